"""Attention of new tokens to a cache on GPU, through Triton: programs share out the slots, then their parts are joined.

With one program a head, a decode step would keep a few processors busy and leave the others idle.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from elr_jax.typing import Array, Float, Int, Queries
from pallas_kernels.blocks import dot, padded, result, round_up
from pallas_kernels.windowed_attention.band import FLOOR, MASKED, LogSumExp

ROWS, SLOTS = 16, 64
"""Query heads times new tokens, and slots, that a program takes at a time."""


def cached(
    q: Queries,
    past_key: Float[Array, "B K S H"],
    past_value: Float[Array, "B K S H"],
    length: Int[Array, "B"],
    *,
    window: int | None,
) -> tuple[Queries, LogSumExp]:
    """Attention of q [B,T,N,H] to the cached keys alone, and its log-sum-exp."""
    batch, new, heads, width = q.shape
    groups, size = past_key.shape[1:3]
    share = heads // groups
    rows = jnp.transpose(q.reshape(batch, new, groups, share, width), (0, 2, 1, 3, 4)).reshape(batch, groups, -1, width)
    count = new * share
    rows = padded(rows, 2, round_up(count, ROWS))
    blocks = -(-size // SLOTS)
    parts = min(blocks, 16)
    operands = (length.astype(jnp.int32), rows, past_key, past_value)
    shape = (batch, groups, parts, *rows.shape[2:])
    results = [result(shape, jnp.float32, *operands), result(shape[:-1], jnp.float32, *operands)]
    out, lse = pl.pallas_call(
        partial(_kernel, size=size, share=share, window=window, blocks=-(-blocks // parts)),
        grid=(parts, rows.shape[2] // ROWS, batch * groups),
        out_shape=results,
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        name="cached_attention",
    )(*operands)
    top = jax.nn.logsumexp(lse, axis=2)
    out = jnp.sum(jnp.exp(lse - top[:, :, None])[..., None] * out, axis=2)

    def unpacked(x: Array) -> Array:
        x = x[:, :, :count].reshape(batch, groups, new, share, *x.shape[3:])
        return jnp.moveaxis(x, 1, 2).reshape(batch, new, heads, *x.shape[4:])

    return unpacked(out).astype(q.dtype), unpacked(top)


def _kernel(
    length_ref, q_ref, k_ref, v_ref, out_ref, lse_ref, *, size: int, share: int, window: int | None, blocks: int
):
    part, row_block, at = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    b, group = at // k_ref.shape[1], at % k_ref.shape[1]
    rows = pl.ds(row_block * ROWS, ROWS)
    length, q = length_ref[b], q_ref[b, group, rows]
    query = length + (row_block * ROWS + jnp.arange(ROWS)) // share

    def add(step: Any, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        acc, top, total = carry
        slot = (part * blocks + step) * SLOTS + jnp.arange(SLOTS)
        inside = slot < size
        turn = (length - 1) // size * size  # tokens from here on stand in the slots up to the newest
        token = slot + turn - jnp.where(slot > length - 1 - turn, size, 0)
        there = ((token >= 0) & inside)[None, :]
        if window is not None:
            there &= token[None, :] > query[:, None] - window
        at = jnp.minimum(slot, size - 1)  # no read goes beyond the cache
        k, v = k_ref[b, group, at], v_ref[b, group, at]
        scores = jnp.where(there, dot(q, k, (1, 1)) * q.shape[1] ** -0.5, MASKED)
        higher = jnp.maximum(top, jnp.max(scores, axis=1))
        weights, shrink = jnp.exp(scores - higher[:, None]), jnp.exp(top - higher)
        acc = shrink[:, None] * acc + dot(weights.astype(v.dtype), v, (1, 0))
        return acc, higher, shrink * total + jnp.sum(weights, axis=1)

    start = jnp.zeros(q.shape, jnp.float32), jnp.full(ROWS, FLOOR), jnp.zeros(ROWS, jnp.float32)
    used = (jnp.minimum(length, size) + SLOTS - 1) // SLOTS  # blocks that hold a token
    steps = jnp.clip(used - part * blocks, 0, blocks)
    acc, top, total = jax.lax.fori_loop(0, steps, add, start)
    total = jnp.where(total > 0, total, 1)
    out_ref[b, group, part, rows] = acc / total[:, None]
    lse_ref[b, group, part, rows] = top + jnp.log(total)
