"""When mixing begins: from the first step, or late on a model of one loop, with its conditioning grafted then."""

import dataclasses
from collections.abc import Mapping

from elr_jax.depth import Switch
from elr_jax.train.settings import Recipe
from experiments.bases import Variant, conditioned, plain, variant_cells
from experiments.sweep import Cell


def switched(after: float) -> Variant:
    """Conditioned, at one loop for a share of the steps."""

    def change(recipe: Recipe) -> Recipe:
        recipe, law = conditioned(recipe), recipe.depth
        assert not isinstance(law, Switch), "the reference mixes from the first step"
        return dataclasses.replace(recipe, depth=Switch(after=after, law=law)) if after else recipe

    return change


VARIANTS = {"plain": plain, **{f"after_{round(100 * share)}": switched(share) for share in (0.0, 0.25, 0.5, 0.75)}}
HEADLINE = ["text_plain", "text_after_0", "text_after_75"]


def cells(references: Mapping[str, Cell]) -> list[Cell]:
    """All cells."""
    chase = ["plain", "after_0", "after_50"]
    return variant_cells(VARIANTS, references, headline=HEADLINE, tasks={"text": [*VARIANTS], "chase": chase})
