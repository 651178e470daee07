"""Units and offsets of the data change the answer as the formulas say, and nothing else.

Each case states a change of the data, and how the optimum of (C) changes with it: which lam and ridge belong to the
same problem, and what the models become.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from support.problems import loss_for, quiet_problem, users_for

import coterie as ct

SCALES = [1e-8, 1e-3, 1e3, 1e8]
POINTS = ("squared_distance", "huber_distance")
MARGINS = ("squared_hinge", "logistic", "squared", "huber", "poisson", "multinomial")


class Case(NamedTuple):
    """The same problem twice, and the way from the models of the first to those of the second."""

    plain: ct.Problem
    moved: ct.Problem
    factor: float  # models of the second are factor * models + shift
    shift: float
    size: float  # objectives of the second are size * those of the first


def scaled_features(name: str, scale: float) -> Case:
    """a -> s a, no intercept: w -> w / s, ridge -> s^2 ridge, lam -> s lam."""
    users = users_for(name, samples=10, seed=2)
    plain = quiet_problem(users, loss_for(name, intercept=False))
    lam = 0.5 * ct.lam_max(plain).upper
    moved = ct.Users.from_arrays(scale * users.features, users.targets, users.owner)
    return Case(plain.with_lam(lam), quiet_problem(moved, loss_for(name, intercept=False, ridge=1e-3 * scale**2),
                                                   lam=scale * lam), 1 / scale, 0.0, 1.0)


def scaled_points(name: str, scale: float) -> Case:
    """a -> s a: x -> s x, delta -> s delta, lam -> s lam, F -> s^2 F."""
    users = users_for(name, n_users=12, seed=2)
    delta = {"delta": 1.0} if name == "huber_distance" else {}
    plain = quiet_problem(users, loss_for(name, **delta))
    lam = 0.5 * ct.lam_max(plain).upper
    scaled = {key: scale * value for key, value in delta.items()}
    return Case(plain.with_lam(lam), quiet_problem(ct.Users.from_arrays(scale * users.features), loss_for(
        name, **scaled), lam=scale * lam), scale, 0.0, scale**2)


def moved_points(name: str, offset: float) -> Case:
    """a -> a + c: x -> x + c."""
    users = users_for(name, n_users=12, seed=2)
    rows = np.round(users.features, 6)  # so that adding an offset of 1e8 changes the data by as little as possible
    plain = quiet_problem(ct.Users.from_arrays((rows + offset) - offset), loss_for(name))
    lam = 0.5 * ct.lam_max(plain).upper
    return Case(plain.with_lam(lam), quiet_problem(ct.Users.from_arrays(rows + offset), loss_for(name), lam=lam), 1.0,
                offset, 1.0)


CASES = [*((scaled_features, name, scale) for name in MARGINS for scale in SCALES),
         *((scaled_points, name, scale) for name in POINTS for scale in SCALES),
         *((moved_points, name, offset) for name in POINTS for offset in (1e-8, 1e3, 1e6, 1e8))]


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0].__name__}-{case[1]}-{case[2]:g}")
def case(request) -> Case:
    make, name, number = request.param
    return make(name, number)


def near(case: Case, plain: np.ndarray, moved: np.ndarray) -> None:
    back = (moved - case.shift) / case.factor
    spread = np.abs(plain).max() + 1e-300
    # An offset of 1e8 leaves eight digits of the models.
    np.testing.assert_allclose(back, plain, atol=1e-5 * spread + 4e-16 * abs(case.shift))


def test_solve(case):
    plain, moved = ct.solve(case.plain, tol=1e-10), ct.solve(case.moved, tol=1e-10)
    assert plain.status is moved.status is ct.Status.CONVERGED
    assert moved.objective == pytest.approx(case.size * plain.objective, rel=1e-8)
    assert moved.labels.tolist() == plain.labels.tolist()
    near(case, plain.models, moved.models)


def test_certify(case):
    """The relative gap of wrong models is the same in all units."""
    rng = np.random.default_rng(1)
    wrong = ct.solve(case.plain).models
    wrong = wrong + 0.1 * np.abs(wrong).max() * rng.standard_normal(wrong.shape)
    first = ct.certify(case.plain, wrong)
    second = ct.certify(case.moved, case.factor * wrong + case.shift)
    assert second.objective == pytest.approx(case.size * first.objective, rel=1e-6)
    assert second.relative_gap == pytest.approx(first.relative_gap, rel=0.05)
    assert first.relative_gap > 1e-4


def test_path(case):
    plain = ct.solve_path(case.plain, [0.5 * case.plain.lam, case.plain.lam], tol=1e-9)
    moved = ct.solve_path(case.moved, [0.5 * case.moved.lam, case.moved.lam], tol=1e-9)
    for first, second in zip(plain.solutions, moved.solutions, strict=True):
        assert second.status is ct.Status.CONVERGED
        assert second.n_clusters == first.n_clusters
        near(case, first.models, second.models)


@pytest.mark.slow
def test_federate(case):
    run = ct.federate(case.moved.users, case.moved.loss, case.moved.lam, tol=1e-7)
    assert run.status is ct.Status.CONVERGED
    assert run.objective == pytest.approx(case.size * ct.solve(case.plain, tol=1e-9).objective, rel=1e-6)


@pytest.mark.parametrize("name", ["squared", "huber"])
@pytest.mark.parametrize("offset", [1e3, 1e6, 1e8])
def test_targets_far_from_zero(name, offset):
    """y -> y + c with a free intercept: b -> b + c, and nothing else."""
    users = users_for(name, samples=10, seed=2)
    targets = np.round(users.targets, 6)
    rounded = (targets + offset) - offset
    plain = quiet_problem(ct.Users.from_arrays(users.features, rounded, users.owner), loss_for(name))
    lam = 0.5 * ct.lam_max(plain).upper
    first = ct.solve(plain.with_lam(lam), tol=1e-9)
    moved = ct.Users.from_arrays(users.features, targets + offset, users.owner)
    second = ct.solve(quiet_problem(moved, loss_for(name), lam=lam), tol=1e-8)
    assert second.status is ct.Status.CONVERGED
    assert second.objective == pytest.approx(first.objective, rel=1e-7)
    back = second.models - np.array([0.0] * users.n_features + [offset])
    np.testing.assert_allclose(back, first.models, atol=1e-4 + 4e-16 * offset)


@pytest.mark.parametrize("offset", [10.0, 100.0, 1e4])
@pytest.mark.parametrize("name", ["squared", "logistic", "squared_hinge"])
def test_features_far_from_zero_converge(name, offset):
    """a -> a + c moves the penalty on the intercept, so the optimum is another one; it is reached all the same."""
    users = users_for(name, samples=10, seed=2)
    problem = quiet_problem(ct.Users.from_arrays(users.features + offset, users.targets, users.owner), loss_for(name))
    for share in (0.1, 0.5):
        solution = ct.solve(problem.with_lam(share * ct.lam_max(problem).upper), tol=1e-8)
        assert solution.status is ct.Status.CONVERGED
