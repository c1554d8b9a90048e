"""What a trained loop does: how far each round moves, whether it settles or cycles, and what caches and positions cost.

    states = model.states(params, tokens, jnp.full(B, R), config=config)     R rounds, more than were trained if wanted
    residuals(states), contraction(states), periods(states)
    losses_of_calls(params, batch, depth, config=config, mode="last_loop", chunk=1)

States are [R+1,B,T,D], s_0 first. All functions are pure and may be jitted.
"""

import jax
import jax.numpy as jnp

from elr_jax.cache import Cache, CacheMode, init_cache
from elr_jax.config import ModelConfig, Runtime
from elr_jax.incremental import extend
from elr_jax.losses import cross_entropy
from elr_jax.parameters import Params
from elr_jax.typing import Array, Depth, Float, Int32, PRNGKeyArray, Tokens, widen

States = Float[Array, "R+1 B T D"]


def residuals(states: States) -> Float[Array, "R B T"]:
    """‖s_k − s_{k−1}‖ / ‖s_k‖ of every round and token."""
    return _relative(states[1:], states[:-1])


def contraction(states: States) -> Float[Array, "B T"]:
    """The mean factor (‖s_R − s_{R−1}‖ / ‖s_1 − s_0‖)^{1/(R−1)} by which a round's step exceeds the one before it.

    Below 1 a token's state settles. R must be 2 at least.
    """
    moved = jnp.linalg.norm(widen(states[1:]) - widen(states[:-1]), axis=-1)
    tiny = jnp.finfo(moved.dtype).tiny
    return (jnp.maximum(moved[-1], tiny) / jnp.maximum(moved[0], tiny)) ** (1 / (moved.shape[0] - 1))


def periods(states: States, *, longest: int = 8, tolerance: float = 1e-2) -> Int32[Array, "B T"]:
    """The period of the cycle that a token's last states run in: 1 is a fixed point, 0 none up to `longest`.

    The least p for which s_k lies within `tolerance`·‖s_k‖ of s_{k−p} for the last p of the R rounds; R must be
    2·longest at least. Slow motion passes for a fixed point: choose a tolerance below the last residuals of interest.
    """
    rounds = states.shape[0] - 1
    assert rounds >= 2 * longest, f"periods up to {longest} need {2 * longest} rounds, not {rounds}"
    found = jnp.zeros(states.shape[1:3], jnp.int32)
    for p in range(longest, 0, -1):
        returns = jnp.all(_relative(states[-p:], states[-2 * p : -p]) <= tolerance, axis=0)
        found = jnp.where(returns, p, found)
    return found


def losses_of_calls(
    params: Params,
    tokens: Tokens,
    targets: Tokens,
    depth: Depth,
    *,
    config: ModelConfig,
    mode: CacheMode,
    chunk: int = 1,
    runtime: Runtime = Runtime(),
    key: PRNGKeyArray | None = None,
) -> Float[Array, "B T"]:
    """Nats of every token when a text is read through a cache in calls of `chunk` tokens, as decoding reads it.

    With `per_loop` these are the losses of the full pass whatever the chunk; what `last_loop` loses is the difference.
    T must be a multiple of `chunk`.
    """
    batch, length = tokens.shape
    assert length % chunk == 0, f"{length} tokens are no multiple of {chunk}"

    def call(cache: Cache, part: tuple[Tokens, Tokens]) -> tuple[Cache, Float[Array, "B C"]]:
        logits, cache = extend(params, part[0], depth, cache, config=config, runtime=runtime, key=key)
        return cache, cross_entropy(logits, part[1])

    first, second = (jnp.moveaxis(x.reshape(batch, -1, chunk), 1, 0) for x in (tokens, targets))
    start = init_cache(config, batch, length, mode=mode, dtype=runtime.dtype)
    return jnp.moveaxis(jax.lax.scan(call, start, (first, second))[1], 0, 1).reshape(batch, length)


def _relative(states: States, others: States) -> Float[Array, "R B T"]:
    size = jnp.linalg.norm(widen(states), axis=-1)
    apart = jnp.linalg.norm(widen(states) - widen(others), axis=-1)
    return apart / jnp.maximum(size, jnp.finfo(size.dtype).tiny)
