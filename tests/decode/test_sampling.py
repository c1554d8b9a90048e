"""Sampling against a plain reference, exact probabilities, and its independence of the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elr_jax.decode import Sampling, filter_logits, sample
from elr_jax.errors import ElrError

VOCAB, ROWS = 9, 3
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
filter_rows, sample_rows = jax.jit(filter_logits), jax.jit(sample)


def arrays(rows):
    types = {"temperature": jnp.float32, "top_k": jnp.int32, "top_p": jnp.float32, "min_p": jnp.float32}
    return {name: jnp.array([row[name] for row in rows], dtype) for name, dtype in types.items()}


def probabilities(logits, *, temperature, top_k, top_p, min_p):
    """The distribution of one row, by sorting and cutting lists."""
    scaled = (logits - logits.max()) / (temperature or 1.0)
    order = sorted(range(VOCAB), key=lambda token: -scaled[token])
    if top_k:
        cut = scaled[order[min(top_k, VOCAB) - 1]]
        order = [token for token in order if scaled[token] >= cut]
    weights = np.exp(scaled[order])
    mass, kept = 0.0, []
    for token, weight in zip(order, weights / weights.sum(), strict=True):
        if top_p >= 1 or mass < top_p or scaled[token] == scaled[kept[-1]]:
            kept.append(token)
        mass += weight
    kept = [token for token in kept if np.exp(scaled[token]) >= min_p]
    result = np.zeros(VOCAB)
    result[kept] = np.exp(scaled[kept]) / np.exp(scaled[kept]).sum()
    return result


# halves and odd shares, so that no cumulated probability meets its bound by rounding
ROW = st.fixed_dictionaries(
    {
        "logits": st.lists(st.integers(-8, 8), min_size=VOCAB, max_size=VOCAB),
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        "top_k": st.integers(0, VOCAB + 2),
        "top_p": st.sampled_from([0.0137, 0.377, 0.713, 0.9391, 0.99917, 1.0]),
        "min_p": st.sampled_from([0.0, 0.0137, 0.377, 0.9391, 1.0]),
    }
)


@given(st.lists(ROW, min_size=ROWS, max_size=ROWS))
def test_filtered_logits_are_the_references(rows):
    logits = jnp.array([row.pop("logits") for row in rows]) / 2.0
    actual = jax.nn.softmax(filter_rows(logits, **arrays(rows)), axis=-1)
    for row, found, settings in zip(np.asarray(logits, np.float64), actual, rows, strict=True):
        expected = probabilities(row, **settings)
        np.testing.assert_allclose(found, expected, atol=2e-6)
        np.testing.assert_array_equal(found > 0, expected > 0)


CASES = [
    {},
    {"temperature": 0.7},
    {"top_k": 3},
    {"temperature": 2.0, "top_p": 0.8},
    {"min_p": 0.2},
    {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.1},
]


def test_draws_have_the_exact_probabilities():
    """A histogram of 20,000 draws within five standard deviations, all settings in one batch."""
    draws, cases = 20_000, [OFF | case for case in CASES]
    logits = 1.5 * jax.random.normal(jax.random.key(1), (VOCAB,))
    rows = arrays([case for case in cases for _ in range(draws)])
    keys = jax.random.split(jax.random.key(2), draws * len(cases))
    tokens = np.asarray(sample_rows(jnp.tile(logits, (len(keys), 1)), keys, **rows)).reshape(len(cases), draws)
    for case, drawn in zip(cases, tokens, strict=True):
        expected = probabilities(np.asarray(logits, np.float64), **case)
        found = np.bincount(drawn, minlength=VOCAB) / draws
        assert (np.abs(found - expected) <= 5 * np.sqrt(expected * (1 - expected) / draws)).all(), case


def test_a_row_draws_what_it_would_draw_alone():
    rows = [OFF, OFF | {"temperature": 0.0}, OFF | {"top_k": 2, "temperature": 3.0}]
    logits = jax.random.normal(jax.random.key(3), (ROWS, VOCAB))
    keys = jax.random.split(jax.random.key(4), ROWS)
    together = sample_rows(logits, keys, **arrays(rows))
    for row in range(ROWS):
        one = slice(row, row + 1)
        assert sample_rows(logits[one], keys[one], **arrays(rows[one])) == together[one]
    assert together[1] == jnp.argmax(logits[1])


@pytest.mark.parametrize(
    "name, value",
    [
        *(("temperature", -1), ("temperature", float("nan")), ("top_k", -1), ("top_p", 0), ("top_p", 1.1)),
        *(("min_p", -0.1), ("min_p", 1.1), ("seed", -1), ("seed", 2**32)),
    ],
)
def test_values_out_of_range_are_refused(name, value):
    with pytest.raises(ElrError, match=rf"sampling\.{name}={value} "):
        Sampling(**{name: value})
