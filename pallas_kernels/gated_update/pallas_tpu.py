"""The adaptive delta on TPU: a matrix product whose last step turns the gate's logits into the new state.

The norm is folded into the product, RMSNorm(s) W = rstd · (s W): the blocks of s that the product reads also give the
sum of squares.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from elr_jax.typing import Array, Bool, Float, Hidden
from pallas_kernels.blocks import dot, result
from pallas_kernels.contract import narrow
from pallas_kernels.tpu import LANES, column, parameters

ROWS = 1024


def refusal(state: Hidden, proposal: Hidden, weight: Float[Array, "D D"]) -> str | None:
    """Why the kernels can't run on these operands, or None."""
    if state.shape[-1] % LANES:
        return f"the width {state.shape[-1]} is no multiple of {LANES}"
    return narrow(state, proposal, weight)


def forward(
    state: Hidden,
    proposal: Hidden,
    weight: Float[Array, "D D"],
    bias: Float[Array, "D"],
    gain: Float[Array, "D"],
    active: Bool[Array, "B"],
    *,
    eps: float,
) -> Hidden:
    """`xla.gated_update`, one kernel."""
    (new,) = _call(
        _forward_kernel, state, (proposal,), weight, (bias, gain), active, eps, results=[state.dtype], sums=0
    )
    return new.reshape(state.shape)


def gate_gradients(
    state: Hidden,
    proposal: Hidden,
    weight: Float[Array, "D D"],
    bias: Float[Array, "D"],
    gain: Float[Array, "D"],
    active: Bool[Array, "B"],
    cotangent: Hidden,
    *,
    eps: float,
) -> tuple[Hidden, Hidden, Float[Array, "D"], Float[Array, "D"]]:
    """Gradients of the logits, of the proposal, of bias and gain, from logits made again."""
    dtype = state.dtype
    dz, dr, sums = _call(
        _backward_kernel, state, (proposal, cotangent), weight, (bias, gain), active, eps, results=[dtype] * 2, sums=2
    )
    of_bias, of_gain = jnp.sum(sums, axis=0)
    return dz.reshape(state.shape), dr.reshape(state.shape), of_bias, of_gain


def _call(
    kernel: Callable[..., None],
    state: Hidden,
    beside: Sequence[Hidden],
    weight: Array,
    vectors: Sequence[Array],
    active: Array,
    eps: float,
    *,
    results: Sequence[Any],
    sums: int,
) -> list[Array]:
    """Run a kernel over blocks of rows, of columns and of the product's inner axis.

    `beside` are further arrays like the state; a kernel gives arrays like it, and sums over a block's rows [`sums`, D].
    """
    batch, length, width = state.shape
    count = batch * length
    rows = min(ROWS, count)
    columns, inner = _divisor(width, 512 if sums else 1024), _divisor(width, 512)
    lanes = jnp.broadcast_to(active.astype(jnp.int32)[:, None], (batch, length)).reshape(1, count)
    flat = [x.reshape(count, width) for x in (state, *beside)]
    operands = (flat[0], weight, *flat, *(x.astype(jnp.float32)[None] for x in vectors), lanes)
    own = pl.BlockSpec((rows, columns), lambda i, j, k: (i, j))
    blocks = pl.cdiv(count, rows)
    of_sums = [pl.BlockSpec((1, sums, columns), lambda i, j, k: (i, 0, j))] if sums else []
    sum_shapes = [result((blocks, sums, width), jnp.float32, *operands)] if sums else []
    return pl.pallas_call(
        partial(kernel, count=count, eps=eps),
        grid=(blocks, width // columns, width // inner),
        in_specs=[
            pl.BlockSpec((rows, inner), lambda i, j, k: (i, k)),
            pl.BlockSpec((inner, columns), lambda i, j, k: (k, j)),
            *[own] * len(flat),
            *[pl.BlockSpec((1, columns), lambda i, j, k: (0, j))] * len(vectors),
            pl.BlockSpec((1, rows), lambda i, j, k: (0, i)),
        ],
        out_specs=[*[own] * len(results), *of_sums],
        out_shape=[*(result((count, width), dtype, *operands) for dtype in results), *sum_shapes],
        scratch_shapes=[pltpu.VMEM((rows, columns), jnp.float32), pltpu.VMEM((rows, LANES), jnp.float32)],
        compiler_params=parameters("parallel", "parallel", "arbitrary"),
        name=f"gated_update{kernel.__name__.removesuffix('_kernel')}",
    )(*operands)


def _divisor(width: int, most: int) -> int:
    """The largest multiple of a vector's lanes that divides the width and is at most so much."""
    return max(size for size in range(LANES, most + 1, LANES) if width % size == 0)


def _forward_kernel(s_ref, w_ref, own_ref, r_ref, bias_ref, gain_ref, active_ref, new_ref, acc, squares, **static):
    @pl.when(_logits(s_ref, w_ref, acc, squares))
    def _end():
        logits = _scaled(acc, squares, bias_ref, s_ref, **static)
        s, r = (ref[...].astype(jnp.float32) for ref in (own_ref, r_ref))
        new = s + jax.nn.sigmoid(logits) * jax.nn.softplus(gain_ref[...]) * (r - s)
        new_ref[...] = jnp.where(column(active_ref[...]) > 0, new, s).astype(new_ref.dtype)


def _backward_kernel(
    s_ref,
    w_ref,
    own_ref,
    r_ref,
    g_ref,
    bias_ref,
    gain_ref,
    active_ref,
    dz_ref,
    dr_ref,
    sums_ref,
    acc,
    squares,
    *,
    count,
    eps,
):
    block = pl.program_id(0)

    @pl.when(_logits(s_ref, w_ref, acc, squares))
    def _end():
        gate = jax.nn.sigmoid(_scaled(acc, squares, bias_ref, s_ref, count=count, eps=eps))
        s, r, g = (ref[...].astype(jnp.float32) for ref in (own_ref, r_ref, g_ref))
        height = jax.nn.softplus(gain_ref[...])
        row = block * s.shape[0] + jax.lax.broadcasted_iota(jnp.int32, (s.shape[0], 1), 0)
        live = (column(active_ref[...]) > 0) & (row < count)
        # rows beyond the last hold anything, NaN included, and would go into the sums
        step = jnp.where(live, gate * g * (r - s), 0)
        dz = step * height * (1 - gate)
        dz_ref[...] = dz.astype(dz_ref.dtype)
        dr_ref[...] = jnp.where(live, gate * height * g, 0).astype(dr_ref.dtype)
        sums_ref[0, 0:1] = jnp.sum(jnp.where(live, dz, 0), axis=0, keepdims=True)
        sums_ref[0, 1:2] = jnp.sum(step, axis=0, keepdims=True) * jax.nn.sigmoid(gain_ref[...])


def _logits(s_ref, w_ref, acc, squares) -> Any:
    """Add a block's part of s W and Σ s²; whether it was the last."""
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _start():
        acc[...] = jnp.zeros_like(acc)
        squares[...] = jnp.zeros_like(squares)

    s = s_ref[...]
    acc[...] += dot(s, w_ref[...], (1, 0))
    squares[...] += jnp.sum(jnp.square(s.astype(jnp.float32)), axis=1, keepdims=True)
    return step == pl.num_programs(2) - 1


def _scaled(acc, squares, bias_ref, s_ref, *, count: int, eps: float) -> Float[Array, "rows columns"]:
    width = s_ref.shape[1] * pl.num_programs(2)
    return acc[...] * jax.lax.rsqrt(squares[:, :1] / width + eps) + bias_ref[...]
