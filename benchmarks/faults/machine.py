"""Faults of the machine and of who starts runs on it: disks, clocks, bad numbers, launches that don't agree."""

import math
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from benchmarks.faults.child import Life, digest, final_state, notes_of, state_of
from benchmarks.faults.lives import CLOCK, SAVE_EVERY, End, Straight, begin, costs, finish, noted, stop, wait, wait_for
from benchmarks.faults.story import Given, Row, effective, lost_steps, read_lives, seen_wrongly
from elr_jax.config import Runtime
from elr_jax.train.metrics import read_metrics

DAY = 86_400.0
EARLY = SAVE_EVERY + 2
"""Steps after which a run is stopped: one save is behind it."""
# A mount of its own, which this command alone sees and which ends with it. Two launches: on a disk that is full, and
# after more room was made.
_IN_NAMESPACE = ("unshare", "--map-root-user", "--mount", "sh", "-ec")
_SMALL_DISK = """
out=$0; size=$1; shift; mkdir -p "$out"
mount -t tmpfs -o size="$size" tmpfs "$out"
code=0; "$@" || code=$?
mount -o remount,size=64m "$out"
"$@" 2>&1
cp -r "$out" "$out.kept"; exit $code
"""
_READ_ONLY = 'mount --bind "$0" "$0"; mount -o remount,bind,ro "$0"; exec "$@"'
_FILE_LIMIT = 'ulimit -f "$0"; exec "$@"'


def full_disk(straight: Straight, *, size: str, where: str, save_every: int | None = SAVE_EVERY) -> Row:
    """A disk of a few KB, and a second launch when it has room."""
    life = straight.another(f"full-{size}", save_every=save_every, tensorboard=True)
    if not _can_mount():
        return _untried(f"disk full {where}")
    end = finish(life, around=(*_IN_NAMESPACE, _SMALL_DISK, life.launch.out, size))
    moved = f"{life.launch.out}.kept"
    notes_of(life.launch.out).rename(notes_of(moved))
    return Row(
        fault=f"disk full {where}",
        done=f"a file system of {size}B, made larger after the run had ended",
        happened=_quoted(end, life),
        exit=f"{end.code}, then 0",
        **costs(replace(life, launch=replace(life.launch, out=moved)), straight),
    )


def file_limit(straight: Straight) -> Row:
    """A write that the system refuses half-way."""
    life = straight.another("limited")
    first = stop(life, after=EARLY)
    end = finish(life, around=("sh", "-ec", _FILE_LIMIT, "8"))
    return _resumed(
        straight, life, (first, end), "write refused half-way", "resumed with files limited to 4 KB, then without"
    )


def read_only(straight: Straight) -> Row:
    """A folder that turns read-only between two launches."""
    life = straight.another("read-only")
    if not _can_mount():
        return _untried("read-only folder")
    first = stop(life, after=EARLY)
    end = finish(life, around=(*_IN_NAMESPACE, _READ_ONLY, life.launch.out))
    done = "resumed in a folder mounted read-only, then writable again"
    return _resumed(straight, life, (first, end), "read-only folder", done)


def sigterm(straight: Straight, *, after: int, name: str) -> Row:
    """SIGTERM in a step."""
    life = straight.another(f"sigterm-{after}")
    end = stop(life, after=after)
    stopped = read_metrics(life.launch.out)[-1]
    happened = "saved and evaluated" if "loss" not in stopped else f"saved after step {stopped['step']} and ended"
    return _resumed(straight, life, (end,), f"SIGTERM {name}", "sent by another process", happened)


def two_runs(straight: Straight) -> Row:
    """A second launch in the folder of a run that is at work."""
    life = straight.another("twice")
    process = begin(life)
    wait_for(lambda: noted(life) > EARLY, process)
    process.send_signal(signal.SIGSTOP)  # so that it is still there, however slow the second one's start is
    second = finish(life)
    process.send_signal(signal.SIGCONT)
    first = wait(process)
    return Row(
        fault="two runs in one folder",
        done=f"a second launch after {EARLY} steps of the first",
        happened=f"the second: {_quoted(second, life)}; the first went on to its end",
        exit=f"{second.code}, the first {first.code}",
        **costs(life, straight),
    )


def changed_launch(straight: Straight) -> Row:
    """Another launch of the same run: what it may change."""
    life = straight.another("changed")
    stop(life, after=EARLY)
    other = replace(
        life.launch, eval_every=7, save_every=9, keep=1, mesh="data=1", runtime=Runtime(remat="none", loop="scan")
    )
    end = finish(replace(life, launch=other))
    return Row(
        fault="another launch of the same run",
        done="resumed with other eval_every, save_every, keep, mesh (data=1), remat (none), loop (scan)",
        happened=end.said or "went on",
        exit=str(end.code),
        **costs(life, straight),
    )


def changed_recipe(straight: Straight) -> Row:
    """Another recipe in the run's folder."""
    life = straight.another("recipe")
    first = stop(life, after=EARLY)
    end = finish(replace(life, learning_rate=0.01))
    return _resumed(straight, life, (first, end), "another recipe", "resumed with another learning rate, then the own")


def nan_batch(straight: Straight) -> Row:
    """A batch whose weights are NaN, in a run that is stopped and resumed and one that is not."""
    bad = 2 * SAVE_EVERY + 2
    life = straight.another("nan", nan_at=bad, save_every=1, keep=straight.life.steps)
    end = finish(life)
    before, after = (state_of(life, step=step) for step in (bad - 1, bad))
    kept = digest(before.params) == digest(after.params)
    lines = [line for line in read_metrics(life.launch.out) if "loss" in line]
    counted = [line["skipped"] for line in lines] == [int(line["step"] >= bad) for line in lines]
    again = replace(life, launch=replace(life.launch, out=f"{life.launch.out}-again"))
    stop(again, after=bad)
    finish(again)
    same = digest(final_state(life)) == digest(final_state(again))
    return Row(
        fault="NaN batch",
        done=f"the weights of step {bad}'s batch are NaN",
        happened=f"parameters {'as before the step' if kept else 'CHANGED'}, counted as "
        f"{'one skipped step' if counted else 'SOMETHING ELSE'}, training went on",
        exit=str(end.code),
        lost=str(sum(lost_steps(read_lives(notes_of(again.launch.out))))),
        data=seen_wrongly(_given(again), _given(life)),
        same=f"{'yes' if same else 'NO'}, to the same run stopped and resumed",
    )


def clock_jump(straight: Straight) -> Row:
    """Clocks that jump forwards and back."""
    life = straight.another("clock")
    jumps = ("8", str(DAY), "16", str(-2 * DAY), "24", str(DAY))
    end = finish(life, module=CLOCK, more=jumps)
    lines = [line for line in read_metrics(life.launch.out) if "loss" in line]
    ordered = all(one["step"] + 1 == two["step"] for one, two in pairwise(lines))
    rates = [value for line in lines for name, value in line.items() if name.endswith("_per_second")]
    sound = all(math.isfinite(rate) and rate >= 0 for rate in rates)
    return Row(
        fault="clock jump",
        done="wall and monotonic clock a day on, two back, one on",
        happened=f"metrics {'in order of steps' if ordered else 'OUT OF ORDER'}, rates "
        f"{'finite' if sound else 'NOT FINITE'} where told ({len(rates)} of {2 * len(lines) - 2})",
        exit=str(end.code),
        **costs(life, straight),
    )


def _resumed(
    straight: Straight, life: Life, ends: Sequence[End], fault: str, done: str, happened: str | None = None
) -> Row:
    """A row of a run that is launched once more, undisturbed."""
    last = finish(life)
    return Row(
        fault=fault,
        done=done,
        happened=happened or _quoted(ends[-1], life),
        exit=f"{ends[-1].code}, then {last.code}",
        **costs(life, straight),
    )


def _quoted(end: End, life: Life) -> str:
    said = end.said.replace(life.launch.out, "OUT").removeprefix("error: ")
    return f"“{said}”"


def _given(life: Life) -> list[Given]:
    return effective(read_lives(notes_of(life.launch.out)))


def _can_mount() -> bool:
    try:
        return subprocess.run((*_IN_NAMESPACE, "mount -t tmpfs tmpfs /mnt"), capture_output=True).returncode == 0
    except OSError:
        return False


def _untried(fault: str) -> Row:
    return Row(fault=fault, done="not tried: this machine lets no process mount", happened="–")
