"""The global model, adapted by every user with some gradient steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Self

import numpy as np

from coterie.base.types import Array, Ints
from coterie.data.users import Users
from coterie.lab.baselines.base import Baseline, Fitted, Outcome, check
from coterie.lab.baselines.descent import curvature, descend
from coterie.lab.baselines.fedavg import FedAvgBaseline
from coterie.lab.baselines.run import BaselineRun
from coterie.losses import Loss, Samples


@dataclass(frozen=True, kw_only=True)
class FineTuning(Baseline):
    """The model of FedAvg, then `steps` gradient steps on f_i at every user i; newcomers do the
    same.

    Wang et al., 2019, "Federated evaluation of on-device personalization": a few epochs, with tuned
    number and rate.

    Traffic: that of FedAvg.

    Parameters
    ----------
    steps
        Number of gradient steps of every user at the end.
    rate
        Length of these steps times L_i.
    common
        Settings of FedAvg for the common model.
    """

    name: ClassVar[str] = "fine_tuning"
    steps: int = 10
    rate: float = 1.0
    common: FedAvgBaseline = field(default_factory=FedAvgBaseline)

    def __post_init__(self) -> None:
        check(steps=(self.steps, 0, np.inf), rate=(self.rate, 0.0, 2.0))

    @classmethod
    def grid(cls, users: Users, loss: Loss) -> tuple[Self, ...]:
        return tuple(cls(steps=steps) for steps in (0, 1, 2, 5, 10, 20, 50, 100, 200, 500))

    def _fit(self, run: BaselineRun) -> Outcome:
        common = self.common._fit(run).shared
        return Outcome(self._adapt(run.loss, run.samples, common), common)

    def _adapt(self, loss: Loss, samples: Samples, common: Array) -> Array:
        models = np.repeat(common, samples.n_users, axis=0)
        return descend(loss, samples, models, self.rate / curvature(loss, samples, models),
                       self.steps)

    def _join(self, fitted: Fitted, samples: Samples) -> tuple[Array, Ints]:
        return self._adapt(fitted.loss, samples, fitted.shared), np.full(samples.n_users, -1)
