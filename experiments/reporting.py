"""What all reports share: tables and figures."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table as RichTable

from experiments.results import Claim, Results
from experiments.sweep import Cell

NO_VALUE = "–"


@dataclass(frozen=True)
class Table:
    """Cells of text under a header, for a file or for a terminal."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """A pipe table."""
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def rich(self, title: str) -> RichTable:
        """The same for a terminal."""
        table = RichTable(*self.header, title=title)
        for row in self.rows:
            table.add_row(*row)
        return table


def mean_and_spread(values: np.ndarray, digits: int = 3) -> str:
    """The mean of some seeds, with their standard deviation where there are several."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{values.mean():.{digits}f} ±{values.std(ddof=1):.{digits}f}"


def cost_columns(results: Results, cell: str) -> list[str]:
    """Seeds, parameters, steps, rounds a row (executed / useful), operations and minutes of a cell."""
    lines = results.of(cell)
    mean = lambda name: float(np.mean([line[name] for line in lines]))
    return [
        str(len(lines)),
        f"{lines[0]['params'] / 1e6:.3g} M",
        f"{lines[0]['steps']:,}",
        f"{mean('executed_rounds'):.2f} / {mean('useful_rounds'):.2f}",
        f"{mean('train_flops') / 1e12:,.1f}",
        f"{mean('seconds') / 60:.1f}",
    ]


def loops_table(results: Results, names: Sequence[str], metric: str, *, costs: bool = True) -> Table:
    """A metric at each loop count, and what it cost, a row for each cell."""
    scores = {name: results.values(name, metric) for name in names}
    loops = max((values.shape[1] for values in scores.values()), default=0)
    rows = []
    for name, values in scores.items():
        shown = [mean_and_spread(column) for column in values.T]
        rows.append([name, *shown, *[NO_VALUE] * (loops - len(shown)), *(cost_columns(results, name) if costs else ())])
    counts = [f"{k} loop{'s' * (k > 1)}" for k in range(1, loops + 1)]
    return Table([metric.replace("_", " "), *counts, *(COST_HEADER if costs else ())], rows)


def curve(results: Results, cell: str, *, metric: str = "bits_per_byte") -> str:
    """The mean over seeds at each loop count."""
    return " / ".join(f"{value:.3f}" for value in results.mean(cell, metric))


def above(results: Results, cell: str, other: str = "plain", *, loops: int | None = 1) -> str:
    """How many bits per byte a cell reads above another at a loop count (None: the last), over the seeds both have."""
    difference = results.paired(cell, other, "bits_per_byte", loops=loops)
    spread = f" ±{difference.std(ddof=1):.3f}" if len(difference) > 1 else ""
    return f"{difference.mean():+.3f}{spread}"


COST_HEADER = ["seeds", "parameters", "steps", "rounds run / needed", "training TFLOP", "minutes"]


def claims_table(claims: Sequence[Claim], results: Results) -> Table:
    """Each claim beside our number and the verdict."""
    rows = [[claim.claim, claim.source, *claim.judge(results)] for claim in claims]
    return Table(["claim", "source's number", "ours", "verdict"], rows)


def provenance(results: Results, cells: list[Cell]) -> str:
    """Where the numbers were made, and which of them belong to an older recipe."""
    if not results.cells:
        return "No results yet."
    now = {cell.name: cell.digest for cell in cells}
    stale = [name for name in results.cells if now.get(name) != results.digests[name]]
    note = f" Their recipe has changed since; run them again: {', '.join(stale)}." if stale else ""
    made = f"Made on {results.device}; {_hours(results.seconds)} of training."
    return f"Mean ± standard deviation over seeds. {made}{note}"


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"


@contextmanager
def figure(path: Path, *, columns: int, **options: Any) -> Iterator[Any]:
    """Axes of a figure with one row, drawn without a screen and saved at the end."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(5.2 * columns, 4.4), layout="constrained")
    FigureCanvasAgg(drawn)
    axes = drawn.subplots(1, columns, squeeze=False, **options)[0]
    yield axes
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, dpi=150)


def line_with_band(axis: Any, values: np.ndarray, **style: Any) -> None:
    """The mean over seeds against loops, with the range of the seeds as a band."""
    loops = np.arange(1, values.shape[1] + 1)
    (line,) = axis.plot(loops, values.mean(axis=0), marker="o", **style)
    axis.fill_between(loops, values.min(axis=0), values.max(axis=0), color=line.get_color(), alpha=0.15, linewidth=0)


def level_with_band(axis: Any, values: np.ndarray, **style: Any) -> None:
    """A number that has no loop count, across the whole axis."""
    axis.axhline(values.mean(), linestyle="--", **style)
    axis.axhspan(values.min(), values.max(), color=style.get("color"), alpha=0.12, linewidth=0)


def loops_axis(axis: Any, max_loops: int) -> None:
    """Label and ticks of a loop-count axis."""
    axis.set_xlabel("loops at evaluation")
    axis.set_xticks(range(1, max_loops + 1))
