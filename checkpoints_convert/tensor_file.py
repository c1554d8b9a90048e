"""The safetensors format, one tensor at a time: a header of names, types, shapes and offsets, then the bytes.

Tensors are read by plain reads into arrays of their own. A mapped file would count as resident memory next to what is
made of it, and NumPy readers don't know bfloat16.
"""

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from elr_jax.errors import ElrError

DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Tensors = dict[str, tuple[np.dtype, tuple[int, ...]]]
"""Type and shape of tensors by name."""
_MEND = "copy or download it again"
_HEADER_LIMIT = 100_000_000


class Entry(NamedTuple):
    """One tensor of a file: type and shape as the header says, and where its bytes begin."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return DTYPES[self.dtype].itemsize * math.prod(self.shape)

    def read(self, scratch: np.ndarray | None = None) -> np.ndarray:
        """The tensor, in memory of its own or in bytes that are at least as many."""
        raw = np.empty(self.nbytes, np.uint8) if scratch is None else scratch[: self.nbytes]
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset)
            done = 0
            while done < self.nbytes:  # one read gives at most 2 GiB
                count = file.readinto(raw[done:].data)
                if not count:
                    raise ElrError(f"{self.path} ended while it was read: {_MEND}")
                done += count
        return raw.view(DTYPES[self.dtype]).reshape(self.shape)


def read_entries(path: Path) -> dict[str, Entry]:
    """Every tensor of a file by name, its header checked against itself and the file's length.

    Raises:
        ElrError: a truncated or corrupt file, a name twice, or a type other than bfloat16, float16 and float32.
    """
    size = path.stat().st_size
    header, start = _read_header(path, size)
    entries, spans = {}, []
    for name, value in header.items():
        if name != "__metadata__":
            entries[name], stop = _entry(path, name, value, start)
            spans.append((entries[name].offset, stop))
    _check_spans(path, sorted(spans), start, size)
    return entries


def file_header(tensors: Tensors) -> tuple[bytes, int]:
    """The bytes before the first tensor, and how many bytes the tensors take, in the mapping's order."""
    header, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        stop = offset + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offset


def in_file_order(tensors: Tensors) -> Tensors:
    """Widest types first, which keeps every tensor aligned, then by name: the order the safetensors library writes."""
    return dict(sorted(tensors.items(), key=lambda item: (-item[1][0].itemsize, item[0])))


def write_tensors(
    path: Path,
    tensors: Tensors,
    parts: Callable[[str], Iterable[np.ndarray]],
) -> None:
    """Write a file tensor by tensor; `parts(name)` gives its leading rows, the following ones, and so on."""
    tensors = in_file_order(tensors)
    with path.open("wb") as file:
        file.write(file_header(tensors)[0])
        for name, (dtype, shape) in tensors.items():
            rows = 0
            for part in parts(name):
                assert part.dtype == dtype and part.shape[1:] == shape[1:], f"{name}: {part.dtype}{part.shape}"
                rows += len(part)
                # a transposed view would be written in the order of its memory
                file.write(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
            assert rows == shape[0], f"{name}: {rows} rows of {shape[0]}"


def _read_header(path: Path, size: int) -> tuple[dict[str, Any], int]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER_LIMIT):
            raise ElrError(f"{path} ({size} bytes) is truncated or no safetensors file: {_MEND}")
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ElrError(f"{path} has a damaged header ({error}): {_MEND}") from error
    if not isinstance(header, dict):
        raise ElrError(f"{path} has a damaged header (no table of tensors): {_MEND}")
    return header, 8 + length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return table


def _entry(path: Path, name: str, value: Any, start: int) -> tuple[Entry, int]:
    """A tensor of the header, and the offset just after it."""
    try:
        dtype, shape, (begin, stop) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        sound = isinstance(dtype, str) and all(type(number) is int and number >= 0 for number in (*shape, begin, stop))
    except (TypeError, KeyError, ValueError):
        sound, dtype, shape, begin, stop = False, "", (), 0, 0
    if not sound:
        raise ElrError(f"{path} has a damaged header ({name!r} is {json.dumps(value)[:80]}): {_MEND}")
    if dtype not in DTYPES:
        raise ElrError(f"{path} holds {name!r} as {dtype}: convert it to one of {', '.join(DTYPES)}")
    if stop - begin != DTYPES[dtype].itemsize * math.prod(shape):
        told = f"{name!r} of {dtype}{list(shape)} takes {stop - begin} bytes"
        raise ElrError(f"{path} has a damaged header ({told}): {_MEND}")
    return Entry(path, dtype, shape, start + begin), start + stop


def _check_spans(path: Path, spans: list[tuple[int, int]], start: int, size: int) -> None:
    """The tensors lie end to end and fill the file: a gap or an overlap is a damaged header."""
    for begin, stop in spans:
        if begin != start:
            raise ElrError(f"{path} has a damaged header (bytes {start} to {begin} belong to none or two): {_MEND}")
        start = stop
    if size != start:
        told = f"truncated: {start - size} bytes are missing" if size < start else f"{size - start} bytes too long"
        raise ElrError(f"{path} is {told}: {_MEND}")
