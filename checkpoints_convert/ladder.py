"""The JAX side of a comparison: the prompt run every way, and the hidden states between the layers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from checkpoints_convert.golden import Case, chunkings
from elr_jax.cache import init_cache
from elr_jax.config import ModelConfig, Runtime
from elr_jax.incremental import extend
from elr_jax.layers import make_context
from elr_jax.layers.norms import unit_norm
from elr_jax.loop import begin, enter_round, leave_round
from elr_jax.model import apply
from elr_jax.parameters import Params
from elr_jax.residual import sub_layer
from elr_jax.typing import widen

apply_jit = jax.jit(apply, static_argnames=("config", "runtime"))
extend_jit = jax.jit(extend, static_argnames=("config", "runtime", "fresh"))
_sub_layer = jax.jit(sub_layer, static_argnames=("letter", "config"))


def logits(
    params: Params, tokens: Int[np.ndarray, "T"], case: Case, *, config: ModelConfig, runtime: Runtime
) -> Float[np.ndarray, "T V"]:
    """Logits of the prompt run one way; loop counts share their programs."""
    row, depth = jnp.asarray(tokens, jnp.int32)[None], jnp.array([case.loops], jnp.int32)
    if case.mode is None:
        return np.asarray(apply_jit(params, row, depth, config=config, runtime=runtime)[0])
    cache = init_cache(config, 1, len(tokens), mode=case.mode, dtype=jnp.dtype(runtime.dtype))
    made, calls = [], chunkings(len(tokens))[case.calls]
    step = partial(extend_jit, config=config, runtime=runtime, fresh=len(calls) == 1)
    for start, count in zip(np.cumsum([0, *calls[:-1]]), calls, strict=True):
        part = row[:, start : start + count]
        part = jnp.pad(part, ((0, 0), (0, calls[0] - count)))  # a short last chunk shares the others' program
        out, cache = step(params, part, depth, cache, new=jnp.array([count], jnp.int32))
        made.append(np.asarray(out[0, :count]))
    return np.concatenate(made)


def rungs(
    params: Params, tokens: Int[np.ndarray, "T"], loops: int, *, config: ModelConfig, runtime: Runtime
) -> dict[str, Float[np.ndarray, "T D"]]:
    """The hidden states of one call after every sub-layer, named as in `checkpoints_convert.reference`."""
    row, depth, taken = jnp.asarray(tokens, jnp.int32)[None], jnp.array([loops], jnp.int32), {}
    positions = jnp.arange(len(tokens), dtype=jnp.int32)[None]
    context = make_context(positions, jnp.zeros_like(row), config, runtime=runtime)

    def run(x: jax.Array, stack: str, first: int, prefix: str = "") -> jax.Array:
        for at, (letter, weights) in enumerate(zip(getattr(config, stack), getattr(params, stack), strict=True)):
            x, _ = _sub_layer(letter, x, weights, context, config)
            taken[f"{prefix}layers.{first + at}"] = x
        return x

    x = params.embedding[row].astype(runtime.dtype)
    taken["embedding"] = unit_norm(x, eps=config.norm_eps)
    x = run(taken["embedding"] if config.sphere and config.sphere.embedding_norm else x, "prelude", 0)
    state, operands = begin(x, depth, params.loop, None, config=config, runtime=runtime, noise=None)
    for i in range(loops):
        x = taken[f"loop {i + 1} entry"] = enter_round(state, operands, config)
        x = run(x, "core", len(config.prelude), f"loop {i + 1} ")
        state = leave_round(jnp.int32(i), state, x, operands, config)
    run(state, "coda", len(config.prelude + config.core))
    return {name: np.asarray(widen(x[0])) for name, x in taken.items()}
