"""The results file of an experiment: one JSON line per finished cell, only ever appended to."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

FILE = "results.jsonl"
Line = dict[str, Any]
Verdict = Literal["worked", "promising", "mixed", "did not work", "not evaluated"]


def read_lines(path: Path) -> list[Line]:
    """All lines of a results file but one that a kill cut short; [] without a file."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def append_line(path: Path, line: Line) -> None:
    """Add a finished cell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write(("" if whole else "\n") + json.dumps(line) + "\n")


class Results:
    """The lines that count: of each cell those of the recipe run last, and of each seed the newest."""

    def __init__(self, lines: list[Line], preset: str):
        lines = [line for line in lines if line["preset"] == preset]
        digests = {line["cell"]: line["digest"] for line in lines}
        newest = {(line["cell"], line["seed"]): line for line in lines if line["digest"] == digests[line["cell"]]}
        self._lines = list(newest.values())
        self.digests = digests

    @property
    def cells(self) -> list[str]:
        """Names of the cells with a result, in the order they first finished."""
        return list(self.digests)

    @property
    def seconds(self) -> float:
        """Training time of the lines made here, not of those taken over from another experiment."""
        return sum(line["seconds"] for line in self._lines if "from" not in line)

    @property
    def device(self) -> str:
        """Where the lines were made."""
        return ", ".join(sorted({line["device"] for line in self._lines}))

    def of(self, cell: str) -> list[Line]:
        """A cell's lines by seed; a `KeyError` if there are none."""
        lines = sorted((line for line in self._lines if line["cell"] == cell), key=lambda line: line["seed"])
        if not lines:
            raise KeyError(cell)
        return lines

    def values(self, cell: str, metric: str) -> np.ndarray:
        """A metric over seeds: [seeds, loops], or [seeds, …] for a task's own."""
        return np.array([line["metrics"][metric] for line in self.of(cell)], float)

    def mean(self, cell: str, metric: str) -> np.ndarray:
        """The mean of `values` over seeds."""
        return self.values(cell, metric).mean(axis=0)

    def paired(self, cell: str, other: str, metric: str, *, loops: int | None) -> np.ndarray:
        """Differences of two cells at a loop count (None: the last), seed by seed; a plain model has one for all."""

        def at(name: str) -> dict[int, float]:
            values = {line["seed"]: line["metrics"][metric] for line in self.of(name)}
            return {seed: row[min(loops or len(row), len(row)) - 1] for seed, row in values.items()}

        first, second = at(cell), at(other)
        seeds = sorted(first.keys() & second.keys())
        if not seeds:
            raise KeyError(f"{cell} and {other} share no seed")
        return np.array([first[seed] - second[seed] for seed in seeds])


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim of the source, its number, and how ours follows from the results. The verdict is a person's."""

    claim: str
    source: str
    ours: Callable[[Results], str]
    verdict: Verdict = "not evaluated"

    def judge(self, results: Results) -> tuple[str, str]:
        """Our number and the verdict; without the cells it needs, neither."""
        try:
            return self.ours(results), self.verdict
        except KeyError:
            return "–", "not evaluated"
