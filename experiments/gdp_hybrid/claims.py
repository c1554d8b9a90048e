"""What was claimed about elastic depth on the hybrid, and what our runs show."""

from experiments.reporting import above, curve
from experiments.results import Claim

CLAIMS = (
    Claim(
        claim="the hybrid serves every loop count from one checkpoint, better with each loop",
        source="Koi-4B, 1 to 4 loops",
        ours=lambda results: f"{curve(results, 'hybrid_elastic')}; plain {curve(results, 'hybrid_plain')}",
        verdict="mixed",
    ),
    Claim(
        claim="at one loop it equals its plain baseline",
        source="–",
        ours=lambda results: f"one loop above plain: {above(results, 'hybrid_elastic', 'hybrid_plain')}",
        verdict="did not work",
    ),
    Claim(
        claim="recurrent states gain from loops at all: a specialist of four loops beats the plain model",
        source="–",
        ours=lambda results: (
            f"trained at four {curve(results, 'hybrid_fixed_4')}; plain {curve(results, 'hybrid_plain')}"
        ),
        verdict="promising",
    ),
    Claim(
        claim="mixing in the last quarter alone keeps one loop near the baseline",
        source="4B and 30B-A3B switch after 75 %",
        ours=lambda results: (
            f"{curve(results, 'hybrid_after_75')}; one loop above plain "
            f"{above(results, 'hybrid_after_75', 'hybrid_plain')}"
        ),
        verdict="did not work",
    ),
)
