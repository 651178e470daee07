"""`coterie fit` and `coterie path`: from a table to groups, models and a page to look at."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from coterie import report, runs
from coterie.cli.base import app, console, error, plain, stops
from coterie.data.encoding import TASKS, Recipe, fingerprint, read_table
from coterie.errors import InvalidInput, NotConverged
from coterie.fitting import Fit, Settings, fit
from coterie.fitting.units import FITTING, Units
from coterie.graph.weights import KINDS
from coterie.losses import Multinomial
from coterie.solution import Status
from coterie.storage import pack, unpack, write_atomically

_LOSSES = ", ".join(dict.fromkeys(name for names in FITTING.values() for name in names))
Data = Annotated[Path, typer.Argument(help="A CSV or Parquet file with a row a sample.")]
Separator = Annotated[str, typer.Option(help="Between the cells of a CSV file, where it cannot be told.")]
User = Annotated[str, typer.Option(help="The column that names the owner of a row; without it every row is a user.")]
Target = Annotated[str, typer.Option(help="The column to predict; without it users are clustered.")]
Features = Annotated[str, typer.Option(help="Columns to learn from, with commas between; all others by default.")]
Drop = Annotated[str, typer.Option(help="Columns to leave out, with commas between.")]
Kind = Annotated[str, typer.Option(help=f"auto, or one of: {', '.join(TASKS)}.")]
LossName = Annotated[str, typer.Option(help=f"auto, or one that fits the task: {_LOSSES}.")]
Lam = Annotated[str, typer.Option(help="auto: the groups found; score: least loss on rows held out; or a number.")]
Weights = Annotated[str, typer.Option(help=f"One of: {', '.join(KINDS)}. unit is the paper's: all pairs alike.")]
Ridge = Annotated[float, typer.Option(help="On all coordinates of a model.")]
Lams = Annotated[int, typer.Option(help="Points of the path.", min=2)]
Most = Annotated[int, typer.Option(help="Groups at most; 0 for as many as there are.", min=0)]
Tol = Annotated[float, typer.Option(help="Certified relative gap to reach.")]
Holdout = Annotated[float, typer.Option(help="Share of every user's rows that judge; 0 for none.")]
Standardize = Annotated[bool, typer.Option(help="Whether features are standardised.")]
Seed = Annotated[int, typer.Option(help="Seed of the rows held out.", min=0)]
Out = Annotated[Path, typer.Option(help="Folder for the results; made if needed.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with a run that was broken off in the folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


@app.command("fit")
def run_fit(data: Data, user: User = "", target: Target = "", features: Features = "", drop: Drop = "",
            separator: Separator = "", task: Kind = "auto", loss: LossName = "auto", lam: Lam = "auto",
            weights: Weights = "auto", ridge: Ridge = 1e-3, n_lams: Lams = 24, most: Most = 0, tol: Tol = 1e-6,
            holdout: Holdout = 0.2, standardize: Standardize = True, seed: Seed = 0,
            out: Out = Path("run"), resume: Resume = False, as_json: Json = False) -> None:
    """Groups and models from a table: who goes with whom, a model for everyone, a certificate, and a page to look at.

    DATA is a CSV or Parquet file with a row a sample.
    Writes run.json, models.csv and .parquet, clusters.csv, path.csv and .parquet, and report.html into the folder.

    Example: coterie fit data.csv --user subject --target y

    Example: coterie fit points.csv --drop id --out clusters
    """
    settings = Settings(loss=loss, lam=_lam(lam), weights=weights, ridge=ridge, n_lams=n_lams, most=most or None,
                        tol=tol, holdout=holdout, standardize=standardize, seed=seed)
    _run(data, user, target, features, drop, separator, task, settings, out, resume, as_json)


@app.command("path")
def run_path(
    source: Annotated[Path, typer.Argument(help="A table, or the folder of a run to look at.")],
    user: User = "", target: Target = "", features: Features = "", drop: Drop = "", separator: Separator = "",
    task: Kind = "auto", loss: LossName = "auto", weights: Weights = "auto", ridge: Ridge = 1e-3, n_lams: Lams = 24,
    tol: Tol = 1e-6, standardize: Standardize = True, out: Out = Path("run"), resume: Resume = False,
    as_json: Json = False,
) -> None:
    """The whole path over lam, from everyone alone to everyone together.

    SOURCE is a table, whose path is solved for, or the folder of a run, whose path is shown.

    Example: coterie path data.csv --user subject --target y --weights unit --out path

    Example: coterie path run
    """
    if not source.is_dir():
        lam: Any = "auto" if weights == "auto" else 0.0
        _run(source, user, target, features, drop, separator, task, Settings(
            loss=loss, lam=lam, weights=weights, ridge=ridge, n_lams=n_lams, tol=tol, holdout=0.0,
            standardize=standardize), out, resume, as_json, quiet=True)
        source = out
    told, _ = runs.read(source)
    rows = _path_rows(source)
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = Table(title=f"{told['n_users']} users along lam")
    for heading in rows[0]:
        table.add_column(heading, justify="right", no_wrap=heading in ("lam", "gap"))
    for row in rows:
        mark = "bold" if row["lam"] == told["lam"] else ""
        table.add_row(*(_short(value) for value in row.values()), style=mark)
    console.print(table)
    console.print(f"Everything in {source}; open {source / 'report.html'} to look at it.", soft_wrap=True, markup=False)


def _run(data: Path, user: str, target: str, features: str, drop: str, separator: str, task: str, settings: Settings,
         out: Path, resume: bool, as_json: bool, quiet: bool = False) -> None:
    if target and not user:
        raise InvalidInput("the column that names the owner of a row is not given", remedy="Give --user COLUMN")
    free(out)
    if data.resolve().parent == out.resolve():
        raise InvalidInput(f"{data} is in the folder for the results", remedy="Name another folder with --out")
    frame = read_table(data, separator or None)
    recipe = Recipe.learn(frame, user=user or None, target=target or None, features=_names(features),
                          drop=_names(drop) or (), task=task)
    users = recipe.encode(frame)
    settings = Settings(**{**asdict(settings), "task": recipe.task, "n_classes": len(recipe.classes)})
    asked = {"data": str(data), "user": user, "target": target, "features": features, "drop": drop,
             "separator": separator, **asdict(settings)}
    stamp = fingerprint(data)
    store = Store(out / "progress", {**asked, "fingerprint": stamp}, resume)
    with _bar(as_json) as tell:
        try:
            found = fit(users, settings, progress=tell, store=store)
            if stops:
                raise KeyboardInterrupt
        except (KeyboardInterrupt, NotConverged):
            if not stops:
                raise
            error.print(f"coterie: interrupted. What is done is kept in {out}; the same command with --resume goes on.",
                        soft_wrap=True, highlight=False, markup=False)
            raise typer.Exit(130) from None
        except InvalidInput:  # nothing to go on with
            shutil.rmtree(store.folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                out.rmdir()
            raise
    write(found, out, asked, recipe, stamp)
    shutil.rmtree(store.folder, ignore_errors=True)
    told, _ = runs.read(out)
    if as_json and not quiet:
        print(json.dumps(told, indent=1))
    elif not quiet:
        show(found, recipe, out)
    if found.solution.status is not Status.CONVERGED:
        raise typer.Exit(1)


def write(found: Fit, out: Path, asked: dict[str, Any], recipe: Recipe, stamp: str) -> None:
    """The run folder; see `coterie.runs`."""
    classes = list(recipe.classes)
    coefficients, units = found.coefficients, found.units
    state = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in units.state().items()}
    scores = found.scores
    summary = None if scores is None else {
        "metric": scores.metric, "rows": scores.n_rows, **{name: _mean(getattr(scores, name)) for name in (
            "here", "alone", "together")}}
    points = found.path.solutions
    path: dict[str, list[Any]] = {
        "lam": [s.lam for s in points], "n_clusters": [s.n_clusters for s in points],
        "objective": [s.objective for s in points],
        "bound": [s.certificate.bound if np.isfinite(s.certificate.bound) else None for s in points],
        "gap": [s.gap if np.isfinite(s.gap) else None for s in points], "status": [s.status.name for s in points]}
    if scores is not None and len(scores.points) == len(points):
        path[f"held out {scores.metric}"] = [_mean(row) for row in scores.points]
    document = report.gather(found, title=f"{Path(asked['data']).name}: {_groups(found)}", classes=classes or None,
                             command=_command(asked),
                             settings=asked, notes=recipe.notes)
    # run.json comes last: a folder that has it is whole.
    (out / "run.json").unlink(missing_ok=True)
    write_atomically(out / "report.json", json.dumps(document, allow_nan=False).encode())
    report.write(document, out / "report.html")
    runs.write(out, found.solution, asked, path=path,
               shown=(coefficients.reshape(len(coefficients), -1), columns_of(units, classes)),
               more={"seed": asked["seed"], "fingerprint": stamp, "task": recipe.task, "why": found.why,
                     "scores": summary, "notes": list(recipe.notes), "recipe": recipe.to_json(), "units": state,
                     "together": found.together.tolist(), "libraries": versions()})


def _command(asked: dict[str, Any]) -> str:
    """What to type for the same run; the task is said, since it may have been guessed from this table."""
    usual = {**asdict(Settings()), "task": None, "n_classes": asked["n_classes"], "standardize": asked["standardize"],
             **dict.fromkeys(("user", "target", "features", "drop", "separator"), ""), "data": asked["data"]}
    words = [word for name, value in asked.items() if value != usual[name]
             for word in (f"--{name.replace('_', '-')}", str(value))]
    return shlex.join(["coterie", "fit", asked["data"], *words, *["--no-standardize"] * (not asked["standardize"])])


def show(found: Fit, recipe: Recipe, out: Path) -> None:
    users = found.solution.problem.users
    for note in recipe.notes:
        console.print(f"[dim]{plain(note)}[/]", soft_wrap=True, highlight=False)
    table = Table(title=f"{_groups(found)} at lam = {found.solution.lam:.4g}")
    for heading in ("group", "users", "rows", "among them"):
        table.add_column(heading, justify="left" if heading == "among them" else "right")
    sizes = np.bincount(found.labels)
    for k in np.argsort(-sizes, kind="stable")[:20]:
        members = np.flatnonzero(found.labels == k)
        names = ", ".join(str(users.names[i]) for i in members[:4]) + (", ..." if len(members) > 4 else "")
        table.add_row(str(k), str(len(members)), str(int(users.data.counts[members].sum())), plain(names))
    console.print(table)
    if len(sizes) > 20:
        console.print(f"and {len(sizes) - 20} more groups in {out / 'clusters.csv'}", soft_wrap=True, markup=False)
    console.print(f"Why            {found.why}", soft_wrap=True, highlight=False, markup=False)
    if found.scores is not None:
        console.print(f"Held out       {found.scores}", soft_wrap=True, highlight=False, markup=False)
        for line in _advice(found):
            console.print(line, soft_wrap=True, highlight=False, markup=False)
    gap = f"{found.gap:.1e} (relative)" if np.isfinite(found.gap) else "none"
    console.print(f"Certified gap  {gap}", highlight=False)
    console.print(found.solution.status.value, soft_wrap=True)
    console.print(f"Results        {out}; open {out / 'report.html'} to look at them", soft_wrap=True, markup=False)


def _advice(found: Fit) -> list[str]:
    """What to do where a user's own models are clearly better, by paired standard errors."""
    scores = found.scores
    assert scores is not None
    gain = (scores.alone - scores.here) * (1.0 if scores.larger else -1.0)
    gain = gain[np.isfinite(gain)]
    if found.settings.lam == "auto" and gain.size > 1 and gain.mean() > 2 * gain.std() / np.sqrt(gain.size):
        return ["               Own models do better here; --lam score takes what does best."]
    return []


def _mean(values: Any) -> float | None:
    """Over users with rows held out; None where it is beyond all bounds."""
    mean = float(np.nanmean(values))
    return mean if np.isfinite(mean) else None


def _groups(found: Fit) -> str:
    k, n = found.n_clusters, found.solution.problem.n_users
    return f"{k} group{'s' * (k != 1)} among {n} user{'s' * (n != 1)}"


def columns_of(units: Units, classes: Sequence[str]) -> list[str]:
    """What each number of a model in models.csv is."""
    names = units.coefficient_names
    many = isinstance(units.loss, Multinomial)
    return runs.distinct([f"{name} [{c}]" for name in names for c in classes] if many else names, runs.TAKEN)


def versions() -> dict[str, str]:
    """Of the libraries that numbers depend on."""
    from importlib.metadata import version

    return {name: version(name) for name in ("numpy", "scipy", "numba", "scikit-learn", "polars")}


def free(out: Path) -> None:
    """Refuse a folder that holds anything but a run."""
    if out.exists() and not out.is_dir():
        raise InvalidInput(f"{out} is a file", remedy="Name a folder with --out")
    progress = list((out / "progress").iterdir()) if (out / "progress").is_dir() else None
    strange = progress is not None and not all(".coterie" in file.suffixes for file in progress)
    if out.is_dir() and (strange or (any(out.iterdir()) and progress is None and not _is_run(out / "run.json"))):
        raise InvalidInput(f"{out} holds other files", remedy="Name an empty or a new folder with --out")


def _is_run(file: Path) -> bool:
    try:
        return "coterie" in json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


class Store(MutableMapping[str, Any]):
    """Finished parts of a run as files, each written in one step."""

    def __init__(self, folder: Path, asked: dict[str, Any], resume: bool) -> None:
        self.folder, self.asked = folder, json.dumps(asked, sort_keys=True, default=str)
        if resume and "asked" in self and self["asked"] != self.asked:
            raise InvalidInput(f"{folder.parent} holds a run of other data or settings",
                               remedy="Give the same ones, or start anew without --resume")
        if resume and "asked" not in self:
            raise InvalidInput(f"there is no run to go on with in {folder.parent}", remedy="Leave out --resume")
        if not resume:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        self["asked"] = self.asked

    def _file(self, key: str) -> Path:
        return self.folder / f"{key.replace(': ', '-').replace(' ', '-')}.coterie"

    def __getitem__(self, key: str) -> Any:
        if not self._file(key).exists():
            raise KeyError(key)
        return unpack(self._file(key).read_bytes(), str(self._file(key)))["value"]

    def __setitem__(self, key: str, value: Any) -> None:
        if stops:  # a solver has taken the interrupt for its own and answered with less than its best
            raise KeyboardInterrupt
        write_atomically(self._file(key), pack({"value": value}))

    def __delitem__(self, key: str) -> None:
        self._file(key).unlink()

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


@contextlib.contextmanager
def _bar(silent: bool) -> Iterator[Any]:
    """A line for each thing that is being done."""
    if silent or not console.is_terminal:
        yield None
        return
    with Progress(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[told]}"),
                  TimeElapsedColumn(), console=console, transient=True) as progress:
        lines: dict[str, Any] = {}

        def tell(what: str, done: int, total: int, told: str) -> None:
            if what not in lines:
                lines[what] = progress.add_task(what, total=None, told="")
            progress.update(lines[what], completed=done, total=total if total > 1 else None, told=told)

        yield tell


def _lam(text: str) -> Any:
    if text in ("auto", "score"):
        return text
    try:
        return float(text)
    except ValueError:
        raise InvalidInput(f"lam must be a number, auto or score, got {text!r}", remedy="Use --lam auto") from None


def _names(text: str) -> list[str] | None:
    return [name.strip() for name in text.split(",") if name.strip()] or None


def _path_rows(folder: Path) -> list[dict[str, Any]]:
    """path.csv: numbers where there are any, None for nothing."""
    import csv

    def value(cell: str) -> Any:
        for kind in (int, float):
            with contextlib.suppress(ValueError):
                return kind(cell)
        return cell or None

    if not (folder / "path.csv").exists():
        raise InvalidInput(f"{folder} holds no path", remedy="Give the folder of `coterie fit` or `coterie path`")
    with (folder / "path.csv").open(newline="", encoding="utf-8") as file:
        return [{name: value(cell) for name, cell in row.items()} for row in csv.DictReader(file)]


def _short(value: Any) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:.5g}" if value > 1e-5 or not value else f"{value:.0e}"


