"""The import benchmark at its smallest, and the bound it is there for on a model large enough to show it."""

import dataclasses
import json
from collections import namedtuple

import pytest

from benchmarks import import_dory
from benchmarks.import_dory import GOAL, ImportDory, main, small_dory
from checkpoints_convert import file_bytes
from elr_jax.config import MLPConfig
from elr_jax.errors import ElrError
from elr_jax.flops import num_params


def test_the_smallest_run(tmp_path, capsys):
    result = main(ImportDory(scale="small", folder=tmp_path, json=tmp_path / "import.json"))
    assert json.loads((tmp_path / "import.json").read_text()) == result
    assert [row["file"] for row in result["imports"]] == ["on disk", "in memory"]
    for row in result["imports"]:
        assert row["parameters"] == num_params(small_dory()) and row["kept"] == 2 * row["parameters"]
        assert 0 < row["before"] <= row["peak"] and row["seconds"] > 0
    assert f"wrote {file_bytes(small_dory()):,} bytes" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["import.json"]


def test_a_disk_without_room(tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(import_dory.shutil, "disk_usage", lambda path: usage(9_900_000_000))
    with pytest.raises(ElrError, match=r"10.0 GB are needed in .* and 9.9 are free"):
        main(ImportDory(folder=tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_can_not_be_imported(tmp_path):
    with pytest.raises(ElrError, match=r"holds no \.safetensors file"):
        main(ImportDory(read=tmp_path))


@pytest.mark.slow
def test_peak_memory_stays_near_what_is_kept(tmp_path, monkeypatch):
    """800 MB with the released model's proportions of head and layers; what JAX itself takes is not counted here."""
    wide = dataclasses.replace(small_dory(), vocab_size=32_768, d_model=1024, mlp=MLPConfig(d_ff=2816))
    monkeypatch.setattr(import_dory, "small_dory", lambda: wide)
    for row in main(ImportDory(scale="small", folder=tmp_path))["imports"]:
        assert row["kept"] > 7e8
        assert row["kept"] <= row["peak"] - row["before"] <= GOAL * row["kept"]
