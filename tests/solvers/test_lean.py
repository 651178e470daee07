"""The solver that stores no value per pair: right if it reports so, honest if it is not."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from support.planted import planted
from support.problems import LOSS_NAMES, graph_for, loss_for, points_problem, problem_for, users_for

import coterie as ct
from coterie.losses.derived import Grouped
from coterie.problem.edges import cluster_pull, member_flow


@pytest.mark.parametrize("fraction", [0.02, 0.3, 0.8, 1.5])
@pytest.mark.parametrize("name", LOSS_NAMES)
def test_it_agrees_with_the_fast_solver_within_its_gap(name, fraction):
    problem = problem_for(name, n_users=12, samples=20)
    problem = problem.with_lam(fraction * ct.lam_max(problem).upper)
    lean, fast = ct.solve(problem, tol=1e-6, solver="lean"), ct.solve(problem, tol=1e-9)
    assert (lean.status is ct.Status.CONVERGED) == (lean.gap <= 1e-6)
    if np.isfinite(lean.gap):
        assert lean.certificate.bound <= fast.objective + 1e-9 * (1 + abs(fast.objective))
        assert lean.objective - fast.objective <= lean.certificate.gap + 1e-9
    assert lean.objective <= problem.objective(np.zeros_like(lean.models)) + 1e-9
    if fraction > 1:
        assert lean.n_clusters == 1
        assert lean.status is ct.Status.CONVERGED


def test_planted_clusters_are_proven_without_duals():
    problem, models, _ = planted(60, graph=ct.Graph.complete(60), lam=0.05)
    solution = ct.solve(problem, tol=1e-6, solver="lean")
    assert solution.status is ct.Status.CONVERGED
    assert solution.duals is None
    np.testing.assert_allclose(solution.models, models, atol=1e-3)
    # The judge, building duals of its own, agrees.
    assert ct.certify(problem, solution.models).relative_gap < 1e-4


def test_potentials_find_a_flow_where_the_closed_form_has_none():
    """At 0.8 of Theorem 1's bound a cluster can still hold: the lean proof then goes beyond the closed form."""
    beyond = 0
    for seed in range(10):
        problem = points_problem(np.random.default_rng(seed).standard_normal((15, 2)))
        bound = ct.recovery_bounds(problem.with_lam(1.0), np.zeros(15)).lower
        lam = 0.5 * (ct.lam_max(problem).upper + bound)
        if lam < 0.999 * bound:
            solution = ct.solve(problem.with_lam(lam), tol=1e-6, solver="lean")
            beyond += solution.n_clusters == 1 and solution.status is ct.Status.CONVERGED
    assert beyond >= 5


def test_walks_over_pairs_are_the_dense_sums():
    rng = np.random.default_rng(0)
    w, v, counts = rng.standard_normal((7, 3)), rng.standard_normal((7, 3)), rng.integers(1, 5, 7).astype(float)
    out, degrees = np.empty((7, 3)), np.empty(7)
    total = cluster_pull(w, counts, 0.1, v, out, degrees)
    distance = np.sqrt(((w[:, None] - w) ** 2).sum(2) + 0.01)
    weights = np.outer(counts, counts) / distance
    np.fill_diagonal(weights, 0.0)
    np.testing.assert_allclose(out, (weights[..., None] * (v[:, None] - v)).sum(1), rtol=1e-12)
    np.testing.assert_allclose(degrees, weights.sum(1), rtol=1e-12)
    assert total == pytest.approx((weights * distance**2).sum() / 2)
    flow = np.empty((7, 3))
    member_flow(v, np.array([3, 0, 5, 1, 2, 4, 6]), np.array([0, 3, 7]), 0.8, flow)
    expected = np.zeros((7, 3))
    for members in ([3, 0, 5], [1, 2, 4, 6]):
        for i in members:
            for j in members:
                gap = v[i] - v[j]
                expected[i] += gap * min(1.0, 0.8 / max(np.linalg.norm(gap), 1e-300))
    np.testing.assert_allclose(flow, expected, atol=1e-12)


def test_other_graphs_are_refused_and_an_interrupt_carries_a_point():
    users = users_for("squared")
    with pytest.raises(ct.Incompatible, match="solver='fast'"):
        ct.solve(ct.Problem(users, ct.Squared(), lam=0.1, graph=graph_for("knn", 9)), solver="lean")

    def stop(record):
        raise KeyboardInterrupt

    problem = points_problem(np.random.default_rng(0).standard_normal((30, 2)), 0.03)
    with pytest.raises(ct.Interrupted) as caught:
        ct.solve(problem, tol=1e-15, solver="lean", progress=stop)
    stopped = caught.value.best
    assert stopped.status is ct.Status.INTERRUPTED
    assert np.isfinite(stopped.gap)
    assert ct.solve(points_problem([[1.0, 2.0]], 1.0), solver="lean").n_clusters == 1
    assert ct.solve(points_problem(np.eye(4), 0.0), solver="lean").n_clusters == 4


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_a_group_is_the_sum_of_its_members(name):
    users = users_for(name, samples=20)
    labels = np.array([0, 0, 1, 2, 1, 0, 2, 2, 1])
    inner = loss_for(name)
    loss = Grouped(loss=inner, samples=inner.prepare(users), labels=labels)
    groups = loss.groups
    assert groups.n_users == 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ct.CoterieWarning)
        models = np.random.default_rng(0).standard_normal((3, loss.samples.dim))
    samples = loss.prepare(groups)
    values, gradients, hessians = loss.evaluate(samples, models)
    parts = inner.evaluate(inner.prepare(users), models[labels])
    for sum_of_all, part in zip((values, gradients, hessians), parts, strict=True):
        for k in range(3):
            np.testing.assert_allclose(sum_of_all[k], part[labels == k].sum(axis=0), rtol=1e-10)
    best = loss.local(samples).points
    assert np.abs(loss.gradients(samples, best)).max() < 1e-6 * (1 + np.abs(gradients).max())
