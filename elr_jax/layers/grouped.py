"""Products of groups of rows, each group with a weight of its own: the experts of a mixture on their tokens.

XLA has such a product of its own for TPUs (`jax.lax.ragged_dot`). Elsewhere, and everywhere in the gradient of the
weights, it takes each weight to every row and masks: the operations of all groups for every row, and as many copies of
the rows. Here a loop runs over the groups, and in it one over blocks of their rows.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from elr_jax.typing import Array, Bool, Float, Int32

BLOCKS = 8, 512
"""Fewest and most rows of a block. With fewer a weight is read too often, with more a block is emptier."""


@jax.custom_vjp
def grouped_product(
    rows: Float[Array, "M D"], weights: Float[Array, "E D F"], sizes: Int32[Array, "E"]
) -> Float[Array, "M F"]:
    """y_m = x_m W_e for the rows of group e, which lie one group below the other, `sizes` [E] of them in each.

    Products are summed in float32 at least and rounded once to the rows' type, which the weights are cast to. For rows
    after the last group y is zero.
    """
    return _product(rows, weights.astype(rows.dtype), sizes)


def _product(rows: Array, weights: Array, sizes: Array) -> Array:
    return jax.lax.platform_dependent(rows, weights, sizes, tpu=_by_compiler, default=_by_blocks)


def _by_compiler(rows: Array, weights: Array, sizes: Array) -> Array:
    product = jax.lax.ragged_dot(rows, weights, sizes, preferred_element_type=_wide(rows)).astype(rows.dtype)
    return jnp.where((jnp.arange(len(rows)) < jnp.sum(sizes))[:, None], product, 0)


def _by_blocks(rows: Array, weights: Array, sizes: Array) -> Array:
    def group(out: Array, one: tuple[Array, ...]) -> tuple[Array, None]:
        weight, *place = one

        def step(out: Array, at: Array, mine: Bool[Array, "block 1"]) -> Array:
            product = jnp.matmul(_block(rows, at, mine), weight, preferred_element_type=_wide(rows))
            return _put(product, out, at, mine)

        return _each_block(step, out, place, rows, len(sizes)), None

    out = jnp.zeros_like(rows, shape=(len(rows), weights.shape[-1]))  # of mesh axes too, like the rows
    return jax.lax.scan(group, out, (weights, jnp.cumsum(sizes) - sizes, sizes))[0]


def _forward(rows: Array, weights: Array, sizes: Array) -> tuple[Array, tuple[Array, ...]]:
    return grouped_product(rows, weights, sizes), (rows, weights, sizes)


def _backward(kept: tuple[Array, ...], cotangent: Array) -> tuple[Array, Array, None]:
    """Both gradients in one loop: left to themselves, compilers put those of weights off and keep all rows for them."""
    rows, weights, sizes = kept

    def group(back: Array, one: tuple[Array, ...]) -> tuple[Array, Array]:
        weight, *place = one
        weight = weight.astype(rows.dtype)

        def step(carry: tuple[Array, Array], at: Array, mine: Bool[Array, "block 1"]) -> tuple[Array, Array]:
            (back, total), theirs = carry, _block(cotangent, at, mine)
            pulled = jax.lax.dot_general(theirs, weight, (((1,), (1,)), ((), ())), preferred_element_type=_wide(rows))
            total += jnp.matmul(_block(rows, at, mine).T, theirs, preferred_element_type=_wide(rows))
            return _put(pulled, back, at, mine), total

        total = jnp.zeros_like(rows, shape=weight.shape, dtype=_wide(rows))
        back, total = _each_block(step, (back, total), place, rows, len(sizes))
        return back, total.astype(weights.dtype)

    back, gradient = jax.lax.scan(group, jnp.zeros_like(rows), (weights, jnp.cumsum(sizes) - sizes, sizes))
    return back, gradient, None


grouped_product.defvjp(_forward, _backward)


def _each_block(step: Callable[..., Any], carry: Any, place: list[Array], rows: Array, groups: int) -> Any:
    """`step(carry, at, mine)` for the blocks of a group of `place` (its first row, its size), each of its rows once.

    A block begins at row `at`; `mine` says which of its rows are the group's and of no block before.
    """
    first, size = place
    block = _block_rows(len(rows), groups)

    def body(i: Int32[Array, ""], carry: Any) -> Any:
        begin = first + i * block
        at = jnp.minimum(begin, len(rows) - block)
        index = at + jnp.arange(block)
        return step(carry, at, ((index >= begin) & (index < first + size))[:, None])

    return jax.lax.fori_loop(0, -(-size // block), body, carry)


def _block_rows(rows: int, groups: int) -> int:
    """Rows of a block: a mean group's, as a power of two."""
    least, most = BLOCKS
    return min(max(2 ** (rows // groups).bit_length() // 2, least), most, rows)


def _block(x: Array, at: Array, mine: Bool[Array, "block 1"]) -> Array:
    return jnp.where(mine, jax.lax.dynamic_slice_in_dim(x, at, len(mine)), 0)


def _put(new: Array, out: Array, at: Array, mine: Bool[Array, "block 1"]) -> Array:
    old = jax.lax.dynamic_slice_in_dim(out, at, len(mine))
    return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(mine, new.astype(out.dtype), old), at, 0)


def _wide(rows: Array) -> jnp.dtype:
    return jnp.promote_types(rows.dtype, jnp.float32)
