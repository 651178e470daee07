"""Compiled code for few users: it agrees with the general code, splits groups that must split, and steps aside."""

from __future__ import annotations

import numpy as np
import pytest
from support.problems import quiet_problem as quiet
from support.problems import users_for

import coterie as ct
from coterie import datasets
from coterie.base.compiling import inner, njit
from coterie.losses.linear import KINDS, flat
from coterie.problem import certificates
from coterie.solvers import expansion, fast, group_kernels, loss_kernels, polish

NAMES = sorted(name for name, loss in ct.LOSSES.items() if loss in KINDS)
SCALES = [1e-2, 1.0, 30.0]  # of the features


def problem_of(name, scale=1.0, seed=0, lam=0.05, **settings):
    users = users_for(name, n_users=12, seed=seed, samples=6)
    users = ct.Users.from_arrays(scale * users.features, users.targets, users.owner)
    return quiet(users, ct.LOSSES[name](**settings), lam=lam)


def without_compiled(monkeypatch):
    """Make all code step aside that needs rows laid out for compiled loops."""
    for module in (certificates, expansion, fast, polish):
        monkeypatch.setattr(module, "flat", lambda loss, samples: None)


def point_near(problem, rng, size):
    """Models and feasible duals, both off the optimum."""
    solution = ct.solve(problem, tol=1e-6)
    models = solution.models + size * rng.standard_normal(solution.models.shape)
    return models, (1.0 - size) * solution.duals


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("size", [0.0, 1e-3])
@pytest.mark.parametrize("name", NAMES)
def test_certificates_are_those_of_the_general_code(name, size, scale, monkeypatch):
    problem = problem_of(name, scale)
    models, duals = point_near(problem, np.random.default_rng(0), size)
    assert flat(problem.loss, problem.samples) is not None
    ours = certificates.judge(problem, models, duals)
    without_compiled(monkeypatch)
    problem.judged.clear()
    other = certificates.judge(problem, models, duals)
    rounding = ours.rounding + other.rounding
    assert ours.objective == pytest.approx(other.objective, abs=rounding)
    assert ours.bound == pytest.approx(other.bound, abs=rounding, rel=1e-13)
    assert ours.infinite_users == other.infinite_users
    assert ours.rounding <= 4.0 * other.rounding
    for field in ("stationarity", "complementarity", "floor"):
        assert getattr(ours, field) == pytest.approx(getattr(other, field), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("settings", [{"ridge": 0.0}, {"penalize_intercept": True}, {"intercept": False}])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "squared_distance"])
def test_certificates_agree_for_every_setting(name, settings, monkeypatch):
    problem = problem_of(name, **settings)
    models, duals = point_near(problem, np.random.default_rng(1), 1e-3)
    ours = certificates.judge(problem, models, duals)
    without_compiled(monkeypatch)
    problem.judged.clear()
    other = certificates.judge(problem, models, duals)
    assert ours.bound == pytest.approx(other.bound, abs=ours.rounding + other.rounding, rel=1e-13)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", NAMES)
def test_solutions_are_those_of_the_general_code(name, scale, monkeypatch):
    """Both are certified, so neither objective is below the other's bound."""
    for seed, lam in enumerate((0.003, 0.03, 0.2)):
        problem = problem_of(name, scale, seed, lam)
        ours = ct.solve(problem, tol=1e-8)
        with monkeypatch.context() as patch:
            without_compiled(patch)
            other = ct.solve(problem.with_lam(lam), tol=1e-8)
        assert ours.status is other.status is ct.Status.CONVERGED
        assert ours.objective >= other.certificate.bound - other.certificate.rounding
        assert other.objective >= ours.certificate.bound - ours.certificate.rounding


def ellipses(seed, lam):
    return quiet(datasets.ellipses(samples=10, test_points=2, seed=seed).users, ct.SquaredHinge(ridge=1e-3), lam=lam)


@pytest.mark.parametrize(("seed", "lam"), [(1, 0.05), (1, 0.07), (1, 0.1), (5, 0.06)])
def test_groups_that_are_about_to_merge_are_found(seed, lam):
    """The groups of a solve to 1e-8 are those of one to 1e-12, though models of different groups are very close."""
    problem = ellipses(seed, lam)
    solution, exact = ct.solve(problem), ct.solve(problem.with_lam(lam), tol=1e-12)
    assert solution.gap <= 1e-8
    assert solution.labels.tolist() == exact.labels.tolist()
    assert solution.history[-1].iteration <= 60


def test_a_group_that_must_split_is_split():
    problem = ellipses(1, 0.07)
    exact = ct.solve(problem, tol=1e-12)
    together = np.zeros(problem.n_users, dtype=np.int64)
    together[exact.labels == exact.labels[0]] = 1  # two groups instead of more than twenty
    models = polish.polish(problem, together, exact.models)
    run = fast._Run(fast.Fast(), problem, 1e-8, None, None)
    run._defend(models)
    assert run.engine.lack is not None
    labels, start = polish.split(problem, models, run.engine.lack, problem.hessians(models), run._enough)
    assert labels.max() > together.max()
    assert problem.objective(start) < problem.objective(models)


def test_groups_that_may_stay_together_are_not_split():
    problem = ellipses(1, 0.07)
    models = ct.solve(problem, tol=1e-12).models
    assert polish.split(problem, models, np.zeros_like(models), problem.hessians(models), 1e-8) is None


def test_no_flow_lacks_less_than_the_least_lack():
    rng = np.random.default_rng(0)
    n, d = 7, 3
    pairs = np.stack(np.triu_indices(n, 1), axis=1)
    radius = np.full(len(pairs), 0.1)
    forces, bounds = rng.standard_normal((n, d)), []
    forces -= forces.mean(axis=0)

    @njit()
    def bound(lack, forces, radius):
        return group_kernels.least_lack(0, n, 0, lack, forces, radius)

    def lack(y):
        out = forces.copy()
        np.add.at(out, pairs[:, 0], y)
        np.add.at(out, pairs[:, 1], -y)
        return out

    y = np.zeros((len(pairs), d))
    for _ in range(300):
        v = lack(y)
        rows, columns = np.ascontiguousarray(v.T), np.ascontiguousarray(forces.T)
        bounds.append(bound(rows, columns, radius))
        y = certificates.project(y - (v[pairs[:, 0]] - v[pairs[:, 1]]) / n, radius)
    reached = float((lack(y) ** 2).sum())
    assert max(bounds) <= reached * (1 + 1e-12)
    assert max(bounds) >= 0.99 * reached > 0  # and the bound is tight at the end
    for _ in range(100):
        other = certificates.project(rng.standard_normal(y.shape), radius)
        assert float((lack(other) ** 2).sum()) >= max(bounds)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_problem_has_the_same_solution(name):
    first, second = (ct.solve(problem_of(name)) for _ in range(2))
    assert np.array_equal(first.models, second.models)
    assert np.array_equal(first.duals, second.duals)


def test_separate_models_do_not_need_compiled_code(monkeypatch):
    problem = ellipses(0, 0.0)
    ours = ct.solve(problem)
    without_compiled(monkeypatch)
    other = ct.solve(problem.with_lam(0.0))
    assert ours.objective == pytest.approx(other.objective, rel=1e-12)
    assert np.allclose(ours.models, other.models, rtol=1e-6, atol=1e-9)


def test_what_compiled_code_does_not_know_is_left_to_the_general_code():
    class Steeper(ct.SquaredHinge):
        def value(self, t, y):
            return 4.0 * super().value(t, y)

        def slope(self, t, y):
            return 4.0 * super().slope(t, y)

        def curvature(self, t, y):
            return 4.0 * super().curvature(t, y)

    users = datasets.ellipses(samples=10, test_points=2).users
    for problem in (quiet(users, Steeper(), lam=0.05), problem_of("squared", 1e6)):
        assert flat(problem.loss, problem.samples) is None
        assert ct.solve(problem).status is ct.Status.CONVERGED


def test_inner_functions_are_parts_of_their_callers():
    @inner(error_model="numpy")
    def double(numbers):
        for k in range(numbers.size):
            numbers[k] *= 2.0

    @njit()
    def doubled(numbers):
        out = numbers.copy()
        double(out)
        return out

    assert doubled(np.arange(3.0)).tolist() == [0.0, 2.0, 4.0]
    for _ in range(2):  # also after it was compiled for its caller
        with pytest.raises(TypeError, match="double is for compiled callers only"):
            double(np.arange(3.0))
    # The linker knows the callers only: machine code of an inner function alone would not be optimised.
    (compiled,) = double.overloads.values()
    codegen = compiled.library.codegen
    assert codegen._engine.get_function_address(compiled.fndesc.llvm_func_name) == 0


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 30, 47])
def test_large_factors_are_those_of_cholesky(n):
    @njit()
    def factor(matrix):
        return loss_kernels.factor_large(matrix, matrix.shape[0])

    rows = np.random.default_rng(n).standard_normal((n, n))
    matrix = rows @ rows.T + np.eye(n)
    found = matrix.copy()
    assert factor(found)
    np.testing.assert_allclose(np.tril(found), np.linalg.cholesky(matrix), rtol=1e-12, atol=1e-12)
    for k in range(n):  # the twin: one direction of negative curvature, wherever it is found
        broken = np.eye(n)
        broken[k, k] = -1.0
        assert not factor(broken)


def test_a_group_that_must_split_is_split_while_the_flow_of_another_is_unknown():
    """Of a pair that nothing holds together the lack stays; of a large group it vanishes, but after many rounds."""
    rng = np.random.default_rng(0)
    n, d = 14, 2
    labels = np.repeat([0, 1], [2, 12])
    models = np.where(labels[:, None] == 0, -5.0, 5.0) * np.ones((n, d))
    edges = n * (n - 1) // 2
    pull = np.where(labels == 0, -12.0, 2.0)[:, None] * np.ones(d) / np.sqrt(d)  # of the other group, at radius 1
    gradients = -pull
    gradients[0] += 5.0  # more than the pair's own dual, of length 1, can carry
    gradients[1] -= 5.0
    inside = rng.standard_normal((12, d))
    gradients[2:] += 4.0 * (inside - inside.mean(axis=0))
    state = np.zeros((edges, d)), np.ones(1), labels, 2, models, gradients

    _, _, after_few, small, _ = group_kernels.complete_proof(*state, 2, 1e-12, 1.0)
    assert not small
    assert np.abs(after_few[:2]).min() > 3.0
    assert np.array_equal(after_few[2:], np.zeros((12, d)))
    gradients[:2] = -pull[:2]  # the twin: without the pair, the lack of the large group is all there is
    _, _, alone, *_ = group_kernels.complete_proof(*state, 2, 1e-12, 1.0)
    assert np.abs(alone[2:]).max() > 0
