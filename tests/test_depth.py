"""The laws of the loop count against their exact marginals, and the cost of depth-sorted microbatches."""

import dataclasses
import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from elr_jax import config
from elr_jax.depth import (
    LAW_UNIONS,
    DepthLaw,
    Fixed,
    LogNormalPoisson,
    PerExample,
    PoissonDepth,
    RotatingSlice,
    SharedDraw,
    Switch,
    Weighted,
    executed_rounds,
    sort_by_depth,
    useful_rounds,
)
from elr_jax.errors import ElrError

KEY = jax.random.key(11)
PER_ROW = [
    PerExample(max_loops=4, forced=0.1),
    PerExample(max_loops=5),
    PoissonDepth(rate=8, max_loops=20),
    PoissonDepth(rate=2.5, max_loops=4),
    LogNormalPoisson(rate=32, max_loops=64),
    LogNormalPoisson(rate=3, max_loops=6, sigma=1.0),
    Weighted(probabilities=(0.4, 0.05, 0.05, 0.5)),
]
SHARED = [
    SharedDraw(max_loops=4),
    SharedDraw(max_loops=4, one_probability=1 / 3),
    RotatingSlice(max_loops=4, forced=0.1),
    RotatingSlice(max_loops=5, forced=0.15),
]
ALL = [*PER_ROW, *SHARED, Fixed(loops=3), Switch(after=0.0, law=PerExample(max_loops=3, forced=0.2))]
fractions = st.floats(0, 1) | st.fractions(0, 1, max_denominator=1000).map(float)


@functools.partial(jax.jit, static_argnames=("law", "batch_size", "total_steps"))
def sample_steps(law, key, steps, rows, batch_size, total_steps):
    return jax.vmap(lambda step: law.sample(key, step, rows, batch_size=batch_size, total_steps=total_steps))(steps)


def draw(law, steps, rows, batch_size, *, total_steps=1 << 20, key=KEY):
    """Depths of the given steps and rows: [steps, rows]."""
    steps, rows = (jnp.asarray(numbers, jnp.int32) for numbers in (steps, rows))
    return np.asarray(sample_steps(law, key, steps, rows, batch_size, total_steps))


def fits(depths, probabilities):
    """p-value of a chi-square test of loop counts against probabilities of 1..K; rare tails are pooled."""
    seen = np.bincount(depths.ravel(), minlength=len(probabilities) + 1)
    if seen[0] or len(seen) > len(probabilities) + 1:
        return 0.0
    expected = probabilities * depths.size
    rare = expected < 5
    seen, expected = (np.append(n[~rare], n[rare].sum() if rare.any() else []) for n in (seen[1:], expected))
    return stats.chisquare(seen, expected).pvalue


@pytest.mark.parametrize("law", PER_ROW, ids=str)
def test_histogram_of_independent_rows(law):
    depths = draw(law, np.arange(2048), np.arange(64), 64)
    assert fits(depths, law.marginal()) > 1e-3
    assert fits(depths[:, 7], law.marginal()) > 1e-3


@pytest.mark.parametrize("law", SHARED, ids=str)
def test_histogram_of_one_row_over_steps(law):
    """One row of 60,000 steps; rotation makes the forced steps regular, so that row's fit can only be closer."""
    depths = draw(law, np.arange(60_000), [3], 20)
    assert fits(depths, law.marginal()) > 1e-3


def test_the_chi_square_would_notice():
    right = PerExample(max_loops=4, forced=0.1)
    depths = draw(right, np.arange(2048), np.arange(32), 32)
    assert fits(depths, PerExample(max_loops=4, forced=0.12).marginal()) < 1e-9
    assert fits(depths, PerExample(max_loops=5).marginal()) < 1e-9
    assert fits(depths - 1, right.marginal()) == 0.0


@pytest.mark.parametrize("law", ALL, ids=str)
def test_pure_in_key_step_and_row(law):
    """A process with some rows, in any order and at any traced step, gets those rows' depths."""
    whole = draw(law, np.arange(40), np.arange(24), 24)
    some = np.array([17, 3, 4, 23])
    np.testing.assert_array_equal(draw(law, np.arange(40), some, 24), whole[:, some])
    assert whole.dtype == np.int32
    assert whole.min() >= 1
    assert whole.max() <= law.max_loops
    if not isinstance(law, Fixed):
        assert len(np.unique(whole, axis=0)) > 1  # the step matters
        assert (draw(law, np.arange(40), np.arange(24), 24, key=jax.random.key(12)) != whole).any()  # so does the key


def test_shared_draws_are_shared():
    shared = draw(SharedDraw(max_loops=4), np.arange(200), np.arange(16), 16)
    assert (shared == shared[:, :1]).all()
    rotating = draw(RotatingSlice(max_loops=4, forced=0.25), np.arange(200), np.arange(16), 16)
    assert all(len(set(row[row > 1])) <= 1 for row in rotating)
    assert (draw(PerExample(max_loops=4), np.arange(200), np.arange(16), 16).std(axis=1) > 0).all()


def forced_rows(forced, steps, batch_size):
    """Which rows the slice holds at each step: [steps, rows]."""
    steps, rows = jnp.asarray(steps, jnp.int32)[:, None], jnp.arange(max(batch_size, 40), dtype=jnp.int32)
    return np.asarray(RotatingSlice(max_loops=2, forced=forced)._in_slice(steps, rows, batch_size))[:, :batch_size]


@settings(deadline=None, max_examples=100)
@given(fraction=st.fractions(0, 1, max_denominator=60), batch_size=st.integers(1, 40))
def test_rotating_share_is_exact(fraction, batch_size):
    """Over one period every row is forced equally often, and each step's slice is f·B rows rounded down or up."""
    forced = forced_rows(float(fraction), np.arange(60), batch_size)[: fraction.denominator]
    assert (forced.sum(axis=0) == fraction.numerator).all()
    exact = fraction * batch_size
    assert set(forced.sum(axis=1)) <= {math.floor(exact), math.ceil(exact)}


@settings(deadline=None, max_examples=20)
@given(fraction=fractions, batch_size=st.sampled_from([1, 7, 1000, 65_535, 65_536]), step=st.integers(0, 10_000_000))
@example(fraction=0.876543, batch_size=65_536, step=9_999_999)
def test_rotating_slice_is_right_at_large_steps(fraction, batch_size, step):
    """32-bit arithmetic agrees with exact integers for ten million steps of 65,536 rows."""
    share = Fraction(fraction).limit_denominator(65_535)
    assert abs(share - Fraction(fraction)) < 8e-6
    first, end = (math.ceil(n * share * batch_size) for n in (step, step + 1))
    expected = np.zeros(batch_size, bool)
    expected[np.arange(first, end) % batch_size] = True
    np.testing.assert_array_equal(forced_rows(fraction, [step], batch_size)[0], expected)


def test_rotating_slice_is_contiguous_and_moves_on():
    forced = forced_rows(0.25, np.arange(8), 8)
    np.testing.assert_array_equal(np.argwhere(forced)[:, 1], np.arange(16) % 8)
    depths = draw(RotatingSlice(max_loops=4, forced=0.25), np.arange(8), np.arange(8), 8)
    assert (depths[forced] == 1).all()
    assert depths.max() > 1


@pytest.mark.parametrize("make", [PerExample, RotatingSlice])
@settings(deadline=None)
@given(forced=fractions, max_loops=st.integers(1, 12))
def test_one_loop_probability_and_mean(make, forced, max_loops):
    """p₁ = 1/K + (1−1/K)f and k̄ = f + (1−f)(K+1)/2."""
    law = make(max_loops=max_loops, forced=forced)
    f = float(Fraction(forced).limit_denominator(65_535)) if make is RotatingSlice else forced
    assert law.marginal()[0] == pytest.approx(1 / max_loops + (1 - 1 / max_loops) * f, abs=1e-12)
    assert law.mean() == pytest.approx(f + (1 - f) * (max_loops + 1) / 2, abs=1e-12)


def test_published_numbers():
    assert RotatingSlice(max_loops=4, forced=0.10).marginal() == pytest.approx([0.325, 0.225, 0.225, 0.225])
    assert RotatingSlice(max_loops=5, forced=0.15).marginal()[0] == pytest.approx(0.32)
    assert RotatingSlice(max_loops=5, forced=0.15).mean() == pytest.approx(2.7)
    assert 1 - PoissonDepth(rate=8, max_loops=64).marginal()[:20].sum() == pytest.approx(9e-5, rel=0.05)


@pytest.mark.parametrize("law", ALL, ids=str)
def test_marginals_are_distributions(law):
    probabilities = law.marginal()
    assert probabilities.shape == (law.max_loops,)
    assert probabilities.dtype == np.float64
    assert (probabilities >= 0).all()
    assert abs(probabilities.sum() - 1) < 1e-12
    assert law.mean() == pytest.approx(sum(k * p for k, p in enumerate(probabilities, 1)))


@settings(deadline=None)
@given(rate=st.floats(0.05, 60), max_loops=st.integers(1, 40))
def test_poisson_marginal(rate, max_loops):
    expected = stats.poisson.pmf(np.arange(1, max_loops + 1), rate)
    expected[0] += stats.poisson.pmf(0, rate)
    expected[-1] = 1.0 - expected[:-1].sum()
    np.testing.assert_allclose(PoissonDepth(rate=rate, max_loops=max_loops).marginal(), expected, atol=1e-12)


@pytest.mark.parametrize(("rate", "sigma", "max_loops"), [(32, 0.5, 128), (3, 1.5, 8), (8, 0.05, 30), (0.3, 4.0, 400)])
def test_log_normal_poisson_marginal(rate, sigma, max_loops):
    """Against adaptive quadrature, split where the integrand peaks."""
    probabilities = LogNormalPoisson(rate=rate, sigma=sigma, max_loops=max_loops).marginal()
    shift = math.log(rate) - sigma**2 / 2
    for loops in (1, 2, max_loops // 2, max_loops - 1):

        def integrand(z, loops=loops):
            return stats.norm.pdf(z) * stats.poisson.pmf(loops - 1, np.exp(shift + sigma * z))

        peak = np.clip((np.log(loops) - shift) / sigma, -8, 8)
        points = sorted({0.0, peak})
        expected, _ = integrate.quad(integrand, -12, 12, points=points, limit=400, epsabs=1e-13, epsrel=1e-12)
        assert probabilities[loops - 1] == pytest.approx(expected, abs=1e-12)


def test_weighted_marginal_is_what_was_given():
    """Up to the rounding of a sum that is 1 only to seven digits; a count of probability 0 is never drawn."""
    law = Weighted(probabilities=(0.4, 0.0, 0.1, 0.5))
    np.testing.assert_array_equal(law.marginal(), [0.4, 0.0, 0.1, 0.5])
    assert law.max_loops == 4 and law.mean() == pytest.approx(0.4 + 0.3 + 2.0)
    assert 2 not in draw(law, np.arange(2000), np.arange(16), 16)
    thirds = Weighted(probabilities=(0.3333333, 0.3333333, 0.3333333)).marginal()
    np.testing.assert_allclose(thirds, 1 / 3, rtol=1e-15)


def test_log_normal_poisson_mean():
    """Uncut, the mean is rate + 1 whatever sigma."""
    assert LogNormalPoisson(rate=32, max_loops=2000).mean() == pytest.approx(33, abs=1e-8)


def test_without_spread_log_normal_poisson_is_poisson():
    counts = stats.poisson.pmf(np.arange(19), 6.0)
    np.testing.assert_allclose(LogNormalPoisson(rate=6, sigma=0, max_loops=20).marginal()[:-1], counts, atol=1e-12)


@pytest.mark.parametrize(
    ("after", "total_steps", "first"),
    [(0.75, 100, 75), (0.07, 100, 7), (0.5, 5, 3), (0.0, 9, 0), (1.0, 9, 9), (0.29, 100, 29)],
)
def test_switch(after, total_steps, first):
    """One loop in the steps before after·total_steps, from then on the later law's own depths."""
    law, rows = SharedDraw(max_loops=4), jnp.arange(2)
    for step in {max(0, first - 1), first}:
        depth = Switch(after=after, law=law).sample(KEY, step, rows, batch_size=2, total_steps=total_steps)
        later = law.sample(KEY, step, rows, batch_size=2, total_steps=total_steps)
        np.testing.assert_array_equal(depth, later if step >= first else 1)


def test_switch_in_a_compiled_step():
    law = PerExample(max_loops=4, forced=0.1)
    laws = (Switch(after=0.75, law=law), law)
    depths, later = (draw(each, np.arange(40), np.arange(24), 24, total_steps=40) for each in laws)
    assert (depths[:30] == 1).all()
    assert (later[:30] > 1).any()
    np.testing.assert_array_equal(depths[30:], later[30:])


def test_switch_marginal():
    law = PerExample(max_loops=4)
    switch = Switch(after=0.75, law=law)
    assert list(switch.marginal(0.74)) == [1, 0, 0, 0]
    assert switch.mean(0.74) == 1
    assert switch.max_loops == 4
    np.testing.assert_array_equal(switch.marginal(0.75), law.marginal())


@pytest.mark.parametrize(("microbatches", "ratio"), [(8, 1.08), (4, 1.18), (1, 1.80)])
def test_sorted_microbatches_cost_what_the_design_says(microbatches, ratio):
    """Rounds executed over rounds needed, for 32 Poisson(8) sequences in microbatches of 4, 8 and 32."""
    depths = draw(PoissonDepth(rate=8, max_loops=40), np.arange(3000), np.arange(32), 32)
    executed = useful = 0
    for depth in depths:
        executed += executed_rounds(np.sort(depth)[::-1], microbatches)
        useful += useful_rounds(depth)
    assert executed / useful == pytest.approx(ratio, rel=0.02)


@settings(deadline=None)
@given(depth=st.lists(st.integers(1, 9), min_size=12, max_size=12), microbatches=st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_sorting_is_a_stable_permutation_and_never_costs_more(depth, microbatches):
    depth = np.array(depth, np.int32)
    order = sort_by_depth(jnp.asarray(depth), microbatches)
    assert order.dtype == jnp.int32
    assert sorted(order.tolist()) == list(range(12))
    assert order.tolist() == sorted(range(12), key=lambda row: -depth[row])
    ordered = depth[np.asarray(order)]
    assert useful_rounds(depth) <= executed_rounds(ordered, microbatches) <= executed_rounds(depth, microbatches)
    assert executed_rounds(ordered, 1) == 12 * depth.max()
    assert executed_rounds(depth, 12) == useful_rounds(depth)
    assert executed_rounds(jnp.asarray(ordered), microbatches) == executed_rounds(ordered, microbatches)


@pytest.mark.parametrize("law", ALL, ids=str)
def test_json_round_trip(law):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Holder:
        depth: DepthLaw

    data = config.to_dict(Holder(depth=law), unions=LAW_UNIONS)
    assert config.from_dict(Holder, data, unions=LAW_UNIONS) == Holder(depth=law)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fixed(loops=0), "loops=0"),
        (lambda: SharedDraw(max_loops=0), "max_loops=0"),
        (lambda: SharedDraw(max_loops=4, one_probability=1.5), "one_probability=1.5"),
        (lambda: RotatingSlice(max_loops=0, forced=0.1), "max_loops=0"),
        (lambda: RotatingSlice(max_loops=4, forced=-0.1), "forced=-0.1"),
        (lambda: PerExample(max_loops=4, forced=math.nan), "forced=nan"),
        (lambda: PerExample(max_loops=-1), "max_loops=-1"),
        (lambda: PoissonDepth(rate=0, max_loops=4), "rate=0"),
        (lambda: PoissonDepth(rate=8, max_loops=0), "max_loops=0"),
        (lambda: LogNormalPoisson(rate=math.inf, max_loops=4), "rate=inf"),
        (lambda: LogNormalPoisson(rate=8, max_loops=4, sigma=-1), "sigma=-1"),
        (lambda: Weighted(probabilities=()), r"probabilities=\(\) are no"),
        (lambda: Weighted(probabilities=(1.5, -0.5)), r"probabilities=\(1.5, -0.5\) are no"),
        (lambda: Weighted(probabilities=(math.nan, 1.0)), "are no probabilities"),
        (lambda: Weighted(probabilities=(0.5, 0.4)), "add up to 0.9: divide"),
        (lambda: Switch(after=1.1, law=Fixed(loops=2)), "after=1.1"),
        (lambda: Switch(after=0.5, law=Switch(after=0.5, law=Fixed(loops=2))), "nested"),
        (lambda: draw(RotatingSlice(max_loops=4, forced=0.1), [0], [0], 65_537), "batch_size=65537"),
        (lambda: sort_by_depth(jnp.ones(10, jnp.int32), 4), "10 rows can't be cut into 4 equal parts"),
        (lambda: executed_rounds(np.ones(10, np.int32), 0), "10 rows can't be cut into 0 equal parts"),
    ],
)
def test_bad_values_name_themselves(make, message):
    with pytest.raises(ElrError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
