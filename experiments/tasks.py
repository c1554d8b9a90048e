"""What a cell trains on and is measured by."""

import math
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import race
from benchmarks.training import steps_of
from elr_jax import model
from elr_jax.config import ModelConfig
from elr_jax.layers.moe import Experts, shared_experts
from elr_jax.parameters import Params
from elr_jax.train.data import Batch, DataConfig, Dataset, batches, open_dataset
from elr_jax.train.evaluate import evaluate
from elr_jax.train.settings import Recipe
from elr_jax.train.token_store import Split
from elr_jax.typing import Array, Float, Int32


class Task(Protocol):
    """Data of both splits, and what is measured beyond the scores at each loop count."""

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that decides the data, JSON-ready."""
        ...

    def open(self, split: Split, *, seed: int) -> Dataset:
        """Examples of one split."""
        ...

    def measure(self, params: Params, recipe: Recipe) -> dict[str, Any]:
        """More metrics of what the recipe trained: numbers or nested lists of them."""
        ...


@dataclass(frozen=True, kw_only=True)
class Text:
    """Next-token prediction on packed text."""

    data: DataConfig = field(default_factory=DataConfig)

    @property
    def settings(self) -> dict[str, Any]:
        """The data's settings; where tokens are cached decides nothing."""
        return {name: value for name, value in asdict(self.data).items() if name != "cache_dir"}

    def open(self, split: Split, *, seed: int) -> Dataset:
        """Packed windows of one split."""
        return open_dataset(self.data, split, seed=seed)

    def measure(self, params: Params, recipe: Recipe) -> dict[str, Any]:
        """Nothing beyond the loss."""
        return {}


@dataclass(frozen=True, kw_only=True)
class RoutedText(Text):
    """The same for mixtures of experts in a loop: what later rounds make of the first one's routes."""

    measured_batches: int = 4
    """Validation batches that routes are compared on."""
    timed_turns: int = 3

    def measure(self, params: Params, recipe: Recipe) -> dict[str, Any]:
        """Lists over the loop counts: how fresh and replayed routes differ, and what a switch between them costs.

        `overlap`: share of a token's experts in round one that round k chooses too; `cosine`: between a mixture's
        output in round k with the first round's experts and with fresh ones; both over the core's mixtures.
        `switch_cost`: bits per byte that routes it was not trained with add to those with its own. `replay_time`: a
        training step with replayed routes over one with fresh routes, medians in turns.
        """
        if recipe.model.loop.max_loops == 1:
            return {}
        validation = self.open("validation", seed=0)
        data = list(
            islice(batches(validation, min(recipe.batch_size, len(validation.examples))), self.measured_batches)
        )
        fresh, replayed = (_routed(recipe, replay) for replay in (False, True))
        switched = fresh if recipe.model.moe == replayed.model.moe else replayed
        overlap = [overlaps(params, batch, config=fresh.model) for batch in data]
        cosine = [cosines(params, batch, config=replayed.model) for batch in data]
        own, other = (
            np.array([score.loss for score in evaluate(params, data, config=config)])
            / (math.log(2) * (validation.bytes_per_token or 1))
            for config in (recipe.model, switched.model)
        )
        turns = {name: steps_of(each, data[0], steps=2) for name, each in (("fresh", fresh), ("replayed", replayed))}
        times = race(turns, repeats=self.timed_turns)
        return {
            "overlap": np.mean(overlap, axis=0, dtype=float).round(4).tolist(),
            "cosine": np.mean(cosine, axis=0, dtype=float).round(4).tolist(),
            "switch_cost": (other - own).round(4).tolist(),
            "replay_time": round(times["replayed"].median / times["fresh"].median, 4),
        }


def _routed(recipe: Recipe, replay: bool) -> Recipe:
    assert recipe.model.moe is not None, "routes belong to mixtures of experts"
    return replace(recipe, model=replace(recipe.model, moe=replace(recipe.model.moe, replay=replay)))


@partial(jax.jit, static_argnames="config")
def overlaps(params: Params, batch: Batch, *, config: ModelConfig) -> Float[Array, "R"]:
    """For each round, the share of a token's first experts that it chooses again."""

    def chosen(k: Int32[Array, ""]) -> list[Experts]:
        return [one.experts for one in _core_routing(params, batch, k, config)]

    first = chosen(jnp.int32(1))
    again = lambda k: jnp.mean(jnp.stack([shared_experts(*pair) for pair in zip(first, chosen(k), strict=True)]))
    return jax.lax.map(again, jnp.arange(1, config.loop.max_loops + 1))


@partial(jax.jit, static_argnames="config")
def cosines(params: Params, batch: Batch, *, config: ModelConfig) -> Float[Array, "R"]:
    """For each round, the cosine between what replayed and what fresh routes give; routing sums over rounds."""

    def up_to(k: Int32[Array, ""]) -> Float[Array, ""]:
        return jnp.mean(jnp.stack([one.cosine for one in _core_routing(params, batch, k, config)]))

    return jnp.diff(jax.lax.map(up_to, jnp.arange(1, config.loop.max_loops + 1)), prepend=0.0)


def _core_routing(params: Params, batch: Batch, loops: Int32[Array, ""], config: ModelConfig) -> list[Any]:
    depth = jnp.full(batch.tokens.shape[0], loops)
    routing = model.routing(params, batch.tokens, depth, config=config, segment_ids=batch.segment_ids)
    before = config.prelude.count("E")
    return list(routing[before : before + config.core.count("E")])
