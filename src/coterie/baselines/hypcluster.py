"""Clusters by whose model fits best, models fitted exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from coterie._typing import Array, Ints
from coterie.baselines.assigning import Assigning
from coterie.baselines.run import Run


@dataclass(frozen=True, kw_only=True)
class HypCluster(Assigning):
    """minimise over models and labels  sum_i f_i(model_{label_i}), by turns: labels given models, models given labels.

    Mansour, Mohri, Ro and Suresh, 2020, "Three approaches for personalization with applications to federated learning".
    Theirs takes a few gradient steps with some of the users between assignments; here the models are exact each time,
    so the sum falls until no user changes cluster. It starts from the models of users drawn at random, several times.
    Newcomers take the model that fits them best.

    Parameters
    ----------
    n_clusters : to be told.
    rounds : of assignment in one start, at most.
    restarts : how many starts; the least training loss wins.

    Traffic: for an assignment n_clusters dim numbers down and 1 up, a user; between them as in `Run.pool`.
    """

    name: ClassVar[str] = "hypcluster"
    rounds: int = 50
    restarts: int = 5

    def _train(self, run: Run, models: Array) -> tuple[float, Ints, Array]:
        labels = np.full(run.n_users, -1)
        for _ in range(self.rounds):
            losses = run.losses(models)
            run.exchange(down=models.size, up=1)
            before, labels = labels, losses.argmin(axis=1)
            if np.array_equal(before, labels):
                break
            models = run.pool(labels, self.n_clusters, start=models)
        return float(run.losses(models)[np.arange(run.n_users), labels].sum()), labels, models
