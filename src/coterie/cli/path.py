"""`coterie path`: the complete path of a table or of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from coterie.cli import options
from coterie.cli.base import app, console
from coterie.cli.fit import progress_bars
from coterie.fitting import Settings
from coterie.output import runs
from coterie.problem.solution import Status

_DEFAULTS = Settings()


@app.command("path")
def run_path(
    source: Annotated[Path, typer.Argument(help="A table, or the folder of a run.")],
    user: options.User = "", target: options.Target = "", features: options.Features = "",
             drop: options.Drop = "",
    separator: options.Separator = "", task: options.TaskName = "auto",
             loss: options.LossName = _DEFAULTS.loss,
    weights: options.Weights = _DEFAULTS.weights, ridge: options.Ridge = _DEFAULTS.ridge,
    n_lams: options.Lams = _DEFAULTS.n_lams, tol: options.Tol = _DEFAULTS.tol,
    standardize: options.Standardize = _DEFAULTS.standardize, out: options.Out = Path("run"),
    resume: options.Resume = False, overwrite: options.Overwrite = False,
             threads: options.Threads = None,
    quiet: options.Quiet = False, as_json: options.Json = False,
) -> None:
    """Show the complete path over lam, from one model per user to one model for all.

    SOURCE is a table, whose path is solved, or the folder of a run, whose path is shown.

    Example: coterie path data.csv --user subject --target y --weights unit --out path

    Example: coterie path run
    """
    code = 0
    if not source.is_dir():
        settings = Settings(loss=loss, lam="auto" if weights == "auto" else 0.0, weights=weights,
                            ridge=ridge, n_lams=n_lams, tol=tol, holdout=0.0,
                            standardize=standardize)
        with progress_bars(as_json) as progress:
            fitted = runs.fit_table(
                source, user=user, target=target, features=options.split_names(features),
                drop=options.split_names(drop), separator=separator, task=task, settings=settings,
                folder=out, resume=resume, overwrite=overwrite, progress=progress)
        code, source = int(fitted.solution.status is not Status.CONVERGED), out
    run = runs.load_run(source)
    rows = run.path
    if as_json:
        print(json.dumps(rows, indent=1))
        raise typer.Exit(code)
    table = Table(title=f"{len(run.names)} users along lam")
    for heading in rows[0]:
        table.add_column(heading, justify="right", no_wrap=heading in ("lam", "gap"))
    for row in rows:
        table.add_row(*map(_short, row.values()), style="bold" if row["lam"] == run.lam else "")
    console.print(table)
    console.print(f"Everything in {source}; open {source / 'report.html'} to look at it.",
                  soft_wrap=True, markup=False)
    raise typer.Exit(code)


def _short(value: Any) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:.5g}" if value > 1e-5 or not value else f"{value:.0e}"
