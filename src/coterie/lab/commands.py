"""`coterie audit`, `bench` and `reproduce`: attacks, methods compared, the paper."""

from __future__ import annotations

import json
import shlex
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from os import PathLike
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from coterie.base.errors import CoterieError, Interrupted, InvalidInput
from coterie.base.storage import write_atomically
from coterie.cli import base as options
from coterie.cli.base import Arg, Opt, console, grid, say
from coterie.data.users import Users
from coterie.data.validation import split_names
from coterie.federated.private.policy import Privacy, parse_clip
from coterie.fitting.prepare import prepare
from coterie.lab.attacks import auditing
from coterie.lab.attacks.simulation import loss_for
from coterie.lab.experiments import federations as lab
from coterie.lab.experiments import paper, paper_figures
from coterie.lab.experiments import tables as score
from coterie.lab.experiments.federations_data import BUNDLED, FILES, Benchmark, federations
from coterie.lab.experiments.paper_claims import Verdict, claims
from coterie.output.runs.load import read

audit = typer.Typer(add_completion=False)
bench = typer.Typer(no_args_is_help=True, add_completion=False, name="bench",
                    help="Compare methods on the same data.")
reproduce = typer.Typer(add_completion=False)

# Attacks

#: Questions whose answers hold Hessians, gradients, or sums over rows.
HESSIANS = ("expand", "local", "summary")
GRADIENTS = ("gradient", "prox", "train", "around", "pdmm")
SUMS = ("facts", "moments", "describe")

_Source = Annotated[Path, Arg(metavar="RUN|DATA", help="A table with one row per sample, or the "
                                                       "folder of a federated run.")]
_Data = Annotated[Path | None, Opt(help="The table of a run, on which the run is repeated.")]
_User = Annotated[str, Opt(help="Column with the owner of each row.")]
_Algorithm = Annotated[str, Opt(help="What is attacked, separated by commas: algorithms of "
                                     "`coterie federate`, fit, weights, or active (a server "
                                     "that asks at points of its choice). By default newton, "
                                     "splitting, pdmm, fit and weights; of a run, its own.")]
_Rows = Annotated[str, Opt(help="Rows per user that take part, separated by commas.")]
_Lam = Annotated[float, Opt(help="Penalty strength of algorithms at a given one.")]
_Epsilon = Annotated[float | None, Opt(help="Budget of a private fit: its releases are attacked "
                                            "too, with their noise and without.")]
_Delta = Annotated[float, Opt(help="The delta of the budget.")]
_Clip = Annotated[str, Opt(help="Bounds of columns, as for `coterie federate`; by default those of "
                                "the rows that take no part.")]
_MaxUsers = Annotated[int, Opt(help="Largest number of users that take part.", min=2)]
_Seed = Annotated[int, Opt(help="Seed of all random numbers.", min=0)]
_Out = Annotated[Path | None, Opt(help="File for the results as JSON.")]


@audit.command("audit")
def run_audit(
    source: _Source, data: _Data = None, user: _User = "", target: options.Target = "",
    features: options.Features = "", drop: options.Drop = "", separator: options.Separator = "",
    loss: options.LossName = "auto", ridge: options.Ridge = 1e-3, algorithm: _Algorithm = "",
    rows: _Rows = "1,5,10,20,50", lam: _Lam = 0.02, epsilon: _Epsilon = None,
    delta: _Delta = 1e-5, clip: _Clip = "", max_users: _MaxUsers = 60, seed: _Seed = 0,
    out: _Out = None, threads: options.Threads = None, quiet: options.Quiet = False,
    as_json: options.Json = False) -> None:
    """Attack what a server sees of a federation: rebuild rows, test membership, guess an attribute.

    DATA is a table: the federation is simulated in this process, with some rows of every user; the
    others are compared with them. RUN is the folder of a federated run, which is repeated on --data
    with its algorithm, loss and lam; without --data, what could be recovered is said by the kinds
    of messages.

    Example: coterie audit table.csv --user who --target y --algorithm newton,splitting --rows 5,20
    """
    privacy = None
    if source.is_dir():
        run = read_run(source)
        if data is None:
            sentences = describe_messages(run)
            _write_json({"structure": sentences}, out, printed=as_json, indent=1)
            if not as_json:
                say("\n".join(sentences))
            return
        privacy, loss, lam, ridge = (run[name] for name in ("privacy", "loss", "lam", "ridge"))
        user, target = run["user"] or user, run["target"] or target
        algorithm = algorithm or run["algorithm"]
    if epsilon is not None:
        privacy = Privacy(epsilon=epsilon, delta=delta, clip=parse_clip(clip))
    users, task = _read_users(source if data is None else data, user, target, features, drop,
                              separator)
    loss = "poisson" if loss == "auto" and task == "counts" else loss
    names = [name.strip() for name in algorithm.split(",") if name.strip()]
    with console.status("Attacking ...") as status:
        result = auditing.audit(
            users, loss_for(users, loss, ridge), algorithms=names or auditing.ALGORITHMS,
            rows=_numbers(rows), lam=lam, max_users=max_users, seed=seed, privacy=privacy,
            progress=None if as_json else lambda text: status.update(f"Attacking {text} ..."))
    _write_json(result.to_json(), out, printed=as_json)
    if not as_json:
        _print_result(result)
    if not result.holds:
        raise typer.Exit(1)


def read_run(folder: str | PathLike[str]) -> dict[str, Any]:
    """What run.json says of a federated run: its settings, the columns of its table, the length of
    a model, the kinds of questions that were answered, and the budget where there was one. The
    algorithm is "fit" where everything was chosen, and "release" where this was done privately.

    Raises
    ------
    InvalidInput : the folder is no run, or not of a federation.
    """
    info, _ = read(folder)
    settings: dict[str, Any] = info["settings"]
    if "n_rounds" not in info:
        raise InvalidInput(f"{folder} is a run of a table: nothing crossed in it",
                           remedy="Give the folder of a run of `coterie federate`")
    run = {"lam": float(info["lam"]), "user": str(settings.get("user", "")),
           "target": str(settings.get("target", "")), "dim": int(info["dim"]),
           "kinds": tuple(info["bytes_by_kind"]), "n_rounds": int(info["n_rounds"])}
    budget = info.get("privacy")
    if budget is not None:  # its loss is that of the released statistics
        privacy = Privacy(**{name: budget[name] for name in ("epsilon", "delta", "unit")})
        return {**run, "algorithm": "release", "loss": "auto", "ridge": 1e-3, "privacy": privacy}
    algorithm = "fit" if "kind" in info else str(settings.get("algorithm") or "newton")
    return {**run, "algorithm": algorithm, "loss": str(settings.get("loss", "auto")),
            "ridge": float(settings.get("ridge", 1e-3)), "privacy": None}


def describe_messages(run: dict[str, Any]) -> list[str]:
    """What can be recovered by the kinds of messages alone, in sentences."""
    hessians, gradients, sums = (", ".join(kind for kind in run["kinds"] if kind in group)
                                 for group in (HESSIANS, GRADIENTS, SUMS))
    dim, privacy = run["dim"], run["privacy"]
    said = [f"{run['n_rounds']} rounds of {run['algorithm']}, models of {dim} coordinates."]
    if privacy is not None:
        said.append(f"Users sent noisy releases: epsilon = {privacy.epsilon:g}, delta = "
                    f"{privacy.delta:g}, unit {privacy.unit}.")
    if hessians:
        said.append(f"Users sent Hessians ({hessians}): if at two or more points, all rows of a "
                    f"user with at most {dim} rows can be rebuilt exactly unless its loss is "
                    "squared, and rows of users with some more rows often.")
    if gradients:
        said.append(f"Users sent gradients ({gradients}): the row of a user with one row can be "
                    f"rebuilt; with fewer than {dim} rows, a row is told from others by the span "
                    "of the gradients.")
    if sums:
        said.append(f"Users sent sums over their rows ({sums}): one row, or with products two "
                    "rows, can be rebuilt, also if they are the held-out ones.")
    return [*said, "Give --data TABLE to repeat the run and attack it."]


def _write_json(document: dict[str, Any], out: Path | None, *, printed: bool,
                indent: int | None = None) -> None:
    if out is not None:
        write_atomically(out, json.dumps(document, indent=1, allow_nan=False).encode())
    if printed:
        print(json.dumps(document, indent=indent, allow_nan=False))


def _read_users(file: Path, user: str, target: str, features: str, drop: str,
                separator: str) -> tuple[Users, str]:
    """The rows of a table as numbers, and the task; two classes become -1 and 1."""
    if not user or not target:
        raise InvalidInput("an audit needs the owner of each row and what is predicted",
                           remedy="Give --user COLUMN and --target COLUMN")
    prepared = prepare(file, user=user, target=target, features=split_names(features) or None,
                       drop=split_names(drop), task="auto", separator=separator or None,
                       loss="auto", ridge=1e-3, standardize=True)
    users, recipe = prepared.given, prepared.recipe
    if recipe.task != "classification":
        return users, recipe.task
    if len(recipe.classes) != 2:
        raise InvalidInput(f"attacks are written for two classes, and {target!r} has "
                           f"{len(recipe.classes)}",
                           remedy="Name a target with two classes, or numbers")
    assert users.targets is not None
    return replace(users, targets=2.0 * users.targets - 1.0), recipe.task


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise InvalidInput(f"rows must be numbers separated by commas, got {text!r}",
                           remedy="Use 1,5,10") from None


def _print_result(result: auditing.Audit) -> None:
    headings = ("algorithm", "rows", "users", "Hessians", "exact", "of rows", "member", "attribute",
                "public")
    table = grid(f"What a server gets: {result.loss} loss, {result.n_features} features", headings,
                 right=headings[1:], fixed=headings)
    for one in result.findings:
        if one.note:
            table.add_row(one.algorithm, str(one.rows))
            say(f"{one.algorithm}, {one.rows} rows: {one.note}")
            continue
        areas = (f"{area:.2f}" if np.isfinite(area) else ""
                 for area in (one.membership, one.attribute, one.attribute_public))
        table.add_row(one.algorithm, str(one.rows), str(one.n_users), str(one.hessians),
                      f"{one.exact_users:.0%}", f"{one.exact_rows:.0%}", *areas)
    console.print(table)
    say("exact: users with a row rebuilt within one percent; of rows: the share of all rows. "
        "member: AUC of telling a user's row from another of the same user. attribute: AUC of "
        "guessing the first feature from the rest of the row, public: without the messages. 0.5 is "
        "guessing, 1 certainty. Other attacks may get more.")
    if np.isfinite(result.moved):
        say("One user that lies consistently moves the model of another by "
            f"{result.moved:.2g} at most.")
    if result.bound is not None and result.claimed is not None:
        refuted = "" if result.holds else " The claim is refuted."
        say(f"By telling releases apart, epsilon is at least {result.bound.epsilon:.2f} "
            f"(confidence {result.bound.confidence:.0%}); claimed: {result.claimed:g}, which "
            f"allows membership {result.allowed:.2f}.{refuted}")


# Methods compared


@bench.callback()
def about_bench() -> None:
    """Compare methods on the same data."""


_Folder = Annotated[Path | None, Opt(help="Folder with the files of the published sets.")]
_Sets = Annotated[str, Opt(help=f"Data sets, separated by commas: {', '.join((*FILES, *BUNDLED))}. "
                                "Default: all that are available.")]
_Methods = Annotated[str, Opt(help="Only these methods, by their names in the table, separated by "
                                   "commas.")]
_Splits = Annotated[int, Opt(help="Number of random splits.", min=1)]
_First = Annotated[int, Opt(help="Seed of the first split; for published splits, the number of the "
                                 "first.", min=0)]
_Small = Annotated[bool, Opt(help="One split of a few small sets.")]
_Tables = Annotated[Path, Opt(help="Folder for tables and figures; created if needed.")]


@bench.command("data")
def run_bench(data: _Folder = None, sets: _Sets = "", methods: _Methods = "", splits: _Splits = 5,
              first: _First = 200, quick: _Small = False, out: _Tables = Path("federations"),
              threads: options.Threads = None, quiet: options.Quiet = False) -> None:
    """Run all methods on real federations: same splits, same budget, scored per user on unseen
    rows.

    Example: coterie bench data --data files --sets landmine,school --splits 3 --out results
    """
    if data is not None and not data.is_dir():
        raise InvalidInput(f"{str(data)!r} is not a folder",
                           remedy="Give the folder with landmine.npz and the others")
    todo = federations(data, split_names(sets), quick)
    only = split_names(methods)
    known = dict.fromkeys(name for federation in todo for name, _ in lab.methods(federation))
    skipped = {name: text for federation in todo for name, text in lab.left_out(federation).items()}
    for name in only:
        if name not in known and name not in skipped:
            raise InvalidInput(f"unknown method {name!r}",
                               remedy=f"Choose from: {', '.join((*known, *skipped))}")
    for name, text in skipped.items():
        if not only or name in only:
            say(f"Left out: {text}")
    seeds = range(first, first + (1 if quick else splits))
    note = lab.origin(seeds, "coterie " + shlex.join(sys.argv[1:]))
    results: list[lab.Result] = []
    for federation in todo:
        finished, splits_of = len(results), seeds
        if federation.masks is not None:  # as many as were published, each once
            splits_of = seeds[:len(federation.masks)]
        interrupted = _run(federation, splits_of, len(seeds), only, results)
        if len(results) > finished:
            rows = lab.write(results, out, note)
            console.print(_compare([row for row in rows if row.federation == federation.name]))
            for concern in dict.fromkeys(f"{r.method}: {r.concern}" for r in results[finished:]
                                         if r.concern):
                say(concern)
        if interrupted:
            break
    if results:
        say(f"Tables and figures in {out}: table.csv, table.md, runs.csv, users.csv")
    if interrupted:
        console.print("Interrupted: finished splits are kept.")
        raise typer.Exit(130)


def _run(federation: Benchmark, seeds: range, n_splits: int, only: tuple[str, ...],
         results: list[lab.Result]) -> bool:
    """Add the results of one federation; whether it was interrupted."""
    with console.status(f"{federation.name} ...") as status:
        try:
            results += lab.run(
                federation, seeds, only=only, progress=lambda name, seed, method: status.update(
                    f"{name}, split {seed - seeds.start + 1} of {n_splits}: {method}"))
        except Interrupted as stop:
            results += stop.best
            return True
    return False


def _compare(rows: list[lab.Row]) -> Table:
    """The columns that fit a terminal; table.md and table.csv have all."""
    shown = ("method", "mean", "better than alone", "worse than alone", "against coterie",
             "p (Holm)", "models")
    table = grid(f"{rows[0].federation}: {rows[0].metric} per user, best mean first", shown,
                 right={*shown} - {"method", "against coterie"}, fixed=("method", "mean"))
    for row in rows:
        texts = dict(zip(lab.HEADINGS, lab.cells(row), strict=True))
        table.add_row(*(texts[name] for name in shown),
                      style="bold" if row.method == "coterie" else "")
    return table


_Names = Annotated[str, Opt(help="Tables, separated by commas. Default: all that can be loaded.")]
_Half = Annotated[str, Opt(help="tuning: tables for choosing constants; fresh: those that are only "
                                "scored; all.")]
_Contenders = Annotated[str, Opt(help="Methods, separated by commas, or none, to compare files "
                                      "only. Default: all that are installed.")]
_Draws = Annotated[int, Opt(help="Number of splits, with seeds 0, 1, ...", min=1)]
_Limit = Annotated[float, Opt(help="Seconds for one method on one split.", min=1.0)]
_Other = Annotated[Path | None, Opt(help="Folder src of another version of coterie, which is run "
                                         "instead of this one.", exists=True, file_okay=False)]
_Scores = Annotated[Path | None, Opt(help="CSV file to which all scores are added.")]
_Known = Annotated[list[Path] | None, Opt(help="CSV file with scores of other methods; "
                                               "may be repeated.", exists=True)]
_Against = Annotated[Path | None, Opt(help="CSV file with scores of another version of coterie.",
                                      exists=True)]
_Single = Annotated[int, Opt(help="Threads of each method.", min=1, callback=options.limit_threads)]


@bench.command("tables")
def run_tables(tables: _Names = "", half: _Half = "all", methods: _Contenders = "",
               seeds: _Draws = 2, limit: _Limit = 60.0, out: _Scores = None, known: _Known = None,
               against: _Against = None, source: _Other = None, threads: _Single = 1,
               quiet: options.Quiet = False) -> None:
    """Score coterie and other software on public tables with a user column: half of each user's
    rows for training, the mean over users of the RMSE or the log loss on the other half.

    Example: coterie bench tables --half fresh --out new.csv --known others.csv --against old.csv
    """
    if half not in ("tuning", "fresh", "all"):
        raise InvalidInput(f"unknown half {half!r}", remedy="Choose from: tuning, fresh, all")
    names = _known_names("table", split_names(tables), {
        name: score.missing(table.package) for name, table in score.TABLES.items()
        if half in ("all", score.half(name))})
    wanted = [] if methods == "none" else _known_names("method", split_names(methods), {
        name: kind.missing() if kind else None for name, kind in score.METHODS.items()})
    found: list[score.Score] = []
    jobs = list(product(names, range(seeds), wanted))
    with console.status("Scoring ...") as status, nullcontext() if out is None else out.open(
            "a", newline="", encoding="utf-8") as file:
        for done, (name, seed, method) in enumerate(jobs):
            status.update(f"{done} of {len(jobs)}: {name}, seed {seed}, {method}")
            found.append(score.run_one(name, method, seed, limit, source))
            if file is not None:
                score.write_scores(file, found[-1:])
    for path in known or ():
        found += [one for one in score.read_scores(path) if one.table in names and one.seed < seeds]
    before = score.read_scores(against) if against is not None else []
    say("\n".join(score.describe(score.compare(found, before), found)))


def _known_names(what: str, chosen: tuple[str, ...], reasons: dict[str, CoterieError | None],
                 ) -> list[str]:
    """Those chosen, or all, that are installed; the others are named with the reason."""
    for name in chosen:
        if name not in reasons:
            raise InvalidInput(f"unknown {what} {name!r}",
                               remedy=f"Choose from: {', '.join(reasons)}")
    names = [name for name in reasons if not chosen or name in chosen]
    for text in dict.fromkeys(str(reasons[name]) for name in names if reasons[name] is not None):
        say(f"Left out: {text}")
    return [name for name in names if reasons[name] is None]


# The paper

COLOURS = {Verdict.YES: "green", Verdict.PARTLY: "yellow", Verdict.NO: "red"}
_Figures = Annotated[Path, Opt(help="Folder for figures, tables and claims; created if needed.")]
_Quick = Annotated[bool, Opt(help="Fewer seeds, lambdas and rounds: within two minutes.")]
_Seeds = Annotated[int, Opt(help="Seeds to average over; 0 takes 10, or 3 with --quick.", min=0)]


@reproduce.command("reproduce")
def run_reproduction(out: _Figures = Path("reproduction"), quick: _Quick = False, seeds: _Seeds = 0,
                     threads: options.Threads = None, quiet: options.Quiet = False) -> None:
    """Reproduce every figure and claim of the paper and compare them with it.

    Example: coterie reproduce --quick --out reproduction
    """
    paper_figures.check()
    began = time.monotonic()
    settings = (paper.ReproductionSettings.quick(seeds or 3) if quick
                else paper.ReproductionSettings(seeds=seeds or 10))
    out.mkdir(parents=True, exist_ok=True)
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(),
                  console=console, transient=True) as bar:
        task = bar.add_task("Starting", total=None)
        results = paper.reproduce(settings, lambda text, done, total: bar.update(
            task, description=text, completed=done, total=total))
        checked = claims(results)
        bar.update(task, description="Drawing")
        files = paper_figures.write(out, results, checked)
    table = grid("The paper and its reproduction", ("", "exp.", "claim", "paper", "here, seed 0",
                                                    "over seeds", "verdict"), show_lines=True)
    for claim in checked:
        table.add_row(str(claim.number), *claim[1:-1],
                      f"[{COLOURS[claim.verdict]}]{claim.verdict.value}[/]")
    console.print(table)
    counts = [sum(claim.verdict is verdict for claim in checked) for verdict in Verdict]
    console.print(f"{counts[0]} of {len(checked)} claims are reproduced, {counts[1]} partly, "
                  f"{counts[2]} not. Seed 0 decides; averages are over {settings.seeds} "
                  f"seed{'s' * (settings.seeds > 1)}.", soft_wrap=True)
    console.print(f"{len(files)} files in {out}, in {time.monotonic() - began:.0f} s.",
                  soft_wrap=True)
