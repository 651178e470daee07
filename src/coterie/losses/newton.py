"""Smooth convex problems of many users at once, each small and on its own data.

Every private computation of the project is of the form

    minimise_x  f_i(x) - <slopes_i, x> + (t_i / 2) ||x - centres_i||^2

with t = 0 for a conjugate value or a local optimum, and t > 0 for a proximal step. One damped Newton method, batched
over users, serves them all. A user's iterates depend on that user's data alone, so a user computes bitwise the same
answer by itself as inside a batch of thousands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from coterie._typing import Array, Flags, Indices

#: (which users, their points, order) -> values, gradients, Hessians up to `order`.
Evaluate = Callable[[Indices, Array, int], tuple[Array, Array, Array]]

_ROUNDING = 1e-15
_ACCEPT = 1e-9
_DIVERGED = 1e12


class Minimum(NamedTuple):
    """Where Newton's method ended, for each user."""

    points: Array  # (n_users, dim)
    values: Array  # (n_users,) the objective there
    excess: Array  # (n_users,) the squared Newton decrement: twice what a quadratic could still lose
    converged: Flags  # (n_users,) False where no minimum was reached, as where there is none


def minimise(evaluate: Evaluate, start: Array, max_iter: int = 200) -> Minimum:
    """Damped Newton on every user's problem, until each is at rounding level or has no minimum.

    The step solves (H + shift I) step = -gradient. The shift is proportional to the gradient's norm, grows when a full
    step fails and falls when it succeeds, so flat Hessians (Huber far out, hinge with no active sample) are harmless
    and the end is quadratic. Steps are no longer than a reach that grows while it binds.
    """
    n_users, dim = start.shape
    points, values = np.array(start, dtype=float), np.empty(n_users)
    excess, converged = np.full(n_users, np.inf), np.zeros(n_users, dtype=bool)
    active = np.arange(n_users)
    x = points.copy()
    value, gradient, hessian = evaluate(active, x, 2)
    damping, closing = np.zeros(n_users), np.zeros(n_users, dtype=bool)
    reach = 10.0 * (1.0 + np.linalg.norm(x, axis=1))
    for _ in range(max_iter):
        norms = np.linalg.norm(gradient, axis=1)
        traces = np.trace(hessian, axis1=1, axis2=2)
        floor = 1e-13 * traces / max(dim, 1) + 1e-8 * norms / reach + 1e-300
        shift = np.maximum(damping * norms, floor)
        step = -_solve(hessian + shift[:, None, None] * np.eye(dim), gradient)
        decrement = -np.einsum("nd,nd->n", gradient, step)
        # The last term matters where the minimum itself is zero, as for data fitted perfectly.
        scale = np.abs(value) + np.abs(np.einsum("nd,nd->n", gradient, x)) + 1e-9 * traces * (x**2).sum(axis=1) + 1e-300
        settled = (decrement <= _ROUNDING * scale) | (norms == 0)
        # Where the Hessian is flat the step knows a direction but no length; `reach` bounds it.
        lengths = np.linalg.norm(step, axis=1)
        cut = np.divide(reach, lengths, out=np.ones_like(lengths), where=lengths > reach)
        step = cut[:, None] * step
        # Once the value has settled, one last full step halves the digits still missing from the gradient.
        last = settled & ~closing & (norms > 0)
        finished = settled & ~last
        trial, trial_value, size = x.copy(), value.copy(), np.where(finished, 0.0, 1.0)
        pending = np.flatnonzero(~finished)
        slack = np.where(last, np.inf, 4e-16 * scale)
        near = decrement[pending] <= 1e-12 * scale[pending]  # so near that a full Newton step needs no trial
        trial[pending[near]] = x[pending[near]] + step[pending[near]]
        pending = pending[~near]
        for _ in range(40):
            if not pending.size:
                break
            trial[pending] = x[pending] + size[pending, None] * step[pending]
            trial_value[pending] = evaluate(active[pending], trial[pending], 0)[0]
            allowed = value - 1e-4 * size * cut * decrement + slack
            with np.errstate(invalid="ignore"):
                pending = pending[~(trial_value[pending] <= allowed[pending])]
            size[pending] *= 0.5
        stuck = np.zeros(active.size, dtype=bool)
        stuck[pending] = True
        trial[stuck] = x[stuck]
        diverged = np.linalg.norm(trial, axis=1) > _DIVERGED * (1.0 + np.linalg.norm(start[active], axis=1))
        # Stuck under damping, a user still has the plain Newton step to try; stuck without it, it is at its end.
        finished |= diverged | (stuck & (shift <= floor))
        grown = np.maximum(4.0 * damping, 1e-6 * traces / (norms + 1e-300))
        damping = np.where(stuck, 0.0, np.where(size < 1.0, grown, 0.25 * damping))
        reach = np.where(size < 1.0, 0.5 * reach, np.where(cut < 1.0, 4.0, 1.0) * reach)
        done = np.flatnonzero(finished)
        users = active[done]
        points[users], values[users], excess[users] = x[done], value[done], decrement[done]
        converged[users] = (decrement[done] <= _ACCEPT * scale[done]) & ~diverged[done]
        keep = np.flatnonzero(~finished)
        if not keep.size:
            return Minimum(points, values, excess, converged)
        active, x, damping, closing = active[keep], trial[keep], damping[keep], (closing | last)[keep]
        reach = reach[keep]
        value, gradient, hessian = evaluate(active, x, 2)
    points[active], values[active] = x, value
    return Minimum(points, values, excess, converged)


def _solve(matrices: Array, vectors: Array) -> Array:
    try:
        return np.asarray(np.linalg.solve(matrices, vectors[..., None])[..., 0])
    except np.linalg.LinAlgError:  # a singular block: the least-squares step of every block instead
        inverses = np.linalg.pinv(matrices, hermitian=True)
        return np.asarray((inverses @ vectors[..., None])[..., 0])
