"""How a sub-layer joins the stream: x + f(RMSNorm(x)), conditioned or not, or a step on the unit sphere."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from elr_jax.conditioning import LayerCondition, enter_layer, leave_layer
from elr_jax.config import ModelConfig, Runtime
from elr_jax.layers import LAYERS, Context
from elr_jax.layers.norms import rms_norm, unit_norm
from elr_jax.params import vector
from elr_jax.typing import Array, Float, Hidden, widen

POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "layer": jax.checkpoint_policies.nothing_saveable,
    "round": jax.checkpoint_policies.nothing_saveable,  # the core is replayed whole: model.py takes its layers out
}


@struct.dataclass
class SubLayer:
    """One physical layer: the scale of its norm, or its rate on the unit sphere, and the parameters of its function."""

    norm: Float[Array, "D"] | None
    rate: Float[Array, "D"] | None
    mixer: Any
    condition: LayerCondition | None = None


def stack_specs(letters: str, config: ModelConfig, condition: LayerCondition | None = None) -> tuple[SubLayer, ...]:
    """Parameter declarations of a string of layers, each with the declared conditioning."""
    gain = 0.0 if config.residual_init == "zero" else 1 / math.sqrt(len(config.layers))
    start = config.sphere.init_std if config.sphere else 1.0
    join = vector((config.d_model,), ("embed",), start)
    norm, rate = (None, join) if config.sphere else (join, None)
    return tuple(
        SubLayer(norm=norm, rate=rate, mixer=LAYERS[letter].specs(config, gain), condition=condition)
        for letter in letters
    )


def sub_layer(
    letter: str, x: Hidden, params: SubLayer, context: Context, config: ModelConfig, past: Any = None
) -> tuple[Hidden, Any]:
    """x + f(RMSNorm(x)), as its conditioning changes it.

    On the unit sphere unit(x̂ + |rate·rate_init/std| ⊙ (unit(f(x)) − x̂)) with x̂ = unit(x). With it comes what the
    layer's tokens make for a cache.
    """
    with jax.named_scope(f"layer_{letter}"):
        inner = x if params.norm is None else rms_norm(x, params.norm, eps=config.norm_eps)
        inner = enter_layer(inner, params.condition, context.condition)
        out, made = LAYERS[letter].apply(inner, params.mixer, context, config, past=past)
        if params.rate is None or config.sphere is None:
            return x + leave_layer(out, params.condition, context.condition), made
        start, end = (unit_norm(widen(y), eps=config.norm_eps) for y in (x, out))
        step = jnp.abs(widen(params.rate) * (config.sphere.rate_init / config.sphere.init_std))
        return unit_norm(start + step * (end - start), eps=config.norm_eps).astype(x.dtype), made


def apply_stack(
    x: Hidden, stack: tuple[SubLayer, ...], context: Context, *, letters: str, config: ModelConfig, runtime: Runtime
) -> Hidden:
    """Run a string of layers; `runtime.remat` says what their backward pass keeps."""
    for letter, params in zip(letters, stack, strict=True):
        x = _remat(letter, config, runtime)(x, params, context)
    return x


def _remat(letter: str, config: ModelConfig, runtime: Runtime):
    def without_cache(x: Hidden, params: SubLayer, context: Context) -> Hidden:
        return sub_layer(letter, x, params, context, config)[0]

    policy = POLICIES.get(runtime.remat)
    return without_cache if policy is None else jax.checkpoint(without_cache, policy=policy)


def extend_stack(
    x: Hidden,
    stack: tuple[SubLayer, ...],
    context: Context,
    past: tuple[Any, ...],
    *,
    letters: str,
    config: ModelConfig,
) -> tuple[Hidden, tuple[Any, ...]]:
    """Run a string of layers over new tokens, each after its own past, and collect what they make for the cache."""
    made = []
    for letter, params, before in zip(letters, stack, past, strict=True):
        x, kept = sub_layer(letter, x, params, context, config, before)
        made.append(kept)
    return x, tuple(made)
