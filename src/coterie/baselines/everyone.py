"""One model for all, exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from coterie.baselines.base import Baseline, Outcome, check, ridges
from coterie.baselines.run import Run
from coterie.losses import Loss
from coterie.users import Users


@dataclass(frozen=True, kw_only=True)
class Global(Baseline):
    """minimise_x sum_i f_i(x): what FedAvg (McMahan et al., 2017) is after; here by Newton's method.

    Parameters
    ----------
    ridge : added to the loss's own.

    Traffic: as in `Run.pool`.
    """

    name: ClassVar[str] = "global"
    ridge: float = 0.0

    def __post_init__(self) -> None:
        check(ridge=(self.ridge, 0.0, np.inf))

    @classmethod
    def grid(cls, users: Users, loss: Loss) -> tuple[Self, ...]:
        return tuple(cls(ridge=ridge) for ridge in ridges(loss))

    def _fit(self, run: Run) -> Outcome:
        model = run.pool(np.zeros(run.n_users, dtype=np.int64), 1, self.ridge)
        return Outcome(np.repeat(model, run.n_users, axis=0), model)
