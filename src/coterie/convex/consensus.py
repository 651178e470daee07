"""The smallest lam at which all users share one model."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from coterie.base.errors import interruptible
from coterie.base.labels import group_means
from coterie.base.types import Array
from coterie.data.users import Participants, Users
from coterie.losses import SquaredDistance
from coterie.losses.curvature import Span
from coterie.losses.derived import SpanQuadratic
from coterie.problem.graph import Graph
from coterie.problem.problem import Problem
from coterie.problem.solution import Solution
from coterie.solvers import solve_quietly
from coterie.solvers.base import Point
from coterie.solvers.polish import polish

_LARGEST = 1e7  # numbers in matrices dim x dim of all users, above which none is formed for points
# Tolerance of the first clustering, times that of the bounds; of the last one.
_LOOSE, _TIGHT = 1e-5, 1e-13
_WIDE = 1e-2  # the first for wide models
# Times rtol: how far the upper bound is from the lower one, unless both are exact: there duals have
# room.
_ROOM = 0.1
_DRIFT = 3e-3  # how far points are moved, relative to their norm


class Bracket(NamedTuple):
    """A lower and an upper bound on a number."""

    lower: float
    upper: float


def lam_max(problem: Problem, *, rtol: float = 1e-6) -> Bracket:
    """Bound the smallest lam at which all users that the graph connects share one model.

    With g_i = grad f_i at the pooled model, all users share one model at lam exactly if some duals
    have B'y = -g and ||y_e|| <= lam w_e. Hence, over edges of positive weight,
        lam_max = min over y with B'y = -g of max_e ||y_e|| / w_e  =  max over x of -<g, x> / sum_e
        w_e ||(Bx)_e||
    Any such y gives an upper bound, any x a lower bound. Both come from convex clustering of the
    points -g at the lower bound: it gives the next, larger lower bound (Dinkelbach's iteration,
    1967) until all points form one cluster. Close to lam_max its x would be too short to be
    accurate. So the points are moved a little along the last x, which is a proximal step
    (Rockafellar 1976) towards the best x, whose length does not matter.

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
    return find_consensus(problem, rtol)[0]


def find_consensus(problem: Problem, rtol: float = 1e-6) -> tuple[Bracket, Array, Array]:
    """The bounds of `lam_max`, the pooled models, and duals that prove the upper bound."""
    # 1. The pooled models, and the gradients there without the rounding error of their optimum.
    graph = problem.graph
    zero = np.zeros((problem.n_users, problem.dim))
    pooled = polish(problem, graph.components, zero)
    gradients = problem.gradients(pooled)
    parts = graph.components
    gradients -= group_means(gradients, parts)[parts]
    if not (graph.weights > 0).any():
        return Bracket(0.0, 0.0), pooled, np.zeros((graph.n_edges, problem.dim))

    # 2. First bounds, of any flow and of any x.
    above = partial(_above, graph)
    unit = float(np.linalg.norm(gradients, axis=1).max())
    proof = graph.flow(-gradients)
    # The local models are equal.
    if unit <= 1e-9 * float(np.abs(problem.gradients(zero)).max()) + 1e-300:
        return Bracket(0.0, above(proof)), pooled, proof
    points, axes = _in_few_dimensions(-gradients / unit)
    lower, upper, tol = _below(graph, points, points), above(proof) / unit, \
        max(_LOOSE * rtol, _TIGHT)
    wide = problem.loss.wide(problem.samples)
    if wide:  # clusterings are expensive: begin closer, with fewer digits
        lower, tol = max(lower, _alone(graph, points)), max(_WIDE * rtol, _TIGHT)
    drift, most = np.zeros_like(points), upper
    start: Solution | Point | None = None
    def bracket() -> Bracket:
        return Bracket(lower * unit, upper * unit)

    clustering = _clustering(points, graph)
    for _ in range(60):
        if upper - lower <= rtol * upper:
            upper = max(upper, min((1.0 + _ROOM * rtol) * lower, most))
            break
        # 3. Convex clustering of the points at the lower bound.
        with interruptible(bracket):
            best = solve_quietly(clustering.with_lam(lower), tol=tol, start=start)
        assert best.duals is not None
        # 4. The upper bound: B'y = points + drift - x at the solution, so y plus a flow of the
        #    difference is a flow of the points.
        rest = points - graph.divergence(best.duals)
        flow = best.duals + graph.flow(rest)
        if above(flow) < upper:
            upper, proof = above(flow), unit * flow @ axes
        # 5. The lower bound, by Dinkelbach's step.
        x = best.models - group_means(best.models, parts)[parts]
        step = max(_below(graph, points, x), _below(graph, points, rest + drift))
        # Too little for this tolerance.
        if not step > lower * (1.0 + (0.5 * rtol if tol > _TIGHT else 1e-15)):
            if tol <= _TIGHT:
                break
            tol = max(1e-2 * tol, _TIGHT)
        lower, start = min(max(step, lower), upper), best
        # 6. Move the points a little along x, so that the next x is not too short.
        if not wide and x.any():
            drift = _DRIFT * np.linalg.norm(points) / np.linalg.norm(x) * x
            clustering = _clustering(points + drift, graph)
            start = Point(drift, best.duals, best.sigma)
    return bracket(), pooled, proof


def _in_few_dimensions(points: Array) -> tuple[Array, Array]:
    """The points in the space that they span, where that has fewer dimensions, and its axes."""
    if points.shape[1] <= len(points):
        return points, np.eye(points.shape[1])
    axes, triangle = np.linalg.qr(points.T)
    return np.ascontiguousarray(triangle.T), axes.T


def _above(graph: Graph, flow: Array) -> float:
    """The least lam at which this flow is feasible."""
    used = graph.weights > 0
    return float((np.linalg.norm(flow[used], axis=1) / graph.weights[used]).max())


def _below(graph: Graph, points: Array, x: Array) -> float:
    """The lower bound <points, x> / sum_e w_e ||(Bx)_e||."""
    length = graph.penalty(x)
    return float((points * x).sum()) / length if length > 0 else 0.0


def _alone(graph: Graph, points: Array) -> float:
    """The largest lower bound from an x that is zero but for one user, ||points_i|| / sum of its
    weights.
    """
    degrees = np.bincount(graph.edges.ravel(), weights=np.repeat(graph.weights, 2),
                          minlength=graph.n_users)
    norms = np.linalg.norm(points, axis=1)
    return float(np.divide(norms, degrees, out=np.zeros_like(norms), where=degrees > 0).max())


def _clustering(points: Array, graph: Graph) -> Problem:
    """Convex clustering of points, by operators instead of matrices dim x dim where these would be
    large.
    """
    n, dim = points.shape
    if graph.is_complete or n * dim**2 <= _LARGEST:
        return Problem(Users.from_arrays(points), SquaredDistance(), lam=0.0, graph=graph)
    nothing, one = np.empty((n, 0)), np.ones(n)
    loss = SpanQuadratic(point=points, value=np.zeros(n), gradient=np.zeros((n, dim)),
                         span=Span(np.empty((n, 0, dim)), np.empty((n, 0, 0)), nothing, one, one))
    return Problem(Participants(range(n)), loss, lam=0.0, graph=graph)
