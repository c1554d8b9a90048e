"""Slices of chips that programs can be compiled for without having one: their compilers run on any machine.

    devices = absent_devices("v5p:4x4x4")     # 64 of them, as a mesh takes them
    with compiling(): jax.jit(step).lower(…).compile(compiler_options=options("v5p:4x4x4"))

TPU needs the package libtpu, which one process at a time may load; H200 the packages of JAX's CUDA plugin and `ptxas`.
"""

import importlib.util
import math
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import jax
from jax.experimental import topologies

from elr_jax.errors import ElrError

H200 = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  clock_rate_ghz: 1.98
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  device_memory_size: 150754820096
}
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
"""
PLATFORMS: dict[str, Literal["tpu", "cuda"]] = {"v5e": "tpu", "v5p": "tpu", "v6e": "tpu", "h200": "cuda"}
PACKAGES = {"tpu": "libtpu", "cuda": "jax_cuda13_plugin"}
OPTIONS: dict[str, dict[str, Any]] = {"tpu": {}, "cuda": {"xla_gpu_autotune_level": 0}}
"""What the compilers are told; nothing can be timed on an absent GPU."""
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # there is no machine to ask about its TPU
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


class Topology(NamedTuple):
    """A slice of chips of one kind in a grid: `v5e:8x8`, `v5p:4x4x4`; of GPUs slices x hosts x GPUs: `h200:1x1x8`."""

    chip: str
    grid: tuple[int, ...]

    @property
    def chips(self) -> int:
        """How many there are."""
        return math.prod(self.grid)

    @property
    def platform(self) -> Literal["tpu", "cuda"]:
        """What runs the programs."""
        return PLATFORMS[self.chip]

    def __str__(self) -> str:
        return f"{self.chip}:{'x'.join(map(str, self.grid))}"


def parse_topology(text: str) -> Topology:
    """The slice that a text such as `v5p:4x4x4` names."""
    found = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)", text)
    if found is None or found[1] not in PLATFORMS:
        raise ElrError(f"topology={text!r} is unknown: give one of {', '.join(PLATFORMS)} and a grid, as v5p:4x4x4")
    return Topology(found[1], tuple(map(int, found[2].split("x"))))


def absent_devices(topology: Topology) -> list[Any]:
    """The devices of a slice that is not here; programs can be compiled for them and not run.

    Raises:
        ElrError: a compiler that is not installed, or a grid that it doesn't know.
    """
    package, grid = PACKAGES[topology.platform], "x".join(map(str, topology.grid))
    if importlib.util.find_spec(package) is None:
        raise ElrError(f"{package}, the compiler for {topology.chip}, is not installed: `make fit` brings it")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    how = {"topology_name": str(topology)} if topology.platform == "tpu" else {"target_config": H200, "topology": grid}
    try:
        found = topologies.get_topology_desc(platform=topology.platform, **how)  # pyright: ignore[reportArgumentType]
    except jax.errors.JaxRuntimeError as error:
        told = str(error).splitlines()[0]
        raise ElrError(f"topology={topology} has no compiler ({told}): try another grid of {topology.chip}") from error
    except NotImplementedError as error:  # JAX left the plugin out, since this machine can't run its programs
        told = f"{package} did not load: set JAX_PLATFORMS=cpu, or call leave_devices before anything of JAX's"
        raise ElrError(f"topology={topology} has no compiler ({told})") from error
    return list(found.devices)


def leave_devices() -> None:
    """Have this process use none of the machine's own accelerators, before anything asked for a device.

    A program that only compiles needs none, what it finds may be busy, and JAX tells of a plugin whose libraries are
    not here in twenty lines. `JAX_PLATFORMS` of the user's stays.
    """
    if not jax.config.jax_platforms:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_platforms", "cpu")


@contextmanager
def compiling() -> Iterator[None]:
    """Within the block programs for absent devices may be compiled without a warning."""
    with warnings.catch_warnings():
        # such programs are stored but can't be read back; reading costs a warning and nothing else
        warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache entry")
        yield
