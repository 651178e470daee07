"""What a solver is: settings that can run."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from coterie._typing import Array
from coterie.problem import Problem
from coterie.solution import Record


class Point(NamedTuple):
    """What a solver hands over to be certified by `solve`; it does not grade itself."""

    models: Array  # (n_users, dim), bitwise equal rows for users it holds to be together
    duals: Array | None = None  # (n_edges, dim); None where it has none, and `solve` builds them
    history: tuple[Record, ...] = ()
    sigma: float | None = None  # where its step ended
    potentials: Array | None = None  # (n_users, dim) instead of duals, see `certificates.potential_slopes`


class Start(NamedTuple):
    """Where a solver begins: a former solution of a similar problem, or parts of one."""

    models: Array
    duals: Array | None = None
    sigma: float | None = None


class Solver(Protocol):
    """A frozen dataclass of settings with one method.

    On Ctrl-C `run` raises Interrupted(point), the best Point so far; where it has none, it lets KeyboardInterrupt pass.
    """

    def run(self, problem: Problem, tol: float, start: Start | None = None,
            progress: Callable[[Record], None] | None = None) -> Point: ...
