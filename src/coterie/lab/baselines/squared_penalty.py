"""Models pulled to their mean by a squared penalty."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from coterie.base.types import Array, Indices, Ints
from coterie.lab.baselines.base import Fitted, Outcome, Pulled
from coterie.lab.baselines.run import BaselineRun
from coterie.losses import Samples
from coterie.losses.newton import minimise


@dataclass(frozen=True, kw_only=True)
class SquaredPenaltyBaseline(Pulled):
    """minimise sum_i f_i(x_i) + strength/2 sum_i ||x_i - mean||^2, exactly.

    Hanzely and Richtarik, 2020, "Federated learning of a mixture of global and local models"; their
    L2GD uses random gradient steps, and their strength is chosen for each data set. A newcomer is
    pulled to the mean of the fit.

    Traffic: a round is one Newton step for the mean: dim numbers down, 1 + dim + dim (dim + 1) / 2
    up.

    Parameters
    ----------
    strength
        Penalty strength; gamma/2 sum_{i<j} ||x_i - x_j||^2 is the same with strength = gamma *
        n_users.
    """

    name: ClassVar[str] = "squared_penalty"

    def _fit(self, run: BaselineRun) -> Outcome:
        if self.strength == 0:
            return Outcome(run.own(), run.own().mean(axis=0, keepdims=True))
        s, loss, samples, d = self.strength, run.loss, run.samples, run.dim
        eye = np.eye(d)
        last: Array = np.zeros((run.n_users, d))

        # The mean also minimises the sum over m: minimise_m sum_i min_x f_i(x) + s/2 ||x - m||^2.
        # With x_i the
        # inner minimum and H_i = hess f_i(x_i), the gradient is sum_i grad f_i(x_i) and, by the
        # Schur complement of the
        # arrow-shaped Hessian in (x_1, ..., x_n, m), the Hessian is sum_i s I - s^2 (H_i + s I)^-1
        # = s (H_i + s)^-1 H_i
        def evaluate(only: Indices, mean: Array, order: int) -> tuple[Array, Array, Array]:
            nonlocal last
            run.exchange(down=d, up=(1, 1 + d, 1 + d + d * (d + 1) // 2)[order])
            centres = np.repeat(mean, run.n_users, axis=0)
            inner = loss.prox(samples, None, s, centres, start=last)
            last = inner.points
            _, g, h = loss.evaluate(samples, last, order)
            gradient, hessian = np.empty(0), np.empty(0)
            if order > 0:
                gradient = g.sum(axis=0)[None]
            if order > 1:
                parts = s * np.linalg.solve(h + s * eye, h)
                hessian = (0.5 * (parts + parts.swapaxes(1, 2))).sum(axis=0)[None]
            return inner.values.sum(keepdims=True), gradient, hessian

        mean = minimise(evaluate, np.zeros((1, d))).points
        models = loss.prox(samples, None, s, np.repeat(mean, run.n_users, axis=0),
                           start=last).points
        return Outcome(models, mean)

    def _join(self, fitted: Fitted, samples: Samples) -> tuple[Array, Ints]:
        centres = np.repeat(fitted.shared, samples.n_users, axis=0)
        return fitted.loss.prox(samples, None, self.strength, centres).points, \
            np.full(samples.n_users, -1)
