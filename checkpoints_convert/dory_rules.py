"""Where each tensor of a Dory checkpoint belongs: one table of names and transforms for all namings and both ways.

A row is a leaf of the parameters, what its tensor is to it, and the tensor's name in each naming. `{layer}` is a
sub-layer, counted from 0 over prelude, core and coda; `{block}` is a pair of attention and MLP.

| naming | found in |
|---|---|
| `released` | the published file |
| `transformers` | what `save_pretrained` of transformers writes |
| `state_dict` | what `state_dict()` of its model gives |
"""

import re
from typing import Literal, NamedTuple, get_args

from checkpoints_convert.leaves import AS_IS, FLAT, LINEAR, Slot, Transform, leaf_specs
from elr_jax.config import ModelConfig

Layout = Literal["released", "transformers", "state_dict"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)

IGNORED = re.compile(r"rotary_emb\.(?:\w+_)?(?:original_)?inv_freq$")
"""Buffers that follow from the config; some savers write them."""


class Rule(NamedTuple):
    """One row of the table; `letters` are the layers that have it, empty for the model's own leaves."""

    letters: str
    leaf: str
    transform: Transform
    names: tuple[str, str, str]
    """In the order of `LAYOUTS`."""


def _attention(leaf: str, transform: Transform, released: str, inner: str, state_dict: str | None = None) -> Rule:
    return _layer("*S", leaf, transform, released, inner, state_dict)


def _mlp(leaf: str, transform: Transform, released: str, inner: str) -> Rule:
    return _layer("-", leaf, transform, released, inner)


def _layer(
    letters: str, leaf: str, transform: Transform, released: str, inner: str, state_dict: str | None = None
) -> Rule:
    names = (
        f"backbone.layers.{{layer}}.{released}",
        f"backbone.layers.{{block}}.{inner}",
        f"model.layers.{{block}}.{state_dict or inner}",
    )
    return Rule(letters, leaf, transform, names)


RULES = (
    Rule(
        "",
        "embedding",
        AS_IS,
        ("backbone.embeddings.weight", "backbone.embeddings.weight", "model.embed_tokens.weight"),
    ),
    Rule("", "head", LINEAR, ("lm_head.weight", "lm_head.weight", "lm_head.weight")),
    Rule("", "logit_scale", AS_IS, ("lm_head.logit_scale", "lm_head.logit_scale", "lm_head.logit_scale")),
    _attention("rate", AS_IS, "attn_alpha", "lambda_1"),
    _attention("mixer/query", LINEAR, "mixer.q_proj.weight", "self_attn.q_proj.weight"),
    _attention("mixer/key", LINEAR, "mixer.k_proj.weight", "self_attn.k_proj.weight"),
    _attention("mixer/value", LINEAR, "mixer.v_proj.weight", "self_attn.v_proj.weight"),
    _attention("mixer/output", LINEAR, "mixer.o_proj.weight", "self_attn.o_proj.weight"),
    _attention(
        "mixer/sphere/gate", LINEAR, "mixer.g_proj.weight", "self_attn.g_proj.weight", "self_attn.gate_proj.weight"
    ),
    _attention("mixer/sphere/query_scale", FLAT, "mixer.sqk", "self_attn.sqk"),
    _attention("mixer/sphere/gate_scale", FLAT, "mixer.s_gate", "self_attn.s_gate"),
    _mlp("rate", AS_IS, "mlp_alpha", "lambda_2"),
    _mlp("mixer/gate", LINEAR, "mixer.gate_proj.weight", "mlp.gate_proj.weight"),
    _mlp("mixer/up", LINEAR, "mixer.up_proj.weight", "mlp.up_proj.weight"),
    _mlp("mixer/down", LINEAR, "mixer.down_proj.weight", "mlp.down_proj.weight"),
    _mlp("mixer/gate_scale", AS_IS, "mixer.suv_gate", "mlp.suv_gate"),
    _mlp("mixer/up_scale", AS_IS, "mixer.suv_up", "mlp.suv_up"),
)


def slots(config: ModelConfig, layout: Layout) -> dict[str, Slot]:
    """Every tensor of a model's checkpoint by its name in one naming; empty where the naming can't tell its layers."""
    if layout != "released" and not in_pairs(config):
        return {}
    specs = leaf_specs(config)
    number = LAYOUTS.index(layout)
    found = {}
    for layer, (place, letter) in enumerate(_places(config)):
        for rule in RULES:
            if letter in rule.letters if rule.letters else layer == 0:
                leaf = f"{place}/{rule.leaf}" if rule.letters else rule.leaf
                if leaf in specs:  # a tied model has no head
                    name = rule.names[number].format(layer=layer, block=layer // 2)
                    found[name] = Slot(leaf, specs[leaf], rule.transform)
    assert {slot.leaf for slot in found.values()} == set(specs), "a leaf has no rule"
    return found


def in_pairs(config: ModelConfig) -> bool:
    """Whether every attention layer is followed by an MLP in its own section, as transformers has it."""
    return all(re.fullmatch("([*S]-)*", section) for section in (config.prelude, config.core, config.coda))


def _places(config: ModelConfig) -> list[tuple[str, str]]:
    """Path and letter of every layer."""
    return [
        (f"{section}/{index}", letter)
        for section in ("prelude", "core", "coda")
        for index, letter in enumerate(getattr(config, section))
    ]
