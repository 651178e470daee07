"""Figures from data objects, drawn with Matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from coterie.errors import Incompatible, MissingExtra
from coterie.solution import Solution

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = npt.NDArray[np.float64]


def _figure(width: float, height: float) -> tuple[Figure, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", "plots", "Drawing figures") from error
    figure = Figure(figsize=(width, height), layout="constrained", dpi=150)
    return figure, figure.subplots()


def separator_ends(models: Array, intercept_sign: float, reach: float) -> Array:
    """(n, 2, 2) the two ends of each line {a : <w, a> + intercept_sign * b = 0} inside a circle about the origin.

    Lines that miss the circle, and models with w = 0, give NaN, which is not drawn.
    """
    normal, shift = models[:, :2], intercept_sign * models[:, 2]
    squares = (normal**2).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        foot = -(shift / squares)[:, None] * normal
        along = np.stack([-normal[:, 1], normal[:, 0]], axis=1) / np.sqrt(squares)[:, None]
        half = np.sqrt(reach**2 - (foot**2).sum(axis=1))[:, None]
        return np.stack([foot - half * along, foot + half * along], axis=1)


def separators(solution: Solution, *, alone: Array | None = None, title: str | None = None) -> Figure:
    """Two-dimensional samples coloured by the cluster found for their user, and each cluster's separating line.

    With `alone`, the models users would have by themselves are drawn faintly behind.
    """
    users = solution.problem.users
    sign = getattr(solution.problem.loss, "intercept_sign", None)
    if users.n_features != 2 or solution.models.shape[1] != 3 or sign is None or users.targets is None:
        raise Incompatible("Separators can be drawn for linear classifiers of two features with an intercept; "
                           f"these models have {solution.models.shape[1]} coordinates.")
    figure, axes = _figure(6.4, 5.6)
    colours = [f"C{k % 10}" for k in range(solution.n_clusters)]
    reach = float(np.linalg.norm(users.features, axis=1).max()) * 1.05
    if alone is not None:
        for end in separator_ends(alone, sign, reach):
            axes.plot(*end.T, color="0.8", linewidth=0.6, zorder=1)
    groups = solution.labels[users.owner]
    for k, colour in enumerate(colours):
        for label, marker in ((1.0, "o"), (-1.0, "x")):
            rows = (groups == k) & (users.targets == label)
            axes.scatter(*users.features[rows].T, s=14, marker=marker, color=colour, alpha=0.55, linewidth=0.9,
                         zorder=2)
        first = int(np.flatnonzero(solution.labels == k)[0])
        size = int((solution.labels == k).sum())
        axes.plot(*separator_ends(solution.models[first: first + 1], sign, reach)[0].T, color=colour, linewidth=2.4,
                  zorder=3, label=f"cluster {k + 1}: {size} user{'s' * (size > 1)}")
    axes.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal", xlabel=users.feature_names[0],
             ylabel=users.feature_names[1])
    axes.set_title(title or f"{solution.n_clusters} models for {users.n_users} users at lam = {solution.lam:g}\n"
                            f"certified relative gap {solution.gap:.0e};  o: +1,  x: -1,  grey: alone", fontsize=10)
    if solution.n_clusters <= 12:
        axes.legend(loc="upper right", fontsize=8, framealpha=0.9)
    return figure
