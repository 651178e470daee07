# mypy: disable-error-code="no-untyped-def"
"""Numba loops over the edges of a graph: its connected parts, and an order of its users."""

from __future__ import annotations

import numpy as np

from coterie.base.compiling import inner, njit


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
        for turn in range(2):
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
def joined(n, first, second, chosen):
    """(n,) the connected parts of 0 .. n-1 along the chosen pairs."""
    parent, labels = np.empty(n, np.int64), np.empty(n, np.int64)
    alone(parent)
    for e in range(chosen.size):
        if chosen[e]:
            join(parent, first[e], second[e])
    number(parent, labels)
    return labels


@inner()
def alone(parent):
    """parent <- the roots of parts of one each, see `join`."""
    for i in range(parent.size):
        parent[i] = i


@inner()
def join(parent, i, j):
    """Join the parts of i and j; the smaller root stays one."""
    while parent[i] != i:
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
        root = i
        while parent[root] != root:
            root = parent[root]
        if root == i:
            labels[i] = count
            count += 1
        else:
            labels[i] = labels[root]
