"""Evaluation at every loop count against the model itself."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import perturb, programs

from elr_jax import model, parameters
from elr_jax.config import AttentionConfig, ConditioningConfig, LoopRule, MLPConfig, ModelConfig
from elr_jax.errors import ElrError
from elr_jax.losses import cross_entropy
from elr_jax.train import evaluate as module
from elr_jax.train.data import Batch
from elr_jax.train.evaluate import evaluate

CONFIG = ModelConfig(
    vocab_size=5,
    d_model=8,
    prelude="",
    core="*",
    coda="",
    attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=4),
    mlp=MLPConfig(d_ff=8),
    loop=LoopRule(initial="random", inject="residual", max_loops=3),
)
KEY = jax.random.key(3)


def batch(seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    tokens, targets, segments = rng.integers(0, 5, (3, 2, 6)).astype(np.int32)
    weights = (rng.random((2, 6)) < 0.3 + 0.5 * seed).astype(np.float32)
    return Batch(tokens=tokens, targets=targets, weights=weights, segment_ids=np.sort(segments))


def test_scores_are_means_over_all_scored_tokens():
    params, data = parameters.init(KEY, CONFIG), [batch(0), batch(1)]
    results = evaluate(params, data, config=CONFIG, bytes_per_token=2.0, key=KEY)
    assert [result.loops for result in results] == [1, 2, 3]
    weights = np.stack([part.weights for part in data])
    targets = np.stack([part.targets for part in data])
    states, losses = [], {k: [] for k in (1, 2, 3)}
    apply = jax.jit(lambda *inputs: model.apply(params, *inputs[:2], config=CONFIG, segment_ids=inputs[2], key=KEY))
    for part in data:
        depth = jnp.full(2, 3)
        states.append(model.states(params, part.tokens, depth, config=CONFIG, segment_ids=part.segment_ids, key=KEY))
        for k in losses:
            losses[k].append(apply(part.tokens, jnp.full(2, k), part.segment_ids))
    states = np.stack(states)
    for result in results:
        k, logits = result.loops, jnp.stack(losses[result.loops])
        loss = np.average(jax.vmap(cross_entropy)(logits, targets), weights=weights)
        assert result.loss == pytest.approx(loss, rel=1e-5)
        assert result.bits_per_byte == pytest.approx(loss / math.log(2) / 2, rel=1e-5)
        assert result.accuracy == pytest.approx(np.average(logits.argmax(-1) == targets, weights=weights))
        moved = np.linalg.norm(states[:, k] - states[:, k - 1], axis=-1) / np.linalg.norm(states[:, k], axis=-1)
        assert result.residual == pytest.approx(moved.mean(), rel=1e-5)
    assert evaluate(params, data, config=CONFIG, key=KEY)[0].bits_per_byte is None


def test_a_conditioned_model_moves_as_in_a_pass_of_its_own_depth():
    """Round k of a longer pass is another function, since the budget is told."""
    told = ConditioningConfig(width=4, sinusoids=4, rank=2)
    config = dataclasses.replace(CONFIG, core="-", conditioning=told, loop=LoopRule(max_loops=2))
    params = perturb(parameters.init(KEY, config))
    results = evaluate(params, [batch(0)], config=config)
    run = jax.jit(partial(model.states, config=config))
    moved = {}
    for k in (1, 2):
        states = run(params, batch(0).tokens, jnp.full(2, k), segment_ids=batch(0).segment_ids)
        moved[k] = np.linalg.norm(states[1:] - states[:-1], axis=-1) / np.linalg.norm(states[1:], axis=-1)
        assert results[k - 1].residual == pytest.approx(moved[k][k - 1].mean(), rel=1e-5)
    assert abs(moved[1][0].mean() - moved[2][0].mean()) > 1e-3


@pytest.mark.parametrize(
    ("data", "found"),
    [
        ([], "no batch"),
        ([dataclasses.replace(batch(0), weights=np.zeros((2, 6), np.float32))], "no token with a weight"),
    ],
)
def test_data_without_a_scored_token_is_refused(data, found):
    with pytest.raises(ElrError, match=f"has {found}"):
        evaluate(parameters.init(KEY, CONFIG), data, config=CONFIG, key=KEY)


def test_a_second_evaluation_compiles_nothing():
    params = parameters.init(KEY, CONFIG)
    compiled = lambda: (programs(module._score), programs(module.residuals))
    evaluate(params, [batch(0)], config=CONFIG, key=KEY)
    before = compiled()
    evaluate(params, [batch(1)], config=CONFIG, key=KEY)
    assert compiled() == before
    assert min(before) >= 1
