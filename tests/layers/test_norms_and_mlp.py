"""Norms, feed-forward layers and products against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import RULES, small_model

from elr_jax.layers.linear import product
from elr_jax.layers.mlp import MLP, mlp
from elr_jax.layers.norms import rms_norm, unit_norm

CONFIG = small_model(RULES["elr"])
X = jax.random.normal(jax.random.key(0), (2, 3, 4))


def weights(*shape, seed=1):
    return jax.random.normal(jax.random.key(seed), shape)


def test_rms_norm():
    x, scale = np.asarray(X, np.float64), np.arange(4.0)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.1)
    np.testing.assert_allclose(rms_norm(X, eps=0.1), expected, rtol=1e-6)
    np.testing.assert_allclose(rms_norm(X, jnp.asarray(scale), eps=0.1), expected * scale, rtol=1e-6)


def test_unit_norm():
    assert jnp.linalg.norm(unit_norm(X, eps=0.0), axis=-1) == pytest.approx(np.ones((2, 3)), rel=1e-6)
    assert not unit_norm(jnp.zeros((1, 4)), eps=1e-6).any()


@pytest.mark.parametrize("norm", [rms_norm, unit_norm])
def test_norms_are_computed_in_float32(norm):
    """1,000² overflows neither, and 4,096 squares of bfloat16 numbers would add up to 256 only."""
    x = jnp.full((1, 4096), 1000, jnp.bfloat16)
    y = norm(x, eps=1e-6)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(jnp.float32), 1.0 if norm is rms_norm else 1 / 64, rtol=1e-2)


def test_swiglu():
    gate, up, down = weights(4, 5), weights(4, 5, seed=2), weights(5, 4, seed=3)
    x, g = np.asarray(X, np.float64), np.asarray(X @ gate, np.float64)
    expected = (g / (1 + np.exp(-g)) * (x @ up)) @ down
    params = MLP(gate=gate, up=up, down=down, gate_scale=None, up_scale=None)
    np.testing.assert_allclose(mlp(X, params, CONFIG), expected, rtol=1e-4, atol=1e-5)


def test_squared_relu():
    up, down = weights(4, 5, seed=2), weights(5, 4, seed=3)
    expected = np.maximum(np.asarray(X, np.float64) @ up, 0) ** 2 @ down
    params = MLP(gate=None, up=up, down=down, gate_scale=None, up_scale=None)
    np.testing.assert_allclose(mlp(X, params, CONFIG), expected, rtol=1e-4, atol=1e-5)


def test_products_round_once():
    """2,048 ones and a half: bfloat16 sums would stop at 256."""
    x = jnp.ones((1, 2048), jnp.bfloat16)
    y = product(x, jnp.ones((2048, 3)))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y.astype(jnp.float32), 2048.0)
