"""The train step: one program for every draw, gradients of the whole batch, bad gradients skipped."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import programs

from elr_jax import model
from elr_jax.config import AttentionConfig, LoopRule, MLPConfig, ModelConfig, Runtime
from elr_jax.depth import PerExample
from elr_jax.errors import ElrError
from elr_jax.losses import cross_entropy
from elr_jax.train.data import Batch
from elr_jax.train.settings import Recipe
from elr_jax.train.step import init_state, train_step

LENGTH = 5
RECIPE = Recipe(
    model=ModelConfig(
        vocab_size=11,
        d_model=8,
        prelude="-",
        core="*",
        coda="",
        attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=4),
        mlp=MLPConfig(d_ff=8, kind="squared_relu"),
        loop=LoopRule(initial="random", inject="concat", update="adaptive_delta", max_loops=4),
    ),
    depth=PerExample(max_loops=4),
    batch_size=6,
    microbatches=3,
    steps=60,
)
# plain descent that keeps the gradient as its state, where a test can read it
DESCENT = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda gradient, state, params: (jax.tree.map(lambda g: -0.01 * g, gradient), gradient),
)
step = jax.jit(partial(train_step, recipe=RECIPE, optimizer=DESCENT, runtime=Runtime()))


@pytest.fixture(scope="module")
def start():
    return jax.jit(partial(init_state, RECIPE, DESCENT))()


def batch(seed: int) -> Batch:
    """Rows with very different numbers of scored tokens."""
    rng = np.random.default_rng(seed)
    shape = (RECIPE.batch_size, LENGTH)
    weights = (rng.random(shape) < np.linspace(0, 1, RECIPE.batch_size)[:, None]) * rng.choice([0.5, 1.0], shape)
    tokens, targets = rng.integers(0, 11, (2, *shape))
    segments = np.cumsum(rng.random(shape) < 0.3, axis=1)
    return Batch(
        tokens=tokens.astype(np.int32),
        targets=targets.astype(np.int32),
        weights=weights.astype(np.float32),
        segment_ids=segments.astype(np.int32),
    )


def depths(state):
    rows = jnp.arange(RECIPE.batch_size)
    key = jax.random.split(state.key)[0]
    return RECIPE.depth.sample(key, state.step, rows, batch_size=RECIPE.batch_size, total_steps=RECIPE.steps)


@jax.jit
def whole_batch(params, state, data, depth):
    """Loss of every token and the gradient of the weighted mean, in the batch's own order and in one piece."""
    keys = jax.random.split(state.key)[1]
    keys = jax.vmap(partial(jax.random.fold_in, jax.random.fold_in(keys, state.step)))(jnp.arange(RECIPE.batch_size))

    def mean_loss(params):
        logits = model.apply(params, data.tokens, depth, config=RECIPE.model, segment_ids=data.segment_ids, key=keys)
        losses = cross_entropy(logits, data.targets)
        return jnp.sum(losses * data.weights) / jnp.sum(data.weights), losses

    return jax.grad(mean_loss, has_aux=True)(params)


def assert_same(actual, expected):
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("seed", range(3))
def test_sorted_microbatches_give_the_gradient_of_the_whole_batch(start, seed):
    """With uneven masks, mixed depths and a random start of each row, at float32 rounding."""
    state = start.replace(step=jnp.int32(seed))
    data, depth = batch(seed), depths(state)
    assert len(set(depth.tolist())) > 1
    new, metrics = step(state, data)
    gradient, losses = whole_batch(state.params, state, data, depth)
    for one, other in zip(jax.tree.leaves(new.opt_state), jax.tree.leaves(gradient), strict=True):
        assert jnp.abs(one - other).max() <= 2e-6 * jnp.abs(other).max()
    for k in range(1, 5):
        rows = np.asarray(depth) == k
        assert float(metrics.by_depth.weight[k - 1]) == data.weights[rows].sum()
        expected = np.sum(np.asarray(losses)[rows] * data.weights[rows])
        assert float(metrics.by_depth.loss[k - 1]) == pytest.approx(expected, rel=1e-5)
    assert float(metrics.loss) == pytest.approx(np.average(losses, weights=data.weights), rel=1e-5)
    assert float(metrics.grad_norm) == pytest.approx(float(optax.tree.norm(gradient)), rel=1e-5)


def test_one_program_serves_every_draw(start):
    state, seen = start, set()
    for seed in range(50):
        depth = np.sort(depths(state))[::-1]
        state, metrics = step(state, batch(seed))
        assert int(metrics.useful_rounds) == depth.sum()
        assert int(metrics.executed_rounds) == 2 * depth[::2].sum()
        seen.add(tuple(depth))
    assert int(state.step) == 50 and int(state.skipped) == 0
    assert len(seen) > 20, "depths changed"
    assert programs(step) == 1


@pytest.mark.parametrize("poison", [np.inf, np.nan])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(start, poison):
    state, _ = step(start, batch(0))
    bad = batch(1)
    bad.weights[3, 2] = poison
    after, metrics = step(state, bad)
    assert_same((after.params, after.opt_state), (state.params, state.opt_state))
    assert int(after.skipped) == int(metrics.skipped) == 1
    assert int(after.step) == 2
    assert not np.isfinite(metrics.grad_norm)
    again, metrics = step(after, batch(2))
    assert int(metrics.skipped) == 1 and (again.params.embedding != after.params.embedding).any()


def test_a_batch_without_scored_tokens_moves_nothing(start):
    empty = dataclasses.replace(batch(0), weights=np.zeros((RECIPE.batch_size, LENGTH), np.float32))
    after, metrics = step(start, empty)
    assert float(metrics.loss) == 0.0
    assert_same(after.params, start.params)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"microbatches": 4}, "batch_size=6 can't be cut into microbatches=4: use a divisor"),
        ({"microbatches": 0}, "microbatches=0 must be at least 1"),
        ({"backprop_loops": 0}, "backprop_loops=0 must be at least 1"),
        ({"depth": PerExample(max_loops=5)}, "the depth law draws up to 5 loops but model.loop.max_loops=4: raise it"),
    ],
)
def test_a_bad_recipe_is_refused(changes, message):
    with pytest.raises(ElrError) as error:
        dataclasses.replace(RECIPE, **changes)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
