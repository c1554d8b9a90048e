"""Rotary positions: exact angles far out, lengths kept, products that depend on distance alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from elr_jax.layers.rope import rotary_table, rotate

HEAD = 64


@pytest.mark.parametrize("position", [0, 1, 4_095, 131_071])
def test_phases_are_right_far_out(position):
    """Against float64; a float32 phase of 131,071 radians is off by up to half its spacing, 0.004."""
    cos, sin = rotary_table(jnp.array([[position]]), head_dim=HEAD, base=10_000.0)
    exact = position * 10_000.0 ** (-np.arange(0, HEAD, 2) / HEAD)
    bound = 1e-6 + position * 3e-7
    np.testing.assert_allclose(cos[0, 0, 0], np.cos(exact), atol=bound)
    np.testing.assert_allclose(sin[0, 0, 0], np.sin(exact), atol=bound)
    assert cos.dtype == sin.dtype == jnp.float32


def test_rotation_is_multiplication_by_a_unit_complex_number():
    x = jax.random.normal(jax.random.key(0), (1, 5, 2, 8))
    positions = jnp.array([[0, 1, 2, 30, 31]])
    turned = np.asarray(rotate(x, rotary_table(positions, head_dim=8, base=100.0)))
    angle = np.asarray(positions)[..., None, None] * 100.0 ** (-np.arange(4) / 4)
    expected = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angle)
    np.testing.assert_allclose(turned, np.concatenate([expected.real, expected.imag], -1), atol=1e-5)


def test_half_precision_is_turned_in_float32():
    x = jax.random.normal(jax.random.key(0), (1, 1, 1, HEAD)).astype(jnp.bfloat16)
    table = rotary_table(jnp.array([[4_095]]), head_dim=HEAD, base=10_000.0)
    turned = rotate(x, table)
    assert turned.dtype == jnp.bfloat16
    np.testing.assert_array_equal(turned, rotate(x.astype(jnp.float32), table).astype(jnp.bfloat16))
