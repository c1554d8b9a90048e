"""What the questions about elastic depth share: their tasks, and the reference recipe that a variant changes.

Text is where the claims were made, the pointer chase where the depth that an answer needs is known. `hybrid` and `moe`
are the text again, for Koi's layers and for the same with mixtures of experts. The reference has adaptive delta and
each row at a loop count of its own, of 1 to K; a question's variants change it in one thing.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from elr_jax.config import AttentionConfig, ConditioningConfig, MLPConfig, ModelConfig
from elr_jax.depth import DepthLaw, Fixed, PerExample, PoissonDepth
from elr_jax.presets import (
    PLAIN,
    TINY_CONDITIONING,
    CedStack,
    ced,
    elr_30b_a3b,
    koi_4b,
    tiny_ced,
    tiny_hybrid,
    tiny_moe,
)
from elr_jax.train.data import DataConfig
from elr_jax.train.settings import Recipe
from experiments.elastic_text.cells import Size, size_of
from experiments.elastic_text.cells import recipe as text_recipe
from experiments.looped_text import LoopedText
from experiments.pointer_chase.cells import cells as chase_cells
from experiments.sweep import Cell, Flags, Preset
from experiments.tasks import RoutedText, Text

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
    own = {}
    for name, model in backbones(preset).items():
        recipe = text_recipe(size, PerExample(max_loops=model.loop.max_loops, forced=0.1), model)
        if preset == "cpu":  # these layers are 2 to 4 times slower there than attention and MLPs
            steps = 120 if model.moe else 200
            recipe = dataclasses.replace(recipe, steps=steps, batch_size=8, microbatches=2)
        task = RoutedText(data=size.data) if model.moe else text.task
        own[name] = dataclasses.replace(text, recipe=recipe, task=task)
    return {"text": text, "chase": chase, **own, "ced": _encoder_decoder(preset, size, text)}


def _encoder_decoder(preset: Preset, size: Size, text: Cell) -> Cell:
    """The causal encoder-decoder with its encoder looped, at stochastic depth."""
    model = ced("encoder") if preset == "paper" else tiny_ced("encoder")
    recipe = dataclasses.replace(text_recipe(size, PoissonDepth(rate=4, max_loops=8), model), backprop_loops=4)
    task = LoopedText(data=size.data, rounds=4)
    if preset == "paper":  # 40 tokens a parameter
        recipe = dataclasses.replace(recipe, depth=PoissonDepth(rate=8, max_loops=24), steps=12_000)
        task = dataclasses.replace(task, rounds=8, copied=128)
    elif preset == "cpu":
        recipe = dataclasses.replace(recipe, steps=200, batch_size=8, microbatches=2)
    else:
        attention = AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8, window=4)
        recipe = with_model(recipe, d_model=16, attention=attention, mlp=MLPConfig(d_ff=32, kind="squared_relu"))
        task = dataclasses.replace(task, chunk=4, copied=4)
    return dataclasses.replace(text, recipe=recipe, task=task)


def stacked(stack: CedStack, *, looped: bool = True) -> Variant:
    """Other layers of the causal encoder-decoder's family; every layer once where it is not looped."""

    def change(recipe: Recipe) -> Recipe:
        make = tiny_ced if recipe.model.d_model <= 128 else ced
        other = make(stack)
        recipe = with_model(recipe, prelude=other.prelude, core=other.core, coda=other.coda)
        return recipe if looped else dataclasses.replace(plain(recipe), backprop_loops=None)

    return change


def backbones(preset: Preset) -> dict[str, ModelConfig]:
    """Koi's layers and those of the 30B-A3B at a preset's size."""
    if preset == "paper":
        return {"hybrid": koi_4b(), "moe": elr_30b_a3b()}
    models = {"hybrid": tiny_hybrid(), "moe": tiny_moe()}
    return {name: _narrow(model) for name, model in models.items()} if preset == "smoke" else models


def _narrow(model: ModelConfig) -> ModelConfig:
    """The same layers of width 16."""
    assert model.delta is not None
    return dataclasses.replace(
        model,
        d_model=16,
        attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8, rope_base=None),
        mlp=MLPConfig(d_ff=32, kind=model.mlp.kind),
        delta=dataclasses.replace(model.delta, num_heads=2, num_key_heads=1, key_dim=8, value_dim=8),
        moe=model.moe and dataclasses.replace(model.moe, d_expert=8, d_shared=16),
    )


def variant_cells(
    variants: Mapping[str, Variant],
    references: Mapping[str, Cell],
    *,
    headline: Sequence[str],
    tasks: Mapping[str, Sequence[str]],
) -> list[Cell]:
    """A cell `task_name` of each variant named for a task; those of `headline` get all seeds."""
    return [
        dataclasses.replace(
            references[task],
            name=f"{task}_{name}",
            recipe=variants[name](references[task].recipe),
            headline=f"{task}_{name}" in headline,
        )
        for task, names in tasks.items()
        for name in names
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
