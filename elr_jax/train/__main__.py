"""Train a byte-level model on text: `python -m elr_jax.train elastic --launch.out runs/elastic`.

`elastic` and `plain` are the two starting points; `elastic --help` lists the fields that can be changed, and the depth
law comes after them: `elastic --recipe.steps 300 recipe.depth:shared-draw --recipe.depth.max-loops 4`. If the folder
holds checkpoints, the run goes on from the newest.
"""

from collections.abc import Sequence

import tyro
from rich.console import Console
from rich.table import Table

from elr_jax import presets
from elr_jax.depth import Fixed, PerExample
from elr_jax.errors import one_line_errors
from elr_jax.train.evaluate import LoopResult
from elr_jax.train.optim import OptimConfig
from elr_jax.train.runner import train_text
from elr_jax.train.settings import Launch, Recipe, TextRun

OPTIM = OptimConfig(learning_rate=0.02, adam_learning_rate=0.006, warmup_steps=20)
"""The rates that experiments/elastic_text found for `tiny_text`."""
RUNS = {
    "elastic": (
        "adaptive delta, each row at its own 1–4 loops",
        TextRun(
            recipe=Recipe(model=presets.tiny_text(), depth=PerExample(max_loops=4, forced=0.1), optim=OPTIM),
            launch=Launch(out="runs/elastic"),
        ),
    ),
    "plain": (
        "the same layers, each run once",
        TextRun(
            recipe=Recipe(model=presets.tiny_text(presets.PLAIN), depth=Fixed(loops=1), optim=OPTIM),
            launch=Launch(out="runs/plain"),
        ),
    ),
}


def show(results: list[LoopResult]) -> None:
    """Print an evaluation as a table."""
    table = Table("loops", "loss (nats)", "bits per byte", "‖s_k − s_k−1‖ / ‖s_k‖")
    for r in results:
        bits = "–" if r.bits_per_byte is None else f"{r.bits_per_byte:.4f}"
        table.add_row(str(r.loops), f"{r.loss:.4f}", bits, f"{r.residual:.4f}")
    Console().print(table)


def command_line(arguments: Sequence[str] | None = None) -> TextRun:
    """The run that arguments ask for; None: those of this program."""
    choice = tyro.extras.subcommand_type_from_defaults(
        {name: run for name, (_, run) in RUNS.items()}, {name: text for name, (text, _) in RUNS.items()}
    )
    return tyro.cli(choice, prog="python -m elr_jax.train", description=__doc__, args=arguments)


def main() -> None:
    """Read the command line and train."""
    with one_line_errors():
        results = train_text(command_line())
        if results:
            show(results)


if __name__ == "__main__":
    main()
