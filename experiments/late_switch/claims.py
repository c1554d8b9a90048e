"""What was claimed about the late switch, and what our runs show."""

import numpy as np

from experiments.reporting import above, curve
from experiments.results import Claim, Results

STARTS = (0, 25, 50, 75)


def _cost(results: Results, name: str) -> float:
    """Executed training operations over those of the plain model."""
    mean = lambda cell: float(np.mean([line["train_flops"] for line in results.of(cell)]))
    return mean(f"text_{name}") / mean("text_plain")


def _gain(results: Results, name: str) -> float:
    """Bits per byte from one loop to the last."""
    values = results.mean(f"text_{name}", "bits_per_byte")
    return float(values[0] - values[-1])


CLAIMS = (
    Claim(
        claim="mixing in the last quarter alone costs far less",
        source="1.20 instead of 1.79 times the plain model's compute (K = 5)",
        ours=lambda results: (
            "compute over plain: "
            + ", ".join(f"from {start} % {_cost(results, f'after_{start}'):.2f}" for start in STARTS)
        ),
        verdict="worked",
    ),
    Claim(
        claim="it keeps most of what the last loop gains",
        source="84 % of the five-loop gain at a start of 75 %",
        ours=lambda results: (
            "gain from one loop to the last: "
            + ", ".join(f"from {start} % {_gain(results, f'after_{start}'):.3f}" for start in STARTS)
        ),
        verdict="did not work",
    ),
    Claim(
        claim="and costs little loss",
        source="+0.009 nats",
        ours=lambda results: (
            "at the last loop above mixing throughout: "
            + ", ".join(
                f"from {start} % {above(results, f'text_after_{start}', 'text_after_0', loops=None)}"
                for start in STARTS[1:]
            )
        ),
        verdict="mixed",
    ),
    Claim(
        claim="the later the switch, the smaller the tax at one loop",
        source="–",
        ours=lambda results: (
            "one loop above plain: "
            + ", ".join(f"from {start} % {above(results, f'text_after_{start}', 'text_plain')}" for start in STARTS)
        ),
        verdict="did not work",
    ),
    Claim(
        claim="depth that decides can be learnt in the second half",
        source="–",
        ours=lambda results: "; ".join(
            f"from {start} % {curve(results, f'chase_after_{start}', metric='accuracy')}" for start in (0, 50)
        ),
        verdict="promising",
    ),
)
