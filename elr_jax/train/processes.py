"""Several processes that run one program: when they are started, and how they stop together.

Nothing is started on a single machine. Processes come together when more than one is named, by the first of
1. `--launch.processes.…` (`Processes`),
2. the variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, which every script reads,
3. a TPU pod, a SLURM step, an indexed Kubernetes job or Open MPI, which JAX itself recognises.
What one leaves open the next fills in. A count of 1 starts nothing, whatever the environment says.
"""

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.experimental import multihost_utils

from elr_jax.errors import ElrError

_FLAG = "--launch.processes"
_ALONE = f"{_FLAG}.count 1 runs alone"
_steps = itertools.count(1)
"""JAX settles on a number that all processes are still to reach, so it can't begin again with a program's next run."""


@dataclass(frozen=True, kw_only=True)
class Processes:
    """The processes of a program; what is None is found out from the environment."""

    coordinator: str | None = None
    """HOST:PORT at which process 0 is to be reached by all."""
    count: int | None = None
    """How many processes there are; 1 runs alone, whatever the environment says."""
    index: int | None = None
    """Which of them this one is, from 0."""
    wait_seconds: int = 300
    """Longest wait until all have come together."""
    heartbeat_seconds: int = 100
    """Silence after which a process counts as dead, and the others end."""

    def __post_init__(self):
        for name, least in (("count", 1), ("index", 0), ("wait_seconds", 1), ("heartbeat_seconds", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ElrError(f"processes.{name}={value} must be at least {least}")
        if self.index is not None and self.count is not None and self.index >= self.count:
            raise ElrError(f"processes.index={self.index} must lie in 0..{self.count - 1}: there are {self.count}")
        if self.coordinator is not None and not _is_address(self.coordinator):
            raise ElrError(f"processes.coordinator={self.coordinator!r} is not of the form HOST:PORT")


def start(processes: Processes = Processes()) -> None:
    """Join the program's other processes; nothing where there are none, or where they are joined already.

    Before anything uses a device.

    Raises:
        ElrError: values that are missing or contradict the environment's, or processes that don't come together in
            time; the program should end then.
    """
    if processes.count == 1 or jax.distributed.is_initialized():
        return
    known = _with_variables(processes)
    told = None not in (known.coordinator, known.count, known.index)
    found = None if told or known.count == 1 else _detected()
    if found and known.count and found != known.count:
        raise ElrError(f"processes.count={known.count}, but the environment names {found}: use one of the two")
    count = known.count or found or 1
    if count > 1 and (told or found):
        _join(known, count, detect=not told)
    elif count > 1 or (known.count is None and (known.coordinator or known.index) is not None):
        missing = [name for name in ("coordinator", "count", "index") if getattr(known, name) is None]
        raise ElrError(f"several processes need {', '.join(f'{_FLAG}.{name}' for name in missing)} too; {_ALONE}")


def is_first() -> bool:
    """Whether this process is the one that talks and writes."""
    return jax.process_index() == 0


def tell(text: str) -> None:
    """Print a line, once for all processes."""
    if is_first():
        print(text, flush=True)


@contextmanager
def stop_on_sigterm() -> Iterator[Callable[[], bool]]:
    """A function to call after every step: whether to stop there, because SIGTERM has come to any process.

    It is true for all processes after the same step. JAX's coordination service, which took over SIGTERM when they
    came together, passes the signal on and settles the step in the background, so a step without one pays for no
    exchange.
    """
    if jax.process_count() > 1:
        yield lambda: multihost_utils.reached_preemption_sync_point(next(_steps))
        return
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped.is_set
        return
    before = signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    try:
        yield stopped.is_set
    finally:
        signal.signal(signal.SIGTERM, before)


def _with_variables(processes: Processes) -> Processes:
    """With what is None taken from the environment's variables."""
    known: dict[str, Any] = {
        "coordinator": os.environ.get("JAX_COORDINATOR_ADDRESS"),
        "count": _number("JAX_NUM_PROCESSES"),
        "index": _number("JAX_PROCESS_ID"),
    }
    return replace(processes, **{name: known[name] for name in known if getattr(processes, name) is None})


def _number(variable: str) -> int | None:
    value = os.environ.get(variable)
    if value and not value.isdecimal():
        raise ElrError(f"{variable}={value} must be a whole number")
    return int(value) if value else None


def _detected() -> int | None:
    """How many processes the environment names, as JAX reads it; None where it names none."""
    from jax._src.clusters import ClusterEnv  # there is no public way to ask without starting

    for cluster in ClusterEnv._cluster_types:
        # Every pod of Kubernetes looks like a cluster; one with processes to join is a pod of an indexed job.
        pod = cluster.__name__ == "K8sCluster"
        if cluster.opt_in_only_method or (pod and "JOB_COMPLETION_INDEX" not in os.environ):
            continue
        try:
            if cluster.is_env_present():
                return cluster.get_process_count()
        except Exception as error:
            told = f"{cluster.__name__}: {' '.join(str(error).split())}"
            raise ElrError(f"the environment's processes can't be found ({told}); {_ALONE}") from error
    return None


def _join(known: Processes, count: int, *, detect: bool) -> None:
    # JAX ends the process when time runs out, so it waits in a thread, and longer than this does.
    failed: list[Exception] = []

    def initialize() -> None:
        try:
            jax.distributed.initialize(
                coordinator_address=known.coordinator,
                num_processes=count,
                process_id=known.index,
                cluster_detection_method=None if detect else "deactivate",
                initialization_timeout=2 * known.wait_seconds + 60,
                heartbeat_timeout_seconds=known.heartbeat_seconds,
                shutdown_timeout_seconds=known.heartbeat_seconds,
            )
        except Exception as error:
            failed.append(error)

    joining = threading.Thread(target=initialize, daemon=True)
    joining.start()
    joining.join(known.wait_seconds)
    if failed:
        raise failed[0]
    if joining.is_alive():
        place = f" at {known.coordinator}" if known.coordinator else ""
        raise ElrError(
            f"{count} processes did not come together{place} in {known.wait_seconds} s: start all of them, with an "
            f"address of process 0 that each can reach; {_ALONE}"
        )


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 2**16
