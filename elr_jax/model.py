"""A model as pure functions of parameters, tokens and a depth per example: prelude, looped core, coda, head."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from elr_jax.conditioning import round_conditions
from elr_jax.config import ModelConfig, Runtime
from elr_jax.errors import ElrError
from elr_jax.layers import Context, make_context, start_carry
from elr_jax.layers.attention import KV
from elr_jax.layers.linear import wide_product
from elr_jax.layers.moe import Routing
from elr_jax.layers.norms import rms_norm, unit_norm
from elr_jax.loop import LoopParams, initial_noise, run_loop, trajectory
from elr_jax.losses import TokenScores, linear_cross_entropy
from elr_jax.parameters import Params, WorkingCopy, cast, param_specs
from elr_jax.residual import SubLayer, apply_stack
from elr_jax.sharding import constrain, on_own_rows
from elr_jax.typing import (
    Array,
    Conditions,
    Depth,
    Float,
    Hidden,
    Int32,
    Logits,
    Positions,
    PRNGKeyArray,
    SegmentIds,
    Tokens,
    widen,
)


def apply(
    params: Params | WorkingCopy,
    tokens: Tokens,
    depth: Depth,
    *,
    config: ModelConfig,
    runtime: Runtime = Runtime(),
    segment_ids: SegmentIds | None = None,
    positions: Positions | None = None,
    key: PRNGKeyArray | None = None,
    backprop_loops: int | None = None,
) -> Logits:
    """Next-token logits [B,T,V] in float32 after `depth` [B] rounds of each example (1 … max_loops).

    logits = head(RMSNorm(coda(loop(prelude(embed(tokens)), depth)))); on the unit sphere the head's output is scaled
    instead of its input normed. Tokens attend within equal `segment_ids` (None:
    one segment); `positions` default to 0 … T−1. `key`, one for the batch or one for each example, is needed by a
    random initial state alone. Gradients flow through the last `backprop_loops` rounds of each example (None: all).
    """
    check_depth(depth, config)
    params = cast(params, config, runtime)
    x, _ = _outcome(params, tokens, depth, config, runtime, segment_ids, positions, key, backprop_loops)
    return logits_of(params, x, config)


def loss(
    params: Params,
    tokens: Tokens,
    targets: Tokens,
    weights: Float[Array, "B T"],
    depth: Depth,
    *,
    config: ModelConfig,
    runtime: Runtime = Runtime(),
    segment_ids: SegmentIds | None = None,
    positions: Positions | None = None,
    key: PRNGKeyArray | None = None,
    backprop_loops: int | None = None,
) -> tuple[Float[Array, ""], TokenScores]:
    """Σ weights ⊙ cross_entropy(apply(…), targets) in nats, and each token's score, without all logits in memory.

    Other arguments as for `apply`.
    """
    check_depth(depth, config)
    working = cast(params, config, runtime)
    x, routing = _outcome(working, tokens, depth, config, runtime, segment_ids, positions, key, backprop_loops)
    with jax.named_scope("head"):
        x = x if params.norm is None else rms_norm(x, params.norm, eps=config.norm_eps)
        head = params.embedding.T if params.head is None else params.head
        if params.logit_scale is not None and config.sphere is not None:
            head = head * (params.logit_scale / config.sphere.init_std)  # its gradient then needs no logits
        total, scores = linear_cross_entropy(x, head, targets, weights)
    return total, scores.replace(routing=routing)  # pyright: ignore


def routing(
    params: Params | WorkingCopy,
    tokens: Tokens,
    depth: Depth,
    *,
    config: ModelConfig,
    runtime: Runtime = Runtime(),
    segment_ids: SegmentIds | None = None,
    positions: Positions | None = None,
    key: PRNGKeyArray | None = None,
) -> tuple[Routing, ...]:
    """What each mixture of experts does, in the order of the layers, replayed routes measured against fresh ones.

    Arguments as for `apply`.
    """
    check_depth(depth, config)
    params = cast(params, config, runtime)
    return _outcome(params, tokens, depth, config, runtime, segment_ids, positions, key, None, probe=True)[1]


def _outcome(
    params: Params,
    tokens: Tokens,
    depth: Depth,
    config: ModelConfig,
    runtime: Runtime,
    segment_ids: SegmentIds | None,
    positions: Positions | None,
    key: PRNGKeyArray | None,
    backprop_loops: int | None,
    probe: bool = False,
) -> tuple[Hidden, tuple[Routing, ...]]:
    """The coda's output, and what the mixtures of experts did."""
    entry, context, noise, before = _enter(params, tokens, config, runtime, segment_ids, positions, key)
    context = dataclasses.replace(context, probe=probe)
    conditions = round_conditions(params.conditioning, depth, config, dtype=runtime.dtype)

    def rounds(weights: tuple[LoopParams, tuple[SubLayer, ...]], rows: Any) -> tuple[Hidden, Any]:
        (loop, stack), (entry, depth, noise, context, conditions, carried) = weights, rows
        return run_loop(
            entry,
            depth,
            loop,
            (stack, context, conditions),
            core=_core(config, runtime),
            config=config,
            runtime=runtime,
            noise=noise,
            backprop_loops=backprop_loops,
            carried=carried,
        )

    carried = _start_core(config, runtime, *tokens.shape)
    weights, rows = (params.loop, params.core), (entry, depth, noise, context, conditions, carried)
    specs = param_specs(config)
    apart = partial(on_own_rows, rounds, specs=(specs.loop, specs.core)) if runtime.gather_core else rounds
    state, (during, shared) = apart(weights, rows)
    if shared is not None:
        context = dataclasses.replace(context, shared=shared)
    with jax.named_scope("coda"):
        context, start = in_round(context, conditions, -1), start_carry(config.coda, config, *tokens.shape)
        x, _, after = apply_stack(
            state, params.coda, context, start, letters=config.coda, config=config, runtime=runtime
        )
    return x, tuple(carried for carried in (*before, *during, *after) if carried is not None)


def states(
    params: Params | WorkingCopy,
    tokens: Tokens,
    depth: Depth,
    *,
    config: ModelConfig,
    runtime: Runtime = Runtime(),
    segment_ids: SegmentIds | None = None,
    positions: Positions | None = None,
    key: PRNGKeyArray | None = None,
) -> Float[Array, "R+1 B T D"]:
    """The loop's states s_0 … s_max_loops, each example frozen after its own depth; arguments as for `apply`."""
    check_depth(depth, config)
    params = cast(params, config, runtime)
    entry, context, noise, _ = _enter(params, tokens, config, runtime, segment_ids, positions, key)
    conditions = round_conditions(params.conditioning, depth, config, dtype=runtime.dtype)
    return trajectory(
        entry,
        depth,
        params.loop,
        (params.core, context, conditions),
        core=_core(config, runtime),
        config=config,
        runtime=runtime,
        noise=noise,
        carried=_start_core(config, runtime, *tokens.shape),
    )


def _start_core(config: ModelConfig, runtime: Runtime, batch: int, length: int) -> tuple[tuple[Any, ...], KV | None]:
    """What the core carries into its first round: what its layers do, and room for the global keys of its last `G`."""
    shape = batch, config.attention.num_kv_heads, length, config.attention.head_dim
    empty = jnp.zeros(shape, runtime.dtype)
    return start_carry(config.core, config, batch, length), KV(key=empty, value=empty) if "G" in config.core else None


def _core(config: ModelConfig, runtime: Runtime):
    # a round that is replayed whole need not replay its layers once more
    inner = dataclasses.replace(runtime, remat="none") if runtime.remat == "round" else runtime

    def core(
        i: Int32[Array, ""],
        x: Hidden,
        carried: tuple[tuple[Any, ...], KV | None],
        operands: tuple[tuple[SubLayer, ...], Context, Conditions | None],
    ) -> tuple[Hidden, tuple[tuple[Any, ...], KV | None]]:
        stack, context, conditions = operands
        context, (layers, shared) = in_round(context, conditions, i), carried
        x, context, layers = apply_stack(x, stack, context, layers, letters=config.core, config=config, runtime=inner)
        return x, (layers, None if shared is None else context.shared)

    return core


def in_round(context: Context, conditions: Conditions | None, i: int | Int32[Array, ""] | Int32[Array, "B"]) -> Context:
    """The context of round i, or i of each example (from 0; −1: the coda), with what layers are told there."""
    rows = slice(None) if conditions is None or jnp.ndim(i) == 0 else jnp.arange(conditions.shape[0])
    return dataclasses.replace(
        context,
        round=None if isinstance(i, int) else i,
        condition=None if conditions is None else conditions[rows, i],
    )


def _enter(
    params: Params,
    tokens: Tokens,
    config: ModelConfig,
    runtime: Runtime,
    segment_ids: SegmentIds | None,
    positions: Positions | None,
    key: PRNGKeyArray | None,
) -> tuple[Hidden, Context, Hidden | None, tuple[Any, ...]]:
    if segment_ids is None:
        segment_ids = jnp.zeros(tokens.shape, jnp.int32)
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    context = make_context(positions, segment_ids, config, tokens=tokens, runtime=runtime)
    with jax.named_scope("prelude"):
        x = embed(params, tokens, config, runtime)
        start = start_carry(config.prelude, config, *tokens.shape)
        x, context, carried = apply_stack(
            x, params.prelude, context, start, letters=config.prelude, config=config, runtime=runtime
        )
    return x, context, draw_noise(key, positions, config, runtime), carried


def embed(params: Params, tokens: Tokens, config: ModelConfig, runtime: Runtime) -> Hidden:
    """The tokens' embeddings, what the first layer reads."""
    table = constrain(params.embedding, "vocab", None)  # gathered for use: what rows it gives are cut by batch alone
    x = constrain(table[tokens].astype(runtime.dtype), "batch", "sequence", None)
    return unit_norm(x, eps=config.norm_eps) if config.sphere and config.sphere.embedding_norm else x


def draw_noise(key: PRNGKeyArray | None, positions: Positions, config: ModelConfig, runtime: Runtime) -> Hidden | None:
    """The random initial state, a function of example key and position; None for a rule that wants none."""
    if config.loop.initial != "random":
        return None
    if key is None:
        raise ElrError(
            "loop.initial='random' draws the initial state: pass key=jax.random.key(…), or use 'copy' or 'zero'"
        )
    if key.ndim == 0:
        key = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(positions.shape[0]))
    return initial_noise(key, positions, config.d_model, runtime.dtype)


def logits_of(params: Params, state: Hidden, config: ModelConfig) -> Logits:
    """The head's reading of the coda's output."""
    with jax.named_scope("head"):
        x = state if params.norm is None else rms_norm(state, params.norm, eps=config.norm_eps)
        logits = wide_product(x, params.embedding.T if params.head is None else params.head)
        if params.logit_scale is None or config.sphere is None:
            return logits
        return logits * (widen(params.logit_scale) / config.sphere.init_std)


def check_depth(depth: Any, config: ModelConfig, *, least: int = 1) -> None:
    """Refuse loop counts outside `least` … max_loops, where they are known."""
    if isinstance(depth, Tracer):  # under jit the values are unknown: laws and requests are checked before
        return
    values, most = np.asarray(depth), config.loop.max_loops
    if values.size and (values.min() < least or values.max() > most):
        bad = values.min() if values.min() < least else values.max()
        raise ElrError(f"depth {bad} is outside {least}…{most}: ask for fewer loops or raise loop.max_loops")
