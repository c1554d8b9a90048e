"""Compare the JAX model with PyTorch's answers: a row for every way to run it, a rung for every layer."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from checkpoints_convert import ladder
from checkpoints_convert.golden import Case, Difference, Golden, difference
from elr_jax.config import LETTERS, ModelConfig, Runtime
from elr_jax.parameters import Params

ROUNDING = 2.0
"""Noise below so many units in the last place of the largest value is luck: it counts as that much."""
CHAOS = 1e4
"""Noise above so many units in the last place of the logits' standard deviation says nothing of the other side."""


class Row(NamedTuple):
    """One way to run the prompt: how far JAX is from PyTorch, PyTorch from float64, and what was allowed."""

    case: Case
    jax: Difference
    noise: Difference
    allowed: float

    @property
    def passed(self) -> bool:
        """Within the tolerance; NaN is not."""
        return self.jax.max_abs <= self.allowed


class Rung(NamedTuple):
    """One hidden state between the layers, or the logits (last): largest differences and what was allowed."""

    name: str
    jax: float
    noise: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Within the tolerance; NaN is not."""
        return self.jax <= self.allowed


@dataclass(frozen=True, kw_only=True)
class Report:
    """All rows and rungs, how much `embedding_norm` changes by loop count, and what is too noisy to tell."""

    rows: list[Row]
    rungs: list[Rung]
    embedding_norm: dict[int, Difference]
    chaotic: list[Case]

    @property
    def first_departure(self) -> str | None:
        """Name of the first rung beyond the tolerance."""
        return next((rung.name for rung in self.rungs if not rung.passed), None)

    @property
    def passed(self) -> bool:
        """Whether parity is shown: every row and rung within the tolerance, and none too noisy to tell."""
        return not self.chaotic and all(one.passed for one in (*self.rows, *self.rungs))


def compare(golden: Golden, params: Params, config: ModelConfig, *, factor: float) -> Report:
    """Run the JAX model as PyTorch was run; `factor` times PyTorch's own noise is allowed."""
    runtime = Runtime(dtype=golden.dtype)  # pyright: ignore[reportArgumentType]
    ulp = float(jnp.finfo(golden.dtype).eps)

    def allowed(noise: float, reference: np.ndarray) -> float:
        return factor * max(noise, ROUNDING * ulp * float(np.abs(reference).max()))

    rows, chaotic, worst = [], [], 0.0
    for case in golden.cases():
        expected, noise = golden.logits[case.key], golden.noise[case.key]
        worst = max(worst, noise.max_abs)  # one way's noise is one draw: fewer loops and other calls have drawn too
        made = ladder.logits(params, golden.tokens, case, config=config, runtime=runtime)
        rows.append(Row(case, difference(made, expected), noise, allowed(worst, expected)))
        if not noise.max_abs <= min(1, CHAOS * ulp) * expected.std():
            chaotic.append(case)
    return Report(
        rows=rows,
        rungs=list(_climb(golden, params, config, runtime, allowed)),
        embedding_norm=_effect_of_embedding_norm(golden, params, config, runtime),
        chaotic=chaotic,
    )


def _climb(golden: Golden, params: Params, config: ModelConfig, runtime: Runtime, allowed) -> Iterator[Rung]:
    """The rungs in order; noise only grows on the way, so each is allowed the largest up to it."""
    made = ladder.rungs(params, golden.tokens, max(golden.loops), config=config, runtime=runtime)
    last = Case(max(golden.loops), None, "one call")
    made["logits"] = ladder.logits(params, golden.tokens, last, config=config, runtime=runtime)
    worst = 0.0
    for name, expected in golden.rungs.items():
        noise = golden.rung_noise[name]
        worst = max(worst, noise)
        yield Rung(name, float(np.abs(made[name] - expected).max()), noise, allowed(worst, expected))


def _effect_of_embedding_norm(
    golden: Golden, params: Params, config: ModelConfig, runtime: Runtime
) -> dict[int, Difference]:
    def run(loops: int, normed: bool) -> np.ndarray:
        assert config.sphere is not None
        one = replace(config, sphere=replace(config.sphere, embedding_norm=normed))
        return ladder.logits(params, golden.tokens, Case(loops, None, "one call"), config=one, runtime=runtime)

    return {loops: difference(run(loops, False), run(loops, True)) for loops in golden.loops}


def describe(rung: str, config: ModelConfig) -> str:
    """A rung's name with the kind of its layer."""
    *_, last = rung.split(".")
    return f"{rung} ({LETTERS[config.layers[int(last)]]})" if last.isdigit() else rung
