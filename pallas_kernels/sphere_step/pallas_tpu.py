"""The step on the unit sphere on TPU: whole rows in a block, every array read and written once."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from elr_jax.typing import Array, Float, Hidden
from pallas_kernels.blocks import result
from pallas_kernels.contract import narrow
from pallas_kernels.tpu import parameters

ELEMENTS = 128 * 1024
"""Elements a block: a dozen float32 arrays of this size fit in a core's vector memory."""


def refusal(state: Hidden, target: Hidden) -> str | None:
    """Why the kernels can't run on these operands, or None."""
    if state.shape[-1] > 8192:
        return f"the width {state.shape[-1]} is above 8192: a block holds 16 whole rows"
    return narrow(state, target)


def forward(state: Hidden, target: Hidden, rate: Float[Array, "D"], *, eps: float) -> Hidden:
    """`xla.sphere_step`, one kernel."""
    (out,) = _call(_forward_kernel, (state, target), rate, eps, results=1)
    return out.reshape(state.shape)


def backward(
    state: Hidden, target: Hidden, rate: Float[Array, "D"], cotangent: Hidden, *, eps: float
) -> tuple[Hidden, Hidden, Float[Array, "D"]]:
    """Gradients of state, target and rate; nothing is kept for them but the operands."""
    by_state, by_target, sums = _call(_backward_kernel, (state, target, cotangent), rate, eps, results=2, sums=True)
    by_rate = jnp.sum(sums, axis=(0, 1)) * jnp.sign(rate.astype(jnp.float32))
    return by_state.reshape(state.shape), by_target.reshape(state.shape), by_rate.astype(rate.dtype)


def _call(
    kernel: Callable[..., None], arrays: Sequence[Hidden], rate: Array, eps: float, *, results: int, sums: bool = False
) -> list[Array]:
    """Run a kernel over blocks of rows; it gives arrays like the state, and a sum over each block's rows."""
    width, dtype = arrays[0].shape[-1], arrays[0].dtype
    flat = [x.reshape(-1, width) for x in arrays]
    count = flat[0].shape[0]
    rows = min(max(16, ELEMENTS // width // 16 * 16), count)
    blocks = pl.cdiv(count, rows)
    operands = (*flat, rate.astype(jnp.float32)[None])
    own = pl.BlockSpec((rows, width), lambda i: (i, 0))
    return pl.pallas_call(
        partial(kernel, count=count, eps=eps),
        grid=(blocks,),
        in_specs=[*[own] * len(flat), pl.BlockSpec((1, width), lambda i: (0, 0))],
        out_specs=[*[own] * results, *[pl.BlockSpec((1, 1, width), lambda i: (i, 0, 0))] * sums],
        out_shape=[
            *[result((count, width), dtype, *operands)] * results,
            *[result((blocks, 1, width), jnp.float32, *operands)] * sums,
        ],
        compiler_params=parameters("parallel"),
        name=f"sphere_step{kernel.__name__.removesuffix('_kernel')}",
    )(*operands)


def _forward_kernel(h_ref, o_ref, rate_ref, out_ref, *, count: int, eps: float):
    del count
    h, o = (_unit(ref[...].astype(jnp.float32), eps)[0] for ref in (h_ref, o_ref))
    out_ref[...] = _unit(h + jnp.abs(rate_ref[...]) * (o - h), eps)[0].astype(out_ref.dtype)


def _backward_kernel(h_ref, o_ref, g_ref, rate_ref, dh_ref, do_ref, sums_ref, *, count: int, eps: float):
    (h, h_scale), (o, o_scale) = (_unit(ref[...].astype(jnp.float32), eps) for ref in (h_ref, o_ref))
    share = jnp.abs(rate_ref[...])
    out, scale = _unit(h + share * (o - h), eps)
    moved = _unit_gradient(g_ref[...].astype(jnp.float32), out, scale)
    dh_ref[...] = _unit_gradient((1 - share) * moved, h, h_scale).astype(dh_ref.dtype)
    do_ref[...] = _unit_gradient(share * moved, o, o_scale).astype(do_ref.dtype)
    row = pl.program_id(0) * h.shape[0] + jax.lax.broadcasted_iota(jnp.int32, (h.shape[0], 1), 0)
    # rows beyond the last hold anything, NaN included
    sums_ref[0] = jnp.sum(jnp.where(row < count, moved * (o - h), 0), axis=0, keepdims=True)


def _unit(x: Float[Array, "rows D"], eps: float) -> tuple[Float[Array, "rows D"], Any]:
    """The rows on the unit sphere, and what they were multiplied with."""
    scale = jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=1, keepdims=True) + eps)
    return scale * x, scale


def _unit_gradient(gradient: Float[Array, "rows D"], unit: Float[Array, "rows D"], scale: Any) -> Array:
    """The gradient of x from that of unit(x) = scale · x."""
    return scale * (gradient - unit * jnp.sum(gradient * unit, axis=1, keepdims=True))
