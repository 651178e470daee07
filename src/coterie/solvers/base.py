"""What a solver is: settings that can run."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from coterie.problem import Problem
from coterie.solution import Record

Array = npt.NDArray[np.float64]


class Point(NamedTuple):
    """What a solver hands over to be certified; it does not grade itself."""

    models: Array  # (n_users, dim), bitwise equal rows for users it holds to be together
    duals: Array | None = None  # (n_edges, dim); None where it has none
    history: tuple[Record, ...] = ()
    interrupted: bool = False


class Solver(Protocol):
    """A frozen dataclass of settings with one method."""

    def run(self, problem: Problem, tol: float) -> Point: ...
