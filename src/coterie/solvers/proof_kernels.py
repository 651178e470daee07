# mypy: disable-error-code="no-untyped-def"
"""Numba loops that build duals for given groups on all pairs: unit vectors between groups, a flow inside."""

from __future__ import annotations

from typing import Any

import numpy as np

from coterie.compiling import inner, njit
from coterie.solvers.part_kernels import alone, join, number

_FAST: dict[str, Any] = {"fastmath": True, "error_model": "numpy"}
_HOPELESS = 100.0  # times `enough`: flows that lack more than this prove nothing
_LEAST, _CLOSE = 8, 0.98  # rounds before the lack is compared with the least one, and share of it that is the least
_SURELY = 0.25  # share of the lack of a group that cannot be supplied, if it is split
_ALIKE = 0.05  # times the largest lack in a group: users whose lacks differ by less stay together


@inner(**_FAST)
def across_groups(radii, labels, models, gradients, rank, duals, forces):
    """Duals between groups, radius times the unit vector; forces (d, n) <- gradients + B'y, users in the order rank."""
    n, d = models.shape
    for i in range(n):
        for k in range(d):
            forces[k, rank[i]] = gradients[i, k]
    e = 0
    for i in range(n):
        for j in range(i + 1, n):
            if labels[i] != labels[j]:
                square = 0.0
                for k in range(d):
                    square += (models[i, k] - models[j, k]) ** 2
                scale = radii[min(e, radii.size - 1)] / (np.sqrt(square) + 1e-300)
                for k in range(d):
                    y = scale * (models[i, k] - models[j, k])
                    duals[e, k] = y
                    forces[k, rank[i]] += y
                    forces[k, rank[j]] -= y
            e += 1


@inner(**_FAST)
def inside_group(start, end, base, lack, gain, y, last, radius, flow, scale):
    """One step of all flows inside a group: y <- projection of y + gain (y - last) - (lack_i - lack_j)."""
    d = y.shape[0]
    for a in range(start, end - 1):
        m = end - a - 1
        c, r = scale[:m], radius[base:base + m]
        for q in range(m):
            c[q] = 0.0
        for k in range(d):
            now, old, away, own = y[k, base:base + m], last[k, base:base + m], lack[k, a + 1:end], lack[k, a]
            for q in range(m):
                v = now[q] + gain * (now[q] - old[q]) - own + away[q]
                old[q] = now[q]
                now[q] = v
                c[q] += v * v
        for q in range(m):
            c[q] = min(1.0, r[q] / np.sqrt(c[q] + 1e-300))
        for k in range(d):
            now, other, total = y[k, base:base + m], flow[k, a + 1:end], 0.0
            for q in range(m):
                v = now[q] * c[q]
                now[q] = v
                total += v
                other[q] -= v
            flow[k, a] += total
        base += m


@inner(**_FAST)
def least_lack(start, end, base, lack, forces, radius):
    """A number that ||forces + B'y||^2 inside a group is not below, for all flows y in the balls, by weak duality:

        <v, forces + B'y> >= <v, forces> - sum_{i<j} radius_ij ||v_i - v_j||     for all v, here the lack
    """
    d, most, square = lack.shape[0], 0.0, 1e-300
    for a in range(start, end):
        for k in range(d):
            most += lack[k, a] * forces[k, a]
            square += lack[k, a] ** 2
        for b in range(a + 1, end):
            length = 0.0
            for k in range(d):
                length += (lack[k, a] - lack[k, b]) ** 2
            most -= radius[base] * np.sqrt(length)
            base += 1
    return most * most / square if most > 0.0 else 0.0


@inner(error_model="numpy")
def by_group(labels, starts, rank):
    """starts <- where each group starts with users in the order of their groups (and the last ends); rank <- ranks."""
    groups = starts.size - 1
    for k in range(groups + 1):
        starts[k] = 0
    for i in range(labels.size):
        rank[i] = starts[labels[i] + 1]
        starts[labels[i] + 1] += 1
    for k in range(groups):
        starts[k + 1] += starts[k]
    for i in range(labels.size):
        rank[i] += starts[labels[i]]


@inner(error_model="numpy")
def inside_pairs(labels, starts, rank, firsts, place):
    """place <- the place of each pair inside a group, by groups and in them by the ranks of users; -1 for others.

    firsts <- the place of the first pair of each group, and the number of all.
    """
    n, e = labels.size, 0
    firsts[0] = 0
    for k in range(starts.size - 1):
        m = starts[k + 1] - starts[k]
        firsts[k + 1] = firsts[k] + m * (m - 1) // 2
    for i in range(n):
        k = labels[i]
        m, a = starts[k + 1] - starts[k], rank[i] - starts[k]
        row = firsts[k] + a * m - a * (a + 1) // 2 - a - 1
        for j in range(i + 1, n):
            place[e] = row + rank[j] - starts[k] if labels[j] == k else -1
            e += 1


@inner(error_model="numpy")
def keep_certain(starts, firsts, lack, forces, radius, enough, scratch):
    """Where `least_lack` shows of some groups that a good part of their lack stays, set the lack of the others to zero.

    That of the others is no direction of descent yet, and would spoil the direction of those that must split.
    """
    certain = 0.0
    for group in range(starts.size - 1):
        start, end, square = starts[group], starts[group + 1], 0.0
        for i in range(start, end):
            for k in range(lack.shape[0]):
                square += lack[k, i] * lack[k, i]
        sure = least_lack(start, end, firsts[group], lack, forces, radius) >= _SURELY * square
        certain += square if sure else 0.0
        for i in range(start, end):
            for k in range(lack.shape[0]):
                scratch[k, i] = lack[k, i] if sure else 0.0
    if certain > enough:
        for i in range(lack.shape[1]):
            for k in range(lack.shape[0]):
                lack[k, i] = scratch[k, i]


@njit(cache=True, error_model="numpy")
def complete_proof(s, shrink, sigma, radii, labels, groups, models, gradients, rounds, enough):
    """Duals for these groups: lam w_e times the unit vector between groups, and inside a flow of the remaining forces.

    The flow starts from the current duals and minimises ||lack||^2, lack = gradients + B'y, over the balls by
    accelerated projected gradients (Beck and Teboulle 2009): in a group of n_k users the step
    y_ij -= (lack_i - lack_j) / n_k is exact except for the balls. At most `rounds` rounds, until ||lack||^2 <= enough.

    Returns the duals, the lack (n, d), and whether it is small. Rounds end early if `least_lack` shows that it is as
    small as it can be: then some group must split. Of groups that may be spared it is returned as zero.
    """
    (n, d), edges = models.shape, shrink.size
    starts, rank = np.empty(groups + 1, np.int64), np.empty(n, np.int64)
    firsts, place = np.empty(groups + 1, np.int64), np.empty(edges, np.int64)
    by_group(labels, starts, rank)
    inside_pairs(labels, starts, rank, firsts, place)
    duals, forces = np.empty((edges, d)), np.empty((d, n))
    across_groups(radii, labels, models, gradients, rank, duals, forces)
    y, last, radius = np.empty((d, firsts[groups])), np.empty((d, firsts[groups])), np.empty(firsts[groups])
    for e in range(edges):
        if place[e] >= 0:
            radius[place[e]] = radii[min(e, radii.size - 1)]
            for k in range(d):
                y[k, place[e]] = last[k, place[e]] = sigma * shrink[e] * s[k, e]
    lack, flow, scale = np.zeros((d, n)), np.empty((d, n)), np.empty(n)
    momentum, gain, missing, least = 1.0, 0.0, np.inf, 0.0
    for turn in range(rounds + 1):
        before, missing, least = missing, 0.0, 0.0
        for i in range(n):
            for k in range(d):
                flow[k, i] = forces[k, i]
        for group in range(groups):
            start, end = starts[group], starts[group + 1]
            inside_group(start, end, firsts[group], lack, gain, y, last, radius, flow, scale)
            check = turn >= _LEAST and turn & (turn - 1) == 0  # after 8, 16, 32, ... rounds
            for i in range(start, end):
                for k in range(d):
                    lack[k, i] = flow[k, i]
                    missing += flow[k, i] ** 2
            if check:
                least += least_lack(start, end, firsts[group], lack, forces, radius)
            for i in range(start, end):
                for k in range(d):
                    lack[k, i] /= end - start
        if missing <= enough or least > _CLOSE * missing:
            break
        # `lack` is taken at the duals, not ahead of them: a safe variant of the momentum, restarted when it fails.
        momentum = 1.0 if missing > before else 0.5 * (1.0 + np.sqrt(1.0 + 4.0 * momentum * momentum))
        gain = (momentum - 1.0) / momentum
    for e in range(edges):
        if place[e] >= 0:
            for k in range(d):
                duals[e, k] = y[k, place[e]]
    keep_certain(starts, firsts, flow, forces, radius, enough, lack)
    left = np.empty((n, d))
    for i in range(n):
        for k in range(d):
            left[i, k] = flow[k, rank[i]]
    return duals, left, missing <= _HOPELESS * enough


@njit(cache=True, error_model="numpy")
def apart(labels, lack, least):
    """(n,) the labels after each group is split into users whose lacks are alike; differences below `least` are."""
    n, d = lack.shape
    parent, parts, largest = np.empty(n, np.int64), np.empty(n, np.int64), np.zeros(n)
    alone(parent)
    for i in range(n):
        for k in range(d):
            largest[labels[i]] = max(largest[labels[i]], abs(lack[i, k]))
    for i in range(n):
        for j in range(i + 1, n):
            if labels[i] == labels[j]:
                square = 0.0
                for k in range(d):
                    square += (lack[i, k] - lack[j, k]) ** 2
                if np.sqrt(square) <= max(_ALIKE * largest[labels[i]], least):
                    join(parent, i, j)
    number(parent, parts)
    return parts


@njit(cache=True, error_model="numpy")
def stiffness(models, way, radius):
    """(n,) what the penalty adds to the curvature along `way`, u the unit vector of gap_ij = models_i - models_j:

        2 radius sum_j (||way_i||^2 - (u' way_i)^2) / ||gap_ij||        over users j with another model

    The factor 2 allows for the motion of both users of a pair.
    """
    n, d = models.shape
    out = np.zeros(n)
    for i in range(n):
        for j in range(n):
            square, along, moved = 0.0, 0.0, 0.0
            for k in range(d):
                gap = models[i, k] - models[j, k]
                square += gap * gap
                along += gap * way[i, k]
                moved += way[i, k] * way[i, k]
            if square > 0.0 and moved > 0.0:
                out[i] += 2.0 * radius * max(moved - along * along / square, 0.0) / np.sqrt(square)
    return out
