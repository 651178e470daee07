"""Fits of wide tables: more coordinates than a user has rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import coterie as ct
from coterie.base.errors import InvalidInput
from coterie.convex.choice import adjusted_rand
from coterie.data.users import Users
from coterie.fitting import Settings, fit
from coterie.fitting.kinds import Sharing, choose_wide, handed_out
from coterie.fitting.units import learn_units
from coterie.groups.wide import fit_models, search_wide
from coterie.problem.weights import LocalModels, adaptive_graph

N_USERS, N_ROWS, COLUMNS, CLASSES = 12, 20, 160, 3


def heads(seed: int, n_groups: int, n_rows: int = N_ROWS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows around one point per class; groups name the classes differently."""
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(N_USERS), n_rows)
    points = 0.6 * rng.standard_normal((CLASSES, COLUMNS))
    true = rng.integers(CLASSES, size=owner.size)
    rows = points[true] + rng.standard_normal((owner.size, COLUMNS))
    return rows, (true + owner % n_groups) % CLASSES, owner


def numbers(seed: int, n_groups: int, n_users: int = 40) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Targets of one linear model for each group, and noise."""
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(n_users), 40)
    rows, models = rng.standard_normal((owner.size, 170)), rng.standard_normal((n_groups, 170)) / 13.0
    return rows, (rows * models[owner % n_groups]).sum(axis=1) + 0.4 * rng.standard_normal(owner.size), owner


def table(drawn: tuple[np.ndarray, np.ndarray, np.ndarray]) -> Users:
    rows, y, owner = drawn
    return Users.from_arrays(rows, y.astype(float), owner)


@pytest.fixture(scope="module")
def fitted() -> ct.Fit:
    result = fit(table(heads(1, 2)), Settings(task="classification", n_lams=3))
    assert result.solution.problem.loss.wide(result.solution.problem.samples)
    return result


def test_the_fit_finds_groups_that_name_classes_differently_and_certifies(fitted: ct.Fit) -> None:
    assert adjusted_rand(fitted.labels, np.arange(N_USERS) % 2) == 1.0
    assert fitted.gap <= fitted.settings.tol
    assert fitted.certify().certified
    assert fitted.stability is not None
    assert fitted.stability.index > 0.9


def test_scores_are_those_of_a_model_that_has_not_seen_the_rows(fitted: ct.Fit) -> None:
    assert fitted.scores is not None
    assert np.nanmean(fitted.scores.fitted) >= np.nanmean(fitted.scores.alone)
    assert np.nanmean(fitted.scores.fitted) > np.nanmean(fitted.scores.together) + 0.2
    fresh = table(heads(1, 2, n_rows=N_ROWS + 10))  # other rows around the same points
    right = fitted.predict(fresh)["prediction"].to_numpy().astype(float) == fresh.targets
    assert right.mean() > 0.9


def test_a_wide_run_is_saved_loaded_and_predicts_the_same(fitted: ct.Fit, tmp_path: object) -> None:
    users = table(heads(1, 2))
    run = ct.load_run(fitted.save(f"{tmp_path}/run"))
    assert run.kind == fitted.kind
    assert run.predict(users).equals(fitted.predict(users))
    assert (run.folder / "report.html").stat().st_size > 10_000


def test_a_wide_personal_run_is_saved_and_loaded(tmp_path: object) -> None:
    users = table(heads(2, 1))
    result = fit(users, Settings(task="classification", n_lams=2, holdout=0.0))
    outer = ct.Personal(result.units.loss, covariance=np.array(0.1), scale="rows")
    problem = replace(result.solution.problem, loss=outer, lam=1e3)
    personal = replace(result, solution=ct.solve(problem, tol=1e-6))
    run = ct.load_run(personal.save(f"{tmp_path}/run"))
    assert run.kind == "personal"
    np.testing.assert_allclose(run.models, personal.models, rtol=1e-9)


@pytest.mark.parametrize("n_groups", [1, 3])
def test_the_search_finds_as_many_groups_as_there_are_for_numbers(n_groups: int) -> None:
    users, settings = table(numbers(3, n_groups)), Settings(task="regression")
    units = learn_units(users, settings)
    inner = units.inner(users)
    assert units.loss.wide(units.loss.prepare(inner))
    found = search_wide(inner, units.loss)
    assert adjusted_rand(found.best.labels, np.arange(users.n_users) % n_groups) == 1.0
    assert found.best.n_groups == n_groups
    assert 0.5 < found.noise / (0.16 / units.spread**2) < 2.0


@pytest.mark.slow
def test_find_groups_has_the_same_groups_and_group_models() -> None:
    users = table(numbers(4, 2))
    groups = ct.find_groups(users, ct.Squared())
    assert adjusted_rand(groups.labels, np.arange(users.n_users) % 2) == 1.0
    loss = ct.Squared()
    gradients = loss.gradients(loss.prepare(users), groups.models)
    for c in range(2):
        assert np.abs(gradients[groups.labels == c].sum(axis=0)).max() < 1e-6


def test_kinds_are_one_model_where_users_do_not_differ() -> None:
    users, settings = table(heads(5, 1)), Settings(task="classification")
    units = learn_units(users, settings)
    compared = choose_wide(units.inner(users), units.loss, np.zeros(N_USERS, dtype=np.int64), settings)
    assert compared.sharing.kind == "one model"


def test_models_by_lbfgs_are_those_of_the_personal_loss() -> None:
    users, settings = table(heads(6, 2)), Settings(task="classification")
    units = learn_units(users, settings)
    inner, labels = units.inner(users), np.arange(N_USERS) % 2
    loss = Sharing("personal in groups", labels, np.array(0.3)).loss(units.loss, inner)
    samples = loss.prepare(inner)
    models = handed_out(loss, samples, labels, "rows")
    weights, prices = inner.sizes / inner.sizes.mean(), 1.0 / (0.3 * inner.sizes)
    centres = fit_models(units.loss, units.loss.prepare(inner), labels, weights, prices, accurate=1e-8).centres
    exact = loss.own_models(samples, centres[labels])
    np.testing.assert_allclose(models, exact, atol=1e-3 * np.abs(exact).max())
    worse = loss.own_models(samples, 1.5 * centres[labels])
    assert np.abs(models - worse).max() > 1e-3 * np.abs(exact).max()


def test_wald_distances_of_operators_are_those_of_hessians(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.losses.rows._HESSIANS", 0)  # as if there were more users
    users = table(numbers(7, 2))
    loss = ct.Squared()
    samples = loss.prepare(users)
    local = LocalModels.of(users, loss)
    assert local.wide is not None
    dense = LocalModels(local.models, loss.hessians(samples, local.models) + 1e-3 * np.eye(samples.dim), local.counts)
    pairs = np.array([[0, 1], [0, 2], [3, 8]])
    S = dense.covariances
    gaps = local.models[pairs[:, 0]] - local.models[pairs[:, 1]]
    exact = [gap @ np.linalg.solve(S[i] + S[j], gap) / samples.dim for gap, (i, j) in zip(gaps, pairs, strict=True)]
    np.testing.assert_allclose(local.wide(pairs), exact, rtol=1e-2)
    assert adaptive_graph(local, "wald", 3).n_users == users.n_users


def test_the_memory_is_asked_for_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.base.machine.free_memory", lambda: 1e6)
    monkeypatch.setattr("coterie.base.machine._SMALL", 0)
    with pytest.raises(InvalidInput, match="principal components"):
        fit(table(heads(8, 2)), Settings(task="classification"))
