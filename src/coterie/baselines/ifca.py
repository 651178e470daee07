"""Clusters by whose model fits best, models by averaged gradient steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from coterie._typing import Array, Ints
from coterie.baselines.base import Baseline, Outcome, check, cluster_counts
from coterie.baselines.descent import curvature, descend
from coterie.baselines.run import Run
from coterie.data.users import Users
from coterie.errors import InvalidInput
from coterie.losses import Loss

_START_RIDGE = 1e-3


@dataclass(frozen=True, kw_only=True)
class IFCA(Baseline):
    """label_i = argmin_k f_i(model_k);  model_k <- mean over {i: label_i = k} of `steps` gradient steps from model_k

    Ghosh, Chung, Yin and Ramchandran, 2020, "An efficient framework for clustered federated learning", with model
    averaging. They start from random models, several times over, and keep the best; here the random models are those
    of n_clusters users drawn at random, and best is the least training loss. A start ends when no user has changed
    cluster in five rounds; the best start's clusters are then fitted exactly, which is where its rounds would lead.
    Newcomers take the model that fits them best.

    Parameters
    ----------
    n_clusters : to be told.
    steps, rate : as for FedAvg.
    rounds : of one start, at most.
    restarts : how many starts.

    Traffic: n_clusters dim numbers down and dim + 1 up, a user and round of every start; at the end as in `Run.pool`.
    """

    name: ClassVar[str] = "ifca"
    n_clusters: int = 2
    steps: int = 5
    rate: float = 1.0
    rounds: int = 100
    restarts: int = 10

    def __post_init__(self) -> None:
        check(n_clusters=(self.n_clusters, 1, np.inf), steps=(self.steps, 1, np.inf), rate=(self.rate, 0.0, 2.0),
              rounds=(self.rounds, 1, np.inf), restarts=(self.restarts, 1, np.inf))

    @classmethod
    def grid(cls, users: Users, loss: Loss) -> tuple[Self, ...]:
        return tuple(cls(n_clusters=k) for k in cluster_counts(users))

    def _fit(self, run: Run) -> Outcome:
        starts = random_starts(run, self.n_clusters, self.restarts)
        _, labels, models = min((self._train(run, models) for models in starts), key=lambda end: end[0])
        models = run.pool(labels, self.n_clusters, start=models)
        return Outcome(models[labels], models, labels)

    def _train(self, run: Run, models: Array) -> tuple[float, Ints, Array]:
        """Training loss, clusters and models at the end of one start."""
        labels, still = np.full(run.n_users, -1), 0
        for _ in range(self.rounds):
            losses = run.losses(models)
            before, labels = labels, losses.argmin(axis=1)
            still = still + 1 if np.array_equal(before, labels) else 0
            if still == 5:
                break
            own = models[labels]
            length = self.rate / curvature(run.loss, run.samples, own).max()
            models = cluster_means(descend(run.loss, run.samples, own, length, self.steps), labels, models)
            run.exchange(down=models.size, up=run.dim + 1)
        return float(losses.min(axis=1).sum()), labels, models


def random_starts(run: Run, n_clusters: int, restarts: int) -> list[Array]:
    """The models, each by itself and slightly shrunk, of so many users drawn at random; one start will do for one."""
    if n_clusters > run.n_users:
        raise InvalidInput(f"expected at most one cluster for each of {run.n_users} users, got {n_clusters}",
                           remedy="Lower n_clusters")
    own, restarts = run.held(_START_RIDGE), restarts if n_clusters > 1 else 1
    return [own[run.rng.choice(run.n_users, n_clusters, replace=False)] for _ in range(restarts)]


def cluster_means(points: Array, labels: Ints, otherwise: Array) -> Array:
    """(k, dim) the mean of each cluster's points; of an empty cluster, its row of `otherwise`."""
    sizes = np.bincount(labels, minlength=len(otherwise))[:, None]
    sums = np.zeros_like(otherwise)
    np.add.at(sums, labels, points)
    return np.where(sizes > 0, sums / np.maximum(sizes, 1), otherwise)
