"""The masking benchmark at its smallest: it runs, and counts the rounds it runs."""

import dataclasses
import json

import numpy as np
import pytest

from benchmarks import masking
from benchmarks.masking import Masking, main
from benchmarks.timing import race
from elr_jax.depth import PoissonDepth, executed_rounds, sort_by_depth, useful_rounds


def test_the_smallest_run(tmp_path, capsys, monkeypatch):
    whole = masking._config
    monkeypatch.setattr(
        masking, "_config", lambda *args: dataclasses.replace(whole(*args), prelude="", core="-", coda="")
    )
    settings = Masking(
        d_model=8,
        seq_len=4,
        rows=4,
        rows_per_microbatch=2,
        rate=2.0,
        max_loops=4,
        uniform_rows=2,
        uniform_loops=(2,),
        repeats=1,
        json=str(tmp_path / "masking.json"),
    )
    result = main(settings)
    assert json.loads((tmp_path / "masking.json").read_text())["mixed"] == result["mixed"]
    scan, bounded, in_parts = result["mixed"]
    assert scan["rounds"] == 16 >= bounded["rounds"] >= in_parts["rounds"] >= in_parts["useful"]
    assert [row["loops"] for row in result["uniform"]] == [2]
    assert "Poisson(2) loops" in capsys.readouterr().out


def test_sorted_microbatches_of_four_run_few_useless_rounds():
    """On average over draws of the default table, and in nearly every one."""
    settings = Masking()
    law = PoissonDepth(rate=settings.rate, max_loops=settings.max_loops)
    rng = np.random.default_rng(0)
    draws = rng.choice(np.arange(1, settings.max_loops + 1), (200, settings.rows), p=law.marginal())
    parts = settings.rows // settings.rows_per_microbatch
    waste = [executed_rounds(np.sort(draw), parts) / useful_rounds(draw) for draw in draws]
    assert np.mean(waste) == pytest.approx(1.08, abs=0.02)
    assert np.quantile(waste, 0.95) <= 1.15
    assert (np.sort(draws[0]) == draws[0][np.asarray(sort_by_depth(draws[0], parts))][::-1]).all()


def test_a_race_alternates():
    turns = []
    times = race({name: lambda name=name: turns.append(name) for name in "ab"}, repeats=3)
    assert turns == list("abababab")
    assert all(0 <= time.fastest <= time.median for time in times.values())
