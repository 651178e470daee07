# mypy: disable-error-code="no-untyped-def"
"""Numba loops over many small positive definite matrices, one after the other.

LAPACK, called for each of thousands of matrices with twenty rows, spends more time on its calls
than on numbers. What is computed of a matrix does not depend on the others.
"""

from __future__ import annotations

import numpy as np

from coterie.base.compiling import njit
from coterie.base.types import Array


@njit(cache=True, error_model="numpy", nogil=True)
def _factor(U, d):
    """matrix <- U with U'U = matrix, in the upper triangle; its diagonal holds reciprocals, NaN if
    not definite.
    """
    for k in range(d):
        pivot = 1.0 / np.sqrt(U[k, k])
        for c in range(k + 1, d):
            U[k, c] *= pivot
        U[k, k] = pivot
        for r in range(k + 1, d):
            v = U[k, r]
            for c in range(r, d):
                U[r, c] -= v * U[k, c]


@njit(cache=True, error_model="numpy", nogil=True)
def solve_scaled(matrices: Array, units: Array, shift: Array, vectors: Array, out: Array) -> None:
    """out_i <- (H_i + shift_i S^2)^-1 vectors_i for S = diag(units_i), by way of S^-1 H_i S^-1; NaN
    if not definite.
    """
    n, d = vectors.shape
    U = np.empty((d, d))
    for i in range(n):
        x = out[i]
        for r in range(d):
            for c in range(r, d):
                U[r, c] = matrices[i, r, c] / (units[i, r] * units[i, c])
            U[r, r] += shift[i]
            x[r] = vectors[i, r] / units[i, r]
        _factor(U, d)
        for k in range(d):
            x[k] *= U[k, k]
            for c in range(k + 1, d):
                x[c] -= x[k] * U[k, c]
        for k in range(d - 1, -1, -1):
            for c in range(k + 1, d):
                x[k] -= U[k, c] * x[c]
            x[k] *= U[k, k]
        for k in range(d):
            x[k] /= units[i, k]


@njit(cache=True, error_model="numpy", nogil=True)
def invert(matrices: Array) -> tuple[Array, Array]:
    """The inverses of positive definite matrices, and the logarithms of their determinants; NaN if
    they are not.
    """
    n, d = matrices.shape[0], matrices.shape[1]
    out, logs = np.empty((n, d, d)), np.empty(n)
    U, W = np.empty((d, d)), np.zeros((d, d))
    for i in range(n):
        for r in range(d):
            for c in range(r, d):
                U[r, c] = matrices[i, r, c]
        _factor(U, d)
        logs[i] = 0.0
        for k in range(d):
            logs[i] -= 2.0 * np.log(U[k, k])
        inverse = out[i]
        for r in range(d):
            for c in range(r + 1):
                inverse[r, c] = 0.0
        # Row k of W = U'^-1, and the inverse is the sum of the products of all rows with
        # themselves.
        for k in range(d):
            for c in range(k):
                W[k, c] = 0.0
            for q in range(k):
                v = U[q, k] * U[k, k]
                for c in range(q + 1):
                    W[k, c] -= v * W[q, c]
            W[k, k] = U[k, k]
            for r in range(k + 1):
                v = W[k, r]
                for c in range(r + 1):
                    inverse[r, c] += v * W[k, c]
        for r in range(d):
            for c in range(r):
                inverse[c, r] = inverse[r, c]
    return out, logs
