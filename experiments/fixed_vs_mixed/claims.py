"""What was claimed about specialists and mixed training, and what our runs show."""

from experiments.reporting import above, curve
from experiments.results import Claim, Results


def _at(results: Results, cell: str, loops: int) -> str:
    return f"{results.mean(cell, 'bits_per_byte')[loops - 1]:.3f}"


def _home(results: Results) -> str:
    return ", ".join(
        f"at {k} loop{'s' * (k > 1)} {_at(results, f'text_fixed_{k}', k)} against {_at(results, 'text_mixed', k)}"
        for k in (1, 2, 3, 4)
    )


CLAIMS = (
    Claim(
        claim="a specialist beats the mixed model at its own loop count",
        source="1.603 against 1.627 nats at 5 loops",
        ours=lambda results: f"specialist against mixed: {_home(results)}",
        verdict="worked",
    ),
    Claim(
        claim="away from home a specialist collapses",
        source="the one-loop model reads 4.242 nats at 5 loops",
        ours=lambda results: (
            f"trained at 1: {curve(results, 'text_fixed_1')}; trained at 4: {curve(results, 'text_fixed_4')}"
        ),
        verdict="worked",
    ),
    Claim(
        claim="the mixed model improves with every loop",
        source="1.683 → 1.627 nats at 1–5",
        ours=lambda results: f"{curve(results, 'text_mixed')}; plain {curve(results, 'text_plain')}",
        verdict="mixed",
    ),
    Claim(
        claim="trained at one loop only, the gated model beats the plain one",
        source="1.660 against 1.685 nats",
        ours=lambda results: f"{above(results, 'text_fixed_1', 'text_plain')} at one loop",
        verdict="did not work",
    ),
    Claim(
        claim="where depth decides, the mixed model is as good as each specialist at home and holds away",
        source="–",
        ours=lambda results: "; ".join(
            f"{name} {curve(results, f'chase_{name}', metric='accuracy')}" for name in ("mixed", "fixed_1", "fixed_4")
        ),
        verdict="worked",
    ),
)
