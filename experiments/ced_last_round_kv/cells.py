"""The encoder loop trained at stochastic depth and at one depth alone, and the dense loop."""

import dataclasses
from collections.abc import Mapping

from elr_jax.depth import Fixed, PoissonDepth
from elr_jax.train.settings import Recipe
from experiments.bases import reference, stacked, variant_cells
from experiments.sweep import Cell


def fixed(recipe: Recipe) -> Recipe:
    """Every row at the mean of the stochastic law."""
    assert isinstance(recipe.depth, PoissonDepth), "the reference is stochastic"
    return dataclasses.replace(recipe, depth=Fixed(loops=round(recipe.depth.rate)))


VARIANTS = {"encoder_loop": reference, "encoder_loop_fixed": fixed, "dense_loop": stacked("dense")}
HEADLINE = ["ced_encoder_loop", "ced_encoder_loop_fixed"]


def cells(references: Mapping[str, Cell]) -> list[Cell]:
    """All cells."""
    return variant_cells(VARIANTS, references, headline=HEADLINE, tasks={"ced": [*VARIANTS]})
