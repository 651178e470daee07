"""`coterie fit` as a method for one table: groups, kind of models and personal parts are chosen by
the fit itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from coterie.data.summary import Task
from coterie.data.users import Users
from coterie.fitting import Settings, fit
from coterie.lab.baselines.central import Central, CentralFit


@dataclass(frozen=True, kw_only=True)
class CoterieFit(Central):
    """`coterie fit` with its default settings; rows are decided about by `Fit.models`."""

    name: ClassVar[str] = "coterie"

    def _fit(self, users: Users, task: Task, n_classes: int, seed: int) -> CentralFit:
        fitted = fit(users, Settings(task=task, n_classes=n_classes))
        groups = f", {fitted.n_clusters} groups" if "groups" in fitted.kind else ""
        return CentralFit(decide=lambda rows: fitted.units.margins(rows.features,
            fitted.models[rows.owner]),
                          models=fitted.models, note=fitted.kind + groups)
