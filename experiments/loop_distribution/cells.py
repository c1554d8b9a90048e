"""Which loop counts a model trains at: what are loops three and four for?"""

from collections.abc import Callable, Mapping

from elr_jax.depth import Weighted
from experiments.bases import Variant, plain, reference, variant_cells, with_law
from experiments.sweep import Cell


def weighted(weight: Callable[[int, int], float]) -> Variant:
    """Each row draws k of 1 … K with a probability in proportion to `weight(k, K)`."""

    def law(most: int, forced: float) -> Weighted:
        weights = [weight(k, most) for k in range(1, most + 1)]
        return Weighted(probabilities=tuple(each / sum(weights) for each in weights))

    return with_law(law)


VARIANTS = {
    "plain": plain,
    "uniform": reference,
    "shallow": weighted(lambda k, most: 2.0 ** (1 - k)),
    "deep": weighted(lambda k, most: 2.0 ** (k - most)),
    "one_two": weighted(lambda k, most: float(k <= 2)),
    "ends": weighted(lambda k, most: float(k in (1, most))),
}
HEADLINE = ["text_plain", "text_uniform", "text_one_two", "chase_uniform"]


def cells(references: Mapping[str, Cell]) -> list[Cell]:
    """All cells."""
    chase = ["uniform", "one_two", "ends"]
    return variant_cells(VARIANTS, references, headline=HEADLINE, tasks={"text": [*VARIANTS], "chase": chase})
