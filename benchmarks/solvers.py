"""coterie and other solvers side by side, on one core: CPU seconds, certified gaps, clusters,
memory, growth.

    python benchmarks/solvers.py [--quick] [--tasks T1,T2,T3,T4] [--out benchmarks/results]
    [--numpy1 PYTHON]

T1  complete graph, quadratic, d = 3              T2  kNN graph of two moons, quadratic, one lam and
                                                  a path
T3  complete graph, squared hinge as in the paper  T4  kNN graph, logistic, d = 50

Constants may be tuned on the cases without a name; on those called fresh nothing is tuned (see
`tasks.py`). No solver judges itself: every point is checked by `coterie.certify`, with the solver's
own duals or with duals built for it (for more than 20,000 edges, with the best bound of the run
instead). `error` is the relative distance of its objective from the best lower bound of the run.
Each run is a separate process, forked after everything is imported and compiled, so time limit,
failure and peak memory are separate. Problems are built again for each repeat, outside the timing,
so that no cached result is reused. Failures are reported and counted. `--numpy1` names a Python
with NumPy 1 and pycut-pursuit, which needs NumPy 1.
"""

from __future__ import annotations

import os

# Before NumPy is imported, which reads them once.
for _library in ("OPENBLAS", "OMP", "MKL", "NUMBA", "RAYON"):
    os.environ[f"{_library}_NUM_THREADS"] = "1"

import argparse  # noqa: E402
import json  # noqa: E402
import multiprocessing  # noqa: E402
import resource  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
import warnings  # noqa: E402
from collections.abc import Callable  # noqa: E402
from dataclasses import dataclass, field  # noqa: E402
from functools import partial  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
from machine import best_of, facts  # noqa: E402
from peers import CUT_PURSUIT, OURS, Answer, Peers, ours  # noqa: E402
from tables import COLUMNS, ELSEWHERE, Row, draw, head, line, machine, summary  # noqa: E402
from tasks import TITLES, Case, cases, logistic, mixture, moons, paper  # noqa: E402

import coterie as ct  # noqa: E402
from coterie.base.compiling import njit  # noqa: E402
from coterie.base.labels import labels_of  # noqa: E402
from coterie.solvers import kernels  # noqa: E402
from coterie.solvers.base import Point  # noqa: E402
from coterie.solvers.engines import near_order  # noqa: E402

# a run is repeated up to so often, while all repeats together take less than so many seconds.
REPEATS, ENOUGH = 5, 1.0
OUR_LIMIT, JUDGING = 900, 300  # seconds, for coterie to solve and for any point to be judged
BUILD = 20_000  # edges up to which duals are built for peers that have none
FORK = multiprocessing.get_context("fork")


def in_child(work: Callable[[Callable[[], None]], Row], limit: float) -> Row:
    """Run the work in a forked process; returns its row, or a row that says how it failed.

    The work calls its argument when the solver is done: the certification after that does not count
    for the time limit. A limit on the CPU seconds of the process would be simpler, but then Linux
    counts them in ticks of milliseconds.
    """
    receiver, sender = FORK.Pipe(duplex=False)

    def target() -> None:
        try:
            row = work(lambda: sender.send(None))
        except Exception as error:
            row = {"status": f"{type(error).__name__}: "
                   f"{(str(error) or 'no message').splitlines()[0]}"}
        sender.send(row)

    child = FORK.Process(target=target)
    child.start()
    sender.close()
    try:
        for seconds in (limit, JUDGING):
            if not receiver.poll(seconds):
                child.kill()
                row = {"status": f"time limit, {seconds:.0f} s"}
                break
            if (row := receiver.recv()) is not None:
                break
    except EOFError:
        child.join()
        row = {"status": f"process ended with code {child.exitcode}"}
    child.join()
    return row


def measure(case: Case, name: str, solver: Callable[[ct.Problem, float], Answer],
            solved: Callable[[], None]) -> Row:
    """Time a solver on a case and certify its point."""
    times: list[float] = []
    peak = 0.0
    repeats = 1 if name == CUT_PURSUIT else REPEATS  # which repeats its runs itself
    while not times or (len(times) < repeats and sum(times) < ENOUGH):
        problem = case.build()
        began = time.process_time()
        answer = solver(problem, case.tol)
        times.append(time.process_time() - began if answer.seconds is None else answer.seconds)
        peak = peak or peak_memory()
    solved()
    objective, bounds, gaps = problem.objective(answer.models), [-np.inf], [np.inf]
    for duals in (answer.duals, None):
        if duals is not None or (name != OURS and min(gaps) > case.tol and problem.graph.n_edges
                                 <= BUILD):
            certificate = ct.certify(problem, answer.models, duals)
            bounds.append(certificate.bound)
            gaps.append(certificate.relative_gap)
    row = {"seconds": min(times), "repeats": len(times),
           "peak": peak if answer.seconds is None else None,
           "objective": objective, "bound": max(bounds), "gap": min(gaps), "status": "",
           "clusters": str(int(labels_of(answer.models).max()) + 1)}
    if name not in (OURS, CUT_PURSUIT):  # conic engines leave rounding between equal users
        near = np.linalg.norm(problem.graph.differences(answer.models), axis=1) <= 1e-5 \
            * np.abs(answer.models).max()
        row["clusters"] = f"~{int(problem.graph.subgraph(near).components.max()) + 1}"
    if name == OURS:
        row["pass"] = pass_seconds(problem)
        row["passes"] = row["seconds"] / row["pass"]
    return row


@dataclass(frozen=True)
class Judged:
    """The fast solver, with each of its points certified and the time of that measured separately.
    """

    gaps: list[float] = field(default_factory=list)
    spent: list[float] = field(default_factory=list)

    def run(self, problem: ct.Problem, tol: float, start: Any = None,
            progress: Any = None) -> Point:
        point = ct.Fast().run(problem, tol, start, progress)
        began = time.process_time()
        self.gaps.append(ct.certify(problem, point.models, point.duals).relative_gap)
        self.spent.append(time.process_time() - began)
        return point


def measure_path(case: Case, solved: Callable[[], None]) -> Row:
    """Time a complete path; every point on it is certified, outside the timing."""
    times: list[float] = []
    while not times or (len(times) < REPEATS and sum(times) < ENOUGH):
        problem, judged = case.build(), Judged()
        began = time.process_time()
        path = ct.solve_path(problem, lams=case.grid, tol=case.tol, solver=judged)
        times.append(time.process_time() - began - sum(judged.spent))
    peak = peak_memory()
    solved()
    worst, above = max(judged.gaps), sum(gap > case.tol for gap in judged.gaps)
    seconds, once = min(times), pass_seconds(problem)
    return {"seconds": seconds, "repeats": len(times), "gap": worst, "points": len(path),
            "pass": once,
            "passes": seconds / once, "peak": peak,
            "clusters": f"{path.n_clusters[0]} to {path.n_clusters[-1]}",
            "status": f"{above} of {len(judged.gaps)} points above tol" if above else "certified"}


def size(case: Case, solved: Callable[[], None]) -> Row:
    problem = case.build()
    return {"edges": problem.graph.n_edges, "d": problem.dim}


def peak_memory() -> float:
    """Peak memory of this process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def pass_seconds(problem: ct.Problem) -> float:
    """Seconds of one pass over the edges, in the order the solver keeps them."""
    graph, d = problem.graph, problem.dim
    s, shrink, radius = np.ones((d, graph.n_edges)), np.full(graph.n_edges, 0.5), np.ones(1)
    x = np.random.default_rng(0).standard_normal((d, graph.n_users))
    if graph.is_complete:
        forces, scratch = np.zeros_like(x), np.empty((d + 2, kernels.BLOCK))
        return best_of(3, lambda: complete_pass(x, s, shrink, radius, forces, scratch))
    position = np.argsort(near_order(graph))
    ends = np.sort(position[graph.edges], axis=1)
    first, second = (np.ascontiguousarray(e, dtype=np.int32)
                     for e in ends[np.lexsort((ends[:, 1], ends[:, 0]))].T)
    rows = np.ascontiguousarray(x.T)
    return best_of(3, lambda: kernels.edges_pass(rows, s, shrink, np.ones(graph.n_edges),
                                                 np.ones(1), first, second,
                                                 1.8, np.zeros_like(rows), False))


@njit()
def complete_pass(x, s, shrink, radius, forces, scratch):  # type: ignore[no-untyped-def]
    """The solver's pass over all pairs, which only compiled code can call."""
    kernels.complete_pass(x, s, shrink, radius, 1.8, forces, False, scratch)


def warm_up(peers: Peers) -> None:
    """Compile and import all that is timed later."""
    for problem in (mixture(40, 0.2), moons(400, 1.0), paper(30, 0.1), logistic(20, 0.05)):
        ours(problem, 1e-8)
        ct.certify(problem, np.zeros((problem.n_users, problem.dim)))
        pass_seconds(problem)
    ct.solve_path(paper(12, 1.0), n_lams=5)
    for name, solver in peers.solvers.items():
        if name != CUT_PURSUIT:
            solver(paper(6, 0.1), 1e-6)


def run(task: str, quick: bool, peers: Peers) -> list[Row]:
    rows: list[Row] = []
    for case in cases(task, quick):
        case_row = {"task": case.task, "variant": case.variant, "n": case.n, "lam": case.lam,
                    "tol": case.tol}
        work = partial(measure_path, case) if case.lam is None else partial(measure, case, OURS,
            ours)
        # Built in the child, so that this process holds no memory.
        case_row |= in_child(partial(size, case), OUR_LIMIT)
        group = [case_row | {"solver": OURS} | in_child(work, OUR_LIMIT)]
        for name in peers.for_case(case, case_row["edges"]):
            row = in_child(partial(measure, case, name, peers.solvers[name]), peers.limit)
            group.append(case_row | {"solver": name} | row)
            peers.note(case, name, group[-1])
        best = max((row.get("bound", -np.inf) for row in group), default=-np.inf)
        for row in group:
            if "objective" in row and np.isfinite(best):
                row["error"] = max(row["objective"] - best, 0.0) / max(abs(row["objective"]),
                    abs(best), 1e-300)
                # a bound is one, whoever proved it.
                row["gap"] = row["gap"] if row["gap"] < np.inf else row["error"]
            if not row["status"]:
                row["status"] = "certified" if row["gap"] <= case.tol else "above tol"
            if "seconds" in row and "seconds" in group[0]:
                row["ratio"] = row["seconds"] / group[0]["seconds"]
            print(line(row), flush=True)
        rows += group
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="T1,T2,T3,T4")
    parser.add_argument("--quick", action="store_true",
                        help="smaller sizes and limits: about two minutes")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--numpy1", default=sys.executable, metavar="PYTHON",
                        help="a Python that has pycut-pursuit")
    options = parser.parse_args()
    tasks = options.tasks.split(",")
    if unknown := set(tasks) - TITLES.keys():
        parser.error(f"unknown tasks: {', '.join(sorted(unknown))}")
    options.out.mkdir(parents=True, exist_ok=True)
    # Some of the paper's users see one class only.
    warnings.filterwarnings("ignore", category=ct.CoterieWarning)
    # That is the natural form.
    warnings.filterwarnings("ignore", "Objective contains too many subexpressions")
    print(facts())
    peers = Peers(limit=6.0 if options.quick else 30.0, python=options.numpy1)
    warm_up(peers)
    about = machine()
    rows: list[Row] = []
    parts = ["# Solvers side by side", "", ", ".join(f"{name} {value}" for name,
                                                     value in about.items()), "",
             f"CPU seconds of one core, best of up to {REPEATS} while they take under {ENOUGH:g} s "
             "together; coterie's "
             "include its certificate, the peers' leave it out. `passes`: in units of one pass "
             "over the edges."]
    for task in tasks:
        print(f"\n{head(COLUMNS)}")
        rows += run(task, options.quick, peers)
        parts += ["", f"## {TITLES[task]}", "", head(COLUMNS)] \
            + [line(r) for r in rows if r["task"] == task]
    skipped = [f"- {reason}{': N = ' if sizes else ''}{', '.join(map(str, sizes))}"
               for reason, sizes in peers.skipped.items()]
    end = summary(rows) + ["", "## Left out, and why", "", *skipped, "",
                           "## Measured elsewhere: not part of this run", ELSEWHERE]
    print("\n".join(end))
    (options.out / "results.md").write_text("\n".join(parts + end))
    saved = {"machine": about, "quick": options.quick, "rows": rows, "skipped": peers.skipped}
    (options.out / "results.json").write_text(json.dumps(saved, indent=1, default=float))
    draw(rows, options.out / "scaling.png")
    print(f"Saved results.json, results.md and scaling.png in {options.out}")


if __name__ == "__main__":
    main()
