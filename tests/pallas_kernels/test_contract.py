"""How ops choose their form, and that kernels run under every transformation a model uses."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import RULES, assert_close, small_model, tiny_dory
from devices import on_eight_devices
from interpreted import assert_near, normal
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from elr_jax import incremental, model, parameters
from elr_jax.cache import init_cache
from elr_jax.config import LoopRule, Runtime
from elr_jax.errors import ElrError
from pallas_kernels.contract import choose, run, target_platform
from pallas_kernels.interpret import plain_interpreter
from pallas_kernels.windowed_attention import windowed_attention

Q = normal(0, 4, 140, 4, 8)
K, V = (normal(j, 4, 140, 2, 8) for j in (1, 2))
kernel = partial(windowed_attention, window=20, implementation="pallas_tpu")
plain = partial(windowed_attention, window=20, implementation="xla")


def tpu_mesh(size=1, kind=AxisType.Auto):
    device = jax.sharding.AbstractDevice(device_kind="TPU v5e", num_cores=1, platform="tpu")
    return AbstractMesh((size,), ("x",), axis_types=(kind,), abstract_device=device)


def test_without_a_name_the_best_form_of_the_target_runs():
    best, able, unable = {"tpu": "pallas_tpu"}, lambda name: None, lambda name: "too wide"
    assert target_platform() == "cpu"
    assert choose("op", None, best=best, refusal=able).implementation == "xla"
    with jax.sharding.use_abstract_mesh(tpu_mesh()):
        assert target_platform() == "tpu"
        assert choose("op", None, best=best, refusal=able).implementation == "pallas_tpu"
        assert choose("op", None, best=best, refusal=unable).implementation == "xla"
        assert choose("op", None, best={}, refusal=able).implementation == "xla"


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Manual])
@pytest.mark.parametrize("name", [None, "pallas_tpu"])
def test_a_mesh_has_its_kernels(kind, name):
    with jax.sharding.use_abstract_mesh(tpu_mesh(4, kind)):
        found = choose("op", name, best={"tpu": "pallas_tpu"}, refusal=lambda name: None)
        assert found.implementation == "pallas_tpu"


def test_arrays_whose_types_are_cut_get_no_kernel():
    chosen = partial(choose, "op", best={"tpu": "pallas_tpu"}, refusal=lambda name: None)
    with jax.sharding.use_abstract_mesh(tpu_mesh(4, AxisType.Explicit)):
        assert chosen(None).implementation == "xla"
        with pytest.raises(ElrError, match="mesh axis 'x' is Explicit"):
            chosen("pallas_tpu")
    with jax.sharding.use_abstract_mesh(tpu_mesh(1, AxisType.Explicit)):
        assert chosen(None).implementation == "pallas_tpu"


def test_rows_that_are_cut_get_no_kernel():
    mesh = AbstractMesh((2,), ("sequence",), axis_types=(AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh), pytest.raises(ElrError, match="cuts rows along its sequence axis"):
        kernel(Q, K, V)


def test_a_kernel_nobody_named_gives_way_on_another_platform():
    """As where a program made on a host with TPUs is put on its CPU."""
    chosen = choose("op", "pallas_tpu", best={}, refusal=lambda name: None)
    for named in (True, False):
        form = type(chosen)(op="op", implementation="pallas_tpu", named=named)
        program = jax.jit(lambda x, form=form: run(form, lambda y: y + 1, lambda y: y - 1, x, axes=((),), like=0))
        if named:
            with pytest.raises(ElrError, match="runs on tpu and this program is for cpu: choose 'xla', or None"):
                program(1.0)
        else:
            assert program(1.0) == 0.0


def test_a_named_kernel_is_refused_on_a_cpu_in_a_model_too():
    config = small_model(RULES["elr"], d_model=128)
    apply = jax.jit(partial(model.apply, config=config, runtime=Runtime(kernels="pallas_tpu")))
    with pytest.raises(ElrError, match=r"windowed_attention\(implementation='pallas_tpu'\) runs on tpu"):
        apply.lower(parameters.abstract(config), jnp.zeros((1, 3), jnp.int32), jnp.ones(1, jnp.int32))


def test_an_unknown_name_is_refused():
    with pytest.raises(ElrError, match=r"'cuda'\) is unknown: choose one of xla, pallas_tpu, pallas_gpu, or None"):
        windowed_attention(Q, K, V, window=2, implementation="cuda")  # pyright: ignore
    with pytest.raises(ElrError, match=r"runtime.kernels='mosaic' is unknown"):
        Runtime(kernels="mosaic")  # pyright: ignore


def gradients(function, *operands):
    return jax.jit(jax.value_and_grad(lambda *x: jnp.sum(jnp.sin(function(*x))), argnums=(0, 1, 2)))(*operands)


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrapped",
    [
        lambda function: jax.checkpoint(function, policy=jax.checkpoint_policies.nothing_saveable),
        lambda function: lambda q, k, v: jax.vmap(lambda *x: function(*(y[None] for y in x))[0])(q, k, v),
        lambda function: lambda q, k, v: jax.lax.scan(lambda c, _: (function(c, k, v), None), q, None, length=2)[0],
    ],
    ids=["remat", "vmap", "scan"],
)
def test_transformations(wrapped):
    expected = gradients(wrapped(plain), Q, K, V)
    with plain_interpreter():
        found = gradients(wrapped(kernel), Q, K, V)
    assert_near(jax.tree.leaves(found), jax.tree.leaves(expected), "float32")


def test_shards_of_batch_and_heads_keep_their_axes():
    """Kernels are traced under `shard_map` with its check of varying axes on; interpreters can't be, hence no run."""
    mesh = AbstractMesh((2, 2), ("rows", "heads"), axis_types=(AxisType.Auto,) * 2)
    spec = PartitionSpec("rows", None, "heads")
    sharded = jax.shard_map(kernel, mesh=mesh, in_specs=spec, out_specs=spec)
    traced = jax.make_jaxpr(jax.grad(lambda *x: jnp.sum(sharded(*x)), argnums=(0, 1, 2)))(Q, K, V)
    assert [aval.shape for aval in traced.out_avals] == [x.shape for x in (Q, K, V)]
    assert str(traced).count("pallas_call") == 3


@pytest.mark.slow
def test_a_shard_is_its_part():
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("rows", "heads"))
    spec = PartitionSpec("rows", None, "heads")
    sharded = jax.shard_map(kernel, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    with plain_interpreter():
        found = jax.jit(sharded)(Q, K, V)
    assert_near([found], [plain(Q, K, V)], "float32")


def test_where_arrays_may_be_cut_unseen_only_a_named_kernel_runs():
    on_eight_devices("kernels_on_mesh.py", "choices")


@pytest.mark.parametrize("part", ["ops", pytest.param("models", marks=pytest.mark.slow)])
def test_a_mesh_of_eight_is_one_device(part):
    on_eight_devices("kernels_on_mesh.py", part)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        small_model(LoopRule(max_loops=2), d_model=128, core="SD-"),
        tiny_dory(prelude="", core="S*-", coda=""),
    ],
    ids=["elr", "dory"],
)
def test_a_model_with_kernels_is_the_model(config):
    """Logits and gradients, and a decode step, with every op's kernel."""
    params = jax.jit(parameters.init, static_argnums=1)(jax.random.key(0), config)
    tokens = jax.random.randint(jax.random.key(1), (2, 6), 0, config.vocab_size)
    depth = jnp.array([1, 2])

    def outputs(runtime):
        def loss(params):
            logits = model.apply(params, tokens, depth, config=config, runtime=runtime)
            return jnp.sum(jnp.sin(logits)), logits

        cache = init_cache(config, 2, 8)
        extended = partial(incremental.extend, config=config, runtime=runtime)
        _, cache = extended(params, tokens[:, :4], depth, cache)
        return jax.grad(loss, has_aux=True)(params), extended(params, tokens[:, 4:], depth, cache)[0]

    expected = jax.jit(partial(outputs, Runtime()))()
    with plain_interpreter():
        found = jax.jit(partial(outputs, Runtime(kernels="pallas_tpu")))()
    assert_close(found, expected, rtol=2e-4)
