"""One model per user, pulled to the global model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from coterie.base.types import Array, Ints
from coterie.lab.baselines.base import Fitted, Outcome, Pulled
from coterie.lab.baselines.run import BaselineRun, own_models
from coterie.losses import Loss, Samples


@dataclass(frozen=True, kw_only=True)
class Ditto(Pulled):
    """minimise_v f_i(v) + strength/2 ||v - w||^2 for every user i, with w the minimum of sum_i f_i;
    newcomers too.

    Li, Hu, Beirami and Smith, 2021, "Ditto: fair and robust federated learning through
    personalization". In the paper w is trained by FedAvg and v by a few gradient steps per round,
    with the strength tuned for each data set; here both are exact. In contrast to the squared
    penalty, w does not depend on v.

    Traffic: as in `BaselineRun.pool`.

    Parameters
    ----------
    strength
        Strength of the pull, lambda in the paper.
    """

    name: ClassVar[str] = "ditto"

    def _fit(self, run: BaselineRun) -> Outcome:
        w = run.once("pooled", lambda: run.pool(np.zeros(run.n_users, dtype=np.int64), 1))
        return Outcome(self._near(run.loss, run.samples, w), w)

    def _near(self, loss: Loss, samples: Samples, w: Array) -> Array:
        if self.strength == 0:
            return own_models(loss, samples)
        return loss.prox(samples, None, self.strength, np.repeat(w, samples.n_users, axis=0)).points

    def _join(self, fitted: Fitted, samples: Samples) -> tuple[Array, Ints]:
        return self._near(fitted.loss, samples, fitted.shared), np.full(samples.n_users, -1)
