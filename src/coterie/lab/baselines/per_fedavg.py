"""A common model from which one gradient step per user gives good models: model-agnostic
meta-learning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import numpy as np

from coterie.base.errors import InvalidInput
from coterie.base.types import Array, Ints
from coterie.data.users import Users
from coterie.lab.baselines.base import Baseline, Fitted, Outcome, check
from coterie.lab.baselines.descent import backtrack, curvature, descend, settled, unbounded
from coterie.lab.baselines.run import BaselineRun
from coterie.losses import Loss, Samples


@dataclass(frozen=True, kw_only=True)
class PerFedAvg(Baseline):
    """minimise_w mean_i F_i(w),  F_i(w) = f_i(w - alpha grad f_i(w)); user i's model is w - alpha
    grad f_i(w).

    Fallah, Mokhtari and Ozdaglar, 2020, "Personalized federated learning with theoretical
    guarantees". The paper has minibatches, and chooses alpha, rate and the number of local steps
    per round for each data set. The models of the users are averaged, as in FedAvg, after steps
    along

        grad F_i(w) = (I - alpha hess f_i(w)) grad f_i(w - alpha grad f_i(w))

    with the Hessian itself (variant "hessian"; their HF approximates its product with a vector by
    differences), or without the first factor ("first_order", their FO). A newcomer takes one step
    from the common model.

    Traffic: dim numbers down and up per user and round.

    Parameters
    ----------
    adapt
        alpha times max_i L_i.
    rate
        Length of the steps on F_i times max_i L_i; if f_i is quadratic and adapt <= 2, a rate of 1
        decreases F_i.
    steps
        Number of steps on F_i per user and round.
    rounds
        Largest number of rounds; the method stops earlier if nothing changes.
    variant
        "hessian" or "first_order".
    """

    name: ClassVar[str] = "per_fedavg"
    adapt: float = 1.0
    rate: float = 1.0
    steps: int = 5
    rounds: int = 200
    variant: Literal["hessian", "first_order"] = "hessian"

    def __post_init__(self) -> None:
        check(adapt=(self.adapt, 0.0, 2.0), rate=(self.rate, 0.0, 2.0),
              steps=(self.steps, 1, np.inf),
              rounds=(self.rounds, 1, np.inf))
        if self.variant not in ("hessian", "first_order"):
            raise InvalidInput(f"unknown variant {self.variant!r}",
                               remedy="Choose 'hessian' or 'first_order'")

    @classmethod
    def grid(cls, users: Users, loss: Loss) -> tuple[Self, ...]:
        return tuple(cls(adapt=adapt, variant=variant) for adapt in (0.1, 0.3, 0.6, 1.0, 1.8)
                     for variant in ("hessian", "first_order"))

    def _fit(self, run: BaselineRun) -> Outcome:
        loss, samples, model = run.loss, run.samples, np.zeros((1, run.dim))
        for _ in range(self.rounds):
            points = np.repeat(model, run.n_users, axis=0)
            bound = float(curvature(loss, samples, points).max())
            for _ in range(self.steps):
                points = self._step(loss, samples, points, bound)
            run.exchange(down=run.dim, up=run.dim)
            model, before = points.mean(axis=0, keepdims=True), model
            if settled(before, model):
                break
        return Outcome(self._adapt(loss, samples, model, bound), model)

    def _step(self, loss: Loss, samples: Samples, points: Array, bound: float) -> Array:
        value, gradients, hessians = loss.evaluate(samples, points,
                                                   2 if self.variant == "hessian" else 1)
        alpha, checked = np.full((len(points), 1), self.adapt / bound), unbounded(loss, samples)
        if checked:
            alpha = alpha \
                * backtrack(lambda size: loss.values(samples, points - size * alpha * gradients),
                            value)
        value, outer, _ = loss.evaluate(samples, points - alpha * gradients, 1)
        if self.variant == "hessian":
            outer = outer - alpha * np.einsum("nde,ne->nd", hessians, outer)
        step = self.rate / bound * outer

        def value_after(size: Array) -> Array:
            trial = points - size * step
            return loss.values(samples, trial - alpha * loss.gradients(samples, trial))

        return points - (backtrack(value_after, value) * step if checked else step)

    def _adapt(self, loss: Loss, samples: Samples, model: Array, bound: float) -> Array:
        return descend(loss, samples, np.repeat(model, samples.n_users, axis=0), self.adapt / bound,
                       1)

    def _join(self, fitted: Fitted, samples: Samples) -> tuple[Array, Ints]:
        old = fitted.loss.prepare(fitted.users)
        bound = float(curvature(fitted.loss, old, np.repeat(fitted.shared, old.n_users,
                                                            axis=0)).max())
        return self._adapt(fitted.loss, samples, fitted.shared, bound), np.full(samples.n_users, -1)
