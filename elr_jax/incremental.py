"""A model's tokens read beside a cache: prompts, chunks, decode steps, and prompts that the decoder skips.

New tokens attend to what the cache held before the call and to themselves; the cache gets theirs at the call's end.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from elr_jax import cache as caches
from elr_jax.cache import Cache
from elr_jax.conditioning import round_conditions
from elr_jax.config import Boundary, ModelConfig, Runtime, decoder_of
from elr_jax.layers import LAYERS, Context, make_context, start_carry
from elr_jax.loop import run_cached_loop
from elr_jax.model import check_depth, draw_noise, embed, in_round, logits_of
from elr_jax.parameters import Params, WorkingCopy, cast
from elr_jax.residual import extend_stack, share
from elr_jax.typing import Array, Depth, Hidden, Int, Int32, Logits, Positions, PRNGKeyArray, Tokens


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
    told = {"config": config, "runtime": runtime, "new": new, "positions": positions, "key": key, "fresh": fresh}
    call = _Call(params, tokens, depth, cache, **told)
    state, made = call.layers(skipped=skipped)
    if last_only:
        state = jnp.take_along_axis(state, jnp.maximum(call.new - 1, 0)[:, None, None], axis=1)
    logits = logits_of(call.params, state, config)
    with jax.named_scope("commit"):
        # always `new`, but unknown before the logits are: a write after all reads needs no copy of the donated cache,
        # and a barrier is gone by the time XLA decides on copies
        written = jnp.minimum(call.new, tokens.shape[1] + (logits[:, 0, 0] > 0))
        return logits, call.commit(made, written)


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
    told = {"config": config, "runtime": runtime, "new": new, "positions": positions, "key": key, "fresh": fresh}
    call = _Call(params, tokens, depth, cache, **told)
    _, made = call.layers(until=boundary)
    with jax.named_scope("commit"):
        return call.commit(made, call.new)


Made = dict[str, tuple[Any, ...]]


class _Call:
    """Some new tokens on their way through the layers, beside a cache; made from the arguments of `extend`."""

    def __init__(
        self,
        params: Params | WorkingCopy,
        tokens: Tokens,
        depth: Depth,
        cache: Cache,
        *,
        config: ModelConfig,
        runtime: Runtime,
        new: Int[Array, "B"] | None,
        positions: Positions | None,
        key: PRNGKeyArray | None,
        fresh: bool,
    ):
        check_depth(depth, config, least=1 if new is None else 0)
        batch, count = tokens.shape
        if positions is None:
            positions = cache.length[:, None] + jnp.arange(count, dtype=jnp.int32)
        self.tokens, self.depth, self.cache = tokens, depth, cache
        self.config, self.runtime, self.fresh = config, runtime, fresh
        self.params = cast(params, config, runtime)
        self.new = jnp.full(batch, count, jnp.int32) if new is None else new
        self.context = make_context(
            positions, jnp.zeros_like(tokens), config, tokens=tokens, runtime=runtime, length=cache.length, new=self.new
        )
        self.conditions = round_conditions(self.params.conditioning, depth, config, dtype=runtime.dtype)
        self.noise = draw_noise(key, positions, config, runtime)

    def layers(self, *, until: Boundary | None = None, skipped: Int[Array, "B"] | None = None) -> tuple[Hidden, Made]:
        """The state after the layers, or those above a boundary, and what each makes for the cache."""
        config, made = self.config, {}
        context, x = self.context, embed(self.params, self.tokens, config, self.runtime)
        border = until if skipped is None else decoder_of(config)
        for name in ("prelude", "core", "coda"):
            if name == "core":
                x, made[name], context = self._loop(x, context)
                continue
            cut = border.above if border is not None and border.stack == name else len(getattr(config, name))
            with jax.named_scope(name):
                x, context, above = self._once(x, name, slice(0, cut), context)
                if until is not None and until.stack == name:
                    return x, made | {name: above}
                if skipped is not None and border is not None and border.stack == name:
                    context = dataclasses.replace(context, first=skipped)
                x, context, below = self._once(x, name, slice(cut, None), context)
            made[name] = above + below
        return x, made

    def commit(self, made: Made, written: Int[Array, "B"]) -> Cache:
        """The cache with what was made of the first `written` tokens; entries of which nothing was made stay."""

        def entries(name: str) -> tuple[Any, ...]:
            held, mine = getattr(self.cache, name), made.get(name, ())
            some = slice(0, len(mine))
            letters = getattr(self.config, name)[some]
            return caches.commit(letters, held[some], mine, self.cache.length, written) + held[len(mine) :]

        stacks = {name: entries(name) for name in ("prelude", "core", "coda")}
        return Cache(**stacks, length=self.cache.length + self.new)

    def _once(self, x: Hidden, name: str, layers: slice, context: Context) -> tuple[Hidden, Context, tuple[Any, ...]]:
        x, context, made = self._stack(x, name, layers, context, -1)
        return x, context, jax.tree.map(lambda leaf: leaf[None], made)

    def _stack(
        self,
        x: Hidden,
        name: str,
        layers: slice,
        context: Context,
        i: Any,
        carried: tuple[Any, ...] | None = None,
    ) -> tuple[Hidden, Context, tuple[Any, ...]]:
        letters, entries = getattr(self.config, name)[layers], getattr(self.cache, name)[layers]
        past = (None,) * len(letters) if self.fresh else caches.read(entries, jnp.maximum(i, 0))
        if carried is not None:
            past = tuple(slot if mine is None else mine for slot, mine in zip(past, carried, strict=True))
        context = in_round(context, self.conditions, i)
        return extend_stack(x, getattr(self.params, name)[layers], context, past, letters=letters, config=self.config)

    def _loop(self, x: Hidden, context: Context) -> tuple[Hidden, tuple[Any, ...], Context]:
        """The core's rounds; with the state what they make in each slot, and the context below them."""
        config, letters = self.config, self.config.core

        def round_(i: Int32[Array, ""], u: Hidden, carried: tuple[Any, ...]) -> tuple[Hidden, Any, tuple[Any, ...]]:
            u, _, made = self._stack(u, "core", slice(None), context, i, carried)
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
            caches.blank(self.cache.core, jax.eval_shape(round_, jnp.int32(0), x, carried)[1]),
            core=round_,
            config=config,
            runtime=self.runtime,
            noise=self.noise,
            carried=carried,
        )
        if "G" in letters:  # the last slot has every token's last round
            last = letters.rindex("G")
            newest = partial(jax.tree.map, lambda leaf: leaf[-1])
            context = share(context, newest(made[last]), None if self.fresh else newest(self.cache.core[last]))
        return state, made, context
