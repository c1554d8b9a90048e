"""Tables and figure of the pointer chase."""

from pathlib import Path
from typing import Any

import numpy as np

from elr_jax.sections import write_section
from experiments.pointer_chase.claims import CLAIMS
from experiments.reporting import (
    Table,
    claims_table,
    figure,
    line_with_band,
    loops_axis,
    loops_table,
    mean_and_spread,
    provenance,
)
from experiments.results import Results
from experiments.sweep import Cell


def report(folder: Path, preset: str, results: Results, cells: list[Cell]) -> None:
    """Rewrite the preset's section of the README and its figure."""
    path = Path("figures") / f"{preset}.png"
    looped = [cell.name for cell in cells if cell.name in results.cells and cell.recipe.model.loop.max_loops > 1]
    if looped:
        with figure(folder / path, columns=len(looped), sharey=True) as axes:
            for axis, name in zip(axes, looped, strict=True):
                draw_by_hops(axis, results.values(name, "accuracy_by_hops"))
                axis.set_title(name)
            axes[0].set_ylabel("accuracy")
            hops_legend(axes[-1])
    parts = [provenance(results, cells), loops_table(results, results.cells, "accuracy").markdown()]
    if looped:
        parts += [
            f"Accuracy of `{looped[0]}`:",
            hops_table(results.values(looped[0], "accuracy_by_hops")).markdown(),
            f"![Accuracy against loops, a line for each hop count]({path})",
        ]
    parts.append(claims_table(CLAIMS, results).markdown())
    write_section(folder / "README.md", preset, "\n\n".join(parts))


def hops_table(values: np.ndarray) -> Table:
    """Accuracy [seeds, hops, loops] as a row for each hop count."""
    loops = [f"{k} loop{'s' * (k > 1)}" for k in range(1, values.shape[2] + 1)]
    rows = [
        [str(hop), *(mean_and_spread(values[:, hop - 1, k]) for k in range(values.shape[2]))]
        for hop in range(1, values.shape[1] + 1)
    ]
    return Table(["hops", *loops], rows)


def draw_by_hops(axis: Any, values: np.ndarray) -> None:
    """Accuracy [seeds, hops, loops] against loops, a line for each hop count."""
    from matplotlib import colormaps

    hops = values.shape[1]
    for hop in range(hops):
        color = colormaps["viridis"](0.9 * hop / max(hops - 1, 1))
        line_with_band(axis, values[:, hop], color=color, label=str(hop + 1))
    loops_axis(axis, values.shape[2])
    axis.set_ylim(0, 1.03)


def hops_legend(axis: Any) -> None:
    """The lines' hop counts, beside the axes."""
    axis.legend(title="hops", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
