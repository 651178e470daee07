"""The iteration of the fast solver for each kind of problem, chosen by the graph and the loss.

All make the same steps (Douglas-Rachford splitting, Lions and Mercier 1979, on z = B x): with the
losses replaced by quadratic models q_i(x) = 1/2 x'H_i x - <linear_i, x>,

    x  <-  argmin sum_i q_i(x_i) + sigma/2 ||B x - (z - P)||^2         a linear system
    s  <-  s + relax (B x - z),      P <- projection of s,  z <- s - P    one pass over the edges
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np

from coterie.base.types import Array, Ints
from coterie.losses.linear import MOST_COORDINATES
from coterie.problem.certificates import project
from coterie.problem.graph import Graph
from coterie.solvers import kernels, model_kernels, part_kernels, proof_kernels

if TYPE_CHECKING:
    from coterie.solvers.expansion import Expansion

RELAX = 1.8
# Pairs visited while duals are built, if that allows a few rounds; and rounds.
_PROOF, _MOST_ROUNDS = 2e6, 128
# Rounds of building duals on a list of edges, and the largest number of edges for it.
_ROUNDS, _PROVABLE = 8, 3_000
_GUESSED = 200_000  # the same where the groups are probably right

#: Orders of narrow graphs, so that a path computes them once.
_ORDERS: WeakKeyDictionary[Graph, Ints | None] = WeakKeyDictionary()


class Engine:
    """State and steps on one problem; the public methods number users and edges as in the graph."""

    s: Array  # (dim, n_edges)
    shrink: Array  # (n_edges,)
    sigma: float
    stiffness: ClassVar[float] = 12.0  # first sigma, in units of curvature / degree
    # Whether it is right for quadratic losses, except for groups close together.
    exact_start: ClassVar[bool] = False
    # (n_users, dim) what the last proof's duals lack, if some group must split.
    lack: Array | None = None
    built: Array | None = None  # (n_edges, dim) where the last proof ended, and can be continued
    # Whether the groups to be proved are probably right, so that building duals pays.
    guessed: bool = False
    rates: Array  # (1,) or (n_edges,) the step size of each edge, in units of sigma
    enough: float = 0.0  # duality gap below which parts of the problem are solved
    batch: ClassVar[int] = 20  # passes between two looks at quadratic losses
    patience: ClassVar[int] = 20  # passes before the first change of sigma
    _radii: Array  # lam * weights: (1,) or (n_edges,)

    def __init__(self, graph: Graph, dim: int, lam: float) -> None:
        self.graph, self.dim = graph, dim
        weights = graph.weights
        one = graph.n_edges > 0 and weights.strides == (0,)
        self._radii, self.rates = lam * np.ascontiguousarray(weights[:1] if one else weights), \
            np.ones(1)

    @property
    def radius(self) -> Array:
        """(1,) or (n_edges,) the radii of P."""
        return self._radii / (self.sigma * self.rates)

    def first_sigma(self, models: Array, usual: float) -> float:
        """The first sigma for quadratic losses and a start from these models."""
        return usual

    def begin(self, models: Array, duals: Array | None, sigma: float) -> None:
        """Start from models and duals: z = B models, P = duals / sigma."""
        self.sigma = sigma
        self.s = np.array(self._in(self.graph.differences(models)).T, order="C")
        if duals is not None:
            self.s += self._in(duals).T / (sigma * self.rates)
        norms = np.sqrt(np.einsum("ke,ke->e", self.s, self.s)) + 1e-300
        with np.errstate(over="ignore"):  # an infinite radius
            self.shrink = np.minimum(1.0, self.radius / norms)
        self._set_models(models)
        self._settle()

    def lengths(self, models: Array) -> Array:
        """(n_edges,) the distances of neighbours."""
        return np.asarray(np.linalg.norm(self.graph.differences(models), axis=1))

    def closeness(self, gradients: Array) -> float:
        """The factor of the first sigma, for losses with these gradients at zero."""
        return 1.0

    def retune(self, sigma: float) -> None:
        """Continue with another sigma; z and the duals do not change."""
        radius, ratio, self.sigma = self.radius, self.sigma / sigma, sigma
        kernels.retune(self.s, self.shrink, radius, self.radius, ratio)
        self._settle()

    def duals(self) -> Array:
        """(n_edges, dim) feasible duals."""
        return self._out(np.ascontiguousarray((self.sigma * self.rates * self.shrink * self.s).T))

    def refine(self) -> None:
        """Continue with more accurate arithmetic, if there is any."""

    def proof(self, labels: Ints, models: Array, gradients: Array, enough: float,
              begin: Array | None = None, share: float = 1.0) -> Array | None:
        """Build duals for these groups, with ||gradients + B'y||^2 <= share * enough if possible.

        They are built from `begin`, a `built` of a proof for the same groups, or from the current
        duals.

        None if that is expensive, or if some group must split.
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

    def _settle(self) -> None:
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

    def _settle(self) -> None:
        kernels.complete_forces(self.s, self.shrink, self.forces)

    def model(self, hessians: Array, linear: Array) -> None:
        eye, n = np.eye(self.dim), self.graph.n_users
        self.inverses = np.linalg.inv(hessians + self.sigma * n * eye)
        # I - sigma sum M = mean of M_i H_i, without cancellation.
        self.total = np.linalg.inv((self.inverses @ hessians).mean(axis=0))
        self.linear = np.ascontiguousarray(linear.T)

    def take(self, losses: Expansion) -> None:
        d, n = self.x.shape
        if d <= MOST_COORDINATES and isinstance(losses.hessians, np.ndarray):
            self.inverses, share, self.linear = np.empty((n, d, d)), np.empty((d, d)), \
                np.empty((d, n))
            if model_kernels.complete_system(losses.hessians, losses.shift, losses.centre,
                                             losses.gradients, self.sigma,
                                             self.inverses, share, self.linear):
                self.total = np.linalg.inv(share)
                return
        super().take(losses)

    def run(self, steps: int) -> tuple[float, float]:
        return kernels.complete_run(self.linear, self.inverses, self.total, self.sigma, self.x,
                                    self.s, self.shrink,
                                    self._radii / self.sigma, RELAX, self.forces, steps)

    def read(self) -> tuple[Array, Array, Ints]:
        flow, labels = kernels.complete_duals(self.s, self.shrink, self.sigma, self.graph.n_users)
        return np.array(self.x.T, order="C"), -flow, labels

    def proof(self, labels: Ints, models: Array, gradients: Array, enough: float,
              begin: Array | None = None, share: float = 1.0) -> Array | None:
        rounds = int(np.clip(_PROOF / self.graph.n_edges, 4, _MOST_ROUNDS))
        duals, self.built, lack, small, least = proof_kernels.complete_proof(
            self.duals() if begin is None else begin, self._radii, labels, int(labels.max()) + 1,
                models, gradients,
            rounds, enough, share)
        self.lack = None if small and not least else lack
        return duals if small else None


class Listed(Engine):
    """A list of edges, stored in an order that keeps neighbours close in memory."""

    def __init__(self, graph: Graph, dim: int, lam: float, order: Ints) -> None:
        super().__init__(graph, dim, lam)
        self.order = order  # order[k] is the user stored at k
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

    def _settle(self) -> None:
        kernels.edges_pass(self.x, self.s, self.shrink, self.radius, self.rates, self.first,
                           self.second, 0.0,
                           self.forces, False)

    def read(self) -> tuple[Array, Array, Ints]:
        flow, labels = kernels.edges_duals(self.s, self.shrink, self.sigma, self.rates, self.first,
                                           self.second,
                                           self.graph.n_users)
        models, slopes, clusters = np.empty_like(self.x), np.empty_like(flow), np.empty_like(labels)
        models[self.order], slopes[self.order], clusters[self.order] = self.x, -flow, labels
        return models, slopes, clusters

    def proof(self, labels: Ints, models: Array, gradients: Array, enough: float,
              begin: Array | None = None, share: float = 1.0) -> Array | None:
        """Unit vectors between groups; inside, alternating projections onto B'y = -gradients and
        onto the balls.
        """
        if self.graph.n_edges > (_GUESSED if self.guessed else _PROVABLE):
            return None
        graph, duals = self.graph, self.duals()
        together = labels[graph.edges[:, 0]] == labels[graph.edges[:, 1]]
        radii = np.empty(graph.n_edges)
        radii[self.edge_order] = self._radii
        gaps = graph.differences(models)[~together]
        duals[~together] = gaps * (radii[~together] / np.maximum(np.linalg.norm(gaps, axis=1),
            1e-300))[:, None]
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


class Dense(Listed):
    """Few unknowns: the inverse of the complete system."""

    def model(self, hessians: Array, linear: Array) -> None:
        n, d = self.x.shape
        degrees = np.bincount(np.concatenate([self.first, self.second]), minlength=n)
        system = np.zeros((n, d, n, d))
        for k in range(d):
            system[self.first, k, self.second, k] = system[self.second, k, self.first,
                                                           k] = -self.sigma
        own = np.arange(n)
        system[own, :, own, :] = hessians[self.order] + (self.sigma * degrees)[:, None, None] \
            * np.eye(d)
        self.inverse = np.linalg.inv(system.reshape(n * d, n * d))
        self.linear = linear[self.order]

    def run(self, steps: int) -> tuple[float, float]:
        measures = (0.0, 0.0)
        for step in range(steps):
            self.x = (self.inverse @ (self.linear + self.sigma * self.forces).ravel()).reshape(
                self.x.shape)
            measures = kernels.edges_pass(self.x, self.s, self.shrink, self.radius, self.rates,
                                          self.first,
                                          self.second, RELAX, self.forces, step == steps - 1)
        return measures


class Iterative(Listed):
    """Any Hessians and any edges: conjugate gradients, block-Jacobi preconditioned."""

    def __init__(self, graph: Graph, dim: int, lam: float, order: Ints) -> None:
        super().__init__(graph, dim, lam, order)
        self.starts, self.neighbours = neighbours_of(np.stack([self.first, self.second], axis=1),
                                                     graph.n_users)
        self.degrees = np.diff(self.starts).astype(float)

    def model(self, hessians: Array, linear: Array) -> None:
        scalar = multiples_of_identity(hessians)
        self.hessians = np.ascontiguousarray((hessians[:, :1, :1] if scalar else hessians)[
            self.order])
        self.linear = np.ascontiguousarray(linear[self.order])
        pull = (self.sigma * self.degrees)[:, None, None] * np.eye(self.hessians.shape[1])
        self.inverses = 1.0 / (self.hessians + pull) if scalar else np.linalg.inv(self.hessians
            + pull)

    def run(self, steps: int) -> tuple[float, float]:
        return kernels.cg_run(
            self.linear, self.hessians, self.inverses, self.degrees, self.starts, self.neighbours,
                              self.sigma, self.x,
            self.s, self.shrink, self.radius, self.rates, self.first, self.second, RELAX,
                              self.forces, steps)


def multiples_of_identity(hessians: Array) -> bool:
    """Whether all Hessians are multiples of the identity."""
    return np.array_equal(hessians, hessians[:, :1, :1] * np.eye(hessians.shape[1]))


def _pattern(graph: Graph) -> Any:
    from scipy import sparse

    i, j = graph.edges.T
    ones = np.ones(graph.n_edges)
    half = sparse.csr_array((ones, (i, j)), shape=(graph.n_users, graph.n_users))
    return half + half.T


def near_order(graph: Graph) -> Ints:
    """An order of the users that keeps neighbours close in memory."""
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    return np.asarray(reverse_cuthill_mckee(_pattern(graph).tocsr(), symmetric_mode=True),
                      dtype=np.int64)


def narrow_order(graph: Graph) -> Ints | None:
    """The users in the order of a breadth-first search, or None if the graph is too wide for a
    factorisation.

    The widest level of the search is about the size of a separator. It is small for graphs of
    points on a curve or in a plane, and large for neighbours in many dimensions.
    """
    if graph in _ORDERS:
        return _ORDERS[graph]
    n = graph.n_users
    order, widest = part_kernels.levels(*neighbours_of(graph.edges, n))
    _ORDERS[graph] = None if n > 500 and widest > max(150.0, 6.0 * np.sqrt(n)) else order
    return _ORDERS[graph]


def neighbours_of(edges: Ints, n: int) -> tuple[Ints, Ints]:
    """Where the neighbours of each user start in the second array (and the last ones end), and the
    neighbours.
    """
    ends, others = edges.T.ravel(), edges[:, ::-1].T.ravel()
    starts = np.concatenate([[0], np.cumsum(np.bincount(ends, minlength=n))]).astype(np.int64)
    return starts, others[np.argsort(ends, kind="stable")]
