"""From users to groups and models: planted groups come back, and their models are those of an independent fit."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
from scipy.optimize import minimize
from sklearn.cluster import KMeans
from sklearn.linear_model import LogisticRegression, PoissonRegressor, Ridge

import coterie as ct
from coterie.base.errors import CoterieWarning, InvalidInput
from coterie.base.labels import check_labels
from coterie.base.machine import set_threads
from coterie.convex.choice import adjusted_rand
from coterie.datasets import clustered
from coterie.fitting import Fit, Settings, fit
from coterie.fitting.units import Units
from coterie.problem.solution import Status

RIDGE = 1e-3
SUPERVISED = ("binary", "classes", "regression", "counts")
TASKS = {"binary": "classification", "classes": "classification", "regression": "regression", "counts": "counts",
         "points": "clustering", "rows": "clustering"}


#: The same kinds, the classes only where there is time.
QUICK = [kind if kind != "classes" else pytest.param(kind, marks=pytest.mark.slow) for kind in TASKS]


class Planted(NamedTuple):
    users: ct.Users
    labels: np.ndarray  # of the users, from 0 in order of first appearance
    X: np.ndarray
    y: np.ndarray | None
    owner: np.ndarray


def planted(kind: str, *, n_users: int = 12, rows: int = 16, seed: int = 0) -> Planted:
    """Two groups taking turns, whose targets are far apart; of their users half hold `rows`, half half as many."""
    rng = np.random.default_rng(seed)
    counts = np.ones(n_users, dtype=int) if kind == "rows" else rows // (1 + np.arange(n_users) // 2 % 2)
    owner = np.repeat(np.arange(n_users), counts)
    sign = np.where(owner % 2, -1.0, 1.0)
    X = rng.standard_normal((len(owner), 2))
    t = sign * (2.0 * X[:, 0] - X[:, 1]) + 0.5
    y: np.ndarray | None
    if kind in ("points", "rows"):
        X, y = 0.3 * X + 3.0 * np.column_stack([sign, -sign]), None
    elif kind == "binary":
        y = (1.5 * t + rng.logistic(size=len(t)) > 0).astype(float)
    elif kind == "classes":
        scores = np.stack([t, -t, 2 * sign * X[:, 1]], axis=1)
        y = (scores + rng.gumbel(size=scores.shape)).argmax(axis=1).astype(float)
    elif kind == "counts":
        y = rng.poisson(np.exp(0.5 * t)).astype(float)
    else:
        y = t + 0.2 * rng.standard_normal(len(t))
    return Planted(ct.Users.from_arrays(X, y, owner), check_labels(np.arange(n_users) % 2, n_users), X, y, owner)


def settings(kind: str, **changes: Any) -> Settings:
    return Settings(**{"task": TASKS[kind], "n_lams": 6, "holdout": 0.0, **changes})


@cache
def fitted(kind: str) -> Fit:
    """The planted groups with default settings, once."""
    return fit(planted(kind).users, settings(kind))


def arrays(result: Fit) -> list[np.ndarray]:
    """Everything computed, for comparison bit by bit."""
    values = [result.solution.models, result.solution.duals, result.path.lams, result.together, result.coefficients,
            np.array([result.chosen, result.gap]), result.path.gaps, *(s.models for s in result.path.solutions)]
    if result.scores is not None:
        s = result.scores
        values += [s.fitted, s.alone, s.together, s.points, s.losses, np.array([s.n_clusters, s.n_rows])]
    return values


def same(one: Fit, other: Fit) -> bool:
    pairs = list(zip(arrays(one), arrays(other), strict=True))
    return one.why == other.why and all(a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in pairs)


# ---- planted groups


@pytest.mark.parametrize("kind", TASKS)
def test_planted_groups_are_found_and_proven(kind):
    data, result = planted(kind), fitted(kind)
    np.testing.assert_array_equal(result.labels, data.labels)
    solution = result.solution
    assert solution.status is Status.CONVERGED
    assert ct.certify(solution.problem, solution.models).relative_gap <= result.settings.tol
    assert len(np.unique(solution.models, axis=0)) == 2
    counts = result.path.n_clusters
    assert counts[0] >= 10
    assert counts[-1] == 1
    assert len(counts) == 6
    assert result.path[result.chosen].lam == solution.lam
    assert result.coefficients.shape[:2] == (12, 2 + (kind not in ("points", "rows")))


def test_many_users_are_searched_by_a_sample_and_drawn_at_few_points(monkeypatch):
    data = planted("regression", n_users=24, rows=32)
    small = fit(data.users, settings("regression", n_lams=12))
    monkeypatch.setattr("coterie.groups.proposals._MOST", 18)
    large = fit(data.users, settings("regression", n_lams=12))
    assert large.path.problem.n_users == small.path.problem.n_users == 24
    assert (len(small.path), large.path.tol, small.path.tol) == (12, 1e-3, 1e-6)
    assert len(large.path) <= 9
    assert (large.path.gaps <= 1e-3).all()
    np.testing.assert_array_equal(small.labels, large.labels)
    np.testing.assert_allclose(small.models, large.models, rtol=1e-9)


def test_the_path_knows_nothing_of_the_groups():
    """It is the path on the summaries, with weights by Wald distance; the twin has weights by groups."""
    data = planted("regression")
    found, other = fitted("regression"), fit(data.users, settings("regression", max_groups=1))
    assert other.n_clusters == 1 < found.n_clusters
    np.testing.assert_array_equal(found.path.problem.graph.edges, other.path.problem.graph.edges)
    np.testing.assert_array_equal(found.path.problem.graph.weights, other.path.problem.graph.weights)
    assert (np.diff(found.labels[found.path.problem.graph.edges], axis=1) != 0).any()
    assert not (np.diff(found.labels[found.solution.problem.graph.edges], axis=1) != 0).any()


@pytest.mark.parametrize("kind", SUPERVISED)
def test_threads_do_not_change_a_bit(kind, monkeypatch):
    monkeypatch.setattr("coterie.losses.blocks._PART", 40)  # so that there are many parts
    results = []
    for threads in (1, 3):
        set_threads(threads)
        try:
            results.append(fit(planted(kind).users, settings(kind, n_lams=4)))
        finally:
            set_threads(None)
    assert same(*results)


@pytest.mark.parametrize("family", ["squared", "logistic"])
def test_one_thread_and_two_give_the_same_bits(family):
    users, results = clustered(family, n_users=24, n_clusters=2, samples=40, seed=5).users, []
    if family == "logistic":
        users = replace(users, targets=(users.targets > 0).astype(float))
    task = "regression" if family == "squared" else "classification"
    for threads in (1, 2):
        set_threads(threads)
        try:
            results.append(fit(users, Settings(task=task, n_lams=6)))
        finally:
            set_threads(None)
    assert same(*results)
    assert results[0].scores is not None
    assert results[0].models.tobytes() == results[1].models.tobytes()


def test_a_fit_does_not_import_scikit_learn(tmp_path):
    code = ("import sys, numpy as np, coterie as ct; from coterie.datasets import clustered; "
            "from coterie.fitting import Settings, fit; "
            "found = fit(clustered('squared', n_users=12).users, Settings(task='regression', n_lams=3)); "
            "assert found.stability is not None; found.save('run'); assert 'sklearn' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=300)


def test_the_proof_can_fail():
    result = fitted("regression")
    moved = result.solution.models.copy()
    moved[0, 0] += 1e-2
    assert ct.certify(result.solution.problem, moved).relative_gap > 1e-4


@pytest.mark.parametrize("kind", ["binary", "regression"])
def test_users_without_groups_are_one(kind):
    data = planted(kind)
    one = data.users.take(np.flatnonzero(data.labels == 0))
    result = fit(one, settings(kind))
    assert result.n_clusters == 1
    assert result.kind == "one model"
    np.testing.assert_allclose(result.together, result.models[0], rtol=1e-12)
    equal = fit(one, replace(settings(kind), count="users"))
    np.testing.assert_allclose(equal.together, equal.solution.models[0], rtol=1e-4, atol=1e-5)


# ---- models, against a computation that shares nothing with the library


def _classes(t: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.log(np.exp(t).sum(axis=1)) - t[np.arange(len(y)), y.astype(int)]


#: The loss of every row from its margins, (n_rows, outputs).
PHI: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "binary": lambda t, y: np.logaddexp(0.0, -(2 * y - 1) * t[:, 0]), "classes": _classes,
    "regression": lambda t, y: 0.5 * (t[:, 0] - y) ** 2, "counts": lambda t, y: np.exp(t[:, 0]) - y * t[:, 0]}


def pooled(kind: str, data: Planted, groups: list[np.ndarray], *, by_rows: bool = False,
           ridge: tuple[float, float] = (RIDGE, RIDGE)) -> np.ndarray:
    """(n_groups, n_features + 1, outputs) in the table's units, of standardised features and an intercept the minimum

        sum over groups of (sum over its users of slopes' ridge/2 ||w||^2 + intercept's ridge/2 b^2 + mean_j phi)
    """
    mean, scale = data.X.mean(axis=0), data.X.std(axis=0)
    A, y, centre, spread = np.column_stack([(data.X - mean) / scale, np.ones(len(data.X))]), data.y, 0.0, 1.0
    if kind == "regression":
        centre, spread = data.y.mean(), data.y.std()
        y = (y - centre) / spread
    counts = np.bincount(data.owner)
    outputs = 3 if kind == "classes" else 1
    phi = PHI[kind]

    def objective(flat: np.ndarray) -> float:
        models, total = flat.reshape(len(groups), -1), 0.0
        for x, members in zip(models, groups, strict=True):
            inside = np.isin(data.owner, members)
            weights = 1.0 / counts[data.owner[inside]] if not by_rows else len(members) / inside.sum() * np.ones(
                inside.sum())
            held = np.repeat([ridge[0], ridge[0], ridge[1]], outputs)
            total += 0.5 * len(members) * held @ x**2 + weights @ phi(A[inside] @ x.reshape(3, outputs), y[inside])
        return total

    start = 1e-3 * np.arange(3.0 * outputs * len(groups))
    start = start.reshape(len(groups), 3, outputs)
    start -= start.mean(axis=2, keepdims=True) if outputs > 1 else 0.0  # only the sum over classes is not determined
    w = minimize(objective, start.ravel(), method="BFGS", options={"gtol": 1e-7}).x.reshape(start.shape)
    slopes = w[:, :2] / scale[:, None] * spread
    return np.concatenate([slopes, w[:, 2:] * spread + centre - mean @ slopes[:, None]], axis=1) if outputs == 1 else \
        np.concatenate([slopes, w[:, 2:] - np.einsum("p,gpk->gk", mean, slopes)[:, None]], axis=1)


@pytest.mark.parametrize("kind", SUPERVISED)
def test_models_are_those_of_their_groups(kind):
    """Models that predict are the certified solution: every row counts alike, and nothing pulls groups together."""
    data, found = planted(kind), fitted(kind)
    groups = [np.flatnonzero(data.labels == k) for k in range(2)]
    first, ridge = [members[0] for members in groups], learned_ridge(found)
    by_rows, free = pooled(kind, data, groups, by_rows=True, ridge=ridge), pooled(kind, data, groups, ridge=ridge)
    size = np.abs(free).max()
    np.testing.assert_array_equal(found.models, found.solution.models)
    np.testing.assert_allclose(found.coefficients[first], by_rows, atol=1e-3 * size)
    np.testing.assert_allclose(found.units.coefficients(found.centres), by_rows, atol=1e-3 * size)
    assert np.abs(by_rows - free).max() > 4e-3 * size
    by_users = fit(data.users, replace(settings(kind), count="users", holdout=0.0))
    free = pooled(kind, data, groups, ridge=learned_ridge(by_users))
    np.testing.assert_allclose(by_users.coefficients[first], free, atol=1e-3 * size)


def learned_ridge(found: Fit) -> tuple[float, float]:
    """The ridge on slopes and on the intercept."""
    loss = found.units.loss
    return loss.ridge, loss.ridge * float(loss.penalize_intercept)


@pytest.mark.parametrize("kind", SUPERVISED)
def test_scikit_learn_agrees_on_one_group(kind):
    """With as many rows each, a group of users is one table; the ridge of scikit-learn spares the intercept."""
    data = planted(kind, rows=24)
    keep = np.concatenate([np.flatnonzero(data.owner == i)[:12] for i in range(0, 12, 2)])
    users = ct.Users.from_arrays(data.X[keep], data.y[keep], data.owner[keep])
    X, y, n = (data.X[keep] - data.X[keep].mean(axis=0)) / data.X[keep].std(axis=0), data.y[keep], len(keep)
    result = fit(users, settings(kind, max_groups=1, lam="auto"))
    assert result.n_clusters == 1
    values = result.units.predict(users.features, np.repeat(result.solution.models, 12, axis=0))
    ridge = result.units.loss.ridge  # learned, unless losses are squared
    assert (ridge == RIDGE) == (kind == "regression")
    theirs = {"binary": LogisticRegression(C=1 / (ridge * n), tol=1e-10, max_iter=1000),
              "classes": LogisticRegression(C=1 / (ridge * n), tol=1e-10, max_iter=1000),
              "regression": Ridge(alpha=ridge * n), "counts": PoissonRegressor(alpha=ridge, tol=1e-10)}[kind]
    theirs.fit(X, y)
    if TASKS[kind] == "classification":
        shares = result.units.probabilities(users.features, np.repeat(result.solution.models, 12, axis=0))
        np.testing.assert_allclose(shares, theirs.predict_proba(X), atol=1e-2)
        assert (values == theirs.predict(X)).mean() > 0.98
    else:
        np.testing.assert_allclose(values, theirs.predict(X), rtol=1e-2, atol=1e-2)


def test_points_are_clustered_as_by_k_means():
    data, result = planted("points"), fitted("points")
    means = np.stack([data.X[data.owner == i].mean(axis=0) for i in range(12)])
    theirs = KMeans(2, n_init=3, random_state=0).fit(means)
    np.testing.assert_array_equal(check_labels(theirs.labels_, 12), result.labels)
    np.testing.assert_allclose(result.coefficients[..., 0], theirs.cluster_centers_[theirs.labels_], atol=0.1)


# ---- what must not matter


@pytest.mark.parametrize("kind", QUICK)
def test_units_of_features_do_not_matter(kind):
    data = planted(kind)
    scale, shift = np.array([1e-3, 250.0]), np.array([5.0, -1e5])
    other = ct.Users.from_arrays(data.X * scale + shift, data.y, data.owner)
    first, second = fitted(kind), fit(other, settings(kind))
    np.testing.assert_array_equal(first.labels, second.labels)
    np.testing.assert_allclose(second.solution.models, first.solution.models, rtol=1e-5, atol=1e-6)
    if kind in ("points", "rows"):
        np.testing.assert_allclose(second.coefficients[..., 0], first.coefficients[..., 0] * scale + shift, rtol=1e-5)
        return
    values = [f.units.margins(u.features, f.solution.models[u.owner])
              for f, u in ((first, data.users), (second, other))]
    np.testing.assert_allclose(values[0], values[1], rtol=1e-5, atol=1e-5)
    assert np.abs(second.coefficients[:, 0] - first.coefficients[:, 0]).max() > 1  # the twin: coefficients do change


@pytest.mark.parametrize(("scale", "shift"), [(-1e6, 1e7), pytest.param(1e-3, 7.0, marks=pytest.mark.slow)])
def test_units_of_a_target_do_not_matter(scale, shift):
    data = planted("regression")
    other = ct.Users.from_arrays(data.X, data.y * scale + shift, data.owner)
    first, second = (fit(users, settings("regression", holdout=0.2, n_lams=3)) for users in (data.users, other))
    values = [f.units.predict(data.X, f.solution.models[data.owner]) for f in (first, second)]
    np.testing.assert_allclose(values[1], values[0] * scale + shift, rtol=1e-6, atol=1e-6 * abs(scale))
    np.testing.assert_allclose(second.scores.fitted, first.scores.fitted * abs(scale), rtol=1e-4)


def test_without_standardisation_units_do_matter():
    data = planted("regression")
    other = ct.Users.from_arrays(data.X * [1e-3, 1.0], data.y, data.owner)
    plain = [fit(users, settings("regression", standardize=False)) for users in (data.users, other)]
    assert plain[0].units.mean.tolist() == [0, 0]
    assert np.abs(plain[0].coefficients[:, 0] - plain[1].coefficients[:, 0] * 1e-3).max() > 0.1


@pytest.mark.parametrize("kind", QUICK)
def test_orders_do_not_matter(kind):
    data = planted(kind)
    rng = np.random.default_rng(1)
    order, rename = rng.permutation(len(data.X)), rng.permutation(12)  # rows come and users are sorted otherwise
    other = ct.Users.from_arrays(data.X[order], None if data.y is None else data.y[order], rename[data.owner][order])
    first, second = fitted(kind), fit(other, settings(kind))
    np.testing.assert_array_equal(check_labels(second.labels[rename], 12), first.labels)
    np.testing.assert_allclose(second.coefficients[rename], first.coefficients, rtol=1e-4, atol=1e-3)


# ---- rows held out


@pytest.mark.parametrize(("kind", "lam"), [
    ("regression", "auto"), *(pytest.param(kind, lam, marks=pytest.mark.slow) for kind in SUPERVISED
                              for lam in ("auto", "score") if (kind, lam) != ("regression", "auto"))])
def test_rows_held_out_are_not_learned_from(kind, lam):
    """Spoil one user's rows held out: nothing changes for the others. Spoil a row it learns from: much does."""
    data = planted(kind)
    chosen = settings(kind, holdout=0.2, lam=lam, n_lams=4)
    X, y = data.X.copy(), data.y.copy()
    # A column that no model uses tells which rows were held out.
    rows = ct.Users.from_arrays(np.arange(len(X))[:, None], y, data.owner)
    test = rows.hold_out(0.2, stratify=TASKS[kind] == "classification", seed=0).test
    mine = test.features[test.owner == 3, 0].astype(int)
    X[mine] = 7.0
    if kind in ("regression", "counts"):
        y[mine] += 50.0
    others = np.arange(12) != 3

    def values(X: np.ndarray, y: np.ndarray) -> tuple[list[np.ndarray], float]:
        s = fit(ct.Users.from_arrays(X, y, data.owner), chosen).scores
        return [s.fitted[others], s.alone[others], s.together[others], s.points[:, others],
                np.array([s.n_clusters])], float(s.alone[3])

    plain, own = values(data.X, data.y)
    for before, after in zip(plain, values(X, y)[0], strict=True):
        if lam == "auto" or before.ndim == 2:  # what scores least is for all rows held out to say
            np.testing.assert_array_equal(before, after)
    learned = np.setdiff1d(np.flatnonzero(data.owner == 3), mine)
    X = data.X.copy()
    X[learned] *= -3.0
    changed, changed_own = values(X, data.y)
    assert changed_own != own or any((a != b).any() for a, b in zip(plain, changed, strict=True))


def test_scores_are_what_they_say():
    data = planted("regression")
    result = fit(data.users, settings("regression", holdout=0.25))
    s = result.scores
    assert (s.metric, s.larger, s.n_clusters) == ("RMSE", False, 2)
    split = data.users.hold_out(0.25, seed=0)
    assert s.n_rows == split.test.n_samples
    train, test = split.train, split.test
    learned = Planted(train, data.labels, train.features, train.targets, train.owner)
    models = pooled("regression", learned, [np.flatnonzero(data.labels == k) for k in range(2)])[data.labels, :, 0]
    errors = (test.features * models[test.owner, :2]).sum(axis=1) + models[test.owner, 2] - test.targets
    theirs = np.sqrt(np.bincount(test.owner, errors**2) / test.counts)
    assert np.abs(s.fitted - theirs).max() < 0.3 * theirs.mean()  # but for the rows of users with few
    assert np.nanmean(s.together) > 3 * np.nanmean(s.fitted)
    assert s.points.shape == (1, 12)
    np.testing.assert_array_equal(s.points[s.chosen], s.fitted)
    scored = fit(data.users, settings("regression", holdout=0.25, lam="score")).scores
    assert scored.points.shape == (6, 12)
    np.testing.assert_array_equal(scored.points[scored.chosen], scored.fitted)
    assert "RMSE on" in str(s)


def test_accuracy_is_of_rows_held_out():
    result = fit(planted("binary").users, settings("binary", holdout=0.25, n_lams=3))
    s = result.scores
    assert s.larger
    assert s.fitted.mean() > 0.8 > 0.65 > s.together.mean()
    assert ((s.fitted >= 0) & (s.fitted <= 1)).all()


def test_the_seed_is_of_the_rows_held_out_only():
    data = planted("regression", n_users=4)
    first, again, other = (fit(data.users, settings("regression", holdout=0.2, seed=s, n_lams=3)) for s in (7, 7, 8))
    assert same(first, again)
    assert not same(first, other)
    assert first.kind == other.kind == "groups"
    np.testing.assert_array_equal(first.solution.models, other.solution.models)


# ---- settings


@pytest.mark.parametrize("weights", ["auto", "unit", "wald", "gaussian", "inverse"])
@pytest.mark.parametrize("lam", ["score", pytest.param(0.02, marks=pytest.mark.slow)])
def test_every_kind_of_weights(weights, lam):
    data = planted("regression", n_users=6)
    result = fit(data.users, settings("regression", weights=weights, lam=lam, holdout=0.25))
    assert result.solution.status is Status.CONVERGED
    assert ct.certify(result.solution.problem, result.solution.models).relative_gap <= 1e-5
    assert result.path.n_clusters[0] >= 5
    assert result.path.n_clusters[-1] == 1
    if lam == "score":
        index = int(np.argmin(result.scores.losses))
        assert result.solution.lam == result.path.lams[index]
        assert result.why.startswith("Least mean loss")
        assert np.nanmean(result.scores.fitted) < 0.5 * np.nanmean(result.scores.together)
    else:
        assert result.solution.lam == lam
        assert result.why == "As given."


@pytest.mark.parametrize("weights", ["auto", "unit", pytest.param("gaussian", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["points", "rows"])
def test_points_on_any_weights(kind, weights):
    data = planted(kind)
    result = fit(data.users, settings(kind, weights=weights))
    np.testing.assert_array_equal(result.labels, data.labels)
    assert fit(data.users, settings(kind, weights=weights, lam=0.0)).n_clusters == 12


def test_points_without_clusters_are_put_together():
    points = np.random.default_rng(0).standard_normal((40, 2))
    result = fit(ct.Users.from_arrays(points), settings("rows"))
    assert result.n_clusters == 1
    assert "No clusters persist" in result.why


def test_far_points_are_no_clusters():
    """Two of them stay apart for longer than three clouds do."""
    rng = np.random.default_rng(0)
    clouds = np.repeat([[0.0, 0.0], [6.0, 0.0], [0.0, 6.0]], 20, axis=0) + 0.4 * rng.standard_normal((60, 2))
    points = np.concatenate([clouds, [[200.0, 0.0], [0.0, -300.0]]])
    result = fit(ct.Users.from_arrays(points), settings("rows", n_lams=24))
    assert adjusted_rand(result.labels[:60], np.repeat([0, 1, 2], 20)) == 1.0
    assert "3 clusters persist longest" in result.why


@pytest.mark.parametrize(("changes", "parts"), [
    ({"lam": -1.0}, ["lam must be"]), ({"lam": float("nan")}, ["lam must be"]), ({"lam": "best"}, ["'best'", "auto"]),
    ({"weights": "heavy"}, ["unknown weights 'heavy'", "wald"]), ({"holdout": 1.0}, ["holdout", "0.2"]),
    ({"holdout": float("nan")}, ["holdout"]), ({"n_lams": 1}, ["n_lams", ">= 2"]),
    ({"max_groups": 0}, ["max_groups", ">= 1"]),
    ({"k": 2.5}, ["k must be a whole number"]), ({"k": True}, ["k must be"]), ({"tol": 0.0}, ["tol", "> 0"]),
    ({"tol": float("inf")}, ["tol"]), ({"ridge": -1.0}, ["ridge"]), ({"ridge": float("nan")}, ["ridge"]),
    ({"loss": "poisson"}, ["'poisson' does not fit regression", "squared"]), ({"task": "magic"}, ["magic", "counts"]),
    ({"seed": -1}, ["seed must be a whole number >= 0"]), ({"seed": 1.5}, ["seed"]),
    ({"lam": "score"}, ["no rows are held out", "Give lam a number"]),
    ({"weights": "unit"}, ["no rows are held out", "Give lam a number"]),
])
def test_settings_that_are_refused(changes, parts):
    with pytest.raises(InvalidInput, match="(?s)" + ".*".join(map(re.escape, parts))):
        fit(planted("regression", n_users=3).users, settings("regression", **changes))


def test_users_that_are_refused():
    points = planted("points").users
    with pytest.raises(InvalidInput, match="regression needs targets"):
        fit(points, settings("regression"))
    with pytest.raises(InvalidInput, match="all samples are of one class"):
        fit(ct.Users.from_arrays([[1.0], [2.0]], [0.0, 0.0], [0, 1]), settings("binary"))
    with pytest.raises(InvalidInput, match="two classes"):
        fit(planted("classes").users, settings("classes", loss="squared_hinge"))


# ---- few users, few rows


def check(result: Fit, n_users: int) -> None:
    """Whatever the data, the answer is proven and all numbers are finite."""
    assert result.solution.status is Status.CONVERGED
    assert result.gap <= result.settings.tol
    assert result.solution.models.shape[0] == n_users
    assert all(np.isfinite(part).all() for part in (result.solution.models, result.coefficients, result.together))
    assert result.path.n_clusters[-1] == 1


def test_check_can_fail():
    data = planted("regression")
    with pytest.raises(AssertionError):
        check(fit(data.users, settings("regression", lam=1e-9, n_lams=2, weights="unit", holdout=0.2)), 11)


@pytest.mark.parametrize("lam", ["auto", pytest.param("score", marks=pytest.mark.slow), 0.1])
@pytest.mark.parametrize("kind", SUPERVISED)
def test_one_user_is_a_plain_fit(kind, lam):
    data = planted(kind, n_users=1)
    result = fit(data.users, settings(kind, lam=lam, holdout=0.2))
    check(result, 1)
    assert "only one user" in result.why
    np.testing.assert_allclose(result.coefficients, pooled(kind, data, [np.array([0])]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("weights", ["auto", "unit", pytest.param("wald", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", QUICK)
def test_two_users(kind, weights):
    data = planted(kind, n_users=2)
    check(fit(data.users, settings(kind, weights=weights, holdout=0.2)), 2)


@pytest.mark.parametrize("kind", QUICK[:4])
def test_users_with_one_row_each(kind):
    data = planted(kind, n_users=14)
    first = np.searchsorted(data.owner, np.arange(14))
    users = ct.Users.from_arrays(data.X[first], data.y[first], data.owner[first])
    with concerned(TASKS[kind] == "classification"):
        result = fit(users, settings(kind, holdout=0.2))
    check(result, 14)
    assert result.scores is None  # a user's only row is never held out
    with concerned(TASKS[kind] == "classification"), pytest.raises(InvalidInput, match="no rows are held out"):
        fit(users, settings(kind, holdout=0.2, lam="score", n_lams=2))


@contextlib.contextmanager
def concerned(warned: bool = True) -> Iterator[None]:
    """Users of one class are named, once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert [("of one class only" in str(w.message), w.category) for w in caught] == [(True, CoterieWarning)] * warned


def test_a_user_of_one_class():
    data = planted("binary")
    y = np.where(data.owner == 0, 1.0, data.y)
    with concerned():
        result = fit(ct.Users.from_arrays(data.X, y, data.owner), settings("binary", holdout=0.2, n_lams=3))
    check(result, 12)


@pytest.mark.parametrize("weights", ["auto", "unit", pytest.param("wald", marks=pytest.mark.slow), "gaussian"])
@pytest.mark.parametrize("kind", QUICK[:5])
def test_identical_users_are_one(kind, weights):
    data = planted(kind, n_users=2)
    mine = data.owner == 0
    X, y = np.tile(data.X[mine], (6, 1)), None if data.y is None else np.tile(data.y[mine], 6)
    users = ct.Users.from_arrays(X, y, np.repeat(np.arange(6), mine.sum()))
    result = fit(users, settings(kind, weights=weights, holdout=0.2))
    check(result, 6)
    assert result.n_clusters == 1


@pytest.mark.parametrize("value", [0.0, 5.0, -1e9])
def test_a_constant_target(value):
    data = planted("regression")
    result = fit(ct.Users.from_arrays(data.X, np.full(len(data.X), value), data.owner),
                settings("regression", holdout=0.2))
    check(result, 12)
    values = result.units.predict(data.X, result.solution.models[data.owner])
    np.testing.assert_allclose(values, value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", QUICK)
def test_three_users_of_one_feature(kind):
    data = planted(kind, n_users=3)
    result = fit(ct.Users.from_arrays(data.X[:, :1], data.y, data.owner), settings(kind, holdout=0.2))
    check(result, 3)


def test_a_constant_feature_has_no_part():
    data = planted("regression")
    result = fit(ct.Users.from_arrays(np.column_stack([data.X, np.full(len(data.X), 3.0)]), data.y, data.owner),
                settings("regression"))
    check(result, 12)
    np.testing.assert_array_equal(result.labels, data.labels)


def test_huge_counts_held_out_are_no_warning():
    data = planted("counts")
    X = data.X.copy()
    rows = ct.Users.from_arrays(np.arange(len(X))[:, None], data.y, data.owner)
    test = rows.hold_out(0.2, seed=0).test.features[:, 0].astype(int)
    X[test] *= 1e6
    scores = fit(ct.Users.from_arrays(X, data.y, data.owner), settings("counts", holdout=0.2, n_lams=2)).scores
    assert np.isinf(scores.fitted).any()


# ---- broken off and gone on with


class Stops(dict):
    """A store that is interrupted at one of its writes, before or after it is done."""

    def __init__(self, at: int, *, after: bool = False) -> None:
        super().__init__()
        self.left, self.after = at, after

    def __setitem__(self, key: str, value: Any) -> None:
        self.left -= 1
        if self.left == 0 and not self.after:
            raise KeyboardInterrupt
        super().__setitem__(key, value)
        if self.left == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize(("kind", "changes"), [
    ("regression", {"holdout": 0.25, "n_lams": 3}), ("regression", {"holdout": 0.25, "n_lams": 3, "weights": "unit"}),
    ("rows", {"n_lams": 4})])
def test_many_interrupts_lose_nothing(kind, changes):
    """One run that is broken off after every second write: a point of the path takes two."""
    data, chosen = planted(kind, n_users=4, rows=8), settings(kind, **changes)
    counted, store, result = Stops(0), Stops(0, after=True), None
    complete = fit(data.users, chosen, store=counted)
    times = 0
    while result is None:
        store.left, times = 2, times + 1
        with contextlib.suppress(KeyboardInterrupt):
            result = fit(data.users, chosen, store=store)
    assert same(result, complete)
    assert -counted.left / 2 <= times <= -counted.left


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "changes"), [
    ("regression", {"holdout": 0.25, "n_lams": 3}), ("regression", {"holdout": 0.25, "n_lams": 3, "weights": "unit"}),
    ("binary", {"holdout": 0.25, "n_lams": 3}), ("classes", {"holdout": 0.25, "n_lams": 2, "lam": "score"}),
    ("counts", {"holdout": 0.25, "n_lams": 2, "lam": 0.01}), ("points", {"n_lams": 3}), ("rows", {"n_lams": 3})])
@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_at_any_write_loses_nothing(kind, changes, after):
    data, chosen = planted(kind, n_users=4, rows=8), settings(kind, **changes)
    counted = Stops(0)
    complete = fit(data.users, chosen, store=counted)
    writes = -counted.left
    automatic = chosen.lam == chosen.weights == "auto" and kind != "rows"
    assert writes >= (1 if automatic else 2 * len(complete.path) + 1)
    for k in range(1, writes + 1):
        store = Stops(k, after=after)
        with pytest.raises(KeyboardInterrupt):
            fit(data.users, chosen, store=store)
        assert len(store) <= k
        assert same(fit(data.users, chosen, store=store), complete)
    assert same(fit(data.users, chosen, store=counted), complete)  # nothing is left to solve


def test_what_is_kept_is_used():
    """The twin: a store that holds something else gives something else."""
    data, chosen = planted("regression", n_users=6, rows=8), settings("regression", n_lams=3)
    store: dict[str, Any] = {}
    complete = fit(data.users, chosen, store=store)
    assert set(store) == {"choice 0"}
    store["choice 0"] = {**store["choice 0"], "kind": "one model", "groups": np.zeros(6, dtype=int)}
    assert not same(fit(data.users, chosen, store=store), complete)
    given = settings("regression", n_lams=3, lam=0.1)
    store = {}
    complete = fit(data.users, given, store=store)
    store["point 0"] = {**store["point 0"], "models": store["point 0"]["models"] + 1.0}
    assert not same(fit(data.users, given, store=store), complete)


def test_an_interrupt_between_writes_is_passed_on():
    data, chosen = planted("regression", n_users=4, rows=8), settings("regression", n_lams=3, holdout=0.25)
    values: list[str] = []
    fit(data.users, chosen, progress=lambda what, *_: values.append(what))
    assert {"summaries of the users", "searching for groups", "centres of the groups"} <= set(values)
    for k in [values.index(what) for what in dict.fromkeys(values) if "searching" not in what]:
        left = [k]

        def stop(*_: Any, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt

        with pytest.raises(ct.Interrupted):
            fit(data.users, chosen, progress=stop)


# ---- units


@pytest.mark.parametrize("standardize", [True, False])
@pytest.mark.parametrize("kind", TASKS)
def test_coefficients_there_and_back(kind, standardize):
    data = planted(kind)
    users = ct.Users.from_arrays(data.X * [1e-2, 30.0] + [4.0, -7.0], data.y, data.owner)
    units = Units.learn(users, TASKS[kind], standardize=standardize)
    rng = np.random.default_rng(0)
    models = rng.standard_normal((5, ct.Problem(units.inner(users), units.loss, 0.0).dim))
    coefficients = units.coefficients(models)
    np.testing.assert_allclose(units.restored(coefficients), models, rtol=1e-8, atol=1e-9)
    again = Units.from_state({**units.state(), "mean": units.mean.tolist(), "scale": units.scale.tolist()})
    np.testing.assert_array_equal(again.coefficients(models), coefficients)
    if data.y is None:
        return
    # <w, x> + b by hand in the table's units.
    rows, owner = users.features[:9], rng.integers(0, 5, 9)
    hand = np.einsum("rp,rpk->rk", rows, coefficients[owner, :-1]) + coefficients[owner, -1]
    margins = units.margins(rows, models[owner])
    np.testing.assert_allclose(hand if kind == "classes" else hand[:, 0], margins, rtol=1e-7, atol=1e-7)
    values = units.predict(rows, models[owner])
    theirs = {"binary": lambda: (hand[:, 0] >= 0).astype(float), "classes": lambda: hand.argmax(axis=1).astype(float),
              "regression": lambda: hand[:, 0], "counts": lambda: np.exp(hand[:, 0])}[kind]()
    np.testing.assert_allclose(values, theirs, rtol=1e-7)
    if TASKS[kind] == "classification":
        shares = units.probabilities(rows, models[owner])
        np.testing.assert_allclose(shares.sum(axis=1), 1.0)
        odds = np.exp(hand) / np.exp(hand).sum(axis=1, keepdims=True) if kind == "classes" else 1 / (1 + np.exp(-hand))
        np.testing.assert_allclose(shares if kind == "classes" else shares[:, 1:], odds, rtol=1e-6)
    else:
        with pytest.raises(InvalidInput, match="no probabilities"):
            units.probabilities(rows, models[owner])


def test_models_of_users_and_strangers():
    result = fitted("regression")
    models, known = result.models_of([3, "stranger", 0])
    assert known.tolist() == [True, False, True]
    np.testing.assert_array_equal(models, [result.models[3], result.together, result.models[0]])
    with pytest.raises(InvalidInput, match=r"expected a list of names, got 3\. Pass \[3\]"):
        result.models_of(3)
    named = replace(result, solution=replace(result.solution, problem=replace(
        result.solution.problem, users=replace(result.solution.problem.users, names=tuple(
            f"user {name}" for name in result.names)))))
    assert named.models_of(["user 3"])[1].tolist() == [True]
    for wrong, part in (("user 3", "expected a list of names"), ([3], r"got the integer 3.*fit\.names\[3\]")):
        with pytest.raises(InvalidInput, match=part):
            named.models_of(wrong)


def test_as_many_groups_as_there_are():
    """Twelve, where eight are looked for at first; a limit is kept to, and said."""
    rng = np.random.default_rng(0)
    kind = np.repeat(np.arange(12), 4)
    owner = np.repeat(np.arange(48), 15)
    X = rng.normal(size=(len(owner), 2))
    y = (X * (10 * rng.normal(size=(12, 2)))[kind[owner]]).sum(axis=1) + rng.normal(size=len(owner))
    users = ct.Users.from_arrays(X, y, owner)
    result = fit(users, Settings(task="regression", n_lams=4, holdout=0.0))
    assert result.n_clusters == 12
    assert len(set(zip(result.labels, kind, strict=True))) == 12
    few = fit(users, Settings(task="regression", n_lams=4, holdout=0.0, max_groups=3))
    assert few.n_clusters <= 3
    assert "The search stopped at this number" in few.why
