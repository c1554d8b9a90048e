"""Table and figure of elastic text."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from elr_jax.sections import write_section
from experiments.elastic_text.claims import CLAIMS
from experiments.reporting import (
    claims_table,
    figure,
    level_with_band,
    line_with_band,
    loops_axis,
    loops_table,
    provenance,
)
from experiments.results import Results
from experiments.sweep import Cell

UNIT = "bits_per_byte"
PLAIN = {"plain": "black", "plain_equal_compute": "tab:gray", "plain_steps_x2": "silver"}
COLORS = matplotlib.colormaps["tab20"]


def report(folder: Path, preset: str, results: Results, cells: list[Cell]) -> None:
    """Rewrite the preset's section of the README and its figure."""
    path = Path("figures") / f"{preset}.png"
    elastic = [cell.name for cell in cells if cell.name in results.cells and _is_mixed(cell)]
    if results.cells:
        with figure(folder / path, columns=2, sharey=True) as (left, right):
            draw_by_loops(left, results, elastic)
            draw_by_compute(right, results, elastic)
            left.figure.legend(*left.get_legend_handles_labels(), loc="outside right center", fontsize="small")
    parts = [
        provenance(results, cells),
        loops_table(results, results.cells, UNIT).markdown(),
        *([f"![Bits per byte against loops and against training compute]({path})"] if results.cells else []),
        claims_table(CLAIMS, results).markdown(),
    ]
    write_section(folder / "README.md", preset, "\n\n".join(parts))


def draw_by_loops(axis: Any, results: Results, elastic: list[str]) -> None:
    """A line for each mixed-depth cell; the plain models, which have no loops, as levels."""
    for name, color in PLAIN.items():
        if name in results.cells:
            level_with_band(axis, results.values(name, UNIT)[:, 0], color=color, label=name)
    for number, name in enumerate(elastic):
        line_with_band(axis, results.values(name, UNIT), color=COLORS(number % 20), label=name)
    loops_axis(axis, max((results.values(name, UNIT).shape[1] for name in elastic), default=1))
    axis.set_ylabel("validation bits per byte")


def draw_by_compute(axis: Any, results: Results, elastic: list[str]) -> None:
    """One loop (open) and the best loop count (filled) of each cell against what its training executed."""
    for number, name in enumerate(elastic):
        compute, curve = _compute(results, name), results.mean(name, UNIT)
        axis.plot([compute] * 2, [curve[0], curve.min()], color=COLORS(number % 20), alpha=0.5)
        axis.plot(compute, curve[0], "o", color=COLORS(number % 20), markerfacecolor="white")
        axis.plot(compute, curve.min(), "o", color=COLORS(number % 20))
    plain = [name for name in PLAIN if name in results.cells]
    points = sorted((_compute(results, name), results.mean(name, UNIT)[0]) for name in plain)
    if points:
        axis.plot(*zip(*points, strict=True), "s--", color="black", label="plain, by length of training")
    axis.plot([], [], "o", color="gray", markerfacecolor="white", label="elastic at one loop")
    axis.plot([], [], "o", color="gray", label="elastic at its best loop count")
    axis.set_xlabel("training compute, TFLOP executed")
    axis.legend(fontsize="small")


def _compute(results: Results, name: str) -> float:
    return float(np.mean([line["train_flops"] for line in results.of(name)])) / 1e12


def _is_mixed(cell: Cell) -> bool:
    """Trained at several depths; a specialist's collapse elsewhere would hide the others' differences."""
    return bool(np.count_nonzero(cell.recipe.depth.marginal()) > 1)
