# mypy: disable-error-code="no-untyped-def"
"""Numba loops of the fast solver: passes over edges, and the linear systems between them.

State of an edge e = (i, j), all vectors in R^d, stored coordinate by coordinate as s[k, e]:

    shrink[e] = min(1, radius / ||s||)      P = shrink * s  the projection onto the ball,   z = s -
                                            P  the rest

The dual of the edge is y = sigma * P, so it is always feasible; z is the estimate of models_i -
models_j. `radius` is lam * weight / sigma: one number for all edges, or one per edge.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from coterie.base.compiling import inner, njit
from coterie.solvers.group_kernels import join, number, separate

BLOCK = 256
_FAST: dict[str, Any] = {"fastmath": True, "error_model": "numpy"}


@inner(**_FAST)
def clear(rows):
    """Set all numbers to zero. An assignment to a slice would compile for a second, for the texts
    of its errors.
    """
    for i in range(rows.shape[0]):
        for k in range(rows.shape[1]):
            rows[i, k] = 0


@inner(**_FAST)
def complete_pass(x, s, shrink, radius, relax, forces, measure, scratch):
    """One pass over all pairs of a complete graph: s <- s + relax (B x - z), forces <- B'(z - P) of
    the new s.

    x and forces are (d, n), scratch is (d + 2, BLOCK). Returns ||B x - z_old||^2 and ||z_new -
    z_old||^2 if `measure` is set, otherwise zeros.
    """
    d, n = x.shape
    one = radius.size == 1
    clear(forces)
    before, square, r = scratch, scratch[d], scratch[d + 1]
    for q in range(BLOCK):
        r[q] = radius[0]
    primal, moved = 0.0, 0.0
    base = 0
    for i in range(n - 1):
        # Blocks of pairs stay in the first cache between the passes over their coordinates.
        for first in range(i + 1, n, BLOCK):
            m = min(BLOCK, n - first)
            c = shrink[base:base + m]
            for q in range(m):
                square[q] = 0.0
                if not one:
                    r[q] = radius[base + q]
            for k in range(d):
                sk, xk, xi, old = s[k, base:base + m], x[k, first:first + m], x[k, i], before[k]
                for q in range(m):
                    # The last z follows from s and its shrink, so only these two are stored.
                    z = sk[q] - c[q] * sk[q]
                    v = sk[q] + relax * (xi - xk[q] - z)
                    old[q] = z
                    sk[q] = v
                    square[q] += v * v
                if measure:
                    for q in range(m):
                        gap = xi - xk[q] - old[q]
                        primal += gap * gap
            for q in range(m):
                # The tiny number keeps s = 0 from dividing by zero, without a branch in the loop.
                c[q] = min(1.0, r[q] / np.sqrt(square[q] + 1e-300))
            for k in range(d):
                sk, fk, old = s[k, base:base + m], forces[k, first:first + m], before[k]
                total = 0.0
                for q in range(m):
                    # z - P = s - 2 P
                    push = sk[q] * (1.0 - 2.0 * c[q])
                    total += push
                    fk[q] -= push
                forces[k, i] += total
                if measure:
                    for q in range(m):
                        gap = sk[q] - c[q] * sk[q] - old[q]
                        moved += gap * gap
            base += m
    return primal, moved


@njit(cache=True, **_FAST)
def edges_pass(x, s, shrink, radius, rates, first, second, relax, forces, measure):
    """The same pass over a list of edges; x and forces are (n, d), and forces <- B'(rates (z - P)).
    """
    d, n_edges = s.shape
    one = radius.size == 1
    square, r, rate = np.empty(BLOCK), np.empty(BLOCK), np.empty(BLOCK)
    clear(forces)
    for q in range(BLOCK):
        r[q], rate[q] = radius[0], rates[0]
    gaps, before = np.empty((d, BLOCK)), np.empty((d, BLOCK))
    primal, moved = 0.0, 0.0
    for base in range(0, n_edges, BLOCK):
        m = min(BLOCK, n_edges - base)
        ii, jj, c = first[base:base + m], second[base:base + m], shrink[base:base + m]
        # Gathered first, so that the loops over coordinates below run along memory.
        for q in range(m):
            a, b = ii[q], jj[q]
            for k in range(d):
                gaps[k, q] = x[a, k] - x[b, k]
        for q in range(m):
            square[q] = 0.0
            if not one:
                r[q] = radius[base + q]
            if rates.size > 1:
                rate[q] = rates[base + q]
        for k in range(d):
            sk, gk, old = s[k, base:base + m], gaps[k], before[k]
            for q in range(m):
                z = sk[q] - c[q] * sk[q]
                v = sk[q] + relax * (gk[q] - z)
                old[q] = z
                sk[q] = v
                square[q] += v * v
            if measure:
                for q in range(m):
                    gap = gk[q] - old[q]
                    primal += gap * gap
        for q in range(m):
            c[q] = min(1.0, r[q] / np.sqrt(square[q] + 1e-300))
        for k in range(d):
            sk, gk, old = s[k, base:base + m], gaps[k], before[k]
            for q in range(m):
                # The gaps are spent: their place holds the pushes.
                gk[q] = rate[q] * sk[q] * (1.0 - 2.0 * c[q])
            if measure:
                for q in range(m):
                    gap = sk[q] - c[q] * sk[q] - old[q]
                    moved += gap * gap
        # Edges of a block may share users, so their pushes are added one by one.
        for q in range(m):
            a, b = ii[q], jj[q]
            for k in range(d):
                forces[a, k] += gaps[k, q]
                forces[b, k] -= gaps[k, q]
    return primal, moved


@njit(cache=True, **_FAST)
def retune(s, shrink, radius, new_radius, ratio):
    """Carry z and the duals over to another sigma (ratio = old / new) or another lam.

    Duals on the boundary of their ball stay on it, others keep their value, cut to the new ball.
    """
    d, n_edges = s.shape
    for e in range(n_edges):
        r, new = radius[min(e, radius.size - 1)], new_radius[min(e, new_radius.size - 1)]
        square = 0.0
        for k in range(d):
            square += s[k, e] * s[k, e]
        length = np.sqrt(square)
        if length > r:
            # ||z|| = length - r stays, and the projection becomes as long as the new radius.
            scale = (length - r + new) / length
            shrink[e] = new / (length - r + new + 1e-300)
        else:
            scale = ratio if length * ratio <= new else new / (length + 1e-300)
            shrink[e] = 1.0
        for k in range(d):
            s[k, e] *= scale


@njit(cache=True, **_FAST)
def complete_run(linear, inverses, total, sigma, x, s, shrink, radius, relax, forces, steps):
    """`steps` iterations on a complete graph, whose linear system has a closed form:

        (H_i + sigma n) x_i - sigma sum_j x_j = linear_i + sigma forces_i =: q_i
        x_i = M_i (q_i + sigma S),   M_i = (H_i + sigma n)^-1 = inverses[i],   S = (I - sigma sum
                                     M)^-1 sum_i M_i q_i
    with total = (I - sigma sum M)^-1.
    """
    d, n = x.shape
    q, sums, shift, scratch = np.empty(d), np.empty(d), np.empty(d), np.empty((d + 2, BLOCK))
    primal, moved = 0.0, 0.0
    for step in range(steps):
        for k in range(d):
            sums[k] = 0.0
        # x_i without what all users share, and the sum of these.
        for i in range(n):
            for k in range(d):
                q[k] = linear[k, i] + sigma * forces[k, i]
            for k in range(d):
                value = 0.0
                for h in range(d):
                    value += inverses[i, k, h] * q[h]
                x[k, i] = value
                sums[k] += value
        # sigma S, the same for all users, and what it adds to each.
        for k in range(d):
            shift[k] = 0.0
            for h in range(d):
                shift[k] += sigma * total[k, h] * sums[h]
        for i in range(n):
            for k in range(d):
                value = 0.0
                for h in range(d):
                    value += inverses[i, k, h] * shift[h]
                x[k, i] += value
        primal, moved = complete_pass(x, s, shrink, radius, relax, forces, step == steps - 1,
                                      scratch)
    return primal, moved


@inner(**_FAST)
def ldl_solve(starts, rows, entries, inverse_diagonal, b):
    """b <- (L D L')^-1 b in place, b (n, d); L unit lower triangular by columns, its diagonal first
    in each.
    """
    n, d = b.shape
    if d == 2:  # two numbers that stay in registers
        for c in range(n):
            u, v = b[c, 0], b[c, 1]
            for q in range(starts[c] + 1, starts[c + 1]):
                row, entry = rows[q], entries[q]
                b[row, 0] -= entry * u
                b[row, 1] -= entry * v
        for c in range(n - 1, -1, -1):
            u, v = b[c, 0] * inverse_diagonal[c], b[c, 1] * inverse_diagonal[c]
            for q in range(starts[c] + 1, starts[c + 1]):
                row, entry = rows[q], entries[q]
                u -= entry * b[row, 0]
                v -= entry * b[row, 1]
            b[c, 0], b[c, 1] = u, v
        return
    # Forwards with L, then backwards with D and L in one pass.
    for c in range(n):
        for q in range(starts[c] + 1, starts[c + 1]):
            row, entry = rows[q], entries[q]
            for k in range(d):
                b[row, k] -= entry * b[c, k]
    for c in range(n - 1, -1, -1):
        for k in range(d):
            b[c, k] *= inverse_diagonal[c]
        for q in range(starts[c] + 1, starts[c + 1]):
            row, entry = rows[q], entries[q]
            for k in range(d):
                b[c, k] -= entry * b[row, k]


@njit(cache=True, **_FAST)
def direct_run(linear, factor, place, sigma, x, s, shrink, radius, rates, first, second, relax,
               forces, steps):
    """`steps` iterations on a list of edges with H_i = h_i I, by a factorisation of diag(h) + sigma
    B' diag(rates) B.

    place[i] is the place of user i in the order of elimination.
    """
    starts, rows, entries, inverse_diagonal = factor
    (n, d), primal, moved = x.shape, 0.0, 0.0
    b = np.empty((n, d))
    for step in range(steps):
        for i in range(n):
            for k in range(d):
                b[place[i], k] = linear[i, k] + sigma * forces[i, k]
        ldl_solve(starts, rows, entries, inverse_diagonal, b)
        for i in range(n):
            for k in range(d):
                x[i, k] = b[place[i], k]
        primal, moved = edges_pass(x, s, shrink, radius, rates, first, second, relax, forces,
                                   step == steps - 1)
    return primal, moved


@inner(**_FAST)
def _apply(hessians, degrees, starts, neighbours, sigma, x, out):
    """out <- (blockdiag(H) + sigma L) x; hessians are (n, d, d), or (n, 1, 1) for multiples of the
    identity.
    """
    n, d = x.shape
    scalar = hessians.shape[1] < d
    for i in range(n):
        for k in range(d):
            value = sigma * degrees[i] * x[i, k]
            if scalar:
                value += hessians[i, 0, 0] * x[i, k]
            else:
                for h in range(d):
                    value += hessians[i, k, h] * x[i, h]
            out[i, k] = value
        for q in range(starts[i], starts[i + 1]):
            j = neighbours[q]
            for k in range(d):
                out[i, k] -= sigma * x[j, k]


@inner(**_FAST)
def _blocks(inverses, r, out):
    total = 0.0
    n, d = r.shape
    scalar = inverses.shape[1] < d
    for i in range(n):
        for k in range(d):
            value = 0.0
            if scalar:
                value = inverses[i, 0, 0] * r[i, k]
            else:
                for h in range(d):
                    value += inverses[i, k, h] * r[i, h]
            out[i, k] = value
            total += value * r[i, k]
    return total


@njit(cache=True, **_FAST)
def cg_run(linear, hessians, inverses, degrees, starts, neighbours, sigma, x, s, shrink, radius,
           rates, first, second, relax, forces, steps):
    """`steps` iterations on a list of edges with any Hessians, by block-Jacobi preconditioned
    conjugate gradients.

    Each system starts from the last x and is solved until r' M r has fallen by 1e-7, M the
    preconditioner, or by 1e-4 where all Hessians are multiples of the identity: then no direction
    is worse conditioned than the others.
    """
    n, d = x.shape
    r, z, p, q = np.empty((n, d)), np.empty((n, d)), np.empty((n, d)), np.empty((n, d))
    primal, moved = 0.0, 0.0
    for step in range(steps):
        _apply(hessians, degrees, starts, neighbours, sigma, x, q)
        for i in range(n):
            for k in range(d):
                r[i, k] = linear[i, k] + sigma * forces[i, k] - q[i, k]
        rz = _blocks(inverses, r, z)
        enough = (1e-4 if hessians.shape[1] < d else 1e-7) * rz
        for i in range(n):
            for k in range(d):
                p[i, k] = z[i, k]
        for _ in range(100):
            # Written so that a NaN ends the loop too.
            if not rz > enough:
                break
            _apply(hessians, degrees, starts, neighbours, sigma, p, q)
            curvature = 0.0
            for i in range(n):
                for k in range(d):
                    curvature += p[i, k] * q[i, k]
            length = rz / curvature
            for i in range(n):
                for k in range(d):
                    x[i, k] += length * p[i, k]
                    r[i, k] -= length * q[i, k]
            new = _blocks(inverses, r, z)
            for i in range(n):
                for k in range(d):
                    p[i, k] = z[i, k] + new / rz * p[i, k]
            rz = new
        primal, moved = edges_pass(x, s, shrink, radius, rates, first, second, relax, forces,
                                   step == steps - 1)
    return primal, moved


@njit(cache=True, **_FAST)
def complete_forces(s, shrink, forces):
    """forces (d, n) <- B'(z - P)."""
    clear(forces)
    d, n = forces.shape
    e = 0
    for i in range(n):
        for j in range(i + 1, n):
            for k in range(d):
                push = s[k, e] * (1.0 - 2.0 * shrink[e])
                forces[k, i] += push
                forces[k, j] -= push
            e += 1


@njit(cache=True)
def complete_duals(s, shrink, sigma, n):
    """B'y (n, d) and the connected parts of the users joined by pairs whose dual is inside its
    ball.
    """
    d = s.shape[0]
    out, parent, labels = np.zeros((n, d)), np.empty(n, np.int64), np.empty(n, np.int64)
    separate(parent)
    e = 0
    for i in range(n - 1):
        for j in range(i + 1, n):
            for k in range(d):
                y = sigma * shrink[e] * s[k, e]
                out[i, k] += y
                out[j, k] -= y
            if shrink[e] >= 1.0:
                join(parent, i, j)
            e += 1
    number(parent, labels)
    return out, labels


@njit(cache=True)
def edges_duals(s, shrink, sigma, rates, first, second, n):
    """The same for a list of edges."""
    d, n_edges = s.shape
    out, parent, labels = np.zeros((n, d)), np.empty(n, np.int64), np.empty(n, np.int64)
    separate(parent)
    for e in range(n_edges):
        i, j = first[e], second[e]
        rate = sigma * rates[min(e, rates.size - 1)] * shrink[e]
        for k in range(d):
            y = rate * s[k, e]
            out[i, k] += y
            out[j, k] -= y
        if shrink[e] >= 1.0:
            join(parent, i, j)
    number(parent, labels)
    return out, labels


# Wide models: s is (n_edges, d), models and forces are (n, d), one edge after the other; d is so
# large that every loop over coordinates is long.

@njit(cache=True, **_FAST)
def wide_pass(x, s, shrink, radius, first, second, relax, forces, measure):
    """One pass over a list of edges; see `complete_pass`."""
    n_edges, d = s.shape
    clear(forces)
    before = np.empty(d if measure else 0, s.dtype)
    primal, moved = 0.0, 0.0
    # Numbers of the rows' own type, or every product would be made in float64.
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


@njit(cache=True, **_FAST)
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


@njit(cache=True, **_FAST)
def wide_retune(s, radius, new_radius, ratio, shrink):
    """`retune` for this order of numbers."""
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


@njit(cache=True, **_FAST)
def wide_duals(s, sigma, radii, first, second, n, out, keep):
    """B'y (n, d) and the parts of the users joined by duals inside their balls; fills the duals
    `out` if `keep`.
    """
    n_edges, d = s.shape
    flow, parent, labels = np.zeros((n, d)), np.empty(n, np.int64), np.empty(n, np.int64)
    separate(parent)
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
