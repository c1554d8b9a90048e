"""Whether a model fits a slice of chips, and how fast it can be there at most: compiled here, run nowhere.

    python -m elr_jax.fit dory_4b
    python -m elr_jax.fit koi_4b --topology v5p:4x4x4 --mesh fsdp=64 --batch-size 256 --programs train

The training step, a prompt and a decode step are lowered and compiled for chips that are not here (`make fit` installs
their compilers). Bytes of memory and what chips exchange are the compiler's. Operations come from `elr_jax.flops`; a
time is a bound from below that the chip's peaks give, with arithmetic, memory and links beside each other or in turn.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from elr_jax.config import Remat
from elr_jax.depth import Fixed
from elr_jax.errors import ElrError, one_line_errors
from elr_jax.fit.plans import PLANS, Plan, find_plan
from elr_jax.fit.report import show, update, write_rows
from elr_jax.fit.rows import Program, Row, fit
from elr_jax.topologies import leave_devices

DOCS = Path(__file__).parents[2] / "docs"
CHANGES = ("topology", "mesh", "batch_size", "seq_len", "microbatches", "remat", "gather_core", "kernels", "loops")


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What to compile; what is not given is the preset's plan."""

    preset: Annotated[str, tyro.conf.Positional]
    """gpt_half_billion, dory_4b, koi_4b or elr_30b_a3b; or all: each of them on each of its slices."""
    topology: str | None = None
    """Slice of chips, such as v5e:8x8, v5p:4x4x4 or h200:1x1x8 (slices x hosts x GPUs)."""
    mesh: str | None = None
    """Chips by mesh axis, such as fsdp=8,expert=8; training and serving have one each by plan."""
    programs: tuple[Program, ...] = ("train", "prefill", "decode")
    """train: an optimizer step; prefill: requests' prompts as long as the context; decode: a token for each request."""
    batch_size: int | None = None
    """Rows of an optimizer step, prompts that are read at once, or requests of a decode step."""
    seq_len: int | None = None
    """Tokens of a row, or of a request's context."""
    microbatches: int | None = None
    """Parts a step's rows are cut into after sorting by depth."""
    remat: Remat | None = None
    """What the backward pass keeps."""
    gather_core: bool | None = None
    """Whether each chip holds the core and its gradient whole while its rounds run."""
    kernels: bool | None = None
    """Whether attention and state updates are the slice's own kernels, longer to compile; else XLA's forms."""
    loops: int | None = None
    """Loops of every row; None: training draws them by the plan's law, requests run the model's most."""
    quick: bool = False
    """Let the compiler make little effort: a fraction of the time, and more memory and collectives than a run has."""
    json: str | None = None
    """File to write the rows to; None writes nothing."""
    write: bool = False
    """Put the rows into docs/scale.json and their tables into docs/scale.md."""

    def __post_init__(self):
        for name in ("batch_size", "seq_len", "microbatches", "loops"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ElrError(f"{name}={value} must be at least 1")
        if self.write and (changed := [name for name in CHANGES[1:] if getattr(self, name) is not None]):
            raise ElrError(f"write=True keeps presets as planned: leave out {changed[0]}, or write with json=FILE")


def main(settings: Fit) -> list[Row]:
    """Compile, print the tables, write what was asked for, and return the rows."""
    plans = PLANS if settings.preset == "all" else (find_plan(settings.preset, settings.topology),)
    rows = []
    try:
        for plan in (changed(plan, settings) for plan in plans):
            for program in settings.programs:
                with Console(stderr=True).status(f"{plan.name} {program} for {plan.topology}: compiling, minutes …"):
                    rows.append(fit(plan, program, quick=settings.quick))
                if settings.write:
                    update(DOCS, rows[-1:])
    finally:  # what took minutes is told, whatever came after it
        if rows:
            show(rows)
            if settings.json is not None:
                write_rows(Path(settings.json), rows)
                print(f"written to {settings.json}")
    return rows


def changed(plan: Plan, settings: Fit) -> Plan:
    """The plan with what the settings say."""
    told = {name: value for name in CHANGES if (value := getattr(settings, name)) is not None}
    same = {"mesh": ("serving_mesh",), "batch_size": ("requests", "prompts"), "seq_len": ("context",)}
    told |= {other: told[name] for name in same.keys() & told for other in same[name]}
    if (loops := told.pop("loops", None)) is not None:
        loop = dataclasses.replace(plan.model.loop, max_loops=loops)
        told |= {"depth": Fixed(loops=loops), "model": dataclasses.replace(plan.model, loop=loop)}
    return dataclasses.replace(plan, **told)


if __name__ == "__main__":
    with one_line_errors():
        leave_devices()
        main(tyro.cli(Fit, description=__doc__, prog="python -m elr_jax.fit"))
