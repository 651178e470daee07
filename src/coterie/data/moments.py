"""Moments of users' rows, which say all that two things need: standardised features, from a count,
means and centred sums of squares of each user; and squared losses, from second moments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from coterie.base.errors import InvalidInput
from coterie.base.types import Array, Ints
from coterie.data.splitting import offsets_of
from coterie.data.users import Moments, Users, freeze
from coterie.data.validation import show


@dataclass(frozen=True, eq=False)
class Standardizer:
    """Shift and scale of every feature: (a - mean) / scale.

    Parameters
    ----------
    mean : (n_features,).
    scale : (n_features,), positive.
    feature_names : of the features it is for; empty: not checked.

    Example
    -------
    >>> users = Users.from_arrays([[1.0], [3.0], [5.0], [7.0]], user=["ann", "ann", "bob", "bob"])
    >>> scaler = Standardizer.from_moments(users.moments(), feature_names=users.feature_names)
    >>> scaler.transform(users).features.std().round(12).item()
    1.0
    """

    mean: Array
    scale: Array
    feature_names: tuple[str, ...] = ()

    @classmethod
    def from_moments(cls, moments: Moments, *, feature_names: Iterable[str] = ()) -> Standardizer:
        """Pooled mean and population standard deviation from per-user moments; constant features
        get scale 1.

        Parameters
        ----------
        moments : of all users, as `Users.moments` gives them.
        feature_names : of the features.

        Raises
        ------
        InvalidInput : no rows, or a feature whose spread is beyond float64.
        """
        labels, n = tuple(feature_names), moments.counts.sum()
        if n == 0:
            raise InvalidInput("Standardisation needs at least one row, got none")
        with np.errstate(over="ignore", invalid="ignore"):
            # Chan's formula (Chan, Golub and LeVeque 1983) for all users at once:
            # mean = sum n_i mean_i / n,  m2 = sum m2_i + sum n_i (mean_i - mean)^2. Shifting by one
            # user's mean keeps
            # the digits of a mean that is large relative to the spread.
            shift = moments.means[np.argmax(moments.counts)]
            mean = shift + moments.counts @ (moments.means - shift) / n
            spread = np.sqrt((moments.m2.sum(axis=0) + moments.counts @ (moments.means - mean) ** 2)
                             / n)
        bad = np.flatnonzero(~np.isfinite(spread))
        if bad.size:
            raise InvalidInput("The spread of a feature is beyond float64",
                               remedy="Give it in larger units",
                               where=f"column {labels[bad[0]] if labels else bad[0]!r}")
        # Means of a constant column agree only to rounding: it is constant if its spread is
        # negligible.
        constant = spread <= 8 * np.finfo(np.float64).eps * np.abs(moments.means).max(axis=0)
        return cls(freeze(mean), freeze(np.where(constant, 1.0, spread)), labels)

    def transform(self, users: Users) -> Users:
        """The same users with standardised features.

        Parameters
        ----------
        users : with the features of the scaler.

        Returns
        -------
        The users, with features (a - mean) / scale.

        Raises
        ------
        InvalidInput : the users have other features than the scaler.

        Example
        -------
        >>> users = Users.from_arrays([[1.0], [3.0]])
        >>> Standardizer.from_moments(users.moments()).transform(users).features.tolist()
        [[-1.0], [1.0]]
        """
        if users.n_features != len(self.mean) or (self.feature_names and users.feature_names
                                                  != self.feature_names):
            raise InvalidInput(f"The scaler is for {len(self.mean)} features "
                               f"({show(*self.feature_names)}), got "
                               f"{users.n_features} ({show(*users.feature_names)})")
        return replace(users, features=(users.features - self.mean) / self.scale)

    def restore(self, models: npt.ArrayLike, *, intercept_sign: int) -> Array:
        """Models in original units, from models (..., n_features + 1) fitted on standardised
        features.

        Parameters
        ----------
        models : the last coordinate is the intercept b of the margin <w, a> + intercept_sign * b.
        intercept_sign : of the loss: 1 or -1.

        Returns
        -------
        (..., n_features + 1) the models in original units.

        Raises
        ------
        InvalidInput : models of another length, or another sign.

        Example
        -------
        >>> scaler = Standardizer.from_moments(Users.from_arrays([[1.0], [3.0]]).moments())
        >>> scaler.restore([2.0, 0.5], intercept_sign=1).tolist()
        [2.0, -3.5]
        """
        fitted = np.asarray(models, dtype=np.float64)
        if (fitted.ndim == 0 or fitted.shape[-1] != len(self.mean) + 1
            or intercept_sign not in (1, -1)):
            raise InvalidInput(f"models must have {len(self.mean) + 1} columns, the intercept "
                               "last, and intercept_sign "
                               f"must be 1 or -1, got shape {fitted.shape} and {intercept_sign!r}")
        # <w, (a - mean) / scale> + s b = <w / scale, a> + s (b - s <w / scale, mean>)
        slopes = fitted[..., :-1] / self.scale
        return np.concatenate(
            [slopes, fitted[..., -1:] - intercept_sign * (slopes @ self.mean)[..., None]], axis=-1)


# Rows condensed to their second moments: all that squared losses can see of them.
#
#     n,  mean of z,  sum (z - mean)(z - mean)',         z = (features, target) of one row
#
# For every linear model the mean of the squared errors follows from these numbers, so a user who
# sends them has answered every question that a fit with the squared loss can ask. `Condensed` users
# have a few rows with the same moments:
#
#     rows = mean + sqrt(r / n) B L',       scatter = L L',     r = 1 + number of columns of z
#
# where the columns of B are orthonormal and orthogonal to (1, ..., 1). So code for rows runs on
# them unchanged, if it asks for `sizes` where it means the number of rows that there were.

class SecondMoments(NamedTuple):
    """The number, the mean and the scatter of each user's rows; the target is the last column.

    Parameters
    ----------
    counts : (n_users,).
    means : (n_users, q).
    scatters : (n_users, q, q).

    Example
    -------
    >>> users = Users.from_arrays([[0.0], [1.0], [4.0]], [1.0, 3.0, 9.0], ["ann", "ann", "bob"])
    >>> moments = SecondMoments.of(users)
    >>> moments.means.tolist(), moments.scatters[0].tolist()
    ([[0.5, 2.0], [4.0, 9.0]], [[0.5, 1.0], [1.0, 2.0]])
    """

    counts: Ints
    means: Array
    scatters: Array

    @classmethod
    def of(cls, users: Users) -> Self:
        """Those of these users."""
        columns = (users.features if users.targets is None
                   else np.column_stack([users.features, users.targets]))
        q = columns.shape[1]
        names = tuple(f"z{k}" for k in range(q))
        both = Users(columns, None, users.offsets, users.names, names)
        means, scatters = both.moments().means, np.zeros((users.n_users, q, q))
        for block in both.blocks():
            rest = (block.features - means[block.index, None]) * (block.weights > 0)[..., None]
            scatters[block.index] = np.swapaxes(rest, 1, 2) @ rest
        return cls(users.counts, means, scatters)

    def add(self, other: SecondMoments) -> SecondMoments:
        """The moments of the rows of both, for each user (Chan, Golub and LeVeque 1983)."""
        counts = self.counts + other.counts
        share = (other.counts / np.maximum(counts, 1))[:, None]
        step = np.where(self.counts[:, None] > 0, other.means - self.means, 0.0)
        start = np.where(self.counts[:, None] > 0, self.means, other.means)
        between = (self.counts[:, None] * share * step)[:, :, None] * step[:, None, :]
        return SecondMoments(counts, start + share * step, self.scatters + other.scatters + between)

    def users(self, names: Sequence[Any], feature_names: Sequence[str]) -> Condensed:
        """Users with these moments."""
        q = self.means.shape[1]
        r, some = q + 1, self.counts > 0
        scales, axes = np.linalg.eigh(self.scatters[some])
        roots = axes * np.sqrt(np.maximum(scales, 0.0))[:, None, :]
        spread = np.sqrt(r / np.maximum(self.counts[some], 1))[:, None, None]
        rows = (self.means[some][:, None, :] + spread
                * (_make_contrasts(r) @ np.swapaxes(roots, 1, 2))).reshape(-1, q)
        p = len(feature_names)
        return Condensed(rows[:, :p], rows[:, p] if q > p else None,
                         offsets_of(np.where(some, r, 0)), tuple(names),
                         tuple(feature_names), self.counts)


def _make_contrasts(r: int) -> Array:
    """(r, r - 1) orthonormal columns orthogonal to (1, ..., 1), Helmert's."""
    out = np.zeros((r, r - 1))
    for k in range(1, r):
        out[:k, k - 1], out[k, k - 1] = 1.0, -k
        out[:, k - 1] /= np.sqrt(k * (k + 1))
    return out


@dataclass(frozen=True, eq=False, repr=False)
class Condensed(Users):
    """Users whose rows stand for more of them: same second moments, other numbers.

    Parameters
    ----------
    features, targets, offsets, names, feature_names : of the few rows, as for `Users`.
    represented : (n_users,) the number of rows that they stand for.

    Example
    -------
    >>> users = Users.from_arrays([[float(i)] for i in range(9)], user=["ann"] * 9)
    >>> few = SecondMoments.of(users).users(users.names, users.feature_names)
    >>> few.counts.tolist(), few.sizes.tolist(), few.moments().m2.round(9).tolist()
    ([2], [9], [[60.0]])
    """

    represented: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def __post_init__(self) -> None:
        super().__post_init__()
        vars(self).update(represented=freeze(np.array(self.represented, dtype=np.int64)))

    def __reduce__(self) -> tuple[Any, ...]:
        return Condensed, (self.features, self.targets, self.offsets, self.names,
                           self.feature_names, self.represented)

    @property
    def sizes(self) -> Ints:
        return self.represented

    def _take_positions(self, chosen: Ints) -> Condensed:
        few = super()._take_positions(chosen)
        return Condensed(few.features, few.targets, few.offsets, few.names, few.feature_names,
                         self.represented[chosen])

    def moments(self) -> Moments:
        counts, means, m2 = super().moments()
        return Moments(self.sizes, means, m2 * (self.sizes / np.maximum(counts, 1))[:, None])
