"""Lives as processes: beginning one, waiting for it, and comparing what a run came to with the undisturbed one."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.faults.child import Life, digest, final_state, notes_of, write_life
from benchmarks.faults.story import Given, effective, lost_steps, read_lives, seen_wrongly
from elr_jax.train.metrics import read_metrics
from elr_jax.train.settings import Launch

CHILD, CLOCK = "benchmarks.faults.child", "benchmarks.faults.clock"
SAVE_EVERY = 5
_LONGEST = 240.0  # seconds of a life
_CLOCK_SCALARS = {"time", "tokens_per_second", "flops_per_second", "mfu"}


class End(NamedTuple):
    """How a process ended: its exit status and what it wrote to stderr."""

    code: int
    errors: str

    @property
    def said(self) -> str:
        """Its first error or warning, else its last line: a traceback's end, or nothing."""
        lines = self.errors.splitlines()
        told = [line for line in lines if line.startswith(("error: ", "warning: "))]
        return (sorted(told) or lines[-1:] or [""])[0]


@dataclass(frozen=True, kw_only=True)
class Straight:
    """The undisturbed run that all others are held against."""

    life: Life
    state: str
    """Digest of its final state."""
    given: list[Given]
    metrics: list[dict]
    start: float
    """Seconds from a process's start to its first step, programs compiled before."""

    @property
    def folder(self) -> Path:
        """Where runs and the compilation cache are."""
        return Path(self.life.launch.out).parent

    def another(self, name: str, **changes: object) -> Life:
        """The same run in a folder of its own."""
        launch = {key: changes.pop(key) for key in list(changes) if key in Launch.__dataclass_fields__}
        out = {"out": str(self.folder / name)}
        return replace(self.life, launch=replace(self.life.launch, **out | launch), **changes)  # pyright: ignore


def run_straight(folder: Path, *, steps: int) -> Straight:
    """The run that nothing disturbs, in a new folder."""
    folder.mkdir()
    life = Life(launch=Launch(out=str(folder / "straight"), save_every=SAVE_EVERY), steps=steps)
    end = finish(life)
    assert end.code == 0, end.said
    given = effective(read_lives(notes_of(life.launch.out)))
    assert [one.step for one in given] == list(range(1, steps + 1)), "the run itself is the measure"
    start = _seconds_to_start(folder, life)
    return Straight(life=life, state=digest(final_state(life)), given=given, metrics=told(life), start=start)


def _seconds_to_start(folder: Path, life: Life) -> float:
    again = replace(life, launch=replace(life.launch, out=str(folder / "timed")))
    began = time.monotonic()
    process = begin(again)
    wait_for(lambda: noted(again) > 1, process)
    seconds = time.monotonic() - began
    process.kill()
    process.communicate()
    return seconds


def begin(life: Life, *, module: str = CHILD, around: Sequence[str] = (), more: Sequence[str] = ()) -> subprocess.Popen:
    """A process that lives a life, in its folder's neighbourhood; `around` is a command to run it under."""
    out = Path(life.launch.out)
    file = write_life(life, out.with_name(f"{out.name}.json"))
    command = [*around, sys.executable, "-m", module, str(file), *more]
    return subprocess.Popen(
        command,
        env=environment(out.parent),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that `wait` can end what it runs under as well
    )


def environment(folder: Path) -> dict[str, str]:
    """A CPU, and programs that are compiled once for all lives."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }


def wait(process: subprocess.Popen) -> End:
    """How a process ends."""
    try:
        errors = process.communicate(timeout=_LONGEST)[1]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return End(process.returncode, errors)


def finish(life: Life, **how: object) -> End:
    """Live a life to its end."""
    return wait(begin(life, **how))  # pyright: ignore


def wait_for(condition: Callable[[], bool], process: subprocess.Popen) -> bool:
    """Wait until something is so; False if the process ends before."""
    deadline = time.monotonic() + _LONGEST
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def stop(life: Life, *, after: int) -> End:
    """Begin a life and end it by SIGTERM after some of its steps."""
    process = begin(life)
    if wait_for(lambda: noted(life) > after, process):
        process.terminate()
    return wait(process)


def noted(life: Life) -> int:
    """Lines that the folder's lives have noted so far: one each, and one a step."""
    notes = notes_of(life.launch.out)
    return notes.read_bytes().count(b"\n") if notes.exists() else 0


def told(life: Life) -> list[dict]:
    """What the metrics say of the steps and, last, of the final evaluation, without what depends on the clock."""
    lines = [
        {name: value for name, value in line.items() if name not in _CLOCK_SCALARS}
        for line in read_metrics(life.launch.out)
    ]
    return [line for line in lines if "loss" in line] + lines[-1:]


def costs(life: Life, straight: Straight) -> dict[str, str]:
    """What a run that was disturbed came to: a row's last three cells."""
    lives = read_lives(notes_of(life.launch.out))
    lost = lost_steps(lives)
    same = digest(final_state(life)) == straight.state and told(life) == straight.metrics
    return {
        "lost": str(sum(lost)) if len(lost) < 2 else f"{sum(lost)} in all, {max(lost)} at most",
        "data": seen_wrongly(effective(lives), straight.given),
        "same": "yes" if same else "NO",
    }
