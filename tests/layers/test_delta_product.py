"""Gated DeltaProduct layers against a plain reference: both public variants, documents, the future, starts."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import RULES, perturb, small_model
from delta_reference import delta_layer
from jax.flatten_util import ravel_pytree

from elr_jax.config import DeltaProductConfig
from elr_jax.layers import make_context
from elr_jax.layers.delta_product import convolve, delta_product, delta_product_specs
from elr_jax.params import count_params, init_params

KEY = jax.random.key(7)
SMALL = {"num_heads": 4, "num_key_heads": 2, "key_dim": 3, "value_dim": 5}
VARIANTS = {
    "megatron": DeltaProductConfig(**SMALL, householder=3),
    "fla": DeltaProductConfig(**SMALL, householder=2, negative_eigenvalues=True, norm="head"),
    "gated deltanet": DeltaProductConfig(**SMALL | {"num_key_heads": 4}, householder=1, norm="head"),
    "no convolution": DeltaProductConfig(**SMALL, householder=2, conv_size=1),
}


def configure(delta):
    return dataclasses.replace(small_model(RULES["elr"], core="D"), delta=delta)


def params_of(config, seed=0):
    return perturb(init_params(KEY, delta_product_specs(config, 1.0)), seed=seed)


@partial(jax.jit, static_argnames="config")
def run(x, params, segments, *, config):
    context = make_context(jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2]), segments, config)
    return delta_product(x, params, context, config)[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_layer_is_the_reference(variant):
    """Two rows, one of them two documents, each as if alone."""
    config = configure(VARIANTS[variant])
    params = params_of(config)
    x = jax.random.normal(KEY, (2, 11, config.d_model))
    segments = jnp.where(jnp.arange(11) < 4, 7, 3)[None].repeat(2, 0).at[1].set(0)
    out = run(x, params, segments, config=config)
    for row, parts in ((0, (slice(0, 4), slice(4, 11))), (1, (slice(0, 11),))):
        for part in parts:
            expected, _ = delta_layer(x[row, part], params, config, [])
            np.testing.assert_allclose(out[row, part], expected, atol=2e-5)


def test_other_documents_and_the_future_do_not_matter():
    """Neither in value nor in gradient, for documents of more than a chunk and of one token."""
    config = configure(VARIANTS["megatron"])
    params = params_of(config)
    segments = jnp.searchsorted(jnp.array([40, 41, 100]), jnp.arange(130), side="right")[None]
    x = jax.random.normal(KEY, (1, 130, config.d_model))

    def influence(x, at):
        return jnp.sum(jnp.square(run(x, params, segments, config=config)[0, at]))

    moved = jnp.abs(jax.jit(jax.grad(influence))(x, 99)).sum(-1)[0]
    # gradients of decays are differences of sums: rounding is left of what is exactly zero elsewhere
    assert moved[:41].max() <= 1e-5 * moved.max() and not moved[100:].any() and moved[41:100].all()
    changed = x.at[:, :41].add(1).at[:, 100:].add(1)
    out, other = (run(y, params, segments, config=config)[0, 41:100] for y in (x, changed))
    np.testing.assert_allclose(out, other, atol=2e-5)


def test_the_convolution_is_numpys():
    rng = np.random.default_rng(0)
    x, before, taps = rng.normal(size=(1, 9, 2)), rng.normal(size=(1, 3, 2)), rng.normal(size=(4, 2))
    out = convolve(*(jnp.asarray(y, jnp.float32) for y in (x, before, taps)), jnp.zeros((1, 9), jnp.int32))
    joined = np.concatenate([before, x], axis=1)[0]
    for channel in range(2):
        expected = np.convolve(joined[:, channel], taps[::-1, channel], mode="valid")
        np.testing.assert_allclose(out[0, :, channel], expected / (1 + np.exp(-expected)), atol=1e-6)


def test_starts():
    """A = e^{a_log} uniform on (0, 16), softplus(dt_bias) log-uniform from 0.001 to 0.1."""
    config = configure(DeltaProductConfig(**SMALL | {"num_heads": 4000}))
    params = init_params(KEY, delta_product_specs(config, 1.0))
    rate, step = jnp.exp(params.a_log), jax.nn.softplus(params.dt_bias)
    assert rate.min() > 0 and rate.max() < 16 and abs(rate.mean() - 8) < 0.3
    assert step.min() > 9.9e-4 and step.max() < 0.101 and abs(jnp.log(step).mean() - np.log(0.01)) < 0.1
    assert abs(params.convolve.value.std() - 0.5 / 3**0.5) < 0.01
    specs: Any = delta_product_specs(config, 1.0)
    groups = {spec.group for spec in (specs.a_log, specs.dt_bias)}
    assert groups == {"vector"}, "not decayed"


def test_gates_stay_wide_in_bfloat16():
    """Decays near 1 would all round to 1: the layer's error is that of its inputs, not more."""
    config = configure(VARIANTS["megatron"])
    params = params_of(config)
    x = jax.random.normal(KEY, (1, 64, config.d_model), jnp.bfloat16)
    segments = jnp.zeros((1, 64), jnp.int32)
    narrow = run(x, params, segments, config=config)
    assert narrow.dtype == jnp.bfloat16
    wide = run(x.astype(jnp.float32), params, segments, config=config)
    assert jnp.abs(narrow - wide).max() < 0.05 * jnp.abs(wide).max()
    gradient = jax.jit(jax.grad(lambda p: jnp.sum(jnp.square(run(x, p, segments, config=config).astype(jnp.float32)))))
    assert jnp.isfinite(ravel_pytree(gradient(params))[0]).all()


def test_sizes():
    config = configure(VARIANTS["megatron"])
    d, n, k, h, v, p = 8, 4, 2, 3, 5, 3
    streams = (p + 1) * k * h + p * n * v
    assert count_params(delta_product_specs(config, 1.0)) == (
        (d + 4) * streams + d * n * (p + 1) + 2 * n + d * n * v + n * v + n * v * d
    )
