"""Solvers, one file a method; `solve` runs one and has its answer certified."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import numpy as np

from coterie.certificates import certify
from coterie.errors import ConvergenceWarning, Interrupted, InvalidInput, NotConverged, interruptible
from coterie.problem import Problem
from coterie.solution import Certificate, Record, Solution, Status
from coterie.solvers.base import Point, Solver, Start
from coterie.solvers.fast import Fast
from coterie.solvers.lean import Lean
from coterie.solvers.reference import Reference

#: Every solver by the name used in the command line and in saved files.
SOLVERS: dict[str, type[Solver]] = {"fast": Fast, "lean": Lean, "reference": Reference}

__all__ = ["SOLVERS", "Fast", "Lean", "Reference", "Solver", "solve", "solve_quietly"]


def solve(problem: Problem, *, tol: float = 1e-8, solver: str | Solver = "fast", start: Solution | Start | None = None,
          progress: Callable[[Record], None] | None = None) -> Solution:
    """Solve (C) and certify the answer.

    Parameters
    ----------
    problem : what to solve.
    tol : the relative duality gap to reach; the status says whether it was, and a warning where it was not.
    solver : a name in `SOLVERS`, or a solver with settings of your own such as Fast(max_iter=100).
    start : a solution of a similar problem on the same users to begin from, or a Start of models, duals and sigma.
    progress : called repeatedly with a Record of the solver's progress.

    Returns
    -------
    Solution, whose certificate is computed from the solver's models and duals and not taken from the solver.

    Raises
    ------
    InvalidInput : where an argument cannot be used.
    Incompatible : where the solver does not take this problem.
    NotConverged : where the solver returns no usable point.
    Interrupted : on Ctrl-C; its `best` is the best point so far as a certified Solution, whose status is INTERRUPTED
        unless it is within `tol` already. None where there is no point yet.

    Example
    -------
    >>> solution = solve(Problem(users, Logistic(), lam=0.02))
    >>> solution.n_clusters, solution.gap, solution.status
    """
    solution = solve_quietly(problem, tol=tol, solver=solver, start=start, progress=progress)
    if solution.status is not Status.CONVERGED:
        warnings.warn(f"relative gap {solution.gap:.1e} at tol = {tol:g}. {solution.status.value}", ConvergenceWarning,
                      stacklevel=2)
    return solution


def solve_quietly(problem: Problem, *, tol: float, solver: str | Solver = "fast",
                  start: Solution | Start | None = None,
                  progress: Callable[[Record], None] | None = None) -> Solution:
    """`solve` without its warning, for callers that look at the status, or ask for more digits than there may be."""
    if not (np.isfinite(tol) and tol > 0):
        raise InvalidInput(f"tol must be a finite number > 0, got {tol!r}", remedy="Use for example 1e-8")
    if not isinstance(problem, Problem):
        raise InvalidInput(f"expected a Problem, got {type(problem).__name__}",
                           remedy="Build one with Problem(users, loss, lam=...)")
    if isinstance(solver, str):
        if solver not in SOLVERS:
            raise InvalidInput(f"unknown solver {solver!r}", remedy=f"Choose one of: {', '.join(SOLVERS)}")
        solver = SOLVERS[solver]()
    began = time.perf_counter()
    interrupted = False
    with interruptible():
        try:
            point = solver.run(problem, tol, _start(problem, start), progress)
        except Interrupted as stop:
            if not isinstance(stop.best, Point):
                raise
            point, interrupted = stop.best, True
        try:
            certificate = certify(problem, point.models, point.duals, potentials=point.potentials)
        except InvalidInput as error:
            raise NotConverged(f"{type(solver).__name__} returned a point that cannot be certified: {error}") from error
    solution = Solution(
        problem=problem, models=point.models, duals=certificate.duals, certificate=certificate,
        status=_status(certificate, tol, interrupted), solver=type(solver).__name__,
        seconds=time.perf_counter() - began, history=point.history, sigma=point.sigma,
    )
    if interrupted:
        raise Interrupted(solution)
    return solution


def _start(problem: Problem, start: Solution | Start | None) -> Start | None:
    """The start as checked arrays; duals on the boundary of their balls at another lam are put on it at this one."""
    if start is None:
        return None
    models, duals = problem.check_models(start.models), start.duals
    if duals is not None and isinstance(start, Solution) and duals.shape[0] == problem.graph.n_edges:
        norms, radii = np.linalg.norm(duals, axis=1), start.lam * problem.graph.weights
        onto = np.where(norms >= radii * (1 - 1e-9), problem.radii, np.minimum(norms, problem.radii))
        duals = duals * np.divide(onto, norms, out=np.zeros_like(norms), where=norms > 0)[:, None]
    if duals is not None and duals.shape != (problem.graph.n_edges, problem.dim):
        raise InvalidInput(f"expected duals of shape ({problem.graph.n_edges}, {problem.dim}), got {duals.shape}",
                           remedy="Start from a solution on the same graph, or leave the duals out")
    if duals is not None and not np.isfinite(duals).all():
        raise InvalidInput("the duals to start from must be finite", remedy="Leave them out")
    if start.sigma is not None and not (np.isfinite(start.sigma) and start.sigma > 0):
        raise InvalidInput(f"sigma must be a finite number > 0, got {start.sigma!r}", remedy="Leave it at None")
    return Start(models, duals, start.sigma)


def _status(certificate: Certificate, tol: float, interrupted: bool) -> Status:
    if certificate.relative_gap <= tol:
        return Status.CONVERGED
    if interrupted:
        return Status.INTERRUPTED
    return Status.INACCURATE if np.isfinite(certificate.bound) else Status.NO_BOUND
