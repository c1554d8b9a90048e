"""Cells small enough to train in a second, and a way to run a command as `python -m` does."""

import runpy
import sys

import pytest

from elr_jax.config import AttentionConfig, LoopRule, MLPConfig, ModelConfig
from elr_jax.depth import PerExample
from elr_jax.train.optim import OptimConfig
from elr_jax.train.settings import Recipe
from experiments.pointer_chase.task import PointerChase
from experiments.sweep import Cell


@pytest.fixture
def tiny_cell():
    model = ModelConfig(
        vocab_size=36,
        d_model=8,
        prelude="-",
        core="*-",
        coda="",
        attention=AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=8),
        mlp=MLPConfig(d_ff=8),
        loop=LoopRule(max_loops=2),
    )
    recipe = Recipe(
        model=model,
        depth=PerExample(max_loops=2),
        optim=OptimConfig(optimizer="adamw", warmup_steps=1),
        steps=4,
        batch_size=4,
        microbatches=2,
    )
    return Cell(name="tiny", recipe=recipe, task=PointerChase(nodes=4, validation_examples=32), eval_batches=2)


@pytest.fixture
def command(monkeypatch):
    def run(module: str, *arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", [module, *map(str, arguments)])
        runpy.run_module(module, run_name="__main__")

    return run
