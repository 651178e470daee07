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


def missed(graph: Graph, lam: float, models: Array, duals: Array, lack: Array,
           values: Array) -> float:
    """An estimate of the relative gap of models and duals: the users' lacks, and the part of the
    penalty that the duals lack.
    """
    if not np.isfinite(lack).all():
        return np.inf
    penalty = lam * graph.penalty(models)
    slack = max(penalty - float((graph.divergence(duals) * models).sum()), 0.0)
    gap = float(lack.sum() + slack) / max(abs(float(capped(values).sum()) + penalty), 1e-300)
    return gap if np.isfinite(gap) else np.inf


def lacks(graph: Graph, models: Array, duals: Array, points: Array, slopes: Array,
          curvature: Array) -> Array:
    """(n,) ||grad f_i + (B'y)_i||^2 / (2 h_i), from slopes and curvatures h at other points; nan
    for users whose curvature is not known.
    """
    h = np.maximum(curvature, 1e-12 * curvature.max() + 1e-300)
    lack = slopes + h[:, None] * (models - points) + graph.divergence(duals)
    return np.asarray((lack**2).sum(axis=1) / (2 * h))
