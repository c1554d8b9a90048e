"""`python -m checkpoints_convert verify PATH`: the JAX model of a Dory checkpoint held to the one in PyTorch."""

import dataclasses
import gc
import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from checkpoints_convert import golden as goldens
from checkpoints_convert.compare import Report, compare, describe
from checkpoints_convert.dory import load_dory, read_config
from checkpoints_convert.golden import Golden
from checkpoints_convert.source import find_source, find_tensors
from elr_jax.config import ModelConfig
from elr_jax.errors import ElrError

LONGEST_LADDER = 40
MODES = {None: "none", "per_loop": "per loop", "last_loop": "last loop"}


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Show that a checkpoint computes the same in JAX as in PyTorch.

    A prompt is run at every loop count, without a cache and with both kinds, in one call, in chunks and token by token,
    by transformers and here. How far the two may be apart goes by the reference's own rounding noise: its distance to
    the same pass in float64. A ladder of the hidden states names the first layer that departs. Exit status 1 where
    parity is not shown.

    The two sides take turns in memory, so the larger is what it needs: 4 bytes a parameter and the activations, 16 GB
    for Dory1.0-4B with 2 to 3 GB to spare; half of it with --dtype bfloat16. The float64 pass holds one tensor at a
    time, and reads every weight again for every token that it is given alone.
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
    """Checkpoint folder, .safetensors file with its config.json beside it, or Hub id."""
    loops: tuple[int, ...] = (1, 2, 3, 4)
    """Loop counts to run; the ladder is climbed at the largest."""
    tokens: int = 24
    """Length of a prompt of random tokens. Take more than the window to see it at work."""
    seed: int = 0
    """Of the random tokens."""
    prompt: str | None = None
    """Text to run instead, through the checkpoint's tokenizer.json."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type that both sides compute in."""
    factor: float = 4.0
    """How many times the reference's own noise the two sides may differ."""
    golden: Path | None = None
    """Compare with the answers kept in this file, without PyTorch; prompt, loop counts and type are the file's."""
    write_golden: Path | None = None
    """Keep PyTorch's answers in this file."""
    json: Path | None = None
    """Write the result here too."""


def run(settings: Verify) -> int:
    """Verify a checkpoint, print the result and return the exit status: 0 where parity is shown, else 1."""
    with jax.default_matmul_precision("highest"):  # accelerators would round float32 products to fewer bits
        report, config = verify(settings)
    # piped output has no width of its own
    show(report, config, Console(width=None if sys.stdout.isatty() else 110))
    if settings.json is not None:
        settings.json.write_text(json.dumps(as_json(report), indent=1) + "\n", encoding="utf-8")
    return 0 if report.passed else 1


def verify(settings: Verify) -> tuple[Report, ModelConfig]:
    """PyTorch's answers, measured or from a file, then the same in JAX."""
    for path in (settings.json, settings.write_golden):
        if path is not None and not path.parent.is_dir():
            raise ElrError(f"{path} can't be written: there is no folder {path.parent}; make it or name another")
    config = read_config(settings.source, embedding_norm=True)
    golden = _from_file(settings.golden, config) if settings.golden else _measured(settings, config)
    if settings.write_golden is not None:
        goldens.write(golden, settings.write_golden)
    params, config = load_dory(settings.source, dtype=golden.dtype, max_loops=max(golden.loops), embedding_norm=True)
    return compare(golden, params, config, factor=settings.factor), config


def _measured(settings: Verify, config: ModelConfig) -> Golden:
    if not all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        raise ElrError("PyTorch is not installed: pip install 'elr-jax[parity]', or compare with --golden FILE")
    if not settings.loops or min(settings.loops) < 1:
        raise ElrError(f"--loops {' '.join(map(str, settings.loops))} must be counts from 1 on")
    tokens = _prompt(settings, config)
    loops = sorted(set(settings.loops))
    files = sorted({entry.path for entry in find_tensors(find_source(settings.source)).values()})
    golden = goldens.measure(files, tokens, loops, config=config, dtype=settings.dtype)
    gc.collect()  # torch's model refers to itself, and the other one needs its room
    return golden


def _from_file(path: Path, config: ModelConfig) -> Golden:
    golden = goldens.read(path)
    if _without_loops(golden.config) != _without_loops(config):
        raise ElrError(f"{path} was made of another model ({golden.config}): make one of this with --write-golden")
    return golden


def _without_loops(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, loop=dataclasses.replace(config.loop, max_loops=1))


def _prompt(settings: Verify, config: ModelConfig) -> np.ndarray:
    if settings.prompt is None:
        tokens = np.random.default_rng(settings.seed).integers(config.vocab_size, size=max(settings.tokens, 0))
    else:
        tokens = np.array(_encode(settings.prompt, find_source(settings.source).folder), dtype=np.int64)
    if len(tokens) < 3:
        raise ElrError(f"the prompt has {len(tokens)} tokens: 3 or more can be cut into chunks")
    if tokens.max() >= config.vocab_size:
        raise ElrError(
            f"the prompt has token {tokens.max()} of a vocabulary of {config.vocab_size}: check tokenizer.json"
        )
    if config.max_positions is not None and len(tokens) > config.max_positions:
        raise ElrError(f"the prompt has {len(tokens)} tokens, the model {config.max_positions} positions: take fewer")
    return tokens


def _encode(text: str, folder: Path) -> list[int]:
    if not (folder / "tokenizer.json").is_file():
        raise ElrError(f"{folder} has no tokenizer.json, which --prompt needs: leave it out for random tokens")
    from elr_jax.decode.text import checkpoint_codec

    return checkpoint_codec(folder).encode(text)


def show(report: Report, config: ModelConfig, console: Console) -> None:
    """Print the rows, the ladder, what the embedding norm changes and the verdict."""
    console.print(_rows(report), _ladder(report, config), _embedding_norm(report))
    for case in report.chaotic:
        console.print(
            f"At {case.key} PyTorch is too far from its own float64 pass to tell anything: chaos or a misread."
        )
    if report.first_departure is not None:
        console.print(f"First to depart: {describe(report.first_departure, config)}")
    worst = max(report.rows, key=lambda row: row.jax.max_abs / row.allowed)
    told = f"largest difference {worst.jax.max_abs:.2e} of {worst.allowed:.2e} allowed ({worst.case.key})"
    console.print(f"{'Parity shown' if report.passed else 'PARITY NOT SHOWN'}: {told}")


def _rows(report: Report) -> Table:
    table = _table("Logits, JAX against PyTorch", "loops", "cache", "calls", "max |Δ|", "allowed", "noise")
    for name in ("KL", "noise KL", "top-1", ""):
        table.add_column(name)
    for row in report.rows:
        table.add_row(
            str(row.case.loops),
            MODES[row.case.mode],
            row.case.calls,
            *(f"{row.jax.max_abs:.2e}", f"{row.allowed:.2e}", f"{row.noise.max_abs:.2e}"),
            *(f"{row.jax.kl:.1e}", f"{row.noise.kl:.1e}", f"{row.jax.top1:.1%}"),
            _mark(row.passed),
        )
    return table


def _ladder(report: Report, config: ModelConfig) -> Table:
    """All rungs, or those about the first departure (else the last ones) where there are too many."""
    table = _table("Ladder, one call", "state after", "max |Δ|", "allowed", "noise", "")
    names = [rung.name for rung in report.rungs]
    middle = names.index(report.first_departure) if report.first_departure else len(names)
    begin = max(0, min(middle - LONGEST_LADDER // 2, len(names) - LONGEST_LADDER))
    for rung in report.rungs[begin : begin + LONGEST_LADDER]:
        numbers = (f"{rung.jax:.2e}", f"{rung.allowed:.2e}", f"{rung.noise:.2e}")
        table.add_row(describe(rung.name, config), *numbers, _mark(rung.passed))
    if len(names) > LONGEST_LADDER:
        table.caption = f"rungs {begin + 1}–{begin + LONGEST_LADDER} of {len(names)}; --json keeps all"
    return table


def _embedding_norm(report: Report) -> Table:
    title = "What embedding_norm changes (transformers has it, vLLM has not)"
    table = _table(title, "loops", "max |Δ|", "KL", "top-1")
    for loops, effect in report.embedding_norm.items():
        table.add_row(str(loops), f"{effect.max_abs:.2e}", f"{effect.kl:.1e}", f"{effect.top1:.1%}")
    return table


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _mark(passed: bool) -> str:
    return "[green]ok[/green]" if passed else "[red]beyond[/red]"


def as_json(report: Report) -> dict[str, Any]:
    """The report as JSON-ready data."""
    rows = [
        {
            **row.case._asdict(),
            "jax": row.jax._asdict(),
            "noise": row.noise._asdict(),
            "allowed": row.allowed,
            "passed": row.passed,
        }
        for row in report.rows
    ]
    return {
        "passed": report.passed,
        "first_departure": report.first_departure,
        "rows": rows,
        "ladder": [{**rung._asdict(), "passed": rung.passed} for rung in report.rungs],
        "embedding_norm": {str(loops): effect._asdict() for loops, effect in report.embedding_norm.items()},
        "too_noisy": [case.key for case in report.chaotic],
    }
