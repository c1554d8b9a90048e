"""The mathematics of the op, token by token and channel by channel, in float32."""

import jax.numpy as jnp

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
    """What `api.gated_update` computes."""
    s, r, w = (widen(x) for x in (state, proposal, weight))
    normed = s / jnp.sqrt(jnp.mean(s * s, axis=-1, keepdims=True) + eps)
    logits = jnp.einsum("btd,de->bte", normed, w, precision="highest") + bias
    step = jnp.log1p(jnp.exp(gain)) / (1 + jnp.exp(-logits))
    return jnp.where(active[:, None, None], s + step * (r - s), s).astype(state.dtype)
