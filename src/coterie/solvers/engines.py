"""The iteration of the fast solver for each kind of problem, chosen by the graph and the loss.

All make the same steps (Douglas-Rachford splitting, Lions and Mercier 1979, on z = B x): with the
losses replaced by quadratic models q_i(x) = 1/2 x'H_i x - <linear_i, x>,

    x  <-  argmin sum_i q_i(x_i) + sigma/2 ||B x - (z - P)||^2         a linear system
    s  <-  s + relax (B x - z),      P <- projection of s,  z <- s - P    one pass over the edges

The engines differ in the linear system: `Complete` has a closed form, `Listed` a dense inverse or
conjugate gradients, `Direct` a sparse factorisation, and those of `wide` never form a Hessian.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from coterie.base.labels import group_means, group_sums
from coterie.base.machine import require_memory
from coterie.base.types import Array, Ints
from coterie.losses.linear import MOST_COORDINATES
from coterie.problem.certificates import project
from coterie.problem.graph import Graph
from coterie.solvers import group_kernels, kernels, loss_kernels

if TYPE_CHECKING:
    from coterie.solvers.expansion import Expansion

RELAX = 1.8
_DENSE = 300  # largest number of unknowns for which the complete system is inverted
# Sigma is changed by a factor, at first `_TURN`, outside these limits of
# ||B x - z|| / ||change of z||; it stays within `_RANGE` times the first one.
_TURN, _TOO_LOW, _TOO_HIGH, _RANGE = 3.0, 2.0, 1.03 / 1.8, 1e5
# Pairs visited while duals are built, if that allows a few rounds; and rounds.
_PROOF, _MOST_ROUNDS = 2e6, 128
# Rounds of building duals on a list of edges, and the largest number of edges for it; the same
# where the groups are probably right.
_ROUNDS, _PROVABLE, _GUESSED = 8, 3_000, 200_000
# `Direct`: share of its radius below which a dual joins its users; largest share of users left for
# which a shorter problem is worth it, and number of users up to which none is.
_SHARE, _SHORTER, _SMALL = 0.8, 0.7, 300
# Passes between two shorter problems; on one, between two looks at its gap, and looks.
_APART, _BATCH, _BATCHES = 20, 20, 10
# Limits of sigma_e, in units of the common one; how often sigma_e is set.
_LOW, _HIGH, _ADAPTED = 0.1, 50.0, 1


class Engine:
    """State and steps on one problem; the public methods number users and edges as in the graph.

    Attributes
    ----------
    graph, dim : of the problem.
    stiffness : first sigma, in units of curvature / degree.
    exact_start : whether it is right for quadratic losses, except for groups close together.
    batch, patience : passes between two looks at quadratic losses; before the first change of
        sigma.
    s, shrink : (dim, n_edges) and (n_edges,) the state of the edges, see `kernels`.
    sigma, rates : the step size, and (1,) or (n_edges,) that of each edge in units of it.
    first_sigma, pace, turned, changes, next_change : sigma at the start, the factor of its next
        change (smaller after every change of direction), the direction of the last one, their
        number, and the passes before the next.
    enough : duality gap below which parts of the problem are solved.
    guessed : whether the groups to be proved are probably right, so that building duals pays.
    lack : (n_users, dim) what the duals of the last proof lack, if some group must split.
    built : (n_edges, dim) where the last proof ended, and can be continued.
    """

    stiffness: ClassVar[float] = 12.0
    exact_start: ClassVar[bool] = False
    batch: ClassVar[int] = 20
    patience: ClassVar[int] = 20
    s: Array
    shrink: Array
    sigma: float
    lack: Array | None = None
    built: Array | None = None
    guessed = False
    enough = 0.0

    def __init__(self, graph: Graph, dim: int, lam: float) -> None:
        self.graph, self.dim, self.rates = graph, dim, np.ones(1)
        one = graph.n_edges > 0 and graph.weights.strides == (0,)
        weights = np.ascontiguousarray(graph.weights[:1] if one else graph.weights)
        self._radii = lam * weights  # (1,) or (n_edges,)
        self.pace, self.turned, self.changes, self.next_change = _TURN, 0, 0, self.patience

    @property
    def radius(self) -> Array:
        """(1,) or (n_edges,) the radii of P."""
        return self._radii / (self.sigma * self.rates)

    def choose_sigma(self, models: Array, usual: float) -> float:
        """The first sigma for quadratic losses and a start from these models."""
        return usual

    def closeness(self, gradients: Array) -> float:
        """The factor of the first sigma, for losses with these gradients at zero."""
        return 1.0

    def begin(self, models: Array, duals: Array | None, sigma: float) -> None:
        """Start from models and duals: z = B models, P = duals / sigma."""
        self.sigma = self.first_sigma = sigma
        self.s = np.array(self._in(self.graph.differences(models)).T, order="C")
        if duals is not None:
            self.s += self._in(duals).T / (sigma * self.rates)
        norms = np.sqrt(np.einsum("ke,ke->e", self.s, self.s)) + 1e-300
        with np.errstate(over="ignore"):  # an infinite radius
            self.shrink = np.minimum(1.0, self.radius / norms)
        self._set_models(models)
        self._compute_forces()

    def lengths(self, models: Array) -> Array:
        """(n_edges,) the distances of neighbours."""
        return np.asarray(np.linalg.norm(self.graph.differences(models), axis=1))

    def balance(self, primal: float, moved: float) -> int:
        """Residual balancing: 1 to increase sigma, as z lags behind B x; -1 to decrease it; 0."""
        ratio = np.sqrt(primal / (moved + 1e-300))
        return 1 if ratio > _TOO_LOW else -1 if ratio < _TOO_HIGH else 0

    def adapt(self, turn: int, passes: int) -> None:
        """Change sigma in this direction, if it is time to."""
        if not turn or self.pace <= 1.3 or passes < self.next_change:
            return
        if self.turned and turn != self.turned:
            self.pace = np.sqrt(self.pace)
        self.turned, self.changes = turn, self.changes + 1
        low, high = self.first_sigma / _RANGE, self.first_sigma * _RANGE
        self.retune(float(np.clip(self.sigma * self.pace**turn, low, high)))
        self.next_change = passes + 20 * (1 + self.changes // 2)

    def retune(self, sigma: float) -> None:
        """Continue with another sigma; z and the duals do not change."""
        radius, ratio, self.sigma = self.radius, self.sigma / sigma, sigma
        kernels.retune(self.s, self.shrink, radius, self.radius, ratio)
        self._compute_forces()

    def duals(self) -> Array:
        """(n_edges, dim) feasible duals."""
        return self._out(np.ascontiguousarray((self.sigma * self.rates * self.shrink * self.s).T))

    def refine(self) -> None:
        """Continue with more accurate arithmetic, if there is any."""

    def prove(self, labels: Ints, models: Array, gradients: Array, enough: float,
              begin: Array | None = None, share: float = 1.0) -> Array | None:
        """Build duals for these groups, with ||gradients + B'y||^2 <= share * enough if possible.

        They are built from `begin`, a `built` of a proof for the same groups, or from the current
        duals. None if that is expensive, or if some group must split.
        """
        return None

    def forget(self) -> None:
        """Forget what the last proof left."""
        self.lack = self.built = None

    # Edges and users may be stored in another order internally.
    def _in(self, rows: Array) -> Array:
        return rows

    def _out(self, rows: Array) -> Array:
        return rows

    def _set_models(self, models: Array) -> None:
        raise NotImplementedError

    def _compute_forces(self) -> None:
        """Compute the forces B'(z - P) from s."""
        raise NotImplementedError

    def model(self, hessians: Array, linear: Array) -> None:
        """Set new quadratic models, and prepare the linear system."""
        raise NotImplementedError

    def take(self, losses: Expansion) -> None:
        """`model` with the quadratic models of the losses."""
        self.model(*losses.forms())

    def run(self, steps: int) -> tuple[float, float]:
        """Make steps; returns ||B x - z_before||^2 and ||z - z_before||^2 of the last one."""
        raise NotImplementedError

    def read(self) -> tuple[Array, Array, Ints]:
        """The models, the slopes -B'y, and the groups of users connected by duals inside their
        balls.
        """
        raise NotImplementedError


class Complete(Engine):
    """All pairs are edges; the linear system has a closed form for all weights."""

    exact_start: ClassVar[bool] = True

    def _set_models(self, models: Array) -> None:
        self.x = np.array(models.T, order="C")  # a copy: the models of the caller do not change
        self.forces = np.zeros_like(self.x)

    def _compute_forces(self) -> None:
        kernels.complete_forces(self.s, self.shrink, self.forces)

    def model(self, hessians: Array, linear: Array) -> None:
        eye, n = np.eye(self.dim), self.graph.n_users
        self.inverses = np.linalg.inv(hessians + self.sigma * n * eye)
        # I - sigma sum M = mean of M_i H_i, without cancellation.
        self.total = np.linalg.inv((self.inverses @ hessians).mean(axis=0))
        self.linear = np.ascontiguousarray(linear.T)

    def take(self, losses: Expansion) -> None:
        d, n = self.x.shape
        if d <= MOST_COORDINATES:
            share = np.empty((d, d))
            self.inverses, self.linear = np.empty((n, d, d)), np.empty((d, n))
            if loss_kernels.complete_system(losses.hessians, losses.shift, losses.centre,
                                            losses.gradients, self.sigma, self.inverses, share,
                                            self.linear):
                self.total = np.linalg.inv(share)
                return
        super().take(losses)

    def run(self, steps: int) -> tuple[float, float]:
        return kernels.complete_run(self.linear, self.inverses, self.total, self.sigma, self.x,
                                    self.s, self.shrink, self.radius, RELAX, self.forces, steps)

    def read(self) -> tuple[Array, Array, Ints]:
        flow, labels = kernels.complete_duals(self.s, self.shrink, self.sigma, self.graph.n_users)
        return np.array(self.x.T, order="C"), -flow, labels

    def prove(self, labels: Ints, models: Array, gradients: Array, enough: float,
              begin: Array | None = None, share: float = 1.0) -> Array | None:
        rounds = int(np.clip(_PROOF / self.graph.n_edges, 4, _MOST_ROUNDS))
        begin = self.duals() if begin is None else begin
        duals, self.built, lack, small, least = group_kernels.complete_proof(
            begin, self._radii, labels, int(labels.max()) + 1, models, gradients, rounds, enough,
            share)
        self.lack = None if small and not least else lack
        return duals if small else None


class Listed(Engine):
    """A list of edges, stored in an order that keeps neighbours close in memory.

    The linear system is solved by its dense inverse or, of many unknowns, by conjugate gradients,
    block-Jacobi preconditioned.
    """

    def __init__(self, graph: Graph, dim: int, lam: float, order: Ints,
                 dense: bool = False) -> None:
        super().__init__(graph, dim, lam)
        self.dense, self.order = dense, order  # order[k] is the user stored at k
        position = np.empty_like(order)
        position[order] = np.arange(order.size)
        ends = position[graph.edges]
        self.edge_order = np.lexsort((ends.max(axis=1), ends.min(axis=1)))
        self.first, self.second = (np.ascontiguousarray(e, dtype=np.int32)
                                   for e in ends[self.edge_order].T)
        if self._radii.size > 1:
            self._radii = self._radii[self.edge_order]

    def _in(self, rows: Array) -> Array:
        return rows[self.edge_order]

    def _out(self, rows: Array) -> Array:
        out = np.empty_like(rows)
        out[self.edge_order] = rows
        return out

    def _set_models(self, models: Array) -> None:
        self.x = models[self.order]
        self.forces = np.zeros_like(self.x)

    @property
    def _edges(self) -> tuple[Any, ...]:
        """The edges, as the loops want them."""
        return self.s, self.shrink, self.radius, self.rates, self.first, self.second

    def _compute_forces(self) -> None:
        kernels.edges_pass(self.x, *self._edges, 0.0, self.forces, False)

    @cached_property
    def neighbours(self) -> tuple[Ints, Ints]:
        """See `neighbours_of`."""
        return neighbours_of(np.stack([self.first, self.second], axis=1), self.graph.n_users)

    def model(self, hessians: Array, linear: Array) -> None:
        self.linear = np.ascontiguousarray(linear[self.order])
        degrees = np.bincount(np.concatenate([self.first, self.second]),
                              minlength=self.graph.n_users).astype(float)
        if self.dense:
            self.inverse = self._invert(hessians[self.order], degrees)
            return
        scalar, self.degrees = multiples_of_identity(hessians), degrees
        kept = hessians[:, :1, :1] if scalar else hessians
        self.hessians = np.ascontiguousarray(kept[self.order])
        pulled = self.hessians + (self.sigma * degrees)[:, None, None] * np.eye(kept.shape[1])
        self.inverses = 1.0 / pulled if scalar else np.linalg.inv(pulled)

    def _invert(self, hessians: Array, degrees: Array) -> Array:
        """The inverse of the complete system, blockdiag(H) + sigma L."""
        n, d = self.x.shape
        system, own = np.zeros((n, d, n, d)), np.arange(n)
        for k in range(d):
            system[self.first, k, self.second, k] = -self.sigma
            system[self.second, k, self.first, k] = -self.sigma
        system[own, :, own, :] = hessians + (self.sigma * degrees)[:, None, None] * np.eye(d)
        return np.asarray(np.linalg.inv(system.reshape(n * d, n * d)))

    def run(self, steps: int) -> tuple[float, float]:
        if not self.dense:
            return kernels.cg_run(self.linear, self.hessians, self.inverses, self.degrees,
                                  *self.neighbours, self.sigma, self.x, *self._edges, RELAX,
                                  self.forces, steps)
        measures, shape = (0.0, 0.0), self.x.shape
        for step in range(steps):
            right = self.linear + self.sigma * self.forces
            self.x = (self.inverse @ right.ravel()).reshape(shape)
            measures = kernels.edges_pass(self.x, *self._edges, RELAX, self.forces,
                                          step == steps - 1)
        return measures

    def read(self) -> tuple[Array, Array, Ints]:
        flow, labels = kernels.edges_duals(self.s, self.shrink, self.sigma, self.rates, self.first,
                                           self.second, self.graph.n_users)
        models, slopes, clusters = np.empty_like(self.x), np.empty_like(flow), np.empty_like(labels)
        models[self.order], slopes[self.order], clusters[self.order] = self.x, -flow, labels
        return models, slopes, clusters

    def prove(self, labels: Ints, models: Array, gradients: Array, enough: float,
              begin: Array | None = None, share: float = 1.0) -> Array | None:
        """Unit vectors between groups; inside, alternating projections onto B'y = -gradients and
        onto the balls.
        """
        graph = self.graph
        if graph.n_edges > (_GUESSED if self.guessed else _PROVABLE):
            return None
        # 1. Between groups, the dual of an edge is a unit vector times its radius.
        duals, radii = self.duals(), np.empty(graph.n_edges)
        radii[self.edge_order] = self._radii
        together = labels[graph.edges[:, 0]] == labels[graph.edges[:, 1]]
        gaps = graph.differences(models)[~together]
        lengths = np.maximum(np.linalg.norm(gaps, axis=1), 1e-300)
        duals[~together] = gaps * (radii[~together] / lengths)[:, None]
        # 2. Inside groups, a flow that supplies what is left, in turns with the balls.
        inside = graph.subgraph(together)
        across = np.where(together[:, None], 0.0, duals)
        forces = -gradients - graph.divergence(across)
        route, flow = inside.flow_solver(), duals[together]
        for _ in range(_ROUNDS):
            lack = forces - inside.divergence(flow)
            if float((lack**2).sum()) <= enough:
                break
            flow = project(flow + route(lack), radii[together])
        duals[together] = flow
        return duals


class Direct(Listed):
    """Narrow graphs with H_i = h_i I: one sparse factorisation for many passes, and shorter
    problems between.

    The linear system of a pass is diag(h) + B' diag(sigma_e) B, factorised once for many passes.
    The step size of an edge is the geometric mean of a common one and of the curvature of its norm
    across its direction,

        sigma_e = sqrt(common * radii_e / ||x_i - x_j||)

    within limits where users are fused, or far apart.

    Between two batches of passes, users joined by duals well inside their balls count as one. With
    h and linear summed over such users, and radii over their edges, this is a problem of the same
    form on far fewer users, whose passes are cheap. It is solved accurately. Its models are models
    of all users, and its duals are shared among the edges that it merged, in proportion to their
    radii, so they stay feasible. What remains to the next batch are the flows inside the parts.
    Where users were joined that should not be, the batch separates them again.

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

    def choose_sigma(self, models: Array, usual: float) -> float:
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

        # The places of the users in the order of elimination, once they are known.
        n, places = self.graph.n_users, self.graph.notes.get("elimination")
        self.place = np.arange(n) if places is None else places
        steps = np.broadcast_to(self.sigma * self.rates, self.first.shape)
        degrees = np.bincount(self.first, steps, n) + np.bincount(self.second, steps, n)
        i, j = self.place[self.first], self.place[self.second]
        entries = np.concatenate([-steps, -steps, self.h + degrees])
        ends = np.concatenate([i, j, self.place]), np.concatenate([j, i, self.place])
        matrix = sparse.csc_array((entries, ends), shape=(n, n))
        lu = splu(matrix, permc_spec="MMD_AT_PLUS_A" if places is None else "NATURAL",
                  diag_pivot_thresh=0.0, options={"SymmetricMode": True})
        if places is None:  # a positive definite matrix needs no other order of its rows
            self.place = self.graph.notes["elimination"] = lu.perm_c.astype(np.int64)
        lower = lu.L.tocsc()
        lower.sort_indices()
        self.factor = (lower.indptr, lower.indices, lower.data, 1.0 / lu.U.diagonal())

    def run(self, steps: int) -> tuple[float, float]:
        if self.passes >= self.next_shorter:
            self._shorten()
            self.next_shorter = self.passes + _APART
        self.passes += steps
        return kernels.direct_run(self.linear, self.factor, self.place, self.sigma, self.x,
                                  *self._edges, RELAX, self.forces, steps)

    def _join(self, share: float) -> Ints:
        """The parts of users joined by duals shorter than `share` of their radii."""
        return group_kernels.interior(self.s, self.shrink, self.radius, share, self.first,
                                      self.second, self.graph.n_users)

    def _shorten(self) -> None:
        """Solve the problem between users joined by duals well inside their balls, and continue
        from its solution.
        """
        n, labels, x = self.graph.n_users, self._join(_SHARE), self.x
        parts = int(labels.max()) + 1
        if n > _SMALL and parts <= _SHORTER * n:
            ends, pair = group_kernels.contract(labels, parts, self.first, self.second)
            if len(ends):
                x = self._solve_between(labels, ends, pair)[labels]
        if self.adapted < _ADAPTED:
            self._adapt_rates(x)
        self._compute_forces()

    def _solve_between(self, labels: Ints, ends: Ints, pair: Ints) -> Array:
        """Solve the problem between parts; returns their models."""
        duals, rates, radii = group_kernels.sum_pairs(self.s, self.shrink, self.rates, self._radii,
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
        group_kernels.carry(self.s, self.shrink, self.rates, self._radii, pair, rest,
                            short.duals() - duals, radii, self.sigma)
        return short.x

    def _adapt_rates(self, x: Array) -> None:
        """Set sigma_e from the lengths of the differences of x."""
        self.adapted += 1
        lengths = np.linalg.norm(x[self.first] - x[self.second], axis=1)
        steps = np.sqrt(self.common * self._radii / np.maximum(lengths, 1e-300))
        rates = np.clip(steps, _LOW * self.common, _HIGH * self.common) / self.sigma
        group_kernels.rescale(self.s, self.shrink, self.rates, rates, self._radii, self.sigma)
        self.rates = rates
        self._factorise()

    def gap(self) -> float:
        """The duality gap after users joined by duals inside their balls get one model."""
        labels = self._join(1.0)
        return float(group_kernels.merged_gap(self.x, self.h, self.linear, self.s, self.shrink,
                                              self.sigma, self.rates, self._radii, self.first,
                                              self.second, labels, int(labels.max()) + 1))


def choose(graph: Graph, hessians: Array, quadratic: bool, lam: float) -> Engine:
    """Choose the engine for a graph and a loss with these Hessians."""
    n, dim = hessians.shape[:2]
    needed = 8.0 * graph.n_edges * (4 * dim + 1)  # the state of every edge, its dual, two copies
    require_memory(needed, f"{graph.n_edges:,} edges",
                   "Use a graph of nearest neighbours, Graph.knn or adaptive_graph, or for all "
                   "pairs with one weight solver='lean', which stores no value per pair")
    if graph.n_edges == n * (n - 1) // 2:
        numbers = graph.edges[:, 0] * n + graph.edges[:, 1] if not graph.is_complete else None
        if numbers is None or (np.diff(numbers) > 0).all():
            return Complete(graph, dim, lam)
    if n * dim > _DENSE and quadratic and multiples_of_identity(hessians):
        order = narrow_order(graph)
        if order is not None:
            return Direct(graph, dim, lam, order)
    return Listed(graph, dim, lam, near_order(graph), dense=n * dim <= _DENSE)


def multiples_of_identity(hessians: Array) -> bool:
    """Whether all Hessians are multiples of the identity."""
    return np.array_equal(hessians, hessians[:, :1, :1] * np.eye(hessians.shape[1]))


def near_order(graph: Graph) -> Ints:
    """An order of the users that keeps neighbours close in memory."""
    from scipy import sparse
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    half: Any = sparse.csr_array((np.ones(graph.n_edges), tuple(graph.edges.T)),
                                 shape=(graph.n_users, graph.n_users))
    pattern = (half + half.T).tocsr()
    return np.asarray(reverse_cuthill_mckee(pattern, symmetric_mode=True), dtype=np.int64)


def narrow_order(graph: Graph) -> Ints | None:
    """The users in the order of a breadth-first search, or None if the graph is too wide for a
    factorisation.

    The widest level of the search is about the size of a separator. It is small for graphs of
    points on a curve or in a plane, and large for neighbours in many dimensions.
    """
    if "narrow order" not in graph.notes:
        n = graph.n_users
        order, widest = group_kernels.levels(*neighbours_of(graph.edges, n))
        too_wide = n > 500 and widest > max(150.0, 6.0 * np.sqrt(n))
        graph.notes["narrow order"] = None if too_wide else order
    known: Ints | None = graph.notes["narrow order"]
    return known


def neighbours_of(edges: Ints, n: int) -> tuple[Ints, Ints]:
    """Where the neighbours of each user start in the second array (and the last ones end), and the
    neighbours.
    """
    ends, others = edges.T.ravel(), edges[:, ::-1].T.ravel()
    starts = np.concatenate([[0], np.cumsum(np.bincount(ends, minlength=n))]).astype(np.int64)
    return starts, others[np.argsort(ends, kind="stable")]
