"""What layers are told of the loop, and what they can do with it."""

import dataclasses
from collections.abc import Mapping

from elr_jax.presets import TINY_CONDITIONING
from experiments.bases import Variant, plain, reference, variant_cells, with_model
from experiments.sweep import Cell


def conditioned(**changes: bool) -> Variant:
    """Conditioning from the first step, with some of it left out."""
    told = dataclasses.replace(TINY_CONDITIONING, **changes)
    return lambda recipe: with_model(recipe, conditioning=told)


VARIANTS = {
    "plain": plain,
    "off": reference,
    "progress": conditioned(budget=False),
    "both": conditioned(),
    "no_scale_shift": conditioned(scale_shift=False),
    "no_low_rank": conditioned(low_rank=False),
    "no_rescale": conditioned(rescale=False),
}
HEADLINE = ["text_plain", "text_off", "text_progress", "text_both", "chase_off"]


def cells(references: Mapping[str, Cell]) -> list[Cell]:
    """All cells."""
    chase = ["plain", "off", "progress", "both"]
    return variant_cells(VARIANTS, references, headline=HEADLINE, tasks={"text": [*VARIANTS], "chase": chase})
