"""Clusters by least loss, with models fitted exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from coterie.base.types import Array, Ints
from coterie.lab.baselines.assigning import Assigning
from coterie.lab.baselines.run import BaselineRun


@dataclass(frozen=True, kw_only=True)
class HypCluster(Assigning):
    """minimise over models and labels  sum_i f_i(model_{label_i}), alternating between labels and
    models.

    Mansour, Mohri, Ro and Suresh, 2020, "Three approaches for personalization with applications to
    federated learning". In the paper some of the users take a few gradient steps between
    assignments; here the models are exact each time, so the sum decreases until no user changes its
    cluster. The starts are the local models of random users. Newcomers get the model with the least
    loss.

    Traffic: for an assignment n_clusters dim numbers down and 1 up per user; between assignments as
    in `BaselineRun.pool`.

    Parameters
    ----------
    n_clusters
        Number of clusters.
    rounds
        Largest number of assignments per start.
    restarts
        Number of starts; the one with the least training loss is used.
    """

    name: ClassVar[str] = "hypcluster"
    rounds: int = 50
    restarts: int = 5

    def _train(self, run: BaselineRun, models: Array) -> tuple[float, Ints, Array]:
        labels = np.full(run.n_users, -1)
        for _ in range(self.rounds):
            losses = run.losses(models)
            run.exchange(down=models.size, up=1)
            before, labels = labels, losses.argmin(axis=1)
            if np.array_equal(before, labels):
                break
            models = run.pool(labels, self.n_clusters, start=models)
        return float(run.losses(models)[np.arange(run.n_users), labels].sum()), labels, models
