"""The recipes: one model trained over mixed depths, two trained at a single depth, and a plain one."""

import dataclasses
from dataclasses import dataclass

from elr_jax.config import AttentionConfig, MLPConfig, ModelConfig
from elr_jax.depth import DepthLaw, Fixed, PerExample
from elr_jax.presets import PLAIN, tiny_pointer_chase
from elr_jax.train.optim import OptimConfig
from elr_jax.train.settings import Recipe
from experiments.pointer_chase.task import PointerChase
from experiments.sweep import Cell, Preset

OPTIM = OptimConfig(learning_rate=0.01, adam_learning_rate=0.003, b2=0.99, warmup_steps=50)
TRAINED_LOOPS = 4


@dataclass(frozen=True, kw_only=True)
class Size:
    """What a preset sets. With fewer steps the cpu preset misses the transition at which the loop is learnt."""

    model: ModelConfig
    task: PointerChase
    steps: int
    batch_size: int
    optim: OptimConfig = OPTIM


def _wide() -> ModelConfig:
    attention = AttentionConfig(num_heads=8, num_kv_heads=8, head_dim=32)
    return dataclasses.replace(tiny_pointer_chase(), d_model=256, attention=attention, mlp=MLPConfig(d_ff=1024))


SIZES: dict[Preset, Size] = {
    "cpu": Size(model=tiny_pointer_chase(), task=PointerChase(), steps=2000, batch_size=128),
    "paper": Size(model=_wide(), task=PointerChase(nodes=16, max_hops=8), steps=20_000, batch_size=1024),
    "smoke": Size(
        model=tiny_pointer_chase(),
        task=PointerChase(validation_examples=64),
        steps=3,
        batch_size=8,
        optim=dataclasses.replace(OPTIM, warmup_steps=1),
    ),
}


def cells(preset: Preset) -> list[Cell]:
    """All cells of a preset."""
    size = SIZES[preset]

    def cell(name: str, law: DepthLaw, model: ModelConfig = size.model) -> Cell:
        recipe = Recipe(
            model=model, depth=law, optim=size.optim, steps=size.steps, batch_size=size.batch_size, microbatches=4
        )
        return Cell(name=name, recipe=recipe, task=size.task)

    return [
        cell("mixed", PerExample(max_loops=TRAINED_LOOPS)),
        cell("fixed_1", Fixed(loops=1)),
        cell("fixed_4", Fixed(loops=TRAINED_LOOPS)),
        cell("plain", Fixed(loops=1), dataclasses.replace(size.model, loop=PLAIN)),
    ]
