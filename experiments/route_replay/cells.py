"""Mixtures of experts in the loop: routes chosen anew in every round, or replayed from the first."""

import dataclasses
from collections.abc import Mapping

from elr_jax.train.settings import Recipe
from experiments.bases import Variant, plain, variant_cells, with_model
from experiments.sweep import Cell


def _routes(*, replay: bool) -> Variant:
    def change(recipe: Recipe) -> Recipe:
        assert recipe.model.moe is not None, "the reference has mixtures of experts"
        return with_model(recipe, moe=dataclasses.replace(recipe.model.moe, replay=replay))

    return change


VARIANTS = {"plain": plain, "fresh": _routes(replay=False), "replay": _routes(replay=True)}
HEADLINE = ["moe_fresh", "moe_replay"]


def cells(references: Mapping[str, Cell]) -> list[Cell]:
    """All cells."""
    return variant_cells(VARIANTS, references, headline=HEADLINE, tasks={"moe": [*VARIANTS]})
