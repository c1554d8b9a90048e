"""Attention in plain JAX: head-major rows, queries in blocks that see no key block beyond their reach.

Under a window each block sees the few before it that its window reaches, so cost and memory grow with T·W; without one,
all before it.
"""

from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np

from elr_jax.typing import Array, Bool, Float, Int, Keys, Queries, SegmentIds, widen
from pallas_kernels.windowed_attention.band import FLOOR, MASKED, Band, GlobalKeys, LogSumExp
from pallas_kernels.windowed_attention.slots import held_positions

Rows = Float[Array, "B K G T H"]
RowSums = Float[Array, "B K G T"]
Columns = Float[Array, "B K S H"]


def attention(
    q: Queries, k: Keys, v: Keys, query_segments: SegmentIds, key_segments: SegmentIds, *, band: Band
) -> tuple[Queries, LogSumExp]:
    """Attention of q [B,T,N,H] over the keys of the same tokens inside the band, and log Σ exp of each row's scores.

    Segment ids are positive. Sums are float32 or wider.
    """
    batch, length, heads, width = q.shape
    groups = k.shape[2]
    # head-major rows: XLA's CPU products run twice as fast as with the heads between rows and columns
    q = jnp.transpose(q.reshape(batch, length, groups, heads // groups, width), (0, 2, 3, 1, 4))
    k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    blocks = _window_blocks if band.far is not None and _window_keys(band.far) < length else _causal_blocks
    out, lse = blocks(q, k, v, query_segments, key_segments, band)
    out = jnp.transpose(out, (0, 3, 1, 2, 4)).reshape(batch, length, heads, width)
    return out, jnp.transpose(lse, (0, 3, 1, 2)).reshape(batch, length, heads)


def visited_keys(length: int, window: int | None, *, before: int = 0) -> float:
    """Keys a query is multiplied with on average, masked ones included; those of global keys lie `before` its own."""
    if window is not None and _window_keys(window) < length:
        return _window_keys(window)
    return sum((stop - start) * max(stop - before, 1) for start, stop in _causal_bounds(length)) / length


def cached_attention(
    q: Queries,
    k: Keys,
    v: Keys,
    past_key: Columns,
    past_value: Columns,
    length: Int[Array, "B"],
    *,
    window: int | None,
    global_keys: GlobalKeys | None = None,
    first: Int[Array, "B"] | None = None,
) -> Queries:
    """Attention of new tokens q [B,T,N,H] over cached keys and the new ones k, v [B,T,K,H], causal among themselves."""
    batch, new, heads, width = q.shape
    groups = k.shape[2]
    share = heads // groups
    q = jnp.transpose(q.reshape(batch, new, groups, share, width), (0, 2, 3, 1, 4)).reshape(batch, groups, -1, width)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    here = length[:, None] + jnp.arange(new)
    near = Band(0, window)
    keys, values, visible = [], [], []
    sets = [(True, (k, v), (past_key, past_value))]
    if global_keys is not None:
        sets.append((False, global_keys[:2], global_keys[2:]))
    for inside, made, past in sets:
        keys += [past[0], jnp.swapaxes(made[0], 1, 2)]
        values += [past[1], jnp.swapaxes(made[1], 1, 2)]
        for token in (held_positions(length, past[0].shape[2]), here):
            behind = here[:, :, None] - token[:, None]
            held = near.holds(behind) if first is None else near.holds(behind) & (token >= first[:, None])[:, None]
            visible.append((token[:, None] >= 0) & (behind >= 0) & (held if inside else ~held))
    scores = [jnp.einsum("bkth,bksh->bkts", q, x, preferred_element_type=wide) for x in keys]
    scores = jnp.concatenate(scores, axis=-1).reshape(batch, groups, share, new, -1) * width**-0.5
    weights = jax.nn.softmax(jnp.where(jnp.concatenate(visible, axis=-1)[:, None, None], scores, MASKED), axis=-1)
    weights = weights.reshape(batch, groups, share * new, -1).astype(v.dtype)
    parts = jnp.split(weights, np.cumsum([x.shape[2] for x in keys])[:-1], axis=-1)
    products = (
        jnp.einsum("bkts,bksh->bkth", part, x, preferred_element_type=wide)
        for part, x in zip(parts, values, strict=True)
    )
    out = reduce(jnp.add, products)
    out = jnp.transpose(out.reshape(batch, groups, share, new, width), (0, 3, 1, 2, 4))
    return out.reshape(batch, new, heads, width).astype(q.dtype)


def _causal_bounds(length: int) -> list[tuple[int, int]]:
    """At most four blocks of queries: more would skip little. On a CPU one is fastest up to 128 tokens."""
    block = max(64, -(-length // 4)) if length > 128 else max(length, 1)
    return [(start, min(start + block, length)) for start in range(0, length, block)]


def _causal_blocks(
    q: Rows, k: Columns, v: Columns, query_segments: SegmentIds, key_segments: SegmentIds, band: Band
) -> tuple[Rows, RowSums]:
    parts = []
    for start, stop in _causal_bounds(q.shape[3]):
        keys = max(stop - band.near, 1)
        parts.append(
            _attend(
                q[..., start:stop, :],
                k[..., :keys, :],
                v[..., :keys, :],
                query_segments[:, start:stop],
                key_segments[:, :keys],
                offset=start,
                band=band,
            )
        )
    outputs, sums = zip(*parts, strict=True)
    return jnp.concatenate(outputs, axis=3), jnp.concatenate(sums, axis=3)


def _window_sizes(window: int) -> tuple[int, int]:
    """Queries a block, and how many earlier blocks its window reaches into: about 1.5·window keys a query."""
    block = max(64, window // 2)
    return block, -(-(window - 1) // block)


def _window_keys(window: int) -> int:
    block, reach = _window_sizes(window)
    return (reach + 1) * block


def _window_blocks(
    q: Rows, k: Columns, v: Columns, query_segments: SegmentIds, key_segments: SegmentIds, band: Band
) -> tuple[Rows, RowSums]:
    batch, groups, share, length, width = q.shape
    block, reach = _window_sizes(band.far or length)
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

    out, lse = _attend(  # padding carries segment 0
        _fold(padded(q, 0), block),
        reached(k),
        reached(v),
        _fold(padded(query_segments, 0), block),
        reached(key_segments),
        offset=reach * block,
        band=band,
    )
    out = jnp.moveaxis(out.reshape(batch, blocks, groups, share, block, width), 1, 3)
    lse = jnp.moveaxis(lse.reshape(batch, blocks, groups, share, block), 1, 3)
    out = out.reshape(batch, groups, share, blocks * block, width)
    return out[..., :length, :], lse.reshape(batch, groups, share, blocks * block)[..., :length]


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
    band: Band,
) -> tuple[Rows, RowSums]:
    """Softmax attention; query t stands at position t + offset of the keys. Dividing comes last, on small arrays."""
    batch, groups, share, length, width = q.shape
    rows = (batch, groups, share * length)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("bkth,bksh->bkts", q.reshape(*rows, width), k, preferred_element_type=wide)
    scores = scores.reshape(batch, groups, share, length, -1) * width**-0.5
    visible = _visible(query_segments, key_segments, offset=offset, band=band)
    scores = jnp.where(visible[:, None, None], scores, MASKED)
    top = jnp.maximum(jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)), FLOOR)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    total = jnp.where(total > 0, total, 1)  # rows that see no key
    weights = weights.reshape(*rows, -1).astype(v.dtype)
    out = jnp.einsum("bkts,bksh->bkth", weights, v, preferred_element_type=wide)
    lse = widen(top + jnp.log(total))[..., 0]
    return (out.reshape(q.shape) / total).astype(q.dtype), lse


def _visible(
    query_segments: SegmentIds, key_segments: Int[Array, "B S"], *, offset: int, band: Band
) -> Bool[Array, "B T S"]:
    query = jnp.arange(query_segments.shape[1])[:, None] + offset
    key = jnp.arange(key_segments.shape[1])[None, :]
    return band.holds(query - key) & (query_segments[:, :, None] == key_segments[:, None, :])
