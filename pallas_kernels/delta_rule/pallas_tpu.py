"""The delta rule on TPU: chunk after chunk of some heads, whose states stay in a core's vector memory.

A chunk is the XLA form's own (`elr_jax.layers.delta_rule.chunk`), and its gradients are those that JAX derives of it.
The arrays keep their order, a head being some columns of a row; only gates come in rows of a head.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from elr_jax.layers.delta_rule import (
    DeltaKeys,
    DeltaQueries,
    DeltaValues,
    LogDecays,
    Outputs,
    State,
    StepSizes,
    chunk,
    decay_sums,
)
from elr_jax.layers.triangular import joined_rows
from elr_jax.typing import Array, Float
from pallas_kernels.blocks import padded, result, round_up
from pallas_kernels.tpu import LANES, parameters

ROWS = 128
"""Householder steps of a chunk at most, as a product's unit has rows."""
TOKENS = 16
"""Tokens of a chunk at least, a register's rows of bfloat16."""
HEADS = 4
"""Heads a block at most: their products follow each other where one head's would wait for the last."""
GATES = 8
"""Rows of a head's gates, a register's."""
_BETA, _STEPS, _TOKENS = 0, 1, 3
"""Where they are: β, the two parts of the sums of log decays up to each step, and those up to each token."""
_OPERANDS = ("tokens", "steps", "steps", "gates", "state")


def refusal(q: DeltaQueries, k: DeltaKeys, v: DeltaValues, *rest: Array) -> str | None:
    """Why the kernels can't run on these operands, or None."""
    widths = {"key": q.shape[-1], "value": v.shape[-1]}
    for name, width in widths.items():
        if width > 2 * LANES:
            return f"the {name} width {width} is above {2 * LANES}: a block holds the states of whole heads"
    if k.shape[2] > ROWS // TOKENS:
        return f"{k.shape[2]} Householder steps are above {ROWS // TOKENS}: a chunk of {TOKENS} tokens holds {ROWS}"
    types = sorted({x.dtype.name for x in (q, k, v, *rest)} - {"float32", "bfloat16"})
    return f"its operands are {' and '.join(types)}, and kernels take float32 or bfloat16" if types else None


class _Cut(NamedTuple):
    """How the operands are cut: into so many chunks of so many tokens, and heads a block."""

    chunks: int
    tokens: int
    steps: int
    heads: int
    block: int

    @property
    def rows(self) -> int:
        """Householder steps of a chunk."""
        return self.tokens * self.steps


def _cut(k: DeltaKeys | jax.ShapeDtypeStruct) -> _Cut:
    _, length, steps, heads, _ = k.shape
    most = 1 << (ROWS // steps).bit_length() - 1
    tokens = min(most, max(TOKENS, 1 << (length - 1).bit_length()))
    block = max(count for count in range(1, HEADS + 1) if heads % count == 0)
    return _Cut(-(-length // tokens), tokens, steps, heads, block)


def flops(q: jax.ShapeDtypeStruct, k: jax.ShapeDtypeStruct, v: jax.ShapeDtypeStruct) -> float:
    """Operations of the forward kernel's products as a matrix unit of 128 × 128 runs them, its tiles full or not.

    A product of float32 is six of bfloat16.
    """
    cut = _cut(k)
    keys, values = (-(-x.shape[-1] // LANES) for x in (q, v))
    by_keys = (cut.rows + cut.tokens) * keys  # with kᵀ
    inverse = 2 * joined_rows(cut.rows)
    by_state = (cut.rows + cut.tokens) * keys * values
    of_found = (cut.rows + cut.tokens + LANES * keys) * values
    streamed = by_keys + inverse + by_state + of_found
    return 6 * 2 * LANES**2 * streamed * cut.chunks * cut.heads * k.shape[0]


def starts_shape(q: DeltaQueries, k: DeltaKeys, v: DeltaValues, *rest: Array) -> tuple[int, ...]:
    """Of the states at the start of each chunk."""
    del rest
    widths = (round_up(x.shape[-1], LANES) for x in (q, v))
    return (k.shape[0], _cut(k).chunks, k.shape[3], *widths)


def forward(
    q: DeltaQueries,
    k: DeltaKeys,
    v: DeltaValues,
    beta: StepSizes,
    g: LogDecays,
    state: State,
    *,
    keep: bool = False,
) -> tuple[Array, ...]:
    """`chunked`, one kernel; with `keep` also the states at the start of each chunk."""
    cut, start = _cut(k), _wide_state(state)
    operands = (*_streams(cut, q, k, v), _gates(cut, beta, g), start)
    results = [
        ("tokens", (len(v), cut.chunks * cut.tokens, cut.heads * start.shape[-1]), jnp.float32),
        ("state", start.shape, jnp.float32),
    ]
    results += [("starts", starts_shape(q, k, v), jnp.float32)] * keep
    kernel = partial(_forward_kernel, cut, q.shape[-1] ** -0.5)
    out, end, *starts = _call(kernel, cut, operands, _OPERANDS, results, lambda step: step)
    return _from_rows(out, v[:, :, 0]), _like(end, state), *starts


def backward(
    q: DeltaQueries,
    k: DeltaKeys,
    v: DeltaValues,
    beta: StepSizes,
    g: LogDecays,
    state: State,
    starts: Array,
    out_gradient: Outputs,
    state_gradient: State,
) -> tuple[Array, ...]:
    """Gradients of all operands, one kernel that goes through the chunks from the last to the first."""
    cut = _cut(k)
    gates, pull = jax.vjp(partial(_gates, cut), beta, g)
    streams, end = _streams(cut, q, k, v), _wide_state(state_gradient)
    operands = (*streams, gates, starts, *_streams(cut, out_gradient), end)
    results = [
        *((kind, x.shape, x.dtype) for kind, x in zip(("tokens", "steps", "steps"), streams, strict=True)),
        ("gates", gates.shape, jnp.float32),
        ("state", end.shape, jnp.float32),
    ]
    kernel = partial(_backward_kernel, cut, q.shape[-1] ** -0.5)
    kinds = (*_OPERANDS[:4], "starts", "tokens", "state")
    *made, gates, start = _call(kernel, cut, operands, kinds, results, lambda step: cut.chunks - 1 - step)
    by_streams = (_from_rows(x, like) for x, like in zip(made, (q, k, v), strict=True))
    return *by_streams, *pull(gates), _like(start, state)


def _forward_kernel(cut: _Cut, scale: float, q_ref, k_ref, v_ref, gates_ref, start_ref, out_ref, end_ref, *starts_ref):
    @pl.when(pl.program_id(2) == 0)
    def _start():
        end_ref[...] = start_ref[...]

    for ref in starts_ref:
        ref[0] = end_ref[...]
    run, operands = _chunk(cut, scale, q_ref, k_ref, v_ref, gates_ref)
    end_ref[0], out = run(*operands, end_ref[0])
    _store(out_ref, out)


def _backward_kernel(
    cut: _Cut,
    scale: float,
    q_ref,
    k_ref,
    v_ref,
    gates_ref,
    starts_ref,
    do_ref,
    end_ref,
    dq_ref,
    dk_ref,
    dv_ref,
    dgates_ref,
    ds_ref,
):
    @pl.when(pl.program_id(2) == 0)
    def _start():
        ds_ref[...] = end_ref[...]

    run, operands = _chunk(cut, scale, q_ref, k_ref, v_ref, gates_ref)
    _, pull = jax.vjp(run, *operands, starts_ref[0, 0])
    dq, dk, dv, beta, tokens, steps, row, ds_ref[0] = pull((ds_ref[0], _heads(cut, do_ref)))
    for ref, gradient in ((dq_ref, dq), (dk_ref, dk), (dv_ref, dv)):
        _store(ref, gradient)
    columns = jnp.zeros((cut.rows, GATES * cut.block), jnp.float32)
    lane = jax.lax.broadcasted_iota(jnp.int32, columns.shape, 1)
    if cut.steps > 1:
        tokens = jnp.concatenate([tokens, jnp.zeros((cut.block, cut.rows - cut.tokens, 1), jnp.float32)], axis=1)
    for head in range(cut.block):
        for gate, gradient in ((_BETA, beta), (_STEPS + 1, steps), (_TOKENS + 1, tokens)):
            columns += jnp.where(lane == GATES * head + gate, gradient[head], 0)
    rows = columns.T
    sublane = jax.lax.broadcasted_iota(jnp.int32, rows.shape, 0)
    for head in range(cut.block):
        rows += jnp.where(sublane == GATES * head + _STEPS + 1, row[head], 0)
    dgates_ref[0, 0] = rows


def _chunk(cut: _Cut, scale: float, q_ref, k_ref, v_ref, gates_ref) -> tuple[Callable[..., Any], tuple[Array, ...]]:
    """A block's chunk as a function of what has gradients, the last of them the state, and these but for the state."""
    rows = gates_ref[0, 0]
    columns = rows.T

    def column(gate: int, count: int) -> Float[Array, "heads count 1"]:
        return jnp.stack([columns[:count, n : n + 1] for n in range(gate, GATES * cut.block, GATES)])

    def row(gate: int) -> Float[Array, "heads 1 rows"]:
        return jnp.stack([rows[n : n + 1] for n in range(gate, GATES * cut.block, GATES)])

    def parts(first: int) -> tuple[Array, Array, Array]:
        return column(_TOKENS + first, cut.tokens), column(_STEPS + first, cut.rows), row(_STEPS + first)

    whole = parts(0)

    def run(q: Array, k: Array, v: Array, beta: Array, *rest: Array) -> tuple[Array, Array]:
        *fine, state = rest
        sums = zip(whole, fine, strict=True)
        return chunk(scale * q, k, v, beta, *sums, smallest=cut.rows).run(state)

    streams = (_heads(cut, ref) for ref in (q_ref, k_ref, v_ref))
    return run, (*streams, column(_BETA, cut.rows), *parts(1))


def _heads(cut: _Cut, ref) -> Float[Array, "heads rows X"]:
    """A block's columns by head."""
    width = ref.shape[2] // cut.block
    return jnp.stack([ref[0, :, n * width : (n + 1) * width].astype(jnp.float32) for n in range(cut.block)])


def _store(ref, x: Float[Array, "heads rows X"]) -> None:
    """Write a block by head to its columns."""
    for n, head in enumerate(x):
        ref[0, :, n * x.shape[2] : (n + 1) * x.shape[2]] = head.astype(ref.dtype)


def _call(kernel, cut: _Cut, operands, kinds, results, chunk_of: Callable[[Any], Any]) -> list[Array]:
    """Run a kernel over the batch, blocks of heads and chunks, these in the order that `chunk_of` gives."""

    def spec(kind: str, shape: Sequence[int]) -> pl.BlockSpec:
        block, index = {
            "tokens": ((1, cut.tokens, shape[-1] * cut.block // cut.heads), lambda b, h, c: (b, c, h)),
            "steps": ((1, cut.rows, shape[-1] * cut.block // cut.heads), lambda b, h, c: (b, c, h)),
            "gates": ((1, 1, GATES * cut.block, cut.rows), lambda b, h, c: (b, c, h, 0)),
            "state": ((1, cut.block, *shape[-2:]), lambda b, h, c: (b, h, 0, 0)),
            "starts": ((1, 1, cut.block, *shape[-2:]), lambda b, h, c: (b, c, h, 0, 0)),
        }[kind]
        return pl.BlockSpec(block, lambda b, h, step: index(b, h, chunk_of(step)))

    return pl.pallas_call(
        kernel,
        grid=(operands[0].shape[0], cut.heads // cut.block, cut.chunks),
        in_specs=[spec(kind, x.shape) for kind, x in zip(kinds, operands, strict=True)],
        out_specs=[spec(kind, shape) for kind, shape, _ in results],
        out_shape=[result(shape, dtype, *operands) for _, shape, dtype in results],
        compiler_params=parameters("parallel", "parallel", "arbitrary"),
        name=f"delta_rule{kernel.func.__name__.removesuffix('_kernel')}",
    )(*operands)


def _streams(cut: _Cut, *arrays: Array) -> list[Float[Array, "B rows NX"]]:
    """[B,T,…,N,X] as rows of whole chunks, with every head's columns a multiple of the lanes."""
    wide = (padded(x, x.ndim - 1, round_up(x.shape[-1], LANES)) for x in arrays)
    whole = (padded(x, 1, cut.chunks * cut.tokens) for x in wide)
    return [x.reshape(len(x), -1, x.shape[-2] * x.shape[-1]) for x in whole]


def _from_rows(x: Float[Array, "B rows NX"], like: Array) -> Array:
    """What `_streams` cut, in the shape of an array of its kind."""
    batch, length, *between, heads, width = like.shape
    return x.reshape(batch, -1, *between, heads, x.shape[-1] // heads)[:, :length, ..., :width]


def _gates(cut: _Cut, beta: StepSizes, g: LogDecays) -> Float[Array, "B chunks NG rows"]:
    """β and the sums of log decays of each head in rows, chunk by chunk."""

    def rows(x: Array) -> Float[Array, "B chunks N rows"]:
        x = padded(x.astype(jnp.float32), 1, cut.chunks * cut.tokens)
        return jnp.swapaxes(x.reshape(len(x), cut.chunks, -1, cut.heads), 2, 3)

    tokens = decay_sums(rows(g))
    steps = (jnp.repeat(x, cut.steps, axis=-1) for x in tokens)
    gates = jnp.stack([rows(beta), *steps, *(padded(x, 3, cut.rows) for x in tokens)], axis=3)
    return padded(gates, 3, GATES).reshape(len(g), cut.chunks, -1, cut.rows)


def _wide_state(state: State) -> State:
    """The state in float32, its widths multiples of the lanes."""
    for axis in (2, 3):
        state = padded(state, axis, round_up(state.shape[axis], LANES))
    return state.astype(jnp.float32)


def _like(wide: State, state: State) -> State:
    """What of a wide state is a state like another."""
    return wide[:, :, : state.shape[2], : state.shape[3]].astype(state.dtype)
