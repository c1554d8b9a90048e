"""What training at mixed depths costs: whole steps under each law of the loop count against steps of one fixed depth.

    python -m benchmarks.elastic_step          about five minutes on two cores

Each law runs the same few steps, gradient and Muon, over and over. Its time is set against that of steps compiled for
exactly k loops, interpolated to the mean loop count that the law drew, in the same process and in turns. `FLOP ratio`
counts the rounds that the microbatches ran, so it holds what they ran beyond the draw; `time / FLOPs` is what the
elastic program costs beyond that: expect 1.05 at most.
"""

import dataclasses
from typing import Any

import numpy as np
import tyro

from benchmarks.report import tell_machine, tell_table, write_json
from benchmarks.timing import machine, race
from benchmarks.training import Turn, random_batch, rounds, steps_of
from elr_jax import flops, presets
from elr_jax.config import ModelConfig, Runtime
from elr_jax.depth import DepthLaw, Fixed, PerExample, RotatingSlice, SharedDraw
from elr_jax.errors import one_line_errors
from elr_jax.train.settings import Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElasticStep:
    """Sizes of the race; the defaults are those of the experiments on text."""

    model: ModelConfig = dataclasses.field(default_factory=presets.tiny_text)
    seq_len: int = 256
    batch_size: int = 16
    microbatches: int = 4
    forced: float = 0.1
    """Share of rows forced to one loop, in the laws that force any."""
    steps: int = 6
    """Steps of one turn, each with its own draw."""
    repeats: int = 5
    """Turns of each contestant."""
    runtime: Runtime = dataclasses.field(default_factory=Runtime)
    """Number type and rematerialisation of all contestants; `loop` is that of the laws, a fixed depth is a scan."""
    seed: int = 0
    json: str | None = None
    """File to write the table to; None writes nothing."""


def main(settings: ElasticStep) -> dict[str, Any]:
    """Race every law against every fixed depth, and print the table."""
    result: dict[str, Any] = {"machine": machine(), "settings": dataclasses.asdict(settings)}
    tell_machine(result["machine"])
    most = settings.model.loop.max_loops
    laws: dict[str, DepthLaw] = {
        "per example": PerExample(max_loops=most, forced=settings.forced),
        "rotating slice": RotatingSlice(max_loops=most, forced=settings.forced),
        "one draw": SharedDraw(max_loops=most),
    }
    elastic = {name: _steps(settings, settings.model, law, settings.runtime) for name, law in laws.items()}
    exact = dataclasses.replace(settings.runtime, loop="scan")
    fixed = {
        k: _steps(
            settings,
            dataclasses.replace(settings.model, loop=dataclasses.replace(settings.model.loop, max_loops=k)),
            Fixed(loops=k),
            exact,
        )
        for k in range(1, most + 1)
    }
    times = race(elastic | {f"fixed {k}": run for k, run in fixed.items()}, repeats=settings.repeats)
    tokens = settings.steps * settings.batch_size * settings.seq_len
    fixed_seconds = [times[f"fixed {k}"].median for k in fixed]
    result["fixed"] = [
        {"loops": k, "tokens / s": tokens / seconds} for k, seconds in zip(fixed, fixed_seconds, strict=True)
    ]
    result["laws"] = []
    for name, run in elastic.items():
        executed, useful = rounds(run()[1], rows=settings.batch_size)
        seconds = float(np.interp(useful, list(fixed), fixed_seconds))
        row = {
            "law": name,
            "drawn": useful,
            "run": executed,
            "tokens / s": tokens / times[name].median,
            "time ratio": times[name].median / seconds,
            "FLOP ratio": _flops(settings, executed) / _flops(settings, useful),
        }
        result["laws"].append(row | {"time / FLOPs": row["time ratio"] / row["FLOP ratio"]})
    tell_table("Fixed depth", result["fixed"])
    tell_table("Rounds a row drawn and run, against a fixed depth of the mean drawn", result["laws"])
    write_json(settings.json, result)
    return result


def _steps(settings: ElasticStep, model: ModelConfig, law: DepthLaw, runtime: Runtime) -> Turn:
    recipe = Recipe(
        model=model,
        depth=law,
        batch_size=settings.batch_size,
        microbatches=settings.microbatches,
        seed=settings.seed,
    )
    batch = random_batch(
        settings.batch_size, settings.seq_len, vocab_size=settings.model.vocab_size, seed=settings.seed
    )
    return steps_of(recipe, batch, steps=settings.steps, runtime=runtime)


def _flops(settings: ElasticStep, loops: float) -> float:
    return flops.train_flops(settings.model, seq_len=settings.seq_len, sequences=1, rounds=loops)


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(ElasticStep, description=__doc__))
