"""The adaptive delta in plain JAX."""

import jax
import jax.numpy as jnp

from elr_jax.layers.linear import product
from elr_jax.layers.norms import rms_norm
from elr_jax.typing import Array, Bool, Float, Hidden, widen


def gated_update(
    state: Hidden,
    proposal: Hidden,
    weight: Float[Array, "D D"],
    bias: Float[Array, "D"],
    gain: Float[Array, "D"],
    active: Bool[Array, "B"],
    *,
    eps: float,
) -> Hidden:
    """s + β ⊙ (r − s) in float32 or wider where active, s elsewhere."""
    wide = widen(state)
    step = step_size(state, weight, bias, gain, eps=eps)
    new = (wide + step * (widen(proposal) - wide)).astype(state.dtype)
    return jnp.where(active[:, None, None], new, state)


def step_size(
    state: Hidden, weight: Float[Array, "D D"], bias: Float[Array, "D"], gain: Float[Array, "D"], *, eps: float
) -> Float[Array, "B T D"]:
    """β = σ(RMSNorm(s) W + b) ⊙ softplus(γ), float32; it may exceed 1, since softplus is unbounded."""
    logits = widen(product(rms_norm(state, eps=eps), weight))
    return jax.nn.sigmoid(logits + bias) * jax.nn.softplus(gain)
