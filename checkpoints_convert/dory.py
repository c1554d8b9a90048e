"""Dory checkpoints into parameters and back: one tensor at a time, checked whole before anything is read or written."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from checkpoints_convert.dory_config import Table, from_json, to_json
from checkpoints_convert.dory_rules import IGNORED, LAYOUTS, slots
from checkpoints_convert.leaves import leaf_paths, load_leaves, match
from checkpoints_convert.output import byte_bar, new_folder
from checkpoints_convert.source import SINGLE, find_source, find_tensors
from checkpoints_convert.tensor_file import DTYPES, Tensors, file_header, in_file_order, write_tensors
from elr_jax.config import ModelConfig, read_json
from elr_jax.errors import ElrError
from elr_jax.parameters import Params, param_specs

HEAD = "lm_head.weight"


def read_config(source: str | Path, *, max_loops: int | None = None, embedding_norm: bool | None = None) -> ModelConfig:
    """The model of a checkpoint, without its tensors; arguments and errors as for `load_dory`."""
    path = find_source(source).config_path
    return from_json(read_json(path), name=str(path), max_loops=max_loops, embedding_norm=embedding_norm)


def load_dory(
    source: str | Path,
    *,
    dtype: Any = None,
    shardings: Any = None,
    max_loops: int | None = None,
    embedding_norm: bool | None = None,
) -> tuple[Params, ModelConfig]:
    """Parameters and config of a Dory checkpoint in any naming and either dialect of config.json.

    Args:
        source: a folder, a .safetensors file with its config.json beside it, or a Hub id (`owner/name@revision`).
        dtype: of all parameters; None keeps each tensor's own.
        shardings: where they go: one `jax.sharding.Sharding`, a `Params` tree of them, or a function of the config that
            gives either; None: the default device.
        max_loops: largest loop count of the model; None: 4, or the file's `n_recurrent_loops` if that is more.
        embedding_norm: whether the embedding's output is normalised (transformers) or not (vLLM); None: not.

    Raises:
        ElrError: a damaged or incomplete checkpoint; all tensors that are unknown, missing, there twice or of the wrong
            shape are named at once, before any is read.
    """
    found = find_source(source)
    config = read_config(found.file or found.folder, max_loops=max_loops, embedding_norm=embedding_norm)
    pairs = match(
        find_tensors(found),
        [slots(config, layout) for layout in LAYOUTS],
        name=str(source),
        ignored=IGNORED,
        tied_head=HEAD if config.tie_embeddings else None,
    )
    places = shardings(config) if callable(shardings) else shardings
    return load_leaves(pairs, param_specs(config), dtype=dtype, shardings=places), config


def save_dory(
    params: Params, config: ModelConfig, out: str | Path, *, dtype: Any = None, base: Table | None = None
) -> Path:
    """Write a folder in the released layout, config.json in both dialects, and return it.

    Args:
        params: the parameters; all of them are on this process's devices.
        config: their model, a Dory.
        out: a folder that is not there yet, or is empty.
        dtype: of all tensors; None keeps each parameter's own.
        base: further keys for config.json, such as those of the checkpoint that this one came from.

    Raises:
        ElrError: a model that is no Dory, a type that the format lacks, a folder that is there already, a full disk.
    """
    by_leaf = dict(zip(leaf_paths(params), jax.tree.leaves(params), strict=True))
    wanted = slots(config, "released")
    tensors = file_tensors(config, {leaf: np.dtype(dtype or array.dtype) for leaf, array in by_leaf.items()})
    types = {kind.name for kind, _ in tensors.values()}
    table = to_json(config, base=base) | {"dtype": types.pop() if len(types) == 1 else "float32"}
    total = _total(tensors)
    with new_folder(out, needed=total + (1 << 20)) as folder, byte_bar("writing", total) as advance:

        def parts(name: str) -> Iterator[np.ndarray]:
            slot = wanted[name]
            array = slot.transform.save(np.asarray(by_leaf[slot.leaf]), slot.spec)
            yield array.astype(tensors[name][0], copy=False)
            advance(array.nbytes)

        (folder / "config.json").write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
        write_tensors(folder / SINGLE, tensors, parts)
    return Path(out)


def file_tensors(config: ModelConfig, dtypes: Mapping[str, np.dtype] | str = "bfloat16") -> Tensors:
    """Type and shape of every tensor of the released layout, in the file's order; one type, or one for each leaf."""
    known = {kind.name: kind for kind in DTYPES.values()}
    tensors = {}
    for name, slot in slots(config, "released").items():
        kind = dtypes if isinstance(dtypes, str) else dtypes[slot.leaf].name
        if kind not in known:
            raise ElrError(f"{name} is {kind}: give dtype=, one of {', '.join(known)}")
        tensors[name] = known[kind], slot.file_shape
    return in_file_order(tensors)


def file_bytes(config: ModelConfig, dtype: str = "bfloat16") -> int:
    """Size of the released layout's file, from its header's arithmetic."""
    return _total(file_tensors(config, dtype))


def _total(tensors: Tensors) -> int:
    header, data = file_header(tensors)
    return len(header) + data
