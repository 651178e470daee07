"""From rows and their users to predictions: the one order in which every fit, run and command
predicts.

1. Each row's user is looked up by name; unknown users, and rows without one, get the pooled model.
2. The row is brought into the solver's units and predicted by its user's model (`Units.predict`).
3. Class numbers become the classes' own values, where a recipe knows them.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, NamedTuple

import numpy as np

from coterie.base.errors import CoterieWarning, InvalidInput, located
from coterie.base.types import Array, Ints
from coterie.data.encoding import Recipe
from coterie.data.files import fingerprint, read_table, row_place
from coterie.data.frames import as_frame, beside, read_cells, to_frame, users_frame
from coterie.data.users import Users
from coterie.data.validation import show
from coterie.fitting.average import Average, predicted
from coterie.fitting.scores import METRICS
from coterie.fitting.units import Units

#: What predictions are made for: a file, a polars frame, or users.
Data = Any


def name_text(name: Any) -> str:
    """A user's name as text: a column of numbers becomes a column of texts as soon as one cell is
    no number.
    """
    return str(int(name)) if isinstance(name, float) and name.is_integer() else str(name)


class RowScores(NamedTuple):
    """How good predictions are where the target is known.

    Parameters
    ----------
    metric : accuracy, RMSE or deviance.
    n_rows : rows with a target.
    users : the score of each user who has such rows.
    seen : whether these are the rows of the fit, on which scores are too good.
    """

    metric: str
    n_rows: int
    users: dict[Any, float]
    seen: bool = False

    @property
    def mean(self) -> float:
        """The mean over users."""
        return float(np.mean(list(self.users.values())))

    def __str__(self) -> str:
        larger = self.metric == "accuracy"
        worst = (min if larger else max)(self.users, key=lambda name: self.users[name])
        shown = [f"{100 * value:.1f}%" if larger else f"{value:.4g}"
                 for value in (self.mean, self.users[worst])]
        return (f"{self.metric} on {self.n_rows:,} rows with a target: {shown[0]}"
                + (f", mean over {len(self.users)} users; worst {shown[1]} (user {show(worst)})"
                   if len(self.users) > 1 else "") + "."
                + " These are the rows of the fit: on new rows expect worse." * self.seen)


class PredictedTable(NamedTuple):
    """A table and the predictions of its rows.

    Parameters
    ----------
    given : the table, a polars frame.
    user : its column with the owner of each row, or None.
    columns : the columns that `predict` gives.
    scores : how good the predictions are; None without targets.
    """

    given: Any
    user: str | None
    columns: dict[str, list[Any]]
    scores: RowScores | None

    def joined(self) -> Any:
        """The table with its predictions beside its own columns, a polars frame.

        The names of the table's columns come first: a prediction of the same name is called
        `coterie ...`.
        """
        added = {}
        for name, values in self.columns.items():
            if name == "user" and self.user == "user":
                continue  # the table has it
            while name in self.given.columns:
                name = f"coterie {name}"
            added[name] = values
        return beside(self.given, added)


def models_by_name(names: Sequence[Any], known: Sequence[Any], models: Array,
                   together: Array | None,
                   key: Callable[[Any], Any] = lambda name: name) -> tuple[Array, Ints]:
    """The model of each user named.

    Parameters
    ----------
    names : users to look up; None is an unknown one.
    known : users with a model.
    models : (n_known, dim) their models.
    together : (dim,) the model of all other users; None where there is none.
    key : what names are compared by.

    Returns
    -------
    (n, dim) the models, and (n,) the position of each name among `known`, -1 for unknown users.

    Raises
    ------
    InvalidInput : an unknown user, and there is no model for these.
    """
    positions = {key(name): i for i, name in enumerate(known)}
    index = np.array([-1 if name is None else positions.get(key(name), -1) for name in names],
                     dtype=np.int64)
    if together is None:
        unknown = np.flatnonzero(index < 0)
        if unknown.size:
            raise InvalidInput("There is no model for an unknown user",
                               where=f"user {show(names[unknown[0]])}",
                               remedy="Leave out the rows of users who are not in the run")
        return models[index], index
    return np.concatenate([models, together[None]])[index], index


@dataclass(frozen=True, kw_only=True, eq=False)
class Predictor:
    """All that predictions need of a fit.

    Parameters
    ----------
    units : of the fit.
    recipe : how a table becomes numbers; None for a fit of `Users`.
    names : of the users.
    models : (n_users, dim) in the solver's units.
    labels : (n_users,) the users' groups.
    together : (dim,) the pooled model; None where there is none.
    fingerprint : of the file the fit was made from; empty where there is none.
    average : of several kinds of models, which predicts; None where `models` predict.
    """

    units: Units
    recipe: Recipe | None
    names: Sequence[Any]
    models: Array
    labels: Ints
    together: Array | None
    fingerprint: str = ""
    average: Average | None = None

    def columns(self, data: Data, separator: str = "",
                interval: float | None = None) -> dict[str, list[Any]]:
        """Columns `user`, `known`, `cluster`, and unless points are clustered `prediction` and
        `probability ...`, or `low` and `high`.
        """
        self.check_interval(interval)
        return self._columns(*self._rows(data, separator)[1:], interval)

    def table(self, data: Data, separator: str = "",
              interval: float | None = None) -> PredictedTable:
        """The rows of a table with their predictions, scored where it has targets."""
        self.check_interval(interval)
        frame, X, names, same_file = self._rows(data, separator)
        if frame is None:
            raise InvalidInput("Users are no table",
                               remedy="Use `predict`, or give a file or a polars frame")
        own = self.recipe.user if self.recipe is not None else None
        scores = self._scores(frame, _place(data, separator))
        return PredictedTable(frame, own, self._columns(X, names, same_file, interval),
                              None if scores is None else scores._replace(seen=same_file))

    def check_interval(self, interval: float | None) -> None:
        """Raises where intervals are asked for, and there are none."""
        if interval is None:
            return
        if self.units.task != "regression":
            raise InvalidInput("intervals are for numbers: classes have probabilities, and there "
                               "are none for counts or groups",
                               remedy="Leave out the interval")
        if self.average is None or not self.average.quantiles.size:
            raise InvalidInput("this fit has no intervals: they need the default loss, several "
                               "users with several rows, and average, lam and weights as they "
                               "are by default, with all rows in one process",
                               remedy="Leave out the interval")
        self.average.quantile(interval)

    def told(self, X: Array, index: Ints, models: Array) -> tuple[Array, Array]:
        """Numbers, mean counts or shares of the second class, and their standard deviations;
        `index` has the positions of rows' users, and `models` theirs by the kind that was chosen.
        """
        own = predicted(self.units, X, models)
        if self.average is None:
            return own, np.zeros(len(X))
        new = index >= len(self.names)  # newcomers are known by a model of the kind only
        told, errors = self.average.predict(X, np.where(new, -1, index), own)
        return np.where(new, own, told), errors

    @property
    def averages(self) -> bool:
        """Whether an average predicts."""
        return self.average is not None and self.average.used

    def _columns(self, X: Array, names: list[Any], same_file: bool,
                 interval: float | None = None) -> dict[str, list[Any]]:
        unnamed = sum(name is None for name in names)
        if unnamed:
            warnings.warn(f"{unnamed} of {len(names)} rows have no user and are predicted as those "
                          "of an unknown one.",
                          CoterieWarning, stacklevel=4)
        models, index = models_by_name(names, self.names, self.models, self.together, key=name_text)
        clusters, known = np.append(self.labels, -1)[index], index >= 0
        if self.recipe is not None and self.recipe.user is None and not same_file:
            # The number of a row names a user in the file of the fit only; here the nearest group
            # is taken.
            from scipy.spatial import cKDTree

            clusters = self.labels[cKDTree(self.models).query(self.units.rows(X))[1]]
            known = np.zeros(len(X), dtype=bool)
        columns: dict[str, list[Any]] = {"user": [None if name is None else str(name)
                                                  for name in names],
                                         "known": known.astype(int).tolist(),
                                         "cluster": [int(k) if k >= 0 else None for k in clusters]}
        if self.units.task != "clustering":
            columns |= self._targets(X, models, index, interval)
        return columns

    def _rows(self, data: Data, separator: str) -> tuple[Any, Array, list[Any], bool]:
        """The table (None for users), encoded rows, the user of each, and whether they are the file
        of the fit.
        """
        if isinstance(data, Users):
            if data.feature_names != self.units.feature_names:
                raise InvalidInput(f"The users have the features {show(*data.feature_names)}, "
                                   "those of the fit have "
                                   f"{show(*self.units.feature_names)}",
                                   remedy="Give the same, in this order")
            return None, data.features, [data.names[i] for i in data.owner], False
        if self.recipe is None:
            raise InvalidInput("This fit was made from Users, so it cannot read a table",
                               remedy="Give Users")
        is_file = isinstance(data, (str, PathLike))
        frame = read_table(data, separator or None) if is_file else as_frame(data)
        with located(_place(data, separator)):
            X, names = self.recipe.matrix(frame)
        return frame, X, names, is_file and fingerprint(data) == self.fingerprint

    def _scores(self, frame: Any, place: Callable[[int], str] | None) -> RowScores | None:
        """How good predictions are where the table has the target; None where it has none, or new
        classes.
        """
        recipe = self.recipe
        if recipe is None or recipe.user is None or recipe.target not in frame.columns \
                or read_cells(frame[recipe.target], parse=False).missing.all():
            return None
        try:
            with located(place), warnings.catch_warnings():
                warnings.simplefilter("ignore", CoterieWarning)  # shown already
                users = recipe.encode(frame)
        except InvalidInput as error:
            warnings.warn(f"The predictions are not scored: {error}", CoterieWarning, stacklevel=4)
            return None
        models, index = models_by_name(users.names, self.names, self.models, self.together,
                                   key=name_text)
        scores = self.units.scores(models, users)
        if self.averages:
            mean = self.told(users.features, index[users.owner], models[users.owner])[0]
            scores = self.units.scores_of(self.units.errors_of(mean, users), users)
        by_user = {name: float(score) for name, score in zip(users.names, scores,
            strict=True) if np.isfinite(score)}
        return RowScores(METRICS[self.units.task], users.n_samples, by_user) if by_user else None

    def _targets(self, X: Array, models: Array, index: Ints,
                 interval: float | None) -> dict[str, list[Any]]:
        with np.errstate(over="ignore"):
            predictions = self.units.predict(X, models)
        told = errors = np.zeros(0)
        if self.averages or interval is not None:
            told, errors = self.told(X, index, models)
        if self.averages:
            predictions = np.asarray(told > 0.5, dtype=float) if self.units.n_classes else told
        if not self.units.n_classes:
            columns = {"prediction": predictions.tolist()}
            if interval is not None:
                assert self.average is not None
                wide = self.average.quantile(interval) * errors
                columns |= {"low": (predictions - wide).tolist(),
                            "high": (predictions + wide).tolist()}
            return columns
        recipe = self.recipe
        values: Sequence[Any] = range(self.units.n_classes) if recipe is None \
            else recipe.class_values
        columns = {"prediction": [values[int(c)] for c in predictions]}
        if self.units.loss.log_odds:
            shares = np.stack([1.0 - told, told], axis=1) if self.averages \
                else self.units.probabilities(X, models)
            names = values if recipe is None else recipe.classes
            columns |= {f"probability {name}": shares[:, c].tolist() for c,
                        name in enumerate(names)}
        return columns


def _place(data: Data, separator: str) -> Callable[[int], str] | None:
    return row_place(data, separator or None) if isinstance(data, (str, PathLike)) else None


class PredictsRows(ABC):
    """A fit, or a run loaded from its folder: something with a `Predictor`."""

    @abstractmethod
    def _predictor(self) -> Predictor: ...

    def predict(self, data: Data, *, separator: str = "", interval: float | None = None) -> Any:
        """Predict every row by the model of its user.

        Parameters
        ----------
        data : a file, a polars frame with the columns that were learned from, or `Users` in the
            units given. Where every row is a user, rows of anything but the fit's own file get the
            nearest group.
        separator : of a CSV file; detected if omitted.
        interval : for numbers, the share of rows whose targets are to be between `low` and `high`,
            such as 0.9; it is right on average over all rows, not for every user.

        Returns
        -------
        A polars frame with a row for each row of the data: `user`, `known` (0 for users who get the
        pooled model), `cluster`, `prediction`, for classes `probability ...`, and with an interval
        `low` and `high`.

        Raises
        ------
        InvalidInput : columns are missing, or cells are not of the kind that was learned from; or
            there are no intervals.
        MissingExtra : polars is not installed.

        Example
        -------
        >>> import coterie as ct
        >>> from coterie.fitting import Settings, fit
        >>> users = ct.Users.from_arrays([[0.0], [1.0], [2.0]] * 4, [0.1, 1.0, 1.9] * 4,
        ...                              ["a"] * 6 + ["b"] * 6)
        >>> fitted = fit(users, Settings(task="regression", n_lams=4, holdout=0.0))
        >>> list(fitted.predict(users.take(["b"])).columns)
        ['user', 'known', 'cluster', 'prediction']
        """
        return to_frame(self._predictor().columns(data, separator, interval))

    def to_frame(self) -> Any:
        """The groups and the models that predict as a table, in the units given.

        Returns
        -------
        A frame of polars, or of pandas where polars is not installed, with a row for each user:
        `user`, `group`, and the coefficients by feature, with several classes by feature and class.

        Raises
        ------
        MissingExtra : neither is installed.

        Example
        -------
        >>> import coterie as ct
        >>> from coterie.fitting import Settings, fit
        >>> users = ct.Users.from_arrays([[0.0], [1.0], [2.0]] * 4, [0.1, 1.0, 1.9] * 4,
        ...                              ["a"] * 6 + ["b"] * 6)
        >>> list(fit(users, Settings(task="regression", n_lams=4, holdout=0.0)).to_frame().columns)
        ['user', 'group', 'x0', 'intercept']
        """
        known = self._predictor()
        columns = known.units.columns(() if known.recipe is None else known.recipe.classes)
        return users_frame(known.names, known.labels, known.units.coefficients(known.models),
                           columns)

    def predict_table(self, data: Data, *, separator: str = "",
                      interval: float | None = None) -> PredictedTable:
        """Predict every row of a table and keep the table's columns; score where it has targets.

        Parameters
        ----------
        data : a file, or a polars frame with the columns that were learned from.
        separator : of a CSV file; detected if omitted.
        interval : as for `predict`.

        Returns
        -------
        The table and its predictions; `joined()` is one frame with both, `scores` is None without
        targets.

        Raises
        ------
        InvalidInput : columns are missing, or cells are not of the kind that was learned from.
        MissingExtra : polars is not installed.
        """
        return self._predictor().table(data, separator, interval)
