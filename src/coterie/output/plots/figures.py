"""Figures of groups, models, scores, certificates and rounds, drawn with Matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from coterie.base.errors import Incompatible
from coterie.base.labels import many
from coterie.base.types import Array
from coterie.convex.path import Path
from coterie.convex.recovery import RecoveryBounds
from coterie.fitting.result import Fit
from coterie.output.plots import base
from coterie.output.plots.base import View, branches, lam_positions, project, separator_ends
from coterie.problem.solution import Solution

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROWS = 30  # largest number of coefficients in a figure


def clusters(source: Fit | Path, *, bounds: RecoveryBounds | None = None,
             index: int | None = None, ax: Axes | None = None) -> Figure:
    """Draw the number of groups along lam.

    Parameters
    ----------
    source
        A fit or a path.
    bounds
        Recovery bounds; the range of lam in which they hold is shaded.
    index
        The point of the path to mark instead of the chosen one.
    ax
        The axes to draw on; a new figure if omitted.

    Returns
    -------
    Figure
        The number of groups against lam.

    Raises
    ------
    InvalidInput
        If `index` is not a point of the path.
    """
    view = View.of(source, index)
    lams, counts = view.path.lams, view.path.n_clusters
    figure, axes = base.new_figure(5.6, 3.2, ax)
    axes.plot(lam_positions(lams), counts, color=base.HUES[0], marker="o", markersize=3.5,
              linewidth=1.2, drawstyle="steps-post", zorder=2)
    base.mark_chosen(axes, view)
    base.lam_axis(axes, lams, "groups")
    if bounds is not None and bounds.lower < bounds.upper:
        left, right = axes.get_xlim()
        axes.axvspan(max(bounds.lower, left), min(bounds.upper, right), color=base.HUES[2],
                     alpha=0.18, linewidth=0, label="provably recovered", zorder=0)
        axes.set_xlim(left, right)
    if counts.max() > 12:
        axes.set_yscale("log", subs=[])
        axes.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
        axes.yaxis.set_major_formatter("{x:,.0f}")
    else:
        axes.set_yticks(range(1, int(counts.max()) + 1))
    axes.set_ylim(bottom=0.8 if counts.max() > 12 else 0.5)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False, loc="best")
    return figure


def gaps(source: Fit | Path, *, index: int | None = None, ax: Axes | None = None) -> Figure:
    """Draw the certified relative gap along lam, and the tolerance; crosses mark points without a
    bound.

    Parameters
    ----------
    source
        A fit or a path.
    index
        The point of the path to mark instead of the chosen one.
    ax
        The axes to draw on; a new figure if omitted.

    Returns
    -------
    Figure
        The gap against lam.

    Raises
    ------
    InvalidInput
        If `index` is not a point of the path.
    """
    view = View.of(source, index)
    positions, values = lam_positions(view.path.lams), view.path.gaps
    figure, axes = base.new_figure(5.6, 3.2, ax)
    finite = np.isfinite(values)
    axes.plot(positions[finite], np.maximum(values[finite], 1e-17), color=base.HUES[0], marker="o",
              markersize=4, linewidth=1.0, label="certified")
    axes.axhline(view.path.tol, color=base.HUES[1], linewidth=1.0, linestyle="--",
                 label=f"tolerance {view.path.tol:.0e}")
    axes.set_yscale("log")
    if not finite.all():
        axes.scatter(positions[~finite], np.ones(int((~finite).sum())), marker="x", s=26,
                     color=base.HUES[1], label="no bound")
    base.mark_chosen(axes, view)
    base.lam_axis(axes, view.path.lams, "relative gap")
    axes.legend(fontsize=8, frameon=False, loc="best")
    return figure


def model_map(source: Fit | Path | Solution, index: int | None = None, *,
              ax: Axes | None = None) -> Figure:
    """Draw the models in the plane in which they differ most: one dot per group, larger for more
    users.

    Grey lines show how the models move from smaller lams. Models with one coordinate are drawn
    against lam.

    Parameters
    ----------
    source
        A fit, a path or a solution.
    index
        The point of the path to show instead of the chosen one.
    ax
        The axes to draw on; a new figure if omitted.

    Returns
    -------
    Figure
        The map of the models.

    Raises
    ------
    InvalidInput
        If `index` is not a point of the path.
    """
    view = View.of(source, index)
    labels, n, line = view.solution.labels, view.problem.n_users, view.models.shape[2] == 1
    if line:
        values = view.coefficients(view.models.reshape(-1, 1)).reshape(len(view.path), n)
        points = np.stack([values, np.broadcast_to(lam_positions(view.path.lams)[:, None],
                                                   values.shape)], axis=2)
        xlabel, ylabel = view.names()[0][0], "lam"
    else:
        points, shares = project(view.models)
        xlabel, ylabel = (f"{name} direction" + f" ({100 * share:.0f}%)" * bool(share)
                          for name, share in zip(("first", "second"), shares, strict=True))
    figure, axes = base.new_figure(6.4, 4.4, ax)
    from matplotlib.collections import LineCollection

    if n <= 300:
        axes.add_collection(LineCollection([*points[:view.index + 1].transpose(1, 0, 2)],
                                           colors="0.75", linewidths=0.6, zorder=1))
    looks, firsts = base.looks_of(labels), np.unique(labels, return_index=True)[1]
    for k in sorted((k for k, look in enumerate(looks) if look.size > 1),
                    key=lambda k: -looks[k].size):
        look, (x, y) = looks[k], points[view.index, firsts[k]]
        # a triangle has less space.
        large = (110 + 900 * look.size / n) * (1.6 if look.shape == "^" else 1.0)
        axes.scatter(x, y, s=large, marker=look.shape, color=look.colour, edgecolor="white",
                     linewidth=0.5, zorder=3)
        axes.annotate(f"{look.size}", (x, y), ha="center", va="center", fontsize=8, zorder=4,
                      # the lighter half
                      color="black" if look.colour in base.HUES[3:] else "white")
    alone = [first for first, look in zip(firsts, looks, strict=True) if look.size == 1]
    if alone:
        axes.scatter(*points[view.index, alone].T, s=14, color=base.GREY, edgecolor="white",
                     linewidth=0.5, zorder=2)
    axes.autoscale_view()
    axes.margins(0.12)
    if line:
        axes.set_yscale("log")
    elif np.ptp(axes.get_xlim()) < 6 * np.ptp(axes.get_ylim()) < 36 * np.ptp(axes.get_xlim()):
        axes.set_aspect("equal", adjustable="datalim")
    base.finish(axes, xlabel, ylabel, f"{many(len(looks), 'group')} of {many(n, 'user')} at lam = "
           f"{view.solution.lam:.3g}")
    base.add_legend(axes, looks)
    return figure


def scores(fit: Fit, *, ax: Axes | None = None) -> Figure:
    """Draw the score of every user on held-out rows: with its group, with its own model, with one
    model for all.

    Parameters
    ----------
    fit
        A fit with held-out rows.
    ax
        The axes to draw on; a new figure if omitted.

    Returns
    -------
    Figure
        One dot per user in each of three rows.

    Raises
    ------
    Incompatible
        If the fit has no held-out rows.
    """
    held_out = fit.scores
    if held_out is None:
        raise Incompatible("No rows were held out, so there are no scores. Fit with holdout > 0.")
    kinds = (("with its\ngroup", held_out.fitted), ("own\nmodel", held_out.alone),
             ("one model\nfor all", held_out.together))
    figure, axes = base.new_figure(5.6, 3.4, ax)
    every = np.concatenate([values[np.isfinite(values)] for _, values in kinds])
    log = bool(every.min() > 0 and every.max() > 10 * every.min())
    axes.set_xscale("log" if log else "linear")
    scale: Any = np.log if log else np.asarray
    low, high = float(scale(every.min())), float(scale(every.max()))
    for row, ((name, values), hue) in enumerate(zip(kinds, base.HUES, strict=False)):
        values = np.sort(values[np.isfinite(values)])
        # Dots with equal scores are stacked; the height of a stack is the number of users with this
        # score.
        bins = np.round(90 * (scale(values) - low) / max(high - low, 1e-300)).astype(np.int64)
        stacks, start, height = np.unique(bins, return_index=True, return_counts=True)
        stack = np.searchsorted(stacks, bins)
        offset = np.arange(len(values)) - start[stack] - (height[stack] - 1) / 2
        lower, median, upper = np.quantile(values, [0.25, 0.5, 0.75])
        axes.fill_betweenx([row - 0.36, row + 0.36], lower, upper, color=hue, alpha=0.16,
                           linewidth=0)
        axes.plot([median, median], [row - 0.36, row + 0.36], color=hue, linewidth=1.6)
        shown = low + bins * (high - low) / 90
        axes.scatter(np.exp(shown) if log else shown, row + offset * min(0.07, 0.68 / height.max()),
                     s=9, color=hue, linewidth=0, alpha=0.75)
        axes.scatter(values.mean(), row, marker="D", s=34, color="white", edgecolor="black",
                     linewidth=1.0, zorder=3, label=name)
    axes.set_yticks(range(3), [name for name, _ in kinds], fontsize=9)
    axes.set_ylim(2.5, -0.5)
    better = "higher" if held_out.larger else "lower"
    base.finish(axes, f"{held_out.metric} on held-out rows ({better} is better)", "")
    axes.tick_params(axis="y", labelsize=9, length=0)
    axes.set_title("diamond: mean; line: median; shaded: second and third quartile", fontsize=8,
                   loc="left")
    return figure


def coefficients(source: Fit | Path | Solution, index: int | None = None, *,
                 classes: Sequence[str] | None = None,
                 most: int = 12, ax: Axes | None = None) -> Figure:
    """Draw the coefficients of the largest groups side by side.

    Colours compare groups within a row, because rows have different units. If there are many
    coefficients, those that differ most between groups, relative to the largest of their row, are
    shown.

    Parameters
    ----------
    source
        A fit, a path or a solution.
    index
        The point of the path to show instead of the chosen one.
    classes
        Names of the classes.
    most
        Largest number of groups to show.
    ax
        The axes to draw on; a new figure if omitted.

    Returns
    -------
    Figure
        One column per group.

    Raises
    ------
    InvalidInput
        If `index` is not a point of the path, or `classes` does not name every class.
    """
    view = View.of(source, index)
    labels = view.solution.labels
    which = np.sort(np.argsort(-np.bincount(labels), kind="stable")[:most])
    names, outputs = view.names(classes)
    rows = [f"{name} ({output})" for name in names for output in outputs] if outputs else names
    table = view.coefficients(view.centres(view.index)[which]).T
    size = np.abs(table).max(axis=1, keepdims=True)
    shade = np.divide(table, size, out=np.zeros_like(table), where=size > 0)
    kept = np.sort(np.argsort(-np.ptp(shade, axis=1), kind="stable")[:_ROWS])
    figure, axes = base.new_figure(1.6 + 0.62 * max(len(which), 3), 1.0 + 0.24 * len(kept), ax)
    axes.imshow(shade[kept], cmap="PuOr_r", vmin=-1.3, vmax=1.3, aspect="auto")
    for (r, c), value in np.ndenumerate(table[kept]):
        text = f"{value:.2g}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.0e}"
        axes.text(c, r, text, ha="center", va="center", fontsize=7,
                  color="white" if abs(shade[kept][r, c]) > 0.7 else "black")
    axes.set_xticks(range(len(which)), [f"{k + 1}\n({np.count_nonzero(labels == k)})"
                                        for k in which])
    axes.set_yticks(range(len(kept)), [rows[k][:28] for k in kept])
    base.finish(axes, "group (users)", "",
           "" if len(kept) == len(rows) else f"{len(kept)} of {len(rows)} coefficients")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return figure


def rounds(run: Any, *, figure: Figure | None = None) -> Figure:
    """Draw the gap and the total bytes sent after each round of a federated run, on two axes.

    Parameters
    ----------
    run
        A run of `federate`.
    figure
        The figure, or part of a figure, to draw the two axes on; a new one if omitted.

    Returns
    -------
    Figure
        The gap above, the bytes below.

    Raises
    ------
    Incompatible
        If the run has no rounds.
    """
    history = run.history
    if not history:
        raise Incompatible("This run has no rounds to draw.")
    figure = base.empty_figure(5.6, 4.6, figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    number = np.array([record.iteration for record in history])
    gap = np.array([record.gap for record in history], dtype=float)
    estimate = np.array([record.estimate for record in history], dtype=float)
    certified = np.isfinite(gap)
    upper.set_yscale("log")
    if (estimate > 0).any():
        upper.plot(number, np.where(estimate > 0, np.maximum(estimate, 1e-17), np.nan), color="0.6",
                   linewidth=1.0, marker=".", markersize=3, label="estimate of the algorithm")
    upper.plot(number[certified], np.maximum(gap[certified], 1e-17), color=base.HUES[0],
               marker="o", markersize=4, linewidth=1.2, label="certified")
    upper.legend(fontsize=8, frameon=False)
    base.finish(upper, "", "relative gap")
    for name, field, hue, dash in (("users to server", "bytes_up", base.HUES[0], "-"),
                                   ("server to users", "bytes_down", base.HUES[1], "--")):
        total = np.cumsum([getattr(record, field) for record in history])
        lower.plot(number, total / 1e3, color=hue, linestyle=dash, linewidth=1.4,
                   label=f"{name}: {total[-1]:,} bytes")
    lower.legend(fontsize=8, frameon=False)
    lower.set_ylim(bottom=0)
    lower.xaxis.get_major_locator().set_params(integer=True)
    base.finish(lower, "round", "total sent (kB)")
    return figure


def separators(solution: Solution, *, alone: Array | None = None, title: str | None = None,
               ax: Axes | None = None) -> Figure:
    """Draw two-dimensional samples, coloured by the group of their user, and the separating line of
    each group.

    The lines are those of the models that predict: each group fitted again without the penalty
    (`Solution.refit`).

    Parameters
    ----------
    solution
        A solution with linear classifiers of two features and an intercept.
    alone
        (n_users, 3) local models, drawn in grey in the background.
    title
        Another title.
    ax
        The axes to draw on; a new figure if omitted.

    Returns
    -------
    Figure
        The samples and the lines.

    Raises
    ------
    Incompatible
        If the models are not linear classifiers of two features with an intercept.
    """
    users, loss = solution.problem.users.data, solution.problem.loss
    sign = loss.intercept_sign
    if (users.n_features != 2 or solution.models.shape[1] != 3 or not loss.intercept
        or users.targets is None):
        raise Incompatible("Separators can be drawn for linear classifiers of two features with an "
                           f"intercept; these models have {solution.models.shape[1]} coordinates.")
    figure, axes = base.new_figure(6.4, 5.6, ax)
    colours = [base.HUES[k % len(base.HUES)] for k in range(solution.n_clusters)]
    reach = float(np.linalg.norm(users.features, axis=1).max()) * 1.05
    if alone is not None:
        for end in separator_ends(alone, sign, reach):
            axes.plot(*end.T, color="0.8", linewidth=0.6, zorder=1)
    groups, models = solution.labels[users.owner], solution.refit()
    for k, colour in enumerate(colours):
        for label, marker in ((1.0, "o"), (-1.0, "x")):
            rows = (groups == k) & (users.targets == label)
            axes.scatter(*users.features[rows].T, s=14, marker=marker, color=colour, alpha=0.55,
                         linewidth=0.9, zorder=2)
        first = int(np.flatnonzero(solution.labels == k)[0])
        size = int((solution.labels == k).sum())
        axes.plot(*separator_ends(models[first: first + 1], sign, reach)[0].T, color=colour,
                  linewidth=2.4, zorder=3, label=f"group {k + 1}: {size} user{'s' * (size > 1)}")
    axes.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal",
             xlabel=users.feature_names[0], ylabel=users.feature_names[1])
    about = (f"{solution.n_clusters} models for {users.n_users} users at lam = {solution.lam:g}\n"
             f"groups of a solution with relative gap {solution.gap:.0e}, each fitted again;  "
             "o: +1,  x: -1,  grey: local")
    axes.set_title(title or about, fontsize=10)
    if solution.n_clusters <= 12:
        axes.legend(loc="upper right", fontsize=8, framealpha=0.9)
    return figure


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
    path, names = view.path, view.problem.users.names
    layout, n, looks = branches(path.linkage), len(names), base.looks_of(view.solution.labels)
    height = float(np.clip(1.2 + 0.13 * n, 2.4, 7.5))
    figure, axes = base.new_figure(6.4, height, ax)
    left = float(lam_positions(np.append(path.lams, 0.0)).min())
    right = max(float(path.lams[-1]) * 1.15, 3 * left)
    _draw_branches(axes, view, layout, looks, (left, right), np.clip(30 * height / n, 0.25, 1.3))
    axes.set_ylim(n - 0.4, -0.6)
    base.mark_chosen(axes, view)
    few = n <= 60
    base.lam_axis(axes, path.lams, "" if few else many(n, "user"))
    axes.set_xlim(left, right)
    shown: list[int] = layout.order.tolist() if few else []
    axes.set_yticks(range(len(shown)), [str(names[k])[:24] for k in shown],
                    fontsize=8 if n <= 30 else 6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    if view.chosen:
        _number_groups(axes, view, layout, looks)
        base.add_legend(axes, looks, line=True)
    return figure


def _draw_branches(axes: Any, view: View, layout: base.Branches, looks: list[base.Look],
                   limits: tuple[float, float], thin: float) -> None:
    """One horizontal line per node, from its own lam to that of its parent, and one vertical line
    per merge.
    """
    from matplotlib.collections import LineCollection

    path, (left, right) = view.path, limits
    n, last = path.problem.n_users, float(path.lams[-1])
    colours = np.array([looks[k].colour if view.chosen else base.HUES[0]
                        for k in view.solution.labels], dtype=object)
    # The root's parent, -1, is the root.
    merged = (layout.parents >= 0) & (layout.heights[layout.parents] <= last)
    ends = np.where(merged, layout.heights[layout.parents], right)
    starts, on_path = np.maximum(layout.heights, left), layout.heights <= last
    above = (layout.heights > view.solution.lam) & view.chosen
    colour = np.where(above, "0.35", colours[layout.leaf])
    horizontal = [[(start, y), (max(end, left), y)] for start, end, y in
                  zip(starts[on_path], ends[on_path], layout.positions[on_path], strict=True)]
    inner = np.flatnonzero(on_path[n:]) + n
    vertical = [[(starts[k], layout.positions[a]), (starts[k], layout.positions[b])]
                for k, (a, b) in zip(inner, path.linkage[inner - n, :2].astype(int), strict=True)]
    widths = np.where(np.arange(len(on_path)) < n, thin, 1.2)
    axes.add_collection(LineCollection(
        horizontal + vertical, colors=[*colour[on_path], *colour[inner]], capstyle="projecting",
        linewidths=[*widths[on_path], *widths[inner]]))


def _number_groups(axes: Any, view: View, layout: base.Branches, looks: list[base.Look]) -> None:
    """Write the number of each group where its branch crosses the chosen lam."""
    positions = np.argsort(layout.order)
    for k, look in enumerate(looks if len(looks) <= 40 else []):
        if look.size > 1:
            axes.text(view.solution.lam, positions[view.solution.labels == k].mean(), f"{k}",
                      fontsize=7, ha="center", va="center", color="0.15",
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0})
