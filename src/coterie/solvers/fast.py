"""The fast solver: splitting on quadratic models of the losses, then merge, polish and certify.

Between refreshes the losses are replaced by their second-order models (proximal Newton), and the
splitting of `engines` makes a few passes over the edges. Its duals are feasible after every pass
and show the groups: a dual strictly inside its ball means that its two users share a model. The
users of a group get their mean or, if that is not enough, the exact optimum for these groups
(`polish`). This makes a rough iterate accurate, because the error of its objective is of second
order.

Stopping rule: the solver stops when `coterie.problem.certificates` certifies the tolerance, and
otherwise after `max_iter` passes.

Where to read: `_Run.go` and `_Run._iterate` are the method; `_look` decides what is tried, `_try`
certifies the merged models, and `_prove` the optimum for given groups.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from coterie.base.errors import Interrupted, InvalidInput
from coterie.base.labels import group_means, labels_of
from coterie.base.types import Array, Ints
from coterie.losses.linear import flat
from coterie.problem.certificates import certify, judge
from coterie.problem.problem import Problem
from coterie.problem.solution import Certificate, Record
from coterie.solvers.base import Point
from coterie.solvers.expansion import Expansion, WideExpansion
from coterie.solvers.polish import nearly_equal, polish, split
from coterie.solvers.smoothed import LARGEST, solve_smoothed

# Tolerance from which rough bounds are enough, and the share of it that they may miss.
_LOOSE, _MISSED = 1e-4, 0.1
_DIGITS = 1e-15  # relative decrease at which a polish ends
_HOPELESS = 3  # failed attempts at a finite bound after which the solver stops trying
_WAIT = 10  # passes, times the proofs that failed, before the next one
_SURE = 1e-11  # gap at which groups are right, except for those whose models differ by rounding
# Groups that are always polished; unknowns of a cheap polish, of any polish, of one that is always
# made, to rounding accuracy, and of one that costs little more than a few passes if it is compiled.
_TINY, _SMALL, _LARGE, _EXACT, _COMPILED = 20, 300, 3000, 100, 150
# Points with good duals that are no solutions, after which also a larger polish is worth it.
_MANY_GOOD_DUALS = 7
# Unknowns, and passes after which smoothing is tried.
_SMOOTH_AT = ((60, 100), (300, 400), (LARGEST, 1500))
# Passes after which the models of the losses change little, and are refreshed half as often.
_LATE = 50
# Passes of wide models after which rounding may be what keeps them from the tolerance.
_MORE_BITS = 150
# Gap that smoothing aims at: it is estimated there, and a few more Newton steps cost little.
_ESTIMATE = 1e-9
_ROUGH = 1e-3  # relative error below which the groups are worth a polish
# Unknowns above which a polish is dear, and the relative error below which it is worth it.
_MANY, _CLOSE = 100, 1e-6
# Times tol: the relative error below which the current duals are worth a certificate.
_HELPFUL = 3.0
_ESTIMATED = 1.1  # estimated gap, in units of tol, up to which a point is certified
_SPLITS = 8  # of groups, in one attempt at a proof
_SHARES = (0.1, 1e-3, 1e-5)  # of what duals may lack, in continuations of one attempt


@dataclass(frozen=True, kw_only=True)
class Fast:
    """The default solver, for any loss and any graph.

    Parameters
    ----------
    max_iter
        Largest number of passes over the edges.
    sigma
        First step size of the splitting; None: set by the curvature of the losses. It adapts in
        both cases.

    Example
    -------
    >>> import coterie as ct
    >>> problem = ct.Problem(ct.Users.from_arrays([[0.0], [1.0], [9.0]]), ct.SquaredDistance(),
    ...                      lam=1.0)
    >>> ct.solve(problem, solver=ct.Fast(max_iter=200)).labels.tolist()
    [0, 0, 1]
    """

    max_iter: int = 5000
    sigma: float | None = None

    def __post_init__(self) -> None:
        if self.max_iter < 1:
            raise InvalidInput(f"max_iter must be at least 1, got {self.max_iter!r}",
                               remedy="Use for example 5000")
        if self.sigma is not None and not (np.isfinite(self.sigma) and self.sigma > 0):
            raise InvalidInput(f"sigma must be a finite number > 0, got {self.sigma!r}",
                               remedy="Use None")

    def run(self, problem: Problem, tol: float, start: Point | None = None,
            progress: Callable[[Record], None] | None = None) -> Point:
        if problem.lam == 0 or not (problem.graph.weights > 0).any():
            return Point(_separate(problem, start), np.zeros((problem.graph.n_edges, problem.dim)))
        with np.errstate(over="ignore", invalid="ignore"):  # points with overflow are not kept
            return _Run(self, problem, tol, start, progress).go()


def _separate(problem: Problem, start: Point | None) -> Array:
    """Everyone's own best model, by compiled code first."""
    shape = problem.n_users, problem.dim
    models = np.zeros(shape) if start is None else np.array(start.models, dtype=float)
    data = flat(problem.loss, problem.samples)
    if data is None:
        return problem.loss.local(problem.samples, start=models).points
    from coterie.losses import kernels

    begin = models.copy()
    rest = np.flatnonzero(~kernels.settle(data, models))
    if rest.size:
        models[rest] = problem.loss.local(problem.samples, start=begin[rest], users=rest).points
    return models


class _Run:
    """One solve.

    Attributes
    ----------
    problem, tol, max_iter, progress : the arguments of the solve.
    digits : relative decrease at which a polish ends.
    began, history : time of the start, and one `Record` per batch of passes.
    losses, engine, best : second-order models, the splitting on the graph, and the best certified
        point.
    exact_start : whether the first sigma is the right one.
    passes, limit : passes over the edges so far, and at most.
    next_try, smooth_at : passes before which no certificate or smoothing is tried.
    labels, tried : groups of the last batch, and the groups that were polished last.
    warm : the groups of a start with duals; None without one.
    guess : the groups of a start without duals, if they are few; None without one.
    failures, next_proof : proofs that failed, and passes before which no other one is tried if
        `splits`.
    n_good_duals : how often duals were good and models were not.
    error : of the dual bound after the last batch, estimated, relative to the losses.
    proven, ending : whether a polish was tried, and whether these are the last tries.
    splits : whether polish and proof are compiled, and split groups that must split.
    wide : whether models are wide, so that nothing of dim x dim is computed.
    """

    def __init__(self, settings: Fast, problem: Problem, tol: float, start: Point | None,
                 progress: Callable[[Record], None] | None) -> None:
        self.problem, self.tol, self.max_iter = problem, tol, settings.max_iter
        self.digits = _DIGITS if tol < _LOOSE else 1e-3 * tol
        self.progress, self.began = progress, time.perf_counter()
        self.history: list[Record] = []
        self.wide = problem.loss.wide(problem.samples)
        self.losses = self._expand(start)
        centre = self.losses.centre
        self.best = BestPoint(problem, tol, centre)
        self._begin(settings.sigma, start)
        self.passes, self.limit, self.next_try = 0, self.max_iter, 0
        unknowns = problem.n_users * problem.dim
        self.smooth_at = next((at for most, at in _SMOOTH_AT if unknowns <= most and not self.wide),
                              self.max_iter + 1)
        self.labels = self.tried = np.empty(0, dtype=np.int64)
        self.warm = self.guess = None
        if start is not None and start.duals is not None:
            self.warm = labels_of(centre)
        elif start is not None:
            labels = labels_of(centre)
            self.guess = labels if labels.max() + 1 <= problem.n_users // 2 else None
        self.proven = self.ending = False
        self.failures, self.next_proof, self.n_good_duals, self.error = 0, 0, 0, np.inf
        # A proof that mends wrong groups need not wait until they have settled.
        self.splits = self.losses.data is not None and problem.graph.is_complete

    def _expand(self, start: Point | None) -> Expansion:
        """The losses at the start; by default at their minima if they are quadratic, and at one
        model for all if they are flat at zero.
        """
        problem = self.problem
        losses = (WideExpansion if self.wide else Expansion)(
            problem, np.zeros((problem.n_users, problem.dim)) if start is None else start.models)
        if start is None and losses.quadratic:
            losses.expand(losses.newton_point())
        elif start is None and not self.wide and losses.flat_somewhere():
            losses.expand(polish(problem, problem.graph.components, losses.centre, tol=1e-6))
        losses.regularise()
        return losses

    def _begin(self, sigma: float | None, start: Point | None) -> None:
        """Choose the engine and its first step size."""
        from coterie.solvers.engines import choose
        from coterie.solvers.wide import choose_wide

        problem, losses = self.problem, self.losses
        engine = choose_wide(problem, self.tol) if self.wide else choose(
            problem.graph, losses.hessians, losses.quadratic, problem.lam)
        # With one curvature for all users and directions, the first sigma is right except for
        # groups close together.
        self.engine = engine
        self.exact_start = losses.quadratic and engine.exact_start and losses.isotropic()
        known = start.sigma if start is not None and not self.exact_start else None
        usual = engine.stiffness * losses.curvature / (2.0 * problem.graph.n_edges
                                                       / problem.n_users)
        if start is None and not losses.quadratic:
            usual *= engine.closeness(losses.gradients)
        elif losses.quadratic:
            usual = engine.choose_sigma(losses.centre, usual)
        engine.begin(losses.centre, None if start is None else start.duals, sigma or known or usual)

    def go(self) -> Point:
        """Iterate until the tolerance is certified or the passes are used up."""
        try:
            # 1. The groups of the start may still be right: then it is enough to solve for them.
            # 2. Otherwise make passes over the edges.
            if not self._try_start():
                self._iterate()
        except KeyboardInterrupt as stop:
            if self.best.certificate is None:  # at most one certificate is computed after Ctrl-C
                models, _, labels = self.engine.read()
                self._judge(group_means(models, labels)[labels], self.engine.duals())
            raise Interrupted(None if self.best.certificate is None else self._point()) from stop
        # 3. Make the best of the last iterate.
        if not self.best.done:
            self._last_try()
        return self._point()

    def _try_start(self) -> bool:
        """Try the groups of the start."""
        centre, labels = self.losses.centre, self.warm
        done = labels is not None and self._small(labels) and self._prove(labels, centre)
        if not done and self.guess is not None:
            labels = self.guess
            if self.wide:
                self.best.models = polish(self.problem, labels, centre, tol=1e-3 * self.tol)
                done = self.best.build()
            else:
                self.engine.guessed = True
                done = self._few(labels, _LARGE) and self._prove(labels, centre)
                self.engine.guessed = False
        if done and labels is not None:
            self._report(labels)
        return done

    def _iterate(self) -> None:
        losses, engine = self.losses, self.engine
        batch = engine.batch if losses.quadratic else 10 if self.tol < _LOOSE else 5
        while self.passes < self.limit:
            # 1. Some passes on the quadratic models of the losses.
            engine.take(losses)
            engine.enough = 0.1 * self.tol * losses.scale
            steps = min(batch if self.passes < _LATE else 2 * batch, self.max_iter - self.passes)
            primal, moved = engine.run(steps)
            self.passes += steps
            models, slopes, labels = engine.read()
            if not np.isfinite(models).all():  # the losses are steeper than their models predicted
                if self.smooth_at <= self.max_iter:
                    self._smooth()
                break
            # 2. New quadratic models, and how far the bound of these duals may be off.
            losses.refresh(models)
            error, scale = losses.error(slopes), losses.scale + 1e-300
            # 3. Certify what has been reached, if that may be enough.
            done = self._look(models, labels, error / scale)
            self._report(labels)
            if done and not self.proven and self._small(labels):
                self._prove(labels, models)
            # 4. Where splitting is slow, smooth the norms.
            if not done and self.passes >= self.smooth_at:
                done = self._smooth()
            if done or self.best.unbounded > _HOPELESS:
                break
            # 5. Adapt arithmetic and step size.
            if self.passes >= _MORE_BITS:
                engine.refine()
            turn = int(error <= 0.1 * self.tol * scale) if self.exact_start \
                else engine.balance(primal, moved)
            engine.adapt(turn, self.passes)

    def _point(self) -> Point:
        assert self.best.certificate is not None
        return Point(self.best.models, self.best.certificate.duals, self.engine.sigma,
                     tuple(self.history))

    def _look(self, models: Array, labels: Ints, error: float) -> bool:
        """Try to finish if the groups do not change any more, or if the iterate is close to the
        optimum.
        """
        settled = np.array_equal(labels, self.labels)
        self.labels, self.error = labels, error
        if error <= _HELPFUL * self.tol and self.passes >= self.next_try:
            if self._try(models, labels, error):
                return True
            self.next_try = int(1.15 * self.passes)  # wait before the next attempt
            return False
        ready = self.passes >= self.next_proof if self.splits else settled
        rough = _CLOSE if (int(labels.max()) + 1) * self.problem.dim > _MANY else _ROUGH
        if not (ready and error <= rough and self._few(labels, _SMALL)) \
                or np.array_equal(labels, self.tried):
            return False
        self.tried = labels
        return self._prove(labels, models)

    def _small(self, labels: Ints) -> bool:
        """Whether a polish is cheap."""
        return self._few(labels, _SMALL) or (int(labels.max()) + 1) * self.problem.dim <= _EXACT

    def _few(self, labels: Ints, most: int) -> bool:
        """Whether there are so few groups that solving for them is cheaper than passes over the
        edges.
        """
        clusters = int(labels.max()) + 1
        unknowns = clusters * self.problem.dim
        if self.wide or unknowns > most:
            return False
        return clusters <= self.problem.n_users // 3 or clusters <= _TINY or (
            self.splits and (unknowns <= _COMPILED or self.n_good_duals >= _MANY_GOOD_DUALS))

    def _try(self, models: Array, labels: Ints, error: float = 0.0) -> bool:
        """Merge and certify; if that is not enough, polish. True if the tolerance is certified."""
        fused = group_means(models, labels)[labels]
        waits = self.splits and self.passes < self.next_proof
        if not self.losses.quadratic and self._few(labels, _SMALL) and not waits:
            # Conjugates are more expensive than a polish.
            return self._prove(labels, fused) or self._judge(fused, self.engine.duals())
        if self.wide:
            return self._try_wide(models, fused, error)
        duals = self.engine.duals()
        likely = not self.splits or self.ending or self._excess(fused, duals, error) <= _ESTIMATED
        self.n_good_duals += not likely
        if likely and self._judge(fused, duals):
            return True
        if waits and not self.ending:
            return False
        return self._few(labels, _LARGE) and self._prove(labels, fused)

    def _try_wide(self, models: Array, fused: Array, error: float) -> bool:
        """Certify the merged models, or else those as they are, if their duals fit well enough."""
        engine, scale = self.engine, self.losses.scale
        slopes = engine.read()[1]
        for point in (fused, models):
            penalty = float(np.sum(self.problem.radii * engine.lengths(point)))
            lack = penalty + float(np.einsum("nd,nd->", slopes, point))
            allowed = self.tol * (scale + penalty)
            if lack <= 0.8 * allowed and lack + error * scale <= 0.9 * allowed:
                break
        else:
            return False
        done = self._judge(point, self.engine.duals())
        if done:
            self._merge_wide(point)
        return done

    def _merge_wide(self, models: Array) -> None:
        """Merge users that are very close together, if the objective shows hardly a difference."""
        graph, best = self.problem.graph, self.best.certificate
        assert best is not None
        assert best.duals is not None
        lengths = self.engine.lengths(models)
        for distance in (1e-2, 1e-3, 1e-4):
            near = graph.subgraph(lengths <= distance * float(np.abs(models).max())).components
            merged = group_means(models, near)[near]
            if near.max() == labels_of(models).max():
                break
            worse = self.problem.objective(merged) - best.objective
            if worse > 0.1 * self.tol * abs(best.objective):
                continue
            certificate = judge(self.problem, merged, best.duals)
            if certificate.relative_gap <= self.tol:
                self.best.models, self.best.certificate = merged, certificate
                break

    def _prove(self, labels: Ints, models: Array) -> bool:
        """Certify the exact optimum for these groups, with the current duals and with duals built
        for it.
        """
        self.proven = True
        # 1. The optimum for these groups. Where no duals can hold a group together, it is split.
        polished = polish(self.problem, labels, models, tol=self.digits)
        proved, splits, shares = self._defend(polished), 0, iter(_SHARES)
        while (not proved or self.engine.lack is not None) and self.engine.built is not None \
                and splits < _SPLITS:
            lack = self.engine.lack
            parts = None if lack is None else split(self.problem, polished, lack,
                                                    self.losses.hessians, self._enough)
            if parts is not None:
                splits, groups = splits + 1, int(labels_of(polished).max()) + 1
                polished = polish(self.problem, *parts, tol=self.digits)
                if labels_of(polished).max() + 1 > groups:
                    proved = self._defend(polished) or proved
                    continue
                if proved:
                    break
            share = None if proved else next(shares, None)
            if share is None:
                break
            # Either the duals are nearly good enough, or it is not known yet what they cannot
            # supply.
            proved = self._defend(polished, begin=self.engine.built, share=share)
        if not proved:
            self.failures += 1
            self.next_proof = self.passes + _WAIT * self.failures
            return False
        # 2. Merge groups that are very close together, if the certificate is as good.
        polished = self.best.models
        for distance in (1e-2, 1e-4, 1e-6) if self.best.gap > _SURE else (1e-6,):
            closer = nearly_equal(self.problem, polished, distance)
            if closer is None:
                break
            fewer = polish(self.problem, closer, polished, tol=self.digits)
            if self._as_good(fewer):
                self._defend(fewer, prefer=True)
            if self.best.models is not polished:
                break
        return True

    @property
    def _enough(self) -> float:
        """||lack||^2 of a proof; the bound's error is about ||lack||^2 / (2 curvature), and some
        users have less.
        """
        return 0.02 * self.tol * self.losses.curvature * self.losses.scale

    def _as_good(self, models: Array) -> bool:
        """Whether these models may have as small a gap as the best ones, by their objective."""
        best = self.best.certificate
        assert best is not None
        return self.problem.objective(models) - best.objective <= best.gap + 4.0 * best.rounding

    def _defend(self, polished: Array, prefer: bool = False, begin: Array | None = None,
                share: float = 1.0) -> bool:
        """Certify the optimum for given groups, with duals built for it if the engine can build
        them.

        They are built from `begin`, or from the current ones, and may lack `share` of what is
        usually enough.
        """
        engine = self.engine
        engine.forget()
        gradients = self.losses.gradients_at(polished)
        duals = engine.prove(labels_of(polished), polished, gradients, self._enough, begin, share)
        if duals is None and engine.lack is not None and self.error > _HELPFUL * self.tol \
                and not self.ending:
            return False  # the current duals are no better
        return self._judge(polished, engine.duals() if duals is None else duals, prefer)

    def _judge(self, models: Array, duals: Array, prefer: bool = False) -> bool:
        """Certify a point, unless it cannot be good enough: its gap is at least its
        complementarity.
        """
        known = self.best.certificate is not None and not self.ending
        if known and self._excess(models, duals) > 2.0:
            return False
        return self.best.judge(models, duals, self.passes, prefer)

    def _excess(self, models: Array, duals: Array, error: float = 0.0) -> float:
        """An estimate of the gap, in units of what is allowed: the complementarity, and `error`
        times the losses.
        """
        problem, scale = self.problem, self.losses.scale
        penalty = problem.lam * problem.graph.penalty(models)
        # B'y sums to zero: what all models share costs no digits.
        offsets = models - models.mean(axis=0)
        slack = penalty - float(np.vdot(problem.graph.divergence(duals), offsets))
        return (slack + error * scale) / (self.tol * (scale + penalty) + 1e-300)

    def _last_try(self) -> None:
        """Certify the last iterate, also with duals built for its groups, and keep the best."""
        self.ending, n_edges = True, self.problem.graph.n_edges
        models, _, labels = self.engine.read()
        if np.isfinite(models).all():
            self._try(models, labels)
        if self.best.certificate is None:
            self._judge(self.losses.centre, np.zeros((n_edges, self.problem.dim)))
        if self.best.certificate is not None and n_edges <= 2_000_000:
            self.best.build()

    def _smooth(self) -> bool:
        """Try the solver for problems on which splitting is slow; see `coterie.solvers.smoothed`.
        """
        problem = self.problem
        self.smooth_at, self.limit = self.max_iter + 1, min(self.limit, 3 * self.passes)
        start = None if self.warm is None else self.losses.centre
        models, duals, lengths = solve_smoothed(problem, min(self.tol, _ESTIMATE), start)
        if not (np.isfinite(models).all() and np.isfinite(duals).all()):
            return False
        close = np.linalg.norm(problem.graph.differences(models), axis=1) <= 10.0 * lengths
        labels = problem.graph.subgraph(close & (problem.radii > 0)).components
        fused = group_means(models, labels)[labels]
        polished = polish(problem, labels, fused, tol=_DIGITS)
        return any(self._judge(point, duals) for point in (fused, polished, models)) \
            or self.best.build(polished) or self.best.build()

    def _report(self, labels: Ints) -> None:
        objective = np.inf if self.best.certificate is None else self.best.certificate.objective
        record = Record(self.passes, objective, self.best.gap, int(labels.max()) + 1,
                        time.perf_counter() - self.began)
        self.history.append(record)
        if self.progress is not None:
            self.progress(record)


class BestPoint:
    """The best certified point so far.

    Attributes
    ----------
    problem, tol : what is solved, and how accurately.
    models, certificate : the point; no certificate as long as there is none.
    enough : by how much bounds may be too low, relative to the losses.
    repair_at : the passes before which duals without a finite bound are not repaired.
    unbounded : how many certificates had no finite bound even after a repair.
    """

    def __init__(self, problem: Problem, tol: float, models: Array) -> None:
        self.problem, self.tol, self.models = problem, tol, models
        self.certificate: Certificate | None = None
        self.enough = _MISSED * tol if tol >= _LOOSE else 0.0
        self.repair_at = self.unbounded = 0

    @property
    def gap(self) -> float:
        return np.inf if self.certificate is None else self.certificate.relative_gap

    @property
    def done(self) -> bool:
        """Whether the tolerance is certified."""
        return self.gap <= self.tol

    def judge(self, models: Array, duals: Array, passes: int, prefer: bool = False) -> bool:
        """Certify a point, and keep it if it is the best so far, or as good and preferred; whether
        that is enough.
        """
        if not (np.isfinite(models).all() and np.isfinite(duals).all()):
            return False  # a step that overflowed
        certificate = judge(self.problem, models, duals, self.enough)
        if not np.isfinite(certificate.bound) and passes >= self.repair_at:
            # The duals may be only slightly outside the domain of a conjugate: repair them, but not
            # every time.
            certificate = certify(self.problem, models, duals)
            self.repair_at = 0 if np.isfinite(certificate.bound) else 2 * passes
            self.unbounded += not np.isfinite(certificate.bound)
        size = max(abs(certificate.objective), certificate.floor, 1e-300)
        below = self.gap + 4.0 * certificate.rounding / size if prefer else self.gap
        if self.certificate is None or certificate.relative_gap < below:
            self.certificate, self.models = certificate, models
        return self.done

    def build(self, models: Array | None = None) -> bool:
        """Certify the best point, or these models, with duals built for their groups; whether that
        is enough.
        """
        models = self.models if models is None else models
        built = certify(self.problem, models)
        if self.certificate is None or built.relative_gap < self.gap:
            self.certificate, self.models = built, models
        return self.done
