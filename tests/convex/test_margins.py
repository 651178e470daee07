"""What a certificate decides about groups, on problems whose groups are known."""

from __future__ import annotations

import numpy as np
import pytest
from support.planted import planted

import coterie as ct


@pytest.mark.parametrize("n_users", [12, 40])
def test_planted_groups_are_decided(n_users):
    known = planted(n_users, graph=ct.Graph.complete(n_users), seed=3)
    solution = ct.solve(known.problem, tol=1e-10)
    margins = ct.group_margins(solution)
    assert margins.decided.all()
    assert not margins.estimated  # squared distances are strongly convex
    assert "are decided" in str(margins)
    # The bound on how far members are apart holds for the optimum, where they are equal; and the distances are real.
    truth = np.unique(known.models, axis=0)
    assert len(margins.slack) == len(truth)
    assert (margins.spread[np.bincount(solution.labels) > 1] > 0).all()


def two(lam: float, tol: float = 1e-9) -> ct.Solution:
    """Two points a unit apart are one from lam = 1/2 on."""
    return ct.solve(ct.Problem(ct.Users.from_arrays([[0.0], [1.0]]), ct.SquaredDistance(), lam=lam), tol=tol)


def test_the_slack_of_two_points_is_known():
    # Together from lam = 1/2 on, where the dual is 1/2: a share 1 - 1 / (2 lam) of the radius is left.
    assert ct.group_margins(two(1.0)).slack == pytest.approx([0.5])
    assert ct.group_margins(two(1.0)).decided.tolist() == [True]
    assert ct.group_margins(two(0.4)).slack.tolist() == [1.0, 1.0]
    assert ct.group_margins(two(0.4)).distance == pytest.approx([0.2, 0.2])


@pytest.mark.parametrize("lam", [0.5 - 1e-12, 0.5, 0.5 + 1e-12])
def test_a_group_that_is_about_to_part_is_not_decided(lam):
    margins = ct.group_margins(two(lam))
    assert not margins.decided.any()
    assert "not decided" in str(margins)


def test_a_point_of_a_path_has_margins_too():
    known = planted(15, graph=ct.Graph.complete(15), seed=1)
    path = ct.solve_path(known.problem, [0.5 * known.problem.lam, known.problem.lam], tol=1e-10)
    assert path[1].duals is None
    assert ct.group_margins(path[1]).decided.all()


def test_routes_differ_only_where_nothing_is_decided():
    """A path and a cold solve, both within the tolerance, may disagree on groups; never on decided ones."""
    from coterie.datasets import ellipses

    problem = ct.Problem(ellipses(users_per_cluster=20, seed=5).users, ct.SquaredHinge(), lam=0.0)
    path = ct.solve_path(problem, np.geomspace(0.01, 0.12, 8), tol=1e-8)
    compared = 0
    for point in path.solutions:
        cold = ct.solve(point.problem, tol=1e-8)
        for solution, other in ((point, cold), (cold, point)):
            margins = ct.group_margins(solution)
            for group in np.flatnonzero(margins.decided & (np.bincount(solution.labels) > 1)):
                members = solution.labels == group
                assert len(np.unique(other.labels[members])) == 1
                compared += 1
    assert compared > 3
