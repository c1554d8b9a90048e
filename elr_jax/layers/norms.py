"""Normalisations, computed in float32 or wider whatever the working type."""

import jax
import jax.numpy as jnp

from elr_jax.typing import Array, Float, widen


def rms_norm(
    x: Float[Array, "*batch D"], scale: Float[Array, "D"] | None = None, *, eps: float
) -> Float[Array, "*batch D"]:
    """x / √(mean(x²) + eps) ⊙ scale over the last axis; no scale means ones."""
    wide = widen(x)
    y = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (y if scale is None else y * scale).astype(x.dtype)


def unit_norm(x: Float[Array, "*batch D"], *, eps: float) -> Float[Array, "*batch D"]:
    """x / √(Σ x² + eps) over the last axis: the point of the unit sphere in the direction of x."""
    wide = widen(x)
    return (wide * jax.lax.rsqrt(jnp.sum(jnp.square(wide), axis=-1, keepdims=True) + eps)).astype(x.dtype)
