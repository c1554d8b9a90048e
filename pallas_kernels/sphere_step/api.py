"""What the library calls: the step of all tokens in one pass over the state."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax

from elr_jax.typing import Array, Float, Hidden
from pallas_kernels.contract import HIDDEN, Choice, Implementation, choose, kernels_of, run
from pallas_kernels.sphere_step import xla

BEST: Mapping[str, Implementation] = {}
"""By platform, the form taken without a name: XLA's until a kernel is known to be faster."""
_kernels = partial(kernels_of, __package__)
AXES = (HIDDEN, HIDDEN, (None,))
"""Logical axes of the operands."""


def sphere_step(
    state: Hidden,
    target: Hidden,
    rate: Float[Array, "D"],
    *,
    eps: float,
    implementation: Implementation | None = None,
) -> Hidden:
    """unit(ĥ + |α| ⊙ (ô − ĥ)) of h = `state` and o = `target` [B,T,D], with unit(x) = x / √(Σ x² + eps). [nGPT]

    Array traffic with X = B·T·D elements: three norms in passes of their own read h and o three times and write once,
    7 X; one kernel moves h, o and the result once, 3 X, and its backward pass h, o and three gradients, 5 X. Nothing
    but the operands is kept.

    Raises:
        ElrError: a named implementation that can't run here, with the reason.
    """
    refusal = lambda name: _kernels(name).refusal(state, target)
    choice = choose("sphere_step", implementation, best=BEST, refusal=refusal)
    if choice.implementation == "xla":
        return xla.sphere_step(state, target, rate, eps=eps)
    return _differentiable(choice, eps, state, target, rate)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(choice: Choice, eps: float, *operands: Array) -> Hidden:
    kernel = partial(_kernels(choice.implementation).forward, eps=eps)
    return run(choice, kernel, partial(xla.sphere_step, eps=eps), *operands, axes=AXES, like=0)


def _forward(choice: Choice, eps: float, *operands: Array) -> tuple[Hidden, Any]:
    return _differentiable(choice, eps, *operands), operands


def _backward(choice: Choice, eps: float, operands: tuple[Array, ...], cotangent: Hidden) -> tuple[Array, ...]:
    kernel = partial(_kernels(choice.implementation).backward, eps=eps)
    plain = partial(_xla_backward, eps=eps)
    return run(choice, kernel, plain, *operands, cotangent, axes=(*AXES, HIDDEN), like=(0, 1, 2))


def _xla_backward(*operands: Array, eps: float) -> tuple[Array, ...]:
    *inputs, cotangent = operands
    return jax.vjp(partial(xla.sphere_step, eps=eps), *inputs)[1](cotangent)


_differentiable.defvjp(_forward, _backward)
