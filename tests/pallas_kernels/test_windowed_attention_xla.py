"""Attention in plain JAX against a plain reference: windows, grouped heads, documents, a cost that grows with T·W."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params

from pallas_kernels.windowed_attention import visited_keys, windowed_attention, xla

HEADS, GROUPS, WIDTH = 4, 2, 3


def draw(length, *, heads=HEADS, groups=GROUPS, batch=2, seed=0):
    keys = jax.random.split(jax.random.key(seed), 4)
    sizes = (heads, groups, groups, heads)
    return tuple(2 * jax.random.normal(key, (batch, length, n, WIDTH)) for key, n in zip(keys, sizes, strict=True))


def reference(q, k, v, segments, *, window):
    """Every head with its own repeated keys, every visible pair spelled out."""
    heads, length = q.shape[2], q.shape[1]
    k, v = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (k, v))
    behind = np.arange(length)[:, None] - np.arange(length)[None, :]
    visible = (behind >= 0) & (behind < (window or length)) & (segments[:, :, None] == segments[:, None, :])
    weights = jnp.exp(jnp.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(q.shape[-1])) * visible[:, None]
    return jnp.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), v)


@partial(jax.jit, static_argnames="function")
def pulled(function, q, k, v, segments, cotangent):
    out, pull = jax.vjp(lambda *x: function(*x, segments), q, k, v)
    return out, *pull(cotangent)


def assert_is_reference(function, length, window, **sizes):
    *arrays, cotangent = draw(length, **sizes)
    segments = jnp.where(jnp.arange(length) < length // 3, 4, 0)[None].repeat(2, 0).at[1].set(7)
    expected = pulled(partial(reference, window=window), *arrays, segments, cotangent)
    for one, other in zip(pulled(function, *arrays, segments, cotangent), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("length, window", [(130, None), (193, 65)])
def test_attention_is_the_reference(length, window):
    assert_is_reference(partial(windowed_attention, window=window), length, window)


@pytest.mark.parametrize("heads, groups", [(4, 1), pytest.param(3, 3, marks=pytest.mark.slow)])
def test_grouped_heads_are_repeated_keys(heads, groups):
    assert_is_reference(partial(windowed_attention, window=None), 5, None, heads=heads, groups=groups)


@pytest.mark.slow
@settings(max_examples=2)
@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 6))
@example(4, 3, 4)  # W − 1
@example(4, 5, 2)  # W + 1
@example(4, 8, 2)  # 2W
@example(1, 7, 3)
def test_blocks_of_any_size_are_the_reference(window, length, block):
    reach = -(-(window - 1) // block)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla, "_window_sizes", lambda window: (block, reach))
        assert_is_reference(partial(windowed_attention, window=window), length, window)


@given(st.integers(1, 100_000))
def test_a_block_reaches_all_of_its_window_and_not_much_more(window):
    block, reach = xla._window_sizes(window)
    assert reach * block >= window - 1, "the first query of a block sees its whole window"
    assert (reach - 1) * block < window - 1 or reach == 0, "no block that nobody sees"
    assert visited_keys(10**9, window) <= max(1.5 * window, window + 2 * 64 - 2)


def test_a_token_alone_in_its_document_attends_to_itself():
    q, k, v, _ = draw(200)
    for window in (None, 5):
        out = windowed_attention(q, k, v, jnp.arange(200)[None].repeat(2, 0), window=window)
        np.testing.assert_allclose(out, jnp.repeat(v, HEADS // GROUPS, axis=2), rtol=1e-6)


def largest(jaxpr) -> int:
    sizes = [math.prod(var.aval.shape) for equation in jaxpr.eqns for var in equation.outvars]
    return max(sizes + [largest(inner) for equation in jaxpr.eqns for inner in jaxprs_in_params(equation.params)])


@pytest.mark.parametrize("window", [1, 64, 200])
def test_cost_and_memory_of_a_window_grow_with_the_length(window):
    """Forward and gradient; one head of width 3 in one row, so that T·T would be by far the largest array."""

    def loss(q, k, v, length):
        return windowed_attention(q, k, v, jnp.zeros((1, length), jnp.int32), window=window).sum()

    flops, memory = [], []
    for length in (4096, 8192):
        shapes = [jax.ShapeDtypeStruct((1, length, 1, WIDTH), jnp.float32)] * 3
        traced = jax.jit(jax.grad(partial(loss, length=length), argnums=(0, 1, 2))).trace(*shapes)
        flops.append(traced.lower().cost_analysis()["flops"])
        memory.append(largest(traced.jaxpr.jaxpr))
    assert flops[1] / flops[0] == pytest.approx(2, rel=0.05)
    assert memory[1] == pytest.approx(2 * memory[0], rel=0.1)
    assert memory[1] <= 8192 * (visited_keys(8192, window) + 64)
