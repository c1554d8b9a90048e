"""One checkpoint at every loop count: loss, bits per byte, and how far the last round still moved the state."""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from elr_jax import model, probes
from elr_jax.config import ModelConfig, Runtime
from elr_jax.errors import ElrError
from elr_jax.parameters import Params
from elr_jax.sharding import constrain
from elr_jax.train.data import Batch
from elr_jax.typing import Array, Float, Int32, PRNGKeyArray


class LoopResult(NamedTuple):
    """Scores of one loop count."""

    loops: int
    loss: float
    """Nats per scored token."""
    accuracy: float
    """Share of scored tokens whose most likely prediction is right."""
    bits_per_byte: float | None
    residual: float
    """Mean over tokens of ‖s_k − s_{k−1}‖ / ‖s_k‖ in a pass of k rounds."""


def evaluate(
    params: Params,
    data: Iterable[Batch],
    *,
    config: ModelConfig,
    runtime: Runtime = Runtime(),
    bytes_per_token: float | None = None,
    key: PRNGKeyArray | None = None,
) -> list[LoopResult]:
    """Scores at 1 … max_loops loops of the same batches; `key` feeds a random initial state.

    Raises:
        ElrError: no batch, or none in which a token has a weight.
    """
    loops = range(1, config.loop.max_loops + 1)
    key = jax.random.key(0) if key is None else key
    sums: Any = None
    for batch in data:
        scored = [_score(params, batch, jnp.int32(k), key, config=config, runtime=runtime) for k in loops]
        batch_sums = jnp.stack(scored), residuals(params, batch, key, config=config, runtime=runtime)
        sums = batch_sums if sums is None else jax.tree.map(jnp.add, sums, batch_sums)
    if sums is None or not sums[0][0, 2]:
        found = "no batch" if sums is None else "no token with a weight above 0"
        raise ElrError(f"the data to evaluate on has {found}: give more of it, or another split")
    (loss, right, weight), (moved, tokens) = (table.T.tolist() for table in sums)
    return [
        LoopResult(
            loops=k,
            loss=loss[k - 1] / weight[k - 1],
            accuracy=right[k - 1] / weight[k - 1],
            bits_per_byte=bytes_per_token and loss[k - 1] / weight[k - 1] / math.log(2) / bytes_per_token,
            residual=moved[k - 1] / tokens[k - 1],
        )
        for k in loops
    ]


@partial(jax.jit, static_argnames=("config", "runtime"))
def _score(
    params: Params,
    batch: Batch,
    loops: Int32[Array, ""],
    key: PRNGKeyArray,
    *,
    config: ModelConfig,
    runtime: Runtime,
) -> Float[Array, "3"]:
    """Summed loss, right answers and weight at one loop count."""
    depth = jnp.full(batch.tokens.shape[0], loops)
    inputs = batch.tokens, batch.targets, batch.weights, depth
    total, scores = model.loss(params, *inputs, config=config, runtime=runtime, segment_ids=batch.segment_ids, key=key)
    return _whole(jnp.stack([total, jnp.sum(scores.right * batch.weights), jnp.sum(batch.weights)]))


@partial(jax.jit, static_argnames=("config", "runtime"))
def residuals(
    params: Params, batch: Batch, key: PRNGKeyArray, *, config: ModelConfig, runtime: Runtime
) -> Float[Array, "R 2"]:
    """For each round, Σ over tokens of ‖s_k − s_{k−1}‖ / ‖s_k‖ and the number of tokens."""
    rounds = config.loop.max_loops

    def moves(loops: Int32[Array, ""] | int) -> Float[Array, "R B T"]:
        depth = jnp.full(batch.tokens.shape[0], loops, jnp.int32)
        states = model.states(
            params, batch.tokens, depth, config=config, runtime=runtime, segment_ids=batch.segment_ids, key=key
        )
        return probes.residuals(states)

    if config.conditioning is None:
        moved = moves(rounds)
    else:  # round k of a longer pass is told something else
        moved = jax.lax.map(lambda k: moves(k)[k - 1], jnp.arange(1, rounds + 1))
    sums = jnp.sum(moved, axis=(1, 2)), jnp.full(moved.shape[0], moved[0].size, jnp.float32)
    return _whole(jnp.stack(sums, axis=1))


def _whole(sums: Array) -> Array:
    """On every device, so that each process can read them."""
    return constrain(sums, *(None,) * sums.ndim)
