"""Standardised features, from what each user can send: a count, means and centred sums of squares.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from coterie.base.errors import InvalidInput
from coterie.base.types import Array
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
