"""One road from a file to a problem: what nodes send scales as all rows do, and an intercept means one thing."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

import coterie as ct
from coterie.data.encoding import Recipe
from coterie.data.merging import merge
from coterie.data.summary import TASKS, summarise
from coterie.fitting import Settings, Units, UserStatistics, fit, prepare
from coterie.losses import LOSSES, losses_for

CASES = [(task, loss) for task in TASKS for loss in losses_for(task)]


def raises(*parts):
    return pytest.raises(ct.InvalidInput, match="(?s)" + ".*".join(re.escape(part) for part in parts))


def drawn(task, loss="auto", n_users=6):
    """Users with features far from standardised, and targets of the task."""
    rng = np.random.default_rng(7)
    owner = np.repeat(np.arange(n_users), rng.integers(5, 12, n_users))
    X = rng.standard_normal((len(owner), 3)) * [1e-3, 50.0, 1.0] + [5.0, -300.0, 0.0]
    t = (X - X.mean(axis=0)) / X.std(axis=0) @ [1.0, -1.0, 0.5] + 0.7 + 0.3 * rng.standard_normal(len(owner))
    y = {"classification": np.digitize(t, [-0.5, 1.0] if loss == "multinomial" else [1.0]).astype(float),
         "regression": 40.0 + 7.0 * t, "counts": np.round(np.exp(t.clip(-2, 3))), "clustering": None}[task]
    return ct.Users.from_arrays(X, y, owner)


def solved(units, users, lam=0.05):
    return ct.solve(ct.Problem(units.inner(users), units.loss, lam), tol=1e-9)


@pytest.mark.parametrize("standardize", [True, False])
@pytest.mark.parametrize(("task", "loss"), CASES)
def test_statistics_of_nodes_are_enough(task, loss, standardize):
    users = drawn(task, loss)
    units = Units.learn(users, task, loss=loss, standardize=standardize)
    again = Units.from_moments(UserStatistics.of(users), task, loss=loss, standardize=standardize)
    nodes = UserStatistics.join([UserStatistics.of(users.take(part)) for part in ([4, 1], [0], [5, 3, 2])])
    parted = Units.from_moments(nodes, task, loss=loss, standardize=standardize)
    for key, value in units.state().items():
        np.testing.assert_array_equal(again.state()[key], value)
        if isinstance(value, (float, np.ndarray)):
            np.testing.assert_allclose(parted.state()[key], value, rtol=1e-12)
        else:
            assert parted.state()[key] == value
    if standardize:
        np.testing.assert_allclose(units.inner(users).features.std(axis=0), 1.0)
    if task == "regression":
        assert units.inner(users).targets.mean() == pytest.approx(0.0, abs=1e-12)
        assert units.inner(users).targets.std() == pytest.approx(1.0)


def test_statistics_that_do_not_fit():
    users = drawn("regression")
    one = UserStatistics.of(users)
    for other in (UserStatistics.of(replace(users, targets=None)),
                  UserStatistics.of(replace(users, feature_names=("p", "q", "r")))):
        with raises("cannot be joined", "same recipe"):
            UserStatistics.join([one, other])
    with raises("cannot be joined"):
        UserStatistics.join([])
    with raises("needs targets"):
        Units.from_moments(UserStatistics.of(replace(users, targets=None)), "regression")
    with raises("beyond float64", "target"):
        Units.learn(replace(users, targets=users.targets * 1e200), "regression")
    with raises("too large for Poisson", "--task regression"):
        Units.learn(replace(users, targets=np.full(users.n_samples, 1e10)), "counts")
    empty = users.split(test=0.5, seed=0).test.take([0, 1])
    assert UserStatistics.of(replace(empty, targets=empty.targets + 5)).largest.min() > 0


@pytest.mark.parametrize(("task", "loss"), [case for case in CASES if case[0] != "clustering"])
def test_the_intercept_is_a_column_of_ones_under_the_ridge(task, loss):
    """The problem solved is the one with a column of ones among the features and no intercept of its own."""
    users = drawn(task, loss)
    units = Units.learn(users, task, loss=loss, ridge=0.01)
    mine = solved(units, users)
    inner = units.inner(users)
    ones = ct.Users(np.column_stack([inner.features, np.ones(inner.n_samples)]), inner.targets, inner.offsets,
                    inner.names, (*inner.feature_names, "ones"))
    extra = {"n_classes": units.n_classes} if loss == "multinomial" else {}
    theirs = ct.solve(ct.Problem(ones, LOSSES[loss](ridge=0.01, intercept=False, **extra), 0.05), tol=1e-9)
    assert mine.objective == pytest.approx(theirs.objective, rel=1e-8)
    assert mine.gap < 1e-8
    plain = replace(units, loss=type("Plus", (type(units.loss),), {"intercept_sign": 1.0})(
        ridge=0.01, penalize_intercept=True, **extra))
    np.testing.assert_allclose(units.coefficients(mine.models), plain.coefficients(theirs.models), rtol=1e-4, atol=1e-5)
    free = ct.solve(ct.Problem(inner, LOSSES[loss](ridge=0.01, **extra), 0.05), tol=1e-9)
    if task != "regression":  # whose targets have the mean 0
        assert free.objective < theirs.objective - 1e-6  # an intercept outside the ridge is another problem


@pytest.mark.parametrize(("task", "loss"), CASES)
def test_units_are_stored_whole(task, loss):
    users = drawn(task, loss)
    units = Units.learn(users, task, loss=loss)
    state = json.loads(json.dumps(units.state(), default=np.ndarray.tolist))
    again, models = Units.from_state(state), np.random.default_rng(0).standard_normal(
        (users.n_users, ct.Problem(units.inner(users), units.loss, 0.0).dim))
    assert again.loss == units.loss
    np.testing.assert_array_equal(again.coefficients(models), units.coefficients(models))
    np.testing.assert_allclose(again.restored(units.coefficients(models)), models, rtol=1e-6)
    if task != "clustering":
        np.testing.assert_array_equal(again.predict(users.features, models[users.owner]),
                                      units.predict(users.features, models[users.owner]))


def test_models_of_a_squared_hinge_are_read_by_the_sign_they_were_saved_with():
    users = drawn("classification")
    units = Units.learn(users, "classification", loss="squared_hinge")
    models = solved(units, users).models
    state = units.state()
    assert state["intercept_sign"] == -1.0
    old = Units.from_state({key: value for key, value in state.items() if key != "intercept_sign"})
    turned = models * [1.0, 1.0, 1.0, -1.0]
    np.testing.assert_allclose(old.coefficients(turned), units.coefficients(models))
    X, owner = users.features, users.owner
    np.testing.assert_allclose(old.margins(X, turned[owner]), units.margins(X, models[owner]))
    np.testing.assert_array_equal(old.predict(X, turned[owner]), units.predict(X, models[owner]))
    assert old.state()["intercept_sign"] == 1.0
    assert old.state()["loss"] == "squared_hinge"
    shown = units.coefficients(models)[owner, :, 0]
    hand = np.einsum("rp,rp->r", X, shown[:, :-1]) + shown[:, -1]
    np.testing.assert_allclose(units.margins(X, models[owner]), hand, rtol=1e-6, atol=1e-9)
    with pytest.raises(AssertionError):  # the sign matters
        np.testing.assert_allclose(old.margins(X, models[owner]), hand, rtol=1e-6, atol=1e-9)


def test_a_file_means_one_problem_wherever_its_rows_are(tmp_path):
    """Two groups, classes 0 and 1, a text column: one table, or one file for each of three nodes."""
    rng = np.random.default_rng(1)
    n = 240
    frame = pl.DataFrame({"who": [f"u{i % 12:02}" for i in range(n)], "x": rng.normal(50, 20, n).round(3),
                          "kind": rng.choice(["a", "b"], n)})
    sign = np.where(np.arange(n) % 12 < 6, 1.0, -1.0)
    frame = frame.with_columns(y=(sign * (frame["x"].to_numpy() - 50) + 5 * rng.standard_normal(n) > 0).astype(int))
    frame.write_csv(tmp_path / "all.csv")
    prepared = prepare(tmp_path / "all.csv", user="who", target="y")
    assert (prepared.recipe.task, prepared.units.n_classes) == ("classification", 2)
    assert prepared.users.feature_names == ("x", "kind=b")
    assert set(prepared.users.targets) == {-1.0, 1.0}
    assert prepared.given.features[:, 0].std() > 15
    assert isinstance(prepared.units.loss, ct.Logistic)
    assert prepared.problem(0.1).dim == 3

    frames = [frame.filter(pl.col("who").is_in([f"u{i:02}" for i in range(k, 12, 3)])) for k in range(3)]
    recipe = Recipe.from_summary(merge([summarise(part, user="who", target="y") for part in frames]))
    assert recipe.feature_names == prepared.recipe.feature_names
    assert (recipe.task, recipe.classes) == (prepared.recipe.task, prepared.recipe.classes)
    given = [recipe.encode(part) for part in frames]
    units = Units.from_moments(UserStatistics.join([UserStatistics.of(users) for users in given]), recipe.task,
                               n_classes=len(recipe.classes))
    assert units.loss == prepared.units.loss
    for users in given:
        inner = units.inner(users)
        same = prepared.users.take([prepared.users.index(name) for name in users.names])
        np.testing.assert_allclose(inner.features, same.features, rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(inner.targets, same.targets)
    assert fit(prepared.given, Settings(task="classification", holdout=0.0)).n_clusters == 2
    assert prepare(frame, user="who", target="y", task="regression").units.loss == ct.Squared(penalize_intercept=True)
