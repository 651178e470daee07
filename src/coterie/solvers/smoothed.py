"""The solver for the small and hard: Newton's method on smoothed problems, in coordinates that fit the losses.

The norms are smoothed and the smoothing is taken away,

    minimise   sum_i f_i(x_i) + sum_e radii_e sqrt(||(B x)_e||^2 + mu^2),        mu -> 0

by Newton's method on the optimality conditions in models and duals together (Chan, Golub and Mulet 1999, for total
variation):

    grad f_i(x_i) + (B'y)_i = 0,        sqrt(||(B x)_e||^2 + mu^2) y_e = radii_e (B x)_e

Models are x = origin + basis z with a basis in which the mean Hessian of the losses is the identity, so that neither
units nor offsets of the data matter. Every step solves a dense system of n_users * dim unknowns: a few dozen steps,
whatever the condition of the losses, where splitting would need thousands of passes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from coterie._typing import Array
from coterie.losses import Evaluation
from coterie.problem import Problem

LARGEST = 1200  # unknowns up to which dense systems are worth it
_REFINEMENTS = 2  # of the duals, after each step
_STEPS, _PATIENCE = 120, 12  # Newton steps in all, and with the same smoothing
_TRIALS = 40
_SINGULAR = 1e-14  # added to the diagonal of a system of unit diagonal


class Smoothed(NamedTuple):
    """Where the last Newton step ended."""

    models: Array  # (n_users, dim)
    duals: Array  # (n_edges, dim), inside their balls
    lengths: Array  # (n_edges,) the length that smoothing gives every difference; models closer than it may be equal


def solve_smoothed(problem: Problem, tol: float, start: Array | None = None) -> Smoothed:
    """Solve by smoothing; see the module's text.

    Parameters
    ----------
    problem : with lam > 0 and at least one edge of positive weight, n_users * dim at most `LARGEST`.
    tol : the relative duality gap aimed at, as the smoothed problem estimates it.
    start : (n_users, dim) models to begin from; zero by default.

    Returns
    -------
    Smoothed
    """
    search = _Search(problem, start)
    for _ in range(_STEPS):
        if search.advance(tol):
            break
    return search.ended()


class _View:
    """The losses as functions of z, where models are x = origin + basis z."""

    def __init__(self, problem: Problem, models: Array) -> None:
        self.loss, self.samples, self.everyone = problem.loss, problem.samples, np.arange(problem.n_users)
        self.frame = problem.samples.frame
        self.origin = np.zeros(problem.dim)
        basis = np.eye(problem.dim)
        if self.frame is not None:
            self.origin, basis = self.frame.common()
        self._use(basis)
        hessian = self.evaluate(self.enter(models), 2).hessians.mean(axis=0)
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
        return np.asarray(np.linalg.lstsq(self.basis / units, (models - self.origin).T, rcond=None)[0].T / units)

    def models(self, z: Array) -> Array:
        return self.origin + z @ self.basis.T

    def evaluate(self, z: Array, order: int) -> Evaluation:
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # a trial far out is rejected
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
    """T with T' hessian T = I, but for directions in which the Hessian is flat beside its others."""
    diagonal = np.diag(hessian)
    if not (np.isfinite(hessian).all() and (diagonal > 0).any()):
        return np.eye(len(hessian))
    units = np.sqrt(np.where(diagonal > 0, diagonal, diagonal[diagonal > 0].min()))
    values, vectors = np.linalg.eigh(hessian / units[:, None] / units)
    return np.asarray(vectors / np.sqrt(np.maximum(values, 1e-12 * values[-1])) / units[:, None])


def _rotated(basis: Array) -> Array:
    """The same space and the same whitened metric, with columns at right angles: lengths in x are sums of squares."""
    units = np.linalg.norm(basis, axis=0)
    if not np.isfinite(units).all():
        return basis
    turn = np.linalg.svd(basis)[2].T
    return np.asarray(basis @ turn)


class _Search:
    """The state of `solve_smoothed`."""

    def __init__(self, problem: Problem, start: Array | None) -> None:
        from scipy import sparse

        self.n, self.d, self.graph = problem.n_users, problem.dim, problem.graph
        self.kept = np.flatnonzero(problem.radii > 0)
        self.radii = problem.radii[self.kept]
        self.first, self.second = problem.graph.edges[self.kept].T
        count = np.arange(len(self.kept))
        signs = np.concatenate([np.ones(len(count)), -np.ones(len(count))])
        self.incidence: Any = sparse.csr_array((signs, (np.concatenate([count, count]), np.concatenate(
            [self.first, self.second]))), shape=(len(count), self.n))
        models = np.zeros((self.n, self.d)) if start is None else start
        self.view = _View(problem, models)
        self.z = self.view.enter(models)
        self.loss = self.view.evaluate(self.z, 2)
        self.duals = np.zeros((len(self.kept), self.d))  # y, in the coordinates of models
        self.damping, self.patience = _SINGULAR, _PATIENCE
        # As far as users would go by themselves, where that does not make the smoothing larger than the losses, and as
        # far as they are apart: nothing of the penalty is sharp yet.
        steps = _solved(self.loss.hessians, self.loss.gradients) @ self.view.basis.T
        reach = np.linalg.norm(steps, axis=1)
        reach = reach[np.isfinite(reach)].max(initial=0.0)
        apart = np.linalg.norm(self._differences(self.z), axis=1).max(initial=0.0)
        even = abs(float(self.loss.values.sum())) / float(self.radii.sum())
        self.mu = max(min(float(reach), even if np.isfinite(even) else np.inf), float(apart), 1e-300)

    def _differences(self, z: Array) -> Array:
        """(n_edges, dim) of models."""
        return np.asarray((self.incidence @ z) @ self.view.basis.T)

    def _smooth(self, differences: Array) -> Array:
        """sqrt(||(B x)_e||^2 + mu^2)."""
        return np.asarray(np.hypot(np.linalg.norm(differences, axis=1), self.mu))

    def _system(self, differences: Array, smooth: Array) -> tuple[Array, Array, Array]:
        """The Newton matrix, its part M of every edge, and the gradient of the smoothed objective.

        Eliminating the step of the duals leaves  H + B' M B  with, for each edge,
            M = radii / s (I - (y d' + d y') / (2 radii s)),      d = (B x)_e,  s = sqrt(||d||^2 + mu^2)
        """
        basis, pull = self.view.basis, self.radii / smooth
        outer = self.duals[:, :, None] * differences[:, None, :]
        outer = (outer + outer.swapaxes(1, 2)) * (0.5 / (self.radii * smooth))[:, None, None]
        edges = pull[:, None, None] * (np.eye(self.d) - outer)
        blocks = basis.T @ edges @ basis
        matrix = np.zeros((self.n, self.n, self.d, self.d))
        np.add.at(matrix, (self.first, self.second), -blocks)
        matrix += matrix.transpose(1, 0, 2, 3)
        everyone = np.arange(self.n)
        matrix[everyone, everyone] = self.loss.hessians - matrix.sum(axis=1)
        gradient = self.loss.gradients + self.incidence.T @ ((pull[:, None] * differences) @ basis)
        return matrix.transpose(0, 2, 1, 3).reshape(self.n * self.d, self.n * self.d), edges, gradient

    def advance(self, tol: float) -> bool:
        """One Newton step; whether the end is reached."""
        differences = self._differences(self.z)
        smooth = self._smooth(differences)
        value = float(self.loss.values.sum() + self.radii @ smooth)
        matrix, edges, gradient = self._system(differences, smooth)
        solve = _Definite(matrix, self.damping)
        step = -solve(gradient)
        decrement = -float((gradient * step).sum())
        size, trial = 1.0, self.loss
        for _ in range(_TRIALS):
            z = self.z + size * step
            trial = self.view.evaluate(z, 0)
            reached = float(trial.values.sum() + self.radii @ self._smooth(self._differences(z)))
            if reached <= value - 1e-4 * size * decrement + 1e-14 * abs(value):
                break
            size *= 0.5
        else:
            size = 0.0
        pull = self.radii / smooth
        moved = self._differences(step)
        change = pull[:, None] * (differences + moved - self.duals * (
            (differences * moved).sum(axis=1) / (self.radii * smooth))[:, None]) - self.duals
        self.z = self.z + size * step
        self.loss = self.view.evaluate(self.z, 2)
        self._carry(self.duals + size * change)
        for _ in range(_REFINEMENTS):
            # Between users that are nearly together, steps of the duals are small differences of large numbers: what
            # the duals still lack is sent through the same edges once more.
            lack = self.loss.gradients + self.incidence.T @ (self.duals @ self.view.basis)
            self._carry(self.duals - (edges @ self._differences(solve(lack))[..., None])[..., 0])
        self.damping = max(_SINGULAR, 0.1 * self.damping) if size == 1.0 else min(
            1e-2, (100.0 if size < 1e-3 else 3.0) * self.damping)
        return self._arrived(tol, value, decrement, size)

    def _carry(self, duals: Array) -> None:
        """Take these duals, drawn into their balls."""
        norms = np.linalg.norm(duals, axis=1)
        self.duals = duals * np.minimum(1.0, self.radii / np.maximum(norms, 1e-300))[:, None]

    def _arrived(self, tol: float, value: float, decrement: float, size: float) -> bool:
        """Whether the duality gap, estimated by the losses' second-order models, is within tol; else less smoothing."""
        differences = self._differences(self.z)
        lengths = np.linalg.norm(differences, axis=1)
        lack = self.loss.gradients + self.incidence.T @ (self.duals @ self.view.basis)
        missing = 0.5 * float(np.einsum("nd,nd->", lack, _solved(self.loss.hessians, lack)))
        slack = float(self.radii @ lengths - (self.duals * differences).sum())
        scale = abs(float(self.loss.values.sum() + self.radii @ lengths)) + 1e-300
        if missing + slack <= 0.1 * tol * scale:
            return True
        smoothing = self.mu * float(self.radii.sum())
        self.patience -= 1
        if decrement <= max(0.3 * smoothing, 1e-15 * abs(value)) or size == 0.0 or not self.patience:
            self.patience = _PATIENCE
            if self.mu <= 1e-15 * float(lengths.max(initial=0.0)) + 1e-250 or smoothing <= 1e-17 * scale:
                return True
            self.mu *= 0.1 if size == 1.0 else 0.5
        return False

    def ended(self) -> Smoothed:
        duals, lengths = np.zeros((self.graph.n_edges, self.d)), np.zeros(self.graph.n_edges)
        duals[self.kept] = self.duals
        norms = np.linalg.norm(self.duals, axis=1)
        room = np.sqrt(np.maximum(1.0 - (norms / self.radii) ** 2, 0.0))
        lengths[self.kept] = self.mu / np.maximum(room, 1e-3)
        return Smoothed(self.view.models(self.z), duals, lengths)


def _solved(matrices: Array, vectors: Array) -> Array:
    """H^-1 v for each user, but for flat directions."""
    from coterie.losses.newton import solve_scaled

    diagonal = np.einsum("nii->ni", matrices)
    units = np.sqrt(np.maximum(diagonal, 1e-12 * float(np.abs(diagonal).max(initial=0.0)) + 1e-300))
    with np.errstate(over="ignore", invalid="ignore"):
        return solve_scaled(matrices, units, np.full(len(matrices), 1e-10), vectors)


class _Definite:
    """Solves systems with a matrix that is positive definite but for rounding."""

    def __init__(self, matrix: Array, damping: float) -> None:
        from scipy.linalg import LinAlgError, cho_factor

        diagonal = np.diag(matrix)
        self.units = np.sqrt(np.maximum(diagonal, 1e-30 * diagonal.max(initial=0.0) + 1e-300))
        self.factor: Any = None
        scaled = matrix / self.units[:, None] / self.units
        if not np.isfinite(scaled).all():
            return
        for shift in (damping, *(s for s in (1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2, 1.0) if s > damping)):
            try:
                self.factor = cho_factor(scaled + shift * np.eye(len(scaled)), lower=True)
                return
            except LinAlgError:
                continue

    def __call__(self, rows: Array) -> Array:
        """The solution for a right-hand side of the shape of models; zero where the matrix cannot be used."""
        from scipy.linalg import cho_solve

        right = rows.ravel() / self.units
        if self.factor is None or not np.isfinite(right).all():
            return np.zeros_like(rows)
        return np.asarray(cho_solve(self.factor, right) / self.units).reshape(rows.shape)
