"""One process of a run of several, held up where a test asks for it; started by test_processes.py."""

import errno
import itertools
import json
import os
import sys
import time
from pathlib import Path

import jax
import numpy as np
from test_runner import TRAINING, launch

from elr_jax.errors import one_line_errors
from elr_jax.sharding import make_mesh
from elr_jax.train import checkpoint, runner
from elr_jax.train.data import batches
from elr_jax.train.placement import Placement
from elr_jax.train.processes import Processes, start

MESHES = ("data=4", "data=2,tensor=2", "tensor=2,data=2", "sequence=4", "fsdp=2,sequence=2", "data=2,expert=2")


def hold(out: Path, name: str) -> None:
    """Say so, and wait for death, or for a file that sends this process on."""
    (out / name).touch()
    while not (out / f"{name}-on").exists():
        time.sleep(0.01)


def hold_up(out: Path, where: str) -> None:
    """Before a step (`step5`), or in the middle of the save after the fourth, its files or its manifest."""
    if where.startswith("step"):
        original = runner.Placement.batch
        number = itertools.count(1)

        def batch(self, held, batch_size):
            if next(number) == int(where.removeprefix("step")):
                hold(out, where)
            return original(self, held, batch_size)

        runner.Placement.batch = batch
        return
    name = {"files": "_checkpointer", "manifest": "_digests"}[where]
    original = getattr(checkpoint, name)

    def held(*arguments):
        unfinished = checkpoint.epath.Path(out / "checkpoints" / "4.unfinished")
        if unfinished.exists() and not (arguments and arguments[0] != unfinished):
            hold(out, where)
        return original(*arguments)

    setattr(checkpoint, name, held)


def fill_disk() -> None:
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    checkpoint._refuse_full_disk = full


def note_rows(out: Path, index: int) -> None:
    """Write down the tokens that this process reads for each step."""
    original = runner.batches

    def noted(data, size, *, start=0, **settings):
        for number, batch in enumerate(original(data, size, start=start, **settings), start=start + 1):
            if data is TRAINING:
                with (out / f"rows-{index}").open("a") as file:
                    file.write(json.dumps([number, batch.tokens.tolist()]) + "\n")
            yield batch

    runner.batches = noted


def check_rows(index: int) -> None:
    """Every device gets its part of the batch, whatever the mesh and the order of its devices."""
    (whole,) = (batch for _, batch in zip(range(1), batches(TRAINING, 8), strict=False))
    meshes = {text: make_mesh(text) for text in MESHES}
    meshes["shuffled"] = make_mesh("data=4", devices=[jax.devices()[place] for place in (0, 2, 1, 3)])
    for name, mesh in meshes.items():
        place = Placement(mesh)
        held = next(batches(TRAINING, 8, rows=place.rows(8)))
        for found, expected in zip(jax.tree.leaves(place.batch(held, 8)), jax.tree.leaves(whole), strict=True):
            assert found.shape == expected.shape
            for shard in found.addressable_shards:
                np.testing.assert_array_equal(shard.data, expected[shard.index])
        print(json.dumps([index, name, list(place.rows(8))]), flush=True)


def main(out: str, port: str, index: str, what: str, heartbeat: str) -> None:
    folder = Path(out)
    processes = Processes(
        coordinator=f"127.0.0.1:{port}",
        count=2,
        index=int(index),
        wait_seconds=60,
        heartbeat_seconds=int(heartbeat),
    )
    if what == "rows":
        start(processes)
        return check_rows(int(index))
    sys.modules["tensorboardX"] = None  # takes seconds to import
    folder.mkdir(exist_ok=True)
    note_rows(folder, int(index))
    if what == "full":
        fill_disk()
    elif what == "elsewhere":
        folder = folder / "elsewhere"
    elif what != "straight":
        hold_up(folder, what)
    with one_line_errors():
        launch(folder, save_every=2, processes=processes)


if __name__ == "__main__":
    main(*sys.argv[1:])
