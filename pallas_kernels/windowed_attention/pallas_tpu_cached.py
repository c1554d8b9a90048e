"""Attention of a few new tokens to a cache on TPU: one pass over the slots that hold something the queries see."""
