"""What the compilers of absent chips plan for two things without a kernel: the loss, and a chunk of the delta product.

    python -m benchmarks.planned_memory --chips h200 v5e          half a minute a chip; pip install -e '.[aot]'

Temporary memory of `linear_cross_entropy` with its gradients, against the same from all logits at once; and the bytes
that XLA's form of one chunk of the delta product moves, on the chip and off it, against those of its operands and
results. Nothing is run.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro

from benchmarks.report import Row, tell_table, write_json
from elr_jax.errors import one_line_errors
from elr_jax.layers import delta_rule
from elr_jax.losses import cross_entropy, linear_cross_entropy
from elr_jax.topologies import leave_devices
from elr_jax.typing import Array
from pallas_kernels.chips import CHIPS, compiler


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedMemory:
    """Chips and sizes; the defaults are those that docs/kernels.md tells."""

    chips: tuple[Literal["v5e", "v5p", "v6e", "h200"], ...] = ("h200", "v5e", "v5p", "v6e")
    tokens: int = 8192
    d_model: int = 2048
    vocab_size: int = 131_072
    rows: int = 4
    """Rows of the chunk; 24 heads of 128 × 128, 16 tokens of three Householder steps."""
    json: str | None = None
    """File to write the tables to; None writes nothing."""


def main(settings: PlannedMemory) -> dict[str, Any]:
    """Compile for every chip and print the tables."""
    result: dict[str, Any] = {"jax": jax.__version__, "settings": dataclasses.asdict(settings), "loss": [], "chunk": []}
    for name in settings.chips:
        with compiler(CHIPS[name]) as compile:
            result["loss"].append({"chip": name} | loss(settings, compile))
            if (row := chunk(settings, compile)) is not None:
                result["chunk"].append({"chip": name} | row)
    tell_table("The loss and its gradients: GB of temporaries", result["loss"])
    if result["chunk"]:
        tell_table("A chunk of the delta product, forward: MB moved", result["chunk"])
    write_json(settings.json, result)
    return result


def loss(settings: PlannedMemory, compile: Callable[..., Any]) -> Row:
    """Temporaries of both forms, in bfloat16."""
    t, d, v = settings.tokens, settings.d_model, settings.vocab_size
    x, head = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, t, d), (d, v)))
    targets, weights = (jax.ShapeDtypeStruct((1, t), dtype) for dtype in (jnp.int32, jnp.float32))

    def all_at_once(x: Array, head: Array, targets: Array, weights: Array) -> Array:
        logits = jnp.matmul(x, head, preferred_element_type=jnp.float32)
        return jnp.sum(weights * cross_entropy(logits, targets))

    forms = {"chunks": lambda *operands: linear_cross_entropy(*operands)[0], "all logits": all_at_once}
    return {
        name: compile(jax.value_and_grad(form, argnums=(0, 1)), x, head, targets, weights)
        .memory_analysis()
        .temp_size_in_bytes
        / 1e9
        for name, form in forms.items()
    }


def chunk(settings: PlannedMemory, compile: Callable[..., Any]) -> Row | None:
    """Bytes of one chunk in float32; None of a compiler that does not count them."""
    rows, tokens, steps, heads, width = settings.rows, 16, 3, 24, 128
    shapes = [
        (rows, tokens, heads, width),
        (rows, tokens, steps, heads, width),
        (rows, tokens, steps, heads, width),
        (rows, tokens, steps, heads),
        (rows, tokens, heads),
        (rows, heads, width, width),
    ]
    operands = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    cost = compile(delta_rule.step, *operands).cost_analysis()
    if cost is None:
        return None
    outputs = jax.eval_shape(delta_rule.step, *operands)
    least = sum(math.prod(x.shape) * x.dtype.itemsize for x in (*operands, *outputs))
    moved = cost["bytes accessed"]
    return {"moved": moved / 1e6, "operands and results": least / 1e6, "ratio": moved / least}


if __name__ == "__main__":
    with one_line_errors():
        leave_devices()
        main(tyro.cli(PlannedMemory, description=__doc__))
