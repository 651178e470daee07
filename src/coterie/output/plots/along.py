"""How predictions change along each column of a table: for all users, for groups, for one user.

The curve of a user along a column is its prediction with all other columns at their mean; that of a
group, or of everybody, is the mean over its users. Where one kind of models predicts, they are
straight lines and its coefficients say the same; only averages bend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from coterie.base.errors import Incompatible, require
from coterie.base.labels import group_means
from coterie.base.types import Array, Ints
from coterie.fitting.average import Average, predicted
from coterie.fitting.result import Fit
from coterie.fitting.units import Units
from coterie.output.plots import base

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_POINTS, _MOST = 33, 6  # values of a column, and columns
_SEEN = 400  # users that means are taken over
_RANGE = (0.01, 0.99)  # quantiles of a column between which it is drawn
_BENT = 0.12  # of a curve's standard deviation that no straight line follows, from which it bends
_VISIBLE = 0.03  # of the spread of all curves, below which nothing is said of a bend
_OWN = 0.2  # of the bends, that differs between users, from which this is said
_LEAST, _MANY_VALUES = 1e-9, 5
_BINARY = 1e-3  # share by which the variance of a column of 0 and 1 may differ


def curves(fit: Fit, *, user: object = None, figure: Figure | None = None) -> Figure:
    """Draw how predictions change along each column: for all users, groups, and one user.

    Parameters
    ----------
    fit
        A fit whose predictions are an average.
    user
        The name of a user to draw, too.
    figure
        The figure, or part of a figure, to draw on; a new one if omitted.

    Returns
    -------
    Figure
        One axes for each column, those that bend first.

    Raises
    ------
    Incompatible
        If one kind of models predicts, whose coefficients say it all.
    InvalidInput
        If there is no such user.
    """
    found = curves_of(fit, users=len(fit.labels))
    if found is None or not found.columns:
        raise Incompatible("One kind of models predicts, and its effects are straight: see "
                           "`coefficients`.")
    if user is not None:
        require(user in fit.names, f"there is no user {user!r}", "Give one of fit.names")
    figure = base.empty_figure(3.4 * len(found.columns), 3.2, figure)
    looks = base.looks_of(fit.labels)
    several = 1 < len(looks) < len(fit.labels)
    for axes, curve in zip(np.atleast_1d(figure.subplots(1, len(found.columns), sharey=True)),
                           found.columns, strict=True):
        for k, line in zip(found.shown, curve.users, strict=True):
            axes.plot(curve.x, line, linewidth=0.5, alpha=0.5, zorder=1,
                      color=looks[fit.labels[k]].colour if several else base.GREY)
        for k, line in enumerate(curve.groups if several else ()):
            axes.plot(curve.x, line, color=looks[k].colour, linewidth=2.0, zorder=2,
                      label=f"group {k + 1}")
        axes.plot(curve.x, curve.everyone, color="black", linewidth=2.0, zorder=3,
                  linestyle="--" if several else "-", label="all")
        if user is not None:
            own = curve.users[np.flatnonzero(found.shown == fit.names.index(user))[0]]
            axes.plot(curve.x, own, color=base.HUES[1], linewidth=2.0, zorder=4, label=str(user))
        base.finish(axes, curve.name, "", "bends" if curve.bends else "straight")
    first = figure.axes[0]
    first.set_ylabel(found.target, fontsize=9)
    first.legend(fontsize=8, frameon=False, loc="best")
    return figure


class DrawnCurve(NamedTuple):
    """Predictions along one column."""

    name: str
    x: Array  # (n_points,)
    everyone: Array  # (n_points,)
    groups: Array  # (n_groups, n_points)
    users: Array  # (n_shown, n_points)
    bends: bool
    differs: bool  # whether users bend differently


@dataclass(frozen=True, eq=False)
class Curves:
    """The curves of a fit: those that bend first, then those that move predictions most.

    Parameters
    ----------
    target : what is predicted.
    columns : the curves.
    shown : (n_shown,) the users who have curves of their own.
    """

    target: str
    columns: tuple[DrawnCurve, ...]
    shown: Ints


def curves_of(fit: Fit, *, users: int = 200) -> Curves | None:
    """The curves along the columns of a fit whose predictions are an average; None for others.

    Parameters
    ----------
    fit : the fit.
    users : most users with curves of their own.
    """
    average, rows = fit.average, getattr(fit.solution.problem.users, "features", None)
    if average is None or not average.used:
        return None
    n, units = len(fit.labels), fit.units
    some = np.linspace(0, n - 1, min(n, max(users, _SEEN))).round().astype(np.int64)
    # At least one user of every group.
    shown = np.unique(np.concatenate([some, np.unique(fit.labels, return_index=True)[1]]))
    X = None if rows is None else rows * units.scale + units.mean
    found = []
    for j in _columns(average, units, X):
        low, high = _ends(average, X, j)
        found.append(_along(fit, average, j, np.linspace(low, high, _POINTS), shown))
    spread = max((float(np.ptp(curve.users)) for curve in found), default=0.0)
    found = [curve._replace(bends=curve.bends and _moves(curve) > _VISIBLE * spread)
             for curve in found]
    found.sort(key=lambda curve: (not curve.bends, -_moves(curve)))
    few = np.unique(np.linspace(0, len(shown) - 1, min(len(shown), users)).round().astype(np.int64))
    return Curves(_target(fit), tuple(curve._replace(users=curve.users[few])
                                      for curve in found[:_MOST]), shown[few])


def _moves(curve: DrawnCurve) -> float:
    """How far predictions of a typical user move along the column."""
    return float(np.median(np.ptp(curve.users, axis=1)))


def _target(fit: Fit) -> str:
    recipe = fit.recipe
    name = "" if recipe is None or recipe.target is None else recipe.target
    if fit.units.n_classes:
        second = recipe.classes[1] if recipe is not None and recipe.classes else "class 1"
        return f"probability of {second}"
    return name or "prediction"


def _columns(average: Average, units: Units, X: Array | None) -> list[int]:
    """Columns that may bend, or that have several values; where rows are with their users, those
    that are not of 0 and 1.
    """
    bent = {curve.column for scale in average.scales for curve in scale.basis.curves}
    if X is None:
        return [j for j in range(len(units.mean)) if j in bent or not is_binary(units, j)]
    some = X[:: max(1, len(X) // 20_000)]
    return [j for j in range(X.shape[1])
            if j in bent or len(np.unique(some[:, j])) >= _MANY_VALUES]


def is_binary(units: Units, j: int) -> bool:
    """Whether a column holds 0 and 1 only: then its variance is mean (1 - mean)."""
    mean, scale = float(units.mean[j]), float(units.scale[j])
    return 0.0 < mean < 1.0 and abs(scale**2 / (mean * (1.0 - mean)) - 1.0) < _BINARY


def _ends(average: Average, X: Array | None, j: int) -> tuple[float, float]:
    """Between which values a column is drawn."""
    if X is not None:
        low, high = (float(end) for end in np.quantile(X[:, j], _RANGE))
        return low, high
    basis = average.scales[0].basis
    ends = basis.range[:, j] * basis.scale[j] + basis.mean[j]
    low, high = (float(end) for end in (np.exp(ends) if basis.logs[j] else ends))
    return low, high


def _along(fit: Fit, average: Average, j: int, x: Array, shown: Ints) -> DrawnCurve:
    units, k = fit.units, len(x)
    grid = np.tile(units.mean, (len(shown) * k, 1))
    grid[:, j] = np.tile(x, len(shown))
    owner = np.repeat(shown, k)
    own = predicted(units, grid, fit.models[owner]) if average.own > 0 else np.zeros(len(grid))
    told = average.predict(grid, owner, own)[0].reshape(len(shown), k)
    everyone = told.mean(axis=0)
    link = _linear(fit, told)
    bent, mean = _rest(x, link), link.mean(axis=0)
    shape, total = _rest(x, mean[None])[0], float(mean.std())
    own = link - link.mean(axis=1, keepdims=True)
    bends = max(float(shape.std()) / max(total, _LEAST),
                float(bent.std()) / max(float(own.std()), _LEAST)) > _BENT
    differs = float((bent - shape).std()) ** 2 > _OWN * max(float(bent.std()) ** 2, _LEAST)
    return DrawnCurve(units.feature_names[j], x, everyone, group_means(told, fit.labels[shown]),
                      told, bends, bool(differs))


def _linear(fit: Fit, told: Array) -> Array:
    """Predictions on the scale on which one kind of models is straight."""
    if fit.units.n_classes:
        share = np.clip(told, 1e-6, 1.0 - 1e-6)
        return np.asarray(np.log(share / (1.0 - share)))
    return np.log(np.maximum(told, 1e-9)) if fit.units.task == "counts" else told


def _rest(x: Array, curves: Array) -> Array:
    """What a straight line leaves of each curve."""
    line = np.stack([np.ones(len(x)), x], axis=1)
    return np.asarray(curves - (line @ np.linalg.lstsq(line, curves.T, rcond=None)[0]).T)
