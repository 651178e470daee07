"""The protocol of a solver: settings with a method `run`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from coterie.base.types import Array
from coterie.problem.problem import Problem
from coterie.problem.solution import Record


class Point(NamedTuple):
    """The result of a solver, which `solve` certifies; a solver does not judge itself."""

    models: Array  # (n_users, dim), bitwise equal rows for users of one group
    duals: Array | None = None  # (n_edges, dim); if None, `solve` builds them
    history: tuple[Record, ...] = ()
    sigma: float | None = None  # the last step size
    # (n_users, dim) instead of duals, see `certificates.potential_slopes`.
    potentials: Array | None = None


class Start(NamedTuple):
    """The start of a solver: a solution of a similar problem, or parts of one."""

    models: Array
    duals: Array | None = None
    sigma: float | None = None


class Solver(Protocol):
    """A frozen dataclass of settings with one method.

    On Ctrl-C `run` raises Interrupted(point) with the best Point so far; without one, it lets
    KeyboardInterrupt pass.
    """

    def run(self, problem: Problem, tol: float, start: Start | None = None,
            progress: Callable[[Record], None] | None = None) -> Point: ...
