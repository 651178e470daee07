"""Releases: what one row can change, what noise is, and that bytes are repeated."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2 as chi2_distribution

from coterie.base.errors import InvalidInput, Refused
from coterie.data.users import Users
from coterie.federated.private.ledger import NodeLedger
from coterie.federated.private.policy import mu_of
from coterie.federated.private.release import (
    CENTRES,
    RANGES,
    SUMMARY,
    ReleaseQuestion,
    discrete_normal,
    release,
    rows_of,
)

STAGES = (RANGES, CENTRES, SUMMARY)
chi2_of = chi2_distribution.ppf


def question(stage, p=3, mu=0.5, **more):
    return ReleaseQuestion(stage=stage, mu=mu, centre=np.linspace(-1, 1, p + 1), scale=np.linspace(0.5, 2, p + 1),
                           n_features=p, **more)


def one_user(rows):
    rows = np.asarray(rows, dtype=float)
    return Users.from_arrays(rows[:, :-1], rows[:, -1], np.zeros(len(rows), dtype=int))


numbers = st.one_of(st.floats(-5, 5), st.floats(-1e12, 1e12), st.sampled_from([0.0, 1e150, -1e150, 1e-300]))
row = st.lists(numbers, min_size=4, max_size=4)


@settings(max_examples=150)
@given(st.sampled_from(STAGES), st.lists(row, min_size=1, max_size=4), row)
def test_one_row_changes_a_release_by_no_more_than_its_sensitivity(stage, rows, other):
    asked = question(stage)
    with_it, without = (asked.exact(one_user(part))[0] for part in ([*rows, other], rows))
    assert np.linalg.norm(with_it - without) <= asked.sensitivity * (1 + 1e-9)


@settings(max_examples=80)
@given(st.sampled_from(STAGES), st.lists(row, min_size=1, max_size=4), st.lists(row, min_size=1, max_size=4))
def test_all_rows_of_a_user_change_a_release_per_user_by_no_more(stage, rows, others):
    asked = question(stage, per_user=True)
    one, other = (asked.exact(one_user(part))[0] for part in (rows, others))
    assert np.linalg.norm(one - other) <= asked.sensitivity * (1 + 1e-9)


def test_the_sensitivity_is_reached():
    """So the noise is not larger than needed, either: a row of full length, and a target at the bound."""
    asked = ReleaseQuestion(stage=SUMMARY, mu=1.0, centre=np.zeros(3), scale=np.ones(3), n_features=2)
    assert np.linalg.norm(asked.exact(one_user([[1.0, 1.0, 1.0]]))[0]) == pytest.approx(asked.sensitivity)


@pytest.mark.parametrize("stage", STAGES)
def test_noise_has_the_deviation_that_the_promise_needs(stage):
    asked = question(stage, mu=0.7)
    exact = np.zeros((200_000 // asked.length, asked.length))
    noise = asked.noisy(exact, 0)
    assert noise.std() == pytest.approx(asked.sensitivity / 0.7, rel=0.02)
    fresh = asked.noisy(exact)
    assert fresh.std() == pytest.approx(asked.sensitivity / 0.7, rel=0.02)
    assert not np.array_equal(fresh, asked.noisy(exact))


def test_noise_of_the_operating_system_is_normal():
    from scipy.stats import kstest

    drawn = discrete_normal(20_000, 1 << 24) / (1 << 24)
    assert kstest(drawn, "norm").pvalue > 1e-6
    assert kstest(drawn * 1.05, "norm").pvalue < 0.05


@pytest.mark.parametrize("s", [1, 2, 5])
def test_integers_have_the_probabilities_of_the_discrete_gaussian(s):
    """On narrow distributions, where rounded normal numbers have others: 3 % at 0 for s = 1."""
    n, k = 200_000, np.arange(-4 * s, 4 * s + 1)
    wide = np.arange(-60 * s, 60 * s + 1)
    expected = np.exp(-k**2 / (2 * s**2)) / np.exp(-wide**2 / (2 * s**2)).sum()

    def chi2(drawn):
        seen = np.array([(drawn == value).sum() for value in k])
        return ((seen - n * expected) ** 2 / (n * expected)).sum()

    assert chi2(discrete_normal(n, s)) < chi2_of(1 - 1e-9, len(k) - 1)
    shifted = np.rint(np.random.default_rng(0).normal(size=n) * s * 1.03)
    assert chi2(shifted) > chi2_of(1 - 1e-9, len(k) - 1)


def test_noise_beyond_integers_is_refused():
    with pytest.raises(InvalidInput, match="positive integer"):
        discrete_normal(3, 1 << 60)
    asked = question(SUMMARY, mu=1e-15)
    with pytest.raises(InvalidInput, match="larger mu"):
        asked.noisy(np.zeros(asked.length))


@settings(max_examples=60)
@given(st.sampled_from(STAGES), st.booleans(), st.lists(row, min_size=1, max_size=4), row)
def test_rounding_to_the_grid_is_within_the_noise(stage, per_user, rows, other):
    """The steps of the noise count what rounding may add."""
    asked = question(stage, per_user=per_user)
    one, two = (np.rint(asked.exact(one_user(part), asked.grid)[0] / asked.grid) for part in ([*rows, other], rows))
    assert np.linalg.norm(one - two) <= asked.steps * asked.mu
    assert asked.steps * asked.grid <= asked.tau * 1.001


@settings(max_examples=40)
@given(st.sampled_from(STAGES), st.lists(row, min_size=2, max_size=5), st.randoms())
def test_sums_do_not_depend_on_the_order_of_rows(stage, rows, chance):
    """They are sums of integers, whose last digit says nothing."""
    asked, mixed = question(stage), list(rows)
    chance.shuffle(mixed)
    one, two = (asked.exact(one_user(part), asked.grid) for part in (rows, mixed))
    assert np.array_equal(one, two)
    twice = asked.exact(one_user([*rows, *rows]), asked.grid)
    assert np.array_equal(twice, 2 * one)


def test_sums_of_plain_numbers_depend_on_the_order_of_rows():
    """The twin."""
    rows = np.random.default_rng(0).normal(size=(50, 4))
    one, two = (question(SUMMARY).exact(one_user(part)) for part in (rows, rows[::-1]))
    assert not np.array_equal(one, two)


def test_large_sums_get_every_digit_of_the_noise():
    """The noise is added to an integer; added to a rounded number, its last digits would say how large the sum is."""
    asked = question(SUMMARY, mu=1e-8)
    large = np.full(4_000, 3.0 * 2**53) * asked.grid
    added = np.rint(asked.noisy(large) / asked.grid) - 3.0 * 2**53
    assert abs(added.std() / asked.steps - 1) < 0.1


def test_released_numbers_are_on_a_grid():
    asked = question(SUMMARY)
    numbers = asked.noisy(np.full((2, asked.length), np.pi)) / asked.grid
    assert np.array_equal(numbers, np.round(numbers))
    assert np.log2(asked.grid) == np.round(np.log2(asked.grid))  # so that nothing is rounded on the way
    seeded = asked.noisy(np.full((2, asked.length), np.pi), 0) / (asked.tau * 2.0**-12)
    assert np.abs(seeded - np.round(seeded)).max() < 1e-6


def test_a_summary_is_sums_of_products():
    users = one_user([[0.2, -0.1, 0.3, 0.5], [0.1, 0.4, 0.0, -0.5]])
    asked = ReleaseQuestion(stage=SUMMARY, mu=1.0, centre=np.zeros(4), scale=np.ones(4), n_features=3)
    a, y = rows_of(users.features), users.targets
    released, k = asked.exact(users)[0], 10
    i, j = np.triu_indices(4)
    assert np.allclose(released[:k], (a.T @ a)[i, j] * np.where(i == j, 1, np.sqrt(2)))
    assert np.allclose(released[k:k + 4], 1.5 * a.T @ y)
    assert released[-1] == pytest.approx(0.25 * y @ y)


def test_a_release_is_repeated_also_when_a_row_has_changed():
    """Otherwise the same question would tell whether it has."""
    users = one_user([[1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 0.0, 1.0]])
    other = one_user([[1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 0.0, 1.5]])
    budget = mu_of(4.0, 1e-5)
    asked = question(SUMMARY, mu=0.9 * budget)
    with NodeLedger(None, budget) as ledger:
        first = release(users, ledger, 0, asked)
        assert release(users, ledger, 0, asked) == first
        assert ledger.spent(0) == pytest.approx(0.9 * budget)
        assert release(other, ledger, 0, asked) == first
        for changed in ({"about": "other columns"}, {"grouping": "shift"}):  # another question costs
            with pytest.raises(Refused, match="spent"):
                release(other, ledger, 0, asked, **changed)
        assert ledger.spent(0) == pytest.approx(0.9 * budget)


def test_nothing_is_released_without_a_ledger():
    with pytest.raises(Refused, match="no privacy budget"):
        release(one_user([[0.0, 1.0, 2.0, 3.0]]), None, 0, question(CENTRES))


@pytest.mark.parametrize("wrong", [
    {"stage": 7}, {"mu": 0.0}, {"mu": np.nan}, {"mu": np.inf}, {"scale": np.zeros(4)}, {"scale": np.ones(3)},
    {"centre": np.full(4, np.nan)}, {"n_features": 1}])
def test_questions_that_are_none_are_refused(wrong):
    good = {"stage": SUMMARY, "mu": 1.0, "centre": np.zeros(4), "scale": np.ones(4), "n_features": 3}
    ReleaseQuestion(**good)
    with pytest.raises(InvalidInput):
        ReleaseQuestion(**{**good, **wrong})


def test_rows_of_other_columns_are_refused():
    with pytest.raises(InvalidInput, match="columns"):
        question(SUMMARY, p=2).exact(one_user([[0.0, 1.0, 2.0, 3.0]]))
