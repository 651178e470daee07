"""From rows and their users to predictions: the one order in which every fit, run and command predicts.

1. Each row's user is looked up by name; unknown users get the pooled model.
2. The row is brought into the solver's units and predicted by its user's model (`Units.predict`).
3. Class numbers become the classes' own values, where a recipe knows them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np

from coterie._typing import Array, Ints
from coterie.data.encoding import Recipe
from coterie.data.frames import as_frame, to_frame, users_frame
from coterie.data.io import fingerprint, read_table
from coterie.data.users import Users
from coterie.data.validation import show
from coterie.errors import InvalidInput
from coterie.fitting.units import Units
from coterie.losses import SquaredHinge

#: What predictions are made for: a file, a polars frame, or users.
Data = Any


def name_text(name: Any) -> str:
    """A user's name as text: a column of numbers becomes a column of texts as soon as one cell is no number."""
    return str(int(name)) if isinstance(name, float) and name.is_integer() else str(name)


def models_by_name(names: Sequence[Any], known: Sequence[Any], models: Array, together: Array | None,
                   key: Callable[[Any], Any] = lambda name: name) -> tuple[Array, Ints]:
    """The model of each user named.

    Parameters
    ----------
    names : users to look up.
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
    index = np.array([positions.get(key(name), -1) for name in names], dtype=np.int64)
    if together is None:
        unknown = np.flatnonzero(index < 0)
        if unknown.size:
            raise InvalidInput("There is no model for an unknown user", where=f"user {show(names[unknown[0]])}",
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
    """

    units: Units
    recipe: Recipe | None
    names: Sequence[Any]
    models: Array
    labels: Ints
    together: Array | None
    fingerprint: str = ""

    def columns(self, data: Data, separator: str = "") -> dict[str, list[Any]]:
        """Columns `user`, `known`, `cluster`, and unless points are clustered `prediction` and `probability ...`."""
        X, names, same_file = self._rows(data, separator)
        models, index = models_by_name(names, self.names, self.models, self.together, key=name_text)
        clusters, known = np.append(self.labels, -1)[index], index >= 0
        if self.recipe is not None and self.recipe.user is None and not same_file:
            # The number of a row names a user in the file of the fit only; here the nearest group is taken.
            from scipy.spatial import cKDTree

            clusters = self.labels[cKDTree(self.models).query(self.units.rows(X))[1]]
            known = np.zeros(len(X), dtype=bool)
        columns: dict[str, list[Any]] = {"user": [str(name) for name in names], "known": known.astype(int).tolist(),
                                         "cluster": [int(k) if k >= 0 else None for k in clusters]}
        if self.units.task != "clustering":
            columns |= self._targets(X, models)
        return columns

    def _rows(self, data: Data, separator: str) -> tuple[Array, list[Any], bool]:
        """Encoded rows, the user of each, and whether they come from the file of the fit."""
        if isinstance(data, Users):
            if data.feature_names != self.units.feature_names:
                raise InvalidInput(f"The users have the features {show(*data.feature_names)}, those of the fit have "
                                   f"{show(*self.units.feature_names)}", remedy="Give the same, in this order")
            return data.features, [data.names[i] for i in data.owner], False
        if self.recipe is None:
            raise InvalidInput("This fit was made from Users, so it cannot read a table", remedy="Give Users")
        if not isinstance(data, (str, PathLike)):
            return *self.recipe.matrix(as_frame(data)), False
        rows = self.recipe.matrix(read_table(data, separator or None))
        return *rows, self.recipe.user is None and fingerprint(data) == self.fingerprint

    def _targets(self, X: Array, models: Array) -> dict[str, list[Any]]:
        with np.errstate(over="ignore"):
            predictions = self.units.predict(X, models)
        if not self.units.n_classes:
            return {"prediction": predictions.tolist()}
        recipe = self.recipe
        values: Sequence[Any] = range(self.units.n_classes) if recipe is None else recipe.class_values
        columns = {"prediction": [values[int(c)] for c in predictions]}
        if not isinstance(self.units.loss, SquaredHinge):
            shares = self.units.probabilities(X, models)
            names = values if recipe is None else recipe.classes
            columns |= {f"probability {name}": shares[:, c].tolist() for c, name in enumerate(names)}
        return columns


class PredictsRows(ABC):
    """A fit, or a run loaded from its folder: something with a `Predictor`."""

    @abstractmethod
    def _predictor(self) -> Predictor: ...

    def predict(self, data: Data, *, separator: str = "") -> Any:
        """Predict every row by the model of its user.

        Parameters
        ----------
        data : a file, a polars frame with the columns that were learned from, or `Users` in the units given. Where
            every row is a user, rows of anything but the fit's own file get the nearest group.
        separator : of a CSV file; detected if omitted.

        Returns
        -------
        A polars frame with a row for each row of the data: `user`, `known` (0 for users who get the pooled model),
        `cluster`, `prediction`, and for classes `probability ...`.

        Raises
        ------
        InvalidInput : columns are missing, or cells are not of the kind that was learned from.
        MissingExtra : polars is not installed.

        Example
        -------
        >>> import coterie as ct
        >>> from coterie.fitting import Settings, fit
        >>> users = ct.Users.from_arrays([[0.0], [1.0], [2.0]] * 4, [0.1, 1.0, 1.9] * 4, ["a"] * 6 + ["b"] * 6)
        >>> fitted = fit(users, Settings(task="regression", n_lams=4, holdout=0.0))
        >>> list(fitted.predict(users.take(["b"])).columns)
        ['user', 'known', 'cluster', 'prediction']
        """
        return to_frame(self._predictor().columns(data, separator))

    def to_frame(self) -> Any:
        """The groups and the models that predict as a table, in the units given.

        Returns
        -------
        A frame of polars, or of pandas where polars is not installed, with a row for each user: `user`, `group`, and
        the coefficients by feature, with several classes by feature and class.

        Raises
        ------
        MissingExtra : neither is installed.

        Example
        -------
        >>> import coterie as ct
        >>> from coterie.fitting import Settings, fit
        >>> users = ct.Users.from_arrays([[0.0], [1.0], [2.0]] * 4, [0.1, 1.0, 1.9] * 4, ["a"] * 6 + ["b"] * 6)
        >>> list(fit(users, Settings(task="regression", n_lams=4, holdout=0.0)).to_frame().columns)
        ['user', 'group', 'x0', 'intercept']
        """
        known = self._predictor()
        columns = known.units.columns(() if known.recipe is None else known.recipe.classes)
        return users_frame(known.names, known.labels, known.units.coefficients(known.models), columns)
