"""`coterie fit`: from a table to groups, models and a report."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import typer
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from coterie.cli import options
from coterie.cli.base import app, console, error, plain
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
    with progress_bars(as_json) as progress:
        fitted = runs.fit_table(
            data, user=user, target=target, features=options.split_names(features),
            drop=options.split_names(drop), separator=separator, task=task, settings=settings,
            folder=out, resume=resume, overwrite=overwrite, progress=progress)
    if as_json:
        print(json.dumps(runs.load_run(out).info, indent=1))
    else:
        show(fitted, out)
    if fitted.solution.status is not Status.CONVERGED:
        raise typer.Exit(1)


def show(fitted: Fit, out: Path) -> None:
    """Print the groups, the reason for them, the scores and the certificate."""
    users = fitted.solution.problem.users
    for note in fitted.recipe.notes if fitted.recipe else ():
        console.print(f"[dim]{plain(note)}[/]", soft_wrap=True, highlight=False)
    title, sizes = f"{count_groups(fitted)} at lam = {fitted.lam:.4g}", np.bincount(fitted.labels)
    if len(sizes) == users.n_users > 1:
        console.print(title[0].upper() + title[1:] + ": each has a model of its own.",
                      soft_wrap=True, highlight=False)
    else:
        _show_groups(fitted, Table(title=title), out)
    console.print(f"Why            {fitted.why}", soft_wrap=True, highlight=False, markup=False)
    if fitted.scores is not None:
        console.print(f"Held out       {fitted.scores}", soft_wrap=True, highlight=False,
                      markup=False)
    for warning in fitted.warnings:
        console.print(f"Warning        {warning}", soft_wrap=True, highlight=False, markup=False)
    gap = f"{fitted.gap:.1e} (relative)" if np.isfinite(fitted.gap) else "none"
    console.print(f"Certified gap  {gap}", highlight=False)
    console.print(fitted.solution.status.value, soft_wrap=True)
    console.print(f"Results        {out}; open {out / 'report.html'} to look at them",
                  soft_wrap=True, markup=False)


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
        console.print(f"and {len(sizes) - 20:,} more groups in {out / 'clusters.csv'}",
                      soft_wrap=True, markup=False)


@contextlib.contextmanager
def progress_bars(silent: bool) -> Iterator[FitProgress | None]:
    """A line for each thing that is being done. Ctrl-C ends the command with the way to continue.
    """
    try:
        if silent or console.quiet or not console.is_terminal:
            yield None
            return
        with Progress(TextColumn("{task.description}"), BarColumn(),
                      TextColumn("{task.fields[text]}"),
                      TimeElapsedColumn(), console=console, transient=True) as progress:
            lines: dict[str, TaskID] = {}

            def update(what: str, done: int, total: int, text: str) -> None:
                if what not in lines:
                    lines[what] = progress.add_task(what, total=None, text="")
                progress.update(lines[what], completed=done, total=total if total > 1 else None,
                                text=text)

            yield update
    except KeyboardInterrupt:
        error.print("Interrupted: rerun with --resume to continue.", highlight=False)
        raise typer.Exit(130) from None
