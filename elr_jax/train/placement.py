"""Where a run's arrays are: on one device, or cut over a mesh whose devices may belong to several processes."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from elr_jax import parameters
from elr_jax.config import ModelConfig
from elr_jax.hardware import peak_flops
from elr_jax.parameters import Params
from elr_jax.sharding import batch_sharding, make_mesh, param_shardings
from elr_jax.train.data import Batch
from elr_jax.train.settings import Launch, Recipe
from elr_jax.train.step import TrainState, init_state, optimizer_for, state_shardings


@dataclass(frozen=True)
class Placement:
    """One device (None), or a mesh."""

    mesh: Mesh | None

    def in_use(self) -> AbstractContextManager[Any]:
        """A context in which programs are cut over the mesh."""
        return nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def state(self, recipe: Recipe) -> TrainState | None:
        """Shardings of the state; None: the default device."""
        return None if self.mesh is None else state_shardings(recipe, self.mesh)

    @property
    def everywhere(self) -> NamedSharding | None:
        """Of what every device has whole, so that each process can read it; None: the default device."""
        return None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

    def abstract(self, recipe: Recipe) -> TrainState:
        """Shapes, types and places of the state, without memory."""
        shapes = jax.eval_shape(partial(init_state, recipe, optimizer_for(recipe)))
        if self.mesh is None:
            return shapes
        struct = lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
        return jax.tree.map(struct, shapes, self.state(recipe))

    def abstract_batch(self, rows: int, seq_len: int) -> Batch:
        """The same of a batch on a mesh."""
        assert self.mesh is not None
        place = batch_sharding(self.mesh, (rows, seq_len))
        ids, weights = (
            jax.ShapeDtypeStruct((rows, seq_len), dtype, sharding=place) for dtype in (jnp.int32, jnp.float32)
        )
        leaves: dict[str, Any] = {"tokens": ids, "targets": ids, "weights": weights, "segment_ids": ids}
        return Batch(**leaves)

    def params(self, config: ModelConfig, dtype: Any) -> Params:
        """The same of a model's parameters, all of one type."""
        shapes = parameters.abstract(config)
        if self.mesh is None:
            return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), shapes)
        struct = lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=place)
        return jax.tree.map(struct, shapes, param_shardings(parameters.param_specs(config), self.mesh))

    def peak_flops(self, launch: Launch) -> float | None:
        """Operations a second of all devices in use at best, as told or as the maker says; None: not known."""
        devices = jax.devices()[:1] if self.mesh is None else list(self.mesh.devices.flat)
        each = peak_flops(devices[0].device_kind) if launch.peak_tflops is None else 1e12 * launch.peak_tflops
        return None if each is None else each * len(devices)

    def rows(self, batch_size: int) -> Sequence[int]:
        """Rows of a batch that this process's devices hold, ascending: those it has to read.

        Processes have them in common where a mesh cuts something else between them, such as heads.
        """
        everything = range(batch_size)
        if self.mesh is None:
            return everything
        cuts: Any = batch_sharding(self.mesh, (batch_size,)).addressable_devices_indices_map((batch_size,)).values()
        return sorted({row for (cut,) in cuts for row in everything[cut]})

    def batch(self, held: Batch, batch_size: int) -> Batch:
        """The whole batch on its devices, from the rows that this process holds."""
        if self.mesh is None:
            return held
        return jax.tree.map(
            partial(_assembled, rows=self.rows(batch_size), batch_size=batch_size, mesh=self.mesh), held
        )


def placement(mesh: str | None) -> Placement:
    """Of a mesh in words; without one, several processes have each their rows of every batch."""
    if mesh is None and jax.process_count() > 1:
        mesh = f"data={jax.device_count()}"
    return Placement(None if mesh is None else make_mesh(mesh))


def _assembled(held: np.ndarray, *, rows: Sequence[int], batch_size: int, mesh: Mesh) -> jax.Array:
    shape = (batch_size, *held.shape[1:])

    def part(index: Any) -> np.ndarray:
        cut, *others = index
        return held[np.searchsorted(rows, range(batch_size)[cut]), *others]

    return jax.make_array_from_callback(shape, batch_sharding(mesh, shape), part)
