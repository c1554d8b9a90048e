"""What was claimed about recall, and what our runs show."""

from experiments.reporting import Table, mean_and_spread
from experiments.results import Claim, Results


def tables(results: Results) -> list[Table]:
    """Bits per byte that a copy saves, by its distance in lengths of the passage."""
    rows = [[name, *map(mean_and_spread, results.values(name, "copy_gain").T)] for name in results.cells]
    counts = range(1, len(rows[0])) if rows else []
    return [Table(["saved on a copy at a distance of", *map(str, counts)], rows)] if rows else []


def _far(results: Results, *names: str) -> str:
    """The mean over distances that no window reaches: of three lengths and more."""
    shown = (
        f"{name} {mean_and_spread(results.values(f'ced_{name}', 'copy_gain')[:, 2:].mean(axis=1))}" for name in names
    )
    return "saved beyond the window: " + ", ".join(shown)


CLAIMS = (
    Claim(
        claim="looping the encoder removes the encoder-decoder's recall deficit, looping the decoder barely does",
        source="−0.084 to −0.160 bits per byte on a copy test",
        ours=lambda results: _far(results, "dense", "dense_loop", "plain", "encoder_loop", "decoder_loop"),
    ),
    Claim(
        claim="looping windows alone recalls worst of the loops",
        source="YOCO-U loop",
        ours=lambda results: _far(results, "yoco", "yoco_loop", "encoder_loop"),
    ),
)
