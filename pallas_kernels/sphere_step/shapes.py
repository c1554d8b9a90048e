"""Sizes of the op: Dory's width, the widest there is, and a small one of odd length."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.case import Case
from pallas_kernels.sphere_step.api import sphere_step


def case(name: str, batch: int, length: int, width: int, dtype: Any = "bfloat16") -> Case:
    """The step of a batch."""
    hidden, rate = jax.ShapeDtypeStruct((batch, length, width), dtype), jax.ShapeDtypeStruct((width,), jnp.float32)
    function = partial(sphere_step, eps=1e-6)
    return Case(name=name, function=function, operands=(hidden, hidden, rate), inputs=3, flops=0)


CASES = [case("dory", 4, 2048, 2560), case("widest", 1, 1000, 8192), case("small", 3, 37, 384, "float32")]
