"""Where a cache keeps its tokens."""

import jax.numpy as jnp

from elr_jax.typing import Array, Int


def held_positions(length: Int[Array, "B"], size: int) -> Int[Array, "B S"]:
    """Which token each slot of a cache of `size` holds, counted from its row's first; negative where none is.

    Token p is kept in slot p mod S, so a cache that is full holds the last S tokens.
    """
    last = length[:, None] - 1
    return last - (last - jnp.arange(size)) % size
