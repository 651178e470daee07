# mypy: disable-error-code="no-untyped-def"
"""The fast solver without Python in its loop: all pairs with one weight, few users, losses that compiled code knows.

The steps are those of `coterie.solvers.fast` and `expansion`; see there for what they do and why.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from coterie._typing import Array
from coterie.losses.flat import POINTS
from coterie.losses.kernels import expand, factor, substitute, value
from coterie.solvers.kernels import complete_duals, complete_pass, complete_run, retune
from coterie.solvers.small_polish import few, gap_of, means, polish, prove, small

_PLAIN: dict[str, Any] = {"cache": True, "error_model": "numpy"}
_RELAX, _STIFFNESS, _TURN, _TOO_LOW, _TOO_HIGH = 1.8, 12.0, 3.0, 2.0, 1.03 / 1.8  # as in `engines` and `fast`
_SMALL, _SQUARED = 300, 2


class Losses(NamedTuple):
    """The quadratic models of `Expansion`; the arrays are changed in place."""

    centre: Array  # (n, d) where the losses are expanded
    values: Array  # (n,)
    gradients: Array  # (n, d)
    hessians: Array  # (n, d, d)
    shift: Array  # (n,) added to the diagonals of the Hessians
    stiffest: Array  # (n,) upper bounds on the Hessians
    curvature: float  # of a user in one direction, on average
    floor: float  # of the shift


class Splitting(NamedTuple):
    """The state of the splitting, see `kernels`; the arrays are changed in place."""

    x: Array  # (d, n)
    s: Array  # (d, n_edges)
    shrink: Array  # (n_edges,)
    forces: Array  # (d, n)
    linear: Array  # (d, n)
    inverses: Array  # (n, d, d)
    total: Array  # (d, d)


@njit(**_PLAIN)
def curvature_of(hessians):
    """The mean curvature of a user in one direction, and the smallest of a user on average."""
    n, d = hessians.shape[:2]
    mean, least = 0.0, np.inf
    for i in range(n):
        trace = 0.0
        for k in range(d):
            trace += hessians[i, k, k] / d
        mean += trace / n
        least = min(least, trace)
    return mean, least


@njit(**_PLAIN)
def newton_point(losses, shift, vectors, out):
    """out <- (H_i + shift)^-1 vectors_i for each user; whether all were positive definite."""
    n, d = vectors.shape
    matrix = np.empty((d, d))
    for i in range(n):
        for k in range(d):
            for q in range(d):
                matrix[k, q] = losses.hessians[i, k, q]
            matrix[k, k] += shift
            out[i, k] = vectors[i, k]
        if not factor(matrix, d):
            return False
        substitute(matrix, d, out[i])
    return True


@njit(**_PLAIN)
def begin(task, models, cold):
    """The quadratic models at the start, which is moved to better models where there is none."""
    n, d = models.shape
    data = task.data
    stiffest, shift = np.full(n, np.inf), np.zeros(n)
    if data.steepest > 0.0:
        for i in range(n):
            stiffest[i] = data.ridges.max()
            for j in range(data.starts[i], data.starts[i + 1]):
                for k in range(d):
                    stiffest[i] += data.weights[j] * data.steepest * data.rows[j, k] ** 2
    losses = Losses(models.copy(), np.empty(n), np.empty((n, d)), np.empty((n, d, d)), shift, stiffest, 0.0, 0.0)
    expand(data, losses.centre, losses.values, losses.gradients, losses.hessians)
    mean, least = curvature_of(losses.hessians)
    if cold and mean > 0.0:
        if data.kind == POINTS or data.kind == 2:
            step = np.empty((n, d))
            if newton_point(losses, 1e-6 * mean, losses.gradients, step):
                losses.centre[:, :] = losses.centre - step
        elif least < 0.1 * mean:
            labels, w = polish(task, np.zeros(n, dtype=np.int64), losses.centre, 1e-6)
            losses.centre[:, :] = w[labels]
        expand(data, losses.centre, losses.values, losses.gradients, losses.hessians)
        mean, least = curvature_of(losses.hessians)
    floor = 0.0 if data.kind == POINTS else 1e-9 * mean
    shift[:] = floor
    return Losses(losses.centre, losses.values, losses.gradients, losses.hessians, shift, stiffest, mean, floor)


@njit(**_PLAIN)
def split(task, models, duals, sigma):
    """The splitting at the start."""
    n, d = models.shape
    edges = n * (n - 1) // 2
    state = Splitting(models.T.copy(), np.empty((d, edges)), np.empty(edges), np.zeros((d, n)), np.empty((d, n)),
                      np.empty((n, d, d)), np.empty((d, d)))
    e = 0
    for i in range(n):
        for j in range(i + 1, n):
            square = 0.0
            for k in range(d):
                state.s[k, e] = models[i, k] - models[j, k]
                if duals.shape[0] > 0:
                    state.s[k, e] += duals[e, k] / sigma
                square += state.s[k, e] ** 2
            state.shrink[e] = min(1.0, task.radius / sigma / (np.sqrt(square) + 1e-300))
            e += 1
    complete_pass(state.x, state.s, state.shrink, np.full(1, task.radius / sigma), 0.0, state.forces, False)
    return state


@njit(**_PLAIN)
def prepare(losses, state, sigma):
    """Set the quadratic models of the splitting, and prepare its linear system; whether it is positive definite."""
    n, d = losses.centre.shape
    matrix, column = np.empty((d, d)), np.empty(d)
    state.total[:, :] = 0.0
    for i in range(n):
        for k in range(d):
            state.linear[k, i] = losses.shift[i] * losses.centre[i, k] - losses.gradients[i, k]
            for q in range(d):
                matrix[k, q] = losses.hessians[i, k, q]
                state.linear[k, i] += matrix[k, q] * losses.centre[i, q]
            matrix[k, k] += losses.shift[i] + sigma * n
        if not factor(matrix, d):
            return False
        for k in range(d):
            column[:] = 0.0
            column[k] = 1.0
            substitute(matrix, d, column)
            for q in range(d):
                state.inverses[i, q, k] = column[q]
        for k in range(d):  # I - sigma sum M = mean of M_i H_i, without cancellation
            for q in range(d):
                entry = state.inverses[i, k, q] * losses.shift[i]
                for p in range(d):
                    entry += state.inverses[i, k, p] * losses.hessians[i, p, q]
                state.total[k, q] += entry / n
    return invert(state.total)


@njit(**_PLAIN)
def invert(a):
    """a <- a^-1 by Gauss-Jordan elimination with pivoting; whether it is regular."""
    d = a.shape[0]
    b = np.eye(d)
    for p in range(d):
        best = p + np.argmax(np.abs(a[p:, p]))
        if not abs(a[best, p]) > 0.0:
            return False
        for q in range(d):
            a[p, q], a[best, q] = a[best, q], a[p, q]
            b[p, q], b[best, q] = b[best, q], b[p, q]
        pivot = a[p, p]
        for q in range(d):
            a[p, q] /= pivot
            b[p, q] /= pivot
        for k in range(d):
            times = a[k, p]
            if k != p and times != 0.0:
                for q in range(d):
                    a[k, q] -= times * a[p, q]
                    b[k, q] -= times * b[p, q]
    a[:, :] = b
    return True


@njit(**_PLAIN)
def refresh(task, losses, state):
    """Expand each loss at the new model, or as far towards it as the old quadratic model is accurate enough."""
    n, d = losses.centre.shape
    gradient, hessian, point = np.empty(d), np.empty((d, d)), np.empty(d)
    for i in range(n):
        slope, second, square = 0.0, 0.0, 0.0
        for k in range(d):
            step = state.x[k, i] - losses.centre[i, k]
            slope += losses.gradients[i, k] * step
            square += step * step
            for q in range(d):
                second += 0.5 * step * losses.hessians[i, k, q] * (state.x[q, i] - losses.centre[i, q])
        second += 0.5 * losses.shift[i] * square
        size, before = 1.0, losses.values[i]
        for _ in range(30):
            for k in range(d):
                point[k] = losses.centre[i, k] + size * (state.x[k, i] - losses.centre[i, k])
            now = value(task.data, i, point)
            if now <= before + size * slope + 1.5 * size * size * second + 1e-12 * abs(before):
                break
            size *= 0.5
        # If a model predicted too large a decrease, its curvature is increased; a Lipschitz bound is always enough.
        if size < 1.0:
            stiffer = max(100.0 * max(0.1 * losses.shift[i], losses.floor), 0.03 * losses.curvature)
            losses.shift[i] = min(stiffer, losses.stiffest[i])
        else:
            losses.shift[i] = max(0.1 * losses.shift[i], losses.floor)
        losses.centre[i] = point
    expand(task.data, losses.centre, losses.values, losses.gradients, losses.hessians)


@njit(**_PLAIN)
def bound_error(losses, flow, shift):
    """An estimate of the error of the dual bound: 1/2 (grad f + B'y)' H^-1 (grad f + B'y)."""
    residual = losses.gradients + flow
    step = np.empty_like(residual)
    if not newton_point(losses, shift * losses.curvature, residual, step):
        return np.inf
    return 0.5 * (residual * step).sum()


@njit(**_PLAIN)
def duals_of(state, sigma):
    """(n_edges, d) the feasible duals of the splitting."""
    d, edges = state.s.shape
    out = np.empty((edges, d))
    for e in range(edges):
        for k in range(d):
            out[e, k] = sigma * state.shrink[e] * state.s[k, e]
    return out


@njit(**_PLAIN)
def attempt(task, losses, state, sigma, labels, enough):
    """Merge and certify, and polish if that is not enough, or cheaper: models, duals and their gap."""
    models = np.ascontiguousarray(state.x.T)
    merged = means(models, labels, labels.max() + 1)[0][labels]
    quadratic = task.data.kind == POINTS or task.data.kind == _SQUARED
    cheap = few(labels, models.shape[1], _SMALL)
    if not quadratic and cheap:
        point, duals, gap = prove(task, state.s, state.shrink, sigma, labels, merged, enough)
        if gap <= task.tol:
            return point, duals, gap, True
    duals = duals_of(state, sigma)
    gap = gap_of(task, merged, duals)[0]
    if cheap and (quadratic or gap <= task.tol):
        point, flow, other = prove(task, state.s, state.shrink, sigma, labels, merged, enough)
        if other <= task.tol or not gap <= task.tol:
            return point, flow, other, True
    return merged, duals, gap, False


@njit(**_PLAIN)
def turned(primal, moved, error, target, exact):
    """1 to increase sigma, -1 to decrease it, else 0."""
    if exact:
        return 1 if error <= target else 0
    ratio = np.sqrt(primal / (moved + 1e-300))
    return 1 if ratio > _TOO_LOW else -1 if ratio < _TOO_HIGH else 0


@njit(**_PLAIN)
def run(task, models, duals, warm, cold, sigma, most):
    """Solve; returns models, duals, their gap, the passes made and the last sigma. The gap is inf without a result.

    `models` and `duals` (none: no rows) are the start, `warm` its groups (none: empty) and `cold` says that there is
    none; sigma 0 stands for the usual one, and `most` is the largest number of passes.
    """
    (n, d), exact = models.shape, task.data.kind == POINTS
    losses = begin(task, models, cold)
    if not losses.curvature > 0.0:
        return models, duals, np.inf, 0, 0.0
    first = sigma = sigma if sigma > 0.0 else _STIFFNESS * losses.curvature / (n - 1)
    state = split(task, losses.centre, duals, sigma)
    share = 0.02 * task.tol * losses.curvature
    if warm.size and small(warm, d):
        point, flow, gap = prove(task, state.s, state.shrink, sigma, warm, losses.centre,
                                 share * np.abs(losses.values).sum())
        if gap <= task.tol:
            return point, flow, gap, 0, sigma
    passes, next_try, next_change, change, last, changes = 0, 0, 20, _TURN, 0, 0
    before, tried, batch = np.empty(0, np.int64), np.empty(0, np.int64), 20 if exact or task.data.kind == 2 else 10
    while passes < most and prepare(losses, state, sigma):
        steps = min(batch, most - passes)
        primal, moved = complete_run(state.linear, state.inverses, state.total, sigma, state.x, state.s, state.shrink,
                                     np.full(1, task.radius / sigma), _RELAX, state.forces, steps)
        passes += steps
        if not np.isfinite(state.x.sum()):
            break
        flow, labels = complete_duals(state.s, state.shrink, sigma, n)
        refresh(task, losses, state)
        scale = np.abs(losses.values).sum() + 1e-300
        error = bound_error(losses, flow, 1e-6 if batch == 20 else 1e-3) / scale
        settled = np.array_equal(labels, before) and not np.array_equal(labels, tried)
        before = labels
        close = error <= 3.0 * task.tol and passes >= next_try
        if close or (settled and error <= 1e-3 and error > 3.0 * task.tol and few(labels, d, _SMALL)):
            if close:
                point, found, gap, _ = attempt(task, losses, state, sigma, labels, share * scale)
                next_try = int(1.15 * passes)
            else:
                tried = labels
                point, found, gap = prove(task, state.s, state.shrink, sigma, labels,
                                          np.ascontiguousarray(state.x.T), share * scale)
            if gap <= task.tol:
                return point, found, gap, passes, sigma
        turn = turned(primal, moved, error, 0.1 * task.tol, exact)
        if turn != 0 and change > 1.3 and passes >= next_change:
            change = np.sqrt(change) if last != 0 and turn != last else change
            last, changes, old = turn, changes + 1, sigma
            sigma = min(max(sigma * change**turn, first / 1e5), first * 1e5)
            retune(state.s, state.shrink, np.full(1, task.radius / old), np.full(1, task.radius / sigma), old / sigma)
            complete_pass(state.x, state.s, state.shrink, np.full(1, task.radius / sigma), 0.0, state.forces, False)
            next_change = passes + 20 * (1 + changes // 2)
    return models, duals, np.inf, passes, sigma
