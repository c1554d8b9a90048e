"""Questions that compare variants of one recipe on both tasks: their command, tables and figure."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import tyro

from elr_jax.errors import one_line_errors
from elr_jax.sections import write_section
from experiments.bases import TextFlags, references
from experiments.reporting import (
    Table,
    claims_table,
    figure,
    level_with_band,
    line_with_band,
    loops_axis,
    loops_table,
    provenance,
)
from experiments.results import Claim, Results
from experiments.sweep import Cell, answer

COLORS = matplotlib.colormaps["tab10"]


class Score(NamedTuple):
    """How a task is measured."""

    metric: str
    label: str
    limits: tuple[float, float] | None
    """Of the figure's axis; None: from the lowest value to `ROOM` above the plain model's."""


class Panel(NamedTuple):
    """One more axis of a question's figure: a list that is measured, at 1, 2, … along the axis."""

    metric: str
    label: str
    along: str
    scale: str = "linear"


SCORES = {
    "text": Score("bits_per_byte", "validation bits per byte", None),
    "hybrid": Score("bits_per_byte", "validation bits per byte, hybrid", None),
    "moe": Score("bits_per_byte", "validation bits per byte, hybrid with experts", None),
    "ced": Score("bits_per_byte", "validation bits per byte", None),
    "chase": Score("accuracy", "accuracy over 1 to 5 hops", (0, 1.03)),
}
ROOM = 0.15
"""What lies further above the plain model is in the table; it would flatten all else."""


def main(
    question: str,
    description: str | None,
    cells: Callable[[dict[str, Cell]], list[Cell]],
    claims: Sequence[Claim],
    *,
    tables: Callable[[Results], list[Table]] = lambda results: [],
    panels: Sequence[Panel] = (),
) -> None:
    """The command of such a question; `tables` and `panels` show what is its own."""
    with one_line_errors():
        flags = tyro.cli(TextFlags, description=description, prog=f"python -m experiments.{question}")
        tell = partial(report, claims=claims, tables=tables, panels=panels)
        answer(question, flags, cells(references(flags.preset, flags.data)), tell)


def report(
    folder: Path,
    preset: str,
    results: Results,
    cells: list[Cell],
    *,
    claims: Sequence[Claim],
    tables: Callable[[Results], list[Table]],
    panels: Sequence[Panel] = (),
) -> None:
    """Rewrite the preset's section of the README and its figure."""
    names = [cell.name for cell in cells if cell.name in results.cells]
    finished = {task: [name for name in names if name.startswith(f"{task}_")] for task in SCORES}
    tasks = [task for task, names in finished.items() if names]
    path = Path("figures") / f"{preset}.png"
    if tasks:
        with figure(folder / path, columns=len(tasks) + len(panels)) as axes:
            for axis, task in zip(axes[: len(tasks)], tasks, strict=True):
                draw(axis, results, finished[task], SCORES[task])
            for axis, panel in zip(axes[len(tasks) :], panels, strict=True):
                draw_panel(axis, results, names, panel)
    parts = [provenance(results, cells)]
    parts += [loops_table(results, finished[task], SCORES[task].metric).markdown() for task in tasks]
    parts += [f"![{' and '.join(SCORES[task].label for task in tasks)} against loops]({path})"] if tasks else []
    parts += [table.markdown() for table in (*tables(results), claims_table(claims, results))]
    write_section(folder / "README.md", preset, "\n\n".join(parts))


def draw(axis: Any, results: Results, names: list[str], score: Score) -> None:
    """A line for each variant over the loops it is evaluated at; the plain model, which has none, as a level."""
    for number, name in enumerate(names):
        values, label = results.values(name, score.metric), name.split("_", 1)[1]
        if values.shape[1] == 1:
            level_with_band(axis, values[:, 0], color=_color(label, number), label=label)
        else:
            line_with_band(axis, values, color=COLORS(number % 10), label=label)
    loops_axis(axis, max(results.values(name, score.metric).shape[1] for name in names))
    axis.set_ylabel(score.label)
    axis.legend(fontsize="small")
    limits = score.limits
    plain = [results.values(name, score.metric).max() for name in names if name.endswith("_plain")]
    if limits is None and plain:
        lowest = min(results.values(name, score.metric).min() for name in names)
        limits = lowest - 0.02, max(plain) + ROOM
    if limits is not None:
        axis.set_ylim(*limits)


def draw_panel(axis: Any, results: Results, names: list[str], panel: Panel) -> None:
    """A line for each variant that has the metric, in the colours of `draw`."""
    for number, name in enumerate(names):
        if all(panel.metric in line["metrics"] for line in results.of(name)):
            label = name.split("_", 1)[1]
            style = {"color": _color(label, number), "label": label, "markersize": 3}
            line_with_band(axis, results.values(name, panel.metric), **style)
    axis.set(xlabel=panel.along, ylabel=panel.label, yscale=panel.scale)
    axis.legend(fontsize="small")


def _color(label: str, number: int) -> Any:
    return "black" if label == "plain" else COLORS(number % 10)
