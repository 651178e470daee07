"""Losses of a margin: squared hinge, logistic, squared, Huber, Poisson; and softmax of several."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from coterie.base.errors import InvalidInput
from coterie.base.labels import sum_zero_basis
from coterie.base.types import Array, Ints
from coterie.data.summary import Task
from coterie.data.users import Block, Participants, Users
from coterie.losses.affine import AffineLoss, LinearLoss, margins_matrix, ridge_form
from coterie.losses.base import (
    Evaluation,
    Loss,
    Magnitudes,
    Samples,
    need_targets,
    one_class_concern,
    refuse_targets,
    require_positive,
)
from coterie.losses.blocks import BlockSamples, Terms
from coterie.losses.points import SquaredDistance


class _Binary(LinearLoss):
    """Targets -1 and +1; the sign of the margin is the prediction."""

    task: ClassVar[Task | None] = "classification"
    signs: ClassVar[bool] = True

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
        return np.multiply(2.0, y * t < 1.0)

    def conjugate(self, a: Array, y: Array) -> Array:
        q = -y * a
        return np.where(q >= 0, 0.25 * q**2 - q, np.inf)

    def shares(self, t: Array) -> Array:
        return np.clip((1 + t) / 2, 0, 1)

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

    log_odds: ClassVar[bool] = True
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

    def shares(self, t: Array) -> Array:
        return 0.5 + 0.5 * np.tanh(t / 2)

    def margin_of(self, mean: float) -> float:
        p = np.clip(0.5 + 0.5 * mean, 1e-6, 1 - 1e-6)
        return float(np.log(p / (1 - p)))

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

    task: ClassVar[Task | None] = "regression"
    least_squares: ClassVar[bool] = True
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

    task: ClassVar[Task | None] = "regression"
    least_squares: ClassVar[bool] = True
    least: ClassVar[float] = 0.0
    max_curvature: ClassVar[float] = 1.0
    delta: float = 1.0

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
        return np.multiply(1.0, np.abs(t - y) <= self.delta)

    def conjugate(self, a: Array, y: Array) -> Array:
        return np.where(np.abs(a) <= self.delta, a * (0.5 * a + y), np.inf)

    def in_unit(self, unit: float) -> Self:
        return replace(self, delta=self.delta / unit)

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

    task: ClassVar[Task | None] = "counts"

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

    def margin_of(self, mean: float) -> float:
        return float(np.log(max(mean, 1e-6)))

    def squares(self, users: Users, models: Array) -> Array:
        # Rows have the weight that they have in the slope of the loss, curvature |row|^2: where
        # counts vary most among the largest, slopes do, too, and models seem to differ.
        y, t = need_targets(self, users), self.decision(users.features, models[users.owner])
        lengths = (users.features**2).sum(axis=1) + 1.0
        sums = [np.bincount(users.owner, part * lengths, users.n_users)
                for part in (self.slope(t, y) ** 2, self.curvature(t, y))]
        return np.asarray(users.counts * sums[0] / np.maximum(sums[1], 1e-300))

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


@dataclass(frozen=True, kw_only=True)
class Multinomial(AffineLoss):
    """log sum_c exp(t_c) - t_y with t = W' a + b in R^classes: softmax classification, targets 0,
    1, ..., classes - 1.

    Adding one number to all t_c changes nothing, so the models live in the subspace where the t_c
    sum to zero, in an orthonormal basis Q of it: t = Q' T with T of n_classes - 1 outputs. No class
    is singled out, distances between models do not depend on the order of the classes, and no
    direction is flat. A model is the (features, outputs) matrix of T in row-major order, its last
    row the intercepts.

    Parameters
    ----------
    ridge, intercept, penalize_intercept : as for every `AffineLoss`.
    n_classes : number of classes; by default one more than the largest target of all users.

    Example
    -------
    >>> import coterie as ct
    >>> users = ct.Users.from_arrays([[0.0], [1.0], [2.0]], [0, 1, 2], ["ann", "ann", "bob"])
    >>> ct.Multinomial().dim(users)  # (1 feature + 1 intercept) x (3 classes - 1)
    4
    """

    task: ClassVar[Task | None] = "classification"
    multiclass: ClassVar[bool] = True
    max_curvature: ClassVar[float] = 0.5
    log_odds: ClassVar[bool] = True
    least: ClassVar[float] = 0.0

    n_classes: int | None = None

    def check_targets(self, users: Users) -> None:
        y = need_targets(self, users)
        refuse_targets(users, (y < 0) | (y != np.floor(y)), "class numbers 0, 1, 2, ...",
                       "Number the classes from 0")
        n_classes = self._classes(users)
        refuse_targets(users, y >= n_classes, f"class numbers below n_classes = {n_classes}",
                       "Raise n_classes")
        if n_classes < 2:
            raise InvalidInput("expected at least two classes, got one",
                               remedy="Give n_classes when some are unseen")

    def concerns(self, users: Users) -> list[str]:
        unseen = np.setdiff1d(np.arange(self._classes(users)), need_targets(self, users))
        return one_class_concern(users) + [
            f"No user has a sample of class {c:g}: its intercept has no optimum, so no bound can "
            "be certified; lower n_classes or number the classes without gaps." for c in unseen[:1]]

    def _classes(self, users: Participants) -> int:
        return int(need_targets(self, users.data).max()) + 1 if self.n_classes is None \
            else self.n_classes

    def dim(self, users: Participants) -> int:
        return (users.n_features + self.intercept) * (self._classes(users) - 1)

    def evaluate_block(self, block: Block, models: Array, order: int) -> Evaluation:
        a, weights = block.features, block.weights
        n, _, p = a.shape
        k = models.shape[1] // p  # outputs
        basis = sum_zero_basis(k + 1)  # Q, (k, k + 1)
        ridges = self.ridges(block, models.shape[1])
        t = (a @ models.reshape(n, p, k)) @ basis
        top = t.max(axis=2, keepdims=True)
        exps = np.exp(t - top)
        sums = exps.sum(axis=2, keepdims=True)
        hot = np.eye(k + 1)[block.targets.astype(int)]
        values = (weights * ((np.log(sums) + top)[..., 0] - (hot * t).sum(axis=2))).sum(axis=1)
        values = values + 0.5 * (ridges * models**2).sum(axis=1)
        gradients, hessians = np.empty(0), np.empty(0)
        if order > 0:  # grad = A' diag(weights) (prob - hot) Q'
            prob = exps / sums
            slopes = weights[..., None] * ((prob - hot) @ basis.T)
            gradients = (a.swapaxes(1, 2) @ slopes).reshape(n, -1) + ridges * models
        # Block (k, l) of H = A' diag(weights * C_kl) A with C = Q (diag(prob) - prob prob') Q'.
        if order > 1:
            q = prob @ basis.T
            hessians = np.zeros((n, p, k, p, k))
            for u in range(k):
                for v in range(u + 1):
                    c = weights * (prob @ (basis[u] * basis[v]) - q[..., u] * q[..., v])
                    h = (c[..., None] * a).swapaxes(1, 2) @ a
                    hessians[:, :, u, :, v] = 0.5 * (h + h.swapaxes(1, 2))
                    hessians[:, :, v, :, u] = hessians[:, :, u, :, v]
            hessians = hessians.reshape(n, p * k, p * k) + ridges[..., None] * np.eye(p * k)
        return Evaluation(values, gradients, hessians)

    def output_basis(self, outputs: int) -> Array:
        return sum_zero_basis(outputs + 1)

    def row_terms(self, block: Block, t: Array) -> Terms:
        basis, rows = sum_zero_basis(t.shape[2] + 1), np.ix_(*map(range, block.targets.shape))
        classes, y = t @ basis, block.targets.astype(int)
        top = classes.max(axis=2, keepdims=True)
        prob = np.exp(classes - top)
        sums = prob.sum(axis=2, keepdims=True)
        prob /= sums
        values = (np.log(sums) + top)[..., 0] - classes[(*rows, y)]
        mass = block.weights[..., None] * prob
        slopes = mass.copy()
        slopes[(*rows, y)] -= block.weights
        return Terms(block.weights * values, slopes @ basis.T, mass)

    def row_duals(self, block: Block, t: Array, sums: Array | None) -> tuple[Array, Array]:
        basis, weights = sum_zero_basis(t.shape[2] + 1), block.weights[..., None]
        mass = self.row_terms(block, t).mass
        hot = weights * np.eye(len(basis) + 1)[block.targets.astype(int)]
        # P + W v with W = diag(P) - P P' / w, so that the sums are right; its rows keep theirs.
        if sums is not None:
            sign, total = block.features[..., -1:], mass.sum(axis=1)
            pairs = (mass / np.maximum(weights, 1e-300)).swapaxes(1, 2) @ mass
            system = basis @ (total[:, :, None] * np.eye(total.shape[1]) - pairs) @ basis.T
            start = mass
            for _ in range(2):  # the second time removes what the first one's rounding left
                lack = sums - (sign * ((mass - hot) @ basis.T)).sum(axis=1)
                v = (np.linalg.pinv(system, hermitian=True) @ lack[..., None])[..., 0] @ basis
                moves = sign * start * v[:, None]
                mass = mass + moves - start * moves.sum(axis=2, keepdims=True) \
                    / np.maximum(weights, 1e-300)
        share = mass / np.maximum(weights, 1e-300)
        conjugates = np.where((mass >= 0).all(axis=2), -entropy(share).sum(axis=2), np.inf)
        return (mass - hot) @ basis.T, np.where(block.weights > 0, block.weights * conjugates, 0.0)

    def magnitudes_block(self, block: Block, models: Array) -> Magnitudes:
        a, weights = block.features, block.weights
        n, _, p = a.shape
        k = models.shape[1] // p
        basis, hot = sum_zero_basis(k + 1), np.eye(k + 1)[block.targets.astype(int)]
        ridges = self.ridges(block, models.shape[1])
        t = (a @ models.reshape(n, p, k)) @ basis
        terms = (np.abs(a) @ np.abs(models).reshape(n, p, k)) @ np.abs(basis)
        exps = np.exp(t - t.max(axis=2, keepdims=True))
        prob = exps / exps.sum(axis=2, keepdims=True)
        values = (weights * (np.abs(t) * (prob + hot)).sum(axis=2)).sum(axis=1) \
            + weights.sum(axis=1)
        parts = (np.abs(prob - hot), prob * (1.0 - prob) * (np.abs(t) + terms))
        slopes, inside = ((np.abs(a).swapaxes(1, 2) @ (
            weights[..., None] * (part @ np.abs(basis).T))).reshape(n, -1) for part in parts)
        slopes = slopes + ridges * np.abs(models)
        return Magnitudes(values + 0.5 * (ridges * models**2).sum(axis=1), slopes, slopes + inside)

    def lipschitz(self, samples: Samples) -> Array:
        bounds = np.empty(samples.n_users)  # ||C|| <= 1/2, so ||H|| <= ||A'A|| / 2 + ridge
        for block in samples.users.data.blocks():
            rows = self.design(block.features, block.weights > 0)
            bounds[block.index] = 0.5 * np.linalg.norm(np.sqrt(block.weights)[..., None] * rows, 2,
                                                       axis=(1, 2)) ** 2
        return (bounds + self.ridge) * (1 + 1e-12)

    def decision(self, features: Array, models: Array) -> Array:
        rows, k = self.rows(features, models)
        return np.einsum("np,npk->nk", rows, models.reshape(len(rows), -1, k)) \
            @ sum_zero_basis(k + 1)

    def predict(self, features: Array, models: Array) -> Array:
        return self.decision(features, models).argmax(axis=1).astype(float)

    def conic(self, cp: ModuleType, samples: Samples, x: Any) -> Any:
        users = samples.users.data
        k = samples.dim // (users.n_features + self.intercept)  # outputs
        outputs = cp.vstack([margins_matrix(samples, self, k, u) @ x for u in range(k)])
        t = sum_zero_basis(k + 1).T @ outputs
        hot = np.eye(k + 1)[need_targets(self, users).astype(int)].T
        phi = cp.log_sum_exp(t, axis=0) - cp.sum(cp.multiply(hot, t), axis=0)
        return (1.0 / users.counts[users.owner]) @ phi + ridge_form(cp, self.ridge,
            self.shrunk(samples.dim, k), x)


#: The numbers by which compiled code knows the losses. Classes derived from them may have other
#: formulas.
KINDS: dict[type[Loss], int] = {SquaredHinge: 0, Logistic: 1, Squared: 2, Huber: 3, Poisson: 4,
                                SquaredDistance: 5}
POINTS = KINDS[SquaredDistance]
MOST_COORDINATES = 12  # of a model, above which loops over dim x dim are slower than libraries


class Flat(NamedTuple):
    """A loss on all users' rows, as compiled code reads it."""

    rows: Array  # (n_rows, dim) of the design; of a user one after the other
    targets: Array  # (n_rows,)
    weights: Array  # (n_rows,) 1 / number of rows of the user
    starts: Ints  # (n_users + 1,) where the rows of each user begin
    ridges: Array  # (dim,) the weight of each coordinate's square, twice over
    curved: Array  # (dim,) numbers c such that f_i - 1/2 sum_k c_k x_k^2 is convex
    kind: int  # see KINDS
    delta: float  # of a Huber loss
    steepest: float  # the largest curvature of phi; 0 where there is none


def flat(loss: Loss, samples: Samples) -> Flat | None:
    """The loss as compiled code reads it; None if that does not know it, or if units are odd
    (`Frame`).
    """
    kind = KINDS.get(type(loss))
    if kind is None or samples.frame is not None or samples.dim > MOST_COORDINATES \
            or not isinstance(samples, BlockSamples):
        return None
    if not isinstance(loss, LinearLoss):
        zeros = np.zeros(samples.dim)
        return Flat(*samples.flat, zeros, zeros + 1.0, kind, 0.0, 1.0)
    ridges = loss.ridge * loss.shrunk(samples.dim)
    steepest = float(loss.max_curvature) if np.isfinite(loss.max_curvature) else 0.0
    return Flat(*samples.flat, ridges, ridges, kind, loss.delta if np.isfinite(loss.delta) else 0.0,
                steepest)
