"""Who takes part: users by name, with or without their data."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie._typing import Ints
from coterie.data.validation import check_unique, plain, show, suggest
from coterie.errors import Incompatible, InvalidInput


class Participants:
    """The names of users and of their features, without data. `Users` are participants with data.

    Parameters
    ----------
    names : unique and hashable.
    feature_names : unique.

    Raises
    ------
    InvalidInput : a name that comes twice.

    Example
    -------
    >>> server_side = Participants(["ann", "bob"], ["age", "dose"])
    >>> server_side.n_users, server_side.n_features, server_side.index("bob")
    (2, 2, 1)
    """

    names: tuple[Any, ...]
    feature_names: tuple[str, ...]

    def __init__(self, names: Iterable[Any], feature_names: Iterable[str] = ()) -> None:
        self.names, self.feature_names = tuple(map(plain, names)), tuple(map(str, feature_names))
        check_unique(self.names, "User names")
        check_unique(self.feature_names, "Feature names")

    def __len__(self) -> int:
        return self.n_users

    def __repr__(self) -> str:
        return f"Participants({self.n_users} users, {self.n_features} features, data elsewhere)"

    @property
    def n_users(self) -> int:
        """Number of users."""
        return len(self.names)

    @property
    def n_features(self) -> int:
        """Number of features."""
        return len(self.feature_names)

    @property
    def data(self) -> Any:
        """The users with their samples; raises Incompatible if these are on other machines."""
        raise Incompatible("The samples of these users are elsewhere, and this needs them. Call it where the data are.")

    @property
    def sizes(self) -> Ints:
        """(n_users,) rows of each user; raises Incompatible if they are on other machines and not known."""
        raise Incompatible("How many rows these users have is not known here. Call it where the data are.")

    @cached_property
    def _positions(self) -> dict[Hashable, int]:
        return {name: i for i, name in enumerate(self.names)}

    def index(self, name: Hashable) -> int:
        """Position of a user, which is its row in the models of a solution.

        Raises
        ------
        InvalidInput : no user has this name; the message suggests one.
        """
        try:
            return self._positions[name]
        except (KeyError, TypeError):
            raise InvalidInput(f"There is no user {show(name)}", remedy=suggest(name, self.names)) from None

    def take(self, indices: npt.ArrayLike) -> Participants:
        """The users at these positions, in this order; a boolean mask is also accepted."""
        return Participants([self.names[i] for i in self._chosen(indices)], self.feature_names)

    def _chosen(self, indices: npt.ArrayLike) -> Ints:
        """Positions of users, checked."""
        chosen = np.asarray(indices)
        if chosen.dtype == bool and chosen.shape == (self.n_users,):
            chosen = np.flatnonzero(chosen)
        if chosen.ndim != 1 or (chosen.size and (chosen.dtype.kind not in "iu" or chosen.min() < 0
                                                 or chosen.max() >= self.n_users)):
            raise InvalidInput(f"indices must be positions of users, 0..{self.n_users - 1}, got {show(indices)}",
                               remedy="Turn a name into a position with users.index(name)")
        return chosen.astype(np.int64)


class Counted(Participants):
    """Users whose data are elsewhere, and whose numbers of rows are known.

    Parameters
    ----------
    names, feature_names : as for `Participants`.
    sizes : (n_users,) rows of each user.

    Example
    -------
    >>> Counted(["ann", "bob"], ["age"], np.array([3, 5])).take([1]).sizes.tolist()
    [5]
    """

    def __init__(self, names: Iterable[Any], feature_names: Iterable[str], sizes: Ints) -> None:
        super().__init__(names, feature_names)
        self._sizes = sizes

    @property
    def sizes(self) -> Ints:
        return self._sizes

    def take(self, indices: npt.ArrayLike) -> Counted:
        chosen = self._chosen(indices)
        return Counted([self.names[i] for i in chosen], self.feature_names, self._sizes[chosen])
