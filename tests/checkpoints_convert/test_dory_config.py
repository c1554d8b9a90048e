"""Both dialects of config.json, their union, and everything that is refused in them."""

import dataclasses
import json

import pytest
from cases import tiny_dory

from checkpoints_convert.dory_config import from_json, to_json
from elr_jax import presets
from elr_jax.config import AttentionConfig, LoopRule, MLPConfig, SphereConfig
from elr_jax.errors import ElrError

ATTENTION = tiny_dory().attention
MODELS = {
    "tiny": tiny_dory(),
    "4b": presets.dory_4b(),
    "one letter": tiny_dory(prelude="", core="*-", coda=""),
    "windows alone": tiny_dory(prelude="S-", core="S-S-", coda=""),
    "tied": tiny_dory(tie_embeddings=True),
    "one base": tiny_dory(attention=dataclasses.replace(ATTENTION, window_rope_base=None)),
    "scales": tiny_dory(sphere=SphereConfig(init_std=0.03, rate_init=0.1, gate_init=2.0)),
    "six loops": tiny_dory(loop=dataclasses.replace(presets.DORY, max_loops=6)),
}
UNPAIRED = {
    "no pairs": tiny_dory(prelude="--S", core="**-", coda="-"),
    "a pair cut": tiny_dory(prelude="*", core="-S-", coda="*-"),
}


def over_json(config, dialect):
    return json.loads(json.dumps(to_json(config, dialect=dialect)))


def read(table, config):
    return from_json(table, max_loops=config.loop.max_loops)


@pytest.mark.parametrize("dialect", ["both", "vllm", "transformers"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_survives_each_dialect(name, dialect):
    config = MODELS[name]
    if dialect == "transformers" and config.sphere.gate_init is not None:
        with pytest.raises(ElrError, match=r"sphere.gate_init=2.0 has no key"):
            to_json(config, dialect=dialect)
        return
    assert read(over_json(config, dialect), config) == config


@pytest.mark.parametrize("name", UNPAIRED)
def test_layers_without_pairs_are_told_in_vllms_dialect(name):
    config = UNPAIRED[name]
    table = over_json(config, "both")
    assert table == over_json(config, "vllm") and "layer_types" not in table
    assert read(table, config) == config
    with pytest.raises(ElrError, match="no pairs"):
        to_json(config, dialect="transformers")


def test_the_dialects_have_their_own_keys():
    vllm, transformers = (set(to_json(tiny_dory(), dialect=dialect)) for dialect in ("vllm", "transformers"))
    assert {"hybrid_layer_pattern", "rope_theta_2", "init_method_std", "swa_window_size"} <= vllm - transformers
    assert {"layer_types", "rope_parameters", "initializer_range", "sliding_window"} == transformers - vllm - {
        "hidden_act"
    }
    assert set(to_json(tiny_dory())) == vllm | transformers


def test_transformers_form_in_memory_counts_blocks():
    table = over_json(tiny_dory(), "transformers")
    table["layer_types"] = table["layer_types"][::2]
    for key in ("num_hidden_layers", "n_input_layers", "n_recurrent_layers", "n_output_layers"):
        table[key] //= 2
    assert read(table, tiny_dory()) == tiny_dory()
    assert read(table | over_json(tiny_dory(), "vllm"), tiny_dory()) == tiny_dory()  # counts of sub-layers win


def test_what_is_absent_takes_the_ports_default():
    vllm = from_json({"dory_format_version": 1})
    assert (vllm.prelude, vllm.core, vllm.coda) == ("", 9 * "S-S-S-*-", "")
    assert vllm.sphere.init_std == 0.02
    assert vllm.attention.base("S") == vllm.attention.base("*") == 10_000
    blocks = from_json({"hidden_act": "silu"})
    assert blocks == presets.dory_4b()
    assert from_json({"sliding_window": 7, "num_hidden_layers": 17, "n_recurrent_layers": None}).core == "S-"
    with pytest.raises(ElrError, match=r"init_method_std is absent.*0.02 in vllm and 0.0177.*neither hybrid_layer"):
        from_json({})


def test_loops_and_embedding_norm():
    table = over_json(tiny_dory(), "both")
    assert from_json(table).loop == presets.DORY
    assert from_json(table | {"n_recurrent_loops": 9}).loop.max_loops == 9
    assert from_json(table | {"n_recurrent_loops": 9}, max_loops=2).loop.max_loops == 2
    assert from_json(table).sphere.embedding_norm is False
    assert from_json(table, embedding_norm=True).sphere.embedding_norm is True


def test_further_keys_are_kept():
    base = {"bos_token_id": 1, "n_recurrent_loops": 3, "recurrent_kv_cache_mode": "last_loop", "vocab_size": 5}
    table = to_json(tiny_dory(), base=base)
    assert (table["bos_token_id"], table["n_recurrent_loops"], table["vocab_size"]) == (1, 3, 61)
    assert table["recurrent_kv_cache_mode"] == "last_loop"
    assert to_json(tiny_dory())["n_recurrent_loops"] == 2


CONTRADICTIONS = {
    "head_dim": (9, "attention_head_dim=8 contradicts head_dim=9"),
    "sliding_window": (6, "swa_window_size=5 contradicts sliding_window=6"),
    "initializer_range": (0.02, "init_method_std=0.0177 contradicts initializer_range=0.02"),
    "hybrid_layer_pattern": ("*-*-S-S-*-*-", "hybrid_layer_pattern='.*' contradicts layer_types=.*"),
    "rope_theta_2": (5.0, "rope_theta_2=5.0 contradicts rope_parameters.full_attention.rope_theta=10000000.0"),
    "rope_theta": (5, "rope_theta=5 contradicts rope_parameters.sliding_attention.rope_theta=10000.0"),
    "rope_profile_layers": ([1] * 12, "rope_theta=10000.0 contradicts rope_parameters.full_attention"),
    "swa_head_dim": (16, "swa_head_dim=16 differs from attention_head_dim=8"),
    "swa_num_attention_heads": (2, "swa_num_attention_heads=2 differs"),
    "num_hidden_layers": (11, "num_hidden_layers=11 contradicts hybrid_layer_pattern"),
    "n_output_layers": (4, "n_output_layers=4 .* contradicts the 12 layers"),
}
UNSUPPORTED = {
    "model_type": "llama",
    "dory_format_version": 2,
    "fngpt": False,
    "ngpt": 1,
    "ngpt_enable_final_norm": True,
    "attention_output_gate": False,
    "attention_bias": True,
    "mlp_bias": True,
    "hidden_act": "gelu",
    "mlp_hidden_act": "relu2",
    "partial_rotary_factor": 0.5,
    "partial_rotary_factor_2": 0.5,
    "initial_state": "zero",
    "input_transform": "none",
    "output_transform": "residual",
    "mixer_type": "mamba",
    "rope_scaling": {"type": "yarn"},
    "quantization_config": {"quant_method": "fp8"},
    "recurrent_kv_cache_mode": "first_loop",
    "no_rope_layers": [0] * 11 + [1],
    "rope_profile_layers": [0] * 12,
    "hybrid_layer_pattern": "S-M-",
    "layer_types": ["linear_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "vocab_size": "61",
    "hidden_size": 32.0,
    "ngpt_alpha_init": True,
    "tie_word_embeddings": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 0,
    "init_method_std": -1,
    "n_recurrent_loops": 0,
    "n_input_layers": -2,
    "rope_theta": "1e4",
}


@pytest.mark.parametrize("key", CONTRADICTIONS)
def test_contradictions_name_both_keys_and_values(key):
    value, words = CONTRADICTIONS[key]
    with pytest.raises(ElrError, match=words) as told:
        from_json(over_json(tiny_dory(), "both") | {key: value}, name="x/config.json")
    assert str(told.value).startswith("x/config.json: ") and "\n" not in str(told.value)


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_what_the_model_can_not_be_is_refused_with_its_value(key):
    table = over_json(tiny_dory(), "transformers" if key.startswith("num_") else "both")
    table.pop("initializer_range" if key == "init_method_std" else "", None)
    told = {"num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads", "init_method_std": "init_std"}
    with pytest.raises(ElrError) as error:
        from_json(table | {key: UNSUPPORTED[key]})
    assert f"{told.get(key, key)}={UNSUPPORTED[key]!r}" in str(error.value)


def test_other_types_of_rotary_positions_are_refused():
    table = over_json(tiny_dory(), "transformers")
    table["rope_parameters"]["full_attention"]["rope_type"] = "yarn"
    with pytest.raises(ElrError, match=r"rope_parameters.full_attention.rope_type='yarn'"):
        from_json(table)


def test_layers_of_one_kind_share_their_base():
    table = over_json(tiny_dory(), "vllm")
    table["rope_profile_layers"][2] = 1
    with pytest.raises(ElrError, match=r"rope_theta=10000.0|rope_theta_2=10000000.0"):
        from_json(table)


def test_a_split_through_a_pair_contradicts_layer_types():
    table = over_json(tiny_dory(), "both") | {"n_input_layers": 3, "n_recurrent_layers": 7}
    with pytest.raises(ElrError, match="cuts a pair"):
        from_json(table)


def test_all_problems_are_told_at_once():
    bad = {"fngpt": False, "head_dim": 9, "hidden_size": "x", "n_output_layers": 0, "no_rope_layers": [1] * 12}
    with pytest.raises(ElrError) as told:
        from_json(over_json(tiny_dory(), "both") | bad)
    assert all(key in str(told.value) for key in bad)


NO_DORY = {
    "loop": {"loop": LoopRule()},
    "sphere": {"sphere": None},
    "mlp.kind": {"mlp": MLPConfig(d_ff=48, kind="squared_relu")},
    "attention.qk_norm": {"attention": dataclasses.replace(ATTENTION, qk_norm=True)},
    "attention.rope_base": {"attention": AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, rope_base=None)},
    "norm_eps": {"norm_eps": 1e-5},
}


@pytest.mark.parametrize("name", NO_DORY)
def test_other_models_have_no_config_json(name):
    with pytest.raises(ElrError, match=f"no Dory, by its {name}:"):
        to_json(tiny_dory(**NO_DORY[name]))
