"""One model for all users, fitted exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from coterie.lab.baselines.base import Outcome, Ridged
from coterie.lab.baselines.run import BaselineRun


@dataclass(frozen=True, kw_only=True)
class Global(Ridged):
    """minimise_x sum_i f_i(x), the goal of FedAvg (McMahan et al., 2017), here by Newton's method.

    Traffic: as in `BaselineRun.pool`.

    Parameters
    ----------
    ridge
        Ridge, added to that of the loss.
    """

    name: ClassVar[str] = "global"

    def _fit(self, run: BaselineRun) -> Outcome:
        model = run.pool(np.zeros(run.n_users, dtype=np.int64), 1, self.ridge)
        return Outcome(np.repeat(model, run.n_users, axis=0), model)
