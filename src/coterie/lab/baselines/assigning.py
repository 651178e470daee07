"""The common part of methods that assign each user to the model with the least loss, from several
random starts.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Self

import numpy as np

from coterie.base.errors import InvalidInput
from coterie.base.types import Array, Ints
from coterie.data.users import Users
from coterie.lab.baselines.base import Baseline, Outcome, check, cluster_counts
from coterie.lab.baselines.run import BaselineRun
from coterie.losses import Loss

_START_RIDGE = 1e-3


@dataclass(frozen=True, kw_only=True)
class Assigning(Baseline):
    """A given number of clusters, from several random starts; the start with the least training
    loss is kept.
    """

    n_clusters: int = 2
    rounds: int = 100
    restarts: int = 10

    def __post_init__(self) -> None:
        check(n_clusters=(self.n_clusters, 1, np.inf), rounds=(self.rounds, 1, np.inf),
              restarts=(self.restarts, 1, np.inf))

    @classmethod
    def grid(cls, users: Users, loss: Loss) -> tuple[Self, ...]:
        return tuple(cls(n_clusters=k) for k in cluster_counts(users))

    def _fit(self, run: BaselineRun) -> Outcome:
        starts = random_starts(run, self.n_clusters, self.restarts)
        _, labels, models = min((self._train(run, models) for models in starts),
                                key=lambda end: end[0])
        return self._finish(run, labels, models)

    @abstractmethod
    def _train(self, run: BaselineRun, models: Array) -> tuple[float, Ints, Array]:
        """Training loss, clusters and models after one start."""

    def _finish(self, run: BaselineRun, labels: Ints, models: Array) -> Outcome:
        """The result, from the best start."""
        return Outcome(models[labels], models, labels)


def random_starts(run: BaselineRun, n_clusters: int, restarts: int) -> list[Array]:
    """For each start, the local models (with a small ridge) of random users; one start is enough
    for one cluster.
    """
    if n_clusters > run.n_users:
        raise InvalidInput(f"expected at most one cluster for each of {run.n_users} users, got "
                           f"{n_clusters}",
                           remedy="Lower n_clusters")
    own, restarts = run.held(_START_RIDGE), restarts if n_clusters > 1 else 1
    return [own[run.rng.choice(run.n_users, n_clusters, replace=False)] for _ in range(restarts)]
