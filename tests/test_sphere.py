"""Laws of the model on the unit sphere (nGPT, Dory), and of training it."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import assert_same_bits, tiny_dory

from elr_jax import LoopRule, Runtime, apply, init, param_specs, presets, states
from elr_jax.depth import PerExample
from elr_jax.params import map_specs, onto_sphere
from elr_jax.train.data import Batch
from elr_jax.train.settings import Recipe
from elr_jax.train.step import init_state, train_step

CONFIG = tiny_dory(prelude="S-", core="*-", coda="S-")
SCALES = ("rate", "logit_scale", "query_scale", "gate_scale", "up_scale")
TOKENS = jnp.asarray(np.random.default_rng(0).integers(61, size=(2, 9)), jnp.int32)
DEPTH = jnp.array([1, 3], jnp.int32)
run, start = jax.jit(apply, static_argnames="config"), jax.jit(init, static_argnames="config")


@pytest.fixture(scope="module")
def params():
    """Matrices on the sphere, every scale away from its start."""
    return each_leaf(
        lambda path, leaf: leaf * factors(path, leaf) if is_scale(path) else leaf, start(key(), config=CONFIG)
    )


def key():
    return jax.random.key(0)


def each_leaf(function, params):
    return jax.tree.map_with_path(lambda path, leaf: function(jax.tree_util.keystr(path), leaf), params)


def is_scale(path: str) -> bool:
    return path.endswith(SCALES)


def factors(path: str, leaf):
    return 0.5 + jax.random.uniform(jax.random.key(len(path)), leaf.shape)


def off_the_sphere(params, config) -> float:
    """Largest distance of a matrix's vectors along the width, or a table's rows, from norm 1."""
    worst = []

    def measure(spec, leaf):
        if spec.group in ("matrix", "embedding"):
            norms = jnp.linalg.norm(leaf, axis=spec.axes.index("embed"))
            worst.append(float(jnp.abs(norms - 1).max()))

    map_specs(measure, param_specs(config), params)
    assert len(worst) == len(config.layers) // 2 * (5 + 3) + 2  # of every attention and MLP, the embedding and the head
    return max(worst)


def logits(params, config=CONFIG):
    return run(params, TOKENS, DEPTH, config=config)


def assert_near(actual, expected, tolerance=2e-5):
    assert jnp.abs(actual - expected).max() <= tolerance, jnp.abs(actual - expected).max()


def test_parameters_start_on_the_sphere():
    assert off_the_sphere(start(key(), config=CONFIG), CONFIG) < 1e-6


def test_states_stay_on_the_sphere(params):
    norms = jnp.linalg.norm(states(params, TOKENS, DEPTH, config=CONFIG), axis=-1)
    assert norms.shape == (CONFIG.loop.max_loops + 1, *TOKENS.shape)
    assert_near(norms, 1.0, 2e-6)


def test_only_the_direction_of_what_a_layer_adds_counts(params):
    """Output and down projections may be scaled: their product is normalised before it joins the stream."""
    scaled = each_leaf(lambda path, x: 3 * x if path.endswith((".output", ".down")) else x, params)
    assert_near(logits(scaled), logits(params))
    scaled = each_leaf(lambda path, x: 3 * x if path.endswith(".value") else x, params)  # so is what they project
    assert_near(logits(scaled), logits(params))


def test_only_the_direction_of_queries_and_keys_counts(params):
    scaled = each_leaf(lambda path, x: 3 * x if path.endswith((".query", ".key")) else x, params)
    assert_near(logits(scaled), logits(params))


def test_rates_count_by_size(params):
    """A step goes towards the layer's output whatever the rate's sign, as in the ports."""
    turned = each_leaf(lambda path, x: -x if path.endswith("rate") else x, params)
    assert_same_bits(logits(turned), logits(params))


def test_without_rates_every_layer_is_skipped(params):
    still = each_leaf(lambda path, x: 0 * x if path.endswith("rate") else x, params)
    x = params.embedding[TOKENS]
    expected = (x / jnp.linalg.norm(x, axis=-1, keepdims=True)) @ params.head * (params.logit_scale / 0.0177)
    assert_near(logits(still), expected)


def test_logits_scale_by_token(params):
    doubled = params.replace(logit_scale=params.logit_scale.at[3].multiply(2))
    assert_same_bits(logits(doubled), logits(params).at[..., 3].multiply(2))


def test_gate_scale_and_query_scale_act_squared(params):
    """A scale doubled is its start quadrupled (gate), and their sign does not count."""
    turned = each_leaf(lambda path, x: -x if path.endswith((".sphere.gate_scale", ".query_scale")) else x, params)
    assert_same_bits(logits(turned), logits(params))
    doubled = each_leaf(lambda path, x: 2 * x if path.endswith(".sphere.gate_scale") else x, params)
    sphere = replace(CONFIG.sphere, gate_init=4 * CONFIG.d_model**0.5)
    assert_near(logits(doubled), logits(params, replace(CONFIG, sphere=sphere)))
    assert jnp.abs(logits(doubled) - logits(params)).max() > 1e-3


def test_embedding_norm_is_for_rows_off_the_sphere(params):
    normed = replace(CONFIG, sphere=replace(CONFIG.sphere, embedding_norm=True))
    assert_near(logits(params, normed), logits(params))
    long = params.replace(embedding=2 * params.embedding)
    assert_near(logits(long, normed), logits(params))
    assert jnp.abs(logits(long) - logits(params)).max() > 1e-2


def test_projection_moves_matrices_alone():
    specs = param_specs(CONFIG)
    away = jax.tree.map(lambda leaf: 1.7 * leaf + 0.01, start(key(), config=CONFIG))
    back = onto_sphere(away, specs)
    assert off_the_sphere(away, CONFIG) > 0.5 and off_the_sphere(back, CONFIG) < 1e-6
    vectors = partial(map_specs, lambda spec, leaf: leaf if spec.group in ("vector", "loop") else None, specs)
    assert_same_bits(vectors(back), vectors(away))
    direction = away.head / jnp.linalg.norm(away.head, axis=0)
    assert_near(back.head, direction, 1e-6)
    empty = onto_sphere(away.replace(head=0 * away.head), specs)
    assert not empty.head.any(), "what has no direction stays zero, and free of NaN"


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(presets.DORY, id="dory"),
        pytest.param(LoopRule(boundary="unit"), id="adaptive delta", marks=pytest.mark.slow),
    ],
)
def test_training_stays_on_the_sphere_and_learns(rule):
    """All matrices are directions after a step, the loss falls, and every parameter takes part in that."""
    config = tiny_dory(prelude="", core="*-", coda="", loop=rule)
    recipe = Recipe(model=config, depth=PerExample(max_loops=3), batch_size=4, microbatches=2, steps=30)
    optimizer = optax.adam(0.01)
    step = jax.jit(partial(train_step, recipe=recipe, optimizer=optimizer, runtime=Runtime()))
    state = jax.jit(partial(init_state, recipe, optimizer))()
    rows = np.random.default_rng(1).integers(61, size=(4, 10)).astype(np.int32)
    batch = Batch(
        tokens=rows[:, :-1],
        targets=rows[:, 1:],
        segment_ids=np.zeros((4, 9), np.int32),
        weights=np.ones((4, 9), np.float32),
    )
    first, losses = state.params, []
    for at in range(30):
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
        if at % 10 == 9:
            assert off_the_sphere(state.params, config) < 1e-6
    assert losses[-1] < 0.8 * losses[0], losses
    moved = jax.tree.map(lambda new, old: float(jnp.abs(new - old).max()), state.params, first)
    assert all(amount > 1e-4 for amount in jax.tree.leaves(moved)), moved
