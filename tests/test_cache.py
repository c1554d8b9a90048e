"""Laws of the cache and of `extend`: calls of any size at any depth, both modes, padding, rings and frozen rows."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import any_calls, extend, row_of, run_calls
from cases import RULES, assert_close, assert_same_bits, perturb, small_model, tiny_dory
from hypothesis import given, settings
from hypothesis import strategies as st

from elr_jax import incremental, model, parameters
from elr_jax.cache import init_cache
from elr_jax.config import ConditioningConfig, LoopRule
from elr_jax.errors import ElrError

KEY = jax.random.key(3)
WINDOW, LOOPS, WIDTH, TOTAL = 3, 3, 4, 13
apply = jax.jit(model.apply, static_argnames="config")


def configure(name, **changes):
    return small_model(dataclasses.replace(RULES[name], max_loops=LOOPS), **changes)


def params_of(config):
    return perturb(jax.jit(parameters.init, static_argnums=1)(KEY, config), scale=0.1)


CONFIGS = {
    "elr": partial(configure, "elr", coda=""),
    "conditioned": partial(configure, "elr", conditioning=ConditioningConfig(width=6, sinusoids=4, rank=3)),
    "hybrid": partial(configure, "dory", prelude="D-*-", core="D-D-", coda="*-"),
    "sphere": partial(tiny_dory, prelude="", core="S*", coda="S"),
    **{name: partial(configure, name) for name in RULES if name != "elr"},
}


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("elr", "conditioned", "sphere") else pytest.param(name, marks=pytest.mark.slow)
        for name in CONFIGS
    ],
)
def test_prompt_and_steps_are_one_full_pass(name):
    """Prompts of W−1, W, W+1 and 2W tokens and more than a window of steps after them, at positions from 7 on."""
    config = CONFIGS[name]()
    window = config.attention.window
    lengths = np.array([window - 1, window, window + 1, 2 * window], np.int32)
    rows, steps = len(lengths), window + 2
    depth = jnp.array([1, 3, 2, 3])
    tokens = jax.random.randint(KEY, (rows, 2 * window + steps), 0, config.vocab_size)
    keys = jax.random.split(KEY, rows)
    positions = jnp.broadcast_to(jnp.arange(7, 7 + tokens.shape[1]), tokens.shape)
    params = params_of(config)
    whole = apply(params, tokens, depth, config=config, key=keys, positions=positions)
    run = partial(extend, params, config=config, key=keys)
    prompt = slice(0, 2 * window)
    logits, cache = run(
        tokens[:, prompt],
        depth,
        init_cache(config, rows, tokens.shape[1], loops=LOOPS),
        new=jnp.array(lengths),
        positions=positions[:, prompt],
        fresh=True,
    )
    for row, length in enumerate(lengths):
        assert_close(logits[row, :length], whole[row, :length], rtol=1e-4)
    for step in range(steps):
        at = (np.arange(rows), lengths + step)
        logits, cache = run(
            tokens[at][:, None], depth, cache, new=jnp.ones(rows, jnp.int32), positions=positions[at][:, None]
        )
        assert_close(logits[:, 0], whole[at], rtol=1e-4)


# Everything below runs the same two attention layers, and nothing else, under one loop rule.
PLAIN = small_model(
    LoopRule(initial="copy", inject="residual", update="replace", boundary="unit", max_loops=LOOPS),
    prelude="",
    core="S*",
    coda="",
)
PARAMS = jax.tree.map(lambda spec: np.asarray(spec), params_of(PLAIN))
TOKENS = np.random.default_rng(0).integers(0, 13, (2, TOTAL))


def reference(tokens, calls, slots):
    """Logits of one row after calls of (tokens, depth), with lists of keys and values for each layer and slot.

    In round i the new tokens see slot i of the past, or the last there is, and their own round's keys. After a call
    slot i holds round i or the last one that was run, and the last slot holds the last.
    """
    config, params = PLAIN, jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), PARAMS)
    lists = [[[] for _ in range(slots)] for _ in config.core]
    start, logits = 0, []
    for count, depth in calls:
        state = entry = params.embedding[tokens[start : start + count]]
        made = []
        for i in range(depth):
            x = unit(state + entry)
            made.append([])
            for letter, layer, past in zip(config.core, params.core, lists, strict=True):
                q, own = project(rms(x) * layer.norm, layer.mixer, start)
                seen = past[min(i, slots - 1)] + own
                reach = config.attention.window if letter == "S" else TOTAL
                out = [look(q[t], seen[: start + t + 1][-reach:]) for t in range(count)]
                x = x + np.einsum("tnh,nhd->td", np.array(out), layer.mixer.output)
                made[-1].append(own)
            state = unit(x)
        for layer, past in enumerate(lists):
            for slot in range(slots):
                past[slot] += made[depth - 1 if slot == slots - 1 else min(slot, depth - 1)][layer]
        logits.append(rms(state) * params.norm @ params.head)
        start += count
    return np.concatenate(logits)


def unit(x):
    return x / np.sqrt((x**2).sum(-1, keepdims=True) + PLAIN.norm_eps)


def rms(x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + PLAIN.norm_eps)


def project(x, mixer, start):
    """Rotated queries of some tokens, and a list of their rotated keys and values."""
    q, k, v = (np.einsum("td,dnh->tnh", x, weight) for weight in (mixer.query, mixer.key, mixer.value))
    width = PLAIN.attention.head_dim
    phase = np.arange(start, start + len(x))[:, None, None] * 1e4 ** (-np.arange(0, width, 2) / width)
    turn = np.exp(1j * phase)

    def rotate(y):
        pairs = (y[..., : width // 2] + 1j * y[..., width // 2 :]) * turn
        return np.concatenate([pairs.real, pairs.imag], -1)

    return rotate(q), list(zip(rotate(k), v, strict=True))


def look(query, seen):
    """What one token's query heads [N,H] read from a list of keys and values [K,H]."""
    share = PLAIN.attention.num_heads // PLAIN.attention.num_kv_heads
    keys, values = (np.repeat(np.array(part), share, axis=1) for part in zip(*seen, strict=True))
    scores = np.einsum("nh,snh->ns", query, keys) / PLAIN.attention.head_dim**0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("ns,snh->nh", weights / weights.sum(-1, keepdims=True), values)


def run(calls, mode="per_loop", tokens=TOKENS):
    return run_calls(PARAMS, tokens, calls, mode, config=PLAIN, width=WIDTH)


@given(any_calls(WIDTH, LOOPS, TOTAL), st.sampled_from(["per_loop", "last_loop"]))
@settings(max_examples=25)
def test_any_calls_at_any_depths_are_the_reference(calls, mode):
    logits, cache = run(calls, mode)
    for row in range(2):
        own = [(new[row], depth[row]) for new, depth in calls if new[row]]
        expected = reference(TOKENS[row], own, LOOPS if mode == "per_loop" else 1)
        np.testing.assert_allclose(logits[row], expected, atol=2e-5)
        assert cache.length[row] == len(expected)


@pytest.mark.parametrize("mode", ["per_loop", pytest.param("last_loop", marks=pytest.mark.slow)])
def test_a_row_is_the_row_alone_in_logits_and_cache(mode):
    """Depths 2 beside 3, across the window; other neighbours change no bit."""
    calls = [([4, 2], [2, 3]), ([1, 1], [2, 1]), ([2, 4], [2, 3])]
    logits, cache = run(calls, mode)
    alone, own = run([(new[:1], depth[:1]) for new, depth in calls], mode, tokens=TOKENS[:1])
    np.testing.assert_allclose(logits[0], alone[0], atol=1e-5)
    assert_close(row_of(cache, 0), row_of(own, 0))
    beside, other = run([([new[0], 1], [depth[0], 1]) for new, depth in calls], mode)
    assert_same_bits(logits[0], beside[0])
    assert_same_bits(row_of(cache, 0), row_of(other, 0))


@pytest.mark.parametrize("width", [1, WIDTH])
def test_rows_without_tokens_and_padding_leave_no_trace(width):
    _, before = run([([4, 3], [3, 2])])
    step = partial(extend, PARAMS, config=PLAIN)
    for padding, depth in ((5, 0), (11, 3)):
        chunk = np.full((2, width), padding)
        chunk[1, 0] = (TOKENS[1, 0] + 1) % 13  # not what the ring holds there
        _, after = step(chunk, jnp.array([depth, 3]), before, new=jnp.array([0, 1]))
        assert_same_bits(row_of(before, 0), row_of(after, 0))
        if padding == 5:
            first = after
    assert_same_bits(first, after)
    pairs = zip(jax.tree.leaves(row_of(before, 1)), jax.tree.leaves(row_of(after, 1)), strict=True)
    changed = [(one != other).any(-1) for one, other in pairs]
    # the fourth token of row 1 stands in slot 0 of the ring of three and in slot 3 of the full layer
    for written, slot in zip(changed, (0, 0, 3, 3), strict=True):
        expected = np.zeros(written.shape[-1], bool)
        expected[slot] = True
        assert (written == expected).all()


def test_later_slots_hold_the_last_round():
    """Tokens that ran k rounds are found by deeper ones: slots from k−1 on hold round k's keys, earlier ones do not."""
    _, cache = run([([3, 3], [1, 2])])
    for entry in cache.core:
        one, two = entry.key[:, 0, :, :WINDOW], entry.key[:, 1, :, :WINDOW]
        assert_same_bits([one[0], one[0]], [one[1], one[2]])
        assert_same_bits(two[1], two[2])
        assert (two[0] != two[1]).any(axis=(1, 2)).all()


def test_fresh_and_last_only_are_the_same_logits():
    new = jnp.array([4, 2])
    run = partial(extend, PARAMS, TOKENS[:, :WIDTH], jnp.array([3, 2]), new=new, config=PLAIN)
    empty = init_cache(PLAIN, 2, TOTAL, loops=LOOPS)
    logits, cache = run(empty)
    last, fresh = run(empty, fresh=True, last_only=True)
    assert_close(last[:, 0], logits[jnp.arange(2), new - 1])
    assert_close(fresh, cache)


def test_refusals():
    for error, arguments in (
        ("mode 'both'", {"mode": "both"}),
        ("capacity=0", {"capacity": 0}),
        ("loops=0", {"loops": 0}),
        ("batch=0", {"batch": 0}),
    ):
        with pytest.raises(ElrError, match=error):
            init_cache(PLAIN, **{"batch": 2, "capacity": 4} | arguments)
    cache = init_cache(PLAIN, 1, 4)
    for depth, new, bad in (([0], None, 0), ([4], None, 4), ([4], jnp.array([1]), 4), ([-1], jnp.array([0]), -1)):
        with pytest.raises(ElrError, match=f"depth {bad} is outside"):
            incremental.extend(PARAMS, TOKENS[:1, :1], jnp.array(depth), cache, new=new, config=PLAIN)
