"""What layers are told of the loop, and what they can do with it."""

from collections.abc import Mapping
from functools import partial

from experiments.bases import conditioned, plain, reference, variant_cells
from experiments.sweep import Cell

VARIANTS = {
    "plain": plain,
    "off": reference,
    "progress": partial(conditioned, budget=False),
    "both": conditioned,
    "no_scale_shift": partial(conditioned, scale_shift=False),
    "no_low_rank": partial(conditioned, low_rank=False),
    "no_rescale": partial(conditioned, rescale=False),
    "third_rate": partial(conditioned, lr_scale=0.3),
    "full_rate": partial(conditioned, lr_scale=1.0),
}
HEADLINE = ["text_plain", "text_off", "text_both", "chase_off"]


def cells(references: Mapping[str, Cell]) -> list[Cell]:
    """All cells."""
    chase = ["plain", "off", "both"]
    return variant_cells(VARIANTS, references, headline=HEADLINE, tasks={"text": [*VARIANTS], "chase": chase})
