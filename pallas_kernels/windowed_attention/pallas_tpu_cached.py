"""Attention of new tokens to a cache on TPU: one pass over the slots that hold something they may see."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from elr_jax.typing import Array, Float, Int, Queries
from pallas_kernels.blocks import dot, padded, result, round_up
from pallas_kernels.tpu import LANES, parameters
from pallas_kernels.windowed_attention.band import FLOOR, MASKED, LogSumExp

SLOTS = 512
"""Slots a block."""
ROWS = 512
"""Query heads times new tokens a block."""


def cached(
    q: Queries,
    past_key: Float[Array, "B K S H"],
    past_value: Float[Array, "B K S H"],
    length: Int[Array, "B"],
    *,
    window: int | None,
) -> tuple[Queries, LogSumExp]:
    """Attention of q [B,T,N,H] to the cached keys alone, and its log-sum-exp; the cache is read once for ROWS rows."""
    batch, new, heads, width = q.shape
    groups, size = past_key.shape[1:3]
    share = heads // groups
    rows = jnp.transpose(q.reshape(batch, new, groups, share, width), (0, 2, 1, 3, 4)).reshape(batch, groups, -1, width)
    count = new * share
    block = min(ROWS, round_up(count, 16))  # a tile of bfloat16 has 16 rows
    rows = padded(rows, 2, round_up(count, block))
    slots = min(SLOTS, size)

    def slot_block(b: Any, h: Any, r: Any, step: Any, lengths: Any) -> tuple[Any, ...]:
        first, used = _occupied(lengths[b], size, slots, window)
        return b, h, jnp.clip(jnp.minimum(first + step, used - 1), 0, pl.cdiv(size, slots) - 1), 0

    of_rows = pl.BlockSpec((1, 1, block, width), lambda b, h, r, s, lengths: (b, h, r, 0))
    of_sums = pl.BlockSpec((1, 1, block, LANES), lambda b, h, r, s, lengths: (b, h, r, 0))
    of_slots = pl.BlockSpec((1, 1, slots, width), slot_block)
    operands = (length.astype(jnp.int32), rows, past_key, past_value)
    out, lse = pl.pallas_call(
        partial(_kernel, size=size, share=share, window=window),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, groups, rows.shape[2] // block, pl.cdiv(size, slots)),
            in_specs=[of_rows, of_slots, of_slots],
            out_specs=[of_rows, of_sums],
            scratch_shapes=[pltpu.VMEM((block, n), jnp.float32) for n in (width, LANES, LANES)],
        ),
        out_shape=[
            result(rows.shape, q.dtype, *operands),
            result((*rows.shape[:3], LANES), jnp.float32, *operands),
        ],
        compiler_params=parameters("parallel", "parallel", "parallel", "arbitrary"),
        name="cached_attention",
    )(*operands)

    def unpacked(x: Array) -> Array:
        x = x[:, :, :count].reshape(batch, groups, new, share, -1)
        return jnp.transpose(x, (0, 2, 1, 3, 4)).reshape(batch, new, heads, -1)

    return unpacked(out), unpacked(lse[..., :1])[..., 0]


def _occupied(length: Any, size: int, slots: int, window: int | None) -> tuple[Any, Any]:
    """The first block of slots that the first new token may see, and the end of those that hold a token."""
    used = (jnp.minimum(length, size) + slots - 1) // slots
    if window is None:
        return 0, used
    oldest = jnp.maximum(length + 1 - window, 0) // slots
    return jnp.where(length <= size, oldest, 0), used  # once it is full, the tokens stand in turned order


def _kernel(
    length_ref, q_ref, k_ref, v_ref, out_ref, lse_ref, acc, top, total, *, size: int, share: int, window: int | None
):
    block, step = pl.program_id(2), pl.program_id(3)
    slots = k_ref.shape[2]
    length = length_ref[pl.program_id(0)]
    first, used = _occupied(length, size, slots, window)

    @pl.when(step == 0)
    def _start():
        acc[...] = jnp.zeros_like(acc)
        top[...] = jnp.full_like(top, FLOOR)
        total[...] = jnp.zeros_like(total)

    @pl.when(first + step < used)
    def _block():
        start = (first + step) * slots
        token, there = _tokens(length, start, slots, size)
        row = block * q_ref.shape[2] + jax.lax.broadcasted_iota(jnp.int32, (q_ref.shape[2], 1), 0)
        if window is not None:
            there &= token > length + jax.lax.div(row, jnp.int32(share)) - window
        scores = dot(q_ref[0, 0], k_ref[0, 0], (1, 1)) * q_ref.shape[-1] ** -0.5
        scores = jnp.where(there, scores, MASKED)
        higher = jnp.maximum(top[...], jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp(scores - higher[:, :1])
        shrink = jnp.exp(top[...] - higher)
        total[...] = shrink * total[...] + jnp.sum(weights, axis=1, keepdims=True)
        inside = start + jax.lax.broadcasted_iota(jnp.int32, (slots, 1), 0) < size
        v = jnp.where(inside, v_ref[0, 0], 0)  # what lies beyond the cache may be anything, NaN included
        acc[...] = shrink[:, :1] * acc[...] + dot(weights.astype(v.dtype), v, (1, 0))
        top[...] = higher

    @pl.when(step == pl.num_programs(3) - 1)
    def _end():
        sum_ = jnp.where(total[...] > 0, total[...], 1)  # a cache that holds nothing they see
        out_ref[0, 0] = (acc[...] / sum_[:, :1]).astype(out_ref.dtype)
        lse_ref[0, 0] = top[...] + jnp.log(sum_)


def _tokens(length: Any, start: Any, slots: int, size: int) -> tuple[Int[Array, "1 S"], Array]:
    """`held_positions` of a block of slots, and which of them hold a token."""
    slot = start + jax.lax.broadcasted_iota(jnp.int32, (1, slots), 1)
    turn = (length - 1) // size * size  # tokens from here on stand in the slots up to the newest
    token = slot + turn - jnp.where(slot > length - 1 - turn, size, 0)
    return token, (token >= 0) & (slot < size)
