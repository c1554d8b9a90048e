"""Rows as tables: for a terminal, and for docs/scale.md, whose rows docs/scale.json keeps."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from elr_jax.config import from_dict
from elr_jax.errors import ElrError
from elr_jax.fit.rows import Row
from elr_jax.sections import write_section

GB = 1e9
WIDTH = 170
"""Of a file or pipe, columns."""
SIZES = ("model", "program", "slice", "mesh", "rows × tokens", "rounds", "given", "temporary", "GB of a chip's", "fits")
ROOFS = (
    "model",
    "program",
    "slice",
    "Tflop a chip",
    "GB moved",
    "GB sent",
    "compute s",
    "memory s",
    "links s",
    "s",
    "MFU",
)
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
EXCHANGES = ("model", "program", "slice", *KINDS)


def show(rows: Sequence[Row]) -> None:
    """Print the tables, and what the compiler said of what does not fit."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    for title, header, lines in _tables(rows):
        table = Table(title=title, title_justify="left")
        for name in header:
            table.add_column(name, justify="left" if name in SIZES[:4] else "right", no_wrap=name in ("model", "mesh"))
        for line in lines:
            table.add_row(*line)
        console.print(table)
    for row in rows:
        if row.refusal is not None:
            console.print(f"{row.preset} {row.program} on {row.topology}: {row.refusal}", highlight=False)


def _tables(rows: Sequence[Row]) -> list[tuple[str, Sequence[str], list[list[str]]]]:
    made = [row for row in rows if row.refusal is None]
    return [
        ("Memory, by the compiler", SIZES, [_sizes(row) for row in rows]),
        ("Collectives, by the compiler: times, and GB of whole arrays", EXCHANGES, [_exchanges(row) for row in made]),
        ("Modelled, not measured: least seconds by each roof", ROOFS, [_roofs(row) for row in made]),
    ]


def _names(row: Row) -> list[str]:
    how = [name for name in ("quick", "kernels") if getattr(row, name)]
    return [row.preset, ", ".join((row.program, *how)), row.topology]


def _sizes(row: Row) -> list[str]:
    cut = f" in {row.microbatches}" if row.microbatches > 1 else ""
    head = [*_names(row), row.mesh, f"{row.rows} × {row.tokens:,}{cut}", f"{row.rounds:.2f}"]
    memory = f"{row.chip.memory / GB:.0f}"
    if row.refusal is not None:
        return [*head, "", "", f"of {memory}", "no program"]
    over = "yes" if row.fits else f"no: {(row.total - row.chip.memory) / GB:.1f} GB too much"
    return [
        *head,
        *(f"{size / GB:.2f}" for size in (row.arguments, row.temporaries)),
        f"{row.total / GB:.2f} of {memory}",
        over,
    ]


def _exchanges(row: Row) -> list[str]:
    def told(kind: str) -> str:
        runs, size = row.collectives.get(kind, (0, 0))
        return f"{runs:,.0f}, {size / GB:,.2f}" if runs else ""

    return [*_names(row), *map(told, KINDS)]


def _roofs(row: Row) -> list[str]:
    times, (low, high) = row.times, row.mfu
    return [
        *_names(row),
        f"{row.load.executed / 1e12:,.4g}",
        *(f"{size / GB:,.2f}" for size in (row.load.moved, row.load.sent)),
        *(f"{seconds:.3g}" for seconds in times),
        f"{times.overlapped:.3g} – {times.in_turn:.3g}",
        f"{100 * low:.0f} – {100 * high:.0f} %",
    ]


def update(folder: Path, rows: Sequence[Row]) -> None:
    """Put rows in the place of older ones of their kind in scale.json, and the tables of all into scale.md."""
    path = folder / "scale.json"
    kept = read_rows(path) if path.exists() else []
    fresh = {row.key: row for row in (*kept, *rows)}
    write_rows(path, list(fresh.values()))
    parts = []
    for title, header, lines in _tables(list(fresh.values())):
        body = "\n".join("| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *lines))
        parts.append(f"**{title}**\n\n{body}")
    made = sorted(
        {
            f"{row.date}, {', '.join(f'{name} {version}' for name, version in row.versions.items())}"
            for row in fresh.values()
        }
    )
    parts.append(f"Compiled, not run: {'; '.join(made)}.")
    write_section(folder / "scale.md", "fit", "\n\n".join(parts))


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """The rows as JSON."""
    data: list[dict[str, Any]] = [dataclasses.asdict(row) for row in rows]
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def read_rows(path: Path) -> list[Row]:
    """What `write_rows` wrote."""
    try:
        return [from_dict(Row, row) for row in json.loads(path.read_text(encoding="utf-8"))]
    except ValueError as error:
        raise ElrError(f"{path} can't be read ({error}): put back a good copy") from error
