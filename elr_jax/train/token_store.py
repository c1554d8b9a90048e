"""Memory-mapped token files: one stream of documents per split, written once and read at any position.

A store is a folder of raw shards (`train-00000.bin`, …), the documents' first positions (`train-starts.npy`) and
`index.json`. It is written beside its final place and renamed, so a folder with that name is always whole;
a killed process leaves at most a hidden folder, which may be deleted.
"""

import json
import tempfile
from array import array
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from jaxtyping import Int, Int32

from elr_jax.errors import ElrError

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
SHARD_TOKENS = 2**27

Document = tuple[Split, Int[np.ndarray, "N"], int]
"""Its split, its token ids (the document marker first) and the bytes of its text."""


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 for up to 65,536 token ids, uint32 beyond; batches are int32, so 2³¹ ids are the most."""
    if not 1 <= vocab_size <= 2**31:
        raise ElrError(f"vocab_size={vocab_size} does not fit int32 token ids: use a tokenizer of at most 2**31 tokens")
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenStream:
    """The documents of one split, end to end."""

    shards: tuple[np.ndarray, ...]
    shard_tokens: int
    """Tokens of every shard but the last."""
    starts: Int[np.ndarray, "documents"]
    """Position of each document's marker, ascending."""
    num_tokens: int
    """All tokens, markers included."""
    num_bytes: int
    """UTF-8 bytes of the text, which markers do not count to."""

    def read(self, begin: int, end: int) -> Int32[np.ndarray, "N"]:
        """Tokens begin to end-1."""
        if not 0 <= begin < end <= self.num_tokens:
            raise IndexError(f"tokens {begin}..{end} of a stream of {self.num_tokens}")
        pieces = []
        while begin < end:
            shard, offset = divmod(begin, self.shard_tokens)
            pieces.append(self.shards[shard][offset : offset + end - begin])
            begin += len(pieces[-1])
        return np.concatenate(pieces).astype(np.int32)


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenStore:
    """Both splits of a corpus and the settings they were made with."""

    settings: dict[str, Any]
    vocab_size: int
    streams: dict[Split, TokenStream]


def write_store(
    folder: Path,
    documents: Iterable[Document],
    *,
    vocab_size: int,
    settings: dict[str, Any],
    shard_tokens: int = SHARD_TOKENS,
) -> None:
    """Write all documents into a new store; an interrupted or failed call leaves no folder of that name."""
    dtype = token_dtype(vocab_size)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
            unfinished = Path(temporary, "store")
            unfinished.mkdir()
            with ExitStack() as stack:
                writers = {
                    split: stack.enter_context(_StreamWriter(unfinished, split, vocab_size, shard_tokens))
                    for split in SPLITS
                }
                for split, ids, num_bytes in documents:
                    writers[split].append(ids, num_bytes)
                sizes = {split: writer.finish() for split, writer in writers.items()}
            index = {"settings": settings, "vocab_size": vocab_size, "shard_tokens": shard_tokens, "splits": sizes}
            (unfinished / "index.json").write_text(json.dumps(index | {"dtype": dtype.str}, indent=1))
            _publish(unfinished, folder)
    except OSError as error:
        raise ElrError(f"{folder} can't be written ({error.strerror}): free space or change cache_dir") from error


def open_store(folder: Path) -> TokenStore:
    """Map a finished store; a missing or shortened file raises an `ElrError` that names it."""
    try:
        index = json.loads((folder / "index.json").read_text())
        dtype = np.dtype(index["dtype"])
        streams: dict[Split, TokenStream] = {
            split: _open_stream(folder, split, dtype, index["shard_tokens"], index["splits"][split]) for split in SPLITS
        }
        return TokenStore(settings=index["settings"], vocab_size=index["vocab_size"], streams=streams)
    except ElrError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise ElrError(f"{folder} is damaged ({error}): delete it, and it will be made again") from error


class _StreamWriter:
    """Appends documents to one split's shards."""

    def __init__(self, folder: Path, split: Split, vocab_size: int, shard_tokens: int):
        self.folder = folder
        self.split: Split = split
        self.vocab_size = vocab_size
        self.shard_tokens = shard_tokens
        self.dtype = token_dtype(vocab_size)
        self.starts = array("q")
        self.num_tokens = 0
        self.num_bytes = 0
        self.shard: BinaryIO | None = None

    def __enter__(self) -> "_StreamWriter":
        return self

    def __exit__(self, *_: object) -> None:
        if self.shard is not None:
            self.shard.close()

    def append(self, ids: Int[np.ndarray, "N"], num_bytes: int) -> None:
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            bad = ids.min() if ids.min() < 0 else ids.max()
            raise ElrError(f"token id {bad} is outside the vocabulary of {self.vocab_size}: mend the tokenizer file")
        self.starts.append(self.num_tokens)
        self.num_bytes += num_bytes
        while len(ids):
            shard, offset = divmod(self.num_tokens, self.shard_tokens)
            if offset == 0:
                self.__exit__()
                self.shard = open(_shard_path(self.folder, self.split, shard), "wb")  # noqa: SIM115 (closed by __exit__)
            assert self.shard is not None
            piece, ids = np.split(ids, [self.shard_tokens - offset])
            self.shard.write(piece.astype(self.dtype).tobytes())
            self.num_tokens += len(piece)

    def finish(self) -> dict[str, int]:
        np.save(_starts_path(self.folder, self.split), np.asarray(self.starts, np.int64))
        return {"num_tokens": self.num_tokens, "num_bytes": self.num_bytes}


def _publish(unfinished: Path, folder: Path) -> None:
    try:
        unfinished.rename(folder)
    except OSError:
        # Another process made the same store first: its content is the same.
        if not (folder / "index.json").exists():
            raise


def _open_stream(folder: Path, split: Split, dtype: np.dtype, shard_tokens: int, sizes: dict[str, int]) -> TokenStream:
    shards = []
    for begin in range(0, sizes["num_tokens"], shard_tokens):
        path = _shard_path(folder, split, begin // shard_tokens)
        length = min(shard_tokens, sizes["num_tokens"] - begin)
        if path.stat().st_size != length * dtype.itemsize:
            raise ElrError(f"{path} is {path.stat().st_size} bytes, not {length * dtype.itemsize}: delete {folder}")
        shards.append(np.memmap(path, dtype, "r"))
    starts = np.load(_starts_path(folder, split), mmap_mode="r")
    return TokenStream(shards=tuple(shards), shard_tokens=shard_tokens, starts=starts, **sizes)


def _shard_path(folder: Path, split: Split, shard: int) -> Path:
    return folder / f"{split}-{shard:05d}.bin"


def _starts_path(folder: Path, split: Split) -> Path:
    return folder / f"{split}-starts.npy"
