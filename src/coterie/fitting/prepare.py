"""From a table to a problem, the one road: a file is read, its columns are encoded, its numbers are
scaled.

    file -> read_table -> Recipe -> Users in the table's units -> Units -> Users as the solver sees
    them, and a loss

`prepare` does all of it for one table. Tables on several nodes take the same road in the same
steps, with what nodes send in place of the table: `summarise` and `merge` for the recipe,
`UserStatistics` for the units.

    merged   = merge([summarise(frame, user="who", target="y") for frame in frames])
    recipe   = Recipe.from_summary(merged)
    given    = [recipe.encode(frame) for frame in frames]
    units    = Units.from_moments(UserStatistics.join([UserStatistics.of(users) for users in
             given]), recipe.task,
                                  n_classes=len(recipe.classes))
    users    = [units.inner(users) for users in given]             # and units.loss

A fit first looks for targets that are too far from all others to be of the same kind, such as a
slipped decimal point or a code for "missing": one of them would decide the scale of all targets,
the groups and the models of its group.

    far:  |y_j - median| > 1000 r,      r = the largest |y_j - median| after the 1 % largest, at
                                        least one

Rows with such targets are left out, as rows without a target are, and a sentence says which. Real
heavy tails do not reach so far: of a million lognormal numbers with a deviation of 2 in the
logarithm, the largest is at 150 r. A single target that is not as far, but has most of the
variance, is kept and reported.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np

from coterie.base.errors import located
from coterie.base.types import Indices
from coterie.data.encoding import Recipe
from coterie.data.files import read_table, row_place
from coterie.data.users import Users
from coterie.data.validation import show
from coterie.fitting.settings import Settings
from coterie.fitting.units import Units
from coterie.problem.graph import Graph
from coterie.problem.problem import Problem

_FAR = 1000.0  # times the distance r
_MOST = 0.5  # share of the sum of squares that one target may have
_FEW = 20  # rows below which one target may have most of the variance


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """A table that is ready to be solved for.

    Parameters
    ----------
    recipe : how the table's columns became numbers.
    given : the users in the table's own units; class k has the target k.
    units : how these became what the solver sees, and the loss.
    """

    recipe: Recipe
    given: Users
    units: Units

    @property
    def users(self) -> Users:
        """The users as the solver sees them."""
        return self.units.inner(self.given)

    def problem(self, lam: float, graph: Graph | None = None) -> Problem:
        """The convex problem at this penalty strength; on all pairs of users unless a graph is
        given.
        """
        users = self.users
        return Problem(users, self.units.loss, lam,
                       Graph.complete(users.n_users) if graph is None else graph)


def prepare(table: str | PathLike[str] | Any, *, user: str | None = None, target: str | None = None,
            features: Iterable[str] | str | None = None, drop: Iterable[str] | str = (),
            task: str = "auto",
            separator: str | None = None, loss: str = Settings.loss, ridge: float = Settings.ridge,
            standardize: bool = Settings.standardize) -> Prepared:
    """Everything between a table and the problem that is solved.

    Parameters
    ----------
    table : a file (see `coterie.data.files.read_table`), or a polars frame; one row per sample.
    user : the column that names the owner of each row; None makes every row a separate user.
    target : the column to predict; None clusters users.
    features : the columns to learn from; all others unless named.
    drop : columns to leave out.
    task : "auto", which infers it from the target, or "classification", "regression", "counts",
        "clustering".
    separator : between the cells of a CSV file; detected if omitted.
    loss : a name in LOSSES that fits the task, or "auto".
    ridge : L2 strength, intercept included.
    standardize : whether features are standardised.

    Returns
    -------
    Prepared

    Raises
    ------
    InvalidInput : a file that is no table, or a column that cannot become numbers.

    Example
    -------
    >>> import coterie, polars
    >>> frame = polars.DataFrame({"who": ["a", "b"] * 6, "x": range(12),
    ...                           "y": [2.0 * i + (i % 3) for i in range(12)]})
    >>> prepared = prepare(frame, user="who", target="y", features="x")
    >>> solution = coterie.solve(prepared.problem(lam=0.1))
    >>> prepared.units.coefficient_names, prepared.units.coefficients(solution.models).shape
    (['x', 'intercept'], (2, 2, 1))
    """
    recipe, given = read_users(table, user=user, target=target, features=features, drop=drop,
                               task=task,
                               separator=separator)
    units = Units.learn(given, recipe.task, loss=loss, ridge=ridge, n_classes=len(recipe.classes),
                        standardize=standardize)
    return Prepared(recipe=recipe, given=given, units=units)


def read_users(table: str | PathLike[str] | Any, *, user: str | None = None,
               target: str | None = None,
               features: Iterable[str] | str | None = None, drop: Iterable[str] | str = (),
               task: str = "auto",
               separator: str | None = None) -> tuple[Recipe, Users]:
    """The first half of `prepare`, with the same arguments: how columns become numbers, and the
    users so.
    """
    is_file = isinstance(table, (str, PathLike))
    frame = read_table(table, separator) if is_file else table
    with located(row_place(table, separator) if is_file else None):
        recipe = Recipe.learn(frame, user=user, target=target, features=features, drop=drop,
                              task=task)
        return recipe, recipe.encode(frame)


def without_far_targets(users: Users, settings: Settings) -> tuple[Users, list[str]]:
    """Leave out rows whose targets are far from all others, unless the loss is named and not
    robust.

    Parameters
    ----------
    users : their data in the units given.
    settings : of the fit.

    Returns
    -------
    The users, and what to tell their owner, one sentence each. A user who would have no rows left
    keeps all.
    """
    y = users.targets
    if y is None or settings.task not in ("regression", "counts") or len(y) < 3:
        return users, []
    distances = np.abs(y - np.median(y))
    ranks = np.sort(distances)
    reference = ranks[-1 - max(1, len(y) // 100)]
    if settings.loss in ("auto", "huber") and reference > 0 and ranks[-1] > _FAR * reference:
        far = distances > _FAR * reference
        left = users.counts - np.bincount(users.owner[far], minlength=users.n_users)
        far &= left[users.owner] > 0
        if far.any():
            return users.keep_rows(~far), \
                [_left_out(users, np.flatnonzero(far),
                           "poisson" if settings.task == "counts" else "squared")]
    if ranks[-1] == 0 or len(y) < _FEW or settings.loss == "huber" or settings.task == "counts":
        return users, []
    share = 1.0 / float(((distances / ranks[-1]) ** 2).sum())
    if share > _MOST:
        row = int(distances.argmax())
        return users, [f"One target has {share:.0%} of the variance of all: {_row(users, row)}. It "
                       "decides "
                       "the models of its group; if it is not right, correct it or leave the cell "
                       "empty. If it is, "
                       "--loss huber limits its influence."]
    return users, []


def _left_out(users: Users, far: Indices, loss: str) -> str:
    shown = "; ".join(_row(users, row) for row in far[:3]) + "; ..." * (len(far) > 3)
    what = "1 target is" if len(far) == 1 else f"{len(far)} targets are"
    return (f"{what} more than {_FAR:g} times as far from the median as 99% of the others, and "
            f"left out: {shown}. "
            f"Correct the cell or leave it empty; --loss {loss} uses all targets as they are.")


def _row(users: Users, row: int) -> str:
    assert users.targets is not None
    owner = int(users.owner[row])
    number = row - users.offsets[owner] + 1
    return (f"{users.targets[row]:g} (user {show(users.names[owner])}, row {number} of its "
            f"{users.counts[owner]} rows)")
