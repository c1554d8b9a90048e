"""Kernels on the CPU: JAX's interpreters of TPU and GPU semantics, for tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any

_active = ContextVar("interpreting", default=False)


def interpreting() -> bool:
    """Whether kernels called now are interpreted, and so may be lowered for any platform."""
    return _active.get()


@contextmanager
def tpu_interpreter(**params: Any) -> Iterator[None]:
    """Interpret TPU kernels called inside, with the `InterpretParams` given."""
    from jax.experimental.pallas import tpu as pltpu

    with _marked(), pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(**params)):
        yield


@contextmanager
def plain_interpreter() -> Iterator[None]:
    """Turn kernels called inside into plain JAX: quick, blind to races and to reads of what nobody wrote."""
    from jax.experimental.pallas import tpu as pltpu

    plain: Any = True
    with _marked(), pltpu.force_tpu_interpret_mode(plain):
        yield


@contextmanager
def gpu_interpreter(**params: Any) -> Iterator[None]:
    """Interpret Mosaic GPU kernels called inside; JAX has had this interpreter since 0.12."""
    plgpu: Any = import_module("jax.experimental.pallas.mosaic_gpu")
    with _marked(), plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(**params)):
        yield


@contextmanager
def _marked() -> Iterator[None]:
    token = _active.set(True)
    try:
        yield
    finally:
        _active.reset(token)
