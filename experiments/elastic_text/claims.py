"""What was claimed about elastic depth on text, and what our runs show of it. Numbers are bits per byte here."""

from experiments.reporting import above, curve
from experiments.results import Claim

CLAIMS = (
    Claim(
        claim="the adaptive delta matches the plain model at one loop; replacing the state does worst there",
        source="equal; replace above it at every depth",
        ours=lambda results: (
            f"one loop above plain: adaptive delta {above(results, 'per_example')}, replace {above(results, 'replace')}"
        ),
        verdict="mixed",
    ),
    Claim(
        claim="mixed training improves with every loop",
        source="1.683 → 1.627 nats at 1–5 loops",
        ours=lambda results: f"{curve(results, 'per_example')}; plain {curve(results, 'plain')}",
        verdict="mixed",
    ),
    Claim(
        claim="a model of one depth wins at home and collapses away",
        source="1.603 against 1.627 nats at home; 4.242 away",
        ours=lambda results: (
            f"trained at 4: {curve(results, 'fixed_4')}; trained at 1: {curve(results, 'one_loop_gated')}; "
            f"mixed: {curve(results, 'per_example')}"
        ),
    ),
    Claim(
        claim="trained at one loop only, the gated model beats the plain one",
        source="1.660 against 1.685 nats",
        ours=lambda results: f"{above(results, 'one_loop_gated')} at one loop",
    ),
    Claim(
        claim="one draw a step leaves a tax at one loop; mixing depths inside the step does not",
        source="1.6871 against 1.683 nats; plain 1.685",
        ours=lambda results: (
            f"one loop above plain: one draw {above(results, 'shared')}, per example {above(results, 'per_example')}"
        ),
        verdict="promising",
    ),
    Claim(
        claim="the tax shrinks with training",
        source="–",
        ours=lambda results: (
            f"one loop above plain: {above(results, 'per_example')} at 300 steps, "
            f"{above(results, 'steps_x2', 'plain_steps_x2')} at 600; with the small core "
            f"{above(results, 'small_core')} and {above(results, 'small_core_steps_x2', 'plain_steps_x2')}"
        ),
        verdict="promising",
    ),
    Claim(
        claim="where the loop stands decides most of the tax",
        source="–",
        ours=lambda results: (
            f"one loop above plain: core of half the blocks {above(results, 'per_example')}, "
            f"of a quarter {above(results, 'small_core')}"
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
