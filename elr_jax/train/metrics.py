"""What a run reports: `metrics.jsonl` always, TensorBoard where it is installed, and a progress line for people.

Each line of `metrics.jsonl` is one object with `step`, `time` (Unix seconds) and the scalars of one call. JSON has no
NaN and no infinity; they are written as the strings "NaN", "Infinity" and "-Infinity", which `read_metrics` (and
Python's `float`) turn back into numbers.
"""

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

from elr_jax.errors import ElrError

FILE = "metrics.jsonl"
_WINDOW = 30.0  # seconds over which rates are averaged
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


class MetricsWriter:
    """Writes scalars and shows progress; a context manager, silent on every process but the first.

    `step` always counts finished steps, as in checkpoints. A run resumed at step n drops the lines after n, so that
    each step stands in the file once; at 0 the file starts anew.

    Args:
        directory: the run's folder; made if absent.
        total_steps: where the run ends.
        resume_step: finished steps at the start.
        console: where progress goes; None means stdout.
        every_seconds: without a terminal, the longest silence between two progress lines.
        peak_flops: operations a second of all devices in use at best, which `mfu` is a share of; None: not known.
        clock: seconds that only grow.

    Raises:
        ElrError: the folder or the file can't be written.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        total_steps: int,
        resume_step: int = 0,
        console: Console | None = None,
        every_seconds: float = 10.0,
        peak_flops: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._path = Path(directory) / FILE
        self._active = jax.process_index() == 0
        if not self._active:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _drop_after(self._path, resume_step)
            self._file = self._path.open("a", encoding="utf-8")
            self._tensorboard = _tensorboard(self._path.parent / "tensorboard", resume_step)
        except OSError as error:
            raise _unwritable(self._path, error) from error
        self._line = _ProgressLine(total_steps, resume_step, console or Console(), every_seconds, peak_flops, clock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the progress line and close the files."""
        if self._active:
            self._line.close()
            for file in (self._file, self._tensorboard):
                with suppress(OSError):  # a full disk was reported by the write
                    if file is not None:
                        file.close()

    def write(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Append one line; values are numbers or arrays of one element.

        Raises:
            ElrError: the file can't be written.
        """
        if not self._active:
            return
        values = {name: value if isinstance(value, int) else float(value) for name, value in scalars.items()}
        line = {"step": step, "time": round(time.time(), 3)} | {name: _encode(value) for name, value in values.items()}
        try:
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()
            if self._tensorboard is not None:
                self._tensorboard.write(step, values)
        except OSError as error:
            raise _unwritable(self._path, error) from error

    def progress(
        self,
        step: int,
        *,
        loss: float,
        loss_by_depth: Mapping[int, float] | None = None,
        tokens: int = 0,
        flops: float = 0.0,
    ) -> dict[str, float]:
        """Move the progress line on.

        Args:
            step: finished steps.
            loss: the training loss, nats per token.
            loss_by_depth: the same at each loop count this step saw; the line shows the last value of every depth seen.
            tokens: trained on since the previous call.
            flops: floating-point operations since the previous call.

        Returns:
            `tokens_per_second`, `flops_per_second` and, where the devices' peak is known, `mfu`, the share of it that
            these operations are, over the last half minute, for `write`; empty at the first call, whose time is
            compilation.
        """
        if not self._active:
            return {}
        return self._line.update(step, float(loss), loss_by_depth or {}, tokens, flops)


def read_metrics(directory: str | os.PathLike[str], *, last_step: int | None = None) -> list[dict[str, Any]]:
    """The lines of a run's `metrics.jsonl` up to a step, without any that a kill cut short; [] without a file."""
    path = Path(directory) / FILE
    entries = (entry for _, entry in _entries(path)) if path.exists() else ()
    return [entry for entry in entries if last_step is None or entry["step"] <= last_step]


class _ProgressLine:
    """A live bar on a terminal; elsewhere a plain line at each tenth of the run and after each silence."""

    def __init__(
        self,
        total: int,
        start: int,
        console: Console,
        every_seconds: float,
        peak_flops: float | None,
        clock: Callable[[], float],
    ):
        self._total, self._console, self._every, self._clock = total, console, every_seconds, clock
        self._peak = peak_flops
        self._marks: deque[tuple[float, int, float, float]] = deque()  # time, step, tokens and flops so far
        self._by_depth: dict[int, float] = {}
        self._last_time, self._last_tenth = clock(), _tenth(start, total)
        self._bar = None
        if console.is_terminal:
            told = TextColumn("{task.fields[told]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1))
            self._bar = Progress(BarColumn(12), MofNCompleteColumn(), told, console=console, expand=True)
            self._task = self._bar.add_task("", total=total, completed=start, told="compiling")
            self._bar.start()

    def update(
        self, step: int, loss: float, by_depth: Mapping[int, float], tokens: float, flops: float
    ) -> dict[str, float]:
        self._by_depth |= {int(depth): float(value) for depth, value in by_depth.items()}
        now = self._clock()
        rates = self._rates(now, step, tokens, flops)
        told = self._describe(step, loss, rates)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, told=told)
        elif _tenth(step, self._total) > self._last_tenth or now - self._last_time >= self._every:
            self._console.print(f"step {step}/{self._total}  {told}", soft_wrap=True, highlight=False, markup=False)
            self._last_time, self._last_tenth = now, _tenth(step, self._total)
        return {name: rates[name] for name in ("tokens_per_second", "flops_per_second", "mfu") if name in rates}

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _rates(self, now: float, step: int, tokens: float, flops: float) -> dict[str, float]:
        _, _, tokens_before, flops_before = self._marks[-1] if self._marks else (0.0, 0, 0.0, 0.0)
        self._marks.append((now, step, tokens_before + tokens, flops_before + flops))
        while len(self._marks) > 2 and self._marks[1][0] <= now - _WINDOW:
            self._marks.popleft()
        names = ("steps_per_second", "tokens_per_second", "flops_per_second")
        seconds, *done = (last - first for first, last in zip(self._marks[0], self._marks[-1], strict=True))
        if seconds <= 0:
            return {}
        rates = {name: value / seconds for name, value in zip(names, done, strict=True) if value}
        if self._peak is not None and "flops_per_second" in rates:
            rates["mfu"] = rates["flops_per_second"] / self._peak
        return rates

    def _describe(self, step: int, loss: float, rates: Mapping[str, float]) -> str:
        parts = [f"loss {loss:.4f}"]
        if self._by_depth:
            losses = (f"{depth}: {loss:.3f}" for depth, loss in sorted(self._by_depth.items()))
            parts.append(f"by loops {' '.join(losses)}")
        if "tokens_per_second" in rates:
            parts.append(f"{_short(rates['tokens_per_second'])} tok/s")
        if "flops_per_second" in rates:
            share = f" ({rates['mfu']:.1%} of peak)" if "mfu" in rates else ""
            parts.append(f"{_short(rates['flops_per_second'])}FLOP/s{share}")
        if "steps_per_second" in rates:
            parts.append(f"ETA {_duration((self._total - step) / rates['steps_per_second'])}")
        return "  ".join(parts)


def _tenth(step: int, total: int) -> int:
    return 10 * step // max(total, 1)


def _short(value: float) -> str:
    """1234567 → `1.23 M`."""
    for size, prefix in _PREFIXES:
        if value >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g} "


def _duration(seconds: float) -> str:
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def _encode(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _decode(value: Any) -> Any:
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


def _entries(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each whole line with its object."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue
            if line.endswith("\n") and isinstance(entry, dict) and isinstance(entry.get("step"), int):
                yield line, {name: _decode(value) for name, value in entry.items()}


def _drop_after(path: Path, step: int) -> None:
    """Rewrite the file without the lines after a step; all of them at step 0."""
    if path.exists():
        kept = [line for line, entry in _entries(path) if step > 0 and entry["step"] <= step]
        fresh = path.with_suffix(".tmp")
        fresh.write_text("".join(kept), encoding="utf-8")
        fresh.replace(path)


class _TensorBoard:
    """TensorBoard's file, written in this thread: tensorboardX's own writer hangs a run whose disk is full."""

    def __init__(self, directory: Path, resume_step: int):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboardX.summary import scalar

        self._event, self._scalar = Event, scalar
        directory.mkdir(parents=True, exist_ok=True)
        self._file = EventsWriter(str(directory / "events"))
        self._flushed = time.monotonic()
        if resume_step:  # what an earlier launch wrote beyond it no longer counts
            start = SessionLog(status=SessionLog.START)
            self._file.write_event(Event(wall_time=time.time(), step=resume_step + 1, session_log=start))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            summary = self._scalar(name, value)
            self._file.write_event(self._event(wall_time=time.time(), step=step, summary=summary))
        if time.monotonic() - self._flushed > _WINDOW:  # it waits for the disk
            self._file.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        self._file.close()


def _tensorboard(directory: Path, resume_step: int) -> _TensorBoard | None:
    """A TensorBoard writer, or None where tensorboardX is not installed."""
    try:
        return _TensorBoard(directory, resume_step)
    except ImportError:
        return None


def _unwritable(path: Path, error: OSError) -> ElrError:
    return ElrError(f"{path} can't be written ({error.strerror}): free space there and resume, or choose another --out")
