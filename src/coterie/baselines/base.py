"""What every comparator is: settings with `fit`, and what `fit` returns.

All methods get the same users and the same loss, weigh users alike (as sum_i f_i does, whatever their number of
samples), let everybody take part in every round, and are handed full gradients instead of minibatches. Users are put in
the order of their names first, so the order they come in changes nothing, not even what is drawn at random.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from coterie._typing import Array, Ints
from coterie.analysis.path import check_labels
from coterie.baselines.run import Run, least_loss
from coterie.data.users import Users
from coterie.errors import InvalidInput
from coterie.losses import AffineLoss, Loss, Samples
from coterie.newcomers import Joined
from coterie.solution import labels_of, rows_owner

#: How many settings `tune` may try, the same for every method.
BUDGET = 10


class Outcome(NamedTuple):
    """What a method found, users in the order of the run."""

    models: Array  # (n_users, dim)
    shared: Array  # (k, dim) what the server holds at the end: the global model, or one for each of `labels`
    labels: Ints | None = None  # the method's own clusters; None: users of equal models


@dataclass(frozen=True, kw_only=True)
class Baseline(ABC):
    """A method to compare with; the fields of a class are its settings."""

    name: ClassVar[str]
    needs_clusters: ClassVar[bool] = False

    @classmethod
    def grid(cls, users: Users, loss: Loss) -> tuple[Self, ...]:
        """The settings `tune` chooses from, at most BUDGET."""
        return (cls(),)

    def fit(self, users: Users, loss: Loss, *, seed: int = 0, clusters: npt.ArrayLike | None = None) -> Fitted:
        """Models for all users. `clusters`, one a user, are the true ones, for methods that are told them."""
        return self._fitted(users, loss, seed, clusters, {})

    def _fitted(self, users: Users, loss: Loss, seed: int, clusters: npt.ArrayLike | None,
                memo: dict[Any, Any]) -> Fitted:
        """`memo` keeps what several settings of one method have in common: same users, loss and seed only."""
        if self.needs_clusters and clusters is None:
            raise InvalidInput(f"{self.name!r} is told the true clusters, and got none",
                               remedy="Give clusters, one label for each user in the order of users.names")
        order = np.array(sorted(range(users.n_users), key=lambda i: _key(users.names[i])), dtype=np.int64)
        if "samples" not in memo:
            memo["samples"] = loss.prepare(users.take(order))
        truth = None if clusters is None else check_labels(clusters, users.n_users)[order]
        run = Run(loss, memo["samples"], np.random.default_rng(seed), truth, memo)
        found = self._fit(run)
        models, shared = np.empty_like(found.models), found.shared
        models[order] = found.models
        if found.labels is None:
            labels = labels_of(models)
        else:
            given = np.empty(users.n_users, dtype=np.int64)
            given[order] = found.labels
            labels = check_labels(given, users.n_users)
            shared = shared[given[np.unique(labels, return_index=True)[1]]]  # as the labels; no row for empty clusters
        return Fitted(models=models, labels=labels, shared=shared, rounds=run.rounds, floats_up=run.floats_up,
                      floats_down=run.floats_down, name=self.name, settings=self, users=users, loss=loss)

    @abstractmethod
    def _fit(self, run: Run) -> Outcome: ...

    def _join(self, fitted: Fitted, samples: Samples) -> tuple[Array, Ints]:
        """Models of newcomers, and the cluster each one joins (-1: none): that whose model fits its samples best."""
        chosen = least_loss(fitted.loss, samples, fitted.shared)
        return fitted.shared[chosen], chosen


@dataclass(frozen=True, kw_only=True)
class Ridged(Baseline):
    """A method whose one setting is a ridge, added to the loss's own."""

    ridge: float = 0.0

    def __post_init__(self) -> None:
        check(ridge=(self.ridge, 0.0, np.inf))

    @classmethod
    def grid(cls, users: Users, loss: Loss) -> tuple[Self, ...]:
        return tuple(cls(ridge=ridge) for ridge in ridges(loss))


@dataclass(frozen=True, kw_only=True)
class Pulled(Baseline):
    """A method whose one setting is how strongly everybody's own model is pulled to what all have in common."""

    strength: float = 0.1

    def __post_init__(self) -> None:
        check(strength=(self.strength, 0.0, np.inf))

    @classmethod
    def grid(cls, users: Users, loss: Loss) -> tuple[Self, ...]:
        return tuple(cls(strength=s) for s in np.geomspace(1e-4, 10.0, BUDGET).tolist())


@dataclass(frozen=True, kw_only=True, eq=False)
class Fitted:
    """Models, one row a user, the clusters they form, and what it took to agree on them.

    floats_up and floats_down count the numbers all users together sent and received in the whole run; the text of each
    method says how many a user sends in a round. Computing at the users alone is no round.
    """

    models: Array = field(repr=False)  # (n_users, dim)
    labels: Ints = field(repr=False)  # (n_users,) from 0, in order of first appearance
    shared: Array = field(repr=False)  # (n_clusters, dim) for methods with clusters, else (1, dim)
    rounds: int
    floats_up: int
    floats_down: int
    name: str
    settings: Baseline
    users: Users = field(repr=False)
    loss: Loss = field(repr=False)

    @property
    def n_clusters(self) -> int:
        return int(self.labels.max()) + 1

    def predict(self, X: npt.ArrayLike, users: npt.ArrayLike) -> Array:
        """The prediction for each row of X under the model of its user; `users` names the owner of each row."""
        rows = Users.from_arrays(X, None, users)
        # `rows` is sorted by user; `back` takes it to the order that was given.
        back = np.argsort(np.argsort(rows_owner(users, rows.names), kind="stable"), kind="stable")
        known = np.array([self.users.index(name) for name in rows.names], dtype=np.int64)
        return self.loss.predict(rows.features, self.models[known[rows.owner]])[back]

    def personalize(self, new_users: Users) -> Joined:
        """Models for users who join later, as the method has it; where it says nothing, one of the shared models.

        No method here says how near a newcomer was to another choice, so `slack` is nan.
        """
        samples = prepared(self.loss, new_users, self.models.shape[1])
        models, clusters = self.settings._join(self, samples)
        return Joined(new_users, models, clusters, np.full(new_users.n_users, np.nan))


def prepared(loss: Loss, users: Users, dim: int) -> Samples:
    """Data of users whose models were fitted on others' samples."""
    if loss.dim(users) != dim:
        raise InvalidInput(f"these users give models of {loss.dim(users)} coordinates, the fitted ones have {dim}",
                           remedy="Give the same columns, and the loss its n_classes where it has classes")
    return loss.prepare(users)


def check(**numbers: tuple[float, float, float]) -> None:
    """Each number, given as (number, least, most), is finite and between the two."""
    for name, (number, least, most) in numbers.items():
        if not (np.isfinite(number) and least <= number <= most):
            reach = f"at least {least:g}" if most == np.inf else f"from {least:g} to {most:g}"
            raise InvalidInput(f"{name} must be a finite number {reach}, got {number!r}", remedy="Leave it out")


def ridges(loss: Loss) -> tuple[float, ...]:
    """What to try as an additional ridge: nothing but 0 where models are points, which no ridge should move."""
    return (0.0, *np.geomspace(1e-4, 1.0, BUDGET - 1).tolist()) if isinstance(loss, AffineLoss) else (0.0,)


def cluster_counts(users: Users) -> tuple[int, ...]:
    """How many clusters to try where a method must be told."""
    return tuple(range(1, min(BUDGET, users.n_users) + 1))


def _key(name: Any) -> tuple[str, Any]:
    return ("", name) if isinstance(name, (int, float)) else (type(name).__name__, str(name))
