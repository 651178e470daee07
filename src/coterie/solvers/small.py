"""The fast solver in compiled code, for few users on all pairs with one weight."""

from __future__ import annotations

import numpy as np

from coterie.certificates import FLOOR, judge
from coterie.labels import labels_of
from coterie.losses.flat import flat
from coterie.problem import Problem
from coterie.solution import Record
from coterie.solvers.base import Point, Start

_LARGEST = 3000  # unknowns
_PASSES = 1000  # over the edges, after which the general solver goes on


def solve_small(problem: Problem, tol: float, start: Start | None, sigma: float | None, max_iter: int) -> Point | None:
    """A point that is certified to `tol`; None if the problem is not one for this method, or it did not get there."""
    graph, shape = problem.graph, (problem.n_users, problem.dim)
    if not graph.is_complete or not graph.n_edges or shape[0] * shape[1] > _LARGEST:
        return None
    data = flat(problem.loss, problem.samples)
    if data is None:
        return None
    from coterie.solvers import small_kernels, small_polish

    sizes = problem.loss.sizes(problem.samples)
    models = np.zeros(shape) if start is None else start.models
    duals = np.empty((0, shape[1])) if start is None or start.duals is None else start.duals
    warm = labels_of(models) if len(duals) else np.empty(0, dtype=np.int64)
    known = None if start is None or problem.loss.quadratic else start.sigma
    task = small_polish.Task(data, sizes, problem.lam * float(graph.weights[0]), FLOOR * float(sizes.sum()), tol)
    models, duals, gap, passes, last = small_kernels.run(
        task, models, duals, warm, start is None, sigma or known or 0.0, min(max_iter, _PASSES))
    if not gap <= tol:
        return None
    certificate = judge(problem, models, duals)
    if not certificate.relative_gap <= tol:
        return None
    record = Record(passes, certificate.objective, certificate.relative_gap, int(labels_of(models).max()) + 1, 0.0)
    return Point(models, certificate.duals, (record,), last)
