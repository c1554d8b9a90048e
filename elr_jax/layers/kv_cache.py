"""The cache entries of attention layers: keys and values of past tokens, in a ring where a window bounds them."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from elr_jax.config import ModelConfig
from elr_jax.layers.attention import KV, GlobalKV
from elr_jax.typing import Array, Int
from pallas_kernels.windowed_attention import held_positions

T = TypeVar("T", KV, GlobalKV)


def kv_entry(config: ModelConfig, *, letter: str, loops: int, batch: int, capacity: int, dtype: str) -> KV:
    """An empty entry [L,B,K,S,H]; that of a window has no more slots than it."""
    attention = config.attention
    size = min(capacity, attention.window) if letter in "SR" else capacity
    shape = (loops, batch, attention.num_kv_heads, size, attention.head_dim)
    return KV(key=jnp.zeros(shape, dtype), value=jnp.zeros(shape, dtype))


def global_entry(config: ModelConfig, **sizes: Any) -> GlobalKV:
    """An empty entry of a `G` layer: a window's ring, and room for all tokens' global keys."""
    return GlobalKV(window=kv_entry(config, letter="S", **sizes), shared=kv_entry(config, letter="*", **sizes))


def kv_commit(entry: T, made: T, length: Int[Array, "B"], new: Int[Array, "B"]) -> T:
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
