"""Gradient steps of many users at once, with a length relative to the curvature of the loss.

A rate of 1 is a step of length 1 / L, with L = loss.lipschitz; every such step decreases the loss.
If the loss has no such bound (Poisson), L is twice the curvature at the start of the steps, and a
step that would not decrease the loss of a user is halved until it does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from coterie.base.types import Array
from coterie.losses import Loss, Samples

_SETTLED = 1e-10


def unbounded(loss: Loss, samples: Samples) -> bool:
    """Whether the curvature of some user has no bound, so that the length of each step must be
    checked.
    """
    return not bool(np.isfinite(loss.lipschitz(samples)).all())


def curvature(loss: Loss, samples: Samples, models: Array) -> Array:
    """(n_users,) L_i, or twice the largest eigenvalue of the Hessian at `models` if there is no
    L_i.
    """
    bounds = loss.lipschitz(samples)
    if not np.isfinite(bounds).all():
        estimates = 2.0 * np.linalg.eigvalsh(loss.hessians(samples, models))[:, -1]
        bounds = np.where(np.isfinite(bounds), bounds, estimates)
    return np.maximum(bounds, 1e-300)


def descend(loss: Loss, samples: Samples, models: Array, lengths: Array | float,
            steps: int) -> Array:
    """Repeat models - lengths * gradient `steps` times."""
    lengths = np.broadcast_to(np.asarray(lengths, dtype=float), (samples.n_users,))[:, None]
    checked = unbounded(loss, samples)
    for _ in range(steps):
        value, gradient, _ = loss.evaluate(samples, models, 1)
        step = lengths * gradient
        if checked:
            step = backtrack(partial(_value_after, loss, samples, models, step), value) * step
        models = models - step
    return models


def _value_after(loss: Loss, samples: Samples, models: Array, step: Array, size: Array) -> Array:
    return loss.values(samples, models - size * step)


def backtrack(value_after: Callable[[Array], Array], value: Array) -> Array:
    """(n_users, 1) for each user the first size of 1, 1/2, 1/4, ... with value_after(size) <=
    value; 0 if none.

    `value_after` gives the value of every user after a step of this size.
    """
    size = np.ones((len(value), 1))
    for _ in range(60):
        with np.errstate(over="ignore", invalid="ignore"):  # a step with overflow is rejected
            worse = ~(value_after(size) <= value + 1e-14 * np.abs(value))
        if not worse.any():
            return size
        size[worse] *= 0.5
    return np.where(worse[:, None], 0.0, size)


def settled(before: Array, after: Array) -> bool:
    """Whether a round changed the models by no more than rounding errors."""
    return float(np.abs(after - before).max()) <= _SETTLED * (1.0 + float(np.abs(after).max()))
