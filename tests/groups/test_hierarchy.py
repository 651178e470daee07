"""Hierarchical models from sums: closed forms, statsmodels, and optimality for fixed variances."""

import numpy as np
import pytest

from coterie.groups.hierarchy import Form, ModelSums, Variances, learn


def layout(n=12, m=7, between=2.0, noise=0.5, seed=0):
    rng = np.random.default_rng(seed)
    y = 3.0 + rng.normal(0, np.sqrt(between), n)[:, None] + rng.normal(0, np.sqrt(noise), (n, m))
    return y, np.arange(n + 1) * m


def intercepts():
    zero = np.zeros(1, dtype=np.int64)
    return Form(zero, zero, zero, zero)


def slopes(n=30, m=9, seed=1):
    rng = np.random.default_rng(seed)
    X = np.concatenate([np.ones((n * m, 1)), rng.normal(size=(n * m, 2))], axis=1)
    owner = np.repeat(np.arange(n), m)
    models = np.array([1.0, -2.0, 0.5]) + rng.normal(size=(n, 3)) * [1.0, 0.7, 0.3]
    y = (X * models[owner]).sum(axis=1) + rng.normal(0, 0.8, n * m)
    return X, y, owner, np.arange(n + 1) * m


def full(width):
    places = np.arange(width)
    return Form(places, np.zeros(width, dtype=np.int64), places, np.zeros(width, dtype=np.int64))


def test_a_balanced_one_way_layout_has_the_closed_form():
    y, offsets = layout()
    n, m = y.shape
    sums = ModelSums.of(np.ones((n * m, 1)), y.ravel(), offsets)
    found = learn(sums, intercepts(), rounds=5000, settled=1e-13, priors=0.0)
    inside = y.var(axis=1, ddof=1).mean()
    between = y.mean(axis=1).var(ddof=1) - inside / m
    assert found.variances.noise == pytest.approx(inside, rel=1e-5)
    assert found.variances.covariance[0, 0] == pytest.approx(between, rel=1e-5)
    assert found.mean[0] == pytest.approx(y.mean(), rel=1e-9)
    assert found.error[0, 0] == pytest.approx((between + inside / m) / n, rel=1e-5)
    shrunk = between / (between + inside / m) * (y.mean(axis=1) - y.mean())
    np.testing.assert_allclose(found.personal[:, 0], shrunk, rtol=1e-4)


def test_with_priors_the_closed_form_is_missed():
    y, offsets = layout()
    n, m = y.shape
    sums = ModelSums.of(np.ones((n * m, 1)), y.ravel(), offsets)
    found = learn(sums, intercepts(), rounds=5000, settled=1e-13, priors=1.0)
    inside = y.var(axis=1, ddof=1).mean()
    assert found.variances.noise != pytest.approx(inside, rel=1e-5)


def test_random_slopes_are_those_of_statsmodels():
    from statsmodels.regression.mixed_linear_model import MixedLM

    X, y, owner, offsets = slopes()
    found = learn(ModelSums.of(X, y, offsets), full(3), rounds=5000, settled=1e-12, priors=0.0)
    theirs = MixedLM(y, X, owner, exog_re=X).fit(reml=True, method=["bfgs", "lbfgs"], gtol=1e-10)
    # Errors of the generalised least squares at their variances, as lme4 has them.
    T, s = np.asarray(theirs.cov_re), theirs.scale
    parts = [(X[owner == i], y[owner == i]) for i in range(30)]
    errors = np.sqrt(np.diag(np.linalg.inv(sum(
        x.T @ np.linalg.solve(x @ T @ x.T + s * np.eye(len(x)), x) for x, _ in parts))))
    assert np.abs(found.mean - theirs.fe_params).max() < 1e-3 * errors.min()
    np.testing.assert_allclose(np.sqrt(np.diag(found.error)), errors, rtol=1e-3)
    np.testing.assert_allclose(found.variances.covariance, theirs.cov_re, rtol=0.01, atol=1e-3)
    assert found.variances.noise == pytest.approx(theirs.scale, rel=1e-3)
    # The twin: ordinary least squares, which statsmodels' model is not.
    plain = learn(ModelSums.of(X, y, offsets), Form(np.arange(3), np.zeros(3, dtype=np.int64),
                  np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)), priors=0.0)
    assert not np.allclose(np.sqrt(np.diag(plain.error)), errors, rtol=0.05)


def test_models_minimise_a_quadratic_function_and_others_do_not():
    X, y, _, offsets = slopes()
    sums = ModelSums.of(X, y, offsets)
    found = learn(sums, full(3))
    assert found.gradient(sums) < 1e-10
    found.personal[3, 1] += 0.01
    assert found.gradient(sums) > 1e-5


def test_models_are_those_of_the_dense_normal_equations():
    X, y, owner, offsets = slopes(n=4, m=5)
    s, T = 0.7, np.diag([1.0, 0.5, 0.2])
    found = learn(ModelSums.of(X, y, offsets), full(3),
                  Variances(s, np.zeros(0), T), rounds=0)
    Z = np.zeros((len(y), 12))
    for row, i in enumerate(owner):
        Z[row, 3 * i:3 * i + 3] = X[row]
    V = s * np.eye(len(y)) + Z @ np.kron(np.eye(4), T) @ Z.T
    C = np.linalg.inv(X.T @ np.linalg.solve(V, X))
    mean = C @ X.T @ np.linalg.solve(V, y)
    np.testing.assert_allclose(found.mean, mean, rtol=1e-6)
    np.testing.assert_allclose(found.error, C, rtol=1e-6)
    own = np.kron(np.eye(4), T) @ Z.T @ np.linalg.solve(V, y - X @ mean)
    np.testing.assert_allclose(found.personal.ravel(), own, rtol=1e-5, atol=1e-9)
    # The variance of a prediction, from the joint posterior of shared and personal parts.
    both = np.concatenate([X, Z], axis=1)
    precision = both.T @ both / s
    precision[3:, 3:] += np.kron(np.eye(4), np.linalg.inv(T))
    joint = np.linalg.inv(precision)
    expected = ((both @ joint) * both).sum(axis=1)
    np.testing.assert_allclose(found.predict(X, owner)[1], expected, rtol=1e-6)


def test_unknown_users_have_the_shared_part_and_the_variance_between_users():
    X, y, owner, offsets = slopes()
    found = learn(ModelSums.of(X, y, offsets), full(3))
    mean, variance = found.predict(X[:5], np.full(5, -1))
    np.testing.assert_allclose(mean, X[:5] @ found.mean)
    expected = ((X[:5] @ (found.variances.covariance + found.error)) * X[:5]).sum(axis=1)
    np.testing.assert_allclose(variance, expected)
    assert (variance > found.predict(X[:5], owner[:5])[1]).all()


def test_sums_subtract():
    X, y, owner, offsets = slopes()
    rows = np.arange(len(y)) % 3 == 0
    def sums_of(some):
        return ModelSums.of(X[some], y[some], np.searchsorted(owner[some], np.arange(len(offsets))))
    rest = ModelSums.of(X, y, offsets).minus(sums_of(rows))
    for mine, theirs in zip(rest, sums_of(~rows), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-9)
    assert not np.allclose(rest.gram, sums_of(rows).gram)


def test_noise_does_not_vanish_where_numbers_outnumber_rows():
    rng = np.random.default_rng(0)
    X = np.concatenate([np.ones((12, 1)), rng.normal(size=(12, 20))], axis=1)
    y = rng.normal(size=12)
    form = Form(np.arange(21), np.repeat([0, 1], [1, 20]), np.zeros(1, dtype=np.int64),
                np.zeros(1, dtype=np.int64))
    found = learn(ModelSums.of(X, y, np.array([0, 6, 12])), form, rounds=500, settled=1e-9)
    assert 1e-6 < found.variances.noise < 10.0
    assert found.variances.covariance[0, 0] > 1e-4
