"""The problem that this library solves, in one convention:

    (C)   minimise   F(models) = sum_i f_i(models_i) + lam * sum_{i<j} w_ij ||models_i - models_j||

The paper's Eq. (3) has 1/N before the losses and sums over ordered pairs; `lam_from_eq3` converts.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.base.errors import CoterieWarning, InvalidInput
from coterie.base.types import Array
from coterie.data.users import Participants, Users
from coterie.losses import Loss, Samples
from coterie.problem.graph import Graph


def lam_from_eq3(lam: float, n_users: int) -> float:
    """The lam of (C) for a penalty parameter in the paper's Eq. (3) as printed: lam = 2 * n_users *
    lam_eq3.

    Parameters
    ----------
    lam : penalty parameter in Eq. (3).
    n_users : number of users.

    Returns
    -------
    The penalty strength for `Problem`.

    Example
    -------
    >>> lam_from_eq3(0.001, n_users=60)
    0.12
    """
    return 2.0 * n_users * lam


def check_lam(lam: float) -> float:
    """The penalty strength as a float; raises InvalidInput unless it is a finite number >= 0."""
    try:
        number = float(lam)
    except (TypeError, ValueError):
        number = np.nan
    if not (np.isfinite(number) and number >= 0):
        raise InvalidInput(f"lam must be a finite number >= 0, got {lam!r}",
                           remedy="lam = 0 gives separate models; a large lam gives one model for "
                                  "all")
    return number


@dataclass(frozen=True, eq=False)
class Problem:
    """Users, a loss, a graph and lam, checked when the problem is created.

    Parameters
    ----------
    users
        `Users` with their data, or, on a server whose losses need no data, `Participants`.
    loss
        The loss of a model on a user's data.
    lam
        Penalty strength; see (C) above.
    graph
        The pairs that are compared, and their weights; the default is all pairs with weight 1, as
        in the paper.

    Raises
    ------
    InvalidInput
        If a part has the wrong type, the graph has another number of users, lam is not a finite
        number >= 0, a user has no samples, or a target is outside the domain of the loss.
    Incompatible
        If the loss needs the data of the users, and these are not available.

    Example
    -------
    >>> import coterie as ct
    >>> users = ct.Users.from_arrays([[0.0], [1.0], [5.0]], user=["ann", "bob", "eve"])
    >>> problem = ct.Problem(users, ct.SquaredDistance(), lam=0.1)
    >>> problem.n_users, problem.dim, problem.objective(users.features)
    (3, 1, 1.0)
    """

    users: Participants
    loss: Loss
    lam: float
    graph: Graph = None  # type: ignore[assignment]  # replaced by the complete graph below
    samples: Samples = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.users, Participants):
            raise InvalidInput(f"expected Users, got {type(self.users).__name__}",
                               remedy="Build them with Users.from_arrays(X, y, user)")
        if not isinstance(self.loss, Loss):
            raise InvalidInput(f"expected a loss such as Logistic(), got {self.loss!r}",
                               remedy="Create the loss by calling its class; coterie.LOSSES lists "
                                      "them")
        graph = Graph.complete(self.users.n_users) if self.graph is None else self.graph
        if graph.n_users != self.users.n_users:
            raise InvalidInput(f"the graph is over {graph.n_users} users, the data over "
                               f"{self.users.n_users}", remedy="Build the graph for these users")
        object.__setattr__(self, "graph", graph)
        object.__setattr__(self, "lam", check_lam(self.lam))
        object.__setattr__(self, "samples", self.loss.prepare(self.users))
        for concern in self.loss.concerns(self.users) if isinstance(self.users, Users) else ():
            warnings.warn(concern, CoterieWarning, stacklevel=3)

    def with_lam(self, lam: float) -> Problem:
        """The same problem at another lam; nothing is copied or checked again.

        Parameters
        ----------
        lam : the penalty strength.

        Returns
        -------
        The problem at this lam.

        Raises
        ------
        InvalidInput : lam is not a finite number >= 0.
        """
        other = copy.copy(self)
        object.__setattr__(other, "lam", check_lam(lam))
        other.__dict__.pop("judged", None)
        return other

    @cached_property
    def judged(self) -> list[Any]:
        """The last point that was judged, its slopes and its certificate; see `certificates`."""
        return []

    @cached_property
    def loss_at_zero(self) -> float:
        """sum_i |f_i(0)|, a scale for objectives that are zero."""
        return float(np.abs(self.values(np.zeros((self.n_users, self.dim)))).sum())

    @property
    def n_users(self) -> int:
        """The number of users."""
        return self.users.n_users

    @property
    def dim(self) -> int:
        """Length of one model."""
        return self.samples.dim

    @property
    def coefficient_names(self) -> list[str]:
        """(dim,) the name of each coordinate of a model: a feature, or the intercept."""
        return coefficient_names(self.loss, self.users, self.dim)

    @property
    def radii(self) -> Array:
        """(n_edges,) lam * weights, the largest norm of the dual of each edge."""
        return self.lam * self.graph.weights

    def values(self, models: Array) -> Array:
        """The loss of every user at its own model.

        Parameters
        ----------
        models : (n_users, dim), in the order of `users.names`.

        Returns
        -------
        (n_users,) f_i(models_i).

        Example
        -------
        >>> import coterie as ct
        >>> problem = ct.Problem(ct.Users.from_arrays([[0.0], [2.0]]), ct.SquaredDistance(),
        ...                      lam=0.5)
        >>> problem.values(np.array([[1.0], [2.0]])).tolist()
        [0.5, 0.0]
        """
        return self.loss.values(self.samples, models)

    def gradients(self, models: Array) -> Array:
        """The gradient of every user's loss at its own model.

        Parameters
        ----------
        models : (n_users, dim), in the order of `users.names`.

        Returns
        -------
        (n_users, dim) grad f_i(models_i).
        """
        return self.loss.gradients(self.samples, models)

    def hessians(self, models: Array) -> Array:
        """The second derivatives of every user's loss at its own model.

        Parameters
        ----------
        models : (n_users, dim), in the order of `users.names`.

        Returns
        -------
        (n_users, dim, dim).
        """
        return self.loss.hessians(self.samples, models)

    def conjugates(self, slopes: Array, start: Array | None = None) -> Array:
        """Upper bounds on the conjugate of every user's loss.

        Parameters
        ----------
        slopes : (n_users, dim).
        start : (n_users, dim) models near which the conjugate is attained, to start from.

        Returns
        -------
        (n_users,) bounds on f_i*(slopes_i); +inf if it is not finite.
        """
        return self.loss.conjugates(self.samples, slopes, start)

    def objective(self, models: Array) -> float:
        """The value of (C) at some models.

        Parameters
        ----------
        models : (n_users, dim), in the order of `users.names`.

        Returns
        -------
        F(models), the losses plus lam times the penalty.

        Example
        -------
        >>> import coterie as ct
        >>> problem = ct.Problem(ct.Users.from_arrays([[0.0], [2.0]]), ct.SquaredDistance(),
        ...                      lam=0.5)
        >>> problem.objective(np.array([[1.0], [2.0]]))
        1.0
        """
        return float(self.values(models).sum()) + self.lam * self.graph.penalty(models)

    def check_models(self, models: npt.ArrayLike) -> Array:
        """Convert models to an array of shape (n_users, dim).

        Parameters
        ----------
        models : (n_users, dim), in the order of `users.names`.

        Returns
        -------
        The models as an array.

        Raises
        ------
        InvalidInput : another shape, or numbers that are not finite.
        """
        array = np.ascontiguousarray(models, dtype=float)
        if array.shape != (self.n_users, self.dim):
            raise InvalidInput(f"expected models of shape ({self.n_users}, {self.dim}), got "
                               f"{array.shape}",
                               remedy="Give one row for each user, in the order of users.names")
        bad = ~np.isfinite(array).all(axis=1)
        if bad.any():
            user = int(np.flatnonzero(bad)[0])
            raise InvalidInput("models must be finite numbers",
                               where=f"user {self.users.names[user]!r}",
                               remedy="Look for an overflow in the computation of the models")
        return array

    def __repr__(self) -> str:
        return (f"Problem({self.n_users:,} users, {self.loss!r}, lam={self.lam:g}, dim={self.dim}, "
                f"{self.graph!r})")


def coefficient_names(loss: Loss, users: Participants, dim: int) -> list[str]:
    """(dim,) the name of each coordinate of a model: a feature, or the intercept; m0, m1, ... where
    none is known.
    """
    loss = loss.own_loss
    names = list(users.feature_names)
    if loss.intercept:
        names.append("intercept")
    if loss.multiclass:
        names = [f"{name}.{k}" for name in names for k in range(dim // max(len(names), 1))]
    return names if len(names) == dim else [f"m{k}" for k in range(dim)]
