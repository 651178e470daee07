"""The columns that models of an average are linear in: straight ones, curves, and users' means.

    1, standardised columns, a curve for each of some columns, users' own means

A curve of the column x with knots k (about six, at quantiles) is spanned by |x - k|^3, less its
part that is linear in x, with mean square one; beyond the range of x it is held at its last value.
On the logarithmic basis positive columns that are less skewed so are taken by their logarithms.

All of it is learned from histograms: how many rows are in each cell of a grid, in units of about
one standard deviation. They are sums over users, so that nobody's rows are needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np

from coterie.base.types import Array, Flags, Ints
from coterie.data.users import Users

_KNOTS, _VALUES = 6, 5  # knots of a curve; different values from which a column may have one
_FEW = 30  # different values below which knots are quantiles of these
_KEPT = 1e-4  # singular value over the largest below which a direction of a curve is left out
_VARIES = 1e-6  # variance inside users over the whole, from which a column varies there
_BETWEEN = 1e-3  # standard deviation of users' means from which they are a column
_LOWEST = 0.5  # of the smallest value: logarithms are taken of no less
# Of the cells of a histogram: finer where most rows of any column are.
_EDGES = np.concatenate([np.linspace(-6.0, -1.5, 37), np.linspace(-1.5, 1.5, 145)[1:],
                         np.linspace(1.5, 6.0, 37)[1:]])
_CENTRES: Array = 0.5 * (_EDGES[1:] + _EDGES[:-1])
CELLS = len(_CENTRES)
_DIGITS = 12  # binary ones of the units of a grid
_SCREENED = 8  # curves up to which all that there can be are taken
_GAIN = 1.5  # F statistic of a curve, from which it is taken where there are many columns


class Grid(NamedTuple):
    """The units in which columns are counted, the target last: as they are, and their logarithms.

    They are rounded, so that the last digits of the moments that they follow from do not matter.
    """

    mean: Array  # (2, q + 1)
    scale: Array  # (2, q + 1)

    @classmethod
    def of(cls, mean: Array, spread: Array) -> Self:
        """That of columns with these means and standard deviations; positive columns are as if
        lognormal.
        """
        scale = _rounded(np.where(spread > 1e-12 * (1e-300 + np.abs(mean)), spread, 1.0))
        with np.errstate(over="ignore"):
            centre = np.where(mean > 0, mean, 1.0)
            log_scale = _rounded(np.sqrt(np.log1p(np.minimum((spread / centre) ** 2, 1e6)))
                                 + 1e-9)
        logs = np.log(centre) - 0.5 * log_scale**2
        return cls(np.stack([_multiple(mean, scale), _multiple(logs, log_scale)]),
                   np.stack([scale, log_scale]))

    def units(self, columns: Array) -> tuple[Array, Flags]:
        """(2, n_rows, q + 1) columns in these units, and which rows have no logarithm."""
        lost = ~(columns > 0)
        both = np.stack([columns, np.log(np.where(lost, 1.0, columns))])
        return np.asarray((both - self.mean[:, None]) / self.scale[:, None]), lost


class Sketch(NamedTuple):
    """What all users say of their columns on a grid.

    Parameters
    ----------
    rows : (n_users,) how many.
    counts : (2, q + 1, CELLS + 1) rows in each cell; the last are those without a logarithm.
    pulls : (2, q, CELLS + 1) sums of targets less the mean of their user; empty where they were
        not asked for.
    own : (n_users, 2, 2, q + 1) means of users, and of squares.
    """

    rows: Array
    counts: Array
    pulls: Array
    own: Array

    @classmethod
    def of(cls, users: Users, grid: Grid, *, pulls: bool) -> Self:
        """Those of each of these users: counts and pulls have a first axis of users."""
        y, n, owner = users.targets, users.n_users, users.owner
        assert y is not None
        z, lost = grid.units(np.column_stack([users.features, y]))
        width, rows = z.shape[2], users.counts
        cells = np.clip(np.searchsorted(_EDGES, z, side="right") - 1, 0, CELLS - 1)
        cells[1][lost] = CELLS
        places = cells + (owner * (CELLS + 1))[:, None]
        size = n * (CELLS + 1)
        left = z[0, :, -1] - (np.bincount(owner, z[0, :, -1], n) / np.maximum(rows, 1))[owner]
        counts = np.stack([[np.bincount(places[s, :, j], minlength=size).reshape(n, -1)
                            for j in range(width)] for s in range(2)])
        sums = np.stack([[np.bincount(places[s, :, j], left, size).reshape(n, -1)
                          for j in range(width - 1)] for s in range(2)]) if pulls \
            else np.zeros((2, 0, n, CELLS + 1))
        z[1][lost] = 0.0
        own = np.stack([[np.stack([np.bincount(owner, part[:, j], n) for j in range(width)], axis=1)
                         / np.maximum(rows, 1)[:, None] for part in (z[s], z[s] ** 2)]
                        for s in range(2)])
        return cls(rows.astype(float), np.moveaxis(counts.astype(float), 2, 0),
                   np.moveaxis(sums.astype(float), 2, 0), np.moveaxis(own, 2, 0))

    @property
    def positive(self) -> Flags:
        """(q + 1,) columns of which all rows have a logarithm."""
        return np.asarray(self.counts[1, :, CELLS] == 0)

    def limits(self, j: int) -> tuple[float, float]:
        """The least and the largest value of a column, in units of the grid, to a cell."""
        some = np.flatnonzero(self.counts[0, j, :CELLS])
        return float(_EDGES[some[0]]), float(_EDGES[some[-1] + 1])


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
    between : (n_means,) columns of which users' own means are columns, too.
    size : (n_means,) standard deviations of these.
    curves : of some columns.
    means : (n_users, n_means) the means over their size.
    """

    logs: Flags
    lowest: Array
    mean: Array
    scale: Array
    range: Array
    varies: Flags
    between: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    size: Array = field(default_factory=lambda: np.zeros(0))
    curves: tuple[ColumnCurve, ...] = ()
    means: Array = field(default_factory=lambda: np.zeros((0, 0)))

    @classmethod
    def learn(cls, sketch: Sketch, grid: Grid, *, logarithms: bool = False) -> Self:
        """The straight columns, and users' means."""
        width = grid.mean.shape[1] - 1
        logs = np.array([logarithms and _better_as_logs(sketch, j) for j in range(width)],
                        dtype=bool)
        s, j = logs.astype(np.int64), np.arange(width)
        mean, scale = grid.mean[s, j], grid.scale[s, j]
        ends = np.array([_ends(sketch.counts[s[k], k, :CELLS]) for k in j]).reshape(width, 2).T
        lowest = np.where(logs, _LOWEST * np.exp(np.where(logs, mean + scale * ends[0], 0.0)), 0.0)
        rows = sketch.rows / max(float(sketch.rows.sum()), 1.0)
        own = sketch.own[:, s, 0, j]
        varies = rows @ (sketch.own[:, s, 1, j] - own**2) > _VARIES
        between = np.flatnonzero(varies & (own.std(axis=0) > _BETWEEN))
        means = own[:, between]
        size = np.maximum(np.sqrt(rows @ (means - rows @ means) ** 2), _BETWEEN)
        return cls(logs, lowest, mean, scale, ends, varies, between, size, (), means / size)

    def with_curves(self, sketch: Sketch, most: int) -> Self:
        """The same basis with at most so many curves, of columns with enough values; of many
        columns of those that say most about what straight columns leave of the target.
        """
        curves = []
        for j, logs in enumerate(self.logs):
            curve = _learn_curve(j, sketch.counts[int(logs), j, :CELLS])
            curves += [] if curve is None else [curve]
        if sketch.pulls.size and (len(curves) > most or len(self.logs) > _SCREENED):
            square = float(sketch.rows @ (sketch.own[:, 0, 1, -1] - sketch.own[:, 0, 0, -1] ** 2))
            gains = [_gain(curve, sketch, int(self.logs[curve.column]), square)
                     for curve in curves]
            order = [int(k) for k in np.argsort(gains)[::-1][:most] if gains[k] > _GAIN]
            curves = [curves[k] for k in sorted(order)]
        return replace(self, curves=tuple(curves[:most]))

    def of_users(self, users: Users) -> Self:
        """The same with the means of these users."""
        z = self.straight(users.features)
        sums = np.zeros((users.n_users, len(self.between)))
        for k, j in enumerate(self.between):
            sums[:, k] = np.bincount(users.owner, z[:, j], users.n_users)
        return replace(self, means=sums / np.maximum(users.counts, 1)[:, None] / self.size)

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
    def width(self) -> int:
        """Columns in all."""
        return 1 + len(self.mean) + sum(self.widths) + len(self.between)

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
        return [np.arange(edges[-1], self.width)] if len(self.between) else []

    def state(self) -> dict[str, Any]:
        """Arrays, numbers and texts, for `from_state`."""
        return {"logs": self.logs.astype(np.int64), "lowest": self.lowest, "mean": self.mean,
                "scale": self.scale, "range": self.range, "varies": self.varies.astype(np.int64),
                "between": self.between, "size": self.size,
                "means": self.means, "curves": [curve._asdict() for curve in self.curves]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """The basis that `state` describes."""
        curves = tuple(ColumnCurve(int(each["column"]), *(np.asarray(each[name]) for name in
                                                    ("knots", "root", "line", "turn")))
                       for each in state["curves"])
        arrays = {name: np.asarray(state[name])
                  for name in ("lowest", "mean", "scale", "range", "size", "means")}
        return cls(np.asarray(state["logs"]).astype(bool),
                   varies=np.asarray(state["varies"]).astype(bool),
                   between=np.asarray(state["between"]).astype(np.int64), curves=curves, **arrays)


def _rounded(x: Array) -> Array:
    """Positive numbers with few binary digits."""
    digits, power = np.frexp(x)
    return np.asarray(np.ldexp(np.round(np.ldexp(digits, _DIGITS)), power - _DIGITS))


def _multiple(x: Array, scale: Array) -> Array:
    """Multiples of a small part of the scale."""
    part = np.ldexp(scale, -_DIGITS)
    return np.asarray(np.round(x / part) * part)


def _logarithms(X: Array, logs: Flags, lowest: Array) -> Array:
    if not logs.any():
        return X
    out = X.copy()
    out[:, logs] = np.log(np.maximum(X[:, logs], lowest[logs]))
    return out


def _ends(counts: Array) -> tuple[float, float]:
    """The first and the last cell with rows."""
    some = np.flatnonzero(counts)
    if not some.size:
        return 0.0, 0.0
    return float(_CENTRES[some[0]]), float(_CENTRES[some[-1]])


def skewness(counts: Array) -> float:
    """The size of the third standardised moment of a histogram."""
    share = counts / max(float(counts.sum()), 1.0)
    centred = _CENTRES - share @ _CENTRES
    return float(abs(share @ centred**3) / max(float(share @ centred**2), 1e-300) ** 1.5)


def _better_as_logs(sketch: Sketch, j: int) -> bool:
    """Whether a column is positive, has several values, and is less skewed as logarithms."""
    level, logs = sketch.counts[0, j, :CELLS], sketch.counts[1, j, :CELLS]
    if not sketch.positive[j] or np.count_nonzero(logs) <= _VALUES:
        return False
    return skewness(logs) < skewness(level)


def _learn_curve(column: int, counts: Array) -> ColumnCurve | None:
    """The curve of a column from its histogram; None where it has too few values."""
    some = np.flatnonzero(counts)
    if len(some) < _VALUES:
        return None
    z, share = _CENTRES[some], counts[some] / counts.sum()
    levels = np.linspace(0.05, 0.95, min(_KNOTS, len(z) - 2))
    knots = np.asarray(np.unique(np.quantile(z, levels) if len(z) < _FEW else np.interp(
        levels, np.cumsum(share) - 0.5 * share, z)), dtype=np.float64)
    if len(knots) < 3:
        return None
    # 1. Functions of the knots, about orthogonal (as of thin plates), less their linear part.
    U, scales, W = np.linalg.svd(np.abs(knots[:, None] - knots) ** 3)
    root = (U / np.sqrt(np.maximum(scales, 1e-6 * scales[0]))) @ W
    functions = np.abs(z[:, None] - knots) ** 3 @ root
    ones, roots = np.stack([np.ones(len(z)), z], axis=1), np.sqrt(share)[:, None]
    line = np.linalg.lstsq(roots * ones, roots * functions, rcond=None)[0]
    rest = roots * (functions - ones @ line)
    size = float(np.sqrt((rest**2).sum()))
    if not size > 1e-9:
        return None
    # 2. The directions that are seen.
    _, scales, axes = np.linalg.svd(rest / size, full_matrices=False)
    return ColumnCurve(column, knots, root, line, axes[scales > _KEPT * scales[0]].T / size)


def _gain(curve: ColumnCurve, sketch: Sketch, s: int, square: float) -> float:
    """The F statistic of a curve beside the straight column."""
    counts, pulls = (part[s, curve.column, :CELLS] for part in (sketch.counts, sketch.pulls))
    line = np.stack([np.ones(CELLS), _CENTRES], axis=1)
    held = line.T @ (counts[:, None] * line) + 1e-9 * np.eye(2)
    square -= float((line.T @ pulls) @ np.linalg.solve(held, line.T @ pulls))
    columns = curve.of(_CENTRES)
    own, pull = columns.T @ (counts[:, None] * columns), columns.T @ pulls
    width = len(own)
    gain = float(pull @ np.linalg.solve(own + (1e-8 * np.trace(own) + 1e-300) * np.eye(width),
                                        pull))
    rows = float(sketch.rows.sum())
    return gain / width / (max(square - gain, 1e-300) / max(rows - 2 - width, 1.0))
