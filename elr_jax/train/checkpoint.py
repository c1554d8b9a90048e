"""Checkpoints on disk: atomic, verified on the way back, and the only place that knows orbax.

A directory holds one folder per step: `<step>/state` is orbax's, `<step>/manifest.json` has the caller's metadata,
shape and dtype of every array, and the SHA-256 of every file. Orbax restores a flipped bit without a word and casts a
wrong dtype silently; the manifest is what both are checked against, before orbax reads anything.

A name that is not a number is no checkpoint: a save fills `<step>.unfinished` and renames it at the end, and a
checkpoint found damaged becomes `damaged-<step>` before the next save; it is never deleted.
"""

import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from elr_jax.errors import ElrError
from elr_jax.params import leaves_by_path

State = TypeVar("State")
Meta = dict[str, Any]

_UNFINISHED = ".unfinished"
_MANIFEST = "manifest.json"
_NONE, _ALL_DAMAGED = -1, -2
_STATUS = re.compile(r"[A-Z_]{4,}: ")  # how tensorstore starts the message of a failed write
_MEND = "resume with the saved values, or start a new --out directory"


class Checkpoints:
    """The writer of one checkpoint directory; one run owns it at a time, and every process of the run takes part.

    Creating it removes what a killed save left behind and says so on stderr. Readers use the functions of this module
    instead, which change nothing on disk.

    Args:
        directory: where the step folders go; made if absent, and seen by every process.
        keep: how many of the newest checkpoints stay. Two or more leave something to fall back to.

    Raises:
        ElrError: `keep` below 1, or a directory that can't be made or is not the same for all processes.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int):
        if keep < 1:
            raise ElrError(f"keep={keep} checkpoints would leave nothing to resume from: use 1 or more")
        self.directory = _absolute(directory)
        self._keep = keep
        self._damaged: set[int] = set()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ElrError(f"{directory} can't hold checkpoints ({_reason(error)}): choose another --out") from error
        _refuse_unshared(self.directory)
        if jax.process_index() == 0:
            for path in self.directory.glob(f"*{_UNFINISHED}*"):
                _warn(f"removing {path}, left behind by a save that was killed")
                _remove(path)

    def latest_step(self) -> int | None:
        """The newest step on disk that has not proved damaged; None when there is none."""
        return max(set(saved_steps(self.directory)) - self._damaged, default=None)

    def save(self, step: int, state: Any, meta: Meta) -> epath.Path:
        """Write one checkpoint and return its folder; it is complete on return.

        The new folder appears under its name only when it is whole, and older ones beyond `keep` go only after that.

        Args:
            step: later than every checkpoint there is.
            state: a pytree of arrays, typed PRNG keys included.
            meta: JSON-ready data.

        Raises:
            ElrError: a step that is not new, or a failed write (a full disk); earlier checkpoints stay as they are.
        """
        latest = self.latest_step()
        if latest is not None and step <= latest:
            raise ElrError(
                f"step {step} is not after step {latest}, the newest checkpoint in {self.directory}: resume from it, "
                "or start a new --out directory"
            )
        self._set_damaged_aside()
        try:
            self._write(step, state, meta)
        except Exception as error:
            self._remove_failed(step)
            if not (isinstance(error, OSError) or _STATUS.match(str(error))):
                raise
            left = f"step {latest} stays loadable" if latest is not None else "there is no earlier checkpoint"
            raise ElrError(
                f"the checkpoint of step {step} can't be written to {self.directory} ({_reason(error)}): free space "
                f"there or choose another --out; {left}"
            ) from error
        if jax.process_index() == 0:
            for old in saved_steps(self.directory)[: -self._keep]:
                _remove(self.directory / str(old))
        return self.directory / str(step)

    def restore(
        self, abstract: State | Callable[[Meta], State], *, step: int | None = None
    ) -> tuple[State, Meta] | None:
        """As the function `restore`; the damaged checkpoints it skips make room for the next save."""
        found = _choose(self.directory, step)
        if found is None:
            return None
        if step is None:
            self._damaged = {other for other in saved_steps(self.directory) if other > found}
        return _read(self.directory / str(found), abstract, field=None)

    def _write(self, step: int, state: Any, meta: Meta) -> None:
        path = self.directory / f"{step}{_UNFINISHED}"

        def prepare() -> None:
            _refuse_full_disk(self.directory, state)
            _remove(path)
            path.mkdir()

        def put_in_place() -> None:
            content = _sealed({"meta": meta, "leaves": _describe(state), "files": _digests(path)})
            (path / _MANIFEST).write_text(json.dumps(content))
            path.rename(self.directory / str(step))

        _by_first_process(prepare)
        with _quiet_orbax():
            _checkpointer().save(path / "state", args=ocp.args.PyTreeSave(state))
        _by_first_process(put_in_place)

    def _remove_failed(self, step: int) -> None:
        # Orbax raises on the first failed write and abandons the others, which may recreate the folder for a moment.
        for _ in range(20):
            for path in self.directory.glob(f"{step}{_UNFINISHED}*"):
                shutil.rmtree(path, ignore_errors=True)
            time.sleep(0.02)

    def _set_damaged_aside(self) -> None:
        for step in self._damaged if jax.process_index() == 0 else ():
            aside = self.directory / f"damaged-{step}"
            if aside.exists():
                _remove(aside)
            (self.directory / str(step)).rename(aside)
            _warn(f"moved the damaged checkpoint of step {step} to {aside}")
        self._damaged = set()


def saved_steps(directory: str | os.PathLike[str]) -> list[int]:
    """The steps with a finished checkpoint, ascending; empty when the directory does not exist."""
    root = _absolute(directory)
    return sorted(int(path.name) for path in root.iterdir() if path.name.isdecimal()) if root.is_dir() else []


def read_meta(directory: str | os.PathLike[str], *, step: int | None = None) -> Meta | None:
    """The metadata of the newest checkpoint that has any (or of one step), arrays unread; None when there is none.

    Raises:
        ElrError: checkpoints exist, none can be read, or the step is absent.
    """
    root = _absolute(directory)
    found = _choose(root, step, verify=_read_manifest)
    return None if found is None else _read_manifest(root / str(found))["meta"]


def restore(
    directory: str | os.PathLike[str],
    abstract: State | Callable[[Meta], State],
    *,
    step: int | None = None,
    field: str | None = None,
) -> tuple[State, Meta] | None:
    """Read the newest undamaged checkpoint, bit for bit, onto the shardings of `abstract`.

    A checkpoint with a file that is absent or lacks the digest it was saved with is skipped with a warning on stderr,
    and the one before is tried. The first process decides for all.

    Args:
        directory: where the step folders are.
        abstract: the pytree saved, with arrays or `jax.ShapeDtypeStruct`s for leaves; leaves without a sharding go to
            the first local device. Or a function that gives it for the metadata of the checkpoint that was chosen.
        step: this step or an error, instead of the newest that is whole.
        field: the top-level field of the saved state that `abstract` describes, such as `params`; None for all of it.

    Returns:
        The state and the metadata saved with it; None when the directory has no checkpoint.

    Raises:
        ElrError: a leaf's shape or dtype differs from `abstract`, the step is absent, or every checkpoint is damaged.
    """
    root = _absolute(directory)
    found = _choose(root, step)
    return None if found is None else _read(root / str(found), abstract, field=field)


def refuse_mismatch(saved: Meta, current: Meta, *, what: str) -> None:
    """Compare settings of a checkpoint with this run's.

    Raises:
        ElrError: names every key path whose values differ, with both values.
    """
    differing = _differences(*(dict(_flatten(json.loads(json.dumps(side)))) for side in (saved, current)))
    if differing:
        raise ElrError(f"{what} differs from the checkpoint's: {', '.join(differing)}; {_MEND}")


def _choose(root: epath.Path, step: int | None, *, verify: Callable[[epath.Path], Any] | None = None) -> int | None:
    """The step to read, the same on every process; None when there is no checkpoint."""
    steps = saved_steps(root)
    if step is not None and step not in steps:
        raise ElrError(f"{root} has no checkpoint of step {step}: choose one of {', '.join(map(str, steps)) or 'none'}")
    candidates = steps[::-1] if step is None else [step]
    chosen = _newest_whole(root, candidates, verify or _verify_files) if jax.process_index() == 0 else _NONE
    if jax.process_count() > 1:
        chosen = int(multihost_utils.broadcast_one_to_all(chosen))
    if chosen == _ALL_DAMAGED:
        told = f"no checkpoint in {root} can be read ({len(candidates)} damaged)"
        raise ElrError(f"{told}: put back a copy, or start a new --out directory")
    return None if chosen == _NONE else chosen


def _newest_whole(root: epath.Path, candidates: list[int], verify: Callable[[epath.Path], Any]) -> int:
    for step in candidates:
        try:
            verify(root / str(step))
            return step
        except Exception as error:  # damaged JSON shows as anything
            _warn(f"the checkpoint of step {step} in {root} is damaged ({_reason(error)})")
    return _ALL_DAMAGED if candidates else _NONE


def _verify_files(path: epath.Path) -> None:
    listed = _read_manifest(path)["files"]
    found = _digests(path)
    for name, digest in listed.items():  # names to look up, never a path to follow
        if name not in found:
            raise ValueError(f"{name} is absent")
        if found[name] != digest:
            raise ValueError(f"{name} does not have the digest it was saved with")


def _read_manifest(path: epath.Path) -> dict[str, Any]:
    if not (path / _MANIFEST).exists():
        raise ValueError(f"{_MANIFEST} is absent")
    content = json.loads((path / _MANIFEST).read_text())
    unsealed = {name: value for name, value in content.items() if name != "sha256"}
    if content.get("sha256") != _sealed(unsealed)["sha256"]:
        raise ValueError(f"{_MANIFEST} does not have the digest it was saved with")
    return content


def _read(path: epath.Path, abstract: State | Callable[[Meta], State], *, field: str | None) -> tuple[State, Meta]:
    manifest = _read_manifest(path)
    wanted: Any = abstract(manifest["meta"]) if callable(abstract) else abstract
    _refuse_unfit(manifest["leaves"], _describe(wanted if field is None else {field: wanted}), field, path=path)
    here = jax.sharding.make_single_device_sharding(jax.local_devices()[0])
    placed = lambda leaf: getattr(leaf, "sharding", None) or here
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed(leaf)), wanted)
    item = target if field is None else {field: target}
    restore_args = ocp.checkpoint_utils.construct_restore_args(item)
    args = ocp.args.PyTreeRestore(item, restore_args=restore_args, partial_restore=field is not None)
    with _quiet_orbax():
        tree = _checkpointer().restore(path / "state", args=args)
    return (tree if field is None else tree[field]), manifest["meta"]


def _refuse_unfit(saved: dict[str, str], current: dict[str, str], field: str | None, *, path: epath.Path) -> None:
    if field is not None:
        saved = {name: leaf for name, leaf in saved.items() if name.split("/")[0] == field}
    differing = _differences(saved, current)
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise ElrError(f"checkpoint {path} does not fit this run: {', '.join(differing[:3])}{more}; {_MEND}")


def _differences(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    keys = [key for key in {**saved, **current} if key not in saved or key not in current or saved[key] != current[key]]
    shown = lambda side, key: repr(side[key]) if key in side else "absent"
    return [f"{key} was {shown(saved, key)}, is {shown(current, key)}" for key in keys]


def _refuse_unshared(directory: epath.Path) -> None:
    """Raise on every process where one of them has another folder under this name."""
    if jax.process_count() == 1:
        return
    number = secrets.randbits(31)
    mark = lambda number: directory / f"seen-by-all-{number}{_UNFINISHED}"
    if jax.process_index() == 0:
        mark(number).mkdir()
    shared = mark(multihost_utils.broadcast_one_to_all(number))
    seen = multihost_utils.process_allgather(np.asarray(shared.exists()))
    if jax.process_index() == 0:
        shared.rmdir()
    if not seen.all():
        blind = ", ".join(map(str, np.flatnonzero(~seen)))
        raise ElrError(f"{directory} is not one folder for all: process {blind} sees another; choose a shared --out")


def _by_first_process(action: Callable[[], None]) -> None:
    """Run on the first process, while the others wait; where it fails all raise, so that none waits for ever."""
    failure: Exception | None = None
    if jax.process_index() == 0:
        try:
            action()
        except Exception as error:
            failure = error
    if jax.process_count() > 1 and multihost_utils.broadcast_one_to_all(failure is not None):
        failure = failure or OSError(errno.EIO, "the first process failed to write its part")
    if failure is not None:
        raise failure


def _refuse_full_disk(directory: epath.Path, state: Any) -> None:
    """Raise the operating system's error before anything is written where the arrays plainly don't fit."""
    leaves = jax.tree.leaves(state)
    needed = sum(leaf.nbytes for leaf in leaves) + 4096 * (len(leaves) + 32)  # index and metadata, with room to spare
    try:
        usage = shutil.disk_usage(directory)
    except OSError:
        return  # not a file system that can tell
    if usage.total and usage.free < needed:
        told = f"{os.strerror(errno.ENOSPC)}: {needed / 1e6:.1f} MB needed, {usage.free / 1e6:.1f} MB free"
        raise OSError(errno.ENOSPC, told)


def _describe(tree: Any) -> dict[str, str]:
    """`params/layers/0/kernel` → `float32[64, 64]`, for every leaf."""
    return {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in leaves_by_path(tree).items()}


def _digests(folder: epath.Path) -> dict[str, str]:
    """The digest of every file below a folder, by relative path; a link that leads out of it is an error."""
    found = {}
    for path in folder.iterdir():
        if not Path(path).resolve().is_relative_to(Path(folder).resolve()):  # epath's own resolve follows no link
            raise ValueError(f"{path.name} is a link that leads out of the checkpoint")
        if path.is_dir():
            found |= {f"{path.name}/{name}": digest for name, digest in _digests(path).items()}
        else:
            found[path.name] = _digest(path)
    return found


def _digest(path: epath.Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _sealed(content: dict[str, Any]) -> dict[str, Any]:
    """Content with a digest of itself under `sha256`."""
    return content | {"sha256": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}


def _flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flatten(inner, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, value


def _checkpointer() -> ocp.Checkpointer:
    # A new one each time: a failed save leaves nothing behind in it.
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())


def _remove(path: epath.Path) -> None:
    """Delete a folder in such a way that a kill half-way never leaves half a checkpoint under its name."""
    if _UNFINISHED not in path.name:
        path = path.rename(path.parent / f"{path.name}{_UNFINISHED}")
    path.rmtree(missing_ok=True)


def _absolute(directory: str | os.PathLike[str]) -> epath.Path:
    return epath.Path(directory).expanduser().resolve()


def _reason(error: Exception) -> str:
    """The operating system's words where there are some, else the head of the message."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    found = re.search(r"([^:]+) \[os_error_code='\d+'\]", str(error))  # how tensorstore ends its messages
    if found:
        return found.group(1).strip()
    text = " ".join(str(error).split())[:200]
    return text if type(error) is ValueError else f"{type(error).__name__}: {text}"


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


@contextmanager
def _quiet_orbax() -> Iterator[None]:
    """Keep orbax's threads from printing tracebacks of errors that arrive here as exceptions anyway."""
    logger = logging.getLogger("absl")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
