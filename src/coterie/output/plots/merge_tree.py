"""The merge tree: which users get the same model at which lam."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from coterie.convex.path import Path
from coterie.fitting.result import Fit
from coterie.output.plots.data import Branches, View, branches, lam_positions
from coterie.output.plots.style import (
    HUES,
    Look,
    add_legend,
    count_users,
    lam_axis,
    looks_of,
    mark_chosen,
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def tree(source: Fit | Path, *, index: int | None = None, ax: Axes | None = None) -> Figure:
    """Draw the merge tree: which users get the same model at which lam.

    Parameters
    ----------
    source
        A fit or a path. Colours show the groups at the chosen lam.
    index
        The point of the path to use instead of the chosen one.
    ax
        The axes to draw on; a new figure if omitted.

    Returns
    -------
    Figure
        Groups that are separate at the end of the path stay separate.

    Raises
    ------
    InvalidInput
        If `index` is not a point of the path.
    MissingExtra
        If Matplotlib is not installed.

    Example
    -------
    >>> import coterie as ct
    >>> from coterie.datasets import gaussian_mixture
    >>> problem = ct.Problem(gaussian_mixture(6).users, ct.SquaredDistance(), lam=0.0)
    >>> tree(ct.solve_path(problem, n_lams=5)).savefig("tree.pdf")  # doctest: +SKIP
    """
    view = View.of(source, index)
    path, names = view.path, view.path.problem.users.names
    layout, n, looks = branches(path.linkage), len(names), looks_of(view.solution.labels)
    height = float(np.clip(1.2 + 0.13 * n, 2.4, 7.5))
    figure, axes = new_figure(6.4, height, ax)
    left = float(lam_positions(np.append(path.lams, 0.0)).min())
    right = max(float(path.lams[-1]) * 1.15, 3 * left)
    _draw_branches(axes, view, layout, looks, (left, right), np.clip(30 * height / n, 0.25, 1.3))
    axes.set_ylim(n - 0.4, -0.6)
    mark_chosen(axes, view)
    few = n <= 60
    lam_axis(axes, path.lams, "" if few else count_users(n))
    axes.set_xlim(left, right)
    axes.set_yticks(range(n) if few else [],
                    [str(names[k])[:24] for k in layout.order] if few else [],
                    fontsize=8 if n <= 30 else 6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    if view.chosen:
        _number_groups(axes, view, layout, looks)
        add_legend(axes, looks, line=True)
    return figure


def _draw_branches(axes: Any, view: View, layout: Branches, looks: list[Look],
                   limits: tuple[float, float], thin: float) -> None:
    """One horizontal line per node, from its own lam to that of its parent, and one vertical line
    per merge.
    """
    from matplotlib.collections import LineCollection

    path, (left, right) = view.path, limits
    n, last = path.problem.n_users, float(path.lams[-1])
    colours = np.array([looks[k].colour for k in view.solution.labels] if view.chosen else [HUES[0]]
                       * n, dtype=object)
    # The root's parent, -1, is the root.
    merged = (layout.parents >= 0) & (layout.heights[layout.parents] <= last)
    ends = np.where(merged, layout.heights[layout.parents], right)
    starts, on_path = np.maximum(layout.heights, left), layout.heights <= last
    above = (layout.heights > view.solution.lam if view.chosen
             else np.zeros(len(on_path), dtype=bool))
    colour = np.where(above, "0.35", colours[layout.leaf])
    horizontal = [[(start, y), (max(end, left), y)] for start, end, y in
                  zip(starts[on_path], ends[on_path], layout.positions[on_path], strict=True)]
    inner = np.flatnonzero(on_path[n:]) + n
    vertical = [[(starts[k], layout.positions[a]), (starts[k], layout.positions[b])]
                for k, (a, b) in zip(inner, path.linkage[inner - n, :2].astype(int), strict=True)]
    widths = np.where(np.arange(len(on_path)) < n, thin, 1.2)
    axes.add_collection(LineCollection(
                            horizontal + vertical, colors=[*colour[on_path], *colour[inner]],
                            capstyle="projecting", linewidths=[*widths[on_path], *widths[inner]]))


def _number_groups(axes: Any, view: View, layout: Branches, looks: list[Look]) -> None:
    """Write the number of each group where its branch crosses the chosen lam."""
    positions = np.argsort(layout.order)
    for k, look in enumerate(looks if len(looks) <= 40 else []):
        if look.size > 1:
            axes.text(view.solution.lam, positions[view.solution.labels == k].mean(), f"{k}",
                      fontsize=7, ha="center", va="center", color="0.15",
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0})
