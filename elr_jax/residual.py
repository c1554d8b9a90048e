"""How a sub-layer joins the stream: x + f(RMSNorm(x))."""

import math
from typing import Any

import jax
from flax import struct

from elr_jax.config import ModelConfig, Runtime
from elr_jax.layers import LAYERS, Context
from elr_jax.layers.norms import rms_norm
from elr_jax.params import vector
from elr_jax.typing import Array, Float, Hidden

POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "layer": jax.checkpoint_policies.nothing_saveable,
    "round": jax.checkpoint_policies.nothing_saveable,  # the core is replayed whole: model.py takes its layers out
}


@struct.dataclass
class SubLayer:
    """One physical layer: the scale of its norm and the parameters of its function."""

    norm: Float[Array, "D"]
    mixer: Any


def stack_specs(letters: str, config: ModelConfig) -> tuple[SubLayer, ...]:
    """Parameter declarations of a string of layers."""
    gain = 0.0 if config.residual_init == "zero" else 1 / math.sqrt(len(config.layers))
    norm = vector(config.d_model, "embed", 1.0)
    return tuple(SubLayer(norm=norm, mixer=LAYERS[letter].specs(config, gain)) for letter in letters)


def apply_stack(
    x: Hidden, stack: tuple[SubLayer, ...], context: Context, *, letters: str, config: ModelConfig, runtime: Runtime
) -> Hidden:
    """Run a string of layers; `runtime.remat` says what their backward pass keeps."""
    for letter, params in zip(letters, stack, strict=True):
        x = _remat(letter, config, runtime)(x, params, context)
    return x


def _remat(letter: str, config: ModelConfig, runtime: Runtime):
    def sub_layer(x: Hidden, params: SubLayer, context: Context) -> Hidden:
        with jax.named_scope(f"layer_{letter}"):
            return x + LAYERS[letter].apply(
                rms_norm(x, params.norm, eps=config.norm_eps), params.mixer, context, config
            )

    policy = POLICIES.get(runtime.remat)
    return sub_layer if policy is None else jax.checkpoint(sub_layer, policy=policy)
