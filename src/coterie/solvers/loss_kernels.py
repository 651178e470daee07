# mypy: disable-error-code="no-untyped-def"
"""Numba loops that evaluate losses, for few users: their quadratic models, the system of a
splitting on all pairs, and `polish` on all pairs with one weight.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from coterie.base.compiling import inner, njit
from coterie.losses.kernels import derive, factor, substitute, value
from coterie.solvers.group_kernels import join, number, separate

_PLAIN: dict[str, Any] = {"error_model": "numpy"}
_HALVINGS = 25  # of one step


@njit(cache=True, **_PLAIN)
def refresh(data, models, centre, values, gradients, hessians, shift, floor, curvature):
    """`Expansion.refresh`: expands each loss at its new model, or part of the way; the arrays are
    changed in place.
    """
    n, d = centre.shape
    point, step = np.empty(d), np.empty(d)
    for i in range(n):
        slope, second, square = 0.0, 0.0, 0.0
        for k in range(d):
            step[k] = models[i, k] - centre[i, k]
            slope += gradients[i, k] * step[k]
            square += step[k] * step[k]
        for k in range(d):
            for q in range(d):
                second += 0.5 * step[k] * hessians[i, k, q] * step[q]
        second += 0.5 * shift[i] * square
        size, before = 1.0, values[i]
        # The quadratic model may be wrong far away: go only as far as the loss falls as it says.
        for _ in range(30):
            for k in range(d):
                point[k] = centre[i, k] + size * step[k]
            if value(data, i, point) <= before + size * slope + 1.5 * size * size * second + 1e-12 \
                * abs(before):
                break
            size *= 0.5
        shift[i] = max(0.1 * shift[i], floor)
        if size < 1.0:  # the model predicted too large a decrease
            shift[i] = min(max(100.0 * shift[i], 0.03 * curvature), _stiffest(data, i, d))
        for k in range(d):
            centre[i, k] = point[k]
        values[i] = derive(data, i, point, gradients[i], hessians[i])


@inner(error_model="numpy")
def _stiffest(data, i, d):
    """An upper bound on the Hessian of a user; inf if there is none."""
    if data.steepest == 0.0:
        return np.inf
    # The trace of a positive semidefinite matrix bounds its largest eigenvalue.
    bound = 0.0
    for k in range(d):
        bound = max(bound, data.ridges[k])
    for j in range(data.starts[i], data.starts[i + 1]):
        for k in range(d):
            bound += data.weights[j] * data.steepest * data.rows[j, k] * data.rows[j, k]
    return bound


@njit(cache=True, **_PLAIN)
def bound_error(hessians, gradients, slopes, shift):
    """1/2 sum_i r_i' (H_i + shift I)^-1 r_i of r = gradients - slopes; nan if one is not positive
    definite.
    """
    n, d = gradients.shape
    matrix, right, total = np.empty((d, d)), np.empty(d), 0.0
    for i in range(n):
        for k in range(d):
            for q in range(d):
                matrix[k, q] = hessians[i, k, q]
            matrix[k, k] += shift
            right[k] = gradients[i, k] - slopes[i, k]
        # Where the loss curves less than was assumed, nothing is proved.
        if not factor(matrix, d):
            return np.nan
        substitute(matrix, d, right)
        for k in range(d):
            total += 0.5 * right[k] * (gradients[i, k] - slopes[i, k])
    return total


@njit(cache=True, **_PLAIN)
def complete_system(hessians, shift, centre, gradients, sigma, inverses, share, linear):
    """The splitting's system on all pairs: linear (d, n) <- H_i centre_i - gradients_i, H the
    Hessians with `shift`.

    inverses <- (H_i + sigma n)^-1, share <- mean of inverses_i H_i; returns whether all are
    positive definite.
    """
    n, d = hessians.shape[:2]
    matrix, column, own = np.empty((d, d)), np.empty(d), np.empty((d, d))
    for k in range(d):
        for q in range(d):
            share[k, q] = 0.0
    for i in range(n):
        for k in range(d):
            linear[k, i] = -gradients[i, k]
            for q in range(d):
                matrix[k, q] = own[k, q] = hessians[i, k, q] + (shift[i] if q == k else 0.0)
                linear[k, i] += own[k, q] * centre[i, q]
            matrix[k, k] += sigma * n
        # One factor gives all columns of the inverse, which then serve many iterations.
        if not factor(matrix, d):
            return False
        for k in range(d):
            for q in range(d):
                column[q] = 1.0 if q == k else 0.0
            substitute(matrix, d, column)
            for q in range(d):
                inverses[i, q, k] = column[q]
        for k in range(d):
            for q in range(d):
                entry = 0.0
                for p in range(d):
                    entry += inverses[i, k, p] * own[p, q]
                share[k, q] += entry / n
    return True


@inner(**_PLAIN)
def reduced_value(data, radius, labels, counts, w):
    """V(w) of `polish`, for groups of `counts` users."""
    total = 0.0
    for i in range(labels.size):
        total += value(data, i, w[labels[i]])
    for a in range(w.shape[0]):
        for b in range(a):
            square = 0.0
            for q in range(w.shape[1]):
                square += (w[a, q] - w[b, q]) ** 2
            total += radius * counts[a] * counts[b] * np.sqrt(square)
    return total


@inner(**_PLAIN)
def reduced_system(data, radius, labels, counts, w, gradient, matrix, g, h):
    """The gradient (k d,) and the lower triangle of the Hessian (k d, k d) of V at w; returns V. g,
    h are scratch.
    """
    (k, d), total = w.shape, 0.0
    for p in range(k * d):
        gradient[p] = 0.0
        for q in range(k * d):
            matrix[p, q] = 0.0
    for i in range(labels.size):
        at = d * labels[i]
        total += derive(data, i, w[labels[i]], g, h)
        for p in range(d):
            gradient[at + p] += g[p]
            for q in range(d):
                matrix[at + p, at + q] += h[p, q]
    for a in range(k):
        for b in range(a):
            square = 0.0
            for p in range(d):
                square += (w[a, p] - w[b, p]) ** 2
            length, pull = np.sqrt(square), radius * counts[a] * counts[b]
            # The penalty has no derivative here; groups this close are joined before.
            if length == 0.0:
                continue
            total += pull * length
            for p in range(d):
                unit = (w[a, p] - w[b, p]) / length
                gradient[d * a + p] += pull * unit
                gradient[d * b + p] -= pull * unit
                for q in range(d):
                    stiff = pull / length * ((1.0 if p == q else 0.0) - unit * (w[a, q] - w[b, q])
                                             / length)
                    matrix[d * a + p, d * a + q] += stiff
                    matrix[d * b + p, d * b + q] += stiff
                    matrix[d * a + p, d * b + q] -= stiff
    return total


@inner(fastmath=True, error_model="numpy")
def factor_large(a, n):
    """As `losses.kernels.factor`, four columns at a time, with sums in an order that is fast."""
    for s in range(0, n, 4):
        for i in range(s, min(s + 4, n)):
            if not _finish_row(a, i, s):
                return False
        if s + 4 >= n:
            break
        r0, r1, r2, r3 = a[s, :s], a[s + 1, :s], a[s + 2, :s], a[s + 3, :s]
        d0, d1, d2, d3 = 1.0 / a[s, s], 1.0 / a[s + 1, s + 1], 1.0 / a[s + 2, s + 2], \
            1.0 / a[s + 3, s + 3]
        for i in range(s + 4, n):
            row, t0, t1, t2, t3 = a[i, :s], 0.0, 0.0, 0.0, 0.0
            for k in range(s):
                t0 += row[k] * r0[k]
                t1 += row[k] * r1[k]
                t2 += row[k] * r2[k]
                t3 += row[k] * r3[k]
            x0 = (a[i, s] - t0) * d0
            x1 = (a[i, s + 1] - t1 - x0 * a[s + 1, s]) * d1
            x2 = (a[i, s + 2] - t2 - x0 * a[s + 2, s] - x1 * a[s + 2, s + 1]) * d2
            x3 = (a[i, s + 3] - t3 - x0 * a[s + 3, s] - x1 * a[s + 3, s + 1] - x2
                  * a[s + 3, s + 2]) * d3
            a[i, s], a[i, s + 1], a[i, s + 2], a[i, s + 3] = x0, x1, x2, x3
    return True


@inner(fastmath=True, error_model="numpy")
def _finish_row(a, i, start):
    """The entries of row i from column `start` to the diagonal, given the others of the rows above.
    """
    for j in range(start, i + 1):
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


@inner(**_PLAIN)
def newton_step(gradient, matrix, reach, step, right):
    """step (k, d) <- -(H + shift)^-1 gradient, Newton's step; returns its decrement, or -1 if there
    is none.
    """
    n, d = gradient.size, step.shape[1]
    curvature, largest, decrement = 0.0, 0.0, 0.0
    for p in range(n):
        curvature += matrix[p, p] / n
        largest = max(largest, abs(gradient[p]))
    # For flat Hessians (Huber far from the samples) shift and reach limit the step; both vanish at
    # the end.
    shift = 1e-14 * curvature + 1e-8 * largest / reach + 1e-300
    for p in range(n):
        matrix[p, p] += shift
        right[p] = -gradient[p]
    if not factor_large(matrix, n):
        return -1.0
    substitute(matrix, n, right)
    for p in range(n):
        step[p // d, p % d] = right[p]
        decrement -= gradient[p] * right[p]
    return decrement


@inner(**_PLAIN)
def _join_passing(w, step, share, distance, parent):
    """Join the groups that `share` of the step moves past each other, and nearer ones; returns
    whether there are any.

    Groups pass each other where gap' (gap + t move) = 0. The first that do so at t <= 1 are joined
    in any case, also if `share` is less; so are those nearer than `distance`.
    """
    (k, d), first, some = w.shape, 1.0, False
    for turn in range(2):
        for a in range(k):
            for b in range(a):
                along, square = 0.0, 0.0
                for q in range(d):
                    gap = w[a, q] - w[b, q]
                    square += gap * gap
                    along += gap * (gap + step[a, q] - step[b, q])
                at = square / (square - along) if along < 0.0 else 1.0 if along == 0.0 else 2.0
                if turn == 0:
                    first = min(first, at)
                elif at <= max(first, share) or np.sqrt(square) <= distance:
                    join(parent, b, a)
                    some = True
    return some


@njit(cache=True, **_PLAIN)
def join_groups(w, step, share, distance):
    """The labels of groups after `_join_passing`."""
    parent, labels = np.empty(w.shape[0], np.int64), np.empty(w.shape[0], np.int64)
    separate(parent)
    _join_passing(w, step, share, distance, parent)
    number(parent, labels)
    return labels


@njit(cache=True, **_PLAIN)
def newton(data, radius, labels, counts, w, step, tol, most):
    """Minimise V for given groups by Newton's method, w in place.

    Returns 0 at the end; if groups are in each other's way, twice the share of `step` that was
    possible.
    """
    k, d = w.shape
    gradient, right, matrix, trial = np.empty(k * d), np.empty(k * d), np.empty((k * d, k * d)), \
        np.empty((k, d))
    g, h, parent = np.empty(d), np.empty((d, d)), np.empty(k, np.int64)
    separate(parent)
    reach = 1.0
    for a in range(k):
        for q in range(d):
            reach = max(reach, 1.0 + abs(w[a, q]))
    reach *= 10.0
    for _ in range(most):
        now = reduced_system(data, radius, labels, counts, w, gradient, matrix, g, h)
        decrement = newton_step(gradient, matrix, reach, step, right)
        if not decrement > tol * abs(now):
            return 0.0
        longest, taken = 1e-300, False
        for a in range(k):
            for q in range(d):
                longest = max(longest, abs(step[a, q]))
        first = size = min(1.0, reach / longest)
        for _ in range(_HALVINGS):
            for a in range(k):
                for q in range(d):
                    trial[a, q] = w[a, q] + size * step[a, q]
            if reduced_value(data, radius, labels, counts, trial) <= now - 1e-4 * size * decrement \
                + 1e-15 * abs(now):
                taken = True
                break
            size *= 0.5
        # The step was limited but good: trust the model farther next time.
        if taken and size == first < 1.0:
            reach *= 4.0
        # A kink of the penalty between the groups, not the losses, may be in the way.
        if (size < 1.0 or not taken) and _join_passing(w, step, 2.0 * size, -1.0, parent):
            return 2.0 * size
        if not taken:
            return 0.0
        for a in range(k):
            for q in range(d):
                w[a, q] = trial[a, q]
    return 0.0
