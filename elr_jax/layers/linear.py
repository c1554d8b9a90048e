"""Matrix products in the working type with float32 accumulation."""

import jax.numpy as jnp

from elr_jax.typing import Array


def product(subscripts: str, x: Array, weight: Array) -> Array:
    """`einsum(subscripts, x, weight)` summed in float32 and rounded once to the type of `x`."""
    return jnp.einsum(subscripts, x, weight.astype(x.dtype), preferred_element_type=jnp.float32).astype(x.dtype)
