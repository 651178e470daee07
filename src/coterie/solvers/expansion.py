"""Second-order models of the losses: what the fast solver iterates on between two refreshes."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from coterie.base.types import Array
from coterie.losses.curvature import Curvature
from coterie.losses.linear import flat
from coterie.losses.newton import solve_scaled
from coterie.problem.problem import Problem

_COMPILED = 20_000  # numbers in all models up to which compiled loops are used


class Expansion:
    """Quadratic models q_i(x) of the losses at `centre`, with a shift that keeps their minima in
    reach.

        q_i(x) = values_i + <gradients_i, x - c_i>
                 + 1/2 (x - c_i)' (hessians_i + shift_i I) (x - c_i)

    Attributes
    ----------
    problem : whose losses.
    quadratic : whether the models are the losses themselves.
    centre, values, gradients, hessians : where the losses are expanded, and their derivatives
        there.
    data : the losses on the rows of all users, for compiled code; None where users are many, or a
        loss is none that it knows.
    curvature : the mean curvature of a user in one direction, at the first point.
    floor, shift : the least and the current shift of each user's Hessian.
    """

    dense: ClassVar[bool] = True  # whether Hessians are matrices

    def __init__(self, problem: Problem, models: Array) -> None:
        self.problem, self.quadratic = problem, problem.loss.quadratic
        compiled = self.dense and models.size <= _COMPILED
        self.data = flat(problem.loss, problem.samples) if compiled else None
        self.expand(models)
        self.floor, self.shift = 0.0, np.zeros(problem.n_users)

    def expand(self, models: Array) -> None:
        """Compute the second-order models of the losses at these points."""
        self.centre = models
        self.values, self.gradients, self.hessians = self._at(models)
        self.curvature = float(np.trace(self.hessians, axis1=1, axis2=2).mean()) / self.problem.dim
        # Flat everywhere: use a positive number, from the loss if it has one.
        if not self.curvature > 0:
            known = self.stiffest[np.isfinite(self.stiffest) & (self.stiffest > 0)]
            self.curvature = 1e-6 * float(known.mean()) if known.size else 1e-6

    @cached_property
    def stiffest(self) -> Array:
        """(n_users,) upper bounds on the Hessians."""
        return self.problem.loss.lipschitz(self.problem.samples)

    @property
    def scale(self) -> float:
        """The sum of the absolute values of the losses at `centre`."""
        return float(np.abs(self.values).sum())

    def newton_point(self) -> Array:
        """(n_users, dim) the minima of the models: the local models, where the losses are
        quadratic.
        """
        return np.asarray(self.centre - self._solve(1e-6, self.gradients))

    def _solve(self, shift: float, vectors: Array) -> Array:
        """(H_i + shift * curvature * I)^-1 vectors_i; finite also for a matrix that is singular in
        rounded numbers.
        """
        definite = self.hessians + shift * self.curvature * np.eye(self.problem.dim)
        try:
            return np.asarray(np.linalg.solve(definite, vectors[..., None])[..., 0])
        except np.linalg.LinAlgError:
            units = np.sqrt(np.maximum(np.einsum("nii->ni", definite), 1e-300))
            return solve_scaled(definite, units, np.full(len(units), 1e-13), vectors)

    def flat_somewhere(self) -> bool:
        """Whether the loss of some user has far less curvature than the mean (Huber far from all
        samples).
        """
        traces = np.trace(self.hessians, axis1=1, axis2=2)
        return bool((traces < 0.1 * self.curvature * self.problem.dim).any())

    def isotropic(self) -> bool:
        """Whether all users have the same curvature in all directions."""
        unit = self.hessians[0, 0, 0] * np.eye(self.problem.dim)
        return np.array_equal(self.hessians, np.broadcast_to(unit, self.hessians.shape))

    def regularise(self) -> None:
        """Set the least shift: users without curvature (a hinge met by all samples) still need a
        definite system.
        """
        least = np.linalg.eigvalsh(self.hessians)[:, 0] if self.quadratic else np.zeros(1)
        regular = (least > 1e-15 * self.curvature).all()
        self.floor = 0.0 if regular else 1e-9 * self.curvature
        self.shift = np.full(self.problem.n_users, self.floor)

    def forms(self) -> tuple[Array, Array]:
        """The models as 1/2 x'H_i x - <linear_i, x>: the Hessians H with their shifts, and
        `linear`.
        """
        hessians = self.hessians + self.shift[:, None, None] * np.eye(self.problem.dim)
        return hessians, np.einsum("nij,nj->ni", hessians, self.centre) - self.gradients

    def refresh(self, models: Array) -> None:
        """Expand at the new point, or as far towards it as the old models are accurate enough."""
        if self.quadratic:  # the model is the loss: only the gradients change
            self.centre = models
            with np.errstate(over="ignore", invalid="ignore"):
                self.values, self.gradients = self._slopes_at(models)
        elif self.data is None:
            self._refresh(models)
        else:
            from coterie.solvers import loss_kernels

            self.centre = self.centre.copy()  # it may be the best point so far
            loss_kernels.refresh(self.data, models, self.centre, self.values, self.gradients,
                                 self.hessians, self.shift, self.floor, self.curvature)

    def _refresh(self, models: Array) -> None:
        step = models - self.centre
        second = 0.5 * self._second(step) + 0.5 * self.shift * (step**2).sum(axis=1)
        slope = np.einsum("nd,nd->n", self.gradients, step)
        size = np.ones(self.problem.n_users)
        for _ in range(30):
            point = self.centre + size[:, None] * step
            with np.errstate(over="ignore", invalid="ignore"):
                values, gradients, hessians = self._at(point)
                predicted = self.values + size * slope + 1.5 * size**2 * second
                trusted = values <= predicted + 1e-12 * np.abs(self.values)
            if trusted.all():
                break
            size = np.where(trusted, size, 0.5 * size)
        # If a model predicted too large a decrease, its curvature is increased; a Lipschitz bound
        # is always enough.
        self.shift = np.maximum(0.1 * self.shift, self.floor)
        if (size < 1.0).any():
            stiffer = np.maximum(100.0 * self.shift, 0.03 * self.curvature)
            self.shift = np.where(size < 1.0, np.minimum(stiffer, self.stiffest), self.shift)
        self.centre, self.values, self.gradients, self.hessians = point, values, gradients, hessians

    def _second(self, step: Array) -> Array:
        """(n_users,) step' H step."""
        return np.einsum("nd,nde,ne->n", step, self.hessians, step)

    def _at(self, point: Array) -> tuple[Array, Array, Array]:
        """Values, gradients and Hessians at these models."""
        if self.data is None:
            return self.problem.loss.evaluate(self.problem.samples, point)
        from coterie.losses import kernels

        n, d = point.shape
        values, gradients, hessians = np.empty(n), np.empty((n, d)), np.empty((n, d, d))
        kernels.expand(self.data, point, values, gradients, hessians)
        return values, gradients, hessians

    def _slopes_at(self, point: Array) -> tuple[Array, Array]:
        """Values and gradients at these models."""
        if self.data is None:
            return self.problem.loss.evaluate(self.problem.samples, point, 1)[:2]
        return self._at(point)[:2]

    def gradients_at(self, point: Array) -> Array:
        """(n_users, dim) the gradients of the losses at these models."""
        return self._slopes_at(point)[1]

    def error(self, slopes: Array) -> float:
        """An estimate of the error of the dual bound: 1/2 (grad f - slopes)' H^-1 (grad f -
        slopes).
        """
        share = 1e-6 if self.quadratic else 1e-3
        if self.data is not None:
            from coterie.solvers import loss_kernels

            error = loss_kernels.bound_error(self.hessians, self.gradients, slopes,
                                             share * self.curvature)
            if np.isfinite(error):
                return float(error)
        residual = self.gradients - slopes
        step = self._solve(share, residual)
        return 0.5 * float(np.einsum("nd,nd->", residual, step))


class WideExpansion(Expansion):
    """`Expansion` with Hessians as operators."""

    dense: ClassVar[bool] = False
    hessians: Curvature  # type: ignore[assignment]

    def expand(self, models: Array) -> None:
        self.centre = models
        self.values, self.gradients, self.hessians = self._at(models)
        self.curvature = float(self.hessians.trace().mean()) / self.problem.dim

    def _solve(self, shift: float, vectors: Array) -> Array:
        shifts = np.full(len(vectors), shift * self.curvature)
        return self.hessians.inverse(shifts, np.float32)(vectors)

    def isotropic(self) -> bool:
        return False

    def regularise(self) -> None:
        self.floor = 1e-9 * self.curvature
        self.shift = np.full(self.problem.n_users, self.floor)

    def forms(self) -> tuple[Any, Array]:
        """The Hessians and their shifts, and `linear`."""
        slopes = self.hessians.times(self.centre) + self.shift[:, None] * self.centre
        return (self.hessians, self.shift), slopes - self.gradients

    def _second(self, step: Array) -> Array:
        return np.einsum("nd,nd->n", step, self.hessians.times(step))

    def _at(self, point: Array) -> tuple[Array, Array, Any]:
        return self.problem.loss.expand(self.problem.samples, point)
