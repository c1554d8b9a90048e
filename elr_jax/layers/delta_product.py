"""Gated DeltaProduct layers (`D`): the projections, the short convolution and the gates around the delta rule.

K key heads of width H serve N value heads of width V; every token makes P keys and values and one query. In this file V
is the width of a value and W the reach of the convolution.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from elr_jax.config import DeltaProductConfig, ModelConfig
from elr_jax.layers.attention import Context
from elr_jax.layers.delta_rule import RESET, Update, read
from elr_jax.layers.linear import product, wide_product
from elr_jax.layers.norms import rms_norm, unit_norm
from elr_jax.params import Initializer, ParamSpec, matrix, vector
from elr_jax.typing import Array, Bool, Float, Hidden, Int, PRNGKeyArray, SegmentIds, widen
from pallas_kernels.delta_rule import delta_rule


@struct.dataclass
class Streams:
    """The three things that are projected and convolved."""

    query: Float[Array, "*batch K H"]
    key: Float[Array, "*batch P K H"]
    value: Float[Array, "*batch P N V"]


@struct.dataclass
class DeltaProduct:
    """Weights of one layer; `project` maps from D, `convolve` has W taps, the last of them the token's own."""

    project: Streams
    convolve: Streams
    step_size: Float[Array, "D P N"]
    decay: Float[Array, "D N"]
    a_log: Float[Array, "N"]
    dt_bias: Float[Array, "N"]
    gate: Float[Array, "D N V"]
    norm: Float[Array, "N V"] | Float[Array, "V"]
    output: Float[Array, "N V D"]


@struct.dataclass
class DeltaState:
    """What a cache keeps of all tokens so far: the state, and the last W−1 inputs of the convolution."""

    state: Float[Array, "*L B N H V"]
    tail: Streams


@struct.dataclass
class DeltaMade:
    """What a call adds: the tokens' update of any state, and their last inputs of the convolution, at most W−1."""

    update: Update
    recent: Streams


def delta_product_specs(config: ModelConfig, output_gain: float) -> DeltaProduct:
    """Parameter declarations of one layer."""
    delta, d = _delta(config), config.d_model
    n, v = delta.num_heads, delta.value_dim
    shapes, axes = _stream_shapes(delta), _STREAM_AXES

    def taps(shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Any:
        shape = (delta.conv_size, *shape)
        return ParamSpec(shape=shape, axes=(None, *axes), init=_uniform(shape[0] ** -0.5), group="vector", inputs=0)

    def per_head(init: Initializer) -> Any:
        return ParamSpec(shape=(n,), axes=("heads",), init=init, group="vector", inputs=0)

    norm = ((n, v), ("heads", "head_dim")) if delta.norm == "group" else ((v,), ("head_dim",))
    return DeltaProduct(
        project=Streams(**{name: matrix((d, *shapes[name]), ("embed", *axes[name])) for name in shapes}),
        convolve=Streams(**{name: taps(shapes[name], axes[name]) for name in shapes}),
        step_size=matrix((d, delta.householder, n), ("embed", None, "heads")),
        decay=matrix((d, n), ("embed", "heads")),
        a_log=per_head(_rate_start),
        dt_bias=per_head(_bias_start),
        gate=matrix((d, n, v), ("embed", "heads", "head_dim")),
        norm=vector(*norm, 1.0),
        output=matrix((n, v, d), ("heads", "head_dim", "embed"), inputs=2, gain=output_gain),
    )


def delta_product(
    x: Hidden, params: DeltaProduct, context: Context, config: ModelConfig, *, past: DeltaState | None = None
) -> tuple[Hidden, DeltaMade | None]:
    """The delta rule over unit(q), unit(k), v and gates of every token, normed, gated and projected back to D.

    q, k, v = silu(conv(x W)), β = σ(x W_β), twice that with negative eigenvalues, and
    g = −e^{a_log} softplus(x W_g + dt_bias), gates in float32. What a cache keeps comes with it in a call that has one.
    [Megatron-LM; flash-linear-attention]
    """
    delta = _delta(config)
    inputs = jax.tree.map(lambda weight: product(x, weight), params.project)
    tail = _no_tail(inputs, delta) if past is None else past.tail
    streams = jax.tree.map(
        lambda x, before, weight: convolve(x, before, weight, context.segment_ids), inputs, tail, params.convolve
    )
    q, k = (unit_norm(widen(y), eps=config.norm_eps) for y in (streams.query, streams.key))
    q, k = (jnp.repeat(y, delta.num_heads // delta.num_key_heads, axis=-2) for y in (q, k))
    beta = jax.nn.sigmoid(wide_product(x, params.step_size)) * (2 if delta.negative_eigenvalues else 1)
    rate = jnp.exp(widen(params.a_log))
    g = -rate * jax.nn.softplus(wide_product(x, params.decay) + params.dt_bias)
    state = jnp.zeros((x.shape[0], delta.num_heads, delta.key_dim, delta.value_dim), beta.dtype)
    if context.new is None:
        g = jnp.where(_begins(context.segment_ids)[..., None], RESET, g)
        form = "xla" if context.kernels == "pallas_gpu" else context.kernels  # there is none for GPUs
        out, made = delta_rule(q, k, streams.value, beta, g, state, implementation=form)[0], None
    else:
        real = (jnp.arange(x.shape[1]) < context.new[:, None])[..., None]
        beta, g = jnp.where(real[..., None], beta, 0), jnp.where(real, g, 0)
        out, update = read(q, k, streams.value, beta, g, state if past is None else past.state)
        made = DeltaMade(update=update, recent=_recent(inputs, context.new, delta))
    return product(_gated(out, product(x, params.gate), params, config), params.output, inputs=2), made


def convolve(
    x: Float[Array, "B T *C"], before: Float[Array, "B W-1 *C"], taps: Float[Array, "W *C"], segment_ids: SegmentIds
) -> Float[Array, "B T *C"]:
    """silu(Σ_j taps_j ⊙ x_{t−W+1+j}), of the token's own segment alone; `before` belongs to the first token's."""
    length, reach = x.shape[1], taps.shape[0] - 1
    joined = jnp.concatenate([before.astype(x.dtype), x], axis=1)
    segments = jnp.pad(segment_ids, ((0, 0), (reach, 0)), mode="edge")
    total = widen(x) * taps[reach]
    for j in range(reach):
        same = segments[:, j : j + length] == segment_ids
        same = same.reshape(*same.shape, *[1] * (x.ndim - 2))
        total += jnp.where(same, widen(joined[:, j : j + length]) * taps[j], 0)
    return jax.nn.silu(total).astype(x.dtype)


def delta_entry(config: ModelConfig, *, loops: int, batch: int, capacity: int, dtype: str) -> DeltaState:
    """An empty entry; its size does not depend on the capacity, and the state is never narrower than float32."""
    delta = _delta(config)
    shape = (loops, batch, delta.num_heads, delta.key_dim, delta.value_dim)
    lead = (loops, batch, delta.conv_size - 1)
    tail = Streams(**{name: jnp.zeros((*lead, *shape), dtype) for name, shape in _stream_shapes(delta).items()})
    return DeltaState(state=jnp.zeros(shape, jnp.promote_types(dtype, jnp.float32)), tail=tail)


def delta_commit(entry: DeltaState, made: DeltaMade, length: Int[Array, "B"], new: Int[Array, "B"]) -> DeltaState:
    """Every slot's state and tail after its own round's tokens; rows without new ones as they were."""

    def moved(tail: Array, recent: Array) -> Array:
        """The last W−1 of what there was and the real ones of `recent`."""
        joined = jnp.concatenate([tail, recent.astype(tail.dtype)], axis=2)
        first = jnp.minimum(new, recent.shape[2])
        return _take(joined, first[:, None] + jnp.arange(tail.shape[2]), axis=2)

    some = (new > 0)[:, None, None, None]
    state = jnp.where(some, made.update(entry.state).astype(entry.state.dtype), entry.state)
    return DeltaState(state=state, tail=jax.tree.map(moved, entry.tail, made.recent))


def _recent(inputs: Streams, new: Int[Array, "B"], delta: DeltaProductConfig) -> Streams:
    """The last W−1 real tokens of each row, its first ones where it has fewer; all of them in a shorter call."""
    count = min(inputs.query.shape[1], delta.conv_size - 1)
    at = jnp.maximum(new - count, 0)[:, None] + jnp.arange(count)
    return jax.tree.map(lambda x: _take(x, at, axis=1), inputs)


def _take(x: Array, at: Int[Array, "B S"], *, axis: int) -> Array:
    """Tokens of each row; the batch is the axis before the tokens'."""
    shape = [1] * x.ndim
    shape[axis - 1 : axis + 1] = at.shape
    return jnp.take_along_axis(x, at.reshape(shape), axis=axis)


def _gated(
    out: Float[Array, "B T N V"], gate: Float[Array, "B T N V"], params: DeltaProduct, config: ModelConfig
) -> Float[Array, "B T N V"]:
    """RMSNorm(o ⊙ silu(z)) over the heads of a key head, or RMSNorm(o) ⊙ silu(z) over each head."""
    delta, open_ = _delta(config), jax.nn.silu(widen(gate))
    if delta.norm == "head":
        return (rms_norm(out, params.norm, eps=config.norm_eps) * open_).astype(gate.dtype)
    groups = (out * open_).reshape(*out.shape[:2], delta.num_key_heads, -1)
    return (rms_norm(groups, eps=config.norm_eps).reshape(out.shape) * params.norm).astype(gate.dtype)


def _begins(segment_ids: SegmentIds) -> Bool[Array, "B T"]:
    """Where a token's segment is not that of the token before."""
    return jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0


_STREAM_AXES = {
    "query": ("kv_heads", "head_dim"),
    "key": (None, "kv_heads", "head_dim"),
    "value": (None, "heads", "head_dim"),
}


def _stream_shapes(delta: DeltaProductConfig) -> dict[str, tuple[int, ...]]:
    keys = (delta.num_key_heads, delta.key_dim)
    steps = delta.householder
    return {"query": keys, "key": (steps, *keys), "value": (steps, delta.num_heads, delta.value_dim)}


def _no_tail(inputs: Streams, delta: DeltaProductConfig) -> Streams:
    def zeros(x: Array) -> Array:
        return jnp.zeros((x.shape[0], delta.conv_size - 1, *x.shape[2:]), x.dtype)

    return jax.tree.map(zeros, inputs)


def _delta(config: ModelConfig) -> DeltaProductConfig:
    assert config.delta is not None, "ModelConfig refuses a D without it"
    return config.delta


def _uniform(bound: float) -> Initializer:
    return lambda key, shape: jax.random.uniform(key, shape, jnp.float32, -bound, bound)


def _rate_start(key: PRNGKeyArray, shape: tuple[int, ...]) -> Array:
    """ln U(0, 16)."""
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, jnp.finfo(jnp.float32).tiny, 16.0))


def _bias_start(key: PRNGKeyArray, shape: tuple[int, ...]) -> Array:
    """softplus^{-1} of a step that is log-uniform from 0.001 to 0.1."""
    step = jnp.exp(jax.random.uniform(key, shape, jnp.float32, math.log(1e-3), math.log(0.1)))
    return step + jnp.log(-jnp.expm1(-step))
