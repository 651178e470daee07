"""Between the user's units and the solver's: standardised features, targets a loss can take, and
back.

    A = (X - mean) / scale,     y = (target - centre) / spread  (regression only),     margin = <w,
                                a> + b

mean, scale, centre and spread are those of all rows together and follow from what each user can
send (`UserStatistics`): a count, means and centred sums of squares. The intercept b is the loss's
own and shares the small ridge (`penalize_intercept`), so that every user has a best model, also one
with samples of one class, and every answer can be certified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np

from coterie.base.errors import InvalidInput
from coterie.base.labels import sum_zero_basis
from coterie.base.types import Array, Ints
from coterie.data.moments import Standardizer
from coterie.data.summary import TASKS, Task
from coterie.data.users import Moments, Users
from coterie.fitting.settings import Settings
from coterie.losses import (
    LOSSES,
    Loss,
    Multinomial,
    SquaredHinge,
    losses_for,
    name_of,
)

INTERCEPT = "intercept"
LARGEST_COUNT = 1e9  # steps of exp(t) are lost beyond


class UserStatistics(NamedTuple):
    """What each user sends for scaling, and nothing else of its rows.

    Parameters
    ----------
    feature_names : of the encoded features.
    features : count, means and centred sums of squares of the features.
    targets : the same of the target, as one column; None without targets.
    largest : (n_users,) the largest target; 0 without targets or rows.
    """

    feature_names: tuple[str, ...]
    features: Moments
    targets: Moments | None
    largest: Array

    @classmethod
    def of(cls, users: Users) -> UserStatistics:
        """Those of these users."""
        y = users.targets
        if y is None:
            return cls(users.feature_names, users.moments(), None, np.zeros(users.n_users))
        column = replace(users, features=y[:, None], targets=None, feature_names=("target",))
        largest, some = np.zeros(users.n_users), users.counts > 0
        largest[some] = np.maximum.reduceat(y, users.offsets[:-1][some]) if some.any() else 0.0
        return cls(users.feature_names, users.moments(), column.moments(), largest)

    @classmethod
    def join(cls, parts: Sequence[UserStatistics]) -> UserStatistics:
        """The users of several nodes as one list."""
        if not parts or any(part.feature_names != parts[0].feature_names
                            or (part.targets is None) != (
                parts[0].targets is None) for part in parts):
            raise InvalidInput("Statistics of different features or targets cannot be joined",
                               remedy="Encode all tables with the same recipe")
        targets = [part.targets for part in parts if part.targets is not None]
        return cls(parts[0].feature_names, _joined([part.features for part in parts]),
                   _joined(targets) if targets else None,
                   np.concatenate([part.largest for part in parts]))


def _joined(parts: Sequence[Moments]) -> Moments:
    counts, means, m2 = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Moments(counts, means, m2)


@dataclass(frozen=True, kw_only=True, eq=False)
class Units:
    """How the numbers given became the numbers solved for.

    Parameters
    ----------
    task : what the targets are.
    loss : with an intercept, which has the same ridge.
    n_classes : 0 where targets are not classes.
    mean, scale : (n_features,) of the features.
    centre, spread : of the targets of a regression; else 0 and 1.
    feature_names : of the features.
    """

    task: Task
    loss: Loss
    n_classes: int
    mean: Array
    scale: Array
    centre: float
    spread: float
    feature_names: tuple[str, ...]

    @classmethod
    def learn(cls, users: Users, task: Task, *, loss: str = Settings.loss,
              ridge: float = Settings.ridge,
              n_classes: int = 0, standardize: bool = Settings.standardize) -> Self:
        """From the users whose models are to be found; see `from_moments`."""
        return cls.from_moments(UserStatistics.of(users), task, loss=loss, ridge=ridge,
                                n_classes=n_classes,
                                standardize=standardize)

    @classmethod
    def from_moments(cls, statistics: UserStatistics, task: Task, *, loss: str = Settings.loss,
                     ridge: float = Settings.ridge, n_classes: int = 0,
                     standardize: bool = Settings.standardize) -> Self:
        """From what each user sends.

        Parameters
        ----------
        statistics : of all users whose models are to be found; targets of classes are numbers 0, 1,
            ...
        task : what the targets are.
        loss : a name in LOSSES that fits the task, or "auto".
        ridge : L2 strength, intercept included.
        n_classes : of a classification; at least as many as the targets have.
        standardize : whether features are standardised.

        Raises
        ------
        InvalidInput : targets that do not fit the task, or numbers too large to be scaled.
        """
        if task not in TASKS:
            raise InvalidInput(f"unknown task {task!r}",
                               remedy=f"Choose one of: {', '.join(TASKS)}")
        names, features, targets, largest = statistics
        if task != "clustering" and targets is None:
            raise InvalidInput(f"{task} needs targets, and these users have none", remedy="Give y")
        if task == "classification":
            n_classes = max(n_classes, int(largest.max()) + 1)
            if n_classes < 2:
                raise InvalidInput("all samples are of one class",
                                   remedy="Give samples of at least two")
        if task == "counts" and largest.max() > LARGEST_COUNT:
            raise InvalidInput(f"a count of {largest.max():g} is too large for Poisson regression",
                               remedy="Use --task regression, or give it in larger units")
        mean, scale, centre, spread = np.zeros(len(names)), np.ones(len(names)), 0.0, 1.0
        if standardize:
            scaler = Standardizer.from_moments(features, feature_names=names)
            mean, scale = scaler.mean, scaler.scale
        if task == "regression":
            assert targets is not None
            scaler = Standardizer.from_moments(targets, feature_names=("target",))
            centre, spread = scaler.mean.item(), scaler.scale.item()
        return cls(task=task, loss=make_loss(task, loss, ridge, n_classes), n_classes=n_classes,
                   mean=mean, scale=scale,
                   centre=centre, spread=spread, feature_names=names)

    def inner(self, users: Users) -> Users:
        """The users as the solver sees them."""
        y = None if self.task == "clustering" or users.targets is None \
            else self.inner_targets(users.targets)
        return replace(users, features=self.rows(users.features), targets=y)

    def inner_targets(self, y: Array) -> Array:
        """Targets as the loss sees them."""
        if self.task == "regression":
            return (y - self.centre) / self.spread
        return 2.0 * y - 1.0 if self.loss.signs else y

    def mean_target(self, counts: Ints, means: Array) -> float:
        """The mean target as the loss sees it, from the rows and the mean target of each user."""
        mean = counts @ means.ravel() / max(counts.sum(), 1)
        return float(self.inner_targets(np.asarray(mean)))

    def rows(self, X: Array) -> Array:
        """Rows of features as the solver sees them."""
        with np.errstate(over="ignore"):
            return (X - self.mean) / self.scale

    def margins(self, X: Array, models: Array) -> Array:
        """(n_rows,) or (n_rows, n_classes): what each row's model says of it; a real target is in
        its own units.
        """
        t = self.loss.decision(self.rows(X), models)
        return t * self.spread + self.centre if self.task == "regression" else t

    def predict(self, X: Array, models: Array) -> Array:
        """Each row's target under its own model: a class number, a number, or a mean count."""
        predictions = self.loss.predict(self.rows(X), models)
        if self.task == "regression":
            return predictions * self.spread + self.centre
        signs = self.n_classes == 2 and not self.loss.multiclass
        return (predictions + 1.0) / 2.0 if signs else predictions

    def scores(self, models: Array, test: Users) -> Array:
        """(n_users,) accuracy, root mean squared error or mean Poisson deviance; nan for users
        without rows.
        """
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            return self.scores_of(self.errors(models, test), test)

    def scores_of(self, errors: Array, test: Users) -> Array:
        """(n_users,) the scores that errors of rows give."""
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            means = np.bincount(test.owner, errors, test.n_users) / test.counts
            return np.sqrt(means) if self.task == "regression" else 1.0 - means if self.n_classes \
                else means

    def errors(self, models: Array, test: Users) -> Array:
        """(n_rows,) 1 for a wrong class and 0 for the right one, squared error, or Poisson
        deviance.
        """
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            return self.errors_of(self.predict(test.features, models[test.owner]), test)

    def errors_of(self, mean: Array, test: Users) -> Array:
        """(n_rows,) the errors of predictions: classes, numbers or mean counts; a share of the
        second class that is more than half predicts it.
        """
        y = test.targets
        assert y is not None
        if self.task == "classification" and self.n_classes == 2:
            mean = np.asarray(mean > 0.5, dtype=float)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            if self.task == "classification":
                return np.asarray(mean != y, dtype=float)
            if self.task == "counts":  # 2 (y log(y / mean) - y + mean)
                return np.asarray(2 * (np.where(y > 0, y * np.log(np.where(y > 0, y, 1.0) / mean),
                                                0.0) - y + mean))
            return np.asarray((mean - y) ** 2)

    def probabilities(self, X: Array, models: Array) -> Array:
        """(n_rows, n_classes) for losses that are log-likelihoods."""
        if not self.loss.log_odds:
            raise InvalidInput(f"{type(self.loss).__name__} has no probabilities",
                               remedy="Use the loss 'logistic'")
        t = self.margins(X, models)
        t = np.stack([-t / 2, t / 2], axis=1) if t.ndim == 1 else t
        t = np.exp(t - t.max(axis=1, keepdims=True))
        return t / t.sum(axis=1, keepdims=True)

    def coefficients(self, models: Array) -> Array:
        """(n, n_features + 1, outputs) models in the units given, the intercept last; points: (n,
        n_features, 1).
        """
        w = self.standardized(models)
        if self.task == "clustering":
            return w * self.scale[:, None] + self.mean[:, None]
        # <w, (x - mean) / scale> + b = <w / scale, x> + (b - <w / scale, mean>)
        slopes = w[:, :-1] / self.scale[:, None] * self.spread
        constant = w[:, -1] * self.spread + self.centre - np.einsum("npk,p->nk", slopes, self.mean)
        return np.concatenate([slopes, constant[:, None]], axis=1)

    def standardized(self, models: Array) -> Array:
        """The same as `coefficients`, for standardised features and targets: comparable between
        features.
        """
        if self.task == "clustering":
            return models[..., None]
        w = models.reshape(len(models), len(self.mean) + 1, -1)
        if self.loss.multiclass:
            w = w @ sum_zero_basis(w.shape[2] + 1)
        return np.concatenate([w[:, :-1], self._sign * w[:, -1:]], axis=1)

    def restored(self, coefficients: Array) -> Array:
        """The models whose `coefficients` these are."""
        if self.task == "clustering":
            return (coefficients[..., 0] - self.mean) / self.scale
        slopes, constant = coefficients[:, :-1], coefficients[:, -1]
        b = self._sign * (constant - self.centre + np.einsum("npk,p->nk", slopes, self.mean)) \
            / self.spread
        w = np.concatenate([slopes * self.scale[:, None] / self.spread, b[:, None]], axis=1)
        if self.loss.multiclass:
            w = w @ sum_zero_basis(w.shape[2]).T
        return w.reshape(len(w), -1)

    @property
    def _sign(self) -> float:
        """Of the intercept in the loss's margin <w, a> + sign b."""
        return self.loss.intercept_sign

    @property
    def coefficient_names(self) -> list[str]:
        """What each row of `coefficients` is."""
        return [*self.feature_names, *([] if self.task == "clustering" else [INTERCEPT])]

    def columns(self, classes: Sequence[str] = ()) -> list[str]:
        """What each number of one user's `coefficients` is, with several classes by their names or
        numbers.
        """
        if not self.loss.multiclass:
            return self.coefficient_names
        return [f"{name} [{c}]" for name in self.coefficient_names for c in classes
                or range(self.n_classes)]

    def state(self) -> dict[str, Any]:
        """Arrays, numbers and texts, for `from_state`."""
        return {"task": self.task,
                "loss": name_of(self.loss),
                "ridge": getattr(self.loss, "ridge", 0.0), "n_classes": self.n_classes,
                "intercept_share": float(getattr(self.loss, "penalize_intercept", 1.0)),
                "mean": self.mean,
                "scale": self.scale, "centre": self.centre, "spread": self.spread,
                "features": list(self.feature_names),
                "intercept_sign": self._sign}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """The units that `state` describes; without "intercept_sign", models have margins <w, a> +
        b.
        """
        loss = make_loss(state["task"], state["loss"], state["ridge"], state["n_classes"])
        share = float(state.get("intercept_share", 1.0))
        if loss.affine and share != 1.0:
            loss = loss.with_ridge(loss.ridge, share)
        if loss.intercept_sign != state.get("intercept_sign", 1.0):
            loss = _PlusSquaredHinge(ridge=loss.ridge, penalize_intercept=True)
        return cls(task=state["task"], loss=loss, n_classes=state["n_classes"],
                   mean=np.array(state["mean"], dtype=float),
                   scale=np.array(state["scale"], dtype=float),
                   centre=state["centre"], spread=state["spread"],
                   feature_names=tuple(state["features"]))


class _PlusSquaredHinge(SquaredHinge):
    """The squared hinge with margins <w, a> + b, in which run folders that name no sign hold their
    models.
    """

    intercept_sign = 1.0


def make_loss(task: Task, name: str, ridge: float, n_classes: int) -> Loss:
    """The task's loss, or the one named; its intercept shares the ridge."""
    fitting = losses_for(task)
    if name != "auto" and name not in fitting:
        raise InvalidInput(f"the loss {name!r} does not fit {task}",
                           remedy=f"Choose one of: auto, {', '.join(fitting)}")
    kind: Any = LOSSES[fitting[0] if name == "auto" else name]
    if task == "classification" and n_classes > 2:
        if not kind.log_odds:
            raise InvalidInput(f"the {name.replace('_', ' ')} is for two classes, got {n_classes}",
                               remedy="Use 'logistic'")
        kind = Multinomial
    if not (isinstance(ridge, (int, float)) and 0 <= ridge < np.inf):
        raise InvalidInput(f"ridge must be a finite number >= 0, got {ridge!r}",
                           remedy="Use for example 1e-3")
    if not kind.affine:
        return kind()
    if kind.multiclass:
        return kind(ridge=float(ridge), penalize_intercept=True, n_classes=n_classes)
    return kind(ridge=float(ridge), penalize_intercept=True)


def learn_units(users: Users, settings: Settings, n_classes: int = 0) -> Units:
    """The units of these users' data."""
    return Units.learn(users, settings.task, loss=settings.loss, ridge=settings.ridge,
                       n_classes=max(n_classes, settings.n_classes),
                       standardize=settings.standardize)
