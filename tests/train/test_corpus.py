"""Files to tokens: what is read, how it is split, and that the store on disk is whole and faithful."""

import json
import random

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from elr_jax.errors import ElrError
from elr_jax.train import corpus, token_store
from elr_jax.train.corpus import corpus_files, open_corpus, source_files, split_of, stdlib_files
from elr_jax.train.token_store import open_store, token_dtype, write_store


@pytest.fixture
def folder(tmp_path):
    """A source of three texts, all of them training text at validation_fraction=0."""
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "a.txt").write_text("abc")
    (source / "b.md").write_text("grün")
    (source / "sub" / "c.py").write_text("x = 1\n")
    return source


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def train_tokens(source, cache, **options):
    store = open_corpus(str(source), cache_dir=str(cache), **({"validation_fraction": 0.0} | options))
    stream = store.streams["train"]
    return stream.read(0, stream.num_tokens).tolist()


def words(path, vocabulary, *, truncate=False):
    """A tokenizer file of whole words between spaces."""
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if truncate:
        tokenizer.enable_truncation(2)
        tokenizer.enable_padding(length=2)
    tokenizer.save(str(path))
    return str(path)


def store_folders(cache):
    return sorted(path.name for path in cache.iterdir()) if cache.exists() else []


# Files and splits


def test_stdlib_is_the_librarys_own_source():
    files = stdlib_files()
    assert {"argparse.py", "json/decoder.py"} <= files.keys()
    assert list(files) == sorted(files)
    assert not any({"site-packages", "test", "tests", "__pycache__"} & set(name.split("/")) for name in files)
    assert all(path.read_bytes().decode() for path in files.values())


def test_stdlib_splits_share_no_file_and_validation_is_a_twentieth_or_so():
    files = corpus_files("stdlib", None, 0.07)
    split = {which: {file.path for file in files if file.split == which} for which in token_store.SPLITS}
    assert not split["train"] & split["validation"]
    size = {which: sum(path.stat().st_size for path in paths) for which, paths in split.items()}
    assert 0.03 < size["validation"] / sum(size.values()) < 0.11


def test_split_depends_on_the_name_alone_and_grows_with_the_fraction():
    names = [f"part/{number}.txt" for number in range(2000)]
    small, large = ({name for name in names if split_of(name, fraction) == "validation"} for fraction in (0.05, 0.1))
    assert small < large
    assert 0.03 < len(small) / len(names) < 0.07


def test_files_are_listed_by_name_without_hidden_ones(folder):
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("no")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "c.pyc").write_bytes(b"\xff")
    assert list(source_files(folder)) == ["a.txt", "b.md", "sub/c.py"]


def test_the_cache_and_the_tokenizer_below_the_source_are_no_text(folder):
    tokenizer = words(folder / "tokenizer.json", {"[UNK]": 0, "<s>": 1, "abc": 2})
    first = open_corpus(str(folder), cache_dir=str(folder / "cache"), tokenizer=tokenizer)
    assert open_corpus(str(folder), cache_dir=str(folder / "cache"), tokenizer=tokenizer).settings == first.settings
    assert first.settings["num_files"] == 3


def test_validation_source_takes_the_place_of_the_hash(folder, tmp_path, cache):
    other = tmp_path / "other.txt"
    other.write_text("held out")
    files = corpus_files(str(folder), str(other), 0.07)
    assert [(file.name, file.split) for file in files if file.split == "validation"] == [("other.txt", "validation")]
    assert len(files) == 4
    with pytest.raises(ElrError, match=r"b\.md is in both"):
        open_corpus(str(folder), validation_source=str(folder / "b.md"), cache_dir=str(cache))


# Tokens


def test_byte_tokens_are_the_text_between_markers(folder, cache):
    expected = [256, *b"abc", 256, *"grün".encode(), 256, *b"x = 1\n"]
    assert train_tokens(folder, cache) == expected
    stream = open_corpus(str(folder), cache_dir=str(cache), validation_fraction=0.0).streams["train"]
    assert stream.starts.tolist() == [0, 4, 10]
    assert stream.num_bytes == stream.num_tokens - 3 == 14


def test_jsonl_and_parquet_records_are_documents(tmp_path, cache):
    import pyarrow
    import pyarrow.parquet

    source = tmp_path / "source"
    source.mkdir()
    (source / "a.jsonl").write_text('{"body": "one"}\n\n{"body": "", "n": 1}\n{"body": "zwölf"}\n')
    pyarrow.parquet.write_table(pyarrow.table({"n": [1, 2], "body": ["three", "four"]}), source / "b.parquet")
    expected = [token for text in ("one", "zwölf", "three", "four") for token in (256, *text.encode())]
    assert train_tokens(source, cache, text_field="body") == expected


def test_token_ids_beyond_16_bits_come_back(tmp_path, cache):
    vocabulary = {"[UNK]": 0, "<s>": 1} | {f"w{number}": number for number in range(2, 70_000)}
    tokenizer = words(tmp_path / "tokenizer.json", vocabulary)
    ids = [*random.Random(0).sample(range(2, 70_000), 500), 65_535, 65_536, 69_999]
    (tmp_path / "text.txt").write_text(" ".join(f"w{number}" for number in ids))
    assert train_tokens(tmp_path / "text.txt", cache, tokenizer=tokenizer) == [1, *ids]
    (shard,) = cache.glob("*/train-*.bin")
    assert shard.stat().st_size == 4 * (len(ids) + 1)


def test_a_small_vocabulary_takes_two_bytes_a_token(folder, cache):
    tokens = train_tokens(folder, cache)
    (shard,) = cache.glob("*/train-*.bin")
    assert shard.stat().st_size == 2 * len(tokens)
    assert token_dtype(65_536) == np.uint16
    assert token_dtype(65_537) == np.uint32


@pytest.mark.parametrize(
    ("vocabulary", "document_token", "marker"),
    [
        ({"[UNK]": 0, "</s>": 1, "<s>": 2}, None, 2),
        ({"[UNK]": 0, "<|endoftext|>": 1}, None, 1),
        ({"[UNK]": 0, "<s>": 1, "<doc>": 2}, "<doc>", 2),
    ],
)
def test_marker_is_the_named_token_or_a_usual_one(tmp_path, cache, vocabulary, document_token, marker):
    tokenizer = words(tmp_path / "tokenizer.json", vocabulary)
    (tmp_path / "text.txt").write_text("some words")
    tokens = train_tokens(tmp_path / "text.txt", cache, tokenizer=tokenizer, document_token=document_token)
    assert tokens == [marker, 0, 0]


def test_marker_must_exist(tmp_path, cache):
    tokenizer = words(tmp_path / "tokenizer.json", {"[UNK]": 0})
    (tmp_path / "text.txt").write_text("some words")
    with pytest.raises(ElrError, match="document_token"):
        train_tokens(tmp_path / "text.txt", cache, tokenizer=tokenizer)
    with pytest.raises(ElrError, match="'<doc>' is not in"):
        train_tokens(tmp_path / "text.txt", cache, tokenizer=tokenizer, document_token="<doc>")


def test_truncation_and_padding_saved_in_a_tokenizer_are_ignored(tmp_path, cache):
    tokenizer = words(tmp_path / "tokenizer.json", {"[UNK]": 0, "<s>": 1, "a": 2}, truncate=True)
    for number, text in enumerate(("a a a", "a")):
        (tmp_path / f"{number}.txt").write_text(text)
    store = open_corpus(str(tmp_path), cache_dir=str(cache), tokenizer=tokenizer, validation_fraction=0.0)
    assert store.streams["train"].read(0, 6).tolist() == [1, 2, 2, 2, 1, 2]
    assert store.streams["train"].num_tokens == 6


def test_added_tokens_count_to_the_vocabulary(tmp_path, cache):
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("a")
    store = open_corpus(
        str(tmp_path / "text.txt"),
        cache_dir=str(cache),
        tokenizer=str(tmp_path / "tokenizer.json"),
        validation_fraction=0,
    )
    assert store.vocab_size == 2


# The store


def documents(*texts):
    return [("train", np.array(ids), len(ids) - 1) for ids in texts]


def test_reads_across_shards(tmp_path):
    tokens = np.arange(23)
    write_store(tmp_path / "s", documents(tokens[:9], tokens[9:23]), vocab_size=300, settings={}, shard_tokens=4)
    stream = open_store(tmp_path / "s").streams["train"]
    assert len(stream.shards) == 6
    for begin in range(23):
        for end in range(begin + 1, 24):
            assert stream.read(begin, end).tolist() == list(range(begin, end))
    with pytest.raises(IndexError):
        stream.read(20, 24)


@pytest.mark.parametrize("token", [-1, 257, 70_000])
def test_token_outside_the_vocabulary_is_refused(tmp_path, token):
    with pytest.raises(ElrError, match=f"token id {token} is outside the vocabulary of 257"):
        write_store(tmp_path / "s", documents([256, 1], [256, token]), vocab_size=257, settings={})
    assert store_folders(tmp_path) == []


def test_vocabulary_beyond_int32_is_refused():
    with pytest.raises(ElrError, match=f"vocab_size={2**31 + 1}"):
        token_dtype(2**31 + 1)


def test_an_interrupted_run_leaves_nothing(folder, cache, monkeypatch):
    def interrupted(path, text_field):
        if path.name == "c.py":
            raise KeyboardInterrupt
        yield path.read_text()

    with monkeypatch.context() as patch:
        patch.setattr(corpus, "read_documents", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_tokens(folder, cache)
    assert store_folders(cache) == []
    assert train_tokens(folder, cache)[-6:] == list(b"x = 1\n")


def test_leftovers_of_a_killed_run_are_not_used(folder, cache):
    train_tokens(folder, cache)
    (name,) = store_folders(cache)
    (cache / name).rename(cache / f".{name}.killed")
    (cache / f".{name}.killed" / "train-00000.bin").write_bytes(b"half")
    assert train_tokens(folder, cache)[:4] == [256, *b"abc"]


def test_a_finished_store_is_used_again(folder, cache, monkeypatch):
    first = train_tokens(folder, cache)
    monkeypatch.setattr(corpus, "write_store", None)
    assert train_tokens(folder, cache) == first


def test_a_store_made_meanwhile_by_another_process_is_used(folder, cache, monkeypatch):
    def second(*args, **options):
        write_store(*args, **options)
        write_store(args[0], documents([256, 1]), **options)

    monkeypatch.setattr(corpus, "write_store", second)
    assert train_tokens(folder, cache)[:4] == [256, *b"abc"]
    assert len(store_folders(cache)) == 1


def test_a_full_disk_is_one_line_and_leaves_nothing(folder, cache, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(token_store.np, "save", full)
    with pytest.raises(ElrError, match="can't be written \\(No space left on device\\)"):
        train_tokens(folder, cache)
    assert store_folders(cache) == []


@pytest.mark.parametrize("damage", ["shard", "index", "starts"])
def test_a_damaged_store_is_named(folder, cache, damage):
    train_tokens(folder, cache)
    (name,) = store_folders(cache)
    if damage == "shard":
        (cache / name / "train-00000.bin").write_bytes(b"shorter.")
    elif damage == "index":
        (cache / name / "index.json").write_text("{")
    else:
        (cache / name / "train-starts.npy").unlink()
    with pytest.raises(ElrError, match=f"{name}.*delete"):
        train_tokens(folder, cache)


def test_fingerprint_follows_content_names_and_settings_but_not_place(folder, tmp_path, cache):
    def fingerprints(source, **options):
        return json.dumps(open_corpus(str(source), cache_dir=str(cache), **options).settings)

    vocabulary = {"[UNK]": 0, "<s>": 1, "<doc>": 2}
    first = words(tmp_path / "first.json", vocabulary)
    second = words(tmp_path / "second.json", vocabulary | {"abc": 3})
    seen = [fingerprints(folder)]
    folder.rename(tmp_path / "moved")
    folder = tmp_path / "moved"
    assert fingerprints(folder) == seen[0]
    seen += [
        fingerprints(folder, text_field="body"),
        fingerprints(folder, validation_fraction=0.3),
        fingerprints(folder, validation_source=str(tmp_path / "first.json")),
        fingerprints(folder, tokenizer=first),
        fingerprints(folder, tokenizer=first, document_token="<doc>"),
        fingerprints(folder, tokenizer=second),
    ]
    (folder / "a.txt").write_text("abd")
    seen.append(fingerprints(folder))
    (folder / "a.txt").rename(folder / "z.txt")
    seen.append(fingerprints(folder))
    assert len(set(seen)) == len(seen) == len(store_folders(cache))


# Bad input


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "empty.txt holds no text"),
        ("latin.txt", "grün".encode("latin-1"), "latin.txt is not UTF-8 at byte 2"),
        ("bad.jsonl", b'{"text": "a"}\n{"text": \n', "bad.jsonl:2 is not JSON"),
        ("field.jsonl", b'{"text": "a"}\n{"body": "b"}\n', "field.jsonl:2 has no text in the field 'text'"),
        ("number.jsonl", b'{"text": 3}\n', "number.jsonl:1 has no text in the field 'text'"),
        ("list.jsonl", b"[1]\n", "list.jsonl:1 has no text"),
        ("latin.jsonl", '{"text": "a"}\n{"text": "ü"}'.encode("latin-1"), "latin.jsonl:2 is not UTF-8"),
        ("half.jsonl", b'{"text": "\\ud800"}\n', "half.jsonl:1 holds half a surrogate"),
        ("empty.jsonl", b'{"text": ""}\n', "empty.jsonl holds no text"),
        ("bad.parquet", b"PAR1 or not", "bad.parquet can't be read as parquet"),
    ],
)
def test_a_bad_file_is_named(folder, cache, name, content, message):
    (folder / name).write_bytes(content)
    with pytest.raises(ElrError) as error:
        train_tokens(folder, cache)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert store_folders(cache) == []


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"body": ["a"], "n": [1]}, "no column 'text': set text_field to one of body, n"),
        ({"text": ["a", None]}, "row 1 holds no text in 'text'"),
        ({"text": [3]}, "row 0 holds no text in 'text'"),
    ],
)
def test_a_bad_parquet_column_is_named(folder, cache, columns, message):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "t.parquet")
    with pytest.raises(ElrError, match=f"t.parquet.*{message}"):
        train_tokens(folder, cache)


def test_an_unreadable_file_is_named(folder, cache):
    (folder / "gone.txt").symlink_to(folder / "nowhere")
    with pytest.raises(ElrError, match=r"gone\.txt can't be read \(No such file"):
        train_tokens(folder, cache)


def test_a_missing_or_empty_source_is_named(tmp_path, cache):
    with pytest.raises(ElrError, match="nowhere is no file or directory"):
        train_tokens(tmp_path / "nowhere", cache)
    (tmp_path / "bare").mkdir()
    with pytest.raises(ElrError, match="bare holds no files"):
        train_tokens(tmp_path / "bare", cache)


def test_a_bad_tokenizer_file_is_named(folder, tmp_path, cache):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ElrError, match=r"tokenizer\.json is no tokenizers JSON file"):
        train_tokens(folder, cache, tokenizer=str(tmp_path / "tokenizer.json"))
    with pytest.raises(ElrError, match=r"nowhere\.json can't be read"):
        train_tokens(folder, cache, tokenizer=str(tmp_path / "nowhere.json"))


@pytest.mark.parametrize("package", ["tokenizers", "pyarrow"])
def test_a_missing_package_names_its_extra(folder, tmp_path, cache, monkeypatch, package):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    (folder / "t.parquet").write_bytes(b"any")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ElrError, match=rf"{package}: pip install 'elr-jax\[data\]'"):
        train_tokens(folder, cache, tokenizer=str(tmp_path / "tokenizer.json") if package == "tokenizers" else None)
