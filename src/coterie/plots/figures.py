"""Figures, drawn with Matplotlib.

Colours are those of Okabe and Ito (2008), which all eyes tell apart, with shapes where there are more clusters than
colours; users alone are grey.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from coterie._typing import Array, Ints
from coterie.analysis.path import Path
from coterie.analysis.recovery import RecoveryBounds
from coterie.errors import Incompatible, MissingExtra
from coterie.federated.run import Federated
from coterie.fitting import Fit
from coterie.plots.data import View, branches, lam_places, project, separator_ends
from coterie.solution import Solution

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HUES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
SHAPES = ("o", "s", "D", "^")
_GREY = "0.62"
_NAMED = 10  # clusters in a legend
_ROWS = 30  # coefficients in a figure


def _figure(width: float, height: float) -> tuple[Figure, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", "plots", "Drawing figures") from error
    figure = Figure(figsize=(width, height), layout="constrained", dpi=150)
    return figure, figure.subplots()


def _finish(axes: Any, xlabel: str, ylabel: str, title: str = "") -> None:
    axes.set_xlabel(xlabel, fontsize=9)
    axes.set_ylabel(ylabel, fontsize=9)
    axes.set_title(title, fontsize=10, loc="left")
    axes.tick_params(which="both", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _lam_axis(axes: Any, lams: Array, ylabel: str, title: str = "") -> None:
    axes.set_xscale("log")
    low, high = float(lam_places(lams).min()), float(lam_places(lams).max())
    axes.set_xlim(low / 1.15 if high > low else low / 3, high * 1.15 if high > low else high * 3)
    _finish(axes, "lam" + " (0 at the left end)" * bool((lams == 0).any()), ylabel, title)


def _mark(axes: Any, view: View) -> None:
    """The lam that was chosen."""
    if view.chosen:
        axes.axvline(lam_places(view.path.lams)[view.index], color="0.25", linewidth=0.9, linestyle=(0, (4, 3)),
                     zorder=1, label=f"chosen lam = {view.solution.lam:.3g}")


class _Look(NamedTuple):
    colour: str
    shape: str
    size: int  # users


def _looks(labels: Ints) -> list[_Look]:
    """Of each cluster: the largest come first in colours, then in shapes; users alone are grey."""
    sizes = np.bincount(labels)
    looks = [_Look(_GREY, "o", 1)] * len(sizes)
    for rank, k in enumerate(np.argsort(-sizes, kind="stable")[:int((sizes > 1).sum())].tolist()):
        looks[k] = _Look(HUES[rank % len(HUES)], SHAPES[rank // len(HUES) % len(SHAPES)], int(sizes[k]))
    return looks


def _users(count: int) -> str:
    return f"{count:,} user" + "s" * (count != 1)


def _clusters(count: int) -> str:
    return f"{count:,} cluster" + "s" * (count != 1)


def _legend(axes: Any, looks: list[_Look], line: bool = False) -> None:
    """Beside the axes: the largest clusters, and how many more there are."""
    from matplotlib.lines import Line2D

    shared = sorted((k for k, look in enumerate(looks) if look.size > 1), key=lambda k: -looks[k].size)
    alone, rest = sum(look.size == 1 for look in looks), shared[_NAMED:]
    style: dict[str, Any] = {"linewidth": 2.0 * line, "markersize": 0.0 if line else 6.0}
    handles = [Line2D([], [], color=looks[k].colour, marker=looks[k].shape, label=f"cluster {k}: "
                      f"{_users(looks[k].size)}", **style) for k in shared[:_NAMED]]
    if rest:
        handles.append(Line2D([], [], linewidth=0, label=f"and {_clusters(len(rest))} more"))
    if alone:
        handles.append(Line2D([], [], color=_GREY, marker="o", label=f"{_users(alone)} alone", **style))
    if axes.get_legend_handles_labels()[0]:
        handles += axes.get_legend_handles_labels()[0]
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)


def tree(source: Fit | Path, *, index: int | None = None) -> Figure:
    """Who joins whom at which lam, coloured by the clusters at the chosen one; what never joins is left apart."""
    view = View.of(source, index)
    path, names = view.path, view.path.problem.users.names
    laid, n = branches(path.linkage), len(names)
    last, lam = float(path.lams[-1]), view.solution.lam
    height = float(np.clip(1.2 + 0.13 * n, 2.4, 7.5))
    figure, axes = _figure(6.4, height)
    from matplotlib.collections import LineCollection

    looks = _looks(view.solution.labels)
    colours = np.array([looks[k].colour for k in view.solution.labels] if view.chosen else [HUES[0]] * n, dtype=object)
    low = float(lam_places(np.append(path.lams, 0.0)).min())
    right = max(last * 1.15, 3 * low)
    joined = (laid.parents >= 0) & (laid.heights[laid.parents] <= last)  # the root's parent, -1, is the root itself
    ends = np.where(joined, laid.heights[laid.parents], right)
    starts, there = np.maximum(laid.heights, low), laid.heights <= last
    above = laid.heights > lam if view.chosen else np.zeros(len(there), dtype=bool)
    own = np.where(above, "0.35", colours[laid.leaf])
    along = [[(a, p), (max(b, low), p)] for a, b, p in zip(starts[there], ends[there], laid.places[there], strict=True)]
    inner = np.flatnonzero(there[n:]) + n
    across = [[(starts[k], laid.places[a]), (starts[k], laid.places[b])]
              for k, (a, b) in zip(inner, path.linkage[inner - n, :2].astype(int), strict=True)]
    thin = np.where(np.arange(len(there)) < n, np.clip(30 * height / n, 0.25, 1.3), 1.2)  # users may be many
    axes.add_collection(LineCollection(along + across, colors=[*own[there], *own[inner]], capstyle="projecting",
                                       linewidths=[*thin[there], *thin[inner]]))
    axes.set_ylim(n - 0.4, -0.6)
    _mark(axes, view)
    few = n <= 60
    _lam_axis(axes, path.lams, "" if few else _users(n))
    axes.set_xlim(low, right)
    axes.set_yticks(range(n) if few else [], [str(names[k])[:24] for k in laid.order] if few else [],
                    fontsize=8 if n <= 30 else 6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    if view.chosen:
        at = np.argsort(laid.order)
        for k, look in enumerate(looks if len(looks) <= 40 else []):
            if look.size > 1:  # its number where its branch crosses the chosen lam
                axes.text(lam, at[view.solution.labels == k].mean(), f"{k}", fontsize=7, ha="center", va="center",
                          color="0.15", bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0})
        _legend(axes, looks, line=True)
    return figure


def clusters(source: Fit | Path, *, bounds: RecoveryBounds | None = None, index: int | None = None) -> Figure:
    """The number of clusters along lam; with `bounds`, the lams at which the clusters are provably recovered."""
    view = View.of(source, index)
    lams, counts = view.path.lams, view.path.n_clusters
    figure, axes = _figure(5.6, 3.2)
    axes.plot(lam_places(lams), counts, color=HUES[0], marker="o", markersize=3.5, linewidth=1.2,
              drawstyle="steps-post", zorder=2)
    _mark(axes, view)
    _lam_axis(axes, lams, "clusters")
    if bounds is not None and bounds.lower < bounds.upper:
        left, right = axes.get_xlim()
        axes.axvspan(max(bounds.lower, left), min(bounds.upper, right), color=HUES[2], alpha=0.18, linewidth=0,
                     label="recovered, provably", zorder=0)
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


def gaps(source: Fit | Path, *, index: int | None = None) -> Figure:
    """The certified relative gap at each lam, and the tolerance; crosses where there is no bound."""
    view = View.of(source, index)
    places, found = lam_places(view.path.lams), view.path.gaps
    figure, axes = _figure(5.6, 3.2)
    finite = np.isfinite(found)
    axes.plot(places[finite], np.maximum(found[finite], 1e-17), color=HUES[0], marker="o", markersize=4, linewidth=1.0,
              label="certified")
    axes.axhline(view.path.tol, color=HUES[1], linewidth=1.0, linestyle="--", label=f"tolerance {view.path.tol:.0e}")
    axes.set_yscale("log")
    if not finite.all():
        axes.scatter(places[~finite], np.ones(int((~finite).sum())), marker="x", color=HUES[1], s=26, label="no bound")
    _mark(axes, view)
    _lam_axis(axes, view.path.lams, "relative gap")
    axes.legend(fontsize=8, frameon=False, loc="best")
    return figure


def model_map(source: Fit | Path | Solution, index: int | None = None) -> Figure:
    """Models in the plane in which they differ most, a dot for each cluster, as large as its number of users.

    Grey lines are the ways they have come from smaller lams. Models of one number are drawn over lam.
    """
    view = View.of(source, index)
    labels, n, line = view.solution.labels, view.path.problem.n_users, view.models.shape[2] == 1
    if line:
        values = view.told(view.models.reshape(-1, 1)).reshape(len(view.path), n)
        points = np.stack([values, np.broadcast_to(lam_places(view.path.lams)[:, None], values.shape)], axis=2)
        xlabel, ylabel = view.names()[0][0], "lam"
    else:
        points, shares = project(view.models)
        xlabel, ylabel = (f"{name} direction" + f" ({100 * share:.0f}%)" * bool(share) for name, share in
                          zip(("first", "second"), shares, strict=True))
    figure, axes = _figure(6.4, 4.4)
    from matplotlib.collections import LineCollection

    if n <= 300:
        axes.add_collection(LineCollection([*points[:view.index + 1].transpose(1, 0, 2)], colors="0.75", linewidths=0.6,
                                           zorder=1))
    looks, firsts = _looks(labels), np.unique(labels, return_index=True)[1]
    for k in sorted((k for k, look in enumerate(looks) if look.size > 1), key=lambda k: -looks[k].size):
        look, (x, y) = looks[k], points[view.index, firsts[k]]
        large = (110 + 900 * look.size / n) * (1.6 if look.shape == "^" else 1.0)  # a triangle holds less text
        axes.scatter(x, y, s=large, marker=look.shape, color=look.colour, edgecolor="white",
                     linewidth=0.5, zorder=3)
        axes.annotate(f"{look.size}", (x, y), ha="center", va="center", fontsize=8, zorder=4,
                      color="black" if look.colour in HUES[3:] else "white")  # the lighter half
    alone = [first for first, look in zip(firsts, looks, strict=True) if look.size == 1]
    if alone:
        axes.scatter(*points[view.index, alone].T, s=14, color=_GREY, edgecolor="white", linewidth=0.5, zorder=2)
    axes.autoscale_view()
    axes.margins(0.12)
    if line:
        axes.set_yscale("log")
    elif np.ptp(axes.get_xlim()) < 6 * np.ptp(axes.get_ylim()) < 36 * np.ptp(axes.get_xlim()):
        axes.set_aspect("equal", adjustable="datalim")
    _finish(axes, xlabel, ylabel, f"{_clusters(len(looks))} of {_users(n)} at lam = {view.solution.lam:.3g}")
    _legend(axes, looks)
    return figure


def scores(fit: Fit) -> Figure:
    """How every user does on rows held out: here, alone, and with one model for all."""
    found = fit.scores
    if found is None:
        raise Incompatible("No rows were held out, so there are no scores. Fit with holdout > 0.")
    kinds = (("with its\ncluster", found.here), ("alone", found.alone), ("one model\nfor all", found.together))
    figure, axes = _figure(5.6, 3.4)
    every = np.concatenate([values[np.isfinite(values)] for _, values in kinds])
    log = bool(every.min() > 0 and every.max() > 10 * every.min())
    axes.set_xscale("log" if log else "linear")
    scale: Any = np.log if log else np.asarray
    low, high = float(scale(every.min())), float(scale(every.max()))
    for row, ((name, values), hue) in enumerate(zip(kinds, HUES, strict=False)):
        values = np.sort(values[np.isfinite(values)])
        # Equal scores are piled up; the width of a pile is how many users have that score.
        bins = np.round(90 * (scale(values) - low) / max(high - low, 1e-300)).astype(np.int64)
        piles, start, many = np.unique(bins, return_index=True, return_counts=True)
        place = np.searchsorted(piles, bins)
        offset = np.arange(len(values)) - start[place] - (many[place] - 1) / 2
        quarter, median, most = np.quantile(values, [0.25, 0.5, 0.75])
        axes.fill_betweenx([row - 0.36, row + 0.36], quarter, most, color=hue, alpha=0.16, linewidth=0)
        axes.plot([median, median], [row - 0.36, row + 0.36], color=hue, linewidth=1.6)
        shown = low + bins * (high - low) / 90
        axes.scatter(np.exp(shown) if log else shown, row + offset * min(0.07, 0.68 / many.max()), s=9, color=hue,
                     linewidth=0, alpha=0.75)
        axes.scatter(values.mean(), row, marker="D", s=34, color="white", edgecolor="black", linewidth=1.0, zorder=3,
                     label=name)
    axes.set_yticks(range(3), [name for name, _ in kinds], fontsize=9)
    axes.set_ylim(2.5, -0.5)
    _finish(axes, f"{found.metric} on rows held out ({'more' if found.larger else 'less'} is better)", "")
    axes.tick_params(axis="y", labelsize=9, length=0)
    axes.set_title("diamond: mean; line: median; shaded: the middle half of the users", fontsize=8, loc="left")
    return figure


def coefficients(source: Fit | Path | Solution, index: int | None = None, *, classes: Sequence[str] | None = None,
                 most: int = 12) -> Figure:
    """The largest clusters' coefficients side by side; colours compare within a row, since rows have their own units.

    Where there are many, those that differ most between clusters are shown, by the row's largest.
    """
    view = View.of(source, index)
    labels = view.solution.labels
    which = np.argsort(-np.bincount(labels), kind="stable")[:most]
    names, outputs = view.names(classes)
    rows = [f"{name} ({output})" for name in names for output in outputs] if outputs else names
    table = view.told(view.solution.models[np.unique(labels, return_index=True)[1][which]]).T
    size = np.abs(table).max(axis=1, keepdims=True)
    shade = np.divide(table, size, out=np.zeros_like(table), where=size > 0)
    kept = np.sort(np.argsort(-np.ptp(shade, axis=1), kind="stable")[:_ROWS])
    figure, axes = _figure(1.6 + 0.62 * max(len(which), 3), 1.0 + 0.24 * len(kept))
    axes.imshow(shade[kept], cmap="PuOr_r", vmin=-1.3, vmax=1.3, aspect="auto")
    for (r, c), value in np.ndenumerate(table[kept]):
        axes.text(c, r, f"{value:.2g}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.0e}", ha="center",
                  va="center", fontsize=7, color="white" if abs(shade[kept][r, c]) > 0.7 else "black")
    axes.set_xticks(range(len(which)), [f"{k}\n({np.count_nonzero(labels == k)})" for k in which])
    axes.set_yticks(range(len(kept)), [rows[k][:28] for k in kept])
    _finish(axes, "cluster (users)", "", "" if len(kept) == len(rows) else f"{len(kept)} of {len(rows)} coefficients")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return figure


def rounds(run: Federated) -> Figure:
    """The gap after each round, and what has crossed until then."""
    history = run.history
    if not history:
        raise Incompatible("This run has no rounds to draw.")
    figure, axes = _figure(5.6, 4.6)
    figure.delaxes(axes)
    upper, lower = figure.subplots(2, 1, sharex=True)
    turn = np.array([line.iteration for line in history])
    gap = np.array([line.gap for line in history], dtype=float)
    guess = np.array([line.estimate for line in history], dtype=float)
    sure = np.isfinite(gap)
    upper.set_yscale("log")
    if (guess > 0).any():
        upper.plot(turn, np.where(guess > 0, np.maximum(guess, 1e-17), np.nan), color="0.6", linewidth=1.0, marker=".",
                   markersize=3, label="the algorithm's own estimate")
    upper.plot(turn[sure], np.maximum(gap[sure], 1e-17), color=HUES[0], marker="o", markersize=4, linewidth=1.2,
               label="certified")
    upper.legend(fontsize=8, frameon=False)
    _finish(upper, "", "relative gap")
    for name, field, hue, style in (("users to server", "bytes_up", HUES[0], "-"),
                                    ("server to users", "bytes_down", HUES[1], "--")):
        total = np.cumsum([getattr(line, field) for line in history])
        lower.plot(turn, total / 1e3, color=hue, linestyle=style, linewidth=1.4, label=f"{name}: {total[-1]:,} bytes")
    lower.legend(fontsize=8, frameon=False)
    lower.set_ylim(bottom=0)
    lower.xaxis.get_major_locator().set_params(integer=True)
    _finish(lower, "round", "sent in all (kB)")
    return figure


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
    colours = [HUES[k % len(HUES)] for k in range(solution.n_clusters)]
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
                  zorder=3, label=f"cluster {k}: {size} user{'s' * (size > 1)}")
    axes.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal", xlabel=users.feature_names[0],
             ylabel=users.feature_names[1])
    axes.set_title(title or f"{solution.n_clusters} models for {users.n_users} users at lam = {solution.lam:g}\n"
                            f"certified relative gap {solution.gap:.0e};  o: +1,  x: -1,  grey: alone", fontsize=10)
    if solution.n_clusters <= 12:
        axes.legend(loc="upper right", fontsize=8, framealpha=0.9)
    return figure
