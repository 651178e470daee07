"""Samples of many users: one flat array of rows plus offsets.

The rows of one user are contiguous, so per-user sums are segment sums and nothing loops over users.
Data are checked in this module only: all others rely on finite float64 numbers, unique names and
matching lengths. Messages count rows from 0, as in the caller's input (in a CSV file, without the
header).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from coterie.base.errors import InvalidInput, located
from coterie.base.types import Array, Flags, Ints
from coterie.data.files import read_table, row_place
from coterie.data.frames import read_numbers, read_parquet
from coterie.data.participants import Participants as Participants
from coterie.data.splitting import choose_own_rows, choose_rows, offsets_of, part_sizes
from coterie.data.validation import (
    ENCODE,
    ENCODE_TARGET,
    Rows,
    as_array,
    as_numbers,
    check_finite,
    check_unique,
    group,
    plain,
    show,
    suggest,
)


class Block(NamedTuple):
    """Users of one padded length as dense arrays; padding is 0 and has weight 0."""

    index: Ints       # type: ignore[assignment]  # (n,) positions of these users; hides tuple.index
    features: Array   # (n, m, p)
    targets: Array    # (n, m), zeros when there are no targets
    weights: Array    # (n, m), 1 / count on real rows
    units: Array | None = None  # (n, dim) of a model's coordinates, where a loss has changed them


def freeze(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array


class Moments(NamedTuple):
    """What each user sends for standardisation; zeros for a user without rows."""

    counts: Ints  # (n_users,)
    means: Array  # (n_users, n_features)
    m2: Array     # (n_users, n_features), centred sums of squares


class Split(NamedTuple):
    """Three parts with the same users in the same order; a user may have no row in `validation` and
    `test`.

    Parameters
    ----------
    train, validation, test : the parts.

    Example
    -------
    >>> split = Users.from_arrays([[0.0], [1.0], [2.0], [3.0]], user=["ann"] * 4).split(test=0.5,
    ...     seed=0)
    >>> split.train.n_samples, split.test.n_samples
    (2, 2)
    """

    train: Users
    validation: Users
    test: Users


@dataclass(frozen=True, eq=False)
class Users(Participants):
    """Samples of many users in one flat array plus offsets; the arrays are copies and read-only.

    Build them with `from_arrays`, `from_frame`, `from_csv` or `from_parquet`.

    Parameters
    ----------
    features : (n_samples, n_features), the rows of one user contiguous and in their original order.
    targets : (n_samples,), or None.
    offsets : (n_users + 1,); user i owns the rows offsets[i]:offsets[i + 1].
    names : (n_users,), unique and hashable.
    feature_names : (n_features,), unique.

    Raises
    ------
    InvalidInput : shapes that do not match, a name that comes twice, or a number that is missing or
        infinite.

    Example
    -------
    >>> users = Users.from_arrays([[1.0], [2.0], [3.0]], [0.5, 1.0, 1.5], ["ann", "bob", "ann"])
    >>> users.names, users.counts.tolist()
    (('ann', 'bob'), [2, 1])
    """

    features: Array
    targets: Array | None
    offsets: Ints
    names: tuple[Any, ...]
    feature_names: tuple[str, ...]

    def __post_init__(self) -> None:
        names, columns = tuple(map(plain, self.names)), tuple(map(str, self.feature_names))
        features, offsets = np.array(self.features, dtype=np.float64, order="C"), np.array(
            self.offsets)
        targets = None if self.targets is None else np.array(self.targets, dtype=np.float64)
        if features.ndim != 2 or features.shape[1] != len(columns) or not columns:
            raise InvalidInput(f"features must have shape (n_samples, {len(columns) or 1}), got "
                               f"{features.shape}")
        n = len(features)
        if targets is not None and targets.shape != (n,):
            raise InvalidInput(f"targets must have shape ({n},), got {targets.shape}")
        if (offsets.shape != (len(names) + 1,) or offsets.dtype.kind not in "iu" or offsets[0]
            or offsets[-1] != n or (offsets[1:] < offsets[:-1]).any()):
            raise InvalidInput(f"offsets must be {len(names) + 1} integers rising from 0 to {n}, "
                               f"got {offsets}")
        check_unique(names, "User names")
        check_unique(columns, "Feature names")
        rows = Rows(names, np.repeat(np.arange(len(names)), np.diff(offsets)))
        check_finite(features, "features", rows, columns)
        if targets is not None:
            check_finite(targets, "targets", rows)
        vars(self).update(
            features=freeze(features), targets=targets if targets is None else freeze(targets),
            offsets=freeze(offsets.astype(np.int64)), names=names, feature_names=columns)

    def __reduce__(self) -> tuple[Any, ...]:
        # Leaves the caches behind, and the arrays are read-only again after unpickling.
        return Users, (self.features, self.targets, self.offsets, self.names, self.feature_names)

    def __repr__(self) -> str:
        targets = "no targets" if self.targets is None else "targets"
        return (f"Users({self.n_users} users, {self.n_samples} samples, {self.n_features} "
                f"features, {targets})")

    @property
    def data(self) -> Users:
        """The users themselves; `Participants` have no data."""
        return self

    @property
    def n_samples(self) -> int:
        """The number of samples of all users together."""
        return len(self.features)

    @cached_property
    def counts(self) -> Ints:
        """Number of rows of each user, (n_users,)."""
        return freeze(np.diff(self.offsets))

    @property
    def sizes(self) -> Ints:
        """How many rows of each user there are, (n_users,); more than `counts` where rows stand for
        several.
        """
        return self.counts

    @cached_property
    def owner(self) -> Ints:
        """Position of the user that owns each row, (n_samples,)."""
        return freeze(np.repeat(np.arange(self.n_users), self.counts))

    def _take_positions(self, chosen: Ints) -> Users:
        counts = self.counts[chosen]
        # Within one user, old and new row numbers differ by the difference of the user's two
        # starts.
        rows = (np.arange(counts.sum())
                + np.repeat(self.offsets[chosen] - offsets_of(counts)[:-1], counts))
        return self._rows(rows, counts, tuple(self.names[i] for i in chosen))

    def _rows(self, rows: Ints, counts: Ints, names: tuple[Any, ...]) -> Users:
        return replace(self, features=np.take(self.features, rows, axis=0),
                       offsets=offsets_of(counts), names=names,
                       targets=None if self.targets is None else self.targets[rows])

    def keep_rows(self, chosen: Flags) -> Users:
        """Only these rows; all users stay, also those who are left without any.

        Parameters
        ----------
        chosen : (n_samples,) True for the rows that stay.

        Returns
        -------
        Users
        """
        counts = np.bincount(self.owner[chosen], minlength=self.n_users)
        return self._rows(np.flatnonzero(chosen), counts, self.names)

    def require_samples(self) -> None:
        """Check that every user has a row.

        Raises
        ------
        InvalidInput : some user has none.
        """
        if (self.counts == 0).any():
            empty = [self.names[i] for i in np.flatnonzero(self.counts == 0)]
            raise InvalidInput(f"Every user needs a row, {len(empty)} of {self.n_users} have none",
                               where=f"user {show(*empty)}",
                               remedy="Keep the others: users.take(users.counts > 0)")

    @classmethod
    def from_arrays(cls, X: Any, y: Any = None, user: Any = None, *,
                    feature_names: Iterable[str] | None = None) -> Users:
        """Users from one row per sample.

        Users are ordered by name if names can be sorted, otherwise by first appearance; equal names
        (1 and 1.0) are one user.

        Parameters
        ----------
        X : (n_samples, n_features) a list, an array or a frame, whose columns then name the
            features.
        y : (n_samples,) targets as numbers, or None.
        user : (n_samples,) the owner of each row; None makes every row a separate user.
        feature_names : of the columns.

        Raises
        ------
        InvalidInput : lengths that do not match, or a cell that is no finite number; with its user
            and row.

        Example
        -------
        >>> Users.from_arrays([[1.0, 0.2], [0.5, 1.1]], [1, -1], ["ann", "bob"])
        Users(2 users, 2 samples, 2 features, targets)
        """
        # 1. Two dimensions, and the names of the columns.
        X = X.collect() if hasattr(X, "collect") else X
        array: Any = None if hasattr(X, "columns") else as_array(X, "X")
        if array is not None and array.ndim != 2:
            raise InvalidInput("X must have two dimensions, samples by features, got shape "
                               f"{array.shape}", remedy="Pass X.reshape(-1, 1) for one feature"
                               if array.ndim < 2 else "Pass X.reshape(len(X), -1)")
        columns = ([f"x{j}" for j in range(array.shape[1])] if array is not None
                   else list(map(str, X.columns)))
        labels = columns if feature_names is None else list(map(str, feature_names))
        check_unique(columns, "Column names of X")
        n = len(X)
        if n == 0 or not columns:
            raise InvalidInput(f"At least one row and one feature are needed, got {n} rows and "
                               f"{len(columns)} columns")
        # 2. One owner and one target for each row.
        rows = Rows(tuple(range(n)), np.arange(n)) if user is None else group(user)
        targets = None if y is None else as_array(y, "y")
        if targets is not None and targets.shape[1:] == (1,):
            targets = y = targets[:, 0]
        if targets is not None and targets.ndim != 1:
            raise InvalidInput(f"y must have one dimension, got shape {targets.shape}",
                               remedy="Pass one target per row")
        for what, size in (("user", len(rows.codes)),
                           ("y", n if targets is None else len(targets))):
            if size != n:
                raise InvalidInput(f"X has {n} rows and {what} has {size} values",
                                   remedy="Pass one value per row")
        if len(labels) != len(columns):
            raise InvalidInput(f"X has {len(columns)} columns and feature_names has {len(labels)} "
                               "values")
        # 3. Finite numbers only.
        if targets is not None:
            targets = as_numbers(y, "y", rows, getattr(y, "name", None), ENCODE_TARGET)
        if array is None or array.dtype.kind not in "biuf":
            series = zip((X[c] for c in X.columns) if array is None else array.T, labels,
                         strict=True)
            array = np.column_stack([as_numbers(values, "X", rows, label, ENCODE)
                                     for values, label in series])
        with np.errstate(over="ignore"):  # a long double becomes inf, which the check names
            array = array.astype(np.float64, copy=False)
        check_finite(array, "X", rows, labels)
        # 4. The rows of each user together, in their order.
        order = np.argsort(rows.codes, kind="stable")
        return cls(np.take(array, order, axis=0), None if targets is None else targets[order],
                   offsets_of(np.bincount(rows.codes)), rows.names, tuple(labels))

    @classmethod
    def from_frame(cls, frame: Any, *, user: Hashable, target: Hashable | None = None,
                   features: Sequence[Hashable] | str | None = None) -> Users:
        """Users from a pandas or polars frame whose features and targets are numbers.

        Nothing is encoded or scaled; `coterie.fitting.prepare` does both, and infers the task.

        Parameters
        ----------
        frame : one row per sample.
        user : the column that names the owner of each row.
        target : the column of targets, or None.
        features : the columns of features; all others unless named.

        Raises
        ------
        InvalidInput : a column that is not there, or a cell that is no finite number; with its user
            and row.

        Example
        -------
        >>> import polars
        >>> frame = polars.DataFrame({"shop": ["a", "b", "a"], "price": [1.5, 2.0, 1.0],
        ...                           "sold": [3, 4, 5]})
        >>> Users.from_frame(frame, user="shop", target="sold")
        Users(2 users, 3 samples, 1 features, targets)
        """
        frame = frame.collect() if hasattr(frame, "collect") else frame
        if not hasattr(frame, "columns"):
            raise InvalidInput("frame must be a pandas or polars DataFrame, got "
                               f"{type(frame).__name__}", remedy="Use Users.from_arrays for arrays")
        columns, used = list(frame.columns), [user] if target is None else [user, target]
        check_unique(columns, "Column names")
        given = (None if features is None else [features] if isinstance(features, str)
                 else list(features))
        for column in (*used, *(given or ())):
            if not isinstance(column, Hashable) or column not in columns:
                raise InvalidInput(f"There is no column {show(column)}",
                                   remedy=suggest(column, columns))
        chosen = [c for c in columns if c not in used] if given is None else given
        check_unique([*used, *chosen], "Columns used as user, target and features")
        if not chosen:
            raise InvalidInput("At least one feature column is needed, got none",
                               remedy="Name some in features")
        return cls.from_arrays(frame[chosen], None if target is None else frame[target],
                               frame[user])

    @classmethod
    def from_csv(cls, path: str | PathLike[str], *, user: str, target: str | None = None,
                 features: Sequence[str] | str | None = None, separator: str = ",") -> Users:
        """Users from a CSV file of numbers with a header, compressed or not.

        The file is read as `coterie fit` reads it, but nothing is encoded, filled in or scaled: a
        cell without a number is refused. A user column of integers gives integer names.

        Parameters
        ----------
        path : the file.
        user, target, features : columns, as for `from_frame`.
        separator : between cells.

        Raises
        ------
        InvalidInput : a file that is no table, or a cell that is no number.
        MissingExtra : polars is not installed.

        Example
        -------
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "shops.csv")
        >>> _ = path.write_text("shop,price,sold\\na,1.5,3\\nb,2.0,4\\n")
        >>> Users.from_csv(path, user="shop", target="sold")
        Users(2 users, 2 samples, 1 features, targets)
        """
        frame = read_table(path, separator)
        frame = read_numbers(frame, [name for name in frame.columns if name != user])
        with located(row_place(path, separator)):
            return cls.from_frame(frame, user=user, target=target, features=features)

    @classmethod
    def from_parquet(cls, path: str | PathLike[str], *, user: str, target: str | None = None,
                     features: Sequence[str] | str | None = None) -> Users:
        """Users from one Parquet file of numbers; as `from_csv`.

        Parameters
        ----------
        path : the file.
        user, target, features : columns, as for `from_frame`.

        Raises
        ------
        InvalidInput : a file that is not Parquet, or a cell that is no number.
        MissingExtra : polars is not installed.

        Example
        -------
        >>> import pathlib, polars, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "shops.parquet")
        >>> polars.DataFrame({"shop": ["a", "b"], "price": [1.5, 2.0]}).write_parquet(path)
        >>> Users.from_parquet(path, user="shop")
        Users(2 users, 2 samples, 1 features, no targets)
        """
        frame = read_parquet(path)
        with located(row_place(path)):
            return cls.from_frame(frame, user=user, target=target, features=features)

    def split(self, *, test: float | None = None, validation: float = 0.0,
              train: float | None = None,
              stratify: bool = False, seed: int | np.random.Generator = 0) -> Split:
        """Split every user's rows at random into train, validation and test.

        A user that has rows keeps at least one for training; of the others, test takes its rows
        before validation.

        Parameters
        ----------
        test : a float is a share of each user's rows, an integer a number of rows per user; 0.2 if
            omitted.
        validation : the same.
        train : limits the training part to so many rows; all other rows go to `test` unless it is
            given.
        stratify : whether every target value of a user is in `test` in proportion, to less than one
            row (in `validation` to less than two).
        seed : of the random choice.

        Returns
        -------
        Split, three `Users` with the same users in the same order.

        Raises
        ------
        InvalidInput : shares outside [0, 1), or stratify without targets.

        Example
        -------
        >>> users = Users.from_arrays([[float(i)] for i in range(20)], user=["ann", "bob"] * 10)
        >>> train, validation, test = users.split(test=0.2, validation=1)
        >>> train.counts.tolist(), validation.counts.tolist(), test.counts.tolist()
        ([7, 7], [1, 1], [2, 2])
        """
        if stratify and self.targets is None:
            raise InvalidInput("stratify=True needs targets",
                               remedy="Give the users targets or pass stratify=False")
        sizes = part_sizes(self.counts, test, validation, train)
        parts = choose_rows(self.owner, self.counts, sizes, self.targets if stratify else None,
                            seed)
        return Split(*(self._rows(rows, size, self.names)
                       for rows, size in zip(parts, sizes, strict=True)))

    def hold_out(self, share: float, *, stratify: bool | Array = False, seed: int = 0,
                 least: int = 0) -> Split:
        """Hold out a share of every user's rows, the same rows whoever the other users are.

        So the users of a table and the same users on several nodes hold out the same rows.

        Parameters
        ----------
        share : of each user's rows.
        stratify, seed : as for `split`; or (n_rows,) numbers that take the place of targets.
        least : users who would hold out fewer rows hold out none.

        Returns
        -------
        Split, with the held-out rows in `test`.

        Example
        -------
        >>> users = Users.from_arrays([[float(i)] for i in range(20)], user=["ann", "bob"] * 10)
        >>> alone = users.take([1]).hold_out(0.3).test.features
        >>> bool((users.hold_out(0.3).test.take([1]).features == alone).all())
        True
        """
        sizes = part_sizes(self.counts, float(share), 0.0, None, least)
        strata = stratify if isinstance(stratify, np.ndarray) else \
            self.targets if stratify else None
        parts = choose_own_rows(self.owner, self.counts, sizes, strata, seed, self.names)
        return Split(*(self._rows(rows, size, self.names)
                       for rows, size in zip(parts, sizes, strict=True)))

    def moments(self) -> Moments:
        """Count, means and centred sums of squares of each user; `Standardizer.from_moments`
        combines them.

        Returns
        -------
        The moments, with zeros for users without rows.

        Example
        -------
        >>> Users.from_arrays([[1.0], [3.0], [5.0]], user=["a", "a", "b"]).moments().means.tolist()
        [[2.0], [5.0]]
        """
        means, m2 = np.zeros((2, self.n_users, self.n_features))
        some = self.counts > 0  # reduceat wants non-empty segments
        if some.any():
            starts, n = self.offsets[:-1][some], self.counts[some][:, None]
            # From_moments names a column that overflows.
            with np.errstate(over="ignore", invalid="ignore"):
                first = np.add.reduceat(self.features, starts, axis=0) / n
                rest = self.features - np.repeat(first, self.counts[some], axis=0)
                # Corrected two-pass algorithm (Chan, Golub and LeVeque 1983): the mean of the
                # residuals is the
                # rounding error of the first mean.
                correction = np.add.reduceat(rest, starts, axis=0) / n
                means[some] = first + correction
                m2[some] = np.maximum(np.add.reduceat(rest**2, starts, axis=0) - n * correction**2,
                                      0.0)
        return Moments(self.counts, means, m2)

    def blocks(self) -> tuple[Block, ...]:
        """All users with rows as dense zero-padded blocks, one for each padded length.

        Returns
        -------
        The blocks, see `Block`; a user alone gives bitwise the block it gives in a crowd.

        Example
        -------
        >>> [block.index.tolist() for block in Users.from_arrays([[1.0], [2.0], [3.0]],
        ...     user=["a", "b", "b"]).blocks()]
        [[0], [1]]
        """
        return self._blocks

    @cached_property
    def prepared(self) -> WeakValueDictionary[Any, Any]:
        """What each loss has prepared of these users, while somebody keeps it."""
        return WeakValueDictionary()

    @cached_property
    def _blocks(self) -> tuple[Block, ...]:
        return padded_blocks(self.features, self.targets, self.offsets)


def padded_blocks(features: Array, targets: Array | None, offsets: Ints) -> tuple[Block, ...]:
    """The blocks of users, given as in `Users`; users without rows are in none.

    The padded length depends on the user's own count only, so a user alone gives bitwise the block
    it gives in a crowd. Up to 16 rows are exact; above, less than one eighth is padding.
    """
    counts = np.diff(offsets)
    # Above 16 rows: the next multiple of 2^(floor(log2(count)) - 3); frexp's exponent is
    # floor(log2(count)) + 1.
    step = 2 ** np.maximum(np.frexp(counts)[1].astype(np.int64) - 4, 0)
    lengths = np.where(counts <= 16, counts, -(-counts // step) * step)
    values = np.zeros(len(features)) if targets is None else targets
    return tuple(_block(features, values, offsets, np.flatnonzero(lengths == m), int(m))
                 for m in np.unique(lengths[lengths > 0]))


def _block(features: Array, values: Array, offsets: Ints, index: Ints, m: int) -> Block:
    counts, start, stop = np.diff(offsets)[index, None], offsets[index[0]], offsets[index[-1] + 1]
    real = np.arange(m) < counts
    if real.all() and stop - start == real.size:  # adjacent users without padding: views
        rows = features[start:stop].reshape(*real.shape, features.shape[1])
        targets = values[start:stop].reshape(real.shape)
    else:
        taken = np.where(real, offsets[index, None] + np.arange(m), 0)
        rows, targets = np.take(features, taken, axis=0), np.where(real, values[taken], 0.0)
        rows[~real] = 0.0
    return Block(freeze(index), freeze(rows), freeze(targets), freeze(real / counts))
