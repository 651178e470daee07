"""Methods for one table with a column that names the user, as people use them where no federation
is needed.

They get all rows of all users at one place, choose their own penalties by cross-validation on these
rows, and return a function that decides about other rows of the same users:

    regression          the predicted number
    two classes         log-odds of class 1
    several classes     (n_rows, n_classes) a score of each class; the largest is predicted

Features are expected to have about unit variance, and classes are numbers 0, 1, ...
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import ClassVar

import numpy as np

from coterie.base.errors import MissingExtra
from coterie.base.types import Array
from coterie.data.summary import Task
from coterie.data.users import Users

Decide = Callable[[Users], Array]


@dataclass(frozen=True, kw_only=True, eq=False)
class CentralFit:
    """What a method decides about rows of the users that it was fitted to.

    Parameters
    ----------
    decide : from users, in the order of the fit, to one decision per row.
    models : (n_users, ...) the numbers that decide about each user's rows; (n_users, 0) where there
        are none.
    note : what was chosen, in words.
    concern : what went wrong, and what was done instead; empty if nothing did.
    """

    decide: Decide = field(repr=False)
    models: Array = field(repr=False)
    note: str = ""
    concern: str = ""


@dataclass(frozen=True, kw_only=True)
class Central(ABC):
    """A method for one table; the fields of the class are its settings."""

    name: ClassVar[str]
    library: ClassVar[str] = ""  # of the extra `bench`, if one is needed
    tasks: ClassVar[tuple[Task, ...]] = ("regression", "classification")

    @classmethod
    def missing(cls) -> MissingExtra | None:
        """What to say if the library is not installed; None if it is."""
        if not cls.library or find_spec(cls.library) is not None:
            return None
        return MissingExtra(cls.library, "bench", f"The method {cls.name!r}")

    def fit(self, users: Users, task: Task, *, n_classes: int = 0, seed: int = 0) -> CentralFit:
        """Fit to all rows.

        Parameters
        ----------
        users
            All rows, grouped by user.
        task
            "regression" or "classification".
        n_classes
            Number of classes; 0 for a regression.
        seed
            Seed of the random numbers of the method.

        Returns
        -------
        CentralFit
            A function that decides about other rows of these users.

        Raises
        ------
        MissingExtra
            If the library that the method needs is not installed.

        Example
        -------
        >>> from coterie.lab.baselines import OneHotRidge
        >>> from coterie.datasets import clustered
        >>> users = clustered("squared", n_users=6, n_clusters=2).users
        >>> OneHotRidge().fit(users, "regression").decide(users).shape == (users.n_samples,)
        True
        """
        missing = self.missing()
        if missing is not None:
            raise missing
        return self._fit(users, task, n_classes, seed)

    @abstractmethod
    def _fit(self, users: Users, task: Task, n_classes: int, seed: int) -> CentralFit: ...


def linear(models: Array, note: str = "", concern: str = "") -> CentralFit:
    """The fit with predictions <w, x> + b by models (w, b) of each user."""

    def decide(rows: Users) -> Array:
        own = models[rows.owner]
        return np.asarray((rows.features * own[:, :-1]).sum(axis=1) + own[:, -1])

    return CentralFit(decide=decide, models=models, note=note, concern=concern)
