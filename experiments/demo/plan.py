"""How many steps fit the minutes. The plan is kept with the run, so that a restarted demo goes on with the same one."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import jax

from elr_jax import flops
from elr_jax.config import Runtime
from elr_jax.errors import ElrError
from elr_jax.train.data import Batch, batches
from elr_jax.train.settings import Recipe
from elr_jax.train.step import init_state, optimizer_for, train_step
from experiments.sweep import Cell

SET_UP_SECONDS = 75.0
"""Kept free for the environment that `make demo` installs first."""
MARGIN = 0.88
"""Share of the remaining time that is planned: machines slow down, and figures take a few seconds."""
FEWEST_STEPS = 20
FILE = "plan.json"


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What a few training steps showed of this machine."""

    flops_per_second: float
    compile_seconds: float


def remembered(out: Path, minutes: float) -> int | None:
    """The text steps of a demo begun in `out`; None for a fresh one, an `ElrError` if it had other minutes."""
    path = out / FILE
    if not path.exists():
        return None
    plan = json.loads(path.read_text())
    if plan["minutes"] != minutes:
        raise ElrError(
            f"{out} holds a demo of {plan['minutes']:g} minutes, not {minutes:g}: "
            f"give --minutes {plan['minutes']:g} to go on, or another --out"
        )
    return plan["text_steps"]


def remember(out: Path, minutes: float, text_steps: int | None, speed: Speed | None) -> None:
    """Keep the plan; a demo is bound to its minutes from the start and to its text steps once they are known."""
    out.mkdir(parents=True, exist_ok=True)
    plan = {"minutes": minutes, "text_steps": text_steps, "speed": speed and asdict(speed)}
    (out / FILE).write_text(json.dumps(plan) + "\n")


def measure_speed(cell: Cell, *, steps: int = 4) -> Speed:
    """Compile and time a few steps of a cell's training."""
    recipe = cell.recipe
    data = cell.task.open("train", seed=0)
    seq_len = data.seq_len
    optimizer = optimizer_for(recipe)
    state = init_state(recipe, optimizer)
    step = jax.jit(partial(train_step, recipe=recipe, optimizer=optimizer, runtime=Runtime()))
    stream: Iterator[Batch] = batches(data, recipe.batch_size)
    begin = time.monotonic()
    state, _ = jax.block_until_ready(step(state, next(stream)))
    compiled = time.monotonic()
    rounds = 0.0
    for _ in range(steps):
        state, metrics = step(state, next(stream))
        rounds += float(metrics.executed_rounds)
    seconds = time.monotonic() - compiled
    done = flops.train_flops(recipe.model, seq_len=seq_len, sequences=steps * recipe.batch_size, rounds=rounds)
    return Speed(flops_per_second=done / seconds, compile_seconds=compiled - begin)


def steps_that_fit(seconds: float, speed: Speed, cells: list[Cell], step_flops: list[float], seq_len: int) -> int:
    """Steps for each of the cells, trained and evaluated one after the other in the given time."""
    evaluation = sum(_evaluation_flops(cell.recipe, cell.eval_batches, seq_len) for cell in cells)
    # a training step and the two programs of the evaluation, which together compile about as long
    compiling = 2 * len(cells) * speed.compile_seconds
    left = MARGIN * seconds - compiling - evaluation / speed.flops_per_second
    return max(FEWEST_STEPS, int(left * speed.flops_per_second / sum(step_flops)))


def _evaluation_flops(recipe: Recipe, eval_batches: int, seq_len: int) -> float:
    """Every loop count once, and the deepest a second time for the residuals."""
    forward = flops.forward_flops(recipe.model, seq_len=seq_len)
    loops = recipe.model.loop.max_loops
    tokens = eval_batches * recipe.batch_size * seq_len
    return tokens * (sum(forward.at(k) for k in range(1, loops + 1)) + forward.at(loops))
