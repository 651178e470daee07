"""Wide models through `solve`: equal to the dense solver and to CVXPY, without a matrix of dim x dim."""

import numpy as np
import pytest

import coterie as ct
from coterie.convex import consensus
from coterie.losses import blocks, rows
from coterie.losses.derived import Grouped
from coterie.solvers import wide


def heads(n_users=12, features=160, classes=2, n_rows=24, seed=0, groups=3):
    """Unit-norm embeddings; users of a group have the same head."""
    rng = np.random.default_rng(seed)
    A = rng.standard_normal((n_users, n_rows, features)) * (1 + np.arange(features)) ** -0.5
    A /= np.linalg.norm(A, axis=2, keepdims=True)
    owner = np.arange(n_users) % groups
    t = 8 * np.einsum("nmd,ncd->nmc", A, rng.standard_normal((groups, classes, features))[owner])
    y = (t + rng.gumbel(size=t.shape)).argmax(axis=2).ravel()
    y[:classes] = range(classes)
    loss = ct.Logistic() if classes == 2 else ct.Multinomial()
    users = ct.Users.from_arrays(A.reshape(-1, features), 2 * y - 1 if classes == 2 else y,
                                 np.repeat(np.arange(n_users), n_rows))
    return users, loss


@pytest.fixture
def no_hessians(monkeypatch):
    """Makes every dense Hessian an error."""
    def refuse(n, dim):
        if dim >= 100:
            raise AssertionError(f"a matrix of {dim} x {dim} for each of {n} users")
    monkeypatch.setattr(blocks, "_require_hessians", refuse)


GRAPHS = {"all pairs": None, "neighbours": 4}


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("share", [0.1, 0.7, 1.01])
def test_equals_the_dense_solver(classes, graph, share, monkeypatch):
    users, loss = heads(classes=classes, features=160 if classes == 2 else 55, n_users=9)
    edges = None if GRAPHS[graph] is None else ct.Graph.knn(np.random.default_rng(1).standard_normal((9, 2)), 4)
    problem = ct.Problem(users, loss, lam=0.0, graph=edges)
    problem = problem.with_lam(share * ct.lam_max(problem, rtol=1e-3).upper)
    assert loss.wide(problem.samples)
    wide = ct.solve(problem, tol=1e-7)
    monkeypatch.setattr(rows, "_LEAST_DIM", 10**9)
    assert not loss.wide(problem.samples)
    dense = ct.solve(problem, tol=1e-7)
    assert wide.status is ct.Status.CONVERGED
    assert wide.certificate.bound <= dense.objective * (1 + 1e-12)
    assert dense.certificate.bound <= wide.objective * (1 + 1e-12)
    assert (wide.n_clusters == 1) == (share > 1)
    judged = ct.certify(problem, wide.models, wide.duals)  # by the dense certificate
    assert judged.relative_gap <= 1.5e-7


@pytest.mark.parametrize("tol", [1e-6, 1e-8])
def test_no_hessian_is_formed_anywhere(no_hessians, tol):
    users, loss = heads(n_users=8, classes=5, features=60)
    problem = ct.Problem(users, loss, lam=0.0)
    path = ct.solve_path(problem, n_lams=4, tol=tol)
    assert all(solution.gap <= tol for solution in path)
    assert path.n_clusters[-1] == 1
    certificate = ct.certify(path[2].problem, path[2].models)
    assert certificate.relative_gap <= 1e-3
    grouped = Grouped(loss=loss, samples=problem.samples, labels=np.arange(8) % 3)
    groups = ct.Problem(grouped.groups, grouped, 0.01, ct.Graph.complete(3))
    assert ct.solve(groups, tol=1e-6).gap <= 1e-6
    personal = ct.Problem(users, ct.Personal(loss, metric=0.02), lam=0.003)
    assert ct.solve(personal, tol=1e-6).gap <= 1e-6


def test_dense_hessians_would_be_noticed(no_hessians):
    users, loss = heads(n_users=4)
    with pytest.raises(AssertionError, match="161 x 161"):
        loss.hessians(loss.prepare(users), np.zeros((4, 161)))


def test_a_start_and_a_path_give_the_same_optimum():
    users, loss = heads(n_users=10, classes=3, features=80)
    problem = ct.Problem(users, loss, lam=0.004)
    first = ct.solve(problem.with_lam(0.003), tol=1e-6)
    warm, cold = ct.solve(problem, tol=1e-6, start=first), ct.solve(problem, tol=1e-6)
    assert warm.gap <= 1e-6
    assert abs(warm.objective - cold.objective) <= 2e-6 * cold.objective
    again = ct.solve(problem, tol=1e-6)
    np.testing.assert_array_equal(again.models, cold.models)


@pytest.mark.slow
@pytest.mark.parametrize("classes", [2, 3])
def test_equals_cvxpy(classes):
    users, loss = heads(n_users=4, classes=classes, features=160 if classes == 2 else 80, n_rows=8, groups=2)
    problem = ct.Problem(users, loss, lam=0.01)
    wide, reference = ct.solve(problem, tol=1e-7), ct.solve(problem, tol=1e-5, solver="reference")
    assert wide.gap <= 1e-7
    assert wide.certificate.bound <= reference.objective * (1 + 1e-12)
    assert abs(wide.objective - reference.objective) <= 1e-5 * wide.objective


def test_newcomers_get_their_own_model(no_hessians, monkeypatch):
    users, loss = heads(n_users=9)
    old, new = users.take(np.arange(7)), users.take(np.array([7, 8]))
    problem = ct.Problem(old, loss, lam=0.0)
    solution = ct.solve(problem.with_lam(0.8 * ct.lam_max(problem, rtol=1e-2).lower), tol=1e-6)
    joined = solution.personalize(new)
    monkeypatch.setattr(blocks, "_require_hessians", lambda n, dim: None)
    monkeypatch.setattr(rows, "_LEAST_DIM", 10**9)
    dense = solution.personalize(new)
    np.testing.assert_array_equal(joined.clusters, dense.clusters)
    np.testing.assert_allclose(joined.models, dense.models, atol=1e-4 * np.abs(dense.models).max())


def test_users_of_one_class():
    """Free intercepts without a minimum of their own."""
    users, loss = heads(n_users=6)
    y = users.targets.copy()
    y[users.owner == 2] = 1.0
    with pytest.warns(ct.CoterieWarning):
        problem = ct.Problem(ct.Users.from_arrays(users.features, y, users.owner), loss, lam=0.01)
    assert ct.solve(problem, tol=1e-6).gap <= 1e-6


@pytest.fixture(autouse=True)
def small_counts_as_wide(monkeypatch):
    """Otherwise Hessians of such small problems are used, where these are quick."""
    monkeypatch.setattr("coterie.losses.rows._LEAST_NUMBERS", 0)


def neighbours(n_users=60, features=190, seed=0):
    """Heads on a graph of nearest neighbours, and without a lam."""
    users, loss = heads(n_users=n_users, features=features, seed=seed)
    graph = ct.Graph.knn(np.random.default_rng(seed).standard_normal((n_users, 3)), 5)
    return ct.Problem(users, loss, lam=0.0, graph=graph)


@pytest.mark.parametrize("rtol", [1e-2, 1e-5])
def test_lam_max_by_operators_equals_that_by_matrices(monkeypatch, rtol):
    problem = neighbours()
    dense = ct.lam_max(problem, rtol=1e-7)
    monkeypatch.setattr(consensus, "_LARGEST", 0.0)
    bracket = ct.lam_max(problem, rtol=rtol)
    assert bracket.upper - bracket.lower <= rtol * bracket.upper
    assert bracket.lower <= dense.upper * (1 + 1e-12)
    assert dense.lower <= bracket.upper * (1 + 1e-12)


def test_bounds_of_lam_max_from_one_user():
    graph = ct.Graph(3, np.array([2.0, 1.0]), np.array([[0, 1], [1, 2]]))
    points = np.array([[3.0, 0.0], [-1.0, 0.0], [-2.0, 0.0]])
    assert consensus._alone(graph, points) == pytest.approx(2.0)  # the last user, 2 / 1, not the first, 3 / 2
    assert consensus._alone(graph, points) == pytest.approx(
        consensus._below(graph, points, np.eye(3)[:, 2:] * points))


def test_the_preconditioner_of_neighbours_is_exact_for_equal_hessians():
    problem = neighbours(n_users=20)
    engine = wide.choose_wide(problem.with_lam(0.1), 1e-9)
    assert isinstance(engine, wide.WideListed)
    models = np.zeros((problem.n_users, problem.dim))
    _, _, curvature = problem.loss.expand(problem.samples, models)
    engine.begin(models, None, 0.3)
    engine.model((curvature, np.zeros(problem.n_users)), models)
    vectors = np.random.default_rng(0).standard_normal(models.shape)
    mean = curvature.times(np.broadcast_to(vectors.mean(axis=0), models.shape)).mean(axis=0)
    back = engine._precondition(np.broadcast_to(mean, models.shape))  # constant: only the mean Hessian counts
    assert np.allclose(back, vectors.mean(axis=0), rtol=1e-3, atol=1e-3 * np.abs(vectors.mean(axis=0)).max())
    again = engine._precondition(vectors)
    h = engine.axes @ np.diag(engine.stiffnesses) @ engine.axes.T
    assert np.allclose(again @ h + 0.3 * (engine.laplacian @ again), vectors, atol=1e-8)
    assert not np.allclose(again @ h, vectors, atol=1e-3)


def test_modes_are_those_of_the_laplacian():
    graph = neighbours(n_users=20).graph
    values, vectors = wide.laplacian_modes(graph)
    laplacian = graph.divergence(graph.differences(np.eye(20)))
    assert np.allclose((vectors * values) @ vectors.T, laplacian)
    assert not np.allclose((vectors * values[::-1]) @ vectors.T, laplacian)
