"""The layer letters: for each, the declaration of its parameters, its function, and what a cache keeps of it."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from elr_jax.config import ModelConfig
from elr_jax.layers.attention import Context, attend, attention_specs, make_context, pack_attention
from elr_jax.layers.delta_product import delta_commit, delta_entry, delta_product, delta_product_specs
from elr_jax.layers.kv_cache import global_entry, kv_commit, kv_entry
from elr_jax.layers.mlp import mlp, mlp_specs, pack_mlp
from elr_jax.layers.moe import moe, moe_specs, start_routing
from elr_jax.typing import Hidden


class Memory(NamedTuple):
    """What a cache keeps of a kind of layer.

    `entry(config, loops=…, batch=…, capacity=…, dtype=…)` is an empty one, its leaves [L, B, …]. `commit(entry, made,
    length, new)` is the entry after a call, `made` having the same leading axes: with the first `new` [B] of its tokens
    after `length` [B] earlier ones. A `recurrent` entry does not grow with the tokens.
    """

    entry: Callable[..., Any]
    commit: Callable[..., Any]
    recurrent: bool = False


class Layer(NamedTuple):
    """One kind of layer.

    `specs(config, output_gain)` declares its parameters. `apply(x, params, context, config, past=…)` returns its output
    and what its tokens make for the cache (None: nothing), given one slot of what the cache kept of those before them.
    `pack(params, dtype)` makes working copies, which `apply` takes as well, for inputs of few rows (None: it has none).
    A layer without memory may instead carry something from round to round: `carry(config, batch, length)` is that
    before the first, leaves [B, …], and `apply` takes it for `past` and returns what it has become.
    """

    specs: Callable[[ModelConfig, float], Any]
    apply: Callable[..., tuple[Hidden, Any]]
    memory: Memory | None = None
    pack: Callable[[Any, str], Any] | None = None
    carry: Callable[[ModelConfig, int, int], Any] | None = None


def _attention(letter: str) -> Layer:
    memory = Memory(global_entry if letter == "G" else partial(kv_entry, letter=letter), kv_commit)
    return Layer(partial(attention_specs, letter=letter), partial(attend, letter=letter), memory, pack_attention)


def _mlp(x: Hidden, params: Any, context: Context, config: ModelConfig, *, past: None = None) -> tuple[Hidden, None]:
    return mlp(x, params, config), None


LAYERS = {
    "*": _attention("*"),
    "S": _attention("S"),
    "V": _attention("V"),
    "G": _attention("G"),
    "R": _attention("R"),
    "D": Layer(delta_product_specs, delta_product, Memory(delta_entry, delta_commit, recurrent=True)),
    "-": Layer(mlp_specs, _mlp, pack=pack_mlp),
    "E": Layer(moe_specs, moe, carry=start_routing),
}


def start_carry(letters: str, config: ModelConfig, batch: int, length: int) -> tuple[Any, ...]:
    """What each of a string of layers carries before its first round; None for those that carry nothing."""
    starts = (LAYERS[letter].carry for letter in letters)
    return tuple(None if start is None else start(config, batch, length) for start in starts)


__all__ = ["LAYERS", "Context", "Layer", "Memory", "make_context", "start_carry"]
