"""`import elr_jax` is cheap: no device, no trainer's libraries, and every public name there."""

import os
import subprocess
import sys

import elr_jax

HEAVY = {"torch", "transformers", "grain", "orbax", "tensorstore", "tyro", "matplotlib"}


def test_import_touches_no_device_and_no_heavy_package():
    code = (
        "import sys, elr_jax\n"
        "from jax._src import xla_bridge\n"
        f"print(sorted({{name.split('.')[0] for name in sys.modules}} & {HEAVY}), sorted(xla_bridge._backends))"
    )
    # An unknown platform makes any use of a device an error, whatever JAX calls its table of backends.
    environment = os.environ | {"JAX_PLATFORMS": "none_such"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[] []"


def test_every_public_name_exists():
    assert sorted(set(elr_jax.__all__)) == sorted(elr_jax.__all__)
    missing = [name for name in elr_jax.__all__ if not hasattr(elr_jax, name)]
    assert not missing
