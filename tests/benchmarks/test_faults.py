"""The fault benchmark: what it makes of its notes, and all of it once."""

import dataclasses
import sys

import numpy as np
import pytest

from benchmarks.faults.__main__ import FAULTS, Faults, main
from benchmarks.faults.damage import DAMAGES, damage
from benchmarks.faults.story import (
    Given,
    Row,
    document,
    effective,
    lost_steps,
    markdown,
    read_lives,
    seen_wrongly,
    sound,
)


def given(*steps, digest="d"):
    return [Given(step, f"{digest}{step}") for step in steps]


def test_notes_are_read_life_by_life(tmp_path):
    (tmp_path / "notes").write_text("life\n1 d1\n2 d2\nlife\nlife\n2 d2\n")
    assert read_lives(tmp_path / "notes") == [given(1, 2), [], given(2)]


def test_a_later_life_undoes_what_it_runs_again():
    lives = [given(1, 2, 3), [], given(3, 4, 5), given(6)]
    assert effective(lives) == given(1, 2, 3, 4, 5, 6)
    assert lost_steps(lives) == [1, 0]
    assert effective([given(1, 2), given(1, 2, 3)]) == given(1, 2, 3)


@pytest.mark.parametrize(
    "found, told",
    [
        (given(1, 2, 3), "none"),
        (given(1, 3), "never: 2"),
        (given(1, 2, 2, 3), "twice: 2"),
        (given(1, 2, 3, 4), "beyond the end: 4"),
        (given(1) + given(2, digest="e") + given(3), "another batch: 2"),
        ([], "never: 1, 2, 3"),
    ],
)
def test_batches_that_are_not_those_of_the_undisturbed_run(found, told):
    assert seen_wrongly(found, given(1, 2, 3)) == told


def test_a_skipped_step_shows_although_no_life_notices():
    """A checkpoint that claims a step more than it holds: the next life begins after a gap."""
    assert seen_wrongly(effective([given(1, 2), given(4)]), given(1, 2, 3, 4)) == "never: 3"


ROW = Row(fault="f", done="d", happened="“h”", exit="2, then 0", lost="3", data="none", same="yes")


@pytest.mark.parametrize(
    "changes",
    [{"data": "twice: 4"}, {"same": "NO"}, {"same": "NO, to the same run"}, {"happened": "CODE WAS RUN"}],
)
def test_what_must_not_be_is_noticed(changes):
    assert sound(ROW) and not sound(dataclasses.replace(ROW, **changes))


def test_errors_that_are_quoted_are_no_alarm():
    assert sound(dataclasses.replace(ROW, happened="“ENOSPC: NOTHING LEFT”"))


def test_the_document_has_two_tables():
    files = dataclasses.replace(ROW, fault="file", exit="–")
    text = document([ROW, files], {"cores": 2})
    runs, harm = (text.index(markdown([ROW])), text.index("| file | d | “h” |"))
    assert text.index("## Runs") < runs < text.index("## Files") < harm
    assert "cores 2" in text


@pytest.mark.parametrize("how", DAMAGES.values(), ids=DAMAGES.keys())
@pytest.mark.parametrize("content", [b"", b"a", b"abcdefgh" * 100])
def test_damage_always_changes_a_file(tmp_path, how, content):
    for seed in range(20):
        (tmp_path / "file").write_bytes(content)
        damage(tmp_path / "file", how, np.random.default_rng(seed))
        assert (tmp_path / "file").read_bytes() != content


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="locks, mounts and signals as Linux has them")
def test_every_fault_once(tmp_path):
    rows = main(Faults(kills=3, steps=22, out=str(tmp_path / "reliability.md")))
    assert len(rows) == len(FAULTS) + len(DAMAGES) + 9
    assert all(map(sound, rows)), [row for row in rows if not sound(row)]
    exits = {row.fault: row.exit for row in rows if not row.done.startswith("not tried")}
    refused = ("disk full", "write refused", "read-only", "another recipe", "every checkpoint damaged")
    for fault, code in exits.items():
        if fault.startswith(refused):
            assert code == "2, then 0", fault
    assert exits["two runs in one folder"] == "2, the first 0"
    assert (
        exits["kill -9"] == "−9, at last 0" and exits["truncated checkpoint"] == exits["bit-flipped checkpoint"] == "0"
    )
    assert "killed 3 times" in (tmp_path / "reliability.md").read_text()
