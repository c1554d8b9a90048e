"""What importing a released checkpoint costs: time, and resident memory over the bytes of the tensors kept.

    python -m benchmarks.import_dory                  writes 8 GB of random bfloat16 and removes it; a few minutes
    python -m benchmarks.import_dory --read PATH      imports a checkpoint of yours instead

Each import runs in a process of its own, first with the file out of the system's page cache, then with what fits of it
in there. Expect a peak of at most 1.15 times the tensors; the peak of a process that has imported JAX alone is in it.
"""

import dataclasses
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import jax
import tyro

from benchmarks.report import Row, tell_machine, tell_table, write_json
from benchmarks.timing import machine
from checkpoints_convert import file_bytes, load_dory
from checkpoints_convert.random_dory import write_random_dory
from checkpoints_convert.source import find_source, find_tensors
from elr_jax import presets
from elr_jax.config import AttentionConfig, MLPConfig, ModelConfig
from elr_jax.errors import ElrError, one_line_errors

SPARE = 2_000_000_000
GOAL = 1.15


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportDory:
    """Size and place of the checkpoint."""

    scale: Literal["full", "small"] = "full"
    """`full` is the released model's 3,975,229,440 parameters, `small` 2 million."""
    folder: Path | None = None
    """Where to make the temporary folder; None: the system's place for them."""
    read: Path | None = None
    """Import this checkpoint instead of a random one."""
    json: Path | None = None
    """File to write the table to; None writes nothing."""
    child: bool = False
    """Import `read` in this process and print one line of JSON; what the benchmark starts."""


def main(settings: ImportDory) -> dict[str, Any]:
    """Write the checkpoint, import it twice and print the table."""
    if settings.child:
        assert settings.read is not None, "the parent says what to read"
        print(json.dumps(measure(settings.read)))
        return {}
    rows = imports(settings.read) if settings.read is not None else written(settings)
    result = {"machine": machine(), "imports": rows}
    tell_machine(result["machine"])
    size = f"{rows[0]['parameters']:,} parameters, {rows[0]['kept'] / 1e9:.2f} GB kept"
    tell_table(f"{size}; goal: peak / kept at most {GOAL}", [_shown(row) for row in rows])
    write_json(settings.json, result)
    return result


def written(settings: ImportDory) -> list[Row]:
    """The imports of a random checkpoint in a temporary folder."""
    config = presets.dory_4b() if settings.scale == "full" else small_dory()
    needed = file_bytes(config) + SPARE
    with tempfile.TemporaryDirectory(dir=settings.folder, prefix="import_dory_") as name:
        free = shutil.disk_usage(name).free
        if free < needed:
            told = f"{needed / 1e9:.1f} GB are needed in {Path(name).parent} and {free / 1e9:.1f} are free"
            raise ElrError(f"{told}: free some, name another --folder, or take --scale small")
        start = time.perf_counter()
        folder = write_random_dory(name, config, dtype="bfloat16")
        print(f"wrote {file_bytes(config):,} bytes in {time.perf_counter() - start:.0f} s", flush=True)
        return imports(folder)


def imports(checkpoint: Path) -> list[Row]:
    """One import from the disk, one from the page cache."""
    _forget(checkpoint)
    return [{"file": place, **_in_child(checkpoint)} for place in ("on disk", "in memory")]


def measure(checkpoint: Path) -> Row:
    """Import a checkpoint and tell what it took of this process."""
    jax.block_until_ready(jax.numpy.zeros(1))
    before = _peak_bytes()
    start, start_cpu = time.perf_counter(), time.process_time()
    params, _ = load_dory(checkpoint)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    leaves = jax.tree.leaves(params)
    return {
        "parameters": sum(leaf.size for leaf in leaves),
        "kept": sum(leaf.nbytes for leaf in leaves),
        "seconds": seconds,
        "cpu seconds": cpu_seconds,
        "before": before,
        "peak": _peak_bytes(),
        "ru_maxrss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def small_dory() -> ModelConfig:
    """The released model's layers at a fortieth of its width: 2 M parameters."""
    return dataclasses.replace(
        presets.dory_4b(),
        vocab_size=1024,
        d_model=64,
        attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=16, rope_base=1e7, window_rope_base=1e4),
        mlp=MLPConfig(d_ff=192),
    )


def _peak_bytes() -> int:
    """The most this process has had resident, since it was started: `ru_maxrss` may begin with its parent's."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _in_child(checkpoint: Path) -> Row:
    command = [sys.executable, "-m", "benchmarks.import_dory", "--child", "--read", str(checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ElrError(f"the import failed: {' '.join(done.stderr.split())[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _forget(checkpoint: Path) -> None:
    """Ask the system to drop the tensors' files from its page cache."""
    for path in {entry.path for entry in find_tensors(find_source(checkpoint)).values()}:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _shown(row: Row) -> Row:
    """A line of the printed table."""
    kept, seconds = row["kept"], row["seconds"]
    sizes = {f"GB {name}": row[name] / 1e9 for name in ("before", "peak", "ru_maxrss")}
    speed = {"s": seconds, "CPU s": row["cpu seconds"], "GB/s": kept / 1e9 / seconds}
    return {"file": row["file"], **speed, **sizes, "peak / kept": f"{row['peak'] / kept:.3f}"}


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(ImportDory, description=__doc__))
