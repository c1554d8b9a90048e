"""Sizes of the op: Koi's `D` layers as they run in bfloat16, the tiny hybrid's, and the widest heads."""

from typing import Any

import jax
import jax.numpy as jnp

from elr_jax.typing import Array
from pallas_kernels.case import Case
from pallas_kernels.contract import Implementation
from pallas_kernels.delta_rule import pallas_tpu
from pallas_kernels.delta_rule.api import delta_rule


def case(name: str, batch: int, length: int, steps: int, heads: int, key: int, value: int, dtype: Any) -> Case:
    """A layer's sequences; `dtype` is that of the values, all else is float32."""
    array = lambda *shape, dtype="float32": jax.ShapeDtypeStruct(shape, dtype)
    q, k = array(batch, length, heads, key), array(batch, length, steps, heads, key)
    v = array(batch, length, steps, heads, value, dtype=dtype)
    return Case(
        name=name,
        function=_outputs,
        operands=(
            q,
            k,
            v,
            array(batch, length, steps, heads),
            array(batch, length, heads),
            array(batch, heads, key, value),
        ),
        inputs=6,
        flops=pallas_tpu.flops(q, k, v),
        kernels=("pallas_tpu",),
        looped=True,
    )


def _outputs(*operands: Array, implementation: Implementation | None) -> Array:
    return delta_rule(*operands, implementation=implementation)[0]


CASES = [
    case("koi", 4, 2048, 3, 24, 128, 128, jnp.bfloat16),
    case("tiny_hybrid", 4, 256, 2, 4, 32, 32, jnp.float32),
    case("wide", 1, 1000, 1, 6, 256, 256, jnp.float32),
]
