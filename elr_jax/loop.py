"""The loop rule: how a round begins, joins the state and ends, and the loop over rounds with a depth per example.

With e the prelude's output and s_0 the initial state, round i < depth of an example computes

    u = boundary(inject(s, e)),  r = core(i, u),  s ← boundary(update(s, r)),

and a finished example keeps its state. A learned scale of the boundary norm acts only on the state that leaves the
round. This file knows no layer kind: the core is a function, and what its layers carry from round to round beside the
state is a tree of leaves [B, …], of which a finished example keeps its own too. The variants of each step stand in
tables at the bottom.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from elr_jax.config import ModelConfig, Remat, Runtime
from elr_jax.layers.linear import product
from elr_jax.layers.norms import rms_norm, unit_norm
from elr_jax.params import Initializer, ParamSpec, constant, identity, orthogonal, truncated_normal, vector
from elr_jax.residual import rematerialised
from elr_jax.rounds import bounded_rounds, scan_rounds
from elr_jax.sharding import in_step
from elr_jax.typing import Array, Bool, Depth, Float, Hidden, Int32, Key, Positions, widen
from pallas_kernels.contract import Implementation
from pallas_kernels.gated_update import gated_update

Carried = Any
Round = Int32[Array, ""] | Int32[Array, "B"]
Core = Callable[[Round, Hidden, Carried, Any], tuple[Hidden, Carried]]
Made = Any
CachedCore = Callable[[Int32[Array, ""], Hidden, Carried], tuple[Hidden, Made, Carried]]


@struct.dataclass
class LoopParams:
    """Parameters of the loop rule's steps; None where the chosen variant has none."""

    inject: Any
    update: Any
    boundary: Any
    readout: Any


def loop_specs(config: ModelConfig) -> LoopParams:
    """Parameter declarations of the configured rule."""
    rule, d = config.loop, config.d_model
    return LoopParams(
        inject=INJECT[rule.inject].specs(d),
        update=UPDATE[rule.update].specs(d),
        boundary=BOUNDARY[rule.boundary].specs(d),
        readout=READOUT[rule.readout].specs(d),
    )


@struct.dataclass
class RoundOperands:
    """What a round reads besides the state; `drive` is the injection's loop-invariant part, made once.

    `before` [B] are the rounds each example ran ahead of those that are counted here; None: none.
    """

    params: LoopParams
    core: Any
    drive: Hidden | None
    depth: Depth
    kernels: Implementation | None = struct.field(pytree_node=False)
    before: Depth | None = None


def loop_round(
    i: Int32[Array, ""],
    carry: tuple[Hidden, Carried],
    operands: RoundOperands,
    *,
    core: Core,
    config: ModelConfig,
    remat: Remat = "none",
) -> tuple[Hidden, Carried]:
    """Round i of every example, unchanged where i ≥ depth; `remat` says what its steps around the core keep."""
    state, carried = carry
    index = i if operands.before is None else operands.before + i
    enter, leave = (rematerialised(partial(step, config=config), remat) for step in (enter_round, leave_round))
    around = operands.replace(core=None)  # pyright: ignore
    with jax.named_scope("core"):
        proposal, later = core(index, enter(state, around), carried, operands.core)
    return leave(i, state, proposal, around), _where(i < operands.depth, later, carried)


def _where(rows: Bool[Array, "B"], new: Any, old: Any) -> Any:
    """The new tree in the given rows, the old one elsewhere."""
    return jax.tree.map(lambda x, y: jnp.where(rows.reshape(-1, *[1] * (x.ndim - 1)), x, y), new, old)


def enter_round(state: Hidden, operands: RoundOperands, config: ModelConfig) -> Hidden:
    """What the core reads: boundary(inject(s, e))."""
    rule, params = config.loop, operands.params
    with jax.named_scope("inject"):
        inner = INJECT[rule.inject].combine(params.inject, state, operands.drive)
        return BOUNDARY[rule.boundary].apply(None, inner, eps=config.norm_eps)


def leave_round(
    i: Int32[Array, ""], state: Hidden, proposal: Hidden, operands: RoundOperands, config: ModelConfig
) -> Hidden:
    """boundary(update(s, r)) where i < depth, s elsewhere."""
    rule, params, active = config.loop, operands.params, i < operands.depth
    with jax.named_scope("update"):
        new = UPDATE[rule.update].apply(
            params.update, state, proposal, active, eps=config.norm_eps, kernels=operands.kernels
        )
        if rule.boundary == "none":
            return new
        new = BOUNDARY[rule.boundary].apply(params.boundary, new, eps=config.norm_eps)
        return jnp.where(active[:, None, None], new, state)


def run_loop(
    entry: Hidden,
    depth: Depth,
    params: LoopParams,
    core_params: Any,
    *,
    core: Core,
    config: ModelConfig,
    runtime: Runtime,
    noise: Hidden | None = None,
    backprop_loops: int | None = None,
    carried: Carried = (),
) -> tuple[Hidden, Carried]:
    """The read-out state of every example after its own number of rounds, and what its core carries then.

    `entry` [B,T,D] is the prelude's output, `noise` the random initial state, if the rule wants one, and `carried` what
    the first round is given. Gradients flow through the last `backprop_loops` rounds of each example (None: all): the
    rounds before run first, for all examples, and all examples then begin their last ones together, so that a backward
    pass sees no more rounds than that, however far apart the depths are.
    """
    state, operands = begin(entry, depth, params, core_params, config=config, runtime=runtime, noise=noise)
    if runtime.remat == "round":
        body = rematerialised(partial(loop_round, core=core, config=config), "round")
    else:
        body = partial(loop_round, core=core, config=config, remat=runtime.remat)

    def repeat(most: int, carry: tuple[Hidden, Carried], operands: RoundOperands) -> tuple[Hidden, Carried]:
        if runtime.loop == "scan":
            return scan_rounds(body, most, carry, operands)
        last = jnp.minimum(in_step(jnp.max(operands.depth)), most)
        return bounded_rounds(body, most, last, carry, operands)

    carry, rounds = (state, carried), config.loop.max_loops
    if backprop_loops is not None and backprop_loops < rounds:
        last = jnp.minimum(depth, backprop_loops)
        before = depth - last
        early = jax.lax.stop_gradient((carry, operands.replace(depth=before)))  # pyright: ignore
        carry = _where(before > 0, repeat(rounds - backprop_loops, *early), carry)
        operands, rounds = operands.replace(depth=last, before=before), backprop_loops  # pyright: ignore
    state, carried = repeat(rounds, carry, operands)
    return READOUT[config.loop.readout].apply(params.readout, state), carried


def run_cached_loop(
    entry: Hidden,
    depth: Depth,
    params: LoopParams,
    kept: Made,
    *,
    core: CachedCore,
    config: ModelConfig,
    runtime: Runtime = Runtime(),
    noise: Hidden | None = None,
    carried: Carried = (),
) -> tuple[Hidden, Made]:
    """The read-out state, and what a cache keeps of the core's tokens, in as many rounds as the deepest example's.

    `core(i, u, carried)` returns a round's proposal, what it made, leaves [B, …], and what it carries on. The leaves of
    `kept` [L, B, …], zeros, are filled with what was made. Slot l holds what round l made, or the example's last round
    where it ran fewer, so that tokens of any depth find every slot they read filled; the last slot holds what its last
    round made.
    """
    state, operands = begin(entry, depth, params, None, config=config, runtime=runtime, noise=noise)

    def keep(i: Int32[Array, ""], kept: Array, made: Array) -> Array:
        slots = kept.shape[0]
        later = jnp.arange(slots)[:, None] >= jnp.minimum(i, slots - 1)
        fills = later & (i < depth)[None]
        return jnp.where(fills.reshape(*fills.shape, *[1] * (made.ndim - 1)), made[None], kept)

    def step(i: Int32[Array, ""], carry: tuple[Hidden, Made, Carried]) -> tuple[Hidden, Made, Carried]:
        state, kept, carried = carry
        with jax.named_scope("core"):
            proposal, made, carried = core(i, enter_round(state, operands, config), carried)
        return leave_round(i, state, proposal, operands, config), jax.tree.map(partial(keep, i), kept, made), carried

    last = jnp.minimum(jnp.max(depth), config.loop.max_loops)
    state, kept, _ = jax.lax.fori_loop(0, last, step, (state, kept, carried))
    return READOUT[config.loop.readout].apply(params.readout, state), kept


def trajectory(
    entry: Hidden,
    depth: Depth,
    params: LoopParams,
    core_params: Any,
    *,
    core: Core,
    config: ModelConfig,
    runtime: Runtime = Runtime(),
    noise: Hidden | None = None,
    carried: Carried = (),
) -> Float[Array, "R+1 B T D"]:
    """The states s_0 … s_max_loops before the read-out, each example frozen after its own depth."""
    state, operands = begin(entry, depth, params, core_params, config=config, runtime=runtime, noise=noise)
    rounds = jnp.arange(config.loop.max_loops, dtype=jnp.int32)

    def step(carry: tuple[Hidden, Carried], i: Int32[Array, ""]) -> tuple[tuple[Hidden, Carried], Hidden]:
        carry = loop_round(i, carry, operands, core=core, config=config)
        return carry, carry[0]

    return jnp.concatenate([state[None], jax.lax.scan(step, (state, carried), rounds)[1]])


def begin(
    entry: Hidden,
    depth: Depth,
    params: LoopParams,
    core_params: Any,
    *,
    config: ModelConfig,
    runtime: Runtime,
    noise: Hidden | None,
) -> tuple[Hidden, RoundOperands]:
    """The initial state and everything about the rounds that no round changes."""
    inject = INJECT[config.loop.inject]
    with jax.named_scope("begin"):
        entry = inject.enter(params.inject, entry, eps=config.norm_eps)
        state = {"copy": entry, "zero": jnp.zeros_like(entry), "random": noise}[config.loop.initial]
        drive = inject.drive(params.inject, entry)
    operands = RoundOperands(params=params, core=core_params, drive=drive, depth=depth, kernels=runtime.implementation)
    return state, operands


def initial_noise(key: Key[Array, "B"], positions: Positions, d_model: int, dtype: Any) -> Hidden:
    """Truncated normal states of standard deviation √(2/(5D)), a function of (example key, position) alone. [Parcae]"""
    draw = truncated_normal(math.sqrt(2 / (5 * d_model)))

    def at(key: Array, position: Array) -> Array:
        return draw(jax.random.fold_in(key, position), (d_model,))

    return jax.vmap(jax.vmap(at, (None, 0)))(key, positions).astype(dtype)


# Injection: e enters the loop (`enter`), its loop-invariant part is made once (`drive`), and each round combines it.


@struct.dataclass
class Concat:
    """W [s; e] as two square halves."""

    state: Float[Array, "D D"]
    entry: Float[Array, "D D"]


@struct.dataclass
class Gated:
    """Parcae's injection Ā⊙s + Δ⊙(B e), Δ = softplus(dt_bias), Ā = exp(−Δ exp(a_log)), e = RMSNorm(prelude)."""

    norm: Float[Array, "D"]
    a_log: Float[Array, "D"]
    dt_bias: Float[Array, "D"]
    input: Float[Array, "D D"]


def _square(d: int, init: Initializer) -> Any:
    return ParamSpec(shape=(d, d), axes=("embed", None), init=init, group="loop")


def _concat_specs(d: int) -> Concat:
    half = _square(d, truncated_normal((2 * d) ** -0.5))
    return Concat(state=half, entry=half)


def _gated_specs(d: int) -> Gated:
    return Gated(
        norm=vector((d,), ("embed",), 1.0),
        a_log=vector((d,), ("embed",), 0.0, group="loop"),
        dt_bias=vector((d,), ("embed",), math.log(math.sqrt(5) - 1), group="loop"),  # Δ = ½ ln 5, so Ā = 1/√5
        input=_square(d, identity),
    )


def _gated_combine(params: Gated, state: Hidden, drive: Hidden) -> Hidden:
    step = jax.nn.softplus(params.dt_bias)
    decay = jnp.exp(-step * jnp.exp(params.a_log))
    return (decay * widen(state) + step * widen(drive)).astype(state.dtype)


class Inject(NamedTuple):
    """A way for e to enter every round."""

    specs: Callable[[int], Any]
    drive: Callable[[Any, Hidden], Hidden | None]
    combine: Callable[[Any, Hidden, Any], Hidden]
    enter: Callable[..., Hidden] = lambda params, entry, *, eps: entry


# Update: how the proposal r joins the state s.


@struct.dataclass
class AdaptiveDelta:
    """The learned step β = σ(W s̃ + b) ⊙ softplus(γ) with s̃ = RMSNorm(s); all zero at the start, so β = ½ ln 2. [ELR]"""

    weight: Float[Array, "D D"]
    bias: Float[Array, "D"]
    gain: Float[Array, "D"]


def _adaptive_delta_specs(d: int) -> AdaptiveDelta:
    zero = vector((d,), ("embed",), 0.0, group="loop")
    return AdaptiveDelta(weight=_square(d, constant(0.0)), bias=zero, gain=zero)


def _adaptive_delta(
    params: AdaptiveDelta,
    state: Hidden,
    proposal: Hidden,
    active: Bool[Array, "B"],
    *,
    eps: float,
    kernels: Implementation | None,
) -> Hidden:
    weights = params.weight, params.bias, params.gain
    return gated_update(state, proposal, *weights, active, eps=eps, implementation=kernels)


def _delta(rate: Float[Array, "D"], state: Hidden, proposal: Hidden) -> Hidden:
    wide = widen(state)
    return (wide + rate * (widen(proposal) - wide)).astype(state.dtype)


def _of_active(update: Callable[[Any, Hidden, Hidden], Hidden]) -> Callable[..., Hidden]:
    """The update with finished examples left as they are."""
    return lambda params, state, proposal, active, **_: jnp.where(
        active[:, None, None], update(params, state, proposal), state
    )


class Update(NamedTuple):
    """A way for the core's proposal to change the state of the examples that are active."""

    specs: Callable[[int], Any]
    apply: Callable[..., Hidden]


class Step(NamedTuple):
    """A boundary norm or a read-out: parameters and function."""

    specs: Callable[[int], Any]
    apply: Callable[..., Hidden]


def _nothing(d: int) -> None:
    return None


INJECT = {
    "none": Inject(_nothing, lambda p, e: None, lambda p, s, drive: s),
    "residual": Inject(_nothing, lambda p, e: e, lambda p, s, drive: s + drive),
    "concat": Inject(
        _concat_specs,
        lambda p, e: product(e, p.entry),
        lambda p, s, drive: product(s, p.state) + drive,
    ),
    "gated": Inject(
        _gated_specs,
        lambda p, e: product(e, p.input),
        _gated_combine,
        lambda p, e, *, eps: rms_norm(e, p.norm, eps=eps),
    ),
}
UPDATE = {
    "replace": Update(_nothing, _of_active(lambda p, s, r: r)),
    "residual": Update(_nothing, _of_active(lambda p, s, r: s + r)),
    "delta": Update(lambda d: vector((d,), ("embed",), 0.05, group="loop"), _of_active(_delta)),
    "adaptive_delta": Update(_adaptive_delta_specs, _adaptive_delta),
}
BOUNDARY = {
    "none": Step(_nothing, lambda p, x, *, eps: x),
    "rms": Step(lambda d: vector((d,), ("embed",), 1.0), lambda p, x, *, eps: rms_norm(x, p, eps=eps)),
    "unit": Step(_nothing, lambda p, x, *, eps: unit_norm(x, eps=eps)),
}
READOUT = {
    "none": Step(_nothing, lambda p, s: s),
    "linear": Step(lambda d: _square(d, orthogonal(math.sqrt(2 / 5))), lambda p, s: product(s, p)),
}
