"""One run of a method: data, random numbers, shared computations, and the count of the numbers
sent.

Every exact fit below is Newton's method, batched over users or clusters. If a loss has no minimum
(a user with one class only and an intercept that is not penalised), NO_MINIMUM/2 ||x||^2 is added
for the users concerned.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from coterie.base.errors import Incompatible
from coterie.base.types import Array, Indices, Ints
from coterie.data.users import Participants
from coterie.losses import AffineLoss, Evaluation, Loss, Samples
from coterie.losses.derived import Grouped
from coterie.losses.newton import minimise

NO_MINIMUM = 1e-8


@dataclass(eq=False)
class BaselineRun:
    """The input of `Baseline._fit`. `memo` is kept between runs while settings are tuned on the
    same data.
    """

    loss: Loss
    samples: Samples
    rng: np.random.Generator
    clusters: Ints | None
    memo: dict[Any, Any] = field(default_factory=dict)
    rounds: int = 0
    floats_up: int = 0
    floats_down: int = 0

    @property
    def n_users(self) -> int:
        return self.samples.n_users

    @property
    def dim(self) -> int:
        return self.samples.dim

    def exchange(self, *, down: int, up: int, users: int | None = None, rounds: int = 1) -> None:
        """Count rounds in which each of `users` users (default: all) receives `down` numbers and
        sends `up`.
        """
        n = (self.n_users if users is None else users) * rounds
        self.rounds, self.floats_down, self.floats_up = self.rounds + rounds, \
            self.floats_down + n * down, self.floats_up + n * up

    def once(self, key: Hashable, compute: Callable[[], Array]) -> Array:
        """The stored result of `compute` for this key, computed if needed; its traffic is counted
        in both cases.
        """
        if key not in self.memo:
            before = self.rounds, self.floats_up, self.floats_down
            result = compute()
            after = self.rounds, self.floats_up, self.floats_down
            self.memo[key] = result, tuple(b - a for a, b in zip(before, after, strict=True))
            return result
        result, (rounds, up, down) = self.memo[key]
        self.rounds, self.floats_up, self.floats_down = self.rounds + rounds, self.floats_up + up, \
            self.floats_down + down
        return result

    def own(self, ridge: float = 0.0) -> Array:
        """(n_users, dim) the minimum of f_i for each user."""
        return self.once(("own", ridge), lambda: own_models(ridged(self.loss, ridge), self.samples))

    def held(self, ridge: float) -> Array:
        """(n_users, dim) the minimum of f_i + ridge/2 ||x||^2 for each user, intercept included."""
        return self.once(("held", ridge), lambda: self.loss.prox(self.samples, None, ridge,
            None).points)

    def pool(self, labels: Ints, n_clusters: int, ridge: float = 0.0,
             start: Array | None = None) -> Array:
        """(n_clusters, dim) the minimum of sum_{i in cluster} f_i for each cluster; an empty
        cluster keeps `start`.

        A round is one evaluation: the users of the clusters receive dim numbers and send 1, 1 + dim
        or 1 + dim + dim (dim + 1) / 2 numbers, depending on whether Newton's method needs the
        value, the gradient, or also the Hessian.
        """
        grouped = _Counted(loss=ridged(self.loss, ridge), samples=self.samples, labels=labels,
                           run=self)
        begin = np.zeros((n_clusters, self.dim)) if start is None else start
        return own_models(grouped, grouped.prepare(Participants(range(n_clusters))), begin)

    def losses(self, models: Array) -> Array:
        """(n_users, k) the loss of every user with each of k models."""
        return losses(self.loss, self.samples, models)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Counted(Grouped):
    """Clusters; each evaluation is counted as a round of their users."""

    run: BaselineRun

    def evaluate(self, samples: Samples, models: Array, order: int = 2,
                 users: Indices | None = None) -> Evaluation:
        d, members = samples.dim, len(self.labels) if users is None else int(np.isin(self.labels,
            users).sum())
        self.run.exchange(down=d, up=(1, 1 + d, 1 + d + d * (d + 1) // 2)[order], users=members)
        return super().evaluate(samples, models, order, users)


def own_models(loss: Loss, samples: Samples, start: Array | None = None) -> Array:
    """The minimum of f_i for each user, or of f_i + NO_MINIMUM/2 ||x||^2 if f_i has none."""
    result = loss.local(samples, None, start)
    points, failed = result.points, np.flatnonzero(~result.converged)
    if failed.size:
        points[failed] = loss.prox(samples, None, NO_MINIMUM, None, users=failed).points
    return points


def ridged(loss: Loss, ridge: float) -> Loss:
    """The loss with `ridge` added to its own."""
    if ridge == 0:
        return loss
    if not isinstance(loss, AffineLoss):
        raise Incompatible(f"{type(loss).__name__} has no ridge. Set ridge to 0.")
    return replace(loss, ridge=loss.ridge + ridge)


def near(loss: Loss, samples: Samples, metrics: Array, centres: Array,
         start: Array | None = None) -> Array:
    """minimise_x f_i(x) + 1/2 (x - centres_i)' metrics_i (x - centres_i) for each user i."""
    n = samples.n_users
    metrics = np.broadcast_to(metrics, (n, samples.dim, samples.dim))

    def evaluate(rows: Indices, x: Array, order: int) -> tuple[Array, Array, Array]:
        # a trial point with overflow is rejected.
        with np.errstate(over="ignore", invalid="ignore"):
            f, g, h = loss.evaluate(samples, x, order, rows)
            shift = x - centres[rows]
            pull = np.einsum("nde,ne->nd", metrics[rows], shift)
            return (f + 0.5 * np.einsum("nd,nd->n", shift, pull), g + pull if order > 0 else g,
                    h + metrics[rows] if order > 1 else h)

    return minimise(evaluate, np.broadcast_to(centres if start is None else start,
                                              (n, samples.dim))).points


def losses(loss: Loss, samples: Samples, models: Array) -> Array:
    """(n_users, k) the loss of every user with each of k models; inf if it exceeds float64."""
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.stack([loss.values(samples, np.broadcast_to(m, (samples.n_users, samples.dim)))
                           for m in models], 1)
    return np.where(np.isnan(values), np.inf, values)


def least_loss(loss: Loss, samples: Samples, models: Array) -> Ints:
    """(n_users,) which of k models has the least loss for each user."""
    return losses(loss, samples, models).argmin(axis=1)
