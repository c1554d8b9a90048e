"""The run that faults happen to: one life of it is one process, `python -m benchmarks.faults.child LIFE.json`.

It is a very small elastic model on random tokens. Beside the run's folder a life notes each batch just before its step
runs: the step's number and a digest of the batch. `story.py` reads those notes.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from elr_jax.config import AttentionConfig, LoopRule, MLPConfig, ModelConfig, from_dict, to_dict
from elr_jax.depth import PerExample
from elr_jax.errors import one_line_errors
from elr_jax.train import checkpoint, runner
from elr_jax.train.data import Dataset, Example, synthetic_dataset
from elr_jax.train.optim import OptimConfig
from elr_jax.train.settings import Launch, Recipe
from elr_jax.train.step import init_state, optimizer_for

VOCAB, LENGTH = 16, 8
NOTES = ".steps"
"""What the notes' file adds to the folder's name."""
LIFE = "life"
"""The line that begins a life."""


@dataclass(frozen=True, kw_only=True)
class Life:
    """One launch of the run."""

    launch: Launch
    steps: int = 40
    learning_rate: float = 3e-3
    nan_at: int | None = None
    """The step whose batch has NaN for weights."""
    tensorboard: bool = False
    """Write TensorBoard's files too, where it is installed; its import may take seconds."""


def recipe_of(life: Life) -> Recipe:
    """What the run trains; `learning_rate` is there to be changed."""
    return Recipe(
        model=ModelConfig(
            vocab_size=VOCAB,
            d_model=8,
            prelude="*",
            core="-",
            coda="",
            attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=4),
            mlp=MLPConfig(d_ff=16),
            loop=LoopRule(initial="random", inject="residual", max_loops=3),
        ),
        depth=PerExample(max_loops=3),
        optim=OptimConfig(optimizer="adamw", learning_rate=life.learning_rate, warmup_steps=2),
        steps=life.steps,
        batch_size=4,
        microbatches=2,
    )


def training_data(life: Life) -> Dataset:
    """Random tokens without end, with the one bad batch where that is asked for."""
    data = synthetic_dataset(_example, vocab_size=VOCAB, settings={"nan_at": life.nan_at}, seed=0)
    if life.nan_at is None:
        return data
    rows, bad = recipe_of(life).batch_size, life.nan_at - 1

    def spoil(index: int, example: Example) -> Example:
        scale = np.float32(np.nan if index // rows == bad else 1)
        return {**example, "weights": example["weights"] * scale}

    return replace(data, examples=data.examples.map_with_index(spoil))


def validation_data() -> Dataset:
    """Eight rows of random tokens."""
    return synthetic_dataset(_example, vocab_size=VOCAB, settings={}, seed=0, split="validation", num_examples=8)


def live(life: Life, *, before_step: Callable[[int], None] = lambda number: None) -> None:
    """Train as a user's process would, noting what each step is given."""
    if not life.tensorboard:
        sys.modules["tensorboardX"] = None  # pyright: ignore
    training, notes = training_data(life), notes_of(life.launch.out)
    given = runner.batches

    def noted(data: Dataset, size: int, *, start: int = 0, **more: Any) -> Iterator[Any]:
        for number, batch in enumerate(given(data, size, start=start, **more), start=start + 1):
            if data is training:
                before_step(number)
                _note(notes, f"{number} {digest(batch)}")
            yield batch

    _note(notes, LIFE)
    runner.batches = noted
    try:
        runner.train(recipe_of(life), life.launch, training=training, validation=validation_data())
    finally:
        runner.batches = given


def notes_of(out: str | Path) -> Path:
    """Where the lives of a folder leave their notes: beside it, since the folder may be full or read-only."""
    return Path(f"{out}{NOTES}")


def final_state(life: Life) -> Any:
    """The whole training state that a folder holds after the recipe's last step."""
    return state_of(life, step=life.steps)


def state_of(life: Life, *, step: int | None) -> Any:
    """The state after a step; None: the newest that is whole."""
    recipe = recipe_of(life)
    shapes = jax.eval_shape(partial(init_state, recipe, optimizer_for(recipe)))
    found = checkpoint.restore(runner.checkpoint_folder(life.launch.out), shapes, step=step)
    assert found is not None, "the run has saved"
    state: Any = found[0]
    return state.replace(key=jax.random.key_data(state.key))


def digest(tree: Any) -> str:
    """Sixteen hex digits of every bit of a tree of arrays."""
    content = hashlib.sha256()
    for leaf in map(np.asarray, jax.tree.leaves(tree)):
        content.update(f"{leaf.dtype}{leaf.shape}".encode() + leaf.tobytes())
    return content.hexdigest()[:16]


def write_life(life: Life, path: Path) -> Path:
    """A life as the file that its process is given."""
    path.write_text(json.dumps(to_dict(life)), encoding="utf-8")
    return path


def read_life(path: str) -> Life:
    """The life in a file."""
    return from_dict(Life, json.loads(Path(path).read_text(encoding="utf-8")))


def _example(rng: np.random.Generator) -> Example:
    tokens = rng.integers(0, VOCAB, LENGTH + 1).astype(np.int32)
    ones = np.ones(LENGTH, np.int32)
    return {"tokens": tokens[:-1], "targets": tokens[1:], "weights": ones.astype(np.float32), "segment_ids": ones}


def _note(path: Path, line: str) -> None:
    """One write to the system: a kill leaves the line whole or not at all."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, f"{line}\n".encode())
    os.close(file)


if __name__ == "__main__":
    with one_line_errors():
        live(read_life(sys.argv[1]))
