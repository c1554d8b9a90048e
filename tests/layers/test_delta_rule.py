"""The gated delta product: three forms of one recurrence, and the recurrence against float64 and PyTorch's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_close, assert_same_bits
from delta_draws import draw, pulled
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params

from elr_jax.layers.delta_rule import RESET, chunk_tokens, chunked, read, rule_flops, sequential, step
from elr_jax.layers.triangular import unit_lower_inverse


@pytest.mark.parametrize("length, steps", [(1, 3), (5, 1), (70, 1), (70, 3)])
def test_all_forms_are_the_definition_in_value_and_gradient(length, steps):
    """Within one chunk and over several, the last not full, from a state that is not zero."""
    inputs = draw(length, steps)
    assert length <= 5 or length > chunk_tokens(length, steps)
    expected = pulled(sequential, *inputs)
    for form in (chunked, step):
        assert_close(pulled(form, *inputs), expected, rtol=2e-6)


@pytest.mark.slow
@settings(max_examples=20)
@given(st.integers(1, 90), st.integers(1, 5))
def test_any_length_and_number_of_steps(length, steps):
    inputs = draw(length, steps, seed=length)
    for form in (chunked, step):
        assert_close(jax.jit(form)(*inputs), jax.jit(sequential)(*inputs), rtol=2e-6)


@pytest.mark.parametrize("form", [sequential, chunked, step])
def test_a_reset_begins_anew(form):
    """Documents of one row are rows of their own, and have no gradient of each other."""
    length, cut = 75, 33
    *inputs, state = draw(length, 2)
    inputs[4][:, cut] = RESET
    out, end = jax.jit(form)(*inputs, state)
    first, _ = jax.jit(form)(*(x[:, :cut] for x in inputs), state)
    second, alone = jax.jit(form)(*(x[:, cut:] for x in inputs), np.zeros_like(state))
    assert_close((out[:, :cut], out[:, cut:], end), (first, second, alone), rtol=2e-6)

    def after(*inputs):
        out, end = form(*inputs)
        return jnp.sum(out[:, cut:] ** 2) + jnp.sum(end**2)

    gradient = jax.jit(jax.grad(after, argnums=range(6)))(*inputs, state)
    for leaf in gradient[:4]:
        assert not leaf[:, :cut].any() and leaf[:, cut + 1 :].any()
    assert not gradient[5].any(), "the state before"
    fades = jnp.abs(gradient[4])  # differences of sums, so zero but for their rounding
    assert fades[:, : cut + 1].max() <= 1e-6 * fades.max()


@pytest.mark.parametrize("form", [sequential, chunked, step])
def test_tokens_without_step_and_decay_leave_the_state_bit_for_bit(form):
    q, k, v, beta, g, state = draw(40, 3)
    new = np.array([0, 17])
    padding = np.arange(40) >= new[:, None]
    beta[padding], g[padding] = 0, 0
    run = jax.jit(form)
    _, end = run(q, k, v, beta, g, state)
    assert_same_bits(end[0], state[0])
    _, other = run(
        q, np.where(padding[..., None, None, None], 3, k), v + padding[..., None, None, None], beta, g, state
    )
    assert_same_bits(other, end)
    short = slice(1, 2), slice(0, 17)
    assert_close(end[1:], run(*(x[short] for x in (q, k, v, beta, g)), state[1:])[1], rtol=2e-6)


@pytest.mark.parametrize("length", [7, 70])
def test_what_was_read_can_be_done_to_another_state(length):
    *inputs, state = draw(length, 2)
    other = 2 - state
    out, update = jax.jit(read)(*inputs, state)
    assert_close(out, jax.jit(sequential)(*inputs, state)[0], rtol=2e-6)
    assert_close(update(other), jax.jit(sequential)(*inputs, other)[1], rtol=2e-6)
    slots = update(jnp.stack([other, state]))
    assert_close(slots[1], jax.jit(sequential)(*inputs, state)[1], rtol=2e-6)


def test_a_call_keeps_no_more_than_a_state_however_long_it_is():
    sizes = []
    for length in (200, 2000):
        inputs = jax.eval_shape(lambda length=length: draw(length, 2))
        sizes.append(sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(read, *inputs)[1])))
    assert sizes[0] == sizes[1] == 2 * 2 * (5 * (2 * 5 + 4) + 1)


@pytest.mark.parametrize("size", [1, 6, 7, 9, 48, 96])
def test_the_inverse_of_the_hardest_matrix(size):
    """One key again and again with β = 2 and no decay: powers of the matrix reach 10²⁷, its inverse never exceeds 2."""
    a = jnp.tril(jnp.full((size, size), 2.0), -1)
    inverse = unit_lower_inverse(a)
    signs = (-1.0) ** np.subtract.outer(np.arange(size), np.arange(size))
    np.testing.assert_allclose(inverse, np.tril(2 * signs, -1) + np.eye(size), atol=1e-6)
    tangent = jnp.tril(jax.random.normal(jax.random.key(0), (size, size)), -1)
    moved = jax.jvp(unit_lower_inverse, (a,), (tangent,))[1]
    np.testing.assert_allclose(moved, -inverse @ tangent @ inverse, atol=1e-3)


def float64_reference(q, k, v, beta, g, state):
    q, k, v, beta, g, state = (np.asarray(x, np.float64) for x in (q, k, v, beta, g, state))
    out = np.empty((*q.shape[:3], v.shape[-1]))
    for t in range(q.shape[1]):
        state = np.exp(g[:, t])[..., None, None] * state
        for j in range(k.shape[2]):
            missing = v[:, t, j] - np.einsum("bnh,bnhv->bnv", k[:, t, j], state)
            state = state + np.einsum("bn,bnh,bnv->bnhv", beta[:, t, j], k[:, t, j], missing)
        out[:, t] = np.einsum("bnh,bnhv->bnv", q[:, t], state) / q.shape[-1] ** 0.5
    return out, state


DECAYS = {
    "near 0": lambda rng, shape: rng.uniform(-700, -8, shape),
    "near 1": lambda rng, shape: -np.exp(rng.uniform(-14, -6, shape)),
    "none": lambda rng, shape: np.zeros(shape),
    "both": lambda rng, shape: np.where(rng.uniform(size=shape) < 0.2, -rng.uniform(20, 900, shape), -1e-4),
}


@pytest.mark.parametrize("decays", DECAYS)
@pytest.mark.parametrize(
    "length, steps, rtol", [(300, 2, 1e-5), *(pytest.param(4096, n, 1e-4, marks=pytest.mark.slow) for n in (1, 3))]
)
def test_long_sequences_stay_with_float64(length, steps, rtol, decays):
    inputs = list(draw(length, steps, batch=1, key=16, value=16))
    inputs[4] = DECAYS[decays](np.random.default_rng(1), inputs[4].shape).astype(np.float32)
    for actual, expected in zip(jax.jit(chunked)(*inputs), float64_reference(*inputs), strict=True):
        assert np.abs(actual - expected).max() <= rtol * max(1, np.abs(expected).max())


def as_one_sequence(torch, q, k, v, beta, g, state):
    """P pseudo-tokens for each token, the decay on the first and the query on the last."""
    batch, length, steps, heads, key = k.shape
    ask, fade = torch.zeros(batch, length, steps, heads, key), torch.zeros(batch, length, steps, heads)
    ask[:, :, -1], fade[:, :, 0] = q, g
    flat = [x.reshape(batch, length * steps, *x.shape[3:]) for x in (ask, k, v, fade, beta)]

    def run(function):
        out, end = function(*flat, initial_state=state, output_final_state=True)
        return out.reshape(v.shape)[:, :, -1], end

    return run


@pytest.mark.parity
@pytest.mark.parametrize("most_beta", [1.0, 2.0])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_parity_with_torch_in_value_and_gradient(steps, most_beta):
    """Two calls, the second from the first one's state, against PyTorch's chunked and recurrent forms."""
    torch = pytest.importorskip("torch")
    peer = pytest.importorskip("transformers.models.olmo_hybrid.modeling_olmo_hybrid")
    length, cut = 150, 83
    inputs = draw(length, steps, most_beta=most_beta, key=16, value=8)

    def calls(*inputs):
        *tokens, state = inputs
        first, state = chunked(*(x[:, :cut] for x in tokens), state)
        second, state = chunked(*(x[:, cut:] for x in tokens), state)
        return jnp.concatenate([first, second], axis=1), state

    found = pulled(calls, *inputs)
    for oracle in (peer.torch_chunk_gated_delta_rule, peer.torch_recurrent_gated_delta_rule):
        theirs = [torch.tensor(x, requires_grad=True) for x in inputs]
        out, end = as_one_sequence(torch, *theirs)(oracle)
        torch.autograd.backward((out, end), (out.detach().cos(), end.detach().sin()))
        expected = (out.detach(), end.detach(), *(x.grad for x in theirs))
        assert_close(found, tuple(jnp.asarray(x.numpy()) for x in expected), rtol=1e-5)


def test_time_grows_with_the_length():
    """Operations and memory of value and gradient; the sequence's square would be by far the largest array."""
    flops = [rule_flops(length, steps=2, key_dim=64, value_dim=64) * length for length in (2048, 4096)]
    assert flops[1] == 2 * flops[0]
    sizes = []
    for length in (1024, 2048):
        inputs = jax.eval_shape(lambda length=length: draw(length, 2, batch=1, heads=1, key=4, value=4))
        jaxpr = jax.make_jaxpr(lambda *x: pulled(chunked, *x))(*inputs)
        sizes.append(max(array.size for array in arrays(jaxpr.jaxpr)))
    assert sizes[1] == 2 * sizes[0]


def arrays(jaxpr):
    for equation in jaxpr.eqns:
        yield from (var.aval for var in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from arrays(inner)
