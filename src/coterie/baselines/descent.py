"""Gradient steps of many users at once, their length measured against the loss's curvature.

A rate of 1 is a step of 1 / L, with L = loss.lipschitz: the largest for which every step lowers the loss. Where the
loss has no such bound (Poisson), L is twice the curvature where the steps begin, and a step that would not lower a
user's loss is halved until it does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from coterie._typing import Array
from coterie.losses import Loss, Samples

_SETTLED = 1e-10


def unbounded(loss: Loss, samples: Samples) -> bool:
    """Whether some user's curvature has no bound, so that steps must be tried before they are taken."""
    return not bool(np.isfinite(loss.lipschitz(samples)).all())


def curvature(loss: Loss, samples: Samples, models: Array) -> Array:
    """(n_users,) L_i, or twice the largest eigenvalue of the Hessian at `models` where there is no L_i."""
    bounds = loss.lipschitz(samples)
    if not np.isfinite(bounds).all():
        here = 2.0 * np.linalg.eigvalsh(loss.hessians(samples, models))[:, -1]
        bounds = np.where(np.isfinite(bounds), bounds, here)
    return np.maximum(bounds, 1e-300)


def descend(loss: Loss, samples: Samples, models: Array, lengths: Array | float, steps: int) -> Array:
    """models - lengths * gradient, `steps` times over."""
    lengths = np.broadcast_to(np.asarray(lengths, dtype=float), (samples.n_users,))[:, None]
    guarded = unbounded(loss, samples)
    for _ in range(steps):
        value, gradient, _ = loss.evaluate(samples, models, 1)
        step = lengths * gradient
        if guarded:
            step = backtrack(partial(_moved, loss, samples, models, step), value) * step
        models = models - step
    return models


def _moved(loss: Loss, samples: Samples, models: Array, step: Array, size: Array) -> Array:
    return loss.values(samples, models - size * step)


def backtrack(reached: Callable[[Array], Array], value: Array) -> Array:
    """(n_users, 1) for each user the first size of 1, 1/2, 1/4, ... with reached(size) <= value; 0 where there is none.

    `reached` gives every user's value after a step of that size.
    """
    size = np.ones((len(value), 1))
    for _ in range(60):
        with np.errstate(over="ignore", invalid="ignore"):  # too long a step is refused, not reported
            worse = ~(reached(size) <= value + 1e-14 * np.abs(value))
        if not worse.any():
            return size
        size[worse] *= 0.5
    return np.where(worse[:, None], 0.0, size)


def settled(before: Array, after: Array) -> bool:
    """Whether a round moved the models by no more than rounding makes of convergence."""
    return float(np.abs(after - before).max()) <= _SETTLED * (1.0 + float(np.abs(after).max()))
