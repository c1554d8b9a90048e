"""What the ops' forms take: measured on the device at hand, or modelled by the compiler of a chip that is not here.

    python -m pallas_kernels.bench                    on this machine's device
    python -m pallas_kernels.bench --preset h200      the sizes and the repeats of a lent H200, under four minutes
    python -m pallas_kernels.bench --model v5e        modelled: no device needed, but the chip's compiler

For each size forward, and forward with gradients: milliseconds, share of the roofline's speed, and the ratio to the XLA
form (above 1: faster). Modelled times are XLA's own for its form; a kernel's are its roofline and XLA's for what stands
around it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.timing import machine, race
from elr_jax.errors import ElrError, one_line_errors
from elr_jax.topologies import leave_devices
from elr_jax.typing import Array
from pallas_kernels.case import Case
from pallas_kernels.chips import CHIPS, Chip, compiler
from pallas_kernels.contract import PLATFORMS, Implementation, target_platform

OPS = ("windowed_attention", "gated_update", "sphere_step", "delta_rule")
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What to run."""

    preset: Literal["here", "h200"] = "here"
    """`h200` refuses another device."""
    model: Literal["v5e", "v5p", "v6e", "h200"] | None = None
    """Model a chip instead of measuring."""
    op: tuple[str, ...] = OPS
    """Ops to run."""
    case: str | None = None
    """One size, by name; None: all."""
    repeats: int = 20

    def __post_init__(self):
        for op in self.op:
            if op not in OPS:
                raise ElrError(f"op={op!r} is unknown: choose from {', '.join(OPS)}")


def cases_of(op: str) -> list[Case]:
    """The sizes of an op."""
    return import_module(f"pallas_kernels.{op}.shapes").CASES


def main(settings: Bench) -> list[Row]:
    """Print the table and return its rows."""
    cases = [(op, case) for op in settings.op for case in cases_of(op) if settings.case in (None, case.name)]
    if settings.model is not None:
        leave_devices()
        rows = list(modelled(cases, CHIPS[settings.model]))
    else:
        rows = list(measured(cases, settings))
    _print(settings, rows)
    return rows


def measured(cases: list[tuple[str, Case]], settings: Bench) -> Iterator[Row]:
    """Time every form that runs here, in turns."""
    found = jax.devices()[0]
    chip = next((chip for name, chip in CHIPS.items() if name in found.device_kind.lower().replace(" lite", "e")), None)
    if settings.preset == "h200" and chip is not CHIPS["h200"]:
        raise ElrError(f"--preset h200 found a {found.device_kind}: run it on an H200, or leave the preset out")
    for op, case in cases:
        operands = [_draw(shape, seed) for seed, shape in enumerate(case.operands)]
        for kind, wrap in _kinds(case):
            forms = {name: jax.jit(wrap(form)) for name, form in _forms(case)}
            runs = {name: run for name, run in forms.items() if _runs(run, operands)}
            times = race({name: partial(run, *operands) for name, run in runs.items()}, repeats=settings.repeats)
            for name, time in times.items():
                yield {
                    "op": op,
                    "size": case.name,
                    "pass": kind,
                    "form": name,
                    "ms": 1000 * time.median,
                    "roofline": chip and _least(case, chip, kind) / time.median,
                    "ratio": times["xla"].median / time.median,
                }


def modelled(cases: list[tuple[str, Case]], chip: Chip) -> Iterator[Row]:
    """Compile both forms for a chip and tell what the compiler says of them."""
    with compiler(chip) as compile:
        for op, case in cases:
            forms: list[Implementation] = ["xla", *[name for name in case.kernels if name == chip.kernels]]
            for kind, wrap in _kinds(case):
                seconds = {}
                for form in forms:
                    program = compile(wrap(case.forward(form)), *case.operands)
                    cost = program.cost_analysis() or {}
                    # XLA knows nothing of a kernel's own time, and gives no time at all for some programs
                    around = cost.get("bytes accessed", 0) / chip.hardware.bandwidth
                    seconds[form] = max(cost.get("optimal_seconds", 0), around)
                    if form != "xla":
                        seconds[form] += _least(case, chip, kind)
                    known = form != "xla" or not case.looped
                    yield {
                        "op": op,
                        "size": case.name,
                        "pass": kind,
                        "form": form,
                        "ms": 1000 * seconds[form] if known else None,
                        "temporary MB": program.memory_analysis().temp_size_in_bytes / 1e6,
                        "ratio": seconds["xla"] / seconds[form] if seconds[form] and not case.looped else None,
                    }


def _kinds(case: Case) -> list[tuple[str, Callable[..., Any]]]:
    forward: tuple[str, Callable[..., Any]] = ("forward", lambda form: form)
    return [forward, ("gradients", case.gradients)] if case.inputs else [forward]


def _forms(case: Case) -> Iterator[tuple[str, Callable[..., Any]]]:
    platform = target_platform()
    kernels: list[Implementation] = [name for name in case.kernels if PLATFORMS[name] == platform]
    for name in ("xla", *kernels):
        yield name, case.forward(name)
    if platform in case.opponents:
        yield case.opponents[platform]


def _runs(run: Callable[..., Any], operands: list[Array]) -> bool:
    """Whether a form compiles and runs; an opponent may not know a type or a size."""
    try:
        jax.block_until_ready(run(*operands))
    except Exception as error:
        Console(stderr=True).print(f"left out: {str(error).splitlines()[0][:200]}", style="dim", highlight=False)
        return False
    return True


def _least(case: Case, chip: Chip, kind: str) -> float:
    """Seconds of the roofline; gradients cost two forward passes more in arithmetic and in memory."""
    passes = 1 if kind == "forward" else 3
    return chip.hardware.roofline(passes * case.flops, passes * case.bytes)


def _draw(shape: jax.ShapeDtypeStruct, seed: int) -> Array:
    if shape.dtype == jnp.bool_:
        return jnp.ones(shape.shape, bool)
    if shape.dtype == jnp.int32:
        return jnp.ones(shape.shape, jnp.int32) if len(shape.shape) == 2 else jnp.full(shape.shape, 10**6)
    return jax.random.normal(jax.random.key(seed), shape.shape).astype(shape.dtype)


def _print(settings: Bench, rows: list[Row]) -> None:
    what = f"modelled for {settings.model}, not measured" if settings.model else str(machine())
    table = Table(title=what, title_justify="left")
    for name in rows[0] if rows else ():
        table.add_column(name, justify="right" if name in ("ms", "roofline", "ratio", "temporary MB") else "left")
    for row in rows:
        table.add_row(*("" if x is None else f"{x:.3g}" if isinstance(x, float) else str(x) for x in row.values()))
    Console().print(table)


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Bench, description=__doc__))
