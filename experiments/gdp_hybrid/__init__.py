"""Elastic depth on Koi's layers: Gated DeltaProduct with a little attention."""
