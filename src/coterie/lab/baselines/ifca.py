"""Clusters by least loss, with models from averaged gradient steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from coterie.base.labels import group_means
from coterie.base.types import Array, Ints
from coterie.lab.baselines.assigning import Assigning
from coterie.lab.baselines.base import Outcome, check
from coterie.lab.baselines.descent import curvature, descend
from coterie.lab.baselines.run import BaselineRun


@dataclass(frozen=True, kw_only=True)
class IFCA(Assigning):
    """label_i = argmin_k f_i(model_k);  model_k <- mean over {i: label_i = k} of `steps` gradient
    steps from model_k

    Ghosh, Chung, Yin and Ramchandran, 2020, "An efficient framework for clustered federated
    learning", with model averaging. In the paper several starts from random models are run and the
    best is kept; here the random models are the local models of n_clusters random users, and the
    best start is that with the least training loss. A start ends when no user has changed its
    cluster in five rounds. The clusters of the best start are then fitted exactly, which is the
    limit of its rounds. Newcomers get the model with the least loss.

    Traffic: n_clusters dim numbers down and dim + 1 up per user and round of every start; at the
    end as in `BaselineRun.pool`.

    Parameters
    ----------
    n_clusters
        Number of clusters.
    steps, rate
        As for `FedAvgBaseline`.
    rounds
        Largest number of rounds per start.
    restarts
        Number of starts.
    """

    name: ClassVar[str] = "ifca"
    steps: int = 5
    rate: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check(steps=(self.steps, 1, np.inf), rate=(self.rate, 0.0, 2.0))

    def _train(self, run: BaselineRun, models: Array) -> tuple[float, Ints, Array]:
        labels, unchanged = np.full(run.n_users, -1), 0
        for _ in range(self.rounds):
            losses = run.losses(models)
            before, labels = labels, losses.argmin(axis=1)
            unchanged = unchanged + 1 if np.array_equal(before, labels) else 0
            if unchanged == 5:
                break
            own = models[labels]
            length = self.rate / curvature(run.loss, run.samples, own).max()
            models = cluster_means(descend(run.loss, run.samples, own, length, self.steps), labels,
                                   models)
            run.exchange(down=models.size, up=run.dim + 1)
        return float(losses.min(axis=1).sum()), labels, models

    def _finish(self, run: BaselineRun, labels: Ints, models: Array) -> Outcome:
        return super()._finish(run, labels, run.pool(labels, self.n_clusters, start=models))


def cluster_means(points: Array, labels: Ints, otherwise: Array) -> Array:
    """(k, dim) the mean of the points of each cluster; for an empty cluster, its row of
    `otherwise`.
    """
    sizes = np.bincount(labels, minlength=len(otherwise))[:, None]
    return np.where(sizes > 0, group_means(points, labels, len(otherwise)), otherwise)
