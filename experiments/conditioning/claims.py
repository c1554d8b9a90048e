"""What was claimed about conditioning, and what our runs show."""

from experiments.reporting import above, curve
from experiments.results import Claim, Results


def _against_off(results: Results, name: str) -> str:
    one, last = (above(results, f"text_{name}", "text_off", loops=k) for k in (1, None))
    return f"{one} at one loop and {last} at the last"


CLAIMS = (
    Claim(
        claim="told progress and budget, the model is better at every loop count",
        source="–",
        ours=lambda results: f"both against off: {_against_off(results, 'both')}; {curve(results, 'text_both')}",
        verdict="did not work",
    ),
    Claim(
        claim="the budget adds to the progress",
        source="–",
        ours=lambda results: (
            f"progress alone against off: {_against_off(results, 'progress')}; both: {_against_off(results, 'both')}"
        ),
        verdict="promising",
    ),
    Claim(
        claim="each of the three ways in is needed",
        source="–",
        ours=lambda results: (
            "against both, at one loop and at the last: "
            + ", ".join(
                f"{name} {above(results, f'text_{name}', 'text_both')} and "
                f"{above(results, f'text_{name}', 'text_both', loops=None)}"
                for name in ("no_scale_shift", "no_low_rank", "no_rescale")
            )
        ),
        verdict="did not work",
    ),
    Claim(
        claim="where depth decides, conditioning does no harm",
        source="–",
        ours=lambda results: "; ".join(
            f"{name} {curve(results, f'chase_{name}', metric='accuracy')}" for name in ("off", "both")
        ),
        verdict="mixed",
    ),
)
