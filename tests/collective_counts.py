"""Collectives of a training step on 1, 2, 4 and 8 CPU devices, two rows on each; run where there are eight.

With `--write` to `golden/collectives.json`, whose README has the command, without it as JSON to the terminal.
"""

import dataclasses
import json
import math
import sys
from pathlib import Path

import jax

from elr_jax import flops, presets
from elr_jax.collectives import collectives, totals
from elr_jax.config import AttentionConfig, MLPConfig, Runtime
from elr_jax.depth import PerExample
from elr_jax.sharding import make_mesh
from elr_jax.train.optim import OptimConfig
from elr_jax.train.runner import lower_step
from elr_jax.train.settings import Recipe

GOLDEN = Path(__file__).parent / "golden" / "collectives.json"
SIZES = (
    {"data": 1},
    {"data": 8},
    {"fsdp": 2},
    {"fsdp": 4},
    {"fsdp": 8},
    {"data": 2, "fsdp": 4},
    {"fsdp": 4, "tensor": 2},
)
MESHES = {",".join(f"{axis}={size}" for axis, size in sizes.items()): sizes for sizes in SIZES}
LENGTH = 32


def count(sizes: dict[str, int]) -> dict:
    """Runs and bytes of one mesh's step by op."""
    devices = math.prod(sizes.values())
    mesh = make_mesh(sizes, devices=jax.devices()[:devices])
    rows = 2 * devices
    recipe = Recipe(
        model=model(),
        depth=PerExample(max_loops=4),
        optim=OptimConfig(optimizer="adamw", warmup_steps=1),
        steps=4,
        batch_size=rows,
        microbatches=1,
    )
    compiled = lower_step(recipe, Runtime(), mesh, seq_len=LENGTH).compile()
    return totals(collectives(compiled.as_text()))


def model():
    """Three blocks of width 64, one of them looped."""
    sizes = {"attention": AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=16), "mlp": MLPConfig(d_ff=256)}
    stacks = {"prelude": "*-", "core": "*-", "coda": "*-"}
    return dataclasses.replace(presets.tiny_text(), d_model=64, vocab_size=256, **sizes, **stacks)


def main() -> None:
    """Count on every mesh."""
    found = {
        "jax": jax.__version__,
        "parameter bytes": 4 * flops.num_params(model()),
        "steps": {text: count(sizes) for text, sizes in MESHES.items()},
    }
    if "--write" in sys.argv:
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
