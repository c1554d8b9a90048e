"""What was claimed about the loop's place, and what our runs show."""

import numpy as np

from experiments.reporting import Table, mean_and_spread
from experiments.results import Claim, Results

LOOPS = ("dense_loop", "dense_middle_loop", "encoder_loop", "decoder_loop", "yoco_loop")


def best(results: Results, name: str) -> float:
    """Lowest mean bits per byte over the loop counts."""
    return float(results.mean(f"ced_{name}", "bits_per_byte").min())


def _gain(results: Results, plain: str, loop: str) -> str:
    """What the loop's best count gains over the same layers run once, over the seeds that both have."""
    first, second = (
        {line["seed"]: min(line["metrics"]["bits_per_byte"]) for line in results.of(f"ced_{name}")}
        for name in (plain, loop)
    )
    return mean_and_spread(np.array([first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())]))


def tables(results: Results) -> list[Table]:
    """Bits per byte by position, on documents of four training contexts."""
    rows = []
    for name in results.cells:
        values = results.values(name, "bits_by_position")
        parts = values.reshape(len(values), 4, -1).mean(axis=2)
        rows.append([name, *(mean_and_spread(part) for part in parts.T)])
    header = ["bits per byte", *(f"context {k}" for k in (1, 2, 3, 4))]
    return [Table(header, rows)] if rows else []


def _far(results: Results, name: str) -> str:
    values = np.asarray(results.mean(f"ced_{name}", "bits_by_position"))
    return f"{values[: len(values) // 4].mean():.3f} → {values[len(values) // 4 :].mean():.3f}"


CLAIMS = (
    Claim(
        claim="looping the encoder gains far more than looping the decoder",
        source="0.0248 against 0.0068",
        ours=lambda results: (
            f"gain over the same layers run once: encoder {_gain(results, 'plain', 'encoder_loop')}, "
            f"decoder {_gain(results, 'plain', 'decoder_loop')}"
        ),
        verdict="did not work",
    ),
    Claim(
        claim="the encoder loop equals the dense loop, with a sixth of the global cache",
        source="0.8468 against 0.8461",
        ours=lambda results: ", ".join(f"{name} {best(results, name):.3f}" for name in LOOPS[:3]),
        verdict="promising",
    ),
    Claim(
        claim="early layers are the better place in a dense stack",
        source="0.8461 against 0.8514",
        ours=lambda results: (
            f"gain over dense: early {_gain(results, 'dense', 'dense_loop')}, "
            f"middle {_gain(results, 'dense', 'dense_middle_loop')}"
        ),
        verdict="did not work",
    ),
    Claim(
        claim="looping windows alone gains as much within a context and loses it beyond",
        source="0.0239; 30 % of the long-range gain forfeited",
        ours=lambda results: (
            f"gain over YOCO-U run once {_gain(results, 'yoco', 'yoco_loop')}; first context → later ones: "
            + ", ".join(f"{name} {_far(results, name)}" for name in ("encoder_loop", "yoco_loop"))
        ),
        verdict="did not work",
    ),
)
