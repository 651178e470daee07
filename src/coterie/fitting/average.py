"""An average of models, where it predicts better than the one kind that a fit has chosen.

    prediction of a row = sum over parts of weight x prediction of the part

The parts are the candidates of `coterie.fitting.candidates`, and the models of the kind that was
chosen, with their groups. The weights are not negative, have the sum one, and minimise the mean
over users of the loss of rows left out: for numbers the logarithm of the mean squared error, for
classes the log loss, for counts the deviance. A kind with equal models of users alone is kept, with
its groups exactly as they are, unless the average is better by more than one standard error, over
users, of the difference, and by more than one percent. Models that differ between all users anyway
are averaged, unless the average is worse by more than one standard error.

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
from coterie.base.types import Array, Flags, Ints
from coterie.data.encoding import Task
from coterie.data.users import Users
from coterie.fitting.basis import Basis
from coterie.fitting.candidates import (
    Candidate,
    Learned,
    Limits,
    Scale,
    curved,
    finish_numbers,
    finish_working,
    finished,
    folds_of,
    forms_of,
    learn_numbers,
    learn_working,
)
from coterie.fitting.kinds import Sharing, group_centres
from coterie.fitting.settings import Settings
from coterie.fitting.units import Units
from coterie.groups.hierarchy import Estimate, Form, Variances
from coterie.losses import losses_for

_LEAST = 0.02  # weight below which a part is left out
_SOFT = 0.3  # of the median over users of the squared error, added to each before its logarithm
_TURNS = 5  # parts of the users, each judged with weights that the others give
_LITTLE = 0.01  # share of the loss that an average has to gain, of numbers of its square root
_STEPS, _LEVEL = 2000, 1e-7  # steps to the weights, and the gain that ends them
_QUANTILES = 200  # of distances from predictions that are kept
# Users and rows that everything is learned from, at most, also of classes and counts, whose rows
# are summed again and again; and numbers of all users' sums.
_USERS, _ROWS, _WORKING_ROWS, _NUMBERS = 250, 20_000, 8_000, 4e7
_WIDEST = 60  # features up to which an average is made
_MOVES = 2  # times that users change groups in a fold


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


# -- what is averaged, and whether


def possible(settings: Settings, units: Units, users: Users) -> bool:
    """Whether an average is looked for: of numbers, two classes or counts with the usual loss, of
    several users, some of whom have several rows, and not too many columns.
    """
    usual = settings.task != "clustering" and settings.loss in ("auto",
                                                                losses_for(settings.task)[0])
    return (settings.average == "auto" and usual and settings.count == "rows"
            and units.n_classes <= 2 and users.n_users > 1 and users.n_features <= _WIDEST
            and int(users.counts.max()) > 1)


def check_scale(settings: Settings, users: Users) -> None:
    """Raises where logarithms of the target are asked for, and it has none."""
    if settings.scale == "log" and settings.task == "regression":
        assert users.targets is not None
        if not users.targets.min() > 0:
            raise InvalidInput(f"the target is not positive everywhere (the least value is "
                               f"{users.targets.min():g}), so it has no logarithm",
                               remedy="Use --scale auto")


def find_average(units: Units, users: Users, sharing: Sharing,
                 settings: Settings) -> Average | None:
    """The average for these users, or the kind that was chosen with what intervals need.

    Parameters
    ----------
    units : of the data.
    users : their rows, in the units given.
    sharing : the kind of models that was chosen, and its groups.
    settings : of the fit.

    Returns
    -------
    The average; None where rows are too few to judge it.
    """
    # 1. Some users, their folds, and the columns.
    some = _some(users, _ROWS if settings.task == "regression" else _WORKING_ROWS)
    sample = users if len(some) == users.n_users else users.take(some)
    y = sample.targets
    assert y is not None
    folds = folds_of(sample, settings.task, settings.seed)
    left = np.flatnonzero(folds >= 0)
    if len(np.unique(sample.owner[left])) < 2 or not y.std() > 0:
        return None
    limits = Limits(float(y.min()), float(y.max()))
    scales = _scales(users, settings)
    if not scales:
        return None
    candidates = [each for k, scale in enumerate(scales)
                  for each in forms_of(scale.basis, k, straight=k == 0)]
    # 2. Candidates, and predictions of rows left out; the kind that was chosen is the first.
    if settings.task == "regression":
        learned = learn_numbers(candidates, scales, sample, some, folds, limits)
    else:
        learned = learn_working(candidates, scales, sample, some, folds, settings.task, limits)
    kind = _kind_left_out(units, sample, _sharing_of(sharing, some), folds)
    told = np.stack([kind, *(one.told for one in learned)], axis=1)[left]
    judged = _Judged.of(settings.task, told, y[left], sample.owner[left])
    # 3. Weights, and whether they are clearly better.
    weights = judged.weights()
    worse = judged.gains()
    gain, error = float(worse.mean()), float(worse.std(ddof=1) / np.sqrt(len(worse)))
    size = 1.0 if settings.task == "regression" else float(judged.by_user(told[:, 0]).mean())
    # Equal models are given up where an average is clearly better; models that differ between all
    # users anyway, unless it is clearly worse.
    differ = sharing.kind == "personal" and sharing.n_groups == 1
    if not gain > (-error if differ else max(error, _LITTLE * size)):
        weights = np.eye(len(weights))[0]
    # 4. The parts, for all users, and distances for intervals.
    spread = _spread_weights(judged, weights)
    parts = _finish(users, _Options(scales, candidates, learned), weights, spread, settings.task,
                    limits)
    quantiles = _distances(judged, learned, weights, spread, left)
    used = list(dict.fromkeys(part.scale for part in parts))
    return Average(settings.task, float(weights[0]),
                   tuple(part._replace(scale=used.index(part.scale)) for part in parts),
                   tuple(scales[k] for k in used), limits, quantiles, gain, error)


class _Options(NamedTuple):
    """What may be averaged."""

    scales: list[Scale]
    candidates: list[Candidate]
    learned: list[Learned]


def _spread_weights(judged: _Judged, weights: Array) -> Array:
    """(n_candidates,) weights of variances: those of predictions or, where the kind predicts
    alone, one for the best candidate of numbers.
    """
    if weights[0] < 1.0:
        return np.asarray(weights[1:] / weights[1:].sum())
    if judged.task != "regression":
        return np.zeros(len(weights) - 1)
    means = [float(judged.by_user(column).mean()) for column in judged.told.T[1:]]
    return np.asarray(np.eye(len(means))[int(np.argmin(means))])


def _finish(users: Users, options: _Options, weights: Array, spread: Array, task: Task,
            limits: Limits) -> list[Part]:
    """The parts, for all users."""
    parts = []
    for k in np.flatnonzero(np.maximum(weights[1:], spread) > 0):
        candidate, first = options.candidates[k], options.learned[k].estimate
        scale = options.scales[candidate.scale]
        estimate, gradient = (
            finish_numbers(candidate, scale, users, first) if task == "regression"
            else finish_working(candidate, scale, users, first, task, limits))
        parts.append(Part(candidate.name, candidate.scale, float(weights[1 + k]),
                          float(spread[k]), estimate, gradient))
    return parts


def _distances(judged: _Judged, learned: list[Learned], weights: Array, spread: Array,
               left: Ints) -> Array:
    """Quantiles of the distances of rows left out, in standard deviations; for numbers only."""
    if judged.task != "regression":
        return np.zeros(0)
    variances = np.stack([one.errors[left] ** 2 for one in learned], axis=1) @ spread
    away = np.abs(judged.y - judged.told @ weights) / np.sqrt(np.maximum(variances, 1e-300))
    return np.asarray(np.quantile(away, np.linspace(0.0, 1.0, _QUANTILES + 1)))


def _some(users: Users, rows: int) -> Ints:
    """Positions of the users that all is learned from, with about so many rows."""
    most = min(_USERS, max(2, int(rows / max(float(users.counts.mean()), 1.0))))
    return np.unique(np.linspace(0, users.n_users - 1, min(users.n_users, most)).astype(np.int64))


def _scales(users: Users, settings: Settings) -> list[Scale]:
    """The scales of the target, each with its columns."""
    y, X, task = users.targets, users.features, settings.task
    assert y is not None
    numbers, scales = task == "regression", list[Scale]()
    for logarithms in (False, True) if settings.scale == "auto" else (settings.scale == "log",):
        if logarithms and numbers and not y.min() > 0:
            continue
        basis = Basis.learn(X, users.offsets, logarithms=logarithms)
        if logarithms and not numbers and not basis.logs.any() and scales:
            continue
        t = np.log(y) if logarithms and numbers else y
        most = _room(users, basis)
        if most < 0:
            continue
        if settings.curves == "auto":
            basis = curved(X, t, users.offsets, basis, most)
        else:
            basis = replace(basis, means=basis.means[:, :0])
        scales.append(Scale(basis, logarithms and numbers, *_centre(task, t)))
    return scales


def _room(users: Users, basis: Basis) -> int:
    """Curves that fit into memory for all users; -1 where not even straight columns do."""
    straight = 1 + users.n_features + basis.means.shape[1]
    inside = 1 + int(basis.varies.sum())
    for curves in range(8, -1, -1):
        width, own = straight + 6 * curves, inside + 6 * min(curves, 3)
        if users.n_users * width * (width + 3.0 * own) <= _NUMBERS:
            return curves
    return -1


def _centre(task: Task, t: Array) -> tuple[float, float]:
    """What is subtracted from margins or targets, and what they are divided by."""
    mean = float(t.mean())
    if task == "regression":
        return mean, max(float(t.std()), 1e-300)
    if task == "counts":
        return float(np.log(max(mean, 1e-3))), 1.0
    share = float(np.clip(mean, 1e-3, 1.0 - 1e-3))
    return float(np.log(share / (1.0 - share))), 1.0


# -- the kind that was chosen, without some rows


def predicted(units: Units, X: Array, models: Array) -> Array:
    """Numbers, mean counts, or shares of the second class, each row by its own model."""
    with np.errstate(over="ignore"):
        if units.n_classes:
            return units.probabilities(X, models)[:, 1]
        return units.predict(X, models)


def _sharing_of(sharing: Sharing, some: Ints) -> Sharing:
    """The same for some of the users."""
    labels = np.unique(sharing.labels[some], return_inverse=True)[1].astype(np.int64)
    noise = None if sharing.noise is None else sharing.noise[some]
    return replace(sharing, labels=labels, noise=noise)


def _kind_left_out(units: Units, users: Users, sharing: Sharing, folds: Ints) -> Array:
    """(n_rows,) predictions of rows that were left out; users choose their group again without
    them.
    """
    inner, told = units.inner(users), np.full(users.n_samples, np.nan)
    assert inner.targets is not None
    for f in range(int(folds.max()) + 1):
        kept, left = np.flatnonzero(folds != f), np.flatnonzero(folds == f)
        part = replace(inner, features=inner.features[kept], targets=inner.targets[kept],
                       offsets=np.searchsorted(users.owner[kept], np.arange(users.n_users + 1)))
        models = _moved(units, part, sharing).models(part, units.loss)
        told[left] = predicted(units, users.features[left], models[users.owner[left]])
    return told


def _moved(units: Units, users: Users, sharing: Sharing) -> Sharing:
    """The sharing with each user in the group that is likeliest for these rows."""
    if not 1 < sharing.n_groups < users.n_users:
        return sharing
    outer = sharing.loss(units.loss, users)
    samples = outer.prepare(users)
    for _ in range(_MOVES):
        centres = group_centres(outer, samples, sharing.labels, sharing.count)
        values = np.stack([outer.values(samples, np.repeat(centre[None], users.n_users, axis=0))
                           for centre in centres])
        labels = values.argmin(axis=0)
        if len(np.unique(labels)) < len(centres) or np.array_equal(labels, sharing.labels):
            break
        sharing = replace(sharing, labels=labels.astype(np.int64))
    return sharing


# -- weights


@dataclass(frozen=True, eq=False)
class _Judged:
    """Rows left out, and what the kind that was chosen and the candidates say of them."""

    task: Task
    told: Array  # (n_rows, n_options)
    y: Array
    owner: Ints
    typical: float  # the median over users of the squared error of the mean of all options

    @classmethod
    def of(cls, task: Task, told: Array, y: Array, owner: Ints) -> Self:
        """Those of these rows."""
        counts, plain = np.bincount(owner), told.mean(axis=1)
        mean = np.bincount(owner, (plain - y) ** 2)[counts > 0] / counts[counts > 0]
        return cls(task, told, y, owner, float(np.median(mean)))

    def by_user(self, told: Array) -> Array:
        """(n_judged,) the loss of each user."""
        counts = np.bincount(self.owner)
        mean = np.bincount(self.owner, row_losses(self.task, told, self.y))[counts > 0] \
            / counts[counts > 0]
        if self.task != "regression":
            return np.asarray(mean)
        return np.asarray(0.5 * np.log(mean + _SOFT * self.typical + 1e-300))

    def weights(self) -> Array:
        """(n_options,) by exponentiated gradient steps, with weights under `_LEAST` left out."""
        n = self.told.shape[1]
        weights, rate = np.full(n, 1.0 / n), 1.0
        value, slope = self._value(weights)
        for _ in range(_STEPS):
            step = np.log(np.maximum(weights, 1e-300)) - rate * (slope - slope.min())
            new = np.exp(step - step.max())
            new /= new.sum()
            next_value, next_slope = self._value(new)
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

    def gains(self) -> Array:
        """(n_judged,) by how much the average is better than the first option, for each user with
        the weights that the others give: the weights themselves are not judged by their own rows.
        """
        # Neighbours in the order of their loss are judged in different turns.
        users = np.unique(self.owner)
        users = users[np.argsort(self.by_user(self.told[:, 0]), kind="stable")]
        n, gains = min(_TURNS, len(users)), np.empty(len(users))
        for turn in range(n):
            mine = np.isin(self.owner, users[turn::n])
            weights = self._take(~mine).weights()
            part = self._take(mine)
            gains[np.isin(np.unique(self.owner), users[turn::n])] = part.by_user(
                part.told[:, 0]) - part.by_user(part.told @ weights)
        return gains

    def _take(self, rows: Flags) -> _Judged:
        return replace(self, told=self.told[rows], y=self.y[rows], owner=self.owner[rows])

    def _value(self, weights: Array) -> tuple[float, Array]:
        """The mean over users of the loss, and its slope by the weights."""
        told = self.told @ weights
        counts = np.bincount(self.owner)
        row = 1.0 / counts[self.owner] / (counts > 0).sum()
        if self.task == "regression":
            users = counts > 0
            mean = np.bincount(self.owner, (told - self.y) ** 2)[users] / counts[users]
            soft = mean + _SOFT * self.typical + 1e-300
            scaled = np.zeros(len(counts))
            scaled[users] = 1.0 / soft
            slope = (row * scaled[self.owner] * (told - self.y)) @ self.told
            return 0.5 * float(np.log(soft).mean()), np.asarray(slope)
        if self.task == "classification":
            share = np.maximum(np.where(self.y > 0, told, 1.0 - told), 1e-12)
            slope = (row * np.where(self.y > 0, -1.0, 1.0) / share) @ self.told
            return float(-(row * np.log(share)).sum()), np.asarray(slope)
        mean = np.maximum(told, 1e-12)
        return (float((row * row_losses(self.task, mean, self.y)).sum()),
                np.asarray((row * 2.0 * (1.0 - self.y / mean)) @ self.told))


def row_losses(task: Task, told: Array, y: Array) -> Array:
    """(n_rows,) squared errors, log losses, or deviances."""
    if task == "regression":
        return np.asarray((told - y) ** 2)
    if task == "classification":
        return np.asarray(-np.log(np.clip(np.where(y > 0, told, 1.0 - told), 1e-12, 1.0)))
    mean = np.maximum(told, 1e-12)
    return np.asarray(2.0 * (np.where(y > 0, y * np.log(np.where(y > 0, y, 1.0) / mean), 0.0)
                             - y + mean))
