"""Conditioning: every layer of core and coda is told which round this is and how many are coming.

In a pass of k rounds, K at most, round i has the progress τ = i/k and the budget κ = k/K, and the coda has τ = 1.
The condition is c = MLP(sines(τ)) + MLP(sines(κ)) [B, C], and a pre-norm layer f becomes

    x̃ = (1 + λ(c)) ⊙ RMSNorm(x) + μ(c),    y = x + (1 + ω(c)) ⊙ f(x̃ + A(g(c) ⊙ B x̃)).

λ, μ, ω and g are linear in c. A and B are the same in every round; g alone tells them apart. λ, μ, ω and A start at
zero, so that a model computes at first, at every k, what it would without conditioning. B and g do not, else A would
have no gradient. Decay would pull the heads back to the model of one loop, so this group has none. Embedding, heads
and gates are float32 whatever the working type. [ELR]
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from elr_jax.config import ConditioningConfig, ModelConfig
from elr_jax.layers.linear import product, wide_product
from elr_jax.params import matrix
from elr_jax.typing import Array, Conditions, Depth, Float, Hidden, widen

LARGEST_FREQUENCY, FREQUENCY_RATIO = 1000.0, 10_000.0


@struct.dataclass
class Embedder:
    """silu(x U) V of the sines of one number."""

    hidden: Float[Array, "sinusoids C"]
    output: Float[Array, "C C"]


@struct.dataclass
class Conditioning:
    """What makes the condition; None for a number that the model is not told."""

    progress: Embedder | None
    budget: Embedder | None


@struct.dataclass
class LowRank:
    """A(g(c) ⊙ B x̃): `down` is B, `gate` is g, `up` is A."""

    down: Float[Array, "D rank"]
    gate: Float[Array, "C rank"]
    up: Float[Array, "rank D"]


@struct.dataclass
class LayerCondition:
    """What a condition does to one layer: λ, μ, the correction, ω; None where the model has none of it."""

    scale: Float[Array, "C D"] | None
    shift: Float[Array, "C D"] | None
    low_rank: LowRank | None
    rescale: Float[Array, "C D"] | None


def conditioning_specs(config: ModelConfig) -> Conditioning | None:
    """Parameter declarations of the embedders; None for a model without conditioning."""
    told = config.conditioning
    if told is None:
        return None
    embedder = Embedder(
        hidden=_weight(told.sinusoids, told.width, (None, "condition")),
        output=_weight(told.width, told.width, ("condition", None)),
    )
    return Conditioning(progress=embedder if told.progress else None, budget=embedder if told.budget else None)


def layer_specs(config: ModelConfig) -> LayerCondition | None:
    """Parameter declarations of one conditioned layer; None for a model without conditioning."""
    told, d = config.conditioning, config.d_model
    if told is None:
        return None
    head = _weight(told.width, d, ("condition", "embed"), gain=0.0)
    scale_shift = head if told.scale_shift else None
    return LayerCondition(
        scale=scale_shift,
        shift=scale_shift,
        low_rank=_low_rank_specs(told, d) if told.low_rank else None,
        rescale=head if told.rescale else None,
    )


def round_conditions(
    params: Conditioning | None, depth: Depth, config: ModelConfig, *, dtype: Any
) -> Conditions | None:
    """c [B,R+1,C] of rounds 1 … max_loops of each row, and last of the coda; float32, or float64 if `dtype` is that.

    τ stays at 1 from a row's last round on, so the entry after max_loops is every row's coda. A row of depth 0 counts
    as one of a single round: its results mean nothing but must be finite.
    """
    if params is None:
        return None
    rounds = config.loop.max_loops
    with jax.named_scope("condition"):
        k = jnp.maximum(depth, 1).astype(jnp.promote_types(dtype, jnp.float32))[:, None]
        i = jnp.arange(1, rounds + 2, dtype=k.dtype)
        told = ((params.progress, jnp.minimum(i / k, 1.0)), (params.budget, k / rounds))
        parts = [_embed(embedder, number) for embedder, number in told if embedder is not None]
        c = functools.reduce(jnp.add, parts)
        return jnp.broadcast_to(c, (c.shape[0], rounds + 1, c.shape[2]))


def enter_layer(x: Hidden, params: LayerCondition | None, c: Float[Array, "B C"] | None) -> Hidden:
    """x̃ + A(g(c) ⊙ B x̃) with x̃ = (1 + λ(c)) ⊙ x + μ(c), x being normed; x itself in a layer without conditioning."""
    if params is None:
        return x
    if params.scale is not None:
        x = ((1 + _head(c, params.scale)) * widen(x) + _head(c, params.shift)).astype(x.dtype)
    if params.low_rank is not None:
        inner = _head(c, params.low_rank.gate) * wide_product(x, params.low_rank.down)
        x = x + product(inner.astype(x.dtype), params.low_rank.up)
    return x


def leave_layer(out: Hidden, params: LayerCondition | None, c: Float[Array, "B C"] | None) -> Hidden:
    """(1 + ω(c)) ⊙ out; out itself in a layer without."""
    if params is None or params.rescale is None:
        return out
    return ((1 + _head(c, params.rescale)) * widen(out)).astype(out.dtype)


def sines(x: Float[Array, "*batch"], count: int) -> Float[Array, "*batch count"]:
    """cos and sin of x·ω_j for `count`/2 frequencies ω_j from 1000 down to about 0.1, in equal ratios."""
    half = count // 2
    frequency = LARGEST_FREQUENCY * FREQUENCY_RATIO ** (-jnp.arange(half, dtype=x.dtype) / half)
    phase = x[..., None] * frequency
    return jnp.concatenate([jnp.cos(phase), jnp.sin(phase)], axis=-1)


def _embed(params: Embedder, number: Float[Array, "B R"]) -> Float[Array, "B R C"]:
    hidden = wide_product(sines(number, params.hidden.shape[0]), params.hidden)
    return wide_product(jax.nn.silu(hidden), params.output)


def _head(c: Float[Array, "B C"] | None, weight: Float[Array, "C D"] | None) -> Float[Array, "B 1 D"]:
    assert c is not None and weight is not None, "a conditioned layer runs with a condition"
    return wide_product(c, weight)[:, None]


def _weight(rows: int, columns: int, axes: tuple[str | None, ...], *, gain: float = 1.0, wide: bool = True) -> Any:
    return matrix((rows, columns), axes, gain=gain, group="condition", wide=wide)


def _low_rank_specs(told: ConditioningConfig, d: int) -> LowRank:
    return LowRank(
        down=_weight(d, told.rank, ("embed", None), wide=False),
        gate=_weight(told.width, told.rank, ("condition", None)),
        up=_weight(told.rank, d, (None, "embed"), gain=0.0, wide=False),
    )
