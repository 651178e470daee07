"""The fast solver: splitting on quadratic models of the losses, then fuse, polish and certify.

Between refreshes the losses are replaced by their second-order models (proximal Newton), and the splitting of
`engines` is run on them for a few passes over the edges. Its duals are feasible at every moment and say which users
are together: a dual strictly inside its ball joins its two users. Giving the users of a cluster their mean, and where
that is not enough the exact optimum for these clusters (`polish`), turns a loose iterate into an accurate point: its
error in the objective is of second order. The judge is `coterie.certificates`; nothing else stops the solver early.
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
from coterie.problem import Problem
from coterie.solution import Certificate, Record, labels_of
from coterie.solvers.base import Point, Start
from coterie.solvers.polish import nearly_equal, polish, to_clusters
from coterie.solvers.smoothed import LARGEST, solve_smoothed

_TURN = 3.0  # factor by which sigma is changed at first
_TOO_LOW, _TOO_HIGH = 2.0, 1.03 / 1.8  # ||B x - z|| / ||change of z|| beyond which sigma is changed
_DIGITS = 1e-15  # relative decrease at which a polish ends
_HOPELESS = 3  # failed attempts at a finite bound after which there is taken to be none
_EXACT = 100  # unknowns up to which the answer is always polished to rounding
_SMOOTH_AT = ((60, 100), (300, 400), (LARGEST, 1500))  # unknowns, and passes after which smoothing is tried
_TINY, _SMALL, _POLISH = 20, 300, 3000  # clusters always polished; unknowns of a cheap polish, and of one at all


@dataclass(frozen=True, kw_only=True)
class Fast:
    """Any loss, any graph.

    Parameters
    ----------
    max_iter : most passes over the edges.
    sigma : step of the splitting to begin with; None lets the curvature of the losses set it. It adapts either way.
    """

    max_iter: int = 5000
    sigma: float | None = None

    def __post_init__(self) -> None:
        if self.max_iter < 1:
            raise InvalidInput(f"max_iter must be at least 1, got {self.max_iter!r}", remedy="Use for example 5000")
        if self.sigma is not None and not (np.isfinite(self.sigma) and self.sigma > 0):
            raise InvalidInput(f"sigma must be a finite number > 0, got {self.sigma!r}", remedy="Leave it at None")

    def run(self, problem: Problem, tol: float, start: Start | None = None,
            progress: Callable[[Record], None] | None = None) -> Point:
        if problem.lam == 0 or not (problem.graph.weights > 0).any():
            models = problem.loss.local(problem.samples, start=None if start is None else start.models).points
            return Point(models, np.zeros((problem.graph.n_edges, problem.dim)))
        return _Run(self, problem, tol, start, progress).go()


class _Run:
    """One solve: the iteration's state and the best certified point so far."""

    def __init__(self, settings: Fast, problem: Problem, tol: float, start: Start | None,
                 progress: Callable[[Record], None] | None) -> None:
        from coterie.solvers.engines import choose

        self.problem, self.tol, self.settings, self.progress = problem, tol, settings, progress
        self.began = time.perf_counter()
        self.history: list[Record] = []
        self.certificate: Certificate | None = None
        self.quadratic = problem.loss.quadratic
        self._expand(np.zeros((problem.n_users, problem.dim)) if start is None else start.models)
        if start is None and self.quadratic:  # everybody's own best model is one Newton step away
            definite = self.hessians + 1e-6 * self.curvature * np.eye(problem.dim)
            self._expand(np.asarray(-np.linalg.solve(definite, self.gradients[..., None])[..., 0]))
        elif start is None and (np.trace(self.hessians, axis1=1, axis2=2) < 0.1 * self.curvature * problem.dim).any():
            # Zero is where some losses are flat (Huber far from all samples): begin from the pooled model.
            self._expand(polish(problem, problem.graph.components, self.centre, tol=1e-6))
        # Without curvature of their own (a hinge met by all samples) users still need a definite system.
        regular = self.quadratic and bool((np.linalg.eigvalsh(self.hessians)[:, 0] > 1e-15 * self.curvature).all())
        self.floor = 0.0 if regular else 1e-9 * self.curvature
        self.shift = np.full(problem.n_users, self.floor)
        degree = 2.0 * problem.graph.n_edges / problem.n_users
        self.engine = choose(problem.graph, self.hessians, self.quadratic, problem.lam)
        # One curvature for all users and directions: then the first sigma is right, but for tight clusters.
        self.exact_start = self.quadratic and self.engine.exact_start and np.array_equal(
            self.hessians, np.broadcast_to(self.hessians[0, 0, 0] * np.eye(problem.dim), self.hessians.shape))
        known = start.sigma if start is not None and not self.exact_start else None
        sigma = settings.sigma or known or self.engine.stiffness * self.curvature / degree
        self.engine.begin(self.centre, None if start is None else start.duals, sigma)
        self.best, self.passes, self.next_try, self.mend_at, self.unbounded = self.centre, 0, 0, 0, 0
        self.labels = self.tried = np.empty(0, dtype=np.int64)
        unknowns = problem.n_users * problem.dim
        self.smooth_at = next((at for most, at in _SMOOTH_AT if unknowns <= most), settings.max_iter)
        self.limit = settings.max_iter
        self.warm = start is not None and start.duals is not None
        self.warm_labels = labels_of(self.centre) if self.warm else self.labels

    def _expand(self, models: Array) -> None:
        """Second-order models of the losses at these points."""
        self.centre = models
        self.values, self.gradients, self.hessians = self.problem.loss.evaluate(self.problem.samples, models)
        self.curvature = float(np.trace(self.hessians, axis1=1, axis2=2).mean()) / self.problem.dim
        if not self.curvature > 0:  # flat everywhere: some positive number, if the loss knows one
            known = self.stiffest[np.isfinite(self.stiffest)]
            self.curvature = 1e-6 * float(known.mean()) if known.size else 1e-6

    @cached_property
    def stiffest(self) -> Array:
        """(n_users,) no Hessian is stiffer."""
        return self.problem.loss.lipschitz(self.problem.samples)

    def go(self) -> Point:
        batch, sigma = 20 if self.quadratic else 10, self.engine.sigma
        factor, last, changes, next_change = _TURN, 0, 0, 20
        try:
            # The clusters of the start may still be right: then the reduced problem and its proof are all there is.
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
                if not np.isfinite(models).all():  # losses steeper than their models said
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
                # The rule of residual balance, told from the last pass: sigma up where z lags behind B x.
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
            if self.certificate is None:  # whoever presses Ctrl-C waits for one judgement at most
                models, _, labels = self.engine.read()
                self._judge(to_clusters(labels, models)[labels], self.engine.duals())
            raise Interrupted(self._point()) from stop
        if self.certificate is None or self.certificate.relative_gap > self.tol:
            self._last_try()
        return self._point()

    def _point(self) -> Point:
        assert self.certificate is not None
        return Point(self.best, self.certificate.duals, tuple(self.history), self.engine.sigma)

    def _look(self, models: Array, labels: Ints, error: float) -> bool:
        """Try to finish when that looks possible: clusters that stay as they are, or an iterate that is near."""
        settled = np.array_equal(labels, self.labels) and not np.array_equal(labels, self.tried)
        self.labels = labels
        if error <= 3.0 * self.tol and self.passes >= self.next_try:
            if self._try(models, labels):
                return True
            self.next_try = int(1.15 * self.passes)  # what failed will not succeed at once
            return False
        if settled and error <= 1e-3 and self._few(labels, _SMALL):
            self.tried = labels
            return self._prove(labels, models)
        return False

    def _small(self, labels: Ints) -> bool:
        """Whether a polish is cheap at any rate."""
        return self._few(labels, _SMALL) or (int(labels.max()) + 1) * self.problem.dim <= _EXACT

    def _few(self, labels: Ints, most: int) -> bool:
        """Whether clusters are so few that solving for them alone is cheap beside passes over the edges."""
        clusters = int(labels.max()) + 1
        return clusters * self.problem.dim <= most and (clusters <= self.problem.n_users // 3 or clusters <= _TINY)

    def _refresh(self, models: Array) -> None:
        """Second-order models at the new point, or as far towards it as the old ones can be trusted."""
        problem = self.problem
        if self.quadratic:  # the model is the loss: nothing to refresh but the gradients, which follow from it
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
        # Where a model promised too much, the next one is stiffer; a Lipschitz bound is always stiff enough.
        self.shift = np.maximum(0.1 * self.shift, self.floor)
        if (size < 1.0).any():
            stiffer = np.minimum(np.maximum(100.0 * self.shift, 0.03 * self.curvature), self.stiffest)
            self.shift = np.where(size < 1.0, stiffer, self.shift)
        self.centre, self.values, self.gradients, self.hessians = point, values, gradients, hessians

    def _error(self, slopes: Array, models: Array) -> float:
        """About what the dual bound misses: 1/2 (grad f - slopes)' H^-1 (grad f - slopes)."""
        residual = self.gradients - slopes
        shift = (1e-6 if self.quadratic else 1e-3) * self.curvature * np.eye(self.problem.dim)
        step = np.linalg.solve(self.hessians + shift, residual[..., None])[..., 0]
        return 0.5 * float(np.einsum("nd,nd->", residual, step))

    proven = False

    def _try(self, models: Array, labels: Ints) -> bool:
        """Fuse and certify; where that falls short, polish. True when the tolerance is certified."""
        fused = to_clusters(labels, models)[labels]
        if not self.quadratic and self._few(labels, _SMALL):  # conjugates cost more than a polish that spares them
            return self._prove(labels, fused) or self._judge(fused, self.engine.duals())
        if self._judge(fused, self.engine.duals()):
            return True
        return self._few(labels, _POLISH) and self._prove(labels, fused)

    def _prove(self, labels: Ints, models: Array) -> bool:
        """The exact optimum for these clusters, with the duals as they are and with duals made for it."""
        self.proven = True
        polished = polish(self.problem, labels, models, tol=_DIGITS)
        if not self._defend(polished):
            return False
        # Clusters that end up side by side are one, if that proves as well.
        for distance in (1e-2, 1e-4, 1e-6):
            closer = nearly_equal(self.problem, polished, distance)
            if closer is None:
                break
            self._defend(polish(self.problem, closer, polished, tol=_DIGITS), prefer=True)
            if self.best is not polished:
                break
        return True

    def _defend(self, polished: Array, prefer: bool = False) -> bool:
        """Judge the optimum for its own clusters with duals made for it, where the engine can make them."""
        labels = labels_of(polished)
        gradients = self.problem.gradients(polished)
        # The bound misses about ||lack||^2 / (2 curvature); a hundredth of that leaves room for users with less of it.
        enough = 0.02 * self.tol * self.curvature * float(np.abs(self.values).sum())
        proof = self.engine.proof(labels, polished, gradients, enough)
        return self._judge(polished, self.engine.duals() if proof is None else proof, prefer)

    def _judge(self, models: Array, duals: Array, prefer: bool = False) -> bool:
        """Have a point judged, and keep it if it is the best so far, or as good as the best and to be preferred."""
        if not (np.isfinite(models).all() and np.isfinite(duals).all()):
            return False  # a step that overflowed
        certificate = judge(self.problem, models, duals)
        if not np.isfinite(certificate.bound) and self.passes >= self.mend_at:
            # Perhaps only just outside a conjugate's domain: have it mended, but not at every turn.
            certificate = certify(self.problem, models, duals)
            self.mend_at = 0 if np.isfinite(certificate.bound) else 2 * self.passes
            self.unbounded += not np.isfinite(certificate.bound)
        known = np.inf if self.certificate is None else self.certificate.relative_gap
        as_good = known + 4.0 * certificate.rounding / max(abs(certificate.objective), certificate.floor, 1e-300)
        if self.certificate is None or certificate.relative_gap < (as_good if prefer else known):
            self.certificate, self.best = certificate, models
        return self.certificate.relative_gap <= self.tol

    def _last_try(self) -> None:
        """The iterate as it stands, and duals built for its clusters: whatever is certified best is returned."""
        models, _, labels = self.engine.read()
        if np.isfinite(models).all():
            self._try(models, labels)
        if self.certificate is None:
            self._judge(self.centre, np.zeros((self.problem.graph.n_edges, self.problem.dim)))
        if self.certificate is not None and self.problem.graph.n_edges <= 2_000_000:
            self._build()

    def _smooth(self) -> bool:
        """The way for what splitting takes long to solve; see `coterie.solvers.smoothed`."""
        self.smooth_at, self.limit = self.settings.max_iter, min(self.limit, 3 * self.passes)
        end = solve_smoothed(self.problem, self.tol, self.centre if self.warm else None)
        if not (np.isfinite(end.models).all() and np.isfinite(end.duals).all()):
            return False
        close = np.linalg.norm(self.problem.graph.differences(end.models), axis=1) <= 10.0 * end.lengths
        labels = self.problem.graph.subgraph(close & (self.problem.radii > 0)).components
        fused = to_clusters(labels, end.models)[labels]
        for models in (fused, polish(self.problem, labels, fused, tol=_DIGITS), end.models):
            if self._judge(models, end.duals):
                return True
        return self._build()

    def _build(self) -> bool:
        """Have the best point judged with duals built for its clusters."""
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
