"""The elastic recipe on a hybrid of Gated DeltaProduct and attention, beside the same layers each run once."""

from collections.abc import Mapping

from elr_jax.depth import Fixed
from experiments.bases import plain, reference, variant_cells, with_law
from experiments.late_switch.cells import switched
from experiments.sweep import Cell

VARIANTS = {
    "plain": plain,
    "elastic": reference,
    "fixed_4": with_law(lambda k, forced: Fixed(loops=k)),
    "after_75": switched(0.75),
}
HEADLINE = ["hybrid_plain", "hybrid_elastic"]


def cells(references: Mapping[str, Cell]) -> list[Cell]:
    """All cells."""
    return variant_cells(VARIANTS, references, headline=HEADLINE, tasks={"hybrid": [*VARIANTS]})
