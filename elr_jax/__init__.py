"""Language models of elastic depth: one set of parameters, run at any loop count, per example.

import elr_jax as elr

config = elr.presets.tiny_text()
params = elr.init(jax.random.key(0), config)
logits = elr.apply(params, tokens, depth, config=config)  # depth: int32 [B]
"""

from elr_jax import depth, flops, presets, sharding
from elr_jax.cache import Cache, cache_bytes, init_cache
from elr_jax.config import (
    AttentionConfig,
    ConditioningConfig,
    DeltaProductConfig,
    LoopRule,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    Runtime,
    SphereConfig,
    from_dict,
    to_dict,
)
from elr_jax.errors import ElrError
from elr_jax.incremental import encode, extend
from elr_jax.losses import DepthSums, cross_entropy, sum_by_depth
from elr_jax.model import apply, routing, states
from elr_jax.parameters import Params, abstract, graft, init, param_specs
from elr_jax.params import ParamSpec, count_params

__all__ = [
    "AttentionConfig",
    "Cache",
    "ConditioningConfig",
    "DeltaProductConfig",
    "DepthSums",
    "ElrError",
    "LoopRule",
    "MLPConfig",
    "MoEConfig",
    "ModelConfig",
    "ParamSpec",
    "Params",
    "Runtime",
    "SphereConfig",
    "abstract",
    "apply",
    "cache_bytes",
    "count_params",
    "cross_entropy",
    "depth",
    "encode",
    "extend",
    "flops",
    "from_dict",
    "graft",
    "init",
    "init_cache",
    "param_specs",
    "presets",
    "routing",
    "sharding",
    "states",
    "sum_by_depth",
    "to_dict",
]
