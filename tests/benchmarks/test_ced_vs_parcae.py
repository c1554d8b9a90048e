"""The race against Parcae's authors' code, without that code: this side runs, and the rounds of both are counted."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.ced_vs_parcae import CedVsParcae, drawn, main, theirs
from elr_jax.errors import ElrError

SMALL = {
    "d_model": 32,
    "heads": 2,
    "blocks": 2,
    "vocab_size": 32,
    "seq_len": 8,
    "batch_size": 4,
    "microbatches": 2,
    "mean_rounds": 3,
    "backprop_rounds": 2,
    "max_loops": 6,
    "repeats": 1,
}


def test_rounds_of_the_other_side_are_those_of_its_loops():
    """A row of 1 round takes part in the 5 without gradients of its batch mate, and in its 2 with."""
    depths = np.array([[1, 7, 2], [2, 2, 2]])
    assert theirs(depths, backprop=2) == ((5 + 2) + (0 + 2)) / 2


@pytest.mark.slow
def test_this_side_alone(tmp_path, capsys):
    settings = CedVsParcae(**SMALL, json=tmp_path / "race.json")
    main(settings)
    ours, other = json.loads(settings.json.read_text())["rows"]
    depths = drawn(settings)
    assert ours["rounds a row drawn"] == depths.mean() <= ours["rounds a row run"] <= other["rounds a row run"]
    assert ours["tokens / s"] > 0 and np.isnan(other["tokens / s"])
    assert "give --parcae a checkout" in capsys.readouterr().out


@pytest.mark.parity
def test_a_folder_that_is_no_checkout_is_refused(tmp_path):
    with pytest.raises(ElrError, match="has no folder parcae_lm"):
        main(CedVsParcae(**SMALL, parcae=Path(tmp_path)))
