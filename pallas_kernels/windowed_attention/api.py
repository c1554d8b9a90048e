"""What the library calls: attention of a sequence to itself, and of new tokens to a cache and themselves."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from elr_jax.errors import ElrError
from elr_jax.typing import Array, Float, Int, Keys, Queries, SegmentIds
from pallas_kernels.contract import Choice, Implementation, choose, cut_rows, kernels_of, run
from pallas_kernels.windowed_attention import xla
from pallas_kernels.windowed_attention.band import Band, GlobalKeys, LogSumExp, joined

BEST: Mapping[str, Implementation] = {}
"""By platform, the form taken without a name: XLA's until a kernel is known to be faster."""
_kernels = partial(kernels_of, __package__)
QUERY, KEY, CACHED = (
    ("batch", None, "heads", None),
    ("batch", None, "kv_heads", None),
    ("batch", "kv_heads", None, None),
)
AXES = (QUERY, KEY, KEY, ("batch", None), ("batch", None))
"""Logical axes of queries, keys, values and both segment ids."""


def windowed_attention(
    q: Queries,
    k: Keys,
    v: Keys,
    segment_ids: SegmentIds | None = None,
    *,
    window: int | None,
    global_keys: tuple[Keys, Keys] | None = None,
    lengths: Int[Array, "B"] | None = None,
    implementation: Implementation | None = None,
) -> Queries:
    """softmax(q kᵀ/√H) v of q [B,T,N,H] over the last `window` keys (None: all) of k, v [B,T,K,H], the own included.

    N is a multiple of K; query head n reads key-value head n // (N/K). Tokens attend within equal `segment_ids`, and
    within the first `lengths` [B] of their row; a query that sees no key gives zeros. `global_keys` are a second key
    and value of the same tokens, [B,T,K,H] each: one softmax over both, in which a token inside the window counts with
    its window key alone. Sums are float32 or wider; the kernels keep q, k, v, the output and log-sum-exps [B,T,N]
    for the backward pass and never hold T² scores.

    Raises:
        ElrError: a named implementation that can't run here, with the reason.
    """
    if window is not None and window < 1:
        raise ElrError(f"window={window} must be at least 1: a token sees itself")
    choice = choose("windowed_attention", implementation, best=BEST, refusal=partial(_refusal, q, k, v))
    segments = _segments(segment_ids, lengths, q.shape[:2])
    attend = partial(_attend, choice)
    near = attend(Band(0, window), q, k, v, segments)
    if global_keys is None or window is None:  # without a window every token is inside it
        return near[0]
    return joined(near, attend(Band(window, None), q, *global_keys, segments))[0]


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
    implementation: Implementation | None = None,
) -> Queries:
    """Attention of new tokens q [B,T,N,H] over cached keys and the new ones k, v [B,T,K,H], causal among themselves.

    Row b has `length[b]` tokens before the new ones; of these the cache holds the last S, token p in slot p mod S,
    whether it is a ring of a window or has room for all. A query sees the last `window` keys (None: all), its own
    included. `global_keys` are a second key and value of the new tokens and a second cache: one softmax over both, in
    which a token inside the window counts with its window key alone. Of tokens before the `first` [B] of a row (None:
    0) there are no window keys, whatever the cache holds; they count with their global ones. No kernel has either.

    Raises:
        ElrError: a named implementation that can't run here, with the reason.
    """
    if window is None:  # every token is inside it
        global_keys = None
    refusal = partial(_refusal, q, k, v)
    if global_keys is not None:
        refusal = lambda name: "no kernel has global keys beside a cache"
    elif first is not None:
        refusal = lambda name: "no kernel leaves out a cache's tokens before a first one"
    choice = choose("cached_attention", implementation, best=BEST, refusal=refusal)
    operands = (q, k, v, past_key, past_value, length)
    plain = partial(xla.cached_attention, window=window, global_keys=global_keys, first=first)
    if choice.implementation == "xla":
        return plain(*operands)

    def kernel(q: Queries, k: Keys, v: Keys, past_key: Array, past_value: Array, length: Array) -> Queries:
        past = _kernels(choice.implementation).cached(q, past_key, past_value, length, window=window)
        form = choice.implementation if q.shape[1] >= 128 else "xla"  # a kernel's block of queries
        inner = Choice(op=choice.op, implementation=form, named=True)
        return joined(_attend(inner, Band(0, window), q, k, v, _segments(None, None, q.shape[:2])), past)[0]

    return run(choice, kernel, plain, *operands, axes=(QUERY, KEY, KEY, CACHED, CACHED, ("batch",)), like=0)


def _refusal(q: Queries, k: Keys, v: Keys, implementation: Implementation) -> str | None:
    return cut_rows() or _kernels(implementation).refusal(q, k, v)


Segments = tuple[SegmentIds, SegmentIds]


def _segments(segment_ids: SegmentIds | None, lengths: Int[Array, "B"] | None, shape: tuple[int, ...]) -> Segments:
    """Positive ids of the queries and of the keys; those of a query and a key beyond a row's length match nothing."""
    if segment_ids is None:
        ids = jnp.ones(shape, jnp.int32)
    else:  # by row: devices with other rows have no say
        ids = segment_ids - jnp.min(segment_ids, axis=1, keepdims=True) + 1
    if lengths is None:
        return ids, ids
    real = jnp.arange(shape[1]) < lengths[:, None]
    return jnp.where(real, ids, -1), jnp.where(real, ids, -2)


def _attend(choice: Choice, band: Band, q: Queries, k: Keys, v: Keys, segments: Segments) -> tuple[Queries, LogSumExp]:
    form = xla.attention if choice.implementation == "xla" else partial(_kernel_attention, choice)
    return form(q, k, v, *segments, band=band)


def _kernel_attention(
    choice: Choice, q: Queries, k: Keys, v: Keys, query_segments: SegmentIds, key_segments: SegmentIds, *, band: Band
) -> tuple[Queries, LogSumExp]:
    return _differentiable(choice, band, q, k, v, query_segments, key_segments)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(choice: Choice, band: Band, *operands: Array) -> tuple[Queries, LogSumExp]:
    kernel = partial(_kernels(choice.implementation).forward, band=band)
    return run(choice, kernel, partial(xla.attention, band=band), *operands, axes=AXES, like=0)


def _forward(choice: Choice, band: Band, *operands: Array) -> tuple[Any, Any]:
    made = _differentiable(choice, band, *operands)
    return made, (operands, made)


def _backward(choice: Choice, band: Band, saved: Any, cotangents: tuple[Queries, LogSumExp]) -> tuple[Any, ...]:
    operands, made = saved
    kernel = partial(_kernels(choice.implementation).backward, band=band)
    axes, plain = (*AXES, *(QUERY, QUERY[:3]) * 2), partial(_xla_backward, band=band)
    gradients = run(choice, kernel, plain, *operands, *made, *cotangents, axes=axes, like=(0, 1, 2))
    return *gradients, None, None


def _xla_backward(q: Queries, k: Keys, v: Keys, *rest: Array, band: Band) -> tuple[Array, Array, Array]:
    query_segments, key_segments, _, _, *cotangents = rest
    plain = partial(xla.attention, query_segments=query_segments, key_segments=key_segments, band=band)
    return jax.vjp(plain, q, k, v)[1](tuple(cotangents))


_differentiable.defvjp(_forward, _backward)
