"""An op at one size: what tests compile and benchmarks time, forward and with gradients."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax

from pallas_kernels.contract import Implementation


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call `function(*operands, implementation=…)` and what it must cost at least."""

    name: str
    function: Callable[..., Any]
    operands: tuple[jax.ShapeDtypeStruct, ...]
    inputs: int
    """The first so many operands have gradients; 0: no backward form."""
    flops: float
    """Of the forward pass, products alone."""
    scores: int = 0
    """Bytes of all scores [B, N, T, T] in the type of the operands, which no form may hold; 0 where there are none."""
    kernels: tuple[Implementation, ...] = ("pallas_tpu", "pallas_gpu")
    """Forms there are beside XLA's."""
    looped: bool = False
    """XLA's form is a loop, of which its compiler counts one round: it tells no time."""
    opponents: Mapping[str, tuple[str, Callable[..., Any]]] = field(default_factory=dict)
    """By platform, the name and the function of what it brings itself; it takes the same operands."""

    @property
    def bytes(self) -> int:
        """Traffic of the forward pass if every operand and the result, which is like the first, move once."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in (*self.operands, self.operands[0]))

    def forward(self, implementation: Implementation | None) -> Callable[..., Any]:
        """The call as a function of the operands."""
        return partial(self.function, implementation=implementation)

    def gradients(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A form's result and its gradients of the inputs; the cotangent is the first operand, which has its shape."""

        def run(*operands: Any) -> tuple[Any, ...]:
            inputs, rest = operands[: self.inputs], operands[self.inputs :]
            out, pull = jax.vjp(lambda *x: function(*x, *rest), *inputs)
            return out, *pull(operands[0])

        return run
