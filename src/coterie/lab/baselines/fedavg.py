"""One model for all users, from averaged gradient steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from coterie.base.types import Array
from coterie.data.users import Users
from coterie.lab.baselines.base import Baseline, Outcome, check
from coterie.lab.baselines.descent import curvature, descend, settled
from coterie.lab.baselines.run import BaselineRun
from coterie.losses import Loss


@dataclass(frozen=True, kw_only=True)
class FedAvgBaseline(Baseline):
    """x <- mean_i (`steps` gradient steps on f_i from x), repeated every round.

    McMahan et al., 2017, "Communication-efficient learning of deep networks from decentralized
    data": 10% of the users per round, 5 epochs with minibatches of 10, averages weighted by
    samples. With one step this is gradient descent on mean_i f_i; with more steps, the fixed point
    is biased towards users with large curvature.

    Traffic: dim numbers down and up per user and round.

    Parameters
    ----------
    steps
        Number of gradient steps per user and round.
    rate
        Length of these steps times max_i L_i.
    rounds
        Largest number of rounds; the method stops earlier if nothing changes.
    """

    name: ClassVar[str] = "fedavg"
    steps: int = 5
    rate: float = 1.0
    rounds: int = 200

    def __post_init__(self) -> None:
        check(steps=(self.steps, 1, np.inf), rate=(self.rate, 0.0, 2.0),
              rounds=(self.rounds, 1, np.inf))

    @classmethod
    def grid(cls, users: Users, loss: Loss) -> tuple[Self, ...]:
        return tuple(cls(steps=steps, rate=rate) for steps in (1, 5, 20)
                     for rate in (0.3, 1.0, 1.9))

    def _fit(self, run: BaselineRun) -> Outcome:
        model = run.once(self, lambda: self._train(run))
        return Outcome(np.repeat(model, run.n_users, axis=0), model)

    def _train(self, run: BaselineRun) -> Array:
        model, loss, samples = np.zeros((1, run.dim)), run.loss, run.samples
        for _ in range(self.rounds):
            models = np.repeat(model, run.n_users, axis=0)
            length = self.rate / curvature(loss, samples, models).max()
            mean = descend(loss, samples, models, length, self.steps).mean(axis=0, keepdims=True)
            run.exchange(down=run.dim, up=run.dim)
            model, before = mean, model
            if settled(before, model):
                break
        return model
