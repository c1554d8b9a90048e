"""The loop rule against a plain reference that runs one row at a time, and the two forms against each other."""

import dataclasses
import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import RULES, assert_close, assert_same_bits, perturb, small_model

from elr_jax.config import Runtime
from elr_jax.loop import INJECT, initial_noise, loop_specs, run_loop, trajectory
from elr_jax.params import count_params, init_params
from pallas_kernels.gated_update import step_size

WIDTH, LENGTH, MAX_LOOPS = 8, 3, 4
DEPTHS = [4, 1, 2, 3]
EPS = 1e-6

# A program for each of these is compiled in both forms; the full product is left to the slow tests.
CHOSEN = [
    ("elr", "round", 1),
    ("dory", "none", 1),
    ("parcae", "none", 2),
    ("huginn", "round", None),
    ("delta", "none", None),
]
CASES = [
    pytest.param(*case, marks=() if case in CHOSEN else pytest.mark.slow)
    for case in itertools.product(RULES, ("none", "round"), (None, 1, 2))
]


def configure(rule, max_loops=MAX_LOOPS):
    return small_model(dataclasses.replace(rule, max_loops=max_loops))


def proposal(x, weights):
    return jnp.tanh(x @ weights) * 1.5


def core(i, x, carried, weights):
    return proposal(x, weights), carried


def inputs(config):
    """Loop parameters, core weights, entry, noise and a cotangent of the read-out state."""
    keys = jax.random.split(jax.random.key(3), 5)
    params = perturb(init_params(keys[0], loop_specs(config)))
    states = (jax.random.normal(key, (len(DEPTHS), LENGTH, WIDTH)) for key in keys[2:])
    return params, jax.random.normal(keys[1], (WIDTH, WIDTH)) / 2, *states


@partial(jax.jit, static_argnames=("config", "loop", "remat", "backprop_loops"))
def run(params, weights, entry, noise, cotangent, depth, *, config, loop="scan", remat="none", backprop_loops=None):
    """Read-out state and the gradients of parameters, core and entry."""

    def forward(params, weights, entry):
        return run_loop(
            entry,
            depth,
            params,
            weights,
            core=core,
            config=config,
            runtime=Runtime(loop=loop, remat=remat),
            noise=noise,
            backprop_loops=backprop_loops,
        )[0]

    out, pull = jax.vjp(forward, params, weights, entry)
    return out, pull(cotangent)


def rms(x, scale=1.0):
    return scale * x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + EPS)


def boundary(rule, x, scale=1.0):
    if rule.boundary == "unit":
        return x / jnp.sqrt(jnp.sum(x**2, -1, keepdims=True) + EPS)
    return rms(x, scale) if rule.boundary == "rms" else x


def inject(rule, p, s, e):
    if rule.inject == "concat":
        return jnp.concatenate([s, e], -1) @ jnp.concatenate([p.state, p.entry])
    if rule.inject == "gated":
        step = jnp.log1p(jnp.exp(p.dt_bias))
        return jnp.exp(-step * jnp.exp(p.a_log)) * s + step * (e @ p.input)
    return s + e if rule.inject == "residual" else s


def update(rule, p, s, r):
    if rule.update == "adaptive_delta":
        p = jnp.log1p(jnp.exp(p.gain)) / (1 + jnp.exp(-(rms(s) @ p.weight + p.bias)))
    return {"replace": r, "residual": s + r}[rule.update] if "delta" not in rule.update else (1 - p) * s + p * r


@partial(jax.jit, static_argnames=("rule", "backprop_loops"))
def reference(params, weights, entry, noise, cotangent, *, rule, backprop_loops):
    """The same as `run`, each row unrolled by itself; the rounds before its last `backprop_loops` see constants."""

    def one_round(p, w, s, e):
        u = boundary(rule, inject(rule, p.inject, s, e))
        return boundary(rule, update(rule, p.update, s, proposal(u, w)), p.boundary)

    def row(p, w, e, noise, depth):
        e = rms(e, p.inject.norm) if rule.inject == "gated" else e
        s = {"copy": e, "zero": jnp.zeros_like(e), "random": noise}[rule.initial]
        for left in range(depth, 0, -1):
            counted = backprop_loops is None or left <= backprop_loops
            s = one_round(p, w, s, e) if counted else one_round(*jax.lax.stop_gradient((p, w, s, e)))
        return s @ p.readout if rule.readout == "linear" else s

    def forward(p, w, entry):
        return jnp.stack([row(p, w, *arrays, depth) for *arrays, depth in zip(entry, noise, DEPTHS, strict=True)])

    out, pull = jax.vjp(forward, params, weights, entry)
    return out, pull(cotangent)


@pytest.mark.parametrize("name, remat, backprop_loops", CASES)
def test_every_row_runs_its_own_rounds_with_gradients_through_the_last_ones(name, remat, backprop_loops):
    config = configure(RULES[name])
    expected = reference(*inputs(config), rule=config.loop, backprop_loops=backprop_loops)
    actual = run(*inputs(config), jnp.array(DEPTHS), config=config, remat=remat, backprop_loops=backprop_loops)
    assert_close(actual, expected)


@pytest.mark.parametrize("name, remat, backprop_loops", CASES)
def test_bounded_is_scan_bit_for_bit(name, remat, backprop_loops):
    config = configure(RULES[name])
    form = partial(run, *inputs(config), config=config, backprop_loops=backprop_loops, remat=remat)
    same = same_bits_unless(backprop_loops == 1)
    for depth in (DEPTHS, [2, 2, 2, 2], [1, 1, 1, 3]):
        same(form(jnp.array(depth), loop="bounded"), form(jnp.array(depth), loop="scan"))


@pytest.mark.parametrize("name, remat, backprop_loops", CASES)
def test_masked_is_truncated_bit_for_bit(name, remat, backprop_loops):
    depth = jnp.full(len(DEPTHS), MAX_LOOPS)
    masked, truncated = (
        run(*inputs(config), depth, config=config, remat=remat, backprop_loops=backprop_loops)
        for config in (configure(RULES[name], MAX_LOOPS + 1), configure(RULES[name]))
    )
    same_bits_unless(backprop_loops == 1)(masked, truncated)


def same_bits_unless(one_round):
    """XLA unrolls a scan of one round, as the last part of a loop may be, and fuses, so rounds, differently."""
    return partial(assert_close, rtol=1e-5) if one_round else assert_same_bits


@pytest.mark.parametrize("name", ["dory", pytest.param("delta", marks=pytest.mark.slow)])
def test_masked_is_truncated_at_one_round(name):
    """XLA unrolls a scan of one round and fuses, so rounds, differently; `bounded` keeps the bits even there."""
    depth = jnp.ones(len(DEPTHS), jnp.int32)
    deep, flat = configure(RULES[name]), configure(RULES[name], 1)
    scan, bounded = (partial(run, loop=loop, backprop_loops=1) for loop in ("scan", "bounded"))
    assert_close(*(scan(*inputs(config), depth, config=config) for config in (deep, flat)), rtol=1e-6)
    assert_same_bits(*(bounded(*inputs(config), depth, config=config) for config in (deep, flat)))


def test_rounds_beyond_a_rows_depth_leave_no_trace():
    config = configure(RULES["delta"])
    params, weights, entry, noise, cotangent = inputs(config)
    out, _ = run(params, weights, entry, noise, cotangent, jnp.array(DEPTHS), config=config)
    for row, depth in enumerate(DEPTHS):
        deeper = jnp.full(len(DEPTHS), MAX_LOOPS).at[row].set(depth)
        other = entry.at[jnp.arange(len(DEPTHS)) != row].multiply(7.0)
        assert_same_bits(run(params, weights, other, noise, cotangent, deeper, config=config)[0][row], out[row])


def test_trajectory_holds_the_state_of_every_round():
    config = configure(RULES["delta"])
    params, weights, entry, noise, cotangent = inputs(config)
    follow = jax.jit(partial(trajectory, core=core, config=config))
    states = follow(entry, jnp.array(DEPTHS), params, weights, noise=noise)
    assert states.shape == (MAX_LOOPS + 1, *entry.shape)
    read = states @ params.readout
    for k in range(1, MAX_LOOPS + 1):
        depth = jnp.minimum(jnp.array(DEPTHS), k)
        assert_close(read[k], run(params, weights, entry, noise, cotangent, depth, config=config)[0])


def test_adaptive_delta_starts_at_half_the_logarithm_of_two():
    params = init_params(jax.random.key(0), loop_specs(configure(RULES["elr"])).update)
    for scale in (1e-3, 1.0, 1e3):
        state = scale * jax.random.normal(jax.random.key(1), (2, 5, WIDTH))
        beta = step_size(state, params.weight, params.bias, params.gain, eps=EPS)
        assert (beta == np.float32(math.log(2) / 2)).all()
    assert float(beta[0, 0, 0]) == pytest.approx(0.34657, abs=5e-6)
    assert count_params(loop_specs(configure(RULES["elr"]))) == WIDTH**2 + 2 * WIDTH


def test_parcae_starts_with_the_papers_decay_and_step():
    params = init_params(jax.random.key(0), loop_specs(configure(RULES["parcae"])).inject)
    one, zero = jnp.ones((1, 1, WIDTH)), jnp.zeros((1, 1, WIDTH))
    combine = INJECT["gated"].combine
    np.testing.assert_allclose(combine(params, one, zero), 1 / math.sqrt(5), rtol=1e-6)  # 0.44721
    np.testing.assert_allclose(combine(params, zero, one), math.log(5) / 2, rtol=1e-6)  # 0.80472
    np.testing.assert_array_equal(INJECT["gated"].drive(params, jnp.arange(8.0)[None, None])[0, 0], np.arange(8.0))


def test_initial_noise_belongs_to_example_and_position():
    keys = jax.random.split(jax.random.key(0), 3)
    positions = jnp.broadcast_to(jnp.arange(500), (3, 500))
    draw = jax.jit(partial(initial_noise, d_model=WIDTH, dtype=jnp.float32))
    noise = draw(keys, positions)
    assert_same_bits(draw(keys[::-1], positions[:, ::-1])[::-1, ::-1], noise)
    assert len(np.unique(noise)) > 0.99 * noise.size
    assert float(jnp.std(noise)) == pytest.approx(math.sqrt(2 / (5 * WIDTH)), rel=0.02)
    assert float(jnp.abs(noise).max()) <= 2 / 0.8796 * math.sqrt(2 / (5 * WIDTH))
