"""Parameters and floating-point operations as functions of a config and a depth.

One multiply-add counts as two operations, matrix products alone are counted, and a core layer counts once for every
round it runs. XLA's own count takes a loop body once, whatever its trip count.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from elr_jax.config import DeltaProductConfig, ModelConfig, decoder_of
from elr_jax.depth import DepthLaw, Switch
from elr_jax.layers.delta_rule import rule_flops
from elr_jax.layers.moe import moe_sizes
from elr_jax.parameters import param_specs
from elr_jax.params import count_params
from pallas_kernels.windowed_attention import visited_keys


class ForwardFlops(NamedTuple):
    """Operations of one token's forward pass: `fixed` once, `round` for each loop."""

    fixed: float
    round: float

    def at(self, loops: float) -> float:
        """Operations at a loop count, or at a mean loop count."""
        return self.fixed + loops * self.round


class TrainingCost(NamedTuple):
    """Mean cost of a run's tokens over that of the same run at one loop without conditioning."""

    layer_passes: float
    flops: float


def num_params(config: ModelConfig) -> int:
    """All parameters, embedding and head included."""
    return count_params(param_specs(config))


def active_params(config: ModelConfig) -> int:
    """Parameters that one token uses: of each mixture of experts the k it is given, and all others."""
    if config.moe is None:
        return num_params(config)
    idle = config.moe.num_experts - config.moe.top_k
    return num_params(config) - config.layers.count("E") * idle * expert_params(config)


def router_calls(config: ModelConfig, loops: int) -> int:
    """How often a token's experts are chosen in a pass: replayed routes are not chosen again."""
    outside = config.prelude.count("E") + config.coda.count("E")
    rounds = 1 if config.moe is not None and config.moe.replay else loops
    return outside + rounds * config.core.count("E")


def forward_flops(config: ModelConfig, *, seq_len: int) -> ForwardFlops:
    """Operations a token, averaged over a sequence of `seq_len`, with the keys that attention really visits."""
    fixed = sum(_layer(letter, config, seq_len) for letter in config.prelude + config.coda)
    fixed += len(config.coda) * _condition(config, seq_len) + 2 * config.d_model * config.vocab_size
    around, round_ = _loop_flops(config, seq_len)
    return ForwardFlops(fixed + around, round_)


def encoder_flops(config: ModelConfig, *, seq_len: int) -> ForwardFlops:
    """The same for a token of a prompt that the decoder does not read: of the last `G` its keys and values alone."""
    stack, above = decoder_of(config)
    letters = (config.prelude if stack == "coda" else "") + getattr(config, stack)[:above]
    last = letters[-1:] == "G" and above > 0
    fixed = sum(_layer(letter, config, seq_len) for letter in (letters[:-1] if last else letters))
    fixed += last * 8 * config.d_model * config.attention.num_kv_heads * config.attention.head_dim
    if stack == "prelude":
        return ForwardFlops(fixed, 0.0)
    around, round_ = _loop_flops(config, seq_len)
    return ForwardFlops(fixed + above * _condition(config, seq_len) + around, round_)


def _loop_flops(config: ModelConfig, seq_len: int) -> tuple[float, float]:
    """What the loop costs once, and each round."""
    rule, square = config.loop, 2 * config.d_model**2
    once = square * ((rule.inject in ("concat", "gated")) + (rule.readout == "linear")) + _embedders(config, seq_len)
    core = sum(_layer(letter, config, seq_len) + _condition(config, seq_len) for letter in config.core)
    return once, core + square * ((rule.inject == "concat") + (rule.update == "adaptive_delta"))


def train_flops(config: ModelConfig, *, seq_len: int, sequences: int, rounds: float) -> float:
    """Operations of a training step on `sequences` that runs `rounds` sequence-rounds of the core in all.

    The backward pass costs twice the forward one; what rematerialisation repeats is not counted.
    """
    forward = forward_flops(config, seq_len=seq_len)
    return 3 * seq_len * (sequences * forward.fixed + rounds * forward.round)


def layer_passes(config: ModelConfig, loops: float) -> float:
    """Layers a token passes at a loop count, or at a mean loop count: D(k) = L_in + k·L_rec + L_out. [ELR]"""
    return len(config.prelude) + loops * len(config.core) + len(config.coda)


def encoder_passes(config: ModelConfig, loops: float) -> float:
    """Layers that a prompt's token passes where the decoder does not read it; the last `G` only makes keys and values.

    A causal encoder-decoder of 2 | 4 | 6 blocks at 8 loops: 34 blocks of 40. [looped CED]
    """
    stack, above = decoder_of(config)
    before = len(config.prelude) + loops * len(config.core) if stack == "coda" else 0
    return before + max(above - 1, 0)


def training_cost(config: ModelConfig, law: DepthLaw, *, seq_len: int) -> TrainingCost:
    """What training with a law of the loop count costs; before a late switch the model has no conditioning.

    Rounds are those the law asks for. What microbatches run beyond them is in a run's own `executed_rounds`.
    """
    plain = dataclasses.replace(config, conditioning=None)
    later = (law.after, law.law) if isinstance(law, Switch) else (0.0, law)
    parts = ((later[0], plain, 1.0), (1 - later[0], config, later[1].mean()))

    def ratio(cost: Callable[[ModelConfig, float], float]) -> float:
        return sum(share * cost(model, loops) for share, model, loops in parts) / cost(plain, 1.0)

    return TrainingCost(ratio(layer_passes), ratio(lambda model, k: forward_flops(model, seq_len=seq_len).at(k)))


def _condition(config: ModelConfig, seq_len: int) -> float:
    """One conditioned layer: its low-rank products for every token, its heads once a sequence."""
    told, d = config.conditioning, config.d_model
    if told is None:
        return 0.0
    heads = told.width * (d * (2 * told.scale_shift + told.rescale) + told.rank * told.low_rank)
    return 4 * d * told.rank * told.low_rank + 2 * heads / seq_len


def _embedders(config: ModelConfig, seq_len: int) -> float:
    """The progress of every round and of the coda, and one budget, embedded once a sequence."""
    told = config.conditioning
    if told is None:
        return 0.0
    numbers = told.progress * (config.loop.max_loops + 1) + told.budget
    return 2 * numbers * told.width * (told.sinusoids + told.width) / seq_len


def _layer(letter: str, config: ModelConfig, seq_len: int) -> float:
    d, attention = config.d_model, config.attention
    if letter == "-":
        return 2 * _feed_forward(config.mlp.kind, d, config.mlp.d_ff)
    if letter == "E":
        sizes = moe_sizes(config)
        shared = _feed_forward(sizes.kind, d, sizes.d_shared)
        return 2 * (d * sizes.num_experts + sizes.top_k * expert_params(config) + shared)
    if letter == "D":
        assert config.delta is not None, "ModelConfig refuses a D without it"
        return _delta_product(d, config.delta, seq_len)
    window = attention.window if letter in "SGR" else None
    n, k, h = attention.num_heads, attention.num_kv_heads, attention.head_dim
    gate = 2 * d * n * h if config.sphere else 2 * attention.value_gate_inputs * k if letter == "V" else 0
    keys = visited_keys(seq_len, window)
    if letter in "GR":
        keys += visited_keys(seq_len, None, before=attention.window)
    second = 4 * d * h * k if letter == "G" else 0
    return gate + second + 4 * d * h * (n + k) + 4 * n * h * keys


def expert_params(config: ModelConfig) -> int:
    """Parameters of one expert of a mixture."""
    sizes = moe_sizes(config)
    return _feed_forward(sizes.kind, config.d_model, sizes.d_expert)


def _feed_forward(kind: str, d: int, width: int) -> int:
    """Parameters of one feed-forward layer's matrices."""
    return (3 if kind == "swiglu" else 2) * d * width


def _delta_product(d: int, delta: DeltaProductConfig, seq_len: int) -> float:
    n, p, keys, values = delta.num_heads, delta.householder, delta.num_key_heads * delta.key_dim, delta.value_dim
    projected = (p + 1) * keys + (p + 2) * n * values + (p + 1) * n  # k q · v gate output · β g
    return 2 * d * projected + n * rule_flops(seq_len, steps=p, key_dim=delta.key_dim, value_dim=values)
