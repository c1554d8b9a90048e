"""Batches: pure in (seed, step), the same for any number of processes, and masked where documents meet."""

import dataclasses
import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elr_jax.config import from_dict, to_dict
from elr_jax.errors import ElrError
from elr_jax.train.data import Batch, DataConfig, batches, open_dataset, synthetic_dataset

FIELDS = [field.name for field in dataclasses.fields(Batch)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Documents of 1 to 40 bytes, no two alike."""
    source = tmp_path_factory.mktemp("data") / "source"
    source.mkdir()
    random = np.random.default_rng(0)
    for number in range(60):
        (source / f"{number:02}.txt").write_text(f"{number}" + "".join(random.choice(list("abcdefg"), 1 + number % 38)))
    return source


@pytest.fixture(scope="module")
def config(folder):
    return DataConfig(source=str(folder), cache_dir=str(folder.parent / "cache"), seq_len=8, validation_fraction=0.2)


@pytest.fixture(scope="module")
def train(config):
    return open_dataset(config, "train", seed=3)


@pytest.fixture(scope="module")
def validation(config):
    return open_dataset(config, "validation", seed=3)


def taken(dataset, batch_size, steps, **options):
    return list(itertools.islice(batches(dataset, batch_size, **options), steps))


def assert_same(left, right):
    assert len(left) == len(right) > 0
    for a, b in zip(left, right, strict=True):
        for field in FIELDS:
            np.testing.assert_array_equal(getattr(a, field), getattr(b, field))


def chosen(batch, places):
    return Batch(**{field: getattr(batch, field)[places] for field in FIELDS})


def rows(found):
    return [row.tobytes() for batch in found for row in batch.tokens]


# Order


def test_resuming_at_a_step_is_the_same_as_never_stopping(train):
    assert_same(taken(train, 4, 30)[23:], taken(train, 4, 7, start=23))


def test_a_far_step_is_reached_at_once(train):
    assert len(taken(train, 4, 2, start=10**12)) == 2


def test_batches_depend_on_the_seed_and_nothing_else(config, train):
    assert_same(taken(train, 4, 10), taken(open_dataset(config, "train", seed=3), 4, 10))
    other = taken(open_dataset(config, "train", seed=4), 4, 10)
    assert rows(taken(train, 4, 10)) != rows(other)


@pytest.mark.parametrize("parts", [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [1], [2], [3]], [[0, 2, 3], [1]]])
@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_rows_read_apart_are_those_of_the_global_batch(request, split, parts, start):
    dataset = request.getfixturevalue(split)
    whole = taken(dataset, 4, 8, start=start)
    for rows in parts:
        assert_same(taken(dataset, 4, 8, start=start, rows=rows), [chosen(batch, rows) for batch in whole])


def test_every_epoch_holds_every_window_in_a_new_order(train):
    n = train.num_examples
    epochs = [[train.examples[epoch * n + i]["tokens"].tobytes() for i in range(n)] for epoch in range(3)]
    windows = [train.examples[i]["tokens"].tobytes() for i in range(n)]
    assert sorted(epochs[1]) == sorted(epochs[2]) == sorted(windows)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_neighbouring_seeds_share_no_epoch(config):
    def epoch(seed, number):
        dataset = open_dataset(config, "train", seed=seed)
        return [dataset.examples[number * dataset.num_examples + i]["tokens"].tobytes() for i in range(20)]

    assert epoch(0, 1) != epoch(1, 0)


def test_validation_is_in_order_and_ends_with_its_last_whole_batch(validation, config):
    found = taken(validation, 4, 10**6)
    assert len(found) == validation.num_examples // 4
    assert rows(found) == [validation.examples[i]["tokens"].tobytes() for i in range(4 * len(found))]
    assert taken(validation, 4, 1, start=len(found)) == []


# Content


def test_windows_cover_the_stream_and_overlap_by_one_target(validation):
    examples = list(validation.examples)
    for one, two in itertools.pairwise(examples):
        assert one["targets"][-1] == two["tokens"][0]
    for example in examples:
        np.testing.assert_array_equal(example["tokens"][1:], example["targets"][:-1])


def test_weights_and_segments_of_a_hand_made_corpus(config, tmp_path):
    for name, text in [("1", "abcd"), ("2", "f"), ("3", "ghijklmno")]:
        (tmp_path / f"{name}.txt").write_text(text)
    config = dataclasses.replace(config, validation_source=str(tmp_path), seq_len=6)
    # The stream is .abcd.f.ghijklmno, its two windows begin with the marker and with f.
    first, second = open_dataset(config, "validation", seed=0).examples
    a, b, c, d, f, g, h, i, j, k = b"abcdfghijk"
    assert first["tokens"].tolist() == [256, a, b, c, d, 256]
    assert first["targets"].tolist() == [a, b, c, d, 256, f]
    assert first["weights"].tolist() == [1, 1, 1, 1, 0, 1]
    assert first["segment_ids"].tolist() == [1, 1, 1, 1, 1, 2]
    assert second["tokens"].tolist() == [f, 256, g, h, i, j]
    assert second["targets"].tolist() == [256, g, h, i, j, k]
    assert second["weights"].tolist() == [0, 1, 1, 1, 1, 1]
    assert second["segment_ids"].tolist() == [1, 2, 2, 2, 2, 2]


@settings(deadline=None, max_examples=20)
@given(seq_len=st.integers(1, 200))
def test_every_target_but_markers_is_scored(config, seq_len):
    dataset = open_dataset(dataclasses.replace(config, seq_len=seq_len), "validation", seed=0)
    tokens = np.concatenate([example["targets"] for example in dataset.examples])
    weights = np.concatenate([example["weights"] for example in dataset.examples])
    np.testing.assert_array_equal(weights, tokens != 256)
    for example in dataset.examples:
        # A document number grows by one exactly where a later token is a marker.
        np.testing.assert_array_equal(np.diff(example["segment_ids"]), example["tokens"][1:] == 256)
        assert example["segment_ids"][0] == 1
    assert dataset.bytes_per_token == 1.0


def test_bytes_per_token_counts_text_over_scored_tokens(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "[UNK]": 1, "over": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("over grün")
    (tmp_path / "b.txt").write_text("over")
    dataset = open_dataset(
        DataConfig(
            source=str(tmp_path),
            tokenizer=str(tmp_path / "tokenizer.json"),
            cache_dir=str(tmp_path / "cache"),
            seq_len=2,
            validation_fraction=0,
        ),
        "train",
        seed=0,
    )
    assert dataset.bytes_per_token == pytest.approx((10 + 4) / 3)
    assert dataset.vocab_size == 3


def test_batches_are_numpy_of_the_documented_types(train):
    (batch,) = taken(train, 4, 1)
    kinds = {"tokens": np.int32, "targets": np.int32, "weights": np.float32, "segment_ids": np.int32}
    for field, dtype in kinds.items():
        array = getattr(batch, field)
        assert isinstance(array, np.ndarray)
        assert (array.shape, array.dtype) == ((4, 8), dtype)


def test_importing_touches_no_device_and_no_optional_package():
    code = """if True:
        import sys
        import elr_jax.train.data
        from jax._src import xla_bridge
        assert not xla_bridge._backends
        assert not {"torch", "tokenizers", "pyarrow"} & sys.modules.keys()
    """
    subprocess.run([sys.executable, "-c", code], check=True)


# Fingerprint


def test_fingerprint_changes_with_each_setting(config, folder, tmp_path):
    changes = [
        {},
        {"seq_len": 9},
        {"text_field": "body"},
        {"validation_fraction": 0.3},
        {"validation_source": str(tmp_path)},
    ]
    (tmp_path / "v.txt").write_text("something to validate on")
    found = [open_dataset(dataclasses.replace(config, **change), "train", seed=3).fingerprint for change in changes]
    found.append(open_dataset(config, "train", seed=4).fingerprint)
    found.append(open_dataset(config, "validation", seed=3).fingerprint)
    assert len(set(found)) == len(found)


def test_config_survives_json(config):
    assert from_dict(DataConfig, to_dict(config)) == config


# Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 4, "rows": []}, r"rows=\[\] must be some of 0\.\.3"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 4, "start": -1}, "start=-1"),
        ({"batch_size": 4, "rows": [2, 4]}, r"rows=\[2, 4\] must be some of 0\.\.3"),
    ],
)
def test_bad_batches_are_refused_before_the_first(train, options, message):
    with pytest.raises(ElrError, match=message):
        batches(train, **options)


def test_a_batch_larger_than_a_finite_split_is_refused(validation):
    with pytest.raises(ElrError, match=f"batch_size=4096 is more than all {validation.num_examples} examples"):
        batches(validation, 4096)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"seq_len": 0}, "seq_len=0"), ({"validation_fraction": 1.0}, "fraction=1.0"), ({"document_token": "x"}, "'x'")],
)
def test_bad_configs_are_refused(change, message):
    with pytest.raises(ElrError, match=message):
        DataConfig(**change)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_bad_seeds_are_refused(config, seed):
    with pytest.raises(ElrError, match=f"seed={seed}"):
        open_dataset(config, "train", seed=seed)


def test_an_unknown_split_is_refused(config):
    with pytest.raises(ElrError, match="split='valid'"):
        open_dataset(config, "valid", seed=0)


def test_a_row_longer_than_the_split_is_refused(config):
    tokens = open_dataset(dataclasses.replace(config, seq_len=1), "validation", seed=0).num_examples + 1
    assert open_dataset(dataclasses.replace(config, seq_len=tokens - 1), "validation", seed=0).num_examples == 1
    with pytest.raises(ElrError, match=f"seq_len={tokens} is too long for the validation split of {tokens} tokens"):
        open_dataset(dataclasses.replace(config, seq_len=tokens), "validation", seed=0)


def test_an_empty_split_is_refused(config):
    with pytest.raises(ElrError, match="has no validation files"):
        open_dataset(dataclasses.replace(config, validation_fraction=0.0), "validation", seed=0)


# Drawn examples


def drawn(rng):
    tokens = rng.integers(0, 50, 9, dtype=np.int32)
    weights = np.ones(8, np.float32)
    return {"tokens": tokens[:-1], "targets": tokens[1:], "weights": weights, "segment_ids": np.ones(8, np.int32)}


def test_drawn_examples_are_pure_and_never_repeat():
    dataset = synthetic_dataset(drawn, vocab_size=50, settings={"task": "any"}, seed=1)
    assert_same(taken(dataset, 4, 6)[4:], taken(dataset, 4, 2, start=4))
    assert len(set(rows(taken(dataset, 4, 50)))) == 200
    assert dataset.num_examples is None


def test_drawn_splits_and_seeds_share_no_example():
    options = {"vocab_size": 50, "settings": {}}
    datasets = [
        synthetic_dataset(drawn, seed=1, **options),
        synthetic_dataset(drawn, seed=2, **options),
        synthetic_dataset(drawn, seed=1, split="validation", num_examples=200, **options),
    ]
    found = [row for dataset in datasets for row in rows(taken(dataset, 4, 50))]
    assert len(set(found)) == len(found) == 600
    assert len({dataset.fingerprint for dataset in datasets}) == 3


def test_a_finite_drawn_set_ends():
    dataset = synthetic_dataset(drawn, vocab_size=50, settings={}, seed=1, split="validation", num_examples=10)
    assert len(list(batches(dataset, 4))) == 2
