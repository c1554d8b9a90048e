"""Cross entropy, and its sums kept apart by loop count so that parts of a batch add up exactly."""

import jax
import jax.numpy as jnp
from flax import struct

from elr_jax.typing import Array, Depth, Float, Logits, Tokens, widen


@struct.dataclass
class DepthSums:
    """Loss and weight summed over the tokens of each loop count: entry k − 1 belongs to examples of k loops."""

    loss: Float[Array, "R"]
    """Nats."""
    weight: Float[Array, "R"]


def cross_entropy(logits: Logits, targets: Tokens) -> Float[Array, "B T"]:
    """log Σ_v exp(logits_v) − logits_target, in nats and float32."""
    logits = widen(logits)
    # a gather's gradient would be a scatter into zeros of the logits' size; a comparison fuses into the sums
    here = jnp.arange(logits.shape[-1]) == targets[..., None]
    return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(here, logits, 0), axis=-1)


def sum_by_depth(
    losses: Float[Array, "B T"], weights: Float[Array, "B T"], depth: Depth, *, max_loops: int
) -> DepthSums:
    """Weighted losses and weights of a batch, by loop count."""
    loss, weight = jnp.sum(losses * weights, axis=1), jnp.sum(weights, axis=1)
    by_depth = jax.nn.one_hot(depth - 1, max_loops, dtype=jnp.float32)
    return DepthSums(loss=loss @ by_depth, weight=weight @ by_depth)
