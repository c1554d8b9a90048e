"""Parcae checkpoints, as the authors' `save_pretrained` leaves them, into parameters.

Ways of that code which become facts of the parameters and so need no code of their own here: rotary pairs lie side by
side (2i, 2i+1), which a new order of each head's columns turns into halves; its squared ReLU is halved, which the
output matrix takes over. What remains is a model of `*-` and `V-` blocks with the gated injection and a linear readout.
Source: github.com/sandyresearch/parcae.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints_convert.leaves import AS_IS, LINEAR, Slot, Transform, leaf_specs, load_leaves, match
from checkpoints_convert.source import find_source, find_tensors
from checkpoints_convert.torch_file import find_torch_file, read_torch
from elr_jax.config import AttentionConfig, LoopRule, MLPConfig, ModelConfig, read_json
from elr_jax.errors import ElrError
from elr_jax.parameters import Params, param_specs
from elr_jax.params import ParamSpec

IGNORED = re.compile(r"freqs_cis$")
HEAD = "lm_head.weight"
SECTIONS = {"prelude": "prelude", "core": "core_block", "coda": "coda"}
WRAPPERS = re.compile(r"^((module|_orig_mod|model)\.)+")
"""What wrappers of a torch module put before the names."""

CHECKED: dict[str, tuple[Any, ...]] = {
    "injection_type": ("diagonal",),
    "prelude_norm": (True,),
    "block_class_name": ("TransformerPreNormBlock",),
    "norm_class_name": ("RMSNorm",),
    "mlp_class_name": ("BaseMLP",),
    "nonlin_name": ("ReLU2",),
    "init_strategy": ("scaled", "scaled-zero"),  # others scale the embedding or the logits
    "bias": (False,),
    "qk_bias": (False,),
    "clip_qkv": (None,),
    "logit_softcap": (None,),
    "use_abacus": (False,),
    "mup_model_scaling_factor": (1,),
}
"""Fields of config.json that must be absent or one of these: nothing here computes another."""
STATE_INIT = {"like-init": "random", "zero": "zero"}


def load_parcae(
    source: str | Path, *, dtype: Any = None, shardings: Any = None, max_loops: int | None = None
) -> tuple[Params, ModelConfig]:
    """Parameters and config of a Parcae checkpoint: safetensors, or a torch file where torch is installed.

    Args:
        source: a folder, a .safetensors file with its config.json beside it, or a Hub id (`owner/name@revision`).
        dtype: of all parameters; None keeps each tensor's own.
        shardings: where they go, as for `load_dory`.
        max_loops: largest loop count of the model; None: three times the mean it was trained at.

    Raises:
        ElrError: a damaged or incomplete checkpoint, or one with a part that this project does not compute.
    """
    found = find_source(source, more=("pytorch_model.bin", "model.pt"))
    config = parcae_config(read_json(found.config_path), name=str(found.config_path), max_loops=max_loops)
    torch_file = find_torch_file(found)
    entries: Any = find_tensors(found) if torch_file is None else read_torch(torch_file)
    pairs = match(
        {WRAPPERS.sub("", tensor): entry for tensor, entry in entries.items()},
        [slots(config)],
        name=str(source),
        ignored=IGNORED,
        tied_head=HEAD if config.tie_embeddings else None,
    )
    return load_leaves(pairs, param_specs(config), dtype=dtype, shardings=shardings), config


def parcae_config(table: dict[str, Any], *, name: str, max_loops: int | None = None) -> ModelConfig:
    """The model that a Parcae config.json describes; a field that asks for something else is named in the error."""
    for field, allowed in CHECKED.items():
        if table.get(field, allowed[0]) not in allowed:
            raise ElrError(f"{name} has {field}={table[field]!r}: only {' or '.join(map(repr, allowed))} is known here")
    try:
        d, heads, blocks = table["n_embd"], table["num_attention_heads"], _blocks(table)
        rotary = table.get("rope_settings") or {}
        mean = table["mean_recurrence"]
        same = {
            "recurrent_embedding_dimension": d,
            "recurrent_intermediation_embedding_dimension": table.get("intermediate_size") or 4 * d,
            "recurrent_num_attention_heads": heads,
        }
        different = [field for field, value in same.items() if (table.get(field) or value) != value]
        if different or rotary.get("rope_condense_ratio", 1) != 1:
            told = different[0] if different else "rope_condense_ratio"
            raise ElrError(
                f"{name} has a {told} of its own: the core is as wide as the rest here, and positions are whole"
            )
        prelude, core, coda = _letters(table, blocks, name)
        return ModelConfig(
            vocab_size=table.get("padded_vocab_size") or table["vocab_size"],
            d_model=d,
            prelude=prelude,
            core=core,
            coda=coda,
            attention=AttentionConfig(
                num_heads=heads,
                num_kv_heads=table.get("num_key_value_heads") or heads,
                head_dim=d // heads,
                rope_base=float(rotary.get("rope_base", 50_000)) if rotary.get("use_rope", True) else None,
                qk_norm=table.get("qk_norm", False),
                qk_norm_eps=float(np.finfo(np.float32).eps),  # what torch's rms_norm takes without one
            ),
            mlp=MLPConfig(d_ff=same["recurrent_intermediation_embedding_dimension"], kind="squared_relu"),
            loop=LoopRule(
                initial=STATE_INIT[table.get("state_init", "like-init")],  # pyright: ignore[reportArgumentType]
                inject="gated",
                update="replace",
                readout="linear",
                max_loops=max_loops or 3 * mean,
            ),
            tie_embeddings=table.get("tie_embeddings", False),
            norm_eps=table.get("norm_eps", 1e-5),
            residual_init="zero" if table.get("init_strategy") == "scaled-zero" else "scaled",
            max_positions=table.get("block_size"),
        )
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise ElrError(f"{name} is no Parcae config ({type(error).__name__}: {error}): put back a good copy") from error


def slots(config: ModelConfig) -> dict[str, Slot]:
    """Every tensor of a checkpoint by its name."""
    specs = leaf_specs(config)
    found = {
        "transformer.wte.weight": ("embedding", AS_IS),
        "transformer.adapter.A_log": ("loop/inject/a_log", AS_IS),
        "transformer.adapter.dt_bias": ("loop/inject/dt_bias", AS_IS),
        "transformer.adapter.B": ("loop/inject/input", LINEAR),
        "transformer.ln_prelude.weight": ("loop/inject/norm", AS_IS),
        "transformer.C.weight": ("loop/readout", LINEAR),
        "transformer.ln_f.weight": ("norm", AS_IS),
        HEAD: ("head", LINEAR),
    }
    number = 0
    for section, stack in SECTIONS.items():
        for block in range(len(getattr(config, section)) // 2):
            attention, mlp = f"{section}/{2 * block}", f"{section}/{2 * block + 1}"
            for name, leaf, transform in (
                ("norm_1", f"{attention}/norm", AS_IS),
                ("attn.c_q", f"{attention}/mixer/query", INTERLEAVED),
                ("attn.c_k", f"{attention}/mixer/key", INTERLEAVED),
                ("attn.c_v", f"{attention}/mixer/value", LINEAR),
                ("attn.c_proj", f"{attention}/mixer/output", LINEAR),
                ("attn.ve_gate", f"{attention}/mixer/embedding/gate", LINEAR),
                ("norm_2", f"{mlp}/norm", AS_IS),
                ("mlp.fc", f"{mlp}/mixer/up", LINEAR),
                ("mlp.proj", f"{mlp}/mixer/down", HALVED),
            ):
                found[f"transformer.{stack}.{block}.{name}.weight"] = leaf, transform
            found[f"value_embeds.{number}.weight"] = f"{attention}/mixer/embedding/table", ROWS
            number += 1
    kept = {tensor: Slot(leaf, specs[leaf], how) for tensor, (leaf, how) in found.items() if leaf in specs}
    assert {slot.leaf for slot in kept.values()} == set(specs), "a leaf has no rule"
    return kept


def _blocks(table: dict[str, Any]) -> tuple[int, int, int]:
    prelude, core, coda = (table[f"n_layers_in_{name}"] for name in ("prelude", "recurrent_block", "coda"))
    return prelude, core, coda


def _letters(table: dict[str, Any], blocks: tuple[int, int, int], name: str) -> tuple[str, str, str]:
    """The three strings. A block has a value embedding if its place among all says so, and a gate if its number does,

    which counts the core's blocks once a round in the coda; the two agree in every published model.
    """
    prelude, core, coda = blocks
    total, last = sum(blocks), core * table["mean_backprop_depth"] - 1
    numbers = [*range(prelude + core), *(prelude + core * table["mean_recurrence"] + i for i in range(coda))]
    letters = ""
    for place, number in enumerate(numbers):
        table_here, gate_here = place % 2 == (total - 1) % 2, number % 2 == last % 2
        if table_here != gate_here:
            raise ElrError(
                f"{name} gives block {place} a value embedding without a gate, or a gate alone: not known here"
            )
        letters += "V-" if table_here else "*-"
    return letters[: 2 * prelude], letters[2 * prelude : 2 * (prelude + core)], letters[2 * (prelude + core) :]


def _split_pairs(tensor: np.ndarray, spec: ParamSpec, leaf: np.ndarray) -> None:
    d, heads, width = spec.shape
    leaf[...] = tensor.reshape(heads, width // 2, 2, d).transpose(3, 0, 2, 1).reshape(spec.shape)


def _join_pairs(leaf: np.ndarray, spec: ParamSpec) -> np.ndarray:
    d, heads, width = spec.shape
    return leaf.reshape(d, heads, 2, width // 2).transpose(1, 3, 2, 0).reshape(heads * width, d)


def _halve(tensor: np.ndarray, spec: ParamSpec, leaf: np.ndarray) -> None:
    LINEAR.load(tensor, spec, leaf)
    leaf *= leaf.dtype.type(0.5)


INTERLEAVED = Transform(LINEAR.file_shape, _split_pairs, _join_pairs)
"""Rows 2i and 2i+1 of a head on file are columns i and H/2+i here."""
HALVED = Transform(LINEAR.file_shape, _halve, lambda leaf, spec: LINEAR.save(leaf * leaf.dtype.type(2), spec))
ROWS = Transform(
    lambda spec: (spec.shape[0], int(np.prod(spec.shape[1:]))),
    AS_IS.load,
    lambda leaf, spec: leaf.reshape(len(leaf), -1),
)
"""One row a token, its heads one beside the other."""
