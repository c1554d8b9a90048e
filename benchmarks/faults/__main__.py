"""What faults do to a training run: each is done to real processes, and what came of it goes into docs/reliability.md.

    python -m benchmarks.faults              ten to twenty minutes on two cores
    python -m benchmarks.faults --kills 5    a few minutes

The run is a very small one, compared bit for bit with itself undisturbed. Expect no batch seen twice or never, and the
same final state after every fault; anything else ends the command with status 1.
"""

import datetime
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks.faults import damage, hostile, machine
from benchmarks.faults.kills import killed, steps_for
from benchmarks.faults.lives import SAVE_EVERY, Straight, run_straight
from benchmarks.faults.story import Row, document, sound
from benchmarks.report import CONSOLE, tell_machine, tell_table
from benchmarks.timing import machine as this_machine
from elr_jax.errors import one_line_errors


@dataclass(frozen=True, kw_only=True)
class Faults:
    """How much is tried, and where it is written."""

    kills: int = 50
    """Moments at which the run is killed."""
    steps: int = 30
    """Steps of the run that all other faults happen to."""
    seed: int = 0
    """Of the random moments and places."""
    out: str | None = "docs/reliability.md"
    """The document to write; None writes nothing."""


def main(settings: Faults) -> list[Row]:
    """Try every fault, print the table, write the document, and return the rows."""
    facts = this_machine() | {"date": datetime.date.today().isoformat(), "seed": settings.seed}
    tell_machine(facts)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        rows = []
        for row in _tried(settings, Path(folder)):
            CONSOLE.print(f"{row.fault}: {row.happened}", highlight=False, markup=False)
            rows.append(row)
    tell_table("What faults do to a run", [row.as_told for row in rows])
    if settings.out is not None:
        Path(settings.out).write_text(document(rows, facts), encoding="utf-8")
        CONSOLE.print(f"written to {settings.out}", highlight=False)
    return rows


def _tried(settings: Faults, folder: Path) -> Iterator[Row]:
    straight = run_straight(folder / "short", steps=settings.steps)
    for fault in FAULTS:
        yield fault(straight)
    stopped = damage.stopped_run(straight)
    for name in damage.DAMAGES:
        yield damage.damaged(straight, stopped, name, seed=settings.seed)
    yield damage.all_damaged(straight, stopped)
    yield from hostile.rows(folder / "hostile", stopped)
    if settings.kills:
        long = run_straight(folder / "long", steps=steps_for(settings.kills))
        yield killed(long, kills=settings.kills, seed=settings.seed)


FAULTS: tuple[Callable[[Straight], Row], ...] = (
    lambda straight: machine.full_disk(straight, size="100k", where="during a save"),
    lambda straight: machine.full_disk(straight, size="8k", where="while metrics are written", save_every=None),
    machine.file_limit,
    machine.read_only,
    lambda straight: machine.sigterm(straight, after=SAVE_EVERY + 4, name="in a step"),
    lambda straight: machine.sigterm(straight, after=straight.life.steps, name="in the last step"),
    machine.two_runs,
    machine.changed_launch,
    machine.changed_recipe,
    machine.nan_batch,
    machine.clock_jump,
)


if __name__ == "__main__":
    with one_line_errors():
        found = main(tyro.cli(Faults, description=__doc__, prog="python -m benchmarks.faults"))
        sys.exit(0 if all(map(sound, found)) else 1)
