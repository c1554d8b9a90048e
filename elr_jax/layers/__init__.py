"""The layer letters: for each, the declaration of its parameters and its function."""

from collections.abc import Callable
from typing import Any, NamedTuple

from elr_jax.config import ModelConfig
from elr_jax.layers.attention import Context, attend, attention_specs, make_context
from elr_jax.layers.mlp import mlp, mlp_specs
from elr_jax.typing import Hidden


class Layer(NamedTuple):
    """One kind of layer: `specs(config, output_gain)` and `apply(x, params, context, config)`."""

    specs: Callable[[ModelConfig, float], Any]
    apply: Callable[[Hidden, Any, Context, ModelConfig], Hidden]


LAYERS = {
    "*": Layer(attention_specs, lambda x, params, context, config: attend(x, params, context, config, window=None)),
    "S": Layer(
        attention_specs,
        lambda x, params, context, config: attend(x, params, context, config, window=config.attention.window),
    ),
    "-": Layer(mlp_specs, lambda x, params, context, config: mlp(x, params)),
}

__all__ = ["LAYERS", "Context", "Layer", "make_context"]
