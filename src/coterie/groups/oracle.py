"""What a search asks of users: a few numbers from each, at models that it names.

Where the data are in this process the answers are computed; in a federation users are asked, and
every call is one round. The search is the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from coterie.base.labels import group_sums
from coterie.base.types import Array, Ints
from coterie.data.users import Participants, Users
from coterie.groups.dispersion import dispersion, without_ridge
from coterie.groups.spread import Expansions, find_modes
from coterie.losses import AffineLoss, LinearLoss, Logistic, Loss, Poisson, Samples, SquaredHinge
from coterie.losses.derived import Quadratic

#: What users have answered, while somebody keeps their samples: the answers follow from these.
_ANSWERS: WeakKeyDictionary[Samples, dict[Any, Any]] = WeakKeyDictionary()
_NUMBERS = 1_000_000  # of rows and models that are computed at the same time


class Settled(NamedTuple):
    """Second-order models of the users' losses at models that are pulled to one centre."""

    model: Quadratic
    information: Array  # (n_users,) share of the user's rows that carry information at its centre


class UserOracle(Protocol):
    """All users of a search, by their answers."""

    loss: Loss
    dim: int
    sizes: Ints  # (n_users,) rows of each user
    target_mean: float  # of all rows
    scale: float  # dispersion of the noise
    known: dict[Any, Any]  # answers that are used more than once

    def settle(self, centres: Array, pull: float) -> Settled:
        """Each user's minimise_x f_i(x) + pull/2 ||x - centre_i||^2, and value, gradient and
        Hessian of f_i there.
        """

    def slopes(self, models: Array, own: Ints) -> tuple[Array, Array]:
        """The values of all users, without ridge, at some models, and their gradients at a few of
        these.

        Parameters
        ----------
        models : (n_models, dim).
        own : (n_users, k) positions of the models at which each user sends its gradient.

        Returns
        -------
        (n_users, n_models) and (n_users, k, dim).
        """

    def evidence(self, centres: Array, covariances: Array) -> Array:
        """(n_users, k) log evidence by Laplace's approximation, for centres (n_users, k, dim) and
        covariances.
        """


class RowsOracle:
    """Users whose rows are in this process.

    Parameters
    ----------
    users : with standardised features.
    loss : of their models.
    """

    def __init__(self, users: Users, loss: Loss) -> None:
        self.users, self.loss, self.bare = users, loss, without_ridge(loss)
        self.samples: Samples = loss.prepare(users)
        self.dim, self.sizes = self.samples.dim, users.sizes
        self.known = _ANSWERS.setdefault(self.samples, {})
        if "scale" not in self.known:
            self.known["scale"] = dispersion(loss, users, self.samples)
        self.scale = self.known["scale"]
        self.target_mean = 0.0 if users.targets is None else float(users.targets.mean())

    def settle(self, centres: Array, pull: float) -> Settled:
        return settled(self.loss, self.samples, centres, pull, np.arange(self.users.n_users))

    def slopes(self, models: Array, own: Ints) -> tuple[Array, Array]:
        return slopes_at(self.loss, self.bare, self.samples, models, own,
                         np.arange(self.users.n_users))

    def evidence(self, centres: Array, covariances: Array) -> Array:
        weights = self.sizes / self.scale
        return np.stack([laplace(self.loss, self.samples, weights, centres[:, k], covariance)
                         for k, covariance in enumerate(covariances)], axis=1)


def settled(loss: Loss, samples: Samples, centres: Array, pull: float, users: Ints) -> Settled:
    """`UserOracle.settle` for some users; to all digits, since a server checks that the point is
    the best one.
    """
    points = loss.prox(samples, None, pull, centres, users=users).points
    values, gradients, hessians = loss.evaluate(samples, points, 2, users)
    model = Quadratic(point=points, value=values, gradient=gradients, hessian=hessians)
    return Settled(model, _information(loss, samples, centres, users))


def slopes_at(loss: Loss, bare: Loss, samples: Samples, models: Array, own: Ints,
              users: Ints) -> tuple[Array, Array]:
    """`UserOracle.slopes` for some users; `bare` is the loss without ridge."""
    # Trial points, and models of very different users.
    with np.errstate(over="ignore", invalid="ignore"):
        gradients = [loss.evaluate(samples, models[own[:, k]], 1, users).gradients
                     for k in range(own.shape[1])]
        return _values_at(bare, samples, models, users), np.stack(gradients, axis=1)


def _values_at(bare: Loss, samples: Samples, models: Array, users: Ints) -> Array:
    """(n_users, n_models) the values of some users at models that are the same for all: one product
    for many rows.
    """
    if not isinstance(bare, LinearLoss) or bare.wide(samples) \
        or (samples.users.data.counts[users] == 0).any():
        n = len(users)
        return np.stack([bare.evaluate(samples, np.tile(model, (n, 1)), 0, users).values
                         for model in models], axis=1)
    rows, out, done = _rows_of(samples, users), np.empty((len(users), len(models))), 0
    assert rows.targets is not None
    while done < len(users):
        last = int(np.searchsorted(rows.offsets, rows.offsets[done] + _NUMBERS // len(models),
                                   side="right")) - 1
        last = min(max(last, done + 1), len(users))
        each = slice(rows.offsets[done], rows.offsets[last])
        values = bare.row_values(rows.features[each], rows.targets[each], models)
        out[done:last] = group_sums(values, rows.owner[each] - done, last - done)
        done = last
    return out / rows.counts[:, None]


def _rows_of(samples: Samples, some: Ints) -> Users:
    """The rows of some users; without a copy if these are all."""
    users: Users = samples.users.data
    return users if len(some) == users.n_users and (some == np.arange(len(some))).all() \
        else users.take(some)


def _split(loss: AffineLoss, models: Array, n_features: int) -> tuple[Array, Array]:
    """The coefficients of the features, and the intercepts as they are added to margins."""
    if not loss.intercept:
        return models, np.zeros(len(models))
    return models[:, :n_features], loss.intercept_sign * models[:, n_features]


def _information(loss: Loss, samples: Samples, centres: Array, some: Ints) -> Array:
    """(n_users,) the mean of 4 p (1 - p) over the rows of each user, for two classes; 1 for other
    targets.
    """
    if not isinstance(loss, (Logistic, SquaredHinge)) or not len(some):
        return np.ones(len(some))
    users = _rows_of(samples, some)
    if (centres == centres[:1]).all():
        slopes, levels = _split(loss, centres[:1], users.n_features)
        t = users.features @ slopes[0] + levels[0]
    else:
        t = loss.decision(users.features, centres[users.owner])
    p = 0.5 + 0.5 * np.tanh(t / 2) if isinstance(loss, Logistic) else np.clip((1 + t) / 2, 0, 1)
    return np.asarray(np.bincount(users.owner, 4 * p * (1 - p), users.n_users)
                      / np.maximum(users.counts, 1))


def laplace(loss: Loss, samples: Samples, weights: Array, centres: Array, covariance: Array,
            users: Ints | None = None) -> Array:
    """(n_users,) the log evidence of each user's rows for models ~ N(centre, covariance), without
    ridge.
    """
    dim = samples.dim
    floor = covariance + (1e-9 * np.trace(covariance) / dim + 1e-12) * np.eye(dim)
    some = np.arange(samples.n_users) if users is None else users
    modes = find_modes(loss, samples, weights, centres, floor, centres, some)
    marginal = Expansions.at(loss, samples, weights, modes, some).marginal(covariance)[0]
    return marginal.at_own(centres) + 0.5 * weights * (modes**2 @ ridge_of(loss, samples))


def ridge_of(loss: Loss, samples: Samples) -> Array:
    """(dim,) the ridge of a loss on each coordinate."""
    if not isinstance(loss, AffineLoss):
        return np.zeros(samples.dim)
    return loss.ridge * loss.shrunk(samples.dim, samples.dim // (samples.users.n_features + 1))


def start_of(loss: Loss, mean: float, dim: int) -> Array:
    """(dim,) the model with an intercept only that fits the mean target; zero for losses without an
    intercept.
    """
    start = np.zeros(dim)
    if not (isinstance(loss, AffineLoss) and loss.intercept):
        return start
    if isinstance(loss, Logistic):
        p = np.clip(0.5 + 0.5 * mean, 1e-6, 1 - 1e-6)
        start[-1] = np.log(p / (1 - p))
    elif isinstance(loss, Poisson):
        start[-1] = np.log(max(mean, 1e-6))
    return start


def near_everyone(users: Participants, oracle: UserOracle, pull: float = 0.1) -> tuple[Quadratic,
        Settled]:
    """Second-order models around the model of the mean target, and around the pooled model that
    these give.

    An oracle is asked once.
    """
    key = ("near everyone", pull)
    if key not in oracle.known:
        n, start = users.n_users, start_of(oracle.loss, oracle.target_mean, oracle.dim)
        local = oracle.settle(np.tile(start, (n, 1)), pull).model
        pooled = expansions_of(users, oracle, local).centres(np.zeros(n, dtype=np.int64))
        oracle.known[key] = local, oracle.settle(np.tile(pooled, (n, 1)), pull)
    known: tuple[Quadratic, Settled] = oracle.known[key]
    return known


def near_groups(users: Participants, oracle: UserOracle, labels: Ints,
                pull: float = 0.1) -> Quadratic:
    """Second-order models around the models of these groups."""
    near = near_everyone(users, oracle, pull)[1].model
    key = ("near groups", labels.tobytes())
    if labels.any() and key not in oracle.known:
        centres = expansions_of(users, oracle, near).centres(labels)
        oracle.known[key] = oracle.settle(centres[labels], pull).model
    known: Quadratic = oracle.known[key] if labels.any() else near
    return known


def expansions_of(users: Participants, oracle: UserOracle, near: Quadratic) -> Expansions:
    samples = near.prepare(users)
    return Expansions.at(near, samples, oracle.sizes / oracle.scale,
                         np.zeros((users.n_users, oracle.dim)))
