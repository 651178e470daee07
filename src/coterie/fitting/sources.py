"""What a fit asks of users, wherever their rows are: here where they are in this process.

    summary     level, slope and curvature of each user's loss at its best model around a centre
    evidence    how likely its rows are for models around given centres, by Laplace's approximation
    around      value and slope of the loss of a centre: the user's loss, or with a personal part
                its envelope (`Personal`), whose slope says which model the user gets
    finish      the certificate of the models handed out, and scores on held-out rows

A federation asks the same questions, each in one round, and users answer by the functions here.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np

from coterie.base.errors import CoterieWarning
from coterie.base.types import Array, Flags, Ints
from coterie.data.encoding import Task
from coterie.data.users import Users
from coterie.fitting.average import Average, predicted
from coterie.fitting.averaging import Asked
from coterie.fitting.columns import Answer, ColumnQuestion
from coterie.fitting.scores import (
    INTERVAL,
    METRICS,
    Scores,
    covered_by,
    reliability_of,
    worse_than_alone,
)
from coterie.fitting.units import Units, UserStatistics
from coterie.groups.summaries import RowsSource, Source
from coterie.groups.wide import fit_models
from coterie.losses import Loss, Personal, Samples
from coterie.losses.personal import PersonalSamples
from coterie.losses.rows import too_wide
from coterie.problem.certificates import certify
from coterie.problem.problem import Problem
from coterie.problem.solution import Solution, Status

_OWN = 1e-12  # pull of models that are users' own
# Decrement, relative to the objective, after which personal models take one more step.
_ENOUGH = 1e-8
_AT_ONCE = 200  # users who answer what an average asks at the same time


class Around(NamedTuple):
    """k centres of each user, each with a covariance of the personal part or zeros."""

    centres: Array  # (n_users, k, dim)
    covariances: Array  # (k, dim, dim)
    # Of each centre, (n_users,) the noise of users over the common one, where it differs.
    noises: tuple[Array | None, ...] = ()


class Expanded(NamedTuple):
    """The answers to `Around`."""

    values: Array  # (n_users, k)
    gradients: Array  # (n_users, k, dim)


class Judged(NamedTuple):
    """Models found without the held-out rows, which these judge."""

    fitted: Array  # (n_users, dim)
    together: Array  # (n_users, dim) one model for all
    n_groups: int
    average: Average | None = None  # what predicts instead of `fitted`


class FitSource(Source, Asked, Protocol):
    """A source that can answer for a fit; `parts` are the rows where they are in this process, or
    stand-ins with the same moments. `exact` is whether these are summarised without asking.
    """

    units: Units
    parts: list[Users]
    exact: bool

    def use(self, units: Units) -> None:
        """Take the loss of these units from now on, also for the rows that are not held out, which
        have units of their own.
        """

    def around(self, asked: list[Around]) -> list[Expanded]:
        """Values and slopes around centres, by part; of the first parts, if fewer are asked."""

    def finish(self, solution: Solution, handed: Array, judged: Judged | None,
               tol: float) -> tuple[Solution, Scores | None]:
        """The solution of the users' own problem with its certificate, and scores.

        Parameters
        ----------
        solution : of the problem whose losses are with their users.
        handed : (n_users, dim) the models that users get.
        judged : models found without the held-out rows; None where none are held out.
        tol : the certified relative gap to reach.
        """


class RowsFitSource(RowsSource):
    """Users whose rows are in this process.

    Parameters
    ----------
    units : of their data.
    users : all their rows, in the units given.
    kept, test : those that are not held out, and those that are, of the same users; None where none
        are.
    train_units : of the rows that are not held out.
    """

    def __init__(self, units: Units, users: Users, kept: Users | None = None,
                 test: Users | None = None, train_units: Units | None = None) -> None:
        parts = [units.inner(users)]
        if kept is not None:
            parts.append((train_units or units).inner(kept))
        super().__init__(units.loss, parts)
        self.units, self.train_units, self.test = units, train_units or units, test
        self.given = [users] if kept is None else [users, kept]
        self.exact = units.loss.quadratic or units.loss.least_squares
        targets = UserStatistics.of(users if kept is None else kept).targets
        if targets is not None:  # by user, as users elsewhere send it
            self.target_mean = units.mean_target(targets.counts, targets.means)

    def use(self, units: Units) -> None:
        self.units, self.loss = units, units.loss
        self.train_units = replace(self.train_units, loss=units.loss)

    @property
    def part_units(self) -> list[Units]:
        return [self.units, self.train_units]

    def moments(self, part: int) -> tuple[Ints, Array, Array]:
        return pooled_moments(self.given[part])

    def ask_average(self, part: int, question: ColumnQuestion, some: Ints,
                    fields: Answer) -> Iterator[tuple[Ints, Answer]]:
        users = self.given[part]
        for each in np.array_split(some, max(1, len(some) // _AT_ONCE)):
            few = users if len(each) == users.n_users else users.take(each)
            yield each, question.answer(few, {name: rows[each] for name, rows in fields.items()})

    def around(self, asked: list[Around]) -> list[Expanded]:
        return [expanded(self.loss, part, each)
                for part, each in zip(self.parts[:len(asked)], asked, strict=True)]

    def finish(self, solution: Solution, handed: Array, judged: Judged | None,
               tol: float) -> tuple[Solution, Scores | None]:
        loss = solution.problem.loss.stated
        with warnings.catch_warnings(action="ignore", category=CoterieWarning):
            problem = Problem(self.parts[0], loss, solution.lam, solution.problem.graph)
        proof = certify(problem, solution.models, solution.duals)
        if proof.relative_gap > tol:
            proof = min(proof, certify(problem, solution.models), key=lambda c: c.relative_gap)
        solution = replace(solution, problem=problem, certificate=proof, duals=proof.duals,
                           status=Status.of(proof, tol))
        return solution, None if judged is None else self._score(judged)

    def _score(self, judged: Judged) -> Scores:
        assert self.test is not None
        units, test = self.train_units, self.test
        models = [judged.fitted, self._own(), judged.together]
        told = np.stack([units.scores(each, test) for each in models], axis=1)
        errors = units.errors(models[0], test)
        if judged.average is not None:
            own = predicted(units, test.features, models[0][test.owner])
            mean = judged.average.predict(test.features, test.owner, own)[0]
            errors = units.errors_of(mean, test)
            told[:, 0] = units.scores_of(errors, test)
        worse = worse_than_alone(errors, units.errors(models[1], test), test)
        scores = scores_of(judged, units.task, told, worse, int(test.sizes.sum()))
        return self._checked(scores, judged, models[0])

    def _checked(self, scores: Scores, judged: Judged, models: Array) -> Scores:
        """The scores with how good intervals and probabilities are on held-out rows."""
        test, units, average = self.test, self.train_units, judged.average
        assert test is not None
        y = test.targets
        if y is None or units.n_classes > 2 or (units.n_classes and not units.loss.log_odds):
            return scores
        if units.task == "counts" or not (units.n_classes or average is not None):
            return scores
        told = predicted(units, test.features, models[test.owner])
        reach = np.zeros(len(y))
        if average is not None:
            told, errors = average.predict(test.features, test.owner, told)
            reach = average.quantile(INTERVAL) * errors if average.quantiles.size else reach
        if units.n_classes:
            return replace(scores, reliability=reliability_of(told, y > 0))
        return replace(scores, covered=covered_by(y, told, reach, test)) if reach.any() else scores

    def _own(self) -> Array:
        """(n_users, dim) models from each user's own rows that are not held out."""
        samples = self.loss.prepare(self.parts[-1])
        if not too_wide(self.loss, samples):
            return own_models(self.loss, self.parts[-1])
        alone = np.arange(samples.n_users)
        return fit_models(self.loss, samples, alone, np.ones(samples.n_users)).models


def pooled_moments(users: Users) -> tuple[Ints, Array, Array]:
    """Rows of each user; means and standard deviations of columns, the target last."""
    statistics = UserStatistics.of(users)
    counts, means, m2 = statistics.features
    assert statistics.targets is not None
    means = np.column_stack([means, statistics.targets.means])
    m2 = np.column_stack([m2, statistics.targets.m2])
    share = counts / max(float(counts.sum()), 1.0)
    mean = share @ means
    rows = max(float(counts.sum()), 1.0)
    return counts, mean, np.sqrt((m2.sum(axis=0) / rows) + share @ (means - mean) ** 2)


def scores_of(judged: Judged, task: Task, told: Array, worse: Flags, n_rows: int) -> Scores:
    """The scores of a fit.

    Parameters
    ----------
    judged : the models.
    task : what the targets are.
    told : (n_users, 3) scores of the fitted models, of users' own and of the pooled one.
    worse : (n_users,) who is worse off than alone.
    n_rows : number of held-out rows.
    """
    fitted, alone, together = told.T
    return Scores(metric=METRICS[task], larger=task == "classification", fitted=fitted,
                  alone=alone, together=together, points=fitted[None], losses=np.full(1, np.nan),
                  chosen=0, n_clusters=judged.n_groups, n_rows=n_rows, worse=worse)


def outer_loss(loss: Loss, users: Users, covariance: Array, noise: Array | None = None) -> Loss:
    """The loss of a centre; `covariance` is that of the personal part, or zero."""
    if not covariance.any():
        return loss
    rows = np.maximum(users.sizes, 1)
    return Personal(loss, covariance=covariance, scale=(1.0 if noise is None else noise) / rows)


def _prepare(outer: Loss, users: Users) -> Samples:
    """What the loss of a centre computes on; personal models are searched to the digits that
    comparisons need.
    """
    samples = outer.prepare(users)
    return replace(samples, enough=_ENOUGH) if isinstance(samples, PersonalSamples) else samples


def expanded(loss: Loss, users: Users, asked: Around) -> Expanded:
    """`FitSource.around` for some rows of these users."""
    parts = []
    for k, covariance in enumerate(asked.covariances):
        outer = outer_loss(loss, users, covariance, asked.noises[k] if asked.noises else None)
        samples, centres = _prepare(outer, users), asked.centres[:, k]
        with np.errstate(over="ignore", invalid="ignore"):  # trial points
            values, gradients, _ = outer.evaluate(samples, centres, 1)
            parts.append((values, gradients))
    return Expanded(*(np.stack(part, axis=1) for part in zip(*parts, strict=True)))


def own_models(loss: Loss, users: Users) -> Array:
    """`FitSource.own` for these users."""
    samples = loss.prepare(users)
    return loss.prox(samples, None, _OWN, np.zeros((users.n_users, samples.dim))).points
