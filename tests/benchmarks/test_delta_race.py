"""The delta product's race at its smallest, and that the contestants compute the same."""

import json

import numpy as np
import pytest

from benchmarks import delta_product
from benchmarks.delta_product import DeltaRace, main
from elr_jax.layers.delta_rule import sequential

TINY = {"lengths": (4, 6), "steps": 2, "heads": 1, "key_dim": 3, "value_dim": 2, "repeats": 1}


def test_the_smallest_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(delta_product._Torch, "load", lambda inputs: None)
    result = main(DeltaRace(**TINY, json=str(tmp_path / "race.json")))
    assert json.loads((tmp_path / "race.json").read_text())["rows"] == result["rows"]
    assert [(row["part"], row["tokens"]) for row in result["rows"]] == [
        ("forward", 4), ("gradient", 4), ("forward", 6), ("gradient", 6),
    ]  # fmt: skip
    assert all(row["chunked ms"] > 0 and row["sequential / chunked"] > 0 for row in result["rows"])
    assert "sequential / chunked" in capsys.readouterr().out


@pytest.mark.parity
def test_torch_runs_the_same():
    pytest.importorskip("transformers.models.olmo_hybrid")
    inputs = delta_product._inputs(DeltaRace(**TINY), 70)
    peer = delta_product._Torch.load(inputs)
    np.testing.assert_allclose(peer.outputs(*peer.inputs), sequential(*inputs)[0], atol=1e-5)
    row = main(DeltaRace(**TINY))["rows"][0]
    assert row["torch / chunked"] > 0
