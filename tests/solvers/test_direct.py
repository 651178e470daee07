"""Narrow graphs: shorter problems between passes, and step sizes of single edges."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.sparse import csr_array
from scipy.sparse.csgraph import dijkstra
from support.problems import points_problem, radius

import coterie as ct
from coterie import datasets
from coterie.base.labels import group_means
from coterie.solvers import engines, group_kernels
from coterie.solvers.engines import Direct


def moons(n, lam, k=6, seed=0):
    points = datasets.two_moons(n, seed=seed).users.features
    return points_problem(points, lam, ct.Graph.knn(points, k=k, decay=0.5))


def certified(problem, tol):
    solution = ct.solve(problem, tol=tol)
    assert solution.gap <= tol
    return solution


def begun(problem, passes, sigma=2.0):
    """An engine after some passes, with h = 1 and linear = the points."""
    engine = Direct(problem.graph, problem.dim, problem.lam, engines.narrow_order(problem.graph))
    points = problem.users.features
    engine.begin(points, None, sigma)
    engine.model(np.broadcast_to(np.eye(problem.dim), (problem.n_users, problem.dim, problem.dim)), points)
    engine.next_shorter = passes
    engine.run(passes)
    return engine


@pytest.mark.parametrize("lam", [0.1, 1.0, 10.0])
def test_shorter_problems_do_not_change_the_optimum(lam, monkeypatch):
    """With and without them, and with step sizes of single edges or without, both points are near the one optimum."""
    problem = moons(600, lam)
    used = []
    between = Direct._solve_between
    monkeypatch.setattr(Direct, "_solve_between", lambda *args: used.append(args) or between(*args))
    shorter = certified(problem, tol=1e-9)
    assert used
    monkeypatch.setattr(engines, "_SMALL", problem.n_users)
    monkeypatch.setattr(engines, "_ADAPTED", 0)
    used.clear()
    plain = certified(problem, tol=1e-9)
    assert not used
    assert np.linalg.norm(shorter.models - plain.models) <= radius(shorter) + radius(plain)


def test_the_pairs_of_parts_are_those_of_the_edges():
    rng = np.random.default_rng(0)
    problem = moons(200, 0.5)
    first, second = (np.ascontiguousarray(e) for e in problem.graph.edges.T)
    labels = rng.integers(0, 30, 200)
    ends, pair = group_kernels.contract(labels, 30, first, second)
    a, b = labels[first], labels[second]
    assert (pair[a == b] == 0).all()
    across = a != b
    np.testing.assert_array_equal(ends[np.abs(pair[across]) - 1],
                                  np.sort(np.stack([a, b], axis=1)[across], axis=1))
    np.testing.assert_array_equal(pair[across] > 0, (a < b)[across])
    assert len(ends) == len(np.unique(ends, axis=0)) == np.abs(pair).max()


def test_the_way_back_keeps_sums_and_balls():
    """Duals of pairs are shared among their edges: their sums arrive where no ball is in the way, and none is left."""
    problem = moons(300, 0.5)
    engine = begun(problem, 30)
    labels = group_kernels.interior(engine.s, engine.shrink, engine.radius, 0.5, engine.first, engine.second, 300)
    ends, pair = group_kernels.contract(labels, int(labels.max()) + 1, engine.first, engine.second)
    duals, rates, radii = group_kernels.sum_pairs(engine.s, engine.shrink, engine.rates, engine._radii, pair, len(ends))
    assert rates.sum() == (pair != 0).sum()
    assert (np.linalg.norm(engine.sigma * duals, axis=1) <= radii * (1 + 1e-12)).all()
    before = engine.duals()
    for size in (1e-3, 10.0):
        change = size * radii[:, None] * np.random.default_rng(1).standard_normal(duals.shape)
        group_kernels.carry(engine.s, engine.shrink, engine.rates, engine._radii, pair, np.zeros_like(duals),
                               -engine.sigma * duals + change, radii, engine.sigma)
        assert (np.linalg.norm(engine.duals(), axis=1) <= problem.radii * (1 + 1e-12)).all()
        sums = group_kernels.sum_pairs(engine.s, engine.shrink, engine.rates, engine._radii, pair, len(ends))[0]
        inside = engine._out((pair == 0)[:, None])[:, 0]
        np.testing.assert_allclose(engine.duals()[inside], before[inside], atol=1e-12)
        duals = sums
    assert not np.allclose(sums * engine.sigma, change)  # the twin: ten times what the balls allow


def test_other_step_sizes_keep_duals_and_differences():
    engine = begun(moons(300, 0.5), 30)
    duals, rest = engine.duals(), (1.0 - engine.shrink) * engine.s
    rates = np.random.default_rng(0).uniform(0.1, 10.0, engine.shrink.size)
    group_kernels.rescale(engine.s, engine.shrink, engine.rates, rates, engine._radii, engine.sigma)
    engine.rates = rates
    np.testing.assert_allclose(engine.duals(), duals, atol=1e-12)
    np.testing.assert_allclose((1.0 - engine.shrink) * engine.s, rest, atol=1e-12)


def test_the_gap_of_an_engine_is_that_of_the_certificate():
    problem = moons(300, 0.5)
    for passes in (20, 60):
        engine = begun(problem, passes)
        models, _, labels = engine.read()
        certificate = ct.certify(problem, group_means(models, labels)[labels], engine.duals())
        assert engine.gap() == pytest.approx(certificate.gap, rel=1e-6)


def test_levels_are_those_of_a_breadth_first_search():
    for problem in (moons(500, 1.0), points_problem(np.zeros((5, 1)), 1.0, ct.Graph.from_edges(5, [[0, 4], [1, 2]]))):
        edges, n = problem.graph.edges, problem.n_users
        order, widest = group_kernels.levels(*engines.neighbours_of(edges, n))
        assert sorted(order.tolist()) == list(range(n))
        half = csr_array((np.ones(len(edges)), edges.T), shape=(n, n))
        parts = problem.graph.components
        most = 0
        for part in np.unique(parts):
            inside = order[parts[order] == part]
            far = dijkstra(half + half.T, unweighted=True, indices=int(inside[0]))[inside]
            assert (np.diff(far) >= 0).all()
            most = max(most, int(np.bincount(far.astype(int)).max()))
        assert widest == most


def test_edges_without_weight_and_equal_points_are_no_obstacle():
    problem = moons(400, 1.0)
    weights = problem.graph.weights.copy()
    weights[::7] = 0.0
    points = problem.users.features.copy()
    points[1::2] = points[::2]
    graph = ct.Graph.from_edges(400, problem.graph.edges, weights)
    certified(points_problem(points, 1.0, graph), tol=1e-7)
    certified(points_problem(np.ones((400, 2)), 1.0, graph), tol=1e-7)
