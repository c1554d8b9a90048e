"""Prompts from text and text from tokens, by the tokenizer a checkpoint brings or a run was trained with."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elr_jax.config import read_json
from elr_jax.errors import ElrError
from elr_jax.train.documents import content_hash
from elr_jax.train.tokenizer import byte_tokenizer, open_file


@dataclass(frozen=True, kw_only=True)
class TextCodec:
    """Text to the tokens of a prompt, tokens to text, and the tokens that end a text."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    stop: tuple[int, ...]


def byte_codec() -> TextCodec:
    """Bytes after the marker of a document; the next document's marker ends a text."""
    tokenizer = byte_tokenizer()
    return TextCodec(
        encode=lambda text: [tokenizer.marker, *tokenizer.encode([text])[0].tolist()],
        decode=lambda tokens: bytes(token for token in tokens if token < 256).decode(errors="replace"),
        stop=(tokenizer.marker,),
    )


def run_codec(data: dict[str, Any], tokenizer: Path | None) -> TextCodec:
    """The codec of a run's data settings; `tokenizer` is the file it was trained with, if not with bytes.

    Raises:
        ElrError: data without text, no file, or another file than the run's.
    """
    identity, marker = data.get("tokenizer"), data.get("marker")
    if identity == "bytes":
        return byte_codec()
    if identity is None or marker is None:
        raise ElrError("the run was not trained on text: give the prompt's tokens by --tokens 1,2,3")
    if tokenizer is None:
        raise ElrError("the run was trained with a tokenizer file: name it by --tokenizer, or give --tokens 1,2,3")
    if content_hash(tokenizer) != identity:
        raise ElrError(f"--tokenizer {tokenizer} is not the file the run was trained with: name that one")
    loaded = open_file(tokenizer)
    return TextCodec(
        encode=lambda text: [marker, *loaded.encode(text, add_special_tokens=False).ids],
        decode=loaded.decode,
        stop=(marker,),
    )


def checkpoint_codec(folder: Path) -> TextCodec:
    """The codec of a released checkpoint, from the files beside its tensors.

    A prompt begins as the tokenizer's post-processor says, or with the configured BOS where `add_bos_token` asks for
    one, and never with two; what the post-processor would put after a finished text is left out.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ElrError(f"{folder} has no tokenizer.json: put it there, or give the prompt's tokens by --tokens 1,2,3")
    loaded, config = open_file(path), _read(folder / "tokenizer_config.json")
    first = _token_id(loaded, config.get("bos_token"))

    def encode(text: str) -> list[int]:
        encoding = loaded.encode(text)
        tokens, added = encoding.ids, encoding.special_tokens_mask
        while tokens and added[len(tokens) - 1]:
            tokens = tokens[:-1]
        if first is None:
            return tokens
        begins = config.get("add_bos_token") is True or encoding.ids[:1] == [first]
        while tokens[:1] == [first]:
            tokens = tokens[1:]
        return [first, *tokens] if begins else tokens

    return TextCodec(encode=encode, decode=loaded.decode, stop=_stop_tokens(folder, loaded, config))


def _stop_tokens(folder: Path, loaded: Any, config: dict[str, Any]) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        found = _read(folder / name).get("eos_token_id")
        if found is not None:
            return tuple(found) if isinstance(found, list) else (found,)
    last = _token_id(loaded, config.get("eos_token"))
    return () if last is None else (last,)


def _token_id(loaded: Any, token: Any) -> int | None:
    content = token.get("content") if isinstance(token, dict) else token
    return None if content is None else loaded.token_to_id(content)


def _read(path: Path) -> dict[str, Any]:
    """The JSON table of a file that may be absent."""
    return read_json(path) if path.is_file() else {}
