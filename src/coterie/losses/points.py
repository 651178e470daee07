"""Distances to points: convex clustering."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from coterie.base.types import Array, Indices
from coterie.data.summary import Task
from coterie.data.users import Block, Participants, Users
from coterie.losses.base import (
    NOISE,
    SUMS,
    DualBounds,
    Evaluation,
    Magnitudes,
    Samples,
    require_positive,
)
from coterie.losses.blocks import BlockLoss
from coterie.losses.frame import Frame


class _Point(BlockLoss):
    """The model is itself a point, compared with the user's rows; targets, if any, are ignored."""

    task: ClassVar[Task | None] = "clustering"

    def dim(self, users: Participants) -> int:
        return users.n_features

    def frame(self, users: Users) -> Frame | None:
        return Frame.of(users, centred=True, sign=0.0, outputs=0)

    def lipschitz(self, samples: Samples) -> Array:
        return np.ones(samples.n_users)

    def _sizes(self, samples: Samples) -> Array:
        # About the mean of the user's own rows.
        centres = self.evaluate_local(samples, np.zeros((samples.n_users, samples.dim)),
                                      1).gradients
        offsets = samples.users.data.moments().means
        return np.abs(self.evaluate_local(samples, -centres, 0).values) + NOISE \
            * (offsets**2).sum(axis=1)

    def upper_hessians(self, samples: Samples) -> Array:
        return np.broadcast_to(np.eye(samples.dim), (samples.n_users, samples.dim, samples.dim))

    def magnitudes_block(self, block: Block, models: Array) -> Magnitudes:
        values = self.evaluate_block(block, models, 0).values
        gaps = models[:, None, :] - block.features
        weights = (block.weights * self.pull(np.linalg.norm(gaps, axis=2)))[:, None, :]
        slopes = (weights @ np.abs(gaps))[:, 0]
        inside = (weights @ (np.abs(models)[:, None, :] + np.abs(block.features)))[:, 0]
        return Magnitudes(np.abs(values), slopes, slopes + inside)

    def pull(self, r: Array) -> Array:
        """h'(r) / r of a distance r."""
        return np.ones_like(r)


@dataclass(frozen=True, kw_only=True)
class SquaredDistance(_Point):
    """f_i(x) = mean_j ||x - a_ij||^2 / 2: convex clustering of points, or of users by their means.

    Example
    -------
    >>> import coterie as ct
    >>> users = ct.Users.from_arrays([[0.0], [1.0], [9.0]])  # every row is a user
    >>> ct.solve(ct.Problem(users, ct.SquaredDistance(), lam=1.0)).labels.tolist()
    [0, 0, 1]
    """

    least: ClassVar[float] = 0.0
    quadratic: ClassVar[bool] = True

    def evaluate_block(self, block: Block, models: Array, order: int) -> Evaluation:
        gaps = models[:, None, :] - block.features
        values = 0.5 * (block.weights * (gaps**2).sum(axis=2)).sum(axis=1)
        gradients = (block.weights[:, None, :] @ gaps)[:, 0]
        hessians = np.broadcast_to(np.eye(models.shape[1]), (*models.shape, models.shape[1]))
        return Evaluation(values, gradients, hessians)

    def strong_convexity(self, samples: Samples) -> Array:
        return np.ones(samples.n_users)

    def dual_bounds(self, samples: Samples, slopes: Array, start: Array | None = None,
                    users: Indices | None = None, about: Array | None = None) -> DualBounds:
        # With c the mean of the rows: f(x) = f(c) + ||x - c||^2 / 2, so f*(u) = <u, c> + ||u||^2 /
        # 2 - f(c).
        who = np.arange(samples.n_users) if users is None else users
        origin = np.zeros_like(slopes) if about is None else about
        origin = origin if samples.frame is None else samples.frame.enter(origin, who)
        centres = -self.evaluate_local(samples, np.zeros_like(slopes), 1, users).gradients
        values = self.evaluate_local(samples, centres, 0, users).values
        step = centres - origin + 0.5 * slopes
        rounding = np.abs(values) \
            + (np.abs(slopes) * (np.abs(centres) + np.abs(origin) + np.abs(slopes))).sum(axis=1)
        return DualBounds(np.einsum("nd,nd->n", slopes, step) - values, SUMS * rounding,
                          np.zeros(len(slopes)))

    def conic(self, cp: ModuleType, samples: Samples, x: Any) -> Any:
        users = samples.users.data
        weights = np.repeat(np.sqrt(1.0 / users.counts[users.owner]), samples.dim)
        gaps = x[_columns(users, samples.dim)] - users.features.ravel()
        return 0.5 * cp.sum_squares(cp.multiply(weights, gaps))


@dataclass(frozen=True, kw_only=True)
class HuberDistance(_Point):
    """f_i(x) = mean_j h(||x - a_ij||), h(r) = r^2/2 up to delta, then delta (r - delta/2): far rows
    pull no harder.

    Parameters
    ----------
    delta : distance from a row beyond which the loss grows linearly.

    Raises
    ------
    InvalidInput : where `delta` is not a finite number > 0.

    Example
    -------
    >>> import numpy as np
    >>> import coterie as ct
    >>> users = ct.Users.from_arrays([[0.0], [10.0]])
    >>> loss = ct.HuberDistance(delta=1.0)
    >>> loss.gradients(loss.prepare(users), np.array([[0.5], [0.5]])).tolist()
    [[0.5], [-1.0]]
    """

    least: ClassVar[float] = 0.0

    delta: float = 1.0

    def __post_init__(self) -> None:
        require_positive("delta", self.delta)

    def evaluate_block(self, block: Block, models: Array, order: int) -> Evaluation:
        gaps = models[:, None, :] - block.features
        r = np.linalg.norm(gaps, axis=2)
        near = np.minimum(r, self.delta)
        far = r > self.delta
        pull = self.pull(r)
        values = (block.weights * near * (r - 0.5 * near)).sum(axis=1)
        weights = block.weights * pull
        gradients = (weights[:, None, :] @ gaps)[:, 0]
        hessians = np.empty(0)
        # Near rows: I; far rows: pull (u'u I - u u'), u = gap / r, never negative whatever rounding
        # does.
        if order > 1:
            units = np.where(far, np.sqrt(weights) / np.where(far, r, 1.0), 0.0)[..., None] * gaps
            outer = units.swapaxes(1, 2) @ units
            level = np.where(far, 0.0, weights).sum(axis=1) + np.trace(outer, axis1=1, axis2=2)
            hessians = level[:, None, None] * np.eye(models.shape[1]) - outer
        return Evaluation(values, gradients, hessians)

    def pull(self, r: Array) -> Array:
        return self.delta / np.maximum(r, self.delta)

    def conic(self, cp: ModuleType, samples: Samples, x: Any) -> Any:
        users = samples.users.data
        gaps = cp.reshape(x[_columns(users, samples.dim)], users.features.shape, order="C") \
            - users.features
        return (0.5 / users.counts[users.owner]) @ cp.huber(cp.norm(gaps, 2, axis=1), self.delta)


def _columns(users: Users, dim: int) -> Any:
    """For every row, the positions of its user's model in the vector of all models."""
    return (users.owner[:, None] * dim + np.arange(dim)).ravel()
