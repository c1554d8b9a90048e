"""A sweep over cells and seeds that may be stopped anywhere and run again.

A cell is a recipe and a task under a name. Each finished cell and seed becomes one line of the experiment's
`results.jsonl`; a rerun skips those whose recipe is unchanged, and goes on with half-finished ones from their newest
checkpoint. What another experiment has finished under any name is taken over, so experiments share their baselines.
"""

import dataclasses
import os
import platform
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from elr_jax import flops
from elr_jax.config import digest, to_dict
from elr_jax.depth import LAW_UNIONS
from elr_jax.errors import ElrError
from elr_jax.train.metrics import read_metrics
from elr_jax.train.processes import is_first, start, tell
from elr_jax.train.runner import load_params, train
from elr_jax.train.settings import Launch, Recipe
from experiments.results import FILE, Line, Results, append_line, read_lines
from experiments.tasks import Task

ROOT = Path(__file__).parent
Preset = Literal["cpu", "paper", "smoke"]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One point of a sweep; the recipe's seed is replaced by each of the sweep's."""

    name: str
    recipe: Recipe
    task: Task
    eval_batches: int = 20
    headline: bool = True
    """Whether a claim rests on it: run with every seed. The others, screens, run with the first alone."""

    @property
    def digest(self) -> str:
        """Changes with anything that decides the results, except the seed.

        Defaults are left out, so that a new field of a config does not make a cell's results stale.
        """
        recipe = to_dict(dataclasses.replace(self.recipe, seed=0), unions=LAW_UNIONS, omit_defaults=True)
        return digest({"recipe": recipe, "task": self.task.settings, "eval_batches": self.eval_batches})


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What every experiment's command takes."""

    preset: Preset = "cpu"
    """`cpu`: minutes a cell on two cores. `paper`: sizes for accelerators. `smoke`: a few steps, to see it run."""
    seeds: tuple[int, ...] = (0, 1, 2)
    only: tuple[str, ...] = ()
    """Names of the cells to run; all when none is given."""
    report: bool = False
    """Run nothing: only rewrite the tables and figures from the results there are."""
    runs: str = "runs"
    """Folder of checkpoints, metrics and tokenised text; may be deleted once cells have finished."""
    mesh: str | None = None
    """Devices by mesh axis that cells train on, such as data=2,fsdp=4; None: one device."""

    def folder(self, question: str) -> Path:
        """Where results, README and figures are: the experiment's own folder, but `runs` for a smoke run."""
        return Path(self.runs) / question / "smoke" if self.preset == "smoke" else ROOT / question


def answer(
    question: str, flags: Flags, cells: list[Cell], report: Callable[[Path, str, Results, list[Cell]], None]
) -> None:
    """Run the cells that are not finished yet, then report on all there are."""
    unknown = set(flags.only) - {cell.name for cell in cells}
    if unknown:
        names = ", ".join(cell.name for cell in cells)
        raise ElrError(f"--only {' '.join(sorted(unknown))} is no cell of {question}: choose from {names}")
    start()  # experiments have no flags for it: the environment says whether several processes run one
    folder = flags.folder(question)
    chosen = [cell for cell in cells if not flags.only or cell.name in flags.only]
    if not flags.report:
        others = [path for path in sorted(ROOT.glob(f"*/{FILE}")) if path.parent != folder]
        places = {"results": folder / FILE, "runs": Path(flags.runs), "mesh": flags.mesh}
        run_cells(question, flags.preset, chosen, flags.seeds, **places, others=others)
    if is_first():
        report(folder, flags.preset, Results(read_lines(folder / FILE), flags.preset), cells)


def run_cells(
    question: str,
    preset: str,
    cells: list[Cell],
    seeds: tuple[int, ...],
    *,
    results: Path,
    runs: Path,
    mesh: str | None = None,
    others: Iterable[Path] = (),
) -> bool:
    """Run every cell with every seed, whole seeds first; False when SIGTERM stopped it.

    `others` are the results files of other experiments; a line of theirs with the cell's preset, seed and digest is
    copied, and its field `from` says where it was made.
    """
    shared = [line for path in others for line in read_lines(path)]
    todo = [(seed, cell) for seed in seeds for cell in cells if cell.headline or seed == seeds[0]]
    total = len(todo)
    for number, (seed, cell) in enumerate(todo, start=1):
        key = {"question": question, "preset": preset, "cell": cell.name, "seed": seed, "digest": cell.digest}
        title = f"[{number}/{total}] {question} {preset} {cell.name} seed {seed}"
        if any(key.items() <= line.items() for line in read_lines(results)):
            tell(f"{title}: finished before")
            continue
        made = _made_elsewhere(key, shared)
        if made is not None:
            tell(f"{title}: taken over from {made['from']}")
            _keep(results, made | key)
            continue
        tell(title)
        # a changed recipe gets a folder of its own, so it never meets the checkpoints of the old one
        out = runs / question / preset / f"{cell.name}-s{seed}-{cell.digest[:6]}"
        line = run_cell(cell, seed, out, mesh=mesh)
        if line is None:
            tell("stopped; the same command goes on from here")
            return False
        _keep(results, key | line)
    return True


def _keep(results: Path, line: Line) -> None:
    """Add a finished cell, once for all processes."""
    if is_first():
        append_line(results, line)


def _made_elsewhere(key: Line, shared: list[Line]) -> Line | None:
    """The newest shared line of the same recipe, seed and preset, with the question it was made for."""
    same = {name: key[name] for name in ("preset", "seed", "digest")}
    found = next((line for line in reversed(shared) if same.items() <= line.items()), None)
    return None if found is None else found | {"from": found.get("from", found["question"])}


def run_cell(cell: Cell, seed: int, out: Path, *, mesh: str | None = None) -> Line | None:
    """Train one cell, or the rest of it, and return its result; None when SIGTERM stopped it."""
    recipe = dataclasses.replace(cell.recipe, seed=seed)
    training = cell.task.open("train", seed=seed)
    validation = cell.task.open("validation", seed=0)  # the same for all seeds
    save_every = max(1, recipe.steps // 6)
    launch = Launch(out=str(out), eval_batches=cell.eval_batches, save_every=save_every, mesh=mesh)
    scores = train(recipe, launch, training=training, validation=validation)
    if not scores:
        return None
    params, _ = load_params(str(out))
    names = [name for name, value in scores[0]._asdict().items() if name != "loops" and value is not None]
    metrics = {name: [round(getattr(score, name), 6) for score in scores] for name in names}
    seq_len = training.seq_len
    return {
        "metrics": metrics | cell.task.measure(params, recipe),
        **cost(out, recipe, seq_len=seq_len),
        "data": training.fingerprint,
        **environment(),
    }


def cost(out: Path, recipe: Recipe, *, seq_len: int) -> dict[str, Any]:
    """What a finished run cost: parameters, steps, rounds and layer passes a row, operations, seconds."""
    steps = [line for line in read_metrics(out) if "executed_rounds" in line]
    executed, useful = (sum(line[name] for line in steps) for name in ("executed_rounds", "useful_rounds"))
    rows = recipe.batch_size * len(steps)
    passes = done = 0.0
    for line in steps:  # a late switch changes the model on the way
        model, rounds = recipe.at(line["step"] - 1).model, line["executed_rounds"]
        passes += flops.layer_passes(model, rounds / recipe.batch_size) / len(steps)
        done += flops.train_flops(model, seq_len=seq_len, sequences=recipe.batch_size, rounds=rounds)
    gaps = np.diff([line["time"] for line in steps])
    return {
        "params": flops.num_params(recipe.model),
        "steps": recipe.steps,
        "tokens": rows * seq_len,
        "executed_rounds": round(executed / rows, 4),
        "useful_rounds": round(useful / rows, 4),
        "layer_passes": round(passes, 4),
        "train_flops": done,
        # a step that took twenty times the median held a pause between two launches
        "seconds": round(float(np.minimum(gaps, 20 * np.median(gaps)).sum()), 1) if gaps.size else 0.0,
    }


def environment() -> dict[str, str]:
    """Where and when a result was made."""
    device = jax.devices()[0]
    cores = f", {os.cpu_count()} cores" if device.platform == "cpu" else ""
    return {
        "device": f"{jax.device_count()} {device.device_kind}{cores}",
        "python": platform.python_version(),
        "jax": jax.__version__,
        "commit": _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def _commit() -> str:
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
