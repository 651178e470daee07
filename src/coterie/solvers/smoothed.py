"""A solver for small ill-conditioned problems: Newton's method on smoothed problems, in scaled
coordinates.

The norms are smoothed, and the smoothing is reduced to zero,

    minimise   sum_i f_i(x_i) + sum_e radii_e sqrt(||(B x)_e||^2 + mu^2),        mu -> 0

by Newton's method on the optimality conditions in models and duals together (Chan, Golub and Mulet
1999, for total variation):

    grad f_i(x_i) + (B'y)_i = 0,        sqrt(||(B x)_e||^2 + mu^2) y_e = radii_e (B x)_e

Models are x = origin + basis z with a basis in which the mean Hessian of the losses is the
identity, so that neither units nor offsets of the data matter. Every step solves a dense system of
n_users * dim unknowns. A few dozen steps are enough for any condition number of the losses, where
splitting would need thousands of passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from coterie.base.types import Array
from coterie.losses import Evaluation
from coterie.problem.problem import Problem

LARGEST = 1200  # largest number of unknowns, because the systems are dense
_REFINEMENTS = 2  # of the duals, after each step
_STEPS, _PATIENCE = 120, 12  # largest number of Newton steps, in total and with the same smoothing
_TRIALS = 40
# Added to the diagonal of a system of unit diagonal, until it is definite.
_SHIFTS = (1e-15, 1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2, 1.0)


def solve_smoothed(problem: Problem, tol: float,
                   start: Array | None = None) -> tuple[Array, Array, Array]:
    """Solve a problem by smoothing.

    Parameters
    ----------
    problem
        A problem with lam > 0 and an edge of positive weight, and with n_users * dim at most
        `LARGEST`.
    tol
        The relative duality gap to reach, as estimated on the smoothed problem.
    start
        (n_users, dim) models to start from; the default is zero.

    Returns
    -------
    Models (n_users, dim), duals (n_edges, dim) inside their balls, and (n_edges,) the length that
    smoothing gives every difference: models closer than it may be equal.
    """
    # A step that overflows is not taken.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        search = _Search(problem, start)
        for _ in range(_STEPS):
            if search.advance(tol):
                break
        return search.end()


class _View:
    """The losses as functions of z, where models are x = origin + basis z."""

    def __init__(self, problem: Problem, models: Array) -> None:
        self.loss, self.samples = problem.loss, problem.samples
        self.everyone = np.arange(problem.n_users)
        self.frame = problem.loss.coordinates(problem.samples)
        self.origin = np.zeros(problem.dim)
        basis = np.eye(problem.dim)
        if self.frame is not None:
            self.origin, basis = self.frame.common()
        self._use(basis)
        hessian = self.evaluate(self.enter(models), 2).hessians.mean(axis=0)
        most = problem.loss.upper_hessians(problem.samples)
        if most is not None:  # losses may be flat here, and are not everywhere
            back = np.swapaxes(self.locals, -1, -2)
            hessian = hessian + 0.01 * (back @ most @ self.locals).mean(axis=0)
        self._use(_rotated(basis @ _whitening(hessian)))

    def _use(self, basis: Array) -> None:
        self.basis = basis
        self.locals = basis if self.frame is None else self.frame.basis(basis, self.everyone)
        if self.frame is not None:
            origin = np.broadcast_to(self.origin, (len(self.everyone), len(self.origin)))
            self.shift = self.frame.enter(origin, self.everyone)

    def enter(self, models: Array) -> Array:
        """z of models."""
        units = np.linalg.norm(self.basis, axis=0)
        right = (models - self.origin).T
        return np.asarray(np.linalg.lstsq(self.basis / units, right, rcond=None)[0].T / units)

    def models(self, z: Array) -> Array:
        return self.origin + z @ self.basis.T

    def evaluate(self, z: Array, order: int) -> Evaluation:
        # a trial point with overflow is rejected.
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            if self.frame is None:
                f, g, h = self.loss.evaluate(self.samples, self.models(z), order)
            else:
                point = np.einsum("nij,nj->ni", self.locals, z) + self.shift
                f, g, h = self.loss.evaluate_local(self.samples, point, order)
            back = np.swapaxes(self.locals, -1, -2)
            g = (back @ g[..., None])[..., 0] if order > 0 else g
            h = back @ h @ self.locals if order > 1 else h
        return Evaluation(f, g, h)


def _whitening(hessian: Array) -> Array:
    """T with T' hessian T = I, except for directions in which the Hessian is nearly flat."""
    diagonal = np.diag(hessian)
    if not (np.isfinite(hessian).all() and (diagonal > 0).any()):
        return np.eye(len(hessian))
    units = np.sqrt(np.where(diagonal > 0, diagonal, diagonal[diagonal > 0].min()))
    values, vectors = np.linalg.eigh(hessian / units[:, None] / units)
    return np.asarray(vectors / np.sqrt(np.maximum(values, 1e-12 * values[-1])) / units[:, None])


def _rotated(basis: Array) -> Array:
    """The same space and the same whitened metric, with columns at right angles: lengths in x are
    sums of squares.
    """
    units = np.linalg.norm(basis, axis=0)
    if not np.isfinite(units).all():
        return basis
    turn = np.linalg.svd(basis)[2].T
    return np.asarray(basis @ turn)


class _Search:
    """The state of `solve_smoothed`.

    Attributes
    ----------
    n, d, graph : of the problem.
    kept, radii, first, second, incidence : the edges of positive weight: positions, radii, ends,
        and B.
    view : the losses as functions of z.
    parts, roots : the connected part of each user, and the first user of each part.
    common, own : z = common[parts] + own.
    loss : values, gradients and Hessians at z.
    duals : (n_edges, dim), in the coordinates of models.
    mu : the smoothing.
    damping, reach : what is added to the diagonal of the system, and the longest step.
    patience : steps that may still be taken with this smoothing.
    """

    def __init__(self, problem: Problem, start: Array | None) -> None:
        from scipy import sparse

        self.n, self.d, self.graph = problem.n_users, problem.dim, problem.graph
        self.kept = np.flatnonzero(problem.radii > 0)
        self.radii = problem.radii[self.kept]
        self.first, self.second = problem.graph.edges[self.kept].T
        count = np.arange(len(self.kept))
        signs = np.repeat([1.0, -1.0], len(count))
        entries = np.tile(count, 2), np.concatenate([self.first, self.second])
        self.incidence: Any = sparse.csr_array((signs, entries), shape=(len(count), self.n))
        models = np.zeros((self.n, self.d)) if start is None else start
        self.view = _View(problem, models)
        self.parts = problem.graph.subgraph(problem.radii > 0).components
        # The first user of each connected part.
        self.roots = np.unique(self.parts, return_index=True)[1]
        # z = common[parts] + own, own of the roots 0: users that are nearly equal keep the digits
        # of their differences.
        z = self.view.enter(models)
        self.common = z[self.roots]
        self.own = z - self.common[self.parts]
        self.loss = self.view.evaluate(self.z, 2)
        self.duals = np.zeros((len(self.kept), self.d))  # y, in the coordinates of models
        self.damping, self.patience = 0.0, _PATIENCE
        # No step is longer, in any coordinate of z.
        self.reach = 10.0 * (1.0 + float(np.abs(z).max(initial=0.0)))
        # The distance to the local models, if this does not make the smoothing larger than the
        # losses, and the distance
        # between users: the penalty is completely smooth at first.
        steps = _solved(self.loss.hessians, self.loss.gradients) @ self.view.basis.T
        lengths = np.linalg.norm(steps, axis=1)
        reach = lengths[np.isfinite(lengths)].max(initial=0.0)
        apart = np.linalg.norm(self._differences(self.own), axis=1).max(initial=0.0)
        even = abs(float(self.loss.values.sum())) / float(self.radii.sum())
        self.mu = max(min(float(reach), even if np.isfinite(even) else np.inf), float(apart),
                      1e-300)

    @property
    def z(self) -> Array:
        return np.asarray(self.common[self.parts] + self.own)

    def _differences(self, z: Array) -> Array:
        """(n_edges, dim) of models, from z or from what users have beyond a common part."""
        return np.asarray((self.incidence @ z) @ self.view.basis.T)

    def _smooth(self, differences: Array) -> Array:
        """sqrt(||(B x)_e||^2 + mu^2)."""
        return np.asarray(np.hypot(np.linalg.norm(differences, axis=1), self.mu))

    def _edges(self, differences: Array, smooth: Array) -> Array:
        """(n_edges, dim, dim) the part of every edge in the Newton matrix.

        Eliminating the step of the duals leaves  H + B' M B  with, for each edge,
            M = radii / s (I - (y d' + d y') / (2 radii s)),      d = (B x)_e,  s = sqrt(||d||^2 +
                                                                  mu^2)
        """
        outer = self.duals[:, :, None] * differences[:, None, :]
        outer = (outer + outer.swapaxes(1, 2)) * (0.5 / (self.radii * smooth))[:, None, None]
        return np.asarray((self.radii / smooth)[:, None, None] * (np.eye(self.d) - outer))

    def _matrix(self, edges: Array) -> Array:
        """The Newton matrix in the unknowns of `_solve`.

        A step of all users together is up to the losses alone: there the edges, which may be
        stiffer by many orders, drop out exactly instead of by cancellation.
        """
        blocks, everyone = self.view.basis.T @ edges @ self.view.basis, np.arange(self.n)
        matrix = np.zeros((self.n, self.n, self.d, self.d))
        np.add.at(matrix, (self.first, self.second), -blocks)
        matrix += matrix.transpose(1, 0, 2, 3)
        matrix[everyone, everyone] = self.loss.hessians - matrix.sum(axis=1)
        roots = self.roots[self.parts]
        matrix[roots, everyone] = matrix[everyone, roots] = self.loss.hessians
        matrix[self.roots, self.roots] = self._totals(self.loss.hessians)
        return matrix.transpose(0, 2, 1, 3).reshape(self.n * self.d, self.n * self.d)

    def _totals(self, rows: Array) -> Array:
        """The sum of rows over each connected part."""
        sums = np.zeros((len(self.roots), *rows.shape[1:]))
        np.add.at(sums, self.parts, rows)
        return sums

    def _solve(self, system: Callable[[Array], Array], right: Array) -> tuple[Array, Array]:
        """The Newton step for a right-hand side: common to each connected part, and beyond it (0
        for the roots).
        """
        turned = right.copy()
        turned[self.roots] = self._totals(right)
        solved = system(turned)
        common = solved[self.roots]
        solved[self.roots] = 0.0
        return common, solved

    def advance(self, tol: float) -> bool:
        """Make one Newton step; returns whether the method has converged."""
        # 1. The linear system of a Newton step on the smoothed objective.
        differences = self._differences(self.own)
        smooth = self._smooth(differences)
        pull = self.radii / smooth
        value = float(self.loss.values.sum() + self.radii @ smooth)
        edges = self._edges(differences, smooth)
        # Where all models are equal and nothing holds them.
        with np.errstate(over="ignore", invalid="ignore"):
            matrix = self._matrix(edges)
        matrix[np.diag_indices(len(matrix))] += self.damping
        system = _factorise(matrix)
        forces = (pull[:, None] * differences) @ self.view.basis
        gradient = self.loss.gradients + self.incidence.T @ forces
        # 2. The step. Where losses are flat (Huber far out) it knows a direction but no length.
        common, own = self._solve(system, -gradient)
        longest = max(float(np.abs(common).max()), float(np.abs(own).max()), 1e-300)
        cut = min(1.0, self.reach / longest)
        common, own = cut * common, cut * own
        decrement = -float((gradient * (common[self.parts] + own)).sum())
        # 3. As much of it as decreases the objective, for the models and for the duals.
        size = self._size(common, own, value, decrement)
        moved = self._differences(own)
        along = (differences * moved).sum(axis=1) / (self.radii * smooth)
        change = pull[:, None] * (differences + moved - self.duals * along[:, None]) - self.duals
        self.common, self.own = self.common + size * common, self.own + size * own
        self.loss = self.view.evaluate(self.z, 2)
        self._carry(self.duals + size * change)
        for _ in range(_REFINEMENTS):
            # 4. Between users with nearly equal models, steps of the duals are small differences of
            #    large numbers. So the remaining residual of the duals is distributed over the same
            #    edges once more.
            flow = self._differences(self._solve(system, self._lack())[1])
            self._carry(self.duals - (edges @ flow[..., None])[..., 0])
        # 5. How far and how carefully to step next.
        self.reach *= 0.5 if size < 1.0 else 4.0 if cut < 1.0 else 1.0
        if size == 1.0:
            self.damping *= 0.1
        elif size < 1e-2:
            self.damping = max(10.0 * self.damping, 1e-8)
        return self._arrived(tol, value, decrement, size)

    def _lack(self) -> Array:
        """grad f + B'y."""
        return np.asarray(self.loss.gradients + self.incidence.T @ (self.duals @ self.view.basis))

    def _size(self, common: Array, own: Array, value: float, decrement: float) -> float:
        """The share of a step that lowers the smoothed objective enough; 0 where none does."""
        size = 1.0
        for _ in range(_TRIALS):
            beyond = self.own + size * own
            trial = self.view.evaluate((self.common + size * common)[self.parts] + beyond, 0)
            penalty = self.radii @ self._smooth(self._differences(beyond))
            reached = float(trial.values.sum() + penalty)
            if reached <= value - 1e-4 * size * decrement + 1e-14 * abs(value):
                return size
            size *= 0.5
        return 0.0

    def _carry(self, duals: Array) -> None:
        """Set these duals, scaled into their balls."""
        norms = np.linalg.norm(duals, axis=1)
        self.duals = duals * np.minimum(1.0, self.radii / np.maximum(norms, 1e-300))[:, None]

    def _arrived(self, tol: float, value: float, decrement: float, size: float) -> bool:
        """Whether the duality gap, estimated by second-order models, is within tol; otherwise
        reduces the smoothing.
        """
        differences = self._differences(self.own)
        lengths = np.linalg.norm(differences, axis=1)
        lack = self._lack()
        missing = 0.5 * float(np.einsum("nd,nd->", lack, _solved(self.loss.hessians, lack)))
        slack = float(self.radii @ lengths - (self.duals * differences).sum())
        scale = abs(float(self.loss.values.sum() + self.radii @ lengths)) + 1e-300
        if missing + slack <= 0.1 * tol * scale:
            return True
        smoothing = self.mu * float(self.radii.sum())
        self.patience -= 1
        if decrement <= max(0.3 * smoothing, 1e-15 * abs(value)) or size == 0.0 \
            or not self.patience:
            self.patience = _PATIENCE
            least = 1e-15 * float(lengths.max(initial=0.0)) + 1e-250
            if self.mu <= least or smoothing <= 1e-17 * scale:
                return True
            self.mu *= 0.1 if size == 1.0 else 0.5
        return False

    def end(self) -> tuple[Array, Array, Array]:
        """The result of `solve_smoothed`."""
        duals, lengths = np.zeros((self.graph.n_edges, self.d)), np.zeros(self.graph.n_edges)
        duals[self.kept] = self.duals
        norms = np.linalg.norm(self.duals, axis=1)
        room = np.sqrt(np.maximum(1.0 - (norms / self.radii) ** 2, 0.0))
        lengths[self.kept] = self.mu / np.maximum(room, 1e-3)
        return self.view.models(self.z), duals, lengths


def _solved(matrices: Array, vectors: Array) -> Array:
    """H^-1 v for each user, except for flat directions."""
    from coterie.losses.newton import solve_scaled

    diagonal = np.einsum("nii->ni", matrices)
    units = np.sqrt(np.maximum(diagonal, 1e-12 * float(np.abs(diagonal).max(initial=0.0)) + 1e-300))
    with np.errstate(over="ignore", invalid="ignore"):
        return solve_scaled(matrices, units, np.full(len(matrices), 1e-10), vectors)


def _factorise(matrix: Array) -> Callable[[Array], Array]:
    """Solve systems with a matrix that is positive definite up to rounding errors, for right-hand
    sides of the shape of models; zero if the matrix cannot be used.
    """
    from scipy.linalg import LinAlgError, cho_factor, cho_solve

    diagonal = np.diag(matrix)
    least = max(1e-30 * float(diagonal.max(initial=0.0)),
                -100.0 * float(diagonal.min(initial=0.0))) + 1e-300
    units, factor = np.sqrt(np.maximum(diagonal, least)), None
    scaled = matrix / units[:, None] / units
    for shift in _SHIFTS if np.isfinite(scaled).all() else ():
        try:
            factor = cho_factor(scaled + shift * np.eye(len(scaled)), lower=True)
            break
        except LinAlgError:
            continue

    def solve(rows: Array) -> Array:
        right = rows.ravel() / units
        if factor is None or not np.isfinite(right).all():
            return np.zeros_like(rows)
        return np.asarray(cho_solve(factor, right) / units).reshape(rows.shape)

    return solve
