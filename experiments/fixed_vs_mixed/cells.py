"""Specialists of one loop count against one model of all."""

from collections.abc import Mapping

from elr_jax.depth import Fixed
from experiments.bases import Variant, plain, reference, variant_cells, with_law
from experiments.sweep import Cell


def _fixed(loops: int) -> Variant:
    return with_law(lambda k, forced: Fixed(loops=loops))


def cells(references: Mapping[str, Cell]) -> list[Cell]:
    """All cells, with a specialist for each loop count of the text's reference."""
    most = references["text"].recipe.depth.max_loops
    variants = {"plain": plain, "mixed": reference, **{f"fixed_{k}": _fixed(k) for k in range(1, most + 1)}}
    chase = ["plain", "mixed", "fixed_1", "fixed_4"]
    headline = ["text_plain", "text_mixed", "text_fixed_1", "chase_mixed"]
    return variant_cells(variants, references, headline=headline, tasks={"text": [*variants], "chase": chase})
