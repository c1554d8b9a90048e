"""What a model remembers of the tokens it has read: keys and values of every attention layer, a length for each row.

Every entry is head-major [L, B, K, S, H] with a leading axis of loops: one slot for the layers that run once; for the
core one for each loop (`per_loop`), or a single one (`last_loop`). The shape alone decides. Slot l of a core entry
holds a token's keys of round l, or of its last round where it ran fewer, so later tokens may run any depth. A single
slot holds those of its last round: in round i a query then sees round-i keys of the tokens of its own call and
last-round keys of earlier calls, so results depend on where calls begin. [Dory]

Window layers keep the last W tokens in a ring: token p stands in slot p mod S of every entry.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from elr_jax.config import LETTERS, ModelConfig
from elr_jax.errors import ElrError
from elr_jax.layers import KV
from elr_jax.typing import Array, Int
from pallas_kernels.windowed_attention import held_positions

CacheMode = Literal["per_loop", "last_loop"]


@struct.dataclass
class Cache:
    """Entries of the three stacks (None for a layer without memory) and the tokens each row has in them."""

    prelude: tuple[KV | None, ...]
    core: tuple[KV | None, ...]
    coda: tuple[KV | None, ...]
    length: Int[Array, "B"]

    @property
    def loops(self) -> int:
        """Loop slots of the core; 1 under `last_loop`."""
        return max((entry.key.shape[0] for entry in self.core if entry is not None), default=1)


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
    attention = config.attention
    slots = (loops or config.loop.max_loops) if mode == "per_loop" else 1

    def entry(letter: str, loops: int) -> KV | None:
        if "attention" not in LETTERS[letter]:
            return None
        size = min(capacity, attention.window) if letter == "S" else capacity
        shape = (loops, batch, attention.num_kv_heads, size, attention.head_dim)
        return KV(key=jnp.zeros(shape, dtype), value=jnp.zeros(shape, dtype))

    return Cache(
        prelude=tuple(entry(letter, 1) for letter in config.prelude),
        core=tuple(entry(letter, slots) for letter in config.core),
        coda=tuple(entry(letter, 1) for letter in config.coda),
        length=jnp.zeros(batch, jnp.int32),
    )


def read(entries: tuple[KV | None, ...], loop: Any) -> tuple[KV | None, ...]:
    """What round `loop` sees of the past: its own slot, or the last one there is."""
    return jax.tree.map(lambda leaf: leaf[jnp.minimum(loop, leaf.shape[0] - 1)], entries)


def blank(entries: tuple[KV | None, ...], tokens: int) -> tuple[KV | None, ...]:
    """Zeros of the shape that `tokens` new tokens a row will add to the entries."""
    return jax.tree.map(lambda leaf: jnp.zeros((*leaf.shape[:3], tokens, leaf.shape[4]), leaf.dtype), entries)


def commit(
    entries: tuple[KV | None, ...], made: tuple[KV | None, ...], length: Int[Array, "B"], new: Int[Array, "B"]
) -> tuple[KV | None, ...]:
    """The entries with the first `new` [B] of the made tokens [L,B,K,T,H] after the `length` [B] there were."""
    return jax.tree.map(lambda old, add: _commit(old, add.astype(old.dtype), length, new), entries, made)


def _commit(old: Array, add: Array, length: Int[Array, "B"], new: Int[Array, "B"]) -> Array:
    size, tokens = old.shape[3], add.shape[3]
    if tokens == 1:  # one write a row, in place where the buffer is donated
        slot = jnp.where(new > 0, length % size, size)  # a slot outside drops the write
        rows = jnp.arange(old.shape[1])
        return old.at[:, rows, :, slot].set(jnp.moveaxis(add[:, :, :, 0], 0, 1), mode="drop")
    # every slot looks up the newest token it may hold: many writes at once without a scatter's row-by-row loop
    token = held_positions(length + new, size) - length[:, None]
    found = jnp.take_along_axis(add, jnp.clip(token, 0, tokens - 1)[None, :, None, :, None], axis=3)
    return jnp.where((token >= 0)[None, :, None, :, None], found, old)
