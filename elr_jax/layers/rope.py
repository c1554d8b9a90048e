"""Rotary positions: the angle tables, made once a forward pass, and the rotation."""

from typing import Any

import jax.numpy as jnp

from elr_jax.typing import Array, Float, Positions, widen

Rotary = tuple[Float[Array, "B T 1 h"], Float[Array, "B T 1 h"]]


def rotary_table(positions: Positions, *, head_dim: int, base: float, dtype: Any = jnp.float32) -> Rotary:
    """cos and sin of position · base^(−2j/H) for j < H/2, [B, T, 1, H/2] in float32, or float64 if `dtype` is that.

    Phases stay float32: bfloat16 ones are off by more than a radian at position 4,095.
    """
    wide = jnp.promote_types(dtype, jnp.float32)
    frequency = 1 / base ** (jnp.arange(0, head_dim, 2, dtype=wide) / head_dim)
    phase = positions.astype(wide)[:, :, None, None] * frequency
    return jnp.cos(phase), jnp.sin(phase)


def rotate(x: Float[Array, "B T heads H"], table: Rotary) -> Float[Array, "B T heads H"]:
    """Turn the pairs (x_j, x_{j+H/2}) by their angles (the half-split, GPT-NeoX layout)."""
    cos, sin = table
    low, high = jnp.split(widen(x), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)
