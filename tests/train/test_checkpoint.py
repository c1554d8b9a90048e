"""Checkpoints: bit-identical round trips, and what is left after damage, kills and full disks."""

import dataclasses
import functools
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from elr_jax.errors import ElrError
from elr_jax.train import checkpoint
from elr_jax.train.checkpoint import Checkpoints, read_meta, refuse_mismatch, restore, saved_steps


@flax.struct.dataclass
class State:
    step: Any
    params: Any
    opt_state: Any
    key: Any


@functools.cache
def make_state(step: int) -> State:
    keys = jax.random.split(jax.random.key(step))
    weights = jax.random.normal(keys[0], (50, 60))
    params = {"layers": [{"w": weights, "b": jnp.full((5,), -0.0, jnp.bfloat16)}], "gate": jnp.float32(jnp.nan)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-3, 100)))
    _, opt_state = optimizer.update(jax.tree.map(jnp.ones_like, params), optimizer.init(params), params)
    return State(step=jnp.int32(step), params=params, opt_state=opt_state, key=keys[1])


def data(leaf) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)


def assert_identical(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert data(one).tobytes() == data(other).tobytes()


def abstract(state):
    return jax.eval_shape(lambda: state)


@pytest.fixture
def two(tmp_path):
    """A directory with the checkpoints of steps 1 and 2."""
    checkpoints = Checkpoints(tmp_path / "run", keep=2)
    for step in (1, 2):
        checkpoints.save(step, make_state(step), {"step": step})
    return tmp_path / "run"


def largest_file(folder: Path) -> Path:
    """The one that holds `layers/0/w`."""
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def truncate(folder: Path):
    path = largest_file(folder / "state")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(folder: Path):
    path = largest_file(folder / "state")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def flip_meta(folder: Path):
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": 3'))


def empty(folder: Path):
    shutil.rmtree(folder)
    folder.mkdir()


DAMAGES = {
    "truncated": truncate,
    "flipped bit": flip,
    "flipped metadata": flip_meta,
    "no arrays": lambda folder: shutil.rmtree(folder / "state"),
    "no index": lambda folder: (folder / "state" / "manifest.ocdbt").unlink(),
    "no metadata": lambda folder: (folder / "manifest.json").unlink(),
    "empty": empty,
}


def test_round_trip_is_bit_identical(tmp_path):
    state, meta = make_state(3), {"model": {"core": "*-"}, "windows": [1, 2], "rate": 1e-3}
    checkpoints = Checkpoints(tmp_path, keep=1)
    path = checkpoints.save(3, state, meta)
    assert (Path(path), checkpoints.latest_step()) == (tmp_path / "3", 3)
    restored, restored_meta = checkpoints.restore(abstract(state))
    assert_identical(restored, state)
    assert restored_meta == meta == read_meta(tmp_path)


def test_the_restored_key_draws_the_same_numbers(two):
    state, _ = restore(two, abstract(make_state(0)))
    assert (jax.random.bits(state.key, (4,)) == jax.random.bits(make_state(2).key, (4,))).all()


def test_metadata_that_is_no_json_leaves_nothing_behind(two):
    checkpoints = Checkpoints(two, keep=2)
    with pytest.raises(TypeError, match="not JSON serializable"):
        checkpoints.save(3, make_state(3), {"path": Path()})
    assert sorted(os.listdir(two)) == ["1", "2"]


def test_one_field_can_be_read_alone(two):
    params, meta = restore(two, abstract(make_state(0).params), field="params")
    assert_identical(params, make_state(2).params)
    assert meta == {"step": 2}


def test_an_empty_directory_has_nothing(tmp_path):
    assert Checkpoints(tmp_path / "new", keep=1).restore(make_state(0)) is None
    assert read_meta(tmp_path / "absent") is None
    assert saved_steps(tmp_path / "absent") == []


def test_only_the_newest_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (5, 10, 100):
        checkpoints.save(step, {"x": jnp.ones(3)}, {})
    assert saved_steps(tmp_path) == [10, 100]
    assert sorted(os.listdir(tmp_path)) == ["10", "100"]
    assert restore(tmp_path, {"x": jnp.ones(3)}, step=10) is not None
    with pytest.raises(ElrError, match="no checkpoint of step 5: choose one of 10, 100"):
        restore(tmp_path, {"x": jnp.ones(3)}, step=5)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_newest_falls_back_with_a_warning(two, capfd, damage):
    damage(two / "2")
    state, meta = restore(two, abstract(make_state(0)))
    assert_identical(state, make_state(1))
    assert meta == {"step": 1}
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"warning: the checkpoint of step 2 in {two} is damaged (")


def test_the_damaged_file_is_named(two, capfd):
    flip(two / "2")
    restore(two, make_state(0))
    assert re.search(r"damaged \(state/\S+ does not have the digest it was saved with\)", capfd.readouterr().err)


def reseal(folder: Path, change):
    """Change a manifest as somebody would who can make a digest."""
    content = json.loads((folder / "manifest.json").read_text())
    del content["sha256"]
    change(content)
    (folder / "manifest.json").write_text(json.dumps(checkpoint._sealed(content)))


@pytest.mark.parametrize("name", ["../../outside", "state/../../../outside", "{outside}"])
def test_a_manifest_names_no_file_outside_its_checkpoint(two, capfd, name):
    outside = two.parent / "outside"
    outside.write_text("secret")
    digest = hashlib.sha256(b"secret").hexdigest()
    reseal(two / "2", lambda content: content["files"].update({name.format(outside=outside): digest}))
    state, _ = restore(two, abstract(make_state(0)))
    assert_identical(state, make_state(1))
    assert "outside is absent" in capfd.readouterr().err


@pytest.mark.parametrize("folder", [False, True])
def test_a_link_out_of_a_checkpoint_is_damage(two, capfd, folder):
    """Its bytes are the right ones, today."""
    path = two / "2" / "state" if folder else largest_file(two / "2" / "state")
    outside = path.rename(two.parent / "outside")
    path.symlink_to(outside)
    state, _ = restore(two, abstract(make_state(0)))
    assert_identical(state, make_state(1))
    assert f"{path.name} is a link that leads out of the checkpoint" in capfd.readouterr().err


def test_a_checkpoint_may_itself_be_a_link(two):
    (two / "2").rename(two.parent / "elsewhere")
    (two / "2").symlink_to(two.parent / "elsewhere")
    assert_identical(restore(two, abstract(make_state(0)))[0], make_state(2))


def test_metadata_falls_back_too(two, capfd):
    flip_meta(two / "2")
    assert read_meta(two) == {"step": 1}
    assert "step 2" in capfd.readouterr().err


def test_nothing_but_damage_is_an_error(two):
    truncate(two / "1")
    empty(two / "2")
    with pytest.raises(ElrError, match=r"no checkpoint in .* can be read \(2 damaged\)"):
        restore(two, make_state(0))
    with pytest.raises(ElrError, match=r"\(1 damaged\)"):
        restore(two, make_state(0), step=2)


def test_training_goes_on_past_a_damaged_checkpoint(two, capfd):
    truncate(two / "2")
    checkpoints = Checkpoints(two, keep=1)
    checkpoints.restore(make_state(0))
    assert checkpoints.latest_step() == 1
    checkpoints.save(2, make_state(2), {})
    assert sorted(os.listdir(two)) == ["2", "damaged-2"], "the damaged one neither counts nor vanishes"
    assert "damaged-2" in capfd.readouterr().err
    assert_identical(restore(two, make_state(0))[0], make_state(2))


def test_a_step_that_is_not_new_is_refused(two):
    for step in (1, 2):
        with pytest.raises(ElrError, match=f"step {step} is not after step 2"):
            Checkpoints(two, keep=2).save(step, make_state(step), {})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda p: p | {"gate": p["gate"].astype(jnp.bfloat16)}, r"params/gate was 'float32\[\]', is 'bfloat16\[\]'"),
        (lambda p: p | {"gate": jnp.ones(7)}, r"params/gate was 'float32\[\]', is 'float32\[7\]'"),
        (lambda p: p | {"extra": jnp.ones(7)}, r"params/extra was absent, is 'float32\[7\]'"),
        (lambda p: {"layers": p["layers"]}, r"params/gate was 'float32\[\]', is absent"),
    ],
    ids=["dtype", "shape", "extra", "missing"],
)
def test_a_state_of_another_kind_is_refused_by_leaf(two, change, told):
    state = make_state(0)
    with pytest.raises(ElrError, match=f"does not fit this run: {told}"):
        restore(two, dataclasses.replace(state, params=change(state.params)))


def test_settings_that_differ_are_named():
    saved = {"model": {"d_model": 64, "core": "*-", "windows": [1, 2]}, "seed": 0}
    refuse_mismatch(saved, {"model": {"d_model": 64.0, "core": "*-", "windows": (1, 2)}, "seed": 0}, what="run")
    current = {"model": {"d_model": 96, "core": "*-", "windows": [1, 2]}, "new": None}
    with pytest.raises(ElrError) as caught:
        refuse_mismatch(saved, current, what="run config")
    assert str(caught.value) == (
        "run config differs from the checkpoint's: model.d_model was 64, is 96, seed was 0, is absent, new was absent, "
        "is None; resume with the saved values, or start a new --out directory"
    )


def test_leftovers_of_a_killed_save_are_removed_aloud(two, capfd):
    leftover = two / "3.unfinished" / "state.orbax-checkpoint-tmp"
    leftover.mkdir(parents=True)
    assert read_meta(two) == {"step": 2}
    assert leftover.exists(), "readers change nothing"
    checkpoints = Checkpoints(two, keep=2)
    assert sorted(os.listdir(two)) == ["1", "2"]
    assert "3.unfinished" in capfd.readouterr().err
    assert checkpoints.latest_step() == 2


@pytest.mark.parametrize("keep", [0, -1])
def test_keep_below_one_is_refused(tmp_path, keep):
    with pytest.raises(ElrError, match=f"keep={keep}"):
        Checkpoints(tmp_path, keep=keep)


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ElrError, match=r"file can't hold checkpoints .*: choose another --out"):
        Checkpoints(tmp_path / "file", keep=1)


def test_a_disk_that_is_full_already_is_refused_before_writing(two, monkeypatch):
    checkpoints = Checkpoints(two, keep=2)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
        with pytest.raises(ElrError, match=r"step 3 can't be written .* \(No space left on device: .*; step 2 stays"):
            checkpoints.save(3, make_state(3), {})
    assert sorted(os.listdir(two)) == ["1", "2"]
    checkpoints.save(3, make_state(3), {})
    assert saved_steps(two) == [2, 3]


SETUP = """
import resource, signal, sys
import jax, jax.numpy as jnp
from elr_jax.errors import one_line_errors
from elr_jax.train.checkpoint import Checkpoints, restore
directory = sys.argv[1]
def state(step):
    return {"w": jax.random.normal(jax.random.key(step), (500, 500)), "step": jnp.int32(step)}
"""

FULL = """
checkpoints = Checkpoints(directory, keep=1)
checkpoints.save(1, state(1), {})
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
with one_line_errors():
    checkpoints.save(2, state(2), {})
"""

KILLED = """
checkpoints = Checkpoints(directory, keep=3)
for step in range(1, 10_000):
    checkpoints.save(step, state(step), {"step": step})
    print(step, flush=True)
"""

SHARDED = """
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((4,), ("x",))
split, whole = NamedSharding(mesh, P("x", None)), NamedSharding(mesh, P())
expected = jax.device_get(jnp.arange(32.0).reshape(8, 4))
w = jax.device_put(jnp.arange(32.0).reshape(8, 4), split)
key = jax.device_put(jax.random.key(0), whole)
Checkpoints(directory, keep=1).save(1, {"w": w, "key": key}, {})
target_key = jax.ShapeDtypeStruct((), key.dtype, sharding=whole)
for sharding in (split, whole, NamedSharding(mesh, P(None, "x"))):
    target_w = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharding)
    state, _ = restore(directory, {"w": target_w, "key": target_key})
    assert state["w"].sharding.is_equivalent_to(sharding, 2) and (jax.device_get(state["w"]) == expected).all()
    assert state["key"].sharding.is_equivalent_to(whole, 0)
    assert (jax.random.key_data(state["key"]) == jax.random.key_data(key)).all()
state, _ = restore(directory, jax.eval_shape(lambda: {"w": jnp.zeros((8, 4)), "key": jax.random.key(1)}))
assert len(state["w"].devices()) == 1 and (jax.device_get(state["w"]) == expected).all()
"""


def start(script: str, directory: Path, **variables: str) -> subprocess.Popen:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()} | variables
    command = [sys.executable, "-c", SETUP + script, str(directory)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> str:
    """Wait for the end and return what it wrote to stderr."""
    try:
        return process.communicate(timeout=240)[1]
    finally:
        process.kill()


def small_state(step: int):
    return {"w": jax.random.normal(jax.random.key(step), (500, 500)), "step": jnp.int32(step)}


def test_a_write_that_fails_half_way_keeps_the_one_before(tmp_path):
    process = start(FULL, tmp_path)
    errors = finish(process)
    assert process.returncode == 2, errors
    told = f"error: the checkpoint of step 2 can't be written to {tmp_path} (File too large): free space there"
    assert errors.splitlines()[-1].startswith(told)
    assert os.listdir(tmp_path) == ["1"]
    assert_identical(restore(tmp_path, small_state(0))[0], small_state(1))


def test_a_kill_while_saving_leaves_whole_checkpoints(tmp_path):
    process = start(KILLED, tmp_path)
    for line in process.stdout:
        if int(line) >= 3:
            break
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("*.unfinished")) and time.monotonic() < deadline:
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    newest = saved_steps(tmp_path)[-1]
    checkpoints = Checkpoints(tmp_path, keep=3)
    assert all(name.isdecimal() for name in os.listdir(tmp_path))
    state, meta = checkpoints.restore(small_state(0))
    assert meta == {"step": newest}
    assert_identical(state, small_state(newest))
    checkpoints.save(newest + 1, small_state(newest + 1), {})


def test_arrays_come_back_on_the_sharding_asked_for(tmp_path):
    process = start(SHARDED, tmp_path, JAX_NUM_CPU_DEVICES="4")
    errors = finish(process)
    assert process.returncode == 0, errors
