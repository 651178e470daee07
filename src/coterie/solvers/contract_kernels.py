# mypy: disable-error-code="no-untyped-def"
"""Numba loops of `direct`: a problem on fewer users, and the way back from its solution."""

from __future__ import annotations

import numpy as np

from coterie.base.compiling import njit
from coterie.solvers.part_kernels import join, number


@njit(cache=True)
def interior(s, shrink, radius, share, first, second, n):
    """(n,) the parts of users joined by edges whose dual is shorter than `share` times its radius.
    """
    d, parent, labels = s.shape[0], np.arange(n), np.empty(n, np.int64)
    for e in range(first.size):
        if shrink[e] >= 1.0:
            square = 0.0
            for k in range(d):
                square += s[k, e] * s[k, e]
            r = share * radius[min(e, radius.size - 1)]
            if square < r * r:
                join(parent, first[e], second[e])
    number(parent, labels)
    return labels


@njit(cache=True)
def contracted(labels, parts, first, second):
    """The pairs of parts with an edge (n_pairs, 2), and for each edge its pair.

    An edge of the pair p is numbered p + 1, or -(p + 1) where its first user is in the second part;
    0: inside a part.
    """
    n_edges = first.size
    starts, pair = np.zeros(parts + 1, np.int64), np.zeros(n_edges, np.int64)
    for e in range(n_edges):
        a, b = labels[first[e]], labels[second[e]]
        if a != b:
            starts[min(a, b) + 1] += 1
    for c in range(parts):
        starts[c + 1] += starts[c]
    free, listed = starts.copy(), np.empty(starts[parts], np.int64)
    for e in range(n_edges):
        a, b = labels[first[e]], labels[second[e]]
        if a != b:
            listed[free[min(a, b)]] = e
            free[min(a, b)] += 1
    ends, last, count = np.empty((starts[parts], 2), np.int64), np.full(parts, -1), 0
    for c in range(parts):
        begin = count
        for t in range(starts[c], starts[c + 1]):
            e = listed[t]
            a, b = labels[first[e]], labels[second[e]]
            other = max(a, b)
            if last[other] < begin:
                last[other] = count
                ends[count, 0], ends[count, 1] = c, other
                count += 1
            pair[e] = last[other] + 1 if a < b else -(last[other] + 1)
    return ends[:count].copy(), pair


@njit(cache=True)
def summed(s, shrink, rates, radii, pair, n_pairs):
    """For each pair of parts, the sums over its edges of duals / sigma (n_pairs, d), of rates and
    of radii.
    """
    d = s.shape[0]
    duals, rate, radius = np.zeros((n_pairs, d)), np.zeros(n_pairs), np.zeros(n_pairs)
    for e in range(pair.size):
        if pair[e] != 0:
            p, sign = abs(pair[e]) - 1, 1.0 if pair[e] > 0 else -1.0
            r = rates[min(e, rates.size - 1)]
            rate[p] += r
            radius[p] += radii[min(e, radii.size - 1)]
            for k in range(d):
                duals[p, k] += sign * r * shrink[e] * s[k, e]
    return duals, rate, radius


@njit(cache=True, error_model="numpy")
def carry(s, shrink, rates, radii, pair, rest, change, pair_radii, sigma):
    """Write the solution between parts back to their edges: z = rest, and duals + (radius / pair's
    radius) change.

    Duals inside parts stay, and z is 0 there.
    """
    d = s.shape[0]
    y, z = np.empty(d), np.empty(d)
    for e in range(pair.size):
        rate, radius = sigma * rates[min(e, rates.size - 1)], radii[min(e, radii.size - 1)]
        p, sign = abs(pair[e]) - 1, 1.0 if pair[e] > 0 else -1.0
        square = 0.0
        for k in range(d):
            y[k] = rate * shrink[e] * s[k, e]
            z[k] = 0.0
            if p >= 0:
                y[k] += sign * radius / (pair_radii[p] + 1e-300) * change[p, k]
                z[k] = sign * rest[p, k]
            square += y[k] * y[k]
        inside = min(1.0, radius / np.sqrt(square + 1e-300)) / rate
        square = 0.0
        for k in range(d):
            s[k, e] = z[k] + inside * y[k]
            square += s[k, e] * s[k, e]
        shrink[e] = min(1.0, radius / rate / np.sqrt(square + 1e-300))


@njit(cache=True, error_model="numpy")
def rescale(s, shrink, rates, new_rates, radii, sigma):
    """Continue with other rates: z and the duals stay."""
    d = s.shape[0]
    for e in range(shrink.size):
        ratio = rates[min(e, rates.size - 1)] / new_rates[e]
        square = 0.0
        for k in range(d):
            inside = shrink[e] * s[k, e]
            s[k, e] += (ratio - 1.0) * inside
            square += s[k, e] * s[k, e]
        radius = radii[min(e, radii.size - 1)] / (sigma * new_rates[e])
        shrink[e] = min(1.0, radius / np.sqrt(square + 1e-300))


@njit(cache=True, error_model="numpy")
def merged_gap(x, h, linear, s, shrink, sigma, rates, radii, first, second, labels, parts):
    """The duality gap of the means of x over parts, for losses h_i/2 ||x||^2 - <linear_i, x>:

        sum_i h_i/2 ||mean_i - (linear_i - (B'y)_i) / h_i||^2 + sum_e radii_e ||(B mean)_e|| - <y_e,
        (B mean)_e>
    """
    n, d = x.shape
    mean, mass, slopes, gap = np.zeros((parts, d)), np.zeros(parts), linear.copy(), 0.0
    for i in range(n):
        mass[labels[i]] += h[i]
        for k in range(d):
            mean[labels[i], k] += h[i] * x[i, k]
    for c in range(parts):
        for k in range(d):
            mean[c, k] /= mass[c]
    for e in range(first.size):
        i, j = first[e], second[e]
        square, rate = 0.0, sigma * rates[min(e, rates.size - 1)] * shrink[e]
        for k in range(d):
            y, away = rate * s[k, e], mean[labels[i], k] - mean[labels[j], k]
            slopes[i, k] -= y
            slopes[j, k] += y
            square += away * away
            gap -= y * away
        gap += radii[min(e, radii.size - 1)] * np.sqrt(square)
    for i in range(n):
        for k in range(d):
            gap += 0.5 * h[i] * (mean[labels[i], k] - slopes[i, k] / h[i]) ** 2
    return gap
