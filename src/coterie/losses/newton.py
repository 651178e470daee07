"""Smooth convex problems of many users at once, each small and on its own data.

Every private computation of the project is of the form

    minimise_x  f_i(x) - <slopes_i, x> + (t_i / 2) ||x - centres_i||^2

with t = 0 for a conjugate value or a local optimum, and t > 0 for a proximal step. One damped
Newton method, batched over users, serves them all. A user's iterates depend on that user's data
alone, so a user computes bitwise the same answer by itself as inside a batch of thousands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from coterie.base.labels import group_sums
from coterie.base.machine import in_parts
from coterie.base.types import Array, Flags, Indices, Ints

#: (which users, their points, order) -> values, gradients, Hessians up to `order`.
Evaluate = Callable[[Indices, Array, int], tuple[Array, Array, Array]]

_ROUNDING = 1e-15  # decrement, relative to the objective, at which a user's value has settled
_ACCEPT = 1e-9  # and up to which an end counts as a minimum
_DIVERGED = 1e12  # times 1 + ||start||: a point beyond runs off to infinity
_SINGULAR = 1e-13  # added to the diagonal of a Hessian of unit diagonal
_FLAT = 1e-20  # no coordinate counts as less curved than this times the most curved one
_TRIALS = 40  # halvings of one step
# Full Newton steps in a row that do not lower the decrement: the user runs along a flat direction.
_STILL = 8
_IDLE = 4  # steps in a row near a minimum that do not lower the value: only rounding is left
_FEW = 64  # rows of matrices up to which compiled loops are faster than LAPACK
_PART = 2**17  # numbers in the matrices of users that are computed at a time
# Steps after which a user that is still far from its minimum must have moved its value by 1 %.
_CREEP = 40
_BACK = (0.03, 0.5)  # share of a step to the models of a group that leads up, at least and at most


class Minimum(NamedTuple):
    """Where Newton's method ended, for each user."""

    points: Array  # (n_users, dim)
    values: Array  # (n_users,) the objective there
    # (n_users,) the squared Newton decrement, >= 0: twice what a quadratic could still lose.
    excess: Array
    converged: Flags  # (n_users,) False where no minimum was reached, as where there is none


def minimise(evaluate: Evaluate, start: Array, max_iter: int = 200, enough: float = 0.0) -> Minimum:
    """Damped Newton on every user's problem, until each is at rounding level or has no minimum.

    The step solves (H + shift S^2) step = -gradient with S^2 the diagonal of H, so that the units
    of a coordinate do not matter (Marquardt 1963). The shift is proportional to the gradient's
    norm, grows when a full step fails and falls when it succeeds, so flat Hessians (Huber far out,
    hinge with no active sample) are harmless and the end is quadratic. Steps are no longer than a
    reach that grows while it binds.

    Parameters
    ----------
    evaluate : gives values, gradients and Hessians of some users.
    start : (n_users, dim) where to begin.
    max_iter : most Newton steps.
    enough : a user whose decrement, relative to the objective, is smaller ends after that step.

    Returns
    -------
    Minimum
    """
    search = Search(evaluate, start, enough)
    for _ in range(max_iter):
        if not search.advance():
            break
    return search.ended()


#: A Newton step of every active user: the step (n, dim), no longer than the user's reach; the share
#: (n,) of the full step that is left; the decrement (n,) -<gradient, full step>, >= 0; what it is
#: small or large against (n,); and whether the step was taken without damping (n,).
Step = tuple[Array, Array, Array, Array, Flags]


class Search:
    """The state of `minimise`; users leave when they are done.

    Attributes
    ----------
    evaluate, start, enough : the arguments of `minimise`.
    points, values, excess, converged : the result, as in `Minimum`; filled in for users that are
        done.
    active : the users still searching; the arrays below have one row for each of them.
    x, value, gradient, hessian : the current points, and the derivatives at them.
    damping, reach : shift of the Hessian relative to the norm of the gradient, and the largest
        length of a step.
    closing : whether the last step of the user was its final one.
    decrement, still : the last Newton decrement, and how many steps in a row it has not decreased.
    lowest, least : the point with the lowest value so far, and this value.
    before, idle : the value before the last step, and how many steps in a row near the minimum have
        not lowered it.
    steps, earlier : number of steps, and the values when slow progress was last checked.
    """

    def __init__(self, evaluate: Evaluate, start: Array, enough: float = 0.0) -> None:
        n_users = len(start)
        self.evaluate, self.start, self.enough = evaluate, start, enough
        self.points, self.values = np.array(start, dtype=float), np.empty(n_users)
        self.excess, self.converged = np.full(n_users, np.inf), np.zeros(n_users, dtype=bool)
        self.active = np.arange(n_users)
        self.x = self.points.copy()
        self.value, self.gradient, self.hessian = evaluate(self.active, self.x, 2)
        self.damping, self.closing = np.zeros(n_users), np.zeros(n_users, dtype=bool)
        self.reach = 10.0 * (1.0 + np.linalg.norm(self.x, axis=1))
        self.decrement, self.still = np.full(n_users, np.inf), np.zeros(n_users, dtype=int)
        self.before, self.idle = np.full(n_users, np.inf), np.zeros(n_users, dtype=int)
        self.lowest, self.least = self.x.copy(), np.full(n_users, np.inf)
        self.steps, self.earlier = 0, np.full(n_users, np.inf)

    def ended(self) -> Minimum:
        self.points[self.active], self.values[self.active] = self.x, self.value
        return Minimum(self.points, self.values, self.excess, self.converged)

    def advance(self) -> bool:
        """One step of every active user; whether any is left."""
        # 1. The Newton step, and whose value has settled: one last full step halves the digits that
        #    are still missing from the gradient.
        lower = self.value < self.least
        self.lowest[lower], self.least[lower] = self.x[lower], self.value[lower]
        norms = np.linalg.norm(self.gradient, axis=1)
        step, cut, decrement, scale, plain = self.direction(norms)
        settled = (decrement <= _ROUNDING * scale) | (norms == 0)
        last = settled & ~self.closing & (norms > 0)
        finished = settled & ~last
        # 2. As much of it as decreases the objective. Stuck under damping, a user still has the
        #    plain Newton step to try; stuck without it, it is at its end.
        trial, size, stuck = self._try(step, cut * decrement, scale, finished,
                                       decrement <= 1e-12 * scale)
        far = _DIVERGED * (1.0 + np.linalg.norm(self.start[self.active], axis=1))
        diverged = np.linalg.norm(trial, axis=1) > far
        finished |= diverged | (stuck & plain) | self._endless(decrement, scale,
            plain & (cut == 1.0))
        done_enough = ~finished & (decrement <= self.enough * scale)
        self.x[done_enough], finished = trial[done_enough], finished | done_enough
        # 3. The damping and the reach of the next step.
        grown = np.maximum(4.0 * self.damping, 1e-6 / (norms + 1e-300))
        damping = np.where(stuck, 0.0, np.where(size < 1.0, grown, 0.25 * self.damping))
        reach = np.where(size < 1.0, 0.5, np.where(cut < 1.0, 4.0, 1.0)) * self.reach
        # 4. Who is done leaves, with its lowest point where the last step left a flat bottom.
        done, keep = np.flatnonzero(finished), np.flatnonzero(~finished)
        users = self.active[done]
        left = self.value[done] > self.least[done] + 1e-10 * scale[done]
        self.points[users] = np.where(left[:, None], self.lowest[done], self.x[done])
        self.values[users], self.excess[users] = np.where(left, self.least[done],
                                                          self.value[done]), decrement[done]
        self.converged[users] = (decrement[done] <= _ACCEPT * scale[done]) & ~diverged[done]
        # 5. The others go on.
        self.active, self.x = self.active[keep], trial[keep]
        self.damping, self.reach = damping[keep], reach[keep]
        self.closing = (self.closing | last)[keep]
        self.decrement, self.still = decrement[keep], self.still[keep]
        self.earlier = self.earlier[keep]
        self.before, self.idle = self.before[keep], self.idle[keep]
        self.lowest, self.least = self.lowest[keep], self.least[keep]
        if keep.size:
            self.value, self.gradient, self.hessian = self.evaluate(self.active, self.x, 2)
        else:
            self.value = self.value[keep]
        return bool(keep.size)

    def _endless(self, decrement: Array, scale: Array, plain: Flags) -> Flags:
        """Who makes step after step without coming nearer to a minimum: on a flat bottom, idle, or
        creeping.
        """
        self.still = np.where(plain & (decrement > 0.999 * self.decrement), self.still + 1, 0)
        near = (decrement <= _ACCEPT * scale) & (self.before - self.value <= _ROUNDING * scale)
        self.idle, self.before = np.where(near, self.idle + 1, 0), self.value.copy()
        endless = (self.still >= _STILL) | (self.idle >= _IDLE)
        self.steps += 1
        if self.steps % _CREEP == 0:
            endless |= (self.earlier - self.value <= 0.01 * scale) & (decrement > 1e-6 * scale)
            self.earlier = self.value.copy()
        return endless

    def direction(self, norms: Array) -> Step:
        x, gradient, hessian = self.x, self.gradient, self.hessian
        diagonal = np.maximum(np.einsum("nii->ni", hessian), 0.0)
        # Where the Hessian is flat the step knows a direction but no length; `reach` bounds it.
        least = np.maximum(_FLAT * diagonal.max(axis=1, initial=0.0), 1e-8 * norms / self.reach) \
            + 1e-300
        units = np.sqrt(np.maximum(diagonal, least[:, None]))
        shift = np.maximum(self.damping * norms, _SINGULAR)
        step = -solve_scaled(hessian, units, shift, gradient)
        decrement = -np.einsum("nd,nd->n", gradient, step)
        # The last term matters where the minimum itself is zero, as for data fitted perfectly.
        scale = np.abs(self.value) + np.abs(np.einsum("nd,nd->n", gradient, x)) \
            + 1e-9 * (diagonal * x**2).sum(axis=1) + 1e-300
        lengths = np.linalg.norm(step, axis=1)
        cut = np.divide(self.reach, lengths, out=np.ones_like(lengths), where=lengths > self.reach)
        return cut[:, None] * step, cut, decrement, scale, shift <= _SINGULAR

    def _try(self, step: Array, gain: Array, scale: Array, finished: Flags,
             near: Flags) -> tuple[Array, Array, Flags]:
        """The points reached, the share of the step that was taken, and who found no better point.
        """
        size, trial, value = np.where(finished, 0.0, 1.0), self.x.copy(), self.value.copy()
        stuck = np.zeros(self.active.size, dtype=bool)
        # So near the end that a full Newton step needs no trial.
        sure = np.flatnonzero(near & ~finished)
        trial[sure] = self.x[sure] + step[sure]
        pending = np.flatnonzero(~near & ~finished)
        for _ in range(_TRIALS):
            if not pending.size:
                break
            trial[pending] = self.x[pending] + size[pending, None] * step[pending]
            value[pending] = self.evaluate(self.active[pending], trial[pending], 0)[0]
            allowed = self.value[pending] - 1e-4 * size[pending] * gain[pending] + 4e-16 \
                * scale[pending]
            with np.errstate(invalid="ignore"):
                pending = pending[~(value[pending] <= allowed)]
            size[pending] *= 0.5
        stuck[pending] = True
        trial[stuck] = self.x[stuck]
        return trial, size, stuck


def solve_scaled(matrices: Array, units: Array, shift: Array, vectors: Array) -> Array:
    """(H + shift S^2)^-1 vectors for S = diag(units); positive on `vectors`, whatever rounding did
    to H.
    """
    solved = np.full(vectors.shape, np.nan)
    if vectors.shape[1] <= _FEW:
        from coterie.base import matrices as small

        systems = [np.require(part, requirements=("C", "W"))
                   for part in (matrices, units, shift, vectors)]
        in_parts(lambda some: small.solve_scaled(*(part[some] for part in systems), solved[some]),
                 len(solved), _PART // vectors.shape[1] ** 2)
    rest = np.flatnonzero(~np.isfinite(solved).all(axis=1))  # rounding made these indefinite
    if rest.size:
        solved[rest] = _eliminate(_scaled(matrices[rest], units[rest], shift[rest]),
                                  vectors[rest] / units[rest]) / units[rest]
    # A negative decrement would pass for a settled one.
    wrong = np.flatnonzero(~(np.einsum("nd,nd->n", vectors, solved) >= 0))
    if wrong.size:
        scaled = _scaled(matrices[wrong], units[wrong], shift[wrong])
        right = vectors[wrong] / units[wrong]
        clean = np.where(np.isfinite(scaled), scaled, 0.0)
        values, axes = np.linalg.eigh(0.5 * (clean + clean.swapaxes(1, 2)))
        values = np.maximum(values, 1e-8 * np.maximum(values[:, -1:], 1e-8))
        turned = np.einsum("nde,nd->ne", axes, np.where(np.isfinite(right), right, 0.0))
        solved[wrong] = np.einsum("nde,ne->nd", axes, turned / values) / units[wrong]
    return solved


def _eliminate(matrices: Array, vectors: Array) -> Array:
    """matrices^-1 vectors; NaN where a matrix is singular."""
    try:
        return np.asarray(np.linalg.solve(matrices, vectors[..., None])[..., 0])
    except np.linalg.LinAlgError:
        if len(vectors) == 1:
            return np.full(vectors.shape, np.nan)
        half = len(vectors) // 2
        return np.concatenate([_eliminate(matrices[some], vectors[some])
                               for some in (slice(half), slice(half, None))])


def _scaled(matrices: Array, units: Array, shift: Array) -> Array:
    """S^-1 H S^-1 + shift I for S = diag(units)."""
    return matrices / (units[..., :, None] * units[..., None, :]) + shift[..., None, None] \
        * np.eye(units.shape[-1])


def possible_gains(hessians: Array, residuals: Array, noise: float, reach: Array) -> Array:
    """(n,) the most that <r, s> can be, for |r| <= `residuals` and steps s that curvature, or else
    `reach`, allows.

        H = U C U,  U = diag(H)^1/2,  C = V diag(c) V';     s = U^-1 V q with |q_k| <= |V'U^-1 r|_k
                                                            / (c_k - noise)

    `noise` is the rounding error of the curvatures c, relative to the largest. A direction that has
    none beyond it is held by nothing that floating point can see; a step along it is only shorter
    than `reach` (n,).
    """
    units = np.sqrt(np.maximum(np.einsum("nii->ni", hessians), 1e-300))
    scaled = hessians / (units[:, :, None] * units[:, None, :])
    usable = np.isfinite(scaled).all(axis=(1, 2)) & np.isfinite(residuals).all(axis=1)
    curvatures, axes = np.linalg.eigh(np.where(usable[:, None, None], scaled, 0.0))
    axes = axes / units[:, :, None]
    along = np.einsum("nd,nde->ne", residuals, np.abs(axes))
    sure = curvatures - noise * np.maximum(curvatures[:, -1:], 1.0)
    steps = np.divide(along, sure, out=np.full_like(along, np.inf), where=sure > 0)
    steps = np.minimum(steps, reach[:, None] / np.linalg.norm(axes, axis=1))
    return np.where(usable, np.where(along > 0, along * steps, 0.0).sum(axis=1), np.inf)


def whiten(matrices: Array, columns: Array) -> Array:
    """W columns, for a W with W' W = H^-1. Then v' H^-1 v = |W v|^2: rounding cannot make it
    negative.

        H = U C U,  U = diag(H)^1/2;     W = L^-1 U^-1 where C = L L'

    If rounding left one of the C indefinite, L is V l^1/2 with its eigenvectors V, and its
    eigenvalues l raised to at least 1e-15 of the largest.
    """
    units = np.sqrt(np.maximum(np.einsum("nii->ni", matrices), 1e-300))
    scaled = matrices / (units[:, :, None] * units[:, None, :])
    try:
        factors = np.linalg.cholesky(scaled)
    except np.linalg.LinAlgError:
        values, vectors = np.linalg.eigh(0.5 * (scaled + scaled.swapaxes(1, 2)))
        factors = vectors \
            * np.sqrt(np.maximum(values, 1e-15 * np.maximum(values[:, -1:], 1.0)))[:, None, :]
    return np.asarray(np.linalg.solve(factors, columns / units[:, :, None]))


# Models of groups, refined by the slopes that their users send: BFGS from summed second-order
# models.


_BACK = (0.03, 0.5)  # of a step that leads up, at least and at most


class Refining:
    """The models of the groups of a partition, on the way to those that minimise sum_i weights_i
    f_i.

    Parameters
    ----------
    labels : (n_users,) the groups, from 0.
    weights : (n_users,) factors of the users' losses.
    models : (n_groups, dim) where to begin.
    curvatures : (n_groups, dim, dim) of the sums, approximately.
    """

    def __init__(self, labels: Ints, weights: Array, models: Array, curvatures: Array) -> None:
        self.labels, self.weights, self.trial, self.curvatures = labels, weights, models, \
            curvatures.copy()
        self.models, self.least = models.copy(), np.full(len(models), np.inf)
        self.slopes, self.gradients = np.zeros_like(models), \
            np.zeros((len(labels), models.shape[1]))

    def take(self, own: Array, gradients: Array) -> None:
        """Take the answers at `trial`, keep the best models, and find the next trial.

        Parameters
        ----------
        own : (n_users,) values at the trial of the own group.
        gradients : (n_users, dim) there.
        """
        n = len(self.trial)
        with np.errstate(invalid="ignore"):
            losses = group_sums(self.weights * np.where(np.isnan(own), np.inf, own), self.labels, n)
            slopes = group_sums(self.weights[:, None] * gradients, self.labels, n)
        good = np.isfinite(losses) & np.isfinite(slopes).all(axis=1)
        if np.isfinite(self.least).any():
            update_hessians(self.curvatures, self.trial - self.models,
                            np.where(good[:, None], slopes - self.slopes, 0.0))
        better = good & (losses < self.least)
        # Where the trial is no better, go back to the least point of the parabola between the two.
        tried = self.trial - self.models
        down = -(self.slopes * tried).sum(axis=1)
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            back = np.clip(np.nan_to_num(0.5 * down / (losses - self.least + down)), *_BACK)
        self.models[better], self.least[better] = self.trial[better], losses[better]
        self.slopes[better] = slopes[better]
        members = better[self.labels]
        self.gradients[members] = gradients[members]
        damping = 1e-9 * np.trace(self.curvatures, axis1=1, axis2=2)[:, None, None] \
            * np.eye(self.trial.shape[1])
        step = np.linalg.solve(self.curvatures + damping, self.slopes[..., None])[..., 0]
        self.trial = np.where(better[:, None], self.models - step,
                              self.models + back[:, None] * tried)

    @property
    def excess(self) -> float:
        """What the sum of the losses exceeds its least value by, relatively, by the second-order
        models: slope' curvature^-1 slope / 2.
        """
        step = np.linalg.solve(self.curvatures + 1e-300 * np.eye(self.slopes.shape[1]),
                               self.slopes[..., None])[..., 0]
        gain = 0.5 * float((self.slopes * step).sum())
        return gain / (abs(float(self.least.sum())) + 1e-300) if np.isfinite(gain) else np.inf


def update_hessians(curvatures: Array, steps: Array, changes: Array) -> None:
    """Change Hessians in place so that they explain what steps did to slopes (BFGS).

        H + y y' / y's - H s s' H / s'H s,    for steps s and changes y of the slopes, where y's > 0
    """
    Hs = (curvatures @ steps[..., None])[..., 0]
    ys, sHs = (changes * steps).sum(axis=1), (steps * Hs).sum(axis=1)
    some = (ys > 1e-9 * sHs) & (sHs > 0)
    curvatures[some] += changes[some, :, None] * changes[some, None, :] / ys[some, None, None] \
        - Hs[some, :, None] * Hs[some, None, :] / sHs[some, None, None]
