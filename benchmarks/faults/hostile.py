"""Files made to do harm: pickled code, and paths that lead out of a checkpoint's folder.

Each file would create another file, the mark, if what it holds were run, or would have a file outside read. What was
tried and what came of it is a row; the mark must not be there afterwards.
"""

import hashlib
import importlib.util
import io
import json
import pickle
import shutil
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks.faults.child import Life, digest, state_of
from benchmarks.faults.damage import files_of
from benchmarks.faults.story import Row
from checkpoints_convert.dory import load_dory
from checkpoints_convert.parcae import load_parcae
from checkpoints_convert.source import INDEX, find_source, find_tensors
from checkpoints_convert.tensor_file import write_tensors
from elr_jax.errors import ElrError
from elr_jax.train import checkpoint
from elr_jax.train.runner import checkpoint_folder
from elr_jax.train.token_store import open_store, write_store

RAN = "CODE WAS RUN"


class Harmful:
    """An object whose pickle creates a file when it is loaded."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A folder for harmful files, and a stopped run to put some into."""

    folder: Path
    stopped: Life

    @property
    def mark(self) -> Path:
        """What harmful code would create."""
        return self.folder / "mark"

    @property
    def payload(self) -> bytes:
        """A pickle that creates the mark."""
        return pickle.dumps(Harmful(self.mark))

    def outcome(self, act: Callable[[], Any]) -> str:
        """What trying something came to: its words, and whether the mark is there."""
        self.mark.unlink(missing_ok=True)
        with redirect_stderr(io.StringIO()) as said:
            try:
                act()
                told = next((line for line in said.getvalue().splitlines() if line.startswith("warning: ")), "read")
            except ElrError as error:
                told = str(error)
            except Exception as error:  # orbax's and tensorstore's own, of a checkpoint that was sealed anew
                told = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
        told = told.removeprefix("warning: ").replace(str(self.folder), "…")
        return RAN if self.mark.exists() else f"“{told if len(told) < 200 else told[:200] + ' …'}”"

    def checkpoint(self) -> tuple[Life, Path]:
        """A copy of the stopped run, and its newest checkpoint."""
        out = self.folder / "run"
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(self.stopped.launch.out, out)
        life = replace(self.stopped, launch=replace(self.stopped.launch, out=str(out)))
        folder = checkpoint_folder(life.launch.out)
        return life, folder / str(checkpoint.saved_steps(folder)[-1])


def rows(folder: Path, stopped: Life) -> list[Row]:
    """All of it, tried."""
    folder.mkdir()
    trial = Trial(folder=folder, stopped=stopped)
    with redirect_stderr(io.StringIO()):  # orbax's threads go on about a restore that has failed
        return [trying(trial) for trying in (_manifest, _link, _pickles, _index, _torch, _store, _hub)]


def _manifest(trial: Trial) -> Row:
    life, newest = trial.checkpoint()
    outside = trial.folder / "outside"
    outside.write_text("not the checkpoint's")
    wanted = hashlib.sha256(outside.read_bytes()).hexdigest()
    told = []
    for name in ("../../../outside", str(outside)):
        reseal(newest, lambda content, name=name: content["files"].update({name: wanted}))
        told.append(trial.outcome(lambda: state_of(life, step=None)))
    return Row(
        fault="manifest of a checkpoint names a file outside",
        done="`../../../outside` and an absolute path, with the right digest",
        happened=told[0] if len({"is absent" in one for one in told}) == 1 else " ".join(told),
    )


def _link(trial: Trial) -> Row:
    life, newest = trial.checkpoint()
    inside = newest / files_of(life, int(newest.name))[-1]
    outside = inside.rename(trial.folder / "moved")
    inside.symlink_to(outside)
    return Row(
        fault="checkpoint with a link that leads out",
        done="a file moved out and linked to, its bytes unchanged",
        happened=trial.outcome(lambda: state_of(life, step=None)),
    )


def _pickles(trial: Trial) -> Row:
    life, newest = trial.checkpoint()
    kept, states, told = digest(state_of(life, step=None)), [], []
    for name in files_of(life, int(newest.name)):
        if name == "manifest.json":
            continue
        life, newest = trial.checkpoint()
        (newest / name).write_bytes(trial.payload)
        digested = hashlib.sha256(trial.payload).hexdigest()
        reseal(newest, lambda content, name=name, digested=digested: content["files"].update({name: digested}))
        told.append(trial.outcome(lambda life=life: states.append(digest(state_of(life, step=None)))))
    ran, changed = sum(one == RAN for one in told), len(states) - states.count(kept)
    return Row(
        fault="pickled code in a checkpoint",
        done=f"in place of each of its {len(told)} files, the manifest sealed anew",
        happened=(f"{RAN} {ran} times; " if ran else "none run; ")
        + f"{len(told) - len(states)} are errors, {states.count(kept)} are not needed for the state"
        + (f", {changed} CHANGED it" if changed else ""),
    )


def _index(trial: Trial) -> Row:
    folder = trial.folder / "sharded"
    folder.mkdir()
    for path in (trial.folder / "outside.safetensors", folder / "model-1.safetensors"):
        write_tensors(path, {"w": (np.dtype(np.float32), (2,))}, lambda name: [np.ones(2, np.float32)])
    told = []
    for name in ("../outside.safetensors", str(trial.folder / "outside.safetensors")):
        (folder / INDEX).write_text(json.dumps({"weight_map": {"w": name}}))
        told.append(trial.outcome(lambda: find_tensors(find_source(folder))))
    return Row(
        fault="safetensors index names a file outside",
        done="`../outside.safetensors` and an absolute path",
        happened=told[0] if all("is absent" in one for one in told) else " ".join(told),
    )


def _torch(trial: Trial) -> Row:
    fault, done = (
        "pickled code in a torch file",
        "a pytorch_model.bin of a Parcae checkpoint, in both of torch's formats",
    )
    if importlib.util.find_spec("torch") is None:
        return Row(fault=fault, done="not tried: torch is not installed", happened="–")
    import torch  # pyright: ignore[reportMissingImports]

    from checkpoints_convert.torch_file import read_torch

    told = []
    for zipped in (True, False):
        path = trial.folder / f"{zipped}.bin"
        torch.save({"w": Harmful(trial.mark)}, path, _use_new_zipfile_serialization=zipped)
        told.append(trial.outcome(lambda path=path: read_torch(path)))
    return Row(fault=fault, done=done, happened=RAN if RAN in told else told[0])


def _store(trial: Trial) -> Row:
    folder = trial.folder / "store"
    write_store(folder, [("train", np.arange(3), 3)], vocab_size=8, settings={})
    np.save(folder / "train-starts.npy", np.array([Harmful(trial.mark)]), allow_pickle=True)
    return Row(
        fault="pickled code in a token store",
        done="an array of objects in train-starts.npy",
        happened=trial.outcome(lambda: open_store(folder)),
    )


def _hub(trial: Trial) -> Row:
    """A Hub that has everything a repository can have; what of it comes here, and what is run."""
    remote = trial.folder / "remote"
    remote.mkdir()
    auto = {"AutoConfig": "modeling_harm.Config", "AutoModelForCausalLM": "modeling_harm.Model"}
    (remote / "config.json").write_text(json.dumps({"model_type": "harm", "auto_map": auto, "trust_remote_code": True}))
    (remote / "modeling_harm.py").write_text(f"import pathlib\npathlib.Path({str(trial.mark)!r}).touch()\n")
    (remote / "pytorch_model.bin").write_bytes(trial.payload)
    local = trial.folder / "downloaded"
    hub: Any = ModuleType("huggingface_hub")

    def snapshot_download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        local.mkdir(exist_ok=True)
        for path in remote.iterdir():
            if any(fnmatch(path.name, pattern) for pattern in allow_patterns):
                shutil.copy(path, local)
        return str(local)

    hub.snapshot_download = snapshot_download
    before = sys.modules.get("huggingface_hub")
    sys.modules["huggingface_hub"] = hub
    try:
        told = [trial.outcome(lambda load=load: load("harm/model")) for load in (load_dory, load_parcae)]
    finally:
        sys.modules.pop("huggingface_hub")
        if before is not None:
            sys.modules["huggingface_hub"] = before
    came = sorted(path.name for path in local.iterdir())
    foreign = [name for name in came if name.endswith(".py")]
    return Row(
        fault="a Hub repository with code of its own",
        done="config.json with auto_map and trust_remote_code, modeling_harm.py, a pickled pytorch_model.bin",
        happened=f"{RAN} {foreign}"
        if RAN in told or foreign
        else f"no code comes along ({', '.join(came)}); {told[0]}",
    )


def reseal(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a checkpoint's manifest as somebody would who can make its digest."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    del content["sha256"]
    change(content)
    digested = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(content | {"sha256": digested}), encoding="utf-8")
