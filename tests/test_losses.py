"""Cross entropy against float64, and sums by loop count that add up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from elr_jax.losses import cross_entropy, sum_by_depth


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_cross_entropy(dtype):
    logits = (30 * jax.random.normal(jax.random.key(0), (2, 3, 5))).astype(dtype)
    targets = jnp.array([[0, 4, 2], [1, 1, 3]])
    exact = np.asarray(logits.astype(jnp.float32), np.float64)
    picked = np.take_along_axis(exact, np.asarray(targets)[..., None], -1)[..., 0]
    losses = cross_entropy(logits, targets)
    assert losses.dtype == jnp.float32
    np.testing.assert_allclose(losses, np.log(np.exp(exact).sum(-1)) - picked, rtol=1e-5, atol=1e-5)


def test_sums_by_depth():
    losses, weights = jnp.arange(8.0).reshape(4, 2), jnp.array([[1, 0], [1, 1], [0.5, 0], [0, 0]])
    sums = sum_by_depth(losses, weights, jnp.array([3, 1, 3, 2]), max_loops=4)
    np.testing.assert_array_equal(sums.loss, [5, 0, 2, 0])
    np.testing.assert_array_equal(sums.weight, [2, 0, 1.5, 0])
