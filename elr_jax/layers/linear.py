"""Matrix products in the working type with float32 accumulation, by a weight or by several packed into one matrix."""

import math

import jax
import jax.numpy as jnp
from flax import struct

from elr_jax.typing import Array, Float

PANELS = 4
"""XLA's CPU products leave a core idle where outputs are few; as a batch of four they are shared out."""


@struct.dataclass
class Packed:
    """Weights that read the same input, one below the other, their rows the outputs, cut into panels.

    With few input rows, as in decoding, a product takes the time in which its weight is read: fewer and larger
    products keep all cores reading, each in the order of the memory.
    """

    panels: Float[Array, "panels rows inputs"]
    shapes: tuple[tuple[int, ...], ...] = struct.field(pytree_node=False)
    """Axes of each weight's output."""


Weights = tuple[Array, ...] | Packed


def pack(*weights: Array, inputs: int = 1, dtype: str) -> Packed:
    """The weights in one piece of the working type; the first `inputs` axes of each are summed over."""
    width = math.prod(weights[0].shape[:inputs])
    rows = jnp.concatenate([weight.reshape(width, -1).T.astype(dtype) for weight in weights])
    panels = PANELS if len(rows) <= width and len(rows) % PANELS == 0 else 1
    shapes = tuple(weight.shape[inputs:] for weight in weights)
    return Packed(panels=rows.reshape(panels, -1, width), shapes=shapes)


def products(x: Array, weights: Weights, *, inputs: int = 1) -> list[Array]:
    """`product` of x with each weight."""
    if not isinstance(weights, Packed):
        return [product(x, weight, inputs=inputs) for weight in weights]
    parts = jnp.split(_packed_product(x, weights, inputs).astype(x.dtype), _ends(weights)[:-1], axis=-1)
    return [part.reshape(*part.shape[:-1], *shape) for part, shape in zip(parts, weights.shapes, strict=True)]


def product(x: Array, weight: Array | Packed, *, inputs: int = 1) -> Array:
    """x @ weight over the last axes of x and the first `inputs` of the weight, rounded once to the type of `x`."""
    return wide_product(x, weight, inputs=inputs).astype(x.dtype)


def wide_product(x: Array, weight: Array | Packed, *, inputs: int = 1) -> Array:
    """The product in the type it is summed in: float32, or float64 if `x` is that.

    Contracted axes keep their order: `einsum` would swap those of a weight [N,H,D] and so copy it in every call.
    """
    if isinstance(weight, Packed):
        (shape,) = weight.shapes
        y = _packed_product(x, weight, inputs)
        return y.reshape(*y.shape[:-1], *shape)
    return jnp.tensordot(x, weight.astype(x.dtype), axes=inputs, preferred_element_type=_sum_type(x))


def _packed_product(x: Array, weight: Packed, inputs: int) -> Array:
    batch, count = x.shape[: x.ndim - inputs], len(weight.panels)
    x = x.reshape(-1, weight.panels.shape[-1])
    y = jnp.einsum(
        "gri,gbi->gbr",
        weight.panels.astype(x.dtype),
        jnp.broadcast_to(x, (count, *x.shape)),
        preferred_element_type=_sum_type(x),
    )
    return jnp.moveaxis(y, 0, 1).reshape(*batch, -1)


def _ends(weights: Packed) -> list[int]:
    ends, end = [], 0
    for shape in weights.shapes:
        end += math.prod(shape)
        ends.append(end)
    return ends


def _sum_type(x: Array) -> jnp.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)


def exact_product(a: Array, b: Array) -> Array:
    """a @ b of stacked matrices with every digit of the factors, where accelerators would drop half of them.

    For what is carried on: errors in a recurrent state or in an inverse stay.
    """
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
