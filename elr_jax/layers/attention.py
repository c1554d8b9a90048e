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

    Sums are float32. Once T exceeds the keys a block form would visit, the block form is used.
    """
    length = q.shape[1]
    if window is None or visited_keys(length, window) == length:
        return _attend_rows(q, k, v, segment_ids, segment_ids, offset=0, window=window)
    block, reach = _block_sizes(window)
    return _attend_blocks(q, k, v, segment_ids, window=window, block=block, reach=reach)


def visited_keys(length: int, window: int | None) -> int:
    """Keys each query is multiplied with, masked ones included: all of them, or the blocks its window reaches."""
    if window is None:
        return length
    block, reach = _block_sizes(window)
    return min(length, (reach + 1) * block)


def _block_sizes(window: int) -> tuple[int, int]:
    """Queries a block, and how many earlier blocks its window reaches into: about 1.5·window keys a query."""
    block = max(64, window // 2)
    return block, -(-(window - 1) // block)


def _attend_blocks(
    q: Queries, k: Keys, v: Keys, segment_ids: SegmentIds, *, window: int, block: int, reach: int
) -> Queries:
    batch, length = q.shape[:2]
    blocks = -(-length // block)
    tail = blocks * block - length

    def split(x: Array, before: int) -> Array:
        return jnp.pad(x, ((0, 0), (before, tail)) + ((0, 0),) * (x.ndim - 2))

    def rows(x: Array) -> Array:
        return split(x, 0).reshape(batch * blocks, block, *x.shape[2:])

    def reached(x: Array) -> Array:
        padded = split(x, reach * block)
        parts = [padded[:, j * block : (j + blocks) * block].reshape(batch, blocks, block, *x.shape[2:]) for j in range(reach + 1)]
        return jnp.concatenate(parts, axis=2).reshape(batch * blocks, (reach + 1) * block, *x.shape[2:])

    # padding carries segment −1 before and behind the sequence; real segments are never negative
    segments = segment_ids + 1
    out = _attend_rows(
        rows(q), reached(k), reached(v), rows(segments), reached(segments), offset=reach * block, window=window
    )
    return out.reshape(batch, blocks * block, *q.shape[2:])[:, :length]


def _attend_rows(
    q: Queries,
    k: Keys,
    v: Keys,
    query_segments: SegmentIds,
    key_segments: Int[Array, "B S"],
    *,
    offset: int,
    window: int | None,
) -> Queries:
    batch, length, heads, width = q.shape
    groups = k.shape[2]
    q = q.reshape(batch, length, groups, heads // groups, width)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32) * width**-0.5
    visible = _visible(query_segments, key_segments, offset=offset, window=window)
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, MASKED), axis=-1)
    out = jnp.einsum("bkgts,bskh->btkgh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return out.reshape(batch, length, heads, width).astype(q.dtype)


def _visible(
    query_segments: SegmentIds, key_segments: Int[Array, "B S"], *, offset: int, window: int | None
) -> Bool[Array, "B T S"]:
    query = jnp.arange(query_segments.shape[1])[:, None] + offset
    key = jnp.arange(key_segments.shape[1])[None, :]
    near = key <= query
    if window is not None:
        near &= key > query - window
    return near & (query_segments[:, :, None] == key_segments[:, None, :])
