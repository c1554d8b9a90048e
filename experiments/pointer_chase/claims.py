"""What was claimed about mixing depths, and what the pointer chase shows of it."""

import numpy as np

from experiments.pointer_chase.cells import TRAINED_LOOPS
from experiments.results import Claim, Results

SOLVED = 0.95
"""Accuracy from which a hop count is called solved."""


def hops_solved(results: Results) -> str:
    """Largest h solved with all smaller ones, at each loop count."""
    solved = results.mean("mixed", "accuracy_by_hops") >= SOLVED
    return ", ".join(map(str, np.cumprod(solved, axis=0).sum(axis=0)))


def _monotone(results: Results) -> str:
    accuracy = results.mean("mixed", "accuracy")
    return " → ".join(f"{value:.3f}" for value in accuracy)


def _specialists(results: Results) -> str:
    one, four, mixed = (results.mean(cell, "accuracy") for cell in ("fixed_1", "fixed_4", "mixed"))
    last = TRAINED_LOOPS - 1
    home = f"{one[0]:.3f} at 1 and {four[last]:.3f} at {TRAINED_LOOPS} loops"
    return f"at home {home}, mixed {mixed[0]:.3f} and {mixed[last]:.3f}; away {one[last]:.3f} and {four[0]:.3f}"


CLAIMS = (
    Claim(
        claim="each loop solves a further hop: with the only attention in the loop, h hops need h loops",
        source="–",
        ours=lambda results: f"{hops_solved(results)} hops at 1–{TRAINED_LOOPS + 2} loops",
        verdict="worked",
    ),
    Claim(
        claim="mixed training improves with every loop and holds beyond the 4 loops it trained at",
        source="text: 1.683 → 1.627 nats at 1–5 loops",
        ours=_monotone,
        verdict="worked",
    ),
    Claim(
        claim="a model trained at one depth wins there and collapses elsewhere",
        source="text, 5 loops: 1.603 at home against 1.627 mixed; 4.242 away",
        ours=_specialists,
        verdict="worked",
    ),
    Claim(
        claim="the mixed model at one loop is as good as a plain one",
        source="text: equal",
        ours=lambda results: (
            f"{results.mean('mixed', 'accuracy')[0]:.3f} against {results.mean('plain', 'accuracy')[0]:.3f}"
        ),
        verdict="mixed",
    ),
)
