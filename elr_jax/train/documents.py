"""The texts inside a file: records of JSON lines and Parquet, any other file whole."""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from elr_jax.errors import ElrError

T = TypeVar("T")


def attempt(path: Path, read: Callable[[Path], T]) -> T:
    """What `read` makes of the path; a failing file system raises an `ElrError` that names it."""
    try:
        return read(path)
    except OSError as error:
        raise ElrError(f"{path} can't be read ({error.strerror}): mend its permissions or remove it") from error


def content_hash(path: Path, advance: Callable[[int], None] = lambda size: None) -> str:
    """Sixteen hex digits of a file's bytes; `advance` hears of each block read."""

    def hashed(path: Path) -> str:
        state = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(2**22):
                state.update(block)
                advance(len(block))
        return state.hexdigest()[:16]

    return attempt(path, hashed)


def read_documents(path: Path, text_field: str) -> Iterator[str]:
    """The texts of one file: each record of .jsonl and .parquet, any other file whole; empty records are skipped."""
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    empty = True
    for text in readers.get(path.suffix.lower(), _read_text)(path, text_field):
        if text:
            empty = False
            yield text
    if empty:
        raise ElrError(f"{path} holds no text: remove it")


def _read_text(path: Path, text_field: str) -> Iterator[str]:
    yield _decode(attempt(path, Path.read_bytes), f"{path}")


def _read_jsonl(path: Path, text_field: str) -> Iterator[str]:
    with attempt(path, lambda path: path.open("rb")) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _jsonl_text(_decode(line, f"{path}:{number}"), text_field, f"{path}:{number}")


def _jsonl_text(line: str, text_field: str, place: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ElrError(f"{place} is not JSON ({error.msg}): mend or remove the line") from error
    if not isinstance(record, dict) or not isinstance(record.get(text_field), str):
        raise ElrError(f"{place} has no text in the field {text_field!r}: set text_field to the field that holds it")
    return _encodable(record[text_field], place)


def _read_parquet(path: Path, text_field: str) -> Iterator[str]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ElrError(f"{path} needs the package pyarrow: pip install 'elr-jax[data]'") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            if text_field not in table.schema_arrow.names:
                known = ", ".join(table.schema_arrow.names)
                raise ElrError(f"{path} has no column {text_field!r}: set text_field to one of {known}")
            texts = (text for rows in table.iter_batches(columns=[text_field]) for text in rows.column(0).to_pylist())
            for row, text in enumerate(texts):
                if not isinstance(text, str):
                    raise ElrError(f"{path} row {row} holds no text in {text_field!r}: set text_field or remove it")
                yield text
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        raise ElrError(f"{path} can't be read as parquet: {str(error).splitlines()[0]}") from error


def _decode(raw: bytes, place: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ElrError(f"{place} is not UTF-8 at byte {error.start}: convert or remove it") from error


def _encodable(text: str, place: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ElrError(f"{place} holds half a surrogate pair: mend or remove the line") from error
    return text
