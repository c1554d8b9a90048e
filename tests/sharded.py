"""One model on eight devices against itself on one; run by test_sharding.py in a process that has them."""

import dataclasses
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from cases import RULES, perturb, small_model, tiny_dory
from jax.sharding import NamedSharding, PartitionSpec

from elr_jax import model, parameters
from elr_jax.config import AttentionConfig, DeltaProductConfig, MLPConfig, MoEConfig, Runtime
from elr_jax.decode import generate
from elr_jax.depth import PerExample
from elr_jax.sharding import batch_sharding, make_mesh, param_shardings
from elr_jax.train.data import Batch
from elr_jax.train.optim import OptimConfig
from elr_jax.train.settings import Recipe
from elr_jax.train.step import init_state, optimizer_for, state_shardings, train_step

SIZES = {
    "d_model": 16,
    "vocab_size": 32,
    "attention": AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=4, window=3),
    "mlp": MLPConfig(d_ff=16),
}
DELTA = DeltaProductConfig(num_heads=4, num_key_heads=2, key_dim=4, value_dim=4, householder=2)
MIXTURE = MoEConfig(num_experts=4, top_k=2, d_expert=8, d_shared=8, replay=True)
MODELS = {
    "gpt": lambda: small_model(RULES["elr"], core="*-", coda="*", prelude="-", **SIZES),
    "dory": lambda: tiny_dory(core="S-*-", prelude="S-", coda="-", **SIZES),
    "hybrid": lambda: small_model(RULES["elr"], core="D-", coda="*", prelude="D", delta=DELTA, **SIZES),
    "moe": lambda: small_model(RULES["elr"], core="*E", coda="E", prelude="-", moe=MIXTURE, **SIZES),
    "ced": lambda: small_model(RULES["parcae"], prelude="S-", core="G-R-", coda="G-R", **SIZES),
}
ROWS, LENGTH = 8, 12
# A log decay's gradient (`a_log`) is a sum over tokens that cancels: on one device float32 is 4e-6 (the median of eight
# seeds) to 1.1e-5 of its largest value from float64, and on eight, in another order of sums, 1.2e-5 from one.
TOLERANCES = {"hybrid": 3e-5}


def near(found, expected, tolerance=1e-5):
    """Every leaf within rounding of its own size."""
    for (path, one), other in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        one, other = (np.asarray(x, np.float64) for x in (one, other))
        size = np.abs(other).max(initial=0)
        error = np.abs(one - other).max(initial=0)
        assert error <= tolerance * max(size, 1e-3), f"{jax.tree_util.keystr(path)}: {error} of {size}"


def main(name: str, *meshes: str) -> None:
    """Loss, gradients, an optimizer step and generated tokens."""
    config = MODELS[name]()
    config = dataclasses.replace(config, loop=dataclasses.replace(config.loop, max_loops=3))
    params = perturb(jax.jit(partial(parameters.init, config=config))(jax.random.key(0)), scale=0.05)
    tokens = jax.random.randint(jax.random.key(1), (ROWS, LENGTH + 1), 0, config.vocab_size)
    ones = jnp.ones((ROWS, LENGTH))
    batch = Batch(tokens=tokens[:, :-1], targets=tokens[:, 1:], weights=ones, segment_ids=ones.astype(jnp.int32))
    depth = jnp.array([1, 2, 3, 1, 2, 3, 1, 1])

    def loss(params, batch, depth):
        total, scores = model.loss(
            params,
            batch.tokens,
            batch.targets,
            batch.weights,
            depth,
            config=config,
            key=jax.random.key(2),
            backprop_loops=2 if name == "ced" else None,
        )
        return total + sum(jnp.sum(one.balance) for one in scores.routing)

    run = jax.jit(jax.value_and_grad(loss))
    expected = run(params, batch, depth)
    recipe = Recipe(
        model=config,
        depth=PerExample(max_loops=3),
        optim=OptimConfig(optimizer="muon" if name == "gpt" else "adamw", warmup_steps=1),
        steps=4,
        batch_size=2 * ROWS,
        microbatches=2,
    )
    optimizer, trains = optimizer_for(recipe), name in ("gpt", "moe")
    twice = jax.tree.map(lambda x: jnp.concatenate([x, x[::-1]]), batch)
    step = partial(train_step, recipe=recipe, optimizer=optimizer, runtime=Runtime())
    state = jax.jit(partial(init_state, recipe, optimizer))()
    trained = jax.jit(step)(state, twice)[0] if trains else None
    requests = {
        "config": config,
        "loops": [1, 2, 3, 1, 2, 3, 1, 1],
        "max_new_tokens": 3,
        "prompts": np.asarray(tokens[:, :5]),
    }
    written = generate(params, **requests)

    for text in meshes:
        mesh = make_mesh(text)
        places = param_shardings(parameters.param_specs(config), mesh)
        placed = jax.device_put(params, places)
        cut = sum(one.addressable_shards[0].data.size < one.size for one in jax.tree.leaves(placed))
        assert cut > 3 or "fsdp" not in text, "parameters are cut"
        put = lambda tree, mesh: jax.tree.map(lambda x: jax.device_put(x, batch_sharding(mesh, x.shape)), tree)
        with jax.set_mesh(mesh):
            near(run(placed, put(batch, mesh), put(depth, mesh)), expected, TOLERANCES.get(name, 1e-5))
            if trained is not None:
                shardings = state_shardings(recipe, mesh)
                moments = [one for one in jax.tree.leaves(shardings.opt_state) if not one.is_fully_replicated]
                assert len(moments) >= cut, "an optimizer's moments are cut where their parameters are"
                one_step = jax.jit(step, out_shardings=(shardings, None))
                after, _ = one_step(jax.device_put(state, shardings), put(twice, mesh))
                # an optimizer divides by the root of squares: where a gradient cancels, rounding is a step of its own
                near(after.params, trained.params, 1e-3)
            assert generate(placed, **requests) == written
        explicit = make_mesh(text, explicit=True)
        specs = param_shardings(parameters.param_specs(config), explicit)
        whole = NamedSharding(explicit, PartitionSpec())
        with jax.set_mesh(explicit):
            automatic = jax.sharding.auto_axes(jax.value_and_grad(loss), out_sharding=(whole, specs))
            found = jax.jit(automatic)(jax.device_put(params, specs), put(batch, explicit), put(depth, explicit))
            near(found, expected, TOLERANCES.get(name, 1e-5))
        print(name, text, "equal", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
