"""`coterie fit` and `path`: from a table to groups, models, a report and the path; `predict`,
`certify` and `report`: what is done with the folder of a run.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import typer
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from coterie.base.errors import InvalidInput
from coterie.base.labels import groups_of, many
from coterie.base.storage import json_ready, write_atomically
from coterie.cli import base as options
from coterie.cli.base import Arg, Opt, app, console, error, grid, interruptible, say
from coterie.data.files import is_input
from coterie.data.frames import to_frame, write_parquet
from coterie.federated.node import holds_models, load_models
from coterie.fitting import Fit, Settings
from coterie.fitting.predictions import PredictsRows
from coterie.fitting.settings import FitProgress
from coterie.output import runs
from coterie.output.report.headline import headline, lines_of
from coterie.problem.solution import Status

_DEFAULTS = Settings()
_Source = Annotated[Path, Arg(help="A table, or the folder of a run.")]
_New = Annotated[Path, Arg(help="A table with the columns that were learned from; - reads standard "
                                "input.")]
_Predictions = Annotated[Path, Opt(help="File for the predictions, .csv or .parquet; - writes CSV "
                                        "to standard output.")]
_Only = Annotated[bool, Opt("--only-predictions", help="Leave out the columns of the table.")]
_Rows = Annotated[Path | None, Arg(help="The table of the run; by default the file of the run.")]
_Run = Annotated[Path, Arg(help="The folder of a run.")]
_Page = Annotated[Path | None, Opt(help="The file; by default report.html in the run folder.")]
_Title = Annotated[str, Opt(help="Another title.")]


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
            average: options.Averaging = _DEFAULTS.average,
            curves: options.Curves = _DEFAULTS.curves, scale: options.ScaleName = _DEFAULTS.scale,
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
                        count=cast(Any, count), ridge=ridge, n_lams=n_lams, tol=tol, seed=seed,
                        max_groups=max_groups or None, holdout=holdout, standardize=standardize,
                        average=average, curves=curves, scale=scale)
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
    """Print what was found, how good and how sure it is, as the page and run.json have it."""
    for note in fitted.recipe.notes if fitted.recipe else ():
        say(note, style="dim")
    said = headline(fitted, fitted.labels, fitted.settings.task)
    say(said["found"], style="bold")
    for name, text in lines_of(said):
        say(f"{name:15}{text}" if name else f"  {text}")
        if not name and text is said["groups"][-1]["sentence"] \
                and len(said["groups"]) < fitted.n_clusters:
            more = fitted.n_clusters - len(said["groups"])
            say(f"  and {many(more, 'more group')} in {out / 'clusters.csv'}")
    for warning in fitted.warnings:
        say(f"Warning        {warning}")
    gap = f", certified gap {fitted.gap:.0e}" if np.isfinite(fitted.gap) else ""
    say(f"Computed       {fitted.solution.status.value} (lam = {fitted.lam:.4g}{gap})")
    say(f"Results        {out}; open {out / 'report.html'} to look at them")


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
def run_path(source: _Source,
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
    table = grid(f"{len(run.names)} users along lam", rows[0], right=rows[0], fixed=("lam", "gap"))
    for row in rows:
        table.add_row(*map(_format, row.values()), style="bold" if row["lam"] == run.lam else "")
    console.print(table)
    say(f"Everything in {source}; open {source / 'report.html'} to look at it.")
    raise typer.Exit(code)


def _format(value: Any) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:.5g}" if value > 1e-5 or not value else f"{value:.0e}"


@app.command("predict")
def run_predict(
    run: options.RunFolder, table: _New, out: _Predictions = Path("predictions.csv"),
    separator: options.Separator = "", only_predictions: _Only = False,
    interval: options.Interval = 0.0,
    quiet: options.Quiet = False, as_json: options.Json = False) -> None:
    """Predict every row of a table by the model of the row's user.

    RUN is the folder of a run of `coterie fit` or `coterie federate`, TABLE a table with the
    columns that were learned from. At a node of a federation RUN may be the folder in which the
    node keeps its users' models. The output has the table's columns and the predictions. Where the
    table has the target, the predictions are scored. Unknown users get the pooled model, and a 0 in
    the column `known`. Where every row was a separate user, rows of another table get the nearest
    cluster.

    Example: coterie predict run new.csv --out predictions.csv

    Example: coterie predict run new.csv --interval 0.9
    """
    # 1. What predicts: a run, or the models that a node keeps.
    complete = (run / "run.json").exists() or not holds_models(run)
    fitted: PredictsRows = runs.load_run(run) if complete else load_models(run)
    if out.suffix not in ("", ".csv", ".txt", ".parquet", ".pq"):
        raise InvalidInput(f"predictions cannot be written as {out.suffix}",
                           remedy="Name a .csv or .parquet file")
    if is_input(out) and as_json:
        raise InvalidInput("the predictions and --json both go to standard output",
                           remedy="Name a file with --out")
    if not is_input(table) and out.resolve() == table.resolve():
        raise InvalidInput(f"{out} is the table itself", remedy="Name another file with --out")
    # 2. The predictions, written.
    predicted = fitted.predict_table(table, separator=separator, interval=interval or None)
    frame = to_frame(predicted.columns) if only_predictions else predicted.joined()
    printer = error if is_input(out) else console
    if is_input(out):
        sys.stdout.write(runs.table(frame.columns, frame.iter_rows()).decode())
    elif out.suffix in (".parquet", ".pq"):
        write_parquet(frame, out)
    else:
        write_atomically(out, runs.table(frame.columns, frame.iter_rows()), shared=True)
    # 3. What is said of them.
    names, scores = predicted.columns["user"], predicted.scores
    users = set(names) - {None}
    unknown = len(users & {name for name, known in zip(names, predicted.columns["known"],
                                                       strict=True) if not known})
    if as_json:
        scored = {} if scores is None else {
            "metric": scores.metric, "score": scores.mean, "scored_rows": scores.n_rows,
            "rows_of_the_fit": scores.seen,
            "score_of_users": {str(name): score for name, score in scores.users.items()}}
        print(json.dumps({"rows": len(names), "users": len(users), "unknown_users": unknown,
                          "out": str(out), **scored}))
        return
    if quiet:
        return
    where = "on standard output" if is_input(out) else f"in {out}"
    recipe = getattr(fitted, "recipe", None)
    say(_describe_predictions(len(names), len(users), unknown, where,
                              by_row=recipe is not None and recipe.user is None), to=printer)
    if scores is not None:
        say(scores, to=printer)


def _describe_predictions(n_rows: int, n_users: int, unknown: int, where: str, by_row: bool) -> str:
    """How many predictions there are and for whom, and which model unknown users get."""
    noun, model = ("point", "model of the nearest group") if by_row else ("user", "pooled model")
    lines = [f"{many(n_rows, 'prediction')} for {many(n_users, noun)} {where}."]
    if unknown:
        verb, subject = ("is", "it gets") if unknown == 1 else ("are", "they get")
        lines.append(f"{unknown:,} of these {noun}s {verb} not in the run: {subject} the {model}.")
    return "\n".join(lines)


@app.command("certify")
def run_certify(run: options.RunFolder, data: _Rows = None, threads: options.Threads = None,
                quiet: options.Quiet = False, as_json: options.Json = False) -> None:
    """Certify the models of a run again, from its table.

    RUN is the folder of a run of `coterie fit`, DATA its table (by default the file of the run).
    The problem is built again from the table, the run's settings and its weights; a lower bound on
    its optimum is computed independently of the values stored in the run.

    Example: coterie certify run data.csv
    """
    saved = runs.load_run(run)
    proof, claims = saved.certify(data), saved.info
    if as_json:
        print(json.dumps(json_ready({
            "certified": proof.certified, "gap": proof.relative_gap, "n_clusters": proof.n_clusters,
            "objective": proof.objective, "bound": proof.bound, "same_data": proof.same_data,
            "same_claims": proof.same_claims, "same_models": proof.same_models,
            "claimed_gap": claims["gap"]})))
    else:
        if proof.same_data is False:
            say("This file differs from the file of the run.", style="yellow")
        if not proof.same_claims:
            say("The groups differ from those in run.json and models.csv: run.json claims "
                f"{many(claims['n_clusters'], 'group')} at lam = {claims['lam']:g}.",
                style="yellow")
        if not proof.same_models:
            say("The models in models.csv are not those of these groups.", style="yellow")
        found = groups_of(proof.n_clusters, len(saved.names), "among")
        say(f"{found[0].upper()}{found[1:]} at lam = {saved.lam:g}: {proof}.")
        what = " for the released statistics" if "privacy" in claims else ""
        say(f"Certified: no other models are better{what} by more than the tolerance."
            if proof.certified else "Not certified to the tolerance of the run.")
    if not proof.holds:
        raise typer.Exit(1)


@app.command("report")
def run_report(run: _Run, out: _Page = None, title: _Title = "") -> None:
    """Write the report of a run again, with another title or to another file.

    RUN is the folder of a run.

    Example: coterie report run --title "Twelve hospitals" --out hospitals.html
    """
    page = runs.load_run(run).report(out, title=title)
    say(f"{page}: open it in a browser; it needs no network.")
