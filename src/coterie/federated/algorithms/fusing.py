"""Exact clusters from iterates that only nearly agree, by what the server knows of the losses."""

from __future__ import annotations

import numpy as np

from coterie._typing import Array
from coterie.federated.algorithms.edges import Pairs
from coterie.graph import Graph
from coterie.labels import group_means

_CLOSE = (0.0, 1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)  # distances beside the largest model


def fused(graph: Graph, lam: float, pairs: Pairs, models: Array, difference: Array, slopes: Array,
          curvature: Array) -> Array:
    """(n_users, dim) models, those as good as equal made equal: the coarsest that the users' slopes allow.

    Users are joined where all their z are zero, or where their models are close; of several lengths for "close" the
    largest is taken whose objective, by the users' slopes and curvatures, is no worse.
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
        links = csr_array((np.ones(joined.sum()), (pairs.heads[joined], pairs.tails[joined])), shape=(n, n))
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


def missed(graph: Graph, lam: float, models: Array, duals: Array, points: Array, values: Array, slopes: Array,
           curvature: Array) -> float:
    """About the relative gap of models and duals, by the users' values, slopes and curvatures at their points.

    The bound misses about ||grad f_i + (B'y)_i||^2 / (2 h_i) of every user, and what the duals leave of the penalty.
    """
    if not np.isfinite(curvature).all():
        return np.inf
    h = np.maximum(curvature, 1e-12 * curvature.max() + 1e-300)
    forces = graph.divergence(duals)
    lack = ((slopes + h[:, None] * (models - points) + forces) ** 2).sum(axis=1)
    penalty = lam * graph.penalty(models)
    slack = max(penalty - float((forces * models).sum()), 0.0)
    gap = float((lack / (2 * h)).sum() + slack) / max(abs(float(values.sum()) + penalty), 1e-300)
    return gap if np.isfinite(gap) else np.inf
