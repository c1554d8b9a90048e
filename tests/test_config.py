"""Configs: what is refused, in one line with value and mend, and the way through JSON."""

import dataclasses
import json

import pytest
from cases import RULES, small_model
from hypothesis import given
from hypothesis import strategies as st

from elr_jax import presets
from elr_jax.config import (
    AttentionConfig,
    ConditioningConfig,
    DeltaProductConfig,
    LoopRule,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    Runtime,
    SphereConfig,
    digest,
    from_dict,
    to_dict,
)
from elr_jax.errors import ElrError

MODEL = small_model(LoopRule(), delta=None)
TOLD = small_model(LoopRule(), conditioning=ConditioningConfig(budget=False, rank=2))
DELTA = {"num_heads": 4, "num_key_heads": 2, "key_dim": 3, "value_dim": 5}
ATTENTION = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4}


def model(**changes):
    return dataclasses.replace(MODEL, **changes)


BAD = [
    (lambda: model(core="*x-"), "core='*x-' has the unknown letter 'x' at 1: use '*' (full attention), 'S' "),
    (lambda: model(prelude="s"), "prelude='s' has the unknown letter 's' at 0: use "),
    (lambda: model(coda="- "), "coda='- ' has the unknown letter ' ' at 1: use "),
    (lambda: model(core=""), "core='' is empty: a looped model needs at least one layer"),
    (lambda: model(vocab_size=0), "vocab_size=0 must be at least 1"),
    (lambda: model(d_model=-8), "d_model=-8 must be at least 1"),
    (
        lambda: model(residual_init="zero", sphere=SphereConfig()),
        "residual_init='zero' has no place on the unit sphere: leave it out there",
    ),
    (
        lambda: model(conditioning=ConditioningConfig(), sphere=SphereConfig()),
        "conditioning has no place on the unit sphere, whose layers have no norm: leave out one",
    ),
    (lambda: ConditioningConfig(width=0), "conditioning.width=0 must be at least 1"),
    (lambda: ConditioningConfig(rank=-1), "conditioning.rank=-1 must be at least 1"),
    (lambda: ConditioningConfig(sinusoids=5), "conditioning.sinusoids=5 is odd: half are sines, half cosines"),
    (lambda: ConditioningConfig(progress=False, budget=False), "conditioning.progress=False and budget=False tell"),
    (
        lambda: ConditioningConfig(scale_shift=False, low_rank=False, rescale=False),
        "conditioning.scale_shift, low_rank and rescale are all False: set one",
    ),
    (lambda: model(residual_init="zeros"), "residual_init='zeros' is unknown: choose one of scaled, zero"),
    (
        lambda: model(core="D-", delta=None),
        "delta=None leaves the D of '*D--' without sizes: give a DeltaProductConfig",
    ),
    (
        lambda: model(core="D-", delta=DeltaProductConfig(**DELTA), sphere=SphereConfig()),
        "sphere has no form of the D in '*D--': use other layers, or sphere=None",
    ),
    (
        lambda: model(core="E", moe=MoEConfig(num_experts=2, top_k=1, d_expert=4), sphere=SphereConfig()),
        "sphere has no form of the E in '*E-': use other layers, or sphere=None",
    ),
    (lambda: model(core="E", moe=None), "moe=None leaves the E of '*E-' without sizes: give a MoEConfig"),
    (
        lambda: model(core="V", attention=dataclasses.replace(MODEL.attention, value_gate_inputs=9)),
        "attention.value_gate_inputs=9 is more than d_model=8: a V layer has no more inputs",
    ),
    (lambda: DeltaProductConfig(**DELTA | {"householder": 0}), "delta.householder=0 must be at least 1"),
    (
        lambda: DeltaProductConfig(**DELTA | {"num_key_heads": 3}),
        "delta.num_heads=4 is not a multiple of num_key_heads=3: every key head serves the same number of heads",
    ),
    (
        lambda: DeltaProductConfig(**DELTA, norm="layer"),
        "delta.norm='layer' is unknown: choose one of group, head",
    ),
    (lambda: MLPConfig(d_ff=0), "mlp.d_ff=0 must be at least 1"),
    (lambda: MLPConfig(d_ff=8, kind="gelu"), "mlp.kind='gelu' is unknown: choose one of swiglu, squared_relu"),
    (
        lambda: AttentionConfig(**{**ATTENTION, "num_heads": 5}),
        "attention.num_heads=5 is not a multiple of num_kv_heads=2",
    ),
    (lambda: AttentionConfig(**{**ATTENTION, "head_dim": 3}), "attention.head_dim=3 is odd: "),
    (lambda: AttentionConfig(**ATTENTION, window=0), "attention.window=0 must be at least 1"),
    (
        lambda: LoopRule(update="add"),
        "loop.update='add' is unknown: choose one of replace, residual, delta, adaptive_delta",
    ),
    (lambda: LoopRule(initial="noise"), "loop.initial='noise' is unknown: choose one of copy, zero, random"),
    (lambda: LoopRule(max_loops=0), "loop.max_loops=0 must be at least 1"),
    (lambda: Runtime(dtype="float16"), "runtime.dtype='float16' is unknown: choose one of float32, bfloat16"),
    (lambda: Runtime(remat="all"), "runtime.remat='all' is unknown: choose one of none, dots, layer, offload, round"),
    (lambda: Runtime(loop="while"), "runtime.loop='while' is unknown: choose one of bounded, scan"),
]


@pytest.mark.parametrize("make, message", BAD, ids=[message.split(" ")[0] for _, message in BAD])
def test_a_bad_value_is_refused_with_the_mend(make, message):
    with pytest.raises(ElrError) as error:
        make()
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "config",
    [
        presets.tiny_text(),
        presets.tiny_text(presets.PLAIN),
        presets.koi_4b(),
        *map(small_model, RULES.values()),
        TOLD,
    ],
)
def test_json_keeps_a_config(config):
    data = to_dict(config)
    assert from_dict(ModelConfig, json.loads(json.dumps(data))) == config


@given(st.sampled_from(sorted(to_dict(MODEL))), st.booleans())
def test_a_missing_or_unknown_key_is_named(key, missing):
    data = to_dict(MODEL)
    value = data.pop(key)
    if not missing:
        data |= {key: value, f"{key}_2": value}
    elif key not in to_dict(MODEL, omit_defaults=True) or key == "loop":
        assert from_dict(ModelConfig, data) == MODEL
        return
    elif key == "moe":  # of a model without E
        assert from_dict(ModelConfig, data) == dataclasses.replace(MODEL, moe=None)
        return
    with pytest.raises(ElrError, match=f"^ModelConfig can't be read: .*{key if missing else key + '_2'}") as error:
        from_dict(ModelConfig, data)
    assert "\n" not in str(error.value)


def test_a_value_refused_by_a_nested_config_is_told_in_one_line():
    data = to_dict(MODEL)
    data["attention"]["window"] = 0
    with pytest.raises(ElrError, match=r"attention.window=0 must be at least 1") as error:
        from_dict(ModelConfig, data)
    assert "\n" not in str(error.value)


def test_what_was_chosen_is_told_without_the_defaults():
    chosen = to_dict(MODEL, omit_defaults=True)
    assert "norm_eps" not in chosen and "norm_eps" in to_dict(
        dataclasses.replace(MODEL, norm_eps=0.1), omit_defaults=True
    )
    assert from_dict(ModelConfig, chosen) == MODEL


def test_a_digest_follows_values_and_not_their_order():
    assert digest({"a": 1, "b": [2, 3]}) == digest({"b": [2, 3], "a": 1})
    assert len({digest(to_dict(small_model(rule))) for rule in RULES.values()}) == len(RULES)
