"""kill -9 at random moments: any time after the start, after a number of steps, and during saves."""

import subprocess
import time
from pathlib import Path
from typing import Literal

import numpy as np

from benchmarks.faults.child import Life
from benchmarks.faults.lives import SAVE_EVERY, Straight, begin, costs, finish, noted, wait_for
from benchmarks.faults.story import Row

Moment = Literal["start", "step", "save"]
MOMENTS: tuple[Moment, ...] = ("start", "step", "save")
_SPREAD = {"step": 0.03, "save": 0.15}  # seconds: about a step, and about a save


def steps_for(kills: int) -> int:
    """Steps of a run that so many kills don't outlast."""
    return 20 + 6 * kills


def killed(straight: Straight, *, kills: int, seed: int) -> Row:
    """One run that is killed again and again, then left to end."""
    life, rng = straight.another("killed"), np.random.default_rng(seed)
    done, saving = dict.fromkeys(MOMENTS, 0), 0
    while sum(done.values()) < kills:
        moment = MOMENTS[sum(done.values()) % len(MOMENTS)]
        process = begin(life)
        if not _wait(moment, process, life, rng, straight.start):
            break  # the run came to its end
        process.kill()
        process.communicate()
        done[moment] += 1
        saving += any(_unfinished(life))
    end = finish(life)
    told = ", ".join(f"{count} {name}" for name, count in zip(_NAMES, done.values(), strict=True))
    return Row(
        fault="kill -9",
        done=f"one run of {life.steps} steps, a save every {SAVE_EVERY}, killed {sum(done.values())} times: {told} "
        f"(seed {seed})",
        happened=f"{saving} left a half-written save, which the next start removed with a warning; every start "
        "went on from the newest whole checkpoint",
        exit=f"−9, at last {end.code}",
        **costs(life, straight),
    )


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
    saves = (lambda: True) if moment == "step" else lambda: any(_unfinished(life))
    if not wait_for(lambda: noted(life) > before + steps and saves(), process):
        return False
    time.sleep(rng.uniform(0, _SPREAD[moment]))
    return process.poll() is None


def _unfinished(life: Life) -> list[Path]:
    return list(Path(life.launch.out, "checkpoints").glob("*.unfinished"))
