"""Every op and a whole training step, compiled for chips that are not here: the kernels are in, no T×T array is."""

import dataclasses
import os
import re
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from benchmarks.planned_memory import PlannedMemory, loss
from elr_jax import model, parameters, presets
from elr_jax.config import LoopRule, Runtime, SphereConfig
from elr_jax.depth import PerExample
from elr_jax.parameters import param_specs
from elr_jax.sharding import make_mesh
from elr_jax.topologies import OPTIONS, PACKAGES, absent_devices, compiling
from elr_jax.train.data import Batch
from elr_jax.train.optim import make_optimizer
from elr_jax.train.runner import lower_step
from elr_jax.train.settings import Recipe
from elr_jax.train.step import init_state, train_step
from pallas_kernels.bench import OPS, cases_of
from pallas_kernels.chips import CHIPS, compiler

CALLS = {"pallas_tpu": ("tpu_custom_call",), "pallas_gpu": ("mosaic_gpu", "xla.gpu.triton")}
CASES = [pytest.param(case, id=f"{op}-{case.name}") for op in OPS for case in cases_of(op)]

pytestmark = [pytest.mark.aot, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=CHIPS)
def chip(request):
    found = CHIPS[request.param]
    pytest.importorskip(PACKAGES[found.topology.platform], reason="the aot extra brings the compilers")
    return found


def kernels_in(chip, compiled):
    lines = [line for line in compiled.as_text().splitlines() if "custom-call(" in line]
    return sum(any(name in line for name in CALLS[chip.kernels]) for line in lines)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", ["forward", "gradients"])
def test_an_op_compiles_to_its_kernels(chip, case, form):
    if form == "gradients" and not case.inputs:
        pytest.skip("has no gradients")
    if chip.kernels not in case.kernels:
        pytest.skip(f"has no {chip.kernels}")
    with compiler(chip) as compile:
        call = case.forward(chip.kernels)
        compiled = compile(call if form == "forward" else case.gradients(call), *case.operands)
    found, least = kernels_in(chip, compiled), {"forward": 1, "gradients": 2}[form]
    assert found >= least, f"{case.name} {form} on {chip.name}: {found} kernels, {least} or more expected"
    temporary = compiled.memory_analysis().temp_size_in_bytes
    if case.scores:
        assert temporary < case.scores, f"{case.name} {form} on {chip.name}: {temporary} bytes of temporaries"


@pytest.mark.parametrize("name", ["elr", "dory", "hybrid"])
def test_a_training_step_compiles_with_every_kernel(chip, name):
    """The tiny model with windows, of both residuals; a bfloat16 step of four rows of 256 tokens."""
    recipe = Recipe(model=tiny(name), depth=PerExample(max_loops=2), batch_size=4, microbatches=2)
    optimizer = make_optimizer(recipe.optim, param_specs(recipe.model), recipe.steps)
    runtime = Runtime(dtype="bfloat16", kernels=chip.kernels)
    rows = jax.ShapeDtypeStruct((4, 256), jnp.int32)
    batch = Batch(tokens=rows, targets=rows, weights=jax.ShapeDtypeStruct((4, 256), jnp.float32), segment_ids=rows)
    state = jax.eval_shape(partial(init_state, recipe, optimizer))
    with compiler(chip) as compile:
        compiled = compile(partial(train_step, recipe=recipe, optimizer=optimizer, runtime=runtime), state, batch)
    # each attention layer has three kernels, an update, a step or a delta rule two, this last on TPU alone
    rule = 2 * (chip.kernels == "pallas_tpu")
    least = {"elr": 3 * 3 + 2, "dory": 3 * 3 + 6 * 2, "hybrid": 3 * 3 + 2 + rule}[name]
    found = kernels_in(chip, compiled)
    assert found >= least, f"a step of {name} on {chip.name}: {found} kernels, {least} or more expected"


@pytest.mark.parametrize("name", ["elr", "dory"])
def test_chips_of_a_mesh_run_kernels_on_their_own_pieces(chip, name):
    """Four chips, rows over two and heads over two: every kernel is there."""
    recipe = Recipe(model=tiny(name), depth=PerExample(max_loops=2), batch_size=8, microbatches=2)
    grid = {"tpu": chip.topology.grid, "cuda": (1, 1, 4)}[chip.topology.platform]
    mesh = make_mesh("fsdp=2,tensor=2", devices=absent_devices(chip.topology._replace(grid=grid)))
    runtime = Runtime(dtype="bfloat16", kernels=chip.kernels)
    with compiling():
        lowered = lower_step(recipe, runtime, mesh, seq_len=256)
        compiled = lowered.compile(compiler_options=OPTIONS[chip.topology.platform])
    least = {"elr": 3 * 3 + 2, "dory": 3 * 3 + 6 * 2}[name]
    found = kernels_in(chip, compiled)
    assert found >= least, f"a step of {name} on four of {chip.name}: {found} kernels, {least} or more expected"


def test_the_loss_of_a_large_vocabulary_holds_no_logits(chip):
    """8,192 tokens, width 2,048, 131,072 words: their logits and the gradient of these would take 8.6 GB in float32.

    What stays is the head's gradient in float32, 1.07 GB, and a chunk.
    """
    with compiler(chip) as compile:
        gigabytes = loss(PlannedMemory(), compile)["chunks"]
    assert gigabytes <= 1.4, f"{gigabytes:.2f} GB of temporaries on {chip.name}"


def test_offloaded_layer_inputs_are_in_the_hosts_memory(chip):
    """Those of all rounds, and nothing is copied there to make room for them."""
    config = dataclasses.replace(tiny("elr"), prelude="", core="---", coda="", loop=LoopRule(max_loops=8))
    rows, depth = jax.ShapeDtypeStruct((4, 256), jnp.int32), jax.ShapeDtypeStruct((4,), jnp.int32)

    def gradient(params, tokens, depth):
        run = partial(model.loss, config=config, runtime=Runtime(dtype="bfloat16", kernels="xla", remat="offload"))
        return jax.grad(lambda params: run(params, tokens, tokens, jnp.ones(tokens.shape), depth)[0])(params)

    with compiler(chip) as compile:
        compiled = compile(gradient, parameters.abstract(config), rows, depth)
    inputs = 8 * len(config.core) * 4 * 256 * config.d_model * 2
    assert compiled.memory_analysis().host_temp_size_in_bytes == inputs
    assert not re.search(r"S\(5\)\} copy\(", compiled.as_text())


def test_a_command_that_only_compiles_asks_for_no_device():
    """JAX's CUDA plugin is installed without its libraries, which a process that looks for devices tells at length."""
    pytest.importorskip(PACKAGES["cuda"], reason="the aot extra brings the compilers")
    told = ["--model", "h200", "--op", "sphere_step", "--case", "small"]
    command = [sys.executable, "-m", "pallas_kernels.bench", *told]
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    assert "modelled for h200" in run.stdout and "Traceback" not in run.stderr


def tiny(name):
    """`presets.tiny_text` with windows of 64 keys, as it is, on the unit sphere, or with a `D` layer."""
    base = presets.tiny_text(
        dataclasses.replace(presets.DORY, max_loops=2) if name == "dory" else LoopRule(max_loops=2)
    )
    attention = dataclasses.replace(base.attention, num_kv_heads=2, window=64)
    sphere = SphereConfig() if name == "dory" else None
    core, delta = ("SD-", presets.tiny_hybrid().delta) if name == "hybrid" else ("S-", None)
    kinds = {"attention": attention, "sphere": sphere, "delta": delta}
    return dataclasses.replace(base, prelude="S-", core=core, coda="*-", **kinds)
