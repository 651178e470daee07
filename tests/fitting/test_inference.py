"""Coefficients of centres with their errors: those of mixed models and of least squares."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import coterie as ct
from coterie.base.errors import InvalidInput
from coterie.datasets import clustered
from coterie.fitting import Settings, fit

PLAIN = Settings(task="regression", n_lams=3, holdout=0.0, average="off")


def panel(seed: int = 0, n_users: int = 30, rows: int = 12) -> ct.Users:
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(n_users), rows)
    X = 5.0 + 3.0 * rng.normal(size=(len(owner), 2))
    models = np.array([1.0, -0.5]) + rng.normal(size=(n_users, 2)) * [0.4, 0.2]
    level = 10.0 + 2.0 * rng.normal(size=n_users)
    y = level[owner] + (X * models[owner]).sum(axis=1) + rng.normal(size=len(owner))
    return ct.Users.from_arrays(X, y, owner)


def test_errors_are_those_of_a_mixed_model_in_the_units_given():
    from statsmodels.regression.mixed_linear_model import MixedLM

    users = panel()
    fitted = fit(users, PLAIN)
    assert fitted.kind == "personal"
    found = fitted.summary()
    design = np.column_stack([np.ones(users.n_samples), users.features])
    theirs = MixedLM(users.targets, design, users.owner, exog_re=design).fit(reml=True, method=["bfgs", "lbfgs"])
    T, s = np.asarray(theirs.cov_re), theirs.scale
    rows = [design[users.owner == i] for i in range(users.n_users)]
    errors = np.sqrt(np.diag(np.linalg.inv(sum(
        x.T @ np.linalg.solve(x @ T @ x.T + s * np.eye(len(x)), x) for x in rows))))
    values = np.array([one.value for one in found.coefficients])
    assert np.abs(values - theirs.fe_params).max() < 1e-3 * errors.min()
    np.testing.assert_allclose([one.error for one in found.coefficients], errors, rtol=2e-3)
    assert found.groups[0].noise == pytest.approx(s, rel=2e-3)
    np.testing.assert_allclose(np.diag(found.groups[0].covariance), np.diag(T), rtol=0.02)
    assert [one.name for one in found.coefficients] == ["intercept", "x0", "x1"]


def test_sleepstudy_has_the_coefficients_that_lme4_prints():
    from coterie.lab.experiments.tables import load_table

    # lme4 1.1, lmer(Reaction ~ Days + (Days | Subject)): restricted likelihood
    theirs, errors = np.array([251.405105, 10.467286]), np.array([6.824597, 1.545790])
    loaded = load_table("sleepstudy")
    users = ct.Users.from_arrays(np.asarray(loaded.columns["Days"], dtype=float)[:, None], loaded.target, loaded.owner)
    found = fit(users, PLAIN).summary()
    values = np.array([one.value for one in found.coefficients])
    assert np.all(np.abs(values - theirs) < 1e-3 * errors)
    np.testing.assert_allclose([one.error for one in found.coefficients], errors, rtol=1e-3)
    np.testing.assert_allclose(np.sqrt(np.diag(found.groups[0].covariance)), [24.74066, 5.92214], rtol=1e-3)
    assert np.sqrt(found.groups[0].noise) == pytest.approx(25.59180, rel=1e-3)
    # Half of the days give other ones.
    half = np.arange(users.n_samples) % 2 == 0
    other = fit(ct.Users.from_arrays(users.features[half], users.targets[half], users.owner[half]), PLAIN).summary()
    assert abs(other.coefficients[0].value - theirs[0]) > 1e-3 * errors[0]


def test_groups_have_the_errors_of_least_squares():
    users = clustered("squared", n_users=12, samples=30, seed=0).users
    fitted = fit(users, PLAIN)
    assert fitted.kind == "groups"
    found = fitted.summary()
    for c in range(fitted.n_clusters):
        rows = fitted.labels[users.owner] == c
        design = np.column_stack([np.ones(rows.sum()), users.features[rows]])
        solution, left, *_ = np.linalg.lstsq(design, users.targets[rows], rcond=None)
        noise = left[0] / (rows.sum() - design.shape[1])
        errors = np.sqrt(noise * np.diag(np.linalg.inv(design.T @ design)))
        mine = [one for one in found.coefficients if one.group == c]
        np.testing.assert_allclose([one.value for one in mine], solution, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose([one.error for one in mine], errors, rtol=1e-4)
        assert found.groups[c].rows == rows.sum()
        assert not np.allclose([one.error for one in mine], 2.0 * errors)


def test_a_column_that_others_give_is_not_determined():
    users = panel()
    double = replace(users, features=np.column_stack([users.features, users.features @ [2.0, -1.0]]),
                     feature_names=("a", "b", "c"))
    found, plain = fit(double, PLAIN).summary(), fit(users, PLAIN).summary()
    assert [np.isfinite(one.error) for one in found.coefficients] == [True, True, True, False]
    assert "c            not determined" in str(found)
    assert "nan" not in str(found)
    assert "not determined" not in str(plain)
    for one, other in zip(found.coefficients[1:3], plain.coefficients[1:3], strict=True):
        assert one.value == pytest.approx(other.value, rel=1e-3)
        assert one.error == pytest.approx(other.error, rel=1e-2)


@pytest.mark.slow
def test_intervals_have_the_true_coefficients_as_often_as_they_say():
    inside = [one.low < truth < one.high for seed in range(25)
              for one, truth in zip(fit(panel(seed, 15, 8), PLAIN).summary().coefficients[1:], (1.0, -0.5),
                                    strict=True)]
    assert 0.84 < np.mean(inside) <= 1.0


def test_classes_are_said_to_be_approximate_and_a_run_has_the_same_summary(tmp_path):
    users = panel()
    middle = np.array([np.median(users.targets[users.owner == i]) for i in range(users.n_users)])
    binary = replace(users, targets=(users.targets > middle[users.owner]).astype(float))
    fitted = fit(binary, replace(PLAIN, task="classification"))
    text = str(fitted.summary())
    assert "approximate" in text
    assert "approximate" not in str(fit(users, PLAIN).summary())
    run = ct.load_run(fitted.save(tmp_path / "run"))
    assert str(run.summary(binary)) == text
    with pytest.raises(InvalidInput, match="not made from a file"):
        run.summary()


def test_models_without_such_coefficients_are_refused():
    points = ct.Users.from_arrays(np.random.default_rng(0).normal(size=(20, 2)))
    with pytest.raises(InvalidInput, match="coefficients have errors"):
        fit(points, replace(PLAIN, task="clustering")).summary()
