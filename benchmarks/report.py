"""How a benchmark tells its result: the machine in one line, tables, and a file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Row = dict[str, Any]
"""A line of a table: its columns by name, numbers as they are."""

CONSOLE = Console()


def tell_machine(facts: Mapping[str, Any]) -> None:
    """Print what the times were taken on."""
    CONSOLE.print("  ".join(f"{name} {value}" for name, value in facts.items()), highlight=False)


def tell_table(title: str, rows: Sequence[Row]) -> None:
    """Print rows of the same columns, words to the left and numbers to the right."""
    table = Table(title=title, title_justify="left")
    for name, value in rows[0].items():
        words = isinstance(value, str)
        table.add_column(name, justify="left" if words else "right", no_wrap=words)
    for row in rows:
        table.add_row(*map(_shown, row.values()))
    CONSOLE.print(table)


def write_json(path: Path | str | None, result: Any) -> None:
    """Write a result to a file where one was asked for, and say so."""
    if path is not None:
        Path(path).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        CONSOLE.print(f"written to {path}", highlight=False)


def _shown(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2f}"
