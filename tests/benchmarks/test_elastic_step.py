"""The race of elastic steps at its smallest: it runs, and counts the rounds that its draws asked for."""

import dataclasses
import json

import numpy as np
import pytest

from benchmarks.elastic_step import ElasticStep, main
from elr_jax import flops, presets
from elr_jax.config import AttentionConfig, LoopRule, MLPConfig

TINY = dataclasses.replace(
    presets.tiny_text(LoopRule(max_loops=3)),
    d_model=8,
    prelude="",
    core="*-",
    coda="",
    attention=AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=8),
    mlp=MLPConfig(d_ff=16),
)


@pytest.mark.slow
def test_the_smallest_race(tmp_path, capsys):
    settings = ElasticStep(
        model=TINY, seq_len=4, batch_size=4, microbatches=2, steps=3, repeats=1, json=str(tmp_path / "race.json")
    )
    result = main(settings)
    assert json.loads((tmp_path / "race.json").read_text())["laws"] == result["laws"]
    assert [row["loops"] for row in result["fixed"]] == [1, 2, 3]
    own, _, shared = result["laws"]
    for row in result["laws"]:
        assert 1 <= row["drawn"] <= row["run"] <= 3
        fixed = {row["loops"]: row["tokens / s"] for row in result["fixed"]}
        seconds = np.interp(row["drawn"], list(fixed), [1 / speed for speed in fixed.values()])
        assert row["time ratio"] == pytest.approx(1 / seconds / row["tokens / s"])
        ran, drawn = (flops.forward_flops(TINY, seq_len=4).at(row[what]) for what in ("run", "drawn"))
        assert row["time / FLOPs"] == pytest.approx(row["time ratio"] * drawn / ran)
    assert shared["run"] == shared["drawn"], "one draw a step leaves nothing to run in vain"
    assert own["run"] > own["drawn"]
    assert "rotating slice" in capsys.readouterr().out
