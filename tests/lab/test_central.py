"""Methods for one table: the same answers as the libraries they call, and words where these fail."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from sklearn.linear_model import RidgeCV

import coterie as ct
from coterie.lab.baselines import CENTRAL, central

INTERCEPT, SLOPES = CENTRAL["mixedlm intercept"], CENTRAL["mixedlm slopes"]
ONE_HOT, PER_USER, TREES = CENTRAL["one-hot ridge"], CENTRAL["ridge per user"], CENTRAL["lightgbm"]


@pytest.fixture(scope="module")
def panel():
    """Twenty users whose intercepts and slopes vary, and other rows of the same users."""
    rng = np.random.default_rng(0)
    own = np.array([2.0, -1.0, 1.0]) + rng.standard_normal((20, 3)) * np.array([0.8, 0.1, 1.5])

    def rows(n):
        owner = np.repeat(np.arange(20), n)
        X = rng.standard_normal((len(owner), 2))
        y = (X * own[owner, :2]).sum(axis=1) + own[owner, 2] + 0.3 * rng.standard_normal(len(owner))
        return ct.Users.from_arrays(X, y, owner)

    return rows(12), rows(40)


@pytest.fixture(scope="module")
def labelled():
    """Four users with three classes; the last user has rows of one class only."""
    rng = np.random.default_rng(1)
    owner = np.repeat(np.arange(4), 30)
    X = rng.standard_normal((120, 2))
    y = np.where(X[:, 0] > 0.5, 2.0, np.where(X[:, 1] > 0, 1.0, 0.0))
    y[owner == 3] = 1.0
    return ct.Users.from_arrays(X, y, owner)


def rmse(method, train, test):
    return float(np.sqrt(((method.fit(train, "regression").decide(test) - test.targets) ** 2).mean()))


@pytest.mark.parametrize("slopes", [False, True])
def test_mixed_models_are_those_of_statsmodels(panel, slopes):
    from statsmodels.regression.mixed_linear_model import MixedLM

    train, test = panel
    X = np.c_[train.features, np.ones(train.n_samples)]
    with warnings.catch_warnings(action="ignore"):  # a small variance is taken for the boundary
        direct = MixedLM(train.targets, X, groups=train.owner, exog_re=X if slopes else X[:, 2:]).fit()
    effects = np.zeros((20, 3))
    effects[:, slice(None) if slopes else slice(2, 3)] = [np.asarray(direct.random_effects[i]) for i in range(20)]
    fitted = (SLOPES if slopes else INTERCEPT).fit(train, "regression")
    np.testing.assert_allclose(fitted.models, direct.fe_params + effects, rtol=1e-6, atol=1e-8)
    assert fitted.concern == ""
    models = fitted.models[test.owner]
    np.testing.assert_allclose(fitted.decide(test), (test.features * models[:, :2]).sum(axis=1) + models[:, 2])


def test_slopes_that_vary_need_random_slopes(panel):
    assert rmse(SLOPES, *panel) < 0.6 * rmse(INTERCEPT, *panel)


def test_a_failure_of_statsmodels_becomes_a_word(panel, monkeypatch):
    import statsmodels.regression.mixed_linear_model as mixed

    train, test = panel
    real = mixed.MixedLM

    def failing(*arguments, exog_re, **others):
        if exog_re.shape[1] > 1:
            raise np.linalg.LinAlgError("Singular matrix.")
        return real(*arguments, exog_re=exog_re, **others)

    monkeypatch.setattr(mixed, "MixedLM", failing)
    fitted = SLOPES.fit(train, "regression")
    assert fitted.concern == "random slopes failed (singular matrix); random intercepts only"
    np.testing.assert_allclose(fitted.models, INTERCEPT.fit(train, "regression").models)
    monkeypatch.setattr(mixed, "MixedLM", lambda *_, **__: (_ for _ in ()).throw(ValueError("no")))
    fitted = SLOPES.fit(train, "regression")
    assert "random intercepts failed (no); least squares" in fitted.concern
    assert (fitted.models == fitted.models[0]).all()
    assert np.isfinite(fitted.decide(test)).all()


def test_many_columns_have_no_random_slopes():
    rng = np.random.default_rng(0)
    users = ct.Users.from_arrays(rng.standard_normal((60, 20)), rng.standard_normal(60), np.arange(60) % 6)
    fitted = SLOPES.fit(users, "regression")
    assert "20 random slopes are too many" in fitted.concern
    assert len(np.unique(fitted.models[:, 0])) == 1


def test_a_column_per_user_is_one_ridge(panel):
    train, test = panel
    table = [np.c_[users.features, np.eye(20)[users.owner]] for users in panel]
    direct = RidgeCV(alphas=central.PENALTIES).fit(table[0], train.targets)
    fitted = ONE_HOT.fit(train, "regression")
    np.testing.assert_allclose(fitted.decide(test), direct.predict(table[1]), rtol=1e-8)
    assert len(np.unique(fitted.models[:, 0])) == 1  # slopes are shared
    assert len(np.unique(fitted.models[:, 2])) == 20


def test_a_ridge_per_user_uses_no_other_rows(panel):
    train, test = panel
    fitted = PER_USER.fit(train, "regression")
    own, other = train.features[train.owner == 3], test.features[test.owner == 3]
    direct = RidgeCV(alphas=central.PENALTIES).fit(own, train.targets[train.owner == 3])
    np.testing.assert_allclose(fitted.decide(test)[test.owner == 3], direct.predict(other))
    few = ct.Users.from_arrays([[1.0], [2.0], [0.0], [1.0], [2.0]], [3.0, 5.0, 0.0, 1.0, 2.0], [0, 0, 1, 1, 1])
    np.testing.assert_allclose(PER_USER.fit(few, "regression").models[0], [0.0, 4.0])


@pytest.mark.parametrize("name", [name for name, kind in CENTRAL.items() if "classification" in kind.tasks])
def test_classes_are_learned(name, labelled):
    """Also of a user with one class, where the class itself is the answer of a model per user."""
    decisions = CENTRAL[name].fit(labelled, "classification", n_classes=3, seed=0).decide(labelled)
    assert decisions.shape == (120, 3)
    right = decisions.argmax(axis=1) == labelled.targets
    assert right[labelled.owner < 3].mean() > 0.8
    if name == "ridge per user":
        assert right[labelled.owner == 3].all()
    two = ct.Users.from_arrays(labelled.features, (labelled.targets > 1).astype(float), labelled.owner)
    decisions = CENTRAL[name].fit(two, "classification", n_classes=2).decide(two)
    assert decisions.shape == (120,)
    assert ((decisions > 0) == (two.targets > 0)).mean() > 0.9


def test_trees_see_the_user(panel):
    train, test = panel
    fitted = TREES.fit(train, "regression", seed=3)
    again = TREES.fit(train, "regression", seed=3)
    np.testing.assert_array_equal(fitted.decide(test), again.decide(test))
    assert "trees of" in fitted.note
    rows = ct.Users.from_arrays(np.zeros((20, 2)), np.zeros(20), np.arange(20))
    assert np.ptp(fitted.decide(rows)) > 1.0  # equal rows of different users


def test_a_missing_library_is_named(panel, monkeypatch):
    monkeypatch.setattr("coterie.lab.baselines.central.find_spec", lambda name: None)
    with pytest.raises(ct.MissingExtra, match=r"'lightgbm' needs lightgbm.*coterie\[bench\]"):
        TREES.fit(panel[0], "regression")
    assert ONE_HOT.missing() is None
