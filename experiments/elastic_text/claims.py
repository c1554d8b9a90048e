"""What was claimed about elastic depth on text, and what our runs show of it. Numbers are bits per byte here."""

import numpy as np

from experiments.results import Claim, Results


def _curve(results: Results, cell: str) -> str:
    return " / ".join(f"{value:.3f}" for value in results.mean(cell, "bits_per_byte"))


def _tax(results: Results, cell: str, other: str = "plain") -> str:
    """One-loop loss above another cell's, over the seeds both have."""
    difference = _paired(results, cell, other)
    spread = f" ±{difference.std(ddof=1):.3f}" if len(difference) > 1 else ""
    return f"{difference.mean():+.3f}{spread}"


def _paired(results: Results, cell: str, other: str) -> np.ndarray:
    """Difference at one loop, seed by seed."""
    one_loop = lambda name: {line["seed"]: line["metrics"]["bits_per_byte"][0] for line in results.of(name)}
    first, second = one_loop(cell), one_loop(other)
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        raise KeyError(f"{cell} and {other} share no seed")
    return np.array([first[seed] - second[seed] for seed in seeds])


CLAIMS = (
    Claim(
        claim="the adaptive delta matches the plain model at one loop; replacing the state does worst there",
        source="equal; replace above it at every depth",
        ours=lambda results: (
            f"one loop above plain: adaptive delta {_tax(results, 'per_example')}, replace {_tax(results, 'replace')}"
        ),
        verdict="mixed",
    ),
    Claim(
        claim="mixed training improves with every loop",
        source="1.683 → 1.627 nats at 1–5 loops",
        ours=lambda results: f"{_curve(results, 'per_example')}; plain {_curve(results, 'plain')}",
        verdict="mixed",
    ),
    Claim(
        claim="a model of one depth wins at home and collapses away",
        source="1.603 against 1.627 nats at home; 4.242 away",
        ours=lambda results: (
            f"trained at 4: {_curve(results, 'fixed_4')}; trained at 1: {_curve(results, 'one_loop_gated')}; "
            f"mixed: {_curve(results, 'per_example')}"
        ),
    ),
    Claim(
        claim="trained at one loop only, the gated model beats the plain one",
        source="1.660 against 1.685 nats",
        ours=lambda results: f"{_tax(results, 'one_loop_gated')} at one loop",
    ),
    Claim(
        claim="one draw a step leaves a tax at one loop; mixing depths inside the step does not",
        source="1.6871 against 1.683 nats; plain 1.685",
        ours=lambda results: (
            f"one loop above plain: one draw {_tax(results, 'shared')}, per example {_tax(results, 'per_example')}"
        ),
        verdict="promising",
    ),
    Claim(
        claim="the tax shrinks with training",
        source="–",
        ours=lambda results: (
            f"one loop above plain: {_tax(results, 'per_example')} at 300 steps, "
            f"{_tax(results, 'steps_x2', 'plain_steps_x2')} at 600; with the small core "
            f"{_tax(results, 'small_core')} and {_tax(results, 'small_core_steps_x2', 'plain_steps_x2')}"
        ),
        verdict="promising",
    ),
    Claim(
        claim="where the loop stands decides most of the tax",
        source="–",
        ours=lambda results: (
            f"one loop above plain: core of half the blocks {_tax(results, 'per_example')}, "
            f"of a quarter {_tax(results, 'small_core')}"
        ),
        verdict="worked",
    ),
    Claim(
        claim="at equal training compute the loops still pay",
        source="–",
        ours=lambda results: (
            f"best of per example {results.mean('per_example', 'bits_per_byte').min():.3f}, "
            f"plain with the same compute {results.mean('plain_equal_compute', 'bits_per_byte')[0]:.3f}"
        ),
        verdict="did not work",
    ),
)
