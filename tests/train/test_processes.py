"""Several processes: how they find each other, what each reads, and that killing one loses nothing."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import pytest
from test_runner import RECIPE, TRAINING, final_state, told

import elr_jax
from elr_jax.errors import ElrError
from elr_jax.train import checkpoint
from elr_jax.train.data import batches
from elr_jax.train.processes import Processes, start

HERE, ROOT = Path(__file__).parent, Path(elr_jax.__file__).parents[1]
PATIENCE = 120
"""Seconds within which everything here ends on a busy machine."""
HEARTBEAT = 10


def environment(devices):
    return os.environ | {
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), str(ROOT)]),
    }


@contextmanager
def two(out, first="straight", second="straight", *, devices=1, heartbeat=100):
    """Both processes of a run; none is left in the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = []
    try:
        for index, what in enumerate((first, second)):
            command = [sys.executable, HERE / "one_of_two.py", out, str(port), str(index), what, str(heartbeat)]
            running.append(
                subprocess.Popen(
                    command, env=environment(devices), start_new_session=True, stdout=subprocess.PIPE, text=True
                )
            )
        yield running
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def finish(out, **settings):
    """Run both to their end, which must be a good one; what they print."""
    with two(out, **settings) as running:
        printed = [process.communicate(timeout=PATIENCE)[0] for process in running]
        assert [process.returncode for process in running] == [0, 0]
    return printed


def wait_for(condition, running):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end and all(process.poll() is None for process in running)
        time.sleep(0.01)


def on_one_process(out, mesh):
    """Go on with a run in one process that has two devices."""
    script = f"import sys, test_runner as t; t.launch(t.Path(sys.argv[1]), mesh={mesh!r})"
    subprocess.run([sys.executable, "-c", script, out], env=environment(2), check=True, timeout=PATIENCE)


def assert_same_bits(out, straight):
    for one, other in zip(*(jax.tree.leaves(final_state(run)) for run in (out, straight)), strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run of two processes that was never stopped."""
    out = tmp_path_factory.mktemp("straight")
    finish(out)
    return out


def rows_read(out, index):
    """The tokens that a process read, by step."""
    *whole, _ = (out / f"rows-{index}").read_text().split("\n")
    return {step: np.array(tokens) for step, tokens in map(json.loads, whole)}


@pytest.mark.slow
def test_the_processes_read_the_rows_that_one_reads(straight):
    """Each half of them, and the two halves are the batch that one process would read."""
    parts = [rows_read(straight, index) for index in (0, 1)]
    alone = dict(zip(range(1, RECIPE.steps + 1), batches(TRAINING, RECIPE.batch_size), strict=False))
    assert parts[0].keys() >= alone.keys() == {1, 2, 3, 4, 5, 6}
    for step, whole in alone.items():
        np.testing.assert_array_equal(np.concatenate([part[step] for part in parts]), whole.tokens)


@pytest.mark.slow
def test_only_the_first_process_writes_and_talks(tmp_path, straight):
    """Evaluated again: the losses of one device, told once."""
    assert sorted(line["step"] for line in told(straight)) == [1, 2, 3, 4, 5, 6, 6]
    said = finish(straight)
    assert "resuming after step 6 of 6" in said[0] and not said[1].replace("[Gloo]", "").count("step")
    script = "import sys, test_runner as t; t.launch(t.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", script, tmp_path], env=environment(1), check=True, timeout=PATIENCE)
    for here, there in zip(told(straight), told(tmp_path), strict=False):
        assert here.keys() == there.keys()
        np.testing.assert_allclose(*(list(line.values()) for line in (here, there)), rtol=1e-4, atol=1e-6)
    for one, other in zip(*(jax.tree.leaves(final_state(run).params) for run in (straight, tmp_path)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def killed_in_a_step(out):
    """The second process, in a step that the first holds up; the first then finds itself alone in it."""
    with two(out, first="step", heartbeat=HEARTBEAT) as running:
        reads_on = lambda: (out / "rows-1").exists() and 6 in rows_read(out, 1)
        wait_for(lambda: (out / "step").exists() and reads_on(), running)
        running[1].kill()
        (out / "step-on").touch()
        assert running[0].wait(PATIENCE) != 0
    assert checkpoint.saved_steps(out / "checkpoints") == [2, 4]


def killed_in_a_save(out, victim, where):
    """A process that has begun to write the checkpoint after step 4; the other waits for its part."""
    hold = {("first", "second")[victim]: where}
    with two(out, **hold, heartbeat=HEARTBEAT) as running:
        wait_for((out / where).exists, running)
        assert (out / "checkpoints" / "4.unfinished").exists()
        running[victim].kill()
        assert running[1 - victim].wait(PATIENCE) != 0
    assert checkpoint.saved_steps(out / "checkpoints") == [2]


@pytest.mark.slow
def test_a_process_killed_in_a_step_ends_the_other_and_both_go_on_to_the_same_bits(straight, tmp_path):
    killed_in_a_step(tmp_path)
    finish(tmp_path)
    assert_same_bits(tmp_path, straight)
    assert told(tmp_path) == told(straight)[:7]


@pytest.mark.slow
def test_a_process_killed_in_a_save_ends_the_other_and_both_go_on_to_the_same_bits(straight, tmp_path):
    killed_in_a_save(tmp_path, 1, "files")
    finish(tmp_path)
    assert_same_bits(tmp_path, straight)


@pytest.mark.slow
def test_the_first_process_killed_in_a_save_and_one_process_goes_on(straight, tmp_path):
    """With both devices in one process, and cut in another way."""
    killed_in_a_save(tmp_path, 0, "manifest")
    other = tmp_path.parent / "other"
    subprocess.run(["cp", "-r", tmp_path, other], check=True)
    on_one_process(tmp_path, "data=2")
    assert_same_bits(tmp_path, straight)
    on_one_process(other, "fsdp=2")
    for one, expected in zip(*(jax.tree.leaves(final_state(run).params) for run in (other, straight)), strict=True):
        np.testing.assert_allclose(one, expected, atol=1e-5)


@pytest.mark.slow
def test_sigterm_to_one_process_stops_both_after_the_same_step(straight, tmp_path):
    with two(tmp_path, first="step") as running:
        wait_for((tmp_path / "step").exists, running)
        running[1].terminate()
        time.sleep(3)  # the service looks for a signal once a second
        (tmp_path / "step-on").touch()
        assert [process.wait(PATIENCE) for process in running] == [0, 0]
    saved = checkpoint.saved_steps(tmp_path / "checkpoints")
    assert saved in ([4, 5], [2, 4])
    finish(tmp_path)
    assert_same_bits(tmp_path, straight)


@pytest.mark.slow
def test_a_process_reads_what_its_devices_need_on_any_mesh(tmp_path):
    said = "".join(finish(tmp_path, first="rows", second="rows", devices=2)).splitlines()
    found = [json.loads(line) for line in said if line.startswith(("[0", "[1"))]
    rows = {(name, index): rows for index, name, rows in found}
    half = [[0, 1, 2, 3], [4, 5, 6, 7]]
    everything = [[*range(8)]] * 2
    expected = {
        "data=4": half,
        "data=2,tensor=2": half,
        "tensor=2,data=2": everything,
        "sequence=4": everything,
        "fsdp=2,sequence=2": half,
        "data=2,expert=2": half,
        "shuffled": [[0, 1, 4, 5], [2, 3, 6, 7]],
    }
    assert rows == {(name, index): of[index] for name, of in expected.items() for index in (0, 1)}
