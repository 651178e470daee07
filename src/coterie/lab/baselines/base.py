"""The frame of the federated methods: settings with `fit`, one run of a method, and its result.

All methods get the same users and the same loss. They give every user the same weight (as sum_i f_i
does, for any number of samples), ask all users in every round, and use full gradients instead of
minibatches. Users are first sorted by name, so the order in which they are given changes nothing,
including the random numbers.

Every exact fit is Newton's method, batched over users or clusters. If a loss has no minimum (a user
with one class only and an intercept that is not penalised), NO_MINIMUM/2 ||x||^2 is added for the
users concerned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import numpy.typing as npt

from coterie.base.errors import InvalidInput
from coterie.base.labels import check_labels, labels_of
from coterie.base.types import Array, Indices, Ints
from coterie.data.users import Participants, Users
from coterie.groups.noise import without_ridge
from coterie.losses import Evaluation, Loss, Samples
from coterie.losses.derived import Grouped

#: Largest number of settings that `tune` tries, the same for every method.
BUDGET = 10
NO_MINIMUM = 1e-8
#: Least and largest value of a setting, by its name; a class may have others.
LIMITS = {"ridge": (0.0, np.inf), "strength": (0.0, np.inf), "weight": (0.0, np.inf),
          "eps2": (0.0, np.inf), "share": (0.0, 1.0), "adapt": (0.0, 2.0), "rate": (0.0, 2.0),
          "steps": (1, np.inf), "rounds": (1, np.inf), "restarts": (1, np.inf),
          "n_clusters": (1, np.inf), "n_probes": (1, np.inf)}

#: Models (n_users, dim) in the order of the run; models at the server (k, dim), the global one or
#: one per cluster; the clusters (n_users,), or None: users with equal models.
Outcome = tuple[Array, Array, Ints | None]
#: Values of settings to try, or a function of users and loss that gives them, by name.
Choices = Mapping[str, Sequence[Any] | Callable[[Users, Loss], Sequence[Any]]]


@dataclass(frozen=True, kw_only=True)
class Baseline(ABC):
    """A method to compare with; the fields of the class are its settings."""

    name: ClassVar[str]
    needs_clusters: ClassVar[bool] = False
    choices: ClassVar[Choices] = {}
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {}

    def __post_init__(self) -> None:
        limits = LIMITS | dict(self.limits)
        for setting in (one.name for one in fields(self) if one.name in limits):
            number, (least, most) = getattr(self, setting), limits[setting]
            if not (np.isfinite(number) and least <= number <= most):
                allowed = f"at least {least:g}" if most == np.inf else f"from {least:g} to {most:g}"
                raise InvalidInput(f"{setting} must be a finite number {allowed}, got {number!r}",
                                   remedy="Omit it to use the default")

    @classmethod
    def grid(cls, users: Users, loss: Loss) -> tuple[Self, ...]:
        """The settings that `tune` chooses from, at most `BUDGET`: all combinations of `choices`.
        """
        values = [given(users, loss) if callable(given) else given
                  for given in cls.choices.values()]
        return tuple(cls(**dict(zip(cls.choices, some, strict=True))) for some in product(*values))

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
        return self._fit_once(users, loss, seed, clusters, {})

    def _fit_once(self, users: Users, loss: Loss, seed: int, clusters: npt.ArrayLike | None,
                  memo: dict[Any, Any]) -> Fitted:
        """As `fit`. `memo` stores results that several settings share, for one set of users, loss
        and seed.
        """
        if self.needs_clusters and clusters is None:
            raise InvalidInput(f"{self.name!r} needs the true clusters, got none",
                               remedy="Give clusters, one label for each user in the order of "
                                      "users.names")
        order = np.array(sorted(range(users.n_users), key=lambda i: _sort_key(users.names[i])))
        back = np.argsort(order)
        if "samples" not in memo:
            memo["samples"] = loss.prepare(users.take(order))
        truth = None if clusters is None else check_labels(clusters, users.n_users)[order]
        run = BaselineRun(loss, memo["samples"], np.random.default_rng(seed), truth, memo)
        models, shared, found = self._fit(run)
        labels = (labels_of(models[back]) if found is None
                  else check_labels(found[back], users.n_users))
        if found is not None:  # in the order of the new labels
            shared = shared[found[back][np.unique(labels, return_index=True)[1]]]
        rounds, up, down = run.traffic.tolist()
        return Fitted(models=models[back], labels=labels, shared=shared, rounds=rounds,
                      floats_up=up, floats_down=down, name=self.name, settings=self)

    @abstractmethod
    def _fit(self, run: BaselineRun) -> Outcome: ...


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

    @property
    def n_clusters(self) -> int:
        """The number of clusters."""
        return int(self.labels.max()) + 1


@dataclass(eq=False)
class BaselineRun:
    """One run of a method: data, random numbers, shared computations, and the count of the numbers
    sent. `memo` is kept between runs while settings are tuned on the same data.
    """

    loss: Loss
    samples: Samples
    rng: np.random.Generator
    clusters: Ints | None
    memo: dict[Any, Any] = field(default_factory=dict)
    # Rounds, and the numbers that all users together sent and received.
    traffic: Ints = field(default_factory=lambda: np.zeros(3, dtype=np.int64))

    @property
    def n_users(self) -> int:
        return self.samples.n_users

    @property
    def dim(self) -> int:
        return self.samples.dim

    def exchange(self, *, down: int, up: int, users: int | None = None) -> None:
        """Count a round in which each of `users` users (default: all) receives `down` numbers and
        sends `up`.
        """
        n = self.n_users if users is None else users
        self.traffic = self.traffic + np.array([1, n * up, n * down])

    def once(self, key: Hashable, compute: Callable[[], Array]) -> Array:
        """The stored result of `compute` for this key, computed if needed; its traffic is counted
        in both cases.
        """
        before = self.traffic
        if key not in self.memo:
            result = compute()
            self.memo[key] = result, self.traffic - before
        result, traffic = self.memo[key]
        self.traffic = before + traffic
        return np.asarray(result)

    def own(self, ridge: float = 0.0) -> Array:
        """(n_users, dim) the minimum of f_i for each user."""
        loss = add_ridge(self.loss, ridge)
        return self.once(("own", ridge), lambda: own_models(loss, self.samples))

    def held(self, ridge: float) -> Array:
        """(n_users, dim) the minimum of f_i + ridge/2 ||x||^2 for each user, intercept included."""
        return self.once(("held", ridge),
                         lambda: self.loss.prox(self.samples, None, ridge, None).points)

    def pool(self, labels: Ints, n_clusters: int, ridge: float = 0.0,
             start: Array | None = None) -> Array:
        """(n_clusters, dim) the minimum of sum_{i in cluster} f_i for each cluster; an empty
        cluster keeps `start`.

        A round is one evaluation: the users of the clusters receive dim numbers and send 1, 1 + dim
        or 1 + dim + dim (dim + 1) / 2 numbers, depending on whether Newton's method needs the
        value, the gradient, or also the Hessian.
        """
        grouped = _CountedGroups(loss=add_ridge(self.loss, ridge), samples=self.samples,
                                 labels=labels, run=self)
        begin = np.zeros((n_clusters, self.dim)) if start is None else start
        return own_models(grouped, grouped.prepare(Participants(range(n_clusters))), begin)

    def pool_all(self, ridge: float = 0.0) -> Array:
        """(1, dim) the minimum of sum_i f_i."""
        return self.pool(np.zeros(self.n_users, dtype=np.int64), 1, ridge)

    def losses(self, models: Array) -> Array:
        """(n_users, k) the loss of every user with each of k models; inf if it exceeds float64."""
        shape = (self.n_users, self.dim)
        with np.errstate(over="ignore", invalid="ignore"):
            values = np.stack([self.loss.values(self.samples, np.broadcast_to(model, shape))
                               for model in models], axis=1)
        return np.where(np.isnan(values), np.inf, values)


@dataclass(frozen=True, kw_only=True, eq=False)
class _CountedGroups(Grouped):
    """Clusters; each evaluation is counted as a round of their users."""

    run: BaselineRun

    def evaluate(self, samples: Samples, models: Array, order: int = 2,
                 users: Indices | None = None) -> Evaluation:
        members = len(self.labels) if users is None else int(np.isin(self.labels, users).sum())
        self.run.exchange(down=samples.dim, up=length_of_answer(samples.dim, order), users=members)
        return super().evaluate(samples, models, order, users)


def length_of_answer(dim: int, order: int) -> int:
    """How many numbers a user sends: the value; with the gradient; with the Hessian's triangle."""
    return (1, 1 + dim, 1 + dim + dim * (dim + 1) // 2)[order]


def own_models(loss: Loss, samples: Samples, start: Array | None = None) -> Array:
    """The minimum of f_i for each user, or of f_i + NO_MINIMUM/2 ||x||^2 if f_i has none."""
    result = loss.local(samples, None, start)
    points, failed = result.points, np.flatnonzero(~result.converged)
    if failed.size:
        points[failed] = loss.prox(samples, None, NO_MINIMUM, None, users=failed).points
    return points


def prepare(loss: Loss, users: Users, dim: int) -> Samples:
    """Prepare the data of users for models of length `dim` that were fitted on other samples."""
    if loss.dim(users) != dim:
        raise InvalidInput(f"expected models of {dim} coordinates, as in the fit, these users give "
                           f"{loss.dim(users)}",
                           remedy="Give the same columns, and set n_classes of a loss with classes")
    return loss.prepare(users)


def add_ridge(loss: Loss, ridge: float) -> Loss:
    """The loss with its ridge increased."""
    return loss if ridge == 0 else loss.with_ridge(loss.ridge + ridge)


def ridges(users: Users, loss: Loss) -> Sequence[float]:
    """The additional ridges to try: only 0 if models are points, which a ridge would shift."""
    return (0.0, *np.geomspace(1e-4, 1.0, BUDGET - 1).tolist()) if loss.affine else (0.0,)


def _sort_key(name: Any) -> tuple[str, Any]:
    return ("", name) if isinstance(name, (int, float)) else (type(name).__name__, str(name))


B = TypeVar("B", bound=Baseline)


def tune(method: type[B], train: Users, validation: Users, loss: Loss, seed: int = 0, *,
         clusters: npt.ArrayLike | None = None) -> tuple[Fitted, B]:
    """Choose the settings of `method.grid` with the least loss on `validation`, as a mean over
    users.

    The loss is without its ridge, which is only for fitting. Of equally good settings the first is
    chosen. To use all samples in the end, fit again: settings.fit(all_users, loss).

    Parameters
    ----------
    method
        A class in `BASELINES`.
    train, validation
        Samples of the same users in the same order, for example from `users.split`.
    loss
        The loss.
    seed
        Seed of the random numbers of the method.
    clusters
        The true cluster of each user, for methods that need it.

    Returns
    -------
    tuple
        The fit to `train` with the chosen settings, and these settings.

    Raises
    ------
    InvalidInput
        If the users of the two parts differ, or there are no validation samples.

    Example
    -------
    >>> import coterie as ct
    >>> from coterie.lab.baselines import KMeans
    >>> from coterie.datasets import clustered
    >>> parts = clustered("squared", n_users=6, n_clusters=2, samples=30).users.split(
    ...     validation=0.3)
    >>> fitted, settings = tune(KMeans, parts.train, parts.validation, ct.Squared())
    >>> settings.n_clusters
    2
    """
    grid = method.grid(train, loss)
    assert 1 <= len(grid) <= BUDGET, f"{method.name}: {len(grid)} settings"
    return choose(grid, train, validation, loss, seed, clusters)


def choose(grid: Sequence[B], train: Users, validation: Users, loss: Loss, seed: int,
           clusters: npt.ArrayLike | None) -> tuple[Fitted, B]:
    """As `tune`, from these settings."""
    if validation.names != train.names:
        raise InvalidInput("the validation samples belong to other users, or have another order",
                           remedy="Use users.split(...), which keeps all users in order")
    present = np.flatnonzero(validation.counts > 0)
    if not present.size:
        raise InvalidInput("there are no validation samples",
                           remedy="Split with validation=0.2, for example")
    bare = without_ridge(loss)
    held = prepare(bare, validation.take(present), loss.dim(train))
    memo: dict[Any, Any] = {}

    def held_out_loss(fitted: Fitted) -> float:
        # A loss that exceeds float64 is the worst.
        with np.errstate(over="ignore", invalid="ignore"):
            mean = float(bare.values(held, fitted.models[present]).mean())
        return np.inf if np.isnan(mean) else mean

    fits = ((settings._fit_once(train, loss, seed, clusters, memo), settings) for settings in grid)
    return min(fits, key=lambda fit: held_out_loss(fit[0]))
