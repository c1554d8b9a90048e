"""Which loop counts a model trains at: what are loops three and four for?"""

from collections.abc import Mapping

from elr_jax.depth import Weighted
from experiments.bases import Variant, plain, reference, variant_cells, with_law
from experiments.sweep import Cell


def weighted(*probabilities: float) -> Variant:
    """Each row draws its loop count with these probabilities."""
    return with_law(lambda k, forced: Weighted(probabilities=probabilities))


VARIANTS = {
    "plain": plain,
    "uniform": reference,
    "shallow": weighted(0.5, 0.3, 0.15, 0.05),
    "deep": weighted(0.15, 0.15, 0.2, 0.5),
    "one_two": weighted(0.5, 0.5, 0.0, 0.0),
    "one_four": weighted(0.5, 0.0, 0.0, 0.5),
}
HEADLINE = ["text_plain", "text_uniform", "text_one_two", "text_one_four", "chase_uniform"]


def cells(references: Mapping[str, Cell]) -> list[Cell]:
    """All cells."""
    chase = ["uniform", "one_two", "one_four"]
    return variant_cells(VARIANTS, references, headline=HEADLINE, tasks={"text": [*VARIANTS], "chase": chase})
