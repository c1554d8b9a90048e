"""A model as pure functions of parameters, tokens and a depth per example: prelude, looped core, coda, head."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.core import Tracer

from elr_jax.config import ModelConfig, Runtime
from elr_jax.errors import ElrError
from elr_jax.layers import Context, make_context
from elr_jax.layers.norms import rms_norm
from elr_jax.loop import LoopParams, initial_noise, loop_specs, run_loop, trajectory
from elr_jax.params import abstract_params, init_params, matrix, table, vector
from elr_jax.residual import SubLayer, apply_stack, stack_specs
from elr_jax.typing import Array, Depth, Float, Hidden, Logits, Positions, PRNGKeyArray, SegmentIds, Tokens


@struct.dataclass
class Params:
    """All parameters of a model; `head` is None when the embedding is tied."""

    embedding: Float[Array, "V D"]
    prelude: tuple[SubLayer, ...]
    core: tuple[SubLayer, ...]
    coda: tuple[SubLayer, ...]
    loop: LoopParams
    norm: Float[Array, "D"]
    head: Float[Array, "D V"] | None


def param_specs(config: ModelConfig) -> Params:
    """The declaration of every parameter: a `Params` of `ParamSpec` leaves."""
    v, d = config.vocab_size, config.d_model
    std = d**-0.5 if config.tie_embeddings else 1.0
    return Params(
        embedding=table(v, d, std),
        prelude=stack_specs(config.prelude, config),
        core=stack_specs(config.core, config),
        coda=stack_specs(config.coda, config),
        loop=loop_specs(config),
        norm=vector(d, "embed", 1.0),
        head=None if config.tie_embeddings else matrix((d, v), ("embed", "vocab"), group="embedding"),
    )


def init(key: PRNGKeyArray, config: ModelConfig) -> Params:
    """Initial parameters, float32."""
    return init_params(key, param_specs(config))


def abstract(config: ModelConfig) -> Params:
    """The parameters' shapes and types, without memory."""
    return abstract_params(param_specs(config))


def apply(
    params: Params,
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

    logits = head(RMSNorm(coda(loop(prelude(embed(tokens)), depth)))). Tokens attend within equal `segment_ids` (None:
    one segment); `positions` default to 0 … T−1. `key`, one for the batch or one for each example, is needed by a
    random initial state alone. Gradients flow through the last `backprop_loops` rounds of each example (None: all).
    """
    _check_depth(depth, config)
    params = _cast(params, runtime)
    entry, context, noise = _encode(params, tokens, config, runtime, segment_ids, positions, key)
    state = run_loop(
        entry,
        depth,
        params.loop,
        (params.core, context),
        core=_core(config, runtime),
        config=config,
        runtime=runtime,
        noise=noise,
        backprop_loops=backprop_loops,
    )
    with jax.named_scope("coda"):
        state = apply_stack(state, params.coda, context, letters=config.coda, config=config, runtime=runtime)
    return _logits(params, state, config)


def states(
    params: Params,
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
    _check_depth(depth, config)
    params = _cast(params, runtime)
    entry, context, noise = _encode(params, tokens, config, runtime, segment_ids, positions, key)
    core = _core(config, runtime)
    return trajectory(entry, depth, params.loop, (params.core, context), core=core, config=config, noise=noise)


def _core(config: ModelConfig, runtime: Runtime):
    # a round that is replayed whole need not replay its layers once more
    inner = dataclasses.replace(runtime, remat="none") if runtime.remat == "round" else runtime

    def core(x: Hidden, operands: tuple[tuple[SubLayer, ...], Context]) -> Hidden:
        stack, context = operands
        return apply_stack(x, stack, context, letters=config.core, config=config, runtime=inner)

    return core


def _encode(
    params: Params,
    tokens: Tokens,
    config: ModelConfig,
    runtime: Runtime,
    segment_ids: SegmentIds | None,
    positions: Positions | None,
    key: PRNGKeyArray | None,
) -> tuple[Hidden, Context, Hidden | None]:
    if segment_ids is None:
        segment_ids = jnp.zeros(tokens.shape, jnp.int32)
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    context = make_context(positions, segment_ids, config)
    with jax.named_scope("prelude"):
        x = params.embedding[tokens].astype(runtime.dtype)
        x = apply_stack(x, params.prelude, context, letters=config.prelude, config=config, runtime=runtime)
    return x, context, _noise(key, positions, config, runtime)


def _noise(key: PRNGKeyArray | None, positions: Positions, config: ModelConfig, runtime: Runtime) -> Hidden | None:
    if config.loop.initial != "random":
        return None
    if key is None:
        raise ElrError(
            "loop.initial='random' draws the initial state: pass key=jax.random.key(…), or use 'copy' or 'zero'"
        )
    if key.ndim == 0:
        key = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(positions.shape[0]))
    return initial_noise(key, positions, config.d_model, runtime.dtype)


def _logits(params: Params, state: Hidden, config: ModelConfig) -> Logits:
    with jax.named_scope("head"):
        x = rms_norm(state, params.norm, eps=config.norm_eps)
        if params.head is None:
            return jnp.einsum("btd,vd->btv", x, params.embedding.astype(x.dtype), preferred_element_type=jnp.float32)
        return jnp.einsum("btd,dv->btv", x, params.head.astype(x.dtype), preferred_element_type=jnp.float32)


def _cast(params: Params, runtime: Runtime) -> Params:
    """Working copies of the matrices, made once a pass; vectors stay float32, where norms and gates are computed."""
    return jax.tree.map(lambda leaf: leaf.astype(runtime.dtype) if leaf.ndim > 1 else leaf, params)


def _check_depth(depth: Any, config: ModelConfig) -> None:
    if isinstance(depth, Tracer):  # under jit the values are unknown: laws and requests are checked before
        return
    values = np.asarray(depth)
    if values.size and (values.min() < 1 or values.max() > config.loop.max_loops):
        bad = values.min() if values.min() < 1 else values.max()
        raise ElrError(f"depth {bad} is outside 1…{config.loop.max_loops}: ask for fewer loops or raise loop.max_loops")
