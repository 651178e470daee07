"""Groups of users as users: the loss of a group is the sum of its members' losses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coterie.base.labels import group_sums
from coterie.base.types import Array, Indices, Ints
from coterie.data.users import Participants
from coterie.losses.base import DualBounds, Evaluation, Loss, Samples
from coterie.losses.curvature import GroupCurvature, WideEvaluation
from coterie.losses.newton import Minimum
from coterie.losses.wide import minimise_wide


@dataclass(frozen=True, kw_only=True, eq=False)
class Grouped(Loss):
    """F_k(w) = sum over the members i of group k of f_i(w): the losses of the paper's clustered
    problem, Eq. (5).

    The groups are the participants of the clustered problem: `loss.prepare(loss.groups)`.

    Parameters
    ----------
    loss : of a user.
    samples : what `loss.prepare(users)` returned.
    labels : (n_users,) the number of each user's group.
    weights : (n_users,) factors of the users' losses; 1 by default.

    Example
    -------
    >>> import numpy as np
    >>> import coterie as ct
    >>> from coterie.losses.grouped import Grouped
    >>> users = ct.Users.from_arrays([[0.0], [2.0], [9.0]])
    >>> samples = ct.SquaredDistance().prepare(users)
    >>> loss = Grouped(loss=ct.SquaredDistance(), samples=samples, labels=np.array([0, 0, 1]))
    >>> loss.local(loss.prepare(loss.groups)).points.tolist()
    [[1.0], [9.0]]
    """

    loss: Loss
    samples: Samples
    labels: Ints
    weights: Array | None = None

    @property
    def groups(self) -> Participants:
        """The groups by number."""
        return Participants(range(int(self.labels.max()) + 1), self.samples.users.feature_names)

    @property
    def quadratic(self) -> bool:  # type: ignore[override]
        return self.loss.quadratic

    def dim(self, users: Participants) -> int:
        return self.samples.dim

    def evaluate(self, samples: Samples, models: Array, order: int = 2,
                 users: Indices | None = None) -> Evaluation:
        """As for any loss; `users` are numbers of groups, and only the members of these groups are
        evaluated.
        """
        members, owner = (None, self.labels) if users is None else self._members(users)
        parts = self.loss.evaluate(self.samples, models[owner], order, members)
        return Evaluation(*(group_sums(self._weighted(part, members), owner, len(models))
                            if k <= order else part
                            for k, part in enumerate(parts)))

    def wide(self, samples: Samples) -> bool:
        return self.loss.wide(self.samples)

    def expand(self, samples: Samples, models: Array,
               users: Indices | None = None) -> WideEvaluation:
        members, owner = (None, self.labels) if users is None else self._members(users)
        f, g, curvature = self.loss.expand(self.samples, models[owner], members)
        weights = self._weighted(np.ones(len(owner)), members)
        values, gradients = (group_sums(self._weighted(part, members), owner, len(models))
                             for part in (f, g))
        return WideEvaluation(values, gradients, GroupCurvature(curvature, owner, weights,
            len(models)))

    def prox(self, samples: Samples, linear: Array | None, t: Array | float, centres: Array | None,
             start: Array | None = None, users: Indices | None = None) -> Minimum:
        if not self.wide(samples):
            return super().prox(samples, linear, t, centres, start, users)
        who = np.arange(samples.n_users) if users is None else users
        zero = np.zeros((len(who), samples.dim))
        centres = zero if centres is None else centres
        return minimise_wide(self, samples, zero if linear is None else linear, np.broadcast_to(
            np.asarray(t, dtype=float), len(who)), centres, centres if start is None else start,
                             who)

    def dual_bounds(self, samples: Samples, slopes: Array, start: Array | None = None,
                    users: Indices | None = None,
                    about: Array | None = None) -> DualBounds:
        """As for any loss. With wide models, F*(u) <= sum_i f_i*(u_i) for all u_i that sum to u:
        gradients at one point, and equal parts of what they lack.
        """
        if not self.wide(samples) or self.weights is not None:
            return super().dual_bounds(samples, slopes, start, users, about)
        members, owner = (None, self.labels) if users is None else self._members(users)
        about = np.zeros_like(slopes) if about is None else about
        point = self.prox(samples, -slopes, 0.0, None, about if start is None else start,
                          users).points
        parts = self.loss.evaluate(self.samples, point[owner], 1, members).gradients
        lack = slopes - group_sums(parts, owner, len(slopes))
        parts = parts + (lack / np.bincount(owner, minlength=len(slopes))[:, None])[owner]
        bounds = self.loss.dual_bounds(self.samples, parts, point[owner], members, about[owner])
        return DualBounds(*(group_sums(part, owner, len(slopes)) for part in bounds))

    def value_rounding(self, samples: Samples, models: Array,
                       users: Indices | None = None) -> Array:
        if not self.wide(samples):
            return super().value_rounding(samples, models, users)
        members, owner = (None, self.labels) if users is None else self._members(users)
        rounding = self._weighted(self.loss.value_rounding(self.samples, models[owner], members),
                                  members)
        return group_sums(rounding, owner, len(models))

    def _weighted(self, part: Array, members: Indices | None = None) -> Array:
        """What each member adds to its group."""
        if self.weights is None:
            return part
        weights = self.weights if members is None else self.weights[members]
        return weights.reshape(-1, *(1,) * (part.ndim - 1)) * part

    def _members(self, groups: Indices) -> tuple[Indices, Indices]:
        """The members of these groups, one group after the other, and for each member the position
        of its group.
        """
        order = np.argsort(self.labels, kind="stable")
        ordered = self.labels[order]
        starts, ends = np.searchsorted(ordered, groups), np.searchsorted(ordered, groups,
            side="right")
        members = [order[start:end] for start, end in zip(starts, ends, strict=True)]
        return np.concatenate([order[:0], *members]), np.repeat(np.arange(len(groups)),
            ends - starts)

    def lipschitz(self, samples: Samples) -> Array:
        return group_sums(self._weighted(self.loss.lipschitz(self.samples)), self.labels,
                          samples.n_users)

    def strong_convexity(self, samples: Samples) -> Array:
        return group_sums(self._weighted(self.loss.strong_convexity(self.samples)), self.labels,
                          samples.n_users)
