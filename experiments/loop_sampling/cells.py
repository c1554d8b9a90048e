"""Who shares a draw of the loop count."""

from collections.abc import Mapping

from elr_jax.depth import RotatingSlice, SharedDraw
from experiments.bases import plain, reference, variant_cells, with_law
from experiments.sweep import Cell

VARIANTS = {
    "plain": plain,
    "per_example": reference,
    "slice": with_law(lambda k, forced: RotatingSlice(max_loops=k, forced=forced)),
    "one_draw": with_law(lambda k, forced: SharedDraw(max_loops=k)),
    "one_draw_third": with_law(lambda k, forced: SharedDraw(max_loops=k, one_probability=1 / 3)),
}
HEADLINE = ["text_plain", "text_per_example", "text_one_draw", "chase_per_example"]


def cells(references: Mapping[str, Cell]) -> list[Cell]:
    """All cells."""
    chase = ["plain", "per_example", "one_draw"]
    return variant_cells(VARIANTS, references, headline=HEADLINE, tasks={"text": [*VARIANTS], "chase": chase})
