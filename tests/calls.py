"""A model's tokens read in calls of any size at any depths, for the laws of caches."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from elr_jax import incremental
from elr_jax.cache import init_cache

extend = jax.jit(incremental.extend, static_argnames=("config", "fresh", "last_only"))


def any_calls(width, loops, total):
    """Lists of ([new tokens], [depth]) for two rows: up to `width` tokens a call, 1 to `total` in all."""
    pair = lambda low, high: st.lists(st.integers(low, high), min_size=2, max_size=2)
    calls = st.lists(st.tuples(pair(0, width), pair(1, loops)), min_size=2, max_size=8)
    return calls.filter(lambda calls: all(1 <= sum(new[row] for new, _ in calls) <= total for row in range(2)))


def run_calls(params, tokens, calls, mode="per_loop", *, config, width):
    """Logits of each row's tokens [rows, total] and the cache after the calls; padding holds a real token's id."""
    rows, total = tokens.shape
    cache = init_cache(config, rows, total, mode=mode)
    start, logits = np.zeros(rows, int), [[] for _ in tokens]
    for new, depth in calls:
        chunk = np.full((rows, width if max(new) > 1 else 1), 5)
        for row, count in enumerate(new):
            chunk[row, :count] = tokens[row, start[row] : start[row] + count]
        out, cache = extend(params, chunk, jnp.array(depth), cache, new=jnp.array(new), config=config)
        for row, count in enumerate(new):
            logits[row].append(out[row, :count])
        start += new
    return [np.concatenate(row) for row in logits], cache


def row_of(cache, row):
    """A row's part of all entries."""
    return jax.tree.map(lambda leaf: leaf[:, row], (cache.prelude, cache.core, cache.coda))
