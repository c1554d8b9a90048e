"""What a model remembers of the tokens it has read: an entry for every layer with a memory, a length for each row.

Every leaf of an entry has leading axes [L, B], of loops and rows: one slot for the layers that run once; for the core
one for each loop (`per_loop`), or a single one (`last_loop`). The shape alone decides. What else an entry is, how it
begins and what a call's tokens do to it belong to its layer kind. Slot l of a core entry holds of every token what its
round l made, or its last round where it ran fewer, so later tokens may run any depth. A single slot holds what the last
round made: in round i a query then sees round-i keys of the tokens of its own call and last-round keys of earlier
calls, so results depend on where calls begin. [Dory]

Attention keeps keys and values [L, B, K, S, H]; window layers the last W in a ring: token p stands in slot p mod S of
every entry. Recurrent layers (`D`) keep states, whose size no number of tokens changes, and keep them for each loop in
both modes, since `last_loop` is there to save what grows: round l continues from slot l, in which a token that ran
k ≤ l rounds was written with the keys, values and gates of its last. So a slot's state has seen every token, and a
shallow token takes no deeper round's memory away.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from elr_jax.config import ModelConfig
from elr_jax.errors import ElrError
from elr_jax.layers import LAYERS, Layer
from elr_jax.typing import Array, Int

CacheMode = Literal["per_loop", "last_loop"]


@struct.dataclass
class Cache:
    """Entries of the three stacks (None for a layer without memory) and the tokens each row has in them."""

    prelude: tuple[Any, ...]
    core: tuple[Any, ...]
    coda: tuple[Any, ...]
    length: Int[Array, "B"]

    @property
    def loops(self) -> int:
        """Loop slots of the core; 1 under `last_loop` without recurrent layers."""
        return _slots(self.core)


class CacheBytes(NamedTuple):
    """Bytes of the entries that grow with the tokens, and of those that do not."""

    attention: int
    states: int


def init_cache(
    config: ModelConfig,
    batch: int,
    capacity: int,
    *,
    loops: int | None = None,
    mode: CacheMode = "per_loop",
    dtype: Any = jnp.float32,
) -> Cache:
    """An empty cache for `capacity` tokens a row and up to `loops` loops (None: the config's max_loops)."""
    if mode not in ("per_loop", "last_loop"):
        raise ElrError(f"cache mode {mode!r} is unknown: choose per_loop or last_loop")
    for name, value in (("batch", batch), ("capacity", capacity), ("loops", loops)):
        if value is not None and value < 1:
            raise ElrError(f"{name}={value} must be at least 1")
    slots = loops or config.loop.max_loops

    def stack(letters: str, slots: int) -> tuple[Any, ...]:
        return tuple(entry(LAYERS[letter], slots) for letter in letters)

    def entry(layer: Layer, slots: int) -> Any:
        if layer.memory is None:
            return None
        one = mode == "last_loop" and not layer.memory.recurrent
        return layer.memory.entry(config, loops=1 if one else slots, batch=batch, capacity=capacity, dtype=dtype)

    return Cache(
        prelude=stack(config.prelude, 1),
        core=stack(config.core, slots),
        coda=stack(config.coda, 1),
        length=jnp.zeros(batch, jnp.int32),
    )


def read(entries: tuple[Any, ...], loop: Any) -> tuple[Any, ...]:
    """What round `loop` sees of the past: its own slot, or the last one there is."""

    def slot(leaf: Array) -> Array:  # of several the right one is known at run time only, and is copied
        return leaf[0] if leaf.shape[0] == 1 else leaf[jnp.minimum(loop, leaf.shape[0] - 1)]

    return jax.tree.map(slot, entries)


def blank(entries: tuple[Any, ...], made: tuple[Any, ...]) -> tuple[Any, ...]:
    """Zeros for what a round makes of new tokens, of these shapes, in every slot of its layer's entry."""

    def one(entry: Any, made: Any) -> Any:
        slots = _slots(entry)
        return jax.tree.map(lambda leaf: jnp.zeros((slots, *leaf.shape), leaf.dtype), made)

    return tuple(one(*pair) for pair in zip(entries, made, strict=True))


def commit(
    letters: str, entries: tuple[Any, ...], made: tuple[Any, ...], length: Int[Array, "B"], new: Int[Array, "B"]
) -> tuple[Any, ...]:
    """A stack's entries with what the first `new` [B] tokens made in each slot, after `length` [B] earlier ones."""

    def one(letter: str, entry: Any, made: Any) -> Any:
        memory = LAYERS[letter].memory
        return None if memory is None else memory.commit(entry, made, length, new)

    return tuple(one(*of_layer) for of_layer in zip(letters, entries, made, strict=True))


def cache_bytes(
    config: ModelConfig, *, tokens: int, loops: int | None = None, mode: CacheMode = "per_loop", dtype: Any
) -> CacheBytes:
    """Bytes of one row's cache for `tokens` tokens and up to `loops` loops."""
    cache = jax.eval_shape(lambda: init_cache(config, 1, tokens, loops=loops, mode=mode, dtype=dtype))
    sizes = {False: 0, True: 0}
    for letter, entry in zip(config.layers, cache.prelude + cache.core + cache.coda, strict=True):
        memory = LAYERS[letter].memory
        if memory is not None:
            sizes[memory.recurrent] += sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(entry))
    return CacheBytes(attention=sizes[False], states=sizes[True])


def _slots(entry: Any) -> int:
    """Loop slots of an entry, 1 for none."""
    return max((leaf.shape[0] for leaf in jax.tree.leaves(entry)), default=1)
