"""Alternating timings in one process, and what they were taken on."""

import importlib
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from elr_jax.errors import ElrError


class Timing(NamedTuple):
    """Seconds of one contestant over all rounds of a race."""

    median: float
    fastest: float


def race(contestants: Mapping[str, Callable[[], Any]], *, repeats: int) -> dict[str, Timing]:
    """Time every contestant once a round, in turns, so that a slow spell of the machine hits all; compiles first."""
    for run in contestants.values():
        jax.block_until_ready(run())
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, run in contestants.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append(time.perf_counter() - start)
    return {name: Timing(statistics.median(taken), min(taken)) for name, taken in seconds.items()}


def require_torch() -> Any:
    """PyTorch, or a line that says how to get it."""
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise ElrError("torch is not installed: pip install 'elr-jax[parity]'") from error


def machine() -> dict[str, str | int | float]:
    """Processor, cores this process may use, load of the last minute, versions."""
    device = jax.devices()[0]
    return {
        "device": _cpu_model() if device.platform == "cpu" else device.device_kind,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
