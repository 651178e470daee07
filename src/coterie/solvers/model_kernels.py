# mypy: disable-error-code="no-untyped-def"
"""Numba loops over few users: quadratic models of their losses, and the system of a splitting on
all pairs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from coterie.base.compiling import inner, njit
from coterie.losses.kernels import derive, factor, substitute, value

_PLAIN: dict[str, Any] = {"cache": True, "error_model": "numpy"}


@njit(**_PLAIN)
def refreshed(data, models, centre, values, gradients, hessians, shift, floor, curvature):
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
    bound = 0.0
    for k in range(d):
        bound = max(bound, data.ridges[k])
    for j in range(data.starts[i], data.starts[i + 1]):
        for k in range(d):
            bound += data.weights[j] * data.steepest * data.rows[j, k] * data.rows[j, k]
    return bound


@njit(**_PLAIN)
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
        if not factor(matrix, d):
            return np.nan
        substitute(matrix, d, right)
        for k in range(d):
            total += 0.5 * right[k] * (gradients[i, k] - slopes[i, k])
    return total


@njit(**_PLAIN)
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
