"""The delta rule's TPU kernels, interpreted, against the definition and the XLA form."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_close, assert_same_bits
from delta_draws import draw, pulled
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import interpreted
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from elr_jax.errors import ElrError
from elr_jax.layers.delta_rule import RESET, chunked, sequential
from pallas_kernels.contract import Choice
from pallas_kernels.delta_rule import api, delta_rule
from pallas_kernels.interpret import plain_interpreter

kernel = partial(delta_rule, implementation="pallas_tpu")


def check(inputs, interpreter=plain_interpreter):
    expected = pulled(sequential, *inputs)
    with interpreter():
        assert_close(pulled(kernel, *inputs), expected, rtol=3e-6)


@pytest.mark.parametrize(
    "length, steps, sizes",
    [(40, 3, {}), pytest.param(3, 1, {"batch": 1, "heads": 3, "key": 4, "value": 130}, marks=pytest.mark.slow)],
    ids=["chunks", "one"],
)
def test_values_and_gradients(length, steps, sizes):
    """Over several chunks, the last not full, and in one; from a state that is not zero."""
    check(draw(length, steps, **sizes))


@pytest.mark.slow
@pytest.mark.parametrize(
    "length, steps, sizes",
    [
        (70, 3, {}),
        (300, 1, {"batch": 1, "heads": 5, "key": 128, "value": 128}),
        (33, 8, {"batch": 1, "heads": 8, "key": 256, "value": 12}),
    ],
    ids=["small", "square", "wide"],
)
def test_no_step_of_the_grid_touches_anothers_memory(length, steps, sizes):
    check(draw(length, steps, **sizes), interpreted)


@pytest.mark.slow
@settings(max_examples=4)
@given(st.integers(1, 2), st.integers(1, 80), st.integers(1, 8), st.integers(1, 6), st.integers(16, 256))
def test_any_shape(batch, length, steps, heads, width):
    """Without keys of few dimensions, where many steps forget all: gradients are rounding there, in every form."""
    check(draw(length, steps, batch=batch, heads=heads, key=width, value=257 - width, seed=length))


def test_a_reset_begins_anew():
    """Documents of one row are rows of their own, and have no gradient of each other."""
    cut = 33
    *inputs, state = draw(75, 2, batch=1)
    inputs[4][:, cut] = RESET

    def after(*inputs):
        out, end = kernel(*inputs)
        return jnp.sum(out[:, cut:] ** 2) + jnp.sum(end**2), (out, end)

    with plain_interpreter():
        gradient, (out, end) = jax.jit(jax.grad(after, argnums=range(6), has_aux=True))(*inputs, state)
    second, alone = sequential(*(x[:, cut:] for x in inputs), np.zeros_like(state))
    assert_close((out[:, cut:], end), (second, alone), rtol=3e-6)
    for leaf in gradient[:4]:
        assert not leaf[:, :cut].any() and leaf[:, cut + 1 :].any()
    assert not gradient[5].any(), "the state before"


def test_tokens_without_step_and_decay_leave_the_state_bit_for_bit():
    q, k, v, beta, g, state = draw(40, 3, heads=1)
    padding = np.arange(40) >= np.array([0, 17])[:, None]
    beta[padding], g[padding] = 0, 0
    with plain_interpreter():
        run = jax.jit(kernel)
        _, end = run(q, k, v, beta, g, state)
        other = run(
            q, np.where(padding[..., None, None, None], 3, k), v + padding[..., None, None, None], beta, g, state
        )
    assert_same_bits(end[0], state[0])
    assert_same_bits(other[1], end)


@pytest.mark.slow
def test_values_in_bfloat16_have_gradients_in_bfloat16():
    q, k, v, *rest = draw(20, 2, batch=1, key=8, value=8)
    inputs = (q, k, jnp.asarray(v, jnp.bfloat16), *rest)
    expected = pulled(chunked, *inputs)
    with plain_interpreter():
        found = pulled(kernel, *inputs)
    assert [x.dtype for x in found] == [x.dtype for x in expected]
    assert_close(found[:2], expected[:2], rtol=3e-6)
    np.testing.assert_allclose(*(np.asarray(x[4], np.float32) for x in (found, expected)), rtol=1e-2, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrapped",
    [
        lambda form: jax.checkpoint(form, policy=jax.checkpoint_policies.nothing_saveable),
        lambda form: jax.vmap(lambda *row: jax.tree.map(lambda x: x[0], form(*(x[None] for x in row)))),
        lambda form: lambda *x: jax.lax.scan(lambda s, _: form(*x[:5], s)[::-1], x[5], None, length=2)[::-1],
    ],
    ids=["remat", "vmap", "scan"],
)
def test_transformations(wrapped):
    inputs = draw(20, 2)
    expected = pulled(wrapped(chunked), *inputs)
    with plain_interpreter():
        assert_close(pulled(wrapped(kernel), *inputs), expected, rtol=3e-6)


TOKENS, STEPS, STATE = (PartitionSpec("rows", *[None] * count, "heads") for count in (1, 2, 0))
SPECS, RESULTS = (TOKENS, STEPS, STEPS, STEPS, TOKENS, STATE), (TOKENS, STATE)


def test_shards_of_batch_and_heads_keep_their_axes():
    """Kernels are traced under `shard_map` with its check of varying axes on; interpreters can't be, hence no run."""
    inputs = draw(20, 2, heads=4)
    mesh = AbstractMesh((2, 2), ("rows", "heads"), axis_types=(AxisType.Auto,) * 2)
    sharded = jax.shard_map(kernel, mesh=mesh, in_specs=SPECS, out_specs=RESULTS)
    loss = lambda *x: sum(jnp.sum(y) for y in sharded(*x))
    traced = jax.make_jaxpr(jax.grad(loss, argnums=range(6)))(*inputs)
    assert [aval.shape for aval in traced.out_avals] == [x.shape for x in inputs]
    assert str(traced).count("pallas_call") == 2


@pytest.mark.slow
def test_a_shard_is_its_part():
    inputs = draw(20, 2, heads=4)
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("rows", "heads"))
    sharded = jax.shard_map(kernel, mesh=mesh, in_specs=SPECS, out_specs=RESULTS, check_vma=False)
    with plain_interpreter():
        found = jax.jit(sharded)(*inputs)
    assert_close(found, chunked(*inputs), rtol=3e-6)


def test_a_kernel_nobody_named_gives_way_on_another_platform():
    """The same gradients of the XLA form, though the kernel would have kept states for its own."""
    inputs = draw(20, 2, batch=1)
    choice = Choice(op="delta_rule", implementation="pallas_tpu", named=False)
    assert_close(pulled(partial(api._differentiable, choice), *inputs), pulled(chunked, *inputs), rtol=1e-6)


@pytest.mark.parametrize(
    "steps, sizes, name, reason",
    [
        (1, {"key": 300}, "pallas_tpu", "the key width 300 is above 256"),
        (1, {"value": 300}, "pallas_tpu", "the value width 300 is above 256"),
        (9, {}, "pallas_tpu", "9 Householder steps are above 8"),
        (1, {}, "pallas_gpu", "it has no kernel for GPUs"),
    ],
)
def test_a_kernel_that_cannot_run_says_why(steps, sizes, name, reason):
    with pytest.raises(ElrError, match=reason):
        delta_rule(*draw(1, steps, **sizes), implementation=name)


def test_other_types_are_refused():
    q, *rest = draw(1, 1, batch=1)
    with pytest.raises(ElrError, match="operands are float16, and kernels take float32 or bfloat16"):
        kernel(q.astype(np.float16), *rest)
