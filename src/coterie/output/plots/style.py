"""The look that all figures have in common: colours, axes, legends.

Colours are those of Okabe and Ito (2008), which can be distinguished with colour blindness; marker
shapes are added if there are more groups than colours. Users with their own model are grey.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from coterie.base.errors import InvalidInput, require_extra
from coterie.base.labels import many
from coterie.base.types import Array, Ints
from coterie.output.plots.data import View, lam_positions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HUES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
SHAPES = ("o", "s", "D", "^")
GREY = "0.62"
_NAMED = 10  # largest number of groups in a legend


def new_figure(width: float, height: float, ax: Any = None) -> tuple[Figure, Any]:
    """An empty figure of this size in inches, and its axes; or the axes given, and their figure."""
    if ax is None:
        figure = empty_figure(width, height)
        return figure, figure.subplots()
    if not hasattr(ax, "plot") or not hasattr(ax, "get_figure"):
        raise InvalidInput(f"ax must be axes of Matplotlib, got {type(ax).__name__}",
                           remedy="Give one of the axes that figure.subplots() returns")
    return ax.get_figure(), ax


def empty_figure(width: float, height: float, figure: Any = None) -> Figure:
    """An empty figure of this size in inches; or the figure given."""
    with require_extra("matplotlib", "plots", "Drawing figures"):
        from matplotlib.figure import Figure
    if figure is None:
        return Figure(figsize=(width, height), layout="constrained", dpi=150)
    if not hasattr(figure, "subplots"):
        raise InvalidInput(f"figure must be a figure of Matplotlib, got {type(figure).__name__}",
                           remedy="Give a figure, or one of those that figure.subfigures() returns")
    return figure


def finish(axes: Any, xlabel: str, ylabel: str, title: str = "") -> None:
    """Set labels, title and font sizes, and remove the upper and right border."""
    axes.set_xlabel(xlabel, fontsize=9)
    axes.set_ylabel(ylabel, fontsize=9)
    axes.set_title(title, fontsize=10, loc="left")
    axes.tick_params(which="both", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def lam_axis(axes: Any, lams: Array, ylabel: str, title: str = "") -> None:
    """Make the horizontal axis a logarithmic axis of lam."""
    axes.set_xscale("log")
    low, high = float(lam_positions(lams).min()), float(lam_positions(lams).max())
    axes.set_xlim(low / 1.15 if high > low else low / 3, high * 1.15 if high > low else high * 3)
    finish(axes, "lam" + " (0 at the left end)" * bool((lams == 0).any()), ylabel, title)


def mark_chosen(axes: Any, view: View) -> None:
    """Mark the chosen lam."""
    if view.chosen:
        axes.axvline(lam_positions(view.path.lams)[view.index], color="0.25", linewidth=0.9,
                     linestyle=(0, (4, 3)), zorder=1, label=f"chosen lam = {view.solution.lam:.3g}")


class Look(NamedTuple):
    """How a group is drawn."""

    colour: str
    shape: str
    size: int  # number of users


def looks_of(labels: Ints) -> list[Look]:
    """The look of each group: colours by decreasing size, then shapes; users with their own model
    are grey.
    """
    sizes = np.bincount(labels)
    looks = [Look(GREY, "o", 1)] * len(sizes)
    for rank, k in enumerate(np.argsort(-sizes, kind="stable")[:int((sizes > 1).sum())].tolist()):
        looks[k] = Look(HUES[rank % len(HUES)], SHAPES[rank // len(HUES) % len(SHAPES)],
                        int(sizes[k]))
    return looks


def add_legend(axes: Any, looks: list[Look], line: bool = False) -> None:
    """A legend next to the axes: the largest groups, and the number of the others."""
    from matplotlib.lines import Line2D

    shared = sorted((k for k, look in enumerate(looks) if look.size > 1),
                    key=lambda k: -looks[k].size)
    alone, rest = sum(look.size == 1 for look in looks), shared[_NAMED:]
    style: dict[str, Any] = {"linewidth": 2.0 * line, "markersize": 0.0 if line else 6.0}
    handles = [Line2D([], [], color=looks[k].colour, marker=looks[k].shape, label=f"group {k + 1}: "
                      f"{many(looks[k].size, 'user')}", **style) for k in shared[:_NAMED]]
    if rest:
        handles.append(Line2D([], [], linewidth=0, label=f"and {many(len(rest), 'group')} more"))
    if alone:
        handles.append(Line2D([], [], color=GREY, marker="o",
                              label=f"{many(alone, 'user')} with own model", **style))
    if axes.get_legend_handles_labels()[0]:
        handles += axes.get_legend_handles_labels()[0]
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8,
                frameon=False)
