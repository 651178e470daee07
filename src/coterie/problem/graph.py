"""Weighted graphs over users, which say which pairs are compared, and their difference operator B.

For the edge e = (i, j) with i < j,   (B models)_e = models_i - models_j,   and B' is `divergence`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from coterie.base.errors import InvalidInput
from coterie.base.labels import group_means
from coterie.base.machine import n_threads
from coterie.base.types import Array, Flags, Ints

if TYPE_CHECKING:
    from scipy.sparse import csr_array

# Users from which flows are computed by conjugate gradients: a factor of L can be nearly dense.
_MANY = 3000
# Relative residual at which these end, and the largest number of steps.
_ACCURATE, _STEPS = 1e-12, 300


@dataclass(frozen=True, eq=False)
class Graph:
    """A weighted graph over users 0 .. n_users - 1; build it with `complete`, `from_edges` or
    `knn`.

    A complete graph with one common weight does not store a list of its pairs; `edges` computes it
    when needed.

    Attributes
    ----------
    n_users
        Number of users.
    weights
        (n_edges,) the weight of each edge.
    pairs
        (n_edges, 2) users of each edge, the smaller number first; None: all pairs, in order.

    Example
    -------
    >>> graph = Graph.from_edges(3, [[0, 1], [1, 2]], weights=[1.0, 0.5])
    >>> graph
    Graph(3 users, 2 edges)
    >>> graph.penalty(np.array([[0.0], [1.0], [3.0]]))
    2.0
    """

    n_users: int
    weights: Array
    pairs: Ints | None = None

    @classmethod
    def complete(cls, n_users: int, weight: float = 1.0) -> Graph:
        """Build the graph of all pairs with one common weight; weight 1 is the paper's case.

        Parameters
        ----------
        n_users
            Number of users.
        weight
            The weight of every pair.

        Returns
        -------
        Graph
            The complete graph.

        Raises
        ------
        InvalidInput
            If the number or the weight is not valid.
        """
        n_users = _count(n_users)
        _check_weights(np.array([weight], dtype=float), None)
        return cls(n_users, np.broadcast_to(float(weight), (n_users * (n_users - 1) // 2,)))

    @classmethod
    def from_edges(cls, n_users: int, edges: npt.ArrayLike,
                   weights: npt.ArrayLike | None = None) -> Graph:
        """Build the graph of given pairs.

        Parameters
        ----------
        n_users
            Number of users.
        edges
            (n_edges, 2) pairs of user numbers, from 0; (i, j) and (j, i) are the same edge.
        weights
            (n_edges,) weights; the default is 1.

        Returns
        -------
        Graph
            Edges in the given order, each with the smaller number first.

        Raises
        ------
        InvalidInput
            If an edge is not a pair of two different users, an edge occurs twice, or a weight is
            not valid.
        """
        n_users = _count(n_users)
        given = np.asarray(edges)
        if given.size == 0:
            given = np.empty((0, 2), dtype=np.int64)
        if given.ndim != 2 or given.shape[1] != 2:
            raise InvalidInput("expected edges as an array of shape (n_edges, 2), got "
                               f"{given.shape}",
                               remedy="Give one row [i, j] for each pair of users")
        if not np.issubdtype(given.dtype, np.integer):
            raise InvalidInput(f"expected edges as whole user numbers, got {given.dtype}",
                               remedy="Users are numbered from 0 in the order of users.names; see "
                                      "users.index(name)")
        w = np.ones(len(given)) if weights is None else np.array(weights, dtype=float)
        if w.shape != (len(given),):
            raise InvalidInput(f"expected one weight for each of {len(given)} edges, got shape "
                               f"{w.shape}", remedy="Give as many weights as edges")
        outside = np.asarray(np.any((given < 0) | (given >= n_users), axis=1))
        _reject(given, outside, f"user numbers from 0 to {n_users - 1}",
                "Remove the edge or add the user")
        _reject(given, np.diff(given, axis=1)[:, 0] == 0, "edges between two different users",
                "Remove the edge")
        pairs = np.sort(given.astype(np.int64), axis=1)
        _, first, inverse = np.unique(pairs[:, 0] * n_users + pairs[:, 1], return_index=True,
                                      return_inverse=True)
        _reject(given, first[inverse] != np.arange(len(given)), "each pair of users once",
                "Remove the duplicate edge, or add its weight to the first")
        _check_weights(w, pairs)
        w.flags.writeable = pairs.flags.writeable = False
        return cls(n_users, w, pairs)

    @classmethod
    def knn(cls, points: npt.ArrayLike, k: int = 10, decay: float = 0.0) -> Graph:
        """Build the graph of nearest neighbours, with weights exp(-decay d^2).

        Parameters
        ----------
        points
            (n_users, n_coordinates) one point per user.
        k
            Number of neighbours; two users are connected if either is among the k nearest of the
            other.
        decay
            How fast weights decrease with the distance d; 0: all weights are 1.

        Returns
        -------
        Graph
            The graph of neighbours.

        Raises
        ------
        InvalidInput
            If the points are not finite, or k or decay is out of range.
        """
        from scipy.spatial import cKDTree

        p = np.ascontiguousarray(points, dtype=float)
        if p.ndim != 2 or not np.isfinite(p).all():
            raise InvalidInput("expected finite points of shape (n_users, n_coordinates), got "
                               f"shape {p.shape}", remedy="Give one row of numbers for each user")
        n = len(p)
        if not 1 <= k < max(n, 2):
            raise InvalidInput(f"k must be from 1 to n_users - 1 = {n - 1}, got {k}",
                               remedy="Lower k")
        if not (np.isfinite(decay) and decay >= 0):
            raise InvalidInput(f"decay must be a finite number >= 0, got {decay!r}",
                               remedy="Use for example 0.5")
        if n == 1:
            return cls.from_edges(1, [])
        # One more than k, because the nearest point is the point itself; with ties it can be
        # missing from the result.
        # Points that are close in space are then close in memory, too: several times faster for
        # many points.
        order = cKDTree(p).indices
        found = cKDTree(p[order]).query(p[order], k=k + 1, workers=n_threads())
        distances, neighbours = np.empty((n, k + 1)), np.empty((n, k + 1), dtype=np.int64)
        distances[order], neighbours[order] = found[0], order[found[1]]
        own = neighbours == np.arange(n)[:, None]
        own[~own.any(axis=1), -1] = True
        ends = np.stack([np.repeat(np.arange(n), k), neighbours[~own]], axis=1).astype(np.int64)
        pairs = np.sort(ends, axis=1)
        _, first = np.unique(pairs[:, 0] * n + pairs[:, 1], return_index=True)
        return cls.from_edges(n, pairs[first], np.exp(-decay * distances[~own][first] ** 2))

    @property
    def n_edges(self) -> int:
        """The number of edges."""
        return len(self.weights)

    @property
    def is_complete(self) -> bool:
        """Whether all pairs are edges with one common weight, which are not stored."""
        return self.pairs is None

    @cached_property
    def edges(self) -> Ints:
        """(n_edges, 2) user numbers, the smaller first."""
        if self.pairs is not None:
            return self.pairs
        return np.stack(np.triu_indices(self.n_users, 1), axis=1)

    @cached_property
    def notes(self) -> dict[str, Any]:
        """What solvers have found out about this graph, so that a path computes it once."""
        return {}

    def differences(self, models: Array) -> Array:
        """The difference of the models of every edge, the operator B.

        Parameters
        ----------
        models : (n_users, dim).

        Returns
        -------
        (n_edges, dim) models_i - models_j.

        Example
        -------
        >>> graph = Graph.from_edges(3, [[0, 1], [1, 2]], [1.0, 2.0])
        >>> graph.differences(np.array([[0.0], [1.0], [5.0]])).tolist()
        [[-1.0], [-4.0]]
        """
        if self.pairs is not None:
            return models[self.pairs[:, 0]] - models[self.pairs[:, 1]]
        from coterie.problem import edges as kernels

        return kernels.complete_differences(np.ascontiguousarray(models))

    def divergence(self, duals: Array) -> Array:
        """The sum of each user's edge vectors with the sign of the edge's direction, the operator
        B'.

        Parameters
        ----------
        duals : (n_edges, dim).

        Returns
        -------
        (n_users, dim) B' duals.

        Example
        -------
        >>> graph = Graph.from_edges(3, [[0, 1], [1, 2]], [1.0, 2.0])
        >>> graph.divergence(np.array([[1.0], [3.0]])).tolist()
        [[1.0], [2.0], [-3.0]]
        """
        from coterie.problem import edges as kernels

        if self.pairs is not None:
            return kernels.divergence(self.pairs, np.ascontiguousarray(duals), self.n_users)
        return kernels.complete_divergence(np.ascontiguousarray(duals), self.n_users)

    def penalty(self, models: Array) -> float:
        """The weighted sum of the lengths of the differences.

        Parameters
        ----------
        models : (n_users, dim).

        Returns
        -------
        sum_e weights_e ||models_i - models_j||.

        Example
        -------
        >>> graph = Graph.from_edges(3, [[0, 1], [1, 2]], [1.0, 2.0])
        >>> graph.penalty(np.array([[0.0], [1.0], [5.0]]))
        9.0
        """
        if self.n_edges == 0:
            return 0.0
        if self.pairs is not None:
            return float(self.weights @ np.linalg.norm(self.differences(models), axis=1))
        from coterie.problem import edges as kernels

        return float(self.weights[0]) * kernels.complete_length(np.ascontiguousarray(models))

    @cached_property
    def components(self) -> Ints:
        """(n_users,) component numbers, counting only edges of positive weight."""
        if self.pairs is None and self.n_edges and self.weights[0] > 0:
            return np.zeros(self.n_users, dtype=np.int64)
        if self.pairs is None:
            return np.arange(self.n_users)
        from scipy.sparse.csgraph import connected_components

        return np.asarray(connected_components(self._adjacency(), directed=False)[1],
                          dtype=np.int64)

    def subgraph(self, chosen: Flags) -> Graph:
        """The same users with only some of the edges.

        Parameters
        ----------
        chosen : (n_edges,) which edges to keep.

        Returns
        -------
        The graph.

        Example
        -------
        >>> graph = Graph.from_edges(3, [[0, 1], [1, 2]], [1.0, 2.0])
        >>> graph.subgraph(np.array([True, False])).edges.tolist()
        [[0, 1]]
        """
        return Graph(self.n_users, np.ascontiguousarray(self.weights[chosen]), self.edges[chosen])

    def take(self, users: Flags) -> Graph:
        """The graph of some of the users only, renumbered in order.

        Parameters
        ----------
        users : (n_users,) who is kept.

        Returns
        -------
        The graph.

        Example
        -------
        >>> graph = Graph.from_edges(3, [[0, 1], [1, 2]], [1.0, 2.0])
        >>> graph.take(np.array([False, True, True])).edges.tolist()
        [[0, 1]]
        """
        n = int(users.sum())
        if self.pairs is None:
            return Graph(n, np.full(n * (n - 1) // 2, self.weights[0] if self.n_edges else 1.0),
                         None)
        inside = self.inside(users)
        number = np.cumsum(users) - 1
        return Graph(n, np.ascontiguousarray(self.weights[inside]),
                     np.ascontiguousarray(number[self.pairs[inside]]))

    def inside(self, users: Flags) -> Flags:
        """Which edges are between some of the users.

        Parameters
        ----------
        users : (n_users,) who is meant.

        Returns
        -------
        (n_edges,) whether both users of each edge are among them.

        Example
        -------
        >>> graph = Graph.from_edges(3, [[0, 1], [1, 2]], [1.0, 2.0])
        >>> graph.inside(np.array([False, True, True])).tolist()
        [False, True]
        """
        return np.asarray(users[self.edges].all(axis=1))

    def flow(self, forces: Array) -> Array:
        """The electrical flow y = W B L^+ forces, with L = B' W B.

        It has the least norm, weighted by 1/weights, of all flows with B'y = forces. Forces that do
        not sum to zero over a component have no flow; their mean is subtracted. Weights below 1e-8
        times the largest are raised to this value, so that L can be inverted.

        Parameters
        ----------
        forces : (n_users, dim).

        Returns
        -------
        (n_edges, dim) the flow.

        Example
        -------
        >>> graph = Graph.from_edges(3, [[0, 1], [1, 2]], [1.0, 2.0])
        >>> graph.flow(np.array([[1.0], [0.0], [-1.0]])).round(9).tolist()
        [[1.0], [1.0]]
        """
        return self.flow_solver()(forces)

    def flow_solver(self) -> Callable[[Array], Array]:
        """A function that computes `flow` for many forces, with one factorisation of L.

        Returns
        -------
        The function, from (n_users, dim) forces to (n_edges, dim) flows.
        """
        if self.n_edges == 0 or not (self.weights > 0).any():
            return lambda forces: np.zeros((self.n_edges, forces.shape[1]))
        if self.pairs is None:  # L = w (n I - 11'), so W B L^+ = B / n
            return lambda forces: self.differences(forces / self.n_users)
        from scipy import sparse

        used = self.weights > 0
        conductance = np.where(used, np.maximum(self.weights, 1e-8 * self.weights.max()), 0.0)
        i, j = self.pairs[used].T
        half = sparse.csr_array((conductance[used], (i, j)), shape=(self.n_users, self.n_users))
        adjacency = half + half.T
        laplacian = sparse.diags_array(adjacency.sum(axis=1)) - adjacency
        # One user of each component at potential 0.
        grounded = np.unique(self.components, return_index=True)[1]
        free = np.setdiff1d(np.arange(self.n_users), grounded)
        if not free.size:
            return lambda forces: np.zeros((self.n_edges, forces.shape[1]))
        inner = laplacian.tocsr()[free][:, free]

        solve = laplacian_solver(inner)

        def flow(forces: Array) -> Array:
            forces = forces - group_means(forces, self.components)[self.components]
            potential = np.zeros_like(forces)
            potential[free] = solve(np.ascontiguousarray(forces[free]))
            return conductance[:, None] * self.differences(potential)

        return flow

    def _adjacency(self) -> csr_array:
        from scipy import sparse

        used = self.weights > 0
        i, j, w = *self.edges[used].T, self.weights[used]
        half = sparse.csr_array((w, (i, j)), shape=(self.n_users, self.n_users))
        return half + half.T

    def __repr__(self) -> str:
        kind = "complete, " if self.is_complete else ""
        return f"Graph({kind}{self.n_users:,} users, {self.n_edges:,} edges)"


def _count(n_users: int) -> int:
    if isinstance(n_users, bool) or int(n_users) != n_users or n_users < 1:
        raise InvalidInput(f"n_users must be a whole number >= 1, got {n_users!r}",
                           remedy="Give the number of users")
    return int(n_users)


def _reject(edges: npt.NDArray[Any], bad: Flags, expected: str, remedy: str) -> None:
    if bad.any():
        e = int(np.flatnonzero(bad)[0])
        raise InvalidInput(f"expected {expected}, got {tuple(edges[e].tolist())}",
                           where=f"edge {e}; {int(bad.sum())} such edges in all", remedy=remedy)


def _check_weights(weights: Array, pairs: Ints | None) -> None:
    bad = ~(np.isfinite(weights) & (weights >= 0))
    if bad.any():
        e = int(np.flatnonzero(bad)[0])
        where = f"edge {e}, users {tuple(pairs[e].tolist())}" if pairs is not None else ""
        raise InvalidInput(f"weights must be finite numbers >= 0, got {weights[e]:g}", where=where,
                           remedy="A weight of 0 takes the pair out of the penalty")


def laplacian_solver(matrix: csr_array) -> Callable[[Array], Array]:
    """A function that solves systems with a Laplacian without the rows of grounded users.

    Few users: one factorisation. Many: conjugate gradients, or the factorisation if these take too
    many steps, as on graphs of points in a plane, where a factor is small.
    """
    from scipy import sparse
    from scipy.sparse.linalg import splu

    @cache
    def factor() -> Any:
        return splu(sparse.csc_array(matrix), permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0,
                    options={"SymmetricMode": True})

    def solve(right: Array) -> Array:
        solved = _conjugate_gradients(matrix, right) if len(right) > _MANY else None
        return np.asarray(factor().solve(right)) if solved is None else solved

    return solve


def _conjugate_gradients(matrix: csr_array, right: Array) -> Array | None:
    """matrix^-1 right to nearly all digits; None if that takes too many steps. All columns advance
    together.
    """
    inverse = 1.0 / matrix.diagonal()[:, None]
    x, r = np.zeros_like(right), right.copy()
    z = inverse * r
    p, rz = z.copy(), np.einsum("nd,nd->d", r, z)
    enough = _ACCURATE**2 * np.einsum("nd,nd->d", right, inverse * right)
    for _ in range(_STEPS):
        if (rz <= enough).all():
            return x
        Ap = matrix @ p
        a = rz / np.maximum(np.einsum("nd,nd->d", p, Ap), 1e-300)
        x += a * p
        r -= a * Ap
        z = inverse * r
        before, rz = rz, np.einsum("nd,nd->d", r, z)
        p = z + (rz / np.maximum(before, 1e-300)) * p
    return None
