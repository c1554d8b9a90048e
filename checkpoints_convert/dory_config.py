"""Dory's config.json: two dialects and their union, to and from `ModelConfig`.

| | vLLM's port | transformers' port |
|---|---|---|
| layers | `hybrid_layer_pattern` "S-S-S-*-" | `layer_types`, with an "mlp" for each MLP |
| sizes | `attention_head_dim`, `swa_window_size` | `head_dim`, `sliding_window` |
| rotary bases | `rope_theta`, `rope_theta_2`, `rope_profile_layers` | `rope_parameters` |
| start of the scales | `init_method_std` | `initializer_range` |

The other keys are common to both. Layer counts are in sub-layers, or in blocks where `layer_types` leaves the MLPs out
(transformers' form in memory). What a file leaves out, null included, takes the default of the port whose keys it has.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from checkpoints_convert.dory_layers import LETTER_OF, read_layers
from checkpoints_convert.dory_rules import in_pairs
from elr_jax import presets
from elr_jax.config import AttentionConfig, MLPConfig, ModelConfig, SphereConfig
from elr_jax.errors import ElrError

Dialect = Literal["both", "vllm", "transformers"]
Table = Mapping[str, Any]


class Key(NamedTuple):
    """A setting's type, and its key and default in each port."""

    type: type
    vllm: str
    transformers: str
    vllm_default: Any
    transformers_default: Any


def _common(type: type, name: str, default: Any) -> Key:
    return Key(type, name, name, default, default)


KEYS = {
    "vocab_size": _common(int, "vocab_size", 131_072),
    "d_model": _common(int, "hidden_size", 2560),
    "d_ff": _common(int, "intermediate_size", 7168),
    "num_heads": _common(int, "num_attention_heads", 16),
    "num_kv_heads": _common(int, "num_key_value_heads", 4),
    "head_dim": Key(int, "attention_head_dim", "head_dim", 256, 256),
    "window": Key(int, "swa_window_size", "sliding_window", 1024, 1024),
    "max_positions": _common(int, "max_position_embeddings", 8192),
    "init_std": Key(float, "init_method_std", "initializer_range", 0.02, 0.0177),
    "rate_init": _common(float, "ngpt_alpha_init", 0.05),
    "gate_init": _common(float, "attention_output_gate_logit_scale_init", None),
    "tie_embeddings": _common(bool, "tie_word_embeddings", False),
    "loops": Key(int, "n_recurrent_loops", "n_recurrent_loops", 1, 2),
}
REQUIRED = {
    "model_type": "dory",
    "dory_format_version": 1,
    "ngpt": True,
    "fngpt": True,
    "ngpt_enable_final_norm": False,
    "attention_output_gate": True,
    "attention_bias": False,
    "mlp_bias": False,
    "mlp_hidden_act": "silu",
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
    "partial_rotary_factor_2": 1.0,
    "initial_state": "input_copy",
    "input_transform": "residual",
    "output_transform": "replace",
}
"""The one value a key may have, if it is there."""
FORBIDDEN = ("mixer_type", "rope_scaling", "quantization_config")
CACHE_MODES = ("per_loop", "last_loop")
SLIDING_SIZES = {
    "swa_num_attention_heads": "num_heads",
    "swa_num_key_value_heads": "num_kv_heads",
    "swa_head_dim": "head_dim",
}
"""Sizes of `S` layers alone, which have to be those of all."""
VLLM_ONLY = {"hybrid_layer_pattern", "rope_theta", "rope_theta_2", "rope_profile_layers", "no_rope_layers"} | {
    *("dory_format_version", "fngpt", "mlp_hidden_act", "attention_head_dim", "swa_window_size", "init_method_std")
}
TRANSFORMERS_ONLY = {"layer_types", "rope_parameters", "sliding_window", "initializer_range", "hidden_act"}


def from_json(
    data: Table, *, name: str = "config.json", max_loops: int | None = None, embedding_norm: bool | None = None
) -> ModelConfig:
    """The model that a config.json describes, in either dialect or both.

    Args:
        data: the file's table.
        name: what to call the file in an error.
        max_loops: largest loop count of the model; None: 4, or `n_recurrent_loops` if that is more.
        embedding_norm: as in `SphereConfig`; None: False, as vLLM's port.

    Raises:
        ElrError: everything wrong with it in one line: dialects that contradict each other, what this model can't be.
    """
    data = {key: value for key, value in data.items() if value is not None}
    problems = _unsupported(data)
    values = {setting: _value(data, key, problems) for setting, key in KEYS.items()}
    for key, full in SLIDING_SIZES.items():
        if data.get(key, values[full]) != values[full]:
            problems.append(f"{key}={data[key]!r} differs from {KEYS[full].vllm}={values[full]!r} of the other layers")
    layers = read_layers(data, _ports(data), problems)
    if not problems:
        try:
            return _model(values, layers, max_loops, bool(embedding_norm))
        except ElrError as error:
            problems.append(str(error))
    raise ElrError(f"{name}: {'; '.join(problems)}: mend the file, or pick a checkpoint of this architecture")


def to_json(config: ModelConfig, *, dialect: Dialect = "both", base: Table | None = None) -> dict[str, Any]:
    """The config.json of a model, by default for both ports at once.

    A model whose layers are no pairs of attention and MLP is told in vLLM's dialect alone: transformers has no word for
    it. Nor has it one for `gate_init`; it takes √D. `base` gives further keys (token ids, say) and the loop count and
    cache mode to run with, by default 2 loops.

    Raises:
        ElrError: the model is no Dory, or `dialect` is "transformers" and has no word for its layers or gate scale.
    """
    _refuse_other_models(config)
    paired = in_pairs(config)
    if dialect == "transformers" and not paired:
        raise ElrError(f"layers {config.layers!r} are no pairs of attention and MLP: use dialect 'vllm'")
    gate = config.sphere.gate_init if config.sphere else None
    if dialect == "transformers" and gate not in (None, config.d_model**0.5):
        raise ElrError(f"sphere.gate_init={gate} has no key in transformers' dialect, where it is √D: use 'vllm'")
    base = base or {}
    table = {**base, "architectures": ["DoryForCausalLM"], "model_type": "dory", **_common_keys(config, base)}
    if dialect != "transformers":
        table |= _vllm_keys(config)
    if dialect != "vllm" and paired:
        table |= _transformers_keys(config)
    return table


def _ports(data: Table) -> set[str]:
    """Whose keys a file has; those of both where it has neither's."""
    found = {"vllm"} & {"vllm" for key in data if key in VLLM_ONLY}
    found |= {"transformers" for key in data if key in TRANSFORMERS_ONLY}
    return found or {"vllm", "transformers"}


def _unsupported(data: Table) -> list[str]:
    problems = [
        f"{key}={data[key]!r} is not supported, only {only!r}"
        for key, only in REQUIRED.items()
        if key in data and (data[key] != only or isinstance(data[key], bool) != isinstance(only, bool))
    ]
    problems += [f"{key}={data[key]!r} is not supported" for key in FORBIDDEN if key in data]
    mode = data.get("recurrent_kv_cache_mode", CACHE_MODES[0])
    if mode not in CACHE_MODES:
        problems.append(f"recurrent_kv_cache_mode={mode!r} is unknown: one of {', '.join(CACHE_MODES)}")
    return problems


def _value(data: Table, key: Key, problems: list[str]) -> Any:
    """A setting from either key, or its default; what is wrong with it goes to `problems`."""
    given = {name: data[name] for name in (key.vllm, key.transformers) if name in data}
    for name, value in given.items():
        if type(value) not in ((int, float) if key.type is float else (key.type,)):
            problems.append(f"{name}={value!r} is no {key.type.__name__}")
            return value
    if len(set(given.values())) > 1:
        problems.append(" contradicts ".join(f"{name}={value!r}" for name, value in given.items()))
    if given:
        return next(iter(given.values()))
    defaults = {"vllm": key.vllm_default, "transformers": key.transformers_default}
    choices = {defaults[port] for port in _ports(data)}
    if len(choices) > 1:
        told = " and ".join(f"{value} in {port}" for port, value in defaults.items())
        problems.append(f"{key.vllm} is absent and the ports differ in its default ({told}): state it")
    return choices.pop()


def _model(values: dict[str, Any], layers: Any, max_loops: int | None, embedding_norm: bool) -> ModelConfig:
    if values["loops"] < 1:
        raise ElrError(f"n_recurrent_loops={values['loops']} must be at least 1")
    full, window = layers.bases["*"], layers.bases["S"]
    loops = max(presets.DORY.max_loops, values["loops"]) if max_loops is None else max_loops
    return ModelConfig(
        prelude=layers.prelude,
        core=layers.core,
        coda=layers.coda,
        attention=AttentionConfig(
            rope_base=full,
            window_rope_base=window if window != full else None,
            **{name: values[name] for name in ("num_heads", "num_kv_heads", "head_dim", "window")},
        ),
        mlp=MLPConfig(d_ff=values["d_ff"]),
        loop=dataclasses.replace(presets.DORY, max_loops=loops),
        sphere=SphereConfig(
            embedding_norm=embedding_norm, **{name: values[name] for name in ("init_std", "rate_init", "gate_init")}
        ),
        **{name: values[name] for name in ("vocab_size", "d_model", "tie_embeddings", "max_positions")},
    )


def _refuse_other_models(config: ModelConfig) -> None:
    """Name everything a config.json of Dory can't say."""
    rule, attention = dataclasses.replace(presets.DORY, max_loops=config.loop.max_loops), config.attention
    found = {
        "sphere": config.sphere is None,
        "loop": config.loop != rule,
        "mlp.kind": config.mlp.kind != "swiglu",
        "attention.qk_norm": attention.qk_norm,
        "attention.rope_base": attention.rope_base is None,
        "norm_eps": config.norm_eps != 1e-6,
    }
    other = [name for name, differs in found.items() if differs]
    if other:
        raise ElrError(f"no Dory, by its {', '.join(other)}: only presets.dory_4b() and its like can be written as one")


def _common_keys(config: ModelConfig, base: Table) -> dict[str, Any]:
    attention, sphere = config.attention, config.sphere
    assert sphere is not None, "checked"
    table = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.mlp.d_ff,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "ngpt_alpha_init": sphere.rate_init,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "n_input_layers": len(config.prelude),
        "n_recurrent_layers": len(config.core),
        "n_output_layers": len(config.coda),
        "n_recurrent_loops": base.get("n_recurrent_loops", min(2, config.loop.max_loops)),
        "recurrent_kv_cache_mode": base.get("recurrent_kv_cache_mode", CACHE_MODES[0]),
    }
    return table if config.max_positions is None else table | {"max_position_embeddings": config.max_positions}


def _vllm_keys(config: ModelConfig) -> dict[str, Any]:
    attention, sphere = config.attention, config.sphere
    assert sphere is not None, "checked"
    required = {key: value for key, value in REQUIRED.items() if key != "hidden_act"}
    return required | {
        "hybrid_layer_pattern": config.layers,
        "attention_head_dim": attention.head_dim,
        "swa_window_size": attention.window,
        "swa_num_attention_heads": attention.num_heads,
        "swa_num_key_value_heads": attention.num_kv_heads,
        "swa_head_dim": attention.head_dim,
        "rope_theta": attention.base("S"),
        "rope_theta_2": attention.base("*"),
        "rope_profile_layers": [2 if letter == "*" else 1 for letter in config.layers],
        "no_rope_layers": [0] * len(config.layers),
        "init_method_std": sphere.init_std,
        "attention_output_gate_logit_scale_init": sphere.gate_init,
        "mixer_type": None,
    }


def _transformers_keys(config: ModelConfig) -> dict[str, Any]:
    attention, sphere = config.attention, config.sphere
    assert sphere is not None, "checked"
    kinds = {letter: kind for kind, letter in LETTER_OF.items()}
    return {
        "layer_types": [kinds[letter] for letter in config.layers],
        "sliding_window": attention.window,
        "rope_parameters": {
            kinds[letter]: {"rope_type": "default", "rope_theta": attention.base(letter)}
            for letter in sorted(set(config.layers) - {"-"})
        },
        "initializer_range": sphere.init_std,
        "hidden_act": "silu",
    }
