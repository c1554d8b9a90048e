"""Text for loops of many rounds, and what is measured of them there."""

import math
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elr_jax import incremental, model, probes
from elr_jax.cache import Cache, CacheMode, init_cache
from elr_jax.config import ModelConfig
from elr_jax.losses import cross_entropy
from elr_jax.parameters import Params
from elr_jax.train.data import Batch, batches, open_dataset
from elr_jax.train.settings import Recipe
from elr_jax.typing import Array, Float, Int32, PRNGKeyArray, Tokens
from experiments.tasks import Text


@dataclass(frozen=True, kw_only=True)
class LoopedText(Text):
    """The same for loops of many rounds: whether they settle, and what caches and prompts of fewer rounds cost."""

    rounds: int
    """Loop count K that is measured; models without a loop have one."""
    measured_batches: int = 4
    """Validation batches that are read through caches."""
    chunk: int = 16
    """Tokens of a call."""
    long_rounds: int = 32
    """Rounds of the pass that is looked at for fixed points and cycles."""
    far: int = 4
    """Length of the documents that are read far, in training contexts."""
    copied: int = 32
    """Tokens of a passage that a row repeats."""

    @property
    def settings(self) -> dict[str, Any]:
        """The data's, and what the measures depend on."""
        own = {"rounds": self.rounds, "far": self.far, "long_rounds": self.long_rounds, "copied": self.copied}
        return super().settings | own

    def measure(self, params: Params, recipe: Recipe) -> dict[str, Any]:
        """What the loop does on validation text at K rounds.

        `bits_by_position` [far · 8]: bits per byte by eighths of a training context, on documents of `far` contexts.
        `copy_gain` [context / copied − 1]: bits per byte saved on a row's last `copied` tokens where the same tokens
        stand 1, 2 … times as many before them, too.
        Of a model with a loop also: `cache_bits` [2]: read in calls with a cache of every round, and of the last alone.
        `prefill_bits` [K]: of the second half of a row, read at K rounds after a first half at 1 … K. `settled`,
        `cycling`: shares of tokens whose state has period 1, and 2 to 8, after `long_rounds`; `contraction` a round;
        `residuals` [long_rounds].
        """
        most = min(self.rounds, recipe.model.loop.max_loops)
        config = replace(recipe.model, loop=replace(recipe.model.loop, max_loops=most))
        validation = self.open("validation", seed=0)
        per_byte = 1 / (math.log(2) * (validation.bytes_per_token or 1))
        rows = min(recipe.batch_size, len(validation.examples))
        data = list(islice(batches(validation, rows), self.measured_batches))
        over = lambda measured: np.mean([np.asarray(measured(batch), float) for batch in data], axis=0)
        key = jax.random.key(0)
        copied = over(lambda batch: copy_gains(params, batch, key, config=config, copied=self.copied))
        found: dict[str, Any] = {
            "bits_by_position": (per_byte * self._by_position(params, config)).round(4).tolist(),
            "copy_gain": (per_byte * copied).round(5).tolist(),
        }
        if most == 1:
            return found
        cached = over(lambda batch: cache_losses(params, batch, key, config=config, chunk=self.chunk))
        prefilled = over(lambda batch: prefill_losses(params, batch, key, config=config, chunk=self.chunk))
        longer = replace(config, loop=replace(config.loop, max_loops=self.long_rounds))
        settled, cycling, contraction, *residuals = over(lambda batch: motion(params, batch, key, config=longer))
        return found | {
            "cache_bits": (per_byte * cached).round(5).tolist(),
            "prefill_bits": (per_byte * prefilled).round(5).tolist(),
            "settled": round(float(settled), 4),
            "cycling": round(float(cycling), 4),
            "contraction": round(float(contraction), 4),
            "residuals": np.round(residuals, 6).tolist(),
        }

    def _by_position(self, params: Params, config: ModelConfig) -> np.ndarray:
        """Nats by eighths of a training context, on rows of `far` contexts."""
        long = open_dataset(replace(self.data, seq_len=self.far * self.data.seq_len), "validation", seed=0)
        rows = min(2, len(long.examples))
        total, weight = 0.0, 0.0
        for batch in islice(batches(long, rows), 2 * self.measured_batches):
            loss = position_losses(params, batch, jax.random.key(0), config=config)
            total, weight = total + np.asarray(loss[0], float), weight + np.asarray(loss[1], float)
        pieces = lambda x: x.reshape(8 * self.far, -1).sum(axis=1)
        return pieces(total) / np.maximum(pieces(weight), 1)


@partial(jax.jit, static_argnames="config")
def position_losses(
    params: Params, batch: Batch, key: PRNGKeyArray, *, config: ModelConfig
) -> tuple[Float[Array, "T"], Float[Array, "T"]]:
    """Weighted nats and weights at each position, at the largest loop count."""
    depth = jnp.full(batch.tokens.shape[0], config.loop.max_loops)
    inputs = batch.tokens, batch.targets, batch.weights, depth
    _, scores = model.loss(params, *inputs, config=config, segment_ids=batch.segment_ids, key=key)
    return jnp.sum(scores.loss * batch.weights, axis=0), jnp.sum(batch.weights, axis=0)


@partial(jax.jit, static_argnames=("config", "copied"))
def copy_gains(
    params: Params, batch: Batch, key: PRNGKeyArray, *, config: ModelConfig, copied: int
) -> Float[Array, "N"]:
    """Mean nats that each row's last `copied` tokens lose where they stand there before, by the distance between."""
    rows, length = batch.tokens.shape
    depth, last = jnp.full(rows, config.loop.max_loops), length - copied
    passage = batch.tokens[:, last:]

    def nats(tokens: Tokens) -> Float[Array, ""]:
        logits = model.apply(params, tokens, depth, config=config, key=key)
        return jnp.mean(cross_entropy(logits[:, last:-1], passage[:, 1:]))

    def before(at: Int32[Array, ""]) -> Float[Array, ""]:
        return nats(jax.lax.dynamic_update_slice(batch.tokens, passage, (0, at)))

    return nats(batch.tokens) - jax.lax.map(before, jnp.arange(last - copied, -1, -copied))


@partial(jax.jit, static_argnames=("config", "chunk"))
def cache_losses(
    params: Params, batch: Batch, key: PRNGKeyArray, *, config: ModelConfig, chunk: int
) -> Float[Array, "2"]:
    """Mean nats of rows read in calls as one text each, with a cache of every round and with one of the last."""
    depth = jnp.full(batch.tokens.shape[0], config.loop.max_loops)
    read = partial(
        probes.losses_of_calls, params, batch.tokens, batch.targets, depth, config=config, chunk=chunk, key=key
    )
    modes: tuple[CacheMode, ...] = ("per_loop", "last_loop")
    return jnp.stack([jnp.mean(read(mode=mode)) for mode in modes])


@partial(jax.jit, static_argnames=("config", "chunk"))
def prefill_losses(
    params: Params, batch: Batch, key: PRNGKeyArray, *, config: ModelConfig, chunk: int
) -> Float[Array, "R"]:
    """Mean nats of each row's second half at K rounds after a first half at 1 … K, with a cache of the last round."""
    rows, half, most = batch.tokens.shape[0], batch.tokens.shape[1] // 2, config.loop.max_loops
    extend = partial(incremental.extend, params, config=config, key=key)

    def after(loops: Int32[Array, ""]) -> Float[Array, ""]:
        cache = init_cache(config, rows, 2 * half, mode="last_loop")
        _, cache = extend(batch.tokens[:, :half], jnp.full(rows, loops), cache, fresh=True, last_only=True)

        def call(cache: Cache, part: tuple[Array, Array]) -> tuple[Cache, Float[Array, ""]]:
            logits, cache = extend(part[0], jnp.full(rows, most), cache)
            return cache, jnp.mean(cross_entropy(logits, part[1]))

        later = (batch.tokens[:, half : 2 * half], batch.targets[:, half : 2 * half])
        parts = tuple(jnp.moveaxis(x.reshape(rows, -1, chunk), 1, 0) for x in later)
        return jnp.mean(jax.lax.scan(call, cache, (parts[0], parts[1]))[1])

    return jax.lax.map(after, jnp.arange(1, most + 1))


@partial(jax.jit, static_argnames="config")
def motion(params: Params, batch: Batch, key: PRNGKeyArray, *, config: ModelConfig) -> Float[Array, "R+3"]:
    """Shares of tokens at a fixed point and in a cycle, the mean contraction, and each round's mean residual."""
    rows = min(4, batch.tokens.shape[0])
    depth = jnp.full(rows, config.loop.max_loops)
    told = {"config": config, "segment_ids": batch.segment_ids[:rows], "key": key}
    states = model.states(params, batch.tokens[:rows], depth, **told)
    periods = probes.periods(states)
    shares = jnp.mean(periods == 1), jnp.mean(periods > 1), jnp.mean(probes.contraction(states))
    return jnp.concatenate([jnp.stack(shares), jnp.mean(probes.residuals(states), axis=(1, 2))])
