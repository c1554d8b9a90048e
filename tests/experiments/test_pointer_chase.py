"""Pointer chase: the task's rows are right, the command runs, and each loop solves a further hop."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elr_jax import parameters
from experiments.pointer_chase.cells import cells
from experiments.pointer_chase.task import PointerChase
from experiments.results import FILE, Results, read_lines
from experiments.sweep import run_cell


@given(st.integers(0, 2**32 - 1))
def test_every_answer_follows_the_edges_of_one_cycle(seed):
    task = PointerChase()
    row = task.example(np.random.default_rng(seed))
    source, target = np.divmod(row["tokens"][:8], 8)
    follow = dict(zip(source.tolist(), target.tolist(), strict=True))
    asked, answers = row["tokens"][8:], row["targets"][8:]
    for here, hops, answer in zip(asked % 8, asked // 8 - 7, answers, strict=True):
        assert 1 <= hops <= 5
        for _ in range(hops):
            here = follow[int(here)]
        assert answer == here
    seen = [0]
    while len(seen) < 8:
        seen.append(follow[seen[-1]])
    assert sorted(seen) == list(range(8)), "one cycle through all nodes"
    np.testing.assert_array_equal(row["weights"], [0] * 8 + [1] * 8)


def test_rows_fit_the_model_and_differ_between_splits():
    task = PointerChase()
    train, validation = (task.open(split, seed=0) for split in ("train", "validation"))
    assert len(validation.examples) == task.validation_examples
    assert train.vocab_size <= cells("cpu")[0].recipe.model.vocab_size
    first = [tuple(data.examples[i]["tokens"]) for data in (train, validation) for i in range(50)]
    assert len(set(first)) == 100


def test_accuracy_is_counted_by_hops_and_loops(tiny_cell, monkeypatch):
    """A model that always answers x is right where the hops go round the cycle, and nowhere else."""
    task = PointerChase(nodes=3, max_hops=4, validation_examples=64)
    module = "experiments.pointer_chase.task._right"
    monkeypatch.setattr(module, lambda params, batch, loops, config: batch.tokens % 3 == batch.targets)
    config = tiny_cell.recipe.model
    table = np.array(task.measure(parameters.abstract(config), tiny_cell.recipe)["accuracy_by_hops"])
    assert table.shape == (4, 2)
    np.testing.assert_array_equal(table, [[0, 0], [0, 0], [1, 1], [0, 0]])


@pytest.mark.slow
def test_the_command_takes_its_first_steps_and_reports(command, tmp_path):
    command("experiments.pointer_chase", "--preset", "smoke", "--seeds", 0, "--runs", tmp_path, "--only", "mixed")
    folder = tmp_path / "pointer_chase" / "smoke"
    results = Results(read_lines(folder / FILE), "smoke")
    assert results.values("mixed", "accuracy_by_hops").shape == (1, 5, 6)
    assert (folder / "figures" / "smoke.png").stat().st_size > 10_000
    assert "| mixed | " in (folder / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.optimised
@pytest.mark.timeout(1800)
def test_each_loop_solves_a_further_hop(tmp_path):
    (mixed,) = (cell for cell in cells("cpu") if cell.name == "mixed")
    metrics = run_cell(mixed, 0, tmp_path)["metrics"]
    by_hops, overall = np.array(metrics["accuracy_by_hops"]), np.array(metrics["accuracy"])
    for k in range(1, 7):
        solved = by_hops[: min(k, 5), k - 1]
        assert solved.min() > (0.95 if k <= 4 else 0.9), f"hops up to {k} at {k} loops: {solved}"
    assert by_hops[2:, 0].max() < 0.5, "one loop can't follow three hops"
    assert np.all(np.diff(overall[:4]) > 0.02)
    assert overall[4:].min() > overall[3] - 0.02
