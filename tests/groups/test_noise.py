"""Noise that differs between users."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from scipy.stats import multivariate_normal

import coterie as ct
from coterie.fitting.kinds import sharing_of
from coterie.groups.noise import (
    _expect,
    _log_mean_square_density,
    _log_ratio_density,
    _prior,
    noise_of_users,
    sums_of,
)
from coterie.groups.random_effects import learn_spread
from coterie.groups.summaries import Summaries

LOSS = ct.Squared(ridge=0.0)


def drawn(deviations, follows=False, seed=0, samples=25, dim=3):
    """Users with models around one centre, and these standard deviations of the noise."""
    rng = np.random.default_rng(seed)
    deviations = np.asarray(deviations)
    spread = 0.7 * rng.standard_normal((len(deviations), dim))
    models = 1.0 + (deviations[:, None] if follows else 1.0) * spread
    owner = np.repeat(np.arange(len(deviations)), samples)
    x = rng.standard_normal((owner.size, dim - 1))
    margins = (np.c_[x, np.ones(owner.size)] * models[owner]).sum(axis=1)
    users = ct.Users.from_arrays(x, margins + deviations[owner] * rng.standard_normal(owner.size), owner)
    return users, models


def lognormal(n_users=40, seed=1):
    return np.exp(np.random.default_rng(seed).standard_normal(n_users))


def test_evidence_is_the_density_of_the_targets():
    """Targets of a user are normal: design @ centre, design T_i design' + s_i I."""
    users, _ = drawn([0.5, 1.0, 2.0, 1.0], samples=6)
    rng = np.random.default_rng(0)
    variances, scales, root = rng.uniform(0.5, 2, 4), rng.uniform(0.5, 2, 4), rng.standard_normal((3, 3))
    covariance, labels = root @ root.T, np.array([0, 0, 1, 1])
    step = _expect(sums_of(users, LOSS), labels, variances, covariance, scales)
    design, total = np.c_[users.features, np.ones(users.n_samples)], 0.0
    for group in (0, 1):
        parts = []
        for i in np.flatnonzero(labels == group):
            rows = users.owner == i
            sigma = scales[i] * design[rows] @ covariance @ design[rows].T + variances[i] * np.eye(rows.sum())
            parts.append((design[rows], users.targets[rows], sigma))
        left = sum(a.T @ np.linalg.solve(sigma, a) for a, _, sigma in parts)
        centre = np.linalg.solve(left, sum(a.T @ np.linalg.solve(sigma, y) for a, y, sigma in parts))
        total += sum(multivariate_normal.logpdf(y, a @ centre, sigma) for a, y, sigma in parts)
    assert step.evidence == pytest.approx(total, rel=1e-9)


def test_variances_are_found():
    deviations = lognormal()
    spread = learn_spread(drawn(deviations)[0], LOSS, np.zeros(40, dtype=int))
    assert spread.noises is not None
    logs = np.log(spread.noise * spread.noises), np.log(deviations**2)
    assert np.corrcoef(*logs)[0, 1] > 0.9
    assert np.abs(logs[0] - logs[1]).mean() < 0.35


def test_equal_noise_has_no_variances_of_its_own():
    found = [learn_spread(drawn(np.ones(40), seed=seed)[0], LOSS, np.zeros(40, dtype=int)) for seed in range(10)]
    assert sum(spread.noises is not None for spread in found) <= 1


def test_users_with_units_of_their_own_are_shrunk_alike():
    """Where models differ as the noise does, the noise must not decide how much a user is shrunk."""
    users, _ = drawn(lognormal(), follows=True)
    assert learn_spread(users, LOSS, np.zeros(40, dtype=int)).noises is None


def test_models_are_nearer_to_the_truth():
    errors, found = [], 0
    for seed in range(10):
        users, models = drawn(lognormal(seed=seed), seed=seed, samples=8)
        sharing = sharing_of("personal", Summaries.exact(users, LOSS), np.zeros(40, dtype=int), "rows")
        found += sharing.noise is not None
        equal = replace(sharing, noise=None)
        errors.append([((option.models(users, LOSS) - models) ** 2).mean() for option in (sharing, equal)])
    own, common = np.mean(errors, axis=0)
    assert found >= 7  # eight rows of a user show its noise, but not always
    assert own < 0.9 * common


def test_other_losses_have_no_noise_of_users():
    users, _ = drawn(np.ones(6))
    huber = ct.Huber(ridge=0.0)
    assert noise_of_users(users, huber, np.zeros(6, dtype=int), np.eye(3), 1.0, lambda T: T) is None


def test_degrees_of_freedom():
    rng = np.random.default_rng(0)
    freedom = np.full(400, 20.0)
    for degrees in (4.0, 16.0):
        variances = 2.0 * degrees / rng.chisquare(degrees, 400)
        found, scale, gain = _prior(variances * rng.chisquare(20.0, 400), freedom)
        assert degrees / 2 <= found <= 2 * degrees
        assert scale == pytest.approx(2.0, rel=0.15)
        assert gain > 10
    assert _prior(2.0 * rng.chisquare(20.0, 400), freedom)[2] < 3


def test_densities():
    rng = np.random.default_rng(0)
    x, k = np.exp(rng.normal(size=40)), rng.uniform(2, 200, 40)
    np.testing.assert_allclose(_log_ratio_density(x, k, 6.0), stats.f.logpdf(x, k, 6.0), rtol=1e-10)
    np.testing.assert_allclose(_log_mean_square_density(x, k), stats.chi2.logpdf(x * k, k) + np.log(k), rtol=1e-10)
