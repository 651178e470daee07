"""Splitting on narrow graphs with scalar curvatures: one factorisation for many passes, and shorter
problems between.

The linear system of a pass is diag(h) + B' diag(sigma_e) B, factorised once for many passes. The
step size of an edge is the geometric mean of a common one and of the curvature of its norm across
its direction,

    sigma_e = sqrt(common * radii_e / ||x_i - x_j||),        within limits where users are fused, or
                                                             far apart

Between two batches of passes, users joined by duals well inside their balls count as one. With h
and linear summed over such users, and radii over their edges, this is a problem of the same form on
far fewer users, whose passes are cheap. It is solved accurately. Its models are models of all
users, and its duals are shared among the edges that it merged, in proportion to their radii, so
they stay feasible. What remains to the next batch are the flows inside the parts. Where users were
joined that should not be, the batch separates them again.
"""

from __future__ import annotations

from typing import ClassVar
from weakref import WeakKeyDictionary

import numpy as np

from coterie.base.labels import group_means, group_sums
from coterie.base.types import Array, Ints
from coterie.problem.graph import Graph
from coterie.solvers import contract_kernels, kernels
from coterie.solvers.engines import RELAX, Listed

_SHARE = 0.8  # of its radius, below which a dual joins its users
_SHORTER = 0.7  # largest share of users left for which a shorter problem is worth it
_BATCH, _BATCHES = 20, 10  # passes on a shorter problem between two looks at its gap, and looks
_LOW, _HIGH = 0.1, 50.0  # limits of sigma_e, in units of the common one
_ADAPTED = 1  # how often sigma_e is set
_SMALL = 300  # number of users up to which a shorter problem does not save time
_APART = 20  # passes between two shorter problems

#: Places of the users in the order of elimination, so that a path computes them once.
_PLACES: WeakKeyDictionary[Graph, Ints] = WeakKeyDictionary()


class Direct(Listed):
    """H_i = h_i I and an elimination order with little fill: one sparse factorisation of diag(h) +
    B' diag(sigma) B.

    Attributes
    ----------
    common : the step size that is right for curvatures h alone.
    passes, next_shorter : passes made, and before the next shorter problem.
    adapted : how often sigma_e was set.
    h, linear, factor : the quadratic models, and the factors of the system.
    """

    stiffness: ClassVar[float] = 60.0
    batch: ClassVar[int] = 10
    patience: ClassVar[int] = 200

    def __init__(self, graph: Graph, dim: int, lam: float, order: Ints) -> None:
        super().__init__(graph, dim, lam, order)
        self.common, self.adapted, self.passes, self.next_shorter = 0.0, 0, 0, _APART
        self.h: Array = np.empty(0)

    def first_sigma(self, models: Array, usual: float) -> float:
        """sqrt(usual * radii_e / ||x_i - x_j||), its geometric mean over the edges."""
        self.common, lengths = usual, self._in(self.lengths(models))
        radii = np.broadcast_to(self._radii, lengths.shape)
        used = (radii > 0) & (lengths > 0)
        if not used.any():
            return usual
        lengths = np.maximum(lengths[used], 1e-3 * np.median(lengths[used]))
        curvature = float(np.exp(np.log(radii[used] / lengths).mean()))
        return float(np.clip(np.sqrt(usual * curvature), _LOW * usual, _HIGH * usual))

    def begin(self, models: Array, duals: Array | None, sigma: float) -> None:
        super().begin(models, duals, sigma)
        self.common, self.h = self.common or sigma, np.empty(0)

    def retune(self, sigma: float) -> None:
        super().retune(sigma)
        self.h = np.empty(0)  # factorise again

    def model(self, hessians: Array, linear: Array) -> None:
        self.set_model(hessians[self.order, 0, 0], np.ascontiguousarray(linear[self.order]))

    def set_model(self, h: Array, linear: Array) -> None:
        """Set the quadratic models, in the order of storage."""
        self.linear = linear
        if not np.array_equal(self.h, h):
            self.h = h
            self._factorise()

    def _factorise(self) -> None:
        from scipy import sparse
        from scipy.sparse.linalg import splu

        n, places = self.graph.n_users, _PLACES.get(self.graph)
        self.place = np.arange(n) if places is None else places
        steps = np.broadcast_to(self.sigma * self.rates, self.first.shape)
        degrees = np.bincount(self.first, steps, n) + np.bincount(self.second, steps, n)
        i, j = self.place[self.first], self.place[self.second]
        matrix = sparse.csc_array((np.concatenate([-steps, -steps, self.h + degrees]),
                                   (np.concatenate([i, j, self.place]),
                                    np.concatenate([j, i, self.place]))),
                                  shape=(n, n))
        lu = splu(matrix, permc_spec="MMD_AT_PLUS_A" if places is None else "NATURAL",
                  diag_pivot_thresh=0.0,
                  options={"SymmetricMode": True})
        if places is None:  # a positive definite matrix needs no other order of its rows
            self.place = _PLACES[self.graph] = lu.perm_c.astype(np.int64)
        lower = lu.L.tocsc()
        lower.sort_indices()
        self.factor = (lower.indptr, lower.indices, lower.data, 1.0 / lu.U.diagonal())

    def run(self, steps: int) -> tuple[float, float]:
        if self.passes >= self.next_shorter:
            self._shorten()
            self.next_shorter = self.passes + _APART
        self.passes += steps
        return kernels.direct_run(self.linear, self.factor, self.place, self.sigma, self.x, self.s,
                                  self.shrink,
                                  self.radius, self.rates, self.first, self.second, RELAX,
                                  self.forces, steps)

    def _shorten(self) -> None:
        """Solve the problem between users joined by duals well inside their balls, and continue
        from its solution.
        """
        n = self.graph.n_users
        labels = contract_kernels.interior(self.s, self.shrink, self.radius, _SHARE, self.first,
                                           self.second, n)
        parts = int(labels.max()) + 1
        x = self.x
        if n > _SMALL and parts <= _SHORTER * n:
            ends, pair = contract_kernels.contracted(labels, parts, self.first, self.second)
            if len(ends):
                x = self._between(labels, ends, pair)[labels]
        if self.adapted < _ADAPTED:
            self._adapt(x)
        self._settle()

    def _between(self, labels: Ints, ends: Ints, pair: Ints) -> Array:
        """Solve the problem between parts; returns their models."""
        duals, rates, radii = contract_kernels.summed(self.s, self.shrink, self.rates, self._radii,
                                                      pair, len(ends))
        duals *= self.sigma
        parts = int(labels.max()) + 1
        short = Direct(Graph(parts, radii, ends), self.dim, 1.0, np.arange(parts))
        short.rates, short.common = rates[short.edge_order], self.common
        short.begin(group_means(self.x, labels), duals, self.sigma)
        short.set_model(group_sums(self.h, labels), group_sums(self.linear, labels))
        for _ in range(_BATCHES):
            short.run(_BATCH)
            if short.gap() <= self.enough:
                break
        rest = np.empty_like(duals)
        rest[short.edge_order] = ((1.0 - short.shrink) * short.s).T
        contract_kernels.carry(self.s, self.shrink, self.rates, self._radii, pair, rest,
                               short.duals() - duals, radii,
                               self.sigma)
        return short.x

    def _adapt(self, x: Array) -> None:
        """Set sigma_e from the lengths of the differences of x."""
        self.adapted += 1
        lengths = np.linalg.norm(x[self.first] - x[self.second], axis=1)
        steps = np.sqrt(self.common * self._radii / np.maximum(lengths, 1e-300))
        rates = np.clip(steps, _LOW * self.common, _HIGH * self.common) / self.sigma
        contract_kernels.rescale(self.s, self.shrink, self.rates, rates, self._radii, self.sigma)
        self.rates = rates
        self._factorise()

    def gap(self) -> float:
        """The duality gap after users joined by duals inside their balls get one model."""
        labels = contract_kernels.interior(self.s, self.shrink, self.radius, 1.0, self.first,
                                           self.second,
                                           self.graph.n_users)
        return float(contract_kernels.merged_gap(
            self.x, self.h, self.linear, self.s, self.shrink, self.sigma, self.rates, self._radii,
                                                 self.first,
            self.second, labels, int(labels.max()) + 1))
