"""Layers `G` and `R`: one softmax over a window and global keys, in loops and caches, against all pairs spelled out."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import extend, run_calls
from cases import RULES, assert_close, perturb, small_model

from elr_jax import incremental, model, parameters
from elr_jax.cache import cache_bytes, init_cache
from elr_jax.config import DeltaProductConfig, Runtime
from elr_jax.errors import ElrError

KEY = jax.random.key(7)
ROWS, LENGTH, WINDOW = 2, 9, 3
TOKENS = jax.random.randint(KEY, (ROWS, LENGTH), 0, 13)
STACKS = {
    "boundary": ("S", "S-", "G-R-"),
    "encoder loop": ("S-", "G-R-", "R-G-R"),
    "decoder loop": ("SG-R", "R-S-R", "R-"),
}
DEPTHS = [3, 1]
SLOW = pytest.mark.slow


def configure(name, *, stacks=None, window=WINDOW):
    prelude, core, coda = stacks or STACKS[name]
    rule = dataclasses.replace(RULES["elr"], max_loops=3)
    config = small_model(rule, prelude=prelude, core=core, coda=coda)
    return dataclasses.replace(config, attention=dataclasses.replace(config.attention, window=window))


def weights_of(config):
    return perturb(jax.jit(parameters.init, static_argnums=1)(KEY, config), scale=0.3)


@partial(jax.jit, static_argnames=("config", "runtime"))
def forward(params, tokens, depth, *, config, runtime=Runtime()):
    return model.apply(params, tokens, depth, config=config, runtime=runtime)


def reference(params, tokens, calls, config, slots=1, first=0):
    """One row read in calls of (tokens, depth), unrolled, with lists of keys for each layer and slot.

    A mask for each layer: keys of the window, and global keys for what lies before it. In round i the new tokens see
    slot i of the past, or the last there is, and their own round's keys. After a call slot i holds round i or the last
    one that was run, and the last slot holds the last: of that are the core's global keys that the coda reads. Windows
    of the decoder hold no token before the `first`; there global keys count.
    """
    stacks, border = ["prelude", "core", "coda"], config.boundary
    begins = (stacks.index(border.stack), border.above)
    sizes, window = config.attention, config.attention.window
    empty = np.zeros((0, sizes.num_kv_heads, sizes.head_dim))
    counts = {"prelude": 1, "core": slots, "coda": 1}
    held = {
        (name, j, kind): [(empty, empty)] * count
        for name, count in counts.items()
        for j in range(len(getattr(config, name)))
        for kind in ("window", "global")
    }
    start, logits = 0, []

    def rms(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * np.asarray(scale)

    def turn(x):
        half = x.shape[-1] // 2
        angle = (start + np.arange(len(x)))[:, None] * sizes.rope_base ** (-np.arange(half) / half)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        one, two = x[..., :half], x[..., half:]
        return np.concatenate([one * cos - two * sin, two * cos + one * sin], -1)

    def heads(x, weight):
        return np.einsum("td,dnh->tnh", x, np.asarray(weight))

    def joined(past, own):
        return tuple(np.concatenate(pair) for pair in zip(past, own, strict=True))

    def attend(x, p, letter, place, slot, shared, made):
        q = turn(heads(x, p.query))
        own = {"window": (turn(heads(x, p.key)), heads(x, p.value))}
        if letter == "G":
            own["global"] = turn(heads(x, p.shared.key)), heads(x, p.shared.value)
            shared = joined(held[*place, "global"][slot], own["global"])
        for kind, keys in own.items():
            made.setdefault((*place, kind), []).append(keys)
        behind = (start + np.arange(len(x)))[:, None] - np.arange(start + len(x))
        skipped = first if (stacks.index(place[0]), place[1]) >= begins else 0
        near = (behind >= 0) & (behind < window) & (np.arange(start + len(x)) >= skipped)
        sets = [(*joined(held[*place, "window"][slot], own["window"]), near)]
        sets += [(*shared, (behind >= 0) & ~near)] if letter in "GR" else []
        repeat = q.shape[1] // sizes.num_kv_heads
        scores, values = [], []
        for keys, vals, mask in sets:
            s = np.einsum("tnh,snh->nts", q, np.repeat(keys, repeat, 1)) / sizes.head_dim**0.5
            scores.append(np.where(mask, s, -np.inf))
            values.append(np.repeat(vals, repeat, 1))
        scores, values = np.concatenate(scores, -1), np.concatenate(values, 0)
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("nts,snh->tnh", powers / powers.sum(-1, keepdims=True), values)
        return np.einsum("tnh,nhd->td", out, np.asarray(p.output)), shared

    def mlp(x, p):
        gate, up = x @ np.asarray(p.gate), x @ np.asarray(p.up)
        return (gate / (1 + np.exp(-gate)) * up) @ np.asarray(p.down)

    def stack(x, name, slot, shared, made):
        for j, (letter, layer) in enumerate(zip(getattr(config, name), getattr(params, name), strict=True)):
            inner = rms(x, layer.norm)
            if letter == "-":
                x = x + mlp(inner, layer.mixer)
            else:
                out, shared = attend(inner, layer.mixer, letter, (name, j), slot, shared, made)
                x = x + out
        return x, shared

    for count, depth in calls:
        made = {}
        x, shared = stack(np.asarray(params.embedding)[tokens[start : start + count]], "prelude", 0, None, made)
        gate = params.loop.update
        for i in range(depth):
            proposal, _ = stack(x, "core", min(i, slots - 1), shared, made)
            pull = rms(x, 1.0) @ np.asarray(gate.weight) + np.asarray(gate.bias)
            x = x + np.log1p(np.exp(np.asarray(gate.gain))) / (1 + np.exp(-pull)) * (proposal - x)
        if "G" in config.core:
            last = ("core", config.core.rindex("G"), "global")
            shared = joined(held[last][-1], made[last][depth - 1])
        x, _ = stack(x, "coda", 0, shared, made)
        for place, rounds in made.items():
            past, end = held[place], len(rounds) - 1
            of = lambda slot, past=past, end=end: end if slot == len(past) - 1 else min(slot, end)
            held[place] = [joined(old, rounds[of(slot)]) for slot, old in enumerate(past)]
        logits.append(rms(x, params.norm) @ np.asarray(params.head))
        start += count
    return np.concatenate(logits)


@pytest.mark.parametrize("name", ["encoder loop", "decoder loop", pytest.param("boundary", marks=SLOW)])
def test_a_pass_is_the_reference_row_by_row(name):
    """At depths 3 and 1 in one batch: what reads the core's global keys finds those of a row's own last round."""
    config = configure(name)
    params = weights_of(config)
    logits = forward(params, TOKENS, jnp.array(DEPTHS), config=config)
    for row, depth in enumerate(DEPTHS):
        expected = reference(params, np.asarray(TOKENS[row]), [(LENGTH, depth)], config)
        np.testing.assert_allclose(logits[row], expected, atol=2e-4 * np.abs(expected).max())


@pytest.mark.parametrize(
    "name, cut",
    [
        ("encoder loop", [4, 5]),
        ("decoder loop", [1] * LENGTH),
        *(pytest.param(name, cut, marks=SLOW) for name in STACKS for cut in ([4, 5], [1] * LENGTH)),
    ],
)
def test_calls_are_one_pass(name, cut):
    config = configure(name)
    params = weights_of(config)
    calls = [([count] * ROWS, DEPTHS) for count in cut]
    logits, _ = run_calls(params, np.asarray(TOKENS), calls, config=config, width=max(cut))
    whole = forward(params, TOKENS, jnp.array(DEPTHS), config=config)
    assert_close(jnp.stack(logits), whole, rtol=1e-4)


@pytest.mark.parametrize("mode", ["last_loop", "per_loop"])
@pytest.mark.parametrize("name", ["encoder loop", pytest.param("decoder loop", marks=SLOW)])
def test_calls_at_other_depths_are_their_history_spelled_out(name, mode):
    """Chunks and single tokens, each call and row at a depth of its own; in both modes, which then differ."""
    config = configure(name)
    params = weights_of(config)
    counts, depths = [3, 1, 4, 1], ([3, 1], [1, 2], [2, 3], [3, 1])
    calls = [([count] * ROWS, depth) for count, depth in zip(counts, depths, strict=True)]
    logits, _ = run_calls(params, np.asarray(TOKENS), calls, mode, config=config, width=4)
    for row in range(ROWS):
        own = [(count, depth[row]) for count, depth in zip(counts, depths, strict=True)]
        expected, other = (
            reference(params, np.asarray(TOKENS[row]), own, config, slots=slots)
            for slots in ((1, 3) if mode == "last_loop" else (3, 1))
        )
        np.testing.assert_allclose(logits[row], expected, atol=2e-4 * np.abs(expected).max())
        assert np.abs(expected - other).max() > 1e-3


@pytest.mark.parametrize(
    "name", ["encoder loop", *(pytest.param(name, marks=SLOW) for name in STACKS if name != "encoder loop")]
)
def test_no_token_sees_a_later_one(name):
    config = configure(name)
    params = weights_of(config)
    before = forward(params, TOKENS, jnp.array(DEPTHS), config=config)
    after = forward(params, TOKENS.at[:, 6].set((TOKENS[:, 6] + 1) % 13), jnp.array(DEPTHS), config=config)
    assert_close(after[:, :6], before[:, :6])
    assert (jnp.abs(after[:, 6:] - before[:, 6:]).max(-1) > 1e-4).all(), "beyond the window by global keys alone"


@pytest.mark.parametrize(
    "name, remat", [("encoder loop", "layer"), pytest.param("decoder loop", "round", marks=pytest.mark.slow)]
)
def test_bounded_is_scan_in_value_and_gradient(name, remat):
    config = configure(name)
    params = weights_of(config)

    @partial(jax.jit, static_argnames="runtime")
    def run(params, depth, runtime):
        weight = jnp.sin(jnp.arange(TOKENS.size * 13)).reshape(*TOKENS.shape, 13)
        apply = partial(model.apply, tokens=TOKENS, depth=depth, config=config, runtime=runtime)
        return jax.value_and_grad(lambda params: jnp.sum(weight * apply(params)))(params)

    bounded, scan = (run(params, jnp.array(DEPTHS), Runtime(loop=form, remat=remat)) for form in ("bounded", "scan"))
    assert_close(bounded, scan)
    shared = next(
        layer.mixer.shared for layer in bounded[1].prelude + bounded[1].core if getattr(layer.mixer, "shared", None)
    )
    assert shared.key.any() and shared.value.any()


SKIPS = {
    "boundary": STACKS["boundary"],
    "encoder loop": STACKS["encoder loop"],
    "encoder of one stack": ("S-", "G-R-", "R-R-"),
    "decoder loop": STACKS["decoder loop"],
}
encode = jax.jit(incremental.encode, static_argnames=("config", "fresh"))


@pytest.mark.parametrize(
    "name", ["encoder loop", *(pytest.param(name, marks=SLOW) for name in SKIPS if name != "encoder loop")]
)
def test_a_decoder_may_skip_all_but_the_last_tokens_of_a_prompt(name):
    """Prompts of two lengths at depths 3 and 1, steps after them; with fewer tokens the answer is another."""
    config = configure(name, stacks=SKIPS[name], window=2)
    params = weights_of(config)
    replayed, steps = config.boundary.replayed(config, loops=3), 3
    lengths = np.array([replayed + 4, replayed + 1])
    tokens = jax.random.randint(KEY, (ROWS, lengths[0] + steps), 0, 13)
    whole = forward(params, tokens, jnp.array(DEPTHS), config=config)

    def answers(kept):
        skipped, run = lengths - kept, partial(extend, params, config=config)
        cache = init_cache(config, ROWS, tokens.shape[1], loops=3)
        depth = jnp.array(DEPTHS)
        # two calls for what is skipped, so that one of them is not fresh
        cache = encode(params, tokens[:, :1], depth, cache, config=config, fresh=True)
        rest = tokens[:, 1 : skipped.max()]
        cache = encode(params, rest, depth, cache, new=jnp.array(skipped - 1), config=config)
        tail = jnp.stack([tokens[row, skip : skip + kept] for row, skip in enumerate(skipped)])
        logits, cache = run(tail, depth, cache, skipped=jnp.array(skipped), last_only=True)
        found = [logits[:, 0]]
        for step in range(steps):
            logits, cache = run(tokens[np.arange(ROWS), lengths + step][:, None], depth, cache)
            found.append(logits[:, 0])
        return jnp.stack(found, axis=1)

    expected = jnp.stack([whole[row, length - 1 : length + steps] for row, length in enumerate(lengths)])
    assert_close(answers(replayed), expected, rtol=1e-4)
    if replayed > 2:  # what comes through ten windows is lost in rounding, what comes through a few is not
        near = answers(min(replayed - 1, 4))
        assert np.isfinite(near).all() and float(jnp.abs(near - expected)[0].max()) > 1e-5


@pytest.mark.parametrize("name", ["boundary", pytest.param("encoder loop", marks=SLOW)])
def test_of_skipped_tokens_a_decoder_sees_the_global_keys(name):
    """With fewer tokens left than its windows reach back to: an approximation, but a defined one."""
    config = configure(name, stacks=SKIPS[name] if name != "boundary" else ("S", "S-", "G-R-R"), window=4)
    params = weights_of(config)
    skipped, depth = 6, jnp.array(DEPTHS)
    assert LENGTH - skipped < config.boundary.replayed(config, loops=3)
    cache = init_cache(config, ROWS, LENGTH, loops=3)
    cache = encode(params, TOKENS[:, :skipped], depth, cache, config=config, fresh=True)
    logits, _ = extend(params, TOKENS[:, skipped:], depth, cache, config=config, skipped=jnp.full(ROWS, skipped))
    for row in range(ROWS):
        tokens, calls = np.asarray(TOKENS[row]), [(LENGTH, DEPTHS[row])]
        expected, whole = (reference(params, tokens, calls, config, first=first)[skipped:] for first in (skipped, 0))
        np.testing.assert_allclose(logits[row], expected, atol=2e-4 * np.abs(expected).max())
        assert np.abs(expected - whole).max() > 1e-3


def test_only_a_decoder_of_windows_may_be_skipped():
    for stacks in (("*-", "*-", "*-"), ("S", "G", "*-"), ("G", "D", "R")):
        sizes = {"delta": DeltaProductConfig(num_heads=1, num_key_heads=1, key_dim=4, value_dim=4)}
        config = small_model(RULES["elr"], prelude=stacks[0], core=stacks[1], coda=stacks[2], **sizes)
        assert config.boundary is None
        cache = init_cache(config, ROWS, LENGTH)
        with pytest.raises(ElrError, match="no decoder to skip"):
            incremental.encode(weights_of(config), TOKENS, jnp.array([1, 1]), cache, config=config)


def test_a_skipped_decoder_costs_nothing():
    """The compiled program has no product of a decoder layer but the last G's global keys, values and window keys."""
    config = configure("boundary", stacks=("S-", "S-", "G-R-R-R-"))
    params = weights_of(config)
    cache = init_cache(config, ROWS, LENGTH)
    cost = lambda function: (
        jax.jit(partial(function, config=config, fresh=True))
        .lower(params, TOKENS, jnp.array([1, 1]), cache)
        .compile()
        .as_text()
    )
    products = [cost(function).count(" dot(") for function in (incremental.encode, incremental.extend)]
    assert products[0] < products[1] / 2, products


def test_a_cache_grows_by_global_keys_alone():
    config = configure("encoder loop")
    one = 2 * 2 * 4 * 4  # key and value, 2 heads of 4, float32
    sizes = [cache_bytes(config, tokens=tokens, loops=3, dtype="float32").attention for tokens in (100, 101)]
    assert sizes[1] - sizes[0] == one * (3 + 1), "the core's G in three slots, the coda's in one"
    last = [cache_bytes(config, tokens=t, loops=3, mode="last_loop", dtype="float32").attention for t in (100, 101)]
    assert last[1] - last[0] == one * 2


@pytest.mark.parametrize("stacks", [("R", "*", "*"), ("G", "R-G", "*"), ("*", "*", "RG")])
def test_a_reader_without_global_keys_is_refused(stacks):
    with pytest.raises(ElrError, match="without a G above"):
        small_model(RULES["elr"], prelude=stacks[0], core=stacks[1], coda=stacks[2])
