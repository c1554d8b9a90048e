"""Dense stacks, the causal encoder-decoder and YOCO-U, looped in several places and not at all."""

from collections.abc import Mapping

from experiments.bases import stacked, variant_cells
from experiments.sweep import Cell

VARIANTS = {
    "dense": stacked("dense", looped=False),
    "dense_loop": stacked("dense"),
    "dense_middle_loop": stacked("dense_middle"),
    "plain": stacked("encoder", looped=False),
    "encoder_loop": stacked("encoder"),
    "decoder_loop": stacked("decoder"),
    "yoco": stacked("yoco", looped=False),
    "yoco_loop": stacked("yoco"),
}
HEADLINE = ["ced_plain", "ced_dense_loop", "ced_encoder_loop", "ced_decoder_loop"]


def cells(references: Mapping[str, Cell]) -> list[Cell]:
    """All cells."""
    return variant_cells(VARIANTS, references, headline=HEADLINE, tasks={"ced": [*VARIANTS]})
