"""Feed-forward layers (`-`): SwiGLU with a gate matrix, squared ReLU without."""

import jax
import jax.numpy as jnp
from flax import struct

from elr_jax.config import ModelConfig
from elr_jax.layers.linear import product
from elr_jax.params import matrix
from elr_jax.typing import Array, Float, Hidden


@struct.dataclass
class MLP:
    """Weights of one feed-forward layer; `gate` is None for squared ReLU."""

    gate: Float[Array, "D F"] | None
    up: Float[Array, "D F"]
    down: Float[Array, "F D"]


def mlp_specs(config: ModelConfig, output_gain: float) -> MLP:
    """Parameter declarations of one feed-forward layer."""
    d, f = config.d_model, config.mlp.d_ff
    wide = matrix((d, f), ("embed", "mlp"))
    return MLP(
        gate=wide if config.mlp.kind == "swiglu" else None,
        up=wide,
        down=matrix((f, d), ("mlp", "embed"), gain=output_gain),
    )


def mlp(x: Hidden, params: MLP) -> Hidden:
    """(silu(x G) ⊙ x U) D with a gate matrix, relu(x U)² D without."""
    up = product("btd,df->btf", x, params.up)
    if params.gate is None:
        inner = jnp.square(jax.nn.relu(up))
    else:
        inner = jax.nn.silu(product("btd,df->btf", x, params.gate)) * up
    return product("btf,fd->btd", inner, params.down)
