"""Products of groups of rows, each group with a weight of its own: the experts of a mixture on their tokens.

XLA has such a product of its own for TPUs (`jax.lax.ragged_dot`). Elsewhere, and everywhere in the gradient of the
weights, it takes each weight to every row and masks: the operations of all groups for every row, and as many copies of
the rows. Here a loop runs over the groups, and in it one over blocks of their rows.
"""

import jax
import jax.numpy as jnp

from elr_jax.typing import Array, Float, Int32

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
    return _forward(rows, weights, sizes)[0]


def _forward(rows: Array, weights: Array, sizes: Array) -> tuple[Array, tuple[Array, ...]]:
    return _product(rows, weights.astype(rows.dtype), sizes), (rows, weights, sizes)


def _backward(kept: tuple[Array, ...], cotangent: Array) -> tuple[Array, Array, None]:
    rows, weights, sizes = kept
    back = jnp.swapaxes(weights, 1, 2).astype(rows.dtype)
    return _product(cotangent, back, sizes), _weight_gradient(rows, cotangent, sizes).astype(weights.dtype), None


grouped_product.defvjp(_forward, _backward)


def _product(rows: Array, weights: Array, sizes: Array) -> Array:
    product = jax.lax.platform_dependent(rows, weights, sizes, tpu=_by_compiler, default=_by_blocks)
    return jnp.where((jnp.arange(len(rows)) < jnp.sum(sizes))[:, None], product, 0)


def _by_compiler(rows: Array, weights: Array, sizes: Array) -> Array:
    return jax.lax.ragged_dot(rows, weights, sizes, preferred_element_type=_wide(rows)).astype(rows.dtype)


def _by_blocks(rows: Array, weights: Array, sizes: Array) -> Array:
    block = _block(rows, weights.shape[0])
    padded = _padded(rows, block)

    def group(out: Array, one: tuple[Array, Array, Array]) -> tuple[Array, None]:
        weight, first, size = one

        def step(i: Int32[Array, ""], out: Array) -> Array:
            mine = jax.lax.dynamic_slice_in_dim(padded, first + i * block, block)
            product = jnp.matmul(mine, weight, preferred_element_type=_wide(rows)).astype(rows.dtype)
            # what the last block writes below its group, the groups to come write over
            return jax.lax.dynamic_update_slice_in_dim(out, product, first + i * block, 0)

        return jax.lax.fori_loop(0, -(-size // block), step, out), None

    out = jnp.zeros_like(rows, shape=(len(padded), weights.shape[-1]))  # of mesh axes too, like the rows
    return jax.lax.scan(group, out, (weights, jnp.cumsum(sizes) - sizes, sizes))[0][: len(rows)]


def _weight_gradient(rows: Array, cotangent: Array, sizes: Array) -> Array:
    """Σ over a group's rows of x_m ⊗ cotangent_m, in the type it is summed in."""
    block = _block(rows, len(sizes))
    rows, cotangent = _padded(rows, block), _padded(cotangent, block)

    def group(_: None, one: tuple[Array, Array]) -> tuple[None, Array]:
        first, size = one

        def step(i: Int32[Array, ""], total: Array) -> Array:
            mine, theirs = (jax.lax.dynamic_slice_in_dim(x, first + i * block, block) for x in (rows, cotangent))
            mine = jnp.where((i * block + jnp.arange(block) < size)[:, None], mine, 0)
            return total + jnp.matmul(mine.T, theirs, preferred_element_type=_wide(rows))

        total = jnp.zeros_like(rows, shape=(rows.shape[1], cotangent.shape[1]), dtype=_wide(rows))
        return None, jax.lax.fori_loop(0, -(-size // block), step, total)

    return jax.lax.scan(group, None, (jnp.cumsum(sizes) - sizes, sizes))[1]


def _block(rows: Array, groups: int) -> int:
    """Rows of a block: a mean group's, as a power of two."""
    least, most = BLOCKS
    return min(max(2 ** (len(rows) // groups).bit_length() // 2, least), most)


def _padded(rows: Array, block: int) -> Array:
    return jnp.pad(rows, ((0, block), (0, 0)))


def _wide(rows: Array) -> jnp.dtype:
    return jnp.promote_types(rows.dtype, jnp.float32)
