"""Matrix products in the working type with float32 accumulation."""

import jax.numpy as jnp

from elr_jax.typing import Array


def product(subscripts: str, x: Array, weight: Array) -> Array:
    """`einsum(subscripts, x, weight)` summed in float32 (or wider) and rounded once to the type of `x`."""
    return wide_product(subscripts, x, weight).astype(x.dtype)


def wide_product(subscripts: str, x: Array, weight: Array) -> Array:
    """`einsum(subscripts, x, weight)` in the type it is summed in: float32, or float64 if `x` is that."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.einsum(subscripts, x, weight.astype(x.dtype), preferred_element_type=wide)
