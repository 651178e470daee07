"""Solvers, one file a method; `solve` runs one and has its answer certified."""

from __future__ import annotations

import time

import numpy as np

from coterie.certificates import certify
from coterie.errors import InvalidInput
from coterie.problem import Problem
from coterie.solution import Certificate, Solution, Status
from coterie.solvers.base import Solver
from coterie.solvers.reference import Reference

#: Every solver by the name used in the command line and in saved files.
SOLVERS: dict[str, type[Solver]] = {"reference": Reference}

__all__ = ["SOLVERS", "Reference", "Solver", "solve"]


def solve(problem: Problem, *, tol: float = 1e-8, solver: str | Solver = "reference") -> Solution:
    """Solve (C) and certify the answer.

    Parameters
    ----------
    problem : what to solve.
    tol : the relative duality gap to reach; the status says whether it was.
    solver : a name in `SOLVERS`, or a solver with settings of your own such as Reference(engine="SCS").
    """
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
    point = solver.run(problem, tol)
    certificate = certify(problem, point.models, point.duals)
    return Solution(
        problem=problem, models=point.models, duals=certificate.duals, certificate=certificate,
        status=_status(certificate, tol, point.interrupted), solver=type(solver).__name__,
        seconds=time.perf_counter() - began, history=point.history,
    )


def _status(certificate: Certificate, tol: float, interrupted: bool) -> Status:
    if certificate.relative_gap <= tol:
        return Status.CONVERGED
    if interrupted:
        return Status.INTERRUPTED
    return Status.INACCURATE if np.isfinite(certificate.bound) else Status.NO_BOUND
