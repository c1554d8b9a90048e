"""Cross entropy against float64, the same straight from hidden states, and sums by loop count that add up."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from elr_jax import losses
from elr_jax.losses import cross_entropy, linear_cross_entropy, sum_by_depth


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_cross_entropy(dtype):
    logits = (30 * jax.random.normal(jax.random.key(0), (2, 3, 5))).astype(dtype)
    targets = jnp.array([[0, 4, 2], [1, 1, 3]])
    exact = np.asarray(logits.astype(jnp.float32), np.float64)
    picked = np.take_along_axis(exact, np.asarray(targets)[..., None], -1)[..., 0]
    found = cross_entropy(logits, targets)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, np.log(np.exp(exact).sum(-1)) - picked, rtol=1e-5, atol=1e-5)


def test_sums_by_depth():
    values, weights = jnp.arange(8.0).reshape(4, 2), jnp.array([[1, 0], [1, 1], [0.5, 0], [0, 0]])
    sums = sum_by_depth(values, weights, jnp.array([3, 1, 3, 2]), max_loops=4)
    np.testing.assert_array_equal(sums.loss, [5, 0, 2, 0])
    np.testing.assert_array_equal(sums.weight, [2, 0, 1.5, 0])


ROWS, LENGTH, WIDTH, VOCAB = 3, 5, 8, 13


def hidden_states(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(1), 4)
    x = (3 * jax.random.normal(keys[0], (ROWS, LENGTH, WIDTH))).astype(dtype)
    head = jax.random.normal(keys[1], (WIDTH, VOCAB))
    targets = jax.random.randint(keys[2], (ROWS, LENGTH), 0, VOCAB)
    weights = jnp.where(jax.random.bernoulli(keys[3], 0.7, (ROWS, LENGTH)), 0.5, 0.0)
    return x, head, targets, weights


def naive(x, head, targets, weights):
    logits = jnp.matmul(x, head.astype(x.dtype), preferred_element_type=jnp.float32)
    return jnp.sum(weights * cross_entropy(logits, targets)), logits


WHOLE = [(chunk, {}) for chunk in (1, 4, 7, ROWS * LENGTH, None)]
SHARED = [(2, {"sequence": 5}), (4, {"fsdp": 3, "sequence": 5}), (4, {"sequence": 2})]


@pytest.mark.parametrize("chunk, sizes", [*WHOLE, *SHARED])
def test_linear_cross_entropy_is_cross_entropy_of_the_product(chunk, sizes, monkeypatch):
    """Whatever tokens make a chunk, and however many devices would share it out."""
    monkeypatch.setattr(losses, "cut_by", lambda axis: sizes.get(axis, 1))
    x, head, targets, weights = hidden_states()
    fused = partial(linear_cross_entropy, chunk=chunk)
    slope = lambda function: jax.value_and_grad(lambda x, head: 3 * function(x, head, targets, weights)[0], (0, 1))
    (value, gradient), (expected, exact) = slope(fused)(x, head), slope(naive)(x, head)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for one, other in zip(gradient, exact, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    total, scores = fused(x, head, targets, weights)
    logits = naive(x, head, targets, weights)[1]
    np.testing.assert_allclose(scores.loss, cross_entropy(logits, targets), rtol=1e-5)
    np.testing.assert_array_equal(scores.right, jnp.argmax(logits, -1) == targets)
    np.testing.assert_allclose(3 * total, value, rtol=1e-6)


def test_linear_cross_entropy_in_bfloat16_sums_in_float32():
    """The head's gradient stays float32, and both are off by the rounding of operands alone."""
    x, head, targets, weights = hidden_states(jnp.bfloat16)
    take = partial(jax.grad, argnums=(0, 1))
    fused = take(lambda x, head: linear_cross_entropy(x, head, targets, weights, chunk=4)[0])(x, head)
    exact = take(lambda x, head: naive(x, head, targets, weights)[0])(x.astype(jnp.float32), head)
    assert fused[0].dtype == jnp.bfloat16 and fused[1].dtype == jnp.float32
    for one, other in zip(fused, exact, strict=True):
        assert jnp.abs(one - other).max() < 0.02 * jnp.abs(other).max()  # head and softmax error are rounded: 2⁻⁸ each


def test_linear_cross_entropy_keeps_no_logits():
    """Memory beside the results is a chunk's; the plain form keeps the logits of all tokens."""
    tokens, width, vocab, chunk = 1024, 16, 4096, 64
    shapes = [(tokens, width), (width, vocab), (tokens,), (tokens,)]
    inputs = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in zip(shapes, ("float32", "float32", "int32", "float32"), strict=True)
    ]

    def temporary(function):
        gradient = jax.jit(jax.grad(lambda *inputs: function(*inputs)[0], (0, 1)))
        return gradient.lower(*inputs).compile().memory_analysis().temp_size_in_bytes

    plain, fused = temporary(naive), temporary(partial(linear_cross_entropy, chunk=chunk))
    logits = 4 * tokens * vocab
    assert plain > 0.9 * logits
    assert fused < 4 * logits * chunk / tokens + 2 * 4 * width * (vocab + tokens)


def test_a_chunk_holds_as_many_tokens_as_its_bytes(monkeypatch):
    x, head, targets, weights = hidden_states()
    monkeypatch.setattr(losses, "CHUNK_BYTES", 4 * VOCAB * 4)
    jaxpr = jax.make_jaxpr(linear_cross_entropy)(x, head, targets, weights)
    assert f"f32[1,1,4,{VOCAB}]" in str(jaxpr) and f"{ROWS * LENGTH},{VOCAB}" not in str(jaxpr)
