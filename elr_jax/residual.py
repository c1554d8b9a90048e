"""How a sub-layer joins the stream: x + f(RMSNorm(x)), conditioned or not, or a step on the unit sphere."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import struct
from jax.ad_checkpoint import checkpoint_name

from elr_jax.conditioning import LayerCondition, enter_layer, leave_layer
from elr_jax.config import ModelConfig, Remat, Runtime
from elr_jax.layers import LAYERS, Context
from elr_jax.layers.attention import KV, GlobalKV
from elr_jax.layers.norms import rms_norm
from elr_jax.params import vector
from elr_jax.sharding import constrain
from elr_jax.typing import Array, Float, Hidden, widen
from pallas_kernels.sphere_step import sphere_step

Out = TypeVar("Out")
_LAYER_INPUT = "layer_input"
POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "layer": jax.checkpoint_policies.nothing_saveable,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[_LAYER_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
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
        out = constrain(out, "batch", "sequence", None)
        if params.rate is None or config.sphere is None:
            return x + leave_layer(out, params.condition, context.condition), made
        rate = widen(params.rate) * (config.sphere.rate_init / config.sphere.init_std)
        return sphere_step(x, out, rate, eps=config.norm_eps, implementation=context.kernels), made


def apply_stack(
    x: Hidden,
    stack: tuple[SubLayer, ...],
    context: Context,
    carried: tuple[Any, ...],
    *,
    letters: str,
    config: ModelConfig,
    runtime: Runtime,
) -> tuple[Hidden, Context, tuple[Any, ...]]:
    """Run a string of layers, each with what it carries; `runtime.remat` says what their backward pass keeps.

    With the output come the context, with the global keys of the last `G`, and what the layers carry on.
    """
    later = []
    for letter, params, before in zip(letters, stack, carried, strict=True):
        x, shared, after = _remat(letter, config, runtime)(x, params, context, before)
        if shared is not None:
            context = dataclasses.replace(context, shared=shared)
        later.append(after)
    return x, context, tuple(later)


def _remat(letter: str, config: ModelConfig, runtime: Runtime):
    def without_cache(x: Hidden, params: SubLayer, context: Context, before: Any) -> tuple[Hidden, KV | None, Any]:
        x = checkpoint_name(x, _LAYER_INPUT)
        x, made = sub_layer(letter, x, params, context, config, before)
        return x, made.shared if letter == "G" else None, None if LAYERS[letter].carry is None else made

    return rematerialised(without_cache, runtime.remat)


def rematerialised(function: Callable[..., Out], remat: Remat) -> Callable[..., Out]:
    """The function, of which a backward pass keeps what the policy says and makes the rest again."""
    policy = POLICIES.get(remat)
    return function if policy is None else jax.checkpoint(function, policy=policy)


def extend_stack(
    x: Hidden,
    stack: tuple[SubLayer, ...],
    context: Context,
    past: tuple[Any, ...],
    *,
    letters: str,
    config: ModelConfig,
) -> tuple[Hidden, Context, tuple[Any, ...]]:
    """Run a string of layers over new tokens, each after its own past, and collect what they make for the cache.

    With the output comes the context, with the global keys of the last `G` and of the tokens before.
    """
    made = []
    for letter, params, before in zip(letters, stack, past, strict=True):
        x, kept = sub_layer(letter, x, params, context, config, before)
        if letter == "G":
            context = share(context, kept, before)
        made.append(kept)
    return x, context, tuple(made)


def share(context: Context, made: GlobalKV, past: GlobalKV | None) -> Context:
    """The context below a `G`, given what it made and what a cache held of it."""
    return dataclasses.replace(context, shared=made.shared, shared_past=None if past is None else past.shared)
