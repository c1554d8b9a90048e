"""Settings of the test run, made before anything imports JAX; child processes inherit them."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    # Compiled programs are kept between runs. The size bound also turns on the cache's file lock, which makes it safe
    # for several test workers at once.
    "JAX_COMPILATION_CACHE_DIR": str(Path(__file__).parents[1] / ".cache" / "jax"),
    "JAX_COMPILATION_CACHE_MAX_SIZE": str(2**30),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
}
for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)

# A first example compiles, so no deadline. CI tries the same examples every time; elsewhere they are fresh.
settings.register_profile("elr", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("elr")


@pytest.fixture
def fast_compilation():
    """Programs compiled in half the time: for laws that hold at any speed, not for what a user's program rounds to."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


MOST_MAPPINGS = 20_000
"""Of a process's memory; Linux allows 65,530 by default, and a compiled program takes dozens."""


@pytest.fixture(autouse=True)
def bounded_mappings():
    """Programs are dropped before they are so many that the next one's memory is refused, which ends the process."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPPINGS:
        import jax

        jax.clear_caches()
