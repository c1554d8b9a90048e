"""Meshes, rules, and that a model on eight devices is the model on one, whatever the mesh and the kind of its axes."""

from types import SimpleNamespace

import jax
import pytest
from cases import RULES, small_model
from devices import on_eight_devices
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from elr_jax import parameters
from elr_jax.errors import ElrError
from elr_jax.params import map_specs
from elr_jax.sharding import Rules, constrain, cut_by, make_mesh, partition

SLOW = pytest.mark.slow


def mesh_of(**sizes):
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


@pytest.mark.parametrize(
    "name, meshes",
    [
        ("gpt", ["data=2,fsdp=4"]),
        pytest.param("gpt", ["data=2,sequence=2,tensor=2"], marks=SLOW),
        pytest.param("dory", ["fsdp=4,tensor=2"], marks=SLOW),
        pytest.param("hybrid", ["fsdp=4,tensor=2"], marks=SLOW),
        pytest.param("moe", ["fsdp=2,expert=4", "fsdp=2,expert=2,tensor=2"], marks=SLOW),
        pytest.param("ced", ["fsdp=4,sequence=2"], marks=SLOW),
    ],
)
def test_eight_devices_are_one(name, meshes):
    """Loss, gradients, a training step and generated tokens; on Auto and, by `auto_axes`, on Explicit axes."""
    printed = on_eight_devices("sharded.py", name, *meshes)
    assert printed.splitlines() == [f"{name} {mesh} equal" for mesh in meshes]


def test_mixed_depths_lie_on_ranks_as_they_may():
    """Masked, sorted and apart give one device's gradients; apart, a rank runs its own rounds alone."""
    on_eight_devices("rank_depths.py")


@SLOW
def test_the_decode_command_takes_a_mesh():
    on_eight_devices("decode_on_mesh.py")


def test_every_parameter_is_cut_by_its_logical_axes():
    config = small_model(RULES["elr"], prelude="*", core="-", coda="E", d_model=16, vocab_size=26)
    mesh = mesh_of(fsdp=4, tensor=2, expert=5)
    specs = map_specs(lambda spec: partition(spec.axes, spec.shape, mesh), parameters.param_specs(config))
    assert specs.embedding == PartitionSpec("tensor", "fsdp")
    attention = specs.prelude[0].mixer
    assert attention.query == attention.key == PartitionSpec("fsdp", "tensor", None)
    assert attention.output == PartitionSpec("tensor", None, "fsdp")
    assert specs.core[0].mixer.up == PartitionSpec("fsdp", "tensor")
    assert specs.coda[0].mixer.up == PartitionSpec("expert", "fsdp", "tensor")
    assert specs.coda[0].mixer.router == PartitionSpec("fsdp", None)
    whole = map_specs(
        lambda spec: partition(spec.axes, spec.shape, mesh, Rules(embed=(), heads=(), mlp=())),
        parameters.param_specs(config),
    )
    assert whole.prelude[0].mixer.query == PartitionSpec(None, None, None)


@pytest.mark.parametrize(
    "axes, shape, message",
    [
        (("batch", None), (6, 2), r"batch=6 can't be cut into data×fsdp=8 equal parts"),
        (("embed", "kv_heads"), (8, 3), r"kv_heads=3 can't be cut into tensor=2 equal parts"),
        (("expert",), (7,), r"expert=7 can't be cut into expert=2 equal parts"),
    ],
)
def test_what_does_not_divide_is_named_with_both_numbers(axes, shape, message):
    with pytest.raises(ElrError, match=message):
        partition(axes, shape, mesh_of(data=2, fsdp=4, tensor=2, **({"expert": 2} if "expert" in axes else {})))


def test_bytes_and_single_tokens_stay_whole():
    mesh = mesh_of(tensor=2, sequence=2)
    assert partition(("vocab", None), (257, 8), mesh) == PartitionSpec(None, None)
    assert partition((None, "sequence"), (4, 1), mesh) == PartitionSpec(None, None)
    assert partition((None, "sequence"), (4, 6), mesh) == PartitionSpec(None, "sequence")


def test_no_mesh_axis_cuts_an_array_twice():
    mesh = mesh_of(fsdp=2)
    assert partition(("batch", "embed"), (4, 8), mesh) == PartitionSpec("fsdp", None)


@pytest.mark.parametrize(
    "sizes, message",
    [
        ("data=3", "has 3 = 3 places for 1 devices"),
        ("data=2,fsdp=2", "has 2·2 = 4 places for 1 devices"),
        ("rows=1", "mesh axis 'rows' is unknown: use data, fsdp"),
        ("data", "is not of the form data=2,fsdp=4"),
        ("data=1,data=1", "is not of the form"),
        ("data=0", "must be at least 1"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(sizes, message):
    with pytest.raises(ElrError, match=message):
        make_mesh(sizes, devices=jax.devices()[:1])
    with pytest.raises(ElrError, match=r"rules\.mlp has the unknown mesh axis"):
        Rules(mlp=("columns",))


def test_a_mesh_across_slices_of_tpus_is_refused():
    chips = [SimpleNamespace(platform="tpu", slice_index=slice) for slice in (0, 0, 1, 1)]
    with pytest.raises(ElrError, match="mesh data=2,fsdp=2 would lie across slices of TPUs"):
        make_mesh("data=2,fsdp=2", devices=chips)


def test_without_a_mesh_nothing_happens():
    x = jax.numpy.ones((3, 5))
    assert constrain(x, "batch", "embed") is x
    assert cut_by("expert") == 1
