"""Weights from the local models of the users.

Unit weights on all pairs, the paper's case, need groups that are well separated. Weights that
decrease with the distance of the local models find groups that are closer together. All kinds need
one round in which users send their local models; the Wald distance also needs their Hessians:

    wald_ij^2 = (x_i - x_j)' (S_i + S_j)^-1 (x_i - x_j) / dim,     S_i = H_i^-1 / m_i

It gives less weight to directions in which a model from few samples is uncertain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from coterie.base.errors import InvalidInput
from coterie.base.types import Array, Ints
from coterie.data.users import Users
from coterie.losses import Loss, Samples
from coterie.losses.curvature import GroupCurvature
from coterie.losses.newton import whiten
from coterie.losses.rows import too_wide
from coterie.problem.graph import Graph

_SMALLEST = 1e-3  # weight in a graph that is kept connected
_FARTHEST = 1e300  # squared distance; larger ones overflow
_WIDE_PAIRS = 32  # pairs of users with wide models whose rows are copied at the same time
#: Takes pairs (n, 2) of users to the squares of their Wald distances.
WaldDistances = Callable[[Ints], Array]
_CHUNK = 4000  # pairs that are computed at the same time
KINDS = ("auto", "unit", "gaussian", "inverse", "wald")


@dataclass(frozen=True, eq=False)
class LocalModels:
    """The summary that every user can send in one round: its local model, the Hessian at it, and
    its sample count.

    Attributes
    ----------
    models
        (n_users, dim) the local models.
    hessians
        (n_users, dim, dim) the Hessian of each user's loss at its local model; empty where models
        are wide.
    counts
        (n_users,) the number of samples of each user.
    wide
        The squared Wald distances of pairs of users, where Hessians are operators because models
        are wide.

    Example
    -------
    >>> import coterie as ct
    >>> from coterie.datasets import clustered
    >>> local = LocalModels.of(clustered("logistic", n_users=4, n_clusters=2).users, ct.Logistic())
    >>> local.models.shape, local.hessians.shape
    ((4, 3), (4, 3, 3))
    """

    models: Array
    hessians: Array
    counts: Array | Ints
    wide: WaldDistances | None = None

    @classmethod
    def of(cls, users: Users, loss: Loss, ridge: float = 1e-3) -> LocalModels:
        """Fit every user separately.

        Parameters
        ----------
        users, loss
            The data and the loss.
        ridge
            L2 strength, intercept included, added to the loss so that every user has a unique local
            model.

        Returns
        -------
        LocalModels
            Models, Hessians and counts.

        Raises
        ------
        InvalidInput
            If the targets do not fit the loss.
        """
        samples = loss.prepare(users)
        models = loss.prox(samples, None, ridge, None).points
        if too_wide(loss, samples):
            return cls(models, np.empty((users.n_users, 0, 0)), users.sizes,
                       partial(_wide_squares, loss, samples, ridge, models, users.sizes))
        hessians = loss.hessians(samples, models) + ridge * np.eye(samples.dim)
        return cls(models, hessians, users.sizes)

    @property
    def covariances(self) -> Array:
        """(n_users, dim, dim) S_i = H_i^-1 / m_i."""
        return self.inverses / self.counts[:, None, None]

    @property
    def inverses(self) -> Array:
        """(n_users, dim, dim) H_i^-1, positive semidefinite also for Hessians that rounding made
        indefinite.
        """
        roots = whiten(self.hessians, np.eye(self.hessians.shape[1]))
        return roots.swapaxes(1, 2) @ roots


def adaptive_graph(local: LocalModels, kind: str = "auto", k: int | None = 5, *,
                   scale: float | None = None, connected: bool = True) -> Graph:
    """Build a graph over the users with weights from their local models.

    Parameters
    ----------
    local
        The local models of the users.
    kind
        "unit" (1), "gaussian" (exp(-d^2 / scale), d Euclidean), "inverse" (scale / (scale + d)) or
        "wald" (exp(-d^2 / scale), d the Wald distance); "auto" is "wald".
    k
        Number of nearest users (by the same distance) that each user is connected to; None: all
        pairs.
    scale
        See `kind`; None: the median of d^2 (of d for "inverse") over the edges.
    connected
        Whether separate components are connected by their closest pairs; then no weight is below
        0.001, because smaller weights would have no effect.

    Returns
    -------
    Graph
        The weighted graph.

    Raises
    ------
    InvalidInput
        If the kind is unknown, or k is smaller than 1.

    Example
    -------
    >>> import coterie as ct
    >>> from coterie.datasets import clustered
    >>> local = LocalModels.of(clustered("logistic", n_users=12).users, ct.Logistic())
    >>> adaptive_graph(local, "wald", k=None)
    Graph(12 users, 66 edges)
    """
    if kind not in KINDS:
        raise InvalidInput(f"unknown weights {kind!r}", remedy=f"Choose one of: {', '.join(KINDS)}")
    kind = "wald" if kind == "auto" else kind
    n = len(local.models)
    if k is not None and k < 1:
        raise InvalidInput(f"k must be at least 1, got {k!r}",
                           remedy="Use for example 5, or None for all pairs")
    if kind == "unit" and (k is None or k >= n - 1):
        return Graph.complete(n)
    metric = None if kind != "wald" else local.wide or local.covariances
    pairs, squares = _pairs(local.models, metric, k, connected)
    if kind == "unit":
        return Graph.from_edges(n, pairs)
    distances = np.sqrt(squares) if kind == "inverse" else squares
    if scale is None:
        scale = float(np.median(distances)) if len(distances) else 1.0
    scale = max(scale, 1e-300)
    with np.errstate(over="ignore"):  # a distance much larger than the scale has weight 0
        weights = scale / (scale + distances) if kind == "inverse" else np.exp(-distances / scale)
    if connected:
        weights = np.maximum(weights, _SMALLEST)
    return Graph.from_edges(n, pairs, weights)


def _pairs(models: Array, covariances: Array | WaldDistances | None, k: int | None,
           connected: bool) -> tuple[Ints, Array]:
    """The edges and their squared distances."""
    n = len(models)
    if k is None or k >= n - 1:
        pairs = np.stack(np.triu_indices(n, 1), axis=1)
        return pairs, _squares(models, pairs, covariances)
    pairs, squares = _nearest(models, covariances, k)
    return _connect(models, covariances, pairs, squares) if connected else (pairs, squares)


def _wide_squares(loss: Loss, samples: Samples, ridge: float, models: Array, counts: Ints,
                  pairs: Ints) -> Array:
    """Squared Wald distances from Hessians as operators, A_i = m_i (H_i + ridge):

        (A_i^-1 + A_j^-1)^-1 = A_i (A_i + A_j)^-1 A_j,      systems in A_i + A_j by conjugate
                                                            gradients
    """
    out = np.empty(len(pairs))
    for start in range(0, len(pairs), _WIDE_PAIRS):
        some = pairs[start:start + _WIDE_PAIRS]
        ends, n = some.T.ravel(), len(some)
        curvature = loss.expand(samples, models[ends], ends)[2]
        gaps = np.tile(models[some[:, 0]] - models[some[:, 1]], (2, 1))
        weights = counts[ends].astype(float)
        forces = weights[:, None] * (curvature.times(gaps) + ridge * gaps)  # A_i gap, then A_j gap
        both = GroupCurvature(curvature, np.tile(np.arange(n), 2), weights, n)
        moved = both.inverse(ridge * (weights[:n] + weights[n:]))(forces[n:])
        out[start:start + n] = np.einsum("nd,nd->n", forces[:n], moved) / models.shape[1]
    return np.clip(out, 0.0, _FARTHEST)


def _squares(models: Array, pairs: Ints, covariances: Array | WaldDistances | None) -> Array:
    """Squared distances of pairs."""
    if callable(covariances):
        return covariances(pairs)
    i, j = np.ascontiguousarray(pairs.T)
    with np.errstate(over="ignore", invalid="ignore"):
        if covariances is None:
            return np.minimum(_in_chunks(
                lambda some: ((models[i[some]] - models[j[some]]) ** 2).sum(axis=1), i), _FARTHEST)
        from coterie.problem import edges as kernels

        squares = kernels.mahalanobis(np.ascontiguousarray(models),
                                      np.ascontiguousarray(covariances), i, j)
        # Rounding made these indefinite, or they overflow.
        rest = np.flatnonzero(~np.isfinite(squares))
        if rest.size:
            a, b = i[rest], j[rest]
            squares[rest] = _in_chunks(lambda some: (whiten(
                covariances[a[some]] + covariances[b[some]],
                (models[a[some]] - models[b[some]])[..., None]) ** 2).sum(axis=(1, 2)), a)
        return np.minimum(squares / models.shape[1], _FARTHEST)


def _in_chunks(function: Callable[[slice], Array], pairs: Ints) -> Array:
    """The numbers of all pairs, computed for some of them at a time to limit the memory."""
    chunks = [function(slice(start, start + _CHUNK)) for start in range(0, len(pairs), _CHUNK)]
    return np.concatenate([np.empty(0), *chunks])


def _nearest(models: Array, covariances: Array | WaldDistances | None,
             k: int) -> tuple[Ints, Array]:
    """Edges from each user to its k nearest; Wald neighbours are selected from Euclidean ones in
    the mean metric.
    """
    from scipy.spatial import cKDTree

    n = len(models)
    points, candidates = models, k
    if covariances is not None:
        # In the metric of the mean covariance, Wald distances are Euclidean up to the deviations of
        # single users.
        if not callable(covariances):
            points = whiten(covariances.mean(axis=0)[None], models.T)[0].T
        candidates = min(n - 1, 6 * k + 10)
    neighbours = cKDTree(points).query(points, k=candidates + 1)[1]
    own = neighbours == np.arange(n)[:, None]
    own[~own.any(axis=1), -1] = True
    ends = np.stack([np.repeat(np.arange(n), candidates), neighbours[~own]],
                    axis=1).astype(np.int64)
    squares = _squares(models, ends, covariances).reshape(n, candidates)
    chosen = np.argsort(squares, axis=1, kind="stable")[:, :k] + candidates * np.arange(n)[:, None]
    pairs = np.sort(ends[chosen.ravel()], axis=1)
    keys, first = np.unique(pairs[:, 0] * n + pairs[:, 1], return_index=True)
    return np.stack([keys // n, keys % n], axis=1), squares.ravel()[chosen.ravel()][first]


def _connect(models: Array, covariances: Array | WaldDistances | None, pairs: Ints,
             squares: Array) -> tuple[Ints, Array]:
    """Connect each component of a graph to the nearest other one, until there is only one."""
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
            distances, nearest = cKDTree(models[outside]).query(models[inside])
            best = int(distances.argmin())
            added.append(sorted((int(inside[best]), int(outside[nearest[best]]))))
        new = np.unique(np.array(added, dtype=np.int64), axis=0)
        pairs = np.concatenate([pairs, new])
        squares = np.concatenate([squares, _squares(models, new, covariances)])
