"""The path over lam: where everyone is together, what merges when, and what the path says of itself."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from scipy.cluster import hierarchy
from scipy.optimize import isotonic_regression
from support.problems import (
    LOSS_NAMES,
    graph_for,
    loss_for,
    points_problem,
    quiet_problem,
    radius,
    users_for,
)

import coterie as ct
from coterie.base.labels import first_labels
from coterie.convex import consensus as consensus_module
from coterie.convex import path as path_module

KINDS = ["complete", "weighted", "knn", "disconnected"]


def problem_of(name, kind="complete", n_users=10, seed=3):
    settings = {} if name.endswith("distance") else {"ridge": 0.1}
    rows = users_for(name, n_users=n_users, samples=20, seed=seed)
    if name == "huber_distance":  # several rows a user make the optimum unique
        rng = np.random.default_rng(seed)
        centres = (2.0 * rng.standard_normal((3, 2)))[np.arange(n_users) * 3 // n_users]
        rows = ct.Users.from_arrays(centres.repeat(6, axis=0) + rng.standard_normal((6 * n_users, 2)),
                                    user=np.arange(n_users).repeat(6))
    return quiet_problem(rows, loss_for(name, **settings), graph=graph_for(kind, n_users, 2))


def pooled(problem):
    """The best models with one for each connected part, by a solve whose lam ties them together at any rate."""
    return ct.solve(problem.with_lam(100 * ct.lam_max(problem).upper), tol=1e-12).models


# One dimension, complete graph: everything is known.

LINE = np.sort(np.random.default_rng(8).standard_normal(9) * [1, 1, 1, 4, 4, 4, 9, 9, 9])


def line_at(points, lam, weight=1.0):
    """In sorted order the penalty is linear: the optimum is the nearest increasing sequence to
    a_i + lam w (number above - number below)."""
    n = len(points)
    order = np.argsort(points)
    exact = np.empty(n)
    exact[order] = isotonic_regression(np.asarray(points)[order] + lam * weight * (n - 1 - 2.0 * np.arange(n))).x
    return exact


def line_merges(points):
    """(lam, labels after it) of every merge: neighbours C, D meet at lam = (mean_D - mean_C) / (n_C + n_D)."""
    order = np.argsort(points)
    clusters = [[int(i)] for i in order]
    found = []
    while len(clusters) > 1:
        means, sizes = (np.array([f(np.asarray(points)[c]) for c in clusters]) for f in (np.mean, len))
        lams = np.diff(means) / (sizes[1:] + sizes[:-1])
        k = int(lams.argmin())
        clusters[k:k + 2] = [clusters[k] + clusters[k + 1]]
        groups = np.empty(len(points), dtype=np.int64)
        for c, members in enumerate(clusters):
            groups[members] = c
        found.append((float(lams[k]), first_labels(groups)))
    return found


def test_the_oracle_agrees_with_itself():
    """Merging neighbours and isotonic regression are two derivations of the same path."""
    for lam, labels in line_merges(LINE):
        exact = line_at(LINE, lam * (1 + 1e-9))
        assert first_labels(np.unique(np.round(exact, 7), return_inverse=True)[1]).tolist() == labels.tolist()


# A gap of g leaves the models within sqrt(2 g) of the optimum (strong convexity), and neighbours near each other with
# rate 2 or more in lam: so much can a merge be misjudged at tol = 1e-13 and an objective below 60.
BLUR = np.sqrt(2 * 1e-13 * 60)


@pytest.fixture(scope="module")
def line():
    return ct.solve_path(points_problem(LINE[:, None]), tol=1e-13)


def test_the_line_is_solved_all_along_the_path(line):
    for solution in line.solutions:
        np.testing.assert_allclose(solution.models[:, 0], line_at(LINE, solution.lam), atol=1e-5)
        assert solution.status is ct.Status.CONVERGED
    assert line.splits == ()
    assert (np.diff(line.n_clusters) <= 0).all()


@pytest.mark.parametrize("weight", [1.0, 0.25, 40.0])
def test_lam_max_of_the_line(weight):
    """The last two blocks to meet: max_k (mean of the upper n - k - mean of the lower k) / (n w)."""
    n = len(LINE)
    exact = max(LINE[k:].mean() - LINE[:k].mean() for k in range(1, n)) / (n * weight)
    assert exact * weight == pytest.approx(line_merges(LINE)[-1][0])
    found = ct.lam_max(points_problem(LINE[:, None], graph=ct.Graph.complete(n, weight)))
    assert found.lower <= exact * (1 + 1e-12)
    assert found.upper >= exact * (1 - 1e-12)
    assert found.upper - found.lower <= 1e-6 * exact


def test_merge_points_of_the_line(line):
    merges = line_merges(LINE)
    for first, second in ((0, 1), (2, 5), (0, 8), (7, 8)):
        exact = next(lam for lam, labels in merges if labels[first] == labels[second])
        low, high = line.merge_point(first, second)
        assert low - BLUR <= exact <= high + BLUR
        assert high - low <= 1e-4 * high
        assert line.at(low).labels[first] != line.at(low).labels[second]
        assert line.at(high).labels[first] == line.at(high).labels[second]
        assert line.merge_point(second, first) == (low, high)
    coarse = line.merge_point(0, 8, rtol=0.1)
    assert 1e-4 * coarse.upper < coarse.upper - coarse.lower <= 0.1 * coarse.upper


def test_windows_of_the_line(line):
    merges = [(0.0, np.arange(len(LINE))), *line_merges(LINE), (np.inf, None)]
    seen = 0
    for (begins, labels), (ends, _) in pairwise(merges):
        if not any(np.array_equal(s.labels, labels) for s in line.solutions):
            continue  # the window lies between two lams of the grid
        seen += 1
        low, high = line.window(labels)
        assert low.lower - BLUR <= begins <= low.upper + BLUR
        assert high.lower - BLUR <= ends <= high.upper + BLUR
        assert low.upper - low.lower <= 1e-4 * low.upper
        for lam, same in ((low.upper, True), (high.lower, True), (low.lower, begins == 0), (high.upper, False)):
            if np.isfinite(lam) and min(abs(lam - begins), abs(lam - ends)) > BLUR:  # nearer, a gap cannot tell
                assert np.array_equal(line.at(lam).labels, labels) == same
    assert seen >= 5


def test_names_of_clusters_do_not_matter_to_a_window(line):
    labels = line[20].labels
    names = np.array([f"cluster {9 - k}" for k in labels])
    assert line.window(names) == line.window(labels) == line.window(5.0 - labels)


def test_what_windows_and_merge_points_refuse(line):
    with pytest.raises(ct.InvalidInput, match="no point of the path has this clustering"):
        line.window([0, 1, 0, 1, 0, 1, 0, 1, 0])
    for labels in (np.zeros(8), np.zeros((9, 1)), 3):
        with pytest.raises(ct.InvalidInput, match="one label for each of 9 users"):
            line.window(labels)
    with pytest.raises(ct.InvalidInput, match="missing"):
        line.window([0, 0, 0, 0, np.nan, 0, 0, 0, 0])
    for pair in ((0, 9), (-1, 2), (9, 0)):
        with pytest.raises(ct.InvalidInput, match="user numbers from 0 to 8"):
            line.merge_point(*pair)


def test_users_that_never_meet_have_no_merge_point():
    problem = points_problem(np.random.default_rng(0).standard_normal((6, 2)), graph=graph_for("disconnected", 6))
    path = ct.solve_path(problem, n_lams=8)
    assert path.merge_point(0, 5) == (path.lams[-1], np.inf)
    assert np.isfinite(path.merge_point(0, 1).upper)


# lam_max.

@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LOSS_NAMES)
def test_lam_max_is_tight_from_both_sides(name, kind):
    """At the upper end the pooled model is certified optimal; just below the lower end something is better."""
    problem = problem_of(name, kind)
    lower, upper = ct.lam_max(problem)
    assert 0 < lower <= upper <= lower * (1 + 1e-5)
    parts = int(problem.graph.components.max()) + 1
    common = pooled(problem)
    assert len(np.unique(common, axis=0)) == parts
    assert ct.certify(problem.with_lam(upper * (1 + 1e-6)), common).relative_gap <= 1e-7
    above = ct.solve(problem.with_lam(upper * (1 + 1e-4)))
    assert above.status is ct.Status.CONVERGED
    assert above.n_clusters == parts
    below = ct.solve(problem.with_lam(lower * (1 - 1e-4)), tol=1e-12)
    assert below.n_clusters > parts
    assert below.objective < below.problem.objective(common)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LOSS_NAMES)
def test_at_lam_max_itself_a_solve_is_certified(name, kind):
    problem = problem_of(name, kind)
    solution = ct.solve(problem.with_lam(ct.lam_max(problem).upper))
    assert solution.status is ct.Status.CONVERGED, solution.certificate


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_lam_max_of_a_loss_that_is_flat_far_out(kind):
    """One row a user under Huber's distance: the optimum need not be unique, lam_max still is."""
    users = users_for("huber_distance", n_users=10, seed=3)
    problem = ct.Problem(users, ct.HuberDistance(), lam=0.0, graph=graph_for(kind, 10, 2))
    lower, upper = ct.lam_max(problem)
    assert 0 < lower <= upper <= lower * (1 + 1e-5)
    # Exactly there, duals fill their balls while slopes touch the edge of their conjugates' domains, so an error costs
    # the bound to first order: a cold solve gets to 1e-7. The path starts from the duals that prove lam_max.
    assert ct.solve(problem.with_lam(upper), tol=1e-6).status is ct.Status.CONVERGED
    last = ct.solve_path(problem, n_lams=5)[-1]
    assert last.lam == upper
    assert last.status is ct.Status.CONVERGED
    assert last.n_clusters == problem.graph.components.max() + 1
    assert ct.solve(problem.with_lam(lower * (1 - 1e-4)), tol=1e-12).n_clusters > problem.graph.components.max() + 1


@pytest.mark.parametrize("weight", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_lam_max_of_two_points(weight, scale):
    """||a - b|| / (2 w)."""
    points = scale * np.array([[1.0, 2.0, -1.0], [0.0, 4.0, 1.0]])
    for graph in (ct.Graph.from_edges(2, [[0, 1]], [weight]), ct.Graph.complete(2, weight)):
        found = ct.lam_max(points_problem(points, graph=graph))
        assert found.lower == pytest.approx(1.5 * scale / weight, rel=1e-9)
        assert found.upper == pytest.approx(1.5 * scale / weight, rel=1e-9)


@pytest.mark.parametrize("kind", ["complete", "knn"])
@pytest.mark.parametrize("name", LOSS_NAMES)
def test_identical_users_are_always_together(name, kind):
    users = users_for(name, n_users=3, samples=12, seed=1)
    rows = np.tile(np.flatnonzero(users.owner == 1), 5)
    same = ct.Users.from_arrays(users.features[rows], None if users.targets is None else users.targets[rows],
                                np.arange(5).repeat(int(users.counts[1])))
    problem = quiet_problem(same, loss_for(name), graph=graph_for(kind, 5))
    found = ct.lam_max(problem)
    size = np.abs(problem.gradients(np.zeros((5, problem.dim)))).max()
    assert 0.0 == found.lower <= found.upper <= 1e-6 * size
    path = ct.solve_path(problem, n_lams=4)
    assert (path.n_clusters == 1).all()
    assert hierarchy.is_valid_linkage(path.linkage)


@pytest.mark.parametrize("factor", [1e-6, 0.3, 1e6])
def test_lam_max_scales_with_the_losses(factor):
    """lam_max(c f) = c lam_max(f); rows and targets times sqrt(c) and ridge times c are c f."""
    users, graph, root = users_for("squared", samples=20, seed=2), graph_for("weighted", 9), np.sqrt(factor)
    plain = ct.Problem(users, ct.Squared(ridge=0.1, intercept=False), lam=0.0, graph=graph)
    moved = ct.Users.from_arrays(root * users.features, root * users.targets, users.owner)
    scaled = ct.Problem(moved, ct.Squared(ridge=0.1 * factor, intercept=False), lam=0.0, graph=graph)
    assert ct.lam_max(scaled).upper == pytest.approx(factor * ct.lam_max(plain).upper, rel=3e-6)


def test_more_weight_never_raises_lam_max_and_doubling_all_halves_it():
    """More weight makes more duals feasible. Twin: less weight does raise it."""
    rng = np.random.default_rng(1)
    points, graph = rng.standard_normal((12, 2)), graph_for("weighted", 12)
    found = ct.lam_max(points_problem(points, graph=graph))
    for _ in range(5):
        more = ct.Graph.from_edges(12, graph.edges, graph.weights * (1 + (rng.random(graph.n_edges) < 0.3)))
        assert ct.lam_max(points_problem(points, graph=more)).lower <= found.upper
    double = ct.Graph.from_edges(12, graph.edges, 2 * graph.weights)
    assert ct.lam_max(points_problem(points, graph=double)).upper == pytest.approx(found.upper / 2, rel=2e-6)
    less = ct.Graph.from_edges(12, graph.edges, graph.weights * (rng.random(graph.n_edges) < 0.7))
    assert ct.lam_max(points_problem(points, graph=less)).lower > found.upper


def test_lam_max_of_parts_is_the_larger_one():
    points, graph = np.random.default_rng(5).standard_normal((10, 2)), graph_for("disconnected", 10)
    halves = []
    for part in (np.arange(5), np.arange(5, 10)):
        inside = np.isin(graph.edges, part).all(axis=1)
        own = ct.Graph.from_edges(5, graph.edges[inside] - part[0], graph.weights[inside])
        halves.append(ct.lam_max(points_problem(points[part], graph=own)).upper)
    assert ct.lam_max(points_problem(points, graph=graph)).upper == pytest.approx(max(halves), rel=2e-6)
    assert abs(halves[0] - halves[1]) > 0.01 * max(halves)


def test_users_nobody_compares_are_together_in_parts_of_one():
    points = np.eye(4)
    for graph in (ct.Graph.from_edges(4, []), ct.Graph.complete(4, 0.0), ct.Graph.from_edges(4, [[0, 1]], [0.0])):
        problem = points_problem(points, graph=graph)
        assert ct.lam_max(problem) == (0.0, 0.0)
        assert ct.solve_path(problem).n_clusters.tolist() == [4]
    alone = points_problem(points[:1])
    assert ct.lam_max(alone) == (0.0, 0.0)
    assert ct.solve_path(alone).linkage.shape == (0, 4)


# The path.

@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LOSS_NAMES)
def test_the_grid_goes_from_everyone_alone_to_one_cluster(name, kind):
    problem = problem_of(name, kind)
    path = ct.solve_path(problem, n_lams=12)
    assert len(path) == len(path.lams) == 12
    ratios = path.lams[1:] / path.lams[:-1]
    np.testing.assert_allclose(ratios, ratios[0], rtol=1e-9)
    assert path.lams[-1] == pytest.approx(ct.lam_max(problem).upper, rel=1e-5)
    assert path.n_clusters[0] == problem.n_users
    assert path.n_clusters[-1] == problem.graph.components.max() + 1
    assert (path.gaps <= 1e-8).all()
    for solution in path.solutions:
        assert solution.status is ct.Status.CONVERGED
        assert solution.objective == pytest.approx(solution.problem.objective(solution.models), rel=1e-12)
    assert hierarchy.is_valid_linkage(path.linkage)


def test_nearly_equal_users_begin_apart_too():
    """Two pairs 1e-3 apart and 10 between them: alone below lam = 5e-4, all together from 2.5."""
    points = np.array([[0.0], [1e-3], [10.0], [10.001]])
    assert len(np.unique(line_at(points[:, 0], 4.9e-4))) == 4
    path = ct.solve_path(points_problem(points), tol=1e-12)
    assert path.lams[-1] == pytest.approx(2.5, rel=1e-5)
    assert path.n_clusters[0] == 4


@pytest.mark.parametrize(("name", "kind"), [("squared_distance", "complete"), ("squared", "weighted"),
                                            ("logistic", "knn"), ("squared_hinge", "complete"),
                                            ("multinomial", "disconnected"), ("huber_distance", "knn")])
def test_a_path_is_a_list_of_independent_solves(name, kind):
    problem = problem_of(name, kind)
    top = ct.lam_max(problem).upper
    lams = top * np.array([0.0, 0.01, 0.2, 0.5, 0.55, 0.9, 1.5])
    path = ct.solve_path(problem, lams, tol=1e-11)
    np.testing.assert_array_equal(path.lams, lams)
    for lam, solution in zip(lams, path.solutions, strict=True):
        alone = ct.solve(problem.with_lam(lam), tol=1e-11)
        assert np.linalg.norm(solution.models - alone.models) <= radius(solution) + radius(alone)
        np.testing.assert_allclose(solution.models, alone.models, atol=1e-4)
        assert solution.objective == pytest.approx(alone.objective, rel=3e-11)
    assert np.abs(path[3].models - path[2].models).max() > 1e-3  # twin: these are not all the same


def test_any_solver_can_do_a_path():
    problem = problem_of("squared_distance")
    lams = ct.lam_max(problem).upper * np.array([0.2, 0.7])
    fast, reference = (ct.solve_path(problem, lams, solver=solver, tol=1e-9) for solver in (ct.Fast(), "reference"))
    assert [s.solver for s in reference.solutions] == ["Reference", "Reference"]
    for a, b in zip(fast.solutions, reference.solutions, strict=True):
        assert np.linalg.norm(a.models - b.models) <= radius(a) + radius(b)


@pytest.mark.parametrize(("lams", "n_lams", "message"), [
    ([0.3, 0.2], 50, "lams must increase"), ([0.1, 0.1], 50, "lams must increase"), ([], 50, "list of lams"),
    ([[0.1, 0.2]], 50, "list of lams"), ([-0.1, 0.2], 50, "lam must be"), ([0.1, np.nan], 50, "lam must be"),
    ([0.1, np.inf], 50, "lam must be"), (None, 1, "n_lams must be"), (None, 0, "n_lams must be")])
def test_what_a_path_refuses(lams, n_lams, message):
    with pytest.raises(ct.InvalidInput, match=message):
        ct.solve_path(points_problem(np.eye(3)), lams, n_lams)


def test_a_single_lam_will_do():
    assert ct.solve_path(points_problem(np.eye(3)), 0.1).lams.tolist() == [0.1]
    assert len(ct.solve_path(points_problem(np.eye(3)), n_lams=2)) == 2


def test_at_gives_the_solution_at_any_lam(line):
    assert line.at(line.lams[7]) is line[7]
    for lam in (0.0, 0.5 * line.lams[0], np.sqrt(line.lams[20] * line.lams[21]), 3.0 * line.lams[-1]):
        solution = line.at(lam)
        assert solution.lam == lam
        assert solution.status is ct.Status.CONVERGED
        np.testing.assert_allclose(solution.models[:, 0], line_at(LINE, lam), atol=1e-5)
    for lam in (-1.0, np.nan, "much"):
        with pytest.raises(ct.InvalidInput, match="lam must be"):
            line.at(lam)


# Splits, and the tree.

def splitting():
    """Users at 0, 0, 10, -1 and edges 0-1 of weight 0.1, 0-2 and 0-3 of weight 1.

    The pulls of 2 and 3 on user 0 cancel, so 0 and 1 stay together, until 3 arrives at lam = 1. Then {0, 1, 3} moves
    up, at v = (lam - 1) / 3, and the edge 0-1 carries v <= 0.1 lam only up to lam = 10/7: user 1 is left behind, at
    0.1 lam, while {0, 3} is at (0.9 lam - 1) / 2. User 2 is at 10 - lam.
    """
    graph = ct.Graph.from_edges(4, [[0, 1], [0, 2], [0, 3]], [0.1, 1.0, 1.0])
    return points_problem(np.array([[0.0], [0.0], [10.0], [-1.0]]), graph=graph)


def test_splits_are_reported():
    lams = np.array([0.5, 0.9, 1.1, 1.4, 1.5, 2.0])
    path = ct.solve_path(splitting(), lams, tol=1e-12)
    for lam, solution in zip(lams, path.solutions, strict=True):
        v = (lam - 1) / 3 if 1 <= lam <= 10 / 7 else (0.9 * lam - 1) / 2
        exact = [0, 0, 10 - lam, lam - 1] if lam < 1 else [v, v if lam <= 10 / 7 else 0.1 * lam, 10 - lam, v]
        np.testing.assert_allclose(solution.models[:, 0], exact, atol=1e-5)
    assert path.n_clusters.tolist() == [3, 3, 2, 2, 3, 3]
    assert path.splits == ((1.5, 0, 1),)
    assert hierarchy.is_valid_linkage(path.linkage)
    together = hierarchy.fcluster(path.linkage, 2.0, "distance")  # the tree keeps what was together once
    assert together[0] == together[1] == together[3] != together[2]
    low, high = path.merge_point(0, 3)
    assert low * (1 - 1e-5) <= 1 <= high * (1 + 1e-5)
    first, last = path.window([0, 0, 1, 0])
    assert first.lower * (1 - 1e-5) <= 1 <= first.upper * (1 + 1e-5)
    assert last.lower * (1 - 1e-4) <= 10 / 7 <= last.upper * (1 + 1e-4)


@pytest.mark.parametrize("points", [LINE[:, None], np.random.default_rng(2).standard_normal((20, 3))],
                         ids=["line", "space"])
def test_equal_weights_never_split(points):
    path = ct.solve_path(points_problem(points), n_lams=25, tol=1e-11)
    assert path.splits == ()
    assert (np.diff(path.n_clusters) <= 0).all()


def test_the_linkage_is_one_that_scipy_takes(line):
    tree = line.linkage
    assert tree.shape == (len(LINE) - 1, 4)
    assert hierarchy.is_valid_linkage(tree)
    assert hierarchy.is_monotonic(tree)
    assert tree[-1, 3] == len(LINE)
    drawn = hierarchy.dendrogram(tree, no_plot=True)
    assert sorted(drawn["leaves"]) == list(range(len(LINE)))
    for solution in line.solutions:
        cut = hierarchy.fcluster(tree, solution.lam, "distance")
        assert first_labels(np.unique(cut, return_inverse=True)[1]).tolist() == solution.labels.tolist()
    assert len(np.unique(hierarchy.fcluster(tree, 0.5 * line.lams[-1], "distance"))) > 1  # twin: heights matter
    heights = np.sort(tree[:, 2])
    for height, (exact, _) in zip(heights, line_merges(LINE), strict=True):  # the first lam of the grid at or after it
        assert height == line.lams[np.searchsorted(line.lams, exact * (1 - 1e-5))]


def test_what_never_merges_is_joined_above_the_path():
    problem = points_problem(np.random.default_rng(0).standard_normal((6, 2)), graph=graph_for("disconnected", 6))
    path = ct.solve_path(problem, n_lams=10)
    assert hierarchy.is_valid_linkage(path.linkage)
    assert path.linkage[-1, 2] == 2 * path.lams[-1]
    assert len(np.unique(hierarchy.fcluster(path.linkage, path.lams[-1], "distance"))) == 2


@pytest.mark.parametrize("lams", [[0.0], [0.0, 1e-6]])
def test_a_tree_of_nobody_merged_says_so(lams):
    path = ct.solve_path(points_problem(np.random.default_rng(0).standard_normal((6, 2))), lams)
    assert path.n_clusters[-1] == 6
    assert hierarchy.is_valid_linkage(path.linkage)
    assert len(np.unique(hierarchy.fcluster(path.linkage, lams[-1], "distance"))) == 6


# Progress and interruption.

def test_progress_tells_how_far_the_path_is():
    calls = []
    problem = problem_of("squared")
    path = ct.solve_path(problem, n_lams=7, progress=lambda solution, total: calls.append((solution, total)))
    assert [total for _, total in calls] == [7] * 7
    assert all(told.models is kept.models and told.lam == kept.lam
               for (told, _), kept in zip(calls, path.solutions, strict=True))
    assert all(told.duals is not None for told, _ in calls)  # for whoever keeps them to go on later
    assert all(kept.duals is None for kept in path.solutions)


def raise_at(monkeypatch, call, inside):
    """Interrupt the path's solve number `call`: inside the solver, which then carries its best point, or around it."""
    solve, count = path_module.solve_quietly, []

    def interrupted(problem, **kwargs):
        count.append(problem.lam)
        if len(count) != call:
            return solve(problem, **kwargs)
        if not inside:
            raise KeyboardInterrupt

        def progress(record):
            raise KeyboardInterrupt
        return solve(problem, **{**kwargs, "tol": 1e-15, "start": None}, progress=progress)

    for module in (path_module, consensus_module):
        monkeypatch.setattr(module, "solve_quietly", interrupted)
    return count


LAMS = [0.01, 0.02, 0.04, 0.08, 0.16]


@pytest.mark.parametrize("inside", [False, True])
def test_ctrl_c_carries_the_path_so_far(monkeypatch, inside):
    count = raise_at(monkeypatch, 4, inside)
    with pytest.raises(ct.Interrupted) as caught:
        ct.solve_path(problem_of("logistic", "knn"), LAMS)
    path = caught.value.best
    assert len(count) == 4
    assert path.lams.tolist() == LAMS[:3]  # points that were finished
    assert all(s.status is ct.Status.CONVERGED for s in path.solutions)
    assert np.isfinite(path.gaps).all()
    assert hierarchy.is_valid_linkage(path.linkage)
    broken = caught.value.__cause__
    assert isinstance(broken, ct.Interrupted) == inside
    if inside:  # the point that was not finished is there as well
        assert broken.best.lam == LAMS[3]
        assert broken.best.status is ct.Status.INTERRUPTED
        assert np.isfinite(broken.best.gap)


def test_ctrl_c_while_progress_is_shown_carries_the_path_so_far():
    shown = []

    def progress(solution, total):
        shown.append(solution)
        if len(shown) == 3:
            raise KeyboardInterrupt

    with pytest.raises(ct.Interrupted) as caught:
        ct.solve_path(problem_of("squared"), LAMS, progress=progress)
    assert caught.value.best.lams.tolist() == LAMS[:3]


def test_ctrl_c_before_the_first_point(monkeypatch):
    raise_at(monkeypatch, 1, False)
    with pytest.raises(ct.Interrupted, match="before there was a result") as caught:
        ct.solve_path(problem_of("squared"), LAMS)
    assert caught.value.best is None


@pytest.mark.parametrize("what", ["lam_max", "grid", "merge_point", "window", "at"])
def test_ctrl_c_ends_what_solves_many_times(monkeypatch, what):
    """What it carries is a result of the function that was called, never of the solve inside it."""
    problem = problem_of("squared", "knn")  # lam_max takes four solves
    path = ct.solve_path(problem, n_lams=5)
    bracket, labels = ct.lam_max(problem, rtol=1e-12), path[2].labels
    merge = path.merge_point(0, 9)
    work = {"lam_max": lambda: ct.lam_max(problem, rtol=1e-12), "grid": lambda: ct.solve_path(problem),
            "merge_point": lambda: path.merge_point(0, 9), "window": lambda: path.window(labels),
            "at": lambda: path.at(1.1 * path[1].lam)}[what]
    call = 1 if what == "at" else 2
    count = raise_at(monkeypatch, call, True)
    with pytest.raises(ct.Interrupted) as caught:
        work()
    assert len(count) == call
    best = caught.value.best
    if what in ("grid", "window"):
        assert best is None
    elif what == "at":
        assert best.status is ct.Status.INTERRUPTED
    else:
        exact = bracket if what == "lam_max" else merge
        assert best.lower <= exact.upper
        assert exact.lower <= best.upper
