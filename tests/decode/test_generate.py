"""Laws of generation: every request's tokens are those of its own run, whatever else is in the batch."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import RULES, assert_same_bits, perturb, programs, small_model, tiny_dory

from elr_jax import parameters
from elr_jax.config import Runtime
from elr_jax.decode import Sampling, decode_step, generate, prefill, start, working_copy
from elr_jax.decode import prompts as asked
from elr_jax.decode.generate import replayed_tokens
from elr_jax.errors import ElrError

ROWS, WIDTH, CAPACITY = 8, 12, 24
LOOPS, PREFILL_LOOPS = [1, 1, 2, 2, 3, 3, 4, 4], [1, 4, 2, 3, 3, 1, 4, 2]
LENGTHS, LIMITS = [1, 9, 3, 5, 12, 2, 7, 4], [6, 3, 6, 1, 5, 6, 4, 6]
PROMPTS = [np.random.default_rng(length).integers(0, 13, length).tolist() for length in LENGTHS]
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=0.7, top_k=4, seed=3),
    Sampling(),
    Sampling(temperature=2.0, top_p=0.8, seed=1),
    Sampling(temperature=1.0, min_p=0.1, seed=2**32 - 1),
    Sampling(),
    Sampling(temperature=1.5, top_k=9, top_p=0.9, min_p=0.01, seed=8),
]
CONFIG = small_model(RULES["elr"], coda="", max_positions=16)
GREEDY = {"sampling": Sampling()}
STATIC = ("config", "runtime", "greedy")
prefill_alone = jax.jit(prefill, static_argnames=(*STATIC, "fresh"))
step_alone = jax.jit(decode_step, static_argnames=STATIC)


def params_of(config):
    # rates on the sphere stay small: far above their start a random model is chaotic, and rounding decides its tokens
    scale = 0.1 if config.sphere else 0.5
    return perturb(jax.jit(parameters.init, static_argnums=1)(jax.random.key(0), config), scale=scale)


PARAMS = params_of(CONFIG)
REQUESTS = {
    "loops": LOOPS,
    "prefill_loops": PREFILL_LOOPS,
    "max_new_tokens": LIMITS,
    "sampling": SAMPLINGS,
    "allow_longer": True,
}
mixed = partial(generate, PARAMS, config=CONFIG, **REQUESTS)


def test_a_working_copy_generates_the_same():
    request = {"config": CONFIG, "loops": [2, 4], "max_new_tokens": 4}
    copy = working_copy(PARAMS, config=CONFIG)
    assert generate(copy, PROMPTS[:2], **request) == generate(PARAMS, PROMPTS[:2], **request)


def alone(params, prompt, *, config, mode="per_loop", positions=None, **request):
    """One request by the pure functions, in arrays of other sizes than `generate` makes."""
    state, requests = read_alone(params, prompt, config=config, mode=mode, positions=positions, **request)
    found = [int(state.token[0])]
    while not state.done[0]:
        state = step_alone(params, state, requests, config=config)
        found.append(int(state.token[0]))
    return found


def read_alone(params, prompt, *, config, mode="per_loop", positions=None, **request):
    requests = asked.pack_requests(1, config=config, **{"stop_tokens": ()} | request)
    tokens, at = np.zeros((2, 1, WIDTH), np.int32)
    tokens[0, : len(prompt)] = prompt
    at[0, : len(prompt)] = range(len(prompt)) if positions is None else positions
    state = start(config, 1, CAPACITY, loops=config.loop.max_loops, mode=mode)
    new = jnp.array([len(prompt)])
    return prefill_alone(params, state, tokens, new, requests, positions=at, config=config, fresh=True), requests


def each_alone(params, config, mode="per_loop"):
    rows = zip(PROMPTS, LOOPS, PREFILL_LOOPS, LIMITS, SAMPLINGS, strict=True)
    return [
        alone(
            params,
            prompt,
            config=config,
            mode=mode,
            loops=loops,
            prefill_loops=prefill_loops,
            max_new_tokens=limit,
            sampling=sampling,
        )
        for prompt, loops, prefill_loops, limit, sampling in rows
    ]


def test_a_mixed_batch_is_eight_separate_runs():
    found = mixed(PROMPTS)
    assert [row.tokens for row in found] == each_alone(PARAMS, CONFIG)
    assert [len(row.tokens) for row in found] == LIMITS
    assert {row.finish for row in found} == {"length"}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["per_loop", "last_loop"])
@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        small_model(dataclasses.replace(RULES["parcae"], max_loops=4)),
        tiny_dory(vocab_size=13, core="S-*-", prelude="S-"),
    ],
    ids=["elr", "parcae", "sphere"],
)
def test_every_model_and_cache_mode_decodes_mixed_batches(config, mode):
    params = params_of(config)
    found = generate(params, PROMPTS, config=config, cache_mode=mode, **REQUESTS)
    assert [row.tokens for row in found] == each_alone(params, config, mode)


@pytest.mark.parametrize("chunk", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_a_skipped_decoder_generates_the_same(chunk):
    """Exactly, where the decoder reads as far as its windows reach; prompts shorter than that are read whole."""
    rule = dataclasses.replace(RULES["parcae"], max_loops=4)
    config = small_model(rule, prelude="S-", core="G-R-", coda="R-G-R")
    params = params_of(config)
    run = partial(generate, params, PROMPTS, config=config, **REQUESTS)
    whole = run()
    assert run(prefill_decoder="exact", prefill_chunk=chunk) == whole
    assert replayed_tokens(config, "exact", loops=4) == config.attention.window < max(LENGTHS)
    deeper = dataclasses.replace(config, coda="R-G-R-R")
    assert replayed_tokens(deeper, "exact", loops=4) == 2 * config.attention.window - 1
    assert replayed_tokens(deeper, "window", loops=4) == config.attention.window
    near = generate(params_of(deeper), PROMPTS, config=deeper, prefill_decoder="window", **REQUESTS)
    assert [len(row.tokens) for row in near] == LIMITS
    with pytest.raises(ElrError, match="no decoder to skip"):
        mixed(PROMPTS, prefill_decoder="exact")
    with pytest.raises(ElrError, match="prefill_decoder='most' is unknown"):
        mixed(PROMPTS, prefill_decoder="most")


def compiled():
    from elr_jax.decode.generate import _decode_step, _prefill

    return programs(_decode_step), programs(_prefill)


def test_one_program_serves_every_mix():
    mixed(PROMPTS)
    before = compiled()
    others = {
        "loops": LOOPS[::-1],
        "prefill_loops": 4,
        "max_new_tokens": 5,
        "sampling": SAMPLINGS[::-1],
        "stop_tokens": [[row] for row in range(ROWS)],
    }
    mixed([row[::-1] for row in PROMPTS[::-1]], **others)
    mixed([[3] * 11, *PROMPTS[1:4], [2], *PROMPTS[5:]], loops=4)
    assert compiled() == before


def test_greedy_requests_have_a_program_without_sampling():
    """It gives what the sampling program gives at temperature 0."""
    found = generate(PARAMS, PROMPTS[4:6], config=CONFIG, loops=[4, 2], max_new_tokens=5, allow_longer=True)
    for row, prompt, loops in zip(found, PROMPTS[4:6], [4, 2], strict=True):
        expected = alone(PARAMS, prompt, config=CONFIG, loops=loops, prefill_loops=None, max_new_tokens=5, **GREEDY)
        assert row.tokens == expected


def padded(side):
    """The prompts in one array with other tokens, even unknown ones, where the padding is."""
    tokens, mask = np.full((ROWS, 14), -7), np.zeros((ROWS, 14), bool)
    for row, prompt in enumerate(PROMPTS):
        where = slice(14 - len(prompt), None) if side == "left" else slice(0, len(prompt))
        tokens[row, where], mask[row, where] = prompt, True
    return tokens, mask


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("explicit", [False, True])
def test_padding_on_either_side_is_no_padding(side, explicit):
    tokens, mask = padded(side)
    positions = np.where(mask, np.cumsum(mask, axis=1) - 1, 99) if explicit else None
    assert mixed(jnp.array(tokens), attention_mask=jnp.array(mask), positions=positions) == mixed(PROMPTS)


def test_positions_go_on_from_the_last_one_given():
    positions = [[9 + 2 * i for i in range(len(prompt))] for prompt in PROMPTS]
    one = {"loops": 2, "prefill_loops": 4, "max_new_tokens": 5}
    rows = zip(PROMPTS, positions, SAMPLINGS, strict=True)
    expected = [alone(PARAMS, row, config=CONFIG, positions=at, sampling=draw, **one) for row, at, draw in rows]
    assert [row.tokens for row in mixed(PROMPTS, positions=positions, **one)] == expected
    assert [row.tokens for row in mixed(PROMPTS, **one)] != expected
    one |= GREEDY
    state, requests = read_alone(PARAMS, PROMPTS[1], config=CONFIG, positions=positions[1], **one)
    assert state.position == positions[1][-1] + 1
    assert step_alone(PARAMS, state, requests, config=CONFIG).position == positions[1][-1] + 2


def test_chunks_of_a_prompt_are_the_prompt():
    assert mixed(PROMPTS, prefill_chunk=5) == mixed(PROMPTS)


def test_a_stop_token_ends_its_own_request():
    whole = mixed(PROMPTS)
    each = [row.tokens[2:3] if number % 3 == 0 else [] for number, row in enumerate(whole)]
    for stops in (each, [each[0]] * ROWS):
        found = mixed(PROMPTS, stop_tokens=stops)
        assert found[0].finish == "stop"
        for before, after, stop in zip(whole, found, stops, strict=True):
            ends = [number for number, token in enumerate(before.tokens) if token in stop]
            assert after.tokens == before.tokens[: ends[0] + 1 if ends else None]
            assert after.finish == ("stop" if ends else "length")
    assert mixed(PROMPTS, stop_tokens=each[0]) == found


def test_tokens_are_streamed_in_order_under_a_progress_bar(capsys):
    rows = [[] for _ in PROMPTS]
    order = []

    def on_token(request, token):
        rows[request].append(token)
        order.append(len(rows[request]))

    found = mixed(PROMPTS, on_token=on_token, progress=True)
    assert rows == [row.tokens for row in found]
    assert order == sorted(order)
    shown = capsys.readouterr()
    assert "Generating" in shown.err
    assert not shown.out
    mixed(PROMPTS)
    assert not capsys.readouterr().err


def test_a_row_that_is_done_is_left_alone():
    """Further steps change no bit of its cache, token or counts."""
    one = {"loops": 3, "prefill_loops": 3, "max_new_tokens": 1, **GREEDY}
    state, requests = read_alone(PARAMS, PROMPTS[1], config=CONFIG, **one)
    assert state.done.tolist() == [True]
    assert_same_bits(step_alone(PARAMS, state, requests, config=CONFIG), state)


@pytest.mark.slow
def test_bfloat16_rows_agree_with_themselves_alone():
    runtime = Runtime(dtype="bfloat16")
    run = partial(generate, PARAMS, config=CONFIG, runtime=runtime, max_new_tokens=4)
    found = run(PROMPTS[:2], loops=[2, 2])
    assert found == [run([prompt], loops=2)[0] for prompt in PROMPTS[:2]]


@pytest.mark.parametrize(
    "error, arguments",
    [
        (r"prompts=\[\] holds no request", {"prompts": []}),
        ("prompt 1 is empty", {"prompts": [[1], []]}),
        ("prompt 0 is empty", {"prompts": np.ones((1, 3), int), "attention_mask": np.zeros((1, 3))}),
        ("prompts=some text are not lists", {"prompts": "some text"}),
        (r"prompts=\[1, 2, 3\] are not lists", {"prompts": [1, 2, 3]}),
        ("prompt 1 has the token 13 outside 0…12", {"prompts": [[1], [2, 13]]}),
        ("prompt 0 has the token -1 outside 0…12", {"prompts": [[-1]]}),
        ("prompt 0 has the token 4294967297 ", {"prompts": [[2**32 + 1]]}),
        ("1.5 stands where a token", {"prompts": [[1.5]]}),
        ("type float64 are not tokens", {"prompts": np.ones((1, 2))}),
        (
            r"attention_mask of shape \(1, 2\) beside",
            {"prompts": np.ones((1, 3), int), "attention_mask": np.ones((1, 2))},
        ),
        ("attention_mask belongs to an array", {"attention_mask": np.ones((2, 2))}),
        (r"positions of lengths \[1, 2\] beside", {"positions": [[0], [0, 1]]}),
        ("prompt 1 has the position -1", {"positions": [[0, 1], [-1, 0]]}),
        ("loops=0 is outside 1…4", {"loops": [1, 0]}),
        ("loops=5 is outside 1…4", {"loops": 5}),
        ("prefill_loops=5 is outside 1…4", {"prefill_loops": 5}),
        ("loops has 3 values for 2 prompts", {"loops": [1, 2, 3]}),
        ("2.0 stands where", {"loops": 2.0}),
        ("max_new_tokens=0 must", {"max_new_tokens": 0}),
        ("sampling has 1 values for 2", {"sampling": [Sampling()]}),
        ("stop_tokens has 13 outside", {"stop_tokens": [13]}),
        ("stop_tokens has 1 values for 2", {"stop_tokens": [[1]]}),
        ("prefill_chunk=0 must", {"prefill_chunk": 0}),
        ("mode 'all' is unknown", {"cache_mode": "all"}),
        ("prompt 1 and its new tokens reach position 13 of max_positions=12", {"prompts": [[1] * 8, [1] * 9]}),
        ("prompt 0 and its new tokens reach position 14 of", {"prompts": [[1]], "positions": [[9]]}),
    ],
)
def test_mistakes_are_named_in_one_line(error, arguments):
    config = dataclasses.replace(CONFIG, max_positions=12)
    with pytest.raises(ElrError, match=error) as caught:
        generate(PARAMS, config=config, **{"prompts": [[1, 2], [3, 4]], "loops": 2, "max_new_tokens": 4} | arguments)
    assert "\n" not in str(caught.value)


def test_a_longer_context_wants_to_be_allowed():
    with pytest.raises(ElrError, match=r"position 17 of max_positions=16: .* allow_longer=True"):
        mixed(PROMPTS, allow_longer=False)
    assert len(mixed(PROMPTS, allow_longer=True)[4].tokens) == 5


@pytest.mark.parametrize("least", [4, 16])
def test_sizes_are_few_and_hardly_more_than_asked(least):
    sizes = [asked.round_up(size, least=least) for size in range(1, 4097)]
    assert all(size >= wanted for wanted, size in enumerate(sizes, 1))
    assert all(size <= 1.25 * wanted for wanted, size in enumerate(sizes, 1) if wanted >= 4 * least)
    assert sizes == sorted(sizes)
    assert len(set(sizes)) <= 4 * 12
    assert asked.round_up(0, least=least) == least
