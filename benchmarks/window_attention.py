"""Attention over a window on the CPU: this library's blocks against PyTorch's attention with a window for its mask.

    python -m benchmarks.window_attention          about a minute on two cores

Same arrays, float32, forward and forward with gradients; the longer the sequence, the more of T² a mask wastes. Expect
this library ahead from T = 2048 on, and its time to double with T. Needs `pip install -e '.[parity]'`.
"""

# pyright: reportMissingImports=false
# torch is in the parity extra alone

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks.report import Row, tell_machine, tell_table, write_json
from benchmarks.timing import machine, race, require_torch
from elr_jax.errors import ElrError, one_line_errors
from pallas_kernels.windowed_attention import windowed_attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowAttention:
    """Sizes; the defaults are those the project's numbers are told for."""

    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192)
    window: int = 256
    heads: int = 4
    head_dim: int = 64
    batch: int = 1
    repeats: int = 3
    """Turns of each contestant."""
    json: str | None = None
    """File to write the table to; None writes nothing."""

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if name != "json" and min(value if isinstance(value, tuple) else (value,)) < 1:
                raise ElrError(f"{name}={value} must be at least 1")


def main(settings: WindowAttention) -> list[Row]:
    """Race all lengths and print the table."""
    rows = [row for length in settings.lengths for row in compare(settings, length)]
    result = {"machine": machine(), "settings": dataclasses.asdict(settings), "rows": rows}
    tell_machine(result["machine"])
    tell_table(f"{settings.heads} heads of {settings.head_dim}, window {settings.window}", rows)
    write_json(settings.json, result)
    return rows


def compare(settings: WindowAttention, length: int) -> list[Row]:
    """Both contestants at one length, after a check that they agree."""
    rng = np.random.default_rng(0)
    shape = (settings.batch, length, settings.heads, settings.head_dim)
    arrays = [rng.standard_normal(shape, np.float32) for _ in range(4)]
    here, there = _jax_forms(arrays, settings.window), _torch_forms(arrays, settings.window)
    rows = []
    for kind in here:
        one, other = np.asarray(here[kind]()), np.swapaxes(np.asarray(there[kind]()), 1, 2)
        if np.abs(one - other).max() > 1e-3:
            raise ElrError(f"{kind} at length {length} differs by {np.abs(one - other).max()}: the race means nothing")
        times = race({"jax": here[kind], "torch": there[kind]}, repeats=settings.repeats)
        jax_time, torch_time = times["jax"], times["torch"]
        rows.append(
            {
                "T": length,
                "pass": kind,
                "jax ms": 1000 * jax_time.median,
                "torch ms": 1000 * torch_time.median,
                "torch / jax": torch_time.median / jax_time.median,
                "fastest torch / jax": torch_time.fastest / jax_time.fastest,
            }
        )
    return rows


def _jax_forms(arrays: list[np.ndarray], window: int) -> dict[str, Callable[[], Any]]:
    q, k, v, cotangent = (jnp.asarray(x) for x in arrays)
    call = partial(windowed_attention, window=window, implementation="xla")
    gradient = jax.jit(jax.grad(lambda *x: jnp.sum(call(*x) * cotangent), argnums=(0, 1, 2)))
    forward = jax.jit(call)
    return {"forward": lambda: forward(q, k, v), "gradients": lambda: gradient(q, k, v)[0]}


def _torch_forms(arrays: list[np.ndarray], window: int) -> dict[str, Callable[[], Any]]:
    torch = require_torch()
    q, k, v, cotangent = (torch.from_numpy(np.swapaxes(x, 1, 2).copy()) for x in arrays)
    position = torch.arange(q.shape[2])
    behind = position[:, None] - position
    mask = (behind >= 0) & (behind < window)
    attend = partial(torch.nn.functional.scaled_dot_product_attention, attn_mask=mask)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def gradients() -> Any:
        out = attend(*leaves)
        return torch.autograd.grad(out, leaves, cotangent)[0].numpy()

    def forward() -> Any:
        with torch.no_grad():
            return attend(q, k, v).numpy()

    return {"forward": forward, "gradients": gradients}


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(WindowAttention, description=__doc__))
