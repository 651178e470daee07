"""Solvers, one file per method; `solve` runs one of them and certifies its result."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import numpy as np

from coterie.base.compiling import compiling_seconds
from coterie.base.errors import (
    ConvergenceWarning,
    Interrupted,
    InvalidInput,
    NotConverged,
    interruptible,
)
from coterie.data.users import Users
from coterie.losses import SquaredHinge
from coterie.problem.certificates import certify
from coterie.problem.problem import Problem
from coterie.problem.solution import Certificate, Record, Solution, Status
from coterie.solvers.base import Point, Solver, check_start
from coterie.solvers.fast import Fast
from coterie.solvers.lean import Lean
from coterie.solvers.reference import Reference

#: Every solver by the name used in the command line and in saved files.
SOLVERS: dict[str, type[Solver]] = {"fast": Fast, "lean": Lean, "reference": Reference}

__all__ = ["SOLVERS", "Fast", "Lean", "Reference", "Solver", "solve", "solve_quietly"]


def solve(problem: Problem, *, tol: float = 1e-8, solver: str | Solver = "fast",
          start: Solution | Point | None = None,
          progress: Callable[[Record], None] | None = None) -> Solution:
    """Solve (C) and certify the solution.

    Parameters
    ----------
    problem
        The problem.
    tol
        The relative duality gap to reach; if it is not reached, the status says so, and a warning
        is issued.
    solver
        A name in `SOLVERS`, or a solver with your own settings, such as Fast(max_iter=100).
    start
        A solution of a similar problem on the same users to start from, or a Point of models, duals
        and sigma.
    progress
        Called repeatedly with a Record of the solver's progress.

    Returns
    -------
    Solution
        Its certificate is computed from the models and duals of the solver, never taken from the
        solver.

    Raises
    ------
    InvalidInput
        If an argument is not valid.
    Incompatible
        If the solver cannot solve this problem.
    NotConverged
        If the solver returns no usable point.
    Interrupted
        On Ctrl-C. Its `best` is the best point so far as a certified Solution, with the status
        INTERRUPTED unless it is within `tol` already; None if there is no point yet.

    Example
    -------
    >>> import coterie as ct
    >>> users = ct.Users.from_arrays([[0.0], [1.0], [9.0]])
    >>> solution = ct.solve(ct.Problem(users, ct.SquaredDistance(), lam=1.0))
    >>> solution.n_clusters, solution.gap <= 1e-8, solution.status.name
    (2, True, 'CONVERGED')
    """
    solution = solve_quietly(problem, tol=tol, solver=solver, start=start, progress=progress)
    if solution.status is not Status.CONVERGED:
        warnings.warn(f"relative gap {solution.gap:.1e} at tol = {tol:g}. {solution.status.value}",
                      ConvergenceWarning, stacklevel=2)
    return solution


def solve_quietly(problem: Problem, *, tol: float, solver: str | Solver = "fast",
                  start: Solution | Point | None = None,
                  progress: Callable[[Record], None] | None = None) -> Solution:
    """`solve` without its warning, for callers that check the status, or ask for more digits than
    can be reached.
    """
    if not (np.isfinite(tol) and tol > 0):
        raise InvalidInput(f"tol must be a finite number > 0, got {tol!r}",
                           remedy="Use for example 1e-8")
    if not isinstance(problem, Problem):
        raise InvalidInput(f"expected a Problem, got {type(problem).__name__}",
                           remedy="Build one with Problem(users, loss, lam=...)")
    if isinstance(solver, str):
        if solver not in SOLVERS:
            raise InvalidInput(f"unknown solver {solver!r}",
                               remedy=f"Choose one of: {', '.join(SOLVERS)}")
        solver = SOLVERS[solver]()
    from coterie.solvers import wide  # noqa: F401, so that importing Numba is no time of the solve

    began, compiled = time.perf_counter(), compiling_seconds()
    interrupted = False
    with interruptible():
        try:
            point = solver.run(problem, tol, check_start(problem, start), progress)
        except Interrupted as stop:
            if not isinstance(stop.best, Point):
                raise
            point, interrupted = stop.best, True
        try:
            certificate = certify(problem, point.models, point.duals, potentials=point.potentials)
        except InvalidInput as error:
            raise NotConverged(f"{type(solver).__name__} returned a point that cannot be "
                               f"certified: {error}") from error
    solution = Solution(
        problem=problem, models=point.models, duals=certificate.duals, certificate=certificate,
        status=_status(certificate, tol, interrupted), solver=type(solver).__name__,
        seconds=time.perf_counter() - began - (compiling_seconds() - compiled),
        history=point.history, sigma=point.sigma,
    )
    if interrupted:
        raise Interrupted(solution)
    return solution


def get_ready() -> None:
    """Load or compile what small solves need, for a command that has to wait for something else.

    It solves a problem of four users. `solve` never calls it, but loads what its problem needs.
    """
    rows = np.array([[-2.0], [1.0], [-1.0], [2.0], [-1.5], [0.9], [3.0], [-0.5]])
    users = Users.from_arrays(rows, np.where(rows[:, 0] > 0.7, 1.0, -1.0),
                              np.repeat(np.arange(4), 2))
    problem = Problem(users, SquaredHinge(), lam=0.05)
    solve_quietly(problem, tol=1e-6)


def _status(certificate: Certificate, tol: float, interrupted: bool) -> Status:
    if certificate.relative_gap <= tol:
        return Status.CONVERGED
    if interrupted:
        return Status.INTERRUPTED
    return Status.INACCURATE if np.isfinite(certificate.bound) else Status.NO_BOUND
