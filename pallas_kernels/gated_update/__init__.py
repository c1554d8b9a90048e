"""The adaptive delta: a learned step of the state towards the core's proposal."""

from pallas_kernels.gated_update.api import gated_update
from pallas_kernels.gated_update.xla import step_size

__all__ = ["gated_update", "step_size"]
