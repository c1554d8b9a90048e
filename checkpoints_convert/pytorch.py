"""The reference implementation, `transformers.DoryForCausalLM`: built from our config, loaded, run and looked into.

Torch and transformers are imported when first needed, by name: everything else works, and is checked, without them.
"""

import importlib
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from checkpoints_convert.dory_rules import IGNORED
from checkpoints_convert.source import INDEX, SINGLE
from elr_jax.config import ModelConfig
from elr_jax.errors import ElrError

KINDS = {"*": "full_attention", "S": "sliding_attention"}


def _torch() -> Any:
    return importlib.import_module("torch")


def _transformers() -> Any:
    return importlib.import_module("transformers")


def dory_config(config: ModelConfig) -> Any:
    """The `DoryConfig` of our config: transformers would misread a config.json of the other dialect without a word."""
    _check_supported(config)
    attention, sphere, letters = config.attention, config.sphere, config.layers[::2]
    bases = {KINDS[letter]: attention.base(letter) for letter in sorted(set(letters))}
    return _transformers().DoryConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        intermediate_size=config.mlp.d_ff,
        num_hidden_layers=len(letters),
        num_attention_heads=attention.num_heads,
        num_key_value_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        max_position_embeddings=config.max_positions or 8192,
        initializer_range=sphere.init_std if sphere else 0.0,
        tie_word_embeddings=config.tie_embeddings,
        rope_parameters={kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
        sliding_window=attention.window,
        layer_types=[KINDS[letter] for letter in letters],
        ngpt_alpha_init=sphere.rate_init if sphere else 0.0,
        n_input_layers=len(config.prelude) // 2,
        n_recurrent_layers=len(config.core) // 2,
        n_output_layers=len(config.coda) // 2,
        attn_implementation="eager",
    )


def _check_supported(config: ModelConfig) -> None:
    problems = []
    for name in ("prelude", "core", "coda"):
        letters = getattr(config, name)
        if set(letters[::2]) - set(KINDS) or set(letters[1::2]) - {"-"} or len(letters) % 2:
            problems.append(f"{name}={letters!r} is no chain of attention-MLP pairs")
    if config.sphere is None:
        problems.append("sphere=None")
    elif config.sphere.gate_init not in (None, config.d_model**0.5):
        problems.append(f"sphere.gate_init={config.sphere.gate_init} is not √d_model")
    if config.norm_eps != 1e-6:
        problems.append(f"norm_eps={config.norm_eps} is not 1e-6")
    if config.attention.rope_base is None or config.mlp.kind != "swiglu" or config.attention.qk_norm:
        problems.append("only rotary positions, SwiGLU and unit-norm queries and keys exist there")
    if problems:
        raise ElrError(f"transformers' Dory can't run this model ({'; '.join(problems)}): verify with --golden FILE")


def load(files: Sequence[Path], config: ModelConfig, dtype: str) -> Any:
    """The model in PyTorch from its safetensors files, as transformers itself reads them."""
    index = [files[0].with_name(INDEX)] if len(files) > 1 else []

    with tempfile.TemporaryDirectory() as folder:  # beside the checkpoint's own config.json it would not take ours
        for file in [*files, *index]:
            name = file.name if index else SINGLE
            (Path(folder) / name).symlink_to(file.resolve())
        model, report = _transformers().DoryForCausalLM.from_pretrained(
            folder,
            config=dory_config(config),
            generation_config=_transformers().GenerationConfig(),  # else it looks for a file of them
            dtype=getattr(_torch(), dtype),
            output_loading_info=True,
            local_files_only=True,
        )
    wrong = {kind: [str(name) for name in names if not IGNORED.search(str(name))] for kind, names in report.items()}
    wrong = {kind: sorted(names) for kind, names in wrong.items() if names}
    if wrong:
        raise ElrError(
            f"transformers can't load the checkpoint whole: {wrong}; check its tensor names against the config"
        )
    return model.eval()


def released_tensors(model: Any) -> dict[str, Any]:
    """The model's tensors under their released names, in torch's memory."""
    renamed = {}
    for name, tensor in model.state_dict().items():
        parts = name.split(".")
        if parts[:2] == ["model", "embed_tokens"]:
            renamed["backbone.embeddings.weight"] = tensor
        elif parts[:2] == ["model", "layers"]:
            renamed[_released(int(parts[2]), parts[3:])] = tensor
        else:
            renamed[name] = tensor
    return renamed


def _released(block: int, parts: list[str]) -> str:
    """Block b of transformers is the sub-layers 2b and 2b + 1."""
    rates = {"lambda_1": (2 * block, "attn_alpha"), "lambda_2": (2 * block + 1, "mlp_alpha")}
    if parts[0] in rates:
        layer, name = rates[parts[0]]
        return f"backbone.layers.{layer}.{name}"
    gate = {"gate_proj": "g_proj"} if parts[0] == "self_attn" else {}
    rest = ".".join(gate.get(part, part) for part in parts[1:])
    return f"backbone.layers.{2 * block + (parts[0] == 'mlp')}.mixer.{rest}"


def logits(
    model: Any, tokens: Int[np.ndarray, "T"], loops: int, *, mode: str | None, calls: Sequence[int]
) -> Float[np.ndarray, "T V"]:
    """Logits of a prompt given in `calls` of so many tokens; without a cache (mode None) in one."""
    torch = _torch()
    model.config.n_recurrent_loops = loops
    model.config.recurrent_kv_cache_mode = mode or "per_loop"
    cache = (
        None if mode is None else _transformers().DynamicCache(config=model.config)
    )  # without the config `last_loop` crashes
    made = []
    with torch.no_grad():
        for part in torch.split(torch.as_tensor(tokens)[None], list(calls), dim=1):
            made.append(model(part, cache=cache, use_cache=mode is not None).logits[0])
    return torch.cat(made).float().numpy()


def rungs(model: Any, tokens: Int[np.ndarray, "T"], loops: int) -> dict[str, Float[np.ndarray, "T D"]]:
    """The normalised hidden states of one call, named and ordered as in `checkpoints_convert.reference`."""
    taken: dict[str, Any] = {}
    with _recording(model, taken):
        logits(model, tokens, loops, mode=None, calls=[len(tokens)])
    return {name: tensor.float().numpy() for name, tensor in taken.items()}


@contextmanager
def _recording(model: Any, taken: dict[str, Any]) -> Iterator[None]:
    """Hooks that fill `taken`; a core layer's states go by the round they were made in."""
    config, unit = model.config, model.model.norm
    core = range(config.n_input_layers, config.n_input_layers + config.n_recurrent_layers)
    rounds = {block: 0 for block in core}

    def keep(name: str, block: int, x: Any) -> None:
        taken[f"loop {rounds[block]} {name}" if block in core else name] = x[0]

    def entered(block: int, x: Any) -> None:
        if block in core:
            rounds[block] += 1
        if block == core.start:
            keep("entry", block, x)

    def watch(module: Any, act: Any) -> Any:
        return module.register_forward_hook(lambda module, arguments, out: act(out))

    hooks = [watch(model.model.embed_tokens, lambda x: taken.__setitem__("embedding", unit(x)[0]))]
    for block, layer in enumerate(model.model.layers):
        hooks += [
            watch(layer.input_layernorm, lambda x, block=block: entered(block, x)),
            watch(layer.pre_feedforward_layernorm, lambda x, block=block: keep(f"layers.{2 * block}", block, x)),
            watch(layer, lambda x, block=block: keep(f"layers.{2 * block + 1}", block, unit(x))),
        ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
