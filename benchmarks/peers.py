"""The solvers that `solvers.py` runs: each takes a problem and a tolerance, and returns a point to
certify.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tasks import Case

import coterie as ct

OURS, CLARABEL, SCS = "coterie", "CVXPY+Clarabel", "CVXPY+SCS"
NATURAL, CUT_PURSUIT = "CVXPY natural form", "cut-pursuit"
_HELPER = Path(__file__).with_name("cut_pursuit.py")


class Answer(NamedTuple):
    models: np.ndarray
    duals: np.ndarray | None = None
    seconds: float | None = None  # measured by the process of the solver, if it is another one


def ours(problem: ct.Problem, tol: float) -> Answer:
    solution = ct.solve(problem, tol=tol)
    return Answer(solution.models, solution.duals)


def vectorised(problem: ct.Problem, tol: float, engine: str) -> Answer:
    accuracy = 1e-8 if engine == "CLARABEL" else tol
    point = ct.Reference(engine=engine, fuse=False, accuracy=accuracy).run(problem, tol)
    return Answer(point.models, point.duals)


def natural(problem: ct.Problem, tol: float) -> Answer:
    """The usual CVXPY formulation: a Python sum over users and over pairs."""
    import cvxpy as cp

    n, loss = problem.n_users, problem.loss
    w = [cp.Variable(problem.dim) for _ in range(n)]
    losses = sum(loss.conic(cp, loss.prepare(problem.users.take([i])), w[i]) for i in range(n))
    penalty = sum(cp.norm(w[i] - w[j]) for i in range(n) for j in range(i + 1, n))
    cp.Problem(cp.Minimize(losses + problem.lam * penalty)).solve(solver="CLARABEL")
    return Answer(np.array([x.value for x in w]))


def cut_pursuit(problem: ct.Problem, tol: float, python: str, limit: float) -> Answer:
    with tempfile.TemporaryDirectory() as folder:
        problem_file, result_file = Path(folder, "problem.npz"), Path(folder, "answer.npz")
        np.savez(problem_file, points=problem.users.features, edges=problem.graph.edges,
                 weights=problem.radii)
        try:
            ended = subprocess.run([python, _HELPER, problem_file, result_file],
                                   capture_output=True, text=True,
                                   timeout=limit)
        except subprocess.TimeoutExpired:
            raise TimeoutError("time limit") from None
        if not result_file.exists():
            raise RuntimeError((ended.stdout + ended.stderr).strip().splitlines()[-1])
        with np.load(result_file) as answer:
            return Answer(answer["models"], None, float(answer["seconds"]))


@dataclass
class Peers:
    """The solvers that are available, the cases each can run on, and the reasons for those left
    out.
    """

    limit: float
    python: str
    # a reason, and the numbers of users it is for.
    skipped: dict[str, list[int]] = field(default_factory=dict)
    # Edges, seconds.
    slowest: dict[tuple[str, str, str], tuple[int, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.solvers: dict[str, Callable[[ct.Problem, float], Answer]] = {}
        engines = {}
        try:
            import cvxpy as cp

            engines = {name: name in cp.installed_solvers() for name in ("CLARABEL", "SCS")}
            if engines["CLARABEL"]:
                self.solvers |= {CLARABEL: partial(vectorised, engine="CLARABEL"), NATURAL: natural}
            if engines["SCS"]:
                self.solvers[SCS] = partial(vectorised, engine="SCS")
        except ImportError as error:
            self.skipped[f"CVXPY: {error}"] = []
        self.skipped |= {f"CVXPY+{name}: the engine is not installed": [] for name in engines
                         if not engines[name]}
        said = subprocess.run([self.python, _HELPER], capture_output=True, text=True)
        if said.stdout.strip() == "ready":
            self.solvers[CUT_PURSUIT] = partial(cut_pursuit, python=self.python,
                                                limit=self.limit - 2.0)
        else:
            reason = (said.stdout + said.stderr).strip().splitlines()[-1]
            self.skipped[f"{CUT_PURSUIT}: {reason}; --numpy1 PYTHON runs it in an environment that "
                         "has it"] = []
        self.skipped["CCMM, SSNAL (pycvxcluster), cvxclustr, clustRviz, SnapVX: not on PyPI; see "
                     "the figures measured "
                     "elsewhere"] = []

    def for_case(self, case: Case, n_edges: int) -> Iterator[str]:
        """Names of the peers worth running on a case."""
        for name in self.solvers if case.lam is not None else ():
            edges, seconds = self.slowest.get((case.task, case.variant, name), (n_edges, 0.0))
            reason = ""
            if name == CUT_PURSUIT and case.task not in ("T1", "T2"):
                reason = "quadratic losses only"
            elif name == NATURAL and case.n > 60:
                reason = "a Python sum over pairs is left to N <= 60"
            elif seconds * n_edges / edges > self.limit:
                reason = (f"would take over {self.limit:.0f} s, estimated from a smaller case or "
                          "the same one")
            if reason:
                where = f"{case.task} {case.variant}".strip()
                sizes = self.skipped.setdefault(f"{where}, {name}: {reason}", [])
                sizes += [case.n] if case.n not in sizes else []
            else:
                yield name

    def note(self, case: Case, name: str, row: dict[str, Any]) -> None:
        """Store the time: larger sizes are skipped after the first one above the limit."""
        seconds = row.get("seconds") or (np.inf if "time limit" in row["status"] else 0.0)
        edges, before = self.slowest.get((case.task, case.variant, name), (0, 0.0))
        self.slowest[case.task, case.variant, name] = (
            row["edges"], max(seconds, before) if edges == row["edges"] or before == np.inf
                                                       else seconds)
