"""One model for each true cluster, fitted exactly: the goal of every method that finds clusters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from coterie.lab.baselines.base import Outcome, Ridged
from coterie.lab.baselines.run import BaselineRun


@dataclass(frozen=True, kw_only=True)
class Oracle(Ridged):
    """minimise_x sum_{i in C_k} f_i(x) for each true cluster C_k; newcomers get the model with the
    least loss.

    Traffic: as in `BaselineRun.pool`.

    Parameters
    ----------
    ridge
        Ridge, added to that of the loss.
    """

    name: ClassVar[str] = "oracle"
    needs_clusters: ClassVar[bool] = True

    def _fit(self, run: BaselineRun) -> Outcome:
        assert run.clusters is not None  # checked by `Baseline.fit`
        models = run.pool(run.clusters, int(run.clusters.max()) + 1, self.ridge)
        return Outcome(models[run.clusters], models, run.clusters)
