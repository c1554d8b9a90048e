"""A program's least time on a slice, from three roofs: arithmetic, memory and links.

Operations come from `elr_jax.flops`, collectives from the compiled program. Nothing is run: a time is a bound from
below, `overlapped` where the three go on beside each other and `in_turn` where none does.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from elr_jax import flops
from elr_jax.collectives import Collective
from elr_jax.config import ModelConfig, Runtime
from elr_jax.depth import executed_rounds, sort_by_depth
from elr_jax.hardware import Hardware
from elr_jax.parameters import abstract, param_specs
from elr_jax.serving_cost import weight_reads
from elr_jax.sharding import DEFAULT_RULES, Rules, param_shardings
from elr_jax.train.settings import Recipe
from elr_jax.typing import Array, Int32

DRAWS = 128
"""Steps whose depths are drawn for the mean of their rounds."""


class Load(NamedTuple):
    """What one run of a program asks of one chip."""

    useful: float = 0.0
    """Operations that the model needs."""
    executed: float = 0.0
    """These, and what is replayed for a backward pass."""
    moved: float = 0.0
    """Bytes between the chip and its memory, at least."""
    sent: float = 0.0
    """Bytes to other chips."""


class Times(NamedTuple):
    """Seconds that a chip's peaks allow."""

    compute: float
    memory: float
    links: float

    @property
    def overlapped(self) -> float:
        """With perfect overlap, the longest alone counts."""
        return max(self)

    @property
    def in_turn(self) -> float:
        """Without any overlap."""
        return sum(self)


def times(load: Load, chip: Hardware) -> Times:
    """Each roof by itself; all links of a chip are taken to be busy in one direction."""
    return Times(load.executed / chip.flops, load.moved / chip.bandwidth, load.sent / chip.link)


def sent_bytes(found: Iterable[Collective], rounds: float) -> float:
    """Bytes a chip sends; what runs in each round of a loop whose length only the run knows, runs `rounds` times."""
    return sum(runs_of(one, rounds) * one.traffic for one in found)


def runs_of(one: Collective, rounds: float) -> float:
    """How often a collective runs."""
    return one.runs * (rounds if one.rounds else 1)


def mean_rounds(recipe: Recipe) -> float:
    """Rounds that a microbatch runs, each as deep as its deepest row: the mean over the run's last steps."""
    rows, key = jnp.arange(recipe.batch_size, dtype=jnp.int32), jax.random.key(recipe.seed)
    sizes = {"batch_size": recipe.batch_size, "total_steps": recipe.steps}
    steps = np.arange(max(recipe.steps - DRAWS, 0), recipe.steps)

    def executed(step: Int32[Array, ""]) -> Int32[Array, ""]:
        depth = recipe.depth.sample(key, step, rows, **sizes)
        return executed_rounds(depth[sort_by_depth(depth, recipe.microbatches)], recipe.microbatches)

    return float(np.mean(jax.vmap(executed)(jnp.asarray(steps)))) / recipe.batch_size


def training_load(
    recipe: Recipe, runtime: Runtime, *, seq_len: int, rounds: float, held: int, sent: float, mesh: Mesh
) -> Load:
    """Of an optimizer step whose state and batch are the `held` bytes.

    At least these move: the state in and out once; the weights in every pass of a microbatch, forward, replayed and
    backward; a layer's input and output in each of these, and its cotangents.
    """
    config, rows, tokens = recipe.model, recipe.batch_size, recipe.batch_size * seq_len
    replays = runtime.remat in ("layer", "offload", "round")
    passes, forward = 3 if replays else 2, flops.forward_flops(config, seq_len=seq_len)
    useful = flops.train_flops(config, seq_len=seq_len, sequences=rows, rounds=rows * rounds)
    replayed = tokens * (forward.at(rounds) - head_flops(config)) if replays else 0.0
    weights = recipe.microbatches * passes * used_weights(config, rounds, tokens=tokens, mesh=mesh)
    activations = (2 * passes + 1) * flops.layer_passes(config, rounds) * tokens * config.d_model / mesh.size
    moved = 2 * held + _width(runtime) * (weights + activations)
    return Load(useful / mesh.size, (useful + replayed) / mesh.size, moved, sent)


def serving_load(
    config: ModelConfig,
    runtime: Runtime,
    *,
    rows: int,
    context: int,
    new: int,
    loops: int,
    held: int,
    sent: float,
    mesh: Mesh,
) -> Load:
    """Of `new` tokens for each of some rows; `held` bytes are weights and caches.

    A prompt moves its weights once a round, its layers' inputs and outputs, and its cache out once; a decode step the
    weights and the whole cache.
    """
    tokens = rows * new
    # a query meets half of a prompt on average, all of a cache
    forward = flops.forward_flops(config, seq_len=2 * context if new == 1 else new)
    useful = tokens * forward.at(loops) - (tokens - rows) * head_flops(config)
    used = used_weights(config, loops, tokens=tokens, mesh=mesh)
    caches = held - held_weights(config, mesh) * _width(runtime)
    activations = 2 * flops.layer_passes(config, loops) * tokens * config.d_model / mesh.size
    moved = caches + _width(runtime) * (used + activations)
    return Load(useful / mesh.size, useful / mesh.size, moved, sent)


def head_flops(config: ModelConfig) -> float:
    """Operations of a token's logits."""
    return 2 * config.d_model * config.vocab_size


def used_weights(config: ModelConfig, rounds: float, *, tokens: int, mesh: Mesh) -> float:
    """Weights that a chip reads in a pass of so many tokens; those it holds a part of by width are gathered for it."""
    held = held_weights(config, mesh, Rules(embed=()))
    return weight_reads(config, rounds, tokens=tokens) * held / flops.num_params(config)


def held_weights(config: ModelConfig, mesh: Mesh, rules: Rules = DEFAULT_RULES) -> int:
    """Weights on one chip."""
    shapes, places = jax.tree.leaves(abstract(config)), param_shardings(param_specs(config), mesh, rules)
    return sum(
        math.prod(place.shard_shape(leaf.shape)) for leaf, place in zip(shapes, jax.tree.leaves(places), strict=True)
    )


def _width(runtime: Runtime) -> int:
    return np.dtype(runtime.dtype).itemsize
