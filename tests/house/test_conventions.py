"""The paper's three conventions, each statement of the docs page pinned by CVXPY on one instance."""

from __future__ import annotations

import cvxpy as cp
import numpy as np
import pytest

import coterie as ct

N, LAM = 6, 0.12


@pytest.fixture(scope="module")
def instance():
    """Six users in two groups, least squares in two features without intercept."""
    rng = np.random.default_rng(0)
    features = rng.standard_normal((N * 12, 2))
    owner = np.repeat(np.arange(N), 12)
    true = np.where(owner[:, None] < 3, [2.0, 0.0], [0.0, 2.0])
    users = ct.Users.from_arrays(features, (features * true).sum(1) + 0.3 * rng.standard_normal(N * 12), owner)
    return ct.Problem(users, ct.Squared(ridge=1e-3, intercept=False), lam=LAM)


def written_out(problem, loss_factor, lam, pairs):
    """minimise loss_factor * sum_i f_i(x_i) + lam * sum over the given pairs of ||x_i - x_j||, as on paper."""
    users, x = problem.users, cp.Variable((N, 2))
    losses = []
    for i in range(N):
        rows = users.owner == i
        residual = users.features[rows] @ x[i] - users.targets[rows]
        losses.append(cp.sum_squares(residual) / (2 * rows.sum()) + 1e-3 / 2 * cp.sum_squares(x[i]))
    penalty = sum(cp.norm(x[i] - x[j]) for i, j in pairs)
    program = cp.Problem(cp.Minimize(loss_factor * sum(losses) + lam * penalty))
    program.solve(solver="CLARABEL", tol_gap_abs=1e-10, tol_gap_rel=1e-10, tol_feas=1e-10)
    return x.value


ORDERED = [(i, j) for i in range(N) for j in range(N) if i != j]
UNORDERED = [(i, j) for i, j in ORDERED if i < j]


def test_problem_c_is_losses_plus_unordered_pairs(instance):
    models = written_out(instance, 1.0, LAM, UNORDERED)
    np.testing.assert_allclose(ct.solve(instance).models, models, atol=1e-6)
    assert ct.certify(instance, models).relative_gap < 1e-8


def test_eq3_as_printed_has_one_over_n_and_ordered_pairs(instance):
    lam_eq3 = LAM / (2 * N)
    assert ct.lam_from_eq3(lam_eq3, N) == pytest.approx(LAM)
    models = written_out(instance, 1 / N, lam_eq3, ORDERED)
    np.testing.assert_allclose(models, ct.solve(instance).models, atol=1e-6)
    # Taking its lam for the lam of (C) is another problem, with another answer.
    other = ct.solve(instance.with_lam(lam_eq3)).models
    assert np.abs(models - other).max() > 0.01


def test_the_reformulation_of_algorithm_1_solves_c_for_twice_its_lam(instance):
    models = written_out(instance, 1.0, LAM, ORDERED)
    np.testing.assert_allclose(models, ct.solve(instance.with_lam(2 * LAM)).models, atol=1e-6)
    assert np.abs(models - ct.solve(instance).models).max() > 1e-3


def test_the_printed_kkt_conditions_are_those_of_c(instance):
    """grad f_i(x_i) + lam * sum_{j != i} s_ij = 0 with ||s_ij|| <= 1, s_ij a unit vector where x_i != x_j."""
    solution = ct.solve(instance, tol=1e-13)
    s = np.zeros((N, N, 2))
    for (i, j), dual in zip(instance.graph.edges, solution.duals, strict=True):
        s[i, j], s[j, i] = dual / LAM, -dual / LAM
    assert np.abs(instance.gradients(solution.models) + LAM * s.sum(axis=1)).max() < 1e-6
    assert np.linalg.norm(s, axis=2).max() <= 1 + 1e-12
    for i, j in UNORDERED:
        gap = solution.models[i] - solution.models[j]
        if (gap != 0).any():
            np.testing.assert_allclose(s[i, j], gap / np.linalg.norm(gap), atol=1e-4)
    # They do not hold, with the same lam, at the solution of Eq. (3) as printed.
    printed = written_out(instance, 1 / N, LAM, ORDERED)
    assert ct.certify(instance, printed).relative_gap > 1e-3


def test_theorem_1_is_in_the_convention_of_c(instance):
    """At lam >= max ||grad f_i(w_k) - grad f_j(w_k)|| / n_k the group shares its model; in (C), with lam unchanged."""
    groups = [np.arange(3), np.arange(3, 6)]
    for lam in np.geomspace(0.01, 0.3, 40):
        problem = instance.with_lam(lam)
        models = ct.solve(problem).models
        shared = np.stack([models[g].mean(axis=0) for g in groups])[np.repeat([0, 1], 3)]
        gradients = problem.gradients(shared)
        needed = max(np.linalg.norm(gradients[i] - gradients[j]) / 3 for g in groups for i in g for j in g)
        if ct.certify(problem, shared).relative_gap < 1e-9 and needed <= lam:
            break
    else:
        pytest.fail("no lam on the grid satisfies the theorem's hypothesis")
    assert (models[:3] == models[0]).all()
    assert (models[3:] == models[3]).all()
    assert (models[0] != models[3]).any()
