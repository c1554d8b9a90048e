"""Laws of the whole model: depths of a batch, both forms of the loop, documents, positions and number types."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import RULES, assert_close, assert_same_bits, perturb, small_model, tiny_dory

from elr_jax import incremental, model, parameters, presets
from elr_jax.cache import init_cache
from elr_jax.config import AttentionConfig, ConditioningConfig, MLPConfig, MoEConfig, Runtime
from elr_jax.errors import ElrError
from elr_jax.losses import cross_entropy

KEY = jax.random.key(5)
DEPTHS = [2, 1, 3]
ROWS, LENGTH = len(DEPTHS), 6
TOKENS = jax.random.randint(KEY, (ROWS, LENGTH), 0, 13)
KEYS = jax.vmap(jax.random.fold_in, (None, 0))(KEY, jnp.arange(ROWS))


def configure(name, max_loops=3, **changes):
    return small_model(dataclasses.replace(RULES[name], max_loops=max_loops), **changes)


def params_of(config):
    return perturb(parameters.init(KEY, config), scale=0.1)


@partial(jax.jit, static_argnames=("config", "runtime", "backprop_loops"))
def gradient(params, depth, tokens=TOKENS, *, config, runtime, backprop_loops=None):
    """Logits and the gradient of a loss that weighs every token differently."""

    def loss(params):
        logits = model.apply(
            params, tokens, depth, config=config, runtime=runtime, key=KEYS, backprop_loops=backprop_loops
        )
        weights = 1 + jnp.sin(jnp.arange(tokens.size).reshape(tokens.shape))
        return jnp.sum(weights * cross_entropy(logits, tokens[:, ::-1])), logits

    (_, logits), grad = jax.value_and_grad(loss, has_aux=True)(params)
    return logits, grad


@partial(jax.jit, static_argnames=("config", "runtime"))
def forward(params, tokens, depth, key=None, segment_ids=None, positions=None, *, config, runtime=Runtime()):
    return model.apply(
        params, tokens, depth, config=config, runtime=runtime, key=key, segment_ids=segment_ids, positions=positions
    )


REPLAYED = MoEConfig(num_experts=4, top_k=2, d_expert=6, kind="squared_relu", replay=True)
LAWS = [
    ("elr", {"prelude": "", "core": "*"}, "dots", None),
    ("parcae", {"prelude": "", "core": "S-", "coda": ""}, "layer", 2),
    ("elr", {"prelude": "", "core": "E", "coda": ""}, "layer", 2),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("delta", {"prelude": "", "core": "D", "coda": ""}, "layer", 2),
            ("dory", {"core": "S-"}, "layer", 1),
            ("dory", {"core": "*E", "coda": "E", "moe": REPLAYED}, "dots", 2),
            ("parcae", {"prelude": "V", "core": "V-", "coda": "V"}, "layer", 2),
            ("parcae", {"prelude": "S", "core": "G-R", "coda": "RGR"}, "round", 2),
            ("huginn", {"core": "*-S-", "tie_embeddings": True}, "round", 2),
            ("residual", {"core": "S", "prelude": ""}, "none", None),
            ("elr", {"prelude": "D-*-", "core": "D-D-", "coda": "*-"}, "none", None),
            ("dory", {"core": "D-"}, "dots", 1),
            ("parcae", {"core": "D*"}, "round", 2),
            ("delta", {"core": "*-", "mlp": MLPConfig(d_ff=12, kind="squared_relu")}, "layer", 2),
        )
    ),
]


@pytest.mark.parametrize("name, changes, remat, backprop_loops", LAWS)
def test_bounded_is_scan_bit_for_bit(name, changes, remat, backprop_loops):
    config = configure(name, 4, **changes)
    bounded, scan = (Runtime(loop=form, remat=remat) for form in ("bounded", "scan"))
    run = partial(gradient, params_of(config), config=config, backprop_loops=backprop_loops)
    # XLA fuses, so rounds, differently: the elementwise chains of a D where gradients are taken, a scan of one round
    rounds_apart = "D" in config.layers or backprop_loops == 1
    same = partial(assert_close, rtol=5e-5) if rounds_apart else assert_same_bits
    for depth in (DEPTHS, [2, 2, 2], [1, 1, 1]):
        same(run(jnp.array(depth), runtime=bounded), run(jnp.array(depth), runtime=scan))


@pytest.mark.parametrize("loop", ["bounded", pytest.param("scan", marks=pytest.mark.slow)])
def test_offloading_changes_no_bit(loop):
    config = configure("parcae", 4, prelude="*", core="S-", coda="-")
    run = partial(gradient, params_of(config), jnp.array(DEPTHS), config=config, backprop_loops=2)
    layer, offload = (run(runtime=Runtime(loop=loop, remat=remat)) for remat in ("layer", "offload"))
    assert_same_bits(offload, layer)


def test_bounded_is_scan_bit_for_bit_in_value_for_recurrent_layers():
    config = configure("delta", prelude="", core="D", coda="")
    run = partial(forward, params_of(config), TOKENS, config=config)
    bounded, scan = (Runtime(loop=form) for form in ("bounded", "scan"))
    for depth in (DEPTHS, [1, 1, 1]):
        assert_same_bits(run(jnp.array(depth), runtime=bounded), run(jnp.array(depth), runtime=scan))


@pytest.mark.parametrize("name, changes, remat, backprop_loops", LAWS)
def test_masked_is_truncated_bit_for_bit(name, changes, remat, backprop_loops):
    deep, shallow = (configure(name, loops, **changes) for loops in (5, 4))
    run = partial(gradient, params_of(deep), jnp.full(ROWS, 4), backprop_loops=backprop_loops)
    scan = Runtime(loop="scan", remat=remat)
    same = partial(assert_close, rtol=5e-5) if backprop_loops == 1 else assert_same_bits
    same(run(config=deep, runtime=scan), run(config=shallow, runtime=scan))


@pytest.mark.parametrize(
    "name, core", [("elr", "*-"), ("parcae", "S"), ("elr", "D-"), ("elr", "*E"), ("parcae", "V-"), ("elr", "GR-")]
)
def test_a_row_alone_is_the_same_row_in_a_batch(name, core):
    config = configure(name, prelude="", core=core)
    params = params_of(config)
    together = forward(params, TOKENS, jnp.array(DEPTHS), KEYS, config=config)
    for row, depth in enumerate(DEPTHS):
        one = slice(row, row + 1)
        assert_close(forward(params, TOKENS[one], jnp.array([depth]), KEYS[one], config=config), together[one])


def test_a_key_for_the_batch_stands_for_one_of_each_row():
    config = configure("parcae", prelude="", core="S")
    run = partial(forward, params_of(config), TOKENS, jnp.array(DEPTHS), config=config)
    assert_same_bits(run(KEY), run(KEYS))
    assert (run(KEYS[::-1]) != run(KEYS)).any()


def test_states_are_the_loops_states():
    """One more pass of coda and head over the last of them gives the logits."""
    config = configure("elr", prelude="", core="-", coda="")
    params = params_of(config)
    states = jax.jit(partial(model.states, config=config))(params, TOKENS, jnp.array(DEPTHS))
    assert states.shape == (4, ROWS, LENGTH, 8)
    last = states[-1]
    normed = last / jnp.sqrt(jnp.mean(last**2, -1, keepdims=True) + config.norm_eps) * params.norm
    assert_close(normed @ params.head, forward(params, TOKENS, jnp.array(DEPTHS), config=config))
    assert_same_bits(states[2, 0], states[3, 0])


LOSS_CASES = {"tied": {"tie_embeddings": True}, "sphere": None}


@pytest.mark.parametrize("name", LOSS_CASES)
def test_the_loss_is_that_of_the_logits(name):
    """In value and in the gradient of every parameter, the head's scale on the sphere included."""
    rule = dataclasses.replace(presets.DORY, max_loops=3)
    config = tiny_dory(prelude="", core="S-", coda="", vocab_size=13, loop=rule)
    if LOSS_CASES[name] is not None:
        config = configure("elr", prelude="", core="*", coda="", **LOSS_CASES[name])
    params, depth, targets = params_of(config), jnp.array(DEPTHS), TOKENS[:, ::-1]
    weights = 1 + jnp.sin(jnp.arange(TOKENS.size).reshape(TOKENS.shape))

    @jax.jit
    def both(params):
        plain = lambda p: jnp.sum(weights * cross_entropy(model.apply(p, TOKENS, depth, config=config), targets))
        fused = lambda p: model.loss(p, TOKENS, targets, weights, depth, config=config)[0]
        return jax.value_and_grad(plain)(params), jax.value_and_grad(fused)(params)

    assert_close(*both(params), rtol=2e-5)


PACKED = {
    "rms": configure("elr", prelude="", core="*-", coda="", mlp=MLPConfig(d_ff=12, kind="squared_relu")),
    "sphere": tiny_dory(prelude="", core="S-", coda="", loop=dataclasses.replace(presets.DORY, max_loops=3)),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_working_copies_compute_the_same(name):
    """In a full pass, and in a prompt with a step after it."""
    config = PACKED[name]
    params = params_of(config)
    copies = jax.jit(partial(parameters.pack, config=config))(params)
    kept = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert sum(leaf.size for leaf in jax.tree.leaves(copies)) == kept and isinstance(copies, parameters.WorkingCopy)
    depth = jnp.array(DEPTHS)

    @jax.jit
    def run(params):
        whole = model.apply(params, TOKENS, depth, config=config)
        cache = init_cache(config, ROWS, LENGTH)
        _, cache = incremental.extend(params, TOKENS[:, :-1], depth, cache, config=config, fresh=True)
        return whole, incremental.extend(params, TOKENS[:, -1:], depth, cache, config=config)

    plain, packed = run(params), run(copies)
    assert_close(packed, plain, rtol=2e-5)
    assert_close(packed[1][0][:, 0], plain[0][:, -1], rtol=2e-5)


def test_packed_copies_have_the_runtimes_type():
    config = PACKED["sphere"]
    runtime = Runtime(dtype="bfloat16")
    params = params_of(config)
    copies = parameters.pack(params, config=config, runtime=runtime)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(copies) if leaf.ndim > 2} == {"bfloat16"}
    run = jax.jit(partial(model.apply, config=config, runtime=runtime))
    plain, packed = (run(p, TOKENS, jnp.array(DEPTHS)) for p in (params, copies))
    assert jnp.abs(plain - packed).max() < 0.03 * jnp.abs(plain).max()  # sums in another order, then 2⁻⁹ a rounding


def test_a_tied_head_is_the_embedding():
    tied, untied = (configure("elr", prelude="", core="-", coda="", tie_embeddings=tie) for tie in (True, False))
    params = params_of(tied)
    run = partial(forward, tokens=TOKENS, depth=jnp.array(DEPTHS))
    assert params.head is None
    assert_close(run(params, config=tied), run(params.replace(head=params.embedding.T), config=untied))


@pytest.mark.parametrize("letters", ["*", "S"])
def test_the_future_and_other_documents_do_not_matter(letters):
    """Their gradient is exactly zero, for 160 tokens so that a window of 3 runs in blocks."""
    config = configure("elr", prelude="", core=letters, coda="")
    params = params_of(config)
    segments = jnp.where(jnp.arange(160) < 70, 1, 2)[None]
    tokens = jax.random.randint(KEY, (1, 160), 0, 13)

    @jax.jit
    def influence(entry):
        """d logits[120] of the embedded tokens."""
        params_with = params.replace(embedding=entry, head=params.head)
        ids = jnp.arange(160)[None]
        logits = model.apply(params_with, ids, jnp.array([3]), config=config, segment_ids=segments)
        return jnp.sum(jnp.square(logits[0, 120]))

    moved = jnp.abs(jax.grad(influence)(params.embedding[tokens[0]])).sum(-1)
    assert not moved[:70].any(), "another document"
    assert not moved[121:].any(), "the future"
    reach = 120 - 3 * 2 if letters == "S" else 70
    assert moved[reach:121].all() and not moved[70:reach].any()


def test_positions_count_relative_to_each_other():
    config = configure("elr", prelude="", core="*-")
    run = partial(forward, params_of(config), TOKENS, jnp.array(DEPTHS), config=config)
    steps = jnp.broadcast_to(jnp.arange(LENGTH), TOKENS.shape)
    assert_close(run(positions=steps), run(key=KEYS))
    assert_close(run(positions=steps + 37), run(positions=steps), rtol=2e-5)
    assert (jnp.abs(run(positions=2 * steps) - run(positions=steps)) > 1e-3).any()
    flat = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=3, window=3, rope_base=None)
    free = configure("elr", prelude="", core="*", coda="", attention=flat)
    anywhere = partial(forward, params_of(free), TOKENS, jnp.array(DEPTHS), config=free)
    assert_same_bits(anywhere(positions=2 * steps), anywhere(positions=steps))


def test_bfloat16_computes_close_to_float32():
    name, changes, remat, _ = LAWS[0]
    config = configure(name, **changes)
    params = params_of(config)
    run = partial(gradient, params, jnp.array(DEPTHS), config=config)
    (logits, grad), (logits16, grad16) = (
        run(runtime=Runtime(dtype=dtype, remat=remat)) for dtype in ("float32", "bfloat16")
    )
    losses, losses16 = (float(cross_entropy(x, TOKENS).mean()) for x in (logits, logits16))
    assert losses16 == pytest.approx(losses, rel=2e-2) and losses16 != losses
    assert logits16.dtype == jnp.float32
    for (path, leaf), exact in zip(jax.tree.leaves_with_path(grad16), jax.tree.leaves(grad), strict=True):
        assert leaf.dtype == jnp.float32, jax.tree_util.keystr(path)
        assert jnp.linalg.norm(leaf - exact) < 0.1 * jnp.linalg.norm(exact), jax.tree_util.keystr(path)


@pytest.mark.parametrize(
    "changes",
    [{"core": "E", "moe": REPLAYED}, pytest.param({"core": "SDG", "coda": "R"}, marks=pytest.mark.slow)],
    ids=lambda changes: changes["core"],
)
def test_integers_and_weights_of_64_bits_change_nothing(changes):
    """As a caller has them under `jax_enable_x64`; the parameters stay float32. Layers are told their round."""
    config = configure("elr", **({"prelude": "", "coda": ""} | changes), conditioning=ConditioningConfig(width=4))
    params, weights = params_of(config), np.arange(TOKENS.size, dtype=np.float32).reshape(TOKENS.shape) / 7

    def slope(params, tokens, weights, depth):
        return jax.value_and_grad(lambda p: model.loss(p, tokens, tokens, weights, depth, config=config)[0])(params)

    expected = jax.jit(slope)(params, TOKENS, weights, np.array(DEPTHS, np.int32))
    with jax.enable_x64(True):
        wide = np.asarray(TOKENS, np.int64), weights.astype(np.float64), np.array(DEPTHS, np.int64)
        found = jax.jit(slope)(params, *map(jnp.asarray, wide))
    assert_close(found, expected)


@pytest.mark.parametrize("depth, bad", [([0, 1, 1], "0"), ([1, 4, 2], "4"), ([-3, 1, 9], "-3")])
def test_a_depth_out_of_range_is_refused_with_its_value(depth, bad):
    config = configure("elr")
    for function in (model.apply, model.states):
        with pytest.raises(ElrError, match=rf"^depth {bad} is outside 1…3: .*loop\.max_loops$"):
            function(parameters.abstract(config), TOKENS, np.array(depth), config=config)


def test_a_random_start_needs_a_key():
    config = configure("huginn")
    with pytest.raises(ElrError, match="pass key="):
        jax.eval_shape(partial(model.apply, config=config), parameters.abstract(config), TOKENS, jnp.array(DEPTHS))
