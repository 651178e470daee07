"""Numba loops over the pairs of a graph; imported on first use, because the import of Numba is
slower than most solves.

The pairs of a complete graph are (0, 1), (0, 2), ..., (0, n-1), (1, 2), ...; they are not stored.
"""

from __future__ import annotations

import numpy as np

from coterie.base.compiling import njit
from coterie.base.types import Array, Ints


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


@njit(cache=True)
def in_balls(duals: Array, radii: Array, slack: float) -> bool:
    """Whether ||duals_e|| <= slack * radii_e for all edges; False if a value is NaN."""
    for e in range(duals.shape[0]):
        square = 0.0
        for k in range(duals.shape[1]):
            square += duals[e, k] * duals[e, k]
        if not np.sqrt(square) <= slack * radii[e]:
            return False
    return True


@njit(cache=True, fastmath=True, error_model="numpy")
def cluster_pull(w: Array, counts: Array, smooth: float, v: Array, out: Array,
                 degrees: Array) -> float:
    """out_k = sum_l n_k n_l (v_k - v_l) / D_kl, degrees_k = sum_l n_k n_l / D_kl, D = sqrt(||w_k -
    w_l||^2 + smooth^2).

    Returns sum_{k<l} n_k n_l D_kl. No value is stored per pair.
    """
    k, d = w.shape
    out[:] = 0.0
    degrees[:] = 0.0
    total = 0.0
    for a in range(k):
        for b in range(a + 1, k):
            square = smooth * smooth
            for h in range(d):
                gap = w[a, h] - w[b, h]
                square += gap * gap
            distance = np.sqrt(square)
            weight = counts[a] * counts[b] / distance
            total += weight * square
            degrees[a] += weight
            degrees[b] += weight
            for h in range(d):
                pull = weight * (v[a, h] - v[b, h])
                out[a, h] += pull
                out[b, h] -= pull
    return total


@njit(cache=True, fastmath=True, error_model="numpy")
def member_flow(potential: Array, order: Ints, starts: Ints, radius: float, out: Array) -> None:
    """out_i = sum over j in i's cluster of P(potential_i - potential_j), P the projection onto the
    ball of the radius.

    Members of cluster k are order[starts[k]:starts[k + 1]]. The flow between two users is never
    stored.
    """
    d = potential.shape[1]
    out[:] = 0.0
    for k in range(starts.size - 1):
        for p in range(starts[k], starts[k + 1]):
            i = order[p]
            for q in range(p + 1, starts[k + 1]):
                j = order[q]
                square = 0.0
                for h in range(d):
                    gap = potential[i, h] - potential[j, h]
                    square += gap * gap
                scale = min(1.0, radius / np.sqrt(square + 1e-300))
                for h in range(d):
                    flow = scale * (potential[i, h] - potential[j, h])
                    out[i, h] += flow
                    out[j, h] -= flow


@njit(cache=True, error_model="numpy")
def mahalanobis(models: Array, covariances: Array, first: Ints, second: Ints) -> Array:
    """(x_i - x_j)' (S_i + S_j)^-1 (x_i - x_j) for pairs, by Cholesky's factors; NaN where rounding
    prevents these.

    Rows and columns are scaled to a unit diagonal first, as in `whiten`.
    """
    d = models.shape[1]
    out = np.empty(first.size)
    L, units, gap = np.empty((d, d)), np.empty(d), np.empty(d)
    for e in range(first.size):
        i, j = first[e], second[e]
        for r in range(d):
            units[r] = 1.0 / np.sqrt(max(covariances[i, r, r] + covariances[j, r, r], 1e-300))
        total = 0.0
        for r in range(d):
            gap[r] = units[r] * (models[i, r] - models[j, r])
            for c in range(r + 1):
                value = units[r] * units[c] * (covariances[i, r, c] + covariances[j, r, c])
                for h in range(c):
                    value -= L[r, h] * L[c, h]
                if c < r:
                    value *= L[c, c]  # the diagonal holds reciprocals
                L[r, c] = value
            L[r, r] = 1.0 / np.sqrt(L[r, r]) if L[r, r] > 0.0 else np.nan
            value = gap[r]
            for h in range(r):
                value -= L[r, h] * gap[h]
            gap[r] = value * L[r, r]
            total += gap[r] * gap[r]
        out[e] = total
    return out
