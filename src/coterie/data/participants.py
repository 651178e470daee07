"""Who takes part: users by name, with or without their data."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from coterie.base.errors import Incompatible, InvalidInput
from coterie.base.types import Ints
from coterie.data.validation import check_unique, plain, show, suggest


class Participants:
    """The names of users and of their features, without data. `Users` are participants with data.

    Parameters
    ----------
    names : unique and hashable.
    feature_names : unique.
    sizes : (n_users,) rows of each user, where they are known.

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

    def __init__(self, names: Iterable[Any], feature_names: Iterable[str] = (),
                 sizes: Ints | None = None) -> None:
        self.names, self.feature_names = tuple(map(plain, names)), tuple(map(str, feature_names))
        self._sizes = sizes
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
        raise Incompatible("The samples of these users are elsewhere, and this needs them. Call it "
                           "where the data are.")

    @property
    def sizes(self) -> Ints:
        """(n_users,) rows of each user; raises Incompatible where they are not known."""
        if self._sizes is None:
            raise Incompatible("How many rows these users have is not known here. Call it where "
                               "the data are.")
        return self._sizes

    @cached_property
    def _positions(self) -> dict[Hashable, int]:
        return {name: i for i, name in enumerate(self.names)}

    def index(self, name: Hashable) -> int:
        """Position of a user, which is its row in the models of a solution.

        Parameters
        ----------
        name : of the user.

        Returns
        -------
        The position, from 0.

        Raises
        ------
        InvalidInput : no user has this name; the message suggests one.

        Example
        -------
        >>> Participants(["ann", "bob"]).index("bob")
        1
        """
        try:
            return self._positions[name]
        except (KeyError, TypeError):
            raise InvalidInput(f"There is no user {show(name)}",
                               remedy=suggest(name, self.names)) from None

    def positions(self, users: Iterable[Any]) -> Ints:
        """Positions of users given by name or by position.

        The rule, for every method that asks for users: a user is given by its name, and where no
        name is an integer, an integer is a position. Where names are integers, integers are names.

        Parameters
        ----------
        users : names or positions.

        Returns
        -------
        (n,) the positions, in the order given.

        Raises
        ------
        InvalidInput : somebody is not among the users; the message names them and the nearest name.

        Example
        -------
        >>> Participants(["ann", "bob", "eve"]).positions(["eve", 0]).tolist()
        [2, 0]
        >>> Participants([30, 10, 20]).positions([10, 20]).tolist()
        [1, 2]
        """
        integers_are_names = (any(map(_is_integer, self.names))
                              and self.names != tuple(range(self.n_users)))
        return np.array([self._position(user, integers_are_names) for user in _list_users(users)],
                        dtype=np.int64)

    def _position(self, user: Any, integers_are_names: bool) -> int:
        if integers_are_names or not _is_integer(user):
            return self.index(user)
        if not 0 <= user < self.n_users:
            raise InvalidInput(f"expected user numbers from 0 to {self.n_users - 1}, or names, got "
                               f"{user}", remedy=suggest(user, self.names))
        return int(user)

    def take(self, indices: npt.ArrayLike) -> Self:
        """Some of the users, in the order given.

        Parameters
        ----------
        indices : positions, as in NumPy, also where names are integers (`positions` turns these
            into positions); names that are no integers; or a boolean mask of all users.

        Returns
        -------
        These users.

        Raises
        ------
        InvalidInput : somebody is not among the users; the message names them and the nearest name.

        Example
        -------
        >>> Participants(["ann", "bob", "eve"]).take(["eve", "ann"]).names
        ('eve', 'ann')
        """
        return self._take_positions(self._find_positions(indices))

    def _take_positions(self, chosen: Ints) -> Any:
        sizes = None if self._sizes is None else self._sizes[chosen]
        return Participants([self.names[i] for i in chosen], self.feature_names, sizes)

    def _find_positions(self, indices: npt.ArrayLike) -> Ints:
        """Positions of the users that `take` is given."""
        given = indices if isinstance(indices, np.ndarray) else _array(indices)
        if given.ndim == 1 and not given.size:
            return np.zeros(0, dtype=np.int64)
        if given.dtype == bool and given.shape == (self.n_users,):
            return np.flatnonzero(given)
        if (given.ndim == 1 and given.dtype.kind in "iu" and given.min() >= 0
            and given.max() < self.n_users):
            return given.astype(np.int64)
        if given.ndim != 1 or given.dtype.kind in "biuf":
            raise InvalidInput("indices must be names or positions of users, "
                               f"0..{self.n_users - 1}, got {show(indices)}",
                               remedy="Give a list of names, of positions as by users.index(name), "
                                      "or a mask")
        return np.array([self._position(user, False) for user in given.tolist()], dtype=np.int64)


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _list_users(users: Any) -> list[Any]:
    """Users as a list; one text is no list of users."""
    if isinstance(users, (str, bytes)) or not hasattr(users, "__iter__"):
        raise InvalidInput(f"expected a list of users, got {show(users)}",
                           remedy=f"Give [{show(users)}]")
    return list(users.tolist() if hasattr(users, "tolist") else users)


def _array(users: Any) -> npt.NDArray[Any]:
    """A list of users as an array in which integers stay integers next to texts, and tuples stay
    tuples.
    """
    values = _list_users(users)
    if (all(isinstance(value, (int, float, np.number, np.bool_)) for value in values)
        or any(isinstance(value, (list, np.ndarray)) for value in values)):
        return np.array(values)
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array
