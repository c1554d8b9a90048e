"""Caches of recurrent layers beside attention: calls of any size at any depth against one pass over lists of tokens."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import any_calls, extend, row_of, run_calls
from cases import assert_close, assert_same_bits, perturb, small_model
from delta_reference import delta_layer
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elr_jax import model, parameters
from elr_jax.cache import init_cache
from elr_jax.config import LoopRule
from elr_jax.layers import LAYERS, make_context

KEY = jax.random.key(3)
LOOPS, WIDTH, TOTAL, VOCAB = 3, 5, 14, 13
RULE = LoopRule(initial="copy", inject="residual", update="replace", boundary="unit", max_loops=LOOPS)
HYBRID = small_model(RULE, prelude="", core="D*", coda="")
PARAMS = perturb(jax.jit(parameters.init, static_argnums=1)(KEY, HYBRID), scale=0.2)
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, TOTAL))


@partial(jax.jit, static_argnames="letter")
def whole_layer(x, params, *, letter):
    """A sub-layer's function over a whole sequence [T,D], without a cache."""
    positions = jnp.arange(x.shape[0])[None]
    context = make_context(positions, jnp.zeros_like(positions), HYBRID)
    return LAYERS[letter].apply(x[None], params, context, HYBRID)[0][0]


def rms(x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + HYBRID.norm_eps)


def unit(x):
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + HYBRID.norm_eps)


class Lists:
    """For each layer and slot, what every token so far left: of attention and MLP its input, of `D` see `Left`."""

    def __init__(self, letters, params, slots):
        self.letters, self.params = letters, params
        self.past = [[[] for _ in range(slots(letter))] for letter in letters]

    def run(self, x, i):
        """The stack's output for new tokens in round i, and what they leave in each layer."""
        left = []
        for letter, layer, past in zip(self.letters, self.params, self.past, strict=True):
            inner, seen = rms(x) * np.asarray(layer.norm), past[min(i, len(past) - 1)]
            if letter == "D":
                out, made = delta_layer(inner, layer.mixer, HYBRID, seen)
            else:
                made, count = list(inner), len(seen) + len(inner)
                filled = np.pad(np.array(seen + made, np.float32), ((0, TOTAL - count), (0, 0)))
                out = np.asarray(whole_layer(filled, layer.mixer, letter=letter))[len(seen) : count]
            x = x + out
            left.append(made)
        return x, left

    def add(self, rounds):
        """Slot l gets what round l left, or the last round; the last slot what the last round left."""
        for layer, past in enumerate(self.past):
            for slot in range(len(past)):
                last = slot == len(past) - 1
                past[slot] = past[slot] + rounds[-1 if last else min(slot, len(rounds) - 1)][layer]


def reference(tokens, calls, mode):
    """Logits of one row after calls of (tokens, depth)."""
    one, many = lambda letter: 1, lambda letter: LOOPS if letter == "D" or mode == "per_loop" else 1
    prelude, core, coda = (
        Lists(getattr(HYBRID, name), getattr(PARAMS, name), slots)
        for name, slots in (("prelude", one), ("core", many), ("coda", one))
    )
    start, logits = 0, []
    for count, depth in calls:
        entry, given = prelude.run(np.asarray(PARAMS.embedding)[tokens[start : start + count]], 0)
        prelude.add([given])
        state, rounds = entry, []
        for i in range(depth):
            x, given = core.run(unit(state + entry), i)
            state = unit(x)
            rounds.append(given)
        core.add(rounds)
        state, given = coda.run(state, 0)
        coda.add([given])
        logits.append(rms(state) * np.asarray(PARAMS.norm) @ np.asarray(PARAMS.head))
        start += count
    return np.concatenate(logits)


def run(calls, mode="per_loop", tokens=TOKENS):
    return run_calls(PARAMS, tokens, calls, mode, config=HYBRID, width=WIDTH)


DEEP_SHALLOW_DEEP = [([4, 5], [3, 1]), ([1, 1], [1, 2]), ([1, 0], [1, 3]), ([2, 1], [3, 3]), ([1, 1], [2, 1])]


@given(any_calls(WIDTH, LOOPS, TOTAL), st.sampled_from(["per_loop", "last_loop"]))
@example(DEEP_SHALLOW_DEEP, "per_loop")
@example(DEEP_SHALLOW_DEEP, "last_loop")
@settings(max_examples=4)
def test_any_calls_at_any_depths_are_the_reference(calls, mode):
    """A deep token after shallow ones finds its own round's state, with every token in it."""
    logits, cache = run(calls, mode)
    for row in range(2):
        own = [(new[row], depth[row]) for new, depth in calls if new[row]]
        expected = reference(TOKENS[row], own, mode)
        np.testing.assert_allclose(logits[row], expected, atol=2e-4)
        assert cache.length[row] == len(expected)


def test_a_row_is_the_row_alone_in_logits_and_cache():
    """Depths 2 beside 3 in chunks and steps; other neighbours change no bit."""
    calls = [([4, 2], [2, 3]), ([1, 1], [2, 1]), ([2, 4], [2, 3])]
    logits, cache = run(calls)
    alone, own = run([(new[:1], depth[:1]) for new, depth in calls], tokens=TOKENS[:1])
    np.testing.assert_allclose(logits[0], alone[0], atol=5e-5)
    assert_close(row_of(cache, 0), row_of(own, 0), rtol=1e-4)
    beside, other = run([([new[0], 1], [depth[0], 1]) for new, depth in calls])
    assert_same_bits(logits[0], beside[0])
    assert_same_bits(row_of(cache, 0), row_of(other, 0))


@pytest.mark.parametrize("width", [1, WIDTH])
def test_rows_without_tokens_and_padding_leave_no_trace(width):
    """A row at depth 0 beside one that runs, and what stands after a row's last token."""
    _, before = run([([4, 3], [3, 2])])
    after = []
    for padding, depth in ((5, 0), (11, 3)):
        chunk = np.full((2, width), padding)
        chunk[1, 0] = TOKENS[1, 3]
        after.append(extend(PARAMS, chunk, jnp.array([depth, 3]), before, new=jnp.array([0, 1]), config=HYBRID)[1])
        assert_same_bits(row_of(before, 0), row_of(after[-1], 0))
    assert_same_bits(*after)
    for old, new in zip(jax.tree.leaves(before.core[0].state), jax.tree.leaves(after[0].core[0].state), strict=True):
        assert (old[:, 1] != new[:, 1]).any(axis=(1, 2, 3)).all(), "every slot of the running row moved"


def test_rounds_not_run_leave_no_trace_of_a_neighbour():
    """A batch whose deepest row runs one round, and three: the row at depth 1 gets the same logits and cache."""
    shallow, deep = (run([([5, 5], [1, depth]), ([1, 1], [1, depth])]) for depth in (1, 3))
    assert_same_bits(shallow[0][0], deep[0][0])
    assert_same_bits(row_of(shallow[1], 0), row_of(deep[1], 0))


@pytest.mark.parametrize("mode", ["per_loop", "last_loop"])
def test_states_are_kept_for_each_loop_in_both_modes(mode):
    cache = init_cache(HYBRID, 2, TOTAL, loops=LOOPS, mode=mode)
    recurrent, attention = cache.core
    assert recurrent.state.shape == (LOOPS, 2, 4, 3, 5)
    assert attention.key.shape[0] == (LOOPS if mode == "per_loop" else 1)
    half = init_cache(HYBRID, 2, TOTAL, loops=LOOPS, mode=mode, dtype="bfloat16")
    assert half.core[0].state.dtype == jnp.float32 and half.core[0].tail.key.dtype == jnp.bfloat16


def test_a_state_outlives_shallow_tokens():
    """Slot 2 still holds what a prompt wrote in its third round after a token of one round, faded and corrected."""
    prompt, depths = ([5, 5], [3, 3]), ([1, 1], [1, 3])
    _, cache = run([prompt, depths])
    _, own = run([([5, 5], [1, 1]), ([1, 1], [1, 1])])
    kept, overwritten = (entry.core[0].state[2, 0] for entry in (cache, own))
    assert jnp.abs(kept - cache.core[0].state[0, 0]).max() > 0.01 * jnp.abs(kept).max()
    assert jnp.abs(kept - overwritten).max() > 0.01 * jnp.abs(kept).max()


def test_fresh_and_last_only_are_the_same_logits():
    new = jnp.array([4, 2])
    run = partial(extend, PARAMS, TOKENS[:, :WIDTH], jnp.array([3, 2]), new=new, config=HYBRID)
    empty = init_cache(HYBRID, 2, TOTAL, loops=LOOPS)
    logits, cache = run(empty)
    last, fresh = run(empty, fresh=True, last_only=True)
    assert_close(last[:, 0], logits[jnp.arange(2), new - 1], rtol=1e-4)
    assert_close(fresh, cache, rtol=1e-4)


def test_a_prompt_of_many_chunks_and_steps_are_one_full_pass():
    """Two chunks of 70 tokens, longer than the recurrence's, then steps, at three depths and lengths."""
    depth, lengths = jnp.array([3, 1, 2]), np.array([140, 101, 69])
    tokens = jax.random.randint(KEY, (3, 144), 0, VOCAB)
    whole = jax.jit(model.apply, static_argnames="config")(PARAMS, tokens, depth, config=HYBRID)
    cache = init_cache(HYBRID, 3, 144, loops=LOOPS)
    for first in (0, 70):
        new = np.clip(lengths - first, 0, 70)
        logits, cache = extend(
            PARAMS, tokens[:, first : first + 70], jnp.where(new > 0, depth, 0), cache, new=new, config=HYBRID
        )
        for row, count in enumerate(new):
            np.testing.assert_allclose(logits[row, :count], whole[row, first : first + count], atol=2e-3)
    for step in range(3):
        at = (np.arange(3), lengths + step)
        logits, cache = extend(PARAMS, tokens[at][:, None], depth, cache, new=jnp.ones(3, jnp.int32), config=HYBRID)
        np.testing.assert_allclose(logits[:, 0], whole[at], atol=2e-3)
