"""Numba loops over the pairs of a graph; imported on first use, since importing Numba takes longer than most solves.

The pairs of a complete graph are (0, 1), (0, 2), ..., (0, n-1), (1, 2), ...; they are walked, never stored.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from coterie._typing import Array, Ints


@njit(cache=True)
def complete_differences(models: Array) -> Array:
    """Row e of the result is models[i] - models[j] for the e-th pair i < j."""
    n, d = models.shape
    out = np.empty((n * (n - 1) // 2, d))
    e = 0
    for i in range(n):
        for j in range(i + 1, n):
            for k in range(d):
                out[e, k] = models[i, k] - models[j, k]
            e += 1
    return out


@njit(cache=True)
def complete_divergence(duals: Array, n: int) -> Array:
    """The transpose of `complete_differences`."""
    d = duals.shape[1]
    out = np.zeros((n, d))
    e = 0
    for i in range(n):
        for j in range(i + 1, n):
            for k in range(d):
                out[i, k] += duals[e, k]
                out[j, k] -= duals[e, k]
            e += 1
    return out


@njit(cache=True)
def complete_length(models: Array) -> float:
    """The sum of ||models[i] - models[j]|| over all pairs."""
    n, d = models.shape
    total = 0.0
    for i in range(n):
        part = 0.0
        for j in range(i + 1, n):
            square = 0.0
            for k in range(d):
                gap = models[i, k] - models[j, k]
                square += gap * gap
            part += np.sqrt(square)
        total += part
    return total


@njit(cache=True)
def divergence(edges: Ints, duals: Array, n: int) -> Array:
    """The transpose of models[edges[:, 0]] - models[edges[:, 1]]."""
    out = np.zeros((n, duals.shape[1]))
    for e in range(edges.shape[0]):
        i, j = edges[e, 0], edges[e, 1]
        for k in range(duals.shape[1]):
            out[i, k] += duals[e, k]
            out[j, k] -= duals[e, k]
    return out
