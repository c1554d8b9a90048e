"""Sizes of the op: Dory's layers, a wide group of heads, the narrowest head, and caches of both kinds."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.case import Case
from pallas_kernels.windowed_attention.api import cached_attention, windowed_attention
from pallas_kernels.windowed_attention.opponents import OPPONENTS


def sequence(
    name: str, batch: int, length: int, heads: int, groups: int, width: int, window: int | None, dtype: Any = "bfloat16"
) -> Case:
    """Attention of a sequence to itself."""
    array = lambda n: jax.ShapeDtypeStruct((batch, length, n, width), dtype)
    keys = min(window or length, length) - (0 if window else length / 2)
    return Case(
        name=name,
        function=partial(windowed_attention, window=window),
        operands=(array(heads), array(groups), array(groups), jax.ShapeDtypeStruct((batch, length), jnp.int32)),
        inputs=3,
        flops=4 * batch * length * heads * width * keys,
        scores=batch * heads * length * length * jnp.dtype(dtype).itemsize,
        opponents={name: (who, partial(call, window=window)) for name, (who, call) in OPPONENTS.items()},
    )


def step(name: str, batch: int, new: int, heads: int, groups: int, width: int, slots: int, window: int | None) -> Case:
    """Attention of new tokens to a cache and themselves."""
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    fresh, past = array(batch, new, groups, width), array(batch, groups, slots, width)
    return Case(
        name=name,
        function=partial(cached_attention, window=window),
        operands=(array(batch, new, heads, width), fresh, fresh, past, past, jax.ShapeDtypeStruct((batch,), jnp.int32)),
        inputs=0,
        flops=4 * batch * new * heads * width * slots,
    )


CASES = [
    sequence("dory_window", 1, 4096, 16, 4, 256, 1024),
    sequence("dory_full", 1, 4096, 16, 4, 256, None),
    sequence("eight_share", 2, 2048, 32, 4, 128, 512),
    sequence("narrow", 1, 2048, 8, 8, 64, 256, "float32"),
    step("ring", 8, 1, 16, 4, 256, 1024, 1024),
    step("linear", 8, 1, 16, 4, 256, 8192, None),
    step("chunk", 2, 256, 16, 4, 256, 1000, 1000),
]
