"""Sizes of the op: the widths of Dory and Koi, the widest there is, and the tiny model's."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.case import Case
from pallas_kernels.gated_update.api import gated_update


def case(name: str, batch: int, length: int, width: int, dtype: Any = "bfloat16") -> Case:
    """The adaptive delta of a batch."""
    hidden, vector = jax.ShapeDtypeStruct((batch, length, width), dtype), jax.ShapeDtypeStruct((width,), jnp.float32)
    weight, active = jax.ShapeDtypeStruct((width, width), dtype), jax.ShapeDtypeStruct((batch,), jnp.bool_)
    return Case(
        name=name,
        function=partial(gated_update, eps=1e-6),
        operands=(hidden, hidden, weight, vector, vector, active),
        inputs=5,
        flops=2 * batch * length * width**2,
    )


CASES = [
    case("dory", 4, 2048, 2560),
    case("koi", 4, 2048, 3072),
    case("widest", 1, 1000, 8192),
    case("tiny", 3, 100, 128, "float32"),
]
