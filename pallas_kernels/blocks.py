"""What kernels share: results that know their mesh axes, products in float32, padding to whole blocks."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from elr_jax.typing import Array, Float


def result(shape: Sequence[int], dtype: Any, *operands: Array) -> jax.ShapeDtypeStruct:
    """The declaration of a kernel's result, which varies over the mesh axes that any operand varies over."""
    varying = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in operands))
    axes = jax.sharding.ManualAxisType(varying=varying)
    return jax.ShapeDtypeStruct(tuple(shape), dtype, manual_axis_type=axes)


def dot(a: Float[Array, "..."], b: Float[Array, "..."], axes: tuple[int, int]) -> Float[Array, "..."]:
    """The product of two matrices over one axis of each, summed in float32; float32 factors are not rounded."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    contract = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(a, b, contract, precision=precision, preferred_element_type=jnp.float32)


def round_up(n: int, multiple: int) -> int:
    """The least multiple that is not below n."""
    return -(-n // multiple) * multiple


def padded(x: Array, axis: int, length: int) -> Array:
    """The array with zeros behind it along one axis."""
    if x.shape[axis] == length:
        return x
    return jnp.pad(x, [(0, length - size) if j == axis else (0, 0) for j, size in enumerate(x.shape)])
