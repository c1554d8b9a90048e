"""One declaration per parameter, from which initialisation, shapes, shardings, decay and the optimizer's groups follow.

Every module declares its parameters as a dataclass of `ParamSpec` leaves; the parameters themselves are the same
dataclass with arrays for leaves, and the helpers that make a spec are typed `Any` to stand in an array's place. `Group`
says how an optimizer treats a leaf:

- `matrix`: the weights of a linear map between hidden spaces (Muon or AdamW, decayed);
- `embedding`: token tables, the head and routers, whose rows or columns are names (AdamW, decayed);
- `vector`: scales, biases and gains (AdamW, not decayed);
- `loop`: everything that joins the rounds: gates, injection, readout (AdamW, not decayed, own learning-rate factor);
- `condition`: what tells layers the round (AdamW, not decayed, own learning-rate factor and warm-up);
- `balance`: selection biases of routers, which the train step moves by their load and no gradient does.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from elr_jax.typing import Array, PRNGKeyArray

Initializer = Callable[[PRNGKeyArray, tuple[int, ...]], Array]
Group = Literal["matrix", "embedding", "vector", "loop", "condition", "balance"]


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """Shape, logical axes, start and optimizer group of one parameter.

    After `stack` axes that tell separate matrices apart, the next `inputs` axes are summed over by the product the
    parameter takes part in, the others are its output.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Initializer
    group: Group
    inputs: int = 1
    stack: int = 0
    wide: bool = False
    """Stays float32 where other matrices get a working copy of less."""

    def __post_init__(self):
        assert len(self.shape) == len(self.axes), f"{self.shape} and {self.axes} differ in rank"


def truncated_normal(std: float) -> Initializer:
    """Normal values cut at two standard deviations and rescaled to the given one."""
    scale = std / 0.87962566103423978  # standard deviation of a unit normal cut at ±2
    return lambda key, shape: scale * jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32)


def constant(value: float) -> Initializer:
    """Every element the same value."""
    return lambda key, shape: jnp.full(shape, value, jnp.float32)


def unit_normal(axis: int) -> Initializer:
    """Normal values, their vectors along one axis scaled to norm 1."""

    def start(key: PRNGKeyArray, shape: tuple[int, ...]) -> Array:
        draw = jax.random.normal(key, shape, jnp.float32)
        return draw / jnp.linalg.norm(draw, axis=axis, keepdims=True)

    return start


def identity(key: PRNGKeyArray, shape: tuple[int, ...]) -> Array:
    """The identity matrix."""
    return jnp.eye(*shape, dtype=jnp.float32)


def orthogonal(gain: float) -> Initializer:
    """A random orthogonal matrix times a gain."""
    return lambda key, shape: jax.nn.initializers.orthogonal(gain)(key, shape, jnp.float32)


def matrix(
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    *,
    inputs: int = 1,
    stack: int = 0,
    gain: float = 1.0,
    group: Group = "matrix",
    unit: bool = False,
    wide: bool = False,
) -> Any:
    """A linear map between hidden spaces, started at standard deviation gain/√fan_in, or `unit` along `embed`."""
    std = gain / math.sqrt(math.prod(shape[stack : stack + inputs]))
    init = truncated_normal(std) if gain else constant(0.0)
    if unit:
        init = unit_normal(axes.index("embed"))
    return ParamSpec(shape=shape, axes=axes, init=init, group=group, inputs=inputs, stack=stack, wide=wide)


def table(shape: tuple[int, ...], axes: tuple[str | None, ...], std: float | None) -> Any:
    """An embedding: for each token one row of the given standard deviation, or of norm 1 (None)."""
    init = unit_normal(1) if std is None else truncated_normal(std)
    return ParamSpec(shape=shape, axes=axes, init=init, group="embedding")


def vector(shape: tuple[int, ...], axes: tuple[str | None, ...], value: float, *, group: Group = "vector") -> Any:
    """A scale or bias with one constant start."""
    return ParamSpec(shape=shape, axes=axes, init=constant(value), group=group, inputs=0)


def onto_sphere(params: Any, specs: Any) -> Any:
    """Every matrix and table with its vectors along the model's width (`embed`) scaled to norm 1, as nGPT trains.

    Read and out projections alike: each vector that meets or makes a hidden state is a direction. [NVIDIA/ngpt]
    """

    def project(spec: ParamSpec, leaf: Array) -> Array:
        if spec.group not in ("matrix", "embedding"):
            return leaf
        norm = jnp.linalg.norm(leaf, axis=spec.axes.index("embed"), keepdims=True)
        return leaf / jnp.maximum(norm, jnp.finfo(leaf.dtype).tiny)  # a vector of zeros has no direction to keep

    return map_specs(project, specs, params)


def map_specs(function: Callable[..., Any], specs: Any, *trees: Any) -> Any:
    """Apply a function to every `ParamSpec` of a tree, and to the leaves beside it in other trees of its structure."""
    return jax.tree.map(function, specs, *trees, is_leaf=lambda leaf: isinstance(leaf, ParamSpec))


def init_params(key: PRNGKeyArray, specs: Any) -> Any:
    """Initial values of every spec, float32.

    Each leaf's key is folded with its own path, so adding or removing a parameter never changes another.
    """

    def start(path: Any, spec: ParamSpec) -> Array:
        leaf_key = jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))
        return spec.init(leaf_key, spec.shape)

    return jax.tree.map_with_path(start, specs)


def overlay(fresh: Any, old: Any) -> Any:
    """The fresh tree with every leaf of the old one in the place of its own path."""
    kept = leaves_by_path(old)
    merged = jax.tree.map_with_path(lambda path, leaf: kept.pop(path_name(path), leaf), fresh)
    assert not kept, f"no place for {', '.join(kept)}"
    return merged


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Every leaf under its path, such as `core/0/mixer/up`."""
    return {path_name(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def path_name(path: Any) -> str:
    """A leaf's path in words."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def abstract_params(specs: Any) -> Any:
    """The parameters as `jax.ShapeDtypeStruct`s, float32."""
    return map_specs(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32), specs)


def count_params(specs: Any) -> int:
    """Number of scalar parameters."""
    return sum(math.prod(spec.shape) for spec in jax.tree.leaves(specs))
