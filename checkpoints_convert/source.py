"""Finding a checkpoint: a folder, a safetensors file, or a Hugging Face Hub id; whole or in shards."""

import importlib
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from checkpoints_convert.tensor_file import Entry, read_entries
from elr_jax.config import read_json
from elr_jax.errors import ElrError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json"),
)
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")


class Source(NamedTuple):
    """A checkpoint on disk: its folder, and the one file asked for (None: what the folder holds)."""

    folder: Path
    file: Path | None

    @property
    def config_path(self) -> Path:
        """Where its config.json is."""
        return self.folder / "config.json"


def find_source(source: str | Path, *, more: Sequence[str] = ()) -> Source:
    """The checkpoint that a path or a Hub id (`owner/name`, `owner/name@revision`) names, downloaded if need be.

    Of a Hub id, files named in `more` come along with safetensors, config and tokenizer.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return Source(path, None)
    if path.is_file():
        if path.suffix != ".safetensors":
            raise ElrError(f"{path} is no .safetensors file: give one, or the folder that holds it")
        return Source(path.parent, path)
    if _HUB_ID.fullmatch(str(source)):
        return Source(_download(str(source), more), None)
    raise ElrError(f"{source} does not exist: give a folder, a .safetensors file or a Hub id such as owner/name")


def find_tensors(source: Source) -> dict[str, Entry]:
    """Every tensor of a checkpoint by name, from headers alone.

    Raises:
        ElrError: no file, shards that the index lacks or names in vain, a tensor in two shards, a damaged file.
    """
    if source.file is not None:
        return read_entries(source.file)
    present = sorted(path.name for path in source.folder.glob("*.safetensors"))
    indexed = (source.folder / INDEX).exists()
    if indexed and SINGLE in present:
        raise ElrError(f"{source.folder} holds both {SINGLE} and {INDEX}: remove one, or name the file")
    if indexed:
        return _sharded(source.folder, present)
    if not present:
        raise ElrError(f"{source.folder} holds no .safetensors file: convert the checkpoint to safetensors first")
    if len(present) > 1:
        stray = ", ".join(name for name in present if name != SINGLE)
        raise ElrError(f"{source.folder} holds {stray} and no {INDEX}: put the index back, or name the one file")
    return read_entries(source.folder / present[0])


def _sharded(folder: Path, present: list[str]) -> dict[str, Entry]:
    index = read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise ElrError(f"{folder / INDEX} has no weight_map of tensors to files: put back a good copy")
    named = set(index.values())
    problems = [f"shard {name} is absent" for name in sorted(named - set(present))]
    problems += [f"{name} is in no entry of the index" for name in sorted(set(present) - named)]
    shards = {name: read_entries(folder / name) for name in sorted(named & set(present))}
    counts = Counter(tensor for shard in shards.values() for tensor in shard)
    problems += [f"tensor {tensor} is in {count} shards" for tensor, count in counts.items() if count > 1]
    problems += [
        f"tensor {tensor} is not in {shard}"
        for tensor, shard in index.items()
        if shard in shards and tensor not in shards[shard]
    ]
    problems += [f"tensor {tensor} is not in the index" for tensor in counts if tensor not in index]
    if problems:
        raise ElrError(f"{folder / INDEX} does not fit the folder: {listed(problems)}: copy or download it again")
    return {tensor: shards[shard][tensor] for tensor, shard in index.items()}


def listed(items: list[str], *, most: int = 12) -> str:
    """Items as one line, and how many more there are."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


def _download(source: str, more: Sequence[str]) -> Path:
    name, _, revision = source.partition("@")
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise ElrError(
            f"{source} is no path here, and a Hub id needs: pip install 'elr-jax[hub]'; or give a folder"
        ) from error
    patterns = ["config.json", SINGLE, INDEX, "model-*.safetensors", *TOKENIZER_FILES, *more]
    try:
        return Path(hub.snapshot_download(name, revision=revision or None, allow_patterns=patterns))
    except Exception as error:  # the Hub's client raises its own, its transport's and the system's
        words = " ".join(str(error).split())[:200]
        raise ElrError(
            f"{source} is no path here and can't be downloaded ({type(error).__name__}: {words}): "
            "check the name and the network, or give a folder"
        ) from error
