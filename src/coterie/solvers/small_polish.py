# mypy: disable-error-code="no-untyped-def"
"""Numba code for given groups on all pairs with one weight: their exact optimum, duals for it, and the gap.

The steps are those of `coterie.solvers.polish` and of `_prove` in `coterie.solvers.fast`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from coterie._typing import Array
from coterie.losses.flat import Flat
from coterie.losses.kernels import conjugate, expand, scratch, substitute, value
from coterie.solvers.kernels import complete_proof, join, labels_from

_PLAIN: dict[str, Any] = {"cache": True, "error_model": "numpy"}
_DIGITS, _NEWTON, _HALVINGS = 1e-15, 50, 25  # relative decrease at which a polish ends; its steps, and halvings of one
_TINY, _SMALL, _EXACT = 20, 300, 100  # groups and unknowns of a cheap polish, see `fast`


class Task(NamedTuple):
    """What is solved."""

    data: Flat  # the losses
    sizes: Array  # (n,) of the losses, as in certificates
    radius: float  # lam * weight
    floor: float  # smallest objective that a gap is relative to
    tol: float  # gap to reach


@njit(**_PLAIN)
def gap_of(task, models, duals):
    """The relative gap of models and duals, the rounding error in it and the objective, as certificates have them."""
    n, d = models.shape
    slopes, about = np.zeros((n, d)), np.zeros(d)
    objective, bound, error, e = 0.0, 0.0, 0.0, 0
    for i in range(n):
        for k in range(d):
            about[k] += models[i, k] / n
        for j in range(i + 1, n):
            square = 0.0
            for k in range(d):
                slopes[i, k] -= duals[e, k]
                slopes[j, k] += duals[e, k]
                square += (models[i, k] - models[j, k]) ** 2
            objective += task.radius * np.sqrt(square)
            e += 1
    best, step, trial, work = np.empty(d), np.empty(d), np.empty(d), scratch(d)
    for i in range(n):
        objective += value(task.data, i, models[i])
        least, rounding = conjugate(task.data, i, models[i], slopes[i], about, task.sizes[i], best, step, trial, work)
        bound -= least
        error += 2.0 * rounding
    scale = max(abs(objective), abs(bound), task.floor, 1e-300)
    if not np.isfinite(bound):
        return np.inf, error / scale, objective
    return (max(objective - bound, 0.0) + error) / scale, error / scale, objective


@njit(**_PLAIN)
def reduced_value(task, labels, counts, w):
    """V(w) of `polish`."""
    total, k = 0.0, w.shape[0]
    for i in range(labels.size):
        total += value(task.data, i, w[labels[i]])
    for a in range(k):
        for b in range(a):
            square = 0.0
            for q in range(w.shape[1]):
                square += (w[a, q] - w[b, q]) ** 2
            total += task.radius * counts[a] * counts[b] * np.sqrt(square)
    return total


@njit(**_PLAIN)
def reduced_system(task, labels, counts, w, values, gradients, hessians, gradient, matrix):
    """The gradient (k d,) and Hessian (k d, k d) of V at w; returns V."""
    (k, d), total = w.shape, 0.0
    expand(task.data, w[labels], values, gradients, hessians)
    gradient[:] = 0.0
    matrix[:, :] = 0.0
    for i in range(labels.size):
        at = d * labels[i]
        total += values[i]
        for p in range(d):
            gradient[at + p] += gradients[i, p]
            for q in range(d):
                matrix[at + p, at + q] += hessians[i, p, q]
    for a in range(k):
        for b in range(a):
            square = 0.0
            for p in range(d):
                square += (w[a, p] - w[b, p]) ** 2
            length = np.sqrt(square)
            if length == 0.0:
                continue
            pull = task.radius * counts[a] * counts[b]
            total += pull * length
            for p in range(d):
                up = (w[a, p] - w[b, p]) / length
                gradient[d * a + p] += pull * up
                gradient[d * b + p] -= pull * up
                for q in range(d):
                    stiff = pull / length * ((1.0 if p == q else 0.0) - up * (w[a, q] - w[b, q]) / length)
                    matrix[d * a + p, d * a + q] += stiff
                    matrix[d * b + p, d * b + q] += stiff
                    matrix[d * a + p, d * b + q] -= stiff
    return total


@njit(cache=True, fastmath=True, error_model="numpy")
def factor_large(a, n):
    """As `factor`, with sums that may be reordered."""
    for i in range(n):
        for j in range(i + 1):
            row, other, total = a[i, :j], a[j, :j], 0.0
            for k in range(j):
                total += row[k] * other[k]
            total = a[i, j] - total
            if i > j:
                a[i, j] = total / a[j, j]
            elif total > 0.0:
                a[i, i] = np.sqrt(total)
            else:
                return False
    return True


@njit(**_PLAIN)
def means(models, labels, k):
    """(k, d) the mean model of each group, and (k,) its number of users."""
    d = models.shape[1]
    w, counts = np.zeros((k, d)), np.zeros(k)
    for i in range(labels.size):
        counts[labels[i]] += 1.0
        for q in range(d):
            w[labels[i], q] += models[i, q]
    for a in range(k):
        for q in range(d):
            w[a, q] /= counts[a]
    return w, counts


@njit(**_PLAIN)
def joined_close(w, ahead, distance, crossing):
    """The labels of groups after merging: those that `ahead` moves past each other, or those within `distance`."""
    parent, (k, d) = np.arange(w.shape[0]), w.shape
    for a in range(k):
        for b in range(a):
            along, square = 0.0, 0.0
            for q in range(d):
                gap = w[a, q] - w[b, q]
                square += gap * gap
                along += gap * (gap + ahead[a, q] - ahead[b, q])
            if (along <= 0.0) if crossing else (np.sqrt(square) <= distance):
                join(parent, b, a)
    return labels_from(parent)


@njit(**_PLAIN)
def polish(task, labels, models, tol):
    """Minimise V by Newton's method; returns the labels, which merges may have changed, and the group models."""
    n, d = models.shape
    k = labels.max() + 1
    w, counts = means(models, labels, k)
    values, gradients, hessians = np.empty(n), np.empty((n, d)), np.empty((n, d, d))
    gradient, matrix, step = np.empty(k * d), np.empty((k * d, k * d)), np.empty((k, d))
    now = reduced_system(task, labels, counts, w, values, gradients, hessians, gradient, matrix)
    reach = 10.0 * (1.0 + np.abs(w).max())
    for _ in range(_NEWTON):
        curvature = 0.0
        for p in range(k * d):
            curvature += matrix[p, p] / (k * d)
        shift = 1e-14 * curvature + 1e-8 * np.abs(gradient).max() / reach + 1e-300
        for p in range(k * d):
            matrix[p, p] += shift
        if not factor_large(matrix, k * d):
            break
        right = -gradient
        substitute(matrix, k * d, right)
        step[:, :] = right.reshape((k, d))
        decrement, longest = 0.0, np.abs(right).max()
        for p in range(k * d):
            decrement -= gradient[p] * right[p]
        if not decrement > tol * abs(now):
            break
        size = start = min(1.0, reach / max(longest, 1e-300))
        taken = False
        for _ in range(_HALVINGS):
            if reduced_value(task, labels, counts, w + size * step) <= now - 1e-4 * size * decrement + 1e-15 * abs(now):
                taken = True
                break
            size *= 0.5
        if taken and size == start and start < 1.0:
            reach *= 4.0
        merged = joined_close(w, step, 0.0, True) if size < 1.0 or not taken else np.arange(k)
        if merged.max() + 1 < k:
            users, labels, k = w[labels], merged[labels], merged.max() + 1
            w, counts = means(users, labels, k)
            gradient, matrix, step = np.empty(k * d), np.empty((k * d, k * d)), np.empty((k, d))
        elif not taken:
            break
        else:
            w = w + size * step
        now = reduced_system(task, labels, counts, w, values, gradients, hessians, gradient, matrix)
    return labels, w


@njit(**_PLAIN)
def defend(task, s, shrink, sigma, labels, w, enough):
    """Models and duals for the optimum of given groups, and their gap and its rounding error."""
    n, d = labels.size, w.shape[1]
    models, counts, radii = w[labels], means(w[labels], labels, w.shape[0])[1], np.full(1, task.radius)
    values, gradients, hessians = np.empty(n), np.empty((n, d)), np.empty((n, d, d))
    expand(task.data, models, values, gradients, hessians)
    rounds = int(min(max(2e6 / shrink.size, 4.0), 60.0))
    duals = complete_proof(s, shrink, sigma, radii, labels, counts, models, gradients, rounds, enough)
    gap, error, _ = gap_of(task, models, duals)
    return models, duals, gap, error


@njit(**_PLAIN)
def prove(task, s, shrink, sigma, labels, models, enough):
    """The exact optimum for these groups and duals for it, and their gap; groups very close together are merged."""
    labels, w = polish(task, labels, models, _DIGITS)
    best, duals, gap, _ = defend(task, s, shrink, sigma, labels, w, enough)
    if gap > task.tol:
        return best, duals, gap
    for distance in (1e-2, 1e-4, 1e-6):
        close = joined_close(w, w, distance * np.abs(w).max(), False)
        if close.max() + 1 == w.shape[0]:
            break
        fewer, at = polish(task, close[labels], w[labels], _DIGITS)
        other, flow, level, error = defend(task, s, shrink, sigma, fewer, at, enough)
        if level < gap + 4.0 * error:
            return other, flow, level
    return best, duals, gap


@njit(**_PLAIN)
def few(labels, d, most):
    """Whether there are so few groups that solving for them is cheaper than passes over the edges."""
    k = labels.max() + 1
    return k * d <= most and (k <= labels.size // 3 or k <= _TINY)


@njit(**_PLAIN)
def small(labels, d):
    """Whether a polish is cheap."""
    return few(labels, d, _SMALL) or (labels.max() + 1) * d <= _EXACT
