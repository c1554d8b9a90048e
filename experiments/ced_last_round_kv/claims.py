"""What was claimed about caches of the last round, and what our runs show."""

from experiments.reporting import Table, mean_and_spread
from experiments.results import Claim, Results

MEASURES = ("contraction", "settled", "cycling")


def _cost(results: Results, name: str) -> str:
    """Bits per byte that a cache of the last round adds to one of every round."""
    values = results.values(f"ced_{name}", "cache_bits")
    return mean_and_spread(values[:, 1] - values[:, 0], digits=4)


def tables(results: Results) -> list[Table]:
    """Caches, and the motion of the state in 32 rounds."""
    rows = []
    for name in results.cells:
        caches = results.values(name, "cache_bits")
        rows.append(
            [
                name,
                *(mean_and_spread(column, digits=4) for column in caches.T),
                *(mean_and_spread(results.values(name, measure)) for measure in MEASURES),
                f"{results.mean(name, 'residuals')[-1]:.1e}",
            ]
        )
    header = ["", "bits per byte, cache per round", "last round", "contraction", "settled", "cycling", "residual 32"]
    return [Table(header, rows)] if rows else []


CLAIMS = (
    Claim(
        claim="after stochastic depth a cache of the last round alone loses nothing",
        source="−0.0002",
        ours=lambda results: (
            f"last round minus per round: encoder loop {_cost(results, 'encoder_loop')}, "
            f"dense loop {_cost(results, 'dense_loop')}"
        ),
        verdict="promising",
    ),
    Claim(
        claim="after training at one depth it fails",
        source="+0.0317",
        ours=lambda results: f"last round minus per round {_cost(results, 'encoder_loop_fixed')}",
        verdict="worked",
    ),
    Claim(
        claim="stochastic depth makes the state settle, one depth makes it cycle",
        source="contraction towards a fixed point; a limit cycle of period 4",
        ours=lambda results: "; ".join(
            f"{name}: contraction {results.mean(f'ced_{name}', 'contraction'):.3f}, settled "
            f"{results.mean(f'ced_{name}', 'settled'):.2f}, cycling {results.mean(f'ced_{name}', 'cycling'):.2f}"
            for name in ("encoder_loop", "encoder_loop_fixed")
        ),
        verdict="mixed",
    ),
)
