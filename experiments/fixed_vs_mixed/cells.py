"""Specialists of one loop count against one model of all."""

from collections.abc import Mapping

from elr_jax.depth import Fixed
from experiments.bases import Variant, plain, reference, variant_cells, with_law
from experiments.sweep import Cell


def _fixed(loops: int) -> Variant:
    return with_law(lambda k, forced: Fixed(loops=loops))


VARIANTS = {"plain": plain, "mixed": reference, **{f"fixed_{k}": _fixed(k) for k in (1, 2, 3, 4)}}
HEADLINE = ["text_plain", "text_mixed", "text_fixed_1", "text_fixed_4", "chase_mixed"]


def cells(references: Mapping[str, Cell]) -> list[Cell]:
    """All cells."""
    chase = ["plain", "mixed", "fixed_1", "fixed_4"]
    return variant_cells(VARIANTS, references, headline=HEADLINE, tasks={"text": [*VARIANTS], "chase": chase})
