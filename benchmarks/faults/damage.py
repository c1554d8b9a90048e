"""Damaged checkpoints: each file cut short, and each file with one bit turned."""

import shutil
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np

from benchmarks.faults.child import Life, digest, notes_of, state_of
from benchmarks.faults.lives import SAVE_EVERY, Straight, costs, finish, stop
from benchmarks.faults.story import Row
from elr_jax.train import checkpoint
from elr_jax.train.runner import checkpoint_folder

Damage = Callable[[bytearray, np.random.Generator], None]


def cut(content: bytearray, rng: np.random.Generator) -> None:
    """Leave a random part of a file's beginning."""
    del content[int(rng.integers(0, max(len(content), 1))) :]


def flip(content: bytearray, rng: np.random.Generator) -> None:
    """Turn a random bit of a file."""
    if content:
        content[int(rng.integers(len(content)))] ^= 1 << int(rng.integers(8))


DAMAGES: dict[str, Damage] = {"truncated": cut, "bit-flipped": flip}


def stopped_run(straight: Straight) -> Life:
    """A run that was stopped with two checkpoints."""
    life = straight.another("damaged")
    stop(life, after=SAVE_EVERY + 2)
    return life


def damaged(straight: Straight, stopped: Life, name: str, *, seed: int) -> Row:
    """Each file of the newest checkpoint in turn: what a reader finds; then one of them, and the run goes on."""
    rng = np.random.default_rng(seed)
    steps = checkpoint.saved_steps(checkpoint_folder(stopped.launch.out))
    files = files_of(stopped, steps[-1])
    earlier = digest(state_of(stopped, step=steps[-2]))
    held = sum(
        _falls_back(_copy(stopped, f"{name}-{at}"), file, DAMAGES[name], rng, steps, earlier)
        for at, file in enumerate(files)
    )
    life = _copy(stopped, name)
    damage(Path(checkpoint_folder(life.launch.out), str(steps[-1]), str(rng.choice(files))), DAMAGES[name], rng)
    end = finish(life)
    return Row(
        fault=f"{name} checkpoint",
        done=f"each of the {len(files)} files of the newest checkpoint, at a random place (seed {seed})",
        happened=("each" if held == len(files) else f"ONLY {held}")
        + " found, by digest, and the checkpoint before read instead; "
        + ("set aside with a warning" if "moved the damaged" in end.errors else "NOT SET ASIDE"),
        exit=str(end.code),
        **costs(life, straight),
    )


def all_damaged(straight: Straight, stopped: Life) -> Row:
    """No checkpoint is left whole, and then the copies are put back."""
    life, rng = _copy(stopped, "hopeless"), np.random.default_rng(0)
    folder = checkpoint_folder(life.launch.out)
    kept = shutil.copytree(folder, f"{folder}.copy")
    for step in checkpoint.saved_steps(folder):
        damage(folder / str(step) / files_of(life, step)[0], flip, rng)
    end = finish(life)
    shutil.rmtree(folder)
    Path(kept).rename(folder)
    last = finish(life)
    said = end.errors.splitlines()[-1].replace(life.launch.out, "OUT").removeprefix("error: ")
    return Row(
        fault="every checkpoint damaged",
        done="a bit of each; then copies put back",
        happened=f"“{said}”",
        exit=f"{end.code}, then {last.code}",
        **costs(life, straight),
    )


def files_of(life: Life, step: int) -> list[str]:
    """The files of a checkpoint, relative to its folder."""
    folder = checkpoint_folder(life.launch.out) / str(step)
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def damage(path: Path, how: Damage, rng: np.random.Generator) -> None:
    """Change a file; an empty one gets a byte."""
    before = path.read_bytes()
    content = bytearray(before)
    how(content, rng)
    path.write_bytes(content if content != before else before + b"?")


def _falls_back(life: Life, file: str, how: Damage, rng: np.random.Generator, steps: list[int], earlier: str) -> bool:
    """Whether a reader of the damaged copy warns, and gets the checkpoint before bit for bit."""
    folder = checkpoint_folder(life.launch.out)
    damage(folder / str(steps[-1]) / file, how, rng)
    with redirect_stderr(StringIO()) as said:
        meta = checkpoint.read_meta(folder)
        state = state_of(life, step=None)
    shutil.rmtree(life.launch.out)
    assert meta is not None, "checkpoints are there"
    return "is damaged" in said.getvalue() and digest(state) == earlier


def _copy(stopped: Life, name: str) -> Life:
    out = f"{stopped.launch.out}-{name}"
    shutil.copytree(stopped.launch.out, out)
    shutil.copy(notes_of(stopped.launch.out), notes_of(out))
    return replace(stopped, launch=replace(stopped.launch, out=out))
