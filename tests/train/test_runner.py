"""Whole runs: stopping and resuming leave no trace, and what may not change between launches is refused."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import elr_jax
from elr_jax import flops
from elr_jax.config import AttentionConfig, ConditioningConfig, LoopRule, MLPConfig, ModelConfig
from elr_jax.depth import PerExample, Switch
from elr_jax.errors import ElrError
from elr_jax.params import leaves_by_path
from elr_jax.train import checkpoint, lock, runner
from elr_jax.train.data import synthetic_dataset
from elr_jax.train.metrics import read_metrics
from elr_jax.train.optim import OptimConfig
from elr_jax.train.runner import load_params, train
from elr_jax.train.settings import Launch, Recipe
from elr_jax.train.step import init_state, optimizer_for

RECIPE = Recipe(
    model=ModelConfig(
        vocab_size=8,
        d_model=8,
        prelude="",
        core="-",
        coda="",
        attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=4),
        mlp=MLPConfig(d_ff=8),
        loop=LoopRule(initial="random", inject="residual", max_loops=2),
    ),
    depth=PerExample(max_loops=2),
    optim=OptimConfig(optimizer="adamw", warmup_steps=2),
    steps=6,
    batch_size=4,
    microbatches=2,
)


def example(rng):
    tokens = rng.integers(0, 8, 5).astype(np.int32)
    ones = np.ones(4, np.int32)
    return {"tokens": tokens[:4], "targets": tokens[1:], "weights": ones.astype(np.float32), "segment_ids": ones}


def dataset(split="train", seed=0, **changes):
    endless = {"num_examples": 4 if split == "validation" else None}
    return synthetic_dataset(example, vocab_size=8, settings={"made": 1} | changes, seed=seed, split=split, **endless)


TRAINING, VALIDATION = dataset(), dataset("validation")


def launch(out, recipe=RECIPE, training=TRAINING, **settings):
    return train(recipe, Launch(out=str(out), **settings), training=training, validation=VALIDATION)


def interrupt(monkeypatch, at, how):
    """Do something just before the step of a number runs."""
    original = runner.batches

    def interrupted(data, size, *, start=0, **settings):
        for number, batch in enumerate(original(data, size, start=start, **settings), start=start + 1):
            if data is TRAINING and number == at:
                how()
            yield batch

    monkeypatch.setattr(runner, "batches", interrupted)


def abstract_state(recipe):
    return jax.eval_shape(partial(init_state, recipe, optimizer_for(recipe)))


def final_state(out, recipe=RECIPE):
    state, _ = checkpoint.restore(out / "checkpoints", abstract_state(recipe), step=recipe.steps)
    return jax.tree.map(np.asarray, state.replace(key=jax.random.key_data(state.key)))


def told(out):
    """The reported numbers that don't depend on the clock."""
    clock = {"time", "tokens_per_second", "flops_per_second"}
    return [{name: value for name, value in line.items() if name not in clock} for line in read_metrics(out)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that was never stopped."""
    out = tmp_path_factory.mktemp("finished")
    return out, launch(out)


def test_resuming_is_as_if_never_stopped(finished, tmp_path, monkeypatch):
    """Once after SIGTERM, once after a crash that lost the steps since the last checkpoint."""
    straight, results = finished
    with monkeypatch.context() as patch:
        interrupt(patch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert launch(tmp_path) == []
    assert checkpoint.saved_steps(tmp_path / "checkpoints") == [3]
    assert [line["step"] for line in told(tmp_path)] == [1, 2, 3]
    seen = []
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="crash"):
        interrupt(patch, 5, lambda: seen.append(told(tmp_path)[-1]["step"]))
        interrupt(patch, 6, lambda: (_ for _ in ()).throw(RuntimeError("crash")))
        launch(tmp_path, save_every=2)
    assert checkpoint.saved_steps(tmp_path / "checkpoints") == [3, 4]
    assert seen == [4], "the metrics of a saved step are on disk"
    assert launch(tmp_path, save_every=5, keep=1) == results
    assert checkpoint.saved_steps(tmp_path / "checkpoints") == [6]
    for one, other in zip(*(jax.tree.leaves(final_state(out)) for out in (tmp_path, straight)), strict=True):
        assert one.tobytes() == other.tobytes()
    assert told(tmp_path) == told(straight)


def test_sigterm_in_the_last_step_leaves_the_final_evaluation(finished, tmp_path, monkeypatch):
    interrupt(monkeypatch, 6, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert launch(tmp_path) == finished[1]
    assert told(tmp_path) == told(finished[0])


SWITCH = dataclasses.replace(
    RECIPE,
    model=dataclasses.replace(
        RECIPE.model,
        loop=LoopRule(max_loops=2),
        conditioning=ConditioningConfig(width=4, sinusoids=4, rank=2),
    ),
    depth=Switch(after=0.45, law=PerExample(max_loops=2)),
    optim=OptimConfig(optimizer="adamw", warmup_steps=2, condition_warmup_steps=2),
)


@pytest.fixture(scope="module")
def switched(tmp_path_factory):
    """A run with a late switch after 3 of its 6 steps, never stopped; it keeps every checkpoint."""
    out = tmp_path_factory.mktemp("switched")
    return out, launch(out, SWITCH, save_every=1, keep=6)


@pytest.mark.parametrize("stop", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_a_late_switch_is_the_same_across_a_resume(switched, tmp_path, monkeypatch, stop):
    """Stopped by SIGTERM at the graft and a step after it; the next test goes on from a step before."""
    with monkeypatch.context() as patch:
        interrupt(patch, stop, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert launch(tmp_path, SWITCH) == []
    assert checkpoint.saved_steps(tmp_path / "checkpoints") == [stop]
    assert launch(tmp_path, SWITCH) == switched[1]
    assert_same_run(tmp_path, switched[0])


def test_a_damaged_checkpoint_after_the_switch_falls_back_to_one_before_it(switched, tmp_path, capsys):
    """Parameters and config are then those from before, and the run goes on from there to the same end."""
    out = shutil.copytree(switched[0], tmp_path / "run")
    for step in (3, 4, 5, 6):
        files = (path for path in (out / "checkpoints" / str(step) / "state").rglob("*") if path.is_file())
        max(files, key=lambda path: path.stat().st_size).write_bytes(b"damaged")
    params, config = load_params(str(out))
    assert config == SWITCH.at(0).model and params.conditioning is None
    assert launch(out, SWITCH) == switched[1]
    assert_same_run(out, switched[0])
    assert "damaged" in capsys.readouterr().err


def assert_same_run(out, straight):
    for one, other in zip(*(jax.tree.leaves(final_state(run, SWITCH)) for run in (out, straight)), strict=True):
        assert one.tobytes() == other.tobytes()
    assert told(out) == told(straight)


def test_before_a_late_switch_the_run_is_the_one_without_conditioning(switched, tmp_path):
    """The same losses and parameters as that recipe's own run, which knows nothing of a graft to come."""
    out, results = switched
    early = SWITCH.at(2)
    assert early.model.conditioning is None and early.model.loop.max_loops == 1 and SWITCH.at(3) is SWITCH
    launch(tmp_path, early, save_every=1, keep=6)
    steps = [line for line in told(out) if "loss" in line]
    assert steps[:3] == [line for line in told(tmp_path) if "loss" in line][:3]
    for step in (1, 2):
        assert_same_params(load_params(str(out), step=step), load_params(str(tmp_path), step=step))
    assert load_params(str(out), step=2)[1] == early.model
    grafted, config = load_params(str(out), step=3)
    assert config == SWITCH.model
    plain, _ = load_params(str(tmp_path), step=3)
    init_key = jax.random.split(jax.random.key(SWITCH.seed))[0]
    expected = elr_jax.graft(plain, config, key=init_key)
    leaves = leaves_by_path(grafted)
    for name, leaf in leaves_by_path(plain).items():
        np.testing.assert_array_equal(leaves[name], leaf)
    jax.tree.map(assert_few_ulps, grafted, expected)
    (kept, _), (made, _) = (
        checkpoint.restore(folder / "checkpoints", abstract_state(recipe), step=3, field=None)
        for folder, recipe in ((tmp_path, early), (out, SWITCH))
    )
    made = leaves_by_path(made.replace(key=jax.random.key_data(made.key)))
    for name, leaf in leaves_by_path(kept.replace(key=jax.random.key_data(kept.key))).items():
        np.testing.assert_array_equal(made[name], leaf, err_msg="the optimizer goes on with what it has")
    assert [result.loops for result in results] == [1, 2]
    assert all(line["useful_rounds"] == 4 and line["layer_passes"] == 1 for line in steps[:3])
    assert any(line["useful_rounds"] > 4 for line in steps[3:])
    for n, line in enumerate(steps):
        cost = flops.train_flops(SWITCH.at(n).model, seq_len=4, sequences=4, rounds=line["executed_rounds"])
        assert line["train_flops"] == cost


def test_a_checkpoint_older_than_a_setting_goes_on_with_its_default(finished, tmp_path, monkeypatch):
    out = shutil.copytree(finished[0], tmp_path / "run")
    read = checkpoint.read_meta

    def before(*arguments, **more):
        meta = read(*arguments, **more)
        del meta["recipe"]["optim"]["condition_lr_scale"], meta["recipe"]["model"]["conditioning"], meta["step"]
        return meta

    monkeypatch.setattr(checkpoint, "read_meta", before)
    assert launch(out) == finished[1]


def assert_few_ulps(actual, expected):
    """Draws of two programs: the rounding of a normal number is up to how its program was compiled."""
    np.testing.assert_array_max_ulp(np.asarray(actual), np.asarray(expected), 4)


def assert_same_params(actual, expected):
    for one, other in zip(*(jax.tree.leaves(tree[0]) for tree in (actual, expected)), strict=True):
        np.testing.assert_array_equal(one, other)
    assert actual[1] == expected[1]


def test_every_step_is_told_once(finished):
    out, results = finished
    *steps, last = told(out)
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert all(line["skipped"] == 0 and line["useful_rounds"] <= line["executed_rounds"] <= 8 for line in steps)
    assert last == {"step": 6} | {
        f"eval/{name}_{result.loops}": getattr(result, name)
        for result in results
        for name in ("loss", "accuracy", "residual")
    }


def test_mfu_is_the_share_of_the_peak_that_executed_operations_are(finished, tmp_path):
    launch(tmp_path, peak_tflops=1e-6)
    steps = [line for line in read_metrics(tmp_path) if "flops_per_second" in line]
    assert len(steps) == 5 and all(line["mfu"] == pytest.approx(line["flops_per_second"] / 1e6) for line in steps)
    assert not any("mfu" in line for line in read_metrics(finished[0])), "nobody knows a CPU's peak"
    with pytest.raises(ElrError, match=r"^peak_tflops=0 must be above 0$"):
        Launch(out="", peak_tflops=0)


def test_the_peak_is_that_of_all_devices_in_use():
    mesh = SimpleNamespace(devices=np.array(4 * jax.devices()[:1]))
    for place, devices in ((runner.Placement(None), 1), (runner.Placement(mesh), 4)):
        assert place.peak_flops(Launch(out="", peak_tflops=2)) == devices * 2e12
        assert place.peak_flops(Launch(out="")) is None


def test_a_finished_run_launched_again_only_evaluates(finished, tmp_path):
    out, results = finished
    again = shutil.copytree(out, tmp_path / "again")
    assert launch(again) == results
    assert checkpoint.saved_steps(again / "checkpoints") == [6]
    assert told(again) == [*told(out), told(out)[-1]]


def test_a_checkpoint_gives_its_parameters_and_config(finished):
    out, _ = finished
    params, config = load_params(str(out))
    assert config == RECIPE.model
    for one, other in zip(*(jax.tree.leaves(tree) for tree in (params, final_state(out).params)), strict=True):
        np.testing.assert_array_equal(one, other)


REFUSED = [
    ({"recipe": dataclasses.replace(RECIPE, seed=1)}, r"^the recipe differs .*: seed was 0, is 1; resume "),
    ({"recipe": dataclasses.replace(RECIPE, depth=PerExample(max_loops=1))}, r"depth\.max_loops was 2, is 1;"),
    (
        {"recipe": dataclasses.replace(RECIPE, optim=dataclasses.replace(RECIPE.optim, learning_rate=1.0))},
        r"optim\.learning_rate was 0\.003, is 1\.0;",
    ),
    ({"training": dataset(seed=1)}, r"^the data differs .*: seed was 0, is 1;"),
    ({"training": dataset(made=2)}, r"^the data differs .*: made was 1, is 2;"),
    (
        {"training": dataclasses.replace(TRAINING, vocab_size=9)},
        r"^model\.vocab_size=8 is smaller than .* 9: raise it$",
    ),
]


@pytest.mark.parametrize("changes, message", REFUSED)
def test_what_may_not_change_is_refused(finished, changes, message):
    out, _ = finished
    written = lambda: {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.name != lock.FILE}
    files = written()
    with pytest.raises(ElrError, match=message) as error:
        launch(out, **changes)
    assert "\n" not in str(error.value)
    assert written() == files, "nothing was written but the lock"


def test_a_folder_without_checkpoints_is_named(tmp_path):
    with pytest.raises(ElrError, match=f"^{tmp_path} holds no checkpoint: train with "):
        load_params(str(tmp_path))


SCRIPT = """
import sys, test_runner as t
t.launch(t.Path(sys.argv[1]), recipe=t.dataclasses.replace(t.RECIPE, steps=10**6))
"""


@pytest.mark.slow
def test_sigterm_saves_once_and_exits_with_zero(tmp_path):
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, tmp_path], env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.DEVNULL
    )
    try:
        while process.poll() is None and len(read_metrics(tmp_path)) < 3:
            pass
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
    (saved,) = checkpoint.saved_steps(tmp_path / "checkpoints")
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, saved + 1))
    assert json.loads((tmp_path / "checkpoints" / str(saved) / "manifest.json").read_text())["meta"]["recipe"]


def test_a_second_run_in_the_folder_is_refused_and_changes_nothing(finished, tmp_path, monkeypatch):
    """While the first saves, so that a second start would find, and remove, a half-written save."""
    refused = []

    def second():
        (tmp_path / "checkpoints" / "4.unfinished").mkdir()
        with pytest.raises(
            ElrError, match=f"^{tmp_path} is in use by process {os.getpid()} on .*--launch.out$"
        ) as told:
            launch(tmp_path)
        refused.append(str(told.value))
        (tmp_path / "checkpoints" / "4.unfinished").rmdir()

    interrupt(monkeypatch, 3, second)
    assert launch(tmp_path) == finished[1]
    assert len(refused) == 1
    assert told(tmp_path) == told(finished[0])


MESHED = """
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
from test_runner import final_state, launch

root = Path(sys.argv[1])
alone = launch(root / "alone")
meshed = launch(root / "meshed", save_every=3, mesh="data=2")
params = final_state(root / "alone").params, final_state(root / "meshed").params
near = lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5)
jax.tree.map(near, *params)
near([one.loss for one in meshed], [one.loss for one in alone])
shutil.rmtree(root / "meshed" / "checkpoints" / "6")
again = launch(root / "meshed", mesh="fsdp=2")
jax.tree.map(near, params[0], final_state(root / "meshed").params)
near([one.loss for one in again], [one.loss for one in alone])
"""


@pytest.mark.slow
def test_a_run_on_a_mesh_is_the_run_and_goes_on_on_another(tmp_path):
    environment = os.environ | {
        "JAX_NUM_CPU_DEVICES": "2",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(Path(elr_jax.__file__).parents[1])]),
    }
    subprocess.run([sys.executable, "-c", MESHED, tmp_path], env=environment, check=True)


def test_a_mesh_of_other_than_the_devices_is_refused(tmp_path):
    with pytest.raises(ElrError, match="mesh data=3 has 3 = 3 places for"):
        launch(tmp_path, mesh="data=3")
    assert not any(tmp_path.iterdir())
