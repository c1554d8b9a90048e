"""Settings of the test run, made before anything imports JAX; child processes inherit them."""

import os
from importlib.metadata import version
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
    # Programs compile in a fraction of the time and compute the same but for rounding.
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "XLA_FLAGS": "--xla_cpu_parallel_codegen_split_count=1",
}
if version("jaxlib").startswith("0.10."):  # later ones don't know it, and XLA ends a process for that
    ENVIRONMENT["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
for name, value in ENVIRONMENT.items():
    os.environ.setdefault(name, value)

# A first example compiles, so no deadline. CI tries the same examples every time; elsewhere they are fresh.
settings.register_profile("elr", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("elr")


@pytest.fixture(autouse=True)
def effort(request):
    """Tests marked `optimised` or `aot` compile as a user's programs do, for memory, operations or speed."""
    if not any(map(request.node.get_closest_marker, ("optimised", "aot"))):
        yield
        return
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


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
