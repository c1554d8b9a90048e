"""What the library calls: the adaptive delta of all tokens in one pass over the state."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from elr_jax.typing import Array, Bool, Float, Hidden
from pallas_kernels.contract import HIDDEN, Choice, Implementation, choose, kernels_of, run
from pallas_kernels.gated_update import xla

BEST: Mapping[str, Implementation] = {}
"""By platform, the form taken without a name: XLA's until a kernel is known to be faster."""
_kernels = partial(kernels_of, __package__)
AXES = (HIDDEN, HIDDEN, (None, None), (None,), (None,), ("batch",))
"""Logical axes of the operands."""


def gated_update(
    state: Hidden,
    proposal: Hidden,
    weight: Float[Array, "D D"],
    bias: Float[Array, "D"],
    gain: Float[Array, "D"],
    active: Bool[Array, "B"],
    *,
    eps: float,
    implementation: Implementation | None = None,
) -> Hidden:
    """s + β ⊙ (r − s) for active examples and s for the others, β = σ(RMSNorm(s) W + b) ⊙ softplus(γ). [ELR]

    Array traffic with X = B·T·D elements: a norm, a product and an update in passes of their own move s, ŝ, ŝ, z, z, s,
    r and s', 8 X, beside W; one kernel reads s for the product, once for each block of columns, and at its end s and r,
    and writes s': 4 X where a block has all columns. Logits are made again in the backward pass, so nothing but the
    operands is kept.

    Raises:
        ElrError: a named implementation that can't run here, with the reason.
    """
    refusal = lambda name: _kernels(name).refusal(state, proposal, weight)
    choice = choose("gated_update", implementation, best=BEST, refusal=refusal)
    if choice.implementation == "xla":
        return xla.gated_update(state, proposal, weight, bias, gain, active, eps=eps)
    return _differentiable(choice, eps, state, proposal, weight, bias, gain, active)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(choice: Choice, eps: float, *operands: Array) -> Hidden:
    kernel = partial(_kernels(choice.implementation).forward, eps=eps)
    return run(choice, kernel, partial(xla.gated_update, eps=eps), *operands, axes=AXES, like=0)


def _forward(choice: Choice, eps: float, *operands: Array) -> tuple[Hidden, Any]:
    return _differentiable(choice, eps, *operands), operands


def _backward(choice: Choice, eps: float, operands: tuple[Array, ...], cotangent: Hidden) -> tuple[Any, ...]:
    kernel = partial(_from_gate, _kernels(choice.implementation).gate_gradients, eps=eps)
    plain = partial(_xla_backward, eps=eps)
    found = run(choice, kernel, plain, *operands, cotangent, axes=(*AXES, HIDDEN), like=(0, 1, 2, 3, 4))
    return *found, None


def _from_gate(gate_gradients: Any, *operands: Array, eps: float) -> tuple[Array, ...]:
    """All gradients from those of the gate's logits, dz, and the proposal, dr = β ⊙ ds', and both vectors'.

    With ŝ = RMSNorm(s): dW = ŝᵀ dz, ds = ds' − dr + rstd · (dz Wᵀ − ŝ · mean(dz Wᵀ ⊙ ŝ)).
    """
    state, _, weight, bias, gain, _, cotangent = operands
    dz, proposal_gradient, bias_gradient, gain_gradient = gate_gradients(*operands, eps=eps)
    wide = state.astype(jnp.float32)
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    normed = rstd * wide
    into = jnp.einsum("bte,de->btd", dz, weight, preferred_element_type=jnp.float32)
    into = rstd * (into - normed * jnp.mean(into * normed, axis=-1, keepdims=True))
    passed = cotangent.astype(jnp.float32) - proposal_gradient.astype(jnp.float32)
    by_weight = jnp.einsum("btd,bte->de", normed.astype(dz.dtype), dz, preferred_element_type=jnp.float32)
    return (
        (passed + into).astype(state.dtype),
        proposal_gradient,
        by_weight.astype(weight.dtype),
        bias_gradient.astype(bias.dtype),
        gain_gradient.astype(gain.dtype),
    )


def _xla_backward(*operands: Array, eps: float) -> tuple[Array, ...]:
    *inputs, active, cotangent = operands
    plain: Any = partial(xla.gated_update, active=active, eps=eps)
    return jax.vjp(plain, *inputs)[1](cotangent)


_differentiable.defvjp(_forward, _backward)
