"""Continue prompts at several loop counts, side by side: `python -m elr_jax.decode PATH --prompt "…" --loops 1,2,4`.

PATH is a folder written by `elr_jax.train` or `checkpoints_convert`, or a released checkpoint: its folder, its
.safetensors file or its Hub id.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table
from rich.text import Text

from elr_jax.cache import CacheMode
from elr_jax.config import ModelConfig, Runtime
from elr_jax.decode.generate import Completion, PrefillDecoder, generate, working_copy
from elr_jax.decode.sampling import GREEDY, Sampling
from elr_jax.decode.text import TextCodec, checkpoint_codec, run_codec
from elr_jax.errors import ElrError, one_line_errors
from elr_jax.parameters import Params, WorkingCopy, param_specs
from elr_jax.sharding import make_mesh, param_shardings


@dataclass(frozen=True, kw_only=True)
class Command:
    """What the command line asks for."""

    path: tyro.conf.Positional[str]
    """Checkpoint or run folder, .safetensors file or Hub id."""
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text to continue; may be given several times."""
    tokens: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """The same as token ids, 1,2,3; needs no tokenizer."""
    loops: str = "1,2,4"
    """Loop counts to compare."""
    max_new_tokens: int = 64
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = GREEDY
    cache_mode: CacheMode = "per_loop"
    prefill_chunk: int | None = None
    """Longest piece of a prompt read at once."""
    prefill_decoder: PrefillDecoder = "all"
    """Of a causal encoder-decoder, the last tokens of a prompt that the decoder reads: all, exact, window."""
    max_loops: int | None = None
    """Allow more loops than the checkpoint's config does."""
    allow_longer: bool = False
    """Go beyond the longest context the model was made for."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Number type; None takes the checkpoint's."""
    tokenizer: Path | None = None
    """The tokenizer file a run was trained with."""
    mesh: str | None = None
    """Devices by mesh axis, such as tensor=4 or data=2,tensor=4; None: one device."""


Opened = tuple[Params, ModelConfig, Callable[[], TextCodec]]


def open_model(
    path: str, *, max_loops: int | None = None, tokenizer: Path | None = None, mesh: Mesh | None = None
) -> Opened:
    """Parameters, on a mesh if one is given, config and (made when asked for) the text codec of what the path names."""
    from elr_jax.train.runner import checkpoint_folder

    if checkpoint_folder(path).is_dir():
        return _open_run(path, max_loops, tokenizer, mesh)
    from checkpoints_convert.dory import load_dory
    from checkpoints_convert.source import find_source

    found = find_source(path)
    places = None if mesh is None else lambda config: param_shardings(param_specs(config), mesh)
    params, config = load_dory(found.file or found.folder, max_loops=max_loops, shardings=places)
    return params, config, lambda: checkpoint_codec(found.folder)


def _open_run(path: str, max_loops: int | None, tokenizer: Path | None, mesh: Mesh | None) -> Opened:
    from elr_jax.train import checkpoint, runner

    params, config = runner.load_params(path, mesh=mesh)
    if max_loops is not None:
        config = replace(config, loop=replace(config.loop, max_loops=max_loops))

    def codec() -> TextCodec:
        meta = checkpoint.read_meta(runner.checkpoint_folder(path)) or {}
        return run_codec(meta["data"], tokenizer) if "data" in meta else checkpoint_codec(Path(path))

    return params, config, codec


def main() -> None:
    """Read the command line, generate and print."""
    with one_line_errors():
        command = tyro.cli(Command, prog="python -m elr_jax.decode", description=__doc__)
        run(command)


def run(command: Command) -> None:
    """Generate at every loop count and print the continuations and their rates."""
    if bool(command.prompt) == bool(command.tokens):
        raise ElrError("give either --prompt TEXT or --tokens 1,2,3, as often as you like")
    loops = _numbers("--loops", command.loops)
    mesh = None if command.mesh is None else make_mesh(command.mesh)
    params, config, codec = open_model(
        command.path, max_loops=command.max_loops, tokenizer=command.tokenizer, mesh=mesh
    )
    text = codec() if command.prompt else None
    prompts = [text.encode(prompt) for prompt in command.prompt] if text else []
    prompts += [_numbers("--tokens", tokens) for tokens in command.tokens]
    table = Table("prompt", *(f"{loop} loop{'s' if loop > 1 else ''}" for loop in loops), show_lines=True)
    dtype = command.dtype or ("bfloat16" if params.embedding.dtype == "bfloat16" else "float32")
    runtime = Runtime(dtype=dtype)
    if mesh is None and jax.default_backend() == "cpu":
        params = working_copy(params, config=config, runtime=runtime)
    timed = partial(_timed, command, params, config, runtime, prompts, text)
    with nullcontext() if mesh is None else jax.set_mesh(mesh):
        answers, rates = zip(*map(timed, loops), strict=True)
    for row, prompt in enumerate(command.prompt or command.tokens):
        table.add_row(Text(prompt), *(_shown(answer[row], text) for answer in answers))
    table.add_row("tokens/s", *("–" if rate is None else f"{rate:.1f}" for rate in rates))
    Console().print(table)


def _timed(
    command: Command,
    params: Params | WorkingCopy,
    config: ModelConfig,
    runtime: Runtime,
    prompts: list[list[int]],
    text: TextCodec | None,
    loops: int,
) -> tuple[list[Completion], float | None]:
    """The answers, and the rate from the first token on: by then everything is compiled and the prompts are read."""
    times: list[float] = []
    answers = generate(
        params,
        prompts,
        config=config,
        runtime=runtime,
        loops=loops,
        max_new_tokens=command.max_new_tokens,
        sampling=command.sampling,
        stop_tokens=text.stop if text else (),
        cache_mode=command.cache_mode,
        prefill_chunk=command.prefill_chunk,
        prefill_decoder=command.prefill_decoder,
        allow_longer=command.allow_longer,
        on_token=lambda request, token: times.append(time.perf_counter()),
    )
    later = len(times) - len(prompts)
    return answers, later / (times[-1] - times[0]) if later else None


def _shown(answer: Completion, text: TextCodec | None) -> Text:
    return Text(text.decode(answer.tokens) if text else ",".join(map(str, answer.tokens)))


def _numbers(flag: str, value: str) -> list[int]:
    try:
        return [int(part) for part in value.split(",")]
    except ValueError:
        raise ElrError(f"{flag} {value!r} is no list of numbers: write them as 1,2,4") from None


if __name__ == "__main__":
    main()
