"""Losses of one margin: squared hinge, logistic, squared, Huber, Poisson."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from coterie.base.types import Array
from coterie.data.users import Users
from coterie.losses.affine import LinearLoss
from coterie.losses.base import Samples, need_targets
from coterie.losses.targets import one_class_concern, refuse_targets, require_positive


class _Binary(LinearLoss):
    """Targets -1 and +1; the sign of the margin is the prediction."""

    def check_targets(self, users: Users) -> None:
        y = need_targets(self, users)
        zero_one = bool(np.isin(y, (0.0, 1.0)).all())
        refuse_targets(users, np.abs(y) != 1.0, "the labels -1 and +1",
                "Labels 0 and 1 become -1 and +1 by 2 * y - 1" if zero_one
                else "Encode the two classes as -1 and +1; for more classes use Multinomial()")

    def concerns(self, users: Users) -> list[str]:
        return one_class_concern(users)

    def predict(self, features: Array, models: Array) -> Array:
        return np.where(self.decision(features, models) >= 0, 1.0, -1.0)


@dataclass(frozen=True, kw_only=True)
class SquaredHinge(_Binary):
    """phi(t, y) = max(0, 1 - y t)^2 with t = <w, a> - b: the loss of the paper's experiments.

    Targets are -1 and +1.

    Parameters
    ----------
    ridge, intercept, penalize_intercept : as for every `AffineLoss`.

    Example
    -------
    >>> import numpy as np
    >>> import coterie as ct
    >>> users = ct.Users.from_arrays([[1.0], [-1.0]], [1, -1], ["ann", "ann"])
    >>> loss = ct.SquaredHinge(ridge=0.0)
    >>> loss.values(loss.prepare(users), np.array([[0.5, 0.0]])).tolist()
    [0.25]
    """

    least: ClassVar[float] = 0.0
    intercept_sign: ClassVar[float] = -1.0
    max_curvature: ClassVar[float] = 2.0

    def value(self, t: Array, y: Array) -> Array:
        return np.maximum(0.0, 1.0 - y * t) ** 2

    def slope(self, t: Array, y: Array) -> Array:
        return -2.0 * y * np.maximum(0.0, 1.0 - y * t)

    def curvature(self, t: Array, y: Array) -> Array:
        return 2.0 * (y * t < 1.0)

    def conjugate(self, a: Array, y: Array) -> Array:
        q = -y * a
        return np.where(q >= 0, 0.25 * q**2 - q, np.inf)

    def conic_terms(self, cp: ModuleType, t: Any, y: Array) -> Any:
        return cp.square(cp.pos(1 - cp.multiply(y, t)))


@dataclass(frozen=True, kw_only=True)
class Logistic(_Binary):
    """phi(t, y) = log(1 + exp(-y t)): binary classification with probabilities.

    Targets are -1 and +1.

    Parameters
    ----------
    ridge, intercept, penalize_intercept : as for every `AffineLoss`.

    Example
    -------
    >>> import numpy as np
    >>> import coterie as ct
    >>> ct.Logistic().predict(np.array([[2.0], [-2.0]]),
    ...                       np.array([[1.0, 0.5], [1.0, 0.5]])).tolist()
    [1.0, -1.0]
    """

    least: ClassVar[float] = 0.0
    max_curvature: ClassVar[float] = 0.25

    def value(self, t: Array, y: Array) -> Array:
        z = -y * t  # log(1 + exp(z)) = max(z, 0) + log(1 + exp(-|z|))
        return np.maximum(z, 0.0) + np.log1p(np.exp(-np.abs(z)))

    def slope(self, t: Array, y: Array) -> Array:
        z = -y * t
        small = np.exp(-np.abs(z))
        return -y * (np.maximum(small, z >= 0.0) / (1.0 + small))

    def curvature(self, t: Array, y: Array) -> Array:
        small = np.exp(-np.abs(-y * t))
        return small / (1.0 + small) ** 2

    def conjugate(self, a: Array, y: Array) -> Array:
        q = -y * a  # q log q + (1 - q) log(1 - q)
        return np.where((q >= 0) & (q <= 1), -entropy(q) - entropy(1.0 - q), np.inf)

    def conic_terms(self, cp: ModuleType, t: Any, y: Array) -> Any:
        return cp.logistic(-cp.multiply(y, t))


@dataclass(frozen=True, kw_only=True)
class Squared(LinearLoss):
    """phi(t, y) = (t - y)^2 / 2: least squares.

    Parameters
    ----------
    ridge, intercept, penalize_intercept : as for every `AffineLoss`.

    Example
    -------
    >>> import coterie as ct
    >>> users = ct.Users.from_arrays([[0.0], [1.0], [2.0]], [1.0, 3.0, 5.0], ["ann", "ann", "ann"])
    >>> loss = ct.Squared(ridge=0.0)
    >>> loss.local(loss.prepare(users)).points.round(6).tolist()  # y = 2 a + 1
    [[2.0, 1.0]]
    """

    least: ClassVar[float] = 0.0
    quadratic: ClassVar[bool] = True
    max_curvature: ClassVar[float] = 1.0

    def check_targets(self, users: Users) -> None:
        need_targets(self, users)

    def value(self, t: Array, y: Array) -> Array:
        return 0.5 * (t - y) ** 2

    def slope(self, t: Array, y: Array) -> Array:
        return t - y

    def curvature(self, t: Array, y: Array) -> Array:
        return t**0

    def conjugate(self, a: Array, y: Array) -> Array:
        return a * (0.5 * a + y)

    def neutral(self, users: Users) -> Array:
        return target_means(self, users)

    def strong_convexity(self, samples: Samples) -> Array:
        low, high = self._gram_ends(samples)
        return np.where(low > 1e-12 * high, low * (1 - 1e-12), 0.0)

    def conic_terms(self, cp: ModuleType, t: Any, y: Array) -> Any:
        return 0.5 * cp.square(t - y)


@dataclass(frozen=True, kw_only=True)
class Huber(LinearLoss):
    """phi(t, y) = r^2/2 for r = |t - y| <= delta, else delta (r - delta/2): least squares that
    outliers cannot rule.

    Parameters
    ----------
    ridge, intercept, penalize_intercept : as for every `AffineLoss`.
    delta : distance from the target beyond which the loss grows linearly; in the units of the
        target.

    Raises
    ------
    InvalidInput : where `delta` is not a finite number > 0.

    Example
    -------
    >>> import numpy as np
    >>> import coterie as ct
    >>> ct.Huber(delta=1.0).value(np.array([0.5, 3.0]), np.array([0.0, 0.0])).tolist()
    [0.125, 2.5]
    """

    least: ClassVar[float] = 0.0

    delta: float = 1.0
    max_curvature: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("delta", self.delta)

    def check_targets(self, users: Users) -> None:
        need_targets(self, users)

    def neutral(self, users: Users) -> Array:
        return target_means(self, users)

    def value(self, t: Array, y: Array) -> Array:
        r = np.abs(t - y)
        near = np.minimum(r, self.delta)
        return near * (r - 0.5 * near)

    def slope(self, t: Array, y: Array) -> Array:
        return np.minimum(np.maximum(t - y, -self.delta), self.delta)

    def curvature(self, t: Array, y: Array) -> Array:
        return 1.0 * (np.abs(t - y) <= self.delta)

    def conjugate(self, a: Array, y: Array) -> Array:
        return np.where(np.abs(a) <= self.delta, a * (0.5 * a + y), np.inf)

    def conic_terms(self, cp: ModuleType, t: Any, y: Array) -> Any:
        return 0.5 * cp.huber(t - y, self.delta)


@dataclass(frozen=True, kw_only=True)
class Poisson(LinearLoss):
    """phi(t, y) = exp(t) - y t: counts with mean exp(t); no global Lipschitz bound exists.

    Targets are numbers >= 0.

    Parameters
    ----------
    ridge, intercept, penalize_intercept : as for every `AffineLoss`.

    Example
    -------
    >>> import numpy as np
    >>> import coterie as ct
    >>> means = ct.Poisson().predict(np.array([[2.0]]), np.array([[0.5, -1.0]]))
    >>> means.tolist()  # exp(0.5 * 2 - 1)
    [1.0]
    """

    def check_targets(self, users: Users) -> None:
        refuse_targets(users, need_targets(self, users) < 0, "counts >= 0",
                "Counts cannot be negative; for any real target use Squared() or Huber()")

    def value(self, t: Array, y: Array) -> Array:
        return np.exp(t) - y * t

    def slope(self, t: Array, y: Array) -> Array:
        return np.exp(t) - y

    def curvature(self, t: Array, y: Array) -> Array:
        return np.exp(t)

    def conjugate(self, a: Array, y: Array) -> Array:
        return np.where(a + y >= 0, -entropy(a + y) - (a + y), np.inf)

    def predict(self, features: Array, models: Array) -> Array:
        return np.exp(self.decision(features, models))

    def conic_terms(self, cp: ModuleType, t: Any, y: Array) -> Any:
        return cp.exp(t) - cp.multiply(y, t)


def entropy(q: Array) -> Array:
    """-q log q, and 0 for q = 0; numbers below 0 count as 0."""
    q = np.maximum(q, 0.0)
    return -q * np.log(np.where(q > 0, q, 1.0))


def target_means(loss: LinearLoss, users: Users) -> Array:
    """(n_users,) the mean target of each user, exact where all targets are equal."""
    y, starts = need_targets(loss, users), users.offsets[:-1]
    return np.asarray(y[starts] + np.add.reduceat(y - y[starts][users.owner], starts)
                      / users.counts)
