"""The two tasks that the questions about elastic depth share, and their reference recipe: text, and the pointer chase.

Text is where the claims were made, the pointer chase where the depth that an answer needs is known. A question's
variants change the reference in one thing: adaptive delta, each row at a loop count of its own, of 1 to K.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from elr_jax.config import ConditioningConfig, ModelConfig
from elr_jax.depth import DepthLaw, Fixed, PerExample
from elr_jax.presets import PLAIN, TINY_CONDITIONING
from elr_jax.train.data import DataConfig
from elr_jax.train.settings import Recipe
from experiments.elastic_text.cells import recipe as text_recipe
from experiments.elastic_text.cells import size_of
from experiments.pointer_chase.cells import cells as chase_cells
from experiments.sweep import Cell, Flags, Preset
from experiments.tasks import Text

Variant = Callable[[Recipe], Recipe]

CONDITION_LR_SCALE = 0.1
"""Chosen on text, seed 0, against 0.3 and 1: the cells `third_rate` and `full_rate` of the question `conditioning`."""


@dataclass(frozen=True, kw_only=True)
class TextFlags(Flags):
    """The common flags and the text."""

    source: str = "stdlib"
    """`stdlib`, or a file or directory of text."""
    tokenizer: str | None = None
    """A Hugging Face `tokenizers` JSON file; bytes without it."""

    @property
    def data(self) -> DataConfig:
        """Settings of the text, cached beside the runs."""
        return DataConfig(source=self.source, tokenizer=self.tokenizer, cache_dir=f"{self.runs}/data_cache")


def references(preset: Preset, data: DataConfig) -> dict[str, Cell]:
    """The reference cell of each task."""
    size = size_of(preset, data)
    law = PerExample(max_loops=size.max_loops, forced=size.forced)
    text = Cell(name="text", recipe=text_recipe(size, law), task=Text(data=size.data), eval_batches=size.eval_batches)
    chase = next(cell for cell in chase_cells(preset) if cell.name == "mixed")
    return {"text": text, "chase": chase}


def variant_cells(
    variants: Mapping[str, Variant],
    references: Mapping[str, Cell],
    *,
    headline: Sequence[str],
    tasks: Mapping[str, Sequence[str]],
) -> list[Cell]:
    """A cell `text_name` or `chase_name` of each variant named for a task; those of `headline` get all seeds."""
    return [
        dataclasses.replace(
            reference,
            name=f"{task}_{name}",
            recipe=variants[name](reference.recipe),
            headline=f"{task}_{name}" in headline,
        )
        for task, reference in references.items()
        for name in tasks[task]
    ]


def reference(recipe: Recipe) -> Recipe:
    """The reference itself."""
    return recipe


def plain(recipe: Recipe) -> Recipe:
    """The same layers, each run once, without a loop rule."""
    return dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, loop=PLAIN), depth=Fixed(loops=1))


def with_law(law: Callable[[int, float], DepthLaw]) -> Variant:
    """Another law of the loop count, given K and the reference's forced share."""

    def change(recipe: Recipe) -> Recipe:
        assert isinstance(recipe.depth, PerExample), "the reference draws per row"
        return dataclasses.replace(recipe, depth=law(recipe.depth.max_loops, recipe.depth.forced))

    return change


def with_rule(**changes: str) -> Variant:
    """Another loop rule."""
    return lambda recipe: with_model(recipe, loop=dataclasses.replace(recipe.model.loop, **changes))


def conditioned(recipe: Recipe, *, lr_scale: float = CONDITION_LR_SCALE, **changes: bool) -> Recipe:
    """Told progress and budget from the first step, with some of it left out; small models get small conditioning."""
    told = TINY_CONDITIONING if recipe.model.d_model <= 128 else ConditioningConfig()
    optim = dataclasses.replace(recipe.optim, condition_lr_scale=lr_scale)
    recipe = dataclasses.replace(recipe, optim=optim)
    return with_model(recipe, conditioning=dataclasses.replace(told, **changes))


def with_model(recipe: Recipe, **changes: object) -> Recipe:
    """Another model."""
    model: ModelConfig = dataclasses.replace(recipe.model, **changes)
    return dataclasses.replace(recipe, model=model)
