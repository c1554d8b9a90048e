"""A model as pure functions of parameters, tokens and a depth per example: prelude, looped core, coda, head."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from elr_jax import cache as caches
from elr_jax.cache import Cache
from elr_jax.conditioning import round_conditions
from elr_jax.config import Boundary, ModelConfig, Runtime, decoder_of
from elr_jax.errors import ElrError
from elr_jax.layers import LAYERS, Context, make_context, start_carry
from elr_jax.layers.attention import KV
from elr_jax.layers.linear import wide_product
from elr_jax.layers.moe import Routing
from elr_jax.layers.norms import rms_norm, unit_norm
from elr_jax.loop import initial_noise, run_cached_loop, run_loop, trajectory
from elr_jax.losses import TokenScores, linear_cross_entropy
from elr_jax.parameters import Params, WorkingCopy, cast
from elr_jax.residual import SubLayer, apply_stack, extend_stack, share
from elr_jax.sharding import constrain
from elr_jax.typing import (
    Array,
    Conditions,
    Depth,
    Float,
    Hidden,
    Int,
    Int32,
    Logits,
    Positions,
    PRNGKeyArray,
    SegmentIds,
    Tokens,
    widen,
)


def apply(
    params: Params | WorkingCopy,
    tokens: Tokens,
    depth: Depth,
    *,
    config: ModelConfig,
    runtime: Runtime = Runtime(),
    segment_ids: SegmentIds | None = None,
    positions: Positions | None = None,
    key: PRNGKeyArray | None = None,
    backprop_loops: int | None = None,
) -> Logits:
    """Next-token logits [B,T,V] in float32 after `depth` [B] rounds of each example (1 … max_loops).

    logits = head(RMSNorm(coda(loop(prelude(embed(tokens)), depth)))); on the unit sphere the head's output is scaled
    instead of its input normed. Tokens attend within equal `segment_ids` (None:
    one segment); `positions` default to 0 … T−1. `key`, one for the batch or one for each example, is needed by a
    random initial state alone. Gradients flow through the last `backprop_loops` rounds of each example (None: all).
    """
    _check_depth(depth, config)
    params = cast(params, config, runtime)
    x, _ = _outcome(params, tokens, depth, config, runtime, segment_ids, positions, key, backprop_loops)
    return _logits(params, x, config)


def loss(
    params: Params,
    tokens: Tokens,
    targets: Tokens,
    weights: Float[Array, "B T"],
    depth: Depth,
    *,
    config: ModelConfig,
    runtime: Runtime = Runtime(),
    segment_ids: SegmentIds | None = None,
    positions: Positions | None = None,
    key: PRNGKeyArray | None = None,
    backprop_loops: int | None = None,
) -> tuple[Float[Array, ""], TokenScores]:
    """Σ weights ⊙ cross_entropy(apply(…), targets) in nats, and each token's score, without all logits in memory.

    Other arguments as for `apply`.
    """
    _check_depth(depth, config)
    working = cast(params, config, runtime)
    x, routing = _outcome(working, tokens, depth, config, runtime, segment_ids, positions, key, backprop_loops)
    with jax.named_scope("head"):
        x = x if params.norm is None else rms_norm(x, params.norm, eps=config.norm_eps)
        head = params.embedding.T if params.head is None else params.head
        if params.logit_scale is not None and config.sphere is not None:
            head = head * (params.logit_scale / config.sphere.init_std)  # its gradient then needs no logits
        total, scores = linear_cross_entropy(x, head, targets, weights)
    return total, scores.replace(routing=routing)  # pyright: ignore


def routing(
    params: Params | WorkingCopy,
    tokens: Tokens,
    depth: Depth,
    *,
    config: ModelConfig,
    runtime: Runtime = Runtime(),
    segment_ids: SegmentIds | None = None,
    positions: Positions | None = None,
    key: PRNGKeyArray | None = None,
) -> tuple[Routing, ...]:
    """What each mixture of experts does, in the order of the layers, replayed routes measured against fresh ones.

    Arguments as for `apply`.
    """
    _check_depth(depth, config)
    params = cast(params, config, runtime)
    return _outcome(params, tokens, depth, config, runtime, segment_ids, positions, key, None, probe=True)[1]


def _outcome(
    params: Params,
    tokens: Tokens,
    depth: Depth,
    config: ModelConfig,
    runtime: Runtime,
    segment_ids: SegmentIds | None,
    positions: Positions | None,
    key: PRNGKeyArray | None,
    backprop_loops: int | None,
    probe: bool = False,
) -> tuple[Hidden, tuple[Routing, ...]]:
    """The coda's output, and what the mixtures of experts did."""
    entry, context, noise, before = _enter(params, tokens, config, runtime, segment_ids, positions, key)
    context = dataclasses.replace(context, probe=probe)
    conditions = round_conditions(params.conditioning, depth, config, dtype=runtime.dtype)
    state, (during, shared) = run_loop(
        entry,
        depth,
        params.loop,
        (params.core, context, conditions),
        core=_core(config, runtime),
        config=config,
        runtime=runtime,
        noise=noise,
        backprop_loops=backprop_loops,
        carried=_start_core(config, runtime, *tokens.shape),
    )
    if shared is not None:
        context = dataclasses.replace(context, shared=shared)
    with jax.named_scope("coda"):
        context, start = _told(context, conditions, -1), start_carry(config.coda, config, *tokens.shape)
        x, _, after = apply_stack(
            state, params.coda, context, start, letters=config.coda, config=config, runtime=runtime
        )
    return x, tuple(carried for carried in (*before, *during, *after) if carried is not None)


def extend(
    params: Params | WorkingCopy,
    tokens: Tokens,
    depth: Depth,
    cache: Cache,
    *,
    config: ModelConfig,
    runtime: Runtime = Runtime(),
    new: Int[Array, "B"] | None = None,
    positions: Positions | None = None,
    key: PRNGKeyArray | None = None,
    fresh: bool = False,
    last_only: bool = False,
    skipped: Int[Array, "B"] | None = None,
) -> tuple[Logits, Cache]:
    """Logits [B,T,V] of new tokens after those in the cache, and the cache with them: prefill, chunk or decode step.

    The first `new` [B] of each row's tokens are real (None: all), the rest is padding: it leaves no trace in the cache
    and its logits mean nothing. `depth` [B] may differ from call to call, and may be 0 where a row has none.
    `positions` default to each row's length in the cache and on. `fresh` says that the cache is empty, so that a
    prompt's attention may go in blocks. `last_only` gives the logits [B,1,V] of each row's last real token. `skipped`
    [B]: how many tokens the cache has from `encode`; needed by the first call after it. The caller minds that the
    capacity is not exceeded; beyond it, a `*` layer would forget its oldest tokens.
    """
    if skipped is not None:
        decoder_of(config)
    call = _Call.begin(params, tokens, depth, cache, config, runtime, new, positions, key, fresh)
    state, made = call.layers(cache, skipped=skipped)
    if last_only:
        state = jnp.take_along_axis(state, jnp.maximum(call.new - 1, 0)[:, None, None], axis=1)
    logits = _logits(call.params, state, config)
    with jax.named_scope("commit"):
        # always `new`, but unknown before the logits are: a write after all reads needs no copy of the donated cache,
        # and a barrier is gone by the time XLA decides on copies
        written = jnp.minimum(call.new, tokens.shape[1] + (logits[:, 0, 0] > 0))
        return logits, call.commit(cache, made, written)


def encode(
    params: Params | WorkingCopy,
    tokens: Tokens,
    depth: Depth,
    cache: Cache,
    *,
    config: ModelConfig,
    runtime: Runtime = Runtime(),
    new: Int[Array, "B"] | None = None,
    positions: Positions | None = None,
    key: PRNGKeyArray | None = None,
    fresh: bool = False,
) -> Cache:
    """The cache with new tokens of a prompt, of which the decoder reads nothing: arguments as for `extend`.

    The layers down to the last `G` run, of that one only what makes keys and values. Later tokens see the new ones
    through global keys alone. With the last `boundary.replayed(…)` tokens of a prompt or more left to `extend`, its
    last logits and all later ones are those of a prompt that was read whole; with fewer, but a window at least, they
    are near.

    Raises:
        ElrError: a model without a decoder whose memory is windows.
    """
    boundary = decoder_of(config)
    call = _Call.begin(params, tokens, depth, cache, config, runtime, new, positions, key, fresh)
    _, made = call.layers(cache, until=boundary)
    with jax.named_scope("commit"):
        return call.commit(cache, made, call.new)


Made = dict[str, tuple[Any, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """Some new tokens on their way through the layers, beside a cache."""

    params: Params
    tokens: Tokens
    depth: Depth
    new: Int[Array, "B"]
    context: Context
    conditions: Conditions | None
    noise: Hidden | None
    config: ModelConfig
    runtime: Runtime
    fresh: bool

    @classmethod
    def begin(
        cls,
        params: Params | WorkingCopy,
        tokens: Tokens,
        depth: Depth,
        cache: Cache,
        config: ModelConfig,
        runtime: Runtime,
        new: Int[Array, "B"] | None,
        positions: Positions | None,
        key: PRNGKeyArray | None,
        fresh: bool,
    ) -> "_Call":
        """What all layers share about the tokens."""
        _check_depth(depth, config, least=1 if new is None else 0)
        params = cast(params, config, runtime)
        batch, count = tokens.shape
        new = jnp.full(batch, count, jnp.int32) if new is None else new
        if positions is None:
            positions = cache.length[:, None] + jnp.arange(count, dtype=jnp.int32)
        context = make_context(
            positions, jnp.zeros_like(tokens), config, tokens=tokens, runtime=runtime, length=cache.length, new=new
        )
        return cls(
            params=params,
            tokens=tokens,
            depth=depth,
            new=new,
            context=context,
            conditions=round_conditions(params.conditioning, depth, config, dtype=runtime.dtype),
            noise=_noise(key, positions, config, runtime),
            config=config,
            runtime=runtime,
            fresh=fresh,
        )

    def layers(
        self, cache: Cache, *, until: Boundary | None = None, skipped: Int[Array, "B"] | None = None
    ) -> tuple[Hidden, Made]:
        """The state after the layers, or those above a boundary, and what each makes for the cache."""
        config, made = self.config, {}
        context, x = self.context, _embed(self.params, self.tokens, config, self.runtime)
        border = until if skipped is None else decoder_of(config)
        for name in ("prelude", "core", "coda"):
            if name == "core":
                x, made[name], context = self._loop(x, cache, context)
                continue
            cut = border.above if border is not None and border.stack == name else len(getattr(config, name))
            with jax.named_scope(name):
                x, context, above = self._once(x, name, slice(0, cut), cache, context)
                if until is not None and until.stack == name:
                    return x, made | {name: above}
                if skipped is not None and border is not None and border.stack == name:
                    context = dataclasses.replace(context, first=skipped)
                x, context, below = self._once(x, name, slice(cut, None), cache, context)
            made[name] = above + below
        return x, made

    def commit(self, cache: Cache, made: Made, written: Int[Array, "B"]) -> Cache:
        """The cache with what was made of the first `written` tokens; entries of which nothing was made stay."""

        def entries(name: str) -> tuple[Any, ...]:
            held, mine = getattr(cache, name), made.get(name, ())
            some = slice(0, len(mine))
            letters = getattr(self.config, name)[some]
            return caches.commit(letters, held[some], mine, cache.length, written) + held[len(mine) :]

        stacks = {name: entries(name) for name in ("prelude", "core", "coda")}
        return Cache(**stacks, length=cache.length + self.new)

    def _once(
        self, x: Hidden, name: str, layers: slice, cache: Cache, context: Context
    ) -> tuple[Hidden, Context, tuple[Any, ...]]:
        x, context, made = self._stack(x, name, layers, cache, context, -1)
        return x, context, jax.tree.map(lambda leaf: leaf[None], made)

    def _stack(
        self,
        x: Hidden,
        name: str,
        layers: slice,
        cache: Cache,
        context: Context,
        i: Any,
        carried: tuple[Any, ...] | None = None,
    ) -> tuple[Hidden, Context, tuple[Any, ...]]:
        letters, entries = getattr(self.config, name)[layers], getattr(cache, name)[layers]
        past = (None,) * len(letters) if self.fresh else caches.read(entries, jnp.maximum(i, 0))
        if carried is not None:
            past = tuple(slot if mine is None else mine for slot, mine in zip(past, carried, strict=True))
        told = _told(context, self.conditions, i)
        return extend_stack(x, getattr(self.params, name)[layers], told, past, letters=letters, config=self.config)

    def _loop(self, x: Hidden, cache: Cache, context: Context) -> tuple[Hidden, tuple[Any, ...], Context]:
        """The core's rounds; with the state what they make in each slot, and the context below them."""
        config, letters = self.config, self.config.core

        def round_(i: Int32[Array, ""], u: Hidden, carried: tuple[Any, ...]) -> tuple[Hidden, Any, tuple[Any, ...]]:
            u, _, made = self._stack(u, "core", slice(None), cache, context, i, carried)
            carries = [LAYERS[letter].carry is not None for letter in letters]
            kept = tuple(None if carry else one for carry, one in zip(carries, made, strict=True))
            later = tuple(one if carry else None for carry, one in zip(carries, made, strict=True))
            return u, kept, later

        replays = config.moe is not None and config.moe.replay
        carried = start_carry(letters, config, *self.tokens.shape) if replays else (None,) * len(letters)
        state, made = run_cached_loop(
            x,
            self.depth,
            self.params.loop,
            caches.blank(cache.core, jax.eval_shape(round_, jnp.int32(0), x, carried)[1]),
            core=round_,
            config=config,
            runtime=self.runtime,
            noise=self.noise,
            carried=carried,
        )
        if "G" in letters:  # the last slot has every token's last round
            last = letters.rindex("G")
            newest = partial(jax.tree.map, lambda leaf: leaf[-1])
            context = share(context, newest(made[last]), None if self.fresh else newest(cache.core[last]))
        return state, made, context


def states(
    params: Params | WorkingCopy,
    tokens: Tokens,
    depth: Depth,
    *,
    config: ModelConfig,
    runtime: Runtime = Runtime(),
    segment_ids: SegmentIds | None = None,
    positions: Positions | None = None,
    key: PRNGKeyArray | None = None,
) -> Float[Array, "R+1 B T D"]:
    """The loop's states s_0 … s_max_loops, each example frozen after its own depth; arguments as for `apply`."""
    _check_depth(depth, config)
    params = cast(params, config, runtime)
    entry, context, noise, _ = _enter(params, tokens, config, runtime, segment_ids, positions, key)
    conditions = round_conditions(params.conditioning, depth, config, dtype=runtime.dtype)
    return trajectory(
        entry,
        depth,
        params.loop,
        (params.core, context, conditions),
        core=_core(config, runtime),
        config=config,
        runtime=runtime,
        noise=noise,
        carried=_start_core(config, runtime, *tokens.shape),
    )


def _start_core(config: ModelConfig, runtime: Runtime, batch: int, length: int) -> tuple[tuple[Any, ...], KV | None]:
    """What the core carries into its first round: what its layers do, and room for the global keys of its last `G`."""
    shape = batch, config.attention.num_kv_heads, length, config.attention.head_dim
    empty = jnp.zeros(shape, runtime.dtype)
    return start_carry(config.core, config, batch, length), KV(key=empty, value=empty) if "G" in config.core else None


def _core(config: ModelConfig, runtime: Runtime):
    # a round that is replayed whole need not replay its layers once more
    inner = dataclasses.replace(runtime, remat="none") if runtime.remat == "round" else runtime

    def core(
        i: Int32[Array, ""],
        x: Hidden,
        carried: tuple[tuple[Any, ...], KV | None],
        operands: tuple[tuple[SubLayer, ...], Context, Conditions | None],
    ) -> tuple[Hidden, tuple[tuple[Any, ...], KV | None]]:
        stack, context, conditions = operands
        context, (layers, shared) = _told(context, conditions, i), carried
        x, context, layers = apply_stack(x, stack, context, layers, letters=config.core, config=config, runtime=inner)
        return x, (layers, None if shared is None else context.shared)

    return core


def _told(context: Context, conditions: Conditions | None, i: int | Int32[Array, ""]) -> Context:
    """The context of round i (from 0; −1: the coda), with what conditioned layers are told there."""
    return dataclasses.replace(
        context,
        round=None if isinstance(i, int) else i,
        condition=None if conditions is None else conditions[i],
    )


def _enter(
    params: Params,
    tokens: Tokens,
    config: ModelConfig,
    runtime: Runtime,
    segment_ids: SegmentIds | None,
    positions: Positions | None,
    key: PRNGKeyArray | None,
) -> tuple[Hidden, Context, Hidden | None, tuple[Any, ...]]:
    if segment_ids is None:
        segment_ids = jnp.zeros(tokens.shape, jnp.int32)
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    context = make_context(positions, segment_ids, config, tokens=tokens, runtime=runtime)
    with jax.named_scope("prelude"):
        x = _embed(params, tokens, config, runtime)
        start = start_carry(config.prelude, config, *tokens.shape)
        x, context, carried = apply_stack(
            x, params.prelude, context, start, letters=config.prelude, config=config, runtime=runtime
        )
    return x, context, _noise(key, positions, config, runtime), carried


def _embed(params: Params, tokens: Tokens, config: ModelConfig, runtime: Runtime) -> Hidden:
    x = constrain(params.embedding[tokens].astype(runtime.dtype), "batch", "sequence", None)
    return unit_norm(x, eps=config.norm_eps) if config.sphere and config.sphere.embedding_norm else x


def _noise(key: PRNGKeyArray | None, positions: Positions, config: ModelConfig, runtime: Runtime) -> Hidden | None:
    if config.loop.initial != "random":
        return None
    if key is None:
        raise ElrError(
            "loop.initial='random' draws the initial state: pass key=jax.random.key(…), or use 'copy' or 'zero'"
        )
    if key.ndim == 0:
        key = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(positions.shape[0]))
    return initial_noise(key, positions, config.d_model, runtime.dtype)


def _logits(params: Params, state: Hidden, config: ModelConfig) -> Logits:
    with jax.named_scope("head"):
        x = state if params.norm is None else rms_norm(state, params.norm, eps=config.norm_eps)
        logits = wide_product(x, params.embedding.T if params.head is None else params.head)
        if params.logit_scale is None or config.sphere is None:
            return logits
        return logits * (widen(params.logit_scale) / config.sphere.init_std)


def _check_depth(depth: Any, config: ModelConfig, *, least: int = 1) -> None:
    if isinstance(depth, Tracer):  # under jit the values are unknown: laws and requests are checked before
        return
    values, most = np.asarray(depth), config.loop.max_loops
    if values.size and (values.min() < least or values.max() > most):
        bad = values.min() if values.min() < least else values.max()
        raise ElrError(f"depth {bad} is outside {least}…{most}: ask for fewer loops or raise loop.max_loops")
