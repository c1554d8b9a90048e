"""The results file: which lines count, and that a kill while writing loses nothing else."""

import numpy as np
import pytest

from experiments.results import Claim, Results, append_line, read_lines


def line(cell="plain", seed=0, digest="a", loss=(1.0,), preset="cpu"):
    return {"preset": preset, "cell": cell, "seed": seed, "digest": digest, "metrics": {"loss": list(loss)}}


def test_a_line_cut_short_is_dropped_and_the_next_stands_alone(tmp_path):
    path = tmp_path / "deep" / "results.jsonl"
    append_line(path, line(seed=0))
    with path.open("a") as file:
        file.write('{"preset": "cp')
    append_line(path, line(seed=1))
    assert [found["seed"] for found in read_lines(path)] == [0, 1]


def test_only_the_newest_recipe_counts_and_the_newest_line_of_a_seed():
    lines = [line(loss=[9]), line(seed=1, loss=[9]), line(digest="b", loss=[3]), line(digest="b", loss=[2])]
    lines += [line(seed=2, digest="b", loss=[4]), line(preset="paper", digest="c", loss=[7])]
    results = Results(lines, "cpu")
    np.testing.assert_array_equal(results.values("plain", "loss"), [[2], [4]])
    assert results.mean("plain", "loss") == [3]
    assert results.digests == {"plain": "b"}


def test_differences_are_paired_by_seed():
    """At a loop count, at the last one, and against a model that has a single one; seeds of one cell alone are out."""
    lines = [line("a", seed, loss=[seed + 5, seed + 3]) for seed in (2, 0, 1)]
    lines += [line("b", seed, loss=[2 * seed]) for seed in (1, 2, 7)]
    results = Results(lines, "cpu")
    np.testing.assert_array_equal(results.paired("a", "b", "loss", loops=1), [4, 3])
    np.testing.assert_array_equal(results.paired("a", "b", "loss", loops=None), [2, 1])
    with pytest.raises(KeyError, match="share no seed"):
        Results([line("a", 0), line("b", 1)], "cpu").paired("a", "b", "loss", loops=1)


def test_a_claim_without_its_cells_is_not_evaluated():
    claim = Claim(claim="c", source="1", ours=lambda r: f"{r.mean('plain', 'loss')[0]:.1f}", verdict="worked")
    assert claim.judge(Results([line(loss=[2])], "cpu")) == ("2.0", "worked")
    assert claim.judge(Results([], "cpu")) == ("–", "not evaluated")
    with pytest.raises(KeyError):
        Results([], "cpu").of("plain")
