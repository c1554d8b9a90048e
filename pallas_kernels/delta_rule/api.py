"""What the library calls: the delta rule of whole sequences, a chunk's inside never leaving the chip."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from elr_jax.layers.delta_rule import (
    DeltaKeys,
    DeltaQueries,
    DeltaValues,
    LogDecays,
    Outputs,
    State,
    StepSizes,
    chunked,
)
from elr_jax.typing import Array
from pallas_kernels.contract import Choice, Implementation, choose, cut_rows, kernels_of, run

QUERY, KEY, STATE = ("batch", None, "heads", None), ("batch", None, None, "heads", None), ("batch", "heads", None, None)
STARTS = ("batch", None, "heads", None, None)
AXES = (QUERY, KEY, KEY, KEY[:-1], QUERY[:-1], STATE)
"""Logical axes of the operands."""
BEST: Mapping[str, Implementation] = {}
"""By platform, the form taken without a name: XLA's until a kernel is known to be faster."""
_kernels = partial(kernels_of, __package__)


def delta_rule(
    q: DeltaQueries,
    k: DeltaKeys,
    v: DeltaValues,
    beta: StepSizes,
    g: LogDecays,
    state: State,
    *,
    implementation: Implementation | None = None,
) -> tuple[Outputs, State]:
    """What `elr_jax.layers.delta_rule.sequential` defines: outputs [B,T,N,V] and the state [B,N,H,V] after the tokens.

    The XLA form is `chunked` of the same file, which also has the chunk that the kernels compute. The kernel moves q,
    k, v and the outputs once, and keeps for the backward pass the operands and the state at the start of each chunk.

    Raises:
        ElrError: a named implementation that can't run here, with the reason.
    """
    operands = (q, k, v, beta, g, state)
    choice = choose("delta_rule", implementation, best=BEST, refusal=lambda name: _refusal(name, *operands))
    return chunked(*operands) if choice.implementation == "xla" else _differentiable(choice, *operands)


def _refusal(implementation: Implementation, *operands: Array) -> str | None:
    if implementation == "pallas_gpu":
        return "it has no kernel for GPUs"
    return cut_rows() or _kernels(implementation).refusal(*operands)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(choice: Choice, *operands: Array) -> tuple[Outputs, State]:
    return run(choice, _kernels(choice.implementation).forward, chunked, *operands, axes=AXES, like=(0, 5))


def _forward(choice: Choice, *operands: Array) -> tuple[tuple[Outputs, State], Any]:
    kernels = _kernels(choice.implementation)

    def plain(*operands: Array) -> tuple[Array, ...]:
        return *chunked(*operands), jnp.zeros(kernels.starts_shape(*operands), jnp.float32)

    out, end, starts = run(choice, partial(kernels.forward, keep=True), plain, *operands, axes=AXES, like=(0, 5, 0))
    return (out, end), (operands, starts)


def _backward(choice: Choice, saved: Any, cotangents: tuple[Outputs, State]) -> tuple[Array, ...]:
    operands, starts = saved
    kernel, axes = _kernels(choice.implementation).backward, (*AXES, STARTS, QUERY, STATE)
    return run(choice, kernel, _xla_backward, *operands, starts, *cotangents, axes=axes, like=tuple(range(6)))


def _xla_backward(*operands: Array) -> tuple[Array, ...]:
    *inputs, _, out, state = operands
    return jax.vjp(chunked, *inputs)[1]((out, state))


_differentiable.defvjp(_forward, _backward)
