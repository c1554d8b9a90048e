"""The mathematics of the op in float32."""

import jax.numpy as jnp

from elr_jax.typing import Array, Float, Hidden, widen


def sphere_step(state: Hidden, target: Hidden, rate: Float[Array, "D"], *, eps: float) -> Hidden:
    """What `api.sphere_step` computes."""

    def unit(x: Array) -> Array:
        return x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)

    h, o = unit(widen(state)), unit(widen(target))
    share = jnp.abs(widen(rate))
    return unit((1 - share) * h + share * o).astype(state.dtype)
