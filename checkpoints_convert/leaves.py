"""Leaves of the parameters and tensors of a file: what one is to the other, which belongs where, and reading them."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from checkpoints_convert.output import byte_bar
from checkpoints_convert.source import listed
from checkpoints_convert.tensor_file import Entry
from elr_jax.config import ModelConfig
from elr_jax.errors import ElrError
from elr_jax.parameters import Params, param_specs
from elr_jax.params import ParamSpec


class Transform(NamedTuple):
    """What a tensor is to its leaf: the shape on file, and the way in and out."""

    file_shape: Callable[[ParamSpec], tuple[int, ...]]
    load: Callable[[np.ndarray, ParamSpec, np.ndarray], None]
    """Fills the leaf, the last argument, whose type may be another."""
    save: Callable[[np.ndarray, ParamSpec], np.ndarray]


def _flat(spec: ParamSpec) -> tuple[int, int]:
    """Inputs and outputs of a linear map, each as one number."""
    return math.prod(spec.shape[: spec.inputs]), math.prod(spec.shape[spec.inputs :])


def turn(matrix: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Fill `out` with the transposed matrix, in blocks that fit a cache: many times as fast as NumPy's own way."""
    high, wide = 256, 32
    for row in range(0, matrix.shape[0], high):
        for column in range(0, matrix.shape[1], wide):
            out[column : column + wide, row : row + high] = matrix[row : row + high, column : column + wide].T
    return out


def _fill(tensor: np.ndarray, spec: ParamSpec, leaf: np.ndarray) -> None:
    leaf[...] = tensor.reshape(spec.shape)


def _fill_turned(tensor: np.ndarray, spec: ParamSpec, leaf: np.ndarray) -> None:
    turn(tensor, leaf.reshape(_flat(spec)))


def _turned(leaf: np.ndarray, spec: ParamSpec) -> np.ndarray:
    return turn(leaf.reshape(_flat(spec)), np.empty(_flat(spec)[::-1], leaf.dtype))


AS_IS = Transform(lambda spec: spec.shape, _fill, lambda leaf, spec: leaf)
FLAT = Transform(lambda spec: (math.prod(spec.shape),), _fill, lambda leaf, spec: leaf.reshape(-1))
LINEAR = Transform(lambda spec: _flat(spec)[::-1], _fill_turned, _turned)
"""torch keeps a linear map as [out, in]."""


class Slot(NamedTuple):
    """A leaf of one model: its path in `Params`, its declaration and what its tensor is to it."""

    leaf: str
    spec: ParamSpec
    transform: Transform

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Shape of the tensor on file."""
        return self.transform.file_shape(self.spec)


def leaf_specs(config: ModelConfig) -> dict[str, ParamSpec]:
    """Every declaration by its path, such as `core/3/mixer/query`."""
    return dict(zip(leaf_paths(param_specs(config)), jax.tree.leaves(param_specs(config)), strict=True))


def leaf_paths(params: Params) -> list[str]:
    """The path of every leaf, in the tree's order."""
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(params)]


def match(
    entries: Mapping[str, Entry],
    tables: Sequence[Mapping[str, Slot]],
    *,
    name: str,
    ignored: re.Pattern[str],
    tied_head: str | None,
) -> list[tuple[Slot, Entry]]:
    """Every leaf's slot with its tensor, by the tables of all namings. `ignored` tensors follow from the config.

    The head of a tied model (`tied_head`; None: it is not tied) may be there if it is the embedding, bit for bit.

    Raises:
        ElrError: names every tensor that is unknown, missing, there twice or of another shape than the config's.
    """
    known = {tensor: slot for table in tables for tensor, slot in table.items()}
    found: dict[str, list[str]] = {}
    for tensor in entries:
        if tensor in known:
            found.setdefault(known[tensor].leaf, []).append(tensor)
    usual = max(tables, key=lambda table: len(table.keys() & entries.keys()))
    kinds = {
        "missing": [tensor for tensor, slot in usual.items() if slot.leaf not in found],
        "unknown": [
            tensor for tensor in entries if tensor not in known and not ignored.search(tensor) and tensor != tied_head
        ],
        "there twice": [" = ".join(sorted(same)) for same in found.values() if len(same) > 1],
        "of another shape": [
            f"{tensor} {list(entries[tensor].shape)}, expected {list(slot.file_shape)}"
            for tensor, slot in known.items()
            if tensor in entries and entries[tensor].shape != slot.file_shape
        ],
    }
    head = entries.get(tied_head or "")
    if head is not None and not all(same_bytes(head, entries[tensor]) for tensor in found.get("embedding", [])):
        kinds["unlike the embedding, though the config ties them"] = [tied_head or ""]
    told = [f"{len(items)} {kind}: {listed(items)}" for kind, items in kinds.items() if items]
    if told:
        raise ElrError(
            f"the tensors of {name} do not fit its config.json: {'; '.join(told)}: mend the one or the other"
        )
    return [(known[tensor], entries[tensor]) for (tensor,) in found.values()]


def load_leaves(pairs: Sequence[tuple[Slot, Entry]], specs: Params, *, dtype: Any, shardings: Any) -> Params:
    """The parameters, one tensor at a time; `dtype` and `shardings` as for `load_dory`."""
    places = dict(zip(leaf_paths(specs), _placements(shardings, specs), strict=True))
    leaves, scratch = {}, np.empty(0, np.uint8)
    with byte_bar("reading", sum(entry.nbytes for _, entry in pairs)) as advance:
        # the largest first: a tensor on its way is in memory twice, and most others are not there yet
        for slot, entry in sorted(pairs, key=lambda pair: -pair[1].nbytes):
            if not entry.nbytes <= scratch.nbytes <= 2 * entry.nbytes:
                scratch = np.empty(entry.nbytes, np.uint8)
            leaves[slot.leaf] = _load(slot, entry.read(scratch), dtype, places[slot.leaf])
            advance(entry.nbytes)
    return jax.tree.unflatten(jax.tree.structure(specs), [leaves[path] for path in places])


def same_bytes(one: Entry, other: Entry) -> bool:
    """Whether two tensors are equal bit for bit."""
    return one[1:3] == other[1:3] and bool(
        np.array_equal(one.read().reshape(-1).view(np.uint8), other.read().reshape(-1).view(np.uint8))
    )


def _placements(shardings: Any, specs: Params) -> list[Any]:
    """Where each leaf goes, in the tree's order."""
    count = len(jax.tree.leaves(specs))
    if shardings is None or isinstance(shardings, jax.sharding.Sharding):
        return [shardings] * count
    if jax.tree.structure(shardings) != jax.tree.structure(specs):
        raise ElrError("shardings has another structure than the parameters: give one Sharding, or one for each leaf")
    return jax.tree.leaves(shardings)


def _load(slot: Slot, tensor: np.ndarray, dtype: Any, placement: Any) -> jax.Array:
    leaf = _aligned(slot.spec.shape, np.dtype(dtype or tensor.dtype))
    slot.transform.load(tensor, slot.spec, leaf)
    return jax.device_put(leaf, placement).block_until_ready()


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Fresh memory from a multiple of 64 on: a CPU device takes it as it is, where it would copy any other."""
    size = dtype.itemsize * math.prod(shape)
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)
