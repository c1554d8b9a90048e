"""What the TPU kernels share: results that know their mesh axes, products in float32, rows turned into columns."""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from elr_jax.typing import Array, Float

LANES = 128


def result(shape: Sequence[int], dtype: Any, *operands: Array) -> jax.ShapeDtypeStruct:
    """The declaration of a kernel's result, which varies over the mesh axes that any operand varies over."""
    varying = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in operands))
    axes = jax.sharding.ManualAxisType(varying=varying)
    return jax.ShapeDtypeStruct(tuple(shape), dtype, manual_axis_type=axes)


def parameters(*semantics: Literal["parallel", "arbitrary"]) -> pltpu.CompilerParams:
    """`parallel` grid dimensions may run in any order and on any core, `arbitrary` ones run in theirs."""
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=48 * 2**20)


def dot(a: Float[Array, "..."], b: Float[Array, "..."], axes: tuple[int, int]) -> Float[Array, "..."]:
    """The product of two matrices over one axis of each, summed in float32; float32 factors are not rounded."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    contract = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(a, b, contract, precision=precision, preferred_element_type=jnp.float32)


def column(row: Array) -> Array:
    """A row [1, n] of 32-bit numbers as a column [n, 1]; in memory a column would take 128 times the room."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:, :1]


def round_up(n: int, multiple: int) -> int:
    """The least multiple that is not below n."""
    return -(-n // multiple) * multiple
