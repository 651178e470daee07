# mypy: disable-error-code="no-untyped-def"
"""Numba loops about which users belong together: connected parts, shorter problems, and proofs.

A proof builds duals for given groups on all pairs: unit vectors between groups, a flow inside.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from coterie.base.compiling import inner, njit

_FAST: dict[str, Any] = {"fastmath": True, "error_model": "numpy"}
_HOPELESS = 100.0  # times `enough`: flows that lack more than this prove nothing
# Rounds between comparisons of the lack with the least one, and share that is the least.
_LEAST, _CLOSE = 8, 0.98
# Relaxation, and rounds after which one is not relaxed: it is exact if no ball is in the way.
_RELAX, _PLAIN = 1.8, 4
_SURELY = 0.25  # share of the lack of a group that cannot be supplied, if it is split
_ALIKE = 0.01  # times the largest lack in a group: users whose lacks differ by less stay together


@njit(cache=True)
def levels(starts, neighbours):
    """The users by breadth-first searches, each from a user far from where it began, and the size
    of the widest level.

    The neighbours of user i are neighbours[starts[i]:starts[i + 1]].
    """
    n = starts.size - 1
    order, level, done, widest = np.empty(n, np.int64), np.full(n, -1), 0, 0
    for seed in range(n):
        if level[seed] >= 0:
            continue
        begin = done
        # The last user found is far from the first; levels counted from there are narrow.
        for turn in range(2):
            # The second search starts anew, over the same users.
            for q in range(begin, done):
                level[order[q]] = -1
            order[begin] = order[done - 1] if turn else seed
            level[order[begin]] = 0
            done, q, width, now = begin + 1, begin, 0, 0
            while q < done:
                i = order[q]
                width = width + 1 if level[i] == now else 1
                now = level[i]
                if turn:
                    widest = max(widest, width)
                for t in range(starts[i], starts[i + 1]):
                    if level[neighbours[t]] < 0:
                        level[neighbours[t]] = now + 1
                        order[done] = neighbours[t]
                        done += 1
                q += 1
    return order, widest


@njit(cache=True)
def join_pairs(n, first, second, chosen):
    """(n,) the connected parts of 0 .. n-1 along the chosen pairs."""
    parent, labels = np.empty(n, np.int64), np.empty(n, np.int64)
    separate(parent)
    for e in range(chosen.size):
        if chosen[e]:
            join(parent, first[e], second[e])
    number(parent, labels)
    return labels


@inner()
def separate(parent):
    """parent <- the roots of parts of one each, see `join`."""
    for i in range(parent.size):
        parent[i] = i


@inner()
def join(parent, i, j):
    """Join the parts of i and j; the smaller root stays one."""
    while parent[i] != i:
        # Halving the way keeps later ones short.
        parent[i] = parent[parent[i]]
        i = parent[i]
    while parent[j] != j:
        parent[j] = parent[parent[j]]
        j = parent[j]
    if i < j:
        parent[j] = i
    elif j < i:
        parent[i] = j


@inner()
def number(parent, labels):
    """labels <- the numbers of the parts by first appearance, from their roots."""
    count = 0
    for i in range(parent.size):
        # Roots are the smallest of their parts, so each is numbered before the others come.
        root = i
        while parent[root] != root:
            root = parent[root]
        if root == i:
            labels[i] = count
            count += 1
        else:
            labels[i] = labels[root]


# Shorter problems of `direct`, between parts of users, and the way back from their solution.

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
def contract(labels, parts, first, second):
    """The pairs of parts with an edge (n_pairs, 2), and for each edge its pair.

    An edge of the pair p is numbered p + 1, or -(p + 1) where its first user is in the second part;
    0: inside a part.
    """
    n_edges = first.size
    starts, pair = np.zeros(parts + 1, np.int64), np.zeros(n_edges, np.int64)
    # Edges are counted by the smaller of their parts, then listed part by part.
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
    # Within a part, `last` says which pair with another part was found already.
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
def sum_pairs(s, shrink, rates, radii, pair, n_pairs):
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
        # With its share of the change a dual may leave its own ball: it is cut to it.
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
    # Means weighted by curvature: what joining costs in the losses is least there.
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


# Duals for given groups.

@inner(**_FAST)
def across_groups(radii, labels, models, gradients, rank, duals, forces):
    """Duals between groups, radius times the unit vector; forces (d, n) <- gradients + B'y, users
    in the order rank.
    """
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
                # The subgradient of a distance that is not zero is unique: no choice here.
                scale = radii[min(e, radii.size - 1)] / (np.sqrt(square) + 1e-300)
                for k in range(d):
                    y = scale * (models[i, k] - models[j, k])
                    duals[e, k] = y
                    forces[k, rank[i]] += y
                    forces[k, rank[j]] -= y
            e += 1


@inner(**_FAST)
def inside_group(start, end, base, move, relax, s, shrink, radius, flow, square):
    """One step of all flows inside a group: s <- s + relax (y - s - (move_i - move_j)), and flow +=
    B'y of the new y.

    y = shrink * s is the projection of s onto the balls.
    """
    d = s.shape[0]
    for a in range(start, end - 1):
        m = end - a - 1
        c, r = shrink[base:base + m], radius[base:base + m]
        for q in range(m):
            square[q] = 0.0
        for k in range(d):
            sk, other, own = s[k, base:base + m], move[k, a + 1:end], move[k, a]
            for q in range(m):
                v = sk[q] + relax * (c[q] * sk[q] - sk[q] - own + other[q])
                sk[q] = v
                square[q] += v * v
        for q in range(m):
            c[q] = min(1.0, r[q] / np.sqrt(square[q] + 1e-300))
        for k in range(d):
            sk, other, total = s[k, base:base + m], flow[k, a + 1:end], 0.0
            for q in range(m):
                y = c[q] * sk[q]
                total += y
                other[q] -= y
            flow[k, a] += total
        base += m


@inner(**_FAST)
def least_lack(start, end, base, lack, forces, radius):
    """A number that ||forces + B'y||^2 inside a group is not below, for all flows y in the balls,
    by weak duality:

        <v, forces + B'y> >= <v, forces> - sum_{i<j} radius_ij ||v_i - v_j||
                                                             for all v, here the lack
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
    # By Cauchy and Schwarz: ||forces + B'y|| >= <v, forces + B'y> / ||v||.
    return most * most / square if most > 0.0 else 0.0


@inner(error_model="numpy")
def by_group(labels, starts, rank):
    """starts <- where each group starts with users in the order of their groups (and the last
    ends); rank <- ranks.
    """
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
    """place <- the place of each pair inside a group, by groups and in them by the ranks of users;
    -1 for others.

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
        # Row a holds the pairs (a, b) with b > a; the place of b is added below.
        row = firsts[k] + a * m - a * (a + 1) // 2 - a - 1
        for j in range(i + 1, n):
            place[e] = row + rank[j] - starts[k] if labels[j] == k else -1
            e += 1


@inner(error_model="numpy")
def lacks_of(starts, firsts, s, forces, lack):
    """lack <- forces + B's inside the groups."""
    d = s.shape[0]
    for i in range(lack.shape[1]):
        for k in range(d):
            lack[k, i] = forces[k, i]
    for group in range(starts.size - 1):
        e = firsts[group]
        for a in range(starts[group], starts[group + 1]):
            for b in range(a + 1, starts[group + 1]):
                for k in range(d):
                    lack[k, a] += s[k, e]
                    lack[k, b] -= s[k, e]
                e += 1


@inner(error_model="numpy")
def next_move(start, end, forces, lack, ahead, move, relax):
    """||lack||^2 of a group; ahead <- forces + B's and move <- what takes 2 y - s onto lack = 0,
    see `complete_proof`.

    B's changes by -relax times what `lack` was before the step, up to its mean, which no flow
    changes. That lack is (n_k move + ahead) / 2, so it need not be stored.
    """
    size, square = end - start, 0.0
    for k in range(lack.shape[0]):
        mean = 0.0
        for i in range(start, end):
            mean += forces[k, i] / size
        for i in range(start, end):
            before = 0.5 * (size * move[k, i] + ahead[k, i])
            ahead[k, i] -= relax * (before - mean)
            square += lack[k, i] * lack[k, i]
            move[k, i] = (2.0 * lack[k, i] - ahead[k, i]) / size
    return square


@inner(error_model="numpy")
def keep_certain(starts, firsts, lack, forces, radius, enough, scratch):
    """Where `least_lack` shows of some groups that a good part of their lack stays, set the lack of
    the others to zero.

    That of the others is no direction of descent yet, and would spoil the direction of those that
    must split.
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
def complete_proof(begin, radii, labels, groups, models, gradients, rounds, enough, share):
    """Duals for these groups: lam w_e times the unit vector between groups, and inside a flow of
    the remaining forces.

    The flow is a point of the balls with lack = gradients + B'y = 0, or with the least ||lack||, by
    relaxed Douglas-Rachford splitting (Lions and Mercier 1979; Bauschke and Moursi 2017 where there
    is no such point):
        y = projection of s onto the balls,   s += relax (projection of 2 y - s onto lack = 0, minus
                                              y)
    in a group of n_k users the projection of q is q_ij - (lack_i - lack_j) / n_k, with the lack at
    q. It starts from s = `begin` and makes at most `rounds` rounds, until ||lack||^2 <= share *
    enough.

    Returns the duals, the last s, the lack (n, d), whether it is small, and whether `least_lack`
    shows that it is as small as it can be: then rounds end early, and some group must split. Of
    groups that may be spared it is returned as zero.
    """
    (n, d), edges = models.shape, begin.shape[0]
    starts, rank = np.empty(groups + 1, np.int64), np.empty(n, np.int64)
    firsts, place = np.empty(groups + 1, np.int64), np.empty(edges, np.int64)
    # Users of a group side by side, so that its flow is worked on in one stretch of memory.
    by_group(labels, starts, rank)
    inside_pairs(labels, starts, rank, firsts, place)
    duals, forces = np.empty((edges, d)), np.empty((d, n))
    across_groups(radii, labels, models, gradients, rank, duals, forces)
    s, shrink, radius = np.empty((d, firsts[groups])), np.ones(firsts[groups]), \
        np.empty(firsts[groups])
    # Flows go on where those for the last groups ended.
    for e in range(edges):
        if place[e] >= 0:
            radius[place[e]] = radii[min(e, radii.size - 1)]
            for k in range(d):
                s[k, place[e]] = begin[e, k]
    lack, ahead, move, square = np.empty((d, n)), np.empty((d, n)), np.zeros((d, n)), np.empty(n)
    missing, least = np.inf, 0.0
    lacks_of(starts, firsts, s, forces, ahead)
    for turn in range(rounds + 1):
        missing, least = 0.0, 0.0
        # The first turn only projects; a plain step now and then is exact if no ball is in the way.
        relax = 0.0 if turn == 0 else 1.0 if turn == 1 or turn % _PLAIN == 0 else _RELAX
        for i in range(n):
            for k in range(d):
                lack[k, i] = forces[k, i]
        for group in range(groups):
            start, end = starts[group], starts[group + 1]
            inside_group(start, end, firsts[group], move, relax, s, shrink, radius, lack, square)
            missing += next_move(start, end, forces, lack, ahead, move, relax)
            # This bound costs as much as a round, so it is asked for now and then only.
            if turn > 0 and turn % _LEAST == 0:
                least += least_lack(start, end, firsts[group], lack, forces, radius)
        if missing <= share * enough or least > _CLOSE * missing:
            break
    state = duals.copy()
    for e in range(edges):
        if place[e] >= 0:
            for k in range(d):
                state[e, k] = s[k, place[e]]
                duals[e, k] = shrink[place[e]] * s[k, place[e]]
    keep_certain(starts, firsts, lack, forces, radius, enough, move)
    left = np.empty((n, d))
    for i in range(n):
        for k in range(d):
            left[i, k] = lack[k, rank[i]]
    return duals, state, left, missing <= _HOPELESS * enough, least > _CLOSE * missing


@njit(cache=True, error_model="numpy")
def apart(labels, lack, least):
    """(n,) the labels after each group is split into users whose lacks are alike; differences below
    `least` are.
    """
    n, d = lack.shape
    parent, parts, largest = np.empty(n, np.int64), np.empty(n, np.int64), np.zeros(n)
    separate(parent)
    for i in range(n):
        for k in range(d):
            largest[labels[i]] = max(largest[labels[i]], abs(lack[i, k]))
    for i in range(n):
        for j in range(i + 1, n):
            if labels[i] == labels[j]:
                square = 0.0
                for k in range(d):
                    square += (lack[i, k] - lack[j, k]) ** 2
                # Along chains: users at both ends of a row of small steps stay together.
                if np.sqrt(square) <= max(_ALIKE * largest[labels[i]], least):
                    join(parent, i, j)
    number(parent, parts)
    return parts


@njit(cache=True, error_model="numpy")
def stiffness(models, way, radius):
    """(n,) what the penalty adds to the curvature along `way`, u the unit vector of gap_ij =
    models_i - models_j:

        2 radius sum_j (||way_i||^2 - (u' way_i)^2) / ||gap_ij||   over users j with another model

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
