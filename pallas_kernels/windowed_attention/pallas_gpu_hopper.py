"""Attention inside a band on Hopper, through Mosaic GPU: key blocks are copied while products of earlier ones run."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from elr_jax.typing import Keys, Queries, SegmentIds
from pallas_kernels.blocks import padded, result, round_up
from pallas_kernels.hopper import accumulated, available, load, product
from pallas_kernels.windowed_attention.band import FLOOR, MASKED, Band, LogSumExp

QUERIES, STAGES = 64, 2
"""Queries a block: the rows of one warpgroup's product. Key blocks in flight."""
LAYOUT = plgpu.Layout.WGMMA


def serves(q: Queries) -> bool:
    """Whether the chip and the operands are this kernel's."""
    return available() and q.dtype == jnp.bfloat16 and q.shape[3] in (64, 128, 256)


def forward(
    q: Queries, k: Keys, v: Keys, query_segments: SegmentIds, key_segments: SegmentIds, *, band: Band
) -> tuple[Queries, LogSumExp]:
    """`xla.attention`, one kernel."""
    batch, length, heads, width = q.shape
    keys = 64 if width > 128 else 128
    arrays = (q, k, v, query_segments.astype(jnp.int32), key_segments.astype(jnp.int32))
    operands = [padded(x, 1, round_up(length, max(QUERIES, keys))) for x in arrays]
    whole = operands[0].shape
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    rows = plgpu.SMEM((QUERIES, width), q.dtype, transforms=transforms)
    run = plgpu.kernel(
        partial(_kernel, band=band, keys=keys, share=heads // k.shape[2], transforms=transforms),
        out_type=(result(whole, q.dtype, *operands), result((batch, heads, whole[1]), jnp.float32, *operands)),
        scratch_types=(rows, plgpu.SMEM((QUERIES,), jnp.float32), plgpu.Barrier()),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        grid=(heads, whole[1] // QUERIES, batch),
        grid_names=("head", "block", "batch"),
    )
    out, lse = run(*operands)
    return out[:, :length], jnp.swapaxes(lse, 1, 2)[:, :length]


def _kernel(
    q_ref, k_ref, v_ref, query_ids, key_ids, out_ref, lse_ref, rows, sums, arrived, *, band, keys, share, transforms
):
    head, i, b = (jax.lax.axis_index(name) for name in ("head", "block", "batch"))
    group, start = jax.lax.div(head, jnp.int32(share)), i * QUERIES
    own = pl.ds(start, QUERIES)
    width = q_ref.shape[-1]
    plgpu.copy_gmem_to_smem(q_ref.at[b, own, head], rows, arrived)
    plgpu.barrier_wait(arrived)
    ids = load(query_ids, (b, own), LAYOUT.reduce(1))
    first = 0 if band.far is None else jax.lax.div(jnp.maximum(start - band.far + 1, 0), jnp.int32(keys))
    end = jax.lax.div(jnp.maximum(start + QUERIES - band.near, 0) + keys - 1, jnp.int32(keys))

    def step(index: Any, k_block, v_block, carry: Any) -> Any:
        acc, top, total = carry
        at = (first + index[0]) * keys
        scores = product(rows, k_block.T)
        shape = scores.shape
        query, key = (plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=LAYOUT) for axis in (0, 1))
        there = load(key_ids, (b, pl.ds(at, keys)), LAYOUT.reduce(0))
        same = jax.lax.broadcast_in_dim(ids, shape, [0]) == jax.lax.broadcast_in_dim(there, shape, [1])
        visible = band.holds(start + query - at - key) & same
        scores = jnp.where(visible, scores * width**-0.5, MASKED)
        higher = jnp.maximum(top, scores.max(axis=1))
        weights = jnp.exp(scores - jax.lax.broadcast_in_dim(higher, shape, [0]))
        shrink = jnp.exp(top - higher)
        total = shrink * total + weights.sum(axis=1)
        acc = acc * jax.lax.broadcast_in_dim(shrink, acc.shape, [0])

        return accumulated(acc, weights.astype(v_block.dtype), v_block), higher, total

    row = lambda value: plgpu.layout_cast(jnp.full((QUERIES,), value, jnp.float32), LAYOUT.reduce(1))
    start_of = (plgpu.layout_cast(jnp.zeros((QUERIES, width), jnp.float32), LAYOUT), row(FLOOR), row(0.0))
    spec = plgpu.BlockSpec((keys, width), lambda n: (first + n, 0), transforms=transforms)
    walk = plgpu.emit_pipeline(
        step,
        grid=(jnp.maximum(end - first, 1),),
        in_specs=[spec, spec],
        max_concurrent_steps=STAGES,
        init_carry=start_of,
    )
    acc, top, total = walk(k_ref.at[b, :, group], v_ref.at[b, :, group])
    total = jnp.where(total > 0, total, 1.0)  # rows that see no key
    rows[...] = (acc / jax.lax.broadcast_in_dim(total, acc.shape, [0])).astype(rows.dtype)
    sums[...] = top + jnp.log(total)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(rows, out_ref.at[b, own, head])
    plgpu.copy_smem_to_gmem(sums, lse_ref.at[b, head, own])
    plgpu.wait_smem_to_gmem(0)
