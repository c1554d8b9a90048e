"""The two ways to repeat a round: `scan_rounds` defines the result, `bounded_rounds` stops with the deepest example.

A round is `body(i, carry, operands) -> carry`, a pure function that leaves finished examples unchanged. Both forms
agree bit for bit in value and gradient. The second stops at a trip count known only at run time, which reverse
differentiation can't do by itself, so it brings its own backward pass: every round keeps what `jax.vjp` of the body
would keep (everything, or less under `jax.checkpoint`) in buffers of `max_rounds`, and the backward pass walks them in
reverse from the last round down to the first.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from elr_jax.typing import Array, Int32

Carry = Any
Operands = Any
Body = Callable[[Int32[Array, ""], Carry, Operands], Carry]


def scan_rounds(body: Body, max_rounds: int, carry: Carry, operands: Operands) -> Carry:
    """Apply `body` for i = 0 … max_rounds − 1."""
    rounds = jnp.arange(max_rounds, dtype=jnp.int32)
    return lax.scan(lambda state, i: (body(i, state, operands), None), carry, rounds)[0]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def bounded_rounds(
    body: Body,
    max_rounds: int,
    last: Int32[Array, ""],
    carry: Carry,
    operands: Operands,
) -> Carry:
    """Apply `body` for i = 0 … last − 1.

    `body` must close over no traced array; `last` is at most `max_rounds`. Cotangents of the operands are summed over
    rounds in float32 and rounded once.
    """
    return lax.fori_loop(0, last, lambda i, state: body(i, state, operands), carry)


@struct.dataclass
class _Saved:
    """Residuals of all rounds: stacked where a round made them, taken from the operands where no round changes them."""

    stacked: list[Any]
    operands: Operands
    last: Int32[Array, ""]
    structure: Any = struct.field(pytree_node=False)
    sources: tuple[int | None, ...] = struct.field(pytree_node=False)

    def round(self, i: Int32[Array, ""]) -> Callable[[Carry], tuple[Carry, Operands]]:
        """The pull-back of round i."""
        shared = jax.tree.leaves(self.operands)
        leaves = [
            buffer[i] if source is None else shared[source]
            for buffer, source in zip(self.stacked, self.sources, strict=True)
        ]
        return jax.tree.unflatten(self.structure, leaves)


def _forward(body: Body, max_rounds: int, last: Array, carry: Carry, operands: Operands):
    static: dict[str, Any] = {}

    def step(i: Array, carry: Carry) -> tuple[Carry, list[Array | None]]:
        carry, pull = jax.vjp(partial(body, i), carry, operands)
        leaves, static["structure"] = jax.tree.flatten(pull)
        shared = {id(leaf): j for j, leaf in enumerate(jax.tree.leaves(operands))}
        static["sources"] = tuple(shared.get(id(leaf)) for leaf in leaves)
        made = [None if id(leaf) in shared else leaf for leaf in leaves]
        static["spaces"] = jax.tree.map(lambda leaf: jax.typeof(leaf).memory_space, made)
        return carry, made

    def save(i: Array, state: tuple[Carry, list[Array | None]]) -> tuple[Carry, list[Array | None]]:
        carry, made = step(i, state[0])
        return carry, jax.tree.map(partial(_put, i), state[1], made)

    _, shapes = jax.eval_shape(step, last, carry)
    buffers = jax.tree.map(partial(_buffer, max_rounds), shapes, static["spaces"])
    carry, buffers = lax.fori_loop(0, last, save, (carry, buffers))
    del static["spaces"]
    return carry, _Saved(stacked=buffers, operands=operands, last=last, **static)


def _buffer(max_rounds: int, leaf: jax.ShapeDtypeStruct, space: Any) -> Array:
    """Room for a residual of every round, in the memory that the residual is in."""
    if space != jax.memory.Space.Host:
        return jnp.zeros((max_rounds, *leaf.shape), leaf.dtype)
    return lax.broadcast(jax.device_put(jnp.zeros((), leaf.dtype), space), (max_rounds, *leaf.shape))


def _put(i: Int32[Array, ""], buffer: Array, leaf: Array) -> Array:
    """The buffer with the residual of round i."""
    # in the host's memory XLA updates slices alone; elsewhere a slice would change what the devices of a mesh exchange
    if jax.typeof(buffer).memory_space == jax.memory.Space.Host:
        return lax.dynamic_update_index_in_dim(buffer, leaf, i, 0)
    return buffer.at[i].set(leaf)


def _backward(body: Body, max_rounds: int, saved: _Saved, cotangent: Carry):
    def replay(step: Array, state: tuple[list[Array], list[Array]]) -> tuple[list[Array], list[Array]]:
        into, total = state
        into, added = saved.round(saved.last - 1 - step)(_with_floats(cotangent, into))
        total = [sum_ + part.astype(sum_.dtype) for sum_, part in zip(total, _floats(added), strict=True)]
        return _floats(into), total

    start = [jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in _floats(saved.operands)]
    into, total = lax.fori_loop(0, saved.last, replay, (_floats(cotangent), start))
    total = [part.astype(leaf.dtype) for part, leaf in zip(total, _floats(saved.operands), strict=True)]
    return None, _with_floats(cotangent, into), _with_floats(saved.operands, total)


bounded_rounds.defvjp(_forward, _backward)


def _is_float(leaf: Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _floats(tree: Any) -> list[Array]:
    return [leaf for leaf in jax.tree.leaves(tree) if _is_float(leaf)]


def _with_floats(tree: Any, floats: list[Array]) -> Any:
    """The tree with its floating leaves replaced in order and `float0` zeros, JAX's integer cotangents, elsewhere."""
    values = iter(floats)
    return jax.tree.map(lambda leaf: next(values) if _is_float(leaf) else np.zeros(leaf.shape, jax.dtypes.float0), tree)
