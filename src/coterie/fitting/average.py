"""An average of models, where it predicts better than the one kind that a fit has chosen.

    prediction of a row = sum over parts of weight x prediction of the part

The parts are the candidates of `coterie.fitting.candidates`, and the models of the kind that was
chosen, with their groups; `coterie.fitting.averaging` finds them. The weights are not negative,
have the sum one, and minimise the mean over users of the loss of rows left out: for numbers the
logarithm of the mean squared error, for classes the log loss, for counts the deviance. A kind with
equal models of users alone is kept, with its groups exactly as they are, unless the average is
better by more than one standard error, over users, of the difference, and by more than one percent.
Models that differ between all users anyway are averaged, unless the average is worse by more than
one standard error.

The models of one part minimise a convex function, and the norm of its gradient is kept beside them.
An average of such models is the minimiser of no one problem. Parts on one scale are linear in the
same columns, so that together they are one model of each user in these.

An interval around a prediction is it plus and minus q sqrt(v + s), v the variance of the model, s
that of the noise: q is the quantile, over all rows left out, of the distance from the prediction in
units of this (Papadopoulos et al. 2002; conformal prediction with normalised residuals).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np

from coterie.base.errors import InvalidInput
from coterie.base.types import Array, Ints
from coterie.data.encoding import Task
from coterie.fitting.basis import Basis
from coterie.fitting.candidates import Limits, Scale, finished
from coterie.fitting.units import Units
from coterie.groups.hierarchy import Estimate, Form, Variances

_LEAST = 0.02  # weight below which a part is left out
_SOFT = 0.3  # of the median over users of the squared error, added to each before its logarithm
_TURNS = 5  # parts of the users, each judged with weights that the others give
_LITTLE = 0.01  # share of the loss that an average has to gain, of numbers of its square root
_STEPS, _LEVEL = 2000, 1e-7  # steps to the weights, and the gain that ends them


class Part(NamedTuple):
    """One model of an average.

    Parameters
    ----------
    name : in words.
    scale : the position of its scale.
    weight : in the predictions.
    spread : weight in their variances.
    estimate : what everybody shares, and what is personal.
    gradient : norm of the gradient of what it minimises, over that at zero.
    """

    name: str
    scale: int
    weight: float
    spread: float
    estimate: Estimate
    gradient: float


@dataclass(frozen=True, eq=False)
class Average:
    """What predicts: parts, and the kind of models that was chosen, with weights.

    Parameters
    ----------
    task : what the targets are.
    own : the weight of the models of the kind that was chosen; 1 where it predicts alone.
    parts : the others.
    scales : targets and columns of the parts.
    limits : the least and the largest target.
    quantiles : of distances of rows left out from their predictions, in standard deviations, at
        equal steps from 0 to 1; empty where there are no intervals.
    gain, error : how much less the loss of rows left out is than that of the kind alone, mean over
        users, and its standard error.
    """

    task: Task
    own: float
    parts: tuple[Part, ...] = field(repr=False)
    scales: tuple[Scale, ...] = field(repr=False)
    limits: Limits
    quantiles: Array = field(repr=False)
    gain: float
    error: float

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each part, by name, largest first; that of the kind is "kind"."""
        found = {part.name: part.weight for part in self.parts} | {"kind": self.own}
        return {name: weight for name, weight in sorted(found.items(), key=lambda item: -item[1])
                if weight > 0}

    @property
    def used(self) -> bool:
        """Whether there is more than the kind that was chosen."""
        return self.own < 1.0

    def predict(self, X: Array, owner: Ints, own: Array) -> tuple[Array, Array]:
        """Numbers, mean counts, or shares of the second class, and the standard deviations of rows
        around them.

        Parameters
        ----------
        X : (n_rows, n_features) in the units given.
        owner : (n_rows,) positions of users; -1 for unknown ones.
        own : (n_rows,) predictions by the kind that was chosen.
        """
        told, variance = self.own * own, np.zeros(len(X))
        rows = [scale.basis.rows(X, owner) for scale in self.scales]
        for part in self.parts:
            mean, sure = part.estimate.predict(rows[part.scale], owner)
            mine, error = finished(self.task, self.scales[part.scale], mean, sure,
                                   part.estimate.variances.noise, self.limits)
            told = told + part.weight * mine if part.weight else told
            variance += part.spread * error**2
        return told, np.sqrt(variance)

    def quantile(self, level: float) -> float:
        """By how many standard deviations so large a share of rows is at most away."""
        if not 0.0 < level < 1.0:
            raise InvalidInput(f"interval must be a share between 0 and 1, got {level!r}",
                               remedy="Use for example 0.9")
        return float(np.interp(level, np.linspace(0.0, 1.0, len(self.quantiles)), self.quantiles))

    def described(self, kind: str) -> str:
        """Of what predictions are an average; `kind` is what the kind that was chosen is called."""
        named = [f"{kind if name == 'kind' else name} ({weight:.2f})"
                 for name, weight in self.weights.items()]
        return f"Predictions are an average of: {'; '.join(named)}."

    def sentence(self, kind: str) -> str:
        """The same, with the reason."""
        better = "clearly better" if self.gain > self.error else "not clearly worse"
        return (f"{self.described(kind)} It is {better} on rows "
                "left out than one kind of models. Each part is the solution of a convex problem "
                "of its own; their average is not that of one problem.")

    def state(self) -> dict[str, Any]:
        """Arrays, numbers and texts, for `from_state`."""
        scales = [{"basis": scale.basis.state(), "logarithm": int(scale.logarithm),
                   "centre": scale.centre, "spread": scale.spread} for scale in self.scales]
        parts = [{"name": part.name, "scale": part.scale, "weight": part.weight,
                  "spread": part.spread, "gradient": part.gradient,
                  "estimate": _state_of(part.estimate)} for part in self.parts]
        return {"task": self.task, "own": self.own, "parts": parts, "scales": scales,
                "low": self.limits.low, "high": self.limits.high, "quantiles": self.quantiles,
                "gain": self.gain, "error": self.error}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """The average that `state` describes."""
        scales = tuple(Scale(Basis.from_state(each["basis"]), bool(each["logarithm"]),
                             float(each["centre"]), float(each["spread"]))
                       for each in state["scales"])
        parts = tuple(Part(str(each["name"]), int(each["scale"]), float(each["weight"]),
                           float(each["spread"]), _estimate_of(each["estimate"]),
                           float(each["gradient"])) for each in state["parts"])
        return cls(state["task"], float(state["own"]), parts, scales,
                   Limits(float(state["low"]), float(state["high"])),
                   np.asarray(state["quantiles"]), float(state["gain"]), float(state["error"]))


def _state_of(estimate: Estimate) -> dict[str, Any]:
    form, variances = estimate.form, estimate.variances
    return {"columns": form.columns, "blocks": form.blocks, "personal": form.personal,
            "curves": form.curves, "noise": variances.noise, "variances": variances.blocks,
            "covariance": variances.covariance, "mean": estimate.mean, "error": estimate.error,
            "own": estimate.personal, "spread": estimate.spread, "follows": estimate.follows,
            "evidence": estimate.evidence}


def _estimate_of(state: Mapping[str, Any]) -> Estimate:
    form = Form(*(np.asarray(state[name]).astype(np.int64)
                  for name in ("columns", "blocks", "personal", "curves")))
    variances = Variances(float(state["noise"]), np.asarray(state["variances"]),
                          np.asarray(state["covariance"]))
    mean, error, own, spread, follows = (np.asarray(state[name]) for name in (
        "mean", "error", "own", "spread", "follows"))
    return Estimate(form, variances, mean, error, own, spread, follows, float(state["evidence"]))


def predicted(units: Units, X: Array, models: Array) -> Array:
    """Numbers, mean counts, or shares of the second class, each row by its own model."""
    with np.errstate(over="ignore"):
        if units.n_classes:
            return units.probabilities(X, models)[:, 1]
        return units.predict(X, models)


# -- weights


@dataclass(frozen=True, eq=False)
class ErrorProducts:
    """Of numbers: products of errors, summed over rows.

    Parameters
    ----------
    products : (n_users, n_options, n_options) means over the rows of each user.
    typical : the median over users of the squared error of the mean of all options.
    """

    products: Array
    typical: float

    @classmethod
    def of(cls, sums: Array, rows: Array) -> Self:
        """From sums of products of users with rows that were left out."""
        products = sums / rows[:, None, None]
        return cls(products, float(np.median(products.mean(axis=(1, 2)))))

    @property
    def n_options(self) -> int:
        """The kind that was chosen, option 0, and the candidates."""
        return self.products.shape[1]

    @property
    def n_users(self) -> int:
        """Users with rows that were left out."""
        return len(self.products)

    def by_user(self, weights: Array) -> Array:
        """(n_users,) the loss of each user."""
        return np.asarray(0.5 * np.log(self._means(weights)[1]))

    def value(self, weights: Array) -> tuple[float, Array]:
        """The mean over users of the loss, and its slope by the weights."""
        pulls, means = self._means(weights)
        return 0.5 * float(np.log(means).mean()), (pulls / means[:, None]).mean(axis=0)

    def take(self, users: Ints) -> Self:
        """The same of some users."""
        return replace(self, products=self.products[users])

    def _means(self, weights: Array) -> tuple[Array, Array]:
        pulls = self.products @ weights
        means = np.maximum(pulls @ weights, 0.0)
        return pulls, means + _SOFT * self.typical + 1e-300


@dataclass(frozen=True, eq=False)
class RowsLeftOut:
    """Of classes and counts: predictions of rows, in the order of their users.

    Parameters
    ----------
    task : what the targets are.
    told : (n_rows, n_options) shares of the second class, or mean counts.
    y : (n_rows,) targets.
    owner : (n_rows,) users, as 0, 1, ...
    """

    task: Task
    told: Array
    y: Array
    owner: Ints

    @classmethod
    def of(cls, task: Task, told: Array, y: Array, owner: Ints) -> Self:
        """Those of these rows."""
        return cls(task, told, y, np.unique(owner, return_inverse=True)[1])

    @property
    def n_options(self) -> int:
        return self.told.shape[1]

    @property
    def n_users(self) -> int:
        return int(self.owner.max()) + 1

    def by_user(self, weights: Array) -> Array:
        losses = row_losses(self.task, self.told @ weights, self.y)
        return np.asarray(np.bincount(self.owner, losses) / np.bincount(self.owner))

    def value(self, weights: Array) -> tuple[float, Array]:
        told, y = self.told @ weights, self.y
        row = 1.0 / np.bincount(self.owner)[self.owner] / self.n_users
        if self.task == "classification":
            share = np.maximum(np.where(y > 0, told, 1.0 - told), 1e-12)
            slope = (row * np.where(y > 0, -1.0, 1.0) / share) @ self.told
            return float(-(row * np.log(share)).sum()), np.asarray(slope)
        mean = np.maximum(told, 1e-12)
        return (float((row * row_losses(self.task, mean, y)).sum()),
                np.asarray((row * 2.0 * (1.0 - y / mean)) @ self.told))

    def take(self, users: Ints) -> Self:
        rows = np.isin(self.owner, users)
        return self.of(self.task, self.told[rows], self.y[rows], self.owner[rows])


#: What is known of the kind that was chosen and of candidates on rows left out.
LeftOut = ErrorProducts | RowsLeftOut


def weights_of(judged: LeftOut) -> Array:
    """(n_options,) by exponentiated gradient steps, with weights under `_LEAST` left out."""
    n = judged.n_options
    weights, rate = np.full(n, 1.0 / n), 1.0
    value, slope = judged.value(weights)
    for _ in range(_STEPS):
        step = np.log(np.maximum(weights, 1e-300)) - rate * (slope - slope.min())
        new = np.exp(step - step.max())
        new /= new.sum()
        next_value, next_slope = judged.value(new)
        if not next_value <= value:
            rate *= 0.5
            if rate < 1e-6:
                break
            continue
        gain, weights, value, slope = value - next_value, new, next_value, next_slope
        if gain < _LEVEL * rate and rate > 0.1:
            break
        rate = min(1.5 * rate, 1e3)
    weights = np.where(weights < _LEAST, 0.0, weights)
    return np.asarray(weights / weights.sum())


def gains_of(judged: LeftOut) -> Array:
    """(n_users,) by how much the average is better than the first option, for each user with the
    weights that the others give: the weights themselves are not judged by their own rows.
    """
    kind = np.eye(judged.n_options)[0]
    # Neighbours in the order of their loss are judged in different turns.
    users = np.argsort(judged.by_user(kind), kind="stable")
    n, gains = min(_TURNS, len(users)), np.empty(len(users))
    for turn in range(n):
        mine = np.sort(users[turn::n])
        weights = weights_of(judged.take(np.setdiff1d(users, mine)))
        part = judged.take(mine)
        gains[mine] = part.by_user(kind) - part.by_user(weights)
    return gains


def row_losses(task: Task, told: Array, y: Array) -> Array:
    """(n_rows,) squared errors, log losses, or deviances."""
    if task == "regression":
        return np.asarray((told - y) ** 2)
    if task == "classification":
        return np.asarray(-np.log(np.clip(np.where(y > 0, told, 1.0 - told), 1e-12, 1.0)))
    mean = np.maximum(told, 1e-12)
    return np.asarray(2.0 * (np.where(y > 0, y * np.log(np.where(y > 0, y, 1.0) / mean), 0.0)
                             - y + mean))


class StackedWeights(NamedTuple):
    """Weights of the kind and the candidates, and of the candidates' variances."""

    weights: Array
    spread: Array
    gain: float
    error: float

    @classmethod
    def of(cls, judged: LeftOut, *, numbers: bool, differ: bool) -> Self:
        """The average where it is clearly better or, if models of the kind differ between all users
        anyway, not clearly worse; else the kind alone with, of numbers, the variances of the best
        candidate.
        """
        weights, better = weights_of(judged), gains_of(judged)
        kind = np.eye(len(weights))[0]
        gain, error = float(better.mean()), float(better.std(ddof=1) / np.sqrt(len(better)))
        size = 1.0 if numbers else float(judged.by_user(kind).mean())
        if not gain > (-error if differ else max(error, _LITTLE * size)):
            weights = kind
        if weights[0] < 1.0:
            spread = weights[1:] / weights[1:].sum()
        else:
            means = [float(judged.by_user(option).mean()) for option in np.eye(len(weights))[1:]]
            spread = np.eye(len(means))[int(np.argmin(means))] * float(numbers)
        return cls(weights, np.asarray(spread), gain, error)
