"""The fast solver: splitting on quadratic models of the losses, then merge, polish and certify.

Between refreshes the losses are replaced by their second-order models (proximal Newton), and the splitting of `engines`
makes a few passes over the edges. Its duals are feasible after every pass and show the groups: a dual strictly inside
its ball means that its two users share a model. The users of a group get their mean or, if that is not enough, the
exact optimum for these groups (`polish`). This makes a rough iterate accurate, because the error of its objective is of
second order.

Stopping rule: the solver stops when `coterie.certificates` certifies the tolerance, and otherwise after `max_iter`
passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from coterie._typing import Array, Ints
from coterie.certificates import certify, judge
from coterie.errors import Interrupted, InvalidInput
from coterie.labels import group_means, labels_of
from coterie.problem import Problem
from coterie.solution import Certificate, Record
from coterie.solvers.base import Point, Start
from coterie.solvers.polish import nearly_equal, polish
from coterie.solvers.smoothed import LARGEST, solve_smoothed

_TURN = 3.0  # first factor of a change of sigma
_TOO_LOW, _TOO_HIGH = 2.0, 1.03 / 1.8  # limits of ||B x - z|| / ||change of z|| outside which sigma is changed
_DIGITS = 1e-15  # relative decrease at which a polish ends
_HOPELESS = 3  # failed attempts at a finite bound after which the solver stops trying
_EXACT = 100  # largest number of unknowns for which the result is always polished to rounding accuracy
_SMOOTH_AT = ((60, 100), (300, 400), (LARGEST, 1500))  # unknowns, and passes after which smoothing is tried
_ESTIMATE = 1e-9  # gap that smoothing aims at: it is estimated there, and a few more Newton steps cost little
_TINY, _SMALL, _POLISH = 20, 300, 3000  # groups that are always polished; unknowns of a cheap polish, of any polish


@dataclass(frozen=True, kw_only=True)
class Fast:
    """The default solver, for any loss and any graph.

    Parameters
    ----------
    max_iter
        Largest number of passes over the edges.
    sigma
        First step size of the splitting; None: set by the curvature of the losses. It adapts in both cases.

    Example
    -------
    >>> import coterie as ct
    >>> problem = ct.Problem(ct.Users.from_arrays([[0.0], [1.0], [9.0]]), ct.SquaredDistance(), lam=1.0)
    >>> ct.solve(problem, solver=ct.Fast(max_iter=200)).labels.tolist()
    [0, 0, 1]
    """

    max_iter: int = 5000
    sigma: float | None = None

    def __post_init__(self) -> None:
        if self.max_iter < 1:
            raise InvalidInput(f"max_iter must be at least 1, got {self.max_iter!r}", remedy="Use for example 5000")
        if self.sigma is not None and not (np.isfinite(self.sigma) and self.sigma > 0):
            raise InvalidInput(f"sigma must be a finite number > 0, got {self.sigma!r}", remedy="Use None")

    def run(self, problem: Problem, tol: float, start: Start | None = None,
            progress: Callable[[Record], None] | None = None) -> Point:
        if problem.lam == 0 or not (problem.graph.weights > 0).any():
            models = problem.loss.local(problem.samples, start=None if start is None else start.models).points
            return Point(models, np.zeros((problem.graph.n_edges, problem.dim)))
        return _Run(self, problem, tol, start, progress).go()


class _Run:
    """One solve: the iteration's state and the best certified point so far.

    Attributes
    ----------
    problem, tol, settings, progress : the arguments of the solve.
    began, history : time of the start, and one `Record` per batch of passes.
    certificate, best : the best certificate so far and its models.
    quadratic : whether the second-order models are the losses themselves.
    centre, values, gradients, hessians : where the second-order models are expanded, and their parts.
    curvature, floor, shift : mean curvature; the least and the current shift of each user's Hessian.
    engine, exact_start : the splitting on the graph; whether its first sigma is the right one.
    passes, limit : passes over the edges so far, and at most.
    next_try, repair_at, smooth_at : passes before which no certificate, repair of duals or smoothing is tried.
    unbounded : how many certificates had no finite bound even after a repair.
    labels, tried : groups of the last batch, and the groups that were polished last.
    warm, warm_labels : whether a start with duals was given, and its groups.
    proven : whether a polish was tried.
    """

    def __init__(self, settings: Fast, problem: Problem, tol: float, start: Start | None,
                 progress: Callable[[Record], None] | None) -> None:
        from coterie.solvers.engines import choose

        self.problem, self.tol, self.settings, self.progress = problem, tol, settings, progress
        self.began = time.perf_counter()
        self.history: list[Record] = []
        self.certificate: Certificate | None = None
        self.quadratic = problem.loss.quadratic
        self._expand(np.zeros((problem.n_users, problem.dim)) if start is None else start.models)
        if start is None and self.quadratic:  # one Newton step gives the local models
            definite = self.hessians + 1e-6 * self.curvature * np.eye(problem.dim)
            self._expand(np.asarray(-np.linalg.solve(definite, self.gradients[..., None])[..., 0]))
        elif start is None and (np.trace(self.hessians, axis1=1, axis2=2) < 0.1 * self.curvature * problem.dim).any():
            # Some losses are flat at zero (Huber far from all samples): start from the pooled model.
            self._expand(polish(problem, problem.graph.components, self.centre, tol=1e-6))
        # Users without curvature (a hinge with margin 1 or more for all samples) still need a definite system.
        regular = self.quadratic and bool((np.linalg.eigvalsh(self.hessians)[:, 0] > 1e-15 * self.curvature).all())
        self.floor = 0.0 if regular else 1e-9 * self.curvature
        self.shift = np.full(problem.n_users, self.floor)
        degree = 2.0 * problem.graph.n_edges / problem.n_users
        self.engine = choose(problem.graph, self.hessians, self.quadratic, problem.lam)
        # With one curvature for all users and directions, the first sigma is right except for groups close together.
        self.exact_start = self.quadratic and self.engine.exact_start and np.array_equal(
            self.hessians, np.broadcast_to(self.hessians[0, 0, 0] * np.eye(problem.dim), self.hessians.shape))
        known = start.sigma if start is not None and not self.exact_start else None
        sigma = settings.sigma or known or self.engine.stiffness * self.curvature / degree
        self.engine.begin(self.centre, None if start is None else start.duals, sigma)
        self.best, self.passes, self.next_try, self.repair_at, self.unbounded = self.centre, 0, 0, 0, 0
        self.labels = self.tried = np.empty(0, dtype=np.int64)
        unknowns = problem.n_users * problem.dim
        self.smooth_at = next((at for most, at in _SMOOTH_AT if unknowns <= most), settings.max_iter)
        self.limit = settings.max_iter
        self.warm = start is not None and start.duals is not None
        self.warm_labels = labels_of(self.centre) if self.warm else self.labels

    def _expand(self, models: Array) -> None:
        """Compute the second-order models of the losses at these points."""
        self.centre = models
        self.values, self.gradients, self.hessians = self.problem.loss.evaluate(self.problem.samples, models)
        self.curvature = float(np.trace(self.hessians, axis1=1, axis2=2).mean()) / self.problem.dim
        if not self.curvature > 0:  # flat everywhere: use a positive number, from the loss if it has one
            known = self.stiffest[np.isfinite(self.stiffest)]
            self.curvature = 1e-6 * float(known.mean()) if known.size else 1e-6

    @cached_property
    def stiffest(self) -> Array:
        """(n_users,) upper bounds on the Hessians."""
        return self.problem.loss.lipschitz(self.problem.samples)

    def go(self) -> Point:
        """Iterate until the tolerance is certified or the passes are used up."""
        batch, sigma = 20 if self.quadratic else 10, self.engine.sigma
        factor, last, changes, next_change = _TURN, 0, 0, 20
        try:
            # The groups of the start may still be right: then it is enough to solve the reduced problem.
            if self.warm and self._small(self.warm_labels) and self._prove(self.warm_labels, self.centre):
                self._report(self.warm_labels)
                return self._point()
            while self.passes < self.limit:
                hessians = self.hessians + self.shift[:, None, None] * np.eye(self.problem.dim)
                linear = np.einsum("nij,nj->ni", hessians, self.centre) - self.gradients
                self.engine.model(hessians, linear)
                steps = min(batch, self.settings.max_iter - self.passes)
                primal, moved = self.engine.run(steps)
                self.passes += steps
                models, slopes, labels = self.engine.read()
                if not np.isfinite(models).all():  # the losses are steeper than their models predicted
                    if self.smooth_at < self.settings.max_iter:
                        self._smooth()
                    break
                self._refresh(models)
                error = self._error(slopes, models)
                scale = float(np.abs(self.values).sum()) + 1e-300
                done = self._look(models, labels, error / scale)
                self._report(labels)
                if done and not self.proven and self._small(labels):
                    self._prove(labels, models)
                if not done and self.passes >= self.smooth_at:
                    done = self._smooth()
                if done or self.unbounded > _HOPELESS:
                    break
                # Residual balancing, with the residuals of the last pass: increase sigma if z is behind B x.
                ratio = np.sqrt(primal / (moved + 1e-300))
                turn = 1 if ratio > _TOO_LOW else -1 if ratio < _TOO_HIGH else 0
                if self.exact_start:
                    turn = int(error <= 0.1 * self.tol * scale)
                if turn and factor > 1.3 and self.passes >= next_change:
                    factor = np.sqrt(factor) if last and turn != last else factor
                    last, changes = turn, changes + 1
                    self.engine.retune(float(np.clip(self.engine.sigma * factor**turn, sigma / 1e5, sigma * 1e5)))
                    next_change = self.passes + 20 * (1 + changes // 2)
        except KeyboardInterrupt as stop:
            if self.certificate is None:  # at most one certificate is computed after Ctrl-C
                models, _, labels = self.engine.read()
                self._judge(group_means(models, labels)[labels], self.engine.duals())
            raise Interrupted(self._point()) from stop
        if self.certificate is None or self.certificate.relative_gap > self.tol:
            self._last_try()
        return self._point()

    def _point(self) -> Point:
        assert self.certificate is not None
        return Point(self.best, self.certificate.duals, tuple(self.history), self.engine.sigma)

    def _look(self, models: Array, labels: Ints, error: float) -> bool:
        """Try to finish if the groups do not change any more, or if the iterate is close to the optimum."""
        settled = np.array_equal(labels, self.labels) and not np.array_equal(labels, self.tried)
        self.labels = labels
        if error <= 3.0 * self.tol and self.passes >= self.next_try:
            if self._try(models, labels):
                return True
            self.next_try = int(1.15 * self.passes)  # wait before the next attempt
            return False
        if settled and error <= 1e-3 and self._few(labels, _SMALL):
            self.tried = labels
            return self._prove(labels, models)
        return False

    def _small(self, labels: Ints) -> bool:
        """Whether a polish is cheap."""
        return self._few(labels, _SMALL) or (int(labels.max()) + 1) * self.problem.dim <= _EXACT

    def _few(self, labels: Ints, most: int) -> bool:
        """Whether there are so few groups that solving for them is cheaper than passes over the edges."""
        clusters = int(labels.max()) + 1
        return clusters * self.problem.dim <= most and (clusters <= self.problem.n_users // 3 or clusters <= _TINY)

    def _refresh(self, models: Array) -> None:
        """Compute second-order models at the new point, or as far towards it as the old ones are accurate enough."""
        problem = self.problem
        if self.quadratic:  # the model is the loss: only the gradients change
            self.centre = models
            with np.errstate(over="ignore", invalid="ignore"):
                self.values, self.gradients, _ = problem.loss.evaluate(problem.samples, models, 1)
            return
        step = models - self.centre
        second = 0.5 * np.einsum("nd,nde,ne->n", step, self.hessians, step) + 0.5 * self.shift * (step**2).sum(axis=1)
        slope = np.einsum("nd,nd->n", self.gradients, step)
        size = np.ones(problem.n_users)
        for _ in range(30):
            point = self.centre + size[:, None] * step
            with np.errstate(over="ignore", invalid="ignore"):
                values, gradients, hessians = problem.loss.evaluate(problem.samples, point)
                trusted = values <= self.values + size * slope + 1.5 * size**2 * second + 1e-12 * np.abs(self.values)
            if trusted.all():
                break
            size = np.where(trusted, size, 0.5 * size)
        # If a model predicted too large a decrease, its curvature is increased; a Lipschitz bound is always enough.
        self.shift = np.maximum(0.1 * self.shift, self.floor)
        if (size < 1.0).any():
            stiffer = np.minimum(np.maximum(100.0 * self.shift, 0.03 * self.curvature), self.stiffest)
            self.shift = np.where(size < 1.0, stiffer, self.shift)
        self.centre, self.values, self.gradients, self.hessians = point, values, gradients, hessians

    def _error(self, slopes: Array, models: Array) -> float:
        """An estimate of the error of the dual bound: 1/2 (grad f - slopes)' H^-1 (grad f - slopes)."""
        residual = self.gradients - slopes
        shift = (1e-6 if self.quadratic else 1e-3) * self.curvature * np.eye(self.problem.dim)
        step = np.linalg.solve(self.hessians + shift, residual[..., None])[..., 0]
        return 0.5 * float(np.einsum("nd,nd->", residual, step))

    proven = False

    def _try(self, models: Array, labels: Ints) -> bool:
        """Merge and certify; if that is not enough, polish. True if the tolerance is certified."""
        fused = group_means(models, labels)[labels]
        if not self.quadratic and self._few(labels, _SMALL):  # conjugates are more expensive than a polish
            return self._prove(labels, fused) or self._judge(fused, self.engine.duals())
        if self._judge(fused, self.engine.duals()):
            return True
        return self._few(labels, _POLISH) and self._prove(labels, fused)

    def _prove(self, labels: Ints, models: Array) -> bool:
        """Certify the exact optimum for these groups, with the current duals and with duals built for it."""
        self.proven = True
        polished = polish(self.problem, labels, models, tol=_DIGITS)
        if not self._defend(polished):
            return False
        # Merge groups that are very close together, if the certificate is as good.
        for distance in (1e-2, 1e-4, 1e-6):
            closer = nearly_equal(self.problem, polished, distance)
            if closer is None:
                break
            self._defend(polish(self.problem, closer, polished, tol=_DIGITS), prefer=True)
            if self.best is not polished:
                break
        return True

    def _defend(self, polished: Array, prefer: bool = False) -> bool:
        """Certify the optimum for given groups, with duals built for it if the engine can build them."""
        labels = labels_of(polished)
        gradients = self.problem.gradients(polished)
        # The error of the bound is about ||lack||^2 / (2 curvature); the factor allows for users with less curvature.
        enough = 0.02 * self.tol * self.curvature * float(np.abs(self.values).sum())
        proof = self.engine.proof(labels, polished, gradients, enough)
        return self._judge(polished, self.engine.duals() if proof is None else proof, prefer)

    def _judge(self, models: Array, duals: Array, prefer: bool = False) -> bool:
        """Certify a point, and keep it if it is the best so far, or as good and preferred."""
        if not (np.isfinite(models).all() and np.isfinite(duals).all()):
            return False  # a step that overflowed
        certificate = judge(self.problem, models, duals)
        if not np.isfinite(certificate.bound) and self.passes >= self.repair_at:
            # The duals may be only slightly outside the domain of a conjugate: repair them, but not every time.
            certificate = certify(self.problem, models, duals)
            self.repair_at = 0 if np.isfinite(certificate.bound) else 2 * self.passes
            self.unbounded += not np.isfinite(certificate.bound)
        known = np.inf if self.certificate is None else self.certificate.relative_gap
        as_good = known + 4.0 * certificate.rounding / max(abs(certificate.objective), certificate.floor, 1e-300)
        if self.certificate is None or certificate.relative_gap < (as_good if prefer else known):
            self.certificate, self.best = certificate, models
        return self.certificate.relative_gap <= self.tol

    def _last_try(self) -> None:
        """Certify the last iterate, also with duals built for its groups, and keep the best."""
        models, _, labels = self.engine.read()
        if np.isfinite(models).all():
            self._try(models, labels)
        if self.certificate is None:
            self._judge(self.centre, np.zeros((self.problem.graph.n_edges, self.problem.dim)))
        if self.certificate is not None and self.problem.graph.n_edges <= 2_000_000:
            self._build()

    def _smooth(self) -> bool:
        """Try the solver for problems on which splitting is slow; see `coterie.solvers.smoothed`."""
        self.smooth_at, self.limit = self.settings.max_iter, min(self.limit, 3 * self.passes)
        end = solve_smoothed(self.problem, min(self.tol, _ESTIMATE), self.centre if self.warm else None)
        if not (np.isfinite(end.models).all() and np.isfinite(end.duals).all()):
            return False
        close = np.linalg.norm(self.problem.graph.differences(end.models), axis=1) <= 10.0 * end.lengths
        labels = self.problem.graph.subgraph(close & (self.problem.radii > 0)).components
        fused = group_means(end.models, labels)[labels]
        for models in (fused, polish(self.problem, labels, fused, tol=_DIGITS), end.models):
            if self._judge(models, end.duals):
                return True
        return self._build()

    def _build(self) -> bool:
        """Certify the best point with duals built for its groups."""
        built = certify(self.problem, self.best)
        if self.certificate is None or built.relative_gap < self.certificate.relative_gap:
            self.certificate = built
        return self.certificate.relative_gap <= self.tol

    def _report(self, labels: Ints) -> None:
        known = self.certificate
        record = Record(self.passes, known.objective if known else np.inf, known.relative_gap if known else np.inf,
                        int(labels.max()) + 1, time.perf_counter() - self.began)
        self.history.append(record)
        if self.progress is not None:
            self.progress(record)
