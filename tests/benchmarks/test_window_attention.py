"""The window attention benchmark at its smallest: both sides agree, and its figures are those of its race."""

import json
import sys

import pytest

from benchmarks.window_attention import WindowAttention, main
from elr_jax.errors import ElrError


@pytest.mark.parity
def test_the_smallest_run(tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "window.json"
    rows = main(WindowAttention(lengths=(70,), window=3, heads=2, head_dim=4, repeats=1, json=str(path)))
    assert [row["pass"] for row in rows] == ["forward", "gradients"]
    assert all(row["torch / jax"] == pytest.approx(row["torch ms"] / row["jax ms"]) for row in rows)
    assert json.loads(path.read_text())["rows"] == rows


def test_without_torch_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ElrError, match=r"torch is not installed: pip install 'elr-jax\[parity\]'"):
        main(WindowAttention(lengths=(5,), window=3, heads=1, head_dim=4, repeats=1))


def test_sizes_of_nothing_are_refused():
    with pytest.raises(ElrError, match=r"lengths=\(64, 0\) must be at least 1"):
        WindowAttention(lengths=(64, 0))
