"""Loop rules and small models that several test files share."""

import jax
import jax.numpy as jnp
import numpy as np

from elr_jax import presets
from elr_jax.config import (
    AttentionConfig,
    DeltaProductConfig,
    LoopRule,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    SphereConfig,
)

RULES = {
    "elr": LoopRule(),
    "dory": LoopRule(initial="copy", inject="residual", update="replace", boundary="unit"),
    "parcae": LoopRule(initial="random", inject="gated", update="replace", readout="linear"),
    "huginn": LoopRule(initial="random", inject="concat", update="replace"),
    "residual": LoopRule(initial="zero", inject="residual", update="residual"),
    "delta": LoopRule(initial="zero", inject="concat", update="delta", boundary="rms", readout="linear"),
}


def small_model(rule: LoopRule, *, prelude: str = "*", core: str = "S-", coda: str = "-", **changes) -> ModelConfig:
    """A model of width 8 with grouped heads, 13 tokens and a window of 3."""
    return ModelConfig(
        **{
            "vocab_size": 13,
            "d_model": 8,
            "prelude": prelude,
            "core": core,
            "coda": coda,
            "attention": AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=4, window=3, value_gate_inputs=5),
            "mlp": MLPConfig(d_ff=12),
            "delta": DeltaProductConfig(num_heads=4, num_key_heads=2, key_dim=3, value_dim=5, householder=2),
            "moe": MoEConfig(num_experts=5, top_k=2, d_expert=6, d_shared=4, route_scale=1.5),
            "loop": rule,
            **changes,
        }
    )


def perturb(params, *, seed: int = 0, scale: float = 0.3):
    """Parameters away from their start, so that no gate, scale or bias sits at a special value."""
    rng = np.random.default_rng(seed)  # a draw by JAX is a program for every shape
    return jax.tree.map(lambda leaf: jnp.asarray(leaf + scale * rng.standard_normal(leaf.shape, np.float32)), params)


def assert_same_bits(actual, expected):
    """Every leaf equal bit for bit, NaN included."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, one), other in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        same = jnp.array_equal(one, other, equal_nan=True)
        assert same, f"{jax.tree_util.keystr(path)} differs by up to {jnp.abs(one - other).max()}"


def assert_close(actual, expected, *, rtol: float = 1e-5):
    """Every leaf equal within `rtol` of its own largest value."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, one), other in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        error, size = jnp.abs(one - other).max(), jnp.abs(other).max()
        assert error <= rtol * size, f"{jax.tree_util.keystr(path)} is off by {error} of {size}"


def tiny_dory(*, prelude: str = "S-*-", core: str = "S-S-*-", coda: str = "*-", **changes) -> ModelConfig:
    """Dory in small: width 32, grouped heads, a window of 5 and 61 tokens, with the released model's rotary bases."""
    return ModelConfig(
        **{
            "vocab_size": 61,
            "d_model": 32,
            "prelude": prelude,
            "core": core,
            "coda": coda,
            "attention": AttentionConfig(
                num_heads=4, num_kv_heads=2, head_dim=8, window=5, rope_base=1e7, window_rope_base=1e4
            ),
            "mlp": MLPConfig(d_ff=48),
            "loop": presets.DORY,
            "sphere": SphereConfig(),
            "max_positions": 256,
            **changes,
        }
    )


def programs(jitted) -> int:
    """How many programs a jitted function was compiled to."""
    return jitted._cache_size()
