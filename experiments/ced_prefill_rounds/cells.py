"""The looped causal encoder-decoder and the looped dense stack, and each run once."""

from collections.abc import Mapping

from experiments.bases import reference, stacked, variant_cells
from experiments.sweep import Cell

VARIANTS = {
    "plain": stacked("encoder", looped=False),
    "encoder_loop": reference,
    "dense": stacked("dense", looped=False),
    "dense_loop": stacked("dense"),
}
HEADLINE = ["ced_plain", "ced_encoder_loop"]


def cells(references: Mapping[str, Cell]) -> list[Cell]:
    """All cells."""
    return variant_cells(VARIANTS, references, headline=HEADLINE, tasks={"ced": [*VARIANTS]})
