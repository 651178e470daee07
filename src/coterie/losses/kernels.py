# mypy: disable-error-code="no-untyped-def"
"""Numba loops over users' rows: losses with their derivatives, and what a certificate needs of each
user.

The formulas are those of `coterie.losses.base`, `affine` and `points`, user by user, on data laid
out by `coterie.losses.linear`. What a user computes depends on its own rows alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from coterie.base.compiling import inner, njit
from coterie.losses.base import REACH, TIGHT, TINY
from coterie.losses.linear import KINDS, POINTS

_EXACT: dict[str, Any] = {"error_model": "numpy"}  # no fastmath: rounding errors are bounded here
_EPSILON = float(np.finfo(float).eps)
_STEPS, _HALVINGS = 40, 30  # of a user's own Newton method, and of one of its steps
# Decrement, relative to the value, at which it ends, and at which it counts as ended.
_SETTLED, _ACCEPT = 1e-15, 1e-9
_LOOSE = 1e-11  # slack of a bound, relative to it, above which another method is asked


def _row(loss: Any) -> Any:
    """phi(data, t, y) of one class: the methods that NumPy calls with arrays, on numbers."""
    value, slope, curvature = (inner(**_EXACT)(method)
                               for method in (loss.value, loss.slope, loss.curvature))

    @inner(**_EXACT)
    def phi(data, t, y):
        return value(data, t, y), slope(data, t, y), curvature(data, t, y)

    return phi


def _choose(kinds: list[Any]) -> Any:
    """phi(data, t, y) of the class that `data.kind` numbers."""
    (loss, kind), *others = kinds
    first, rest = _row(loss), _choose(others) if others else None
    if rest is None:
        return first

    @inner(**_EXACT)
    def phi(data, t, y):
        return first(data, t, y) if data.kind == kind else rest(data, t, y)

    return phi


#: The loss of a row with margin t and target y, its slope and its curvature.
phi = _choose([(loss, kind) for loss, kind in KINDS.items() if kind != POINTS])


@inner(**_EXACT)
def value(data, i, x):
    """f_i(x)."""
    d, total = x.size, 0.0
    for j in range(data.starts[i], data.starts[i + 1]):
        if data.kind == POINTS:
            square = 0.0
            for k in range(d):
                square += (x[k] - data.rows[j, k]) ** 2
            total += 0.5 * data.weights[j] * square
        else:
            t = 0.0
            for k in range(d):
                t += data.rows[j, k] * x[k]
            total += data.weights[j] * phi(data, t, data.targets[j])[0]
    for k in range(d):
        total += 0.5 * data.ridges[k] * x[k] * x[k]
    return total


@inner(**_EXACT)
def derive(data, i, x, g, h):
    """f_i(x); its gradient and Hessian go into g (dim,) and h (dim, dim)."""
    d, total = x.size, 0.0
    points = data.kind == POINTS
    for k in range(d):
        g[k] = data.ridges[k] * x[k]
        total += 0.5 * data.ridges[k] * x[k] * x[k]
        for q in range(d):
            h[k, q] = 0.0
        h[k, k] = 1.0 if points else data.ridges[k]
    for j in range(data.starts[i], data.starts[i + 1]):
        weight = data.weights[j]
        if points:
            for k in range(d):
                gap = x[k] - data.rows[j, k]
                total += 0.5 * weight * gap * gap
                g[k] += weight * gap
            continue
        t = 0.0
        for k in range(d):
            t += data.rows[j, k] * x[k]
        f, slope, curvature = phi(data, t, data.targets[j])
        total += weight * f
        slope, curvature = weight * slope, weight * curvature
        for k in range(d):
            a = data.rows[j, k]
            g[k] += slope * a
            if curvature != 0.0:
                for q in range(k + 1):
                    h[k, q] += curvature * a * data.rows[j, q]
    for k in range(d):
        for q in range(k):
            h[q, k] = h[k, q]
    return total


@njit(cache=True, **_EXACT)
def expand(data, models, values, gradients, hessians):
    """Values (n,), gradients (n, dim) and Hessians (n, dim, dim) of all users at their models."""
    for i in range(models.shape[0]):
        values[i] = derive(data, i, models[i], gradients[i], hessians[i])


@inner(**_EXACT)
def factor(a, n):
    """a = L L' for the leading n x n part of a, L in its lower triangle; whether a is positive
    definite.
    """
    for i in range(n):
        for j in range(i + 1):
            total = a[i, j]
            for k in range(j):
                total -= a[i, k] * a[j, k]
            if i > j:
                a[i, j] = total / a[j, j]
            elif total > 0.0:
                a[i, i] = np.sqrt(total)
            else:
                return False
    return True


@inner(**_EXACT)
def substitute(a, n, b):
    """b <- (L L')^-1 b for the factor of `factor`."""
    for i in range(n):
        for k in range(i):
            b[i] -= a[i, k] * b[k]
        b[i] /= a[i, i]
    for i in range(n - 1, -1, -1):
        b[i] /= a[i, i]
        for k in range(i):
            b[k] -= a[i, k] * b[i]


@inner(**_EXACT)
def _newton_step(h, r, shift, scaled, units, step):
    """step <- (H + shift diag H)^-1 r, and r' step; -1 where H is not positive definite in rounded
    numbers.
    """
    d, largest = r.size, 0.0
    for k in range(d):
        largest = max(largest, h[k, k])
    for k in range(d):
        units[k] = np.sqrt(max(h[k, k], 1e-20 * largest) + 1e-300)
    for k in range(d):
        for q in range(d):
            scaled[k, q] = h[k, q] / (units[k] * units[q])
        scaled[k, k] += shift
        step[k] = r[k] / units[k]
    if not factor(scaled, d):
        return -1.0
    substitute(scaled, d, step)
    decrement = 0.0
    for k in range(d):
        step[k] /= units[k]
        decrement += r[k] * step[k]
    return decrement


@inner(**_EXACT)
def _eigen(a, v):
    """The eigenvalues of a symmetric matrix on its diagonal, the eigenvectors in the columns of v
    (Jacobi 1846).
    """
    d = a.shape[0]
    for k in range(d):
        for q in range(d):
            v[k, q] = 1.0 if k == q else 0.0
    for _ in range(30):
        off, on = 0.0, 0.0
        for p in range(d):
            on += a[p, p] * a[p, p]
            for q in range(p):
                off += a[p, q] * a[p, q]
        if off <= 1e-32 * on:
            break
        for p in range(d - 1):
            for q in range(p + 1, d):
                if a[p, q] == 0.0:
                    continue
                theta = (a[q, q] - a[p, p]) / (2.0 * a[p, q])
                t = (1.0 if theta >= 0.0 else -1.0) / (abs(theta) + np.sqrt(theta * theta + 1.0))
                c = 1.0 / np.sqrt(t * t + 1.0)
                s = t * c
                for k in range(d):
                    a[k, p], a[k, q] = c * a[k, p] - s * a[k, q], s * a[k, p] + c * a[k, q]
                for k in range(d):
                    a[p, k], a[q, k] = c * a[p, k] - s * a[q, k], s * a[p, k] + c * a[q, k]
                for k in range(d):
                    v[k, p], v[k, q] = c * v[k, p] - s * v[k, q], s * v[k, p] + c * v[k, q]


@inner(**_EXACT)
def _possible_gain(h, residuals, noise, reach, scaled, axes, units):
    """See `coterie.losses.newton.possible_gains`."""
    d, largest, gain = residuals.size, 1.0, 0.0
    for k in range(d):
        units[k] = np.sqrt(max(h[k, k], 1e-300))
    for k in range(d):
        for q in range(d):
            scaled[k, q] = h[k, q] / (units[k] * units[q])
            if not np.isfinite(scaled[k, q]):
                return np.inf
    _eigen(scaled, axes)
    for k in range(d):
        largest = max(largest, scaled[k, k])
    for k in range(d):
        along, square = 0.0, 0.0
        for q in range(d):
            axis = axes[q, k] / units[q]
            along += residuals[q] * abs(axis)
            square += axis * axis
        sure = scaled[k, k] - noise * largest
        step = reach / np.sqrt(square)
        if sure > 0.0:
            step = min(step, along / sure)
        if along > 0.0:
            gain += along * step
    return gain


@inner(**_EXACT)
def _magnitudes(data, i, x, slopes, levels):
    """The sums of absolute values of `Magnitudes`: of the value; of slopes and gradients into the
    arrays.
    """
    d, total = x.size, 0.0
    for k in range(d):
        slopes[k] = data.ridges[k] * abs(x[k])
        levels[k] = 0.0
        total += 0.5 * data.ridges[k] * x[k] * x[k]
    for j in range(data.starts[i], data.starts[i + 1]):
        weight, t, terms = data.weights[j], 0.0, 0.0
        if data.kind == POINTS:
            for k in range(d):
                gap = abs(x[k] - data.rows[j, k])
                slopes[k] += weight * gap
                levels[k] += weight * (abs(x[k]) + abs(data.rows[j, k]))
                total += 0.5 * weight * gap * gap
            continue
        for k in range(d):
            t += data.rows[j, k] * x[k]
            terms += abs(data.rows[j, k] * x[k])
        f, slope, curvature = phi(data, t, data.targets[j])
        terms += abs(t)
        most = data.steepest if data.steepest > 0.0 else curvature
        total += weight * (abs(f) + 16.0 * 8.0 * _EPSILON * most * terms * terms)
        for k in range(d):
            a = abs(data.rows[j, k])
            slopes[k] += weight * abs(slope) * a
            levels[k] += weight * curvature * terms * a
    for k in range(d):
        levels[k] += slopes[k]
    return total


@inner(**_EXACT)
def _sums(data, i, d):
    """The error of a sum over a user's rows, relative to the sum of its terms' absolute values."""
    return _EPSILON * max(8.0, 0.5 * (data.starts[i + 1] - data.starts[i] + d) + 4.0)


@inner(**_EXACT)
def _bound_at(data, i, z, f, terms, u, centre, size, work):
    """A bound on f_i*(u) - <u, centre> by the point z, its rounding and its slack; see
    `Loss._dual_bound`.

    `work` holds the derivatives and magnitudes at z; f is the value there, and `terms` its
    magnitude.
    """
    g, slopes, levels, residual, units, h, scaled, axes = work
    d, sums = z.size, _sums(data, i, z.size)
    bound, slack, rounding, length, free = -f, 0.0, 0.0, 0.0, False
    for k in range(d):
        level, away = abs(u[k]) + levels[k], abs(z[k] - centre[k])
        gap = abs(u[k] - g[k])
        exact = gap <= TINY * level
        gap += sums * level  # it is rounded itself
        residual[k] = 0.0
        if data.curved[k] > 0.0:
            slack += gap * gap / (2.0 * data.curved[k])
        elif exact:
            slack += gap * away
            residual[k], free = gap, True
        else:
            return np.inf, 0.0, np.inf
        bound += u[k] * (z[k] - centre[k])
        terms += slopes[k] * abs(z[k]) + abs(u[k]) * away
        length += z[k] * z[k]
    bound, rounding = bound + slack, sums * terms
    if free:  # what these residuals may still gain, where hardly anything holds the model
        gain = _possible_gain(h, residual, sums * d, REACH * (1.0 + np.sqrt(length)), scaled, axes,
                              units)
        rounding += gain if gain <= 1e-7 * abs(bound) + 1e-9 * size else np.inf
    if not (np.isfinite(bound) and np.isfinite(rounding)):
        return np.inf, 0.0, np.inf
    return bound, rounding, slack


@inner(**_EXACT)
def _settle(data, i, u, z, step, trial, work):
    """Damped Newton from z on f_i(z) - <u, z>, in place; f_i there, and whether it is a minimum.

    `work` holds the derivatives at z, before and after.
    """
    g, _, _, r, units, h, scaled, _ = work
    d, last = z.size, False
    for _ in range(_STEPS):
        f = derive(data, i, z, g, h)
        now, scale = f, 1e-300
        for k in range(d):
            r[k] = u[k] - g[k]
            now -= u[k] * z[k]
            scale += 1e-9 * h[k, k] * z[k] * z[k]
        decrement = _newton_step(h, r, 1e-13, scaled, units, step)
        if not decrement >= 0.0:
            return f, False
        slope = 0.0
        for k in range(d):
            slope += r[k] * z[k]
        scale += abs(now) + abs(slope)
        if last:
            return f, decrement <= _ACCEPT * scale
        # One more full step halves the digits that the gradient lacks.
        last = decrement <= _SETTLED * scale
        size = 1.0
        for _ in range(_HALVINGS):
            at = 0.0
            for k in range(d):
                trial[k] = z[k] + size * step[k]
                at -= u[k] * trial[k]
            if decrement <= 1e-12 * scale:
                break
            if at + value(data, i, trial) <= now - 1e-4 * size * decrement + 4e-16 * scale:
                break
            size *= 0.5
        else:
            return f, False
        for k in range(d):
            z[k] = trial[k]
    return np.inf, False


@inner(**_EXACT)
def _conjugate(data, i, x, f, terms, u, centre, size, best, step, trial, work):
    """A bound on f_i*(u) - <u, centre> from above, started at x, and its rounding; see
    `Loss.dual_bounds`.

    The bound is inf where another method may find one. `f`, `terms` and `work` are as in
    `_bound_at`; `best`, `step` and `trial` (dim,) are scratch memory.
    """
    g, slopes, levels, r, units, h, scaled, _ = work
    bound, rounding, slack = _bound_at(data, i, x, f, terms, u, centre, size, work)
    if np.isfinite(bound) and slack <= TIGHT * abs(bound):
        return bound, rounding
    for k in range(x.size):
        best[k] = x[k]
    f, settled = _settle(data, i, u, best, step, trial, work)
    for _ in range(4 if settled else 0):
        terms = _magnitudes(data, i, best, slopes, levels)
        other, error, gained = _bound_at(data, i, best, f, terms, u, centre, size, work)
        if other + error < bound + rounding:
            bound, rounding, slack = other, error, gained
        if np.isfinite(bound):
            break
        # Infinite only since a residual is not quite at rounding level: a Newton step more may take
        # it there.
        for k in range(best.size):
            r[k] = u[k] - g[k]
        if _newton_step(h, r, 1e-15, scaled, units, step) < 0.0:
            break
        for k in range(best.size):
            best[k] += step[k]
        f = derive(data, i, best, g, h)
    return (bound, rounding) if slack <= _LOOSE * (abs(bound) + size) and np.isfinite(bound) \
        else (np.inf, 0.0)


@inner(**_EXACT)
def _point_conjugate(data, i, u, centre, mean):
    """With c the mean of the rows: f(x) = f(c) + ||x - c||^2 / 2, so f*(u) = <u, c> + ||u||^2 / 2 -
    f(c).
    """
    for k in range(u.size):
        mean[k] = 0.0
        for j in range(data.starts[i], data.starts[i + 1]):
            mean[k] += data.weights[j] * data.rows[j, k]
    least = value(data, i, mean)
    bound, terms = -least, abs(least)
    for k in range(u.size):
        bound += u[k] * (mean[k] - centre[k] + 0.5 * u[k])
        terms += abs(u[k]) * (abs(mean[k]) + abs(centre[k]) + abs(u[k]))
    return bound, _sums(data, i, u.size) * terms


@njit(cache=True, **_EXACT)
def answers(data, models, slopes, about, sizes):
    """(5, n) for each user the numbers of `coterie.problem.certificates.Answers`; conjugates inf as
    said at `_conjugate`.
    """
    n, d = models.shape
    out = np.empty((5, n))
    best, step, trial, zero = np.empty(d), np.empty(d), np.empty(d), np.zeros(d)
    work = (np.empty(d), np.empty(d), np.empty(d), np.empty(d), np.empty(d), np.empty((d, d)),
            np.empty((d, d)), np.empty((d, d)))
    for i in range(n):
        x, u = models[i], slopes[i]
        f, terms = derive(data, i, x, work[0], work[5]), _magnitudes(data, i, x, work[1], work[2])
        square, rounding = 0.0, terms
        for k in range(d):
            square += (work[0][k] - u[k]) ** 2
            rounding += work[1][k] * abs(x[k])
        out[0, i], out[2, i] = f, np.sqrt(square)
        out[3, i] = sizes[i] + min(abs(value(data, i, about[i])), abs(value(data, i, zero)))
        if data.kind == POINTS:
            out[1, i], error = _point_conjugate(data, i, u, about[i], best)
        else:
            out[1, i], error = _conjugate(data, i, x, f, terms, u, about[i], sizes[i], best, step,
                                          trial, work)
        out[4, i] = _sums(data, i, d) * rounding + error
    return out


@njit(cache=True, **_EXACT)
def settle(data, points):
    """Each user's minimum of f_i, from `points`, in place; (n,) whether it was found."""
    n, d = points.shape
    found, u, step, trial = np.zeros(n, np.bool_), np.zeros(d), np.empty(d), np.empty(d)
    work = (np.empty(d), np.empty(d), np.empty(d), np.empty(d), np.empty(d), np.empty((d, d)),
            np.empty((d, d)), np.empty((d, d)))
    for i in range(n):
        found[i] = _settle(data, i, u, points[i], step, trial, work)[1]
    return found
