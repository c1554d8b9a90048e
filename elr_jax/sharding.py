"""Where arrays live on a mesh of devices: the mesh's axes, and the rules from logical axes to them.

A mesh has some of five axes. `data` cuts the batch; `fsdp` cuts the batch and the weights, which are gathered for use;
`tensor` cuts heads, feed-forward widths and the vocabulary; `expert` cuts the batch and the experts; `sequence` cuts
the tokens of a row. Everything is one program under `jax.jit`: its numbers are those of one device, but for rounding.

    mesh = make_mesh("data=2,fsdp=4")
    params = jax.device_put(params, param_shardings(param_specs(config), mesh))
    with jax.set_mesh(mesh):
        logits = jax.jit(apply, static_argnames=("config", "runtime"))(params, tokens, depth, config=config)

Without a mesh all of it does nothing. `elr_jax.collectives` counts what a step exchanges: with `fsdp` each matrix
is gathered where it is used, in the loop's forward rounds once for all of them; gradients of the core are summed over
devices in every round of the backward pass, those of other layers once.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from elr_jax.errors import ElrError
from elr_jax.params import ParamSpec, map_specs
from elr_jax.typing import Array

MESH_AXES = ("data", "fsdp", "tensor", "expert", "sequence")
EXPERT_AXIS = "expert"

MeshAxes = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The mesh axes that cut each logical axis of the parameters; those a mesh lacks cut nothing."""

    embed: MeshAxes = ("fsdp",)
    """The model's width; that of activations is whole."""
    heads: MeshAxes = ("tensor",)
    kv_heads: MeshAxes = ("tensor",)
    mlp: MeshAxes = ("tensor",)
    vocab: MeshAxes = ("tensor",)
    expert: MeshAxes = (EXPERT_AXIS,)

    def __post_init__(self):
        for field in fields(self):
            for axis in getattr(self, field.name):
                if axis not in MESH_AXES:
                    raise ElrError(f"rules.{field.name} has the unknown mesh axis {axis!r}: {_KNOWN}")


DEFAULT_RULES = Rules()
ACTIVATIONS = {"batch": ("data", "fsdp", EXPERT_AXIS), "sequence": ("sequence",)}
_KNOWN = f"use {', '.join(MESH_AXES)}"


def make_mesh(sizes: str | Mapping[str, int], *, explicit: bool = False, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of all devices (or those given), from sizes by axis or text such as `data=2,fsdp=4`.

    Raises:
        ElrError: an unknown axis, or sizes that don't multiply to the number of devices.
    """
    named = _parse(sizes) if isinstance(sizes, str) else dict(sizes)
    for axis, size in named.items():
        if axis not in MESH_AXES:
            raise ElrError(f"mesh axis {axis!r} is unknown: {_KNOWN}")
        if size < 1:
            raise ElrError(f"mesh axis {axis}={size} must be at least 1")
    count = jax.device_count() if devices is None else len(devices)
    if math.prod(named.values()) != count:
        product = "·".join(map(str, named.values())) or "1"
        raise ElrError(f"mesh {sizes} has {product} = {math.prod(named.values())} places for {count} devices")
    kind = AxisType.Explicit if explicit else AxisType.Auto
    return jax.make_mesh(tuple(named.values()), tuple(named), axis_types=(kind,) * len(named), devices=devices)


def _parse(text: str) -> dict[str, int]:
    named = {}
    for part in text.split(","):
        axis, _, size = part.strip().partition("=")
        if not size.isdecimal() or axis in named:
            raise ElrError(f"mesh {text!r} is not of the form data=2,fsdp=4")
        named[axis] = int(size)
    return named


def partition(
    axes: Sequence[str | None], shape: Sequence[int], mesh: Any, rules: Rules = DEFAULT_RULES
) -> PartitionSpec:
    """How an array of these logical axes (None: never cut) is cut; no mesh axis cuts it twice.

    Vocabulary and sequence stay whole where they don't divide: there are 257 bytes, and a decode step has one token.

    Raises:
        ElrError: a size that the mesh doesn't divide.
    """
    used: set[str] = set()
    cuts: list[MeshAxes | None] = []
    for logical, size in zip(axes, shape, strict=True):
        wanted = () if logical is None else ACTIVATIONS.get(logical) or getattr(rules, logical, ())
        mine = tuple(axis for axis in wanted if mesh.shape.get(axis, 1) > 1 and axis not in used)
        parts = math.prod(mesh.shape[axis] for axis in mine)
        if size % parts:
            if logical not in ("vocab", "sequence"):
                raise ElrError(f"{logical}={size} can't be cut into {'×'.join(mine)}={parts} equal parts")
            mine = ()
        used.update(mine)
        cuts.append(mine or None)
    return PartitionSpec(*cuts)


def param_shardings(specs: Any, mesh: Mesh, rules: Rules = DEFAULT_RULES) -> Any:
    """The sharding of every declared parameter."""

    def one(spec: ParamSpec) -> NamedSharding:
        return NamedSharding(mesh, partition(spec.axes, spec.shape, mesh, rules))

    return map_specs(one, specs)


def batch_sharding(mesh: Mesh, shape: Sequence[int]) -> NamedSharding:
    """The sharding of tokens [B,T] and of what else has a row for each example."""
    return NamedSharding(mesh, partition(("batch", "sequence")[: len(shape)], shape, mesh))


def constrain(x: Array, *axes: str | None) -> Array:
    """The array, cut along these axes on the mesh in use (`jax.set_mesh`).

    Unchanged without a mesh, inside `shard_map`, and on Explicit axes: `jax.sharding.auto_axes` makes those automatic.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or any(kind != AxisType.Auto for kind in mesh.axis_types):
        return x
    return jax.lax.with_sharding_constraint(x, partition(axes, x.shape, mesh))


def cut_by(axis: str) -> int:
    """Devices along an axis of the mesh in use that XLA cuts arrays over; 1 without one."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return mesh.shape[axis] if kinds.get(axis) == AxisType.Auto else 1
