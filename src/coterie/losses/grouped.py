"""Groups of users as users: the loss of a group is the sum of its members' losses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coterie._typing import Array, Indices, Ints
from coterie.data.users import Block, Users
from coterie.losses.base import Evaluation, Loss, Samples


@dataclass(frozen=True, kw_only=True, eq=False)
class Grouped(Loss):
    """F_k(w) = sum over the members i of group k of f_i(w): the losses of the paper's clustered problem, Eq. (5).

    Use it with users of one group each, such as `group_users(samples.users, labels)`; their data are not looked at.
    """

    loss: Loss
    samples: Samples
    labels: Ints

    @property
    def quadratic(self) -> bool:  # type: ignore[override]
        return self.loss.quadratic

    def dim(self, users: Users) -> int:
        return self.samples.dim

    def prepare(self, users: Users) -> Samples:
        return Samples(users, (), self.samples.dim)

    def _evaluate(self, samples: Samples, block: Block, models: Array, order: int) -> Evaluation:
        raise NotImplementedError  # groups have no blocks of their own; see `_on`

    def _on(self, samples: Samples, users: Indices, models: Array, order: int) -> Evaluation:
        every = np.zeros((samples.n_users, samples.dim))
        every[users] = models
        parts = self.loss.evaluate(self.samples, every[self.labels], order)
        return Evaluation(*(self._sums(part, samples.n_users)[users] if k <= order else part
                            for k, part in enumerate(parts)))

    def _sums(self, rows: Array, n: int) -> Array:
        flat = rows.reshape(len(rows), -1)
        sums = np.stack([np.bincount(self.labels, weights=column, minlength=n) for column in flat.T], axis=1)
        return np.asarray(sums.reshape(n, *rows.shape[1:]), dtype=float)

    def lipschitz(self, samples: Samples) -> Array:
        return self._sums(self.loss.lipschitz(self.samples), samples.n_users)

    def strong_convexity(self, samples: Samples) -> Array:
        return self._sums(self.loss.strong_convexity(self.samples), samples.n_users)


def group_users(users: Users, labels: Ints) -> Users:
    """One user for each group, named by its number, holding the samples of its members."""
    return Users.from_arrays(users.features, users.targets, labels[users.owner], feature_names=users.feature_names)
