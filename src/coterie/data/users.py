"""Samples of many users: one flat array of rows plus offsets.

The rows of one user are contiguous, so per-user sums are segment sums and nothing loops over users. Data are checked
here, once: later parts rely on finite float64 numbers, unique names and matching lengths. Messages count rows from 0,
as in the caller's input (in a CSV file, without the header).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from coterie._typing import Array, Ints
from coterie.data.frames import read_numbers, read_parquet
from coterie.data.io import read_table
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
from coterie.errors import Incompatible, InvalidInput


class Block(NamedTuple):
    """Users of one padded length as dense arrays; padding is 0 and has weight 0."""

    index: Ints        # type: ignore[assignment]  # (n,) positions of these users; hides tuple.index
    features: Array   # (n, m, p)
    targets: Array    # (n, m), zeros when there are no targets
    weights: Array    # (n, m), 1 / count on real rows
    units: Array | None = None  # (n, dim) of a model's coordinates, where a loss has changed them


class Moments(NamedTuple):
    """What each user tells for standardisation; zeros for a user without rows."""

    counts: Ints   # (n_users,)
    means: Array  # (n_users, n_features)
    m2: Array     # (n_users, n_features), centred sums of squares


class Split(NamedTuple):
    """Three parts with the same users in the same order; a user may have no row in `validation` and `test`."""

    train: Users
    validation: Users
    test: Users


class Participants:
    """Who takes part, by name, and what the columns of their data are called; the data are elsewhere.

    `Users` are participants whose data are here.

    Parameters
    ----------
    names : unique and hashable.
    feature_names : unique.

    Raises
    ------
    InvalidInput : where a name comes twice.

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
        return len(self.names)

    @property
    def n_features(self) -> int:
        return len(self.feature_names)

    @property
    def data(self) -> Users:
        """The users with their samples; raises Incompatible where these are elsewhere."""
        raise Incompatible("The samples of these users are elsewhere, and this needs them. Call it where the data are.")

    @cached_property
    def _positions(self) -> dict[Hashable, int]:
        return {name: i for i, name in enumerate(self.names)}

    def index(self, name: Hashable) -> int:
        """Position of the user called `name`."""
        try:
            return self._positions[name]
        except (KeyError, TypeError):
            raise InvalidInput(f"There is no user {show(name)}", remedy=suggest(name, self.names)) from None

    def take(self, indices: npt.ArrayLike) -> Participants:
        """The users at these positions, in this order; a boolean mask works too."""
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


@dataclass(frozen=True, eq=False)
class Users(Participants):
    """Ragged samples of many users in one flat array plus offsets; the arrays are copies and read-only."""

    features: Array               # (n_samples, n_features), rows of one user contiguous and in their original order
    targets: Array | None         # (n_samples,)
    offsets: Ints                  # (n_users + 1,), user i owns rows offsets[i]:offsets[i + 1]
    names: tuple[Any, ...]         # (n_users,), unique and hashable
    feature_names: tuple[str, ...]

    def __post_init__(self) -> None:
        names, columns = tuple(map(plain, self.names)), tuple(map(str, self.feature_names))
        features, offsets = np.array(self.features, dtype=np.float64, order="C"), np.array(self.offsets)
        targets = None if self.targets is None else np.array(self.targets, dtype=np.float64)
        if features.ndim != 2 or features.shape[1] != len(columns) or not columns:
            raise InvalidInput(f"features must have shape (n_samples, {len(columns) or 1}), got {features.shape}")
        n = len(features)
        if targets is not None and targets.shape != (n,):
            raise InvalidInput(f"targets must have shape ({n},), got {targets.shape}")
        if offsets.shape != (len(names) + 1,) or offsets.dtype.kind not in "iu" or offsets[0] or offsets[-1] != n \
                or (offsets[1:] < offsets[:-1]).any():
            raise InvalidInput(f"offsets must be {len(names) + 1} integers rising from 0 to {n}, got {offsets}")
        check_unique(names, "User names")
        check_unique(columns, "Feature names")
        rows = Rows(names, np.repeat(np.arange(len(names)), np.diff(offsets)))
        check_finite(features, "features", rows, columns)
        if targets is not None:
            check_finite(targets, "targets", rows)
        vars(self).update(features=freeze(features), targets=targets if targets is None else freeze(targets),
                          offsets=freeze(offsets.astype(np.int64)), names=names, feature_names=columns)

    def __reduce__(self) -> tuple[Any, ...]:
        # Leaves the caches behind, and the arrays are read-only again after unpickling.
        return Users, (self.features, self.targets, self.offsets, self.names, self.feature_names)

    def __repr__(self) -> str:
        targets = "no targets" if self.targets is None else "targets"
        return f"Users({self.n_users} users, {self.n_samples} samples, {self.n_features} features, {targets})"

    @property
    def data(self) -> Users:
        return self

    @property
    def n_samples(self) -> int:
        return len(self.features)

    @cached_property
    def counts(self) -> Ints:
        """Number of rows of each user, (n_users,)."""
        return freeze(np.diff(self.offsets))

    @cached_property
    def owner(self) -> Ints:
        """Position of the user that owns each row, (n_samples,)."""
        return freeze(np.repeat(np.arange(self.n_users), self.counts))

    def take(self, indices: npt.ArrayLike) -> Users:
        """The users at these positions, in this order; a boolean mask works too."""
        chosen = self._chosen(indices)
        counts = self.counts[chosen]
        # Within one user, row numbers here and there differ by the difference of the user's two starts.
        rows = np.arange(counts.sum()) + np.repeat(self.offsets[chosen] - _offsets(counts)[:-1], counts)
        return self._rows(rows, counts, tuple(self.names[i] for i in chosen))

    def _rows(self, rows: Ints, counts: Ints, names: tuple[Any, ...]) -> Users:
        return replace(self, features=np.take(self.features, rows, axis=0), offsets=_offsets(counts), names=names,
                       targets=None if self.targets is None else self.targets[rows])

    def require_samples(self) -> None:
        """Raise InvalidInput when some user has no row."""
        if (self.counts == 0).any():
            empty = [self.names[i] for i in np.flatnonzero(self.counts == 0)]
            raise InvalidInput(f"Every user needs a row, {len(empty)} of {self.n_users} have none",
                               where=f"user {show(*empty)}", remedy="Keep the others: users.take(users.counts > 0)")

    @classmethod
    def from_arrays(cls, X: Any, y: Any = None, user: Any = None, *,
                    feature_names: Iterable[str] | None = None) -> Users:
        """Users from one row per sample; `user` names the owner of each row (None: every row is a user of its own).

        Users are ordered by name where names can be sorted, else by first appearance; equal names (1 and 1.0) are one
        user. X may be a list, an array or a frame, whose columns then name the features.
        """
        X = X.collect() if hasattr(X, "collect") else X
        array: Any = None if hasattr(X, "columns") else as_array(X, "X")
        if array is not None and array.ndim != 2:
            raise InvalidInput(f"X must have two dimensions, samples by features, got shape {array.shape}", remedy=(
                "Pass X.reshape(-1, 1) for one feature" if array.ndim < 2 else "Pass X.reshape(len(X), -1)"))
        columns = [f"x{j}" for j in range(array.shape[1])] if array is not None else list(map(str, X.columns))
        labels = columns if feature_names is None else list(map(str, feature_names))
        check_unique(columns, "Column names of X")
        n = len(X)
        if n == 0 or not columns:
            raise InvalidInput(f"At least one row and one feature are needed, got {n} rows and {len(columns)} columns")
        rows = Rows(tuple(range(n)), np.arange(n)) if user is None else group(user)
        targets = None if y is None else as_array(y, "y")
        if targets is not None and targets.shape[1:] == (1,):
            targets = y = targets[:, 0]
        if targets is not None and targets.ndim != 1:
            raise InvalidInput(f"y must have one dimension, got shape {targets.shape}", remedy="Pass one target a row")
        for what, size in (("user", len(rows.codes)), ("y", n if targets is None else len(targets))):
            if size != n:
                raise InvalidInput(f"X has {n} rows and {what} has {size} values", remedy="Pass one value a row")
        if len(labels) != len(columns):
            raise InvalidInput(f"X has {len(columns)} columns and feature_names has {len(labels)} values")
        if targets is not None:
            targets = as_numbers(y, "y", rows, getattr(y, "name", None), ENCODE_TARGET)
        if array is None or array.dtype.kind not in "biuf":
            series = zip((X[c] for c in X.columns) if array is None else array.T, labels, strict=True)
            array = np.column_stack([as_numbers(values, "X", rows, label, ENCODE) for values, label in series])
        with np.errstate(over="ignore"):  # a long double beyond float64 becomes inf, which the check names
            array = array.astype(np.float64, copy=False)
        check_finite(array, "X", rows, labels)
        order = np.argsort(rows.codes, kind="stable")
        return cls(np.take(array, order, axis=0), None if targets is None else targets[order],
                   _offsets(np.bincount(rows.codes)), rows.names, tuple(labels))

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
        InvalidInput : a column that is not there, or a cell that is no finite number; with its user and row.

        Example
        -------
        >>> users = Users.from_frame(frame, user="shop", target="sold")
        """
        frame = frame.collect() if hasattr(frame, "collect") else frame
        if not hasattr(frame, "columns"):
            raise InvalidInput(f"frame must be a pandas or polars DataFrame, got {type(frame).__name__}",
                               remedy="Use Users.from_arrays for arrays")
        columns, used = list(frame.columns), [user] if target is None else [user, target]
        check_unique(columns, "Column names")
        given = None if features is None else [features] if isinstance(features, str) else list(features)
        for column in (*used, *(given or ())):
            if not isinstance(column, Hashable) or column not in columns:
                raise InvalidInput(f"There is no column {show(column)}", remedy=suggest(column, columns))
        chosen = [c for c in columns if c not in used] if given is None else given
        check_unique([*used, *chosen], "Columns used as user, target and features")
        if not chosen:
            raise InvalidInput("At least one feature column is needed, got none", remedy="Name some in features")
        return cls.from_arrays(frame[chosen], None if target is None else frame[target], frame[user])

    @classmethod
    def from_csv(cls, path: str | PathLike[str], *, user: str, target: str | None = None,
                 features: Sequence[str] | str | None = None, separator: str = ",") -> Users:
        """Users from a CSV file of numbers with a header, compressed or not.

        The file is read as `coterie fit` reads it, but nothing is encoded, filled in or scaled: a cell without a
        number is refused. A user column of integers gives integer names.

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
        >>> users = Users.from_csv("shops.csv", user="shop", target="sold")
        """
        frame = read_table(path, separator)
        frame = read_numbers(frame, [name for name in frame.columns if name != user])
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
        >>> users = Users.from_parquet("shops.parquet", user="shop", target="sold")
        """
        return cls.from_frame(read_parquet(path), user=user, target=target, features=features)

    def split(self, *, test: float | None = None, validation: float = 0.0, train: float | None = None,
              stratify: bool = False, seed: int | np.random.Generator = 0) -> Split:
        """Split every user's rows at random into train, validation and test.

        A float is a share of each user's rows, an int a number of rows per user. `test` is 0.2 unless given. `train`
        cuts the training part to that many rows; then all other rows go to `test` unless it is given. A user with any
        row keeps at least one for training; after that test is served before validation. With `stratify` every
        target value of a user is in `test` in proportion, to less than one row (in `validation` to less than two).
        """
        if stratify and self.targets is None:
            raise InvalidInput("stratify=True needs targets", remedy="Give the users targets or pass stratify=False")
        counts, least = self.counts, np.minimum(self.counts, 1)
        n_train = counts if train is None else np.clip(_wanted(train, counts, "train"), least, counts)
        if train is None or test is not None:
            n_test = np.minimum(_wanted(0.2 if test is None else test, counts, "test"), counts - least)
            n_validation = np.minimum(_wanted(validation, counts, "validation"), counts - least - n_test)
            n_train = np.minimum(n_train, counts - n_test - n_validation)
        else:
            n_validation = np.minimum(_wanted(validation, counts, "validation"), counts - n_train)
            n_test = counts - n_train - n_validation
        rng = np.random.default_rng(seed)
        key = rng.random(self.n_samples)
        left = np.lexsort((key, self.targets if stratify and self.targets is not None else key, self.owner))
        parts = []
        for wanted in (n_test, n_validation, n_train):
            owner = self.owner[left]
            size = np.bincount(owner, minlength=self.n_users)
            # Systematic sampling of k of a user's n positions j with a phase u of 0..n-1: j is in if
            # floor(((j+1) k + u) / n) > floor((j k + u) / n). So k are in, and of any run of L positions L k / n to
            # less than one; integers, so no rounding.
            k, n, u = wanted[owner], size[owner], rng.integers(0, np.maximum(size, 1))[owner]
            j = np.arange(len(left)) - _offsets(size)[owner]
            chosen = ((j + 1) * k + u) // n > (j * k + u) // n
            parts.append(self._rows(np.sort(left[chosen]), wanted, self.names))
            left = left[~chosen]
        return Split(train=parts[2], validation=parts[1], test=parts[0])

    def moments(self) -> Moments:
        """Each user's count, means and centred sums of squares; `Standardizer.from_moments` combines them."""
        means, m2 = np.zeros((2, self.n_users, self.n_features))
        some = self.counts > 0  # reduceat wants non-empty segments
        if some.any():
            starts, n = self.offsets[:-1][some], self.counts[some][:, None]
            with np.errstate(over="ignore", invalid="ignore"):  # from_moments names a column that overflows
                first = np.add.reduceat(self.features, starts, axis=0) / n
                rest = self.features - np.repeat(first, self.counts[some], axis=0)
                # Corrected two-pass algorithm (Chan, Golub and LeVeque 1983): the mean of the residuals is the
                # rounding error of the first mean.
                correction = np.add.reduceat(rest, starts, axis=0) / n
                means[some] = first + correction
                m2[some] = np.maximum(np.add.reduceat(rest**2, starts, axis=0) - n * correction**2, 0.0)
        return Moments(self.counts, means, m2)

    def blocks(self) -> tuple[Block, ...]:
        """All users with rows as dense zero-padded blocks, one for each padded length.

        The padded length depends on the user's own count only, so a user alone gives bitwise the block it gives in a
        crowd. Up to 16 rows are exact; above, less than one eighth is padding.
        """
        return self._blocks

    @cached_property
    def _blocks(self) -> tuple[Block, ...]:
        # Above 16 rows: the next multiple of 2^(floor(log2(count)) - 3); frexp's exponent is floor(log2(count)) + 1.
        step = 2 ** np.maximum(np.frexp(self.counts)[1].astype(np.int64) - 4, 0)
        lengths = np.where(self.counts <= 16, self.counts, -(-self.counts // step) * step)
        return tuple(self._block(np.flatnonzero(lengths == m), int(m)) for m in np.unique(lengths[lengths > 0]))

    def _block(self, index: Ints, m: int) -> Block:
        counts, start, stop = self.counts[index, None], self.offsets[index[0]], self.offsets[index[-1] + 1]
        real = np.arange(m) < counts
        values = np.zeros(self.n_samples) if self.targets is None else self.targets
        if real.all() and stop - start == real.size:  # adjacent users without padding: views
            features = self.features[start:stop].reshape(*real.shape, self.n_features)
            targets = values[start:stop].reshape(real.shape)
        else:
            rows = np.where(real, self.offsets[index, None] + np.arange(m), 0)
            features, targets = np.take(self.features, rows, axis=0), np.where(real, values[rows], 0.0)
            features[~real] = 0.0
        return Block(freeze(index), freeze(features), freeze(targets), freeze(real / counts))


def _wanted(amount: Any, counts: Ints, name: str) -> Ints:
    """Rows per user that a share (rounded half up) or a number of rows asks for."""
    if isinstance(amount, (int, np.integer)) and not isinstance(amount, bool) and amount >= 0:
        return np.minimum(counts, min(int(amount), 2**62))
    if isinstance(amount, (float, np.floating)) and 0 <= amount < 1:
        # 0.29 * 50 is just below 14.5 in binary; the last term makes it a half.
        return np.asarray(np.floor(float(amount) * counts + 0.5 + 1e-9), dtype=np.int64)
    raise InvalidInput(f"{name} must be a share in [0, 1) or a number of rows per user, got {amount!r}",
                       remedy=f"For example {name}=0.2 or {name}=5")


def _offsets(counts: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def freeze(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array
