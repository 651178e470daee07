"""`coterie fit` and `coterie path`: from a table to groups, models, a report and the path."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import typer
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from coterie.cli import base as options
from coterie.cli.base import app, console, interruptible, plain, say
from coterie.fitting import Fit, Settings
from coterie.fitting.work import FitProgress
from coterie.output import runs
from coterie.output.runs.save import count_groups
from coterie.problem.solution import Status

_DEFAULTS = Settings()


@app.command("fit")
def run_fit(data: options.Table, user: options.User = "", target: options.Target = "",
            features: options.Features = "", drop: options.Drop = "",
            separator: options.Separator = "", task: options.TaskName = "auto",
            loss: options.LossName = _DEFAULTS.loss, lam: options.Lam = str(_DEFAULTS.lam),
            weights: options.Weights = _DEFAULTS.weights, count: options.Count = _DEFAULTS.count,
            ridge: options.Ridge = _DEFAULTS.ridge, n_lams: options.Lams = _DEFAULTS.n_lams,
            max_groups: options.MaxGroups = _DEFAULTS.max_groups or 0,
            tol: options.Tol = _DEFAULTS.tol, holdout: options.Holdout = _DEFAULTS.holdout,
            standardize: options.Standardize = _DEFAULTS.standardize,
            seed: options.Seed = _DEFAULTS.seed, out: options.Out = Path("run"),
            resume: options.Resume = False, overwrite: options.Overwrite = False,
            threads: options.Threads = None, quiet: options.Quiet = False,
            as_json: options.Json = False) -> None:
    """Find groups and models from a table: who belongs together, a model for everyone, a
    certificate, and a report.

    DATA is a file with one row per sample: CSV, Parquet, Excel or JSON lines, also compressed; - is
    standard input. Writes run.json, models.csv and .parquet, clusters.csv, path.csv and .parquet,
    and report.html into the folder.

    Example: coterie fit data.csv --user subject --target y

    Example: coterie fit points.csv --drop id --out clusters

    Example: zcat data.csv.gz | coterie fit - --user subject --target y
    """
    settings = Settings(loss=loss, lam=options.parse_lam(lam), weights=weights,
                        count=cast(Any, count), ridge=ridge,
                        n_lams=n_lams, max_groups=max_groups or None, tol=tol, holdout=holdout,
                        standardize=standardize, seed=seed)
    fitted = _fit(data, settings, as_json, user=user, target=target, features=features, drop=drop,
                  separator=separator, task=task, folder=out, resume=resume, overwrite=overwrite)
    if as_json:
        print(json.dumps(runs.load_run(out).info, indent=1))
    else:
        show(fitted, out)
    if fitted.solution.status is not Status.CONVERGED:
        raise typer.Exit(1)


def _fit(data: Path, settings: Settings, silent: bool, *, features: str, drop: str,
         **asked: Any) -> Fit:
    """The fit of a table, with a line for each thing that is being done."""
    with interruptible(": rerun with --resume to continue."), _progress_bars(silent) as progress:
        return runs.fit_table(data, features=options.split_names(features),
                              drop=options.split_names(drop), settings=settings, progress=progress,
                              **asked)


def show(fitted: Fit, out: Path) -> None:
    """Print the groups, the reason for them, the scores and the certificate."""
    users = fitted.solution.problem.users
    for note in fitted.recipe.notes if fitted.recipe else ():
        say(note, style="dim")
    title, sizes = f"{count_groups(fitted)} at lam = {fitted.lam:.4g}", np.bincount(fitted.labels)
    if len(sizes) == users.n_users > 1:
        say(title[0].upper() + title[1:] + ": each has a model of its own.")
    else:
        _show_groups(fitted, Table(title=title), out)
    say(f"Why            {fitted.why}")
    if fitted.scores is not None:
        say(f"Held out       {fitted.scores}")
    for warning in fitted.warnings:
        say(f"Warning        {warning}")
    gap = f"{fitted.gap:.1e} (relative)" if np.isfinite(fitted.gap) else "none"
    say(f"Certified gap  {gap}")
    say(fitted.solution.status.value)
    say(f"Results        {out}; open {out / 'report.html'} to look at them")


def _show_groups(fitted: Fit, table: Table, out: Path) -> None:
    """Print the largest groups."""
    users, sizes = fitted.solution.problem.users, np.bincount(fitted.labels)
    for heading in ("group", f"{fitted.noun}s", "rows", "among them"):
        table.add_column(heading, justify="left" if heading == "among them" else "right")
    for k in np.argsort(-sizes, kind="stable")[:20]:
        members = np.flatnonzero(fitted.labels == k)
        names = (", ".join(str(users.names[i]) for i in members[:4])
                 + (", ..." if len(members) > 4 else ""))
        table.add_row(str(k), f"{len(members):,}", f"{int(users.sizes[members].sum()):,}",
                      plain(names))
    console.print(table)
    if len(sizes) > 20:
        say(f"and {len(sizes) - 20:,} more groups in {out / 'clusters.csv'}")


@contextlib.contextmanager
def _progress_bars(silent: bool) -> Iterator[FitProgress | None]:
    """A line for each thing that is being done; None where nothing is to be seen."""
    if silent or console.quiet or not console.is_terminal:
        yield None
        return
    with Progress(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"),
                  TimeElapsedColumn(), console=console, transient=True) as progress:
        lines: dict[str, TaskID] = {}

        def update(what: str, done: int, total: int, text: str) -> None:
            if what not in lines:
                lines[what] = progress.add_task(what, total=None, text="")
            progress.update(lines[what], completed=done, total=total if total > 1 else None,
                            text=text)

        yield update


@app.command("path")
def run_path(source: Annotated[Path, typer.Argument(help="A table, or the folder of a run.")],
             user: options.User = "", target: options.Target = "", features: options.Features = "",
             drop: options.Drop = "", separator: options.Separator = "",
             task: options.TaskName = "auto", loss: options.LossName = _DEFAULTS.loss,
             weights: options.Weights = _DEFAULTS.weights, ridge: options.Ridge = _DEFAULTS.ridge,
             n_lams: options.Lams = _DEFAULTS.n_lams, tol: options.Tol = _DEFAULTS.tol,
             standardize: options.Standardize = _DEFAULTS.standardize,
             out: options.Out = Path("run"), resume: options.Resume = False,
             overwrite: options.Overwrite = False, threads: options.Threads = None,
             quiet: options.Quiet = False, as_json: options.Json = False) -> None:
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
        fitted = _fit(source, settings, as_json, user=user, target=target, features=features,
                      drop=drop, separator=separator, task=task, folder=out, resume=resume,
                      overwrite=overwrite)
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
        table.add_row(*map(_format, row.values()), style="bold" if row["lam"] == run.lam else "")
    console.print(table)
    say(f"Everything in {source}; open {source / 'report.html'} to look at it.")
    raise typer.Exit(code)


def _format(value: Any) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:.5g}" if value > 1e-5 or not value else f"{value:.0e}"
