"""Conditioning: its mathematics, who is told what, the zero graft bit for bit, and what stays float32."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import RULES, assert_close, assert_same_bits, perturb, small_model

from elr_jax import flops, incremental, model, parameters
from elr_jax.cache import init_cache
from elr_jax.conditioning import layer_specs, round_conditions, sines
from elr_jax.config import AttentionConfig, ConditioningConfig, LoopRule, MLPConfig, Runtime
from elr_jax.errors import ElrError
from elr_jax.layers import make_context
from elr_jax.layers.mlp import mlp
from elr_jax.layers.norms import rms_norm
from elr_jax.params import init_params
from elr_jax.residual import sub_layer
from pallas_kernels.gated_update import step_size

KEY = jax.random.key(5)
TOLD = ConditioningConfig(width=6, sinusoids=4, rank=3)
LOOPS = 3
TOKENS = jax.random.randint(KEY, (3, 6), 0, 13)
KEYS = jax.random.split(KEY, 3)
DEPTHS = ([1, 1, 1], [2, 1, 3], [3, 3, 3])


def configure(name="elr", told=TOLD, **changes):
    """A rule's small model, and the same conditioned."""
    plain = small_model(dataclasses.replace(RULES[name], max_loops=LOOPS), **changes)
    return plain, dataclasses.replace(plain, conditioning=told)


def params_of(config):
    return perturb(jax.jit(parameters.init, static_argnums=1)(KEY, config), scale=0.1)


@partial(jax.jit, static_argnames=("config", "runtime"))
def forward(params, depth, tokens=TOKENS, *, config, runtime=Runtime()):
    return model.apply(params, tokens, depth, config=config, runtime=runtime, key=KEYS[: tokens.shape[0]])


def test_a_condition_tells_progress_and_budget():
    """c of every round and row against a loop over both: τ = i/k up to 1, κ = k/K; the last entry is the coda's."""
    _, config = configure()
    params = params_of(config).conditioning

    def embed(embedder, number):
        hidden = sines(jnp.float32(number), 4) @ embedder.hidden
        return hidden / (1 + jnp.exp(-hidden)) @ embedder.output

    depth = [2, 1, 3, 0]
    c = round_conditions(params, jnp.array(depth), config, dtype="bfloat16")
    assert c.shape == (4, LOOPS + 1, 6) and c.dtype == jnp.float32
    for row, k in enumerate(max(k, 1) for k in depth):
        for i in range(1, LOOPS + 2):
            expected = embed(params.progress, min(i / k, 1)) + embed(params.budget, k / LOOPS)
            np.testing.assert_allclose(c[row, i - 1], expected, rtol=2e-4, atol=1e-5)
    assert_same_bits(c[1, 1:], c[1, :-1])
    assert len({float(c[2, i, 0]) for i in range(LOOPS)}) == LOOPS
    for part, changes in (("progress", {"budget": False}), ("budget", {"progress": False})):
        _, only = configure(told=dataclasses.replace(TOLD, **changes))
        told = params.replace(**{name: None for name in changes})
        number = {"progress": 2 / 3, "budget": 1.0}[part]
        c = round_conditions(told, jnp.array([3]), only, dtype="float32")
        np.testing.assert_allclose(c[0, 1], embed(getattr(params, part), number), rtol=2e-4, atol=1e-5)


def test_sines_tell_loop_counts_apart():
    """Frequencies 1000 … 0.1; all fractions i/k up to 20 loops are embedded far from each other."""
    table = sines(jnp.array([0.25]), 8)[0]
    frequency = 1000 * 10_000 ** (-np.arange(4) / 4)
    np.testing.assert_allclose(table, np.concatenate([np.cos(0.25 * frequency), np.sin(0.25 * frequency)]), atol=1e-4)
    fractions = np.unique([i / k for k in range(1, 21) for i in range(1, k + 1)])
    vectors = np.asarray(sines(jnp.asarray(fractions, jnp.float32), 32))
    distance = np.linalg.norm(vectors[:, None] - vectors[None], axis=-1) + 9 * np.eye(len(fractions))
    assert distance.min() > 0.5


def test_a_conditioned_layer_is_the_formula():
    """y = x + (1 + ω(c)) ⊙ f(x̃ + A(g(c) ⊙ B x̃)) with x̃ = (1 + λ(c)) ⊙ RMSNorm(x) + μ(c), in float64."""
    _, config = configure()
    layer = params_of(config).core[1]
    x = jax.random.normal(KEY, (2, 5, 8))
    c = jax.random.normal(KEYS[0], (2, 6))
    context = dataclasses.replace(make_context(TOKENS[:2, :5], TOKENS[:2, :5], config), condition=c)
    y, _ = sub_layer("-", x, layer, context, config)
    told, (x64, c64) = layer.condition, (np.asarray(value, np.float64) for value in (x, c))
    head = lambda weight: (c64 @ np.asarray(weight, np.float64))[:, None]
    normed = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + config.norm_eps) * np.asarray(layer.norm)
    inner = (1 + head(told.scale)) * normed + head(told.shift)
    low = told.low_rank
    inner = inner + (head(low.gate) * (inner @ np.asarray(low.down))) @ np.asarray(low.up)
    out = np.asarray(mlp(jnp.asarray(inner, jnp.float32), layer.mixer, config))
    np.testing.assert_allclose(y, x64 + (1 + head(told.rescale)) * out, atol=1e-5)


@pytest.mark.parametrize("loop", ["bounded", "scan"])
@pytest.mark.parametrize(
    "name", [name if name in ("elr", "parcae") else pytest.param(name, marks=pytest.mark.slow) for name in RULES]
)
def test_a_grafted_model_is_the_model_bit_for_bit(name, loop):
    """At every k and in mixed batches, compiled, in both working types."""
    plain, conditioned = configure(name)
    params = params_of(plain)
    grafted = parameters.graft(params, conditioned, key=KEY)
    for dtype in ("float32", "bfloat16"):
        runtime = Runtime(loop=loop, dtype=dtype)
        for depth in DEPTHS:
            expected = forward(params, jnp.array(depth), config=plain, runtime=runtime)
            assert_same_bits(forward(grafted, jnp.array(depth), config=conditioned, runtime=runtime), expected)
    moved = perturb(grafted.core[0].condition, scale=0.1)
    other = dataclasses.replace(
        grafted, core=(dataclasses.replace(grafted.core[0], condition=moved), *grafted.core[1:])
    )
    assert (forward(other, jnp.array(depth), config=conditioned, runtime=runtime) != expected).any()


def test_a_graft_keeps_the_parameters_and_starts_as_a_new_model_does():
    plain, conditioned = configure()
    start = parameters.init(KEY, conditioned)
    assert_same_bits(parameters.graft(parameters.init(KEY, plain), conditioned, key=KEY), start)
    for stack in (start.core, start.coda):
        for layer in stack:
            told = layer.condition
            zero = (told.scale, told.shift, told.rescale, told.low_rank.up)
            assert not any(leaf.any() for leaf in zero)
            assert all(leaf.any() for leaf in (told.low_rank.gate, told.low_rank.down))
    assert all(layer.condition is None for layer in start.prelude)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"conditioning": None}, "config.conditioning=None has nothing to graft: set it"),
        ({"core": "S-S"}, r"core/2/\S+ is absent, not \(8,\): graft onto"),
        ({"core": "S"}, r"core/1/\S+ is \(8,\), not absent: graft onto"),
        ({"mlp": MLPConfig(d_ff=10)}, r"mixer/\w+ is \(8, 12\), not \(8, 10\): graft onto"),
    ],
)
def test_a_graft_that_does_not_fit_is_refused(change, message):
    plain, conditioned = configure()
    with pytest.raises(ElrError, match=message) as error:
        parameters.graft(parameters.abstract(plain), dataclasses.replace(conditioned, **change), key=KEY)
    assert "\n" not in str(error.value)
    if not change:
        return
    with pytest.raises(ElrError, match=r"conditioning/progress/hidden is \(4, 6\), not absent|core/0/condition"):
        parameters.graft(parameters.abstract(conditioned), conditioned, key=KEY)


@partial(jax.jit, static_argnames=("config", "runtime", "backprop_loops"))
def gradient(params, depth, *, config, runtime, backprop_loops=None):
    def loss(params):
        logits = model.apply(
            params, TOKENS, depth, config=config, runtime=runtime, key=KEYS, backprop_loops=backprop_loops
        )
        return jnp.sum(logits * jnp.sin(jnp.arange(logits.size).reshape(logits.shape))), logits

    return jax.grad(loss, has_aux=True)(params)


@pytest.mark.parametrize(
    "name, remat, backprop_loops",
    [
        ("elr", "round", None),
        ("elr", "none", 2),
        pytest.param("parcae", "layer", 2, marks=pytest.mark.slow),
    ],
)
def test_bounded_is_scan_bit_for_bit(name, remat, backprop_loops):
    _, config = configure(name, prelude="", core="-", coda="-")
    if backprop_loops is not None:  # two rounds in each part: XLA unrolls a scan of one, and rounds differently
        loop = dataclasses.replace(config.loop, max_loops=backprop_loops + 2)
        config = dataclasses.replace(config, loop=loop)
    params = params_of(config)
    run = partial(gradient, params, config=config, backprop_loops=backprop_loops)
    bounded, scan = (Runtime(loop=form, remat=remat) for form in ("bounded", "scan"))
    for depth in DEPTHS:
        results = [run(jnp.array(depth), runtime=runtime) for runtime in (bounded, scan)]
        assert_same_bits(*results)
    moved = jax.tree.map(lambda leaf: bool(leaf.any()), results[0][0])
    assert all(jax.tree.leaves((moved.conditioning, moved.core, moved.coda)))


def test_cut_gradients_of_rows_told_other_rounds_are_those_of_each_alone():
    """Rows begin their last rounds together, each at a progress of its own."""
    _, config = configure(prelude="", core="-", coda="-")
    params, depth = params_of(config), [3, 1, 2]

    @partial(jax.jit, static_argnames="cut")
    def gradient(params, tokens, depth, *, cut):
        def loss(params):
            logits = model.apply(params, tokens, depth, config=config, backprop_loops=cut)
            return jnp.sum(jnp.sin(logits)), logits

        return jax.grad(loss, has_aux=True)(params)

    together, logits = gradient(params, TOKENS, jnp.array(depth), cut=1)
    alone = [gradient(params, TOKENS[row : row + 1], jnp.array([depth[row]]), cut=1) for row in range(3)]
    assert_close(logits, jnp.concatenate([one for _, one in alone]), rtol=2e-5)
    assert_close(together, jax.tree.map(lambda *parts: sum(parts), *(one for one, _ in alone)), rtol=5e-5)
    whole, expected = gradient(params, TOKENS, jnp.array(depth), cut=None)
    assert_close(logits, expected, rtol=2e-5)
    assert jnp.abs(whole.conditioning.progress.output - together.conditioning.progress.output).max() > 1e-4


def test_at_the_start_exactly_the_heads_and_the_corrections_output_have_a_gradient():
    _, config = configure(prelude="", core="-", coda="-")
    grad, _ = gradient(parameters.init(KEY, config), jnp.array([2, 1, 3]), config=config, runtime=Runtime())
    assert not any(leaf.any() for leaf in jax.tree.leaves(grad.conditioning))
    for layer in grad.core + grad.coda:
        told = layer.condition
        assert all(leaf.any() for leaf in (told.scale, told.shift, told.rescale, told.low_rank.up))
        assert not told.low_rank.gate.any() and not told.low_rank.down.any()


def test_rounds_and_coda_get_the_conditions_in_their_order():
    """The first two rounds and the coda by hand, each with its own entry of `round_conditions`."""
    _, config = configure(prelude="", core="-", coda="-")
    params, depth = params_of(config), jnp.array([2, 2, 3])
    c = round_conditions(params.conditioning, depth, config, dtype="float32")

    @jax.jit
    def layer(x, weights, told):
        context = dataclasses.replace(make_context(TOKENS, TOKENS, config), condition=told)
        return sub_layer("-", x, weights, context, config)[0]

    states, gate = jax.jit(partial(model.states, config=config))(params, TOKENS, depth), params.loop.update
    for i in (0, 1):
        step = step_size(states[i], gate.weight, gate.bias, gate.gain, eps=config.norm_eps)
        assert_close(states[i + 1], states[i] + step * (layer(states[i], params.core[0], c[:, i]) - states[i]))
    last = rms_norm(layer(states[-1], params.coda[0], c[:, -1]), params.norm, eps=config.norm_eps)
    assert_close(last @ params.head, forward(params, depth, config=config))


def test_a_row_is_told_of_its_own_loops():
    """A row of a mixed batch is the same row alone at its depth, and each depth is another function of the round."""
    _, config = configure(prelude="", core="-", coda="-")
    params = params_of(config)
    together = forward(params, jnp.array([2, 1, 3]), config=config)
    for row, depth in enumerate((2, 1, 3)):
        alone = forward(params, jnp.array([depth]), TOKENS[row : row + 1], config=config)
        assert_close(alone, together[row : row + 1])
    states = jax.jit(partial(model.states, config=config))
    two, three = (states(params, TOKENS, jnp.full(3, k)) for k in (2, 3))
    assert (jnp.abs(two[1] - three[1]) > 1e-3).any(), "round one knows how many are to come"
    _, blind = configure(prelude="", core="-", coda="-", told=dataclasses.replace(TOLD, progress=False))
    fixed = params.replace(conditioning=params.conditioning.replace(progress=None))
    blind_states = jax.jit(partial(model.states, config=blind))
    last = [blind_states(fixed, TOKENS, jnp.full(3, k))[1] for k in (2, 3)]
    assert (last[0] != last[1]).any(), "so does a budget alone"


def test_rows_of_padding_or_of_no_loops_stay_finite():
    _, config = configure()
    cache = init_cache(config, 3, 8)
    run = jax.jit(partial(incremental.extend, config=config))
    logits, cache = run(params_of(config), TOKENS, jnp.array([2, 0, 3]), cache, new=jnp.array([6, 0, 0]))
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves((logits, cache)))


def test_heads_and_embedding_stay_float32():
    _, config = configure()
    cast = parameters.cast(parameters.init(KEY, config), config, Runtime(dtype="bfloat16"))
    told = cast.core[0].condition
    wide = (cast.conditioning, told.scale, told.shift, told.rescale, told.low_rank.gate)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(wide)} == {"float32"}
    assert told.low_rank.down.dtype == told.low_rank.up.dtype == cast.core[1].mixer.up.dtype == jnp.bfloat16


@pytest.mark.parametrize("missing", ["scale_shift", "low_rank", "rescale"])
def test_each_effect_can_be_left_out(missing):
    _, config = configure(core="-", told=dataclasses.replace(TOLD, **{missing: False}))
    params = params_of(config)
    told = params.core[0].condition
    absent = {name for name in ("scale", "shift", "low_rank", "rescale") if getattr(told, name) is None}
    assert absent == ({"scale", "shift"} if missing == "scale_shift" else {missing})
    still = forward(params, jnp.array([2, 1, 3]), config=config)
    neutral = jax.tree.map(jnp.zeros_like, init_params(KEY, layer_specs(configure()[1])))
    whole = params.replace(
        **{
            name: tuple(
                layer.replace(
                    condition=neutral.replace(
                        **{
                            field.name: getattr(layer.condition, field.name)
                            for field in dataclasses.fields(layer.condition)
                            if field.name not in absent
                        }
                    )
                )
                for layer in getattr(params, name)
            )
            for name in ("core", "coda")
        }
    )
    assert_close(forward(whole, jnp.array([2, 1, 3]), config=configure(core="-")[1]), still)


def test_koi_gets_the_papers_count():
    """14 | 24 | 14 layers of width 3072 with width, sines and rank 256: within 3 % of 155.6M."""
    koi = small_model(
        LoopRule(),
        prelude="-*" * 7,
        core="-*" * 12,
        coda="-*" * 7,
        d_model=3072,
        attention=AttentionConfig(num_heads=32, num_kv_heads=8, head_dim=128),
        mlp=MLPConfig(d_ff=12),
    )
    added = flops.num_params(dataclasses.replace(koi, conditioning=ConditioningConfig())) - flops.num_params(koi)
    assert added == 38 * (3 * 256 * 3072 + 2 * 256 * 3072 + 256 * 256) + 4 * 256 * 256 == 152_174_592
    assert added == pytest.approx(155.6e6, rel=0.03)
