"""Prompts from text as the checkpoint's own files say, and the command that continues them."""

import json
import sys

import jax
import pytest
from cases import RULES, perturb, small_model

from elr_jax import parameters
from elr_jax.decode import __main__ as command
from elr_jax.decode.text import byte_codec, checkpoint_codec, run_codec
from elr_jax.errors import ElrError
from elr_jax.train.documents import content_hash

VOCAB = {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "[UNK]": 4}


def write_tokenizer(folder, *, template="<s> $A", **config):
    """A tokenizer of words whose post-processor puts a template around a text."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(VOCAB, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<s>", "</s>"])
    if template is not None:
        special = [(name, VOCAB[name]) for name in ("<s>", "</s>")]
        made.post_processor = tokenizers.processors.TemplateProcessing(single=template, special_tokens=special)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"


@pytest.mark.parametrize(
    "template, config, text, tokens",
    [
        ("<s> $A", {"bos_token": "<s>"}, "a b", [0, 2, 3]),
        ("<s> $A", {"bos_token": "<s>"}, "<s> a b", [0, 2, 3]),
        ("<s> $A </s>", {"bos_token": {"content": "<s>"}}, "a", [0, 2]),
        ("<s> $A </s>", {"bos_token": "<s>"}, "a </s>", [0, 2, 1]),
        ("<s> $A", {"bos_token": "<s>"}, "", [0]),
        ("<s> $A", {"bos_token": "<s>", "add_bos_token": True}, "a", [0, 2]),
        (None, {"bos_token": "<s>", "add_bos_token": True}, "a", [0, 2]),
        (None, {"bos_token": "<s>", "add_bos_token": True}, "<s> a", [0, 2]),
        (None, {"bos_token": "<s>"}, "a", [2]),
        (None, {}, "a b", [2, 3]),
    ],
)
def test_a_prompt_begins_with_one_bos_where_the_checkpoint_says_so(tmp_path, template, config, text, tokens):
    write_tokenizer(tmp_path, template=template, **config)
    codec = checkpoint_codec(tmp_path)
    assert codec.encode(text) == tokens
    assert codec.decode([2, 3, 1]) == "a b"


def test_stop_tokens_come_from_the_first_file_that_names_them(tmp_path):
    write_tokenizer(tmp_path)
    assert checkpoint_codec(tmp_path).stop == ()
    write_tokenizer(tmp_path, eos_token="</s>")
    assert checkpoint_codec(tmp_path).stop == (1,)
    (tmp_path / "config.json").write_text('{"eos_token_id": 0}')
    assert checkpoint_codec(tmp_path).stop == (0,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 2]}')
    assert checkpoint_codec(tmp_path).stop == (3, 2)


def test_a_runs_text_begins_with_its_marker(tmp_path):
    path = write_tokenizer(tmp_path)
    codec = run_codec({"tokenizer": content_hash(path), "marker": 1}, path)
    assert (codec.encode("a b"), codec.stop) == ([1, 2, 3], (1,))
    codec = run_codec({"tokenizer": "bytes", "marker": 256}, None)
    assert (codec.encode("ä"), codec.stop) == ([256, 0xC3, 0xA4], (256,))
    assert byte_codec().decode([256, 0xC3, 0xA4, 0xC3]) == "ä�"


def test_files_that_do_not_serve_are_named(tmp_path):
    with pytest.raises(ElrError, match=r"has no tokenizer\.json: .*--tokens"):
        checkpoint_codec(tmp_path)
    path = write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ElrError, match=r"tokenizer_config\.json holds a list"):
        checkpoint_codec(tmp_path)
    with pytest.raises(ElrError, match="not trained on text"):
        run_codec({"task": "chase"}, None)
    with pytest.raises(ElrError, match="name it by --tokenizer"):
        run_codec({"tokenizer": "abc", "marker": 1}, None)
    with pytest.raises(ElrError, match="is not the file"):
        run_codec({"tokenizer": "abc", "marker": 1}, path)


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["decode", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "200")
    command.main()


@pytest.mark.parametrize(
    "arguments, error",
    [
        ((), "give either --prompt TEXT or --tokens"),
        (("--prompt", "a", "--tokens", "1"), "give either"),
        (("--tokens", "1", "--loops", "1,x"), "--loops '1,x' is no list of numbers"),
        (("--tokens", "1", "--temperature", "-1"), "temperature=-1.0 is out of range"),
        (("--tokens", "1"), "nowhere"),
    ],
)
def test_mistakes_are_one_line(monkeypatch, capsys, arguments, error):
    with pytest.raises(SystemExit) as caught:
        call(monkeypatch, "/nowhere", *arguments)
    assert caught.value.code == 2
    assert error in capsys.readouterr().err


@pytest.mark.slow
def test_continuations_stand_side_by_side(monkeypatch, capsys, tmp_path):
    """A converted checkpoint with its tokenizer beside it; more loops than its config has need --max-loops."""
    from elr_jax.train import runner

    config = small_model(RULES["elr"], vocab_size=5, prelude="", coda="")
    params = perturb(parameters.init(jax.random.key(0), config))
    runner.save_params(str(tmp_path), params, config)
    write_tokenizer(tmp_path, bos_token="<s>")
    call(monkeypatch, tmp_path, "--prompt", "a b", "--prompt", "b [a]", "--loops", "1,4", "--max-new-tokens", "5")
    shown = capsys.readouterr().out
    expected = [
        model_answers(params, config, [[0, 2, 3], [0, 3, 4, 2, 4]], loops, checkpoint_codec(tmp_path))
        for loops in (1, 4)
    ]
    assert all(text in shown for column in expected for text in column)
    assert all(text in shown for text in ("1 loop", "4 loops", "tokens/s", "b [a]"))
    with pytest.raises(SystemExit):
        call(monkeypatch, tmp_path, "--tokens", "2", "--loops", "5")
    assert "loops=5 is outside 1…4" in capsys.readouterr().err
    call(monkeypatch, tmp_path, "--tokens", "2", "--loops", "5", "--max-loops", "5", "--max-new-tokens", "2")
    assert "5 loops" in capsys.readouterr().out


def model_answers(params, config, prompts, loops, codec):
    found = command.generate(params, prompts, config=config, loops=loops, max_new_tokens=5, stop_tokens=codec.stop)
    return [codec.decode(row.tokens) for row in found]
