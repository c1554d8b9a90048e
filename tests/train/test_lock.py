"""One run a folder: who holds it, and how it comes free."""

import os
import signal
import subprocess
import sys

import pytest

from elr_jax.errors import ElrError
from elr_jax.train import lock
from elr_jax.train.lock import only_run

HOLDER = """
import sys, time
from elr_jax.train.lock import only_run
with only_run(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_folder_comes_free_when_its_holder_is_killed(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path / "run"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ElrError, match=f"run is in use by process {process.pid} on .*: wait for its end"):
            only_run(tmp_path / "run").__enter__()
        process.send_signal(signal.SIGKILL)
        process.communicate()
    finally:
        process.kill()
    with only_run(tmp_path / "run"):
        assert (tmp_path / "run" / lock.FILE).read_text().startswith(f"process {os.getpid()} on ")


def test_it_comes_free_when_a_run_fails(tmp_path):
    with pytest.raises(RuntimeError), only_run(tmp_path):
        raise RuntimeError
    with only_run(tmp_path), pytest.raises(ElrError), only_run(tmp_path):
        pass


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in ("file", "file/run"):
        with (
            pytest.raises(ElrError, match=r"can't hold a run \(.+\): choose another --launch.out$"),
            only_run(tmp_path / folder),
        ):
            pass


def test_a_file_system_without_locks_is_told_and_used(tmp_path, monkeypatch, capsys):
    def refuse(*arguments):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    with only_run(tmp_path):
        assert "can't be locked (Function not implemented): start no second run" in capsys.readouterr().err


def test_other_processes_of_a_run_leave_it_to_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(lock.jax, "process_index", lambda: 1)
    with only_run(tmp_path / "run"):
        assert not (tmp_path / "run").exists()
