"""What PyTorch makes of a checkpoint, and its own rounding noise: measured here, or read from a file made elsewhere."""

import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from checkpoints_convert import pytorch, reference
from elr_jax.cache import CacheMode
from elr_jax.config import ModelConfig, from_dict, to_dict
from elr_jax.errors import ElrError

MODES: tuple[CacheMode | None, ...] = (None, "per_loop", "last_loop")


class Case(NamedTuple):
    """One way to run the prompt: loop count, cache mode (None: no cache) and how many tokens go into each call."""

    loops: int
    mode: CacheMode | None
    calls: str

    @property
    def key(self) -> str:
        """The name of its arrays in a file."""
        return f"{self.loops} loops/{self.mode or 'no cache'}/{self.calls}"


class Difference(NamedTuple):
    """How far two sets of logits are apart: largest of |a − b| and of KL over positions, share of equal top tokens."""

    max_abs: float
    kl: float
    top1: float


def chunkings(length: int) -> dict[str, list[int]]:
    """One call, a few chunks of which the last is short, token by token."""
    chunk = max(1, length // 3 - 1)
    chunks = [chunk] * (length // chunk) + [length % chunk] * (length % chunk > 0)
    return {"one call": [length], "chunks": chunks, "token by token": [1] * length}


def cases(loops: Sequence[int], length: int) -> list[Case]:
    """Every loop count with every cache mode and chunking; without a cache there is one call."""
    cached = [(mode, calls) for mode in MODES[1:] for calls in chunkings(length)]
    return [Case(count, *way) for count in loops for way in [(None, "one call"), *cached]]


def difference(actual: Float[np.ndarray, "T V"], expected: Float[np.ndarray, "T V"]) -> Difference:
    """The difference between two models' logits; a NaN anywhere makes it NaN."""
    a, b = (logits.astype(np.float64) for logits in (actual, expected))
    log_p, log_q = log_softmax(b), log_softmax(a)
    kl = np.sum(np.exp(log_p) * (log_p - log_q), axis=-1)
    top1 = np.mean(a.argmax(axis=-1) == b.argmax(axis=-1))
    return Difference(float(np.abs(a - b).max()), float(kl.max()), float(top1))


def log_softmax(x: Float[np.ndarray, "T V"]) -> Float[np.ndarray, "T V"]:
    """x − log Σ exp(x)."""
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


@dataclass(frozen=True, kw_only=True)
class Golden:
    """PyTorch's answers to one prompt.

    `logits` and their `noise` go by `Case.key`, `rungs` (the hidden states between the layers at the largest loop
    count, then its logits) and their `rung_noise` by name. Noise is the difference to the same pass in float64.
    """

    config: ModelConfig
    dtype: str
    loops: tuple[int, ...]
    tokens: Int[np.ndarray, "T"]
    logits: dict[str, Float[np.ndarray, "T V"]]
    noise: dict[str, Difference]
    rungs: dict[str, Float[np.ndarray, "T _"]]
    rung_noise: dict[str, float]

    def cases(self) -> list[Case]:
        """The cases its logits are of."""
        return cases(self.loops, len(self.tokens))


def measure(
    files: Sequence[Path], tokens: Int[np.ndarray, "T"], loops: Sequence[int], *, config: ModelConfig, dtype: str
) -> Golden:
    """Load a checkpoint in PyTorch and run the prompt every way, there and in float64."""
    model = pytorch.load(files, config, dtype)
    tensors = pytorch.released_tensors(model)
    exact = partial(reference.forward, tensors, tokens, config=config)
    ways, logits, noise, rung_noise = chunkings(len(tokens)), {}, {}, {}
    ladder = pytorch.rungs(model, tokens, max(loops))
    for count in loops:
        whole = exact(count)  # in exact arithmetic `per_loop` and a single call are the pass without a cache
        if count == max(loops):
            rung_noise = {name: float(np.abs(rung - whole.rungs[name]).max()) for name, rung in ladder.items()}
        for case in cases([count], len(tokens)):
            calls = ways[case.calls]
            split = case.mode == "last_loop" and len(calls) > 1
            truth = exact(count, mode="last_loop", calls=calls) if split else whole
            logits[case.key] = pytorch.logits(model, tokens, count, mode=case.mode, calls=calls)
            noise[case.key] = difference(logits[case.key], truth.logits)
    last = Case(max(loops), None, "one call").key
    return Golden(
        config=config,
        dtype=dtype,
        loops=tuple(loops),
        tokens=tokens,
        logits=logits,
        noise=noise,
        rungs={**ladder, "logits": logits[last]},
        rung_noise={**rung_noise, "logits": noise[last].max_abs},
    )


def write(golden: Golden, path: Path) -> None:
    """Keep PyTorch's answers for machines without it, as one compressed .npz."""
    about = {
        "config": to_dict(golden.config),
        "dtype": golden.dtype,
        "loops": golden.loops,
        "noise": golden.noise,
        "rung_noise": golden.rung_noise,
    }
    arrays: dict[str, Any] = {f"logits/{name}": array for name, array in golden.logits.items()}
    arrays |= {f"rungs/{name}": array for name, array in golden.rungs.items()}
    unfinished = path.with_name(f".{path.name}.partial.npz")
    try:
        np.savez_compressed(unfinished, about=np.array(json.dumps(about)), tokens=golden.tokens, **arrays)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read(path: Path) -> Golden:
    """The answers that `write` kept."""
    try:
        with np.load(path) as file:
            arrays = dict(file)
        about = json.loads(str(arrays.pop("about")))
        return Golden(
            config=from_dict(ModelConfig, about["config"]),
            dtype=about["dtype"],
            loops=tuple(about["loops"]),
            tokens=arrays["tokens"],
            logits=_under("logits/", arrays),
            noise={name: Difference(*numbers) for name, numbers in about["noise"].items()},
            rungs=_under("rungs/", arrays),
            rung_noise=about["rung_noise"],
        )
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise ElrError(f"{path} is no golden file ({error}): make one with verify --write-golden") from error


def _under(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
