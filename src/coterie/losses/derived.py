"""Losses made of others: second-order models, sums over groups, and losses of users elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from coterie.base.errors import Incompatible, InvalidInput
from coterie.base.labels import group_sums
from coterie.base.types import Array, Indices, Ints
from coterie.data.users import Participants, Users
from coterie.losses.base import SUMS, DualBounds, Evaluation, Loss, Samples
from coterie.losses.curvature import (
    GroupCurvature,
    ScaledCurvature,
    Span,
    SpanCurvature,
    WideEvaluation,
)
from coterie.losses.newton import Minimum
from coterie.losses.rows import minimise_wide


@dataclass(frozen=True, kw_only=True, eq=False)
class Quadratic(Loss):
    """A quadratic function for each user; no data are needed.

        f_i(x) = value_i + <gradient_i, x - point_i> + 1/2 (x - point_i)' hessian_i (x - point_i)

    Parameters
    ----------
    point : (n_users, dim) where each function is known.
    value, gradient, hessian : (n_users,), (n_users, dim) and (n_users, dim, dim) there; Hessians
        are positive semidefinite.

    Example
    -------
    >>> import numpy as np
    >>> from coterie.data.users import Participants, Users
    >>> from coterie.losses.derived import Quadratic
    >>> loss = Quadratic(point=np.zeros((1, 2)), value=np.ones(1), gradient=np.ones((1, 2)),
    ...                  hessian=np.eye(2)[None])
    >>> loss.local(loss.prepare(Participants(["ann"]))).points.tolist()
    [[-1.0, -1.0]]
    """

    quadratic: ClassVar[bool] = True
    point: Array
    value: Array
    gradient: Array
    hessian: Array

    def dim(self, users: Participants) -> int:
        return int(self.point.shape[1])

    def prepare(self, users: Participants) -> Samples:
        if users.n_users != len(self.point):
            raise InvalidInput(f"expected {len(self.point)} users, one for each function, got "
                               f"{users.n_users}",
                               remedy="Give the users these functions belong to")
        return super().prepare(users)

    def evaluate(self, samples: Samples, models: Array, order: int = 2,
                 users: Indices | None = None) -> Evaluation:
        parts = (self.point, self.value, self.gradient, self.hessian)
        point, value, gradient, hessian = parts if users is None else (part[users]
            for part in parts)
        steps = models - point
        changes = (hessian @ steps[..., None])[..., 0]  # of the gradient
        return Evaluation(value + np.einsum("nd,nd->n", gradient + 0.5 * changes, steps),
                          gradient + changes, hessian)

    def strong_convexity(self, samples: Samples) -> Array:
        return np.maximum(np.linalg.eigvalsh(self.hessian)[:, 0] * (1 - 1e-9), 0.0)

    def lipschitz(self, samples: Samples) -> Array:
        return np.asarray(np.linalg.eigvalsh(self.hessian)[:, -1] * (1 + 1e-12))


@dataclass(frozen=True, kw_only=True, eq=False)
class SpanQuadratic(Loss):
    """A quadratic function for each user, with a Hessian as in the module; no data are needed.

    Parameters
    ----------
    point, value, gradient : as for `Quadratic`.
    span : the Hessians.

    Example
    -------
    >>> from coterie.data.users import Participants, Users
    >>> loss = SpanQuadratic(point=np.zeros((1, 2)), value=np.ones(1), gradient=np.ones((1, 2)),
    ...                      span=Span(np.array([[[1.0, 0.0]]]), np.ones((1, 1, 1)),
    ...                                np.full((1, 1), 3.0), np.ones(1), np.ones(1)))
    >>> loss.local(loss.prepare(Participants(["ann"]))).points.tolist()
    [[-0.25, -1.0]]
    """

    quadratic: ClassVar[bool] = True
    point: Array
    value: Array
    gradient: Array
    span: Span

    @cached_property
    def hessian(self) -> SpanCurvature:
        """The Hessians as operators."""
        return SpanCurvature(self.span)

    def _hessians(self, users: Indices | None) -> SpanCurvature:
        everyone = users is None or np.array_equal(users, np.arange(len(self.point)))
        return self.hessian if users is None or everyone else SpanCurvature(self.span.take(users))

    def dim(self, users: Participants) -> int:
        return int(self.point.shape[1])

    def prepare(self, users: Participants) -> Samples:
        if users.n_users != len(self.point):
            raise InvalidInput(f"expected {len(self.point)} users, one for each function, got "
                               f"{users.n_users}",
                               remedy="Give the users these functions belong to")
        return super().prepare(users)

    def wide(self, samples: Samples) -> bool:
        return True

    def expand(self, samples: Samples, models: Array,
               users: Indices | None = None) -> WideEvaluation:
        """Values, gradients and Hessians as operators."""
        values, gradients, _ = self.evaluate(samples, models, 1, users)
        return values, gradients, self._hessians(users)

    def evaluate(self, samples: Samples, models: Array, order: int = 2,
                 users: Indices | None = None) -> Evaluation:
        if order > 1:
            raise Incompatible("Hessians of wide models are operators: use `expand`.")
        who = slice(None) if users is None else users
        steps = models - self.point[who]
        changes = self._hessians(users).times(steps)
        slopes = self.gradient[who]
        return Evaluation(self.value[who] + np.einsum("nd,nd->n", slopes + 0.5 * changes, steps),
                          slopes + changes, np.empty(0))

    def local(self, samples: Samples, slopes: Array | None = None, start: Array | None = None,
              users: Indices | None = None) -> Minimum:
        who = np.arange(samples.n_users) if users is None else users
        u = np.zeros((len(who), samples.dim)) if slopes is None else slopes
        points, values = self._best(samples, u, who)
        return Minimum(points, values, np.zeros(len(who)), np.ones(len(who), dtype=bool))

    def _best(self, samples: Samples, slopes: Array, who: Indices) -> tuple[Array, Array]:
        """The minima of f - <slopes, x>, and the values there."""
        inverse = self._hessians(who).inverse(np.zeros(len(who)))
        points = self.point[who]
        for _ in range(2):  # the second step removes what rounding left of the first one
            points = points - inverse(self.evaluate(samples, points, 1, who).gradients - slopes)
        values = self.evaluate(samples, points, 0, who).values
        return points, values - np.einsum("nd,nd->n", slopes, points)

    def dual_bounds(self, samples: Samples, slopes: Array, start: Array | None = None,
                    users: Indices | None = None, about: Array | None = None) -> DualBounds:
        who = np.arange(samples.n_users) if users is None else users
        points, values = self._best(samples, slopes, who)
        shift = np.zeros(len(who)) if about is None else np.einsum("nd,nd->n", slopes, about)
        rounding = self.value_rounding(samples, points, who) + SUMS * (
            np.abs(slopes * points).sum(axis=1) + np.abs(shift))
        return DualBounds(-values - shift, rounding, np.zeros(len(who)))

    def value_rounding(self, samples: Samples, models: Array,
                       users: Indices | None = None) -> Array:
        who = slice(None) if users is None else users
        steps = models - self.point[who]
        changes = self._hessians(users).times(steps)
        return SUMS * (np.abs(self.value[who]) + (
            np.abs(steps) * (np.abs(self.gradient[who]) + np.abs(changes))).sum(axis=1))


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
    >>> from coterie.losses.derived import Grouped
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
                            if k <= order else part for k, part in enumerate(parts)))

    def wide(self, samples: Samples) -> bool:
        return self.loss.wide(self.samples)

    def expand(self, samples: Samples, models: Array,
               users: Indices | None = None) -> WideEvaluation:
        members, owner = (None, self.labels) if users is None else self._members(users)
        f, g, curvature = self.loss.expand(self.samples, models[owner], members)
        weights = self._weighted(np.ones(len(owner)), members)
        values, gradients = (group_sums(self._weighted(part, members), owner, len(models))
                             for part in (f, g))
        return values, gradients, GroupCurvature(curvature, owner, weights, len(models))

    def prox(self, samples: Samples, linear: Array | None, t: Array | float, centres: Array | None,
             start: Array | None = None, users: Indices | None = None) -> Minimum:
        if not self.wide(samples):
            return super().prox(samples, linear, t, centres, start, users)
        return minimise_wide(self, samples, linear, t, centres, start, users)

    def dual_bounds(self, samples: Samples, slopes: Array, start: Array | None = None,
                    users: Indices | None = None, about: Array | None = None) -> DualBounds:
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
        starts, ends = (np.searchsorted(ordered, groups, side) for side in ("left", "right"))
        members = [order[start:end] for start, end in zip(starts, ends, strict=True)]
        return np.concatenate([order[:0], *members]), np.repeat(np.arange(len(groups)),
            ends - starts)

    def lipschitz(self, samples: Samples) -> Array:
        return group_sums(self._weighted(self.loss.lipschitz(self.samples)), self.labels,
                          samples.n_users)

    def strong_convexity(self, samples: Samples) -> Array:
        return group_sums(self._weighted(self.loss.strong_convexity(self.samples)), self.labels,
                          samples.n_users)


@dataclass(frozen=True, kw_only=True, eq=False)
class Weighted(Loss):
    """w_i f_i with w_i = rows of user i / unit: every row counts alike, not every user.

    Parameters
    ----------
    loss : of a user.
    unit : the number of rows that count as one user; one for each user where their noise differs.

    Example
    -------
    >>> import coterie as ct
    >>> from coterie.losses.derived import Weighted
    >>> users = ct.Users.from_arrays([[0.0], [0.0], [3.0]], user=["ann", "ann", "bob"])
    >>> ct.solve(ct.Problem(users, Weighted(loss=ct.SquaredDistance(), unit=1.5), lam=9.0)).models
    array([[1.],
           [1.]])
    """

    loss: Loss
    unit: float | Array
    counts_rows: ClassVar[bool] = True

    @property
    def quadratic(self) -> bool:  # type: ignore[override]
        return self.loss.quadratic

    @property
    def least(self) -> float:  # type: ignore[override]
        return 0.0 if self.loss.least >= 0 else -np.inf

    @property
    def own_loss(self) -> Loss:
        return self.loss.own_loss

    @property
    def rows_per_user(self) -> float | Array:
        return self.unit

    def _weights(self, samples: Samples, users: Indices | None) -> Array:
        weights = np.asarray(samples.users.sizes / self.unit)
        return weights if users is None else weights[users]

    def dim(self, users: Participants) -> int:
        return self.loss.dim(users)

    def prepare(self, users: Participants) -> Samples:
        return self.loss.prepare(users)

    def concerns(self, users: Users) -> list[str]:
        return self.loss.concerns(users)

    def wide(self, samples: Samples) -> bool:
        return self.loss.wide(samples)

    def expand(self, samples: Samples, models: Array,
               users: Indices | None = None) -> WideEvaluation:
        w, (f, g, h) = self._weights(samples, users), self.loss.expand(samples, models, users)
        return w * f, w[:, None] * g, ScaledCurvature(h, w)

    def evaluate(self, samples: Samples, models: Array, order: int = 2,
                 users: Indices | None = None) -> Evaluation:
        w = self._weights(samples, users)
        f, g, h = self.loss.evaluate(samples, models, order, users)
        return Evaluation(w * f, w[:, None] * g if order > 0 else g,
                          w[:, None, None] * h if order > 1 else h)

    def prox(self, samples: Samples, linear: Array | None, t: Array | float, centres: Array | None,
             start: Array | None = None, users: Indices | None = None) -> Minimum:
        w = self._weights(samples, users)
        part = None if linear is None else linear / w[:, None]
        best = self.loss.prox(samples, part, t / w, centres, start, users)
        return best._replace(values=w * best.values)

    def dual_bounds(self, samples: Samples, slopes: Array, start: Array | None = None,
                    users: Indices | None = None, about: Array | None = None) -> DualBounds:
        """(w f)*(u) = w f*(u / w)."""
        w = self._weights(samples, users)
        bounds = self.loss.dual_bounds(samples, slopes / w[:, None], start, users, about)
        return DualBounds(*(w * part for part in bounds))

    def value_rounding(self, samples: Samples, models: Array,
                       users: Indices | None = None) -> Array:
        return self._weights(samples, users) * self.loss.value_rounding(samples, models, users)

    def sizes(self, samples: Samples) -> Array:
        return self._weights(samples, None) * self.loss.sizes(samples)

    def lipschitz(self, samples: Samples) -> Array:
        return self._weights(samples, None) * self.loss.lipschitz(samples)

    def strong_convexity(self, samples: Samples) -> Array:
        return self._weights(samples, None) * self.loss.strong_convexity(samples)

    def decision(self, features: Array, models: Array) -> Array:
        return self.loss.decision(features, models)

    def predict(self, features: Array, models: Array) -> Array:
        return self.loss.predict(features, models)


@dataclass(frozen=True, kw_only=True, eq=False)
class Remote(Loss):
    """A loss whose data are with their users: it can predict, and cannot be evaluated.

    Parameters
    ----------
    loss : the loss the users have.
    length : of a model.

    Example
    -------
    >>> import numpy as np
    >>> import coterie as ct
    >>> from coterie.losses.derived import Remote
    >>> Remote(loss=ct.Squared(), length=2).predict(np.array([[3.0]]),
    ...                                             np.array([[2.0, 1.0]])).tolist()
    [7.0]
    """

    loss: Loss
    length: int

    def dim(self, users: Participants) -> int:
        return self.length

    def evaluate(self, samples: Samples, models: Array, order: int = 2,
                 users: Indices | None = None) -> Evaluation:
        raise Incompatible("The data are with their users, so their losses cannot be evaluated "
                           "here.")

    @property
    def own_loss(self) -> Loss:
        return self.loss.own_loss

    @property
    def stated(self) -> Loss:
        return self.loss

    @property
    def rows_per_user(self) -> float | Array | None:
        return self.loss.rows_per_user

    def own_models(self, samples: Samples, models: Array, users: Indices | None = None) -> Array:
        if self.loss.personal:
            raise Incompatible("Users compute their personal models from their own data, which are "
                               "not here.")
        return models

    def decision(self, features: Array, models: Array) -> Array:
        return self.loss.decision(features, models)

    def predict(self, features: Array, models: Array) -> Array:
        return self.loss.predict(features, models)
