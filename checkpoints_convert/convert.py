"""The commands that convert a checkpoint: a Dory in any naming or a Parcae in, this project's form out, or a Dory's."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro

from checkpoints_convert.dory import load_dory, save_dory
from checkpoints_convert.dory_config import Table
from checkpoints_convert.output import copy_tokenizer, new_folder, refuse_taken
from checkpoints_convert.parcae import load_parcae
from checkpoints_convert.source import find_source
from elr_jax.config import ModelConfig, read_json
from elr_jax.errors import ElrError
from elr_jax.flops import num_params
from elr_jax.parameters import Params


@dataclass(frozen=True, kw_only=True)
class Dory:
    """Convert a Dory checkpoint; the tokenizer's files go along."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="IN")]
    """Folder, .safetensors file with its config.json beside it, or Hub id (owner/name, owner/name@revision)."""
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder to write, which is not there yet."""
    to: Literal["run", "released"] = "run"
    """What to write: a folder as training makes one, with the parameters of step 0; or safetensors as released."""
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """Type of all parameters; None keeps the file's."""
    max_loops: int | None = None
    """Largest loop count of the model; None: 4, or the config's `n_recurrent_loops` if that is more."""
    embedding_norm: bool = False
    """Normalise the embedding's output, as transformers does and vLLM does not."""


@dataclass(frozen=True, kw_only=True)
class Parcae:
    """Convert a Parcae checkpoint (safetensors, or torch's own format where torch is installed)."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="IN")]
    """Folder, .safetensors file with its config.json beside it, or Hub id (owner/name, owner/name@revision)."""
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder to write, which is not there yet."""
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """Type of all parameters; None keeps the file's."""
    max_loops: int | None = None
    """Largest loop count of the model; None: three times the mean it was trained at."""


def run_parcae(settings: Parcae) -> int:
    """Convert, say where the result is, and return the exit status."""
    refuse_taken(settings.out)
    params, config = load_parcae(settings.source, dtype=settings.dtype, max_loops=settings.max_loops)
    return _write(params, config, settings.out, tokenizer=find_source(settings.source).folder)


def run(settings: Dory) -> int:
    """Convert, say where the result is, and return the exit status."""
    if settings.to == "released" and (settings.embedding_norm or settings.max_loops):
        raise ElrError("a released config.json has no word for --embedding-norm and --max-loops: leave them out")
    refuse_taken(settings.out)
    found = find_source(settings.source)
    source = found.file or found.folder
    params, config = load_dory(
        source, dtype=settings.dtype, max_loops=settings.max_loops, embedding_norm=settings.embedding_norm
    )
    released = read_json(found.config_path) if settings.to == "released" else None
    return _write(params, config, settings.out, tokenizer=found.folder, released=released)


def _write(params: Params, config: ModelConfig, out: str, *, tokenizer: Path, released: Table | None = None) -> int:
    """A folder as training makes one, or a Dory's as released with further keys for its config.json."""
    needed = int(1.05 * sum(leaf.nbytes for leaf in jax.tree.leaves(params))) + (64 << 20)
    with new_folder(out, needed=needed) as folder:
        if released is not None:
            save_dory(params, config, folder, base=released)
        else:
            from elr_jax.train.runner import save_params  # loads orbax

            save_params(str(folder), params, config)
        names = copy_tokenizer(tokenizer, folder)
    print(f"{num_params(config):,} parameters are in {Path(out)}, with {', '.join(names) or 'no tokenizer'}")
    return 0
