"""Cross entropy, also straight from hidden states, and its sums by loop count, so that parts of a batch add up."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from elr_jax.layers.linear import wide_product
from elr_jax.layers.moe import Routing
from elr_jax.sharding import ACTIVATIONS, constrain, cut_by
from elr_jax.typing import Array, Bool, Depth, Float, Hidden, Int, Logits, Tokens, widen

CHUNK_BYTES = 1 << 27
"""Logits that are in memory at a time: large enough for the products' full speed."""


@struct.dataclass
class DepthSums:
    """Loss and weight summed over the tokens of each loop count: entry k − 1 belongs to examples of k loops."""

    loss: Float[Array, "R"]
    """Nats."""
    weight: Float[Array, "R"]


@struct.dataclass
class TokenScores:
    """What became of every token's prediction; without gradient, but for `routing`."""

    loss: Float[Array, "B T"]
    """Nats."""
    right: Bool[Array, "B T"]
    """Whether no token had a higher logit than the target."""
    routing: tuple[Routing, ...] = ()
    """What each mixture of experts did, in the order of the layers."""


def cross_entropy(logits: Logits, targets: Tokens) -> Float[Array, "B T"]:
    """log Σ_v exp(logits_v) − logits_target, in nats and float32."""
    logits = widen(logits)
    # a gather's gradient would be a scatter into zeros of the logits' size; a comparison fuses into the sums
    here = jnp.arange(logits.shape[-1]) == targets[..., None]
    return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(here, logits, 0), axis=-1)


def sum_by_depth(
    losses: Float[Array, "B T"], weights: Float[Array, "B T"], depth: Depth, *, max_loops: int
) -> DepthSums:
    """Weighted losses and weights of a batch, by loop count."""
    loss, weight = jnp.sum(losses * weights, axis=1), jnp.sum(weights, axis=1)
    by_depth = jax.nn.one_hot(depth - 1, max_loops, dtype=jnp.float32)
    return DepthSums(loss=loss @ by_depth, weight=weight @ by_depth)


def linear_cross_entropy(
    x: Hidden, head: Float[Array, "D V"], targets: Tokens, weights: Float[Array, "B T"], *, chunk: int | None = None
) -> tuple[Float[Array, ""], TokenScores]:
    """Σ weights ⊙ cross_entropy(x head, targets) and each token's score, with the logits of `chunk` tokens at a time.

    Where gradients are wanted, they are made while a chunk's logits are there, so the forward pass costs three products
    and the backward pass none: memory is the head's gradient and one chunk (None: as many tokens as CHUNK_BYTES of
    float32 logits hold) instead of all logits and their gradients. Products are in the type of `x`, sums in float32 or
    wider; targets and weights get no gradient.
    """
    length, rows = targets.shape[-1], math.prod(targets.shape[:-1])
    # every chunk has tokens of all rows, so that devices which share the rows out share each chunk out
    most = chunk or CHUNK_BYTES * math.prod(map(cut_by, ACTIVATIONS["batch"])) // (4 * head.shape[1])
    count = -(-length // max(1, most // rows))
    cut = partial(_cut, count=count, axis=targets.ndim - 1)
    total, loss, right = _chunked(cut(x), head, cut(targets), cut(weights))
    whole = lambda y: jnp.moveaxis(y, 0, -2).reshape(*targets.shape[:-1], -1)[..., :length]
    return total, TokenScores(loss=jax.lax.stop_gradient(whole(loss)), right=whole(right))


Chunks = Float[Array, "chunks *B N D"]
Scores = tuple[Float[Array, ""], Float[Array, "chunks *B N"], Bool[Array, "chunks *B N"]]


def _cut(x: Array, *, count: int, axis: int) -> Array:
    """The axis of tokens in `count` equal pieces, which come first, filled up with zeros: tokens of weight 0."""
    size = -(-x.shape[axis] // count)
    sides = [(0, 0)] * x.ndim
    sides[axis] = (0, count * size - x.shape[axis])
    pieces = jnp.pad(x, sides).reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])
    pieces = jnp.moveaxis(pieces, axis, 0)
    return pieces if axis == 0 else constrain(pieces, None, "batch", "sequence", *[None] * (x.ndim - 2))


@jax.custom_vjp
def _chunked(
    x: Chunks, head: Float[Array, "D V"], targets: Int[Array, "chunks *B N"], weights: Float[Array, "chunks *B N"]
) -> Scores:
    head = _working(head, x)

    def one(total: Array, part: tuple[Array, Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        x, targets, weights = part
        loss, right, _ = _scores(wide_product(x, head), targets)
        return total + jnp.sum(weights * loss), (loss, right)

    total, (loss, right) = jax.lax.scan(one, _zero(x), (x, targets, weights))
    return total, loss, right


def _forward(
    x: Chunks, head: Float[Array, "D V"], targets: Int[Array, "chunks *B N"], weights: Float[Array, "chunks *B N"]
) -> tuple[Scores, tuple[Chunks, Array]]:
    working = _working(head, x)

    def one(carry: tuple[Array, Array], part: tuple[Array, Array, Array]):
        total, slope = carry
        x, targets, weights = part
        loss, right, share = _scores(wide_product(x, working), targets)
        here = jnp.arange(head.shape[1]) == targets[..., None]
        error = (weights[..., None] * (share - here)).astype(x.dtype)
        tokens = tuple(range(targets.ndim))
        slope += jax.lax.dot_general(x, error, ((tokens, tokens), ((), ())), preferred_element_type=slope.dtype)
        back = jnp.matmul(error, working.T, preferred_element_type=slope.dtype)
        return (total + jnp.sum(weights * loss), slope), (loss, right, back.astype(x.dtype))

    start = _zero(x), jnp.zeros(head.shape, _zero(x).dtype)
    (total, slope), (loss, right, back) = jax.lax.scan(one, start, (x, targets, weights))
    return (total, loss, right), (back, slope.astype(head.dtype))


def _backward(made: tuple[Chunks, Array], cotangent: Scores):
    back, slope = made
    return (cotangent[0] * back).astype(back.dtype), (cotangent[0] * slope).astype(slope.dtype), None, None


_chunked.defvjp(_forward, _backward)


def _scores(logits: Float[Array, "*B N V"], targets: Int[Array, "*B N"]):
    """Loss, whether the target is the maximum, and the softmax."""
    highest = jnp.max(logits, axis=-1, keepdims=True)
    powers = jnp.exp(logits - highest)
    total = jnp.sum(powers, axis=-1, keepdims=True)
    target = jnp.take_along_axis(logits, targets[..., None], axis=-1)
    return (highest + jnp.log(total) - target)[..., 0], (target == highest)[..., 0], powers / total


def _working(head: Float[Array, "D V"], x: Array) -> Float[Array, "D V"]:
    """The head in the type of `x`, gathered once for all chunks."""
    return constrain(head.astype(x.dtype), None, "vocab")


def _zero(x: Array) -> Float[Array, ""]:
    return jnp.zeros((), jnp.promote_types(x.dtype, jnp.float32))
