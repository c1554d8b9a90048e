"""The source leaves the law of the loop count open; what our runs show of it."""

from experiments.reporting import above, curve
from experiments.results import Claim, Results


def _spent(results: Results, name: str) -> str:
    lines = results.of(f"text_{name}")
    rounds = sum(line["useful_rounds"] for line in lines) / len(lines)
    return f"{name} {curve(results, f'text_{name}')} for {rounds:.2f} rounds a row"


CLAIMS = (
    Claim(
        claim="loops beyond the second earn their training",
        source="open question",
        ours=lambda results: "; ".join(_spent(results, name) for name in ("one_two", "ends", "uniform")),
        verdict="mixed",
    ),
    Claim(
        claim="depths between those trained at come for free",
        source="–",
        ours=lambda results: (
            "trained at the ends only, above the uniform law at two loops "
            f"{above(results, 'text_ends', 'text_uniform', loops=2)}, at three "
            f"{above(results, 'text_ends', 'text_uniform', loops=3)}"
        ),
        verdict="promising",
    ),
    Claim(
        claim="weight on few loops lowers the one-loop tax, weight on many the deep loss",
        source="–",
        ours=lambda results: ", ".join(
            f"{name} {above(results, f'text_{name}', 'text_uniform')} at one and "
            f"{above(results, f'text_{name}', 'text_uniform', loops=None)} at the last"
            for name in ("shallow", "deep")
        ),
        verdict="promising",
    ),
    Claim(
        claim="where depth decides, loops that were never trained still work between and beyond",
        source="–",
        ours=lambda results: "; ".join(
            f"{name} {curve(results, f'chase_{name}', metric='accuracy')}" for name in ("uniform", "one_two", "ends")
        ),
        verdict="mixed",
    ),
)
