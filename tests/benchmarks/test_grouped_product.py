"""The race of grouped products at its smallest: its contestants agree, and its figures are those of its race."""

import json

import pytest

from benchmarks.grouped_product import GroupedRace, main
from elr_jax.errors import ElrError


def test_the_smallest_run(tmp_path):
    path = tmp_path / "grouped.json"
    result = main(GroupedRace(experts=(3,), rows=20, width=4, inner=4, repeats=1, json=str(path)))
    assert [row["pass"] for row in result["rows"]] == ["forward", "with gradients"]
    for row in result["rows"]:
        assert row["ragged_dot / blocks"] == pytest.approx(row["ragged_dot ms"] / row["blocks ms"])
    assert json.loads(path.read_text())["rows"] == result["rows"]


def test_sizes_of_nothing_are_refused():
    with pytest.raises(ElrError, match="rows=0 must be at least 1"):
        GroupedRace(rows=0)
