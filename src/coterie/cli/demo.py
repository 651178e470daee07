"""`coterie demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.status import Status
from rich.table import Table

from coterie.base.compiling import when_compiling
from coterie.base.errors import Interrupted, MissingExtra
from coterie.base.labels import many
from coterie.base.types import Array
from coterie.cli import base as options
from coterie.cli.base import Opt, app, console, grid, say
from coterie.convex.choice import accuracy_of_users, refit
from coterie.convex.consensus import lam_max
from coterie.convex.path import solve_path
from coterie.data.simulated import Dataset, ellipses
from coterie.losses import SquaredHinge
from coterie.output import report
from coterie.output.plots import separators
from coterie.problem.problem import Problem
from coterie.problem.solution import Solution
from coterie.solvers import SOLVERS, solve

_Out = Annotated[Path, Opt(help="Folder for the figure and the report; created if needed.")]
_Lam = Annotated[float, Opt(help="Fusion penalty strength.")]
_Seed = Annotated[int, Opt(help="Seed of the data.", min=0)]
_Tol = Annotated[float, Opt(help="Relative duality gap to reach.")]
_Solver = Annotated[str, Opt(help=f"One of: {', '.join(SOLVERS)}.")]


@app.command()
def demo(out: _Out = Path("demo"), lam: _Lam = 0.09, seed: _Seed = 0, tol: _Tol = 1e-8,
         solver: _Solver = "fast", threads: options.Threads = None,
         quiet: options.Quiet = False) -> None:
    """Solve, certify and plot the paper's data: sixty users of three kinds, ten samples each.

    Example: coterie demo --lam 0.05 --out somewhere
    """
    out.mkdir(parents=True, exist_ok=True)
    data = ellipses(seed=seed)
    problem = Problem(data.users, SquaredHinge(ridge=1e-3), lam=lam)
    # 1. The solution, with its groups and what its models are good for.
    solution, interrupted = _solve(problem, tol, solver)
    console.print(_groups(solution, data))
    alone = problem.loss.local(problem.samples).points
    accuracies = _show_accuracies(solution, alone, data)
    # 2. The path, as a report.
    page = None
    if lam > 0 and not interrupted:
        with console.status("Solving along lam ...") as status:
            try:
                page = out / "report.html"
                _write_path_page(solution, tol, data, accuracies, page, status)
            except KeyboardInterrupt:
                page, interrupted = None, True
    # 3. The certificate, and a figure.
    console.print(f"Objective      {solution.objective:.10f}")
    console.print(f"Lower bound    {solution.certificate.bound:.10f}")
    console.print(f"Certified gap  {solution.gap:.1e} (relative), in {solution.seconds:.3f} s")
    console.print(solution.status.value)
    figure = out / "separators.png"
    try:
        separators(solution, alone=alone).savefig(figure)
        say(f"Figure         {figure}")
    except MissingExtra as missing:
        say(f"Figure         none. {missing}")
    if page is not None:
        say(f"Report         {page}")
    if interrupted:
        raise typer.Exit(130)
    if solution.gap > tol:
        raise typer.Exit(1)


def _solve(problem: Problem, tol: float, solver: str) -> tuple[Solution, bool]:
    """The solution, or the best one at an interrupt; and whether it was interrupted."""
    with console.status(f"Solving for {problem.n_users} users and {problem.graph.n_edges:,} pairs "
                        "...") as status:
        when_compiling(_announce_compiling)
        try:
            return solve(problem, tol=tol, solver=solver, progress=lambda record: status.update(
                f"pass {record.iteration}: {record.n_clusters} groups, certified gap "
                f"{record.gap:.1e}")), False
        except Interrupted as stop:
            if stop.best is None:
                raise
            return stop.best, True


def _announce_compiling() -> None:
    """Say once that functions are compiled."""
    when_compiling(None)
    console.print("Compiling       once on this machine, less than a minute ...")


def _show_accuracies(solution: Solution, alone: Array, data: Dataset) -> tuple[Array, Array]:
    """Print mean test accuracies over users; returns (n_users,) those of local models and of one
    model for all.
    """
    problem, test = solution.problem, data.test
    assert test is not None
    pooled = refit(problem, np.zeros(problem.n_users, dtype=np.int64))
    ours, shrunk, own, one = (accuracy_of_users(problem.loss, models, test)
                              for models in (solution.refit(), solution.models, alone, pooled))
    say(f"Test accuracy  {ours.mean():.1%} ({shrunk.mean():.1%} before each group is fitted "
        f"again), {own.mean():.1%} local models, {one.mean():.1%} one model for all")
    say(f"               {(ours > own).sum()} of {len(own)} users are better off than with their "
        f"own model, {(ours < own).sum()} worse")
    return own, one


def _write_path_page(solution: Solution, tol: float, data: Dataset, others: tuple[Array, Array],
                     page: Path, status: Status) -> None:
    """Solve the path, write its report, and print the range of lam with these groups."""
    problem, lam, test = solution.problem, solution.lam, data.test
    assert test is not None
    top = lam_max(problem).upper
    lams = np.unique([*np.geomspace(top / 50, top, 30), lam])
    path = solve_path(problem, lams, tol=tol, progress=lambda point, _: status.update(
        f"lam = {point.lam:.4g}: {point.n_clusters} groups"))
    first, last = path.window(path.at(lam).labels)
    document = report.gather(path, chosen=int(np.searchsorted(path.lams, lam)),
                             title="Sixty users of three kinds", command="coterie demo", refit=True,
                             notes=["Models and scores are those of each group fitted again, "
                                    "without the penalty."])
    document["scores"] = {"metric": "accuracy", "larger": True, "alone": others[0].tolist(),
                          "together": others[1].tolist(),
                          "points": [accuracy_of_users(problem.loss, point.refit(), test).tolist()
                                     for point in path.solutions],
                          "note": "On 1,000 test samples per user."}
    report.write(document, page)
    console.print(f"These groups   for lam from {first.upper:.4f} to {last.lower:.4f}; one group "
                  f"from {top:.4f}")


def _groups(solution: Solution, data: Dataset) -> Table:
    assert data.clusters is not None
    table = grid(f"{many(solution.n_clusters, 'group')} among {solution.problem.n_users} users at "
                 f"lam = {solution.lam:g}",
                 ("group", "users", "true kind of its users", "model (w, b)"),
                 right=("group", "users"))
    models = solution.refit()
    for k in range(solution.n_clusters):
        members = solution.labels == k
        kinds = zip(*np.unique(data.clusters[members], return_counts=True), strict=True)
        table.add_row(str(k + 1), str(int(members.sum())),
                      ", ".join(f"{n} of kind {kind}" for kind, n in kinds),
                      "  ".join(f"{value:+.4f}" for value in models[members][0]))
    return table
