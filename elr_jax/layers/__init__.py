"""The layer letters: for each, the declaration of its parameters and its function."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from elr_jax.config import ModelConfig
from elr_jax.layers.attention import KV, Context, attend, attention_specs, make_context
from elr_jax.layers.mlp import mlp, mlp_specs
from elr_jax.typing import Hidden


class Layer(NamedTuple):
    """One kind of layer.

    `specs(config, output_gain)` declares its parameters. `apply(x, params, context, config, past=…)` returns its output
    and what a cache keeps of its tokens (None: nothing), given what the cache kept of those before them.
    """

    specs: Callable[[ModelConfig, float], Any]
    apply: Callable[..., tuple[Hidden, KV | None]]


LAYERS = {
    "*": Layer(attention_specs, partial(attend, letter="*")),
    "S": Layer(attention_specs, partial(attend, letter="S")),
    "-": Layer(mlp_specs, lambda x, params, context, config, *, past=None: (mlp(x, params, config), None)),
}

__all__ = ["KV", "LAYERS", "Context", "Layer", "make_context"]
