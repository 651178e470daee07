"""The models that an average is made of, each learned from sums, and their predictions of rows left
out.

    straight columns    x  one model | own intercepts | personal slopes
    curves, own means   x  own intercepts | personal slopes | personal curves
                        on the level of the target, and on its logarithm where it is positive

Each is a hierarchical model (`coterie.groups.hierarchy`) in some columns of a basis
(`coterie.fitting.basis`). Rows are left out in five folds, with variances learned again without
them: for numbers on the sums of all rows less those of the fold. Classes and counts are working
least-squares problems of iteratively reweighted least squares, solved again without the fold.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from coterie.base.types import Array, Ints
from coterie.data.encoding import Task
from coterie.data.users import Users
from coterie.fitting.basis import Basis
from coterie.groups.hierarchy import (
    Estimate,
    Form,
    ModelSums,
    Variances,
    learn,
    with_scaled,
)

N_FOLDS = 5
_PERSONAL = 3  # personal curves, at most
_IN_FOLD = 6  # rounds of EM in a fold
_STEPS, _FOLD_STEPS = 12, 5  # working problems, of all rows and without a fold
_LAST_STEPS = 25  # of all users, with variances that are known
_CALM = 2  # working problems after which steps are damped
_SCALES = (1.0, 3.0, 9.0, 27.0, 81.0)  # of T, that Laplace's evidence is compared for
_LEAST_WEIGHT = 1e-5  # of a row in a working problem
_LOWEST_LOG = -12.0  # of the mean of a count


@dataclass(frozen=True, eq=False)
class Scale:
    """The target of one scale, and the basis that goes with it.

    Parameters
    ----------
    basis : of the columns.
    logarithm : whether the target is taken by its logarithm.
    centre, spread : of the target on this scale; for classes and counts the margin of the mean
        target, and 1.
    """

    basis: Basis
    logarithm: bool
    centre: float
    spread: float

    def inner(self, y: Array) -> Array:
        """Targets on this scale."""
        t = np.log(y) if self.logarithm else y
        return np.asarray((t - self.centre) / self.spread)


class Candidate(NamedTuple):
    """One model: its name, the position of its scale, and its form."""

    name: str
    scale: int
    form: Form


class Limits(NamedTuple):
    """The least and the largest target, which predictions do not leave far."""

    low: float
    high: float


def starts_of(own: Array, rows: Array) -> Ints:
    """(n_users,) the fold that each user begins with, in the order of the sums of their columns, so
    that neither names nor order matter; `own` are (n_users, q + 1) means, the target's last.
    """
    first = np.empty(len(rows), dtype=np.int64)
    first[np.lexsort((own * rows[:, None]).T)] = np.arange(len(rows))
    return first % N_FOLDS


def folds_of(users: Users, task: Task, first: Ints, seed: int) -> Ints:
    """(n_rows,) the fold of each row: of each user's rows, and of its classes, as many in each. The
    only row of a user is never left out: -1.

    Parameters
    ----------
    users : whose rows.
    task : what the targets are.
    first : (n_users,) the fold that each user begins with.
    seed : of the fit.
    """
    counts, offsets, y = users.counts, users.offsets[:-1], users.targets
    assert y is not None
    row = np.arange(users.n_samples) - offsets[users.owner]
    chance = np.random.default_rng([seed, 5]).random(int(counts.max(initial=0)))[row]
    strata = y if task == "classification" else np.zeros(len(y))
    order = np.lexsort((chance, strata, users.owner))
    fold = np.empty(users.n_samples, dtype=np.int64)
    fold[order] = (row + np.asarray(first, dtype=np.int64)[users.owner]) % N_FOLDS
    fold[counts[users.owner] < 2] = -1
    return fold


def forms_of(basis: Basis, scale: int, *, straight: bool) -> list[Candidate]:
    """The candidates of one scale."""
    lines = basis.part_of("straight")[0]
    bent, means = basis.part_of("curves"), basis.part_of("means")
    inside = [0, *(1 + np.flatnonzero(basis.varies))]
    own = {"own intercepts": [0], "personal slopes": inside}
    where = ", logarithms" * bool(scale)
    found = []
    if straight or not (bent or means):
        plain = _form([lines], {"one model": [], **own})
        found += [Candidate(f"straight columns, {name}{where}", scale, form)
                  for name, form in plain.items()]
    if bent or means:
        some = [k for k, curve in enumerate(basis.curves) if basis.varies[curve.column]]
        rich = _form([lines, *bent, *means], own)
        if some[:_PERSONAL]:
            rich |= _form([lines, *bent, *means], {"personal curves": inside},
                          [bent[k] for k in some[:_PERSONAL]])
        what = "curves" if bent else "own means"
        found += [Candidate(f"{what}, {name}{where}", scale, form) for name, form in rich.items()]
    return found


def _form(parts: list[Ints], own: dict[str, list[int]],
          curves: list[Ints] | None = None) -> dict[str, Form]:
    """Forms with these blocks of columns, and personal parts by name."""
    columns = np.concatenate([[0], *parts]).astype(np.int64)
    blocks = np.repeat(np.arange(len(parts) + 1), [1, *(len(part) for part in parts)])
    places = {int(column): k for k, column in enumerate(columns)}
    out = {}
    for name, personal in own.items():
        free = [places[int(j)] for j in personal]
        more = [places[int(j)] for part in curves or () for j in part]
        numbers = np.repeat(np.arange(1, len(curves or ()) + 1),
                            [len(part) for part in curves or ()])
        out[name] = Form(columns, blocks, np.array(free + more, dtype=np.int64),
                         np.concatenate([np.zeros(len(free), dtype=np.int64), numbers]))
    return out


# -- from margins to predictions


def _top(limits: Limits) -> float:
    """The logarithm of twice the largest count: no mean is larger."""
    return float(np.log(2.0 * max(limits.high, 1.0)))


def finished(task: Task, scale: Scale, mean: Array, variance: Array, noise: float,
             limits: Limits) -> tuple[Array, Array]:
    """Predictions in the target's own units, and their standard deviations with the noise; of
    classes the share of the second one.
    """
    if task == "classification":
        shares = 1.0 / (1.0 + np.exp(-(mean + scale.centre) / np.sqrt(1.0 + np.pi * variance / 8)))
        return shares, np.sqrt(shares * (1.0 - shares))
    if task == "counts":
        t = np.clip(mean + scale.centre + np.minimum(variance, 1.0) / 2, _LOWEST_LOG,
                    _top(limits))
        return np.exp(t), np.sqrt(noise * np.exp(t))
    wide, total = limits.high - limits.low, variance + noise
    if not scale.logarithm:
        told = mean * scale.spread + scale.centre
        return (np.clip(told, limits.low - wide, limits.high + wide),
                np.sqrt(total) * scale.spread)
    # The mean of a lognormal target is its median times exp(variance / 2).
    total = np.minimum(total * scale.spread**2, 1.0)
    told = np.exp(np.clip(mean * scale.spread + scale.centre + total / 2, -700.0,
                          np.log(limits.high) + 1.0))
    told = np.clip(told, 0.0, limits.high + wide)
    return told, told * np.sqrt(np.expm1(total))


# -- learning


def learn_numbers(candidates: list[Candidate],
                  sums: list[list[ModelSums]]) -> list[tuple[Estimate, list[Estimate]]]:
    """Of numbers: each candidate from all rows, and without each fold, by the sums of each fold of
    each scale.
    """
    out = []
    whole = [ModelSums(*(sum(arrays[1:], arrays[0]) for arrays in zip(*parts, strict=True)))
             for parts in sums]
    for candidate in candidates:
        total, parts = whole[candidate.scale], sums[candidate.scale]
        estimate = learn(total, candidate.form)
        out.append((estimate, [learn(total.minus(part), candidate.form, estimate.variances,
                                     rounds=_IN_FOLD) for part in parts[:N_FOLDS]]))
    return out


class Working(NamedTuple):
    """Rows of classes or counts, in the order of their users."""

    task: Task
    columns: Array
    target: Array
    offsets: Ints
    centre: float
    top: float

    @property
    def owner(self) -> Ints:
        """(n_rows,) the user of each row."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def sums(self, margins: Array) -> ModelSums:
        """The working least-squares problem at these margins, less the centre."""
        if self.task == "counts":
            margins = np.clip(margins, _LOWEST_LOG, self.top)
            mean = np.exp(margins)
            weights = np.maximum(mean, _LEAST_WEIGHT)
        else:
            mean = 1.0 / (1.0 + np.exp(-margins))
            weights = np.maximum(mean * (1.0 - mean), _LEAST_WEIGHT)
        target = margins + (self.target - mean) / weights - self.centre
        return ModelSums.of(self.columns, target, self.offsets, weights)

    def likelihood(self, margins: Array) -> float:
        """The logarithm of the likelihood of all targets, but for a constant."""
        if self.task == "counts":
            t = np.clip(margins, _LOWEST_LOG, self.top)
            return float((self.target * t - np.exp(t)).sum())
        return -float(np.logaddexp(0.0, -(2.0 * self.target - 1.0) * margins).sum())

    def take(self, rows: Ints) -> Working:
        """Some rows of all users."""
        offsets = np.searchsorted(self.owner[rows], np.arange(len(self.offsets)))
        return self._replace(columns=self.columns[rows], target=self.target[rows],
                             offsets=offsets)

    def solve(self, form: Form, variances: Variances | None, margins: Array, *, steps: int,
              rounds: int) -> tuple[Estimate, Array]:
        """Working problems, one after the other, with some rounds of EM in each."""
        counts, owner, estimate = self.task == "counts", self.owner, None
        for k in range(steps):
            if variances is None:
                start = Variances(1.0, np.ones(form.n_blocks), 0.5 * np.eye(len(form.personal)))
            else:
                start = variances
            estimate = learn(self.sums(margins), form, start, rounds=rounds, noise=counts)
            if counts and estimate.variances.noise < 1.0 and rounds:
                kept = Variances(1.0, estimate.variances.blocks, estimate.variances.covariance)
                estimate = learn(self.sums(margins), form, kept, rounds=0, noise=False)
            variances = estimate.variances
            new = estimate.margins(self.columns, owner) + self.centre
            change = float(np.abs(new - margins).max(initial=0.0))
            margins = new if k < _CALM else 0.3 * margins + 0.7 * new
            if change < 1e-3 and k > _CALM:
                break
        assert estimate is not None
        return estimate, margins

    def with_evidence(self, estimate: Estimate, margins: Array) -> tuple[Estimate, Array]:
        """The scale of T by Laplace's evidence: working problems say too little of it."""
        form, first, best = estimate.form, estimate.variances, -np.inf
        chosen, p = (estimate, margins), form.personal
        for factor in _SCALES if p.size else ():
            variances = with_scaled(first, factor)
            found, at = self.solve(form, variances, margins, steps=4, rounds=0)
            s, T = variances.noise, variances.covariance
            own = self.sums(at).take(form.columns[p]).gram / s
            inverse = np.linalg.pinv(T)
            logs = np.linalg.slogdet(np.eye(len(p)) + own @ T)[1].sum()
            pulled = float(((found.personal @ inverse) * found.personal).sum())
            value = self.likelihood(at) / s - 0.5 * logs - 0.5 * pulled
            if not value > best:
                break
            best, chosen = value, (found, at)
        return chosen


def learn_working(candidates: list[Candidate], scales: list[Scale], users: Users, some: Ints,
                  folds: Ints, task: Task, limits: Limits) -> list[tuple[Estimate, Array]]:
    """Of classes and counts: each candidate from all rows, and its (n_rows,) predictions of rows
    that were left out, by working problems of all rows and again without each fold.
    """
    assert users.targets is not None
    out = []
    for candidate in candidates:
        scale = scales[candidate.scale]
        rows = scale.basis.rows(users.features, some[users.owner])
        work = Working(task, rows, users.targets, users.offsets, scale.centre, _top(limits))
        margins = np.full(len(rows), scale.centre)
        estimate, margins = work.solve(candidate.form, None, margins, steps=_STEPS, rounds=8)
        estimate, margins = work.with_evidence(estimate, margins)
        told = np.full(len(rows), np.nan)
        for f in range(N_FOLDS):
            kept, left = np.flatnonzero(folds != f), np.flatnonzero(folds == f)
            fold, _ = work.take(kept).solve(candidate.form, estimate.variances, margins[kept],
                                            steps=_FOLD_STEPS, rounds=0)
            mean, variance = fold.predict(rows[left], users.owner[left])
            told[left], _ = finished(task, scale, mean, variance, fold.variances.noise, limits)
        out.append((estimate, told))
    return out


# -- for all users, with the variances that some of them showed


def finish_numbers(candidate: Candidate, sums: ModelSums,
                   learned: Estimate) -> tuple[Estimate, float]:
    """A model of numbers for all users, by their sums, and its gradient."""
    estimate = learn(sums, candidate.form, learned.variances, rounds=0)
    return estimate, estimate.gradient(sums)


def finish_working(candidate: Candidate, scale: Scale, users: Users, learned: Estimate,
                   task: Task, limits: Limits) -> tuple[Estimate, float]:
    """A model of classes or counts for all users, and its gradient."""
    assert users.targets is not None
    columns = scale.basis.rows(users.features, users.owner)[:, candidate.form.columns]
    inside = replace(candidate.form, columns=np.arange(columns.shape[1]))
    work = Working(task, columns, users.targets, users.offsets, scale.centre, _top(limits))
    estimate, _ = work.solve(inside, learned.variances, np.full(len(columns), scale.centre),
                                   steps=_LAST_STEPS, rounds=0)
    gradient = estimate.gradient(work.sums(estimate.margins(columns, users.owner)
                                           + scale.centre))
    return replace(estimate, form=candidate.form), gradient
