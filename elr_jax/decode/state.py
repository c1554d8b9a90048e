"""The functional core of generation: a batch's state, and the pure functions that read prompts and add tokens.

A row that is done runs at depth 0: it costs no rounds and writes nothing. `prefill` touches the rows that have new
tokens and no others, so prompts may come in chunks, and to some rows while others wait.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import UInt32

from elr_jax import incremental, parameters
from elr_jax.cache import Cache, CacheMode, init_cache
from elr_jax.config import ModelConfig, Runtime
from elr_jax.decode.sampling import RowLogits, sample
from elr_jax.parameters import Params
from elr_jax.typing import Array, Bool, Depth, Float, Int, Key, Positions, Tokens


@struct.dataclass
class Requests:
    """What each row of a batch asks for."""

    prefill_loops: Depth
    loops: Depth
    """Loops of every generated token that is read again."""
    limit: Int[Array, "B"]
    """Most tokens to generate."""
    stop: Int[Array, "B stops"]
    """Tokens that end the row; −1 fills up."""
    seed: UInt32[Array, "B"]
    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    min_p: Float[Array, "B"]


@struct.dataclass
class DecodeState:
    """A batch between two steps; the newest token of each row is not in the cache yet."""

    cache: Cache
    token: Int[Array, "B"]
    position: Int[Array, "B"]
    """Where the next token that is read stands."""
    count: Int[Array, "B"]
    """Tokens generated so far."""
    done: Bool[Array, "B"]


def start(
    config: ModelConfig,
    batch: int,
    capacity: int,
    *,
    loops: int,
    mode: CacheMode = "per_loop",
    dtype: Any = jnp.float32,
) -> DecodeState:
    """A batch that has read nothing, with a cache for `capacity` tokens a row and up to `loops` loops."""

    def zeros() -> Int[Array, "B"]:  # one buffer each: a donated state may hold none twice
        return jnp.zeros(batch, jnp.int32)

    cache = init_cache(config, batch, capacity, loops=loops, mode=mode, dtype=dtype)
    return DecodeState(cache=cache, token=zeros(), position=zeros(), count=zeros(), done=jnp.zeros(batch, bool))


def prefill(
    params: Params | parameters.WorkingCopy,
    state: DecodeState,
    tokens: Tokens,
    new: Int[Array, "B"],
    requests: Requests,
    *,
    config: ModelConfig,
    runtime: Runtime = Runtime(),
    positions: Positions | None = None,
    fresh: bool = False,
    greedy: bool = False,
    skipped: Int[Array, "B"] | None = None,
) -> DecodeState:
    """Read the first `new` [B] tokens of each row, a prompt or its next chunk, and draw the token after them.

    `positions` go on from the state's by default. A token drawn before the prompt's last chunk is replaced by the next
    chunk's. `fresh` and `greedy` promise an empty cache and that all temperatures are 0. `skipped` [B] are the tokens
    that `encode` has read (None: none).
    """
    rows, call = _of_prompt(state, tokens, new, requests, positions)
    logits, cache = incremental.extend(
        params,
        cache=state.cache,
        fresh=fresh,
        last_only=True,
        skipped=skipped,
        config=config,
        runtime=runtime,
        **call,
    )
    return _add_token(_moved(state, cache, rows, call), rows, logits[:, 0], requests, greedy=greedy)


def encode(
    params: Params | parameters.WorkingCopy,
    state: DecodeState,
    tokens: Tokens,
    new: Int[Array, "B"],
    requests: Requests,
    *,
    config: ModelConfig,
    runtime: Runtime = Runtime(),
    positions: Positions | None = None,
    fresh: bool = False,
) -> DecodeState:
    """Read the first `new` [B] tokens of each row, a prompt's beginning, by the encoder alone (`incremental`)."""
    rows, call = _of_prompt(state, tokens, new, requests, positions)
    cache = incremental.encode(params, cache=state.cache, fresh=fresh, config=config, runtime=runtime, **call)
    return _moved(state, cache, rows, call)


def _of_prompt(
    state: DecodeState, tokens: Tokens, new: Int[Array, "B"], requests: Requests, positions: Positions | None
) -> tuple[Bool[Array, "B"], dict[str, Any]]:
    """The rows that read something, and what the model is told of it."""
    rows = new > 0
    if positions is None:
        positions = state.position[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    depth = jnp.where(rows, requests.prefill_loops, 0)
    call = {"tokens": tokens, "depth": depth, "new": new, "positions": positions, "key": _keys(requests, 0)}
    return rows, call


def _moved(state: DecodeState, cache: Cache, rows: Bool[Array, "B"], call: dict[str, Any]) -> DecodeState:
    """The state after a piece of a prompt, before a token is drawn."""
    last = jnp.take_along_axis(call["positions"], jnp.maximum(call["new"] - 1, 0)[:, None], axis=1)[:, 0]
    return replace(
        state,
        cache=cache,
        position=jnp.where(rows, last + 1, state.position),
        count=jnp.where(rows, 0, state.count),
    )


def decode_step(
    params: Params | parameters.WorkingCopy,
    state: DecodeState,
    requests: Requests,
    *,
    config: ModelConfig,
    runtime: Runtime = Runtime(),
    greedy: bool = False,
) -> DecodeState:
    """Read the newest token of each row that is not done, at the row's own loop count, and draw the next.

    `greedy` promises that all temperatures are 0.
    """
    rows = ~state.done
    logits, cache = incremental.extend(
        params,
        state.token[:, None],
        jnp.where(rows, requests.loops, 0),
        state.cache,
        new=rows.astype(jnp.int32),
        positions=state.position[:, None],
        key=_keys(requests, 0),
        config=config,
        runtime=runtime,
    )
    state = replace(state, cache=cache, position=state.position + rows)
    return _add_token(state, rows, logits[:, 0], requests, greedy=greedy)


def _add_token(
    state: DecodeState, rows: Bool[Array, "B"], logits: RowLogits, requests: Requests, *, greedy: bool
) -> DecodeState:
    if greedy:
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    else:
        keys = jax.vmap(jax.random.fold_in)(_keys(requests, 1), state.count)
        token = sample(logits, keys, requests.temperature, requests.top_k, requests.top_p, requests.min_p)
    count = state.count + rows
    done = jnp.any(token[:, None] == requests.stop, axis=1) | (count >= requests.limit)
    return replace(
        state, token=jnp.where(rows, token, state.token), count=count, done=jnp.where(rows, done, state.done)
    )


def _keys(requests: Requests, use: int) -> Key[Array, "B"]:
    """A key for each request and use: 0 random initial states, 1 draws."""
    return jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(seed), use))(requests.seed)
