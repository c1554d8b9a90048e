"""Causal grouped-query attention, full (`*`) or over a sliding window (`S`), in plain JAX.

The window form cuts the sequence into blocks and lets each block see the few before it that its window reaches, so its
cost grows with T·W. Tokens attend within their own segment only. With a past, tokens attend to it and to themselves.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from elr_jax.config import ModelConfig
from elr_jax.layers.linear import Packed, pack, product, products
from elr_jax.layers.norms import rms_norm, unit_norm
from elr_jax.layers.rope import Rotary, rotary_table, rotate
from elr_jax.params import matrix, vector
from elr_jax.typing import Array, Bool, Float, Hidden, Int, Keys, Positions, Queries, SegmentIds, widen

MASKED = -1e30  # finite: a row without visible keys stays free of NaN


@struct.dataclass
class SphereAttention:
    """What the unit sphere adds: the output gate and the learned scales of queries and gate logits."""

    gate: Float[Array, "D N H"] | None
    """None where it is packed with what else reads the input."""
    query_scale: Float[Array, "N H"]
    gate_scale: Float[Array, "N H"]


@struct.dataclass
class Attention:
    """Projections of one attention layer."""

    query: Float[Array, "D N H"]
    key: Float[Array, "D K H"]
    value: Float[Array, "D K H"]
    output: Float[Array, "N H D"]
    sphere: SphereAttention | None

    @property
    def reads(self) -> tuple[Array, ...]:
        """What reads the layer's input: query, key, value and, on the unit sphere, the gate."""
        gate = () if self.sphere is None or self.sphere.gate is None else (self.sphere.gate,)
        return (self.query, self.key, self.value, *gate)


@struct.dataclass
class PackedAttention:
    """Working copies of one attention layer for inputs of few rows."""

    reads: Packed
    output: Packed
    sphere: SphereAttention | None


def pack_attention(params: Attention, dtype: str) -> PackedAttention:
    """Two matrices instead of four or five."""
    sphere = None if params.sphere is None else replace(params.sphere, gate=None)
    output = pack(params.output, inputs=2, dtype=dtype)
    return PackedAttention(reads=pack(*params.reads, dtype=dtype), output=output, sphere=sphere)


@struct.dataclass
class KV:
    """Rotated keys and values of some tokens, head-major; a cache's have a leading axis of loops."""

    key: Float[Array, "*L B K S H"]
    value: Float[Array, "*L B K S H"]


@struct.dataclass
class Context:
    """What the layers of a forward pass share about its tokens."""

    segment_ids: SegmentIds
    rotary: dict[float, Rotary]
    """Angles by rotary base."""
    length: Int[Array, "B"] | None = None
    """Tokens of each row in the cache before this call; None without a cache."""
    condition: Float[Array, "B C"] | None = None
    """What conditioned layers are told of each row; None without conditioning."""
    new: Int[Array, "B"] | None = None
    """How many of each row's tokens, its first ones, are real and not padding; None without a cache."""


def make_context(
    positions: Positions,
    segment_ids: SegmentIds,
    config: ModelConfig,
    *,
    dtype: str = "float32",
    length: Int[Array, "B"] | None = None,
    new: Int[Array, "B"] | None = None,
) -> Context:
    """The context of a batch; the rotary tables are made here, once, and not in every round of the loop."""
    attention = config.attention
    table = partial(rotary_table, positions, head_dim=attention.head_dim, dtype=dtype)
    bases = (attention.base(letter) for letter in sorted({"*", "S"} & set(config.layers)))
    rotary = {base: table(base=base) for base in bases if base is not None}
    return Context(segment_ids=segment_ids, rotary=rotary, length=length, new=new)


def attention_specs(config: ModelConfig, output_gain: float) -> Attention:
    """Parameter declarations of one attention layer."""
    d, n, k, h = config.d_model, config.attention.num_heads, config.attention.num_kv_heads, config.attention.head_dim
    sphere = config.sphere
    wide = matrix((d, n, h), ("embed", "heads", "head_dim"), unit=sphere is not None)
    narrow = matrix((d, k, h), ("embed", "kv_heads", "head_dim"), unit=sphere is not None)
    scale = vector((n, h), ("heads", "head_dim"), sphere.init_std if sphere else 1.0)
    return Attention(
        query=wide,
        key=narrow,
        value=narrow,
        output=matrix((n, h, d), ("heads", "head_dim", "embed"), inputs=2, gain=output_gain, unit=sphere is not None),
        sphere=SphereAttention(gate=wide, query_scale=scale, gate_scale=scale) if sphere else None,
    )


def attend(
    x: Hidden,
    params: Attention | PackedAttention,
    context: Context,
    config: ModelConfig,
    *,
    letter: str,
    past: KV | None = None,
) -> tuple[Hidden, KV]:
    """softmax(q kᵀ/√H + mask) v, projected back to D, and the keys and values made on the way.

    A `*` sees all keys before it, an `S` the last `attention.window`, its own included; `past` holds the cached ones.
    On the unit sphere q = (√H·query_scale/std)² ⊙ unit(q), k = unit(k), and the output is gated by
    σ(x W_g ⊙ gate_init·(gate_scale/std)²) and normalised over all heads before the last product. [Dory]
    """
    q, k, v, *gate = products(x, params.reads)
    base = config.attention.base(letter)
    if base is not None:
        q, k = rotate(q, context.rotary[base]), rotate(k, context.rotary[base])
    if config.attention.qk_norm:
        q, k = rms_norm(q, eps=config.norm_eps), rms_norm(k, eps=config.norm_eps)
    if params.sphere is not None and config.sphere is not None:
        q, k = unit_norm(q, eps=config.norm_eps), unit_norm(k, eps=config.norm_eps)
        factor = config.attention.head_dim**0.5 / config.sphere.init_std
        q = (widen(q) * jnp.square(widen(params.sphere.query_scale) * factor)).astype(q.dtype)
    window = config.attention.window if letter == "S" else None
    if past is None or context.length is None:
        out = windowed_attention(q, k, v, context.segment_ids, window=window)
    else:
        out = attend_past(q, k, v, past, context.length, window=window)
    if params.sphere is not None and config.sphere is not None:
        gain = (config.sphere.gate_init or config.d_model**0.5) / config.sphere.init_std**2
        logits = widen(gate[0])
        logits *= gain * jnp.square(widen(params.sphere.gate_scale))
        out = (widen(out) * jax.nn.sigmoid(logits)).astype(out.dtype)
        out = unit_norm(out.reshape(*out.shape[:2], -1), eps=config.norm_eps).reshape(out.shape)
    made = KV(key=jnp.swapaxes(k, 1, 2), value=jnp.swapaxes(v, 1, 2))
    return product(out, params.output, inputs=2), made


def held_positions(length: Int[Array, "B"], size: int) -> Int[Array, "B S"]:
    """Which token each slot of a cache of `size` holds, counted from its row's first; negative where none is.

    Token p is kept in slot p mod S, so a cache that is full holds the last S tokens.
    """
    last = length[:, None] - 1
    return last - (last - jnp.arange(size)) % size


def attend_past(q: Queries, k: Keys, v: Keys, past: KV, length: Int[Array, "B"], *, window: int | None) -> Queries:
    """Attention of new tokens q [B,T,N,H] over cached keys and the new ones k, v [B,T,K,H], causal among themselves."""
    batch, new, heads, width = q.shape
    groups = k.shape[2]
    share = heads // groups
    q = jnp.transpose(q.reshape(batch, new, groups, share, width), (0, 2, 3, 1, 4)).reshape(batch, groups, -1, width)
    k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    keys = jnp.concatenate([held_positions(length, past.key.shape[2]), length[:, None] + jnp.arange(new)], axis=1)
    query = (length[:, None] + jnp.arange(new))[:, :, None]
    visible = (keys[:, None] >= 0) & (keys[:, None] <= query)
    if window is not None:
        visible &= keys[:, None] > query - window
    scores = [jnp.einsum("bkth,bksh->bkts", q, x, preferred_element_type=wide) for x in (past.key, k)]
    scores = jnp.concatenate(scores, axis=-1).reshape(batch, groups, share, new, -1) * width**-0.5
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, MASKED), axis=-1)
    weights = weights.reshape(batch, groups, share * new, -1).astype(v.dtype)
    old = past.key.shape[2]
    out = jnp.einsum("bkts,bksh->bkth", weights[..., :old], past.value, preferred_element_type=wide)
    out += jnp.einsum("bkts,bksh->bkth", weights[..., old:], v, preferred_element_type=wide)
    out = jnp.transpose(out.reshape(batch, groups, share, new, width), (0, 3, 1, 2, 4))
    return out.reshape(batch, new, heads, width).astype(q.dtype)


def windowed_attention(q: Queries, k: Keys, v: Keys, segment_ids: SegmentIds, *, window: int | None) -> Queries:
    """Causal attention of q [B,T,N,H] over k, v [B,T,K,H] within segments and the last `window` keys (None: all).

    Sums are float32 or wider. Queries go in blocks that see no key block beyond their reach: the few before them under
    a window, all before them without one.
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
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("bkth,bksh->bkts", q.reshape(*rows, width), k, preferred_element_type=wide)
    scores = scores.reshape(batch, groups, share, length, -1) * width**-0.5
    visible = _visible(query_segments, key_segments, offset=offset, window=window)
    scores = jnp.where(visible[:, None, None], scores, MASKED)
    weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights.reshape(*rows, -1).astype(v.dtype)
    out = jnp.einsum("bkts,bksh->bkth", weights, v, preferred_element_type=wide)
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
