"""Declarations of parameters: starts that depend on nothing but key and path, shapes, groups."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import RULES, assert_same_bits, small_model

from elr_jax import parameters
from elr_jax.config import LoopRule, MLPConfig
from elr_jax.params import ParamSpec, count_params, init_params, matrix, orthogonal, truncated_normal, vector

KEY = jax.random.key(1)


def by_path(tree):
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def test_one_more_parameter_changes_no_other():
    plain, rich = (
        by_path(parameters.init(KEY, small_model(rule))) for rule in (LoopRule(update="replace"), RULES["parcae"])
    )
    assert plain.keys() < rich.keys()
    assert_same_bits({path: rich[path] for path in plain}, plain)


def test_one_more_layer_changes_no_other():
    """But for the scale of the outputs that join the stream, 1/√(number of layers)."""
    short, long = (by_path(parameters.init(KEY, small_model(LoopRule(), coda=coda))) for coda in ("-", "-*"))
    assert short.keys() < long.keys()
    for path, leaf in short.items():
        joins = path.endswith((".output", ".down"))
        np.testing.assert_allclose(long[path], leaf * math.sqrt(4 / 5) if joins else leaf, rtol=1e-6 if joins else 0)


def test_every_leaf_starts_apart_and_the_same_each_time():
    params = parameters.init(KEY, small_model(RULES["huginn"], core="**", prelude="*"))
    assert_same_bits(parameters.init(KEY, small_model(RULES["huginn"], core="**", prelude="*")), params)
    first = {
        path: leaf.flat[0].item() for path, leaf in by_path(jax.tree.map(np.asarray, params)).items() if leaf.ndim > 1
    }
    assert len(set(first.values())) == len(first)
    other = parameters.init(jax.random.key(2), small_model(RULES["huginn"], core="**", prelude="*"))
    assert (other.embedding != params.embedding).any()


@pytest.mark.parametrize("name", RULES)
def test_parameters_are_what_was_declared(name):
    config = small_model(RULES[name])
    specs, params, shapes = parameters.param_specs(config), parameters.init(KEY, config), parameters.abstract(config)
    assert jax.tree.structure(specs) == jax.tree.structure(params) == jax.tree.structure(shapes)
    for spec, leaf, shape in zip(*map(jax.tree.leaves, (specs, params, shapes)), strict=True):
        assert leaf.shape == spec.shape == shape.shape
        assert leaf.dtype == shape.dtype == jnp.float32
    assert count_params(specs) == sum(leaf.size for leaf in jax.tree.leaves(params))


def test_groups_of_the_optimizer():
    groups = {name: set() for name in ("matrix", "embedding", "vector", "loop")}
    for rule in RULES.values():
        for path, spec in by_path(parameters.param_specs(small_model(rule))).items():
            groups[spec.group].add(path)
    assert groups["embedding"] == {".embedding", ".head"}
    assert all(".mixer." in path for path in groups["matrix"])
    assert groups["vector"] == {".norm", ".loop.inject.norm", ".loop.boundary"} | {
        f".{stack}[{i}].norm" for stack, size in (("prelude", 1), ("core", 2), ("coda", 1)) for i in range(size)
    }
    assert {path for path in groups["loop"] if "inject" not in path} == {
        ".loop.readout", ".loop.update", ".loop.update.weight", ".loop.update.bias", ".loop.update.gain",
    }  # fmt: skip


def test_spread_of_the_starts():
    start = {
        "normal": truncated_normal(0.5)(KEY, (300, 100)),
        "matrix": init_params(KEY, matrix((300, 10, 10), ("a", None, None))),
        "two inputs": init_params(KEY, matrix((30, 10, 100), ("a", "b", "c"), inputs=2, gain=0.5)),
    }
    for name, std in (("normal", 0.5), ("matrix", 300**-0.5), ("two inputs", 0.5 * 300**-0.5)):
        assert float(jnp.std(start[name])) == pytest.approx(std, rel=0.02), name
        assert float(jnp.abs(start[name]).max()) <= 2 / 0.8796 * std * 1.001, "cut at two standard deviations"
    square = orthogonal(0.6)(KEY, (20, 20))
    np.testing.assert_allclose(square @ square.T, 0.36 * np.eye(20), atol=1e-5)
    assert (init_params(KEY, vector((3,), (None,), 0.25)) == 0.25).all()


def test_outputs_can_start_at_zero():
    params = by_path(parameters.init(KEY, small_model(LoopRule(), residual_init="zero", core="*-")))
    joins = [leaf for path, leaf in params.items() if path.endswith((".output", ".down"))]
    assert len(joins) == 4 and not any(leaf.any() for leaf in joins)


def test_squared_relu_has_no_gate():
    config = small_model(LoopRule(), mlp=MLPConfig(d_ff=12, kind="squared_relu"))
    assert not any("gate" in path for path in by_path(parameters.param_specs(config)))


def test_a_spec_names_every_axis():
    spec = dataclasses.asdict(vector((3,), ("embed",), 1.0))
    with pytest.raises(AssertionError, match="rank"):
        ParamSpec(**{**spec, "axes": ("embed", None)})
