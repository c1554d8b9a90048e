"""What the TPU kernels share: their compiler's parameters, and rows turned into columns."""

from typing import Literal

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from elr_jax.typing import Array

LANES = 128


def parameters(*semantics: Literal["parallel", "arbitrary"]) -> pltpu.CompilerParams:
    """`parallel` grid dimensions may run in any order and on any core, `arbitrary` ones run in theirs."""
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=48 * 2**20)


def column(row: Array) -> Array:
    """A row [1, n] of 32-bit numbers as a column [n, 1]; in memory a column would take 128 times the room."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:, :1]
