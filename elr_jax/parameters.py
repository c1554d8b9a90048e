"""All parameters of a model: declared, started, grafted, moved by a router's load, cast and packed for use."""

import dataclasses
from typing import Any

from flax import struct

from elr_jax.conditioning import Conditioning, conditioning_specs, layer_specs
from elr_jax.config import ModelConfig, Runtime
from elr_jax.errors import ElrError
from elr_jax.layers import LAYERS
from elr_jax.layers.linear import pack as pack_weights
from elr_jax.layers.moe import balanced
from elr_jax.loop import LoopParams, loop_specs
from elr_jax.params import abstract_params, init_params, leaves_by_path, map_specs, matrix, overlay, table, vector
from elr_jax.residual import SubLayer, stack_specs
from elr_jax.typing import Array, Float, PRNGKeyArray


@struct.dataclass
class Params:
    """All parameters of a model.

    `head` is None when the embedding is tied, `norm` on the unit sphere, `logit_scale` off it.
    """

    embedding: Float[Array, "V D"]
    prelude: tuple[SubLayer, ...]
    core: tuple[SubLayer, ...]
    coda: tuple[SubLayer, ...]
    loop: LoopParams
    norm: Float[Array, "D"] | None
    head: Float[Array, "D V"] | None
    logit_scale: Float[Array, "V"] | None
    conditioning: Conditioning | None = None


@struct.dataclass
class WorkingCopy:
    """Parameters that `pack` made ready for inputs of few rows, in the type they are used in."""

    params: Params


def param_specs(config: ModelConfig) -> Params:
    """The declaration of every parameter: a `Params` of `ParamSpec` leaves."""
    v, d = config.vocab_size, config.d_model
    sphere = config.sphere
    std = None if sphere else d**-0.5 if config.tie_embeddings else 1.0
    head = matrix((d, v), ("embed", "vocab"), group="embedding", unit=sphere is not None)
    return Params(
        embedding=table((v, d), ("vocab", "embed"), std),
        prelude=stack_specs(config.prelude, config),
        core=stack_specs(config.core, config, layer_specs(config)),
        coda=stack_specs(config.coda, config, layer_specs(config)),
        loop=loop_specs(config),
        norm=None if sphere else vector((d,), ("embed",), 1.0),
        head=None if config.tie_embeddings else head,
        logit_scale=vector((v,), ("vocab",), sphere.init_std) if sphere else None,
        conditioning=conditioning_specs(config),
    )


def init(key: PRNGKeyArray, config: ModelConfig) -> Params:
    """Initial parameters, float32."""
    return init_params(key, param_specs(config))


def abstract(config: ModelConfig) -> Params:
    """The parameters' shapes and types, without memory."""
    return abstract_params(param_specs(config))


def graft(params: Params, config: ModelConfig, *, key: PRNGKeyArray) -> Params:
    """Parameters of the model without conditioning, as they are, beside freshly started ones of its conditioning.

    The result computes at first what `params` compute, at every loop count. `init(key, config)` is
    `graft(init(key, config without conditioning), config, key=key)`.

    Raises:
        ElrError: a config without conditioning, or parameters that don't fit the rest of it.
    """
    if config.conditioning is None:
        raise ElrError("config.conditioning=None has nothing to graft: set it to a ConditioningConfig")
    given, plain = leaves_by_path(params), leaves_by_path(abstract(dataclasses.replace(config, conditioning=None)))
    for name in {**given, **plain}:
        is_, should = (side[name].shape if name in side else "absent" for side in (given, plain))
        if is_ != should:
            raise ElrError(
                f"{name} is {is_}, not {should}: graft onto parameters of this very config without conditioning"
            )
    return overlay(init(key, config), params)


def balance_routers(params: Params, loads: Float[Array, "layers E"], rate: float, *, config: ModelConfig) -> Params:
    """The parameters with the selection bias of every mixture of experts moved by `rate` against its load."""
    todo = iter(loads)

    def stack(name: str) -> tuple[SubLayer, ...]:
        layers = zip(getattr(config, name), getattr(params, name), strict=True)
        return tuple(
            dataclasses.replace(layer, mixer=balanced(layer.mixer, next(todo), rate)) if letter == "E" else layer
            for letter, layer in layers
        )

    return dataclasses.replace(params, **{name: stack(name) for name in ("prelude", "core", "coda")})


def pack(params: Params, *, config: ModelConfig, runtime: Runtime = Runtime()) -> WorkingCopy:
    """Working copies for inputs of few rows, as in decoding: weights that read the same input become one matrix.

    Its rows are the outputs. `apply`, `extend` and `states` take them in the parameters' place and compute the same but
    for rounding. They need as much memory again as the parameters in `runtime.dtype`.
    """
    working = cast(params, config, runtime)

    def stack(name: str) -> tuple[SubLayer, ...]:
        layers = zip(getattr(config, name), getattr(working, name), strict=True)
        return tuple(dataclasses.replace(layer, mixer=mixer(letter, layer.mixer)) for letter, layer in layers)

    def mixer(letter: str, params: Any) -> Any:
        make = LAYERS[letter].pack
        return params if make is None else make(params, runtime.dtype)

    stacks = {name: stack(name) for name in ("prelude", "core", "coda")}
    head = None if params.head is None else pack_weights(params.head, dtype=runtime.dtype)
    return WorkingCopy(params=dataclasses.replace(working, head=head, **stacks))


def cast(params: Params | WorkingCopy, config: ModelConfig, runtime: Runtime) -> Params:
    """Working copies of the matrices, made once a pass; vectors stay as they are: norms and gates widen them."""
    if isinstance(params, WorkingCopy):
        return params.params
    return map_specs(
        lambda spec, leaf: leaf.astype(runtime.dtype) if spec.inputs and not spec.wide else leaf,
        param_specs(config),
        params,
    )
