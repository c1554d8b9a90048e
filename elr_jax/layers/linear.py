"""Matrix products in the working type with float32 accumulation."""

import jax
import jax.numpy as jnp

from elr_jax.typing import Array


def product(x: Array, weight: Array, *, inputs: int = 1) -> Array:
    """x @ weight over the last axes of x and the first `inputs` of the weight, rounded once to the type of `x`."""
    return wide_product(x, weight, inputs=inputs).astype(x.dtype)


def wide_product(x: Array, weight: Array, *, inputs: int = 1) -> Array:
    """The product in the type it is summed in: float32, or float64 if `x` is that.

    Contracted axes keep their order: `einsum` would swap those of a weight [N,H,D] and so copy it in every call.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.tensordot(x, weight.astype(x.dtype), axes=inputs, preferred_element_type=wide)


def exact_product(a: Array, b: Array) -> Array:
    """a @ b of stacked matrices with every digit of the factors, where accelerators would drop half of them.

    For what is carried on: errors in a recurrent state or in an inverse stay.
    """
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
