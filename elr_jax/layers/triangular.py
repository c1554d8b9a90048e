"""The inverse of unit lower triangular matrices, in matrix products alone."""

from functools import partial

import jax
import jax.numpy as jnp

from elr_jax.layers.linear import exact_product
from elr_jax.typing import Array, Float

SMALLEST = 8
"""Smaller matrices are not halved: products of a row or two cost more time than they save."""
_TILE = 8  # rows of a TPU's register, which pieces of whole registers cost nothing to take


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def unit_lower_inverse(a: Float[Array, "*batch R R"], smallest: int = SMALLEST) -> Float[Array, "*batch R R"]:
    """(I + a)^{-1} for a strictly lower triangular `a`, in matrix products alone; halved down to the `smallest` size.

    Only inverses of diagonal blocks occur on the way. For the delta rule their entries are at most β; powers of `a`, as
    in a Neumann product, would grow like binomials.
    """
    size = a.shape[-1]
    if size % 2 or size <= smallest:
        return _doubled(a)
    half = size // 2
    first, last = unit_lower_inverse(jnp.stack([a[..., :half, :half], a[..., half:, half:]]), smallest)
    corner = -exact_product(last, exact_product(a[..., half:, :half], first))
    upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([corner, last], axis=-1)], axis=-2)


@unit_lower_inverse.defjvp
def _unit_lower_inverse_jvp(smallest: int, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    inverse = unit_lower_inverse(*primals, smallest)
    return inverse, -exact_product(inverse, exact_product(tangents[0], inverse))


def _doubled(a: Float[Array, "*batch R R"]) -> Float[Array, "*batch R R"]:
    """Inverses of the diagonal blocks of 2, 4, … rows, from those of half the size: X − X a' X, a' what joins two."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, a.shape[-2:], axis) for axis in (0, 1))
    # where a row of an odd block of `width` meets a column of the block before it
    joins = lambda width: (row // width % 2 == 1) & (row // width - 1 == column // width)
    inverse = jnp.where(row == column, 1, 0) - jnp.where(joins(1), a, 0)
    width = 2
    while width < a.shape[-1]:
        joined = jnp.where(joins(width), a, 0)
        if width % _TILE == 0:
            inverse = _joined(inverse, joined, width)
        else:
            inverse = inverse - exact_product(inverse, exact_product(joined, inverse))
        width *= 2
    return inverse


def _joined(inverse: Float[Array, "*batch R R"], joined: Float[Array, "*batch R R"], width: int) -> Array:
    """X − X a' X by the rows of odd blocks, which alone it changes."""
    rows = [slice(first, first + width) for first in range(0, inverse.shape[-2], width)]
    odd = lambda x: jnp.concatenate([x[..., block, :] for block in rows[1::2]], axis=-2)

    def among(x: Array, even: Array) -> Array:
        """The blocks of odd rows between those of the even ones."""
        ends = range(0, x.shape[-2], width)
        odd = [x[..., first : first + width, :] for first in ends]
        pairs = [piece for n, block in enumerate(rows[::2]) for piece in (even[..., block, :], *odd[n : n + 1])]
        return jnp.concatenate(pairs, axis=-2)

    own = odd(inverse)
    found = among(exact_product(odd(joined), inverse), jnp.zeros_like(inverse))
    return among(own - exact_product(own, found), inverse)


def joined_rows(size: int) -> int:
    """Rows that go into the products of `unit_lower_inverse` without halving, of which each join has two."""
    total, width = 0, 2
    while width < size:
        total += size if width % _TILE else size // (2 * width) * width + max(0, size % (2 * width) - width)
        width *= 2
    return total


def inverse_products(size: int) -> int:
    """Multiply-adds of `unit_lower_inverse`."""
    if size % 2 or size <= SMALLEST:
        return 2 * size**3 * max(0, (size - 1).bit_length() - 1)
    return 2 * inverse_products(size // 2) + 2 * (size // 2) ** 3
