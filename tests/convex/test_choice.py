"""Choosing lambda: each rule does what it says, and test data never have a say."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

import coterie as ct
from coterie.convex.choice import adjusted_rand
from coterie.datasets import ellipses


@pytest.fixture(scope="module")
def setting():
    data = ellipses(users_per_cluster=8, samples=40, seed=0)
    parts = data.users.split(validation=0.4, test=0.0, seed=1)
    problem = ct.Problem(parts.train, ct.SquaredHinge(ridge=1e-3), lam=1.0)
    return data, parts, problem, ct.solve_path(problem, n_lams=25, tol=1e-6)


def test_refit_is_the_best_model_of_each_cluster(setting):
    data, _, problem, _ = setting
    models = ct.refit(problem, data.clusters)
    for k in range(3):
        members = data.clusters == k
        assert (models[members] == models[members][0]).all()
        assert np.abs(problem.gradients(models)[members].sum(axis=0)).max() < 1e-8
    names = np.array(["x", "y", "z"])[data.clusters]
    np.testing.assert_array_equal(ct.refit(problem, names), models)
    with pytest.raises(ct.InvalidInput, match="each of 24 users"):
        ct.refit(problem, [0, 1])


def test_the_score_chosen_is_the_least_or_within_one_error(setting):
    _, parts, problem, path = setting
    plain = ct.by_score(problem, parts.validation, path=path, one_standard_error=False)
    assert plain.scores[[s.lam for s in path.solutions].index(plain.lam)] == pytest.approx(plain.scores.min())
    careful = ct.by_score(problem, parts.validation, path=path)
    assert careful.solution.n_clusters <= plain.solution.n_clusters
    samples = problem.loss.prepare(parts.validation)
    assert problem.loss.values(samples, plain.models).mean() == pytest.approx(plain.scores.min())
    expected = ct.refit(problem, plain.labels) if plain.refitted else plain.solution.models
    np.testing.assert_array_equal(plain.models, expected)
    assert "held-out" in str(plain)


def test_test_data_never_have_a_say(setting):
    """Poisoned test labels change nothing that is chosen; poisoned validation labels do."""
    data = setting[0]
    parts = data.users.split(validation=0.3, test=0.3, seed=2)

    def choose(users):
        split = users.split(validation=0.3, test=0.3, seed=2)
        problem = ct.Problem(split.train, ct.SquaredHinge(ridge=1e-3), lam=1.0)
        return ct.by_score(problem, split.validation, n_lams=12)

    def poisoned(part):
        rows = {(int(o), *map(float, x)) for o, x in zip(part.owner, part.features, strict=True)}
        everyone = zip(data.users.owner, data.users.features, strict=True)
        hit = np.array([(int(o), *map(float, x)) in rows for o, x in everyone])
        return ct.Users.from_arrays(data.users.features, np.where(hit, -data.users.targets, data.users.targets),
                                    data.users.owner)

    honest, same, other = choose(data.users), choose(poisoned(parts.test)), choose(poisoned(parts.validation))
    assert honest.lam == same.lam
    np.testing.assert_array_equal(honest.models, same.models)
    assert not np.array_equal(honest.scores, other.scores)


def test_a_budget_of_models_is_kept(setting):
    _, _, problem, path = setting
    for budget in (1, 2, 3, 10, 100):
        choice = ct.by_clusters(problem, budget, path=path)
        assert choice.solution.n_clusters <= budget
        earlier = path.n_clusters[path.lams < choice.lam]
        assert (earlier > budget).all()
    for bad in (0, 2.5, True):
        with pytest.raises(ct.InvalidInput, match="at_most"):
            ct.by_clusters(problem, bad, path=path)
    with pytest.raises(ct.InvalidInput, match="no point of the path"):
        ct.by_clusters(problem, 1, path=ct.solve_path(problem, [1e-6]))


def test_the_certified_choice_is_certified(setting):
    data, _, problem, path = setting
    choice = ct.by_certificate(problem, path=path)
    assert ct.recovery_bounds(choice.solution.problem, choice.labels).holds
    assert np.array_equal(choice.labels, data.clusters)
    nothing = ct.by_certificate(problem, path=ct.solve_path(problem, path.lams[[0, -1]]))
    assert nothing.solution.n_clusters == 1
    assert "no clustering" in nothing.sentence


def test_stable_clusters_are_the_true_ones(setting):
    data, _, problem, path = setting
    choice = ct.by_stability(problem, path=path, resamples=4)
    assert choice.scores.max() <= 1.0
    assert np.array_equal(choice.labels, data.clusters)


def test_held_out_users_must_be_the_same(setting):
    _, parts, problem, path = setting
    with pytest.raises(ct.InvalidInput, match="other users"):
        ct.by_score(problem, parts.validation.take(np.arange(23)), path=path)
    with pytest.raises(ct.InvalidInput, match="no held-out samples"):
        ct.by_score(problem, parts.test, path=path)


@pytest.mark.parametrize("n", [2, 3, 10, 80])
def test_adjusted_rand_index(n):
    rng = np.random.default_rng(n)
    for groups in (1, 2, 5, n):
        labels, others = rng.integers(0, groups, n), rng.integers(0, 3, n)
        assert adjusted_rand(labels, others) == pytest.approx(adjusted_rand_score(labels, others), abs=1e-12)
        assert adjusted_rand(labels, labels) == 1.0
