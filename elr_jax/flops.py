"""Parameters and floating-point operations as functions of a config and a depth.

One multiply-add counts as two operations, matrix products alone are counted, and a core layer counts once for every
round it runs. XLA's own count takes a loop body once, whatever its trip count.
"""

from typing import NamedTuple

from elr_jax.config import ModelConfig
from elr_jax.model import param_specs
from elr_jax.params import count_params
from pallas_kernels.windowed_attention import visited_keys


class ForwardFlops(NamedTuple):
    """Operations of one token's forward pass: `fixed` once, `round` for each loop."""

    fixed: float
    round: float

    def at(self, loops: float) -> float:
        """Operations at a loop count, or at a mean loop count."""
        return self.fixed + loops * self.round


def num_params(config: ModelConfig) -> int:
    """All parameters, embedding and head included."""
    return count_params(param_specs(config))


def forward_flops(config: ModelConfig, *, seq_len: int) -> ForwardFlops:
    """Operations a token, averaged over a sequence of `seq_len`, with the keys that attention really visits."""
    d = config.d_model
    rule = config.loop
    fixed = sum(_layer(letter, config, seq_len) for letter in config.prelude + config.coda) + 2 * d * config.vocab_size
    fixed += 2 * d * d * ((rule.inject in ("concat", "gated")) + (rule.readout == "linear"))
    square = (rule.inject == "concat") + (rule.update == "adaptive_delta")
    return ForwardFlops(fixed, sum(_layer(letter, config, seq_len) for letter in config.core) + 2 * d * d * square)


def train_flops(config: ModelConfig, *, seq_len: int, sequences: int, rounds: float) -> float:
    """Operations of a training step on `sequences` that runs `rounds` sequence-rounds of the core in all.

    The backward pass costs twice the forward one; what rematerialisation repeats is not counted.
    """
    forward = forward_flops(config, seq_len=seq_len)
    return 3 * seq_len * (sequences * forward.fixed + rounds * forward.round)


def _layer(letter: str, config: ModelConfig, seq_len: int) -> float:
    d, attention = config.d_model, config.attention
    if letter == "-":
        return 2 * d * config.mlp.d_ff * (3 if config.mlp.kind == "swiglu" else 2)
    window = attention.window if letter == "S" else None
    n, k, h = attention.num_heads, attention.num_kv_heads, attention.head_dim
    gate = 2 * d * n * h if config.sphere else 0
    return gate + 4 * d * h * (n + k) + 4 * n * h * visited_keys(seq_len, window)
