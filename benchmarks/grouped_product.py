"""The experts' products of a mixture on the CPU, against XLA's own grouped product and a plain one of as many rows.

    python -m benchmarks.grouped_product          about a minute on two cores

Rows are sorted by expert, as a mixture's are, in groups of random sizes; float32. XLA's (`jax.lax.ragged_dot`) takes
every expert to every row and masks. The plain product, of all rows by one weight, is a bound: its operations are the
same and it reads less. Expect XLA's time to grow with the experts, and that of blocks not to.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks.report import Row, tell_machine, tell_table, write_json
from benchmarks.timing import machine, race
from elr_jax.errors import ElrError, one_line_errors
from elr_jax.layers.grouped import grouped_product
from elr_jax.typing import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedRace:
    """Sizes; the defaults are those the project's numbers are told for."""

    experts: tuple[int, ...] = (4, 16, 64)
    rows: int = 4096
    """Of all experts: tokens times experts a token."""
    width: int = 256
    inner: int = 512
    """Of an expert."""
    repeats: int = 5
    """Turns of each contestant."""
    json: str | None = None
    """File to write the table to; None writes nothing."""

    def __post_init__(self):
        for name in ("rows", "width", "inner", "repeats"):
            if getattr(self, name) < 1:
                raise ElrError(f"{name}={getattr(self, name)} must be at least 1")


def main(settings: GroupedRace) -> dict[str, Any]:
    """Race every number of experts, forward and with gradients, and print the times."""
    result: dict[str, Any] = {"machine": machine(), "settings": dataclasses.asdict(settings)}
    result["rows"] = [row for experts in settings.experts for row in compare(settings, experts)]
    tell_machine(result["machine"])
    tell_table(f"{settings.rows:,} rows, {settings.width} to {settings.inner}", result["rows"])
    write_json(settings.json, result)
    return result


def compare(settings: GroupedRace, experts: int) -> list[Row]:
    """The contestants at one number of experts, after a check that the two that do the same agree."""
    rng = np.random.default_rng(experts)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[-1]), jnp.float32)
    rows, weights = draw(settings.rows, settings.width), draw(experts, settings.width, settings.inner)
    cotangent = draw(settings.rows, settings.inner)
    sizes = jnp.asarray(np.bincount(rng.integers(experts, size=settings.rows), minlength=experts), jnp.int32)
    forms = {
        "blocks": (grouped_product, weights),
        "ragged_dot": (jax.lax.ragged_dot, weights),
        "plain": (lambda rows, weight, _: rows @ weight, weights[0]),
    }
    found = []
    for part, form in (("forward", _forward), ("with gradients", _with_gradients)):
        calls = {
            name: partial(jax.jit(partial(form, one)), rows, weight, sizes, cotangent)
            for name, (one, weight) in forms.items()
        }
        for one, other in zip(jax.tree.leaves(calls["blocks"]()), jax.tree.leaves(calls["ragged_dot"]()), strict=True):
            if (apart := float(jnp.max(jnp.abs(one - other)))) > 1e-3:
                raise ElrError(f"{part} with {experts} experts differs by {apart}: the race means nothing")
        times = race(calls, repeats=settings.repeats)
        ours = times["blocks"].median
        found.append(
            {"experts": experts, "pass": part}
            | {f"{name} ms": 1000 * time.median for name, time in times.items()}
            | {f"{name} / blocks": time.median / ours for name, time in times.items() if name != "blocks"}
        )
    return found


def _forward(form: Callable[..., Array], rows: Array, weights: Array, sizes: Array, cotangent: Array) -> Array:
    return form(rows, weights, sizes)


def _with_gradients(form: Callable[..., Array], rows: Array, weights: Array, sizes: Array, cotangent: Array) -> Any:
    y, pull = jax.vjp(lambda rows, weights: form(rows, weights, sizes), rows, weights)
    return y, pull(cotangent)


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(GroupedRace, description=__doc__))
