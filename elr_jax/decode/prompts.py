"""What a caller asks for, checked and brought to the form the model wants: real tokens first, one value a request."""

from collections.abc import Sequence
from operator import index
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from elr_jax.config import ModelConfig
from elr_jax.decode.sampling import Sampling
from elr_jax.decode.state import Requests
from elr_jax.errors import ElrError

Prompts = Sequence[Sequence[int]] | Int[np.ndarray, "B T"]


class Batch(NamedTuple):
    """Prompts with their real tokens first."""

    tokens: Int[np.ndarray, "B T"]
    positions: Int[np.ndarray, "B T"]
    lengths: Int[np.ndarray, "B"]


def pack_prompts(prompts: Prompts, *, vocab_size: int, attention_mask: Any = None, positions: Any = None) -> Batch:
    """Prompts, given as lists or as an array padded on either side, as one array with the padding behind.

    `attention_mask` [B,T] marks the real tokens of an array (None: all). `positions`, in the form of the prompts, count
    from each row's first real token by default.

    Raises:
        ElrError: no or empty prompts, unknown tokens, a mask or positions that do not fit.
    """
    if isinstance(prompts, str) or any(np.ndim(row) != 1 for row in prompts):
        raise ElrError(f"prompts={str(prompts)[:40]} are not lists of tokens: give one list, or row, for each request")
    if isinstance(prompts, Sequence):
        if attention_mask is not None:
            raise ElrError("attention_mask belongs to an array of prompts: leave it out beside lists of tokens")
        tokens, mask = _pad_right(prompts)
        positions = None if positions is None else _like_prompts(positions, prompts)
    else:
        tokens = np.asarray(prompts)
        mask = np.ones(tokens.shape, bool) if attention_mask is None else np.asarray(attention_mask).astype(bool)
        positions = None if positions is None else np.asarray(positions)
    for name, value in (("attention_mask", mask), ("positions", positions)):
        if tokens.ndim != 2 or (value is not None and value.shape != tokens.shape):
            shape = None if value is None else value.shape
            raise ElrError(f"{name} of shape {shape} beside prompts of {tokens.shape}: both must be [B,T]")
    if not tokens.shape[0]:
        raise ElrError("prompts=[] holds no request: pass at least one prompt")
    if tokens.dtype.kind not in "iu":
        raise ElrError(f"prompts of type {tokens.dtype} are not tokens: give integers")
    batch = _compact(tokens, mask, positions)
    _check(batch, vocab_size)
    return Batch(*(x.astype(np.int32) for x in batch))


def _pad_right(rows: Sequence[Sequence[int]]) -> tuple[Int[np.ndarray, "B T"], Bool[np.ndarray, "B T"]]:
    lengths = np.array([len(row) for row in rows], np.int64)
    mask = np.arange(max(lengths, default=0)) < lengths[:, None]
    tokens = np.zeros(mask.shape, np.int64)
    tokens[mask] = [_integer(token) for row in rows for token in row]
    return tokens, mask


def _like_prompts(positions: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]]) -> Int[np.ndarray, "B T"]:
    found, wanted = [len(row) for row in positions], [len(row) for row in prompts]
    if found != wanted:
        raise ElrError(f"positions of lengths {found} beside prompts of lengths {wanted}: give one for each token")
    return _pad_right(positions)[0]


def _compact(
    tokens: Int[np.ndarray, "B T"], mask: Bool[np.ndarray, "B T"], positions: Int[np.ndarray, "B T"] | None
) -> Batch:
    """The real tokens of every row moved to its front, zeros after them."""
    order = np.argsort(~mask, axis=1, kind="stable")
    lengths = mask.sum(axis=1)
    slots = np.arange(lengths.max(initial=0))
    real = slots < lengths[:, None]

    def moved(x: np.ndarray) -> np.ndarray:
        return np.where(real, np.take_along_axis(x, order[:, : len(slots)], axis=1), 0)

    counted = np.broadcast_to(slots, real.shape)
    return Batch(moved(tokens), counted if positions is None else moved(positions), lengths)


def _check(batch: Batch, vocab_size: int) -> None:
    for row, length in enumerate(batch.lengths):
        if not length:
            raise ElrError(f"prompt {row} is empty: begin it with a token, such as the tokenizer's first of a text")
        known = (batch.tokens[row] >= 0) & (batch.tokens[row] < vocab_size)
        if not known.all():
            bad = batch.tokens[row][~known][0]
            raise ElrError(f"prompt {row} has the token {bad} outside 0…{vocab_size - 1}: use the model's tokenizer")
        if batch.positions[row].min() < 0:
            raise ElrError(f"prompt {row} has the position {batch.positions[row].min()}: count from 0")


def pack_requests(
    count: int,
    *,
    config: ModelConfig,
    loops: int | Sequence[int],
    prefill_loops: int | Sequence[int] | None,
    max_new_tokens: int | Sequence[int],
    sampling: Sampling | Sequence[Sampling],
    stop_tokens: Sequence[int] | Sequence[Sequence[int]],
) -> Requests:
    """What `count` requests ask for as arrays of the host; a value that stands alone is for all of them.

    Raises:
        ElrError: values for another number of requests, or outside their range.
    """
    deepest = config.loop.max_loops
    depths = {"loops": loops, "prefill_loops": loops if prefill_loops is None else prefill_loops}
    each: dict[str, Any] = {name: _integers(name, value, count) for name, value in depths.items()}
    for name, values in each.items():
        for bad in values[(values < 1) | (values > deepest)]:
            raise ElrError(f"{name}={bad} is outside 1…{deepest}: ask for fewer loops or raise loop.max_loops")
    limit = _integers("max_new_tokens", max_new_tokens, count)
    for bad in limit[limit < 1]:
        raise ElrError(f"max_new_tokens={bad} must be at least 1")
    samplers = [sampling] * count if isinstance(sampling, Sampling) else list(sampling)
    _check_count("sampling", samplers, count)
    drawing = {
        "seed": np.uint32,
        "temperature": np.float32,
        "top_k": np.int32,
        "top_p": np.float32,
        "min_p": np.float32,
    }
    for name, dtype in drawing.items():
        each[name] = np.array([getattr(sampler, name) for sampler in samplers], dtype)
    each |= {"limit": limit, "stop": _stop_table(stop_tokens, count, config.vocab_size)}
    return Requests(**each)


def _stop_table(
    stop_tokens: Sequence[int] | Sequence[Sequence[int]], count: int, vocab_size: int
) -> Int[np.ndarray, "B stops"]:
    """The stop tokens of each request, filled up to a few sizes."""
    shared = all(isinstance(token, int | np.integer) for token in stop_tokens)
    rows: list[Any] = [stop_tokens] * count if shared else list(stop_tokens)
    _check_count("stop_tokens", rows, count)
    tokens, mask = _pad_right(rows)
    for bad in tokens[(tokens < 0) | (tokens >= vocab_size)]:
        raise ElrError(f"stop_tokens has {bad} outside 0…{vocab_size - 1}: use the model's tokenizer")
    table = np.full((count, round_up(tokens.shape[1], least=4)), -1, np.int32)
    table[:, : tokens.shape[1]] = np.where(mask, tokens, -1)
    return table


def _integers(name: str, value: int | Sequence[int], count: int) -> Int[np.ndarray, "B"]:
    values = [value] * count if np.ndim(value) == 0 else list(value)  # type: ignore[arg-type]
    _check_count(name, values, count)
    return np.array([min(_integer(x), 2**30) for x in values], np.int32)


def _integer(value: Any) -> int:
    try:
        return index(value)
    except TypeError:
        raise ElrError(f"{value!r} stands where a token or a count belongs: give an integer") from None


def _check_count(name: str, values: Sequence[Any], count: int) -> None:
    if len(values) != count:
        raise ElrError(f"{name} has {len(values)} values for {count} prompts: give one for all, or one for each")


def round_up(size: int, *, least: int = 16) -> int:
    """The size, or the next of a few: at least `least`, and at most a quarter more than asked beyond 4·least.

    Arrays made to these sizes compile a few programs instead of one for each length.
    """
    step = max(least, 1 << max(size.bit_length() - 3, 0))
    return max(-(-size // step), 1) * step
