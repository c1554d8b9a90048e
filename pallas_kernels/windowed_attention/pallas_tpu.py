"""Attention inside a band on TPU: blocks of queries meet only the key blocks their band reaches.

The query heads that share a key-value head go in one block of rows, so keys are read once for all of them. Scores stand
transposed, keys × rows: a row's maximum, sum and log-sum-exp are then lanes of one vector, which is how they are kept
(a column of them would take 128 times the room), and the backward products need no transposition of their own.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from elr_jax.typing import Array, Float, Keys, Queries, SegmentIds
from pallas_kernels.blocks import dot, padded, result, round_up
from pallas_kernels.contract import narrow
from pallas_kernels.tpu import LANES, column, parameters
from pallas_kernels.windowed_attention.band import FLOOR, MASKED, Band, LogSumExp
from pallas_kernels.windowed_attention.pallas_tpu_cached import cached as cached

ROWS = 1024
"""Query heads times queries that a block aims at."""


def refusal(q: Queries, k: Keys, v: Keys) -> str | None:
    """Why the kernels can't run on these operands, or None."""
    share, width = q.shape[2] // k.shape[2], q.shape[3]
    if width > 256:
        return f"head_dim={width} is above 256"
    if share > 16:
        return f"{share} query heads share a key-value head, and a block has room for 16"
    return narrow(q, k, v)


class _Blocks(NamedTuple):
    """How a padded sequence is cut; all numbers are known when the program is made."""

    band: Band
    share: int
    queries: int
    """Queries a block, for each of `share` heads."""
    keys: int
    length: int
    """Tokens, padded to whole blocks."""

    def reach(self, inner: str) -> tuple[Callable[[Any], tuple[Any, Any]], int, int]:
        """For the kernels' two inner loops: first and last inner block by outer block, and how many of each there are.

        The range may begin before the first block and end after the last.
        """
        band, queries, keys = self.band, self.queries, self.keys
        at_queries, at_keys = self.length // queries, self.length // keys

        def keys_of(i: Any) -> tuple[Any, Any]:
            first = 0 if band.far is None else (i * queries - band.far + 1) // keys
            return first, ((i + 1) * queries - 1 - band.near) // keys

        def queries_of(j: Any) -> tuple[Any, Any]:
            last = at_queries - 1 if band.far is None else ((j + 1) * keys + band.far - 2) // queries
            return (j * keys + band.near) // queries, last

        return (keys_of, at_queries, at_keys) if inner == "keys" else (queries_of, at_keys, at_queries)

    def visit(self, inner: str, outer: Any, step: Any) -> tuple[Any, Any]:
        """The inner block of a step, and whether the outer block reaches it."""
        reach, _, blocks = self.reach(inner)
        first, last = reach(outer)
        block = first + step
        return block, (block >= 0) & (block <= last) & (block < blocks)


def forward(
    q: Queries, k: Keys, v: Keys, query_segments: SegmentIds, key_segments: SegmentIds, *, band: Band
) -> tuple[Queries, LogSumExp]:
    """`xla.attention`, one kernel."""
    blocks, rows, keys, segments = _prepared(band, q, (q,), (k, v), (query_segments, key_segments))
    share, width = blocks.share, q.shape[3]
    out, lse = _call(
        _forward_kernel,
        blocks,
        inner="keys",
        rows=rows,
        keys=keys,
        segments=segments,
        sums=(),
        results=[("rows", q.dtype), ("sums", jnp.float32)],
        scratch=[(width, share * blocks.queries), (1, share * blocks.queries), (1, share * blocks.queries)],
    )
    return _from_rows(out, q.shape), _from_sums(lse, q.shape)


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
    blocks, rows, keys, segments = _prepared(band, q, (q, out_gradient), (k, v), (query_segments, key_segments))
    # the softmax's own correction: a score's gradient is p · (dout·v − Σ dout·out + dlse)
    delta = jnp.sum(out.astype(jnp.float32) * out_gradient.astype(jnp.float32), axis=-1) - lse_gradient
    sums = tuple(_to_sums(x, blocks) for x in (lse, delta))
    call = partial(_call, blocks=blocks, rows=rows, keys=keys, segments=segments, sums=sums)
    width = q.shape[3]
    (dq,) = call(
        _query_gradient_kernel,
        inner="keys",
        results=[("rows", q.dtype)],
        scratch=[(blocks.share * blocks.queries, width)],
    )
    dk, dv = call(
        _key_gradient_kernel,
        inner="queries",
        results=[("keys", k.dtype), ("keys", v.dtype)],
        scratch=[(blocks.keys, width)] * 2,
    )
    return _from_rows(dq, q.shape), _from_keys(dk, k.shape), _from_keys(dv, v.shape)


def _forward_kernel(blocks: _Blocks, q_ref, k_ref, v_ref, query_ids, key_ids, out_ref, lse_ref, acc, top, total):
    i, step = pl.program_id(2), pl.program_id(3)
    j, reached = blocks.visit("keys", i, step)

    @pl.when(step == 0)
    def _start():
        acc[...] = jnp.zeros_like(acc)
        top[...] = jnp.full_like(top, FLOOR)
        total[...] = jnp.zeros_like(total)

    @pl.when(reached)
    def _block():
        scores = _scores(blocks, i, j, q_ref, k_ref, query_ids, key_ids)
        higher = jnp.maximum(top[...], jnp.max(scores, axis=0, keepdims=True))
        weights = jnp.exp(scores - higher)
        shrink = jnp.exp(top[...] - higher)
        total[...] = shrink * total[...] + jnp.sum(weights, axis=0, keepdims=True)
        v = v_ref[0, 0]
        acc[...] = shrink * acc[...] + dot(v, weights.astype(v.dtype), (0, 0))
        top[...] = higher

    @pl.when(step == pl.num_programs(3) - 1)
    def _end():
        sum_ = jnp.where(total[...] > 0, total[...], 1)  # rows that see no key
        out_ref[0, 0] = (acc[...] / sum_).T.astype(out_ref.dtype).reshape(out_ref.shape[2:])
        lse = top[...] + jnp.log(sum_)
        for g in range(blocks.share):
            lse_ref[0, 0, g : g + 1] = lse[:, g * blocks.queries : (g + 1) * blocks.queries]


def _query_gradient_kernel(
    blocks: _Blocks, q_ref, do_ref, k_ref, v_ref, query_ids, key_ids, lse_ref, delta_ref, dq_ref, acc
):
    i, step = pl.program_id(2), pl.program_id(3)
    j, reached = blocks.visit("keys", i, step)

    @pl.when(step == 0)
    def _start():
        acc[...] = jnp.zeros_like(acc)

    @pl.when(reached)
    def _block():
        scores = _scores(blocks, i, j, q_ref, k_ref, query_ids, key_ids)
        _, change = _score_gradient(scores, do_ref, v_ref, lse_ref, delta_ref)
        k = k_ref[0, 0]
        acc[...] += dot(change.astype(k.dtype), k, (0, 0))

    @pl.when(step == pl.num_programs(3) - 1)
    def _end():
        scale = q_ref.shape[-1] ** -0.5
        dq_ref[0, 0] = (scale * acc[...]).astype(dq_ref.dtype).reshape(dq_ref.shape[2:])


def _key_gradient_kernel(
    blocks: _Blocks, q_ref, do_ref, k_ref, v_ref, query_ids, key_ids, lse_ref, delta_ref, dk_ref, dv_ref, dk, dv
):
    j, step = pl.program_id(2), pl.program_id(3)
    i, reached = blocks.visit("queries", j, step)

    @pl.when(step == 0)
    def _start():
        dk[...] = jnp.zeros_like(dk)
        dv[...] = jnp.zeros_like(dv)

    @pl.when(reached)
    def _block():
        scores = _scores(blocks, i, j, q_ref, k_ref, query_ids, key_ids)
        weights, change = _score_gradient(scores, do_ref, v_ref, lse_ref, delta_ref)
        q, do = _rows(q_ref), _rows(do_ref)
        dk[...] += dot(change.astype(q.dtype), q, (1, 0))
        dv[...] += dot(weights.astype(do.dtype), do, (1, 0))

    @pl.when(step == pl.num_programs(3) - 1)
    def _end():
        dk_ref[0, 0] = (q_ref.shape[-1] ** -0.5 * dk[...]).astype(dk_ref.dtype)
        dv_ref[0, 0] = dv[...].astype(dv_ref.dtype)


def _rows(ref) -> Float[Array, "rows H"]:
    """A block of queries with its heads one after the other."""
    return ref[0, 0].reshape(-1, ref.shape[-1])


def _lanes(ref) -> Array:
    """A block of row sums [G, queries] as one row, in the order of `_rows`."""
    return jnp.concatenate([ref[0, 0, g : g + 1] for g in range(ref.shape[2])], axis=1)


def _scores(blocks: _Blocks, i, j, q_ref, k_ref, query_ids, key_ids) -> Float[Array, "keys rows"]:
    """q kᵀ/√H of query block i and key block j, transposed; masked pairs have `MASKED`."""
    scores = dot(k_ref[0, 0], _rows(q_ref), (1, 1)) * q_ref.shape[-1] ** -0.5
    shape = (blocks.keys, blocks.queries)
    query = i * blocks.queries + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    key = j * blocks.keys + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    visible = blocks.band.holds(query - key) & (column(key_ids[0]) == query_ids[0])
    penalty = jnp.where(visible, 0.0, MASKED)
    return scores + jnp.concatenate([penalty] * blocks.share, axis=1)


def _score_gradient(scores: Float[Array, "keys rows"], do_ref, v_ref, lse_ref, delta_ref) -> tuple[Array, Array]:
    """The weights and the gradients of the scores before they were scaled."""
    weights = jnp.exp(scores - _lanes(lse_ref))
    return weights, weights * (dot(v_ref[0, 0], _rows(do_ref), (1, 1)) - _lanes(delta_ref))


def _call(kernel, blocks: _Blocks, *, inner: str, rows, keys, segments, sums, results, scratch) -> list[Array]:
    """Run a kernel over batch, key-value heads, blocks, and the `inner` blocks of the other side that each reaches."""
    batch, groups, share, _, width = rows[0].shape
    over_keys = inner == "keys"
    reach, outer_blocks, inner_blocks = blocks.reach(inner)

    def reached(outer, step):
        first, last = reach(outer)
        # outside the range the index stays, so that nothing is fetched for a step that does nothing
        return jnp.clip(jnp.minimum(first + step, last), 0, inner_blocks - 1)

    def query_block(outer, step):
        return outer if over_keys else reached(outer, step)

    def key_block(outer, step):
        return reached(outer, step) if over_keys else outer

    of_rows = pl.BlockSpec((1, 1, share, blocks.queries, width), lambda b, h, o, s: (b, h, 0, query_block(o, s), 0))
    of_keys = pl.BlockSpec((1, 1, blocks.keys, width), lambda b, h, o, s: (b, h, key_block(o, s), 0))
    of_sums = pl.BlockSpec((1, 1, share, blocks.queries), lambda b, h, o, s: (b, h, 0, query_block(o, s)))
    of_ids = (
        pl.BlockSpec((1, 1, blocks.queries), lambda b, h, o, s: (b, 0, query_block(o, s))),
        pl.BlockSpec((1, 1, blocks.keys), lambda b, h, o, s: (b, 0, key_block(o, s))),
    )
    kinds = {
        "rows": (of_rows, rows[0].shape),
        "keys": (of_keys, keys[0].shape),
        "sums": (of_sums, rows[0].shape[:-1]),
    }
    steps = max(1, *(last - first + 1 for first, last in map(reach, range(outer_blocks))), 1)
    operands = (*rows, *keys, *segments, *sums)
    return pl.pallas_call(
        partial(kernel, blocks),
        grid=(batch, groups, outer_blocks, steps),
        in_specs=[*[of_rows] * len(rows), *[of_keys] * len(keys), *of_ids, *[of_sums] * len(sums)],
        out_specs=[kinds[kind][0] for kind, _ in results],
        out_shape=[result(kinds[kind][1], dtype, *operands) for kind, dtype in results],
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        compiler_params=parameters("parallel", "parallel", "parallel", "arbitrary"),
        name=f"windowed_attention{kernel.__name__.removesuffix('_kernel')}",
    )(*operands)


def _block_sizes(share: int, length: int, band: Band) -> tuple[int, int]:
    queries = max(LANES, min(512, ROWS // share // LANES * LANES))
    reach = length if band.far is None else band.far - band.near
    keys = 512 if reach >= 2048 and share * queries <= ROWS else 256 if reach > LANES else LANES
    longest = round_up(length, LANES)
    return min(queries, longest), min(keys, longest)


def _prepared(band: Band, q: Queries, rows, keys, segments) -> tuple[_Blocks, tuple, tuple, tuple]:
    """The cut of the sequence, and the operands head-major and padded to whole blocks."""
    length, heads = q.shape[1:3]
    share = heads // keys[0].shape[2]
    queries, per_block = _block_sizes(share, length, band)
    whole = round_up(length, math.lcm(queries, per_block))
    band = Band(band.near, None if band.far is not None and band.far >= length else band.far)
    blocks = _Blocks(band, share, queries, per_block, whole)
    rows = tuple(padded(_to_rows(x, share), 3, whole) for x in rows)
    keys = tuple(padded(jnp.swapaxes(x, 1, 2), 2, whole) for x in keys)
    segments = tuple(padded(x.astype(jnp.int32)[:, None], 2, whole) for x in segments)
    return blocks, rows, keys, segments


def _to_rows(x: Queries, share: int) -> Float[Array, "B K G T H"]:
    batch, length, heads, width = x.shape
    return jnp.transpose(x.reshape(batch, length, heads // share, share, width), (0, 2, 3, 1, 4))


def _from_rows(x: Float[Array, "B K G T H"], shape: tuple[int, ...]) -> Queries:
    return jnp.transpose(x[..., : shape[1], :], (0, 3, 1, 2, 4)).reshape(shape)


def _to_sums(x: LogSumExp, blocks: _Blocks) -> Float[Array, "B K G T"]:
    batch, length, heads = x.shape
    x = x.reshape(batch, length, heads // blocks.share, blocks.share)
    return padded(jnp.transpose(x, (0, 2, 3, 1)), 3, blocks.length)


def _from_sums(x: Float[Array, "B K G T"], shape: tuple[int, ...]) -> LogSumExp:
    return jnp.transpose(x[..., : shape[1]], (0, 3, 1, 2)).reshape(shape[:3])


def _from_keys(x: Float[Array, "B K S H"], shape: tuple[int, ...]) -> Keys:
    return jnp.swapaxes(x[:, :, : shape[1]], 1, 2)
