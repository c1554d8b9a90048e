"""Generation for a batch of requests: the host's side of it, which compiles, streams and stops."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from elr_jax import parameters
from elr_jax.cache import CacheMode
from elr_jax.config import ModelConfig, Runtime, decoder_of
from elr_jax.decode import state as core
from elr_jax.decode.prompts import Batch, Prompts, pack_prompts, pack_requests, round_up
from elr_jax.decode.sampling import GREEDY, Sampling
from elr_jax.decode.state import DecodeState, Requests
from elr_jax.errors import ElrError
from elr_jax.parameters import Params
from elr_jax.typing import Array, Bool, Int

Report = tuple[Int[Array, "B"], Bool[Array, "B"]]
PrefillDecoder = Literal["all", "exact", "window"]


class Completion(NamedTuple):
    """The tokens of one request, a stop token included, and what ended it."""

    tokens: list[int]
    finish: Literal["stop", "length"]


def generate(
    params: Params | parameters.WorkingCopy,
    prompts: Prompts,
    *,
    config: ModelConfig,
    runtime: Runtime = Runtime(),
    loops: int | Sequence[int],
    max_new_tokens: int | Sequence[int],
    prefill_loops: int | Sequence[int] | None = None,
    sampling: Sampling | Sequence[Sampling] = GREEDY,
    stop_tokens: Sequence[int] | Sequence[Sequence[int]] = (),
    attention_mask: Any = None,
    positions: Any = None,
    cache_mode: CacheMode = "per_loop",
    prefill_chunk: int | None = None,
    prefill_decoder: PrefillDecoder = "all",
    allow_longer: bool = False,
    on_token: Callable[[int, int], None] | None = None,
    progress: bool | None = None,
) -> list[Completion]:
    """Continue every prompt; each row's tokens are those it would get alone.

    Args:
        params: the model's parameters, or `working_copy` of them, which a CPU decodes faster.
        prompts: lists of tokens, or an array [B,T] padded on either side with `attention_mask` beside it.
        config: the model.
        runtime: number type of activations and cache.
        loops: loop count of every generated token; like all that follows up to `stop_tokens`, one for all requests or
            one for each.
        max_new_tokens: most tokens to generate.
        prefill_loops: loop count of the prompt (None: `loops`).
        sampling: how tokens are drawn. Requests of one seed and one prompt draw the same.
        stop_tokens: tokens that end a request.
        attention_mask: [B,T], true where the array of prompts holds a real token (None: everywhere).
        positions: in the form of the prompts; they count from each row's first real token by default.
        cache_mode: keys and values of every loop, or of the last loop alone (see `elr_jax.cache`).
        prefill_chunk: longest piece of a prompt read at once (None: all); changes results under `last_loop` alone.
        prefill_decoder: tokens of a prompt that the decoder of a causal encoder-decoder reads: all; the last ones that
            its windows reach back from the answer, which makes no difference (`exact`; under `last_loop` the prompt's
            two parts are calls of their own); or the last window alone, an approximation (`window`).
        allow_longer: go beyond `config.max_positions`.
        on_token: called as `on_token(request, token)` for every token as it comes.
        progress: show a progress bar (None: on a terminal).

    Raises:
        ElrError: an empty prompt, an unknown token, a depth outside 1…max_loops, a context longer than the model's,
            values for another number of requests, or a decoder to skip where there is none.
    """
    batch = pack_prompts(prompts, vocab_size=config.vocab_size, attention_mask=attention_mask, positions=positions)
    requests = pack_requests(
        len(batch.lengths),
        config=config,
        loops=loops,
        prefill_loops=prefill_loops,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop_tokens=stop_tokens,
    )
    if not allow_longer:
        _check_context(batch, requests, config)
    if prefill_chunk is not None and prefill_chunk < 1:
        raise ElrError(f"prefill_chunk={prefill_chunk} must be at least 1")
    state = core.start(
        config,
        len(batch.lengths),
        round_up(int((batch.lengths + requests.limit).max())),
        loops=int(max(requests.loops.max(), requests.prefill_loops.max())),
        mode=cache_mode,
        dtype=runtime.dtype,
    )
    settings = {"config": config, "runtime": runtime, "greedy": not np.any(requests.temperature > 0)}
    if not isinstance(params, parameters.WorkingCopy):
        params = _cast(params, config=config, runtime=runtime)
    kept = replayed_tokens(config, prefill_decoder, loops=int(requests.prefill_loops.max()))
    reports = _reports(params, state, list(_pieces(batch, kept, prefill_chunk)), requests, settings)
    with _progress_bar(int(requests.limit.sum()), shown=progress) as advance:
        return _collect(reports, requests, on_token, advance)


def _check_context(batch: Batch, requests: Requests, config: ModelConfig) -> None:
    if config.max_positions is None:
        return
    first = np.take_along_axis(batch.positions, batch.lengths[:, None] - 1, axis=1)[:, 0] + 1
    for row, end in enumerate(first + requests.limit):
        if end > config.max_positions:
            raise ElrError(
                f"prompt {row} and its new tokens reach position {end} of max_positions={config.max_positions}: "
                "shorten it, lower max_new_tokens or set allow_longer=True"
            )


working_copy = jax.jit(parameters.pack, static_argnames=("config", "runtime"))
"""`parameters.pack`, compiled: worth its memory where a CPU generates many tokens."""
_cast = jax.jit(parameters.cast, static_argnames=("config", "runtime"))


def _reported(function: Callable[..., DecodeState]) -> Callable[..., tuple[DecodeState, Report]]:
    """With the new state what the host reads of it, since the state itself is given away to the next step."""

    @wraps(function)
    def reported(params: Params, state: DecodeState, *args: Any, **settings: Any) -> tuple[DecodeState, Report]:
        state = function(params, state, *args, **settings)
        return state, (state.token, state.done)

    return reported


_STATIC = ("config", "runtime", "greedy")
_prefill = jax.jit(_reported(core.prefill), static_argnames=(*_STATIC, "fresh"), donate_argnums=1)
_encode = jax.jit(core.encode, static_argnames=("config", "runtime", "fresh"), donate_argnums=1)
_decode_step = jax.jit(_reported(core.decode_step), static_argnames=_STATIC, donate_argnums=1)


class Piece(NamedTuple):
    """Some tokens of the prompts, `new` of each row; after `skipped` ones for the encoder alone, or of those (None)."""

    tokens: Int[np.ndarray, "B T"]
    positions: Int[np.ndarray, "B T"]
    new: Int[np.ndarray, "B"]
    skipped: Int[np.ndarray, "B"] | None


def replayed_tokens(config: ModelConfig, prefill_decoder: PrefillDecoder, *, loops: int) -> int | None:
    """How many of a prompt's last tokens the decoder reads; None: all of them."""
    if prefill_decoder == "all":
        return None
    if prefill_decoder not in ("exact", "window"):
        raise ElrError(f"prefill_decoder={prefill_decoder!r} is unknown: choose all, exact or window")
    exact = decoder_of(config).replayed(config, loops=loops)
    return exact if prefill_decoder == "exact" else min(exact, config.attention.window)


def _reports(
    params: Params | parameters.WorkingCopy,
    state: DecodeState,
    pieces: list[Piece],
    requests: Requests,
    settings: dict[str, Any],
) -> Iterator[Report]:
    """The newest tokens after the prompts and after every step; the next step is on its way when one is handed out."""
    steps = int(requests.limit.max()) - 1
    requests = jax.device_put(requests)
    report: Any = None
    for number, piece in enumerate(pieces):
        read = {"positions": piece.positions, "fresh": number == 0}
        if piece.skipped is None:
            told = {name: settings[name] for name in ("config", "runtime")}
            state = _encode(params, state, piece.tokens, piece.new, requests, **read, **told)
            continue
        skipped = piece.skipped if piece.skipped.any() else None
        state, report = _prefill(params, state, piece.tokens, piece.new, requests, skipped=skipped, **read, **settings)
    for _ in range(steps):
        state, ahead = _decode_step(params, state, requests, **settings)
        yield report
        report = ahead
    yield report


def _pieces(batch: Batch, kept: int | None, longest: int | None) -> Iterator[Piece]:
    """The prompts in the order they are read: what is left to the encoder, then what all layers read."""
    skipped = np.zeros_like(batch.lengths) if kept is None else np.maximum(batch.lengths - kept, 0)
    if skipped.any():
        for piece in _chunks(batch.tokens, batch.positions, skipped, longest):
            yield Piece(*piece, skipped=None)
    left = batch.lengths - skipped
    at = np.minimum(skipped[:, None] + np.arange(left.max()), batch.tokens.shape[1] - 1)
    tokens, positions = (np.take_along_axis(x, at, axis=1) for x in (batch.tokens, batch.positions))
    for piece in _chunks(tokens, positions, left, longest):
        yield Piece(*piece, skipped=skipped)


def _chunks(
    tokens: Int[np.ndarray, "B T"],
    positions: Int[np.ndarray, "B T"],
    lengths: Int[np.ndarray, "B"],
    longest: int | None,
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Tokens, positions and lengths of each piece of some rows, all pieces of one width."""
    length = int(lengths.max())
    width = round_up(length) if longest is None else min(longest, round_up(length))
    tokens, positions = (np.pad(x[:, :length], ((0, 0), (0, -length % width))) for x in (tokens, positions))
    for first in range(0, length, width):
        piece = slice(first, first + width)
        yield tokens[:, piece], positions[:, piece], np.clip(lengths - first, 0, width)


def _collect(
    reports: Iterator[Report],
    requests: Requests,
    on_token: Callable[[int, int], None] | None,
    advance: Callable[[int], None],
) -> list[Completion]:
    tokens: list[list[int]] = [[] for _ in requests.limit]
    running = list(range(len(tokens)))
    for report in reports:
        newest, done = jax.device_get(report)
        advance(len(running))
        for row in running:
            tokens[row].append(int(newest[row]))
            if on_token is not None:
                on_token(row, tokens[row][-1])
        running = [row for row in running if not done[row]]
        if not running:
            break
    stopped = [row[-1] in stop for row, stop in zip(tokens, requests.stop, strict=True)]
    return [Completion(row, "stop" if stop else "length") for row, stop in zip(tokens, stopped, strict=True)]


@contextmanager
def _progress_bar(total: int, *, shown: bool | None) -> Iterator[Callable[[int], None]]:
    console = Console(stderr=True)
    columns = (TextColumn("Generating"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeRemainingColumn())
    disable = not (console.is_terminal if shown is None else shown)
    with Progress(*columns, console=console, transient=console.is_terminal, disable=disable) as bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)
