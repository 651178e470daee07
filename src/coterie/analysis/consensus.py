"""The smallest lam at which all users share one model."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from coterie._typing import Array
from coterie.data.users import Users
from coterie.errors import interruptible
from coterie.labels import group_means
from coterie.losses import SquaredDistance
from coterie.problem import Problem
from coterie.solution import Solution
from coterie.solvers import solve_quietly
from coterie.solvers.polish import polish


class Bracket(NamedTuple):
    """A lower and an upper bound on a number."""

    lower: float
    upper: float


class Consensus(NamedTuple):
    """The pooled models, the bounds of `lam_max`, and duals that prove the upper bound."""

    bracket: Bracket
    models: Array
    duals: Array


def lam_max(problem: Problem, *, rtol: float = 1e-6) -> Bracket:
    """Bound the smallest lam at which all users that the graph connects share one model.

    With g_i = grad f_i at the pooled model, all users share one model at lam exactly if some duals have B'y = -g and
    ||y_e|| <= lam w_e. Hence, over edges of positive weight,
        lam_max = min over y with B'y = -g of max_e ||y_e|| / w_e  =  max over x of -<g, x> / sum_e w_e ||(Bx)_e||
    Any such y gives an upper bound, any x a lower bound. Both come from convex clustering of the points -g at the lower
    bound: it gives the next, larger lower bound (Dinkelbach's iteration, 1967) until all points form one cluster.

    Parameters
    ----------
    problem
        The problem; its lam is not used.
    rtol
        Relative distance of the two bounds to reach.

    Returns
    -------
    Bracket
        The lower and the upper bound.

    Raises
    ------
    Interrupted
        On Ctrl-C; its `best` is the bracket so far.

    Example
    -------
    >>> import coterie as ct
    >>> users = ct.Users.from_arrays([[0.0], [4.0]])
    >>> ct.lam_max(ct.Problem(users, ct.SquaredDistance(), lam=0.0))
    Bracket(lower=2.0, upper=2.0)
    """
    return consensus(problem, rtol).bracket


def consensus(problem: Problem, rtol: float = 1e-6) -> Consensus:
    """`lam_max` with the models and duals behind it."""
    graph = problem.graph
    used = graph.weights > 0
    zero = np.zeros((problem.n_users, problem.dim))
    pooled = polish(problem, graph.components, zero)
    gradients = problem.gradients(pooled)
    parts = graph.components
    gradients -= group_means(gradients, parts)[parts]  # remove the rounding error of the pooled optimum
    if not used.any():
        return Consensus(Bracket(0.0, 0.0), pooled, np.zeros((graph.n_edges, problem.dim)))

    def above(flow: Array) -> float:
        return float((np.linalg.norm(flow[used], axis=1) / graph.weights[used]).max())

    unit = float(np.linalg.norm(gradients, axis=1).max())
    proof = graph.flow(-gradients)
    if unit <= 1e-9 * float(np.abs(problem.gradients(zero)).max()) + 1e-300:  # the local models are equal
        return Consensus(Bracket(0.0, above(proof)), pooled, proof)
    points, axes = -gradients / unit, np.eye(problem.dim)
    if problem.dim > problem.n_users:  # the points lie in a space of fewer dimensions: nothing changes in it
        axes, triangle = np.linalg.qr(points.T)
        points, axes = np.ascontiguousarray(triangle.T), axes.T
    lower, upper = float((points**2).sum()) / graph.penalty(points), above(proof) / unit
    clustering = Problem(Users.from_arrays(points), SquaredDistance(), lam=lower, graph=graph)
    best: Solution | None = None

    def bracket() -> Bracket:
        return Bracket(lower * unit, upper * unit)

    for _ in range(60):
        if upper - lower <= rtol * upper:
            break
        with interruptible(bracket):
            best = solve_quietly(clustering.with_lam(lower), tol=1e-13, start=best)
        assert best.duals is not None
        # B'y = points - x at the solution, so y plus a flow of the difference is a flow of the points.
        flow = best.duals + graph.flow(points - graph.divergence(best.duals))
        if above(flow) < upper:
            upper, proof = above(flow), unit * flow @ axes
        x = best.models - group_means(best.models, parts)[parts]
        length = graph.penalty(x)
        step = float((points * x).sum()) / length if length > 0 else lower
        if not step > lower * (1.0 + 1e-15):
            break
        lower = min(step, upper)
    return Consensus(bracket(), pooled, proof)
