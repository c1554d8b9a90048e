"""The JAX model in float64 against `checkpoints_convert.reference`, which shares no code with it: equal to 1e-10."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import tiny_dory

from checkpoints_convert import ladder, load_dory, reference
from checkpoints_convert.golden import cases, chunkings
from checkpoints_convert.random_dory import write_random_dory
from checkpoints_convert.tensor_file import read_entries
from elr_jax import Runtime, apply, init_cache

TOLERANCE = 1e-10
RUNTIME = Runtime(dtype="float64")
MODEL = tiny_dory(prelude="S-", core="S-*-", coda="*-")
TOKENS = np.random.default_rng(1).integers(61, size=17)  # the window of 5 is crossed three times
LOOPS = (1, 2, 4, 8)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module", params=[True, False], ids=["unit rows", "other rows"])
def folder(request, tmp_path_factory) -> Path:
    """Embedding rows of norm 1, or of 0.5 to 1.5."""
    return write_random_dory(tmp_path_factory.mktemp("dory"), MODEL, seed=5, unit_embedding=request.param)


def both_sides(folder: Path, *, embedding_norm: bool = False):
    """Float64 parameters, their config and the tensors for the reference."""
    params, config = load_dory(folder, max_loops=max(LOOPS), embedding_norm=embedding_norm)
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), params)
    tensors = {name: entry.read() for name, entry in read_entries(folder / "model.safetensors").items()}
    return params, config, tensors


def assert_equal(actual, expected):
    error = np.abs(np.asarray(actual) - expected).max()
    assert error <= TOLERANCE, f"off by {error} at logits of standard deviation {expected.std()}"


def test_every_loop_count_cache_and_chunking(folder):
    params, config, tensors = both_sides(folder)
    for case in cases(LOOPS, len(TOKENS)):
        calls = chunkings(len(TOKENS))[case.calls]
        made = ladder.logits(params, TOKENS, case, config=config, runtime=RUNTIME)
        mode = case.mode or "per_loop"
        assert made.dtype == np.float64
        assert_equal(made, reference.forward(tensors, TOKENS, case.loops, config=config, mode=mode, calls=calls).logits)


def test_embedding_norm_matters_where_rows_are_not_of_norm_one(folder):
    logits = []
    for normed in (False, True):
        _, config, tensors = both_sides(folder, embedding_norm=normed)
        logits.append(reference.forward(tensors, TOKENS, 2, config=config).logits)
    effect = np.abs(logits[0] - logits[1]).max()
    rows = np.linalg.norm(tensors["backbone.embeddings.weight"], axis=1)
    assert effect < 1e-4 if np.abs(rows - 1).max() < 1e-3 else effect > 0.1


@pytest.mark.parametrize("embedding_norm", [False, True])
@pytest.mark.parametrize("gate_init", [None, 2.5])
def test_every_hidden_state(folder, embedding_norm, gate_init):
    """With the settings that the two ports differ in, and one that only vLLM's has."""
    params, config, tensors = both_sides(folder, embedding_norm=embedding_norm)
    assert config.sphere is not None
    config = replace(config, sphere=replace(config.sphere, gate_init=gate_init))
    made = ladder.rungs(params, TOKENS, 3, config=config, runtime=RUNTIME)
    expected = reference.forward(tensors, TOKENS, 3, config=config).rungs
    assert list(made) == list(expected)
    for name, rung in expected.items():
        assert np.abs(made[name] - rung).max() <= TOLERANCE, name


@pytest.mark.parametrize("mode", ["per_loop", "last_loop"])
def test_loop_counts_that_change_between_cached_calls(folder, mode):
    params, config, tensors = both_sides(folder)
    calls, counts = [4, 1, 4, 1, 3, 4], [2, 4, 1, 8, 2, 1]
    made = run_calls(params, TOKENS[None], [calls], [counts], config=config, mode=mode)[0]
    assert_equal(made, reference.forward(tensors, TOKENS, counts, config=config, mode=mode, calls=calls).logits)


@pytest.mark.parametrize("mode", ["per_loop", "last_loop"])
def test_batch_of_mixed_lengths_and_loop_counts(folder, mode):
    """Every row gives another number of tokens to each call, and runs them at its own loop count: as alone."""
    params, config, tensors = both_sides(folder)
    calls, counts = [[4, 4, 3, 1], [3, 1, 1, 4], [1, 4, 4, 4], [2, 1, 4, 2]], [4, 1, 8, 2]
    rows = np.random.default_rng(2).integers(61, size=(4, len(TOKENS)))
    made = run_calls(params, rows, calls, [[count] * 4 for count in counts], config=config, mode=mode)
    for row, (sizes, count) in enumerate(zip(calls, counts, strict=True)):
        tokens = rows[row, : sum(sizes)]
        expected = reference.forward(tensors, tokens, count, config=config, mode=mode, calls=sizes)
        assert_equal(made[row], expected.logits)


def run_calls(params, rows, calls, counts, *, config, mode):
    """Logits of each row's tokens, given in calls of its own sizes, padded to one width."""
    width, done = max(map(max, calls)), np.zeros(len(rows), int)
    cache = init_cache(config, *rows.shape, mode=mode, dtype=jnp.float64)
    padded, made = np.pad(rows, ((0, 0), (0, width))), [[] for _ in rows]
    for sizes, depth in zip(np.transpose(calls), np.transpose(counts), strict=True):
        part = np.stack([row[start : start + width] for row, start in zip(padded, done, strict=True)])
        part, depth, new = (jnp.asarray(x, jnp.int32) for x in (part, depth, sizes))
        logits, cache = ladder.extend_jit(
            params, part, depth, cache, new=new, config=config, runtime=RUNTIME, fresh=False
        )
        for row, size in enumerate(sizes):
            made[row].append(logits[row, :size])
        done += sizes
    return [np.concatenate(parts) for parts in made]


def test_left_padded_rows_and_explicit_positions(folder):
    """Positions count from each row's first token, or from 7; padding is a segment of its own.

    The scale after the rotation makes the model depend on absolute positions, so wrong ones show.
    """
    params, config, tensors = both_sides(folder)
    lengths, starts, width = np.array([17, 9, 2, 17]), np.array([0, 0, 0, 7]), 17
    pad = width - lengths[:, None]
    rows = np.where(np.arange(width) < pad, 0, np.random.default_rng(3).integers(61, size=(4, width)))
    positions = np.maximum(np.arange(width) - pad, 0) + starts[:, None]
    segments = jnp.asarray(np.arange(width) >= pad, jnp.int32)
    depth, where = jnp.array([2, 4, 1, 2], jnp.int32), jnp.asarray(positions, jnp.int32)
    run = jax.jit(partial(apply, config=config, runtime=RUNTIME))
    made = run(params, jnp.asarray(rows), depth, positions=where, segment_ids=segments)
    for row, length in enumerate(lengths):
        exact = partial(reference.forward, tensors, rows[row, -length:], int(depth[row]), config=config)
        assert_equal(made[row, -length:], exact(positions=positions[row, -length:]).logits)
    assert np.abs(made[3] - exact().logits).max() > 0.1
