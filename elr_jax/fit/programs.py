"""The programs whose fit is asked, compiled as a training run and generation compile them."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from elr_jax.collectives import Collective, collectives
from elr_jax.config import ModelConfig, Runtime
from elr_jax.decode import state as decoding
from elr_jax.errors import ElrError
from elr_jax.sharding import batch_sharding, partition
from elr_jax.topologies import OPTIONS, Topology, compiling
from elr_jax.train.placement import Placement
from elr_jax.train.runner import lower_step
from elr_jax.train.settings import Recipe


class Compiled(NamedTuple):
    """What the compiler says of a program: bytes of one chip, and what chips exchange."""

    arguments: int
    """Bytes given: of a training step its state and batch, of the others weights and cache."""
    temporaries: int
    """Bytes more, at the fullest moment."""
    total: int
    """All of it, with results that take the place of no argument, and the program itself."""
    collectives: list[Collective]
    seconds: float
    """What lowering and compiling took here."""


class Where(NamedTuple):
    """A slice, its mesh, and whether the compiler is to look for fast code with little effort."""

    topology: Topology
    mesh: Mesh
    quick: bool


class DoesNotFit(ElrError):
    """A program that the compiler refuses for want of memory."""


def compile_training(recipe: Recipe, runtime: Runtime, *, seq_len: int, where: Where) -> Compiled:
    """One optimizer step."""
    return _compile(partial(lower_step, recipe, runtime, where.mesh, seq_len=seq_len), where=where)


def compile_serving(
    config: ModelConfig, runtime: Runtime, *, rows: int, context: int, new: int, where: Where
) -> Compiled:
    """A batch's prompts of `new` tokens at once, or for one token a decode step, beside caches for `context` tokens.

    Weights are in the runtime's type. Rows are cut over the mesh, keys and values also by their heads.
    """
    mesh = where.mesh
    params = Placement(mesh).params(config, runtime.dtype)
    start = partial(decoding.start, config, rows, context, loops=config.loop.max_loops, dtype=runtime.dtype)
    state = _cut_state(jax.eval_shape(start), mesh)
    row: Any = lambda dtype, *more: _placed(jax.ShapeDtypeStruct((rows, *more), dtype), mesh)
    told: dict[str, Any] = {name: row(jnp.int32) for name in ("prefill_loops", "loops", "limit", "top_k")}
    told |= {name: row(jnp.float32) for name in ("temperature", "top_p", "min_p")}
    requests = decoding.Requests(**told, stop=row(jnp.int32, 1), seed=row(jnp.uint32))
    settings = {"config": config, "runtime": runtime, "greedy": True}
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    jit = partial(jax.jit, donate_argnums=1, out_shardings=places)
    if new == 1:
        program, operands = jit(partial(decoding.decode_step, **settings)), (params, state, requests)
    else:
        program = jit(partial(decoding.prefill, fresh=True, **settings))
        operands = (params, state, row(jnp.int32, new), row(jnp.int32), requests)
    return _compile(partial(program.lower, *operands), where=where)


def _placed(leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=batch_sharding(mesh, leaf.shape))


def _cut_state(state: decoding.DecodeState, mesh: Mesh) -> decoding.DecodeState:
    """With shardings: cache entries [L, B, heads, …] (but a tail's have tokens for heads), all else [B]."""

    def cut(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if leaf.ndim < 2:
            return _placed(leaf, mesh)
        heads = None if "tail" in jax.tree_util.keystr(path) else "kv_heads"
        axes = (None, "batch", heads, *[None] * (leaf.ndim - 3))
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, partition(axes, leaf.shape, mesh))
        )

    return jax.tree.map_with_path(cut, state)


def _compile(lower: Callable[[], Any], *, where: Where) -> Compiled:
    began, options = time.perf_counter(), OPTIONS[where.topology.platform]
    if where.quick:
        options = options | {"exec_time_optimization_effort": -1.0}
    with jax.set_mesh(where.mesh), compiling():
        try:
            compiled = lower().compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise DoesNotFit(" ".join(str(error).split())[:400]) from error
    memory = compiled.memory_analysis()
    kept = memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.generated_code_size_in_bytes
    return Compiled(
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        total=memory.argument_size_in_bytes + memory.temp_size_in_bytes + kept,
        collectives=collectives(compiled.as_text()),
        seconds=time.perf_counter() - began,
    )
