"""Chips that kernels are made for, and their compilers, which need none (`elr_jax.topologies`)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from elr_jax.hardware import HARDWARE, Hardware
from elr_jax.topologies import OPTIONS, Topology, absent_devices, compiling, parse_topology
from pallas_kernels.contract import Implementation


class Chip(NamedTuple):
    """A chip's name, the kernels it runs, and the smallest slice that its compiler knows."""

    name: str
    kernels: Implementation
    topology: Topology

    @property
    def hardware(self) -> Hardware:
        """Its maker's figures."""
        return HARDWARE[self.name]


def _chip(name: str, kernels: Implementation, grid: str) -> Chip:
    return Chip(name, kernels, parse_topology(f"{name}:{grid}"))


CHIPS = {
    chip.name: chip
    for chip in (
        _chip("v5e", "pallas_tpu", "2x2"),
        _chip("v5p", "pallas_tpu", "2x2x1"),
        _chip("v6e", "pallas_tpu", "2x2"),
        _chip("h200", "pallas_gpu", "1x1x1"),
    )
}


@contextmanager
def compiler(chip: Chip) -> Iterator[Callable[..., Any]]:
    """Within the block the chip is the target; gives `compile(function, *operands)` for one of it."""
    mesh = Mesh(np.array(absent_devices(chip.topology)[:1]), ("chip",), axis_types=(AxisType.Auto,))
    everywhere = NamedSharding(mesh, PartitionSpec())

    def compile(function: Callable[..., Any], *operands: Any) -> Any:
        placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), operands)
        return jax.jit(function).lower(*placed).compile(compiler_options=OPTIONS[chip.topology.platform])

    with jax.set_mesh(mesh), compiling():
        yield compile
