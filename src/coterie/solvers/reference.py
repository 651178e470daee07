"""The reference solver: (C) solved by a conic solver with CVXPY (Diamond and Boyd, 2016).

It is the ground truth for small cases, and the method of the paper; the number of pairs limits it
to a few hundred users.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.base.errors import InvalidInput, NotConverged, require_extra
from coterie.base.types import Array
from coterie.problem.certificates import certify, fusions
from coterie.problem.problem import Problem
from coterie.problem.solution import Record
from coterie.solvers.base import Point
from coterie.solvers.polish import polish

#: CVXPY engines that accept every loss of the library, with the names of their tolerances.
ENGINES: dict[str, tuple[str, ...]] = {
    "CLARABEL": ("tol_gap_abs", "tol_gap_rel", "tol_feas"),
    "SCS": ("eps_abs", "eps_rel"),
}


@dataclass(frozen=True, kw_only=True)
class Reference:
    """CVXPY with a conic engine, as ground truth for small problems.

    Parameters
    ----------
    engine
        "CLARABEL" (interior point, accurate) or "SCS" (first order, larger problems).
    accuracy
        The tolerances of the engine; None: a hundredth of the requested gap, at most 1e-9.
    fuse
        Whether models that differ by less than the accuracy of the engine are made equal, if the
        certificate allows.

    Example
    -------
    >>> import coterie as ct
    >>> problem = ct.Problem(ct.Users.from_arrays([[0.0], [1.0], [9.0]]), ct.SquaredDistance(),
    ...                      lam=1.0)
    >>> ct.solve(problem, tol=1e-6, solver=ct.Reference(engine="CLARABEL")).labels.tolist()
    [0, 0, 1]
    """

    engine: str = "CLARABEL"
    accuracy: float | None = None
    fuse: bool = True

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise InvalidInput(f"unknown engine {self.engine!r}",
                               remedy=f"Choose one of: {', '.join(ENGINES)}")

    def run(self, problem: Problem, tol: float, start: Point | None = None,
            progress: Callable[[Record], None] | None = None) -> Point:
        with require_extra("cvxpy", "reference", "The reference solver"):
            import cvxpy as cp
        graph, n, d = problem.graph, problem.n_users, problem.dim
        x = cp.Variable(n * d)
        objective = problem.loss.conic(cp, problem.samples, x)
        constraints = []
        if graph.n_edges and problem.lam > 0:
            # z = B x as a constraint, whose multipliers are the duals.
            z = cp.Variable((graph.n_edges, d))
            constraints = [cp.reshape(incidence(problem) @ x, (graph.n_edges, d), order="C") == z]
            objective = objective + problem.radii @ cp.norm(z, 2, axis=1)
        program = cp.Problem(cp.Minimize(objective), constraints)
        accuracy = min(0.01 * tol, 1e-9) if self.accuracy is None else self.accuracy
        with warnings.catch_warnings():
            # "solution may be inaccurate": the certificate measures it.
            warnings.simplefilter("ignore", UserWarning)
            for attempt in (accuracy, max(1e-9, accuracy), max(1e-7, accuracy)):
                try:
                    tolerances = dict.fromkeys(ENGINES[self.engine], attempt)
                    program.solve(solver=self.engine, **tolerances)
                    break
                except cp.error.SolverError as error:  # often the tolerances are too small
                    failure = error
            else:
                raise NotConverged(f"{self.engine} failed on this problem: {failure} "
                                   "Standardise the features, raise `accuracy`, or try "
                                   "engine='SCS'.") from failure
        if x.value is None:
            raise NotConverged(f"{self.engine} found no solution (status {program.status!r}). "
                               "A ridge > 0 makes every loss bounded below.")
        models = np.ascontiguousarray(np.asarray(x.value).reshape(n, d))
        duals = np.asarray(constraints[0].dual_value).reshape(-1, d) if constraints else None
        return fuse(problem, models, duals, tol) if self.fuse else Point(models, duals)


def incidence(problem: Problem) -> Any:
    """The sparse matrix of B on all models in one vector."""
    from scipy import sparse

    e = np.arange(problem.graph.n_edges)
    i, j = problem.graph.edges.T
    ones = np.ones(e.size)
    b = sparse.csr_array((np.r_[ones, -ones], (np.r_[e, e], np.r_[i, j])),
                         shape=(e.size, problem.n_users))
    return sparse.kron(b, sparse.eye_array(problem.dim), format="csr")


def fuse(problem: Problem, models: Array, duals: Array | None, tol: float) -> Point:
    """Make nearly equal models exactly equal: the fewest groups whose certificate is within `tol`,
    or no worse.

    A dual strictly inside its ball proves that its two users share a model. So groups are the
    connected components of the graph along edges whose dual is inside by some margin, or whose
    difference is small; each candidate is polished and certified.
    """
    graph = problem.graph
    if not graph.n_edges or problem.lam == 0:
        return Point(models, duals)
    plain = certify(problem, models, duals).relative_gap
    enough = max(tol, plain) if np.isfinite(plain) else tol
    guesses = list(fusions(models, np.linalg.norm(graph.differences(models), axis=1)))
    if duals is not None:
        inside = 1.0 - np.linalg.norm(duals, axis=1) / np.maximum(problem.radii, 1e-300)
        guesses += [inside > margin for margin in (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7)]
    found = [graph.subgraph(fused).components for fused in guesses]
    groupings = {labels.tobytes(): labels for labels in found}
    for labels in sorted(groupings.values(), key=lambda labels: int(labels.max())):
        if labels.max() + 1 == problem.n_users:
            break
        grouped = polish(problem, labels, models)
        if certify(problem, grouped).relative_gap <= enough:
            return Point(grouped)
    return Point(models, duals)
