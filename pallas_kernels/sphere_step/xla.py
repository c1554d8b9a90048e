"""The step on the unit sphere in plain JAX."""

import jax.numpy as jnp

from elr_jax.layers.norms import unit_norm
from elr_jax.typing import Array, Float, Hidden, widen


def sphere_step(state: Hidden, target: Hidden, rate: Float[Array, "D"], *, eps: float) -> Hidden:
    """unit(ĥ + |α| ⊙ (ô − ĥ)), in float32 or wider."""
    start, end = (unit_norm(widen(x), eps=eps) for x in (state, target))
    return unit_norm(start + jnp.abs(widen(rate)) * (end - start), eps=eps).astype(state.dtype)
