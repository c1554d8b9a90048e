"""What was claimed about prompts of fewer rounds, and what our runs show."""

from experiments.reporting import Table, mean_and_spread
from experiments.results import Claim, Results


def tables(results: Results) -> list[Table]:
    """Bits per byte of a second half at K rounds, by the rounds of the first."""
    looped = [name for name in results.cells if name.endswith("_loop")]
    rows = [[name, *map(mean_and_spread, results.values(name, "prefill_bits").T)] for name in looped]
    if not rows:
        return []
    counts = range(1, len(rows[0]))
    return [Table(["second half, after a first at", *(f"{k} round{'s' * (k > 1)}" for k in counts)], rows)]


def _lost(results: Results, name: str) -> str:
    """Bits per byte that a prompt in 1 … K rounds costs its continuation, against K."""
    values = results.values(f"ced_{name}", "prefill_bits")
    return " / ".join(mean_and_spread(column, digits=4) for column in (values - values[:, -1:]).T[:-1])


CLAIMS = (
    Claim(
        claim="half the rounds for the prompt keep 99 % of the gain",
        source="5.1 → 2.7 times the prefill cost",
        ours=lambda results: f"lost by prompts in 1 / 2 / 3 rounds against 4: {_lost(results, 'encoder_loop')}",
        verdict="promising",
    ),
    Claim(
        claim="and so for the dense loop",
        source="–",
        ours=lambda results: f"lost by prompts in 1 / 2 / 3 rounds against 4: {_lost(results, 'dense_loop')}",
        verdict="promising",
    ),
)
