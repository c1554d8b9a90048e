"""What was claimed about replayed routes, and what our runs show."""

import numpy as np

from experiments.reporting import Table, above, curve, loops_table, mean_and_spread
from experiments.results import Claim, Results


def tables(results: Results) -> list[Table]:
    """How routes change from round to round, and what it costs to switch after training."""
    trained = [name for name in ("moe_fresh", "moe_replay") if name in results.cells]
    metrics = ("overlap", "cosine", "switch_cost")
    return [loops_table(results, trained, metric, costs=False) for metric in metrics] if trained else []


def _time(results: Results) -> str:
    ratios = np.concatenate([results.values(name, "replay_time") for name in ("moe_fresh", "moe_replay")])
    return mean_and_spread(ratios)


CLAIMS = (
    Claim(
        claim="replaying the first round's routes costs little loss",
        source="+0.0038 nats",
        ours=lambda results: (
            "bits per byte above fresh routes: "
            + ", ".join(
                f"{above(results, 'moe_replay', 'moe_fresh', loops=k)} at {k} loop{'s' * (k > 1)}" for k in (1, 2, 3, 4)
            )
        ),
        verdict="promising",
    ),
    Claim(
        claim="and saves time in training",
        source="update time −11.7 %",
        ours=lambda results: f"a step's time over that with fresh routes {_time(results)}",
        verdict="did not work",
    ),
    Claim(
        claim="tokens keep half of their first experts by the fourth loop",
        source="53 %",
        ours=lambda results: f"kept at 1 to 4 loops {curve(results, 'moe_fresh', metric='overlap')}",
        verdict="mixed",
    ),
    Claim(
        claim="replayed outputs stay close to fresh ones",
        source="cosine 0.77",
        ours=lambda results: (
            f"cosine, trained with fresh routes {curve(results, 'moe_fresh', metric='cosine')}, "
            f"with replayed ones {curve(results, 'moe_replay', metric='cosine')}"
        ),
        verdict="worked",
    ),
)
