"""The bounded loop as a function of its own: any carry, any operands, its range of gradients and what it keeps."""

import math
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import RULES, assert_close, assert_same_bits, small_model
from jax.extend.core import jaxprs_in_params

from elr_jax import model, parameters
from elr_jax.config import Runtime
from elr_jax.residual import POLICIES
from elr_jax.rounds import bounded_rounds, scan_rounds


def body(i, carry, operands):
    """Integers ride along in carry and operands; a carry counts the rounds."""
    state, count = carry
    weights, (shift, bias) = operands
    return {"next": jnp.sin(state["next"] @ weights + bias * i) + jnp.roll(state["next"], shift, 0)}, count + shift


CARRY = {"next": jnp.arange(12.0).reshape(3, 4) / 7}, jnp.int32(0)
OPERANDS = jnp.eye(4) / 2 + 0.1, (jnp.int32(1), jnp.arange(4.0))


@jax.jit
def bounded(last, carry, operands):
    return pulled(lambda c, o: bounded_rounds(body, 5, last, c, o), carry, operands)


def pulled(function, carry, operands):
    (state, count), pull = jax.vjp(function, carry, operands)
    zero = jnp.zeros((), jax.dtypes.float0)
    (into, _), (weights, (_, bias)) = pull(({"next": jnp.cos(state["next"])}, zero))
    return state, count, into, weights, bias


def test_any_trip_count_is_a_loop_of_that_length():
    for last in range(1, 6):
        unrolled = pulled(lambda c, o, n=last: scan_rounds(body, n, c, o), CARRY, OPERANDS)
        assert_close(bounded(last, CARRY, OPERANDS), unrolled, rtol=1e-5)


def test_no_round_is_the_identity():
    state, count, into, weights, bias = bounded(0, CARRY, OPERANDS)
    assert_same_bits((state, count), CARRY)
    assert_same_bits(into, {"next": jnp.cos(CARRY[0]["next"])})
    assert not weights.any() and not bias.any()


def test_gradients_of_bfloat16_operands_are_summed_in_float32():
    """64 additions of 2⁻⁸ to 1 would all be lost in bfloat16."""

    def add(i, carry, gain):
        return carry + gain.astype(jnp.float32) * jnp.where(i == 63, 1.0, 2.0**-8)

    gradient = jax.grad(lambda gain: bounded_rounds(add, 64, jnp.int32(64), jnp.float32(0), gain))
    assert float(gradient(jnp.bfloat16(1))) == 1.25


def buffers(config, runtime):
    """Everything that a gradient's loops carry with a leading axis of the rounds."""
    tokens, depth = jnp.zeros((2, 7), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)

    def loss(params, depth):
        return model.apply(params, tokens, depth, config=config, runtime=runtime, key=jax.random.key(0)).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss))(parameters.abstract(config), depth).jaxpr
    found = [var.aval for var in loop_carries(jaxpr)]
    return [aval for aval in found if aval.ndim > 1 and aval.shape[0] == config.loop.max_loops]


def stored(config, runtime, spaces=tuple(jax.memory.Space)):
    """Their shapes without that axis, of those in these memories."""
    return [aval.shape[1:] for aval in buffers(config, runtime) if aval.memory_space in spaces]


def loop_carries(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "while":
            yield from equation.outvars
        for inner in jaxprs_in_params(equation.params):
            yield from loop_carries(inner)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("remat", ["none", *POLICIES])
@pytest.mark.parametrize("name", ["elr", "parcae", "huginn"])
def test_weights_are_not_kept_once_more_in_every_round(name, remat, dtype):
    """11 rounds, and no size of a weight (8, 12, 2·4, 4·4) is a size of the activations, 2 rows of 7."""
    rule = RULES[name].__class__(**{**vars(RULES[name]), "max_loops": 11})
    config = small_model(rule, core="*-")
    kept = stored(config, Runtime(remat=remat, dtype=dtype))
    assert (2, 7, 8) in kept
    weights = {leaf.shape for leaf in jax.tree.leaves(parameters.abstract(config)) if leaf.ndim > 1}
    weights |= {(math.prod(shape),) for shape in weights} | {(8, 8), (8, 16), (16, 8)}
    assert not weights & set(kept)
    if remat == "round":
        assert set(kept) <= {(2, 7, 8)}, "only the incoming state"
    elif remat in ("layer", "offload"):
        assert all(math.prod(shape) <= 2 * 7 * 8 for shape in kept), "only what has the size of a state"


@pytest.mark.parametrize("name", RULES)
def test_the_steps_around_the_core_keep_nothing_wide(name):
    """Of a round stay its layers' inputs, the state, and what the core made of it, in the working type: no masks."""
    rule = RULES[name].__class__(**{**vars(RULES[name]), "max_loops": 11})
    config = small_model(rule, core="*-")
    kept = Counter(aval.dtype for aval in buffers(config, Runtime(dtype="bfloat16")) if aval.shape[1:] == (2, 7, 8))
    assert set(kept) == {jnp.dtype("bfloat16")} and kept.total() <= len(config.core) + 2, kept


@pytest.mark.parametrize("core", ["*-", "S-*-"])
def test_offloaded_layers_keep_their_inputs_with_the_host(core):
    """Of the rounds; the loop rule's own residuals stay on the device."""
    config = small_model(RULES["elr"], core=core, prelude="", coda="")
    here, there = jax.memory.Space.Device, jax.memory.Space.Host
    layer, offload = (Runtime(remat=remat) for remat in ("layer", "offload"))
    inputs = len(core) * [(2, 7, 8)]
    assert stored(config, layer, [there]) == []
    assert stored(config, offload, [there]) == inputs
    on_device = Counter(stored(config, layer, [here])) - Counter(stored(config, offload, [here]))
    assert on_device[2, 7, 8] >= len(core) - 1, "the first layer's input may be the state that the rule keeps anyway"


def test_an_array_may_stand_twice_among_the_operands():
    """The residuals are counted twice, once for their shapes: both counts must see the same arrays as the same."""

    def loss(form, x):
        body = lambda i, x, operands: jnp.sin(x * operands["a"])  # the other one is not read
        table = jnp.cos(jnp.arange(2.0) + jnp.max(jnp.array([1, 2])))
        operands = {"a": table, "b": table}
        if form == "scan":
            return jnp.sum(scan_rounds(body, 3, x, operands))
        return jnp.sum(bounded_rounds(body, 3, jnp.int32(3), x, operands))

    x = jnp.array([0.3, 0.7])
    bounded, scan = (jax.jit(jax.grad(partial(loss, form)))(x) for form in ("bounded", "scan"))
    np.testing.assert_allclose(bounded, scan, rtol=1e-6)
