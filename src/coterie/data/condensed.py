"""Rows condensed to their second moments: all that squared losses can see of them.

    n,  mean of z,  sum (z - mean)(z - mean)',         z = (features, target) of one row

For every linear model the mean of the squared errors follows from these numbers, so a user who
sends them has answered every question that a fit with the squared loss can ask. `Condensed` users
have a few rows with the same moments:

    rows = mean + sqrt(r / n) B L',       scatter = L L',     r = 1 + number of columns of z

where the columns of B are orthonormal and orthogonal to (1, ..., 1). So code for rows runs on them
unchanged, if it asks for `sizes` where it means the number of rows that there were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np

from coterie.base.types import Array, Ints
from coterie.data.splitting import offsets_of
from coterie.data.users import Moments, Users, freeze


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

