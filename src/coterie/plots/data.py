"""What there is to draw, as arrays: the view of a result, models in a plane, a merge tree laid out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from coterie._typing import Array, Ints
from coterie.analysis.path import Path
from coterie.data.encoding import Task
from coterie.errors import InvalidInput
from coterie.fitting import Fit
from coterie.fitting.units import FITTING, Units
from coterie.losses import LOSSES, Loss, Multinomial
from coterie.losses.base import AffineLoss
from coterie.losses.remote import Remote
from coterie.runs import coefficient_names
from coterie.solution import Solution

_EXACT = 1000  # coordinates up to which directions are computed exactly


@dataclass(frozen=True, eq=False)
class View:
    """A path, the point of it to look at, and the units its models are told in."""

    path: Path
    index: int
    chosen: bool  # whether that point was chosen by somebody
    units: Units | None = None  # None: models are told as they are

    @classmethod
    def of(cls, source: Fit | Path | Solution, index: int | None = None, path: Path | None = None) -> View:
        """A result; of a path nobody has chosen from, the point in the middle of the clustering that lasts longest.

        `path` is one that a solution belongs to: it is put in its place by its lam.
        """
        if isinstance(source, Fit):
            points = [*source.path.solutions]
            points[source.chosen] = source.solution
            found = cls(replace(source.path, solutions=tuple(points)), source.chosen, True, source.units)
        elif isinstance(source, Solution):
            others = () if path is None else path.solutions
            points = sorted([*(s for s in others if s.lam != source.lam), source], key=lambda s: s.lam)
            found = cls(Path(problem=source.problem, solutions=tuple(points), tol=path.tol if path else source.gap),
                        points.index(source), True)
        elif isinstance(source, Path):
            found = cls(source, longest(source), False)
        else:
            raise InvalidInput(f"expected a Fit, a Path or a Solution, got {type(source).__name__}",
                               remedy="Give what coterie.fitting.fit, solve_path, solve or federate returned")
        if index is None:
            return found
        if not 0 <= index < len(found.path):
            raise InvalidInput(f"expected a point of the path from 0 to {len(found.path) - 1}, got {index!r}",
                               remedy="path.lams lists them")
        return replace(found, index=int(index), chosen=True)

    @property
    def solution(self) -> Solution:
        return self.path[self.index]

    @property
    def loss(self) -> Loss:
        loss = self.path.problem.loss
        return loss.loss if isinstance(loss, Remote) else loss

    @property
    def task(self) -> Task:
        if self.units is not None:
            return self.units.task
        fitting = (task for task, names in FITTING.items() if any(isinstance(self.loss, LOSSES[n]) for n in names))
        return next(fitting, "regression")

    @cached_property
    def models(self) -> Array:
        """(n_lams, n_users, dim) in the solver's units."""
        return np.stack([s.models for s in self.path.solutions])

    def names(self, classes: Sequence[str] | None = None) -> tuple[list[str], list[str] | None]:
        """What coefficients are of, and what they are for: None where there is one output."""
        if self.units is None:
            return coefficient_names(self.path.problem), None
        k = self.units.n_classes if isinstance(self.units.loss, Multinomial) else 0
        if classes is not None and k and len(classes) != k:
            raise InvalidInput(f"expected names of {k} classes, got {len(classes)}", remedy="Name all, in order")
        outputs = [f"class {c}" for c in range(k)] if classes is None else [str(c) for c in classes]
        return self.units.coefficient_names, outputs if k else None

    def told(self, models: Array) -> Array:
        """(n, names x outputs) models in the units given."""
        return models if self.units is None else self.units.coefficients(models).reshape(len(models), -1)

    def lines(self) -> Array | None:
        """(n_lams, n_users, 3) w1, w2, b of w1 x + w2 y + b = 0; None but for linear classifiers of two features."""
        units, users = self.units, self.path.problem.users
        features = users.feature_names if units is None else units.feature_names
        if self.task != "classification" or isinstance(self.loss, Multinomial) or len(features) != 2 \
                or users.targets is None:
            return None
        flat = self.models.reshape(-1, self.models.shape[2])
        if units is not None:
            return self.told(flat).reshape(*self.models.shape[:2], 3)
        assert isinstance(self.loss, AffineLoss)
        return self.models * [1.0, 1.0, self.loss.intercept_sign] if self.loss.intercept else None


def longest(path: Path) -> int:
    """The middle of the clustering that lasts longest over log lam: of those between 2 and sqrt(n_users) clusters, or
    at least other than all alone and all together, where there are such."""
    n, end = path.problem.n_users, len(path)
    logs, labels = np.log(lam_places(path.lams)), [s.labels for s in path.solutions]
    starts = [r for r in range(end) if r == 0 or not np.array_equal(labels[r], labels[r - 1])]

    def lasting(run: tuple[int, int]) -> tuple[bool, bool, float]:
        many = path[run[0]].n_clusters
        return 1 < many <= max(n**0.5, 2), 1 < many < n, float(logs[min(run[1], end - 1)] - logs[run[0]])

    first, last = max(zip(starts, [*starts[1:], end], strict=True), key=lasting)
    return (first + last - 1) // 2


class Projection(NamedTuple):
    """Models in the plane in which they differ most."""

    points: Array  # (n_lams, n_users, 2)
    shares: Array  # (2,) of all their variance


def project(models: Array) -> Projection:
    """(n_lams, n_users, dim) models on their two principal directions over all lams, so that they move with lam.

    The largest coordinate of a direction is positive.
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
    return Projection(points.reshape(*shape, 2), (points**2).sum(axis=0) / total if total > 0 else np.zeros(2))


class Branches(NamedTuple):
    """A merge tree laid out: leaves at 0, 1, ... in an order in which no branches cross."""

    order: Ints  # (n_users,) the users from first to last
    places: Array  # (2 n_users - 1,) of every node: the mean place of its users
    heights: Array  # (2 n_users - 1,) lam, 0 for users
    parents: Ints  # (2 n_users - 1,) -1 for the root
    leaf: Ints  # (2 n_users - 1,) one user of each node


def branches(linkage: Array) -> Branches:
    """From `Path.linkage`."""
    n = len(linkage) + 1
    children = linkage[:, :2].astype(np.int64).tolist()
    order, waiting = [], [2 * n - 2]
    while waiting:
        node = waiting.pop()
        if node < n:
            order.append(node)
        else:
            waiting += children[node - n][::-1]
    places, heights = np.zeros(2 * n - 1), np.concatenate([np.zeros(n), linkage[:, 2]])
    sizes, parents, leaf = np.ones(2 * n - 1), np.full(2 * n - 1, -1), np.arange(2 * n - 1)
    places[order] = np.arange(n)
    for node, pair in enumerate(children, n):
        sizes[node] = sizes[pair].sum()
        places[node] = (sizes[pair] * places[pair]).sum() / sizes[node]
        parents[pair], leaf[node] = node, leaf[pair[0]]
    return Branches(np.array(order), places, heights, parents, leaf)


def lam_places(lams: Array) -> Array:
    """Where lams lie on a logarithmic axis: 0 a little before the least of the others."""
    positive = lams[lams > 0]
    return np.where(lams > 0, lams, positive.min() / 3 if positive.size else 1.0)



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
