"""Train an elastic-depth text model beside a plain one, and the pointer chase, where loops show plainest.

Command: `python -m experiments.demo --minutes 10 --out runs/demo`. Stopped and run again, it goes on where it was.
Expect one hop more with each loop in the pointer chase. On text, in so few steps, expect the elastic model a few
hundredths of a bit per byte above the plain one at every loop count, and lower at two loops than at one.
"""

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console

from elr_jax.errors import ElrError, one_line_errors
from elr_jax.train.data import DataConfig
from experiments.demo.plan import SET_UP_SECONDS, measure_speed, remember, remembered, steps_that_fit
from experiments.demo.show import ELASTIC, MIXED, show
from experiments.elastic_text import cells as text_cells
from experiments.pointer_chase import cells as chase_cells
from experiments.results import FILE, Results, read_lines
from experiments.sweep import Cell, run_cells

MINUTES_FOR_CHASE = 5.0
"""From here on the pointer chase trains in full."""


@dataclass(frozen=True, kw_only=True)
class Demo:
    """The demo's flags."""

    minutes: float = 10.0
    """Longest duration on two CPU cores, installing included; the text models' steps follow from it."""
    out: str = "runs/demo"
    """Where checkpoints, metrics, tables and the figure go."""
    preset: Literal["cpu", "smoke"] = "cpu"
    """`smoke` takes a few steps of everything, to see it run."""

    def __post_init__(self):
        if self.minutes <= 0:
            raise ElrError(f"minutes={self.minutes} must be positive: 10 shows everything, 5 the pointer chase")


def main(demo: Demo) -> None:
    """All stages; those finished before are skipped."""
    begin, out, console = time.monotonic(), Path(demo.out), Console(highlight=False, soft_wrap=True)
    planned = remembered(out, demo.minutes)
    chase = chase_cell(demo)
    console.print(
        f"Three models on this machine, {demo.minutes:g} minutes at most:\n"
        f"  1. pointer chase, {chase.recipe.steps:,} steps at mixed loop counts (about 200 s on two cores)\n"
        f"  2. text, elastic depth, as many steps as the time allows\n"
        f"  3. text, plain, as many steps\n"
        f"Everything goes to {out}; stop it at any time, and the same command goes on from there.\n"
    )
    if planned is None:
        remember(out, demo.minutes, None, None)
    if not run_cells("pointer_chase", "demo", [chase], (0,), results=out / FILE, runs=out):
        return
    left = 60 * demo.minutes - SET_UP_SECONDS - (time.monotonic() - begin)
    pair = text_pair(demo, planned or plan_text(demo, out, left, console))
    if not run_cells("elastic_text", "demo", pair, (0,), results=out / FILE, runs=out):
        return
    lines = read_lines(out / FILE)
    of = lambda question: Results([line for line in lines if line["question"] == question], "demo")
    show(out, of("pointer_chase"), of("elastic_text"), console)
    console.print(
        f"\n{time.monotonic() - begin:.0f} s in all. Written to {out}: tables.md, demo.png, {FILE}, and in "
        "pointer_chase/ and elastic_text/ each run's checkpoints/ and metrics.jsonl."
    )


def chase_cell(demo: Demo) -> Cell:
    """The mixed-depth pointer chase, shortened where there is too little time for all of it."""
    cell = next(cell for cell in chase_cells.cells(demo.preset) if cell.name == MIXED)
    steps = max(2, round(cell.recipe.steps * min(1.0, demo.minutes / MINUTES_FOR_CHASE)))
    optim = dataclasses.replace(cell.recipe.optim, warmup_steps=min(cell.recipe.optim.warmup_steps, max(1, steps // 5)))
    return dataclasses.replace(cell, recipe=dataclasses.replace(cell.recipe, steps=steps, optim=optim))


def text_pair(demo: Demo, steps: int) -> list[Cell]:
    """The elastic text model and the plain one."""
    size = text_cells.size_of(demo.preset, DataConfig(cache_dir=f"{demo.out}/data_cache"))
    optim = dataclasses.replace(size.optim, warmup_steps=min(size.optim.warmup_steps, max(1, steps // 5)))
    size = dataclasses.replace(size, steps=steps, optim=optim, eval_batches=min(12, size.eval_batches))
    by_name = {cell.name: cell for cell in text_cells.cells(size)}
    return [by_name[ELASTIC], by_name["plain"]]


def plan_text(demo: Demo, out: Path, seconds: float, console: Console) -> int:
    """Steps of each text model, from this machine's speed and the time that is left."""
    if demo.preset == "smoke":
        return 3
    console.print(f"Measuring this machine's speed; {max(seconds, 0):.0f} s are left for the two text models.")
    begin = time.monotonic()
    pair = text_pair(demo, text_cells.STEPS)
    speed = measure_speed(pair[0])
    seq_len = DataConfig().seq_len
    costs = [text_cells.step_flops(cell.recipe, seq_len) for cell in pair]
    steps = steps_that_fit(seconds - (time.monotonic() - begin), speed, pair, costs, seq_len)
    console.print(f"{speed.flops_per_second / 1e9:.0f} GFLOP/s: {steps} steps for each text model.\n")
    remember(out, demo.minutes, steps, speed)
    return steps


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Demo, description=__doc__))
