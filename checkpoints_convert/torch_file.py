"""Tensors of a file that torch has saved; read without unpickling anything but tensors, by torch, which is optional."""

import importlib
import math
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from checkpoints_convert.source import Source
from checkpoints_convert.tensor_file import DTYPES
from elr_jax.errors import ElrError

NAMES = ("pytorch_model.bin", "model.pt")
_KINDS = {f"torch.{dtype.name}": name for name, dtype in DTYPES.items()}


class Held(NamedTuple):
    """One tensor, read as a `tensor_file.Entry` is."""

    tensor: Any
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return DTYPES[self.dtype].itemsize * math.prod(self.shape)

    def read(self, scratch: np.ndarray | None = None) -> np.ndarray:
        """The tensor's values; `scratch` is not needed."""
        tensor = self.tensor.detach().contiguous()
        if self.dtype == "BF16":
            return tensor.view(importlib.import_module("torch").int16).numpy().view(ml_dtypes.bfloat16)
        return tensor.numpy()


def find_torch_file(source: Source) -> Path | None:
    """The torch file of a checkpoint that has no safetensors."""
    if source.file is not None or any(source.folder.glob("*.safetensors")):
        return None
    return next((source.folder / name for name in NAMES if (source.folder / name).is_file()), None)


def read_torch(path: Path) -> dict[str, Held]:
    """Every tensor of a file by name.

    Raises:
        ElrError: torch is not installed, the file is damaged or holds more than tensors, or a type is none of
            bfloat16, float16 and float32.
    """
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise ElrError(f"{path} was saved by torch, which reads it: pip install 'elr-jax[parity]'") from error
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # pickle's, zip's, torch's and the system's own
        # torch's own words on a pickle that is more than tensors advise to run it
        more = isinstance(error, pickle.UnpicklingError)
        words = "it holds other objects" if more else " ".join(str(error).split())[:160]
        raise ElrError(f"{path} can't be read as tensors alone ({type(error).__name__}: {words})") from error
    if not isinstance(tensors, dict) or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
        raise ElrError(f"{path} holds something else than tensors by name: give a state dict")
    unknown = [f"{name} ({tensor.dtype})" for name, tensor in tensors.items() if str(tensor.dtype) not in _KINDS]
    if unknown:
        raise ElrError(f"{path} holds {unknown[0]}: convert it to one of {', '.join(DTYPES)}")
    return {name: Held(tensor, _KINDS[str(tensor.dtype)], tuple(tensor.shape)) for name, tensor in tensors.items()}
