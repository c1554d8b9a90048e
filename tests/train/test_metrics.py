"""Metrics on disk and the progress line."""

import io
import json
import math
import sys

import pytest
from rich.console import Console

from elr_jax.errors import ElrError
from elr_jax.hardware import peak_flops
from elr_jax.train.metrics import FILE, MetricsWriter, read_metrics


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def no_tensorboard(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)


@pytest.fixture
def log():
    return Console(file=io.StringIO(), force_terminal=False, width=200)


def run(directory, steps, *, resume_step=0, console=None):
    with MetricsWriter(directory, total_steps=10, resume_step=resume_step, console=console) as metrics:
        for step in steps:
            metrics.write(step, {"loss": 10.0 - step})


def test_every_line_is_one_object_on_disk_at_once(tmp_path):
    with MetricsWriter(tmp_path, total_steps=2) as metrics:
        metrics.write(1, {"loss": 2.5, "skipped": 0})
        first = json.loads((tmp_path / FILE).read_text())
        metrics.write(2, {"loss": 2.25})
    assert (first["step"], first["loss"], first["skipped"]) == (1, 2.5, 0)
    assert [line["loss"] for line in read_metrics(tmp_path)] == [2.5, 2.25]


def test_resuming_leaves_each_step_once(tmp_path):
    run(tmp_path, range(1, 7))
    run(tmp_path, range(5, 11), resume_step=4)
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, 11))


@pytest.mark.parametrize("cut", ['{"step": 4, "lo', '{"step": 4, "loss": 6.0}'])
def test_a_line_cut_short_by_a_kill_is_dropped(tmp_path, cut):
    run(tmp_path, range(1, 4))
    with (tmp_path / FILE).open("a") as file:
        file.write(cut)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]
    run(tmp_path, [5], resume_step=4)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 5]
    assert len((tmp_path / FILE).read_text().splitlines()) == 4


def test_a_new_run_starts_the_file_anew(tmp_path):
    run(tmp_path, range(4))
    run(tmp_path, range(2))
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1]


def test_values_json_lacks_survive(tmp_path):
    with MetricsWriter(tmp_path, total_steps=1) as metrics:
        metrics.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf})

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    json.loads((tmp_path / FILE).read_text(), parse_constant=refuse)
    (line,) = read_metrics(tmp_path)
    assert math.isnan(line["a"])
    assert (line["b"], line["c"]) == (math.inf, -math.inf)


def test_last_step_limits_what_is_read(tmp_path):
    run(tmp_path, range(1, 7))
    assert [line["step"] for line in read_metrics(tmp_path, last_step=2)] == [1, 2]
    assert read_metrics(tmp_path / "absent") == []


def test_without_a_terminal_each_tenth_is_a_plain_line(tmp_path, log):
    with MetricsWriter(tmp_path, total_steps=100, console=log, clock=Clock()) as metrics:
        for step in range(1, 101):
            metrics.progress(step, loss=2.0)
    lines = log.file.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == [f"{step}/100" for step in range(10, 101, 10)]
    assert "\x1b" not in log.file.getvalue()


def test_without_a_terminal_silence_is_bounded(tmp_path, log):
    clock = Clock()
    with MetricsWriter(tmp_path, total_steps=10_000, console=log, every_seconds=5, clock=clock) as metrics:
        for step in range(1, 31):
            clock.now += 1.0
            metrics.progress(step, loss=2.0)
    assert [line.split()[1] for line in log.file.getvalue().splitlines()] == [f"{s}/10000" for s in range(5, 31, 5)]


def test_the_line_tells_losses_rates_and_time_left(tmp_path, log):
    clock = Clock()
    with MetricsWriter(tmp_path, total_steps=200, console=log, every_seconds=0, clock=clock) as metrics:
        clock.now = 100.0  # compilation, left out of the rates
        assert metrics.progress(1, loss=3.0, loss_by_depth={2: 3.0}, tokens=500, flops=1e9) == {}
        clock.now += 0.5
        rates = metrics.progress(2, loss=2.5, loss_by_depth={4: 2.5}, tokens=500, flops=1e9)
    assert rates == {"tokens_per_second": 1000.0, "flops_per_second": 2e9}
    last = log.file.getvalue().splitlines()[-1]
    assert last == "step 2/200  loss 2.5000  by loops 2: 3.000 4: 2.500  1 k tok/s  2 GFLOP/s  ETA 1:39"


def test_operations_are_set_against_the_peak_where_it_is_known(tmp_path, log):
    clock = Clock()
    with MetricsWriter(tmp_path, total_steps=9, console=log, every_seconds=0, clock=clock, peak_flops=8e9) as metrics:
        assert metrics.progress(1, loss=3.0, flops=1e9) == {}
        clock.now += 0.5
        assert metrics.progress(2, loss=3.0, flops=1e9) == {"flops_per_second": 2e9, "mfu": 0.25}
        assert metrics.progress(3, loss=3.0) == {"flops_per_second": 2e9, "mfu": 0.25}
    assert "  2 GFLOP/s (25.0% of peak)  ETA" in log.file.getvalue()


@pytest.mark.parametrize(
    "kind, peak",
    [
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v6 lite", 918e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GB200", 2.5e15),
        ("NVIDIA H100 PCIe", None),
        ("cpu", None),
    ],
)
def test_the_peak_of_a_device(kind, peak):
    assert peak_flops(kind) == peak


def test_rates_follow_the_last_half_minute(tmp_path, log):
    clock = Clock()
    with MetricsWriter(tmp_path, total_steps=1000, console=log, clock=clock) as metrics:
        for step in range(1, 201):
            clock.now += 1.0 if step <= 100 else 0.5
            rates = metrics.progress(step, loss=2.0, tokens=100)
    assert rates == {"tokens_per_second": 200.0}


def test_a_terminal_gets_one_live_line(tmp_path):
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=120)
    with MetricsWriter(tmp_path, total_steps=3, console=console) as metrics:
        for step in range(1, 4):
            metrics.progress(step, loss=1.5, tokens=10)
    assert "3/3\x1b[0m loss 1.5" in written.getvalue()


def test_tensorboard_gets_the_same_scalars_where_it_is_installed(tmp_path, monkeypatch):
    monkeypatch.undo()
    pytest.importorskip("tensorboardX")
    run(tmp_path, range(1, 4))
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert events.read_bytes().count(b"loss") == 3


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/dev/full is Linux's")
@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:Exception ignored:pytest.PytestUnraisableExceptionWarning")  # of its open file
def test_tensorboard_on_a_full_disk_ends_the_run_with_one_line(tmp_path, monkeypatch):
    """More lines than any queue would hold."""
    monkeypatch.undo()
    pytest.importorskip("tensorboardX")
    (tmp_path / "tensorboard").mkdir()
    monkeypatch.setattr("tensorboardX.record_writer.open_file", lambda path: open("/dev/full", "wb"))  # noqa: SIM115
    with (
        MetricsWriter(tmp_path, total_steps=1000) as metrics,
        pytest.raises(ElrError, match=r"can't be written \(No space left on device\)"),
    ):
        for step in range(1000):
            metrics.write(step, {"loss": 1.0})


def test_an_unwritable_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ElrError, match=r"metrics\.jsonl can't be written \(.+\): .*--out"):
        MetricsWriter(tmp_path / "file", total_steps=1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/dev/full is Linux's")
def test_a_full_disk_is_one_line(tmp_path):
    told = r"metrics\.jsonl can't be written \(No space left on device\)"
    with MetricsWriter(tmp_path, total_steps=1) as metrics:
        metrics._file.close()
        metrics._file = open("/dev/full", "w")  # noqa: SIM115
        with pytest.raises(ElrError, match=told):
            metrics.write(1, {"loss": 1.0})
