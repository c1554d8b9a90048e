"""Mixed depths on eight devices, however rows and rounds lie on them; test_sharding.py runs it in its own process."""

import dataclasses
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from cases import RULES, perturb, small_model
from sharded import MODELS, near

from elr_jax import parameters
from elr_jax.config import Runtime
from elr_jax.depth import RotatingSlice
from elr_jax.loop import loop_specs, run_loop
from elr_jax.params import init_params
from elr_jax.sharding import batch_sharding, make_mesh, num_ranks, on_own_rows, param_shardings
from elr_jax.train.data import Batch
from elr_jax.train.optim import OptimConfig
from elr_jax.train.settings import Recipe
from elr_jax.train.step import draw_depths, gradient_by_depth

ROWS, LENGTH, LOOPS = 16, 6, 3


def same_gradients() -> None:
    """Masked, sorted by depth, ranks apart, and both: the gradient of one device."""
    config = MODELS["gpt"]()
    config = dataclasses.replace(config, loop=dataclasses.replace(config.loop, max_loops=LOOPS))
    law = RotatingSlice(max_loops=LOOPS, forced=0.25)
    recipe = Recipe(
        model=config, depth=law, optim=OptimConfig(warmup_steps=1), steps=9, batch_size=ROWS, microbatches=1
    )
    params = perturb(parameters.init(jax.random.key(0), config), scale=0.05)
    tokens = jax.random.randint(jax.random.key(1), (ROWS, LENGTH + 1), 0, config.vocab_size)
    weights = (jnp.arange(LENGTH) < 1 + jnp.arange(ROWS)[:, None] % LENGTH).astype(jnp.float32)
    segments = jnp.ones((ROWS, LENGTH), jnp.int32)
    batch = Batch(tokens=tokens[:, :-1], targets=tokens[:, 1:], weights=weights, segment_ids=segments)
    depth = next(
        one for step in range(9) if len(set((one := draw_depths(recipe, jax.random.key(2), step)).tolist())) > 1
    )
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(3), jnp.arange(ROWS))

    def gradient(microbatches: int, apart: bool):
        parts = dataclasses.replace(recipe, microbatches=microbatches)
        runtime = Runtime(gather_core=apart)
        return jax.jit(partial(gradient_by_depth, recipe=parts, runtime=runtime))

    expected = gradient(1, False)(params, batch, depth, keys)
    mesh = make_mesh("data=2,fsdp=4")
    placed = jax.device_put(params, param_shardings(parameters.param_specs(config), mesh))
    spread = jax.tree.map(lambda x: jax.device_put(x, batch_sharding(mesh, x.shape)), batch)
    for microbatches in (1, 2):
        for apart in (False, True):
            with jax.set_mesh(mesh):
                near(gradient(microbatches, apart)(placed, spread, depth, keys), expected)


def own_rounds() -> None:
    """Every rank runs as many rounds as its own deepest row; where another axis cuts the rounds, as all ranks'."""
    config = small_model(RULES["elr"], d_model=8)
    depth = jnp.array([1, 1, 2, 1, 3, 1, 1, 1])
    entry = jax.random.normal(jax.random.key(0), (8, 2, 8))
    ran: Counter[int] = Counter()

    def core(i, u, carried, operands):
        jax.debug.callback(lambda rank: ran.update([int(rank)]), operands[0, 0])
        return jnp.tanh(u), carried

    def rounds(weights, rows):
        entry, depth, rank = rows
        return run_loop(entry, depth, weights, rank, core=core, config=config, runtime=Runtime())[0]

    specs = loop_specs(config)
    weights = init_params(jax.random.key(1), specs)
    alone = rounds(weights, (entry, depth, jnp.zeros((8, 1))))
    for mesh, expected in (
        (make_mesh("data=2,fsdp=2", devices=jax.devices()[:4]), {0: 1, 1: 2, 2: 3, 3: 1}),
        (make_mesh("data=4,tensor=2"), dict.fromkeys(range(4), 3)),
    ):
        jax.effects_barrier()
        ran.clear()
        with jax.set_mesh(mesh):
            apart = jax.jit(partial(on_own_rows, rounds, specs=specs))
            found = apart(weights, (entry, depth, jnp.arange(8)[:, None] // 2))
            assert num_ranks() == (4 if mesh.size == 4 else 1)
        jax.effects_barrier()
        assert ran == expected, ran
        np.testing.assert_allclose(found, alone, rtol=1e-6)


if __name__ == "__main__":
    same_gradients()
    own_rounds()
