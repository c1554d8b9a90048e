"""Batches as a pure function of (seed, step): packed token windows through grain's random-access datasets.

Batch `step` of B rows holds the B examples from step·B on of an endless, reshuffled sequence. Nothing is carried
from one batch to the next, so a run resumes from its step alone and any number of processes sees the same global batch.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import grain
import numpy as np
from flax import struct

from elr_jax.config import digest
from elr_jax.errors import ElrError
from elr_jax.train.corpus import open_corpus
from elr_jax.train.token_store import SPLITS, Split, TokenStream
from elr_jax.typing import Array, Float, SegmentIds, Tokens

Example = Mapping[str, np.ndarray]
"""One row of a `Batch`: its field names, each an array of length T."""

ENDLESS = sys.maxsize
"""The length of a dataset without an end, as grain's `repeat()` has it."""


@struct.dataclass
class Batch:
    """B packed rows of T tokens, as numpy arrays until a step moves them to a device."""

    tokens: Tokens
    targets: Tokens
    weights: Float[Array, "B T"]
    """1 where the target is scored, 0 where it begins a document (or, in a task, is no answer)."""
    segment_ids: SegmentIds
    """Number of the token's document within its row, from 1; attention stays inside a document."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """Examples in their order, and what a run must know about them."""

    examples: grain.MapDataset
    """Element i is row i mod B of batch i div B; endless where training."""
    vocab_size: int
    bytes_per_token: float | None
    """Bytes of text per scored token (1 for byte tokens); None where bits per byte mean nothing."""
    num_examples: int | None
    """Examples of one epoch; None where they never come again."""
    settings: dict[str, Any]
    """Everything the examples depend on; saved with a run, which is resumed with the same alone."""

    @property
    def seq_len(self) -> int:
        """Tokens in a row, T."""
        example = self.examples[0]
        assert example is not None, "nothing is filtered, so every index has an example"
        return len(example["tokens"])

    @property
    def fingerprint(self) -> str:
        """Changes when any setting or the data does."""
        return digest(self.settings)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which text, as which tokens, in rows of which length."""

    source: str = "stdlib"
    """`stdlib` (the Python standard library's own source), or a file or directory of .txt, .jsonl, .parquet, ..."""
    validation_source: str | None = None
    """A file or directory to validate on; None takes a fraction of the source's files."""
    validation_fraction: float = 0.07
    """Share of the source's files kept for validation, chosen by a hash of their names."""
    tokenizer: str | None = None
    """A Hugging Face `tokenizers` JSON file; None takes the text's bytes."""
    document_token: str | None = None
    """The tokenizer's token that begins a document; None looks for a usual one (BOS before EOS)."""
    text_field: str = "text"
    """Field of .jsonl records and column of .parquet files that holds the text."""
    seq_len: int = 256
    """Tokens in a row."""
    cache_dir: str = "data_cache"
    """Where tokenised text is kept."""

    def __post_init__(self):
        if self.seq_len < 1:
            raise ElrError(f"data.seq_len={self.seq_len} must be at least 1")
        if not 0 <= self.validation_fraction < 1:
            raise ElrError(f"data.validation_fraction={self.validation_fraction} must be at least 0 and below 1")
        if self.document_token is not None and self.tokenizer is None:
            raise ElrError(
                f"data.document_token={self.document_token!r} needs data.tokenizer: bytes have their own marker"
            )


def open_dataset(config: DataConfig, split: Split, *, seed: int) -> Dataset:
    """One split as examples: training reshuffles every epoch without end, validation is in order and ends.

    Window w holds tokens w·T … w·T+T of the split; its first T are inputs, its last T targets.
    """
    _check_split(split, seed)
    corpus = {name: value for name, value in asdict(config).items() if name != "seq_len"}
    store = open_corpus(**corpus)
    stream = store.streams[split]
    if stream.num_tokens == 0:
        raise ElrError(
            f"data.source={config.source!r} has no {split} files: change "
            f"data.validation_fraction={config.validation_fraction} or give data.validation_source"
        )
    if stream.num_tokens <= config.seq_len:
        raise ElrError(f"data.seq_len={config.seq_len} is too long for the {split} split of {stream.num_tokens} tokens")
    windows = _Windows(stream, config.seq_len)
    examples = grain.MapDataset.source(windows)
    if split == "train":
        # shuffle() reseeds each epoch, but with seed + epoch: the seed goes through grain's hash first, so that
        # neighbouring seeds don't share epochs.
        examples = examples.seed(seed).shuffle().repeat()
    return Dataset(
        examples=examples,
        vocab_size=store.vocab_size,
        bytes_per_token=stream.num_bytes / max(stream.num_tokens - len(stream.starts), 1),
        num_examples=len(windows),
        settings=store.settings | {"split": split, "seq_len": config.seq_len, "seed": seed},
    )


def synthetic_dataset(
    make_example: Callable[[np.random.Generator], Example],
    *,
    vocab_size: int,
    settings: dict[str, Any],
    seed: int,
    split: Split = "train",
    num_examples: int | None = None,
) -> Dataset:
    """Examples drawn by a function, each from its own generator seeded by (seed, split, index).

    With `num_examples` the sequence ends there, without it never. `settings` is whatever else the examples depend on.
    """
    _check_split(split, seed)
    length = ENDLESS if num_examples is None else num_examples
    stream = SPLITS.index(split)
    examples = grain.MapDataset.range(length).map(
        lambda index: make_example(np.random.default_rng([seed, stream, index]))
    )
    return Dataset(
        examples=examples,
        vocab_size=vocab_size,
        bytes_per_token=None,
        num_examples=num_examples,
        settings=settings | {"split": split, "num_examples": num_examples, "seed": seed},
    )


def batches(dataset: Dataset, batch_size: int, *, start: int = 0, rows: Sequence[int] | None = None) -> Iterator[Batch]:
    """Batches start, start+1, … of B rows, read ahead in threads; starting anywhere costs the same.

    Of every batch only `rows` are read: a process's part of it (`Placement.rows`); None reads all. A finite dataset
    ends with its last whole batch: the remaining examples are left out, so that every process sees equally many batches
    of one shape.
    """
    rows = range(batch_size) if rows is None else rows
    if batch_size < 1 or start < 0:
        raise ElrError(f"batch_size={batch_size} must be at least 1, and start={start} at least 0")
    if not rows or not all(0 <= row < batch_size for row in rows):
        raise ElrError(f"rows={list(rows)} must be some of 0..{batch_size - 1}, the rows of a batch")
    whole = len(dataset.examples) // batch_size
    if whole == 0:
        raise ElrError(f"batch_size={batch_size} is more than all {len(dataset.examples)} examples: lower it")
    mine = grain.MapDataset.source(_Rows(dataset.examples, batch_size, whole, rows))
    return _read_ahead(mine.batch(len(rows))[start:])


def _read_ahead(parts: grain.MapDataset) -> Iterator[Batch]:
    iterator = iter(parts.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)))
    try:
        for rows in iterator:
            yield Batch(**rows)
    finally:
        iterator.close()


class _Rows:
    """Some rows of every batch, one after the other, as a grain source."""

    def __init__(self, examples: grain.MapDataset, batch_size: int, batches: int, rows: Sequence[int]):
        self.examples = examples
        self.batch_size = batch_size
        self.batches = batches
        self.rows = rows

    def __len__(self) -> int:
        return self.batches * len(self.rows)

    def __getitem__(self, index: int) -> Example:
        batch, place = divmod(index, len(self.rows))
        example = self.examples[batch * self.batch_size + self.rows[place]]
        assert example is not None, "nothing is filtered, so every index has an example"
        return example


class _Windows:
    """Windows of T+1 tokens as a grain source, in O(T + log documents) each."""

    def __init__(self, stream: TokenStream, seq_len: int):
        self.stream = stream
        self.seq_len = seq_len

    def __len__(self) -> int:
        return (self.stream.num_tokens - 1) // self.seq_len

    def __getitem__(self, index: int) -> Example:
        begin = index * self.seq_len
        end = begin + self.seq_len + 1
        tokens = self.stream.read(begin, end)
        first, last = np.searchsorted(self.stream.starts, [begin + 1, end])
        starts = np.zeros(self.seq_len + 1, bool)
        starts[self.stream.starts[first:last] - begin] = True
        return {
            "tokens": tokens[:-1],
            "targets": tokens[1:],
            "weights": (~starts[1:]).astype(np.float32),
            "segment_ids": 1 + np.cumsum(starts[:-1], dtype=np.int32),
        }


def _check_split(split: Split, seed: int) -> None:
    if split not in SPLITS:
        raise ElrError(f"split={split!r} is unknown: choose one of {', '.join(SPLITS)}")
    if not 0 <= seed < 2**32:
        raise ElrError(f"seed={seed} must lie in 0..2**32-1")
