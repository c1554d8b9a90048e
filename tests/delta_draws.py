"""Draws of the delta rule's operands, and what a form makes of them."""

import jax
import jax.numpy as jnp
import numpy as np


def draw(length, steps, *, most_beta=2.0, batch=2, heads=2, key=5, value=4, seed=0):
    """Keys and queries of norm 1, log decays from −1e−4 to −1, which a state survives from chunk to chunk, and one."""
    rng = np.random.default_rng(seed)

    def unit(*shape):
        x = rng.normal(size=shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    inputs = (
        unit(batch, length, heads, key),
        unit(batch, length, steps, heads, key),
        rng.normal(size=(batch, length, steps, heads, value)),
        rng.uniform(0, most_beta, (batch, length, steps, heads)),
        -np.exp(rng.uniform(np.log(1e-4), 0, (batch, length, heads))),
        rng.normal(size=(batch, heads, key, value)),
    )
    return tuple(x.astype(np.float32) for x in inputs)


def pulled(function, *inputs):
    """Outputs, state and the gradient of a loss of both, traced anew: an interpreter in use has a say in it."""

    @jax.jit
    def run(*inputs):
        (out, state), pull = jax.vjp(function, *inputs)
        return out, state, *pull((jnp.cos(out), jnp.sin(state)))

    return run(*inputs)
