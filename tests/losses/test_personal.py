"""Personal models around centres: the envelope against CVXPY on the joint problem in (x, z), and its limits."""

from __future__ import annotations

import warnings

import cvxpy as cp
import mpmath as mp
import numpy as np
import pytest
from support.exact import exact
from support.exact_personal import ExactPersonalProblem
from support.nasty import nasty
from support.problems import graph_for, loss_for, quiet_problem, users_for

import coterie as ct
from coterie.datasets import clustered
from coterie.losses.derived import Remote
from coterie.losses.metric import Metric

KINDS = ["round", "diagonal", "full", "covariance", "limits", "each"]


def matrix(dim: int, seed: int = 0) -> np.ndarray:
    root = np.random.default_rng(seed).standard_normal((dim, dim))
    return root @ root.T + 0.3 * np.eye(dim)


def personal(loss: ct.Loss, users: ct.Users, kind: str) -> ct.Personal:
    """The loss with a metric of each kind."""
    dim, rng = loss.dim(users), np.random.default_rng(3)
    if kind == "round":
        return ct.Personal(loss, 0.7)
    if kind == "diagonal":
        return ct.Personal(loss, rng.uniform(0.1, 2.0, dim), scale=rng.uniform(0.5, 2.0, users.n_users))
    if kind == "full":
        return ct.Personal(loss, 3.0 * matrix(dim), scale="rows")
    if kind == "covariance":  # of rank one: all other directions are shared
        return ct.Personal(loss, covariance=np.outer(*2 * [rng.standard_normal(dim)]))
    if kind == "limits":  # a coordinate that is shared, one that is personal
        return ct.Personal(loss, np.array([np.inf, 0.0, *[0.5] * (dim - 2)]))
    return ct.Personal(loss, np.stack([matrix(dim, seed) for seed in range(users.n_users)]))


def joint_optimum(loss: ct.Personal, users: ct.Users, lam: float, graph: ct.Graph) -> float:
    """minimise sum_i f_i(x_i) + 1/2 (x_i - z_i)' P_i (x_i - z_i) + lam sum w_ij ||z_i - z_j|| over x and z, by CVXPY.

    From the matrices themselves, not from their eigenvalues.
    """
    samples = loss.loss.prepare(users)
    n, d = users.n_users, samples.dim
    x, z = cp.Variable((n, d)), cp.Variable((n, d))
    scale = 1.0 / users.counts if isinstance(loss.scale, str) else np.ones(n) if loss.scale is None else loss.scale
    form = np.asarray(loss.covariance if loss.metric is None else loss.metric, dtype=float)
    terms, constraints = [], []
    for i in range(n):
        step, own = x[i] - z[i], form[i] if form.ndim == 3 else form
        if loss.metric is None:  # rank one: steps along one vector v, C = v v'
            values, vectors = np.linalg.eigh(own)
            c = cp.Variable()
            constraints.append(step == c * np.sqrt(values[-1]) * vectors[:, -1])
            terms.append(scale[i] / 2 * cp.square(c))
        elif own.ndim == 2:
            terms.append(scale[i] / 2 * cp.quad_form(step, cp.psd_wrap(own)))
        else:
            own = np.broadcast_to(own, d)
            constraints += [step[k] == 0 for k in np.flatnonzero(np.isinf(own))]
            terms += [scale[i] * own[k] / 2 * cp.square(step[k]) for k in np.flatnonzero(np.isfinite(own))]
    flat = cp.reshape(x, (n * d,), order="C")
    bz = graph.weights @ cp.norm(z[graph.edges[:, 0]] - z[graph.edges[:, 1]], 2, axis=1)
    program = cp.Problem(cp.Minimize(loss.loss.conic(cp, samples, flat) + sum(terms) + lam * bz), constraints)
    program.solve(solver="CLARABEL")
    return float(program.value)


def check_joint(name: str, kind: str, lam: float = 0.05) -> None:
    users = users_for(name, n_users=6)
    loss, graph = personal(loss_for(name), users, kind), graph_for("weighted", 6)
    solution = ct.solve(quiet_problem(users, loss, lam, graph), tol=1e-9)
    expected = joint_optimum(loss, users, lam, graph)
    assert solution.objective == pytest.approx(expected, rel=1e-6, abs=1e-7)
    assert solution.gap <= 1e-9


@pytest.mark.parametrize(("name", "kind"), [("squared", "full"), ("logistic", "limits"), ("huber_distance", "round")])
def test_the_solution_is_that_of_the_joint_problem(name, kind):
    check_joint(name, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_solution_is_that_of_the_joint_problem_for_every_loss(loss_name, kind):
    check_joint(loss_name, kind)


@pytest.mark.slow
def test_the_joint_problem_can_differ():
    users, graph = users_for("squared", n_users=6), graph_for("weighted", 6)
    other = joint_optimum(ct.Personal(ct.Squared(), 0.8), users, 0.05, graph)
    assert ct.solve(ct.Problem(users, ct.Personal(ct.Squared(), 0.7), 0.05, graph)).objective != pytest.approx(
        other, rel=1e-4)


@pytest.mark.parametrize("kind", ["round", "full", "covariance", "limits"])
def test_every_loss_keeps_the_rules_inside(loss_name, kind):
    users = users_for(loss_name)
    ct.check_loss(personal(loss_for(loss_name), users, kind), users, seed=1)


@pytest.mark.slow
def test_a_personal_loss_keeps_the_rules_inside_another():
    users = users_for("logistic")
    ct.check_loss(ct.Personal(ct.Personal(ct.Logistic(), 0.7), np.array([2.0, np.inf, 0.3])), users)


class Shifted(ct.Personal):
    """An envelope whose gradient belongs to a metric twice as large."""

    def evaluate(self, samples, models, order=2, users=None):
        values, gradients, hessians = super().evaluate(samples, models, order, users)
        return type(super().evaluate(samples, models, 0, users))(values, 2 * gradients, hessians)


def test_the_rules_can_be_broken():
    with pytest.raises(AssertionError, match="gradient"):
        ct.check_loss(Shifted(ct.Logistic(), 0.7), users_for("logistic"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["squared", "logistic"])
def test_derivatives_are_the_formulas(name, kind):
    """grad = P (z - x) = grad f(x), Hessian = P - P (H + P)^-1 P, with P written out; large numbers for inf."""
    users = users_for(name)
    loss = personal(loss_for(name), users, kind)
    samples = loss.prepare(users)
    z = np.random.default_rng(0).standard_normal((users.n_users, samples.dim))
    values, gradients, hessians = loss.evaluate(samples, z)
    x = loss.personal_models(users, z)
    f, g, h = loss.loss.evaluate(samples.inner, x)
    np.testing.assert_allclose(gradients, g, atol=1e-9)
    prices = np.where(np.isinf(samples.metric.prices), 1e9, samples.metric.prices)
    axes = np.broadcast_to(np.eye(samples.dim) if samples.metric.axes is None else samples.metric.axes, h.shape)
    p = axes * prices[:, None, :] @ axes.swapaxes(1, 2)
    np.testing.assert_allclose(hessians, p - p @ np.linalg.solve(h + p, p), rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(values, f + 0.5 * np.einsum("nd,nde,ne->n", x - z, np.where(
        p > 1e6, 0.0, p), x - z) if kind != "covariance" else values, rtol=1e-9)
    some = np.array([4, 0, 4])
    for part, all_of_them in zip(loss.evaluate(samples, z[some], 2, some), (values, gradients, hessians), strict=True):
        np.testing.assert_array_equal(part, all_of_them[some])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["squared", "logistic", "multinomial"])
def test_conjugates_and_prox(name, kind):
    """Fenchel and Young's equality at gradients, inequality elsewhere; e* = f* + 1/2 u' C u; the prox is optimal."""
    users = users_for(name)
    loss = personal(loss_for(name, ridge=0.1), users, kind)
    samples, rng = loss.prepare(users), np.random.default_rng(0)
    z, other = rng.standard_normal((2, users.n_users, samples.dim))
    values, u, _ = loss.evaluate(samples, z)
    conjugates = loss.conjugates(samples, u)
    np.testing.assert_allclose(values + conjugates, np.einsum("nd,nd->n", u, z), rtol=1e-8, atol=1e-8)
    assert (loss.values(samples, other) + conjugates >= np.einsum("nd,nd->n", u, other) - 1e-9).all()
    np.testing.assert_allclose(conjugates, loss.loss.conjugates(samples.inner, u) + 0.5 * samples.metric.covariances(u),
                               rtol=1e-9)
    for t in (0.0, 0.4, rng.uniform(0.1, 2.0, users.n_users)):
        near = loss.prox(samples, -0.5 * u, t, other)
        pull = np.reshape(t, (-1, 1)) * (near.points - other)
        assert near.converged.all()
        np.testing.assert_allclose(loss.gradients(samples, near.points) - 0.5 * u + pull, 0.0, atol=1e-7)
        np.testing.assert_allclose(near.values, loss.values(samples, near.points) - 0.5 * np.einsum(
            "nd,nd->n", u, near.points) + 0.5 * np.einsum("nd,nd->n", pull, near.points - other), rtol=1e-8, atol=1e-9)


def test_conjugates_are_infinite_along_personal_directions():
    users = users_for("squared")
    loss = ct.Personal(ct.Squared(), np.array([1.0, 1.0, 0.0]))
    samples = loss.prepare(users)
    slopes = np.tile([0.1, 0.2, 0.0], (users.n_users, 1))
    assert np.isfinite(loss.conjugates(samples, slopes)).all()
    assert np.isinf(loss.conjugates(samples, slopes + [0.0, 0.0, 1e-3])).all()
    assert not loss.prox(samples, slopes + [0.0, 0.0, 1e-3], 0.0, None).converged.any()


def conjugate_by_cvxpy(loss: ct.Personal, users: ct.Users, slopes: np.ndarray) -> float:
    samples = loss.prepare(users)
    z = cp.Variable(slopes.size)
    program = cp.Problem(cp.Minimize(loss.conic(cp, samples, z) - slopes.ravel() @ z))
    program.solve(solver="CLARABEL")
    return -float(program.value)


@pytest.mark.parametrize(("name", "kind"), [("logistic", "covariance"), ("squared_hinge", "full"),
                                            ("multinomial", "limits")])
def test_conjugates_and_the_conic_form_agree(name, kind):
    users = users_for(name)
    loss = personal(loss_for(name, ridge=0.1), users, kind)
    samples = loss.prepare(users)
    u = loss.gradients(samples, np.random.default_rng(1).standard_normal((users.n_users, samples.dim)))
    assert loss.conjugates(samples, u).sum() == pytest.approx(conjugate_by_cvxpy(loss, users, u), rel=1e-6, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_solver_agrees(loss_name, kind):
    users = users_for(loss_name, n_users=6)
    problem = quiet_problem(users, personal(loss_for(loss_name), users, kind), 0.05)
    expected = ct.solve(problem, solver=ct.Reference(accuracy=1e-8)).objective
    assert ct.solve(problem, tol=1e-9).objective == pytest.approx(expected, rel=1e-6)


# Limits, as statements.

@pytest.mark.parametrize("name", ["squared", "logistic", "poisson"])
def test_a_large_metric_is_the_problem_of_the_loss_itself(name):
    """metric -> inf: the paper. With metric = inf it is exactly that, bit by bit."""
    users = users_for(name)
    plain = ct.solve(quiet_problem(users, loss_for(name), 0.05), tol=1e-10)
    nearly = ct.Personal(loss_for(name), 1e7)
    large = ct.solve(quiet_problem(users, nearly, 0.05), tol=1e-10)
    assert large.labels.tolist() == plain.labels.tolist()
    np.testing.assert_allclose(large.models, plain.models, atol=1e-4)
    np.testing.assert_allclose(nearly.personal_models(users, large.models), plain.models, atol=1e-4)
    shared = ct.Personal(loss_for(name), np.inf)
    samples = shared.prepare(users)
    for got, expected in zip(shared.evaluate(samples, plain.models),
                             loss_for(name).evaluate(samples.inner, plain.models), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-14)
    assert (shared.personal_models(users, plain.models) == plain.models).all()


@pytest.mark.parametrize("name", ["squared", "logistic"])
def test_a_small_metric_or_no_penalty_leaves_everyone_alone(name):
    users = users_for(name, samples=20)
    inner = loss_for(name, ridge=0.1, penalize_intercept=True)
    own = inner.local(inner.prepare(users)).points
    free = ct.Personal(inner, 0.0)
    solution = ct.solve(quiet_problem(users, free, 0.05))
    assert solution.n_clusters == 1
    assert solution.gap < 1e-6
    np.testing.assert_allclose(free.personal_models(users, solution.models), own, atol=1e-6)
    alone = ct.solve(quiet_problem(users, ct.Personal(inner, 0.7), 0.0), tol=1e-10)
    np.testing.assert_allclose(alone.models, own, atol=1e-4)
    np.testing.assert_allclose(alone.problem.loss.personal_models(users, alone.models), own, atol=1e-4)


def test_a_large_lam_is_the_mode_of_a_mixed_model():
    """lam >= lam_max: one centre, that of generalised least squares, and the best linear predictors around it.

    y_i = A_i x_i + noise, x_i = z + deviation of covariance C: z solves sum_i A_i' V_i^-1 (y_i - A_i z) = 0 with
    V_i = s I + A_i C A_i', and x_i = z + C A_i' V_i^-1 (y_i - A_i z) (Henderson 1975).
    """
    users, s = users_for("squared", n_users=8), 0.3
    c = np.linalg.inv(matrix(3))
    loss = ct.Personal(ct.Squared(ridge=0.0), covariance=c / s, scale="rows")
    problem = ct.Problem(users, loss, lam=0.0)
    solution = ct.solve(problem.with_lam(1.01 * ct.lam_max(problem).upper), tol=1e-12)
    assert solution.n_clusters == 1
    left, right, parts = np.zeros((3, 3)), np.zeros(3), []
    for i in range(users.n_users):
        rows = slice(users.offsets[i], users.offsets[i + 1])
        a = np.column_stack([users.features[rows], np.ones(rows.stop - rows.start)])
        v = s * np.eye(len(a)) + a @ c @ a.T
        left += a.T @ np.linalg.solve(v, a) / len(a)
        right += a.T @ np.linalg.solve(v, users.targets[rows]) / len(a)
        parts.append((a, v, users.targets[rows]))
    centre = np.linalg.solve(left, right)  # each user counts once, as f_i is a mean
    np.testing.assert_allclose(solution.models[0], centre, rtol=1e-5, atol=1e-6)
    for own, (a, v, y) in zip(loss.personal_models(users, solution.models), parts, strict=True):
        np.testing.assert_allclose(own, centre + c @ a.T @ np.linalg.solve(v, y - a @ centre), rtol=1e-5, atol=1e-6)
    assert ct.solve(problem.with_lam(0.5 * ct.lam_max(problem).lower)).n_clusters > 1


def test_an_intercept_per_user_with_shared_slopes():
    """metric (inf, inf, 0): one regression with a column per user, at a large lam."""
    users = users_for("squared", n_users=7, samples=12)
    loss = ct.Personal(ct.Squared(ridge=0.0), np.array([np.inf, np.inf, 0.0]))
    solution = ct.solve(ct.Problem(users, loss, lam=100.0), tol=1e-10)
    own = loss.personal_models(users, solution.models)
    weights = np.sqrt(1.0 / users.counts[users.owner])
    columns = np.column_stack([users.features, np.eye(users.n_users)[users.owner]])
    best = np.linalg.lstsq(weights[:, None] * columns, weights * users.targets, rcond=None)[0]
    np.testing.assert_allclose(own[:, :2], np.tile(best[:2], (7, 1)), atol=1e-6)
    np.testing.assert_allclose(own[:, 2], best[2:], atol=1e-6)
    rows = solution.predict(users.features, [users.names[i] for i in users.owner])
    np.testing.assert_allclose(rows, columns @ best, atol=1e-5)


def one_class_panel() -> ct.Users:
    """Binary targets, an intercept of each user's own, so that some users have one class only."""
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(12), 8)
    rows = rng.standard_normal((len(owner), 2))
    margins = rows @ [1.0, -1.0] + 3.0 * rng.standard_normal(12)[owner] + rng.logistic(size=len(owner))
    return ct.Users.from_arrays(rows, np.where(margins > 0, 1.0, -1.0), owner)


@pytest.mark.slow
def test_a_personal_intercept_of_users_with_one_class_is_certified():
    """Their intercepts run off, and their losses without the ridge to zero; the bound knows it."""
    users = one_class_panel()
    starts = users.offsets[:-1]
    alone = np.flatnonzero(np.minimum.reduceat(users.targets, starts) == np.maximum.reduceat(users.targets, starts))
    assert alone.size
    loss = ct.Personal(ct.Logistic(), np.array([1.0, np.inf, 0.0]))
    with pytest.warns(ct.CoterieWarning) as caught:
        problem = ct.Problem(users, loss, lam=0.01)
    assert any("entirely personal" in str(warning.message) for warning in caught)
    solution = ct.solve(problem)
    assert solution.gap <= 1e-6
    assert claim(problem, solution.models, solution.certificate) is None
    samples = problem.samples
    slopes = np.tile([0.02, -0.01, 0.0], (users.n_users, 1))
    expected = (slopes**2).sum(axis=1) / (2 * 1e-3)  # f*(u) of a user with one class, attained at infinity
    conjugates = loss.conjugates(samples, slopes) - 0.5 * samples.metric.covariances(slopes)
    np.testing.assert_allclose(conjugates[alone], expected[alone], rtol=1e-12)
    assert (conjugates <= expected * (1 + 1e-12)).all()
    outside = slopes + [0.0, 0.0, 1e-3] * users.targets[starts][:, None]  # slopes of the wrong sign
    assert np.isinf(loss.loss.conjugates(samples.inner, outside)[alone]).all()


# Everything else runs on it.

def grouped_users(name: str = "logistic") -> ct.Users:
    return clustered(name, n_users=9, samples=30, n_features=2, separation=3.0, seed=2).users


def test_paths_bounds_margins_and_newcomers():
    users = grouped_users("squared")
    loss = ct.Personal(ct.Squared(), np.array([1.0, 2.0, 0.5]), scale="rows")
    problem = ct.Problem(users, loss, lam=0.0)
    path = ct.solve_path(problem, n_lams=8)
    assert path.n_clusters[-1] == 1
    assert max(s.gap for s in path.solutions) <= 1e-6
    solution = next(s for s in path.solutions if s.n_clusters == 3)
    assert ct.certify(solution.problem, solution.models).relative_gap <= 1e-5
    assert ct.recovery_bounds(solution.problem, solution.labels).lower >= 0
    assert ct.fusion_ladder(solution.problem, solution.labels) is not None
    newcomers = clustered("squared", n_users=3, samples=30, n_features=2, separation=3.0, seed=2).users
    joined = solution.personalize(newcomers)
    assert loss.personal_models(newcomers, joined.models).shape == joined.models.shape
    assert problem.coefficient_names == ct.Problem(users, ct.Squared(), 0.0).coefficient_names
    refitted = ct.refit(problem, solution.labels)
    total = np.zeros((3, 3))
    np.add.at(total, solution.labels, loss.gradients(problem.samples, refitted))
    np.testing.assert_allclose(total, 0.0, atol=1e-8)


@pytest.mark.parametrize("algorithm", [
    ct.Newton(), ct.Splitting(), pytest.param(ct.PDMM(rho=0.1), marks=pytest.mark.slow)],
    ids=lambda a: type(a).__name__)
def test_federations_agree_with_the_solver(algorithm):
    users = grouped_users()
    loss = ct.Personal(ct.Logistic(ridge=0.05), np.array([1.0, 0.5, 0.0]))
    tol = 1e-4 if isinstance(algorithm, ct.PDMM) else 1e-7
    expected = ct.solve(ct.Problem(users, loss, lam=0.02), tol=1e-10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ct.CoterieWarning)
        run = ct.federate(users, loss, 0.02, algorithm=algorithm, tol=tol, seed=0, max_rounds=3000)
    assert run.gap <= tol
    assert run.objective == pytest.approx(expected.objective, rel=2 * tol)


def test_partial_participation_and_held_out_scores():
    """A user's score is that of its own model, around the centre, on its held-out rows."""
    parts = grouped_users("squared").split(test=0.3, seed=0)
    loss = ct.Personal(ct.Squared(), 0.5, scale="rows")
    run = ct.federate(parts.train, loss, 0.01, participation=0.5, seed=0, tol=1e-6)
    assert run.gap <= 1e-6
    path = ct.federate_path(parts.train, loss, [0.01], held_out=parts.test, tol=1e-6)
    own = loss.personal_models(parts.train, path.runs[0].models)
    inner = loss.loss.values(ct.Squared().prepare(parts.test), own)
    expected = float((inner * parts.test.counts).sum() / parts.test.counts.sum())
    assert path.scores[0] == pytest.approx(expected, rel=1e-6)
    chosen = ct.by_score(ct.Problem(parts.train, loss, 0.0), parts.test, n_lams=5)
    assert np.isfinite(chosen.scores).all()


def test_users_without_their_data_have_no_personal_models_here():
    remote = Remote(loss=ct.Personal(ct.Logistic(), 1.0), length=3)
    samples = remote.prepare(users_for("logistic"))
    with pytest.raises(ct.Incompatible, match="personal models"):
        remote.own_models(samples, np.zeros((9, 3)))
    assert Remote(loss=ct.Logistic(), length=3).own_models(samples, np.ones((9, 3))).sum() == 27


# Soundness.

def nasty_personal(seed: int) -> ct.Problem:
    """A nasty problem with a diagonal metric of any size, up to inf and down to 0."""
    inner, rng = nasty(seed), np.random.default_rng([seed, 5])
    prices = 10 ** rng.uniform(-8, 8, inner.dim)
    prices = np.where(rng.random(inner.dim) < 0.2, np.inf, np.where(rng.random(inner.dim) < 0.2, 0.0, prices))
    scale = "rows" if rng.random() < 0.5 else None
    return quiet_problem(inner.users, ct.Personal(inner.loss, prices, scale=scale), inner.lam, inner.graph)


def claim(problem: ct.Problem, models: np.ndarray, certificate: ct.Certificate) -> str | None:
    """What a certificate claims falsely, by a judge in forty digits."""
    judge = ExactPersonalProblem(problem, models)
    objective = judge.objective([exact(row) for row in models])
    best = min(objective, judge.improved(models, steps=4))
    slack = mp.mpf(certificate.rounding) + mp.mpf(certificate.floor) / 10**9 + mp.mpf(10) ** -250
    if objective > mp.mpf(certificate.objective) + slack:  # a personal model that is not the best one adds to it
        return f"the objective is {mp.nstr(objective, 17)}, not {certificate.objective!r}"
    if np.isfinite(certificate.relative_gap) and mp.mpf(certificate.bound) > best + slack:
        return f"the bound {certificate.bound!r} is above {mp.nstr(best, 17)}, which is reached"
    return None


def claim_of_solution(problem: ct.Problem) -> str | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ct.CoterieWarning)
        solution = ct.solve(problem)
    return claim(problem, solution.models, solution.certificate)


@pytest.mark.parametrize("seed", [0, 1, 3, 4])
def test_no_certificate_is_false(seed):
    assert claim_of_solution(nasty_personal(seed)) is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 6, 7, *range(8, 48)])
def test_no_certificate_is_false_on_many_problems(seed):
    assert claim_of_solution(nasty_personal(seed)) is None


class TooSmall(ct.Personal):
    """Bounds that forget the price."""

    def dual_bounds(self, samples, slopes, start=None, users=None, about=None):
        return self.loss.dual_bounds(samples.inner, slopes, start, users, about)


@pytest.mark.parametrize("kind", [ct.Personal, TooSmall])
def test_a_false_certificate_is_caught(kind):
    users = users_for("squared", n_users=3, samples=4)
    solution = ct.solve(ct.Problem(users, ct.Personal(ct.Squared(), 0.5), lam=0.3))
    problem, models = ct.Problem(users, kind(ct.Squared(), 0.5), lam=0.3), solution.models + 1.0
    wrong = claim(problem, models, ct.certify(problem, models, solution.duals))
    assert (wrong is None) if kind is ct.Personal else ("is above" in wrong)


# What is rejected.

@pytest.mark.parametrize(("settings", "complaint"), [
    ({}, "either a metric"), ({"metric": 1.0, "covariance": 1.0}, "either a metric"), ({"metric": -1.0}, ">= 0"),
    ({"metric": np.ones(4)}, "of shape"), ({"metric": np.array([[1.0, 2.0, 0], [0, 1, 0], [0, 0, 1]])}, "symmetric"),
    ({"metric": -np.ones((3, 3))}, "semidefinite"), ({"metric": np.full((3, 3), np.nan)}, "finite"),
    ({"metric": 1.0, "scale": "users"}, "unknown scale"), ({"metric": 1.0, "scale": np.ones(4)}, "one scale per user"),
    ({"metric": 1.0, "scale": 0.0}, "scales > 0"), ({"metric": 1.0, "scale": {"nobody": 1.0}}, "no number"),
    ({"metric": np.where(np.arange(27).reshape(9, 1, 3) == 5, np.inf, 1.0)}, "same for all"),
    ({"metric": np.zeros((9, 3, 3)) + np.ones((3, 3))}, "definite"),
])
def test_what_does_not_fit_is_rejected(settings, complaint):
    users = users_for("squared")
    with pytest.raises(ct.InvalidInput, match=complaint):
        ct.Personal(ct.Squared(), **settings).prepare(users)


def test_what_is_no_loss_is_rejected():
    with pytest.raises(ct.InvalidInput, match="expected a loss"):
        ct.Personal(1.0, ct.Squared())
    loss, users = ct.Personal(ct.Squared(), 1.0), users_for("squared")
    with pytest.raises(ct.InvalidInput, match="prepared by another loss"):
        loss.evaluate(ct.Squared().prepare(users), np.zeros((9, 3)))
    with pytest.raises(ct.InvalidInput, match="centres"):
        loss.personal_models(users, np.zeros((8, 3)))


def test_scales_by_name_serve_some_of_the_users():
    users = users_for("squared")
    loss = ct.Personal(ct.Squared(), 1.0, scale={name: 1.0 + k for k, name in enumerate(users.names)})
    some = users.take([5, 2])
    z = np.zeros((9, 3))
    np.testing.assert_array_equal(loss.personal_models(some, z[:2]), loss.personal_models(users, z)[[5, 2]])
    metric = Metric.of(2.0, "rows", users, 3)
    np.testing.assert_array_equal(metric.prices, np.tile(2.0 / users.counts[:, None], (1, 3)))


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-17, 1e-8, 1.0])
def test_a_column_at_the_level_of_rounding_keeps_nobody_at_its_centre(size):
    """As constant columns are after standardising: about 1e-17 at some users, of ordinary size at others."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 3))
    X[:30, 2] *= size
    users = ct.Users.from_arrays(X, X @ [1.0, -1.0, 0.5] + 0.3 * rng.normal(size=60), np.repeat([0, 1], 30))
    covariance = 0.1 * np.eye(4) + 0.2 * np.outer([0, 0, 0, 1], [0, 0, 0, 1])
    loss = ct.Personal(ct.Squared(ridge=1e-3, penalize_intercept=True), covariance=covariance, scale="rows")
    models = loss.personal_models(users, np.full((2, 4), 0.2))
    price = np.linalg.inv(covariance)
    for k, own in enumerate((slice(0, 30), slice(30, 60))):
        rows = np.column_stack([X[own], np.ones(30)])
        exact = np.linalg.solve(rows.T @ rows + 0.03 * np.eye(4) + price,
                                rows.T @ users.targets[own] + price @ np.full(4, 0.2))
        np.testing.assert_allclose(models[k], exact, rtol=1e-10)
