"""The recipes: laws of the loop count, loop rules, gate rates and places of the loop, beside plain models.

All cells of a preset share data, batch, optimizer and, but for `plain_equal_compute`, the number of steps.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from elr_jax import flops
from elr_jax.config import AttentionConfig, MLPConfig, ModelConfig
from elr_jax.depth import DepthLaw, Fixed, PerExample, RotatingSlice, SharedDraw, executed_rounds, sort_by_depth
from elr_jax.presets import PLAIN, gpt_half_billion, tiny_text
from elr_jax.train.data import DataConfig
from elr_jax.train.optim import OptimConfig
from elr_jax.train.settings import Recipe
from experiments.sweep import Cell, Preset
from experiments.tasks import Text

OPTIM = OptimConfig(learning_rate=0.02, adam_learning_rate=0.006, warmup_steps=20)
"""Chosen on the plain model at 120 steps, seed 0, from Muon at 0.003, 0.01, 0.02 and 0.03 and AdamW at 0.003."""
STEPS = 300


@dataclass(frozen=True, kw_only=True)
class Size:
    """What a preset sets: K loops at most, the forced share f, and the sizes of model, data and run."""

    model: ModelConfig
    data: DataConfig
    steps: int
    batch_size: int
    microbatches: int
    forced: float
    optim: OptimConfig = OPTIM
    eval_batches: int = 20

    @property
    def max_loops(self) -> int:
        """K."""
        return self.model.loop.max_loops


def size_of(preset: Preset, data: DataConfig) -> Size:
    """Sizes of a preset; `data` brings source, tokenizer and cache."""
    smoke_model = dataclasses.replace(
        tiny_text(),
        d_model=16,
        attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8),
        mlp=MLPConfig(d_ff=32, kind="squared_relu"),
    )
    sizes = {
        "cpu": Size(model=tiny_text(), data=data, steps=STEPS, batch_size=16, microbatches=4, forced=0.1),
        "paper": Size(
            model=gpt_half_billion(),
            data=dataclasses.replace(data, seq_len=2048),
            steps=20_000,
            batch_size=256,
            microbatches=8,
            forced=0.15,
            eval_batches=50,
        ),
        "smoke": Size(
            model=smoke_model,
            data=dataclasses.replace(data, seq_len=16),
            steps=3,
            batch_size=4,
            microbatches=2,
            forced=0.1,
            optim=dataclasses.replace(OPTIM, optimizer="adamw", warmup_steps=1),  # quick to compile
            eval_batches=2,
        ),
    }
    return sizes[preset]


def cells(size: Size) -> list[Cell]:
    """All cells; those named for a rule, a rate or a place differ from `per_example` in that alone."""
    k, model = size.max_loops, size.model
    law, one = PerExample(max_loops=k, forced=size.forced), Fixed(loops=1)
    plain = dataclasses.replace(model, loop=PLAIN)
    elastic = recipe(size, law)
    small_core = recipe(size, law, _move_block(model, source="core", target="prelude"))
    return [
        cell("plain", size, recipe(size, one, plain)),
        cell("per_example", size, elastic),
        cell("shared", size, recipe(size, SharedDraw(max_loops=k, one_probability=1 / 8))),
        cell("slice", size, recipe(size, RotatingSlice(max_loops=k, forced=size.forced))),
        cell("plain_equal_compute", size, equal_compute(recipe(size, one, plain), elastic, size.data.seq_len)),
        cell("one_loop_gated", size, recipe(size, one)),
        cell(f"fixed_{k}", size, recipe(size, Fixed(loops=k))),
        cell("replace", size, recipe(size, law, _with_rule(model, update="replace"))),
        cell("gate_rate_x0.3", size, _with_gate_rate(elastic, 0.3)),
        cell("gate_rate_x3", size, _with_gate_rate(elastic, 3.0)),
        cell("rate_x0.5", size, _with_rate(elastic, 0.5)),
        cell("rate_x2", size, _with_rate(elastic, 2)),
        cell("plain_rate_x0.5", size, _with_rate(recipe(size, one, plain), 0.5)),
        cell("steps_x2", size, _longer(elastic, 2)),
        cell("plain_steps_x2", size, _longer(recipe(size, one, plain), 2)),
        cell("steps_x4", size, _longer(elastic, 4)),
        cell("plain_steps_x4", size, _longer(recipe(size, one, plain), 4)),
        cell("adamw", size, _with_adamw(elastic)),
        cell("plain_adamw", size, _with_adamw(recipe(size, one, plain))),
        cell("no_prelude", size, recipe(size, law, _move_block(model, source="prelude", target="coda"))),
        cell("small_core", size, small_core),
        cell("small_core_steps_x2", size, _longer(small_core, 2)),
    ]


def cell(name: str, size: Size, recipe: Recipe) -> Cell:
    """A recipe under a name, on the preset's text."""
    return Cell(name=name, recipe=recipe, task=Text(data=size.data), eval_batches=size.eval_batches)


def recipe(size: Size, law: DepthLaw, model: ModelConfig | None = None) -> Recipe:
    """The preset's recipe with a law and, if given, another model."""
    return Recipe(
        model=model or size.model,
        depth=law,
        optim=size.optim,
        steps=size.steps,
        batch_size=size.batch_size,
        microbatches=size.microbatches,
    )


def equal_compute(short: Recipe, long: Recipe, seq_len: int) -> Recipe:
    """The first recipe with as many steps as cost what the second one executes."""
    steps = round(long.steps * step_flops(long, seq_len) / step_flops(short, seq_len))
    return dataclasses.replace(short, steps=steps)


def step_flops(recipe: Recipe, seq_len: int) -> float:
    """Mean operations of a training step, from the rounds that 1,000 draws of the recipe's law execute."""
    rows = jnp.arange(recipe.batch_size)

    def rounds(step: jax.Array) -> jax.Array:
        depth = recipe.depth.sample(
            jax.random.key(0), step, rows, batch_size=recipe.batch_size, total_steps=recipe.steps
        )
        return executed_rounds(depth[sort_by_depth(depth, recipe.microbatches)], recipe.microbatches)

    mean = float(jnp.mean(jax.vmap(rounds)(jnp.arange(1000))))
    return flops.train_flops(recipe.model, seq_len=seq_len, sequences=recipe.batch_size, rounds=mean)


def _with_rule(model: ModelConfig, **changes: str) -> ModelConfig:
    return dataclasses.replace(model, loop=dataclasses.replace(model.loop, **changes))


def _with_gate_rate(recipe: Recipe, factor: float) -> Recipe:
    return dataclasses.replace(recipe, optim=dataclasses.replace(recipe.optim, loop_lr_scale=factor))


def _with_rate(recipe: Recipe, factor: float) -> Recipe:
    """Another peak rate of the matrices, the rest as it was."""
    optim = dataclasses.replace(recipe.optim, learning_rate=factor * recipe.optim.learning_rate)
    return dataclasses.replace(recipe, optim=optim)


def _with_adamw(recipe: Recipe) -> Recipe:
    """AdamW for everything, at half the rate it has beside Muon."""
    rate = recipe.optim.adam_learning_rate / 2
    optim = dataclasses.replace(recipe.optim, optimizer="adamw", learning_rate=rate)
    return dataclasses.replace(recipe, optim=optim)


def _longer(recipe: Recipe, factor: int) -> Recipe:
    return dataclasses.replace(recipe, steps=factor * recipe.steps)


def _move_block(model: ModelConfig, *, source: str, target: str) -> ModelConfig:
    """Half the core, or all of the prelude, moved to another part: the same layers under another loop."""
    letters = getattr(model, source)
    stays = letters[len(letters) // 2 :] if source == "core" else ""
    moved = letters[: len(letters) - len(stays)]
    target_letters = getattr(model, target)
    joined = target_letters + moved if target == "prelude" else moved + target_letters
    return dataclasses.replace(model, **{source: stays, target: joined})
