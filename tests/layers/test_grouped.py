"""Products of groups of rows against each group's own, and what they cost."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st

from elr_jax import topologies
from elr_jax.layers import grouped
from elr_jax.layers.grouped import grouped_product

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


def by_hand(rows, weights, sizes, cotangent):
    """In float64: what the op gives, and its gradients."""
    rows, weights, cotangent = (np.asarray(x, np.float64) for x in (rows, weights, cotangent))
    y, pulled, gradient = np.zeros(cotangent.shape), np.zeros(rows.shape), np.zeros(weights.shape)
    end = 0
    for e, size in enumerate(sizes):
        mine = slice(end, end := end + size)
        y[mine] = rows[mine] @ weights[e]
        pulled[mine] = cotangent[mine] @ weights[e].T
        gradient[e] = rows[mine].T @ cotangent[mine]
    return y, pulled, gradient


@partial(jax.jit, static_argnames="form")
def outcome(rows, weights, sizes, cotangent, *, form=grouped_product):
    y, pull = jax.vjp(lambda rows, weights: form(rows, weights, sizes), rows, weights)
    return y, *pull(cotangent)


def operands(sizes, idle, width, inner, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    count = sum(sizes) + idle
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[-1]), dtype)
    return draw(count, width), draw(len(sizes), width, inner), jnp.asarray(sizes, jnp.int32), draw(count, inner)


def check(sizes, idle, width=5, inner=3, dtype="float32", seed=0):
    rows, weights, sizes, cotangent = operands(sizes, idle, width, inner, dtype, seed)
    made = outcome(rows, weights, sizes, cotangent)
    assert [x.dtype.name for x in made] == [dtype] * 3
    expected = by_hand(rows, weights, sizes, cotangent)
    scale = [max(np.abs(x).max(), 1e-9) for x in expected]
    for one, other, size in zip(made, expected, scale, strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float64) / size, other / size, atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    "sizes, idle",
    [([4, 0, 9, 1], 0), ([0, 0, 30], 7), ([3, 5], 40), ([0, 0], 3), ([1], 0), ([40, 0, 0, 2], 1)],
)
def test_each_group_has_its_own_weight(sizes, idle):
    check(sizes, idle)


@pytest.mark.slow
@settings(max_examples=40)
@given(st.data())
def test_groups_of_any_sizes(data):
    check(
        data.draw(st.lists(st.integers(0, 60), min_size=1, max_size=7), label="sizes"),
        data.draw(st.integers(1, 70), label="rows of no group"),
        data.draw(st.integers(1, 9), label="width"),
        data.draw(st.integers(1, 9), label="inner"),
        data.draw(st.sampled_from(sorted(TOLERANCE))),
        data.draw(st.integers(0, 99), label="seed"),
    )


def test_rows_of_no_group_reach_nothing():
    """Whatever they hold: of a mixture on a mesh they are the tokens of other devices' experts."""
    rows, weights, sizes, cotangent = operands([3, 9], 6, 4, 4)
    clean = outcome(rows, weights, sizes, cotangent)
    spoiled = outcome(rows.at[12:].set(jnp.nan), weights, sizes, cotangent)
    assert_close(spoiled, clean)
    assert not clean[0][12:].any() and not clean[1][12:].any()


def test_a_row_is_the_same_in_any_group_and_batch():
    rows, weights, sizes, cotangent = operands([20, 13, 31], 0, 8, 8)
    y, *_ = outcome(rows, weights, sizes, cotangent)
    for m, e in ((0, 0), (19, 0), (25, 1), (63, 2)):
        alone = outcome(rows[m : m + 1], weights, jnp.zeros(3, jnp.int32).at[e].set(1), cotangent[m : m + 1])[0]
        assert_close(alone[0], y[m])


def test_batched_by_vmap():
    many = [operands(sizes, idle, 4, 3, seed=i) for i, (sizes, idle) in enumerate([([4, 8], 1), ([13, 0], 0)])]
    stacked = [jnp.stack(leaves) for leaves in zip(*many, strict=True)]
    together = jax.vmap(outcome)(*stacked)
    for i, one in enumerate(many):
        assert_close([x[i] for x in together], list(outcome(*one)))


GROUPS, WIDTH, INNER, ROWS = 32, 128, 64, 4096


def planned(devices, options):
    """Bytes that a compiler plans beside operands and results, value and gradients."""
    place = jax.sharding.make_single_device_sharding(devices[0])
    shapes = ((ROWS, WIDTH), (GROUPS, WIDTH, INNER), (GROUPS,), (ROWS, INNER))
    told = [
        jax.ShapeDtypeStruct(shape, jnp.int32 if len(shape) == 1 else jnp.bfloat16, sharding=place) for shape in shapes
    ]
    with topologies.compiling():
        compiled = outcome.lower(*told).compile(compiler_options=options)
    return compiled.memory_analysis().temp_size_in_bytes


ONCE = ROWS * (WIDTH + INNER) * 4 + GROUPS * WIDTH * INNER * 4
"""Bytes of all operands in float32; with the rows once for each group it is 25 times as much."""


def test_rows_are_not_taken_to_every_group():
    assert planned(jax.devices(), {}) < 3 * ONCE


@pytest.mark.aot
@pytest.mark.parametrize("chip", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "h200:1x1x1"])
def test_nor_on_accelerators(chip):
    topology = topologies.parse_topology(chip)
    devices, options = topologies.absent_devices(topology), topologies.OPTIONS[topology.platform]
    assert planned(devices, options) < 3 * ONCE


def test_blocks_hold_a_mean_group():
    sizes = [(4096, 16), (4096, 3), (100, 16), (64, 4), (5, 4)]
    assert [grouped._block_rows(rows, groups) for rows, groups in sizes] == [256, 512, 8, 16, 5]
