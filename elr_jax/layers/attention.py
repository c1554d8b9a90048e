"""Causal grouped-query attention, full (`*`) or over a sliding window (`S`), in plain JAX.

The window form cuts the sequence into blocks and lets each block see the few before it that its window reaches, so its
cost grows with T·W. Tokens attend within their own segment only.
"""

import jax
import jax.numpy as jnp
from flax import struct

from elr_jax.config import ModelConfig
from elr_jax.layers.linear import product
from elr_jax.layers.norms import rms_norm
from elr_jax.layers.rope import Rotary, rotary_table, rotate
from elr_jax.params import matrix
from elr_jax.typing import Array, Bool, Float, Hidden, Int, Keys, Positions, Queries, SegmentIds

MASKED = -1e30  # finite: a row without visible keys stays free of NaN


@struct.dataclass
class Attention:
    """Projections of one attention layer."""

    query: Float[Array, "D N H"]
    key: Float[Array, "D K H"]
    value: Float[Array, "D K H"]
    output: Float[Array, "N H D"]


@struct.dataclass
class Context:
    """What every layer of a forward pass shares about the tokens: their segments and their rotary angles."""

    segment_ids: SegmentIds
    rotary: Rotary | None


def make_context(positions: Positions, segment_ids: SegmentIds, config: ModelConfig) -> Context:
    """The context of a batch; the rotary table is made here, once, and not in every round of the loop."""
    attention = config.attention
    if attention.rope_base is None:
        return Context(segment_ids=segment_ids, rotary=None)
    table = rotary_table(positions, head_dim=attention.head_dim, base=attention.rope_base)
    return Context(segment_ids=segment_ids, rotary=table)


def attention_specs(config: ModelConfig, output_gain: float) -> Attention:
    """Parameter declarations of one attention layer."""
    d, n, k, h = config.d_model, config.attention.num_heads, config.attention.num_kv_heads, config.attention.head_dim
    return Attention(
        query=matrix((d, n, h), ("embed", "heads", "head_dim")),
        key=matrix((d, k, h), ("embed", "kv_heads", "head_dim")),
        value=matrix((d, k, h), ("embed", "kv_heads", "head_dim")),
        output=matrix((n, h, d), ("heads", "head_dim", "embed"), inputs=2, gain=output_gain),
    )


def attend(x: Hidden, params: Attention, context: Context, config: ModelConfig, *, window: int | None) -> Hidden:
    """softmax(q kᵀ/√H + mask) v, projected back to D; `window` counts the visible keys, the query's own included."""
    q = product("btd,dnh->btnh", x, params.query)
    k = product("btd,dkh->btkh", x, params.key)
    v = product("btd,dkh->btkh", x, params.value)
    if context.rotary is not None:
        q, k = rotate(q, context.rotary), rotate(k, context.rotary)
    if config.attention.qk_norm:
        q, k = rms_norm(q, eps=config.norm_eps), rms_norm(k, eps=config.norm_eps)
    out = windowed_attention(q, k, v, context.segment_ids, window=window)
    return product("btnh,nhd->btd", out, params.output)


def windowed_attention(q: Queries, k: Keys, v: Keys, segment_ids: SegmentIds, *, window: int | None) -> Queries:
    """Causal attention of q [B,T,N,H] over k, v [B,T,K,H] within segments and the last `window` keys (None: all).

    Sums are float32. Queries go in blocks that see no key block beyond their reach: the few before them under a window,
    all before them without one.
    """
    batch, length, heads, width = q.shape
    groups = k.shape[2]
    # head-major rows: XLA's CPU products run twice as fast as with the heads between rows and columns
    q = jnp.transpose(q.reshape(batch, length, groups, heads // groups, width), (0, 2, 3, 1, 4))
    k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    if window is not None and _window_keys(window) < length:
        out = _window_blocks(q, k, v, segment_ids, window)
    else:
        out = _causal_blocks(q, k, v, segment_ids, window)
    return jnp.transpose(out, (0, 3, 1, 2, 4)).reshape(batch, length, heads, width)


def visited_keys(length: int, window: int | None) -> float:
    """Keys a query is multiplied with on average, masked ones included."""
    if window is not None and _window_keys(window) < length:
        return _window_keys(window)
    return sum((stop - start) * stop for start, stop in _causal_bounds(length)) / length


Rows = Float[Array, "B K G T H"]
Columns = Float[Array, "B K S H"]


def _causal_bounds(length: int) -> list[tuple[int, int]]:
    """At most four blocks of queries: more would skip little and cost compile time."""
    block = max(64, -(-length // 4))
    return [(start, min(start + block, length)) for start in range(0, length, block)]


def _causal_blocks(q: Rows, k: Columns, v: Columns, segment_ids: SegmentIds, window: int | None) -> Rows:
    outputs = [
        _attend(
            q[..., start:stop, :],
            k[..., :stop, :],
            v[..., :stop, :],
            segment_ids[:, start:stop],
            segment_ids[:, :stop],
            offset=start,
            window=window,
        )
        for start, stop in _causal_bounds(q.shape[3])
    ]
    return jnp.concatenate(outputs, axis=3)


def _window_sizes(window: int) -> tuple[int, int]:
    """Queries a block, and how many earlier blocks its window reaches into: about 1.5·window keys a query."""
    block = max(64, window // 2)
    return block, -(-(window - 1) // block)


def _window_keys(window: int) -> int:
    block, reach = _window_sizes(window)
    return (reach + 1) * block


def _window_blocks(q: Rows, k: Columns, v: Columns, segment_ids: SegmentIds, window: int) -> Rows:
    batch, groups, share, length, width = q.shape
    block, reach = _window_sizes(window)
    blocks = -(-length // block)

    def padded(x: Array, before: int) -> Array:
        sides = [(0, 0)] * x.ndim
        sides[_time(x)] = (before, blocks * block - length)
        return jnp.pad(x, sides)

    def reached(x: Array) -> Array:
        """The keys each block sees: [B·blocks, …, (reach + 1)·block, …]."""
        x = padded(x, reach * block)
        parts = [
            _fold(jax.lax.slice_in_dim(x, j * block, (j + blocks) * block, axis=_time(x)), block)
            for j in range(reach + 1)
        ]
        return jnp.concatenate(parts, axis=_time(x))

    # padding carries segment 0, real tokens 1 and more
    segments = segment_ids - jnp.min(segment_ids) + 1
    out = _attend(
        _fold(padded(q, 0), block),
        reached(k),
        reached(v),
        _fold(padded(segments, 0), block),
        reached(segments),
        offset=reach * block,
        window=window,
    )
    out = jnp.moveaxis(out.reshape(batch, blocks, groups, share, block, width), 1, 3)
    return out.reshape(batch, groups, share, blocks * block, width)[..., :length, :]


def _time(x: Array) -> int:
    """The axis of tokens: last of segment ids, last but one of heads."""
    return x.ndim - (1 if x.ndim == 2 else 2)


def _fold(x: Array, block: int) -> Array:
    """Cut the tokens into blocks and count these as batch: [B, …, n·block, …] → [B·n, …, block, …]."""
    axis = _time(x)
    x = x.reshape(*x.shape[:axis], -1, block, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 1).reshape(-1, *x.shape[1:axis], *x.shape[axis + 1 :])


def _attend(
    q: Rows,
    k: Columns,
    v: Columns,
    query_segments: SegmentIds,
    key_segments: Int[Array, "B S"],
    *,
    offset: int,
    window: int | None,
) -> Rows:
    """Softmax attention; query t stands at position t + offset of the keys. Dividing comes last, on small arrays."""
    batch, groups, share, length, width = q.shape
    rows = (batch, groups, share * length)
    scores = jnp.einsum("bkth,bksh->bkts", q.reshape(*rows, width), k, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, groups, share, length, -1) * width**-0.5
    visible = _visible(query_segments, key_segments, offset=offset, window=window)
    scores = jnp.where(visible[:, None, None], scores, MASKED)
    weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = jnp.einsum(
        "bkts,bksh->bkth", weights.reshape(*rows, -1).astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    return (out.reshape(q.shape) / total).astype(q.dtype)


def _visible(
    query_segments: SegmentIds, key_segments: Int[Array, "B S"], *, offset: int, window: int | None
) -> Bool[Array, "B T S"]:
    query = jnp.arange(query_segments.shape[1])[:, None] + offset
    key = jnp.arange(key_segments.shape[1])[None, :]
    near = key <= query
    if window is not None:
        near &= key > query - window
    return near & (query_segments[:, :, None] == key_segments[:, None, :])
