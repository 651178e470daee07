"""Clusters by repeated splits in two, where the gradients of users disagree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import numpy as np

from coterie.base.errors import InvalidInput
from coterie.base.types import Array, Flags, Ints
from coterie.data.users import Users
from coterie.lab.baselines.base import Baseline, Outcome, check
from coterie.lab.baselines.run import BaselineRun
from coterie.losses import Loss


@dataclass(frozen=True, kw_only=True)
class CFL(Baseline):
    """Fit one model; if some gradients at it are large, split the users in two by cosines; repeat
    for both parts.

    Sattler, Mueller and Samek, 2020, "Clustered federated learning: model-agnostic distributed
    multi-task optimization under privacy constraints". Let g_i be the gradient of user i at the
    model of its cluster. The cluster is split if

        ||mean_i g_i|| < eps1   and   max_i ||g_i|| > eps2

    with eps1 = 0.4 and eps2 = 1.6 in the authors' code. Our models are exact, so the first
    condition always holds. The second depends on the loss and on the units. Therefore ||g_i|| is
    measured relative to the noise that the m_i samples of user i would cause if all users of the
    cluster had the same distribution,

        ||g_i|| / sqrt(v / m_i),    v = the mean over users of the variance of the gradient of one
                                    sample

    so 1 is the typical value for one user by chance; among many users, or with few coordinates,
    some exceed 1.6 by chance. The two parts are, by `rule`,
        "code"   complete linkage on -cosine, as in the authors' code, for clusters of more than two
                 users;
        "paper"  single linkage, which minimises the largest cosine a between the parts (their
        Algorithm 1), and a
                 split only if a < sqrt((1 - gamma) / 2) (their Algorithm 3; gamma is 0 here: noise
                 is in v).
    Newcomers get the model with the least loss; in the paper they follow the tree of splits.

    Traffic: as in `BaselineRun.pool`; for each level of splits dim numbers down and dim + 1 up per
    user.

    Parameters
    ----------
    eps2
        Threshold on the largest relative gradient.
    rule
        How a cluster is split: "code" or "paper".
    """

    name: ClassVar[str] = "cfl"
    eps2: float = 1.6
    rule: Literal["code", "paper"] = "code"

    def __post_init__(self) -> None:
        check(eps2=(self.eps2, 0.0, np.inf))
        if self.rule not in ("code", "paper"):
            raise InvalidInput(f"unknown rule {self.rule!r}", remedy="Choose 'code' or 'paper'")

    @classmethod
    def grid(cls, users: Users, loss: Loss) -> tuple[Self, ...]:
        return tuple(cls(eps2=eps2, rule=rule) for rule in ("code", "paper")
                     for eps2 in (1.2, 1.6, 2.4, 4.0, 8.0))

    def _fit(self, run: BaselineRun) -> Outcome:
        users = run.samples.users.data
        # Every sample as a separate user, to get the gradients of single samples.
        singles = run.loss.prepare(Users.from_arrays(users.features, users.targets))
        labels, final = np.zeros(run.n_users, dtype=np.int64), set[int]()
        models = run.pool(labels, 1)
        while True:
            gradients = run.loss.gradients(run.samples, models[labels])
            spread = run.loss.gradients(singles, models[labels][users.owner]) \
                - gradients[users.owner]
            squares: Array = np.bincount(users.owner, (spread**2).sum(axis=1),
                                         run.n_users).astype(float)
            run.exchange(down=run.dim, up=run.dim + 1)
            before = len(models)
            for cluster in sorted(set(range(before)) - final):
                members = np.flatnonzero(labels == cluster)
                second = self._split(gradients[members], squares[members], users.counts[members])
                if second is None:
                    final.add(cluster)
                else:
                    labels[members[second]] = len(models)
                    models = np.concatenate([models, models[[cluster]]])
            if len(models) == before:
                return Outcome(models[labels], models, labels)
            models = run.pool(labels, len(models), start=models)

    def _split(self, gradients: Array, squares: Array, counts: Ints) -> Flags | None:
        """Which users form the second part; None if the cluster is not split."""
        from scipy.cluster.hierarchy import fcluster, linkage
        from scipy.spatial.distance import squareform

        norms = np.linalg.norm(gradients, axis=1)
        several = counts > 1
        variance = (squares[several] / (counts[several] - 1)).mean() if several.any() else 1.0
        if len(counts) <= (2 if self.rule == "code" else 1) or not norms.any() \
                or (norms / np.sqrt(max(variance, 1e-300) / counts)).max() <= self.eps2:
            return None
        units = gradients / np.maximum(norms, 1e-300)[:, None]
        cosines = units @ units.T
        distances = squareform(np.maximum(1.0 - cosines, 0.0), checks=False)
        tree = linkage(distances, "complete" if self.rule == "code" else "single")
        second = fcluster(tree, 2, "maxclust") == 2
        if not second.any() or (self.rule == "paper" and cosines[second][:, ~second].max()
                                >= np.sqrt(0.5)):
            return None
        return np.asarray(second)
