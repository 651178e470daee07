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


class _Step(NamedTuple):
    """A damped Newton step for each user still at work, and the sizes it is judged by."""

    step: Array  # (n, dim), no longer than the user's reach
    cut: Array  # (n,) the share of the Newton step that is within reach
    decrement: Array  # (n,) -<gradient, Newton step>: twice what a quadratic loses by it
    scale: Array  # (n,) the size of the objective that rounding is relative to
    shift: Array  # (n,) on the Hessian's diagonal
    floor: Array  # (n,) the least shift there is
    norms: Array  # (n,) of the gradients
    traces: Array  # (n,) of the Hessians


def minimise(evaluate: Evaluate, start: Array, max_iter: int = 200) -> Minimum:
    """Damped Newton on every user's problem, until each is at rounding level or has no minimum.

    The step solves (H + shift I) step = -gradient. The shift is proportional to the gradient's norm, grows when a full
    step fails and falls when it succeeds, so flat Hessians (Huber far out, hinge with no active sample) are harmless
    and the end is quadratic. Steps are no longer than a reach that grows while it binds.

    Parameters
    ----------
    evaluate : values, gradients and Hessians of some users' objectives at points of theirs.
    start : (n_users, dim) where to begin.
    max_iter : most Newton steps per user.

    Returns
    -------
    Minimum, with one row per user. `converged` is False for a user whose problem has no minimum.

    Example
    -------
    >>> import numpy as np
    >>> def evaluate(users, x, order):  # (x - 3)^2 for everyone
    ...     return ((x - 3.0) ** 2).sum(axis=1), 2.0 * (x - 3.0), np.full((len(x), 1, 1), 2.0)
    >>> minimise(evaluate, np.zeros((2, 1))).points.tolist()
    [[3.0], [3.0]]
    """
    n_users = len(start)
    points, values = np.array(start, dtype=float), np.empty(n_users)
    excess, converged = np.full(n_users, np.inf), np.zeros(n_users, dtype=bool)
    active = np.arange(n_users)
    x = points.copy()
    value, gradient, hessian = evaluate(active, x, 2)
    damping, closing = np.zeros(n_users), np.zeros(n_users, dtype=bool)
    reach = 10.0 * (1.0 + np.linalg.norm(x, axis=1))
    for _ in range(max_iter):
        newton = _newton(x, value, gradient, hessian, damping, reach)
        settled = (newton.decrement <= _ROUNDING * newton.scale) | (newton.norms == 0)
        # Once the value has settled, one last full step halves the digits still missing from the gradient.
        last = settled & ~closing & (newton.norms > 0)
        finished = settled & ~last
        trial, size, stuck = _search(evaluate, active, x, value, newton, last, finished)
        diverged = np.linalg.norm(trial, axis=1) > _DIVERGED * (1.0 + np.linalg.norm(start[active], axis=1))
        # Stuck under damping, a user still has the plain Newton step to try; stuck without it, it is at its end.
        finished |= diverged | (stuck & (newton.shift <= newton.floor))
        grown = np.maximum(4.0 * damping, 1e-6 * newton.traces / (newton.norms + 1e-300))
        damping = np.where(stuck, 0.0, np.where(size < 1.0, grown, 0.25 * damping))
        reach = np.where(size < 1.0, 0.5 * reach, np.where(newton.cut < 1.0, 4.0, 1.0) * reach)
        done = np.flatnonzero(finished)
        users = active[done]
        points[users], values[users], excess[users] = x[done], value[done], newton.decrement[done]
        converged[users] = (newton.decrement[done] <= _ACCEPT * newton.scale[done]) & ~diverged[done]
        keep = np.flatnonzero(~finished)
        if not keep.size:
            return Minimum(points, values, excess, converged)
        active, x, damping, closing = active[keep], trial[keep], damping[keep], (closing | last)[keep]
        reach = reach[keep]
        value, gradient, hessian = evaluate(active, x, 2)
    points[active], values[active] = x, value
    return Minimum(points, values, excess, converged)


def _newton(x: Array, value: Array, gradient: Array, hessian: Array, damping: Array, reach: Array) -> _Step:
    """Solve (H + shift I) step = -gradient for each user, and cut the step to the user's reach."""
    dim = x.shape[1]
    norms = np.linalg.norm(gradient, axis=1)
    traces = np.trace(hessian, axis1=1, axis2=2)
    floor = 1e-13 * traces / max(dim, 1) + 1e-8 * norms / reach + 1e-300
    shift = np.maximum(damping * norms, floor)
    step = -_solve(hessian + shift[:, None, None] * np.eye(dim), gradient)
    decrement = -np.einsum("nd,nd->n", gradient, step)
    # The last term matters where the minimum itself is zero, as for data fitted perfectly.
    scale = np.abs(value) + np.abs(np.einsum("nd,nd->n", gradient, x)) + 1e-9 * traces * (x**2).sum(axis=1) + 1e-300
    # Where the Hessian is flat the step knows a direction but no length; `reach` bounds it.
    lengths = np.linalg.norm(step, axis=1)
    cut = np.divide(reach, lengths, out=np.ones_like(lengths), where=lengths > reach)
    return _Step(cut[:, None] * step, cut, decrement, scale, shift, floor, norms, traces)


def _search(evaluate: Evaluate, active: Indices, x: Array, value: Array, newton: _Step, last: Flags,
            finished: Flags) -> tuple[Array, Array, Flags]:
    """Halve the steps until the objective falls by enough: trial points, shares of the steps, and who is stuck.

    Users whose step is their last take it in full; those who are finished stay where they are.
    """
    trial, trial_value, size = x.copy(), value.copy(), np.where(finished, 0.0, 1.0)
    pending = np.flatnonzero(~finished)
    slack = np.where(last, np.inf, 4e-16 * newton.scale)
    near = newton.decrement[pending] <= 1e-12 * newton.scale[pending]  # so near that a full step needs no trial
    trial[pending[near]] = x[pending[near]] + newton.step[pending[near]]
    pending = pending[~near]
    for _ in range(40):
        if not pending.size:
            break
        trial[pending] = x[pending] + size[pending, None] * newton.step[pending]
        trial_value[pending] = evaluate(active[pending], trial[pending], 0)[0]
        allowed = value - 1e-4 * size * newton.cut * newton.decrement + slack
        with np.errstate(invalid="ignore"):
            pending = pending[~(trial_value[pending] <= allowed[pending])]
        size[pending] *= 0.5
    stuck = np.zeros(active.size, dtype=bool)
    stuck[pending] = True
    trial[stuck] = x[stuck]
    return trial, size, stuck


def _solve(matrices: Array, vectors: Array) -> Array:
    try:
        return np.asarray(np.linalg.solve(matrices, vectors[..., None])[..., 0])
    except np.linalg.LinAlgError:  # a singular block: the least-squares step of every block instead
        inverses = np.linalg.pinv(matrices, hermitian=True)
        return np.asarray((inverses @ vectors[..., None])[..., 0])
