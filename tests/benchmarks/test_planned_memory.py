"""What compilers plan, asked of the CPU's: the loss in chunks needs less than all logits, and every byte is counted."""

from contextlib import contextmanager

import jax

from benchmarks import planned_memory
from benchmarks.planned_memory import PlannedMemory, main


def test_the_smallest_plan(tmp_path, capsys, monkeypatch):
    @contextmanager
    def here(chip):
        yield lambda function, *operands: jax.jit(function).lower(*operands).compile()

    monkeypatch.setattr(planned_memory, "compiler", here)
    # more tokens than a chunk of logits holds
    sizes = {"tokens": 1024, "d_model": 8, "vocab_size": 40_000, "rows": 1}
    result = main(PlannedMemory(chips=("v5e",), json=str(tmp_path / "plan.json"), **sizes))
    (loss,), (chunk,) = result["loss"], result["chunk"]
    assert 0 < loss["chunks"] < loss["all logits"]
    # q, g and out of 16 tokens, k, v and β of three steps each, the state before and after; 24 heads of 128, float32
    tokens = 16 * 24 * (128 + 1 + 128) + 48 * 24 * (128 + 128 + 1)
    assert chunk["operands and results"] == 4 * (tokens + 2 * 24 * 128 * 128) / 1e6
    assert chunk["ratio"] > 1
    assert (tmp_path / "plan.json").exists() and "MB moved" in capsys.readouterr().out
