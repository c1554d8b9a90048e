"""Chips that programs can be compiled for without having one: their compilers run on any machine.

TPU needs the package libtpu, H200 the packages of JAX's CUDA plugin and `ptxas`. Peaks are the makers' figures for
dense bfloat16 products and memory.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.contract import Implementation

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


@dataclass(frozen=True, kw_only=True)
class Chip:
    """A chip's name, peaks, the kernels it runs, and how its compiler is asked for."""

    name: str
    flops: float
    bandwidth: float
    kernels: Implementation
    topology: dict[str, str]

    def roofline(self, flops: float, bytes: float) -> float:
        """Seconds at least, by arithmetic or by memory."""
        return max(flops / self.flops, bytes / self.bandwidth)


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v5e",
            flops=197e12,
            bandwidth=819e9,
            kernels="pallas_tpu",
            topology={"platform": "tpu", "topology_name": "v5e:2x2"},
        ),
        Chip(
            name="v5p",
            flops=459e12,
            bandwidth=2765e9,
            kernels="pallas_tpu",
            topology={"platform": "tpu", "topology_name": "v5p:2x2x1"},
        ),
        Chip(
            name="v6e",
            flops=918e12,
            bandwidth=1640e9,
            kernels="pallas_tpu",
            topology={"platform": "tpu", "topology_name": "v6e:2x2"},
        ),
        Chip(
            name="h200",
            flops=989e12,
            bandwidth=4800e9,
            kernels="pallas_gpu",
            topology={"platform": "cuda", "target_config": H200, "topology": "1x1x1"},
        ),
    )
}
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # there is no machine to ask about its TPU
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


@contextmanager
def compiler(chip: Chip) -> Iterator[Callable[..., Any]]:
    """Within the block the chip is the target; gives `compile(function, *operands)` for one of it."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    topology = topologies.get_topology_desc(**chip.topology)  # pyright: ignore[reportArgumentType]
    mesh = Mesh(np.array(topology.devices[:1]), ("chip",), axis_types=(AxisType.Auto,))
    everywhere = NamedSharding(mesh, PartitionSpec())

    def compile(function: Callable[..., Any], *operands: Any) -> Any:
        placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), operands)
        options: dict[str, Any] = {"xla_gpu_autotune_level": 0} if chip.kernels == "pallas_gpu" else {}
        return jax.jit(function).lower(*placed).compile(compiler_options=options)

    with jax.set_mesh(mesh), warnings.catch_warnings():
        # programs for absent devices are stored but can't be read back; reading costs a warning and nothing else
        warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache entry")
        yield compile
