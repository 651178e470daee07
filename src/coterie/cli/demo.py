"""`coterie demo`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.table import Table

from coterie import report
from coterie._typing import Array
from coterie.analysis.path import Path as Solved
from coterie.analysis.path import lam_max, solve_path
from coterie.analysis.select import refit
from coterie.cli.base import app, console, stops
from coterie.datasets import Dataset, ellipses
from coterie.errors import Interrupted
from coterie.losses import SquaredHinge
from coterie.plots import separators
from coterie.problem import Problem
from coterie.solution import Record, Solution
from coterie.solvers import SOLVERS, solve


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for picture and page; made if needed.")] = Path("demo"),
    lam: Annotated[float, typer.Option(help="Price of a difference between two users' models.")] = 0.09,
    seed: Annotated[int, typer.Option(help="Seed of the data.", min=0)] = 0,
    tol: Annotated[float, typer.Option(help="Relative duality gap to reach.")] = 1e-8,
    solver: Annotated[str, typer.Option(help=f"One of: {', '.join(SOLVERS)}.")] = "fast",
) -> None:
    """The paper's data: sixty users of three kinds, ten samples each; solved, certified and drawn.

    Example: coterie demo --lam 0.05 --out somewhere
    """
    out.mkdir(parents=True, exist_ok=True)
    data = ellipses(seed=seed)
    problem = Problem(data.users, SquaredHinge(ridge=1e-3), lam=lam)
    with console.status(f"Solving for {problem.n_users} users and {problem.graph.n_edges:,} pairs ...") as status:
        try:
            solution = solve(problem, tol=tol, solver=solver, progress=lambda record: status.update(_told(record)))
        except Interrupted as stop:
            if stop.best is None:
                raise
            solution = stop.best
    alone = problem.loss.local(problem.samples).points
    console.print(_clusters(solution, data))
    pooled = refit(problem, np.zeros(problem.n_users, dtype=np.int64))
    again = refit(problem, solution.labels)
    best, ours, own, one = (_accuracy(problem, models, data) for models in (again, solution.models, alone, pooled))
    console.print(f"Test accuracy  {best.mean():.1%} refitted by cluster, {ours.mean():.1%} as they are, "
                  f"{own.mean():.1%} alone, {one.mean():.1%} one for all", soft_wrap=True)
    page = None
    if lam > 0 and not stops:
        first = last = None
        with console.status("Solving along lam ...") as status, contextlib.suppress(Interrupted):
            top = lam_max(problem).upper
            lams = np.unique([*np.geomspace(top / 50, top, 30), lam])
            path = solve_path(problem, lams, tol=tol, progress=lambda point, _: status.update(
                f"lam = {point.lam:.4g}: {point.n_clusters} clusters"))
            first, last = path.window(path.at(lam).labels)
            page = _page(path, lam, problem, data, (own, one), out / "report.html")
        if first and last and page:
            console.print(f"These clusters at lam from {first.upper:.4f} to {last.lower:.4f}, "
                          f"all together from {top:.4f}")
    console.print(f"Objective      {solution.objective:.10f}")
    console.print(f"Lower bound    {solution.certificate.bound:.10f}")
    console.print(f"Certified gap  {solution.gap:.1e} (relative), in {solution.seconds:.2f} s")
    console.print(solution.status.value)
    picture = out / "separators.png"
    separators(solution, alone=alone).savefig(picture)
    console.print(f"Picture        {picture}", soft_wrap=True)
    if page is not None:
        console.print(f"To look at     {page}", soft_wrap=True)
    if stops:
        raise typer.Exit(130)
    if solution.gap > tol:
        raise typer.Exit(1)


def _told(record: Record) -> str:
    return f"pass {record.iteration}: {record.n_clusters} clusters, certified gap {record.gap:.1e}"


def _clusters(solution: Solution, data: Dataset) -> Table:
    assert data.clusters is not None
    found = f"{solution.n_clusters} cluster{'s' * (solution.n_clusters > 1)}"
    table = Table(title=f"{found} among {solution.problem.n_users} users "
                        f"at lam = {solution.lam:g}")
    for heading in ("cluster", "users", "true kind of its users", "model (w, b)"):
        table.add_column(heading, justify="left" if heading.startswith(("true", "model")) else "right")
    for k in range(solution.n_clusters):
        members = solution.labels == k
        kinds, counts = np.unique(data.clusters[members], return_counts=True)
        model = solution.models[members][0]
        table.add_row(str(k), str(int(members.sum())),
                      ", ".join(f"{n} of kind {kind}" for kind, n in zip(kinds, counts, strict=True)),
                      "  ".join(f"{value:+.4f}" for value in model))
    return table


def _page(path: Solved, lam: float, problem: Problem, data: Dataset, others: tuple[Array, Array], page: Path) -> Path:
    """What was found, to look at: all of the path, with accuracy on test samples."""
    document = report.gather(path, chosen=int(np.searchsorted(path.lams, lam)), title="Sixty users of three kinds",
                             command="coterie demo", notes=["Models as the path has them, not refitted by cluster."])
    document["scores"] = {
        "metric": "accuracy", "larger": True, "alone": others[0].tolist(), "together": others[1].tolist(),
        "points": [_accuracy(problem, point.models, data).tolist() for point in path.solutions],
        "note": "On 1,000 fresh samples of each user."}
    report.write(document, page)
    return page


def _accuracy(problem: Problem, models: Array, data: Dataset) -> Array:
    """(n_users,) the share of each user's test samples predicted right."""
    test = data.test
    assert test is not None
    assert test.targets is not None
    right = problem.loss.predict(test.features, models[test.owner]) == test.targets
    return np.asarray(np.add.reduceat(right, test.offsets[:-1], dtype=float) / test.counts)
