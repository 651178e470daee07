"""The reference solver against answers that are known, and what must not change an answer."""

from __future__ import annotations

import numpy as np
import pytest
from support.planted import planted
from support.problems import graph_for, problem_for, users_for

import coterie as ct


@pytest.mark.filterwarnings("ignore::coterie.ConvergenceWarning")
def test_lam_zero_leaves_everyone_alone(loss_name):
    problem = problem_for(loss_name, lam=0.0, samples=40, seed=2)
    solution = ct.solve(problem)
    local = problem.loss.local(problem.samples)
    assert solution.objective == pytest.approx(local.values.sum(), rel=1e-7, abs=1e-9)


def test_large_lam_gives_the_pooled_model_to_everyone(loss_name):
    problem = problem_for(loss_name, lam=100.0)
    solution = ct.solve(problem)
    assert solution.n_clusters == 1
    gradient = problem.gradients(solution.models).sum(axis=0)  # of the sum of all losses, at one common model
    scale = np.abs(problem.gradients(np.zeros_like(solution.models))).sum()
    assert np.abs(gradient).max() <= 1e-6 * scale


@pytest.mark.parametrize("kind", ["complete", "weighted", "knn"])
def test_planted_optima_are_found(kind):
    graph = graph_for(kind, 24, seed=1)
    problem, models, _ = planted(24, graph=graph, lam=0.05)
    solution = ct.solve(problem)
    np.testing.assert_allclose(solution.models, models, atol=1e-6)
    # Equal models of users whom no chain of equal neighbours joins are a coincidence of the construction.
    equal = (graph.differences(models) == 0).all(axis=1)
    assert solution.n_clusters == graph.subgraph(equal).components.max() + 1


def test_fused_users_are_bitwise_equal():
    problem, models, _ = planted(24, graph=ct.Graph.complete(24), lam=0.05)
    solution = ct.solve(problem)
    truth = np.unique(models, axis=0, return_inverse=True)[1].ravel()
    for k in range(solution.n_clusters):
        members = solution.models[truth == truth[np.flatnonzero(solution.labels == k)[0]]]
        assert (members == members[0]).all()


def test_the_order_of_users_changes_nothing():
    users = users_for("logistic", samples=20, seed=1)
    order = np.random.default_rng(0).permutation(users.n_users)
    a = ct.solve(ct.Problem(users, ct.Logistic(), lam=0.02))
    b = ct.solve(ct.Problem(users.take(order), ct.Logistic(), lam=0.02))
    np.testing.assert_allclose(a.models[order], b.models, atol=1e-5)
    assert a.n_clusters == b.n_clusters


def test_shifting_turning_and_scaling_points_does_the_same_to_models():
    rng = np.random.default_rng(3)
    points, lam = rng.standard_normal((15, 2)), 0.03
    turn = np.linalg.qr(rng.standard_normal((2, 2)))[0]

    def solve(moved, lam):
        return ct.solve(ct.Problem(ct.Users.from_arrays(moved), ct.SquaredDistance(), lam=lam), tol=1e-10)

    def distance(solution):  # strong convexity: ||models - optimum||^2 <= 2 (F(models) - min F)
        return np.sqrt(2 * solution.certificate.gap)

    plain = solve(points, lam)
    assert distance(plain) < 1e-4
    for moved, expected, scale in (
        (solve(points + 100.0, lam), plain.models + 100.0, 1.0),
        (solve(points @ turn, lam), plain.models @ turn, 1.0),
        (solve(1e3 * points, 1e3 * lam), 1e3 * plain.models, 1e3),  # F(s x; s a, s lam) = s^2 F(x; a, lam)
    ):
        assert np.linalg.norm(moved.models - expected) <= distance(moved) + scale * distance(plain)


def test_lam_and_weights_only_matter_as_a_product():
    problem = problem_for("huber", lam=0.02, graph=graph_for("weighted", 9))
    heavier = ct.Graph.from_edges(9, problem.graph.edges, 5 * problem.graph.weights)
    other = ct.Problem(problem.users, problem.loss, lam=0.004, graph=heavier)
    assert ct.solve(other).objective == pytest.approx(ct.solve(problem).objective, rel=1e-8)


def test_a_disconnected_graph_is_two_problems():
    graph, users = graph_for("disconnected", 8), users_for("squared", n_users=8, seed=4)
    combined = ct.solve(ct.Problem(users, ct.Squared(), lam=0.05, graph=graph))
    for part in (np.arange(4), np.arange(4, 8)):
        inside = np.isin(graph.edges, part).all(axis=1)
        alone = ct.Graph.from_edges(4, graph.edges[inside] - part[0], graph.weights[inside])
        half = ct.solve(ct.Problem(users.take(part), ct.Squared(), lam=0.05, graph=alone))
        np.testing.assert_allclose(combined.models[part], half.models, atol=1e-6)


def test_a_duplicated_user_gets_the_same_model():
    users = users_for("logistic", n_users=6, samples=20)
    twice = ct.Users.from_arrays(
        np.r_[users.features, users.features[users.owner == 0]],
        np.r_[users.targets, users.targets[users.owner == 0]],
        np.r_[users.owner, np.full(users.counts[0], 6)])
    solution = ct.solve(ct.Problem(twice, ct.Logistic(), lam=0.02))
    assert (solution.models[0] == solution.models[6]).all()


def test_scs_agrees_with_clarabel():
    problem = problem_for("squared", lam=0.05)
    exact, rough = ct.solve(problem), ct.solve(problem, tol=1e-6, solver=ct.Reference(engine="SCS", accuracy=1e-8))
    np.testing.assert_allclose(rough.models, exact.models, atol=1e-3)
    assert rough.solver == "Reference"


def test_what_solve_refuses():
    problem = problem_for("squared")
    with pytest.raises(ct.InvalidInput, match=r"unknown solver 'simplex'.*reference"):
        ct.solve(problem, solver="simplex")
    with pytest.raises(ct.InvalidInput, match="tol must be"):
        ct.solve(problem, tol=0.0)
    with pytest.raises(ct.InvalidInput, match="expected a Problem"):
        ct.solve(problem.users)
    with pytest.raises(ct.InvalidInput, match="unknown engine"):
        ct.Reference(engine="GUROBI")


def test_an_answer_short_of_the_tolerance_says_so():
    rough = ct.Reference(accuracy=1e-3, fuse=False)
    with pytest.warns(ct.ConvergenceWarning):
        solution = ct.solve(problem_for("logistic", lam=0.02), tol=1e-13, solver=rough)
    assert solution.status is ct.Status.INACCURATE
    assert 1e-13 < solution.gap < np.inf


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
def test_every_loss_and_graph_is_certified(loss_name, seed):
    rng = np.random.default_rng(seed)
    kind = ["complete", "weighted", "knn", "disconnected"][seed % 4]
    lam = float(10 ** rng.uniform(-3, 1))
    n_users = int(rng.integers(4, 14))
    problem = problem_for(loss_name, lam=lam, graph=graph_for(kind, n_users, seed), n_users=n_users, seed=seed,
                          n_features=int(rng.integers(1, 4)))
    solution = ct.solve(problem, tol=1e-7)
    assert solution.status is ct.Status.CONVERGED, (kind, lam, n_users, solution.certificate)
