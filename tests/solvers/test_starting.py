"""Starts ahead of the last solutions: on the line through two of them, with the groups of the last one."""

from __future__ import annotations

import numpy as np
import pytest

import coterie as ct
from coterie import datasets
from coterie.base.labels import labels_of
from coterie.solvers import group_kernels
from coterie.solvers.base import Point, carry_duals, look_ahead


def solutions(*lams):
    users = datasets.ellipses(samples=10, test_points=2, seed=3).users
    problem = ct.Problem(users, ct.SquaredHinge(ridge=1e-3), lam=0.0)
    return [ct.solve(problem.with_lam(lam)) for lam in lams]


def test_a_start_ahead_is_nearer_than_the_last_solution():
    before, last, there = solutions(0.008, 0.01, 0.0125)
    start = look_ahead(before, last, 0.0125)
    assert isinstance(start, Point)
    away = np.abs(last.models - there.models).max()
    assert np.abs(start.models - there.models).max() < 0.5 * away
    assert np.abs(look_ahead(before, last, 0.0100001).models - there.models).max() > 0.9 * away  # the twin: not so far


def test_a_start_ahead_has_the_groups_of_the_last_solution_and_feasible_duals():
    before, last = solutions(0.04, 0.05)
    assert before.n_clusters != last.n_clusters
    start = look_ahead(before, last, 0.06)
    assert labels_of(start.models).tolist() == last.labels.tolist()
    norms = np.linalg.norm(start.duals, axis=1)
    assert norms.max() == pytest.approx(0.06)
    assert np.linalg.norm(last.duals, axis=1).max() == pytest.approx(0.05)


def test_the_last_solution_is_the_start_where_a_line_is_no_good_guess():
    before, last = solutions(0.01, 0.0125)
    assert look_ahead(None, last, 0.02) is last
    assert look_ahead(before, last, 0.1) is last  # far away
    assert look_ahead(last, before, 0.0125) is before  # lams do not increase
    assert look_ahead(before, None, 0.02) is None


def test_duals_inside_their_balls_stay_as_they_are():
    duals = np.array([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    moved = carry_duals(duals, np.full(3, 5.0), np.full(3, 10.0))
    assert moved.tolist() == [[6.0, 8.0], [0.3, 0.4], [0.0, 0.0]]
    assert np.linalg.norm(carry_duals(duals, np.full(3, 5.0), np.full(3, 0.1)), axis=1).max() <= 0.1 + 1e-15


def flow_problem(spread):
    """Twelve users of one group whose gradients sum to zero; from some spread on, no flow in unit balls supplies them.

    Half of the users pull one way, half the other: each of the 36 pairs between the halves carries at most 1.
    """
    gradients = spread * np.repeat([[1.0, 0.0], [-1.0, 0.0]], 6, axis=0)
    gradients += 0.01 * np.random.default_rng(0).standard_normal((12, 2))
    gradients -= gradients.mean(axis=0)
    return np.ones(1), np.zeros(12, dtype=np.int64), 1, np.zeros((12, 2)), gradients


@pytest.mark.parametrize(("spread", "possible"), [(5.9, True), (6.1, False)])
def test_a_flow_is_found_exactly_if_there_is_one(spread, possible):
    radii, labels, groups, models, gradients = flow_problem(spread)
    duals, _, lack, small, least = group_kernels.complete_proof(
        np.zeros((66, 2)), radii, labels, groups, models, gradients, 2000, 1e-12, 1.0)
    assert small is possible
    assert least is not possible
    assert np.linalg.norm(duals, axis=1).max() <= 1 + 1e-12
    balance = gradients + ct.Graph.complete(12).divergence(duals)
    assert np.abs(balance - lack).max() < 1e-9
    assert bool((balance**2).sum() <= 1e-10) is possible


def test_a_proof_goes_on_where_the_last_one_ended():
    """A group that can just be held together needs many rounds; a second proof makes those that the first one lacks."""
    arguments = flow_problem(5.999)
    arguments[-1][0] += [0.3, 0.0]
    arguments[-1][1] -= [0.3, 0.0]

    def lack_after(begin, rounds):
        _, state, lack, *_ = group_kernels.complete_proof(begin, *arguments, rounds, 1e-12, 1e-12)
        return state, float((lack**2).sum())

    nothing = np.zeros((66, 2))
    state, first = lack_after(nothing, 2)
    assert first > 1e-6
    assert lack_after(state, 2)[1] < first
    assert lack_after(nothing, 2)[1] == first  # the twin: from the beginning it is no better
