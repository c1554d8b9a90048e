"""Causal attention over a sliding window or over all earlier keys, with or without a cache."""

from pallas_kernels.windowed_attention.api import cached_attention, windowed_attention
from pallas_kernels.windowed_attention.slots import held_positions
from pallas_kernels.windowed_attention.xla import visited_keys

__all__ = ["cached_attention", "held_positions", "visited_keys", "windowed_attention"]
