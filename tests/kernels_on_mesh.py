"""Kernels on eight devices, each on its own pieces, interpreted; test_contract.py runs each part in its own process."""

import sys
from functools import partial

import jax
import jax.numpy as jnp
from cases import RULES, perturb, small_model, tiny_dory
from jax.sharding import NamedSharding
from sharded import near

from elr_jax import model, parameters
from elr_jax.config import AttentionConfig, MLPConfig, Runtime
from elr_jax.sharding import batch_sharding, make_mesh, param_shardings, partition
from pallas_kernels.contract import choose
from pallas_kernels.delta_rule import api as delta_rule
from pallas_kernels.gated_update import api as gated_update
from pallas_kernels.interpret import plain_interpreter
from pallas_kernels.sphere_step import api as sphere_step
from pallas_kernels.windowed_attention import api as windowed_attention

MESH = "fsdp=4,tensor=2"


def choices() -> None:
    """Unnamed, no op takes a kernel where arrays may be cut unseen: on several devices and no mesh in use."""
    form = lambda: choose("op", None, best={"cpu": "pallas_tpu"}, refusal=lambda name: None).implementation
    assert form() == "xla"
    with jax.set_mesh(make_mesh(MESH)):
        assert form() == "pallas_tpu"


def ops() -> None:
    """Values and every gradient, of vectors and matrices that are whole on every device too."""
    draws = iter(jax.random.split(jax.random.key(0), 99))
    normal = lambda *shape: jax.random.normal(next(draws), shape)
    rows, query, keys = normal(4, 20, 128), normal(4, 20, 4, 8), lambda: normal(4, 20, 2, 8)
    cached = lambda: normal(4, 2, 16, 8)
    active, length = jnp.array([True, False, True, True]), jnp.array([3, 16, 9, 30])
    whole, ids = normal(128), jnp.arange(80).reshape(4, 20) // 7
    gate = normal(128, 128) / 11, whole, normal(128), active
    update = partial(gated_update.gated_update, eps=1e-6)
    step = partial(sphere_step.sphere_step, eps=1e-6)
    attend = partial(windowed_attention.windowed_attention, window=6)
    beyond = lambda q, k, v, *more, **form: attend(q, k, v, global_keys=more, **form)
    joined = (windowed_attention.QUERY, *[windowed_attention.KEY] * 4)
    decode = partial(windowed_attention.cached_attention, window=16)
    cut = (*[windowed_attention.KEY] * 2, *[windowed_attention.CACHED] * 2, ("batch",))
    calls = [
        (update, (rows, normal(4, 20, 128), *gate), gated_update.AXES, 5),
        (step, (rows, normal(4, 20, 128), whole), sphere_step.AXES, 3),
        (attend, (query, keys(), keys(), ids), windowed_attention.AXES[:4], 3),
        (beyond, (query, keys(), keys(), keys(), keys()), joined, 5),
        (decode, (query[:, :1], keys()[:, :1], keys()[:, :1], cached(), cached(), length), (joined[0], *cut), 0),
    ]
    tokens, steps = (4, 20, 4), (4, 20, 2, 4)
    step_keys = normal(*steps, 8)
    rule = (normal(*tokens, 8), step_keys / jnp.linalg.norm(step_keys, axis=-1, keepdims=True), normal(*steps, 8))
    rates = jax.nn.sigmoid(normal(*steps)), -jnp.exp(normal(*tokens)), normal(4, 4, 8, 8)
    calls.append((lambda *x, **form: delta_rule.delta_rule(*x, **form)[0], (*rule, *rates), delta_rule.AXES, 6))
    mesh = make_mesh(MESH)
    for op, operands, axes, inputs in calls:

        def run(form, *operands, op=op, inputs=inputs):
            value = lambda *first: op(*first, *operands[inputs:], implementation=form)
            if not inputs:
                return value()
            out, pull = jax.vjp(value, *operands[:inputs])
            return out, *pull(jnp.cos(out))

        expected = jax.jit(partial(run, "xla"))(*operands)
        places = tuple(
            NamedSharding(mesh, partition(named, x.shape, mesh)) for named, x in zip(axes, operands, strict=True)
        )
        with jax.set_mesh(mesh), plain_interpreter():
            program = jax.jit(partial(run, "pallas_tpu")).lower(*jax.device_put(operands, places))
        assert "shard_map" in program.as_text() or "manual_computation" in program.as_text()
        near(program.compile()(*jax.device_put(operands, places)), expected, 2e-5)


def models() -> None:
    """Loss and gradients, in the gathered core, beside it, and with its weights cut in every round."""
    sizes = {
        "d_model": 128,
        "vocab_size": 32,
        "attention": AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, window=3),
        "mlp": MLPConfig(d_ff=16),
    }
    # a sphere's norms and rates amplify rounding: without kernels eight devices are 1.3e-5 from one there too
    for config, tolerance in (
        (small_model(RULES["elr"], prelude="S-", core="S-", coda="*", **sizes), 1e-5),
        (tiny_dory(prelude="-", core="S*-", coda="-", **sizes), 3e-5),
    ):
        params = perturb(jax.jit(partial(parameters.init, config=config))(jax.random.key(0)), scale=0.05)
        tokens = jax.random.randint(jax.random.key(1), (8, 13), 0, config.vocab_size)
        depth = jnp.array([1, 2, 2, 1, 2, 2, 1, 1])

        def loss(params, tokens, depth, runtime, config=config):
            inputs, targets = tokens[:, :-1], tokens[:, 1:]
            weights = jnp.ones(targets.shape)
            return model.loss(params, inputs, targets, weights, depth, config=config, runtime=runtime)[0]

        gradient = lambda runtime, loss=loss: jax.jit(jax.value_and_grad(partial(loss, runtime=runtime)))
        expected = gradient(Runtime())(params, tokens, depth)
        mesh = make_mesh(MESH)
        placed = jax.device_put(params, param_shardings(parameters.param_specs(config), mesh))
        rows = [jax.device_put(x, batch_sharding(mesh, x.shape)) for x in (tokens, depth)]
        for gathered in (True, False):
            with jax.set_mesh(mesh), plain_interpreter():
                found = gradient(Runtime(kernels="pallas_tpu", gather_core=gathered))(placed, *rows)
            near(found, expected, tolerance)


if __name__ == "__main__":
    {"choices": choices, "ops": ops, "models": models}[sys.argv[1]]()
