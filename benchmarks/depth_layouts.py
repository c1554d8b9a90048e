"""What mixed depths cost on several devices, by how rows and rounds are laid out: counted, not run.

    python -m benchmarks.depth_layouts          a minute on two cores

A batch of mixed depths is `masked`, run as one and as deep as its deepest row; `sorted` by depth into microbatches, so
that all ranks are at one depth; or has its `ranks apart`, each as deep as its own deepest row (`Runtime.gather_core`);
or both. For each law of the loop count, in rounds a row, means of many draws:

    time   rounds of each microbatch's deepest rank: what a step takes
    work   rounds that were run, those of finished rows among them: what it costs
    idle   share of the time in which a rank waits for another

and the bytes that a device sends in a step, read from the compiled program of a small model on eight CPU devices.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np
import tyro

from benchmarks.report import Row, tell_machine, tell_table, write_json
from benchmarks.timing import machine
from elr_jax import flops, presets
from elr_jax.collectives import collectives
from elr_jax.config import AttentionConfig, MLPConfig, Runtime
from elr_jax.depth import DepthLaw, PerExample, PoissonDepth, RotatingSlice, executed_rounds, useful_rounds
from elr_jax.errors import one_line_errors
from elr_jax.sharding import make_mesh
from elr_jax.train.optim import OptimConfig
from elr_jax.train.runner import lower_step
from elr_jax.train.settings import Recipe
from elr_jax.train.step import draw_depths

DEVICES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class DepthLayouts:
    """Sizes of the count; the defaults are those that docs/scale.md tells."""

    rows: int = 64
    """Rows of a step's batch."""
    microbatches: int = 4
    """Parts of the sorted layouts."""
    mesh: str = "data=2,fsdp=4"
    """Eight devices."""
    draws: int = 500
    """Steps whose depths are counted."""
    seq_len: int = 64
    json: str | None = None
    """File to write the tables to; None writes nothing."""


class Layout(NamedTuple):
    """How a step's rows and rounds lie on the ranks."""

    sorted: bool
    apart: bool


LAYOUTS = {
    "masked": Layout(False, False),
    "sorted": Layout(True, False),
    "ranks apart": Layout(False, True),
    "both": Layout(True, True),
}
LAWS: dict[str, DepthLaw] = {
    "rotating slice of a quarter, 1–4": RotatingSlice(max_loops=4, forced=0.25),
    "each row its own, 1–4": PerExample(max_loops=4),
    "Poisson(8), up to 24": PoissonDepth(rate=8, max_loops=24),
}


def main(settings: DepthLayouts) -> dict[str, Any]:
    """Count every law in every layout."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    result: dict[str, Any] = {"machine": machine(), "settings": dataclasses.asdict(settings), "laws": {}}
    tell_machine(result["machine"])
    for name, law in LAWS.items():
        result["laws"][name] = [count(settings, law, layout) for layout in LAYOUTS]
        tell_table(f"{name}: {result['laws'][name][0]['drawn']:.2f} rounds a row", result["laws"][name])
    write_json(settings.json, result)
    return result


def count(settings: DepthLayouts, law: DepthLaw, layout: str) -> Row:
    """Rounds and bytes of one law in one layout."""
    form = LAYOUTS[layout]
    recipe = recipe_of(settings, law, form)
    ranks = DEVICES if form.apart else 1
    draw = jax.jit(lambda step: draw_depths(recipe, jax.random.key(0), step))
    depths = [-np.sort(-np.asarray(draw(step))) for step in range(settings.draws)]  # as the step sorts them
    time, work = (
        np.mean([executed_rounds(depth, parts) for depth in depths]) / settings.rows
        for parts in (recipe.microbatches, recipe.microbatches * ranks)
    )
    sent = sent_bytes(settings, recipe, form, rounds=float(time))
    return {
        "layout": layout,
        "drawn": float(np.mean([useful_rounds(depth) for depth in depths]) / settings.rows),
        "time": float(time),
        "work": float(work),
        "idle": float(1 - work / time),
        "sent / weights": sent / (4 * flops.num_params(recipe.model)),
    }


def recipe_of(settings: DepthLayouts, law: DepthLaw, layout: Layout) -> Recipe:
    """A step of a small model, three blocks of width 64, the middle one looped."""
    sizes = {"attention": AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=16), "mlp": MLPConfig(d_ff=256)}
    base = presets.tiny_text()
    loop = dataclasses.replace(base.loop, max_loops=law.max_loops)
    model = dataclasses.replace(
        base, d_model=64, vocab_size=256, prelude="*-", core="*-", coda="*-", loop=loop, **sizes
    )
    parts = settings.microbatches if layout.sorted else 1
    optim = OptimConfig(optimizer="adamw", warmup_steps=1)
    steps = max(settings.draws, 2)
    return Recipe(model=model, depth=law, optim=optim, batch_size=settings.rows, microbatches=parts, steps=steps)


def sent_bytes(settings: DepthLayouts, recipe: Recipe, layout: Layout, *, rounds: float) -> float:
    """Bytes a device sends in a step whose microbatches run so many rounds each."""
    runtime = Runtime(gather_core=layout.apart)
    program = lower_step(recipe, runtime, make_mesh(settings.mesh), seq_len=settings.seq_len).compile()
    found = collectives(program.as_text() or "")
    return sum(one.traffic * one.runs * (rounds if one.rounds else 1) for one in found)


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(DepthLayouts, description=__doc__))
