"""Laws of the loop count, and the plan that makes mixed depths cheap.

A law says how many loops each row of step `t`'s global batch runs. Every draw is a pure function of
(key, step, row), so a process that holds only some rows computes just those, and resuming needs nothing but the
step. `marginal()` is the exact law of one row's depth; most laws draw from that very table and differ only in who
shares a draw.

The plan: sorting a batch by depth before cutting it into microbatches makes each microbatch nearly uniform, so that
a step costs about Σ depth rounds instead of B · max depth.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elr_jax.errors import ElrError
from elr_jax.typing import Array, Bool, Depth, Int32, PRNGKeyArray

Step = int | Int32[Array, ""]
Rows = Int32[Array, "B"]

_LARGEST_BATCH = 1 << 16
_LARGEST_DENOMINATOR = (1 << 16) - 1


class _Law:
    """What follows from the marginal alone."""

    def marginal(self, progress: float = 1.0) -> np.ndarray:
        """Exact probabilities of 1..max_loops, float64 [max_loops], once `progress` (0..1) of the run is done."""
        raise NotImplementedError

    def mean(self, progress: float = 1.0) -> float:
        """Mean loop count k̄ = Σ k·p_k at that fraction of the run."""
        probabilities = self.marginal(progress)
        return float(probabilities @ np.arange(1, len(probabilities) + 1))


@dataclass(frozen=True, kw_only=True)
class Fixed(_Law):
    """Every row runs the same number of loops in every step."""

    loops: int

    def __post_init__(self):
        _at_least_one("loops", self.loops)

    @property
    def max_loops(self) -> int:
        """The loop count itself."""
        return self.loops

    def marginal(self, progress: float = 1.0) -> np.ndarray:
        """All mass on `loops`."""
        return _point(self.loops, self.loops)

    def sample(self, key: PRNGKeyArray, step: Step, rows: Rows, *, batch_size: int, total_steps: int) -> Depth:
        """`loops` for every row."""
        return jnp.full(rows.shape, self.loops, jnp.int32)


@dataclass(frozen=True, kw_only=True)
class SharedDraw(_Law):
    """One draw a step for all rows: one loop with probability p, else uniform on 1..K.

    p = 0 draws uniformly; p = 1/3 adds the one-loop step that a looped model needs to stay good at one loop.
    """

    max_loops: int
    one_probability: float = 0.0
    """Probability p of a one-loop step, on top of the uniform draw's own 1/K."""

    def __post_init__(self):
        _at_least_one("max_loops", self.max_loops)
        _fraction("one_probability", self.one_probability)

    def marginal(self, progress: float = 1.0) -> np.ndarray:
        """p + (1−p)/K for one loop, (1−p)/K for each other count."""
        return _one_or_uniform(self.one_probability, self.max_loops)

    def sample(self, key: PRNGKeyArray, step: Step, rows: Rows, *, batch_size: int, total_steps: int) -> Depth:
        """The step's draw, repeated for every row."""
        return jnp.full(rows.shape, _draw(jax.random.fold_in(key, step), self.marginal()))


@dataclass(frozen=True, kw_only=True)
class RotatingSlice(_Law):
    """A rotating slice of the rows runs one loop, the others share one uniform draw of 1..K (ELR, Eq. 3).

    p₁ = 1/K + (1 − 1/K)·f and k̄ = f + (1 − f)(K + 1)/2. At step t of batch size B the slice is the rows whose
    number, modulo B, lies in [t·f·B, (t+1)·f·B): slices of successive steps join without gap or overlap, so every
    row is forced in exactly the share f of the steps, also where f·B is no whole number. f is taken as the nearest
    fraction with a denominator up to 65,535 (0.15 = 3/20), which moves it by less than 8e-6.
    """

    max_loops: int
    forced: float
    """Share f of the rows that is forced to one loop."""

    def __post_init__(self):
        _at_least_one("max_loops", self.max_loops)
        _fraction("forced", self.forced)

    def marginal(self, progress: float = 1.0) -> np.ndarray:
        """f + (1−f)/K for one loop, (1−f)/K for each other count."""
        return _one_or_uniform(float(self._share), self.max_loops)

    def sample(self, key: PRNGKeyArray, step: Step, rows: Rows, *, batch_size: int, total_steps: int) -> Depth:
        """One loop in the step's slice, the shared draw elsewhere."""
        shared = _draw(jax.random.fold_in(key, step), _one_or_uniform(0.0, self.max_loops))
        return jnp.where(self._in_slice(step, rows, batch_size), 1, shared)

    @property
    def _share(self) -> Fraction:
        return Fraction(self.forced).limit_denominator(_LARGEST_DENOMINATOR)

    def _in_slice(self, step: Step, rows: Rows, batch_size: int) -> Bool[Array, "B"]:
        """Whether (row/B − t·f) mod 1 < f, in whole numbers that fit 32 bits at any step.

        In units of 1/(B·q), with f = p/q: t·f mod 1 is B·((t mod q)·p mod q). Both products stay below
        65,536 · 65,535 < 2³².
        """
        if batch_size > _LARGEST_BATCH:
            raise ElrError(f"batch_size={batch_size} is too large for RotatingSlice: use up to {_LARGEST_BATCH} rows")
        p, q = (jnp.uint32(n) for n in self._share.as_integer_ratio())
        size = jnp.uint32(batch_size)
        start = size * (jnp.asarray(step).astype(jnp.uint32) % q * p % q)
        row = rows.astype(jnp.uint32) * q
        behind = jnp.where(row >= start, row - start, row + (size * q - start))
        return behind < size * p


@dataclass(frozen=True, kw_only=True)
class PerExample(_Law):
    """Each row draws alone: one loop with probability f, else uniform on 1..K; the marginal of `RotatingSlice`."""

    max_loops: int
    forced: float = 0.0
    """Probability f that a row is forced to one loop."""

    def __post_init__(self):
        _at_least_one("max_loops", self.max_loops)
        _fraction("forced", self.forced)

    def marginal(self, progress: float = 1.0) -> np.ndarray:
        """f + (1−f)/K for one loop, (1−f)/K for each other count."""
        return _one_or_uniform(self.forced, self.max_loops)

    def sample(self, key: PRNGKeyArray, step: Step, rows: Rows, *, batch_size: int, total_steps: int) -> Depth:
        """An independent draw for every row."""
        return _draw_rows(key, step, rows, self.marginal())


@dataclass(frozen=True, kw_only=True)
class PoissonDepth(_Law):
    """Each row draws max(1, Poisson(rate)), cut at K (Parcae: rate 8)."""

    rate: float
    """Mean of the Poisson count before it is cut; `mean()` is the mean loop count after."""
    max_loops: int

    def __post_init__(self):
        _at_least_one("max_loops", self.max_loops)
        _positive("rate", self.rate)

    def marginal(self, progress: float = 1.0) -> np.ndarray:
        """e^−λ(1+λ) for one loop, e^−λ λ^k / k! between, all of the tail at K."""
        counts = _poisson(np.asarray(self.rate), self.max_loops)
        return _with_tail(np.append(counts[0] + counts[1], counts[2:]))

    def sample(self, key: PRNGKeyArray, step: Step, rows: Rows, *, batch_size: int, total_steps: int) -> Depth:
        """An independent draw for every row."""
        return _draw_rows(key, step, rows, self.marginal())


@dataclass(frozen=True, kw_only=True)
class LogNormalPoisson(_Law):
    """Each row draws Poisson(λ) + 1 cut at K, with ln λ ~ Normal(ln rate − σ²/2, σ), so λ has mean `rate` (Huginn)."""

    rate: float
    """Mean of the Poisson rate λ; before the cut the mean loop count is rate + 1."""
    max_loops: int
    sigma: float = 0.5

    def __post_init__(self):
        _at_least_one("max_loops", self.max_loops)
        _positive("rate", self.rate)
        if not 0 <= self.sigma <= 4:
            raise ElrError(f"sigma={self.sigma} is out of range: give a value from 0 to 4")

    def marginal(self, progress: float = 1.0) -> np.ndarray:
        """∫ e^−λ λ^(k−1) / (k−1)! dN(ln λ), all of the tail at K.

        Trapezoids of 1/128 standard deviation over ±12: the rule converges geometrically on such bell-shaped analytic
        integrands; the error is below 1e-12 while σ·√K ≤ 100.
        """
        z = np.linspace(-12.0, 12.0, 24 * 128 + 1)
        weights = np.exp(-(z**2) / 2) / (128 * math.sqrt(2 * math.pi))
        rates = self.rate * np.exp(self.sigma * z - self.sigma**2 / 2)
        return _with_tail(_poisson(rates, self.max_loops)[:-1] @ weights)

    def sample(self, key: PRNGKeyArray, step: Step, rows: Rows, *, batch_size: int, total_steps: int) -> Depth:
        """An independent draw for every row."""
        return _draw_rows(key, step, rows, self.marginal())


@dataclass(frozen=True, kw_only=True)
class Weighted(_Law):
    """Each row draws k with a probability of its own for each of 1..K."""

    probabilities: tuple[float, ...]
    """p₁ … p_K, which add up to 1."""

    def __post_init__(self):
        shown = f"probabilities={self.probabilities}"
        if not self.probabilities or not all(0 <= p <= 1 for p in self.probabilities):
            raise ElrError(f"{shown} are no probabilities: give one from 0 to 1 for each loop count from 1 on")
        total = math.fsum(self.probabilities)
        if abs(total - 1) > 1e-6:
            raise ElrError(f"{shown} add up to {total:.7g}: divide each by that, so that they add up to 1")

    @property
    def max_loops(self) -> int:
        """As many as there are probabilities."""
        return len(self.probabilities)

    def marginal(self, progress: float = 1.0) -> np.ndarray:
        """The probabilities, freed of the rounding of their sum."""
        return np.array(self.probabilities, np.float64) / math.fsum(self.probabilities)

    def sample(self, key: PRNGKeyArray, step: Step, rows: Rows, *, batch_size: int, total_steps: int) -> Depth:
        """An independent draw for every row."""
        return _draw_rows(key, step, rows, self.marginal())


SteadyLaw = Fixed | SharedDraw | RotatingSlice | PerExample | PoissonDepth | LogNormalPoisson | Weighted


@dataclass(frozen=True, kw_only=True)
class Switch(_Law):
    """One loop until the fraction `after` of the run is done, then `law` (ELR's late switch)."""

    after: float
    law: SteadyLaw

    def __post_init__(self):
        _fraction("after", self.after)
        if isinstance(self.law, Switch):
            raise ElrError("Switch(law=Switch(…)) is nested: give the later law itself")

    @property
    def max_loops(self) -> int:
        """Largest loop count after the switch."""
        return self.law.max_loops

    def first_step(self, total_steps: int) -> int:
        """The first step of the later law, ⌈after · total_steps⌉."""
        return math.ceil(self.after * total_steps - 1e-6)  # 0.07 · 100 is a little over 7 in floating point

    def marginal(self, progress: float = 1.0) -> np.ndarray:
        """All mass on one loop before the switch, the later law's marginal from then on."""
        return self.law.marginal(progress) if progress >= self.after else _point(1, self.max_loops)

    def sample(self, key: PRNGKeyArray, step: Step, rows: Rows, *, batch_size: int, total_steps: int) -> Depth:
        """One loop before `first_step`, then the later law's draw."""
        later = self.law.sample(key, step, rows, batch_size=batch_size, total_steps=total_steps)
        return jnp.where(jnp.asarray(step) >= self.first_step(total_steps), later, 1)


DepthLaw = SteadyLaw | Switch
LAW_UNIONS = (SteadyLaw, DepthLaw)
"""The `unions` that `config.to_dict` and `from_dict` need for a config with a law; the inner one stands first."""


def sort_by_depth(depth: Depth, microbatches: int) -> Int32[Array, "B"]:
    """Row order that puts rows of like depth into the same one of `microbatches` equal consecutive parts.

    Deepest first, equal depths in their old order. The deepest part needs the most memory, so a step that does not fit
    fails in its first part; every order of the parts costs the same.
    """
    _rows_per_part(depth.shape[0], microbatches)
    return jnp.argsort(-depth, stable=True).astype(jnp.int32)


def executed_rounds(depth: Depth | np.ndarray, parts: int) -> Any:
    """Row-rounds a step runs with its rows in the given order: Σ over equal consecutive parts of rows · deepest row.

    Parts are microbatches or, where ranks run apart, the ranks' parts of them.
    """
    rows = _rows_per_part(depth.shape[0], parts)
    return rows * depth.reshape(parts, rows).max(axis=1).sum()


def useful_rounds(depth: Depth | np.ndarray) -> Any:
    """Row-rounds a step needs: Σ depth."""
    return depth.sum()


def _rows_per_part(batch_size: int, parts: int) -> int:
    if parts < 1 or batch_size % parts:
        raise ElrError(f"a batch of {batch_size} rows can't be cut into {parts} equal parts: use a divisor")
    return batch_size // parts


def _draw(key: PRNGKeyArray, probabilities: np.ndarray) -> Int32[Array, ""]:
    """One loop count from a table of 1..K: 1 + the number of cumulative bounds that 32 random bits reach."""
    bounds = np.minimum(np.rint(np.cumsum(probabilities[:-1]) * 2.0**32), 2.0**32 - 1).astype(np.uint32)
    return 1 + jnp.sum(jax.random.bits(key, (), jnp.uint32) >= bounds, dtype=jnp.int32)


def _draw_rows(key: PRNGKeyArray, step: Step, rows: Rows, probabilities: np.ndarray) -> Depth:
    step_key = jax.random.fold_in(key, step)
    return jax.vmap(lambda row: _draw(jax.random.fold_in(step_key, row), probabilities))(rows)


def _point(loops: int, max_loops: int) -> np.ndarray:
    return np.eye(max_loops)[loops - 1]


def _one_or_uniform(one: float, max_loops: int) -> np.ndarray:
    return one * _point(1, max_loops) + (1 - one) / max_loops


def _poisson(rates: np.ndarray, largest: int) -> np.ndarray:
    """Poisson probabilities of the counts 0..largest: [largest + 1, *rates.shape]."""
    counts = np.arange(largest + 1).reshape(-1, *[1] * rates.ndim)
    log_factorial = np.vectorize(math.lgamma, otypes=[float])(counts + 1.0)
    return np.exp(counts * np.log(rates) - rates - log_factorial)


def _with_tail(probabilities: np.ndarray) -> np.ndarray:
    """The table with its last entry replaced by what the others leave of 1."""
    head = probabilities[:-1]
    return np.append(head, max(0.0, 1.0 - head.sum()))


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ElrError(f"{name}={value} must be at least 1")


def _positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ElrError(f"{name}={value} must be a positive number")


def _fraction(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ElrError(f"{name}={value} is no fraction: give a value from 0 to 1")
