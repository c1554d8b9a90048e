"""Where a causal encoder-decoder should loop, beside looped dense stacks."""
