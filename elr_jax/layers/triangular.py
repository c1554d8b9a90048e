"""The inverse of unit lower triangular matrices, in matrix products alone."""

import jax
import jax.numpy as jnp
import numpy as np

from elr_jax.layers.linear import exact_product
from elr_jax.typing import Array, Float

_SMALLEST = 8  # smaller matrices are not halved: products of a row or two cost more time than they save


@jax.custom_jvp
def unit_lower_inverse(a: Float[Array, "*batch R R"]) -> Float[Array, "*batch R R"]:
    """(I + a)^{-1} for a strictly lower triangular `a`, in matrix products alone.

    Only inverses of diagonal blocks occur on the way. For the delta rule their entries are at most β; powers of `a`, as
    in a Neumann product, would grow like binomials.
    """
    size = a.shape[-1]
    if size % 2 or size <= _SMALLEST:
        return _doubled(a)
    half = size // 2
    first, last = unit_lower_inverse(jnp.stack([a[..., :half, :half], a[..., half:, half:]]))
    corner = -exact_product(last, exact_product(a[..., half:, :half], first))
    upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([corner, last], axis=-1)], axis=-2)


@unit_lower_inverse.defjvp
def _unit_lower_inverse_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    inverse = unit_lower_inverse(*primals)
    return inverse, -exact_product(inverse, exact_product(tangents[0], inverse))


def _doubled(a: Float[Array, "*batch R R"]) -> Float[Array, "*batch R R"]:
    """Inverses of the diagonal blocks of 2, 4, … rows, from those of half the size: X − X a' X, a' what joins two."""
    size = a.shape[-1]
    inverse = jnp.eye(size, dtype=a.dtype) - jnp.where(_joins(size, 1), a, 0)
    width = 2
    while width < size:
        inverse = inverse - exact_product(inverse, exact_product(jnp.where(_joins(size, width), a, 0), inverse))
        width *= 2
    return inverse


def _joins(size: int, width: int) -> np.ndarray:
    """Where a row of an odd block of `width` meets a column of the block before it."""
    block = np.arange(size) // width
    return (block[:, None] % 2 == 1) & (block[:, None] - 1 == block[None, :])


def inverse_products(size: int) -> int:
    """Multiply-adds of `unit_lower_inverse`."""
    if size % 2 or size <= _SMALLEST:
        return 2 * size**3 * max(0, (size - 1).bit_length() - 1)
    return 2 * inverse_products(size // 2) + 2 * (size // 2) ** 3
