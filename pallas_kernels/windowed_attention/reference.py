"""The mathematics of the op, every pair of tokens spelled out."""

from collections.abc import Callable

import jax.numpy as jnp

from elr_jax.typing import Array, Bool, Float, Int, Keys, Queries, SegmentIds, widen
from pallas_kernels.windowed_attention.band import GlobalKeys


def windowed_attention(
    q: Queries,
    k: Keys,
    v: Keys,
    segment_ids: SegmentIds | None = None,
    *,
    window: int | None,
    global_keys: tuple[Keys, Keys] | None = None,
    lengths: Int[Array, "B"] | None = None,
) -> Queries:
    """What `api.windowed_attention` computes, with T² memory."""
    batch, length, *_ = q.shape
    behind = jnp.arange(length)[:, None] - jnp.arange(length)
    ids = jnp.zeros((batch, length), jnp.int32) if segment_ids is None else segment_ids
    real = jnp.arange(length) < (jnp.full(batch, length) if lengths is None else lengths)[:, None]
    allowed = (behind >= 0) & (ids[:, :, None] == ids[:, None, :]) & real[:, :, None] & real[:, None, :]
    near = allowed & (behind < (length if window is None else window))
    sets = [(k, v, near)] if global_keys is None else [(k, v, near), (*global_keys, allowed & ~near)]
    return _softmax_over(q, sets)


def cached_attention(
    q: Queries,
    k: Keys,
    v: Keys,
    past_key: Float[Array, "B K S H"],
    past_value: Float[Array, "B K S H"],
    length: Int[Array, "B"],
    *,
    window: int | None,
    global_keys: GlobalKeys | None = None,
    first: Int[Array, "B"] | None = None,
) -> Queries:
    """What `api.cached_attention` computes, slot by slot."""
    reach = window or int(1e9)
    start = jnp.zeros_like(length) if first is None else first
    inside = lambda behind, token: (behind < reach) & (token >= start[:, None, None])
    sets = _slots_and_new(k, v, past_key, past_value, length, inside)
    if global_keys is not None:
        sets += _slots_and_new(*global_keys, length, lambda behind, token: ~inside(behind, token))
    return _softmax_over(q, sets)


def _slots_and_new(
    k: Keys,
    v: Keys,
    past_key: Float[Array, "B K S H"],
    past_value: Float[Array, "B K S H"],
    length: Int[Array, "B"],
    reached: Callable[[Array, Array], Array],
) -> list[tuple[Keys, Keys, Bool[Array, "B T S"]]]:
    """Cached keys and new ones, each with who sees them."""
    size, new = past_key.shape[2], k.shape[1]
    query = length[:, None] + jnp.arange(new)
    token = jnp.full((k.shape[0], size), -1)
    for back in range(size, 0, -1):  # the newest token of a slot comes last
        position = length - back
        here = jnp.arange(size) == (position % size)[:, None]
        token = jnp.where(here & (position >= 0)[:, None], position[:, None], token)
    past = (token[:, None, :] >= 0) & reached(query[:, :, None] - token[:, None, :], token[:, None, :])
    behind = query[:, :, None] - query[:, None, :]
    among = (behind >= 0) & reached(behind, query[:, None, :])
    old = (jnp.swapaxes(past_key, 1, 2), jnp.swapaxes(past_value, 1, 2))
    return [(*old, past), (k, v, among)]


def _softmax_over(q: Queries, sets: list[tuple[Keys, Keys, Bool[Array, "B T S"]]]) -> Queries:
    """One softmax over the visible keys of all sets; zeros where there are none."""
    keys, values = (jnp.concatenate([widen(part[j]) for part in sets], axis=1) for j in (0, 1))
    visible = jnp.concatenate([part[2] for part in sets], axis=2)[:, None]
    keys, values = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (keys, values))
    scores = jnp.einsum("btnh,bsnh->bnts", widen(q), keys, precision="highest") / q.shape[-1] ** 0.5
    scores = jnp.where(visible, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True, initial=-1e30)
    weights = jnp.where(visible, jnp.exp(jnp.where(visible, scores - top, 0)), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1)
    return jnp.einsum("bnts,bsnh->btnh", weights, values, precision="highest").astype(q.dtype)
