"""kill -9 at random moments: any time after the start, after a number of steps, and during saves."""

import subprocess
import time
from contextlib import suppress
from typing import Literal

import numpy as np

from benchmarks.faults.child import Life, notes_of
from benchmarks.faults.lives import SAVE_EVERY, Straight, begin, costs, finish, noted, wait_for
from benchmarks.faults.story import Row, read_lives
from elr_jax.train.checkpoint import saved_steps
from elr_jax.train.runner import checkpoint_folder

Moment = Literal["start", "step", "save"]
MOMENTS: tuple[Moment, ...] = ("start", "step", "save")
_SPREAD = {"step": 0.03, "save": 0.15}  # seconds: about a step, and about a save


def steps_for(kills: int) -> int:
    """Steps of a run that so many kills don't outlast."""
    return 20 + 6 * kills


def killed(straight: Straight, *, kills: int, seed: int) -> Row:
    """One run that is killed again and again, then left to end."""
    life, rng = straight.another("killed"), np.random.default_rng(seed)
    done, saving, removed, wrong = dict.fromkeys(MOMENTS, 0), 0, 0, 0
    while sum(done.values()) < kills:
        moment = MOMENTS[sum(done.values()) % len(MOMENTS)]
        newest = max(saved_steps(checkpoint_folder(life.launch.out)), default=0)
        before = _unfinished(life)
        process = begin(life)
        if not _wait(moment, process, life, rng, straight.start):
            break  # the run came to its end
        process.kill()
        removed += _REMOVED in process.communicate()[1]
        done[moment] += 1
        saving += bool(_unfinished(life) - before)
        wrong += not _begins_after(life, newest)
    end = finish(life)
    told = ", ".join(f"{count} {name}" for name, count in zip(_NAMES, done.values(), strict=True))
    removed += _REMOVED in end.errors
    return Row(
        fault="kill -9",
        done=f"one run of {life.steps} steps, a save every {SAVE_EVERY}, killed {sum(done.values())} times: {told} "
        f"(seed {seed})",
        happened=f"{saving} left a half-written save; {removed} starts removed one with a warning; "
        + (f"{wrong} STARTED ELSEWHERE" if wrong else "all went on from the newest whole checkpoint"),
        exit=f"−9, at last {end.code}",
        **costs(life, straight),
    )


_REMOVED = "left behind by a save that was killed"
_NAMES = ("at any time after the start", "after a random step", "during a save")


def _wait(moment: Moment, process: subprocess.Popen, life: Life, rng: np.random.Generator, start: float) -> bool:
    """Wait for a random moment of a kind; False if the process ends before."""
    before = noted(life)
    if moment == "start":
        time.sleep(rng.uniform(0, 1.5 * start))
        return process.poll() is None
    # the life's own line comes first, and what an earlier kill left of a save is removed before its first step
    most = 2 * SAVE_EVERY if moment == "step" else 1
    steps = int(rng.integers(1, most + 1))
    saves = (lambda: True) if moment == "step" else lambda: bool(_unfinished(life))
    if not wait_for(lambda: noted(life) > before + steps and saves(), process):
        return False
    time.sleep(rng.uniform(0, _SPREAD[moment]))
    return process.poll() is None


def _unfinished(life: Life) -> set[int]:
    """Half-written saves, by what tells one from another of the same step."""
    folder = checkpoint_folder(life.launch.out)
    found = set()
    for path in folder.glob("*.unfinished"):
        with suppress(FileNotFoundError):  # finished meanwhile
            found.add(path.stat().st_ino)
    return found


def _begins_after(life: Life, step: int) -> bool:
    """Whether the last life, if it came to its first step, went on after this one."""
    last = read_lives(notes_of(life.launch.out))[-1] if notes_of(life.launch.out).exists() else []
    return not last or last[0].step == step + 1
