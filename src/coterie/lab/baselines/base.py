"""The base class of the methods, settings with `fit`, and the result of `fit`.

All methods get the same users and the same loss. They give every user the same weight (as sum_i f_i
does, for any number of samples), ask all users in every round, and use full gradients instead of
minibatches. Users are first sorted by name, so the order in which they are given changes nothing,
including the random numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from coterie.base.errors import InvalidInput
from coterie.base.labels import check_labels, labels_of
from coterie.base.types import Array, Ints
from coterie.data.users import Users
from coterie.lab.baselines.run import BaselineRun, least_loss
from coterie.losses import AffineLoss, Loss, Samples
from coterie.problem.newcomers import Joined
from coterie.problem.solution import predict_rows

#: Largest number of settings that `tune` tries, the same for every method.
BUDGET = 10


class Outcome(NamedTuple):
    """The result of a method, with users in the order of the run."""

    models: Array  # (n_users, dim)
    # (k, dim) the models at the server: the global model, or one per cluster of `labels`.
    shared: Array
    labels: Ints | None = None  # the clusters of the method; None: users with equal models


@dataclass(frozen=True, kw_only=True)
class Baseline(ABC):
    """A method to compare with; the fields of the class are its settings."""

    name: ClassVar[str]
    needs_clusters: ClassVar[bool] = False

    @classmethod
    def grid(cls, users: Users, loss: Loss) -> tuple[Self, ...]:
        """The settings that `tune` chooses from, at most `BUDGET`."""
        return (cls(),)

    def fit(self, users: Users, loss: Loss, *, seed: int = 0,
            clusters: npt.ArrayLike | None = None) -> Fitted:
        """Fit a model for every user.

        Parameters
        ----------
        users, loss
            The data and the loss.
        seed
            Seed of the random numbers of the method.
        clusters
            The true cluster of each user, for methods that need it.

        Returns
        -------
        Fitted
            Models, clusters, and the number of rounds and of numbers sent.

        Raises
        ------
        InvalidInput
            If the method needs the true clusters and got none, or a setting does not fit the data.
        Incompatible
            If the method cannot use this loss.

        Example
        -------
        >>> import coterie as ct
        >>> from coterie.lab.baselines import IFCA
        >>> from coterie.datasets import clustered
        >>> users = clustered("squared", n_users=6, n_clusters=2).users
        >>> IFCA(n_clusters=2).fit(users, ct.Squared()).n_clusters
        2
        """
        return self._fitted(users, loss, seed, clusters, {})

    def _fitted(self, users: Users, loss: Loss, seed: int, clusters: npt.ArrayLike | None,
                memo: dict[Any, Any]) -> Fitted:
        """As `fit`. `memo` stores results that several settings share, for one set of users, loss
        and seed.
        """
        if self.needs_clusters and clusters is None:
            raise InvalidInput(f"{self.name!r} needs the true clusters, got none",
                               remedy="Give clusters, one label for each user in the order of "
                                      "users.names")
        order = np.array(sorted(range(users.n_users), key=lambda i: _key(users.names[i])),
                         dtype=np.int64)
        if "samples" not in memo:
            memo["samples"] = loss.prepare(users.take(order))
        truth = None if clusters is None else check_labels(clusters, users.n_users)[order]
        run = BaselineRun(loss, memo["samples"], np.random.default_rng(seed), truth, memo)
        outcome = self._fit(run)
        models, shared = np.empty_like(outcome.models), outcome.shared
        models[order] = outcome.models
        if outcome.labels is None:
            labels = labels_of(models)
        else:
            unordered = np.empty(users.n_users, dtype=np.int64)
            unordered[order] = outcome.labels
            labels = check_labels(unordered, users.n_users)
            # In the order of the new labels.
            shared = shared[unordered[np.unique(labels, return_index=True)[1]]]
        return Fitted(models=models, labels=labels, shared=shared, rounds=run.rounds,
                      floats_up=run.floats_up,
                      floats_down=run.floats_down, name=self.name, settings=self, users=users,
                      loss=loss)

    @abstractmethod
    def _fit(self, run: BaselineRun) -> Outcome: ...

    def _join(self, fitted: Fitted, samples: Samples) -> tuple[Array, Ints]:
        """Models of newcomers, and the cluster that each joins (-1: none). Default: the cluster
        with the least loss.
        """
        cluster = least_loss(fitted.loss, samples, fitted.shared)
        return fitted.shared[cluster], cluster


@dataclass(frozen=True, kw_only=True)
class Ridged(Baseline):
    """A method whose only setting is a ridge, added to that of the loss."""

    ridge: float = 0.0

    def __post_init__(self) -> None:
        check(ridge=(self.ridge, 0.0, np.inf))

    @classmethod
    def grid(cls, users: Users, loss: Loss) -> tuple[Self, ...]:
        return tuple(cls(ridge=ridge) for ridge in ridges(loss))


@dataclass(frozen=True, kw_only=True)
class Pulled(Baseline):
    """A method whose only setting is how strongly the models of the users are pulled to a common
    model.
    """

    strength: float = 0.1

    def __post_init__(self) -> None:
        check(strength=(self.strength, 0.0, np.inf))

    @classmethod
    def grid(cls, users: Users, loss: Loss) -> tuple[Self, ...]:
        return tuple(cls(strength=s) for s in np.geomspace(1e-4, 10.0, BUDGET).tolist())


@dataclass(frozen=True, kw_only=True, eq=False)
class Fitted:
    """The models of a method, the clusters they form, and the communication that was needed.

    `floats_up` and `floats_down` are the numbers that all users together sent and received in the
    complete run; the docstring of each method gives them per user and round. Computation at the
    users alone is not a round.
    """

    models: Array = field(repr=False)  # (n_users, dim)
    # (n_users,) the cluster of each user, from 0 in order of first appearance.
    labels: Ints = field(repr=False)
    # (n_clusters, dim) for methods with clusters, otherwise (1, dim).
    shared: Array = field(repr=False)
    rounds: int
    floats_up: int
    floats_down: int
    name: str  # of the method, in `BASELINES`
    settings: Baseline
    users: Users = field(repr=False)
    loss: Loss = field(repr=False)

    @property
    def n_clusters(self) -> int:
        """The number of clusters."""
        return int(self.labels.max()) + 1

    def predict(self, X: npt.ArrayLike, users: npt.ArrayLike) -> Array:
        """Predict each row of X with the model of its user.

        Parameters
        ----------
        X
            (n_rows, n_features)
        users
            The name of the owner of each row.

        Returns
        -------
        Array
            One prediction per row.

        Raises
        ------
        InvalidInput
            If a user was not in the fit.
        """
        return predict_rows(self.loss, self.users, self.models, X, users)

    def personalize(self, new_users: Users) -> Joined:
        """Give new users a model, by the rule of the method or, if it has none, the best of the
        shared models.

        Parameters
        ----------
        new_users
            Users with the same features as in the fit.

        Returns
        -------
        Joined
            Models and clusters of the new users. `slack` is nan, because these methods define no
            margin.

        Raises
        ------
        InvalidInput
            If the features are not those of the fit.
        """
        samples = prepared(self.loss, new_users, self.models.shape[1])
        models, clusters = self.settings._join(self, samples)
        return Joined(new_users, models, clusters, np.full(new_users.n_users, np.nan))


def prepared(loss: Loss, users: Users, dim: int) -> Samples:
    """Prepare the data of users for models of length `dim` that were fitted on other samples."""
    if loss.dim(users) != dim:
        raise InvalidInput(f"expected models of {dim} coordinates, as in the fit, these users give "
                           f"{loss.dim(users)}",
                           remedy="Give the same columns, and set n_classes of a loss with classes")
    return loss.prepare(users)


def check(**numbers: tuple[float, float, float]) -> None:
    """Reject numbers, given as (number, minimum, maximum), that are not finite or out of range."""
    for name, (number, minimum, maximum) in numbers.items():
        if not (np.isfinite(number) and minimum <= number <= maximum):
            allowed = f"at least {minimum:g}" if maximum == np.inf \
                else f"from {minimum:g} to {maximum:g}"
            raise InvalidInput(f"{name} must be a finite number {allowed}, got {number!r}",
                               remedy="Omit it to use the default")


def ridges(loss: Loss) -> tuple[float, ...]:
    """The additional ridges to try: only 0 if models are points, which a ridge would shift."""
    return (0.0, *np.geomspace(1e-4, 1.0, BUDGET - 1).tolist()) if isinstance(loss, AffineLoss) \
        else (0.0,)


def cluster_counts(users: Users) -> tuple[int, ...]:
    """The numbers of clusters to try for methods that need this number."""
    return tuple(range(1, min(BUDGET, users.n_users) + 1))


def _key(name: Any) -> tuple[str, Any]:
    return ("", name) if isinstance(name, (int, float)) else (type(name).__name__, str(name))
