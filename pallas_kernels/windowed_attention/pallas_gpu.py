"""Attention inside a band on GPU, through Triton: a program takes a block of queries, or of keys, and walks the band.

Sequences stay [B,T,N,H] in memory. Blocks outside the band are never read.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from elr_jax.typing import Array, Float, Keys, Queries, SegmentIds
from pallas_kernels.blocks import dot, padded, result, round_up
from pallas_kernels.contract import narrow
from pallas_kernels.windowed_attention import pallas_gpu_hopper
from pallas_kernels.windowed_attention.band import FLOOR, MASKED, Band, LogSumExp
from pallas_kernels.windowed_attention.pallas_gpu_cached import cached as cached


def refusal(q: Queries, k: Keys, v: Keys) -> str | None:
    """Why the kernels can't run on these operands, or None."""
    width = q.shape[3]
    if width not in (16, 32, 64, 128, 256):
        return f"head_dim={width} is none of 16, 32, 64, 128 and 256"
    return narrow(q, k, v)


class _Blocks(NamedTuple):
    """How a padded sequence is cut; all numbers are known when the program is made."""

    band: Band
    share: int
    size: int
    """Tokens a block, of queries and of keys."""
    number: int

    def keys_of(self, i: Any) -> tuple[Any, Any]:
        """The first key block that query block i reaches, and the end of those it does."""
        far, near = self.band.far, self.band.near
        first = 0 if far is None else jnp.maximum(i * self.size - far + 1, 0) // self.size
        return first, (jnp.maximum((i + 1) * self.size - near, 0) + self.size - 1) // self.size

    def queries_of(self, j: Any) -> tuple[Any, Any]:
        """The first query block that reaches key block j, and the end of those that do."""
        far, near = self.band.far, self.band.near
        end = self.number if far is None else ((j + 1) * self.size + far - 2) // self.size + 1
        return (j * self.size + near) // self.size, jnp.minimum(end, self.number)

    def scores(self, i: Any, j: Any, q: Array, k: Array, query_ids: Array, key_ids: Array) -> Float[Array, "T S"]:
        """q kᵀ/√H of query block i and key block j; masked pairs have `MASKED`."""
        query = i * self.size + jnp.arange(self.size)[:, None]
        key = j * self.size + jnp.arange(self.size)[None, :]
        visible = self.band.holds(query - key) & (query_ids[:, None] == key_ids[None, :])
        return jnp.where(visible, dot(q, k, (1, 1)) * q.shape[1] ** -0.5, MASKED)


def forward(
    q: Queries, k: Keys, v: Keys, query_segments: SegmentIds, key_segments: SegmentIds, *, band: Band
) -> tuple[Queries, LogSumExp]:
    """`xla.attention`, one kernel; on Hopper through Mosaic GPU."""
    if pallas_gpu_hopper.serves(q):
        return pallas_gpu_hopper.forward(q, k, v, query_segments, key_segments, band=band)
    blocks, arrays, ids = _prepared(band, (q, k, v), (query_segments, key_segments))
    length, heads = q.shape[1:3]
    out, lse = _call(_forward_kernel, blocks, (*arrays, *ids), rows=heads, outputs=[("rows", q.dtype), ("sums", None)])
    return out[:, :length], jnp.swapaxes(lse, 1, 2)[:, :length]


def backward(
    q: Queries,
    k: Keys,
    v: Keys,
    query_segments: SegmentIds,
    key_segments: SegmentIds,
    out: Queries,
    lse: LogSumExp,
    out_gradient: Queries,
    lse_gradient: LogSumExp,
    *,
    band: Band,
) -> tuple[Queries, Keys, Keys]:
    """Gradients of q, k and v: a kernel that sums over keys and one that sums over queries, both from fresh scores."""
    blocks, arrays, ids = _prepared(band, (q, k, v, out_gradient), (query_segments, key_segments))
    # the softmax's own correction: a score's gradient is p · (dout·v − Σ dout·out + dlse)
    delta = jnp.sum(out.astype(jnp.float32) * out_gradient.astype(jnp.float32), axis=-1) - lse_gradient
    sums = (padded(jnp.swapaxes(x, 1, 2), 2, arrays[0].shape[1]) for x in (lse, delta))
    operands = (*arrays, *ids, *sums)
    (dq,) = _call(_query_gradient_kernel, blocks, operands, rows=q.shape[2], outputs=[("rows", q.dtype)])
    dk, dv = _call(
        _key_gradient_kernel, blocks, operands, rows=k.shape[2], outputs=[("keys", k.dtype), ("keys", v.dtype)]
    )
    length = q.shape[1]
    return dq[:, :length], dk[:, :length], dv[:, :length]


def _forward_kernel(blocks: _Blocks, q_ref, k_ref, v_ref, query_ids, key_ids, out_ref, lse_ref):
    i, head = pl.program_id(0), pl.program_id(1)
    own, group = pl.ds(i * blocks.size, blocks.size), head // blocks.share
    q, ids = q_ref[own, head], query_ids[own]

    def add(j: Any, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        acc, top, total = carry
        here = pl.ds(j * blocks.size, blocks.size)
        scores = blocks.scores(i, j, q, k_ref[here, group], ids, key_ids[here])
        higher = jnp.maximum(top, jnp.max(scores, axis=1))
        weights, shrink = jnp.exp(scores - higher[:, None]), jnp.exp(top - higher)
        v = v_ref[here, group]
        acc = shrink[:, None] * acc + dot(weights.astype(v.dtype), v, (1, 0))
        return acc, higher, shrink * total + jnp.sum(weights, axis=1)

    start = jnp.zeros(q.shape, jnp.float32), jnp.full(blocks.size, FLOOR), jnp.zeros(blocks.size, jnp.float32)
    acc, top, total = jax.lax.fori_loop(*blocks.keys_of(i), add, start)
    total = jnp.where(total > 0, total, 1)  # rows that see no key
    out_ref[own, head] = (acc / total[:, None]).astype(out_ref.dtype)
    lse_ref[head, own] = top + jnp.log(total)


def _query_gradient_kernel(
    blocks: _Blocks, q_ref, k_ref, v_ref, do_ref, query_ids, key_ids, lse_ref, delta_ref, dq_ref
):
    i, head = pl.program_id(0), pl.program_id(1)
    own, group = pl.ds(i * blocks.size, blocks.size), head // blocks.share
    q, do, ids, lse, delta = (
        q_ref[own, head],
        do_ref[own, head],
        query_ids[own],
        lse_ref[head, own],
        delta_ref[head, own],
    )

    def add(j: Any, acc: Array) -> Array:
        here = pl.ds(j * blocks.size, blocks.size)
        k = k_ref[here, group]
        weights = jnp.exp(blocks.scores(i, j, q, k, ids, key_ids[here]) - lse[:, None])
        change = weights * (dot(do, v_ref[here, group], (1, 1)) - delta[:, None])
        return acc + dot(change.astype(k.dtype), k, (1, 0))

    acc = jax.lax.fori_loop(*blocks.keys_of(i), add, jnp.zeros(q.shape, jnp.float32))
    dq_ref[own, head] = (q.shape[1] ** -0.5 * acc).astype(dq_ref.dtype)


def _key_gradient_kernel(
    blocks: _Blocks, q_ref, k_ref, v_ref, do_ref, query_ids, key_ids, lse_ref, delta_ref, dk_ref, dv_ref
):
    j, group = pl.program_id(0), pl.program_id(1)
    own = pl.ds(j * blocks.size, blocks.size)
    k, v, ids = k_ref[own, group], v_ref[own, group], key_ids[own]

    def add(head: Any, i: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        dk, dv = carry
        here = pl.ds(i * blocks.size, blocks.size)
        q, do = q_ref[here, head], do_ref[here, head]
        weights = jnp.exp(blocks.scores(i, j, q, k, query_ids[here], ids) - lse_ref[head, here][:, None])
        change = weights * (dot(do, v, (1, 1)) - delta_ref[head, here][:, None])
        dv += dot(weights.astype(do.dtype), do, (0, 0))
        return dk + dot(change.astype(q.dtype), q, (0, 0)), dv

    def add_head(g: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        return jax.lax.fori_loop(*blocks.queries_of(j), partial(add, group * blocks.share + g), carry)

    start = (jnp.zeros(k.shape, jnp.float32),) * 2
    dk, dv = jax.lax.fori_loop(0, blocks.share, add_head, start)
    dk_ref[own, group] = (k.shape[1] ** -0.5 * dk).astype(dk_ref.dtype)
    dv_ref[own, group] = dv.astype(dv_ref.dtype)


def _call(
    kernel: Callable[..., None], blocks: _Blocks, operands: Sequence[Array], *, rows: int, outputs: Sequence[Any]
) -> list[Array]:
    """Run a kernel over blocks, heads (`rows` of them) and batch; every array is seen whole, without its batch axis."""
    q, k = operands[:2]
    shapes = {"rows": q.shape, "keys": k.shape, "sums": (q.shape[0], q.shape[2], q.shape[1])}
    results = [result(shapes[kind], dtype or jnp.float32, *operands) for kind, dtype in outputs]

    def whole(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec((None, *x.shape[1:]), lambda i, head, b: (b, *[0] * (len(x.shape) - 1)))

    return pl.pallas_call(
        partial(kernel, blocks),
        grid=(blocks.number, rows, q.shape[0]),
        in_specs=[whole(x) for x in operands],
        out_specs=[whole(x) for x in results],
        out_shape=results,
        compiler_params=plt.CompilerParams(num_warps=4 if q.shape[3] <= 128 else 8, num_stages=2),
        name=f"windowed_attention{kernel.__name__.removesuffix('_kernel')}",
    )(*operands)


def _prepared(band: Band, arrays: Sequence[Array], segments: Sequence[Array]) -> tuple[_Blocks, Any, Any]:
    """The cut of the sequence, and the operands padded to whole blocks."""
    (_, length, heads, width), wide = arrays[0].shape, arrays[0].dtype == jnp.float32
    size = 32 if width * (1 + wide) > 256 else 64
    whole = round_up(length, size)
    band = Band(band.near, None if band.far is not None and band.far >= length else band.far)
    blocks = _Blocks(band, heads // arrays[1].shape[2], size, whole // size)
    return blocks, [padded(x, 1, whole) for x in arrays], [padded(x.astype(jnp.int32), 1, whole) for x in segments]
