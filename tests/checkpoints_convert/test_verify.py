"""The verify command. `golden/tiny` is a random checkpoint of write_random_dory, and the answers beside it come from

python -m checkpoints_convert verify tests/checkpoints_convert/golden/tiny --loops 1 2 --tokens 9 \
    --write-golden tests/checkpoints_convert/golden/tiny.npz
"""

import importlib.util
import json
import shutil
import sys
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from cases import tiny_dory

from checkpoints_convert import golden as goldens
from checkpoints_convert import load_dory, pytorch, read_config
from checkpoints_convert import verify as verify_module
from checkpoints_convert.compare import Report, Rung, describe
from checkpoints_convert.golden import chunkings, difference
from checkpoints_convert.random_dory import write_random_dory
from checkpoints_convert.tensor_file import read_entries
from checkpoints_convert.verify import Verify, run
from elr_jax import ElrError

GOLDEN = Path(__file__).parent / "golden"
TINY, ANSWERS = GOLDEN / "tiny", GOLDEN / "tiny.npz"
absent = not all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def needs_torch(test):
    """Leave a test to the runs that compare with PyTorch."""
    return pytest.mark.parity(pytest.mark.skipif(absent, reason="needs torch and transformers")(test))


@pytest.fixture
def no_torch(monkeypatch):
    """A machine without PyTorch: neither found nor importable."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("torch", "transformers") else find(name)
    )


def scaled(name: str, folder: Path, factor: float) -> Path:
    """The tiny checkpoint with one tensor scaled, in a folder of its own."""
    folder.mkdir()
    (folder / "config.json").write_bytes((TINY / "config.json").read_bytes())
    data = bytearray((TINY / "model.safetensors").read_bytes())
    entry = read_entries(TINY / "model.safetensors")[name]
    tensor = entry.read()
    data[entry.offset : entry.offset + tensor.nbytes] = (tensor * factor).astype(tensor.dtype).tobytes()
    (folder / "model.safetensors").write_bytes(data)
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("no_torch")
def test_golden_answers_without_torch(tmp_path, capsys):
    file = tmp_path / "report.json"
    assert run(Verify(source=str(TINY), golden=ANSWERS, json=file)) == 0
    report, golden = json.loads(file.read_text()), goldens.read(ANSWERS)
    assert report["passed"] and report["first_departure"] is None and not report["too_noisy"]
    ways = {(row["loops"], row["mode"], row["calls"]) for row in report["rows"]}
    modes = [(None, "one call"), *((mode, calls) for mode in ("per_loop", "last_loop") for calls in chunkings(9))]
    assert ways == {(loops, *way) for loops in golden.loops for way in modes}
    assert all(0 < row["jax"]["max_abs"] <= row["allowed"] < 1e-4 for row in report["rows"])
    assert all(0 < row["noise"]["max_abs"] < 1e-4 and row["jax"]["top1"] == 1 for row in report["rows"])
    names = [rung["name"] for rung in report["ladder"]]
    assert names[0] == "embedding" and names[-1] == "logits" and "loop 2 layers.3" in names
    assert report["embedding_norm"].keys() == {str(loops) for loops in golden.loops}
    assert "Parity shown" in capsys.readouterr().out


@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize(
    "tensor, first",
    [
        ("backbone.layers.0.mixer.sqk", "layers.0 (full attention)"),
        ("backbone.layers.3.mlp_alpha", "loop 1 layers.3 (MLP)"),
        ("lm_head.logit_scale", "logits"),
    ],
)
def test_the_first_layer_that_departs_is_named(tmp_path, capsys, tensor, first):
    folder = scaled(tensor, tmp_path / "checkpoint", 1.02)
    assert run(Verify(source=str(folder), golden=ANSWERS)) == 1
    printed = capsys.readouterr().out
    assert f"First to depart: {first}\n" in printed and "PARITY NOT SHOWN" in printed


@needs_torch
def test_both_sides_run_here_and_their_answers_can_be_kept(tmp_path):
    kept, again = tmp_path / "kept.npz", tmp_path / "again.json"
    settings = Verify(source=str(TINY), loops=(1, 2), tokens=9, write_golden=kept)
    assert run(settings) == 0
    assert run(Verify(source=str(TINY), golden=kept, json=again)) == 0
    ours, committed = goldens.read(kept), goldens.read(ANSWERS)
    assert (ours.config, ours.loops) == (committed.config, committed.loops)
    assert np.array_equal(ours.tokens, committed.tokens)
    for key, logits in committed.logits.items():
        assert np.abs(logits - ours.logits[key]).max() < 1e-4, f"the committed answers are stale at {key}"
    assert not list(tmp_path.glob(".*"))


@needs_torch
def test_a_fault_of_the_import_shows(tmp_path, monkeypatch):
    """PyTorch reads the file by itself, so parameters that went astray on our side alone differ from its."""

    def astray(*arguments, **settings):
        params, config = load_dory(*arguments, **settings)
        first = params.core[0]
        mixer = replace(first.mixer, key=first.mixer.value, value=first.mixer.key)
        return replace(params, core=(replace(first, mixer=mixer), *params.core[1:])), config

    monkeypatch.setattr(verify_module, "load_dory", astray)
    file = tmp_path / "report.json"
    assert run(Verify(source=str(TINY), loops=(1, 2), tokens=9, json=file)) == 1
    assert json.loads(file.read_text())["first_departure"] == "loop 1 layers.2"


@pytest.mark.slow
@needs_torch
def test_bfloat16_and_a_config_of_one_dialect(tmp_path):
    """transformers alone would build twice the blocks from the other dialect's keys."""
    folder = write_random_dory(tmp_path / "one", goldens.read(ANSWERS).config, dtype="bfloat16", dialect="vllm")
    file = tmp_path / "report.json"
    assert run(Verify(source=str(folder), loops=(1, 2), tokens=9, dtype="bfloat16", json=file)) == 0
    noise = [row["noise"]["max_abs"] for row in json.loads(file.read_text())["rows"]]
    assert min(noise) > 1e-3


@needs_torch
def test_torch_leaves_memory_before_jax_comes(monkeypatch):
    """Both models of a 4B checkpoint have no room in 24 GB."""
    models, load = [], pytorch.load

    def loaded(*arguments):
        model = load(*arguments)
        models.append(weakref.ref(model))
        return model

    def no_room(*arguments, **settings):
        assert models and models[0]() is None
        raise ElrError("seen")

    monkeypatch.setattr(pytorch, "load", loaded)
    monkeypatch.setattr(verify_module, "load_dory", no_room)
    with pytest.raises(ElrError, match="seen"):
        run(Verify(source=str(TINY), loops=(1,), tokens=3))


def test_prompt_of_text(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<s>": 0, "the": 5, "loop": 7, "runs": 9, "beyond": 61}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<s>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = read_config(tmp_path)
    prompt = partial(Verify, source=str(tmp_path))
    assert verify_module._prompt(prompt(prompt="the loop runs"), config).tolist() == [5, 7, 9]
    with pytest.raises(ElrError, match="the prompt has token 61 of a vocabulary of 61"):
        verify_module._prompt(prompt(prompt="the loop runs beyond"), config)


def test_nothing_passes_on_nan_or_chaos():
    nan = Rung("layers.0", float("nan"), 0.0, 1.0)
    assert not nan.passed
    report = Report(rows=[], rungs=[], embedding_norm={}, chaotic=[])
    assert report.passed
    assert not replace(report, rungs=[nan]).passed
    assert not replace(report, chaotic=[goldens.Case(1, None, "one call")]).passed


def test_difference_of_logits():
    expected = np.log([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]])
    actual = expected + np.array([[1.0], [0.0]]) + np.array([[0.0, 0.0, 0.0], [0.0, np.log(4), 0.0]])
    found = difference(actual, expected)
    assert found.max_abs == pytest.approx(np.log(4)) and found.top1 == 0.5
    assert found.kl == pytest.approx(np.log(1.6) - 0.2 * np.log(4))


@pytest.mark.parametrize("length", [3, 4, 9, 24, 25])
def test_chunkings_cover_the_prompt(length):
    one, chunks, each = chunkings(length).values()
    assert one == [length] and each == [1] * length
    assert sum(chunks) == length and len(chunks) > 1 and min(chunks) > 0 and max(chunks) == chunks[0]


def test_rungs_are_described_by_their_layer():
    config = tiny_dory(prelude="S-", core="*-", coda="")
    assert describe("loop 3 layers.2", config) == "loop 3 layers.2 (full attention)"
    assert describe("layers.0", config) == "layers.0 (sliding-window attention)"
    assert describe("loop 1 entry", config) == "loop 1 entry"


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"golden": GOLDEN / "tiny" / "config.json"}, "is no golden file"),
        ({"golden": Path("absent.npz")}, "is no golden file"),
        ({"tokens": 2}, "the prompt has 2 tokens: 3 or more"),
        ({"tokens": 257}, "the prompt has 257 tokens, the model 256 positions"),
        ({"loops": (0, 1)}, "--loops 0 1 must be counts from 1 on"),
        ({"json": Path("absent/report.json")}, "there is no folder absent; make it or name another"),
        ({"write_golden": Path("absent/tiny.npz")}, "there is no folder absent; make it or name another"),
        ({"prompt": "hello"}, "has no tokenizer.json, which --prompt needs"),
    ],
)
def test_one_line_errors(changes, words, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ElrError, match=words) as error:
        run(Verify(source=str(TINY), **changes))
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("no_torch")
def test_without_torch_and_answers_it_says_what_to_do():
    with pytest.raises(ElrError, match=r"pip install 'elr-jax\[parity\]', or compare with --golden FILE"):
        run(Verify(source=str(TINY)))


def test_answers_of_another_model_are_refused(tmp_path):
    folder = write_random_dory(tmp_path / "other", tiny_dory())
    with pytest.raises(ElrError, match="was made of another model"):
        run(Verify(source=str(folder), golden=ANSWERS))
