"""The iteration of the fast solver for wide models: Hessians are operators, systems are those of
users' rows.

The steps are those of `coterie.solvers.engines`. With M_i = (H_i + shift_i + sigma deg_i)^-1, which
needs systems of the user's rows only (`coterie.losses.curvature`), the linear system of a pass is

    M_i^-1 x_i - sigma sum_{j ~ i} x_j = q_i

All pairs:    x_i = M_i (q_i + sigma S),   (I - sigma sum M) S = sum_i M_i q_i,    one system of dim
              unknowns
Other graphs: conjugate gradients, see `WideListed`

Both are solved from the last pass's solution, and a few steps are enough. Passes are computed with
32 bits where the tolerance allows it; gradients, values and certificates never are.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from coterie.base.machine import require_memory
from coterie.base.types import Array, Ints
from coterie.losses.curvature import Curvature, RowCurvature, RowInverse
from coterie.problem.graph import Graph
from coterie.problem.problem import Problem
from coterie.solvers import kernels
from coterie.solvers.engines import RELAX, Engine

_SINGLE = 5e-7  # smallest tolerance for which passes are computed with 32 bits
_STEPS, _MORE_STEPS = 6, 20  # most steps of conjugate gradients in a pass; without a coarse matrix
# Models for which the mean Hessian is computed again, and its largest size.
_REFRESHES, _LARGEST = 3, 1500
_STALE = 1.5  # steps per system from which the coarse matrix is computed again
# They stop at this share of the first residual; of its norm, on a list of edges.
_ENOUGH, _NEAR = 0.03, 0.3



class Wide(Engine):
    """What the engines of wide models have in common.

    Attributes
    ----------
    first, second : (n_edges,) the ends of the edges.
    degrees : (n_users,)
    inverse : M, as a map.
    """

    inverse: RowInverse
    _known: tuple[Array, Array, Ints] | None = None  # what `read` returned, until the state changes

    def __init__(self, graph: Graph, dim: int, lam: float, tol: float) -> None:
        super().__init__(graph, dim, lam)
        self.dtype: Any = np.float32 if tol >= _SINGLE else np.float64
        self.first, self.second = (np.ascontiguousarray(ends, dtype=np.int32)
                                   for ends in graph.edges.T)
        self.degrees = np.bincount(graph.edges.ravel(), minlength=graph.n_users).astype(float)

    def begin(self, models: Array, duals: Array | None, sigma: float) -> None:
        self.sigma, self.first_sigma, self._known = sigma, sigma, None
        self.x = models.astype(self.dtype)
        if models.any():
            self.s = self.x[self.first] - self.x[self.second]
        else:
            self.s = np.zeros((self.graph.n_edges, self.dim), dtype=self.dtype)
        if duals is not None:
            self.s += (duals / sigma).astype(self.dtype)
        norms = np.sqrt(np.einsum("ek,ek->e", self.s, self.s)).astype(float) + 1e-300
        self.shrink = np.minimum(1.0, self._radii / sigma / norms)
        self.forces = np.zeros_like(self.x)
        self._compute_forces()

    def retune(self, sigma: float) -> None:
        kernels.wide_retune(self.s, self._radii / self.sigma, self._radii / sigma,
                            self.sigma / sigma, self.shrink)
        self.sigma, self._known = sigma, None
        self._compute_forces()

    def lengths(self, models: Array) -> Array:
        """(n_edges,) the distances of neighbours, without a difference in memory."""
        return np.asarray(kernels.wide_lengths(np.ascontiguousarray(models), self.first,
                                               self.second))

    def refine(self) -> None:
        """Continue with 64 bits."""
        if self.dtype is np.float32:
            self.dtype, self._known = np.float64, None
            self.x, self.s = self.x.astype(float), self.s.astype(float)
            self.forces = self.forces.astype(float)
            self._compute_forces()

    def _compute_forces(self) -> None:
        self._pass(0.0, False)

    def _pass(self, relax: float, measure: bool) -> tuple[float, float]:
        return kernels.wide_pass(self.x, self.s, self.shrink, self.radius, self.first,
                                 self.second, relax, self.forces, measure)

    def duals(self) -> Array:
        out = np.empty((self.graph.n_edges, self.dim))
        self._read_duals(out, True)
        return out

    def _read_duals(self, out: Array, keep: bool) -> tuple[Array, Ints]:
        return kernels.wide_duals(self.s, self.sigma, self._radii, self.first, self.second,
                                  self.graph.n_users, out, keep)

    def read(self) -> tuple[Array, Array, Ints]:
        if self._known is None:
            flow, labels = self._read_duals(np.empty((0, 0)), False)
            self._known = self.x.astype(float), -flow, labels
        return self._known

    def model(self, hessians: Any, linear: Array) -> None:
        curvature, shift = hessians
        self.linear = linear.astype(self.dtype)
        self.inverse = curvature.inverse(shift + self.sigma * self.degrees, self.dtype)
        self._prepare(curvature, shift)

    def run(self, steps: int) -> tuple[float, float]:
        measures, self._known = (0.0, 0.0), None
        for step in range(steps):
            x = self._solve(self.linear + self.dtype(self.sigma) * self.forces)
            self.x = x.astype(self.dtype, copy=False)
            measures = self._pass(RELAX, step == steps - 1)
        return measures

    def _prepare(self, curvature: Curvature, shift: Array) -> None:
        raise NotImplementedError

    def _solve(self, q: Array) -> Array:
        raise NotImplementedError


class WideComplete(Wide):
    """All pairs are edges.

    Attributes
    ----------
    shared, spread : (dim,) S of the last pass, and (n_users, dim) M_i S.
    coarse, coarse_sigma : a Cholesky factor of I - sigma sum M of one output, or of the mean over
        outputs, at some earlier models, and its sigma.
    steps, solved : of conjugate gradients, and systems solved by them, since the last model.
    """

    shared: Array | None = None
    coarse: tuple[Array, bool] | None = None
    coarse_sigma: float = 0.0
    steps: int = 0
    solved: int = 0

    def __init__(self, graph: Graph, dim: int, lam: float, tol: float) -> None:
        super().__init__(graph, dim, lam, tol)
        self.degrees += 1.0  # the sum below is over all users, and each one among them

    def closeness(self, gradients: Array) -> float:
        """The closer lam is to one model for all, the closer models are together, and the larger
        sigma is best.

        All users share one model at zero where the flow (gradients_i - gradients_j) / n keeps to
        the radii.
        """
        n = len(gradients)
        # a mean of its norms.
        flow = np.sqrt(2.0 * ((gradients - gradients.mean(axis=0)) ** 2).sum() / (n - 1)) / n
        return float(np.clip(16.0 * (self._radii.mean() / (flow + 1e-300)) ** 3, 0.3, 30.0))

    def _prepare(self, curvature: Curvature, shift: Array) -> None:
        from scipy.linalg import cho_factor

        if self.coarse is not None and self.coarse[0].dtype != self.dtype:
            self.coarse = None
            self.shared = None if self.shared is None else self.shared.astype(self.dtype)
        stale = self.coarse_sigma != self.sigma or self.steps > _STALE * self.solved
        if isinstance(curvature, RowCurvature) and (self.coarse is None or stale):
            self.outputs = curvature.outputs
            matrix = self._coarse_matrix(curvature, shift)
            try:
                self.coarse = cho_factor(matrix.T, lower=True, check_finite=False)
            except np.linalg.LinAlgError:  # definite but for rounding
                matrix[np.diag_indices(len(matrix))] += 1e-3 * np.trace(matrix)
                self.coarse = cho_factor(matrix.T, lower=True, check_finite=False)
            self.coarse_sigma = self.sigma
        self.steps = self.solved = 0
        self.shared = np.zeros(self.dim, dtype=self.dtype) if self.shared is None else self.shared
        self.spread = self.inverse(np.broadcast_to(self.shared, self.x.shape))

    def _coarse_matrix(self, curvature: RowCurvature, shift: Array) -> Array:
        """I - sigma sum M = diag(mean (R + shift_i) / S_i) + sigma sum_i S_i^-1 A_i' C_i A_i S_i^-1
        of one output.
        """
        scales = self.inverse.scales
        held = (curvature.ridges + shift[:, None]).astype(self.dtype)
        rows = list[Array]()
        for number, part in enumerate(curvature.terms):
            small = self.inverse.average(number)
            eye = np.eye(small.shape[1], dtype=self.dtype)
            traces = np.trace(small, axis1=1, axis2=2)[:, None, None]
            roots = np.linalg.cholesky(small + self.dtype(1e-6) * traces * eye
                                       + self.dtype(1e-30) * eye)
            designs = self.inverse.designs[number] / scales[part.users][:, None]
            scaled = roots.swapaxes(1, 2) @ designs
            rows.append(scaled.reshape(-1, scaled.shape[2]))
        stacked = rows[0] if len(rows) == 1 else np.concatenate(rows)
        matrix = self.dtype(self.sigma) * (stacked.T @ stacked)
        diagonal = 1.0 - self.sigma * (1.0 / scales).sum(axis=0, dtype=float)
        diagonal = np.maximum(diagonal, (held / scales).mean(axis=0))
        matrix[np.diag_indices(len(matrix))] += diagonal.astype(self.dtype)
        return matrix

    def _precondition(self, vector: Array) -> Array:
        from scipy.linalg import cho_solve

        if self.coarse is None:  # a number would do the same
            return vector
        return cho_solve(self.coarse, vector.reshape(-1, self.outputs), check_finite=False).ravel()

    def _solve(self, q: Array) -> Array:
        sigma = self.dtype(self.sigma)
        self.solved += 1
        alone = self.inverse(q)
        assert self.shared is not None  # since `_prepare`
        residual = alone.sum(axis=0) - self.shared + sigma * self.spread.sum(axis=0)
        z = self._precondition(residual)
        direction, rz = z, float(residual @ z)
        enough = _ENOUGH**2 * rz
        for _ in range(_STEPS if self.coarse is not None else _MORE_STEPS):
            if not rz > 0:
                break
            self.steps += 1
            spread = self.inverse(np.broadcast_to(direction, self.x.shape))
            product = direction - sigma * spread.sum(axis=0)
            curvature = float(direction @ product)
            if not curvature > 0:
                break
            length = self.dtype(rz / curvature)
            self.shared = self.shared + length * direction
            self.spread += length * spread
            residual = residual - length * product
            z = self._precondition(residual)
            new = float(residual @ z)
            if not new > enough:
                break
            direction, rz = z + self.dtype(new / rz) * direction, new
        return alone + sigma * self.spread


class WideListed(Wide):
    """Any list of edges, with sigma L of the graph's Laplacian L in the system.

    The preconditioner is the inverse for users who all have the mean H of the Hessians, of one
    output. With L = U diag(moduli) U' and H = Q diag(stiffnesses) Q' it is

        R -> U ((U' R Q)_jk / (stiffnesses_k + sigma moduli_j)) Q'

    What neighbours have in common depends on sums of Hessians, and their differences on sigma:
    neither on how Hessians differ.

    Attributes
    ----------
    laplacian : L, sparse.
    product : (n_users, dim) the system's matrix times x of the last pass.
    curvature, shift : the Hessians and their shifts.
    level : h where all Hessians are h I, so that the system is one of users; else None.
    modelled : number of models so far.
    pairs, pairs_sigma : (n_users, n_users) (level + sigma L)^-1, and its sigma.
    modes, moduli : (n_users, n_users) U, and (n_users,) the eigenvalues of L.
    axes, stiffnesses : (p, p) Q, and (p,); None and h for Hessians that are no sums over rows.
    """

    stiffness: ClassVar[float] = 80.0
    pairs: Array
    modes: Array
    modelled: int = 0
    pairs_sigma: float = 0.0
    level: float | None = None

    def __init__(self, graph: Graph, dim: int, lam: float, tol: float) -> None:
        super().__init__(graph, dim, lam, tol)
        from scipy import sparse

        ends = np.concatenate([self.first, self.second]), np.concatenate([self.second, self.first])
        joined = sparse.csr_array((np.ones(len(ends[0])), ends),
                                  shape=(graph.n_users, graph.n_users))
        self.laplacian = (sparse.diags_array(self.degrees) - joined).tocsr().astype(self.dtype)

    def model(self, hessians: Any, linear: Array) -> None:
        self.curvature, self.shift = hessians
        self.linear = linear.astype(self.dtype)
        self.laplacian = self.laplacian.astype(self.dtype, copy=False)
        self.level = self.curvature.level()
        if self.level is not None:
            if self.sigma != self.pairs_sigma or self.pairs.dtype != self.dtype:
                dense = self.sigma * self.laplacian.toarray().astype(float) \
                    + np.diag(self.level + self.shift)
                self.pairs, self.pairs_sigma = np.linalg.inv(dense).astype(self.dtype), self.sigma
            return
        if self.modelled < _REFRESHES or self.modes.dtype != self.dtype:
            moduli, modes = laplacian_modes(self.graph)
            self.modes, self.moduli = modes.astype(self.dtype), moduli
            self._precondition_mean()
        self.modelled += 1
        self.product = self._times(self.x)

    def _precondition_mean(self) -> None:
        """The axes and stiffnesses of the mean Hessian, of one output."""
        curvature, n = self.curvature, self.graph.n_users
        h = float(curvature.trace().mean()) / self.dim
        self.axes, self.stiffnesses, self.outputs = None, np.full(1, h), 1
        if not isinstance(curvature, RowCurvature) or len(curvature.ridges) > _LARGEST:
            return
        matrix = np.diag(curvature.ridges + 1e-6 * h)
        for part in curvature.terms:
            root = np.sqrt(curvature.mean_mass(part) / n)[..., None].astype(self.dtype)
            rows = (root * part.design_in(self.dtype)).reshape(-1, part.design.shape[2])
            matrix += rows.T @ rows
        self.stiffnesses, axes = np.linalg.eigh(matrix)
        self.stiffnesses = np.maximum(self.stiffnesses, 1e-6 * h)
        self.axes, self.outputs = axes.astype(self.dtype), curvature.outputs

    def _times(self, x: Array) -> Array:
        held = self.shift[:, None].astype(self.dtype) * x
        return self.curvature.times(x) + held + self.dtype(self.sigma) * (self.laplacian @ x)

    def _precondition(self, r: Array) -> Array:
        n, k = len(r), self.outputs
        z = (self.modes.T @ r).reshape(n, -1, k).swapaxes(1, 2)
        stiff = (self.sigma * self.moduli[:, None, None] + self.stiffnesses).astype(self.dtype)
        if self.axes is None:
            z = z / stiff
        else:
            z = (z.reshape(n * k, -1) @ self.axes).reshape(n, k, -1) / stiff
            z = z.reshape(n * k, -1) @ self.axes.T
        return np.asarray(self.modes @ z.reshape(n, k, -1).swapaxes(1, 2).reshape(r.shape))

    def _solve(self, q: Array) -> Array:
        x = self.x
        if self.level is not None:
            return np.asarray(self.pairs @ q)
        residual = q - self.product
        first, rz, direction = float(np.vdot(residual, residual)), 0.0, np.zeros_like(q)
        for _ in range(_STEPS):
            z = self._precondition(residual)
            new = float(np.vdot(residual, z))
            if not new > 0:
                break
            direction, rz = z if not rz else z + self.dtype(new / rz) * direction, new
            product = self._times(direction)
            length = self.dtype(rz / float(np.vdot(direction, product)))
            x, self.product = x + length * direction, self.product + length * product
            residual = residual - length * product
            if float(np.vdot(residual, residual)) <= _NEAR**2 * first:
                break
        return x


def laplacian_modes(graph: Graph) -> tuple[Array, Array]:
    """The eigenvalues (n_users,) and eigenvectors, in columns, of the graph's Laplacian."""
    if "modes" not in graph.notes:
        dense = np.zeros((graph.n_users, graph.n_users))
        first, second = graph.edges.T
        np.add.at(dense, (first, second), -1.0)
        dense += dense.T
        dense[np.diag_indices(graph.n_users)] = -dense.sum(axis=1)
        values, vectors = np.linalg.eigh(dense)
        graph.notes["modes"] = np.maximum(values, 0.0), vectors
    modes: tuple[Array, Array] = graph.notes["modes"]
    return modes


def choose_wide(problem: Problem, tol: float) -> Wide:
    """The engine for a problem with wide models."""
    graph, n, dim = problem.graph, problem.n_users, problem.dim
    numbers = 4.0 if tol >= _SINGLE else 8.0
    require_memory((numbers + 16.0) * graph.n_edges * dim,
                   f"{graph.n_edges:,} edges with {dim:,} numbers each",
                   "Use a graph of nearest neighbours, Graph.knn or adaptive_graph, with fewer "
                   "edges")
    complete = graph.n_edges == n * (n - 1) // 2 and n > 2
    if not complete:
        require_memory(20.0 * n**2, f"Systems of {n:,} users", "Use fewer users or fewer features")
    return (WideComplete if complete else WideListed)(graph, dim, problem.lam, tol)
