"""The demo's tables, figure and headlines."""

from pathlib import Path

from rich.console import Console

from experiments.elastic_text.report import UNIT, draw_by_loops
from experiments.pointer_chase.claims import hops_solved
from experiments.pointer_chase.report import draw_by_hops, hops_legend, hops_table
from experiments.reporting import figure, loops_table
from experiments.results import Results

ELASTIC, MIXED = "small_core", "mixed"


def show(out: Path, chase: Results, text: Results, console: Console) -> None:
    """Print both tables, and write them and the figure to `out`."""
    tables = {
        "Text: validation bits per byte, one elastic checkpoint at each loop count beside a plain model": loops_table(
            text, text.cells, UNIT, costs=False
        ),
        "Pointer chase: accuracy by hops and loops (trained at 1–4 loops)": hops_table(
            chase.values(MIXED, "accuracy_by_hops")
        ),
    }
    for title, table in tables.items():
        console.print(table.rich(title))
    console.print(text_headline(text))
    console.print(chase_headline(chase))
    with figure(out / "demo.png", columns=2) as (left, right):
        draw_by_loops(left, text, [ELASTIC])
        left.legend()
        left.set_title("text: bits per byte")
        draw_by_hops(right, chase.values(MIXED, "accuracy_by_hops"))
        right.set_title("pointer chase: accuracy")
        right.set_ylabel("accuracy")
        hops_legend(right)
    written = [f"## {title}\n\n{table.markdown()}" for title, table in tables.items()]
    body = "\n\n".join([*written, text_headline(text), chase_headline(chase), "![Both against loops](demo.png)"])
    (out / "tables.md").write_text(body + "\n", encoding="utf-8")


def text_headline(text: Results) -> str:
    """Best loop count and the one-loop tax, in a sentence."""
    curve, plain = text.mean(ELASTIC, UNIT), text.mean("plain", UNIT)[0]
    best = int(curve.argmin())
    return (
        f"Text: {curve[0]:.3f} bits per byte at 1 loop and {curve[best]:.3f} at {best + 1}, from one checkpoint; "
        f"the plain model has {plain:.3f}."
    )


def chase_headline(chase: Results) -> str:
    """Hops solved at each loop count, or that training was too short for any of it."""
    most = chase.mean(MIXED, "accuracy_by_hops").max()
    if most < 0.9:
        return "Pointer chase: not learnt. The transition needs about 1,000 steps, which --minutes 5 and more give."
    return f"Pointer chase: solved up to {hops_solved(chase)} hops at 1, 2, 3, … loops."
