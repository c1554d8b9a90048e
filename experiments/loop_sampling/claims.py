"""What was claimed about sampling loop counts, and what our runs show."""

import numpy as np

from experiments.reporting import above, curve
from experiments.results import Claim, Results


def _best(results: Results, name: str) -> str:
    return f"{results.mean(f'text_{name}', 'bits_per_byte').min():.3f}"


def _rounds(results: Results, name: str) -> str:
    lines = results.of(f"text_{name}")
    executed, useful = (np.mean([line[key] for line in lines]) for key in ("executed_rounds", "useful_rounds"))
    return f"{executed:.2f} for {useful:.2f}"


CLAIMS = (
    Claim(
        claim="one draw a step leaves the one-loop loss above the plain model's; mixing inside the step does not",
        source="1.6871 against 1.685 nats; rotating slice 1.683",
        ours=lambda results: (
            "one loop above plain: "
            + ", ".join(
                f"{name} {above(results, f'text_{name}', 'text_plain')}"
                for name in ("one_draw", "one_draw_third", "slice", "per_example")
            )
        ),
        verdict="mixed",
    ),
    Claim(
        claim="a third of one-loop steps mends it only in part, and costs depth",
        source="–",
        ours=lambda results: (
            f"one draw {curve(results, 'text_one_draw')}; with a third {curve(results, 'text_one_draw_third')}"
        ),
        verdict="did not work",
    ),
    Claim(
        claim="draws for each row reach the lowest loss",
        source="–",
        ours=lambda results: (
            "best loop count: "
            + ", ".join(f"{name} {_best(results, name)}" for name in ("per_example", "slice", "one_draw"))
        ),
        verdict="worked",
    ),
    Claim(
        claim="sorted into microbatches, draws for each row run few rounds in vain",
        source="–",
        ours=lambda results: (
            "rounds run and needed by a row: "
            + ", ".join(f"{name} {_rounds(results, name)}" for name in ("per_example", "slice", "one_draw"))
        ),
        verdict="worked",
    ),
)
