"""`solve` is the only judge: whatever a solver claims, the certificate is computed from its point."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import replace

import numpy as np
import pytest
from support.problems import graph_for, points_problem, problem_for

import coterie as ct
from coterie.problem import certificates
from coterie.solvers.base import Point


class Fake:
    """A solver that returns what it is given."""

    def __init__(self, point):
        self.point = point

    def run(self, problem, tol, start=None, progress=None):
        return self.point


def doubted(problem, point):
    """The solution of a solver that returns this point, which is not within the tolerance: a warning says so."""
    with pytest.warns(ct.ConvergenceWarning):
        return ct.solve(problem, tol=1e-8, solver=Fake(point))


@pytest.fixture(scope="module")
def problem():
    return problem_for("logistic", lam=0.02, n_users=12, samples=15)


@pytest.fixture(scope="module")
def best(problem):
    return ct.solve(problem, tol=1e-9)


def test_an_honest_point_is_accepted(problem, best):
    """The twin of all that follows: the judge does accept what is right."""
    solution = ct.solve(problem, tol=1e-8, solver=Fake(Point(best.models, best.duals)))
    assert solution.status is ct.Status.CONVERGED
    assert solution.gap == pytest.approx(best.gap, rel=1e-3, abs=1e-13)


def test_a_solver_cannot_hand_over_its_own_certificate(problem, best):
    perfect = replace(best.certificate, bound=best.certificate.objective, rounding=0.0)
    assert perfect.relative_gap == 0.0
    with pytest.raises(TypeError, match="certificate"):
        Point(best.models, certificate=perfect)
    claiming = namedtuple("claiming", [*Point._fields, "certificate", "interrupted"])
    wrong = np.ones_like(best.models)
    claimed = claiming(wrong, best.duals, (), None, None, perfect, False)
    solution = doubted(problem, claimed)
    assert solution.status is ct.Status.INACCURATE
    assert solution.objective == pytest.approx(problem.objective(wrong), rel=1e-12)
    assert solution.gap > 0.01


def test_infeasible_duals_prove_nothing(problem, best):
    """Everyone together, with duals that balance all gradients: a perfect proof, but for the balls they leave."""
    together = ct.refit(problem, np.zeros(12))
    duals = problem.graph.flow(-problem.gradients(together))
    assert (np.linalg.norm(duals, axis=1) > 1.5 * problem.radii).any()
    bound = -problem.conjugates(-problem.graph.divergence(duals), start=together).sum()
    assert bound == pytest.approx(problem.objective(together), rel=1e-9)  # what a judge would say who does not look
    solution = doubted(problem, Point(together, duals))
    assert (np.linalg.norm(solution.duals, axis=1) <= problem.radii * (1 + 1e-14)).all()
    assert solution.certificate.bound <= best.objective * (1 + 1e-12)
    assert solution.status is ct.Status.INACCURATE


def test_wrong_models_are_not_saved_by_the_right_duals(problem, best):
    for step in (1e-3, 1.0):
        solution = doubted(problem, Point(best.models + step, best.duals))
        assert solution.status is ct.Status.INACCURATE
        assert solution.gap >= (problem.objective(best.models + step) - best.objective) / solution.objective - 1e-8


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("part", ["models", "duals", "potentials"])
def test_what_is_not_a_number_is_refused(problem, best, part, bad):
    rows = {"models": best.models, "duals": best.duals, "potentials": np.zeros_like(best.models)}
    rows[part] = rows[part].copy()
    rows[part][3, 1] = bad
    if part == "potentials":
        rows["duals"] = None
    else:
        rows["potentials"] = None
    with pytest.raises(ct.NotConverged, match="Fake returned a point that cannot be certified"):
        ct.solve(problem, solver=Fake(Point(**rows)))


@pytest.mark.parametrize("shape", [(11, 3), (12, 4), (12,)])
def test_points_of_another_shape_are_refused(problem, shape):
    with pytest.raises(ct.NotConverged, match="expected models of shape"):
        ct.solve(problem, solver=Fake(Point(np.zeros(shape))))


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e9])
def test_potentials_stand_for_feasible_duals_whatever_they_are(scale):
    """The duals a lean point stands for, written out: feasible, with the slopes that the judge computes."""
    rng = np.random.default_rng(0)
    problem = points_problem(rng.standard_normal((12, 2)), lam=0.05)
    models = rng.standard_normal((4, 2))[rng.integers(0, 4, 12)]
    potentials = scale * rng.standard_normal((12, 2))
    gaps, flow = (problem.graph.differences(rows) for rows in (models, potentials))
    lengths = np.linalg.norm(gaps, axis=1)
    duals = np.where(lengths[:, None] > 0, 0.05 * gaps / np.maximum(lengths, 1e-300)[:, None],
                     certificates.project(flow, problem.radii))
    by_duals, by_potentials = ct.certify(problem, models, duals), ct.certify(problem, models, potentials=potentials)
    assert by_potentials.bound == pytest.approx(by_duals.bound, rel=1e-12)
    assert by_potentials.objective == by_duals.objective
    assert by_potentials.duals is None
    best = ct.solve(problem, tol=1e-12)
    assert by_potentials.bound <= best.objective * (1 + 1e-12)


def test_potentials_are_for_all_pairs_with_one_weight():
    listed = points_problem(np.eye(9), lam=0.05, graph=graph_for("knn", 9))
    with pytest.raises(ct.InvalidInput, match="all pairs with one weight"):
        ct.certify(listed, np.eye(9), potentials=np.eye(9))


def test_what_is_remembered_is_told_apart_by_its_numbers(problem, best):
    """An array changed in place after it was judged is judged anew, and so is the same array of another problem."""
    models, duals = best.models.copy(), best.duals.copy()
    first = ct.certify(problem, models, duals)
    assert ct.certify(problem, models, duals) == first
    models += 0.1
    assert ct.certify(problem, models, duals).relative_gap > 1e-4
    models -= 0.1
    duals[0] = 0.0
    assert ct.certify(problem, models, duals).bound < first.bound
    other = ct.certify(problem.with_lam(0.04), best.models, best.duals)
    assert other.objective > first.objective


def test_a_judgement_is_made_once(problem, monkeypatch):
    """The solver has its point judged before `solve` does: the conjugates, which cost most, are not computed twice."""
    calls = []
    original = certificates._answers
    monkeypatch.setattr(certificates, "_answers", lambda *a, **k: calls.append(1) or original(*a, **k))
    solution = ct.solve(problem.with_lam(0.5), tol=1e-6)
    assert solution.status is ct.Status.CONVERGED
    count = len(calls)
    ct.certify(solution.problem, solution.models, solution.duals)
    assert len(calls) == count
    ct.certify(solution.problem, solution.models + 1e-9, solution.duals)
    assert len(calls) == count + 1
