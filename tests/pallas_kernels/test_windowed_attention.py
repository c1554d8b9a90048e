"""Attention's TPU kernels, interpreted, and its XLA form against every pair of tokens spelled out."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import assert_near, check, interpreted, normal

from elr_jax.errors import ElrError
from pallas_kernels.interpret import gpu_interpreter, plain_interpreter
from pallas_kernels.windowed_attention import (
    cached_attention,
    held_positions,
    pallas_gpu_hopper,
    reference,
    windowed_attention,
    xla,
)
from pallas_kernels.windowed_attention.band import Band
from pallas_kernels.windowed_attention.pallas_tpu_cached import _tokens


def run_sequence(length, heads, share, width, window, dtype, *, lengths, joint, documents, **how):
    """The op on random rows, with documents, rows of their own length and global keys where asked."""
    groups, batch = heads // share, 2
    q = normal(0, batch, length, heads, width, dtype=dtype)
    keys = [normal(j, batch, length, groups, width, dtype=dtype) for j in range(1, 5 if joint else 3)]
    ids = jnp.where(jnp.arange(length) < length // 3, 4, -2)[None].repeat(batch, 0) if documents else None
    options = {"segment_ids": ids, "window": window, "lengths": lengths}

    def bound(function):
        def call(q, k, v, *far, **implementation):
            return function(q, k, v, global_keys=far or None, **options, **implementation)

        return call

    return check(bound(windowed_attention), bound(reference.windowed_attention), (q, *keys), dtype, **how)


def test_a_window_with_documents_short_rows_and_global_keys():
    """Rows that see no key too: all of the first, and those of the second beyond its length."""
    lengths = jnp.array([0, 41])
    how = {"lengths": lengths, "joint": True, "documents": True, "interpreter": plain_interpreter}
    out, *_ = run_sequence(50, 2, 2, 8, 20, "float32", **how)
    assert not np.asarray(out[0]).any() and not np.asarray(out[1, 41:]).any() and np.asarray(out[1, :41]).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "length, heads, share, width, window, dtype",
    [
        (300, 2, 2, 16, None, "float32"),
        (257, 3, 1, 64, 1, "bfloat16"),
        (140, 8, 8, 16, 140, "bfloat16"),
        (129, 2, 1, 8, 1000, "float32"),
        (1, 2, 1, 8, 3, "float32"),
        (700, 1, 1, 8, 130, "float32"),
    ],
)
def test_corners(length, heads, share, width, window, dtype):
    """One head a key and eight, W = 1, W ≥ T, one token, several blocks of a window and of all keys."""
    run_sequence(length, heads, share, width, window, dtype, lengths=None, joint=False, documents=False)


@pytest.mark.slow
@settings(max_examples=8)
@given(st.data())
def test_any_shape(data):
    length, share = data.draw(st.integers(1, 300)), data.draw(st.sampled_from([1, 2, 8]))
    run_sequence(
        length,
        share * data.draw(st.integers(1, 2)),
        share,
        data.draw(st.sampled_from([4, 64])),
        data.draw(st.none() | st.integers(1, 350)),
        data.draw(st.sampled_from(["float32", "bfloat16"])),
        lengths=jnp.array(data.draw(st.lists(st.integers(0, length), min_size=2, max_size=2))),
        joint=data.draw(st.booleans()),
        documents=data.draw(st.booleans()),
    )


CACHES = [
    # batch · new · heads · share · width · slots · window · tokens before
    pytest.param((3, 1, 4, 2, 16, 40, None, [0, 7, 40]), "float32", id="linear"),
    pytest.param((3, 3, 2, 1, 16, 5, 5, [0, 4, 23]), "float32", id="ring"),
    pytest.param((2, 1, 2, 2, 64, 1100, 100, [900, 1100]), "bfloat16", id="window on linear"),
    pytest.param((2, 2, 8, 8, 8, 600, 600, [1305, 300]), "float32", id="turned ring"),
    pytest.param((1, 130, 8, 8, 8, 70, 70, [33]), "float32", id="chunk"),
]


def test_a_turned_ring_and_two_new_tokens():
    run_cached((2, 2, 2, 2, 8, 5, 5, [3, 23]), "float32", plain_interpreter)


@pytest.mark.slow
@pytest.mark.parametrize("sizes, dtype", CACHES)
def test_a_cache_is_slots_and_new_tokens_spelled_out(sizes, dtype):
    run_cached(sizes, dtype, interpreted)


def run_cached(sizes, dtype, interpreter, kernels="pallas_tpu"):
    batch, new, heads, share, width, slots, window, before = sizes
    groups = heads // share
    q = normal(0, batch, new, heads, width, dtype=dtype)
    k, v = (normal(j, batch, new, groups, width, dtype=dtype) for j in (1, 2))
    past = [normal(j, batch, groups, slots, width, dtype=dtype) for j in (3, 4)]
    operands = (q, k, v, *past, jnp.array(before))
    expected = [reference.cached_attention(*operands, window=window)]
    assert_near([cached_attention(*operands, window=window)], expected, dtype)
    with interpreter():
        run = jax.jit(lambda *x: cached_attention(*x, window=window, implementation=kernels))
        assert_near([run(*operands)], expected, dtype)


@pytest.mark.parametrize("new, before", [(1, [0, 7, 40]), (4, [3, 12, 30])])
def test_global_keys_beside_a_cache_are_one_softmax(new, before):
    """A window's ring of 5 and a linear cache of the same tokens; no key counts twice."""
    operands = [normal(j, 3, new, groups, 8) for j, groups in enumerate((4, 2, 2))]
    ring = [normal(j, 3, 2, 5, 8) for j in (3, 4)]
    shared = *(normal(j, 3, new, 2, 8) for j in (5, 6)), *(normal(j, 3, 2, 44, 8) for j in (7, 8))
    arguments = (*operands, *ring, jnp.array(before))
    found = cached_attention(*arguments, window=5, global_keys=shared)
    assert_near([found], [reference.cached_attention(*arguments, window=5, global_keys=shared)], "float32")
    assert (found[2] != cached_attention(*arguments, window=5)[2]).any()
    with pytest.raises(ElrError, match="no kernel has global keys beside a cache"):
        cached_attention(*arguments, window=5, global_keys=shared, implementation="pallas_tpu")


@pytest.mark.parametrize("joint", [False, True])
def test_tokens_before_the_first_are_seen_by_global_keys_alone(joint):
    operands = [normal(j, 3, 4, groups, 8) for j, groups in enumerate((4, 2, 2))]
    ring = [normal(j, 3, 2, 5, 8) for j in (3, 4)]
    shared = *(normal(j, 3, 4, 2, 8) for j in (5, 6)), *(normal(j, 3, 2, 44, 8) for j in (7, 8))
    arguments = (*operands, *ring, jnp.array([0, 12, 30]))
    options = {"window": 5, "global_keys": shared if joint else None}
    found, expected = (
        function(*arguments, **options, first=jnp.array([0, 12, 28]))
        for function in (cached_attention, reference.cached_attention)
    )
    assert_near([found], [expected], "float32")
    whole = cached_attention(*arguments, **options)
    np.testing.assert_array_equal(found[0], whole[0])
    assert (found[1, 0] != whole[1, 0]).any() and (found[2, 0] != whole[2, 0]).any()
    with pytest.raises(ElrError, match="no kernel"):
        cached_attention(*arguments, **options, first=jnp.zeros(3, jnp.int32), implementation="pallas_tpu")


@pytest.mark.parametrize("kernels", ["pallas_tpu", "pallas_gpu"])
@pytest.mark.slow
@pytest.mark.parametrize("sizes, dtype", CACHES[:2])
def test_plainly_interpreted_caches(sizes, dtype, kernels):
    run_cached(sizes, dtype, plain_interpreter, kernels)


@pytest.mark.slow
@settings(max_examples=6)
@given(st.data())
def test_any_shape_on_gpu(data):
    """Triton's kernels have no interpreter that knows a GPU; their mathematics is what is tested here."""
    length, share = data.draw(st.integers(1, 200)), data.draw(st.sampled_from([1, 8]))
    run_sequence(
        length,
        share,
        share,
        data.draw(st.sampled_from([16, 64])),
        data.draw(st.none() | st.integers(1, 250)),
        data.draw(st.sampled_from(["float32", "bfloat16"])),
        lengths=jnp.array(data.draw(st.lists(st.integers(0, length), min_size=2, max_size=2))),
        joint=data.draw(st.booleans()),
        documents=data.draw(st.booleans()),
        interpreter=plain_interpreter,
        kernels="pallas_gpu",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "length, share, width, band",
    [(100, 2, 64, Band(0, 70)), (200, 1, 128, Band(0, None)), (130, 2, 64, Band(60, None))],
)
def test_hoppers_kernel_is_the_xla_form(length, share, width, band):
    """Mosaic GPU's interpreter, with races looked for; JAX has it since 0.12."""
    mosaic = pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
    if not hasattr(mosaic, "force_gpu_interpret_mode"):
        pytest.skip("this JAX can't interpret Mosaic GPU kernels")
    q = normal(0, 2, length, 2, width, dtype="bfloat16")
    k, v = (normal(j, 2, length, 2 // share, width, dtype="bfloat16") for j in (1, 2))
    ids = jnp.where(jnp.arange(length) < length // 3, 4, 1)[None].repeat(2, 0)
    with gpu_interpreter(detect_races=True):
        found = jax.jit(partial(pallas_gpu_hopper.forward, band=band))(q, k, v, ids, ids)
    assert_near(found, xla.attention(q, k, v, ids, ids, band=band), "bfloat16")


@pytest.mark.parametrize("size, start, slots", [(7, 0, 7), (7, 4, 4), (1, 0, 1)])
def test_a_kernels_slots_hold_the_caches_tokens(size, start, slots):
    lengths = jnp.arange(3 * size + 2)
    held = np.asarray(held_positions(lengths, size))
    token, there = jax.vmap(lambda length: _tokens(length, start, slots, size))(lengths)
    held = np.pad(held, ((0, 0), (0, slots)), constant_values=-1)[:, start : start + slots]
    np.testing.assert_array_equal(there[:, 0], held >= 0)
    np.testing.assert_array_equal(np.where(held >= 0, token[:, 0], -1), np.maximum(held, -1))


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"width": 264}, "head_dim=264 is above 256"),
        ({"heads": 17}, "17 query heads share a key-value head"),
        ({"dtype": "float16"}, "its operands are float16"),
    ],
)
def test_a_kernel_that_cannot_run_says_why(changes, reason):
    sizes = {"heads": 2, "width": 8, "dtype": "float32"} | changes
    q = jnp.ones((1, 3, sizes["heads"], sizes["width"]), sizes["dtype"])
    with pytest.raises(ElrError, match=reason):
        windowed_attention(q, q[:, :, :1], q[:, :, :1], window=2, implementation="pallas_tpu")
    assert windowed_attention(q, q[:, :, :1], q[:, :, :1], window=2).shape == q.shape


def test_a_window_of_nothing_is_refused():
    q = jnp.ones((1, 3, 1, 4))
    with pytest.raises(ElrError, match="window=0 must be at least 1"):
        windowed_attention(q, q, q, window=0)
