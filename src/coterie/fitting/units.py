"""Between the user's units and the solver's: standardised features, an intercept, targets a loss can take, and back.

    A = [(X - mean) / scale, 1],     y = (target - centre) / spread  (real targets only)

The intercept is a column of ones like any other and shares the small ridge, so that every user has a best model, those
with samples of one class too, and every answer can be certified.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from coterie._typing import Array
from coterie.data.encoding import TASKS, Task
from coterie.data.users import Standardizer, Users
from coterie.errors import InvalidInput
from coterie.losses import LOSSES, AffineLoss, HuberDistance, Logistic, Loss, Multinomial, SquaredDistance, SquaredHinge
from coterie.losses.multinomial import sum_zero_basis

INTERCEPT = "intercept"
MOST = 1e9  # of counts: steps of exp(t) are lost beyond
#: The losses that fit each task; the first is taken unless another is named.
FITTING: dict[Task, tuple[str, ...]] = {
    "classification": ("logistic", "squared_hinge", "multinomial"), "regression": ("squared", "huber"),
    "counts": ("poisson",), "clustering": ("squared_distance", "huber_distance")}


@dataclass(frozen=True, kw_only=True, eq=False)
class Units:
    """How the numbers given became the numbers solved for."""

    task: Task
    loss: Loss
    n_classes: int  # 0 where targets are not classes
    mean: Array  # (n_features,)
    scale: Array  # (n_features,)
    centre: float
    spread: float
    feature_names: tuple[str, ...]

    @classmethod
    def learn(cls, users: Users, task: Task, *, loss: str = "auto", ridge: float = 1e-3, n_classes: int = 0,
              standardize: bool = True) -> Self:
        """From the users whose models are to be found; targets of classes are numbers 0, 1, ..."""
        if task not in TASKS:
            raise InvalidInput(f"unknown task {task!r}", remedy=f"Choose one of: {', '.join(TASKS)}")
        if task == "clustering":
            users = replace(users, targets=None)
        elif users.targets is None:
            raise InvalidInput(f"{task} needs targets, and these users have none", remedy="Give y")
        if task == "classification":
            assert users.targets is not None
            n_classes = max(n_classes, int(users.targets.max()) + 1)
            if n_classes < 2:
                raise InvalidInput("all samples are of one class", remedy="Give samples of at least two")
        if task == "counts":
            assert users.targets is not None
            if users.targets.max() > MOST:
                raise InvalidInput(f"a count of {users.targets.max():g} is beyond what a Poisson regression can tell "
                                   "from others", remedy="Take it for a regression, or give it in larger units")
        p = users.n_features
        mean, scale, centre, spread = np.zeros(p), np.ones(p), 0.0, 1.0
        if standardize:
            scaler = Standardizer.from_moments(users.moments(), feature_names=users.feature_names)
            mean, scale = scaler.mean, scaler.scale
        if task == "regression":
            assert users.targets is not None
            with np.errstate(over="ignore"):
                centre, spread = float(users.targets.mean()), float(users.targets.std())
            if not np.isfinite(spread):
                raise InvalidInput("the spread of the targets is beyond float64", remedy="Give them in larger units")
            spread = spread if spread > 1e-12 * abs(centre) else 1.0
        return cls(task=task, loss=make_loss(task, loss, ridge, n_classes), n_classes=n_classes, mean=mean, scale=scale,
                   centre=centre, spread=spread, feature_names=users.feature_names)

    def inner(self, users: Users) -> Users:
        """The users as the solver sees them."""
        y = users.targets
        if self.task == "clustering":
            y = None
        elif y is not None and self.task == "regression":
            y = (y - self.centre) / self.spread
        elif y is not None and isinstance(self.loss, (Logistic, SquaredHinge)):
            y = 2.0 * y - 1.0
        names = users.feature_names if self.task == "clustering" else (*users.feature_names, _fresh(users))
        return Users(self.rows(users.features), y, users.offsets, users.names, names)

    def rows(self, X: Array) -> Array:
        with np.errstate(over="ignore"):
            scaled = (X - self.mean) / self.scale
        return scaled if self.task == "clustering" else np.column_stack([scaled, np.ones(len(X))])

    def margins(self, X: Array, models: Array) -> Array:
        """(n_rows,) or (n_rows, n_classes): what each row's model says of it; a real target is in its own units."""
        t = self.loss.decision(self.rows(X), models)
        return t * self.spread + self.centre if self.task == "regression" else t

    def predict(self, X: Array, models: Array) -> Array:
        """Each row's target under its own model: a class number, a number, or a mean count."""
        told = self.loss.predict(self.rows(X), models)
        if self.task == "regression":
            return told * self.spread + self.centre
        return (told + 1.0) / 2.0 if self.n_classes == 2 and not isinstance(self.loss, Multinomial) else told

    def scores(self, models: Array, test: Users) -> Array:
        """(n_users,) accuracy, root mean squared error or mean Poisson deviance; nan for users without rows."""
        y, owner = test.targets, test.owner
        assert y is not None
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            told = self.predict(test.features, models[owner])
            if self.task == "classification":
                each = (told == y).astype(float)
            elif self.task == "counts":  # 2 (y log(y / told) - y + told)
                each = 2 * (np.where(y > 0, y * np.log(np.where(y > 0, y, 1.0) / told), 0.0) - y + told)
            else:
                each = (told - y) ** 2
            means = np.bincount(owner, each, test.n_users) / test.counts
            return np.sqrt(means) if self.task == "regression" else means

    def probabilities(self, X: Array, models: Array) -> Array:
        """(n_rows, n_classes) for losses that are log-likelihoods."""
        if isinstance(self.loss, SquaredHinge) or not self.n_classes:
            raise InvalidInput(f"{type(self.loss).__name__} has no probabilities", remedy="Use the loss 'logistic'")
        t = self.margins(X, models)
        t = np.stack([-t / 2, t / 2], axis=1) if t.ndim == 1 else t
        t = np.exp(t - t.max(axis=1, keepdims=True))
        return t / t.sum(axis=1, keepdims=True)

    def coefficients(self, models: Array) -> Array:
        """(n, n_features + 1, outputs) models in the units given, the intercept last; points: (n, n_features, 1)."""
        n = len(models)
        if self.task == "clustering":
            return (models * self.scale + self.mean)[..., None]
        w = models.reshape(n, len(self.mean) + 1, -1)
        if isinstance(self.loss, Multinomial):
            w = w @ sum_zero_basis(w.shape[2] + 1)
        # <w, (x - mean) / scale> + b = <w / scale, x> + (b - <w / scale, mean>)
        slopes = w[:, :-1] / self.scale[:, None] * self.spread
        first = w[:, -1] * self.spread + self.centre - np.einsum("npk,p->nk", slopes, self.mean)
        return np.concatenate([slopes, first[:, None]], axis=1)

    def restored(self, coefficients: Array) -> Array:
        """The models whose `coefficients` these are."""
        if self.task == "clustering":
            return (coefficients[..., 0] - self.mean) / self.scale
        slopes, first = coefficients[:, :-1], coefficients[:, -1]
        w = np.concatenate([slopes * self.scale[:, None] / self.spread, (
            (first - self.centre + np.einsum("npk,p->nk", slopes, self.mean)) / self.spread)[:, None]], axis=1)
        if isinstance(self.loss, Multinomial):
            w = w @ sum_zero_basis(w.shape[2]).T
        return w.reshape(len(w), -1)

    @property
    def coefficient_names(self) -> list[str]:
        return [*self.feature_names, *([] if self.task == "clustering" else [INTERCEPT])]

    def state(self) -> dict[str, Any]:
        """Arrays, numbers and texts, for `from_state`."""
        kind = type(self.loss)
        return {"task": self.task, "loss": next(name for name, made in LOSSES.items() if made is kind),
                "ridge": getattr(self.loss, "ridge", 0.0), "n_classes": self.n_classes, "mean": self.mean,
                "scale": self.scale, "centre": self.centre, "spread": self.spread, "features": list(self.feature_names)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        loss = make_loss(state["task"], state["loss"], state["ridge"], state["n_classes"])
        return cls(task=state["task"], loss=loss, n_classes=state["n_classes"],
                   mean=np.array(state["mean"], dtype=float), scale=np.array(state["scale"], dtype=float),
                   centre=state["centre"], spread=state["spread"],
                   feature_names=tuple(state["features"]))


def make_loss(task: Task, name: str, ridge: float, n_classes: int) -> Loss:
    """The task's loss, or the one named; without an intercept of its own, since a column of ones stands for it."""
    fitting = FITTING[task]
    if name != "auto" and name not in fitting:
        raise InvalidInput(f"the loss {name!r} does not fit {task}",
                           remedy=f"Choose one of: auto, {', '.join(fitting)}")
    kind: Any = LOSSES[fitting[0] if name == "auto" else name]
    if task == "classification" and n_classes > 2:
        if name == "squared_hinge":
            raise InvalidInput(f"the squared hinge tells two classes apart, got {n_classes}", remedy="Use 'logistic'")
        kind = Multinomial
    if not (isinstance(ridge, (int, float)) and 0 <= ridge < np.inf):
        raise InvalidInput(f"ridge must be a finite number >= 0, got {ridge!r}", remedy="Use for example 1e-3")
    if kind in (SquaredDistance, HuberDistance):
        return kind()
    assert issubclass(kind, AffineLoss)
    if kind is Multinomial:
        return Multinomial(ridge=float(ridge), intercept=False, n_classes=n_classes)
    return kind(ridge=float(ridge), intercept=False)


def _fresh(users: Users) -> str:
    """A name for the intercept that no feature has."""
    name = INTERCEPT
    while name in users.feature_names:
        name += "_"
    return name
