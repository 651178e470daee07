"""Clusters of the local models of the users, computed in one round."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from coterie.base.errors import InvalidInput
from coterie.base.types import Array, Ints
from coterie.data.users import Users
from coterie.lab.baselines.base import Baseline, Fitted, Outcome, check
from coterie.lab.baselines.run import BaselineRun
from coterie.losses import Loss, Samples


@dataclass(frozen=True, kw_only=True)
class KMeans(Baseline):
    """k-means (Lloyd, 1982; k-means++, best of ten starts) on the local models, then one exact fit
    per cluster.

    Dennis, Li and Smith, 2021, "Heterogeneity for the win: one-shot federated clustering", and
    Ghosh et al., 2019, are methods of this kind. Newcomers join the cluster with the nearest mean
    of local models.

    Traffic: dim numbers up, once per user; then as in `BaselineRun.pool`.

    Parameters
    ----------
    n_clusters
        Number of clusters.
    ridge
        L2 strength, intercept included, of the local models that are compared; needed for users
        with few samples.
    """

    name: ClassVar[str] = "k_means"
    n_clusters: int = 2
    ridge: float = 0.1

    def __post_init__(self) -> None:
        check(n_clusters=(self.n_clusters, 1, np.inf), ridge=(self.ridge, 0.0, np.inf))

    @classmethod
    def grid(cls, users: Users, loss: Loss) -> tuple[Self, ...]:
        counts = [k for k in (1, 2, 3, 4, 6) if k <= users.n_users]
        return tuple(cls(n_clusters=k, ridge=ridge) for k in counts for ridge in (0.01, 0.1))

    def _fit(self, run: BaselineRun) -> Outcome:
        labels = k_means(run.held(self.ridge), self.n_clusters, run.rng)
        run.exchange(down=0, up=run.dim)
        models = run.pool(labels, self.n_clusters)
        return Outcome(models[labels], models, labels)

    def _join(self, fitted: Fitted, samples: Samples) -> tuple[Array, Ints]:
        old = fitted.loss.prox(fitted.loss.prepare(fitted.users), None, self.ridge, None).points
        centres = np.stack([old[fitted.labels == k].mean(axis=0) for k in range(fitted.n_clusters)])
        own = fitted.loss.prox(samples, None, self.ridge, None).points
        nearest = ((own[:, None] - centres) ** 2).sum(axis=2).argmin(axis=1)
        return fitted.shared[nearest], nearest


def k_means(points: Array, n_clusters: int, rng: np.random.Generator) -> Ints:
    """(n,) the cluster of each point."""
    from sklearn.cluster import KMeans as Lloyd

    if n_clusters > len(points):
        raise InvalidInput(f"expected at most one cluster for each of {len(points)} users, got "
                           f"{n_clusters}",
                           remedy="Lower n_clusters")
    with warnings.catch_warnings():
        # With fewer distinct points than clusters, some clusters are empty.
        warnings.simplefilter("ignore")
        labels = Lloyd(n_clusters, n_init=10, random_state=int(rng.integers(2**31))).fit_predict(
            points)
    return np.asarray(labels, dtype=np.int64)
