"""Newcomers: each gets the exact optimum of its own problem, and predictions find their user's model."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from scipy.optimize import minimize
from support.problems import loss_for, users_for

import coterie as ct
from coterie.datasets import ellipses


@pytest.fixture(scope="module")
def solved():
    data = ellipses(seed=0)
    return data, ct.solve(ct.Problem(data.users, ct.SquaredHinge(ridge=1e-3), lam=0.09))


@pytest.mark.parametrize("lam", [0.0, 0.01, 0.05, 0.09, 0.5])
def test_a_newcomer_gets_the_optimum_of_its_own_problem(solved, lam):
    _, base = solved
    solution = ct.solve(base.problem.with_lam(lam))
    newcomers = ellipses(seed=5, users_per_cluster=2).users
    joined = solution.personalize(newcomers)
    for i in range(newcomers.n_users):
        samples = solution.problem.loss.prepare(newcomers.take([i]))

        def value(x, samples=samples):
            return (solution.problem.loss.values(samples, x[None])[0]
                    + lam * np.linalg.norm(x - solution.models, axis=1).sum())

        starts = [joined.models[i], solution.models[0], solution.models[-1]]
        options = {"xatol": 1e-10, "fatol": 1e-13, "maxiter": 5000}
        best = min(minimize(value, x, method="Nelder-Mead", options=options).fun for x in starts)
        assert value(joined.models[i]) <= best + 1e-9 * (1 + abs(best))
        if joined.clusters[i] >= 0:
            members = solution.models[solution.labels == joined.clusters[i]]
            assert (members == joined.models[i]).all()
            assert joined.slack[i] >= 0
        else:
            assert joined.slack[i] < 0


def test_newcomers_of_known_kinds_join_their_own(solved):
    _, solution = solved
    new = ellipses(seed=11, users_per_cluster=40)
    joined = solution.personalize(new.users)
    assert (joined.clusters == new.clusters).mean() > 0.9
    assert "join 3 groups" in str(joined)


def test_a_stranger_stands_alone(solved):
    _, solution = solved
    rng = np.random.default_rng(0)
    features = rng.standard_normal((40, 2)) + [0.0, 30.0]
    targets = np.where(features[:, 1] > 30.0, 1.0, -1.0)
    stranger = ct.Users.from_arrays(features, targets, ["stranger"] * 40)
    quiet = ct.solve(solution.problem.with_lam(0.001))
    joined = quiet.personalize(stranger)
    assert joined.clusters.tolist() == [-1]
    assert "1 unassigned" in str(joined)


@pytest.mark.parametrize("name", ["logistic", "squared", "poisson", "squared_distance", "huber_distance"])
def test_joining_the_crowd_again_changes_nothing(name):
    """At consensus a copy of a user joins the one cluster there is."""
    users = users_for(name, samples=20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ct.CoterieWarning)
        problem = ct.Problem(users, loss_for(name), lam=1.0)
    solution = ct.solve(problem.with_lam(3 * ct.lam_max(problem).upper + 1.0))
    joined = solution.personalize(users.take([0, 1, 2]))
    assert joined.clusters.tolist() == [0, 0, 0]
    assert (joined.models == solution.models[0]).all()


def test_what_newcomers_must_bring(solved):
    _, solution = solved
    with pytest.raises(ct.InvalidInput, match="fitted on 2 features, these users have 3"):
        solution.personalize(ct.Users.from_arrays(np.ones((2, 3)), [1, -1], [0, 0]))
    with pytest.raises(ct.InvalidInput, match="labels -1 and"):
        solution.personalize(ct.Users.from_arrays(np.ones((2, 2)), [0, 1], [0, 0]))
    with pytest.raises(ct.InvalidInput, match="weight"):
        solution.personalize(ellipses(seed=1).users, weight=-1.0)


def test_predictions_come_in_the_order_of_the_rows(solved):
    data, solution = solved
    names = np.array(data.test.names)[data.test.owner]
    plain = solution.problem.loss.predict(data.test.features, solution.models[data.test.owner])
    order = np.random.default_rng(0).permutation(len(names))
    np.testing.assert_array_equal(solution.predict(data.test.features[order], names[order]), plain[order])
    with pytest.raises(ct.InvalidInput, match="61"):
        solution.predict([[0.0, 0.0]], [61])


def test_predictions_take_names_or_positions():
    users = ct.Users.from_arrays([[0.0], [1.0], [2.0]] * 2, [0.0, 1.0, 2.0, 0.0, 3.0, 6.0], ["ann"] * 3 + ["bob"] * 3)
    solution = ct.solve(ct.Problem(users, ct.Squared(), lam=0.01))
    rows = users.features[::-1]
    by_name = solution.predict(rows, [users.names[k] for k in users.owner[::-1]])
    np.testing.assert_array_equal(solution.predict(rows, users.owner[::-1]), by_name)
    with pytest.raises(ct.InvalidInput, match="from 0 to 1, or names, got 2"):
        solution.predict([[0.0]], [2])
