"""The demo runs through, goes on where it was, and plans within its minutes."""

import dataclasses

import pytest

from elr_jax import flops
from elr_jax.errors import ElrError
from experiments.demo import plan
from experiments.demo.plan import Speed, remember, remembered, steps_that_fit
from experiments.elastic_text.cells import step_flops


@pytest.mark.slow
def test_the_demo_shows_tables_figure_and_where_they_are(command, tmp_path, capsys):
    command("experiments.demo", "--preset", "smoke", "--out", tmp_path)
    told = capsys.readouterr().out
    assert "small_core" in told
    assert "plain" in told
    assert str(tmp_path) in told
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    assert "| small_core | " in (tmp_path / "tables.md").read_text()
    command("experiments.demo", "--preset", "smoke", "--out", tmp_path)
    assert capsys.readouterr().out.count("finished before") == 3


def test_other_minutes_in_the_same_folder_are_refused(tmp_path):
    remember(tmp_path, 10.0, 300, None)
    assert remembered(tmp_path, 10.0) == 300
    with pytest.raises(ElrError, match="holds a demo of 10 minutes, not 5: give --minutes 10 to go on, or another"):
        remembered(tmp_path, 5.0)


def test_the_planned_steps_take_the_time_there_is(tiny_cell):
    speed = Speed(flops_per_second=1e8, compile_seconds=3.0)
    cell = dataclasses.replace(tiny_cell, eval_batches=10)
    costs = [step_flops(cell.recipe, 6)] * 2
    steps = steps_that_fit(100.0, speed, [cell, cell], costs, 6)
    forward = flops.forward_flops(cell.recipe.model, seq_len=6)
    evaluation = 2 * 10 * 4 * 6 * (forward.at(1) + 2 * forward.at(2)) / 1e8
    assert steps * sum(costs) / 1e8 == pytest.approx(plan.MARGIN * 100 - 4 * 3.0 - evaluation, rel=1e-3)
    assert steps_that_fit(1.0, speed, [cell, cell], costs, 6) == plan.FEWEST_STEPS
