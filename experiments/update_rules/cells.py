"""The update rules: how the core's proposal joins the state."""

from collections.abc import Mapping

from experiments.bases import plain, reference, variant_cells, with_rule
from experiments.sweep import Cell

VARIANTS = {
    "plain": plain,
    "adaptive_delta": reference,
    "delta": with_rule(update="delta"),
    "residual": with_rule(update="residual"),
    "replace": with_rule(update="replace"),
}
HEADLINE = ["text_plain", "text_adaptive_delta", "text_replace", "chase_adaptive_delta"]


def cells(references: Mapping[str, Cell]) -> list[Cell]:
    """All cells."""
    return variant_cells(VARIANTS, references, headline=HEADLINE, tasks={"text": [*VARIANTS], "chase": [*VARIANTS]})
