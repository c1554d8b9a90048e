"""The safetensors format, held against its own library, and every way a file can be damaged."""

import json

import ml_dtypes
import numpy as np
import pytest

from checkpoints_convert.tensor_file import DTYPES, file_header, read_entries, write_tensors
from elr_jax.errors import ElrError

numpy_library = pytest.importorskip("safetensors.numpy")


def sample() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "wide": rng.standard_normal((5, 7), np.float32),
        "turned": rng.standard_normal((4, 6), np.float32).T,
        "half": rng.standard_normal((3, 2)).astype(np.float16),
        "brain": rng.standard_normal(11).astype(ml_dtypes.bfloat16),
    }


def write(path, arrays):
    write_tensors(path, {name: (array.dtype, array.shape) for name, array in arrays.items()}, lambda n: [arrays[n]])
    return path


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "model.safetensors", sample())


def same(actual, expected):
    return actual.dtype == expected.dtype and actual.tobytes() == np.ascontiguousarray(expected).tobytes()


def test_what_is_written_is_what_the_library_writes(tmp_path, file):
    arrays = {name: np.ascontiguousarray(array) for name, array in sample().items()}
    numpy_library.save_file(arrays, tmp_path / "theirs")
    assert file.read_bytes() == (tmp_path / "theirs").read_bytes()


def test_what_the_library_writes_is_read(tmp_path):
    arrays = {name: np.ascontiguousarray(array) for name, array in sample().items()}
    numpy_library.save_file(arrays, tmp_path / "theirs", metadata={"format": "pt"})
    entries = read_entries(tmp_path / "theirs")
    assert entries.keys() == arrays.keys()
    for name, array in arrays.items():
        assert entries[name].shape == array.shape and entries[name].nbytes == array.nbytes
        assert same(entries[name].read(), array)


def test_a_tensor_may_be_written_in_parts(tmp_path, file):
    arrays = sample()
    types = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    write_tensors(tmp_path / "parts", types, lambda name: np.array_split(arrays[name], 3))
    assert (tmp_path / "parts").read_bytes() == file.read_bytes()


def test_every_truncation_is_found(file):
    whole = file.read_bytes()
    for length in [*range(0, 40), *range(40, len(whole), 7), len(whole) - 1]:
        file.write_bytes(whole[:length])
        with pytest.raises(ElrError, match="truncated") as told:
            read_entries(file)
        assert "\n" not in str(told.value) and str(file) in str(told.value)
    file.write_bytes(whole + b"\0")
    with pytest.raises(ElrError, match="1 bytes too long"):
        read_entries(file)


def test_a_file_that_shrinks_while_it_is_read(file):
    entries = read_entries(file)
    file.write_bytes(file.read_bytes()[:-1])
    last = max(entries.values(), key=lambda entry: entry.offset)
    with pytest.raises(ElrError, match="ended while it was read"):
        last.read()


def rewrite(file, change):
    """Replace the header by a changed one of any length."""
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    text = change(json.loads(whole[8 : 8 + length]))
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])


def move(header, name, by):
    header[name]["data_offsets"] = [end + by for end in header[name]["data_offsets"]]
    return header


DAMAGE = {
    "not JSON": (lambda h: b"{", "damaged header"),
    "not UTF-8": (lambda h: b"{\xff}", "damaged header"),
    "deeply nested": (lambda h: b"[" * 100_000, "damaged header"),
    "a list": (lambda h: [1], "no table"),
    "twice": (lambda h: json.dumps(h)[:-1].encode() + b', "brain": 1}', "'brain' is there twice"),
    "no offsets": (lambda h: h | {"brain": {"dtype": "F32", "shape": [1]}}, "'brain' is"),
    "a number": (lambda h: h | {"brain": 3}, "'brain' is 3"),
    "negative": (lambda h: h | {"brain": h["brain"] | {"shape": [-11]}}, "'brain' is"),
    "fractional": (lambda h: h | {"brain": h["brain"] | {"shape": [11.0]}}, "'brain' is"),
    "other shape": (lambda h: h | {"brain": h["brain"] | {"shape": [12]}}, r"'brain' of BF16\[12\] takes 22 bytes"),
    "other type": (lambda h: h | {"brain": h["brain"] | {"dtype": "F8_E4M3"}}, "'brain' as F8_E4M3"),
    "unhashable type": (lambda h: h | {"brain": h["brain"] | {"dtype": []}}, "'brain'"),
    "overlap": (lambda h: move(h, "brain", -2), "belong to none or two"),
    "gap": (lambda h: {name: value for name, value in h.items() if name != "brain"}, "belong to none or two"),
    "beyond": (lambda h: move(h, "brain", 2), "belong to none or two"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_header_is_named(file, kind):
    change, words = DAMAGE[kind]
    rewrite(file, change)
    with pytest.raises(ElrError, match=words) as told:
        read_entries(file)
    assert "\n" not in str(told.value)


def test_any_flipped_header_byte_is_an_error_or_another_sound_header(file):
    whole = file.read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little")
    for position in range(length):
        flipped = bytearray(whole)
        flipped[position] ^= 0x11
        file.write_bytes(flipped)
        try:
            entries = read_entries(file)
        except ElrError:
            continue
        assert sum(entry.nbytes for entry in entries.values()) == len(whole) - length


def test_the_header_keeps_tensors_aligned():
    header, data = file_header({"a": (DTYPES["F32"], (3,)), "b": (DTYPES["BF16"], (1,))})
    assert len(header) % 8 == 0 and data == 14
