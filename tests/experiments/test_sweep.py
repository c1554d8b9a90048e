"""A sweep skips what is finished, goes on with what is half-finished, and runs what has changed."""

import dataclasses
import os
import signal

import pytest

from elr_jax import flops
from elr_jax.config import ConditioningConfig
from elr_jax.depth import Fixed, Switch
from elr_jax.errors import ElrError
from elr_jax.train.metrics import MetricsWriter, read_metrics
from experiments import sweep
from experiments.results import Results, append_line, read_lines
from experiments.sweep import Flags, answer, run_cells


@pytest.fixture
def run(tmp_path):
    def run(*cells, seeds=(0,), **more):
        kept = {"results": tmp_path / "results.jsonl", "runs": tmp_path / "runs"}
        return run_cells("question", "cpu", list(cells), seeds, **(kept | more))

    return run


def test_a_finished_cell_is_skipped_and_a_changed_one_is_not(run, tiny_cell, tmp_path, monkeypatch):
    trained = []
    real = sweep.run_cell
    monkeypatch.setattr(
        sweep, "run_cell", lambda cell, seed, out, **more: trained.append(seed) or real(cell, seed, out, **more)
    )
    assert run(tiny_cell)
    assert run(tiny_cell)
    assert trained == [0]
    longer = dataclasses.replace(tiny_cell, recipe=dataclasses.replace(tiny_cell.recipe, steps=5))
    assert run(longer)
    assert trained == [0, 0]
    first, second = read_lines(tmp_path / "results.jsonl")
    assert first["digest"] != second["digest"]
    assert (first["steps"], second["steps"]) == (4, 5)


def test_what_another_experiment_has_finished_is_taken_over(run, tiny_cell, tmp_path, monkeypatch):
    """Whatever its name there; another seed, recipe or preset is none of it."""
    other = tmp_path / "other.jsonl"
    line = {"question": "other", "preset": "cpu", "cell": "base", "seed": 0, "digest": tiny_cell.digest}
    for changes in ({"seed": 1}, {}, {"seconds": 5.0}, {"preset": "paper"}, {"digest": "0" * 16}):
        append_line(other, line | {"seconds": 1.0, "metrics": changes} | changes)
    trained = []
    monkeypatch.setattr(sweep, "run_cell", lambda cell, seed, out, **more: trained.append(seed) or {"seconds": 2.0})
    assert run(tiny_cell, seeds=(0, 1, 2), others=[tmp_path / "absent", other])
    assert run(tiny_cell, seeds=(0, 1, 2), others=[other])
    assert trained == [2]
    first, second, third = read_lines(tmp_path / "results.jsonl")
    assert first == line | {"question": "question", "cell": "tiny", "seconds": 5.0, "from": "other"} | {
        "metrics": {"seconds": 5.0}
    }
    assert second["from"] == "other" and second["seed"] == 1 and "from" not in third
    assert Results([first, second, third], "cpu").seconds == 2.0, "what was made elsewhere cost nothing here"
    more = {"results": tmp_path / "third.jsonl", "others": [tmp_path / "results.jsonl"]}
    run(tiny_cell, **more)
    assert read_lines(tmp_path / "third.jsonl")[0]["from"] == "other", "where it was made, not where it was copied from"


def test_a_command_looks_into_the_other_experiments_results(tiny_cell, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "ROOT", tmp_path)
    line = {"question": "other", "preset": "cpu", "cell": "base", "seed": 0, "digest": tiny_cell.digest}
    append_line(tmp_path / "other" / "results.jsonl", line)
    seen = []
    flags = Flags(seeds=(0,), runs=str(tmp_path / "runs"))
    answer("question", flags, [tiny_cell], report=lambda *told: seen.append(told[2].cells))
    assert seen == [["tiny"]]
    assert read_lines(tmp_path / "question" / "results.jsonl")[0]["from"] == "other"


def test_cells_train_on_the_mesh_that_a_command_names(tiny_cell, tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "ROOT", tmp_path)
    flags = Flags(seeds=(0,), runs=str(tmp_path / "runs"), mesh="data=3")
    with pytest.raises(ElrError, match="mesh data=3 has 3 = 3 places for 1 devices"):
        answer("question", flags, [tiny_cell], report=lambda *told: None)


def test_a_line_says_what_was_executed(run, tiny_cell, tmp_path):
    run(tiny_cell)
    (line,) = read_lines(tmp_path / "results.jsonl")
    (folder,) = (tmp_path / "runs" / "question" / "cpu").iterdir()
    steps = [entry for entry in read_metrics(folder) if "executed_rounds" in entry]
    assert len(steps) == 4
    executed = sum(entry["executed_rounds"] for entry in steps)
    assert line["executed_rounds"] == pytest.approx(executed / 16)
    assert 1 <= line["useful_rounds"] <= line["executed_rounds"] <= 2
    model = tiny_cell.recipe.model
    assert line["train_flops"] == flops.train_flops(model, seq_len=12, sequences=16, rounds=executed)
    assert line["layer_passes"] == pytest.approx(1 + 2 * line["executed_rounds"])
    assert line["params"] == flops.num_params(model)
    assert len(line["metrics"]["loss"]) == 2
    assert [len(line["metrics"]["accuracy_by_hops"]), len(line["metrics"]["accuracy_by_hops"][0])] == [5, 2]


def test_a_stopped_sweep_goes_on_and_ends_as_if_never_stopped(run, tiny_cell, tmp_path, monkeypatch):
    real = MetricsWriter.progress

    def stop_at_two(self, step, **told):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, step, **told)

    with monkeypatch.context() as patch:
        patch.setattr(MetricsWriter, "progress", stop_at_two)
        assert not run(tiny_cell)
    assert not read_lines(tmp_path / "results.jsonl")
    assert run(tiny_cell)
    (resumed,) = read_lines(tmp_path / "results.jsonl")
    whole = sweep.run_cell(tiny_cell, 0, tmp_path / "whole")
    for name in ("metrics", "executed_rounds", "train_flops", "steps", "data"):
        assert resumed[name] == whole[name]


def test_the_seed_is_no_part_of_the_digest_but_everything_else_is(tiny_cell):
    changed = [
        dataclasses.replace(tiny_cell, eval_batches=3),
        dataclasses.replace(tiny_cell, task=dataclasses.replace(tiny_cell.task, nodes=5)),
        dataclasses.replace(tiny_cell, recipe=dataclasses.replace(tiny_cell.recipe, microbatches=1)),
    ]
    assert len({cell.digest for cell in [tiny_cell, *changed]}) == 4
    other_seed = dataclasses.replace(tiny_cell, recipe=dataclasses.replace(tiny_cell.recipe, seed=5))
    assert other_seed.digest == tiny_cell.digest


def test_an_unknown_cell_is_named_before_anything_runs(tiny_cell, tmp_path):
    flags = Flags(preset="smoke", only=("tinny",), runs=str(tmp_path / "runs"))
    with pytest.raises(ElrError, match="tinny is no cell of question: choose from tiny"):
        answer("question", flags, [tiny_cell], report=lambda *_: None)
    assert not list(tmp_path.iterdir())


def test_without_git_the_commit_is_unknown(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert sweep.environment()["commit"] == "unknown"


def test_before_a_late_switch_a_run_costs_what_the_model_without_conditioning_does(tiny_cell, monkeypatch):
    told = dataclasses.replace(tiny_cell.recipe.model, conditioning=ConditioningConfig(width=4, sinusoids=4, rank=2))
    recipe = dataclasses.replace(tiny_cell.recipe, model=told, depth=Switch(after=0.5, law=Fixed(loops=2)))
    rounds = enumerate((4, 4, 8, 8), start=1)
    lines = [{"step": n, "time": n, "executed_rounds": k, "useful_rounds": k} for n, k in rounds]
    monkeypatch.setattr(sweep, "read_metrics", lambda out: lines)
    made = sweep.cost(None, recipe, seq_len=6)
    plain, later = (
        flops.train_flops(model, seq_len=6, sequences=8, rounds=rounds)
        for model, rounds in ((tiny_cell.recipe.model, 8), (told, 16))
    )
    assert made["train_flops"] == pytest.approx(plain + later)
    assert made["layer_passes"] == pytest.approx((3 + 3 + 5 + 5) / 4)
    assert made["params"] == flops.num_params(told)


def test_a_pause_between_launches_is_no_training_time(tiny_cell, monkeypatch):
    times = [0.0, 1.0, 2.0, 1000.0, 1001.0]
    lines = [{"step": i, "time": t, "executed_rounds": 4, "useful_rounds": 4} for i, t in enumerate(times)]
    monkeypatch.setattr(sweep, "read_metrics", lambda out: lines)
    assert sweep.cost(None, tiny_cell.recipe, seq_len=6)["seconds"] == 23.0
