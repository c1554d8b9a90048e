"""Text to token ids: the bytes themselves, or any Hugging Face `tokenizers` file."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from elr_jax.errors import ElrError
from elr_jax.train.documents import content_hash

BYTE_VOCAB = 257
"""The 256 bytes and the document marker, 256."""

MARKERS = (
    *("<|begin_of_text|>", "<|startoftext|>", "<bos>", "<s>", "[BOS]"),
    *("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "[EOS]"),
)
"""Tokens that begin a document, tried in this order when none is named."""


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """Text to token ids without the marker, the marker's id, and what identifies both."""

    vocab_size: int
    marker: int
    identity: str
    encode: Callable[[list[str]], list[Int[np.ndarray, "N"]]]


def byte_tokenizer() -> Tokenizer:
    """Tokens 0..255 are the bytes of the UTF-8 text, 256 marks a document."""
    return Tokenizer(
        vocab_size=BYTE_VOCAB,
        marker=256,
        identity="bytes",
        encode=lambda texts: [np.frombuffer(text.encode(), np.uint8) for text in texts],
    )


def file_tokenizer(path: Path, document_token: str | None) -> Tokenizer:
    """A Hugging Face `tokenizers` JSON file; `document_token`, or the first of `MARKERS` it knows, marks a document."""
    identity = content_hash(path)
    loaded = open_file(path)
    vocabulary = loaded.get_vocab(with_added_tokens=True)

    def encode(texts: list[str]) -> list[Int[np.ndarray, "N"]]:
        try:
            encodings = loaded.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # as above
            raise ElrError(f"tokenizer={path} can't encode this text: {error}") from error
        return [np.array(encoding.ids, np.int64) for encoding in encodings]

    return Tokenizer(
        vocab_size=max(vocabulary.values(), default=0) + 1,
        marker=_marker(vocabulary, path, document_token),
        identity=identity,
        encode=encode,
    )


def open_file(path: Path) -> Any:
    """The `tokenizers.Tokenizer` in a file."""
    try:
        import tokenizers
    except ImportError as error:
        raise ElrError(f"tokenizer={path} needs the package tokenizers: pip install 'elr-jax[data]'") from error
    try:
        loaded = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise ElrError(f"tokenizer={path} is no tokenizers JSON file: {error}") from error
    # A saved truncation or padding would silently cut or fill documents.
    loaded.no_truncation()
    loaded.no_padding()
    return loaded


def _marker(vocabulary: dict[str, int], path: Path, document_token: str | None) -> int:
    for token in MARKERS if document_token is None else (document_token,):
        if token in vocabulary:
            return vocabulary[token]
    if document_token is not None:
        raise ElrError(f"document_token={document_token!r} is not in {path}: name a token of its vocabulary")
    raise ElrError(f"{path} has none of {', '.join(MARKERS)}: name one that begins a document by document_token")
