"""Feed-forward layers (`-`): SwiGLU with a gate matrix, squared ReLU without."""

import jax
import jax.numpy as jnp
from flax import struct

from elr_jax.config import ModelConfig
from elr_jax.layers.linear import Packed, pack, product, products
from elr_jax.layers.norms import unit_norm
from elr_jax.params import matrix, vector
from elr_jax.typing import Array, Float, Hidden, widen


@struct.dataclass
class MLP:
    """Weights of one feed-forward layer; `gate` is None for squared ReLU, the scales are the unit sphere's alone."""

    gate: Float[Array, "D F"] | None
    up: Float[Array, "D F"]
    down: Float[Array, "F D"]
    gate_scale: Float[Array, "F"] | None
    up_scale: Float[Array, "F"] | None

    @property
    def reads(self) -> tuple[Array, ...]:
        """What reads the layer's input: up and, if there is one, gate."""
        return (self.up,) if self.gate is None else (self.up, self.gate)


@struct.dataclass
class PackedMLP:
    """Working copies of one feed-forward layer for inputs of few rows."""

    reads: Packed
    down: Packed
    gate_scale: Float[Array, "F"] | None
    up_scale: Float[Array, "F"] | None


def pack_mlp(params: MLP, dtype: str) -> PackedMLP:
    """Two matrices instead of two or three."""
    reads, down = pack(*params.reads, dtype=dtype), pack(params.down, dtype=dtype)
    return PackedMLP(reads=reads, down=down, gate_scale=params.gate_scale, up_scale=params.up_scale)


def mlp_specs(config: ModelConfig, output_gain: float) -> MLP:
    """Parameter declarations of one feed-forward layer."""
    d, f = config.d_model, config.mlp.d_ff
    sphere, gated = config.sphere is not None, config.mlp.kind == "swiglu"
    wide = matrix((d, f), ("embed", "mlp"), unit=sphere)
    scale = vector((f,), ("mlp",), 1.0) if sphere else None
    return MLP(
        gate=wide if gated else None,
        up=wide,
        down=matrix((f, d), ("mlp", "embed"), gain=output_gain, unit=sphere),
        gate_scale=scale if gated else None,
        up_scale=scale,
    )


def mlp(x: Hidden, params: MLP | PackedMLP, config: ModelConfig) -> Hidden:
    """(silu(x G) ⊙ x U) D with a gate matrix, relu(x U)² D without.

    On the unit sphere x G and x U are multiplied by scale·√D, and what D projects is normalised first.
    """
    up, *gate = products(x, params.reads)
    up = _scaled(up, params.up_scale, config)
    inner = activation(up, _scaled(gate[0], params.gate_scale, config) if gate else None)
    if config.sphere:
        inner = unit_norm(inner, eps=config.norm_eps)
    return product(inner, params.down)


def activation(up: Array, gate: Array | None) -> Array:
    """silu(gate) up, or relu(up)² without a gate."""
    return jnp.square(jax.nn.relu(up)) if gate is None else jax.nn.silu(gate) * up


def _scaled(x: Float[Array, "B T F"], scale: Float[Array, "F"] | None, config: ModelConfig) -> Float[Array, "B T F"]:
    return x if scale is None else (widen(x) * (widen(scale) * config.d_model**0.5)).astype(x.dtype)
