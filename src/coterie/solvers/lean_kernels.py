# mypy: disable-error-code="no-untyped-def"
"""Numba loops of the lean solver: walks over all pairs that store nothing for any of them."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True, fastmath=True, error_model="numpy")
def lean_pull(w, counts, smooth, v, out, degrees):
    """out_k = sum_l n_k n_l (v_k - v_l) / D_kl, degrees_k = sum_l n_k n_l / D_kl, D = sqrt(||w_k - w_l||^2 + smooth^2).

    Returns sum_{k<l} n_k n_l D_kl. Nothing is stored for a pair.
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
def lean_flow(potential, order, starts, radius, out):
    """out_i = sum over j in i's cluster of P(potential_i - potential_j), P the projection onto the ball of the radius.

    Members of cluster k are order[starts[k]:starts[k + 1]]. The flow between two users is never stored.
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
