"""Probes on states whose motion is known, and losses through caches against the full pass."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import RULES, assert_close, perturb, small_model
from hypothesis import given
from hypothesis import strategies as st

from elr_jax import model, parameters, probes
from elr_jax.losses import cross_entropy

KEY = jax.random.key(5)


def states_of(step, rounds=16):
    """Two rows of three tokens that start apart and follow `step(state, round)`."""
    states = [np.random.default_rng(0).normal(size=(2, 3, 4))]
    for k in range(rounds):
        states.append(step(states[-1], k))
    return jnp.asarray(np.stack(states), jnp.float32)


@given(st.floats(0.1, 1.5))
def test_a_geometric_approach_contracts_by_its_factor(factor):
    goal = np.arange(1.0, 5.0)
    states = states_of(lambda s, k: goal + factor * (s - goal), rounds=4)
    np.testing.assert_allclose(probes.contraction(states), factor, rtol=2e-3)
    moved = np.linalg.norm(np.diff(states, axis=0), axis=-1) / np.linalg.norm(states[1:], axis=-1)
    np.testing.assert_allclose(probes.residuals(states), moved, rtol=1e-5)


@given(st.integers(1, 8), st.floats(0.0, 0.6))
def test_a_cycle_is_found_with_its_least_period(period, decay):
    """On the way into a cycle of p points, too; a multiple of the period would return as well."""
    points = np.random.default_rng(1).normal(size=(8, 4)) + 3

    def step(s, k):
        return points[k % period] + decay ** (k + 1) * (s - points[(k - 1) % period])

    found = probes.periods(states_of(step, rounds=24), longest=8, tolerance=1e-3)
    np.testing.assert_array_equal(found, period)


def test_what_neither_settles_nor_returns_has_no_period():
    walk = states_of(lambda s, k: s + 0.1 * np.sign(s))
    np.testing.assert_array_equal(probes.periods(walk, tolerance=1e-3), 0)
    np.testing.assert_array_equal(probes.periods(walk, tolerance=2.0), 1)
    with pytest.raises(AssertionError, match="need 16 rounds"):
        probes.periods(walk[:16])


@pytest.mark.parametrize("rule", ["parcae", "elr"])
def test_losses_of_calls(rule):
    """Through a per-loop cache they are the full pass's; through one of the last loop alone they are not."""
    config = small_model(dataclasses.replace(RULES[rule], max_loops=3), coda="")
    params = perturb(jax.jit(parameters.init, static_argnums=1)(KEY, config), scale=0.3)
    tokens = jax.random.randint(KEY, (2, 9), 0, 13)
    inputs, depth = (tokens[:, :-1], tokens[:, 1:]), jnp.array([3, 2])
    logits = model.apply(params, inputs[0], depth, config=config, key=KEY)
    whole = cross_entropy(logits, inputs[1])

    def read(mode, chunk):
        return probes.losses_of_calls(params, *inputs, depth, config=config, mode=mode, chunk=chunk, key=KEY)

    for chunk in (1, 4):
        assert_close(read("per_loop", chunk), whole, rtol=1e-4)
    assert_close(read("last_loop", 8), whole, rtol=1e-4)
    assert jnp.abs(read("last_loop", 1) - whole).max() > 1e-3
