"""What depths cost: sorted microbatches against a plain masked scan, and `bounded` against scans of exactly k rounds.

    python -m benchmarks.masking          about three minutes on two cores

Two tables, forward and gradient, float32. Mixed depths: 32 rows of Poisson(8) loops as one masked scan of 24 rounds, as
one bounded batch, and sorted into microbatches of 4; expect sorted to run at most 1.15 times the useful rounds, and its
time to follow. Equal depths: the bounded program of 8 rounds at depth k against scans compiled for k; expect 1.10 at
most. `fastest` tells more than `median` on a machine that does other things.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import tyro

from benchmarks.report import Row, tell_machine, tell_table, write_json
from benchmarks.timing import Timing, machine, race
from elr_jax import model, parameters, presets
from elr_jax.config import LoopRule, ModelConfig, Runtime
from elr_jax.depth import PoissonDepth, executed_rounds, sort_by_depth, useful_rounds
from elr_jax.errors import one_line_errors
from elr_jax.losses import cross_entropy, sum_by_depth
from elr_jax.parameters import Params
from elr_jax.train.step import accumulate
from elr_jax.typing import Array, Depth, Tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Masking:
    """Sizes of the two tables; the defaults are those the project's numbers are told for."""

    d_model: int = 128
    """Width; four heads, feed-forward layers four times as wide."""
    seq_len: int = 256
    rows: int = 32
    rows_per_microbatch: int = 4
    rate: float = 8.0
    """Rate of the Poisson law of the mixed batch."""
    max_loops: int = 24
    uniform_rows: int = 8
    uniform_loops: tuple[int, ...] = (1, 2, 4, 8)
    repeats: int = 5
    """Turns of each contestant."""
    runtime: Runtime = dataclasses.field(default_factory=lambda: Runtime(remat="layer"))
    """Number type and rematerialisation of all contestants; `loop` is what they differ in."""
    seed: int = 0
    json: str | None = None
    """File to write the tables to; None writes nothing."""


def main(settings: Masking) -> dict[str, Any]:
    """Race both tables and print them."""
    result: dict[str, Any] = {"machine": machine(), "settings": dataclasses.asdict(settings)}
    tell_machine(result["machine"])
    law = PoissonDepth(rate=settings.rate, max_loops=settings.max_loops)
    result["mixed"] = mixed(settings, law)
    title = f"{settings.rows} rows, Poisson({settings.rate:g}) loops, mean {law.mean():.2f}"
    tell_table(title, result["mixed"])
    result["uniform"] = uniform(settings)
    tell_table(f"{settings.uniform_rows} rows of k loops each", result["uniform"])
    write_json(settings.json, result)
    return result


def mixed(settings: Masking, law: PoissonDepth) -> list[Row]:
    """Rounds and times of one batch of mixed depths, run in three ways."""
    config = _config(settings, settings.max_loops)
    row_numbers = jnp.arange(settings.rows, dtype=jnp.int32)
    depth = law.sample(jax.random.key(settings.seed), 0, row_numbers, batch_size=settings.rows, total_steps=1)
    parts = settings.rows // settings.rows_per_microbatch
    inputs = *_inputs(settings, config, settings.rows), depth
    scan, bounded, in_parts = (
        _gradient(config, dataclasses.replace(settings.runtime, loop=form), microbatches)
        for form, microbatches in (("scan", 1), ("bounded", 1), ("bounded", parts))
    )
    times = race(
        {
            "masked scan": lambda: scan(*inputs),
            "bounded": lambda: bounded(*inputs),
            f"sorted, {parts} parts": lambda: in_parts(*inputs),
        },
        repeats=settings.repeats,
    )
    rounds = (
        settings.rows * settings.max_loops,
        int(executed_rounds(depth, 1)),
        int(executed_rounds(depth[sort_by_depth(depth, parts)], parts)),
    )
    useful, (slowest, *_) = int(useful_rounds(depth)), times.values()
    return [
        {
            "form": name,
            "rounds": ran,
            "useful": useful,
            "rounds / useful": ran / useful,
            **_milliseconds(time),
            "rounds / scan": ran / rounds[0],
            "time / scan": time.fastest / slowest.fastest,
        }
        for (name, time), ran in zip(times.items(), rounds, strict=True)
    ]


def uniform(settings: Masking) -> list[Row]:
    """For each k, the bounded program of all depths against the scan of exactly k rounds."""
    rows, deepest = settings.uniform_rows, max(settings.uniform_loops)
    config = _config(settings, deepest)
    inputs = _inputs(settings, config, rows)
    bounded = _gradient(config, dataclasses.replace(settings.runtime, loop="bounded"), 1)
    table = []
    for loops in settings.uniform_loops:
        exact = _gradient(_config(settings, loops), dataclasses.replace(settings.runtime, loop="scan"), 1)
        depth = jnp.full(rows, loops, jnp.int32)
        times = race(
            {"exact": partial(exact, *inputs, depth), "bounded": partial(bounded, *inputs, depth)},
            repeats=settings.repeats,
        )
        table.append(
            {"loops": loops}
            | {f"{form} {name}": value for form in times for name, value in _milliseconds(times[form]).items()}
            | {"bounded / exact": times["bounded"].fastest / times["exact"].fastest}
        )
    return table


def _config(settings: Masking, max_loops: int) -> ModelConfig:
    base = presets.tiny_text(LoopRule(max_loops=max_loops))
    width = settings.d_model
    return dataclasses.replace(
        base,
        d_model=width,
        core="*-",
        attention=dataclasses.replace(base.attention, head_dim=width // base.attention.num_heads),
        mlp=dataclasses.replace(base.mlp, d_ff=4 * width),
    )


def _inputs(settings: Masking, config: ModelConfig, rows: int) -> tuple[Params, Tokens]:
    keys = jax.random.split(jax.random.key(settings.seed))
    tokens = jax.random.randint(keys[1], (rows, settings.seq_len), 0, config.vocab_size)
    return jax.jit(partial(parameters.init, config=config))(keys[0]), tokens


def _gradient(config: ModelConfig, runtime: Runtime, microbatches: int) -> Callable[[Params, Tokens, Depth], Any]:
    """A compiled gradient of the mean loss, rows sorted into microbatches as in training."""

    def loss(params: Params, part: tuple[Tokens, Depth]):
        tokens, depth = part
        logits = model.apply(params, tokens, depth, config=config, runtime=runtime)
        losses = cross_entropy(logits[:, :-1], tokens[:, 1:])
        sums = sum_by_depth(losses, jnp.ones_like(losses), depth, max_loops=config.loop.max_loops)
        return jnp.sum(sums.loss), sums

    def gradient(params: Params, tokens: Tokens, depth: Depth):
        order = sort_by_depth(depth, microbatches)

        def cut(x: Array) -> Array:
            return x[order].reshape(microbatches, -1, *x.shape[1:])

        return accumulate(loss, params, (cut(tokens), cut(depth)), total=jnp.float32(tokens.size))

    return jax.jit(gradient)


def _milliseconds(time: Timing) -> Row:
    return {f"{name} ms": 1000 * value for name, value in time._asdict().items()}


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Masking, description=__doc__))
