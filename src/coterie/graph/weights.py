"""Weights from the users' own models: who should be compared with whom, and how much.

Unit weights on all pairs, the paper's case, need clusters that stand far apart. Weights that fall with the distance of
the users' own best models find groups that lie closer. All of them need one round of local optima; the Wald distance
needs their Hessians too:

    wald_ij^2 = (x_i - x_j)' (S_i + S_j)^-1 (x_i - x_j) / dim,     S_i = H_i^-1 / m_i

discounts directions in which a user with few samples cannot know its model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coterie._typing import Array, Ints
from coterie.data.users import Users
from coterie.errors import InvalidInput
from coterie.graph import Graph
from coterie.losses import Loss

_LIGHTEST = 1e-3
KINDS = ("auto", "unit", "gaussian", "inverse", "wald")


@dataclass(frozen=True, eq=False)
class LocalModels:
    """What every user can tell of itself in one round: its best model, the curvature there, and how many samples."""

    models: Array  # (n_users, dim)
    hessians: Array  # (n_users, dim, dim)
    counts: Ints  # (n_users,)

    @classmethod
    def of(cls, users: Users, loss: Loss, ridge: float = 1e-3) -> LocalModels:
        """Fit every user alone; `ridge`/2 ||x||^2 is added on all coordinates, so that every user has a best model."""
        samples = loss.prepare(users)
        models = loss.prox(samples, None, ridge, None).points
        hessians = loss.hessians(samples, models) + ridge * np.eye(samples.dim)
        return cls(models, hessians, users.counts)

    @property
    def covariances(self) -> Array:
        """(n_users, dim, dim) S_i = H_i^-1 / m_i."""
        return np.linalg.inv(self.hessians) / self.counts[:, None, None]


def adaptive_graph(local: LocalModels, kind: str = "auto", k: int | None = 5, *, scale: float | None = None,
                   connected: bool = True) -> Graph:
    """A graph over the users with weights from their local models.

    Parameters
    ----------
    local : the users' own models.
    kind : "unit" (1), "gaussian" (exp(-d^2 / scale), d Euclidean), "inverse" (scale / (scale + d)) or "wald"
        (exp(-d^2 / scale), d the Wald distance); "auto" is "wald".
    k : each user joined to its k nearest (by the same distance); None means all pairs.
    scale : None means the median of d^2 (of d for "inverse") over the edges.
    connected : whether parts of the graph that no edge joins are joined by their closest pairs; then no edge weighs
        less than a thousandth, or its pull would vanish.
    """
    if kind not in KINDS:
        raise InvalidInput(f"unknown weights {kind!r}", remedy=f"Choose one of: {', '.join(KINDS)}")
    kind = "wald" if kind == "auto" else kind
    n = len(local.models)
    if k is not None and k < 1:
        raise InvalidInput(f"k must be at least 1, got {k!r}", remedy="Use for example 5, or None for all pairs")
    if kind == "unit" and (k is None or k >= n - 1):
        return Graph.complete(n)
    covariances = local.covariances if kind == "wald" else None
    if k is None or k >= n - 1:
        pairs = np.stack(np.triu_indices(n, 1), axis=1)
        squares = _squares(local.models, pairs, covariances)
    else:
        pairs, squares = _nearest(local.models, covariances, k)
        if connected:
            pairs, squares = _connect(local.models, covariances, pairs, squares)
    if kind == "unit":
        return Graph.from_edges(n, pairs)
    distances = np.sqrt(squares) if kind == "inverse" else squares
    if scale is None:
        scale = float(np.median(distances)) if len(distances) else 1.0
    scale = max(scale, 1e-300)
    weights = scale / (scale + distances) if kind == "inverse" else np.exp(-distances / scale)
    if connected:
        weights = np.maximum(weights, _LIGHTEST)
    return Graph.from_edges(n, pairs, weights)


def _squares(models: Array, pairs: Ints, covariances: Array | None) -> Array:
    """Squared distances of pairs, in chunks so that memory stays bounded."""
    out = np.empty(len(pairs))
    chunk = max(1, 2_000_000 // models.shape[1] ** 2)
    for start in range(0, len(pairs), chunk):
        i, j = pairs[start:start + chunk].T
        gap = models[i] - models[j]
        if covariances is None:
            out[start:start + chunk] = (gap**2).sum(axis=1)
        else:
            solved = np.linalg.solve(covariances[i] + covariances[j], gap[..., None])[..., 0]
            out[start:start + chunk] = (gap * solved).sum(axis=1) / models.shape[1]
    return out


def _nearest(models: Array, covariances: Array | None, k: int) -> tuple[Ints, Array]:
    """Edges from each user to its k nearest. Wald neighbours are sought among Euclidean ones in the average metric."""
    from scipy.spatial import cKDTree

    n = len(models)
    points, candidates = models, k
    if covariances is not None:
        # In the metric of the average covariance, Wald distances are Euclidean but for how users differ from it.
        points = models @ np.linalg.cholesky(np.linalg.inv(covariances.mean(axis=0)))
        candidates = min(n - 1, 6 * k + 10)
    found = cKDTree(points).query(points, k=candidates + 1)[1]
    own = found == np.arange(n)[:, None]
    own[~own.any(axis=1), -1] = True
    ends = np.stack([np.repeat(np.arange(n), candidates), found[~own]], axis=1).astype(np.int64)
    squares = _squares(models, ends, covariances).reshape(n, candidates)
    chosen = np.argsort(squares, axis=1, kind="stable")[:, :k] + candidates * np.arange(n)[:, None]
    pairs = np.sort(ends[chosen.ravel()], axis=1)
    keys, first = np.unique(pairs[:, 0] * n + pairs[:, 1], return_index=True)
    return np.stack([keys // n, keys % n], axis=1), squares.ravel()[chosen.ravel()][first]


def _connect(models: Array, covariances: Array | None, pairs: Ints, squares: Array) -> tuple[Ints, Array]:
    """Join the parts of a graph, each to the nearest other, until there is one."""
    from scipy.spatial import cKDTree

    n = len(models)
    while True:
        parts = Graph.from_edges(n, pairs).components
        sizes = np.bincount(parts)
        if sizes.size == 1:
            return pairs, squares
        added = []
        for part in np.flatnonzero(sizes <= sizes.max())[np.argsort(sizes)][:-1]:
            inside, outside = np.flatnonzero(parts == part), np.flatnonzero(parts != part)
            distances, found = cKDTree(models[outside]).query(models[inside])
            best = int(distances.argmin())
            added.append(sorted((int(inside[best]), int(outside[found[best]]))))
        new = np.unique(np.array(added, dtype=np.int64), axis=0)
        pairs = np.concatenate([pairs, new])
        squares = np.concatenate([squares, _squares(models, new, covariances)])
