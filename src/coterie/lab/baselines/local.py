"""One model per user, without communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from coterie.base.types import Array, Ints
from coterie.lab.baselines.base import Fitted, Outcome, Ridged
from coterie.lab.baselines.run import BaselineRun, own_models, ridged
from coterie.losses import Samples


@dataclass(frozen=True, kw_only=True)
class Local(Ridged):
    """minimise_x f_i(x) for every user i separately; newcomers do the same.

    Traffic: none.

    Parameters
    ----------
    ridge
        Ridge, added to that of the loss.
    """

    name: ClassVar[str] = "local"

    def _fit(self, run: BaselineRun) -> Outcome:
        models = run.own(self.ridge)
        return Outcome(models, models.mean(axis=0, keepdims=True))

    def _join(self, fitted: Fitted, samples: Samples) -> tuple[Array, Ints]:
        return own_models(ridged(fitted.loss, self.ridge), samples), np.full(samples.n_users, -1)
