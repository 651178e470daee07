"""The columns that models of an average are linear in: straight ones, curves, and users' means.

    1, standardised columns, a curve for each of some columns, users' own means

A curve of the column x with knots k (about six, at quantiles) is spanned by |x - k|^3, less its
part that is linear in x, with mean square one; beyond the range of x it is held at its last value.
On the logarithmic basis positive columns that are less skewed so are taken by their logarithms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np

from coterie.base.types import Array, Flags, Ints

_KNOTS, _VALUES = 6, 5  # knots of a curve; different values from which a column may have one
_FEW = 30  # different values below which knots are quantiles of these
_KEPT = 1e-4  # singular value over the largest below which a direction of a curve is left out
_VARIES = 1e-6  # variance inside users over the whole, from which a column varies there
_BETWEEN = 1e-3  # standard deviation of users' means from which they are a column
_LOWEST = 0.5  # of the smallest value: logarithms are taken of no less
_SEEN = 20_000  # rows that knots are chosen from, at most


class ColumnCurve(NamedTuple):
    """The curve of one column."""

    column: int
    knots: Array  # (k,)
    root: Array  # (k, k) makes the knots' functions about orthogonal
    line: Array  # (2, k) their linear part
    turn: Array  # (k, width) to the columns, with mean square one

    def of(self, x: Array) -> Array:
        """(n_rows, width) for values in the range."""
        functions = np.abs(x[:, None] - self.knots) ** 3 @ self.root
        return np.asarray((functions - self.line[0] - x[:, None] * self.line[1]) @ self.turn)


@dataclass(frozen=True, eq=False)
class Basis:
    """How rows of features become columns.

    Parameters
    ----------
    logs : (n_features,) columns taken by their logarithm.
    lowest : (n_features,) the least value that these may have.
    mean, scale : (n_features,) of the columns.
    range : (2, n_features) of the standardised columns.
    varies : (n_features,) columns that vary inside users.
    curves : of some columns.
    means : (n_users, n_means) users' own means of columns, over their standard deviation.
    """

    logs: Flags
    lowest: Array
    mean: Array
    scale: Array
    range: Array
    varies: Flags
    curves: tuple[ColumnCurve, ...] = ()
    means: Array = field(default_factory=lambda: np.zeros((0, 0)))

    @classmethod
    def learn(cls, X: Array, offsets: Ints, *, logarithms: bool = False) -> Self:
        """The straight columns, and users' means, from rows in the order of their users."""
        width, counts = X.shape[1], np.diff(offsets)
        logs = np.array([logarithms and _better_as_logs(X[:, j]) for j in range(width)], dtype=bool)
        lowest = np.where(logs, _LOWEST * X.min(axis=0), 0.0)
        x = _logarithms(X, logs, lowest)
        mean, scale = x.mean(axis=0), x.std(axis=0)
        scale = np.where(scale > 1e-12 * (1e-300 + np.abs(mean)), scale, 1.0)
        z = (x - mean) / scale
        owner = np.repeat(np.arange(len(counts)), counts)
        sums = np.stack([np.bincount(owner, z[:, j], len(counts)) for j in range(width)], axis=1)
        means = sums / np.maximum(counts, 1)[:, None]
        varies = ((z - means[owner]) ** 2).mean(axis=0) > _VARIES
        spread = means.std(axis=0)
        between = np.flatnonzero(varies & (spread > _BETWEEN))
        own = means[:, between] / np.maximum(means[owner][:, between].std(axis=0), _BETWEEN)
        return cls(logs, lowest, mean, scale, np.stack([z.min(axis=0), z.max(axis=0)]), varies,
                   (), own)

    def with_curves(self, X: Array, columns: Ints) -> Self:
        """The same basis with the curves of these columns, as far as they have enough values."""
        z = self.straight(X)
        curves = [curve for j in columns if (curve := _learn_curve(int(j), z[:, j])) is not None]
        return type(self)(self.logs, self.lowest, self.mean, self.scale, self.range, self.varies,
                          tuple(curves), self.means)

    def straight(self, X: Array) -> Array:
        """(n_rows, n_features) the standardised columns."""
        return np.asarray((_logarithms(X, self.logs, self.lowest) - self.mean) / self.scale)

    def rows(self, X: Array, owner: Ints) -> Array:
        """(n_rows, width) all columns of rows; users who are not known have owner -1."""
        z = self.straight(X)
        held = np.clip(z, *self.range)
        own = np.zeros((len(X), self.means.shape[1]))
        if own.shape[1]:
            own = np.where((owner >= 0)[:, None], self.means[owner], 0.0)
        return np.concatenate([np.ones((len(X), 1)), z,
                               *(curve.of(held[:, curve.column]) for curve in self.curves), own],
                              axis=1)

    @property
    def widths(self) -> list[int]:
        """Columns of each curve."""
        return [curve.turn.shape[1] for curve in self.curves]

    def part_of(self, what: str) -> list[Ints]:
        """Positions of columns: "straight", "curves" (by curve), or "means"."""
        first = 1 + len(self.mean)
        edges = np.cumsum([first, *self.widths])
        if what == "straight":
            return [np.arange(1, first)]
        if what == "curves":
            return [np.arange(a, b) for a, b in pairwise(edges)]
        return [np.arange(edges[-1], edges[-1] + self.means.shape[1])] if self.means.size else []

    def state(self) -> dict[str, Any]:
        """Arrays, numbers and texts, for `from_state`."""
        return {"logs": self.logs.astype(np.int64), "lowest": self.lowest, "mean": self.mean,
                "scale": self.scale, "range": self.range, "varies": self.varies.astype(np.int64),
                "means": self.means, "curves": [curve._asdict() for curve in self.curves]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """The basis that `state` describes."""
        curves = tuple(ColumnCurve(int(each["column"]), *(np.asarray(each[name]) for name in
                                                    ("knots", "root", "line", "turn")))
                       for each in state["curves"])
        arrays = {name: np.asarray(state[name])
                  for name in ("lowest", "mean", "scale", "range", "means")}
        return cls(np.asarray(state["logs"]).astype(bool), arrays["lowest"], arrays["mean"],
                   arrays["scale"], arrays["range"], np.asarray(state["varies"]).astype(bool),
                   curves, arrays["means"])


def _logarithms(X: Array, logs: Flags, lowest: Array) -> Array:
    if not logs.any():
        return X
    out = X.copy()
    out[:, logs] = np.log(np.maximum(X[:, logs], lowest[logs]))
    return out


def skewness(x: Array) -> float:
    """The size of the third standardised moment."""
    centred = x - x.mean()
    return float(abs((centred**3).mean()) / max(float(centred.std()), 1e-300) ** 3)


def _better_as_logs(x: Array) -> bool:
    """Whether a column is positive, has several values, and is less skewed as logarithms."""
    if not x.min() > 0 or len(np.unique(x[:_SEEN])) <= _VALUES:
        return False
    return skewness(np.log(x)) < skewness(x)


def _learn_curve(column: int, z: Array) -> ColumnCurve | None:
    """The curve of a standardised column; None where it has too few values."""
    z = z[:: max(1, len(z) // _SEEN)]
    values = np.unique(z)
    if len(values) < _VALUES:
        return None
    knots = np.unique(np.quantile(values if len(values) < _FEW else z,
                                  np.linspace(0.05, 0.95, min(_KNOTS, len(values) - 2))))
    if len(knots) < 3:
        return None
    # 1. Functions of the knots, about orthogonal (as of thin plates), less their linear part.
    U, scales, W = np.linalg.svd(np.abs(knots[:, None] - knots) ** 3)
    root = (U / np.sqrt(np.maximum(scales, 1e-6 * scales[0]))) @ W
    functions = np.abs(z[:, None] - knots) ** 3 @ root
    ones = np.stack([np.ones(len(z)), z], axis=1)
    line = np.linalg.lstsq(ones, functions, rcond=None)[0]
    rest = functions - ones @ line
    size = float(np.sqrt((rest**2).sum(axis=1).mean()))
    if not size > 1e-9:
        return None
    # 2. The directions that are seen.
    _, scales, axes = np.linalg.svd(rest / size, full_matrices=False)
    return ColumnCurve(column, knots, root, line, axes[scales > _KEPT * scales[0]].T / size)
