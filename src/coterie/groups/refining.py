"""Models of groups, refined by the slopes that their users send: BFGS from summed second-order
models.
"""

from __future__ import annotations

import numpy as np

from coterie.base.labels import group_sums
from coterie.base.types import Array, Ints

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
