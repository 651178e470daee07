"""What one consistent liar moves is bounded by lam, however strong the lie."""

from __future__ import annotations

import numpy as np
import pytest

import coterie as ct
from coterie.datasets import clustered
from coterie.federated.client import Data
from coterie.lab.attacks.simulation import PoisonedRuntime, _run, influence
from coterie.problem.problem import Problem

LAM = 0.02


@pytest.fixture(scope="module")
def users():
    return clustered("logistic", n_users=10, n_clusters=2, samples=40, seed=0).users


def test_the_influence_of_a_liar_is_bounded_by_lam(users):
    loss = ct.Logistic(ridge=1e-2, penalize_intercept=True)
    moved = [influence(users, loss, LAM, strength, seed=1) for strength in (0.0, 1e-3, 1e-1, 1e1, 1e3)]
    assert moved[0] == 0.0
    assert 0 < moved[1] < moved[2]  # some of it gets through
    # The others' objective is strongly convex, and the liar changes the pull on each of them by 2 lam at most.
    assert max(moved) <= 2 * LAM * np.sqrt(9) / 1e-2


def test_points_move_by_no_more_than_twice_lam():
    points = ct.Users.from_arrays(np.random.default_rng(0).standard_normal((8, 2)))
    moved = [influence(points, ct.SquaredDistance(), LAM, strength, seed=2) for strength in (1e-2, 1.0, 1e3)]
    assert min(moved) > 0
    assert max(moved) <= 2 * LAM + 1e-6


def test_the_liar_is_consistent_and_so_stays(users):
    problem = Problem(users, ct.Logistic(ridge=1e-2, penalize_intercept=True), LAM)
    run = _run(problem, 3, np.array([0.3, -0.2, 0.1]))
    assert run.aside == {}
    assert run.status is ct.Status.CONVERGED

    class Careless(PoisonedRuntime):  # the twin: who forgets to lie in its values is set aside
        def _lie(self, query, reply):
            lied = super()._lie(query, reply)
            return type(reply)(reply.kind, reply.round, {**lied.arrays, "value": reply.arrays["value"]})

    from coterie.federated.run import run_federation
    from coterie.federated.settings import FederationSettings

    settings = FederationSettings(lam=LAM, algorithm=ct.Newton(), tol=1e-9)
    caught = run_federation(settings.federation(problem.users, problem.loss, problem.graph), settings, Careless(
        Data(problem.loss, problem.samples), 3, np.array([3.0, -2.0, 1.0])), problem=problem)
    assert list(caught.aside) == [3]
