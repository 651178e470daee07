"""One-shot clustering of the local models: one message up, one message down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from coterie.base.labels import group_means
from coterie.base.types import Array, Ints
from coterie.convex.consensus import lam_max
from coterie.data.users import Users
from coterie.lab.baselines.base import Baseline, Fitted, Outcome, check
from coterie.lab.baselines.kmeans import k_means
from coterie.lab.baselines.run import BaselineRun
from coterie.losses import Loss, Samples, SquaredDistance
from coterie.problem.problem import Problem
from coterie.solvers import solve_quietly

_RIDGES = (0.01, 0.1)
_TOL = 1e-6  # relative gap of the convex clustering


@dataclass(frozen=True, kw_only=True)
class _OneShot(Baseline):
    """Clusters of the local models; the users of a cluster get the mean of its local models.

    Parameters
    ----------
    ridge
        L2 strength, intercept included, of the local models; needed for users with few samples.
    """

    ridge: float = 0.1

    def _fit(self, run: BaselineRun) -> Outcome:
        own = run.held(self.ridge)
        labels = self._labels(run, own)
        run.exchange(down=run.dim, up=run.dim)
        centres = group_means(own, labels, int(labels.max()) + 1)
        return Outcome(centres[labels], centres, labels)

    def _labels(self, run: BaselineRun, own: Array) -> Ints:
        raise NotImplementedError

    def _join(self, fitted: Fitted, samples: Samples) -> tuple[Array, Ints]:
        own = fitted.loss.prox(samples, None, self.ridge, None).points
        nearest = ((own[:, None] - fitted.shared) ** 2).sum(axis=2).argmin(axis=1)
        return fitted.shared[nearest], nearest


@dataclass(frozen=True, kw_only=True)
class ODCL(_OneShot):
    """ODCL-CC (Armacki, Bajovic, Jakovetic and Kar, 2022, arXiv 2209.10866): convex clustering of
    the local models a_i.

        minimise  1/2 sum_i ||z_i - a_i||^2 + lam sum_{i<j} ||z_i - z_j||

    Users with equal z_i form a cluster, and get the mean of its a_i. Newcomers join the cluster
    with the nearest mean.

    Traffic: dim numbers up and dim numbers down, once per user.

    Parameters
    ----------
    ridge
        L2 strength, intercept included, of the local models; needed for users with few samples.
    share
        lam over the smallest lam at which all users form one cluster.
    """

    name: ClassVar[str] = "odcl"
    share: float = 0.9

    def __post_init__(self) -> None:
        check(ridge=(self.ridge, 0.0, np.inf), share=(self.share, 0.0, 1.0))

    @classmethod
    def grid(cls, users: Users, loss: Loss) -> tuple[Self, ...]:
        return tuple(cls(share=share, ridge=ridge) for share in (0.3, 0.5, 0.7, 0.9, 1.0)
                     for ridge in _RIDGES)

    def _labels(self, run: BaselineRun, own: Array) -> Ints:
        if run.n_users == 1 or self.share == 1.0:
            return np.zeros(run.n_users, dtype=np.int64)
        if run.dim > run.n_users:  # the same distances in fewer coordinates
            left, scales, _ = np.linalg.svd(own - own.mean(axis=0), full_matrices=False)
            own = left * scales
        problem = Problem(Users.from_arrays(own), SquaredDistance(), 0.0)
        return solve_quietly(problem.with_lam(self.share * lam_max(problem).upper), tol=_TOL).labels


@dataclass(frozen=True, kw_only=True)
class ODCLKMeans(_OneShot):
    """ODCL-KM (Armacki, Bajovic, Jakovetic and Kar, 2022): k-means on the local models instead of
    convex clustering.

    In contrast to `KMeans`, users get the mean of the local models of their cluster, without
    another fit.

    Traffic: dim numbers up and dim numbers down, once per user.

    Parameters
    ----------
    ridge
        L2 strength, intercept included, of the local models; needed for users with few samples.
    n_clusters
        Number of clusters.
    """

    name: ClassVar[str] = "odcl k_means"
    n_clusters: int = 2

    def __post_init__(self) -> None:
        check(ridge=(self.ridge, 0.0, np.inf), n_clusters=(self.n_clusters, 1, np.inf))

    @classmethod
    def grid(cls, users: Users, loss: Loss) -> tuple[Self, ...]:
        return tuple(cls(n_clusters=k, ridge=ridge) for k in (1, 2, 3, 4, 6) if k <= users.n_users
                     for ridge in _RIDGES)

    def _labels(self, run: BaselineRun, own: Array) -> Ints:
        return np.unique(k_means(own, self.n_clusters, run.rng), return_inverse=True)[1]
