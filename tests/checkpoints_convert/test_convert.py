"""The command line: what it writes, and that it leaves nothing when it can't."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
from cases import assert_same_bits, tiny_dory

from checkpoints_convert import load_dory
from checkpoints_convert.convert import Dory, run
from checkpoints_convert.random_dory import write_random_dory
from elr_jax.errors import ElrError
from elr_jax.train import runner
from elr_jax.train.checkpoint import Checkpoints, saved_steps
from elr_jax.train.runner import load_params, save_params

CONFIG = tiny_dory()


@pytest.fixture
def checkpoint(tmp_path):
    folder = write_random_dory(tmp_path / "random", CONFIG, dtype="bfloat16", layout="transformers")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"eos_token_id": 3}')
    table = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(table | {"eos_token_id": 3, "n_recurrent_loops": 3}))
    return folder


def command(*arguments):
    line = [sys.executable, "-m", "checkpoints_convert", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, env=os.environ)


def test_a_run_folder_from_the_command_line(tmp_path, checkpoint):
    done = command("dory", checkpoint, tmp_path / "run", "--max-loops", "6")
    assert done.returncode == 0, done.stderr
    assert f"57,533 parameters are in {tmp_path / 'run'}, with tokenizer.json, generation_config.json" in done.stdout
    params, config = load_params(str(tmp_path / "run"))
    expected, read = load_dory(checkpoint, max_loops=6)
    assert config == read and config.loop.max_loops == 6
    assert_same_bits(params, expected)
    assert (tmp_path / "run" / "tokenizer.json").read_text() == "{}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["random", "run"]


def test_errors_are_one_line_and_leave_nothing(tmp_path, checkpoint):
    (checkpoint / "model.safetensors").write_bytes(b"x")
    done = command("dory", checkpoint, tmp_path / "run")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and "truncated" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["random"]


def test_the_released_layout_keeps_further_keys(tmp_path, checkpoint):
    assert run(Dory(source=str(checkpoint), out=str(tmp_path / "out"), to="released", dtype="float32")) == 0
    params, config = load_dory(tmp_path / "out")
    assert config == CONFIG and params.embedding.dtype == "float32"
    table = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (table["eos_token_id"], table["n_recurrent_loops"], table["dtype"]) == (3, 3, "float32")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
    ]


def test_what_can_not_be_written_is_refused_first(tmp_path, checkpoint, monkeypatch):
    out = tmp_path / "out"
    with pytest.raises(ElrError, match="no word for --embedding-norm"):
        run(Dory(source=str(checkpoint), out=str(out), to="released", embedding_norm=True))
    out.mkdir()
    (out / "mine").touch()
    monkeypatch.setattr("checkpoints_convert.convert.load_dory", lambda *args, **options: pytest.fail("was read"))
    with pytest.raises(ElrError, match="is there already"):
        run(Dory(source=str(checkpoint), out=str(out)))
    assert [path.name for path in out.iterdir()] == ["mine"]


def test_parameters_of_several_types_need_one(tmp_path, checkpoint):
    params, config = load_dory(checkpoint)
    mixed = dataclasses.replace(params, logit_scale=params.logit_scale.astype("float32"))
    with pytest.raises(ElrError, match="are bfloat16 and float32: convert"):
        save_params(str(tmp_path / "run"), mixed, config)
    save_params(str(tmp_path / "run"), params, config)
    assert saved_steps(tmp_path / "run" / "checkpoints") == [0]
    assert_same_bits(load_params(str(tmp_path / "run"), step=0)[0], params)


def test_training_does_not_resume_from_them(tmp_path, checkpoint):
    save_params(str(tmp_path / "run"), *load_dory(checkpoint))
    store = Checkpoints(tmp_path / "run" / "checkpoints", keep=1)
    with pytest.raises(ElrError, match="holds parameters that no run trained"):
        runner._same_run(store, {"recipe": {}, "data": {}})


def test_import_touches_no_device_and_no_torch():
    code = """
import sys, checkpoints_convert.convert, checkpoints_convert.random_dory
from jax._src import xla_bridge
print({"torch", "transformers", "orbax", "huggingface_hub"} & sys.modules.keys(), xla_bridge._backends)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert done.stdout.strip() == "set() {}", done.stderr
