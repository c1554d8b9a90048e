"""Write experiments/README.md: every experiment's claims beside our numbers, verdicts and costs.

Command: `python -m experiments.index`.
"""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from elr_jax.sections import write_section
from experiments.reporting import Table
from experiments.results import FILE, Claim, Results, read_lines
from experiments.sweep import ROOT

INTRODUCTION = """# Experiments

Each folder answers one question. Its README has set-up, table, figure and verdict; `results.jsonl` has one line for
each finished cell and seed; its command goes on where it was stopped. The verdicts are: worked, promising, mixed, did
not work, not evaluated. This table is written by `python -m experiments.index`.
"""


def main(root: Path = ROOT) -> None:
    """Rewrite the index from the experiments that make claims."""
    found = {path.parent.name: path.parent for path in sorted(root.glob("*/claims.py"))}
    claims = {name: importlib.import_module(f"experiments.{name}.claims").CLAIMS for name in found}
    results = {name: Results(read_lines(folder / FILE), "cpu") for name, folder in found.items()}
    write_index(root / "README.md", claims, results)


def write_index(path: Path, claims: Mapping[str, Sequence[Claim]], results: Mapping[str, Results]) -> None:
    """The index of some experiments' claims, judged by their results."""
    rows = []
    for name in claims:
        link, cost, command = f"[{name}]({name}/README.md)", _cost(results[name]), f"`python -m experiments.{name}`"
        rows += [
            [link, claim.claim, claim.source, *claim.judge(results[name]), cost, command] for claim in claims[name]
        ]
    header = ["experiment", "claim", "source's number", "ours", "verdict", "cost", "command"]
    if not path.exists():
        path.write_text(INTRODUCTION, encoding="utf-8")
    write_section(path, "index", Table(header, rows).markdown())


def _cost(results: Results) -> str:
    return f"{results.seconds / 3600:.1f} h on {results.device}" if results.cells else "–"


if __name__ == "__main__":
    main()
