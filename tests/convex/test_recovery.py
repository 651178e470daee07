"""The paper's theorems as statements: whenever the hypothesis holds, so does the conclusion, by another solver."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from support.problems import graph_for, loss_for, users_for

import coterie as ct
from coterie.convex.recovery import solve_clustered, spreads
from coterie.datasets import clustered as clustered_data
from coterie.datasets import gaussian_mixture

FAMILIES = ["squared_distance", "squared", "logistic", "squared_hinge", "huber_distance"]


def instance(name: str, seed: int, lam: float) -> tuple[ct.Problem, np.ndarray]:
    """Nine users of three kinds, far enough apart for a window to exist now and then."""
    rng = np.random.default_rng(seed)
    if name in ("squared_distance", "huber_distance"):
        data = gaussian_mixture(9, n_features=2, separation=float(rng.uniform(4, 30)), seed=seed)
        loss = ct.HuberDistance(delta=50.0) if name == "huber_distance" else ct.SquaredDistance()
    else:
        data = clustered_data(name, n_users=9, samples=400, separation=float(rng.uniform(2, 5)), seed=seed)
        loss = loss_for(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ct.CoterieWarning)
        return ct.Problem(data.users, loss, lam=lam), data.clusters


@pytest.mark.parametrize("name", FAMILIES)
def test_theorems_1_and_2_hold_whenever_their_hypotheses_do(name):
    """lower <= lam: the clusters share a model in the reference's solution; lam < upper: the models are distinct."""
    met = {"theorem 1": 0, "theorem 2": 0, "both": 0}
    for seed in range(6):
        problem, clusters = instance(name, seed, 1.0)
        top = ct.lam_max(problem).upper
        for lam in top * np.array([0.05, 0.2, 0.5, 0.8, 0.95]):
            here = problem.with_lam(lam)
            bounds = ct.recovery_bounds(here, clusters)
            distinct = len(np.unique(bounds.models, axis=0)) == 3
            if lam < bounds.upper:  # Theorem 2
                met["theorem 2"] += 1
                assert distinct
            if bounds.lower <= lam:  # Theorem 1: w* laid out over the users solves (C)
                met["theorem 1"] += 1
                assert ct.certify(here, bounds.models[clusters]).relative_gap < 1e-6
            if bounds.holds:
                met["both"] += 1
                solution = ct.solve(here, solver="reference")
                assert np.array_equal(solution.labels, clusters)
    assert min(met.values()) > 0, met  # the statements were put to the test


def test_where_the_hypothesis_fails_the_conclusion_can_fail_too():
    problem, clusters = instance("squared_distance", 1, 1.0)
    top = ct.lam_max(problem)
    low = ct.recovery_bounds(problem.with_lam(0.01 * top.upper), clusters)
    assert low.lam < low.lower
    assert ct.solve(problem.with_lam(low.lam)).n_clusters > 3
    high = ct.recovery_bounds(problem.with_lam(1.1 * top.upper), clusters)
    assert high.lam >= high.upper
    assert ct.solve(problem.with_lam(high.lam)).n_clusters == 1
    assert not low.holds
    assert not high.holds


@pytest.mark.parametrize("seed", range(8))
def test_stringent_and_uniform_bounds_are_inside_those_of_the_solution(seed):
    """They hold for every lam at once, so at any lam they are no wider than the bounds at its solution."""
    problem, clusters = instance("squared_distance", seed, 0.3)
    narrow = {kind: ct.recovery_bounds(problem, clusters, kind) for kind in ("stringent", "uniform")}
    for lam in np.geomspace(0.01, 3.0, 8) * ct.lam_max(problem).upper:
        wide = ct.recovery_bounds(problem.with_lam(lam), clusters)
        for bounds in narrow.values():
            assert bounds.lower >= wide.lower * (1 - 1e-9)
            assert bounds.upper <= wide.upper * (1 + 1e-9)


def test_theorem_3_in_closed_form_and_theorem_4():
    """Points: gradients differ by a_j - a_i everywhere, and each point is its own best model (mu = L = 1)."""
    data = gaussian_mixture(12, n_features=2, separation=60.0, seed=0)
    problem = ct.Problem(data.users, ct.SquaredDistance(), lam=1.0)
    points, labels = data.users.features, data.clusters
    gaps = np.linalg.norm(points[:, None] - points, axis=2)
    same = labels[:, None] == labels
    bounds = ct.recovery_bounds(problem, labels, "uniform")
    assert bounds.lower == pytest.approx(gaps[same].max() / 4)
    eps, delta = spreads(problem.gradients(np.zeros_like(points)), labels)
    margins = [delta[k, m] - eps[k] - eps[m] for k in range(3) for m in range(3) if k != m]
    assert bounds.upper == pytest.approx(min(margins) / (2 * 8))
    middle = 0.5 * (bounds.lower + bounds.upper)
    assert bounds.lower < bounds.upper
    assert np.array_equal(ct.solve(problem.with_lam(middle)).labels, labels)
    # Theorem 4: local optima are within eps_k / mu inside clusters and at least delta_kl / L apart across them.
    own = problem.loss.local(problem.samples).points
    distances = np.linalg.norm(own[:, None] - own, axis=2)
    assert bounds.within == pytest.approx(eps.max())
    assert bounds.across == pytest.approx(delta[np.isfinite(delta)].min())
    assert distances[same].max() <= bounds.within + 1e-9
    assert distances[~same].min() >= bounds.across - 1e-9


@pytest.mark.parametrize("kind", ["weighted", "knn"])
def test_the_electrical_flow_plays_the_same_part_on_any_graph(kind):
    """Where its bound is met, the clustered solution solves (C) on the weighted graph too."""
    met = 0
    for seed in range(6):
        data = gaussian_mixture(12, n_features=2, separation=25.0, seed=seed)
        graph = graph_for("weighted", 12, seed) if kind == "weighted" else ct.Graph.knn(data.users.features, k=6)
        for lam in np.geomspace(0.1, 20, 12):
            problem = ct.Problem(data.users, ct.SquaredDistance(), lam=lam, graph=graph)
            bounds = ct.recovery_bounds(problem, data.clusters)
            if bounds.lower <= lam:
                met += 1
                assert ct.certify(problem, bounds.models[data.clusters]).relative_gap < 1e-7
    assert met > 5


def test_losses_the_lam_free_bounds_do_not_cover_say_so():
    problem, clusters = instance("logistic", 0, 0.1)
    for kind in ("stringent", "uniform"):
        bounds = ct.recovery_bounds(problem, clusters, kind)
        assert (bounds.lower, bounds.upper, bounds.holds) == (np.inf, 0.0, False)
        assert "Not available" in bounds.sentence


def test_the_clustered_problem_is_the_papers():
    """One model a cluster, minimised by the reference on the full problem with the models of a cluster tied."""
    problem, clusters = instance("squared", 2, 0.05)
    w = solve_clustered(problem, clusters)
    counts = np.bincount(clusters)

    def value(w):
        losses = problem.values(w[clusters]).sum()
        return losses + 0.05 * sum(counts[k] * counts[m] * np.linalg.norm(w[k] - w[m])
                                   for k in range(3) for m in range(k + 1, 3))

    assert value(w) == pytest.approx(problem.objective(w[clusters]), rel=1e-12)
    rng = np.random.default_rng(0)
    for size in (1e-1, 1e-3):
        for _ in range(20):
            assert value(w + size * rng.standard_normal(w.shape)) > value(w)


def test_special_partitions_and_bad_labels():
    problem = ct.Problem(users_for("squared"), ct.Squared(), lam=0.1)
    one = ct.recovery_bounds(problem, np.zeros(9))
    assert one.upper == np.inf
    assert one.lower >= ct.lam_max(problem).lower * (1 - 1e-6)  # the closed form is one way to consensus, not the best
    each = ct.recovery_bounds(problem, np.arange(9))
    assert each.lower == 0.0
    for labels, complaint in ((np.zeros(5), "each of 9 users"), (np.full(9, np.nan), "must not be missing")):
        with pytest.raises(ct.InvalidInput, match=complaint):
            ct.recovery_bounds(problem, labels)
    with pytest.raises(ct.InvalidInput, match="unknown kind"):
        ct.recovery_bounds(problem, np.zeros(9), "loose")
    with pytest.raises(ct.InvalidInput, match="all pairs"):
        ct.recovery_bounds(ct.Problem(problem.users, ct.Squared(), lam=0.1, graph=graph_for("knn", 9)), np.zeros(9),
                           "stringent")


def test_explain_says_what_holds_and_what_parts():
    data = gaussian_mixture(9, n_features=2, separation=40.0, seed=0)
    problem = ct.Problem(data.users, ct.SquaredDistance(), lam=1.0)
    bounds = ct.recovery_bounds(problem, data.clusters)
    assert bounds.holds
    solution = ct.solve(problem)
    held = solution.explain(0, 1)
    assert held.together
    assert held.slack >= -1e-9
    assert "in one group" in str(held)
    parted = solution.explain(0, 8)
    assert not parted.together
    assert parted.force == pytest.approx(parted.limit, rel=1e-6)
    assert "in different groups" in str(parted)
    with pytest.raises(ct.InvalidInput, match="two different"):
        solution.explain(1, 1)
    with pytest.raises(ct.InvalidInput, match="user numbers"):
        solution.explain(0, 99)
    with pytest.raises(ct.Incompatible, match="has no duals"):
        ct.solve_path(problem, [0.1])[0].explain(0, 1)


@pytest.mark.parametrize("pair", [(0, 1), (2, 7), (3, 8), (7, 8)])
def test_explain_finds_the_right_edge(pair):
    problem, _ = instance("squared_distance", 4, 0.4)
    solution = ct.solve(problem)
    edge = np.flatnonzero((problem.graph.edges == pair).all(axis=1))[0]
    assert solution.explain(*pair).force == pytest.approx(np.linalg.norm(solution.duals[edge]))
    sparse = ct.Problem(problem.users, problem.loss, lam=0.4, graph=ct.Graph.from_edges(9, [[0, 1], [1, 2]]))
    told = ct.solve(sparse).explain(*pair)
    assert (told.limit > 0) == (pair == (0, 1))


@pytest.mark.slow
def test_every_rung_of_the_ladder_is_reached_and_right():
    """Where a rung holds, the clustered solution is optimal; where none does, it is not."""
    reached = set()
    for seed in range(8):
        for kind in ("complete", "weighted", "knn"):
            data = gaussian_mixture(12, n_features=2, separation=12.0, seed=seed)
            graph = ct.Graph.knn(data.users.features, k=6) if kind == "knn" else graph_for(kind, 12, seed)
            for lam in np.geomspace(0.05, 2.0, 5):
                problem = ct.Problem(data.users, ct.SquaredDistance(), lam=lam, graph=graph)
                rungs = ct.fusion_ladder(problem, data.clusters)
                reached |= {rung.rung for rung in rungs}
                fused = solve_clustered(problem, data.clusters)[data.clusters]
                if all(rung.rung != "none" for rung in rungs):
                    assert ct.certify(problem, fused).relative_gap < 1e-7
                else:
                    assert ct.solve(problem, tol=1e-12).objective < problem.objective(fused)
    assert reached == {"closed form", "electrical flow", "feasible flow", "none"}
    assert ct.fusion_ladder(problem.with_lam(1e-6), np.arange(12))[0].rung == "alone"
    told = [str(rung) for rung in ct.fusion_ladder(problem.with_lam(50.0), np.zeros(12))]
    assert "one model is proved by" in told[0]
