"""What the lives of a run add up to: the batches behind the final parameters, steps lost, and the table of faults."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.faults.child import LIFE


class Given(NamedTuple):
    """A batch that a step was given."""

    step: int
    digest: str


Lives = list[list[Given]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One fault: what was done, what came of it, and what it cost."""

    fault: str
    done: str
    happened: str
    exit: str = "–"
    lost: str = "–"
    """Steps run again."""
    data: str = "–"
    """Batches that the final parameters have seen twice or never."""
    same: str = "–"
    """Whether the final state is the undisturbed run's, bit for bit."""

    @property
    def as_told(self) -> dict[str, str]:
        """The row by the table's headings."""
        cells = (self.fault, self.done, self.happened, self.exit, self.lost, self.data, self.same)
        return dict(zip(HEADINGS, cells, strict=True))


HEADINGS = ("fault", "done", "happened", "exit", "steps lost", "data twice or never", "final state identical")


def read_lives(notes: Path) -> Lives:
    """The lives of a run from its notes; a life that a kill ended before its first step is empty."""
    lives: Lives = []
    for line in notes.read_text(encoding="utf-8").splitlines():
        if line == LIFE:
            lives.append([])
        else:
            step, digest = line.split()
            lives[-1].append(Given(int(step), digest))
    return lives


def effective(lives: Lives) -> list[Given]:
    """The batches behind the final state: a life that begins at step n undoes what earlier ones did from n on."""
    kept: list[Given] = []
    for life in lives:
        if life:
            kept = [given for given in kept if given.step < life[0].step] + life
    return kept


def lost_steps(lives: Lives) -> list[int]:
    """How many steps each life did in vain: those that a later one did again."""
    begun = [life for life in lives if life]
    return [max(life[-1].step - later[0].step + 1, 0) for life, later in pairwise(begun)]


def seen_wrongly(found: Sequence[Given], straight: Sequence[Given]) -> str:
    """`none`, or which batches of the undisturbed run were seen twice, never, or in another form."""
    counts, expected = Counter(given.step for given in found), {given.step: given.digest for given in straight}
    problems = {
        "twice": [step for step, count in counts.items() if count > 1],
        "never": [step for step in expected if step not in counts],
        "beyond the end": [step for step in counts if step not in expected],
        "another batch": [given.step for given in found if given.digest != expected.get(given.step, given.digest)],
    }
    told = [f"{name}: {', '.join(map(str, sorted(set(steps))))}" for name, steps in problems.items() if steps]
    return "; ".join(told) or "none"


def sound(row: Row) -> bool:
    """Whether a fault cost nothing but steps that were run again: no capitals, which mark what must not be."""
    return row.data in ("none", "–") and not any(_WRONG.search(cell) for cell in (row.happened, row.same))


_WRONG = re.compile(
    r"\b(NO|NOT|CHANGED|SOMETHING ELSE|OUT OF ORDER|ONLY|STARTED ELSEWHERE|CODE WAS RUN|ANOTHER EXIT)\b"
)


def markdown(rows: Iterable[Row], shown: Sequence[str] = HEADINGS) -> str:
    """The rows as a table."""
    lines = [shown, ["---"] * len(shown), *([row.as_told[name] for name in shown] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def document(rows: Sequence[Row], facts: Mapping[str, Any]) -> str:
    """The text of docs/reliability.md."""
    runs = [row for row in rows if row.exit != "–"]
    files = [row for row in rows if row not in runs]
    told = "  ".join(f"{name} {value}" for name, value in facts.items())
    return _TEXT.format(machine=told, runs=markdown(runs), files=markdown(files, HEADINGS[:3]))


_TEXT = """# Reliability

What faults do to a training run. Written by `python -m benchmarks.faults`, which does each of them to real processes;
change the benchmark, not this file. {machine}

The run is a very small elastic model on random tokens, with a save every five steps. Beside the run's folder each
process notes every batch just before its step runs. From the notes of all processes of a run follow the batches behind
its final parameters: a process that goes on from step n undoes what earlier ones did beyond n. They must be those of
the undisturbed run, each once. *Final state* is every bit of parameters, optimizer, step and key; the metrics of every
step and of the final evaluation were equal too. *Steps lost* were run again. Exit status 2 comes with one line on
stderr, quoted here.

## Runs

{runs}

## Files made to do harm

Each file would create another file if code in it were run, or would have one outside its folder read.

{files}

## What this does not show

- A power cut. The system keeps what a killed process wrote; a machine that dies may not. A manifest or array that did
  not reach the disk fails its digest, and the checkpoint before is read.
- Digests find damage, not forgery: whoever can write a checkpoint can seal it. Nothing in it is run, and no name in it
  is followed out of its folder.
- The lock on a run's folder is the file system's. On one without locks a run says so and starts.
- A batch whose gradient is not finite is skipped and counted (`skipped` in `metrics.jsonl`); nothing stops a run whose
  every batch is.
"""
