"""What was claimed about update rules, and what our runs show."""

import numpy as np

from experiments.reporting import above, curve
from experiments.results import Claim, Results

RULES = ("adaptive_delta", "delta", "residual", "replace")


def _above_plain(results: Results) -> str:
    return ", ".join(f"{name} {above(results, f'text_{name}', 'text_plain')}" for name in RULES)


def _lowest(results: Results) -> str:
    curves = np.stack([results.mean(f"text_{name}", "bits_per_byte") for name in RULES])
    return ", ".join(f"{RULES[best]} at {k}" for k, best in enumerate(curves.argmin(axis=0), start=1))


CLAIMS = (
    Claim(
        claim="only the adaptive delta matches the plain model at one loop; replace is worst there",
        source="1.683 against 1.685 nats; the others above",
        ours=lambda results: f"one loop above plain: {_above_plain(results)}",
        verdict="mixed",
    ),
    Claim(
        claim="the adaptive delta has the lowest loss at every loop count",
        source="lowest at 1–5",
        ours=lambda results: f"lowest: {_lowest(results)}",
        verdict="promising",
    ),
    Claim(
        claim="replace gets worse with the last loop, residual stops gaining after three",
        source="replace worsens from 4 to 5",
        ours=lambda results: f"replace {curve(results, 'text_replace')}; residual {curve(results, 'text_residual')}",
        verdict="mixed",
    ),
    Claim(
        claim="where depth decides, every rule uses it; the gate alone holds beyond the loops it trained at",
        source="–",
        ours=lambda results: "; ".join(
            f"{name} {curve(results, f'chase_{name}', metric='accuracy')}" for name in RULES
        ),
        verdict="mixed",
    ),
)
