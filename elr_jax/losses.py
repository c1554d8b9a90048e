"""Cross entropy, also straight from hidden states, and its sums by loop count, so that parts of a batch add up."""

import math

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
    rows, length = math.prod(targets.shape[:-1]), targets.shape[-1]
    beside = math.prod(map(cut_by, ACTIVATIONS["batch"])), _apart(length)
    most = chunk or max(1, CHUNK_BYTES // (4 * head.shape[1]))
    cut = lambda y: _cut(y.reshape(rows, length, *y.shape[targets.ndim :]), beside, most)
    total, loss, right = _chunked(cut(x), head, cut(targets), cut(weights.astype(_zero(x).dtype)))
    whole = lambda y: _join(y, rows, length).reshape(targets.shape)
    return total, TokenScores(loss=jax.lax.stop_gradient(whole(loss)), right=whole(right))


Chunks = Float[Array, "chunks rows pieces N D"]
Scores = tuple[Float[Array, ""], Float[Array, "chunks rows pieces N"], Bool[Array, "chunks rows pieces N"]]
"""A chunk has N tokens for each device, which share out rows and pieces of the sequence: nothing in it is exchanged."""


def _apart(length: int) -> int:
    """Devices that share out a sequence; one that they don't divide is whole on each."""
    pieces = math.prod(map(cut_by, ACTIVATIONS["sequence"]))
    return 1 if length % pieces else pieces


def _cut(x: Array, beside: tuple[int, int], most: int) -> Array:
    """The tokens [B,T,…] of each device in chunks of at most so many, filled up with zeros: tokens of weight 0."""
    rows, pieces = beside
    batch, length, *rest = x.shape
    tokens = batch * length // (rows * pieces)
    count = -(-tokens // most)
    x = jnp.swapaxes(x.reshape(rows, batch // rows, pieces, length // pieces, *rest), 1, 2)
    x = constrain(x.reshape(rows, pieces, tokens, *rest), "batch", "sequence", *[None] * (1 + len(rest)))
    x = jnp.pad(x, [(0, 0), (0, 0), (0, -tokens % count), *[(0, 0)] * len(rest)])
    return jnp.moveaxis(x.reshape(rows, pieces, count, -1, *rest), 2, 0)


def _join(y: Array, batch: int, length: int) -> Array:
    """What `_cut` cut, [B,T]."""
    _, rows, pieces, _ = y.shape
    y = jnp.moveaxis(y, 0, 2).reshape(rows, pieces, -1)[..., : batch * length // (rows * pieces)]
    return jnp.swapaxes(y.reshape(rows, pieces, batch // rows, -1), 1, 2).reshape(batch, length)


@jax.custom_vjp
def _chunked(
    x: Chunks, head: Float[Array, "D V"], targets: Int[Array, "chunks rows pieces N"], weights: Array
) -> Scores:
    head = _working(head, x)

    def one(total: Array, part: tuple[Array, Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        x, targets, weights = part
        loss, right, _ = _scores(wide_product(x, head), targets)
        return total + jnp.sum(weights * loss), (loss, right)

    total, (loss, right) = jax.lax.scan(one, _zero(x), (x, targets, weights))
    return total, loss, right


def _forward(
    x: Chunks, head: Float[Array, "D V"], targets: Int[Array, "chunks rows pieces N"], weights: Array
) -> tuple[Scores, tuple[Chunks, Array]]:
    working = _working(head, x)

    def one(carry: tuple[Array, Array], part: tuple[Array, Array, Array]):
        total, slope = carry
        x, targets, weights = part
        loss, right, share = _scores(wide_product(x, working), targets)
        here = jnp.arange(head.shape[1]) == targets[..., None]
        error = (weights[..., None] * (share - here)).astype(x.dtype)
        slope += jnp.einsum("rpnd,rpnv->rpdv", x, error, preferred_element_type=slope.dtype)
        back = jnp.matmul(error, working.T, preferred_element_type=slope.dtype)
        return (total + jnp.sum(weights * loss), slope), (loss, right, back.astype(x.dtype))

    # each device sums its own: else all would exchange a gradient of the head's size for every chunk
    slope = jnp.zeros((*targets.shape[1:3], *head.shape), _zero(x).dtype)
    start = _zero(x), constrain(slope, "batch", "sequence", None, "vocab")
    (total, slope), (loss, right, back) = jax.lax.scan(one, start, (x, targets, weights))
    return (total, loss, right), (back, jnp.sum(slope, axis=(0, 1)).astype(head.dtype))


def _backward(made: tuple[Chunks, Array], cotangent: Scores):
    back, slope = made
    return (cotangent[0] * back).astype(back.dtype), (cotangent[0] * slope).astype(slope.dtype), None, None


_chunked.defvjp(_forward, _backward)


def _scores(logits: Float[Array, "rows pieces N V"], targets: Int[Array, "rows pieces N"]):
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
