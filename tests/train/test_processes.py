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
        "JAX_NUM_CPU_DEVICES": str(devices),
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), str(ROOT)]),
    }


@contextmanager
def two(out, first="straight", second="straight", *, devices=1, heartbeat=100, **settings):
    """Both processes of a run; none is left in the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = []
    try:
        for index, what in enumerate((first, second)):
            command = [sys.executable, HERE / "one_of_two.py", out, str(port), str(index), what, str(heartbeat)]
            settings = {"env": environment(devices), "start_new_session": True, "text": True} | settings
            running.append(subprocess.Popen(command, stdout=subprocess.PIPE, **settings))
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
    """A run of two processes that was never stopped; what they said is in `said-0` and `said-1`."""
    out = tmp_path_factory.mktemp("straight")
    for index, said in enumerate(finish(out)):
        (out / f"said-{index}").write_text(said)
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
def test_two_processes_train_what_one_trains_and_the_first_alone_tells(tmp_path, straight):
    said = [(straight / f"said-{index}").read_text() for index in (0, 1)]
    assert "step 6/6" in said[0] and "checkpoints: " in said[0]
    assert [line for line in said[1].splitlines() if not line.startswith("[Gloo]")] == []
    script = "import sys, test_runner as t; t.launch(t.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", script, tmp_path], env=environment(1), check=True, timeout=PATIENCE)
    for here, there in zip(told(straight), told(tmp_path), strict=True):
        assert here.keys() == there.keys()
        ran = {"executed_rounds", "idle_rounds", "layer_passes", "train_flops"} & here.keys()
        if ran:  # each process as deep as its own deepest row
            assert here["executed_rounds"] + here["idle_rounds"] == there["executed_rounds"]
        same = [name for name in here if name not in ran]
        np.testing.assert_allclose([here[n] for n in same], [there[n] for n in same], rtol=1e-4, atol=1e-6)
    for one, other in zip(*(jax.tree.leaves(final_state(run).params) for run in (straight, tmp_path)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def killed_in_a_step(out):
    """The second process, in a step that the first holds up; the first then finds itself alone in it."""
    with two(out, first="step5", heartbeat=HEARTBEAT) as running:
        reads_on = lambda: (out / "rows-1").exists() and 6 in rows_read(out, 1)
        wait_for(lambda: (out / "step5").exists() and reads_on(), running)
        running[1].kill()
        (out / "step5-on").touch()
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
    assert told(tmp_path) == told(straight)


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
    with two(tmp_path, first="step3") as running:
        wait_for((tmp_path / "step3").exists, running)
        running[1].terminate()
        time.sleep(3)  # the service looks for a signal once a second
        (tmp_path / "step3-on").touch()
        assert [process.wait(PATIENCE) for process in running] == [0, 0]
    *_, saved = checkpoint.saved_steps(tmp_path / "checkpoints")
    assert saved < RECIPE.steps and [line["step"] for line in told(tmp_path)] == [*range(1, saved + 1)]
    finish(tmp_path)
    assert_same_bits(tmp_path, straight)


@pytest.mark.slow
def test_a_full_disk_at_the_first_process_is_one_line_from_each(tmp_path):
    with two(tmp_path, first="full", stderr=subprocess.PIPE) as running:
        errors = [process.communicate(timeout=PATIENCE)[1] for process in running]
        assert [process.returncode for process in running] == [2, 2]
    assert "error: the checkpoint of step 2 can't be written" in errors[0] and "No space left" in errors[0]
    assert "(the first process failed to write its part)" in errors[1]
    assert not any("Traceback" in error for error in errors)


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


@pytest.mark.slow
def test_folders_of_their_own_are_refused(tmp_path):
    """The second process is sent to another folder."""
    with two(tmp_path, second="elsewhere", stderr=subprocess.PIPE) as running:
        errors = [process.communicate(timeout=PATIENCE)[1] for process in running]
        assert [process.returncode for process in running] == [2, 2]
    assert all("is not one folder for all: process 1 sees another" in error for error in errors)


# How they find each other


STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[3-4],other",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}
VARIABLES = {"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}


@pytest.fixture
def started(monkeypatch):
    """What JAX was asked to start, in an environment that names nothing."""
    calls = []
    for name in [*STEP, *VARIABLES, "KUBERNETES_SERVICE_HOST", "OMPI_MCA_orte_hnp_uri", "TPU_WORKER_HOSTNAMES"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(jax.distributed, "initialize", lambda **settings: calls.append(settings))
    return calls


def asked(started):
    (settings,) = started
    return [
        settings[name] for name in ("coordinator_address", "num_processes", "process_id", "cluster_detection_method")
    ]


def test_a_single_machine_starts_nothing(started, monkeypatch):
    start()
    start(Processes(count=1))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")  # a pod, but not of an indexed job
    start()
    for name, value in (STEP | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}).items():
        monkeypatch.setenv(name, value)
    start()
    for name, value in (VARIABLES | {"SLURM_NTASKS": "4"}).items():
        monkeypatch.setenv(name, value)
    start(Processes(count=1))
    assert started == []


def test_flags_come_before_variables_and_variables_before_the_cluster(started, monkeypatch):
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    start()
    assert asked(started) == [None, 4, None, None]
    started.clear()
    start(Processes(coordinator="host:5"))
    assert asked(started) == ["host:5", 4, None, None]
    started.clear()
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    start()
    assert asked(started) == ["host:1", 2, 1, "deactivate"]
    started.clear()
    start(Processes(coordinator="host:9", count=3, index=0, wait_seconds=5, heartbeat_seconds=7))
    assert asked(started) == ["host:9", 3, 0, "deactivate"]
    assert started[0]["heartbeat_timeout_seconds"] == started[0]["shutdown_timeout_seconds"] == 7


def test_a_joined_program_is_not_joined_again(started, monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    start(Processes(coordinator="host:9", count=3, index=0))
    assert started == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, r"^processes\.count=0 must be at least 1$"),
        ({"index": -1}, r"^processes\.index=-1 must be at least 0$"),
        ({"count": 2, "index": 2}, r"^processes\.index=2 must lie in 0\.\.1: there are 2$"),
        ({"coordinator": "host"}, r"^processes\.coordinator='host' is not of the form HOST:PORT$"),
        ({"coordinator": ":80"}, r"^processes\.coordinator=':80' is not of the form"),
        ({"coordinator": "host:99999"}, r"^processes\.coordinator='host:99999' is not of the form"),
        ({"heartbeat_seconds": 0}, r"^processes\.heartbeat_seconds=0 must be at least 1$"),
        ({"count": 2}, r"^several processes need --launch\.processes\.coordinator, --launch\.processes\.index too; "),
        ({"index": 0}, r"need --launch\.processes\.coordinator, --launch\.processes\.count too"),
        ({"coordinator": "host:1"}, r"need --launch\.processes\.count, --launch\.processes\.index too"),
    ],
)
def test_values_that_contradict_or_are_missing_are_refused(started, values, message):
    with pytest.raises(ElrError, match=message):
        start(Processes(**values))
    assert started == []


def test_what_contradicts_the_environment_is_refused(started, monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "two")
    with pytest.raises(ElrError, match=r"^JAX_NUM_PROCESSES=two must be a whole number$"):
        start()
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("JAX_PROCESS_ID", "2")
    with pytest.raises(ElrError, match=r"^processes\.index=2 must lie in 0\.\.1"):
        start()
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("JAX_PROCESS_ID", "1")
    with pytest.raises(ElrError, match=r"^processes\.count=2, but the environment names 4: use one of the two$"):
        start()
    assert started == []


def test_a_cluster_that_can_t_be_read_is_named(started, monkeypatch):
    for name, value in (STEP | {"SLURM_NTASKS": "many"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ElrError, match=r"processes can't be found \(SlurmCluster: .*many.*count 1 runs alone$"):
        start()


def test_a_coordinator_that_does_not_answer_is_one_line_in_time():
    """Through the real command."""
    flags = ["coordinator", "127.0.0.1:9", "count", "2", "index", "1", "wait-seconds", "2"]
    flags = [f"--launch.processes.{flag}" if number % 2 == 0 else flag for number, flag in enumerate(flags)]
    command = [sys.executable, "-m", "elr_jax.train", "elastic", *flags]
    done = subprocess.run(command, env=environment(1), timeout=PATIENCE, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: 2 processes did not come together at 127.0.0.1:9 in 2 s: start all of them")
    assert done.stderr.count("\n") == 1 and done.stdout == ""
