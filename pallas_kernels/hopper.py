"""What the Mosaic GPU kernels share: loads whose signature differs between JAX releases, and the chips they are for."""

from inspect import signature
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from elr_jax.typing import Array
from pallas_kernels.blocks import dot
from pallas_kernels.interpret import interpreting

_TAKES_INDEX = "idx" in signature(plgpu.load).parameters  # until JAX 0.12


def load(ref: Any, index: tuple[Any, ...], layout: Any) -> Array:
    """A piece of a reference in the layout of a product's rows or columns."""
    options: dict[str, Any] = {"layout": layout, "optimized": False}
    return plgpu.load(ref, index, **options) if _TAKES_INDEX else plgpu.load(ref.at[index], **options)


def product(a: Any, b: Any) -> Array:
    """a b of two blocks in shared memory."""

    def multiply(into: Any) -> Array:
        plgpu.wgmma(into, a, b)
        return into[...]

    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def accumulated(total: Array, a: Any, b: Any) -> Array:
    """total + a b for an array a, in the total's own registers; JAX's interpreter knows neither."""
    if interpreting():
        return total + dot(a, b[...], (1, 0))
    summed: Any = pl.run_state(lambda into: plgpu.wgmma(into, a, b))(plgpu.ACC.init(total))
    return summed


def available() -> bool:
    """Whether the target is a Hopper: the chip of the mesh in use, or else of the default device."""
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    return any(name in device.device_kind for name in ("H100", "H200", "GH200"))
