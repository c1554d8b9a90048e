"""Training steps as contestants of a race: from the same state every time, on random tokens."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from elr_jax.config import Runtime
from elr_jax.train.data import Batch
from elr_jax.train.settings import Recipe
from elr_jax.train.step import StepMetrics, init_state, optimizer_for, train_step

Turn = Callable[[], tuple[Any, list[StepMetrics]]]


def steps_of(recipe: Recipe, batch: Batch, *, steps: int, runtime: Runtime = Runtime(), params: Any = None) -> Turn:
    """A turn: the first steps of a run, from the recipe's start (or these parameters), each with its own draw."""
    optimizer = optimizer_for(recipe)
    step = jax.jit(partial(train_step, recipe=recipe, optimizer=optimizer, runtime=runtime))
    start = jax.jit(partial(init_state, recipe, optimizer))()
    start = start if params is None else start.replace(params=params)

    def turn() -> tuple[Any, list[StepMetrics]]:
        state, metrics = start, []
        for _ in range(steps):
            state, one = step(state, batch)
            metrics.append(one)
        return state, metrics

    return turn


def random_batch(rows: int, length: int, *, vocab_size: int, seed: int) -> Batch:
    """Random tokens, all scored, each row one document."""
    tokens = jax.random.randint(jax.random.key(seed), (rows, length + 1), 0, vocab_size)
    ones = jnp.ones((rows, length))
    return Batch(tokens=tokens[:, :-1], targets=tokens[:, 1:], weights=ones, segment_ids=ones.astype(jnp.int32))


def rounds(metrics: list[StepMetrics], *, rows: int) -> tuple[float, float]:
    """Rounds run, and rounds drawn, a row of a step."""
    every = rows * len(metrics)
    executed, useful = (sum(int(getattr(one, f"{kind}_rounds")) for one in metrics) for kind in ("executed", "useful"))
    return executed / every, useful / every
