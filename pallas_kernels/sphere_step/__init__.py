"""The normalised transformer's residual: a step of the state on the unit sphere."""

from pallas_kernels.sphere_step.api import sphere_step

__all__ = ["sphere_step"]
