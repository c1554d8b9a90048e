"""Which parameters each rule moves, by how much, and when."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from elr_jax.errors import ElrError
from elr_jax.params import (
    ParamSpec,
    constant,
    init_params,
    leaves_by_path,
    matrix,
    overlay,
    truncated_normal,
    vector,
)
from elr_jax.train.optim import ADAM_RMS, OptimConfig, learning_rate, make_optimizer, muon_dimensions


@flax.struct.dataclass
class Layer:
    wq: Any  # [D, N, H]
    wo: Any  # [N, H, D]
    up: Any  # [D, F]
    norm: Any  # [D]
    absent: Any  # a sub-layer without this parameter


@flax.struct.dataclass
class Tree:
    embed: Any
    layers: tuple
    stacked_scales: Any  # rank two, yet vectors
    gate: Any  # a matrix of the loop


def layer_specs():
    return Layer(
        wq=matrix((8, 2, 6), ("D", "N", "H")),
        wo=matrix((2, 6, 8), ("N", "H", "D"), inputs=2),
        up=matrix((8, 24), ("D", "F")),
        norm=vector((8,), ("D",), 1.0),
        absent=None,
    )


SPECS = Tree(
    embed=ParamSpec(shape=(10, 8), axes=("V", "D"), init=truncated_normal(1.0), group="embedding"),
    layers=(layer_specs(), layer_specs()),
    stacked_scales=ParamSpec(shape=(3, 8), axes=(None, "D"), init=constant(1.0), group="vector"),
    gate=ParamSpec(shape=(8, 8), axes=("D", "D"), init=truncated_normal(0.1), group="loop"),
)
FLAT = {"schedule": "wsd", "decay_fraction": 0.0, "warmup_steps": 0, "clip_norm": None}
"""A constant rate from the first step, no clipping."""


@pytest.fixture(scope="module")
def params():
    return init_params(jax.random.key(0), SPECS)


@pytest.fixture(scope="module")
def grads(params):
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    return tree.unflatten([0.1 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)])


def step(config, params, grads, specs=SPECS):
    optimizer = make_optimizer(config, specs, 100)
    return jax.jit(lambda p, g: optimizer.update(g, optimizer.init(p), p)[0])(params, grads)


def names(tree, holds):
    return {jax.tree_util.keystr(path) for path, leaf in jax.tree.leaves_with_path(tree) if holds(leaf)}


MATRICES = {f".layers[{i}].{name}" for i in (0, 1) for name in ("wq", "wo", "up")}


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_decay_reaches_matrices_and_embeddings_only(optimizer, params):
    """With a zero gradient decay is all that moves a parameter, by learning rate · decay · value."""
    config = OptimConfig(optimizer=optimizer, learning_rate=0.01, adam_learning_rate=0.02, weight_decay=0.5, **FLAT)
    updates = step(config, params, jax.tree.map(jnp.zeros_like, params))
    assert names(updates, lambda leaf: (leaf != 0).any()) == MATRICES | {".embed"}
    np.testing.assert_allclose(updates.layers[1].wo, -0.01 * 0.5 * params.layers[1].wo, rtol=1e-5)
    embed_rate = 0.02 if optimizer == "muon" else 0.01
    np.testing.assert_allclose(updates.embed, -embed_rate * 0.5 * params.embed, rtol=1e-5)


def test_muon_moves_exactly_the_matrices(params, grads):
    """AdamW's first step is the sign of the gradient times its rate; Muon's is not."""
    config = OptimConfig(learning_rate=0.01, adam_learning_rate=0.02, weight_decay=0.0, **FLAT)
    updates = step(config, params, grads)
    signs = jax.tree.map(lambda update, grad: jnp.allclose(update, -0.02 * jnp.sign(grad), rtol=1e-4), updates, grads)
    assert names(signs, lambda leaf: not leaf) == MATRICES


def test_muon_update_is_orthogonal_and_of_adam_size(params, grads):
    """Each weight, flattened to inputs by outputs, moves along a matrix of nearly equal singular values."""
    config = OptimConfig(learning_rate=0.01, weight_decay=0.0, **FLAT)
    updates, rate = step(config, params, grads), 0.01
    for name, flat in (("wq", (8, 12)), ("wo", (12, 8)), ("up", (8, 24))):
        update, grad = (np.reshape(getattr(tree.layers[0], name), flat) for tree in (updates, grads))
        left, _, right = np.linalg.svd(grad, full_matrices=False)
        size = rate * ADAM_RMS * max(flat) ** 0.5
        core = left.T @ update @ right.T / -size
        singular = np.diagonal(core)
        np.testing.assert_allclose(core, np.diag(singular), atol=1e-3)
        assert (singular > 0.6).all()
        assert (singular < 1.3).all()
        assert np.sqrt(np.mean(update**2)) == pytest.approx(rate * ADAM_RMS, rel=0.2)


def test_muon_flattens_inputs_by_outputs():
    assert muon_dimensions(SPECS.layers[0].wq) == ((0,), (1, 2))
    assert muon_dimensions(SPECS.layers[0].wo) == ((0, 1), (2,))
    with pytest.raises(ElrError, match="inputs=2"):
        muon_dimensions(matrix((8, 24), ("D", "F"), inputs=2))


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_loop_rate_scales_the_loop_group_only(optimizer, params, grads):
    plain, scaled = (
        step(OptimConfig(optimizer=optimizer, loop_lr_scale=scale, **FLAT), params, grads) for scale in (1.0, 0.25)
    )
    ratios = jax.tree.map(lambda a, b: jnp.mean(a / b), scaled, plain)
    assert names(ratios, lambda leaf: not np.isclose(leaf, 1.0)) == {".gate"}
    assert ratios.gate == pytest.approx(0.25)


def test_adamw_is_optax_adamw():
    """On a tree of one group, over several steps with warm-up, decay and clipping."""
    specs = {"a": matrix((4, 6), ("D", "F")), "b": matrix((6, 4), ("F", "D"))}
    config = OptimConfig(
        optimizer="adamw", learning_rate=0.01, warmup_steps=3, weight_decay=0.2, b2=0.99, clip_norm=0.5
    )
    ours = make_optimizer(config, specs, 10)
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.01, 3, 10, 0.001)
    theirs = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(rate, 0.9, 0.99, weight_decay=0.2))
    params = [init_params(jax.random.key(0), specs)] * 2
    states = [ours.init(params[0]), theirs.init(params[1])]
    updates_of = [jax.jit(optimizer.update) for optimizer in (ours, theirs)]
    for number in range(6):
        grads = jax.tree.map(lambda p: jnp.sin(p * 7 + number), params[1])  # noqa: B023
        for i, update in enumerate(updates_of):
            updates, states[i] = update(grads, states[i], params[i])
            params[i] = optax.apply_updates(params[i], updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *params)


def test_clipping_is_by_the_norm_of_the_whole_tree(params, grads):
    """AdamW ignores the gradient's length on the first step, so the second step shows it."""
    norm = float(optax.tree.norm(grads))

    def second(clip_norm, first):
        optimizer = make_optimizer(OptimConfig(optimizer="adamw", **{**FLAT, "clip_norm": clip_norm}), SPECS, 100)
        update = jax.jit(optimizer.update)
        state = update(first, optimizer.init(params), params)[1]
        return update(jax.tree.map(lambda g: 0.1 * g[::-1], grads), state, params)[0]

    clipped = second(norm / 4, grads)
    by_hand = second(None, jax.tree.map(lambda g: g / 4, grads))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-7), clipped, by_hand)
    assert not np.allclose(second(None, grads).embed, by_hand.embed, rtol=1e-3)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_state_is_float32(optimizer, params):
    state = make_optimizer(OptimConfig(optimizer=optimizer), SPECS, 200).init(params)
    floats = [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size > 3]
    assert all(leaf.dtype == jnp.float32 for leaf in floats)
    moments = {"muon": 1, "adamw": 2}[optimizer] * 6 + 2 * 5  # six matrices, five other leaves
    assert len(floats) == moments


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_schedule_ends(schedule):
    rate = learning_rate(OptimConfig(schedule=schedule, learning_rate=2.0, warmup_steps=20, final_fraction=0.1), 100)
    assert [float(rate(n)) for n in (0, 5, 20, 100, 150)] == pytest.approx([0.0, 0.5, 2.0, 0.2, 0.2])


def test_schedule_middle():
    common = {"learning_rate": 2.0, "warmup_steps": 20, "final_fraction": 0.1}
    cosine = learning_rate(OptimConfig(**common), 100)
    assert float(cosine(60)) == pytest.approx((2.0 + 0.2) / 2)
    assert float(cosine(40)) == pytest.approx(0.2 + 1.8 * (1 + np.cos(np.pi / 4)) / 2)
    wsd = learning_rate(OptimConfig(schedule="wsd", decay_fraction=0.4, **common), 100)
    assert [float(wsd(n)) for n in (21, 40, 60, 80, 99)] == pytest.approx([2.0, 2.0, 2.0, 1.1, 0.245])
    assert float(learning_rate(OptimConfig(**common), 100, peak=1.0)(60)) == pytest.approx(0.55)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_schedule_borders(schedule):
    """No warm-up starts at the peak; no decay stays there; decay may follow warm-up at once."""
    assert float(learning_rate(OptimConfig(schedule=schedule, learning_rate=2.0, warmup_steps=0), 10)(0)) == 2.0
    assert float(learning_rate(OptimConfig(schedule=schedule, learning_rate=2.0, warmup_steps=0), 1)(0)) == 2.0
    flat = OptimConfig(schedule="wsd", learning_rate=2.0, warmup_steps=5, decay_fraction=0.0)
    assert [float(learning_rate(flat, 10)(n)) for n in (5, 9, 10)] == [2.0] * 3
    triangle = OptimConfig(schedule="wsd", learning_rate=2.0, warmup_steps=5, decay_fraction=0.5, final_fraction=0.0)
    assert [float(learning_rate(triangle, 10)(n)) for n in (0, 5, 10)] == pytest.approx([0, 2, 0])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optimizer": "sgd"}, "optimizer='sgd'.*muon, adamw"),
        ({"schedule": "step"}, "schedule='step'.*cosine, wsd"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"adam_learning_rate": float("nan")}, "adam_learning_rate=nan"),
        ({"loop_lr_scale": -1.0}, "loop_lr_scale=-1.0"),
        ({"condition_lr_scale": -1.0}, "condition_lr_scale=-1.0"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"condition_warmup_steps": -1}, "condition_warmup_steps=-1"),
        ({"decay_fraction": 1.5}, "decay_fraction=1.5"),
        ({"final_fraction": -0.5}, "final_fraction=-0.5"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"b1": 1.0}, "b1=1.0"),
        ({"b2": 1.5}, "b2=1.5"),
        ({"momentum": -0.1}, "momentum=-0.1"),
        ({"eps": 0.0}, "eps=0.0"),
        ({"clip_norm": 0.0}, "clip_norm=0.0"),
    ],
)
def test_bad_values_name_themselves(values, message):
    with pytest.raises(ElrError, match=message) as caught:
        OptimConfig(**values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("config", [OptimConfig(warmup_steps=10), OptimConfig(warmup_steps=9, schedule="wsd")])
def test_a_warm_up_longer_than_the_run_is_refused(config):
    with pytest.raises(ElrError, match=r"warmup_steps=\d+ .*10 steps"):
        make_optimizer(config, SPECS, 10)


def test_grafted_conditioning_enters_with_its_own_moments_count_and_warm_up():
    """After 40 steps without it. With a constant gradient, bias-corrected AdamW moves by its rate times the sign."""
    specs = {"a": matrix((4, 6), ("D", "F"))}
    more = specs | {"told": matrix((6, 4), ("C", "D"), group="condition")}
    config = OptimConfig(
        optimizer="adamw",
        learning_rate=0.01,
        warmup_steps=3,
        b2=0.999,
        clip_norm=None,
        condition_lr_scale=0.5,
        condition_warmup_steps=4,
    )
    without, with_it = make_optimizer(config, specs, 100), make_optimizer(config, more, 100, grafted_at=40)
    params = init_params(jax.random.key(0), more)
    grads = jax.tree.map(lambda leaf: 1e-3 * jnp.sin(7 * leaf), params)
    old = {"a": params["a"]}
    state = without.init(old)
    for _ in range(40):
        _, state = jax.jit(without.update)({"a": grads["a"]}, state, old)
    grafted = overlay(with_it.init(params), state)
    fresh, kept = leaves_by_path(grafted), leaves_by_path(state)
    for name, leaf in kept.items():
        np.testing.assert_array_equal(fresh.pop(name), leaf)
    assert len(fresh) == 4 and not any(leaf.any() for leaf in fresh.values()), "two moments and two counts"
    rate = learning_rate(config, 100, peak=0.005)
    for n in range(6):
        updates, grafted = jax.jit(with_it.update)(grads, grafted, params)
        alone, state = jax.jit(without.update)({"a": grads["a"]}, state, old)
        np.testing.assert_array_equal(updates["a"], alone["a"], err_msg="the others go on as if nothing had joined")
        expected = -float(rate(40 + n)) * min((n + 1) / 4, 1) * np.sign(grads["told"])
        np.testing.assert_allclose(updates["told"], expected, rtol=1e-3)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_conditioning_is_not_decayed_and_has_its_own_rate(optimizer, params, grads):
    specs, told = (SPECS, None), (SPECS, matrix((6, 4), ("C", "D"), group="condition"))
    values = (params, jnp.ones((6, 4)))
    still = step(OptimConfig(optimizer=optimizer, **FLAT), values, jax.tree.map(jnp.zeros_like, values), told)
    assert not still[1].any()
    config = OptimConfig(optimizer=optimizer, condition_lr_scale=0.25, condition_warmup_steps=1, **FLAT)
    updates = step(config, values, (grads, jnp.ones((6, 4))), told)
    np.testing.assert_allclose(updates[1], -0.25 * config.learning_rate, rtol=1e-5)
    alone = step(config, (params, None), (grads, None), specs)
    jax.tree.map(np.testing.assert_array_equal, updates[0], alone[0])
