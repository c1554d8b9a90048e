"""The cache entries of attention layers: keys and values of past tokens, in a ring where a window bounds them."""

import jax
import jax.numpy as jnp

from elr_jax.config import ModelConfig
from elr_jax.layers.attention import KV, held_positions
from elr_jax.typing import Array, Int


def kv_entry(config: ModelConfig, *, letter: str, loops: int, batch: int, capacity: int, dtype: str) -> KV:
    """An empty entry [L,B,K,S,H]; an `S` layer's has no more slots than its window."""
    attention = config.attention
    size = min(capacity, attention.window) if letter == "S" else capacity
    shape = (loops, batch, attention.num_kv_heads, size, attention.head_dim)
    return KV(key=jnp.zeros(shape, dtype), value=jnp.zeros(shape, dtype))


def kv_commit(entry: KV, made: KV, length: Int[Array, "B"], new: Int[Array, "B"]) -> KV:
    """The entry with the first `new` [B] of the made tokens [L,B,K,T,H] after the `length` [B] there were."""
    return jax.tree.map(lambda old, add: _commit(old, add.astype(old.dtype), length, new), entry, made)


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
