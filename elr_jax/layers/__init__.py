"""The layer letters: for each, the declaration of its parameters and its function."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from elr_jax.config import ModelConfig
from elr_jax.layers.attention import KV, Context, attend, attention_specs, make_context, pack_attention
from elr_jax.layers.mlp import mlp, mlp_specs, pack_mlp
from elr_jax.typing import Hidden


class Layer(NamedTuple):
    """One kind of layer.

    `specs(config, output_gain)` declares its parameters. `apply(x, params, context, config, past=…)` returns its output
    and what a cache keeps of its tokens (None: nothing), given what the cache kept of those before them.
    `pack(params, dtype)` makes working copies, which `apply` takes as well, for inputs of few rows.
    """

    specs: Callable[[ModelConfig, float], Any]
    apply: Callable[..., tuple[Hidden, KV | None]]
    pack: Callable[[Any, str], Any]


LAYERS = {
    "*": Layer(attention_specs, partial(attend, letter="*"), pack_attention),
    "S": Layer(attention_specs, partial(attend, letter="S"), pack_attention),
    "-": Layer(mlp_specs, lambda x, params, context, config, *, past=None: (mlp(x, params, config), None), pack_mlp),
}

__all__ = ["KV", "LAYERS", "Context", "Layer", "make_context"]
