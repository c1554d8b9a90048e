"""Random Dory checkpoints of any size, for tests and benchmarks: what a trained one looks like, without its weights.

Every scale vector is random, so that a scale that is read for another or not at all shows. Residual rates stay below
0.3: a random model of 36 blocks above about 0.4 is chaotic, and no two programs agree on its logits.
"""

import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from checkpoints_convert.dory_config import Dialect, to_json
from checkpoints_convert.dory_rules import Layout, slots
from checkpoints_convert.leaves import LINEAR, Slot
from checkpoints_convert.tensor_file import DTYPES, write_tensors
from elr_jax.config import ModelConfig, SphereConfig
from elr_jax.errors import ElrError

DType = Literal["float32", "float16", "bfloat16"]
FILE_DTYPES = {dtype.name: dtype for dtype in DTYPES.values()}
LOGIT_STD = 3.0
"""About what the logits' standard deviation is: that of trained models."""
_CHUNK = 1 << 24


def write_random_dory(
    out: str | Path,
    config: ModelConfig,
    *,
    seed: int = 0,
    dtype: DType = "float32",
    layout: Layout = "released",
    dialect: Dialect = "both",
    unit_embedding: bool = True,
) -> Path:
    """Write a folder with `config.json` and `model.safetensors`, in memory for one tensor, and return it.

    The values depend on the seed and the leaf alone: the same in every layout, rounded to `dtype`.

    Args:
        out: the folder, made if absent.
        config: a Dory model.
        seed: of all values.
        dtype: of all tensors.
        layout: the tensors' naming.
        dialect: the keys of `config.json`.
        unit_embedding: whether the embedding's rows have norm 1, as training leaves them; else 0.5 to 1.5.

    Raises:
        ElrError: a model that is no Dory, or layers that the naming can't tell.
    """
    text = json.dumps(to_json(config, dialect=dialect), indent=2) + "\n"
    wanted = slots(config, layout)
    if not wanted:
        raise ElrError(
            f"layers {config.prelude!r} {config.core!r} {config.coda!r} are no pairs of attention and MLP, as "
            f"layout {layout!r} has them: use layout 'released'"
        )
    folder, target = Path(out), FILE_DTYPES[dtype]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(text, encoding="utf-8")

    def parts(name: str) -> Iterator[np.ndarray]:
        slot = wanted[name]
        rng = np.random.default_rng([seed, zlib.crc32(slot.leaf.encode())])
        return (part.astype(target) for part in _values(slot, config, rng, unit_embedding))

    tensors = {name: (target, slot.file_shape) for name, slot in wanted.items()}
    write_tensors(folder / "model.safetensors", tensors, parts)
    return folder


def _values(slot: Slot, config: ModelConfig, rng: np.random.Generator, unit_embedding: bool) -> Iterator[np.ndarray]:
    """A tensor as on file, float32, in parts of whole rows."""
    if len(slot.file_shape) == 1:
        yield _scale(slot, config, rng)
        return
    rows, width = slot.file_shape
    # of width D on file is the last axis, but for the products that end in a hidden state (torch has [out, in])
    along = 0 if slot.transform is LINEAR and slot.spec.axes[-1] == "embed" else 1
    step = rows if along == 0 else max(1, _CHUNK // width)
    for begin in range(0, rows, step):
        part = rng.standard_normal((min(step, rows - begin), width), np.float32)
        part /= np.linalg.norm(part, axis=along, keepdims=True)
        if slot.leaf == "embedding" and not unit_embedding:
            part *= rng.uniform(0.5, 1.5, (len(part), 1)).astype(np.float32)
        yield part


def _scale(slot: Slot, config: ModelConfig, rng: np.random.Generator) -> np.ndarray:
    """A scale vector: random about its usual value, the rates of either sign and effectively 0.02 to 0.3."""
    sphere = config.sphere or SphereConfig()
    (size,) = slot.file_shape
    if slot.leaf.endswith("/rate"):
        rate = rng.uniform(0.02, 0.3, size) * rng.choice([-1.0, 1.0], size)
        return (rate * (sphere.init_std / sphere.rate_init)).astype(np.float32)
    # the product of unit vectors of width D has standard deviation D^-½
    logit = LOGIT_STD * math.sqrt(config.d_model) * sphere.init_std
    usual = {"logit_scale": logit, "up_scale": 1.0}.get(slot.leaf.rsplit("/", 1)[-1], sphere.init_std)
    if slot.leaf.endswith("mixer/gate_scale"):
        usual = 1.0
    return (usual * rng.normal(1.0, 0.2, size)).astype(np.float32)
