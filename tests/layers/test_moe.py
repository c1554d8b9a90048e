"""Mixture of experts: dropless dispatch against every expert on every token, routes, their replay and their balance."""

import collections
import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import run_calls
from cases import RULES, assert_close, assert_same_bits, perturb, small_model
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType

from elr_jax import model, parameters
from elr_jax.config import MoEConfig, Runtime
from elr_jax.depth import PerExample
from elr_jax.errors import ElrError
from elr_jax.layers import make_context
from elr_jax.layers.mlp import mlp
from elr_jax.layers.moe import balanced, moe, moe_specs, run_experts, start_routing
from elr_jax.params import init_params
from elr_jax.train.data import Batch
from elr_jax.train.optim import OptimConfig
from elr_jax.train.settings import Recipe, RoutingConfig
from elr_jax.train.step import init_state, optimizer_for, train_step

KEY = jax.random.key(2)
DEPTHS = [2, 1, 3]
TOKENS = jax.random.randint(KEY, (3, 6), 0, 13)


def sized(**changes):
    sizes = MoEConfig(num_experts=5, top_k=2, d_expert=6, d_shared=4, route_scale=1.5)
    return small_model(RULES["elr"], core="E", moe=dataclasses.replace(sizes, **changes))


def params_of(config, seed=0):
    return perturb(init_params(KEY, moe_specs(config, 1.0)), seed=seed)


def run(x, params, config, past=None):
    tokens = jnp.zeros(x.shape[:2], jnp.int32)
    return moe(x, params, make_context(tokens, tokens, config), config, past=past)


def dense(x, params, config):
    """Every expert on every token, those not chosen with weight zero."""
    sizes = config.moe
    scores = 1 / (1 + jnp.exp(-(x @ params.router)))
    rank = jnp.argsort(jnp.argsort(-(scores + params.bias), axis=-1), axis=-1)
    chosen = jnp.where(rank < sizes.top_k, scores, 0.0)
    weights = sizes.route_scale * chosen / chosen.sum(-1, keepdims=True)
    up = jnp.einsum("btd,edf->btef", x, params.up)
    if sizes.kind == "swiglu":
        gate = jnp.einsum("btd,edf->btef", x, params.gate)
        inner = up * gate / (1 + jnp.exp(-gate))
    else:
        inner = jnp.maximum(up, 0) ** 2
    routed = jnp.einsum("bte,btef,efd->btd", weights, inner, params.down)
    return routed + (mlp(x, params.shared, config) if sizes.d_shared else 0)


def check_dispatch(config, shape, seed, *, dtype="float32", rtol=2e-5):
    config = dataclasses.replace(config, mlp=dataclasses.replace(config.mlp, kind=config.moe.kind))
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params_of(config, seed))
    x, weight = jax.random.normal(KEY, shape, dtype), jnp.sin(jnp.arange(np.prod(shape), dtype=dtype)).reshape(shape)

    def outcome(layer):
        def run(x, params):
            out, pull = jax.vjp(lambda x, params: layer(x, params, config), x, params)
            return out, pull(weight)

        return jax.jit(run)(x, params)

    (out, (dx, grads)), expected = outcome(lambda *args: run(*args)[0]), outcome(dense)
    assert_close((out, (dx, grads)), expected, rtol=rtol)
    assert not grads.bias.any(), "the bias selects, no more"


def test_dispatch_is_every_expert_on_every_token():
    check_dispatch(sized(), (2, 7, 8), 0)


@pytest.mark.slow
@settings(max_examples=10)
@given(st.data())
def test_dispatch_of_any_size(data):
    """In float64: what the norm of a token's weights leaves of a router's gradient can be a hundredth of its terms."""
    experts = data.draw(st.integers(2, 7), label="experts")
    config = sized(
        num_experts=experts,
        top_k=data.draw(st.integers(2, experts), label="top_k"),  # the weight of one alone is constant
        kind=data.draw(st.sampled_from(["swiglu", "squared_relu"])),
        d_shared=data.draw(st.sampled_from([0, 4])),
    )
    shape = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9)), config.d_model
    with jax.enable_x64(True):
        check_dispatch(config, shape, data.draw(st.integers(0, 99)), dtype="float64", rtol=1e-11)


def test_a_token_depends_on_no_other():
    config = sized()
    params, x = params_of(config), jax.random.normal(KEY, (2, 6, 8))
    out, _ = run(x, params, config)
    for t in range(6):
        assert_close(run(x[:1, t : t + 1], params, config)[0], out[:1, t : t + 1])
    # all tokens to the same experts is no more than a long group
    flooded = params.replace(bias=jnp.array([9.0, 0, 0, 0, 9.0]))
    assert_close(run(x, flooded, config)[0], dense(x, flooded, config))


@pytest.mark.parametrize("tensor", [1, 2])
def test_devices_exchange_rows_and_not_their_experts_outputs(tensor):
    """A device gathers its expert axis' rows, and gets the sums of its own alone; the other way in the gradient.

    Where an axis cuts inner widths, the sum over it is XLA's, and the one `psum` is that of a row's gradients.
    """
    config = sized(num_experts=4, d_shared=0)
    x = jnp.zeros((8, 7, config.d_model))
    inputs = jnp.zeros((8, 7, 2), jnp.int32), jnp.zeros((8, 7, 2)), params_of(config)
    mesh = AbstractMesh((2, 2, tensor), ("fsdp", "expert", "tensor"), axis_types=(AxisType.Auto,) * 3)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.make_jaxpr(lambda x: jax.vjp(lambda x: run_experts(x, *inputs, config), x)[1](x))(x)
    found = re.findall(rf":f32\[(\d+),7,{config.d_model}\] = (all_gather|reduce_scatter|psum\w*)\[", str(traced))
    exchanged = collections.Counter((int(rows), kind.removesuffix("_invariant")) for rows, kind in found)
    expected = {(4, "all_gather"): 2, (2, "reduce_scatter"): 2}
    assert exchanged == expected | ({(2, "psum"): 1} if tensor > 1 else {})


def test_what_an_execution_counts():
    config = sized()
    params, x = params_of(config), jax.random.normal(KEY, (2, 6, 8))
    start = start_routing(config, 2, 6)
    once = run(x, params, config, start)[1]
    logits = np.asarray(x @ params.router)
    scores = 1 / (1 + np.exp(-logits))
    best = np.argsort(-(scores + params.bias), axis=-1)[..., :2]
    assert (np.asarray(once.experts) == best).all()
    load = np.stack([np.bincount(row.ravel(), minlength=5) for row in best])
    assert (np.asarray(once.load) == load).all()
    mean = (scores / scores.sum(-1, keepdims=True)).mean(1)
    np.testing.assert_allclose(once.balance, (load * 5 / 12 * mean).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(once.z, (np.log(np.exp(logits).sum(-1)) ** 2).mean(1), rtol=1e-5)
    even = params.replace(router=jnp.zeros_like(params.router))
    np.testing.assert_allclose(run(x, even, config, start)[1].balance, 1.0, rtol=1e-6)
    twice = run(x, params, config, once)[1]
    assert_close((twice.load, twice.balance, twice.z), (2 * once.load, 2 * once.balance, 2 * once.z))


def test_the_bias_moves_against_the_load():
    params = params_of(sized())
    moved = balanced(params, jnp.array([5.0, 0, 2, 2, 1]), 0.25).bias - params.bias
    np.testing.assert_allclose(moved, [-0.25, 0.25, 0, 0, 0.25], atol=1e-7)


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"top_k": 6}, "moe.top_k=6"),
        ({"route_scale": 0.0}, "moe.route_scale=0.0"),
        ({"d_shared": -1}, "moe.d_shared=-1"),
    ],
)
def test_sizes_that_cannot_be(changes, named):
    with pytest.raises(ElrError, match=named):
        sized(**changes)


def looped(*, replay, core="*E", coda="E", **changes):
    sizes = dataclasses.replace(sized().moe, replay=replay)
    rule = dataclasses.replace(RULES["elr"], max_loops=3)
    return small_model(rule, prelude="", core=core, coda=coda, moe=sizes, **changes)


def weights_of(config):
    return perturb(parameters.init(KEY, config), scale=0.3)


@partial(jax.jit, static_argnames="config")
def routing(params, tokens, depth, *, config):
    return model.routing(params, tokens, depth, config=config)


def test_later_rounds_replay_the_first_ones_routes():
    fresh, replayed = looped(replay=False), looped(replay=True)
    params = weights_of(fresh)
    once, *_ = routing(params, TOKENS, jnp.ones(3, jnp.int32), config=replayed)
    core, coda = routing(params, TOKENS, jnp.array(DEPTHS), config=replayed)
    assert (core.experts == once.experts).all()
    assert (core.load == once.load * jnp.array(DEPTHS)[:, None]).all(), "every execution is load"
    assert (coda.load.sum(-1) == 12).all(), "the coda runs once"
    assert (core.overlap < jnp.array(DEPTHS)).any() and (core.overlap >= 1).all()
    assert (core.cosine[0], core.cosine[2]) < (2, 3) and core.cosine[1] == pytest.approx(1)
    own, _ = routing(params, TOKENS, jnp.array(DEPTHS), config=fresh)
    assert (own.experts[0] != core.experts[0]).any(), "the first round's routes are not the later ones'"
    assert (own.experts[1] == core.experts[1]).all()
    assert_close((own.overlap, own.cosine), (jnp.array(DEPTHS, jnp.float32),) * 2)


def test_a_replayed_route_is_weighted_by_this_rounds_scores():
    """Two rounds by hand: the second's output is that of the first's experts, with gradients in its own router."""
    config = looped(replay=True, core="E", coda="")
    config = dataclasses.replace(config, loop=dataclasses.replace(config.loop, update="replace"))
    params = weights_of(config)
    layer = params.core[0]

    def by_hand(params):
        layer, s = params.core[0], params.embedding[TOKENS]
        for i in range(2):
            inner = s / jnp.sqrt(jnp.mean(s**2, -1, keepdims=True) + config.norm_eps) * layer.norm
            scores = jax.nn.sigmoid(inner @ layer.mixer.router)
            if i == 0:
                order = jnp.argsort(-(scores + layer.mixer.bias), axis=-1)[..., :2]
                mask = jax.nn.one_hot(order, 5).sum(-2)
            chosen = scores * mask
            weights = 1.5 * chosen / chosen.sum(-1, keepdims=True)
            up, gate = (jnp.einsum("btd,edf->btef", inner, w) for w in (layer.mixer.up, layer.mixer.gate))
            routed = jnp.einsum("bte,btef,efd->btd", weights, jax.nn.silu(gate) * up, layer.mixer.down)
            s = s + routed + mlp(inner, layer.mixer.shared, config)
        normed = s / jnp.sqrt(jnp.mean(s**2, -1, keepdims=True) + config.norm_eps) * params.norm
        return normed @ params.head

    weight = jnp.cos(jnp.arange(TOKENS.size * 13)).reshape(*TOKENS.shape, 13)
    ours = partial(model.apply, tokens=TOKENS, depth=jnp.full(3, 2), config=config)
    losses = [jax.value_and_grad(lambda params, f=f: jnp.sum(weight * f(params))) for f in (ours, by_hand)]
    (value, grads), expected = (jax.jit(loss)(params) for loss in losses)
    assert_close((value, grads), expected, rtol=5e-5)
    assert grads.core[0].mixer.router.any() and layer.mixer.bias.any()


@partial(jax.jit, static_argnames=("config", "runtime", "backprop_loops"))
def full_loss(params, tokens, depth, *, config, runtime=Runtime(), backprop_loops=None):
    """The loss with its balance and z losses, and all of its gradients."""

    def total(params):
        ones = jnp.ones(tokens.shape)
        loss, scores = model.loss(
            params, tokens, tokens[:, ::-1], ones, depth, config=config, runtime=runtime, backprop_loops=backprop_loops
        )
        extra = sum(jnp.sum(one.balance + 0.1 * one.z) for one in scores.routing)
        return loss + 3 * extra, scores.routing

    return jax.value_and_grad(total, has_aux=True)(params)


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("backprop_loops", [None, pytest.param(1, marks=pytest.mark.slow)])
def test_bounded_is_scan_with_the_routing_losses(replay, backprop_loops):
    config = looped(replay=replay, core="E", coda="")
    form = partial(full_loss, weights_of(config), TOKENS, config=config, backprop_loops=backprop_loops)
    for depth in (DEPTHS, [2, 2, 2]):
        bounded, scan = (form(jnp.array(depth), runtime=Runtime(loop=loop)) for loop in ("bounded", "scan"))
        assert_close(bounded, scan)


@pytest.mark.parametrize(
    "replay, backprop_loops",
    [pytest.param(False, None, marks=pytest.mark.slow), (True, None), (True, 2)],
)
def test_each_row_counts_its_own_rounds(replay, backprop_loops):
    """Routes, counts and gradients; where gradients are cut, rows that begin with their last rounds choose there."""
    config = looped(replay=replay)
    params = weights_of(config)
    form = partial(full_loss, params, config=config, backprop_loops=backprop_loops)
    (_, together), gradient = form(TOKENS, jnp.array(DEPTHS))
    parts = []
    for row, depth in enumerate(DEPTHS):
        rows = slice(row, row + 1)
        (_, alone), part = form(TOKENS[rows], jnp.array([depth]))
        assert_close(jax.tree.map(lambda leaf, rows=rows: leaf[rows], together), alone)
        parts.append(part)
    assert_close(gradient, jax.tree.map(lambda *leaves: sum(leaves), *parts), rtol=1e-4)
    if backprop_loops is not None:
        (_, whole), _ = full_loss(params, TOKENS, jnp.array(DEPTHS), config=config)
        assert_close(together, whole)


@pytest.mark.parametrize("replay", [False, True])
def test_calls_of_any_size_are_one_pass(replay):
    """Each call's tokens replay their own first round, whatever calls they came in."""
    config = looped(replay=replay)
    params, tokens = weights_of(config), np.asarray(TOKENS[:2])
    depth = [3, 1]
    logits, _ = run_calls(params, tokens, [([3, 1], depth), ([1, 1], depth), ([2, 4], depth)], config=config, width=4)
    whole = jax.jit(partial(model.apply, config=config))(params, tokens, jnp.array(depth))
    assert_close(jnp.stack(logits), whole, rtol=5e-5)


def test_gradients_before_the_last_loops_are_dropped_from_the_routing_losses_too():
    """Of a row's rounds only the last counts: the router's gradient is that of one round on constants before it."""
    config = looped(replay=False, core="E", coda="")
    params = weights_of(config)
    truncated = full_loss(params, TOKENS, jnp.full(3, 2), config=config, backprop_loops=1)[1].core[0].mixer.router

    def last_round(router):
        layer = params.core[0]
        state = model.states(params, TOKENS, jnp.full(3, 1), config=config)[1]
        moved = layer.replace(mixer=layer.mixer.replace(router=router))
        fixed = jax.lax.stop_gradient(state)
        inner = fixed / jnp.sqrt(jnp.mean(fixed**2, -1, keepdims=True) + config.norm_eps) * layer.norm
        done = run(inner, moved.mixer, config, start_routing(config, 3, 6))[1]
        return 3 * jnp.sum(done.balance + 0.1 * done.z)

    def without_routing(params):
        ones = jnp.ones(TOKENS.shape)
        return model.loss(params, TOKENS, TOKENS[:, ::-1], ones, jnp.full(3, 2), config=config, backprop_loops=1)[0]

    expected = jax.jit(jax.grad(last_round))(params.core[0].mixer.router)
    rest = jax.jit(jax.grad(without_routing))(params).core[0].mixer.router
    assert_close(truncated, expected + rest, rtol=2e-5)


def test_a_step_moves_the_biases_by_its_whole_load():
    """However the batch is cut; and by nothing else."""
    config = looped(replay=True, core="E", coda="E")
    states = []
    for microbatches in (1, 2):
        recipe = Recipe(
            model=config,
            depth=PerExample(max_loops=3),
            optim=OptimConfig(warmup_steps=0),
            batch_size=4,
            microbatches=microbatches,
            routing=RoutingConfig(bias_rate=0.125),
        )
        optimizer = optimizer_for(recipe)
        state = init_state(recipe, optimizer)
        step = jax.jit(partial(train_step, recipe=recipe, optimizer=optimizer, runtime=Runtime()))
        states.append((state, *step(state, batch())))
    (before, after, metrics), (_, other, same) = states
    assert_same_bits(metrics.routing.load, same.routing.load)
    assert_close((metrics.routing.balance, metrics.routing.z), (same.routing.balance, same.routing.z))
    load = np.asarray(metrics.routing.load)
    assert load.sum() == 2 * 6 * (int(metrics.useful_rounds) + 4)
    for layer, name in enumerate(("core", "coda")):
        biases = [getattr(state.params, name)[0].mixer.bias for state in (before, after, other)]
        expected = biases[0] + 0.125 * np.sign(load[layer].mean() - load[layer])
        assert_same_bits((biases[1], biases[2]), (expected, expected))
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), before.params.core, after.params.core)
    assert moved[0].mixer.router and moved[0].mixer.up and moved[0].mixer.shared.up


def batch():
    tokens = jax.random.randint(KEY, (4, 7), 0, 13)
    ones = jnp.ones((4, 6))
    return Batch(tokens=tokens[:, :-1], targets=tokens[:, 1:], weights=ones, segment_ids=ones.astype(jnp.int32))
