"""Where arrays live on a mesh of devices: the mesh's axes, and the rules from logical axes to them.

A mesh has some of five axes. `data` cuts the batch; `fsdp` cuts the batch and the weights, which are gathered for use;
`tensor` cuts heads, feed-forward widths and the vocabulary; `expert` cuts the batch and the experts; `sequence` cuts
the tokens of a row. Everything is one program under `jax.jit`: its numbers are those of one device, but for rounding.

    mesh = make_mesh("data=2,fsdp=4")
    params = jax.device_put(params, param_shardings(param_specs(config), mesh))
    with jax.set_mesh(mesh):
        logits = jax.jit(apply, static_argnames=("config", "runtime"))(params, tokens, depth, config=config)

Without a mesh all of it does nothing. With `fsdp` each matrix is gathered where it is used, those of the core once
before its loop (`Runtime.gather_core`); every gradient is summed over devices once. `elr_jax.collectives` counts what
a step exchanges.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from elr_jax.errors import ElrError
from elr_jax.params import ParamSpec, map_specs
from elr_jax.typing import Array, Int32

MESH_AXES = ("data", "fsdp", "tensor", "expert", "sequence")
EXPERT_AXIS = "expert"

MeshAxes = tuple[str, ...]
Out = TypeVar("Out")


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
OF_EXPERTS = (EXPERT_AXIS, "tensor")
"""Axes that cut a mixture's experts and their inner width: what an output of it is a sum over."""
RANKS = ("data", "fsdp")
ACTIVATIONS = {"batch": (*RANKS, EXPERT_AXIS), "sequence": ("sequence",)}
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
    devices = jax.devices() if devices is None else devices
    count = len(devices)
    if math.prod(named.values()) != count:
        product = "·".join(map(str, named.values())) or "1"
        raise ElrError(f"mesh {sizes} has {product} = {math.prod(named.values())} places for {count} devices")
    if len({getattr(device, "slice_index", 0) for device in devices}) > 1 and devices[0].platform == "tpu":
        raise ElrError(f"mesh {sizes} would lie across slices of TPUs, which share no fast links: use one")
    # an axis may take a part of a slice's own, as fsdp=8 of 4x4x4 does, which jax.make_mesh grants v5e alone
    placed = mesh_utils.create_device_mesh(tuple(named.values()), devices, allow_split_physical_axes=True)
    kind = AxisType.Explicit if explicit else AxisType.Auto
    return Mesh(placed, tuple(named), axis_types=(kind,) * len(named))


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

    Unchanged without a mesh. Axes that are Explicit or, in `shard_map`, Manual cut nothing: `jax.sharding.auto_axes`
    makes the former automatic.
    """
    cut = partition(axes, x.shape, _automatic())
    return jax.lax.with_sharding_constraint(x, cut) if any(cut) else x


def cut_by(*axes: str) -> int:
    """Devices along axes of the mesh in use that XLA cuts arrays over; 1 without one."""
    sizes = _automatic().shape
    return math.prod(sizes.get(axis, 1) for axis in axes)


def num_ranks() -> int:
    """Parts of a batch, consecutive rows, that `on_own_rows` runs apart; 1 where they keep step."""
    return cut_by(*RANKS) if cut_by(*(set(MESH_AXES) - set(RANKS))) == 1 else 1


def in_step(count: Int32[Array, ""]) -> Int32[Array, ""]:
    """The number of rounds for which a loop may run: inside `on_own_rows`, where ranks must keep step, their largest.

    They must where another axis cuts what a round computes: its exchanges may be written as one among all devices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    ranks = tuple(axis for axis in RANKS if axis in mesh.axis_names and axis not in _automatic().shape)
    return jax.lax.pmax(count, ranks) if ranks and cut_by(*MESH_AXES) > 1 else count


class _Axes(NamedTuple):
    """Sizes by mesh axis, as `partition` reads them of a mesh."""

    shape: dict[str, int]


def _automatic() -> _Axes:
    """The axes of the mesh in use that XLA cuts arrays over."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return _Axes({name: size for name, size, kind in kinds if kind == AxisType.Auto})


def on_own_rows(
    function: Callable[[Any, Any], Out], weights: Any, rows: Any, specs: Any, *, apart: tuple[str, ...] = ()
) -> Out:
    """`function(weights, rows)` with every rank of `data` and `fsdp` on its own rows, by itself until it is done.

    The leaves of `rows` and of the result are [B, …]; `specs` declare the weights, which are gathered whole before and
    whose gradients are summed over the ranks once after, each rank keeping its piece. No round then waits for another
    rank, and a loop's rounds may differ from rank to rank (`in_step`). Along the axes `apart` that cut weights, each
    device runs the function with its own piece on the rows of all devices there, and its result is its rows of their
    results' sum. Other axes of the mesh go on cutting inside. Weights that the specs don't declare, packed ones, are
    whole on every device.
    """
    if cut_by(*RANKS, *apart) == 1:
        return function(weights, rows)
    cut = {axis: size for axis, size in _automatic().shape.items() if axis in (*RANKS, *apart) and size > 1}
    declared = jax.tree.structure(specs) == jax.tree.structure(weights)
    pieces = (
        map_specs(lambda spec: partition(spec.axes, spec.shape, _Axes(cut)), specs) if declared else PartitionSpec()
    )
    own = partition(("batch",), (jax.tree.leaves(rows)[0].shape[0],), _Axes(cut))
    cutting = jax.tree.leaves([tuple(piece) for piece in jax.tree.leaves(pieces)])
    summed = {axis for axis in apart if axis in cutting}
    with_rows = tuple(axis for axis in jax.tree.leaves(tuple(own)) if axis in summed)
    without = tuple(sorted(summed - set(with_rows)))

    def run(weights: Any, rows: Any) -> Out:
        if with_rows:
            rows = jax.tree.map(lambda x: jax.lax.all_gather(x, with_rows, axis=0, tiled=True), rows)
        found = function(jax.tree.map(_gathered, weights, pieces) if declared else weights, rows)
        if with_rows:
            found = jax.tree.map(lambda x: jax.lax.psum_scatter(x, with_rows, tiled=True), found)
        return jax.tree.map(lambda x: x[None], found) if without else found

    # unchecked, what varies over devices needs no marks, and a weight's gradient is summed where it leaves
    out = PartitionSpec(without, *own) if without else own
    call = jax.shard_map(run, in_specs=(pieces, own), out_specs=out, axis_names=set(cut), check_vma=False)
    # not by `psum` inside, whose gradient would sum again what each device has whole
    total = lambda x: jax.lax.reduce(x, jnp.zeros((), x.dtype), jax.lax.add, (0,))
    return jax.tree.map(total, call(weights, rows)) if without else call(weights, rows)


def on_own_pieces(
    function: Callable[..., Any], operands: Sequence[Array], axes: Sequence[Sequence[str | None]], like: Any
) -> Any:
    """`function(*operands)`, every device on its own pieces of the operands, where XLA cuts arrays.

    `axes` are the logical axes of each operand. `like` says of each result, or of a tree of results, by which operand
    it is cut; over mesh axes that cut other operands and not that one, it is the sum. For functions whose pieces need
    nothing of each other, such as a kernel, which XLA can't cut. No derivative is to be taken of it.
    """
    if cut_by(*MESH_AXES) == 1:
        return function(*operands)
    mesh = _automatic()
    cuts = [partition(named, x.shape, mesh) for named, x in zip(axes, operands, strict=True)]
    over = [set(jax.tree.leaves(tuple(cut))) for cut in cuts]
    summed = [tuple(sorted(set().union(*over) - mine)) for mine in over]

    def run(*pieces: Array) -> Any:
        add = lambda i, made: jax.lax.psum(made, summed[i]) if summed[i] else made
        return jax.tree.map(add, like, function(*pieces))

    out = jax.tree.map(lambda i: _up_to_last(cuts[i]), like)
    call = jax.shard_map(run, in_specs=tuple(cuts), out_specs=out, axis_names=set(mesh.shape), check_vma=False)
    return call(*operands)


def _up_to_last(cut: PartitionSpec) -> PartitionSpec:
    """As far as the last axis that is cut: for results that lack the operand's last axes."""
    return PartitionSpec(*cut[: max((i + 1 for i, group in enumerate(cut) if group), default=0)])


def _gathered(piece: Array, cut: PartitionSpec) -> Array:
    """The array, of which each rank holds a piece, whole but for what other axes cut."""
    for axis, over in enumerate(cut):
        if over and set(jax.tree.leaves(over)) <= set(RANKS):
            piece = jax.lax.all_gather(piece, over, axis=axis, tiled=True)
    return piece
