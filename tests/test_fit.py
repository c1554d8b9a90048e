"""Fit: what is asked of slices, meshes and plans; the roofs by hand; and a plan from compilation to the documents."""

import dataclasses
import math
from functools import partial
from unittest.mock import Mock

import jax
import pytest
from jax.sharding import AbstractMesh

from elr_jax import flops, presets, topologies
from elr_jax.cache import cache_bytes
from elr_jax.collectives import Collective
from elr_jax.config import AttentionConfig, MLPConfig, Runtime
from elr_jax.depth import Fixed, PerExample
from elr_jax.errors import ElrError
from elr_jax.fit import __main__ as command
from elr_jax.fit import rows as fit_rows
from elr_jax.fit.__main__ import Fit, changed, main
from elr_jax.fit.plans import PLANS, Plan, find_plan
from elr_jax.fit.programs import DoesNotFit
from elr_jax.fit.report import read_rows, update
from elr_jax.fit.roofline import (
    Load,
    Times,
    held_weights,
    mean_rounds,
    sent_bytes,
    serving_load,
    times,
    training_load,
    used_weights,
)
from elr_jax.hardware import HARDWARE
from elr_jax.parameters import param_specs
from elr_jax.sharding import batch_sharding, make_mesh, param_shardings
from elr_jax.topologies import PACKAGES, Topology, absent_devices, parse_topology
from elr_jax.train.step import init_state, optimizer_for, state_shardings

TINY = Plan(
    name="tiny_text",
    model=dataclasses.replace(presets.tiny_text(), prelude="-", core="*-", coda="-"),
    topology="v5e:1x1",
    mesh="fsdp=1",
    depth=Fixed(loops=3),
    batch_size=4,
    seq_len=32,
    microbatches=2,
    serving_mesh="data=1",
    prompts=2,
    requests=2,
    context=16,
)


def test_a_slice_is_a_chip_and_a_grid():
    found = parse_topology("v5p:4x4x8")
    assert found == Topology("v5p", (4, 4, 8)) and found.chips == 128 and found.platform == "tpu"
    assert str(found) == "v5p:4x4x8" and parse_topology("h200:1x1x8").platform == "cuda"


@pytest.mark.parametrize("text", ["v5p", "v9:2x2", "v5e:", "v5e:2x", "2x2", "v5e:2x2 "])
def test_another_text_is_no_slice(text):
    with pytest.raises(ElrError, match="is unknown: give one of v5e, v5p, v6e, h200"):
        parse_topology(text)


def mesh_of(text):
    sizes = dict(part.split("=") for part in text.split(","))
    return AbstractMesh(tuple(map(int, sizes.values())), tuple(sizes))


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.name}-{plan.topology}")
def test_a_plan_divides_by_its_meshes(plan):
    training, serving = mesh_of(plan.mesh), mesh_of(plan.serving_mesh)
    assert training.size == serving.size == parse_topology(plan.topology).chips
    batch_sharding(training, (plan.batch_size // plan.microbatches, plan.seq_len))
    batch_sharding(serving, (plan.requests,))
    batch_sharding(serving, (plan.prompts,))
    param_shardings(param_specs(plan.model), training)
    # weights in bfloat16 and the caches of all requests fit; that the rest does, is for the compiler to say
    entries = cache_bytes(plan.model, tokens=plan.context, dtype="bfloat16")
    held = 2 * held_weights(plan.model, serving) + plan.requests * sum(entries) / serving.size
    assert held < HARDWARE[parse_topology(plan.topology).chip].memory


def test_another_mesh_is_an_error_of_one_line(monkeypatch):
    monkeypatch.setattr(fit_rows, "absent_devices", lambda topology: ["chip"] * topology.chips)
    with pytest.raises(ElrError, match="mesh fsdp=4 has 4 = 4 places for 8 devices"):
        main(Fit(preset="gpt_half_billion", mesh="fsdp=4", programs=("train",)))


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"preset": "koi"}, "preset='koi' is unknown: choose one of gpt_half_billion"),
        ({"preset": "dory_4b", "loops": 0}, "loops=0 must be at least 1"),
        ({"preset": "dory_4b", "write": True, "batch_size": 64}, "leave out batch_size"),
    ],
)
def test_settings_are_checked(settings, named):
    with pytest.raises(ElrError, match=named):
        main(Fit(**settings))


def test_settings_change_a_plan():
    plan = find_plan("dory_4b", None)
    told = {"mesh": "fsdp=32,tensor=2", "batch_size": 64, "seq_len": 512, "loops": 3, "remat": "round"}
    other = changed(plan, Fit(preset="dory_4b", **told))
    assert (other.mesh, other.serving_mesh) == ("fsdp=32,tensor=2",) * 2
    assert (other.batch_size, other.requests, other.prompts) == (64, 64, 64)
    assert (other.seq_len, other.context, other.runtime.remat) == (512, 512, "round")
    assert other.depth == Fixed(loops=3) and other.model.loop.max_loops == 3
    assert changed(plan, Fit(preset="dory_4b")) == plan


@pytest.mark.parametrize("topology, own", [("v5e:2x4", "pallas_tpu"), ("h200:1x1x8", "pallas_gpu")])
def test_kernels_are_the_slices_own(topology, own):
    plan = dataclasses.replace(TINY, topology=topology)
    assert plan.runtime.kernels == "auto", "as in a run that names none"
    assert dataclasses.replace(plan, kernels=True).runtime.kernels == own


def test_roofs_by_hand():
    chip = HARDWARE["v5e"]
    found = times(Load(useful=1.0, executed=197e12, moved=2 * 819e9, sent=200e9 / 2), chip)
    assert found == Times(1.0, 2.0, 0.5) and found.overlapped == 2.0 and found.in_turn == 3.5


def test_collectives_of_a_round_run_in_every_round():
    once = Collective("all-gather", 800, 8, 3, False, "")
    each = Collective("all-reduce", 800, 8, 2, True, "")
    assert sent_bytes([once, each], 2.5) == 3 * 700 + 2 * 2.5 * 1400


def test_rounds_are_those_that_microbatches_run():
    assert mean_rounds(TINY.recipe) == 3
    law = PerExample(max_loops=4, forced=0.1)
    recipe = dataclasses.replace(TINY.recipe, depth=law, batch_size=64, microbatches=64)
    assert mean_rounds(recipe) == pytest.approx(law.mean(), abs=0.05), "a row each: none waits"
    few = mean_rounds(dataclasses.replace(recipe, microbatches=16))
    assert law.mean() < few < law.mean() + 0.3, "four rows of like depth"
    assert mean_rounds(dataclasses.replace(recipe, microbatches=1)) == pytest.approx(4, abs=0.01)


def test_operations_are_those_of_flops():
    mesh, recipe = AbstractMesh((2,), ("fsdp",)), TINY.recipe
    how = {"seq_len": 32, "rounds": 3.0, "held": 1000, "sent": 7.0, "mesh": mesh}
    kept, replayed = (training_load(recipe, Runtime(remat=remat), **how) for remat in ("none", "layer"))
    useful = flops.train_flops(recipe.model, seq_len=32, sequences=4, rounds=12)
    assert kept.useful == replayed.useful == kept.executed == useful / 2 and kept.sent == 7.0
    head = 2 * 128 * 257
    again = 4 * 32 * (flops.forward_flops(recipe.model, seq_len=32).at(3) - head)
    assert replayed.executed == pytest.approx((useful + again) / 2)
    # two microbatches more of a pass: the looped weights three times; a layer's input and output of 128 numbers
    config, params = recipe.model, flops.num_params(recipe.model)
    weights = 2 * (params - 257 * 128 - 128 + 2 * (core_params(config)))
    layers = 2 * flops.layer_passes(config, 3) * 4 * 32 * 128 / 2
    assert replayed.moved - kept.moved == pytest.approx(4 * (weights + layers))


def core_params(config):
    """Of a round: the core's and the update's."""
    d, once = config.d_model, dataclasses.replace(config, core=config.core * 2)
    return flops.num_params(once) - flops.num_params(config) + d * d + 2 * d


def test_a_prompt_and_a_step():
    config, mesh = presets.tiny_text(), AbstractMesh((2,), ("data",))
    how = {"rows": 4, "context": 64, "loops": 2, "held": 4 * flops.num_params(config) + 5000, "sent": 0.0, "mesh": mesh}
    prompt, step = (serving_load(config, Runtime(), new=new, **how) for new in (64, 1))
    head = 2 * 128 * 257
    forward = flops.forward_flops(config, seq_len=64)
    assert prompt.useful == pytest.approx((4 * 64 * forward.at(2) - 4 * 63 * head) / 2), (
        "logits of the last token alone"
    )
    assert step.useful == pytest.approx(4 * flops.forward_flops(config, seq_len=128).at(2) / 2)
    passes = flops.layer_passes(config, 2)
    assert prompt.moved - step.moved == pytest.approx(4 * 2 * passes * (4 * 64 - 4) * 128 / 2)
    assert step.moved > 5000


def test_weights_on_a_chip():
    config = presets.tiny_text()
    fsdp, tensor = AbstractMesh((4,), ("fsdp",)), AbstractMesh((4,), ("tensor",))
    assert held_weights(config, fsdp) < 0.26 * flops.num_params(config)
    whole = used_weights(config, 1, tokens=1, mesh=fsdp)
    assert whole == flops.num_params(config) - 257 * 128 - 128, "gathered for use; of the embedding a row"
    assert used_weights(config, 1, tokens=1, mesh=tensor) < 0.5 * whole


@pytest.fixture
def here(monkeypatch):
    """One device of this machine in a chip's place."""
    monkeypatch.setattr(fit_rows, "absent_devices", lambda topology: jax.devices()[: topology.chips])
    monkeypatch.setattr(fit_rows, "PACKAGES", {"tpu": ("jax",)})
    monkeypatch.setattr(command, "PLANS", (TINY,))


def test_a_plan_from_compilation_to_the_documents(here, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "DOCS", tmp_path)
    (tmp_path / "scale.md").write_text("# Scale\n\nMine.\n")
    train, decode = main(Fit(preset="all", programs=("train", "decode"), json=str(tmp_path / "rows.json"), write=True))
    state = 4 * 3 * flops.num_params(TINY.model)
    assert state < train.arguments < 1.01 * state + 10_000 and train.fits
    assert train.temporaries > 0 and train.total >= train.arguments + train.temporaries
    assert train.rounds == 3 and decode.rounds == 4 and train.collectives == {}
    assert 0 < train.mfu[0] < train.mfu[1] < 1
    assert read_rows(tmp_path / "rows.json") == [train, decode] == read_rows(tmp_path / "scale.json")
    text = (tmp_path / "scale.md").read_text()
    assert text.startswith("# Scale\n\nMine.\n") and "| tiny_text | decode | v5e:1x1 |" in text
    assert "Compiled, not run" in text and "Modelled, not measured" in text
    assert "tiny_text" in capsys.readouterr().out
    update(tmp_path, [dataclasses.replace(train, temporaries=17 * 10**9, total=18 * 10**9)])
    text = (tmp_path / "scale.md").read_text()
    assert "no: 2.0 GB too much" in text and text.count("| tiny_text | train |") == 3, "a newer row replaces the older"


@pytest.mark.aot
@pytest.mark.parametrize("topology", list(dict.fromkeys(plan.topology for plan in PLANS)))
def test_meshes_of_plans_lie_on_their_slices(topology):
    """An axis of a mesh may take a part of a slice's own: eight chips of 4x4x4."""
    pytest.importorskip(PACKAGES[parse_topology(topology).platform], reason="the aot extra brings the compilers")
    devices = absent_devices(parse_topology(topology))
    for plan in PLANS:
        for text in {plan.mesh, plan.serving_mesh} if plan.topology == topology else ():
            assert make_mesh(text, devices=devices).size == len(devices)


def shards_of_state(plan):
    """Elements that a device has of each leaf."""
    places = jax.tree.leaves(state_shardings(plan.recipe, mesh_of(plan.mesh)))
    leaves = jax.tree.leaves(jax.eval_shape(partial(init_state, plan.recipe, optimizer_for(plan.recipe))))
    return [math.prod(place.shard_shape(leaf.shape)) for leaf, place in zip(leaves, places, strict=True)]


@pytest.mark.aot
def test_a_small_plan_on_four_chips_that_are_not_here():
    """The state of a chip is the sum of its shards, and weights are gathered and gradients summed over the chips."""
    pytest.importorskip("libtpu", reason="the aot extra brings the compilers")
    sizes = {"attention": AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=128), "mlp": MLPConfig(d_ff=1024)}
    model = dataclasses.replace(TINY.model, d_model=512, vocab_size=256, **sizes)
    plan = dataclasses.replace(TINY, model=model, topology="v5e:2x2", mesh="fsdp=4", serving_mesh="data=2,tensor=2")
    plan = dataclasses.replace(plan, batch_size=16, seq_len=256, requests=4, kernels=True)
    train, decode = fit_rows.fit(plan, "train"), fit_rows.fit(plan, "decode")
    shards = shards_of_state(plan)
    batch = 4 * 4 * 16 * 256 / 4
    assert train.arguments == pytest.approx(4 * sum(shards) + batch, rel=0.01)
    assert sum(shards) < 0.26 * 3 * flops.num_params(model)
    matrices = 2 * (flops.num_params(model) - 2 * 512 * 256)
    gathered = sum(
        size for kind, (_, size) in train.collectives.items() if kind in ("all-gather", "collective-permute")
    )
    assert gathered > matrices, "weights in bfloat16, where they are used"
    assert train.load.sent > 0 and train.times.links > 0
    weights = 2 * flops.num_params(model) / 2
    assert 0.9 * weights < decode.arguments < 2.5 * weights, "half of the weights, and caches"


@pytest.mark.aot
@pytest.mark.parametrize("topology, mesh", [("v5e:2x2", "fsdp=2,expert=2"), ("h200:1x1x2", "expert=2")])
def test_a_mixture_is_cut_by_its_experts_on_devices_that_are_not_here(topology, mesh):
    """A step compiles in which a device holds and runs its own experts alone, beside ranks that gather theirs."""
    pytest.importorskip(PACKAGES[parse_topology(topology).platform], reason="the aot extra brings the compilers")
    model = dataclasses.replace(presets.tiny_moe(), d_model=256, coda="D*E")
    model = dataclasses.replace(model, moe=dataclasses.replace(model.moe, d_expert=512))
    plan = dataclasses.replace(TINY, model=model, topology=topology, mesh=mesh, batch_size=8, seq_len=256)
    train = fit_rows.fit(plan, "train", quick=True)
    assert train.arguments == pytest.approx(4 * sum(shards_of_state(plan)), rel=0.01)
    summed = sum(size for kind, (_, size) in train.collectives.items() if kind in ("all-reduce", "reduce-scatter"))
    assert summed > 2 * 8 * 256 * 256, "at least each token's sum over its experts, in bfloat16"


def test_an_error_loses_no_row_that_was_made(here, tmp_path, capsys, monkeypatch):
    def fail(*_, **__):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(fit_rows, "compile_training", fail)
    with pytest.raises(NotImplementedError):
        main(Fit(preset="all", programs=("decode", "train"), json=str(tmp_path / "rows.json")))
    assert [row.program for row in read_rows(tmp_path / "rows.json")] == ["decode"]
    assert "tiny_text" in capsys.readouterr().out


def test_a_compiler_that_jax_left_out_is_an_error_with_its_mend(monkeypatch):
    """As JAX leaves out its CUDA plugin where CUDA's libraries are not installed."""
    monkeypatch.setattr(topologies, "PACKAGES", {"tpu": "jax"})
    monkeypatch.setattr(topologies.topologies, "get_topology_desc", Mock(side_effect=NotImplementedError))
    with pytest.raises(ElrError, match="jax did not load: set JAX_PLATFORMS=cpu"):
        absent_devices(parse_topology("v5e:2x2"))


def test_what_has_no_program_is_told(here, capsys, monkeypatch):
    def refuse(*_, **__):
        raise DoesNotFit("RESOURCE_EXHAUSTED: Used 20G of 15.75G hbm")

    monkeypatch.setattr(fit_rows, "compile_training", refuse)
    (row,) = main(Fit(preset="all", programs=("train",)))
    assert row.refusal and not row.fits
    assert "Used 20G of 15.75G" in capsys.readouterr().out
