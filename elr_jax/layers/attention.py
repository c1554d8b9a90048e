"""Causal grouped-query attention: full, over a sliding window, with value embeddings, with global keys.

| letter | sees |
|---|---|
| `*` `V` | all tokens before |
| `S` | the window |
| `G` | the window, and beyond it global keys that it makes from its own input |
| `R` | the window, and beyond it the global keys of the nearest `G` above |

A query of `G` and `R` has one softmax over both; a token inside the window counts with its window key alone.

Tokens attend within their own segment only. With a past, tokens attend to it and to themselves. A `V` is a `*` whose
values have a part that the token alone decides, gated by the head's reading of the first C inputs:

    v_t ← v_t + 2σ(x_t[:C] G) ⊙ table[token_t]    [Parcae, modded-nanogpt]
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from elr_jax.config import ModelConfig, Runtime
from elr_jax.layers.linear import Packed, pack, product, products, wide_product
from elr_jax.layers.norms import rms_norm, unit_norm
from elr_jax.layers.rope import Rotary, rotary_table, rotate
from elr_jax.params import matrix, table, vector
from elr_jax.typing import Array, Float, Hidden, Int, Int32, Keys, Positions, Queries, SegmentIds, Tokens, widen
from pallas_kernels.contract import Implementation
from pallas_kernels.windowed_attention import cached_attention, windowed_attention


@struct.dataclass
class SphereAttention:
    """What the unit sphere adds: the output gate and the learned scales of queries and gate logits."""

    gate: Float[Array, "D N H"] | None
    """None where it is packed with what else reads the input."""
    query_scale: Float[Array, "N H"]
    gate_scale: Float[Array, "N H"]


@struct.dataclass
class ValueEmbedding:
    """What a `V` layer adds to its values."""

    table: Float[Array, "V K H"]
    gate: Float[Array, "C K"]


@struct.dataclass
class SharedKeys:
    """The second projections of a `G` layer."""

    key: Float[Array, "D K H"]
    value: Float[Array, "D K H"]


@struct.dataclass
class Attention:
    """Projections of one attention layer."""

    query: Float[Array, "D N H"]
    key: Float[Array, "D K H"]
    value: Float[Array, "D K H"]
    output: Float[Array, "N H D"]
    sphere: SphereAttention | None
    embedding: ValueEmbedding | None
    shared: SharedKeys | None

    @property
    def reads(self) -> tuple[Array, ...]:
        """What reads the layer's input: query, key, value; the sphere's gate; the global key and value of a `G`."""
        gate = () if self.sphere is None or self.sphere.gate is None else (self.sphere.gate,)
        shared = () if self.shared is None else (self.shared.key, self.shared.value)
        return (self.query, self.key, self.value, *gate, *shared)


@struct.dataclass
class PackedAttention:
    """Working copies of one attention layer for inputs of few rows."""

    reads: Packed
    output: Packed
    sphere: SphereAttention | None
    embedding: ValueEmbedding | None


def pack_attention(params: Attention, dtype: str) -> PackedAttention:
    """Two matrices instead of four or five."""
    sphere = None if params.sphere is None else replace(params.sphere, gate=None)
    output = pack(params.output, inputs=2, dtype=dtype)
    reads = pack(*params.reads, dtype=dtype)
    return PackedAttention(reads=reads, output=output, sphere=sphere, embedding=params.embedding)


@struct.dataclass
class KV:
    """Rotated keys and values of some tokens, head-major; a cache's have a leading axis of loops."""

    key: Float[Array, "*L B K S H"]
    value: Float[Array, "*L B K S H"]


@struct.dataclass
class GlobalKV:
    """What a `G` layer makes and a cache keeps of it: a window's part and what all later tokens see."""

    window: KV
    shared: KV


@struct.dataclass
class Context:
    """What the layers of a forward pass share about its tokens."""

    segment_ids: SegmentIds
    tokens: Tokens | None
    """For `V` layers; None where they aren't known."""
    rotary: dict[float, Rotary]
    """Angles by rotary base."""
    length: Int[Array, "B"] | None = None
    """Tokens of each row in the cache before this call; None without a cache."""
    condition: Float[Array, "B C"] | None = None
    """What conditioned layers are told of each row; None without conditioning."""
    new: Int[Array, "B"] | None = None
    """How many of each row's tokens, its first ones, are real and not padding; None without a cache."""
    shared: KV | None = None
    """Global keys and values of these tokens, made by the nearest `G` so far; None before one."""
    shared_past: KV | None = None
    """The same of the tokens before this call; None without a cache or without such tokens."""
    first: Int[Array, "B"] | None = None
    """The first token of each row that windows have seen, where those before it were skipped; None: from 0."""
    round: Int32[Array, ""] | Int32[Array, "B"] | None = None
    """Which round of the core this is, from 0, for all rows or for each; None outside of it."""
    kernels: Implementation | None = struct.field(pytree_node=False, default=None)
    """Form of the attention; None: the best one known."""
    probe: bool = struct.field(pytree_node=False, default=False)
    """Whether layers that carry something from round to round also measure what that changes."""


def make_context(
    positions: Positions,
    segment_ids: SegmentIds,
    config: ModelConfig,
    *,
    tokens: Tokens | None = None,
    runtime: Runtime = Runtime(),
    length: Int[Array, "B"] | None = None,
    new: Int[Array, "B"] | None = None,
) -> Context:
    """The context of a batch; the rotary tables are made here, once, and not in every round of the loop."""
    attention = config.attention
    angles = partial(rotary_table, positions, head_dim=attention.head_dim, dtype=runtime.dtype)
    bases = (attention.base(letter) for letter in sorted({"*", "S", "V", "G", "R"} & set(config.layers)))
    rotary = {base: angles(base=base) for base in bases if base is not None}
    rest = {"length": length, "new": new, "kernels": runtime.implementation}
    return Context(segment_ids=segment_ids, tokens=tokens if "V" in config.layers else None, rotary=rotary, **rest)


def attention_specs(config: ModelConfig, output_gain: float, *, letter: str) -> Attention:
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
        embedding=_value_embedding_specs(config) if letter == "V" else None,
        shared=SharedKeys(key=narrow, value=narrow) if letter == "G" else None,
    )


def _value_embedding_specs(config: ModelConfig) -> ValueEmbedding:
    """A table of values, and a gate that starts at one everywhere."""
    k, h, inputs = config.attention.num_kv_heads, config.attention.head_dim, config.attention.value_gate_inputs
    return ValueEmbedding(
        table=table((config.vocab_size, k, h), ("vocab", "kv_heads", "head_dim"), 1.0),
        gate=matrix((inputs, k), (None, "kv_heads"), group="embedding", gain=0.0),
    )


def attend(
    x: Hidden,
    params: Attention | PackedAttention,
    context: Context,
    config: ModelConfig,
    *,
    letter: str,
    past: KV | GlobalKV | None = None,
) -> tuple[Hidden, KV | GlobalKV]:
    """softmax(q kᵀ/√H + mask) v, projected back to D, and the keys and values made on the way.

    A window is the last `attention.window` keys, the query's own included; `past` holds the cached ones.
    On the unit sphere q = (√H·query_scale/std)² ⊙ unit(q), k = unit(k), and the output is gated by
    σ(x W_g ⊙ gate_init·(gate_scale/std)²) and normalised over all heads before the last product. [Dory]
    """
    q, k, v, *more = products(x, params.reads)
    if params.embedding is not None:
        v = _with_embedding(v, x, params.embedding, context)
    q, k = (_turned(x, context, config, letter) for x in (q, k))
    if params.sphere is not None and config.sphere is not None:
        factor = config.attention.head_dim**0.5 / config.sphere.init_std
        q = (widen(q) * jnp.square(widen(params.sphere.query_scale) * factor)).astype(q.dtype)
    shared, shared_past = context.shared, context.shared_past
    if letter == "G":
        shared = KV(key=_heads_first(_turned(more[0], context, config, letter)), value=_heads_first(more[1]))
        shared_past = past.shared if isinstance(past, GlobalKV) else None
    beyond = shared if letter in "GR" else None
    ring = past.window if isinstance(past, GlobalKV) else past
    window = config.attention.window if letter in "SGR" else None
    out = _see(q, k, v, context, window=window, past=ring, beyond=beyond, beyond_past=shared_past)
    if params.sphere is not None and config.sphere is not None:
        gain = (config.sphere.gate_init or config.d_model**0.5) / config.sphere.init_std**2
        logits = widen(more[0])
        logits *= gain * jnp.square(widen(params.sphere.gate_scale))
        out = (widen(out) * jax.nn.sigmoid(logits)).astype(out.dtype)
        out = unit_norm(out.reshape(*out.shape[:2], -1), eps=config.norm_eps).reshape(out.shape)
    made = KV(key=_heads_first(k), value=_heads_first(v))
    if letter == "G" and shared is not None:
        made = GlobalKV(window=made, shared=shared)
    return product(out, params.output, inputs=2), made


def _see(
    q: Queries,
    k: Keys,
    v: Keys,
    context: Context,
    *,
    window: int | None,
    past: KV | None,
    beyond: KV | None,
    beyond_past: KV | None,
) -> Queries:
    """Attention to these tokens and to the past's; beyond the window to the global keys of both."""
    more: Any = None if beyond is None else (_heads_first(beyond.key), _heads_first(beyond.value))
    form = context.kernels
    if past is None or context.length is None:
        return windowed_attention(q, k, v, context.segment_ids, window=window, global_keys=more, implementation=form)
    if more is not None and beyond_past is not None:
        more = *more, beyond_past.key, beyond_past.value
    cached = past.key, past.value, context.length
    first = None if window is None else context.first
    return cached_attention(q, k, v, *cached, window=window, global_keys=more, first=first, implementation=form)


def _turned(x: Array, context: Context, config: ModelConfig, letter: str) -> Array:
    """Queries or keys, rotated and normed as the config says."""
    base = config.attention.base(letter)
    if base is not None:
        x = rotate(x, context.rotary[base])
    if config.attention.qk_norm:
        eps = config.norm_eps if config.attention.qk_norm_eps is None else config.attention.qk_norm_eps
        x = rms_norm(x, eps=eps)
    return unit_norm(x, eps=config.norm_eps) if config.sphere is not None else x


def _heads_first(x: Array) -> Array:
    """[B, T, K, H] as [B, K, T, H], and back."""
    return jnp.swapaxes(x, 1, 2)


def _with_embedding(v: Keys, x: Hidden, params: ValueEmbedding, context: Context) -> Keys:
    """The values with what their tokens add."""
    assert context.tokens is not None, "make_context was not given the tokens of a model with V layers"
    gate = 2 * jax.nn.sigmoid(wide_product(x[..., : params.gate.shape[0]], params.gate))
    return (widen(v) + gate[..., None] * widen(params.table[context.tokens])).astype(v.dtype)
