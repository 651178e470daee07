"""Exact groups from iterates that are only nearly equal, with what the server knows of the losses.
"""

from __future__ import annotations

import numpy as np

from coterie.base.labels import group_means
from coterie.base.types import Array
from coterie.federated.algorithms.edges import Pairs
from coterie.federated.plausible import capped
from coterie.problem.graph import Graph

# Distances, relative to the largest model.
_CLOSE = (0.0, 1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)


def fused(graph: Graph, lam: float, pairs: Pairs, models: Array, difference: Array, slopes: Array,
          curvature: Array) -> Array:
    """(n_users, dim) models in which nearly equal ones are made equal, with as few groups as the
    slopes allow.

    Users are merged if all their z are zero, or if their models are close. Of several distances for
    "close", the largest is used whose objective, estimated from the users' slopes and curvatures,
    is no worse.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    n = len(models)
    apart = np.linalg.norm(models[pairs.heads] - models[pairs.tails], axis=1)
    zero = np.full(graph.n_edges, True)
    np.logical_and.at(zero, pairs.edge, ~difference.any(axis=1))
    size = float(np.abs(models).max(initial=0.0))
    active = graph.subgraph(np.isin(np.arange(graph.n_edges), pairs.edge))
    best, least, seen = models, lam * active.penalty(models), n
    for close in _CLOSE:
        joined = zero[pairs.edge] | (apart <= close * size)
        links = csr_array((np.ones(joined.sum()), (pairs.heads[joined], pairs.tails[joined])),
                          shape=(n, n))
        count, labels = connected_components(links, directed=False)
        if count == seen:
            continue
        seen = count
        means = group_means(models, labels, count)[labels]
        step = means - models
        rise = float((slopes * step).sum() + 0.5 * (curvature * (step**2).sum(axis=1)).sum())
        total = lam * active.penalty(means) + rise
        if total <= least + 1e-12 * abs(least):
            best, least = means, total
    return best


def missed(graph: Graph, lam: float, models: Array, duals: Array, points: Array, values: Array,
           slopes: Array,
           curvature: Array) -> tuple[float, float]:
    """An estimate of the relative gap of models and duals, from the users' values, slopes and
    curvatures.

    It is the sum of ||grad f_i + (B'y)_i||^2 / (2 h_i) over users, and of the part of the penalty
    that the duals lack; the second number is the same with a sum in which no single user counts for
    much.
    """
    if not np.isfinite(curvature).all():
        return np.inf, np.inf
    h = np.maximum(curvature, 1e-12 * curvature.max() + 1e-300)
    forces = graph.divergence(duals)
    lack = ((slopes + h[:, None] * (models - points) + forces) ** 2).sum(axis=1) / (2 * h)
    penalty = lam * graph.penalty(models)
    slack = max(penalty - float((forces * models).sum()), 0.0)
    size = max(abs(float(capped(values).sum()) + penalty), 1e-300)
    gap, rest = (float(part.sum() + slack) / size for part in (lack, capped(lack)))
    return gap if np.isfinite(gap) else np.inf, rest if np.isfinite(rest) else np.inf
