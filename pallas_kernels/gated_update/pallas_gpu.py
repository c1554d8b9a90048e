"""The adaptive delta on GPU, through Triton: a matrix product that ends by making the new state of the gate's logits.

The norm is folded into the product, RMSNorm(s) W = rstd · (s W): the blocks of s that the product reads also give the
sum of squares.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from elr_jax.typing import Array, Bool, Float, Hidden
from pallas_kernels.blocks import dot, padded, result, round_up
from pallas_kernels.contract import narrow

ROWS, COLUMNS, INNER = 64, 128, 64
"""A program's block of the result, and how much of the product's inner axis it takes at a time."""


def refusal(state: Hidden, proposal: Hidden, weight: Float[Array, "D D"]) -> str | None:
    """Why the kernels can't run on these operands, or None."""
    if state.shape[-1] % COLUMNS:
        return f"the width {state.shape[-1]} is no multiple of {COLUMNS}"
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
    return _call(_forward_kernel, (state, proposal), weight, (bias, gain), active, eps, results=1)[0]


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
    arrays = (state, proposal, cotangent)
    dz, dr, by_bias, by_gain = _call(_backward_kernel, arrays, weight, (bias, gain), active, eps, results=2, sums=2)
    return dz, dr, jnp.sum(by_bias, axis=0), jnp.sum(by_gain, axis=0)


def _call(
    kernel: Callable[..., None],
    arrays: Sequence[Hidden],
    weight: Array,
    vectors: Sequence[Array],
    active: Array,
    eps: float,
    *,
    results: int,
    sums: int = 0,
) -> list[Array]:
    """Run a kernel over blocks of rows and columns; it gives arrays like the state, and sums over each block's rows."""
    batch, length, width = arrays[0].shape
    count, dtype = batch * length, arrays[0].dtype
    whole = round_up(count, ROWS)
    flat = [padded(x.reshape(count, width), 0, whole) for x in arrays]
    live = jnp.broadcast_to(active.astype(jnp.int32)[:, None], (batch, length)).reshape(count)
    operands = (*flat, weight, *(x.astype(jnp.float32) for x in vectors), padded(live, 0, whole))
    made = pl.pallas_call(
        partial(kernel, eps=eps),
        grid=(whole // ROWS, width // COLUMNS),
        out_shape=[
            *[result((whole, width), dtype, *operands)] * results,
            *[result((whole // ROWS, width), jnp.float32, *operands)] * sums,
        ],
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=3),
        name=f"gated_update{kernel.__name__.removesuffix('_kernel')}",
    )(*operands)
    return [x[:count].reshape(arrays[0].shape) for x in made[:results]] + list(made[results:])


def _forward_kernel(s_ref, r_ref, w_ref, bias_ref, gain_ref, live_ref, new_ref, *, eps: float):
    rows, columns = _block()
    gate = jax.nn.sigmoid(_logits(s_ref, w_ref, bias_ref, rows, columns, eps))
    s, r = (ref[rows, columns].astype(jnp.float32) for ref in (s_ref, r_ref))
    new = s + gate * jax.nn.softplus(gain_ref[columns])[None] * (r - s)
    new_ref[rows, columns] = jnp.where(live_ref[rows][:, None] > 0, new, s).astype(new_ref.dtype)


def _backward_kernel(
    s_ref, r_ref, g_ref, w_ref, bias_ref, gain_ref, live_ref, dz_ref, dr_ref, by_bias, by_gain, *, eps: float
):
    rows, columns = _block()
    gate = jax.nn.sigmoid(_logits(s_ref, w_ref, bias_ref, rows, columns, eps))
    s, r, g = (ref[rows, columns].astype(jnp.float32) for ref in (s_ref, r_ref, g_ref))
    gain = gain_ref[columns][None]
    g = jnp.where(live_ref[rows][:, None] > 0, g, 0)
    step = gate * g * (r - s)
    dz = step * jax.nn.softplus(gain) * (1 - gate)
    dz_ref[rows, columns] = dz.astype(dz_ref.dtype)
    dr_ref[rows, columns] = (gate * jax.nn.softplus(gain) * g).astype(dr_ref.dtype)
    by_bias[pl.program_id(0), columns] = jnp.sum(dz, axis=0)
    by_gain[pl.program_id(0), columns] = jnp.sum(step * jax.nn.sigmoid(gain), axis=0)


def _block() -> tuple[Any, Any]:
    return pl.ds(pl.program_id(0) * ROWS, ROWS), pl.ds(pl.program_id(1) * COLUMNS, COLUMNS)


def _logits(s_ref, w_ref, bias_ref, rows: Any, columns: Any, eps: float) -> Float[Array, "rows columns"]:
    """RMSNorm(s) W + b of the program's block."""
    width = s_ref.shape[1]

    def add(step: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        acc, squares = carry
        inner = pl.ds(step * INNER, INNER)
        s = s_ref[rows, inner]
        squares += jnp.sum(jnp.square(s.astype(jnp.float32)), axis=1)
        return acc + dot(s, w_ref[inner, columns], (1, 0)), squares

    start = jnp.zeros((ROWS, COLUMNS), jnp.float32), jnp.zeros(ROWS, jnp.float32)
    acc, squares = jax.lax.fori_loop(0, width // INNER, add, start)
    return acc * jax.lax.rsqrt(squares / width + eps)[:, None] + bias_ref[columns][None]
