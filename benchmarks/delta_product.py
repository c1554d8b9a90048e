"""The delta product's chunks against its scan over tokens and against PyTorch's chunked form, forward and backward.

    python -m benchmarks.delta_product          about a minute on two cores

One sequence, float32. PyTorch's contestant is transformers' chunked gated delta rule on the P-fold sequence (the decay
on a token's first step, its query on the last), eager as transformers runs it; without it the other two race. Expect
time to double with the length, and the chunks ahead of both.
"""

# pyright: reportMissingImports=false
# torch and transformers are in the parity extra alone

import dataclasses
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import tyro

from benchmarks.report import Row, tell_machine, tell_table, write_json
from benchmarks.timing import machine, race
from elr_jax.errors import one_line_errors
from elr_jax.layers.delta_rule import chunked, rule_flops, sequential
from elr_jax.typing import Array

Inputs = tuple[Array, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaRace:
    """Sizes; the defaults are those the project's numbers are told for."""

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096)
    steps: int = 2
    """Householder steps a token."""
    heads: int = 4
    key_dim: int = 64
    value_dim: int = 64
    repeats: int = 3
    """Turns of each contestant."""
    json: str | None = None
    """File to write the table to; None writes nothing."""


def main(settings: DeltaRace) -> dict[str, Any]:
    """Race every length and print the times."""
    result: dict[str, Any] = {"machine": machine(), "settings": dataclasses.asdict(settings), "rows": []}
    tell_machine(result["machine"])
    for length in settings.lengths:
        inputs = _inputs(settings, length)
        for part, contestants in (("forward", _forward(inputs)), ("gradient", _gradient(inputs))):
            times = race(contestants, repeats=settings.repeats)
            result["rows"].append({"part": part, "tokens": length} | _row(settings, length, times, part))
    for part in ("forward", "gradient"):
        rows = [row for row in result["rows"] if row["part"] == part]
        tell_table(part, [{name: value for name, value in row.items() if name != "part"} for row in rows])
    write_json(settings.json, result)
    return result


def _inputs(settings: DeltaRace, length: int) -> Inputs:
    """Keys and queries of norm 1, step sizes in (0, 1), decays from 0.4 to 0.9999, no state yet."""
    keys = jax.random.split(jax.random.key(length), 5)
    lead, heads = (1, length), settings.heads
    q = jax.random.normal(keys[0], (*lead, heads, settings.key_dim))
    k = jax.random.normal(keys[1], (*lead, settings.steps, heads, settings.key_dim))
    v = jax.random.normal(keys[2], (*lead, settings.steps, heads, settings.value_dim))
    beta = jax.nn.sigmoid(jax.random.normal(keys[3], (*lead, settings.steps, heads)))
    g = -jnp.exp(jax.random.uniform(keys[4], (*lead, heads), minval=-9, maxval=0))
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    return q, k, v, beta, g, jnp.zeros((1, heads, settings.key_dim, settings.value_dim))


def _forward(inputs: Inputs) -> dict[str, Callable[[], Any]]:
    contestants: dict[str, Callable[[], Any]] = {
        name: partial(jax.jit(form), *inputs) for name, form in (("chunked", chunked), ("sequential", sequential))
    }
    if (peer := _Torch.load(inputs)) is not None:
        contestants["torch"] = peer.forward
    return contestants


def _gradient(inputs: Inputs) -> dict[str, Callable[[], Any]]:
    def gradient(form: Callable[..., tuple[Array, Array]]) -> Callable[..., Any]:
        return jax.jit(jax.grad(lambda *x: jnp.sum(jnp.square(form(*x)[0])), argnums=range(len(inputs))))

    contestants: dict[str, Callable[[], Any]] = {
        name: partial(gradient(form), *inputs) for name, form in (("chunked", chunked), ("sequential", sequential))
    }
    if (peer := _Torch.load(inputs)) is not None:
        contestants["torch"] = peer.gradient
    return contestants


class _Torch:
    """transformers' chunked form on the same inputs and the same number of threads."""

    def __init__(self, torch: Any, rule: Any, inputs: Inputs):
        torch.set_num_threads(int(machine()["cores"]))
        self.torch, self.rule = torch, rule
        self.inputs = [torch.tensor(jax.device_get(x)) for x in inputs]

    @classmethod
    def load(cls, inputs: Inputs) -> "_Torch | None":
        """The contestant, or None without PyTorch or a transformers that has the layer."""
        if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
            return None
        if importlib.util.find_spec("transformers.models.olmo_hybrid") is None:
            return None
        import torch
        from transformers.models.olmo_hybrid.modeling_olmo_hybrid import torch_chunk_gated_delta_rule

        return cls(torch, torch_chunk_gated_delta_rule, inputs)

    def outputs(self, q: Any, k: Any, v: Any, beta: Any, g: Any, state: Any) -> Any:
        batch, length, steps, *_ = k.shape
        ask = self.torch.cat([q.new_zeros(k.shape)[:, :, 1:], q[:, :, None]], 2)
        fade = self.torch.cat([g[:, :, None], g.new_zeros(beta.shape)[:, :, 1:]], 2)
        flat = [x.reshape(batch, length * steps, *x.shape[3:]) for x in (ask, k, v, fade, beta)]
        out, _ = self.rule(*flat, initial_state=state, output_final_state=True)
        return out.reshape(v.shape)[:, :, -1]

    def forward(self) -> None:
        with self.torch.no_grad():
            self.outputs(*self.inputs)

    def gradient(self) -> None:
        inputs = [x.clone().requires_grad_() for x in self.inputs]
        self.outputs(*inputs).square().sum().backward()


def _row(settings: DeltaRace, length: int, times: dict[str, Any], part: str) -> Row:
    cost = rule_flops(length, steps=settings.steps, key_dim=settings.key_dim, value_dim=settings.value_dim)
    work = settings.heads * length * cost * (1 if part == "forward" else 3)
    ours = times["chunked"]
    return (
        {f"{name} ms": 1000 * time.median for name, time in times.items()}
        | {f"{name} / chunked": time.median / ours.median for name, time in times.items() if name != "chunked"}
        | {"chunked GFLOP/s": work / ours.median / 1e9}
    )


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(DeltaRace, description=__doc__))
