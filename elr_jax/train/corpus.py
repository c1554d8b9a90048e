"""From files to tokens: which files, which documents in them, which ids, and the cached store of the result.

Files are split whole into train and validation by a hash of their names, so no file is in both and adding one moves
no other. Every document begins with a marker token; nothing else is added to its text.
"""

import hashlib
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from elr_jax.config import digest
from elr_jax.errors import ElrError
from elr_jax.train.documents import attempt, content_hash, read_documents
from elr_jax.train.token_store import Document, Split, TokenStore, open_store, write_store
from elr_jax.train.tokenizer import Tokenizer, byte_tokenizer, file_tokenizer

Advance = Callable[[int], None]

FORMAT = 1
"""Goes into every fingerprint; raise it when the same files would give other tokens."""

# Not the library's own prose: installed packages, tests, and modules written by generators.
_NOT_STDLIB = {
    *("site-packages", "dist-packages", "__pycache__"),
    *("test", "tests", "idle_test", "lib2to3", "pydoc_data", "encodings"),
}


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file of the corpus; its name is its path below the source, with forward slashes."""

    name: str
    path: Path
    split: Split


def open_corpus(
    source: str,
    *,
    cache_dir: str,
    validation_source: str | None = None,
    validation_fraction: float = 0.07,
    tokenizer: str | None = None,
    document_token: str | None = None,
    text_field: str = "text",
) -> TokenStore:
    """The token store of a corpus, made in `cache_dir` on first use and found by its fingerprint afterwards.

    The fingerprint covers the files' names, splits and contents, the tokenizer and the settings. Files that can't be
    read, aren't UTF-8 or hold no text raise an `ElrError` that names them.
    """
    excluded = tuple(Path(path) for path in (cache_dir, tokenizer) if path is not None)
    files = corpus_files(source, validation_source, validation_fraction, excluded)
    encoder = byte_tokenizer() if tokenizer is None else file_tokenizer(Path(tokenizer), document_token)
    total = sum(attempt(file.path, lambda path: path.stat().st_size) for file in files)
    with _progress("Reading", total) as advance:
        content = digest([[file.name, file.split, content_hash(file.path, advance)] for file in files])
    settings = {
        "format": FORMAT,
        "files": content,
        "num_files": len(files),
        "tokenizer": encoder.identity,
        "marker": encoder.marker,
        "text_field": text_field,
        "validation_fraction": validation_fraction if validation_source is None else None,
    }
    folder = Path(cache_dir, digest(settings))
    if not folder.exists():
        with _progress("Tokenising", total) as advance:
            documents = _tokenise(files, encoder, text_field, advance)
            write_store(folder, documents, vocab_size=encoder.vocab_size, settings=settings)
    return open_store(folder)


def corpus_files(
    source: str, validation_source: str | None, validation_fraction: float, excluded: tuple[Path, ...] = ()
) -> list[SourceFile]:
    """All files of a source with their splits, by name; a validation source of its own takes the place of the hash."""

    def listed(of: str) -> dict[str, Path]:
        return stdlib_files() if of == "stdlib" else source_files(Path(of), excluded)

    if validation_source is None:
        return [
            SourceFile(name=name, path=path, split=split_of(name, validation_fraction))
            for name, path in listed(source).items()
        ]
    train, validation = listed(source), listed(validation_source)
    if shared := {path.resolve() for path in train.values()} & {path.resolve() for path in validation.values()}:
        raise ElrError(
            f"{min(shared)} is in both source={source} and validation_source={validation_source}: separate them"
        )
    return [SourceFile(name=name, path=path, split="train") for name, path in train.items()] + [
        SourceFile(name=name, path=path, split="validation") for name, path in validation.items()
    ]


def split_of(name: str, validation_fraction: float) -> Split:
    """The split of a file, from nothing but its name: validation where the hash falls below the fraction."""
    position = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
    return "validation" if position < validation_fraction else "train"


def stdlib_files() -> dict[str, Path]:
    """The Python standard library's own source files, by name: no tests, no packages, no generated tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    return {name: path for name, path in sorted(found.items()) if _is_stdlib(name) and _is_text(path)}


def source_files(source: Path, excluded: tuple[Path, ...] = ()) -> dict[str, Path]:
    """One file, or every file below a directory except hidden ones, `__pycache__` and what is excluded, by name."""
    if source.is_file():
        return {source.name: source}
    if not source.is_dir():
        raise ElrError(f"source={source} is no file or directory: give a path, or 'stdlib'")
    skipped = {path.resolve() for path in excluded}
    found = {}
    for path in source.rglob("*"):
        parts = path.relative_to(source).parts
        unwanted = any(part.startswith(".") or part == "__pycache__" for part in parts)
        # A dangling link is kept, so that reading it fails with its name.
        if not unwanted and not path.is_dir() and not skipped & {path.resolve(), *path.resolve().parents}:
            found["/".join(parts)] = path
    if not found:
        raise ElrError(f"source={source} holds no files: put .txt, .jsonl, .parquet or other text files there")
    return dict(sorted(found.items()))


def _tokenise(files: list[SourceFile], tokenizer: Tokenizer, text_field: str, advance: Advance) -> Iterator[Document]:
    documents: Iterator[tuple[Split, str]] = (
        (file.split, text) for file in files for text in read_documents(file.path, text_field)
    )
    marker = np.array([tokenizer.marker], np.int64)
    for group in _grouped(documents, 2**20):
        for (split, text), ids in zip(group, tokenizer.encode([text for _, text in group]), strict=True):
            num_bytes = len(text.encode())
            advance(num_bytes)
            yield split, np.concatenate([marker, ids]), num_bytes


def _grouped(documents: Iterable[tuple[Split, str]], characters: int) -> Iterator[list[tuple[Split, str]]]:
    """Enough documents at a time to keep the tokenizer's threads busy."""
    group, size = [], 0
    for document in documents:
        group.append(document)
        size += len(document[1])
        if size >= characters:
            yield group
            group, size = [], 0
    if group:
        yield group


def _is_stdlib(name: str) -> bool:
    parts = name.split("/")
    return _NOT_STDLIB.isdisjoint(parts) and not parts[0].startswith(("config-", "_sysconfigdata"))


def _is_text(path: Path) -> bool:
    try:
        return bool(path.read_bytes().decode())
    except (OSError, UnicodeDecodeError):
        return False


@contextmanager
def _progress(title: str, total: int) -> Iterator[Advance]:
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total)
        yield lambda size: progress.advance(task, size)
