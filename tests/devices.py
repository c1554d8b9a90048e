"""Programs that need eight devices, in a process that makes them of its CPU."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def on_eight_devices(script: str, *arguments: str) -> str:
    """What a script of this folder prints; it can import what tests import."""
    environment = os.environ | {
        "JAX_NUM_CPU_DEVICES": "8",
        "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}",
    }
    command = [sys.executable, HERE / script, *arguments]
    return subprocess.run(command, env=environment, check=True, timeout=900, stdout=subprocess.PIPE, text=True).stdout
