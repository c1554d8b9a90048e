"""One run a folder: a lock that dies with its process, however that ends."""

import fcntl
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import jax

from elr_jax.errors import ElrError

FILE = "run.lock"


@contextmanager
def only_run(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Hold a run's folder, made if absent; the first process of a run holds it for all.

    The file stays behind and means nothing: what counts is the system's lock on it, which ends with the process.

    Raises:
        ElrError: another process holds the folder, or it can't be made or written.
    """
    if jax.process_index() > 0:
        yield
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        file = Path(folder, FILE).open("ab+", buffering=0)  # noqa: SIM115 (closed below)
    except OSError as error:
        raise ElrError(f"{folder} can't hold a run ({error.strerror}): choose another --launch.out") from error
    with file:
        _lock(file, folder)
        yield


def _lock(file: BinaryIO, folder: str | os.PathLike[str]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
    except BlockingIOError as error:
        file.seek(0)
        holder = file.read().decode(errors="replace") or "another process"
        told = f"{folder} is in use by {holder}: wait for its end, stop it, or choose another --launch.out"
        raise ElrError(told) from error
    except OSError as error:  # a file system without locks, or full
        print(f"warning: {folder} can't be locked ({error.strerror}): start no second run there", file=sys.stderr)
