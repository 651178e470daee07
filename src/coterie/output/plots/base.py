"""What figures have in common: their data as arrays (the view of a result, models in a plane, the
layout of a merge tree), and their look (colours, axes, legends).

Colours are those of Okabe and Ito (2008), which can be distinguished with colour blindness; marker
shapes are added if there are more groups than colours. Users with their own model are grey.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from coterie.base.errors import InvalidInput, require_extra
from coterie.base.labels import many
from coterie.base.types import Array, Ints
from coterie.convex.path import Path
from coterie.data.encoding import Task
from coterie.data.users import Users
from coterie.fitting.kinds import Count, group_centres
from coterie.fitting.result import Fit
from coterie.fitting.units import Units
from coterie.groups.wide import CentredModels
from coterie.losses import Loss
from coterie.losses.derived import Quadratic
from coterie.problem.problem import Problem
from coterie.problem.solution import Solution

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_EXACT = 1000  # largest number of coordinates for which directions are computed exactly
HUES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
SHAPES = ("o", "s", "D", "^")
GREY = "0.62"
_NAMED = 10  # largest number of groups in a legend


@dataclass(frozen=True, eq=False)
class View:
    """A path, one point of it, and the units in which its models are shown.

    Attributes
    ----------
    path
        The solutions over lam.
    index
        The point of the path that is shown.
    chosen
        Whether this point was chosen, by a fit or by the caller; otherwise it is a default.
    units
        The conversion to the user's units; None: models are shown as they are.
    count
        Models are fitted again by group, without the penalty, where rows or users count alike;
        None: models are those of the convex problem.
    known
        (n_lams, n_users, dim) the models to show, if they are computed already.
    sent
        Centres and models at the chosen point, where they are known.
    stated
        The problem of the chosen point, where the path is that of another one: on summaries.

    Example
    -------
    >>> import coterie as ct
    >>> from coterie.datasets import gaussian_mixture
    >>> problem = ct.Problem(gaussian_mixture(6).users, ct.SquaredDistance(), lam=0.1)
    >>> View.of(ct.solve(problem)).models.shape
    (1, 6, 3)
    """

    path: Path
    index: int
    chosen: bool
    units: Units | None = None
    count: Count | None = None
    known: Array | None = None
    sent: CentredModels | None = None
    stated: Problem | None = None

    @classmethod
    def of(cls, source: Fit | Path | Solution, index: int | None = None,
           path: Path | None = None) -> View:
        """Build the view of a result.

        Parameters
        ----------
        source
            The result. A `Fit` and a `Solution` determine the point; for a `Path` the default is
            `longest(path)`.
        index
            The point of the path to show instead.
        path
            Other solutions to show with a `Solution`, which is inserted by its lam.

        Returns
        -------
        View
            The path with the point to show.

        Raises
        ------
        InvalidInput
            If the source is not a result, or the index is not a point of the path.
        """
        if isinstance(source, Fit):
            points = [*source.path.solutions]
            points[source.chosen] = source.solution
            view = cls(replace(source.path, solutions=tuple(points)), source.chosen, True,
                       source.units, source.settings.count, sent=source.sent,
                       stated=source.solution.problem)
        elif isinstance(source, Solution):
            others = () if path is None else path.solutions
            points = sorted([*(s for s in others if s.lam != source.lam), source],
                            key=lambda s: s.lam)
            view = cls(Path(problem=source.problem, solutions=tuple(points),
                            tol=path.tol if path else source.gap), points.index(source), True)
        elif isinstance(source, Path):
            view = cls(source, longest(source), False)
        else:
            raise InvalidInput(f"expected a Fit, a Path or a Solution, got {type(source).__name__}",
                               remedy="Give a result of coterie.fitting.fit, solve_path, solve or "
                                      "federate")
        if index is None:
            return view
        if not 0 <= index < len(view.path):
            raise InvalidInput(f"expected a point of the path from 0 to {len(view.path) - 1}, got "
                               f"{index!r}", remedy="path.lams lists them")
        return replace(view, index=int(index), chosen=True)

    @property
    def problem(self) -> Problem:
        """The problem of the models that are shown, with its users."""
        return self.path.problem if self.stated is None else self.stated

    @property
    def refitted(self) -> bool:
        """Whether groups along the path are fitted again: where it is that of the problem."""
        return self.count is not None and type(self.path.problem.loss) is type(self.problem.loss)

    @property
    def solution(self) -> Solution:
        """The solution at the point shown."""
        return self.path[self.index]

    @property
    def loss(self) -> Loss:
        """The loss of the users' models, also if only its name is known, as at the server of a
        federation.
        """
        loss = self.problem.loss
        if isinstance(loss, Quadratic) and self.units is not None:
            return self.units.loss
        return loss.own_loss

    @property
    def task(self) -> Task:
        """The task of the fit, or else the first task that the loss fits."""
        if self.units is not None:
            return self.units.task
        return self.loss.task or "regression"

    @cached_property
    def models(self) -> Array:
        """(n_lams, n_users, dim) in the solver's units."""
        if self.known is not None:
            return self.known
        problem, points = self.problem, self.path.solutions
        models = np.stack([s.models for s in points] if not self.refitted
                          else [problem.loss.own_models(problem.samples, self.centres(k)[s.labels])
                                for k, s in enumerate(points)])
        if self.sent is not None:
            models[self.index] = self.sent.models
        return models

    def centres(self, index: int) -> Array:
        """(n_groups, dim) what the users of each group share at a point of the path, in the
        solver's units.

        Centres of personal models are fitted again at the point shown only, because this takes
        long, and those of other models to all digits there only.
        """
        problem, labels, shown = self.problem, self.path[index].labels, index == self.index
        if self.sent is not None and shown:
            return self.sent.centres
        firsts = self.path[index].models[np.unique(labels, return_index=True)[1]]
        if not self.refitted or (not shown and problem.loss.personal):
            return firsts
        key = labels.tobytes()
        if key not in self._centres:
            self._centres[key] = group_centres(problem.loss, problem.samples, labels,
                                               self.count or "users", firsts)
        return self._centres[key]

    @cached_property
    def _centres(self) -> dict[bytes, Array]:
        """Centres by labels: many points of a path have the same groups."""
        return {}

    def names(self, classes: Sequence[str] | None = None) -> tuple[list[str], list[str] | None]:
        """The names of the coefficients, and of the outputs (None if there is one output).

        Raises
        ------
        InvalidInput
            If `classes` does not name every class.
        """
        if self.units is None:
            return self.problem.coefficient_names, None
        k = self.units.n_classes if self.units.loss.multiclass else 0
        if classes is not None and k and len(classes) != k:
            raise InvalidInput(f"expected names of {k} classes, got {len(classes)}",
                               remedy="Name all, in order")
        outputs = [f"class {c}" for c in range(k)] if classes is None else [str(c) for c in classes]
        return self.units.coefficient_names, outputs if k else None

    def coefficients(self, models: Array) -> Array:
        """Convert models to the units shown: (n, names x outputs)."""
        return models if self.units is None else self.units.coefficients(models).reshape(
            len(models), -1)

    def lines(self) -> Array | None:
        """(n_lams, n_users, 3) w1, w2, b of the line w1 x + w2 y + b = 0.

        None unless the models are binary linear classifiers of two features with an intercept.
        """
        units, users = self.units, self.problem.users
        features = users.feature_names if units is None else units.feature_names
        if (self.task != "classification" or self.loss.multiclass
            or len(features) != 2 or not isinstance(users, Users) or users.targets is None):
            return None
        flat = self.models.reshape(-1, self.models.shape[2])
        if units is not None:
            return self.coefficients(flat).reshape(*self.models.shape[:2], 3)
        return self.models * [1.0, 1.0, self.loss.intercept_sign] if self.loss.intercept else None


def longest(path: Path) -> int:
    """Find the point in the middle of the groups that stay the same over the longest range of log
    lam.

    Points with 2 to sqrt(n_users) groups are preferred; then points that have neither one group nor
    only single users.

    Returns
    -------
    int
        A position in `path`.
    """
    n, end = path.problem.n_users, len(path)
    logs, labels = np.log(lam_positions(path.lams)), [s.labels for s in path.solutions]
    starts = [r for r in range(end) if r == 0 or not np.array_equal(labels[r], labels[r - 1])]

    def preference(run: tuple[int, int]) -> tuple[bool, bool, float]:
        n_groups = path[run[0]].n_clusters
        return 1 < n_groups <= max(n**0.5, 2), 1 < n_groups < n, float(logs[min(run[1], end - 1)]
                                                                       - logs[run[0]])

    first, last = max(zip(starts, [*starts[1:], end], strict=True), key=preference)
    return (first + last - 1) // 2


class Projection(NamedTuple):
    """Models in the plane in which they differ most."""

    points: Array  # (n_lams, n_users, 2)
    shares: Array  # (2,) the share of the total variance along each direction


def project(models: Array) -> Projection:
    """Project models on their first two principal directions.

    The directions are the same for all lams, and the largest coordinate of each is positive.

    Parameters
    ----------
    models
        (n_lams, n_users, dim)

    Returns
    -------
    Projection
        The points and the share of the variance along each direction.

    Example
    -------
    >>> points, shares = project(np.array([[[1.0, 0.0, 0.0], [3.0, 0.0, 0.0]]]))
    >>> points.tolist(), shares.tolist()
    ([[[-1.0, 0.0], [1.0, 0.0]]], [1.0, 0.0])
    """
    shape, dim = models.shape[:2], models.shape[2]
    rows = (models - models.mean(axis=(0, 1))).reshape(-1, dim)
    if dim <= _EXACT:
        axes = np.linalg.eigh(rows.T @ rows)[1][:, ::-1][:, :2].T
    else:
        from sklearn.utils.extmath import randomized_svd

        axes = randomized_svd(rows, min(2, len(rows)), random_state=0)[2]
    axes = axes * np.sign(axes[np.arange(len(axes)), np.abs(axes).argmax(axis=1)])[:, None]
    points = np.zeros((len(rows), 2))
    points[:, :len(axes)] = rows @ axes.T
    total = float((rows**2).sum())
    shares = (points**2).sum(axis=0) / total if total > 0 else np.zeros(2)
    return Projection(points.reshape(*shape, 2), shares)


class Branches(NamedTuple):
    """The layout of a merge tree: leaves at positions 0, 1, ... in an order in which no branches
    cross.
    """

    order: Ints  # (n_users,) the users from first to last
    positions: Array  # (2 n_users - 1,) of every node: the mean position of its users
    heights: Array  # (2 n_users - 1,) lam of every node, 0 for users
    parents: Ints  # (2 n_users - 1,) the node above, -1 for the root
    leaf: Ints  # (2 n_users - 1,) one user of each node


def branches(linkage: Array) -> Branches:
    """Compute the layout of a merge tree in SciPy's format, as in `Path.linkage`.

    Example
    -------
    >>> branches(np.array([[0, 1, 0.5, 2], [2, 3, 1.0, 3]])).positions.tolist()
    [1.0, 2.0, 0.0, 1.5, 1.0]
    """
    from scipy.cluster.hierarchy import leaves_list  # takes long to import

    n = len(linkage) + 1
    children = linkage[:, :2].astype(np.int64).tolist()
    order = leaves_list(linkage).astype(np.int64) if n > 1 else np.zeros(1, dtype=np.int64)
    positions, heights = np.zeros(2 * n - 1), np.concatenate([np.zeros(n), linkage[:, 2]])
    sizes, parents, leaf = np.ones(2 * n - 1), np.full(2 * n - 1, -1), np.arange(2 * n - 1)
    positions[order] = np.arange(n)
    for node, pair in enumerate(children, n):
        sizes[node] = sizes[pair].sum()
        positions[node] = (sizes[pair] * positions[pair]).sum() / sizes[node]
        parents[pair], leaf[node] = node, leaf[pair[0]]
    return Branches(order, positions, heights, parents, leaf)


def lam_positions(lams: Array) -> Array:
    """Positions of lams on a logarithmic axis: 0 is drawn at a third of the smallest positive lam.
    """
    positive = lams[lams > 0]
    return np.where(lams > 0, lams, positive.min() / 3 if positive.size else 1.0)


def separator_ends(models: Array, intercept_sign: float, reach: float) -> Array:
    """Compute the two ends of each separating line {a : <w, a> + intercept_sign * b = 0} inside a
    circle.

    Parameters
    ----------
    models
        (n, 3) w1, w2, b.
    intercept_sign
        +1 or -1, as the loss has it.
    reach
        Radius of the circle around the origin.

    Returns
    -------
    Array
        (n, 2, 2) two points per line; NaN, which is not drawn, for lines outside the circle and
        models with w = 0.

    Example
    -------
    >>> separator_ends(np.array([[1.0, 0.0, -1.0]]), 1.0, 1.25).tolist()
    [[[1.0, -0.75], [1.0, 0.75]]]
    """
    normal, shift = models[:, :2], intercept_sign * models[:, 2]
    squares = (normal**2).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        foot = -(shift / squares)[:, None] * normal
        along = np.stack([-normal[:, 1], normal[:, 0]], axis=1) / np.sqrt(squares)[:, None]
        half = np.sqrt(reach**2 - (foot**2).sum(axis=1))[:, None]
        return np.stack([foot - half * along, foot + half * along], axis=1)


# -- the look


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
