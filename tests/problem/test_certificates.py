"""The judge: it must accept optima, refuse anything else, and never claim a bound that is not one."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planted import planted
from support.problems import LOSS_NAMES, graph_for, loss_for, problem_for, users_for

import coterie as ct
from coterie.problem.certificates import build_duals, feasible_flow, judge, project

KINDS = ["complete", "weighted", "knn", "disconnected"]


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), name=st.sampled_from(LOSS_NAMES), kind=st.sampled_from(KINDS),
       lam=st.sampled_from([0.0, 1e-3, 0.05, 1.0]), scale=st.sampled_from([0.0, 0.3, 3.0]), given_duals=st.booleans())
def test_the_bound_is_below_every_objective(seed, name, kind, lam, scale, given_duals):
    """Weak duality on random points and random duals, feasible or not: bound <= F at any models."""
    problem = problem_for(name, lam=lam, graph=graph_for(kind, 6, seed), n_users=6, seed=seed % 5)
    rng = np.random.default_rng(seed)
    models, other = scale * rng.standard_normal((2, 6, problem.dim))
    duals = rng.standard_normal((problem.graph.n_edges, problem.dim)) * 2 * lam if given_duals else None
    certificate = ct.certify(problem, models, duals)
    assert certificate.objective == pytest.approx(problem.objective(models), rel=1e-12)
    assert certificate.gap >= 0
    for point in (models, other, np.zeros_like(models)):
        value = problem.objective(point)
        assert certificate.bound <= value + 1e-9 * (1 + abs(value))
        # What convexity alone says, in the certificate's words.
        reach = certificate.stationarity * np.linalg.norm(models - point) + certificate.complementarity
        assert certificate.objective - value <= reach + 1e-9 * (1 + abs(value) + reach)


@pytest.mark.parametrize("enough", [1e-2, 1e-4])
@pytest.mark.parametrize("lam", [0.003, 0.1])
def test_a_rough_bound_is_below_the_exact_one_and_near_it(loss_name, lam, enough):
    loss = loss_for(loss_name)
    if hasattr(loss, "penalize_intercept"):
        loss = replace(loss, penalize_intercept=True)  # so that every coordinate has curvature
    problem = ct.Problem(users_for(loss_name), loss, lam=lam)
    rough = ct.solve(problem, tol=1e-2)
    problem.judged.clear()
    exact = judge(problem, rough.models, rough.duals)
    problem.judged.clear()
    loose = judge(problem, rough.models, rough.duals, enough)
    best = ct.solve(problem, tol=1e-10).objective
    assert loose.bound <= exact.bound + 1e-12 * abs(exact.bound)
    assert loose.bound <= best + 1e-9 * abs(best)
    losses = np.abs(problem.loss.values(problem.samples, rough.models)).sum()
    assert loose.bound >= exact.bound - 3 * enough * losses


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lam", [1e-3, 0.03, 10.0])
def test_the_gap_closes_at_the_optimum_of_every_loss(loss_name, kind, lam):
    problem = problem_for(loss_name, lam=lam, graph=graph_for(kind, 8), n_users=8)
    solution = ct.solve(problem, tol=1e-8)
    assert solution.status is ct.Status.CONVERGED
    assert solution.gap <= 1e-8
    assert (np.linalg.norm(solution.duals, axis=1) <= problem.radii * (1 + 1e-12)).all()
    # From the models alone the judge builds duals nearly as good.
    assert ct.certify(problem, solution.models).relative_gap <= 1e-6


@pytest.mark.parametrize("size", [1e-2, 1e-3])
def test_a_perturbed_optimum_is_refused(loss_name, size):
    """Strong convexity turns a step away from the optimum into a gap: gap >= F(perturbed) - F(optimal)."""
    problem = problem_for(loss_name, lam=0.03, n_users=8)
    solution = ct.solve(problem, tol=1e-9)
    step = size * np.random.default_rng(0).standard_normal(solution.models.shape)
    for duals in (solution.duals, None):
        certificate = ct.certify(problem, solution.models + step, duals)
        assert certificate.relative_gap > 1e-7
        assert certificate.gap >= problem.objective(solution.models + step) - solution.objective - 1e-9
    # Wrong duals refuse a right point as well.
    wrong = ct.certify(problem, solution.models, np.zeros_like(solution.duals))
    assert wrong.relative_gap > 1e-5


@pytest.mark.parametrize(("n_users", "kind"), [(60, "complete"), (60, "weighted"), (400, "knn"), pytest.param(
    600, "complete", marks=pytest.mark.slow)])
def test_planted_optima_are_recognised(n_users, kind):
    graph = ct.Graph.complete(n_users) if kind == "complete" else graph_for(kind, n_users)
    problem, models, duals = planted(n_users, graph=graph, lam=0.3 if kind == "knn" else 3.0 / n_users)
    assert ct.certify(problem, models, duals).relative_gap < 1e-13
    assert ct.certify(problem, models).relative_gap < 1e-9
    assert ct.certify(problem, models + 1e-3).relative_gap > 1e-9


def test_rounding_is_part_of_the_gap():
    problem, models, duals = planted(30, graph=ct.Graph.complete(30), lam=0.1)
    certificate = ct.certify(problem, models, duals)
    assert 0 < certificate.rounding <= certificate.gap


def test_infinite_duals_are_scaled_into_their_balls():
    problem, models, duals = planted(20, graph=ct.Graph.complete(20), lam=0.1)
    certificate = ct.certify(problem, models, 100 * duals)
    assert (np.linalg.norm(certificate.duals, axis=1) <= problem.radii * (1 + 1e-12)).all()
    assert certificate.bound <= problem.objective(models) + 1e-9


def one_class_problem(loss: ct.Loss, lam: float) -> ct.Problem:
    rng = np.random.default_rng(1)
    features, user = rng.standard_normal((60, 2)), np.repeat(np.arange(12), 5)
    targets = np.where(features[:, 0] + 0.5 * rng.standard_normal(60) > 0, 1.0, -1.0)
    targets[:15] = 1.0
    with pytest.warns(ct.CoterieWarning, match="one class only"):
        return ct.Problem(ct.Users.from_arrays(features, targets, user), loss, lam=lam)


@pytest.mark.parametrize("loss", [ct.SquaredHinge(), ct.Logistic(), ct.SquaredHinge(ridge=0.0), ct.Logistic(ridge=0.0)])
@pytest.mark.parametrize("lam", [1e-3, 0.02, 0.2, 5.0])
def test_users_of_one_class_are_certified_through_the_others(loss, lam):
    problem = one_class_problem(loss, lam)
    solution = ct.solve(problem)
    assert solution.gap <= 1e-8
    assert ct.certify(problem, solution.models).relative_gap <= 1e-6


def test_an_infinite_conjugate_is_said_not_printed():
    """At lam = 0 users of one class have no best logistic model: no bound exists, and none is claimed."""
    problem = one_class_problem(ct.Logistic(ridge=0.0), 0.0)
    certificate = ct.certify(problem, np.zeros((12, 3)))
    assert certificate.bound == -np.inf
    assert certificate.relative_gap == np.inf
    assert set(certificate.infinite_users) >= {0, 1, 2}
    assert "no finite lower bound" in str(certificate)
    with pytest.warns(ct.ConvergenceWarning, match="no finite bound"):
        solution = ct.solve(problem)
    assert solution.status is ct.Status.NO_BOUND
    assert solution.gap == np.inf


def test_outside_the_domain_beyond_repair():
    """Duals that force an infinite conjugate, with no edge to mend it through."""
    rng = np.random.default_rng(0)
    users = ct.Users.from_arrays(rng.standard_normal((8, 1)), np.ones(8), np.repeat([0, 1], 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ct.CoterieWarning)
        problem = ct.Problem(users, ct.Logistic(), lam=1.0)
    # Both users want a positive margin without limit; a common shift of both intercepts is never paid for.
    assert ct.certify(problem, np.zeros((2, 2)), np.array([[0.0, 0.5]])).relative_gap > 0.1


def test_feasible_flow_finds_what_the_electrical_flow_misses():
    """A triangle with one narrow edge: the electrical flow breaks its bound, a detour does not."""
    graph = ct.Graph.from_edges(3, [[0, 1], [0, 2], [1, 2]])
    forces, radii = np.array([[1.0], [-1.0], [0.0]]), np.array([0.2, 1.0, 1.0])
    assert (np.abs(graph.flow(forces)[:, 0]) > radii).any()
    flow = feasible_flow(graph, forces, radii)
    np.testing.assert_allclose(graph.divergence(flow), forces, atol=1e-9)
    assert (np.abs(flow[:, 0]) <= radii + 1e-12).all()
    short = feasible_flow(graph, forces, np.array([0.2, 0.5, 0.5]))  # 0.7 is all that can leave user 0
    assert np.abs(graph.divergence(short) - forces).max() > 0.2


def test_project_is_the_nearest_point():
    rng = np.random.default_rng(0)
    duals, radii = rng.standard_normal((50, 3)), rng.uniform(0, 2, 50)
    radii[0] = 0.0
    near = project(duals, radii)
    norms = np.linalg.norm(duals, axis=1)
    np.testing.assert_allclose(np.linalg.norm(near, axis=1), np.minimum(norms, radii), atol=1e-14)
    np.testing.assert_array_equal(near[norms <= radii], duals[norms <= radii])


def test_duals_are_built_for_nearly_equal_models():
    problem, models, _ = planted(40, graph=ct.Graph.complete(40), lam=0.05)
    blurred = models + 1e-9 * np.random.default_rng(0).standard_normal(models.shape)
    assert ct.certify(problem, blurred, build_duals(problem, blurred)).relative_gap < 1e-7


@pytest.mark.parametrize(("models", "duals", "complaint"), [
    (np.zeros((3, 2)), None, r"expected models of shape \(4, 2\)"),
    (np.full((4, 2), np.nan), None, "must be finite numbers"),
    (np.zeros((4, 2)), np.zeros((5, 2)), r"duals of shape \(6, 2\)"),
    (np.zeros((4, 2)), np.full((6, 2), np.inf), "finite duals"),
])
def test_bad_points_are_refused(models, duals, complaint):
    problem = ct.Problem(ct.Users.from_arrays(np.eye(4)[:, :2]), ct.SquaredDistance(), lam=0.1)
    with pytest.raises(ct.InvalidInput, match=complaint):
        ct.certify(problem, models, duals)


def test_an_infinite_loss_at_the_mean_model_does_not_hide_the_gap():
    """The mean of models that are far apart can have an infinite Poisson loss, which must not count as a size."""
    users = ct.Users.from_arrays([[-1.0], [0.0], [0.0], [1.0]], [1.0, 2.0, 3.0, 1.0], [0, 0, 1, 1])
    problem = ct.Problem(users, ct.Poisson(ridge=0.0), lam=1e-3)
    models = np.array([[4000.0, 0.0], [0.0, 0.0]])
    certificate = ct.certify(problem, models)
    with np.errstate(over="ignore"):
        assert problem.loss.values(problem.samples, np.tile(models.mean(axis=0), (2, 1))).max() == np.inf
    assert np.isfinite(certificate.floor)
    assert certificate.relative_gap > 0.1
    assert ct.solve(problem).gap <= 1e-6


@pytest.mark.parametrize(("seed", "lam"), [(0, 0.1), (0, 0.5), (11, 0.1)])
def test_users_without_active_rows_have_a_finite_bound(seed, lam):
    # Their loss is flat in the intercept, so that a slope of 1e-18 there, which is rounding, has no finite conjugate.
    users, loss = ct.datasets.ellipses(seed=seed).users, ct.SquaredHinge(ridge=1e-3)
    graph = ct.Graph.knn(loss.local(loss.prepare(users)).points, k=5, decay=0.1)
    assert ct.solve(ct.Problem(users, loss, lam=lam, graph=graph)).gap <= 1e-8
