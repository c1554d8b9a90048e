"""The step on the unit sphere on GPU, through Triton: a program takes row after row, reading and writing each once."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from elr_jax.typing import Array, Float, Hidden
from pallas_kernels.blocks import result
from pallas_kernels.contract import narrow

PROGRAMS = 1056
"""Eight for each of an H200's processors."""


def refusal(state: Hidden, target: Hidden) -> str | None:
    """Why the kernels can't run on these operands, or None."""
    if state.shape[-1] > 8192:
        return f"the width {state.shape[-1]} is above 8192: a program holds a row in registers"
    return narrow(state, target)


def forward(state: Hidden, target: Hidden, rate: Float[Array, "D"], *, eps: float) -> Hidden:
    """`xla.sphere_step`, one kernel."""
    return _call(_forward_kernel, (state, target), rate, eps, results=1)[0]


def backward(
    state: Hidden, target: Hidden, rate: Float[Array, "D"], cotangent: Hidden, *, eps: float
) -> tuple[Hidden, Hidden, Float[Array, "D"]]:
    """Gradients of state, target and rate; nothing is kept for them but the operands."""
    by_state, by_target, sums = _call(_backward_kernel, (state, target, cotangent), rate, eps, results=2, sums=1)
    by_rate = jnp.sum(sums, axis=0) * jnp.sign(rate.astype(jnp.float32))
    return by_state, by_target, by_rate.astype(rate.dtype)


def _call(
    kernel: Callable[..., None], arrays: Sequence[Hidden], rate: Array, eps: float, *, results: int, sums: int = 0
) -> list[Array]:
    """Run a kernel over rows; it gives arrays like the state, and each program's sum over its rows."""
    width, dtype = arrays[0].shape[-1], arrays[0].dtype
    flat = [x.reshape(-1, width) for x in arrays]
    count = flat[0].shape[0]
    programs = min(PROGRAMS, count)
    operands = (*flat, rate.astype(jnp.float32))
    made = pl.pallas_call(
        partial(kernel, eps=eps),
        grid=(programs,),
        out_shape=[
            *[result((count, width), dtype, *operands)] * results,
            *[result((programs, width), jnp.float32, *operands)] * sums,
        ],
        compiler_params=plt.CompilerParams(num_warps=4 if width <= 2048 else 8, num_stages=1),
        name=f"sphere_step{kernel.__name__.removesuffix('_kernel')}",
    )(*operands)
    return [x.reshape(arrays[0].shape) for x in made[:results]] + list(made[results:])


def _forward_kernel(h_ref, o_ref, rate_ref, out_ref, *, eps: float):
    columns = _Columns(h_ref.shape[1])
    share = jnp.abs(columns.load(rate_ref))

    def step(row: Any, carry: None) -> None:
        h, o = (_unit(columns.load(ref, row), eps)[0] for ref in (h_ref, o_ref))
        columns.store(out_ref, row, _unit(h + share * (o - h), eps)[0])

    _each_row(h_ref.shape[0], step, None)


def _backward_kernel(h_ref, o_ref, g_ref, rate_ref, dh_ref, do_ref, sums_ref, *, eps: float):
    columns = _Columns(h_ref.shape[1])
    share = jnp.abs(columns.load(rate_ref))

    def step(row: Any, total: Array) -> Array:
        (h, h_scale), (o, o_scale) = (_unit(columns.load(ref, row), eps) for ref in (h_ref, o_ref))
        out, scale = _unit(h + share * (o - h), eps)
        moved = _unit_gradient(columns.load(g_ref, row), out, scale)
        columns.store(dh_ref, row, _unit_gradient((1 - share) * moved, h, h_scale))
        columns.store(do_ref, row, _unit_gradient(share * moved, o, o_scale))
        return total + moved * (o - h)

    columns.store(sums_ref, pl.program_id(0), _each_row(h_ref.shape[0], step, jnp.zeros_like(share)))


def _each_row(count: int, step: Callable[[Any, Any], Any], carry: Any) -> Any:
    """Fold over this program's rows: one of every so many, so that programs side by side read side by side."""
    first, programs = pl.program_id(0), pl.num_programs(0)
    rows = (count - first + programs - 1) // programs
    return jax.lax.fori_loop(0, rows, lambda n, carry: step(first + n * programs, carry), carry)


class _Columns:
    """The columns of a row in a vector of a power of two, which Triton asks for; zeros behind the last."""

    def __init__(self, width: int):
        self.columns = jnp.arange(pl.next_power_of_2(width))
        self.inside = self.columns < width

    def load(self, ref, *row: Any) -> Float[Array, "D"]:
        return plt.load(ref.at[(*row, self.columns)], mask=self.inside, other=0).astype(jnp.float32)

    def store(self, ref, row: Any, value: Float[Array, "D"]) -> None:
        plt.store(ref.at[row, self.columns], value.astype(ref.dtype), mask=self.inside)


def _unit(x: Float[Array, "D"], eps: float) -> tuple[Float[Array, "D"], Any]:
    """The row on the unit sphere, and what it was multiplied with."""
    scale = jax.lax.rsqrt(jnp.sum(jnp.square(x)) + eps)
    return scale * x, scale


def _unit_gradient(gradient: Float[Array, "D"], unit: Float[Array, "D"], scale: Any) -> Float[Array, "D"]:
    """The gradient of x from that of unit(x) = scale · x."""
    return scale * (gradient - unit * jnp.sum(gradient * unit))
