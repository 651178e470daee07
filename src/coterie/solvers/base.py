"""What goes into a solver and comes out of it: its settings, its start, and its point."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from coterie.base.errors import InvalidInput
from coterie.base.labels import group_means
from coterie.base.types import Array
from coterie.problem.problem import Problem
from coterie.problem.solution import Record, Solution

# Steps ahead, in units of the last one, for which a line through two solutions is a good guess.
_LONGEST = 1.5


class Point(NamedTuple):
    """Where a solver starts or ends; `solve` certifies the end, a solver does not judge itself."""

    models: Array  # (n_users, dim), at the end bitwise equal rows for users of one group
    duals: Array | None = None  # (n_edges, dim); if None, `solve` builds them
    sigma: float | None = None  # the first or last step size
    history: tuple[Record, ...] = ()
    # (n_users, dim) instead of duals, see `certificates.potential_slopes`.
    potentials: Array | None = None


class Solver(Protocol):
    """A frozen dataclass of settings with one method.

    On Ctrl-C `run` raises Interrupted(point) with the best Point so far; without one, it lets
    KeyboardInterrupt pass.
    """

    def run(self, problem: Problem, tol: float, start: Point | None = None,
            progress: Callable[[Record], None] | None = None) -> Point: ...


def look_ahead(before: Solution | None, last: Solution | Point | None,
               lam: float) -> Solution | Point | None:
    """A start at `lam` on the line through the last two solutions: in log lam, with the groups of
    the last one.

        models = last + share (last - before)
        share = log(lam / last.lam) / log(last.lam / before.lam)

    The last solution itself if there is no other one, or if it is too far away. Its duals are
    scaled to the radii.
    """
    if before is None or not (isinstance(last, Solution) and 0 < before.lam < last.lam < lam):
        return last
    share = np.log(lam / last.lam) / np.log(last.lam / before.lam)
    if share > _LONGEST:
        return last
    labels, graph = last.labels, last.problem.graph
    moved = group_means(last.models - before.models, labels)[labels]
    duals = last.duals
    if duals is not None:
        duals = carry_duals(duals, last.problem.radii, lam * graph.weights)
    return Point(last.models + share * moved, duals, last.sigma)


def carry_duals(duals: Array, radii: Array, new: Array) -> Array:
    """Duals on the boundary of their balls scaled to the boundary of the new balls, the others into
    these.
    """
    norms = np.sqrt(np.einsum("ed,ed->e", duals, duals))
    onto = np.where(norms >= radii * (1 - 1e-9), new, np.minimum(norms, new))
    scale = np.divide(onto, norms, out=np.zeros_like(norms), where=norms > 0)
    return np.asarray(duals * scale[:, None])


def check_start(problem: Problem, start: Solution | Point | None) -> Point | None:
    """The start as checked arrays; duals of a solution are carried to this lam."""
    if start is None:
        return None
    models, duals, sigma = problem.check_models(start.models), start.duals, start.sigma
    shape = problem.graph.n_edges, problem.dim
    if duals is not None and isinstance(start, Solution) and len(duals) == shape[0]:
        duals = carry_duals(duals, start.lam * problem.graph.weights, problem.radii)
    if duals is not None and duals.shape != shape:
        raise InvalidInput(f"expected duals of shape {shape}, got {duals.shape}",
                           remedy="Start from a solution on the same graph, or omit the duals")
    if duals is not None and not np.isfinite(duals).all():
        raise InvalidInput("the duals to start from must be finite", remedy="Omit them")
    if sigma is not None and not (np.isfinite(sigma) and sigma > 0):
        raise InvalidInput(f"sigma must be a finite number > 0, got {sigma!r}", remedy="Use None")
    return Point(models, duals, sigma)
