"""Writing a folder that is whole or absent, and a bar while bytes move."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from checkpoints_convert.source import TOKENIZER_FILES
from elr_jax.errors import ElrError

_SLOW = 1 << 30  # bytes that take more than a moment


@contextmanager
def new_folder(out: str | Path, *, needed: int) -> Iterator[Path]:
    """A folder to fill that gets the name `out` when the block ends, and is removed when it fails.

    Raises:
        ElrError: `out` exists and is no empty folder, its disk has less than `needed` bytes free, or a write failed.
    """
    target = refuse_taken(out)
    work = _unfinished(target)
    try:
        work.mkdir(parents=True)
        free = shutil.disk_usage(work).free
        if free < needed:
            raise ElrError(f"{out} needs {needed / 1e9:.2f} GB and its disk has {free / 1e9:.2f}: free some, or move")
        yield work
        if target.exists():
            target.rmdir()
        work.rename(target)
    except OSError as error:
        raise ElrError(f"{out} can't be written ({error.strerror or error}): name another folder") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def refuse_taken(out: str | Path) -> Path:
    """The absolute path, if a folder can be made there: it is absent or an empty folder."""
    target = Path(out).expanduser().absolute()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ElrError(f"{out} is there already: name a folder that is not, or an empty one")
    if _unfinished(target).exists():
        told = f"{_unfinished(target)} was left behind by a conversion that was killed"
        raise ElrError(f"{told}, or one is at work: remove it, or name another folder")
    return target


def _unfinished(target: Path) -> Path:
    return target.with_name(f"{target.name}.unfinished")


def copy_tokenizer(folder: Path, out: Path) -> list[str]:
    """Copy a checkpoint's tokenizer and generation files, and return their names."""
    names = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    for name in names:
        shutil.copyfile(folder / name, out / name)
    return names


@contextmanager
def byte_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function that moves a bar on by so many bytes; it is drawn on terminals, where `total` takes a while."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, transient=True, disable=total < _SLOW) as bar:
        task = bar.add_task(what, total=total)
        bar.disable = bar.disable or not bar.console.is_terminal
        yield lambda count: bar.advance(task, count)
