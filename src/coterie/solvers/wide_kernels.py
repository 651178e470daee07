# mypy: disable-error-code="no-untyped-def"
"""Numba loops over the edges of wide models: the passes of `coterie.solvers.kernels`, one edge
after the other.

The state s is (n_edges, d), models and forces are (n, d); d is so large that every loop over
coordinates is long.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from coterie.base.compiling import njit
from coterie.solvers.kernels import clear
from coterie.solvers.part_kernels import alone, join, number

_FAST: dict[str, Any] = {"cache": True, "fastmath": True, "error_model": "numpy"}


@njit(**_FAST)
def wide_pass(x, s, shrink, radius, first, second, relax, forces, measure):
    """One pass over a list of edges; see `coterie.solvers.kernels.complete_pass`."""
    n_edges, d = s.shape
    clear(forces)
    before = np.empty(d if measure else 0, s.dtype)
    primal, moved = 0.0, 0.0
    speed = s.dtype.type(relax)
    for e in range(n_edges):
        i, j = first[e], second[e]
        row, xi, xj, fi, fj = s[e], x[i], x[j], forces[i], forces[j]
        keep = s.dtype.type(1.0 - shrink[e])
        square = s.dtype.type(0.0)
        if measure:
            gap2 = s.dtype.type(0.0)
            for k in range(d):
                z = keep * row[k]
                gap = xi[k] - xj[k] - z
                before[k] = z
                gap2 += gap * gap
                v = row[k] + speed * gap
                row[k] = v
                square += v * v
            primal += gap2
        else:
            for k in range(d):
                v = row[k] + speed * (xi[k] - xj[k] - keep * row[k])
                row[k] = v
                square += v * v
        c = min(1.0, radius[min(e, radius.size - 1)] / np.sqrt(square + 1e-300))
        shrink[e] = c
        share = s.dtype.type(1.0 - 2.0 * c)
        for k in range(d):
            push = share * row[k]
            fi[k] += push
            fj[k] -= push
        if measure:
            keep = s.dtype.type(1.0 - c)
            gap2 = s.dtype.type(0.0)
            for k in range(d):
                gap = keep * row[k] - before[k]
                gap2 += gap * gap
            moved += gap2
    return primal, moved


@njit(**_FAST)
def wide_lengths(x, first, second):
    """(n_edges,) ||x_i - x_j||."""
    out = np.empty(first.size)
    for e in range(first.size):
        xi, xj = x[first[e]], x[second[e]]
        square = 0.0
        for k in range(x.shape[1]):
            gap = xi[k] - xj[k]
            square += gap * gap
        out[e] = np.sqrt(square)
    return out


@njit(**_FAST)
def wide_retune(s, radius, new_radius, ratio, shrink):
    """`coterie.solvers.kernels.retune` for this order of numbers."""
    n_edges, d = s.shape
    for e in range(n_edges):
        r, new = radius[min(e, radius.size - 1)], new_radius[min(e, new_radius.size - 1)]
        square = 0.0
        for k in range(d):
            square += s[e, k] * s[e, k]
        length = np.sqrt(square)
        if length > r:
            scale = (length - r + new) / length
            shrink[e] = new / (length - r + new + 1e-300)
        else:
            scale = ratio if length * ratio <= new else new / (length + 1e-300)
            shrink[e] = 1.0
        factor = s.dtype.type(scale)
        for k in range(d):
            s[e, k] *= factor


@njit(**_FAST)
def wide_duals(s, sigma, radii, first, second, n, out, keep):
    """B'y (n, d) and the parts of the users joined by duals inside their balls; fills the duals
    `out` if `keep`.
    """
    n_edges, d = s.shape
    flow, parent, labels = np.zeros((n, d)), np.empty(n, np.int64), np.empty(n, np.int64)
    alone(parent)
    for e in range(n_edges):
        i, j = first[e], second[e]
        square = 0.0
        for k in range(d):
            square += np.float64(s[e, k]) * s[e, k]
        length, radius = sigma * np.sqrt(square), radii[min(e, radii.size - 1)]
        scale = sigma
        if length > radius:
            # Inside the ball, whatever rounding does.
            scale = sigma * radius / length * (1.0 - 1e-14)
        else:
            join(parent, i, j)
        for k in range(d):
            y = scale * s[e, k]
            flow[i, k] += y
            flow[j, k] -= y
            if keep:
                out[e, k] = y
    number(parent, labels)
    return flow, labels
