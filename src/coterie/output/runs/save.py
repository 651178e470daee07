"""`save_run`: a result as a run folder.

    run.json         settings, versions, status, gap, number of groups, and of a federated run
                     rounds and bytes
    models.csv       one line per user: its group, and its model of the kind that was chosen, which
                     predicts for it alone or as a part of an average
    clusters.csv     one line per group: number of users, and their model or the centre of their
                     models
    path.csv         one line per lam of the path: groups, objective, bound, gap, score on held-out
                     rows
    ledger.csv       the messages of a federated run: by round, kind, direction and field
    solution.coterie models, duals and graph
    average.coterie  the parts of an average that predicts, and what intervals need
    released.coterie the released statistics of a private run, which its certificate is about
    report.json      what report.html shows

Models and the path are also written as Parquet where polars is installed. Every file is written
atomically, and run.json last: a folder that has it is complete.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import platform
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coterie.base.errors import InvalidInput, MissingExtra
from coterie.base.labels import many
from coterie.base.storage import LOCK, json_ready, pack, safe_cell, write_atomically
from coterie.base.types import Array
from coterie.data.frames import distinct, write_parquet
from coterie.data.moments import Condensed
from coterie.fitting.result import Fit, TableSource
from coterie.fitting.scores import Scores
from coterie.fitting.settings import Settings
from coterie.fitting.units import Units
from coterie.output import report
from coterie.output.report.headline import noun_of
from coterie.problem.account import Account
from coterie.problem.problem import Problem
from coterie.problem.solution import Solution

# Columns of models.csv and clusters.csv that are no coefficients.
RESERVED = ("user", "cluster", "users")
#: What an unfinished federated run leaves in its folder.
UNFINISHED = {"checkpoint", "cluster", "state", "rounds.jsonl", "error.txt"}
RELEASED, AVERAGE = "released.coterie", "average.coterie"
_OPTIONAL = (RELEASED, AVERAGE, "ledger.csv", "path.csv", "path.parquet", "models.parquet",
             "report.json", "report.html")


def save_run(result: Fit | Solution, folder: str | PathLike[str], *,
             settings: Mapping[str, Any] | None = None, title: str = "",
             overwrite: bool = False) -> Path:
    """Write a result as a run folder: files that other programs read, a report, and all that
    `load_run` needs.

    Parameters
    ----------
    result : a `Fit` or a `Solution`, also of a federation.
    folder : created if needed.
    settings : what the user asked for, for run.json; a fit brings its own.
    title : of the report; if omitted, it gives the number of groups.
    overwrite : whether a finished run in the folder may be replaced.

    Returns
    -------
    The folder.

    Raises
    ------
    InvalidInput : the folder holds a finished run or other files.

    Example
    -------
    >>> import coterie as ct
    >>> users = ct.Users.from_arrays([[0.0], [0.1], [5.0]])
    >>> folder = ct.save_run(ct.solve(ct.Problem(users, ct.SquaredDistance(), lam=0.1)), "points")
    >>> ct.load_run(folder).n_clusters
    2
    """
    if not isinstance(result, (Fit, Solution)):
        raise InvalidInput(f"expected a Fit or a Solution, got {type(result).__name__}",
                           remedy="Give what fit_table, solve or federate returned")
    folder = check_free(folder, overwrite=overwrite)
    write_run(result, folder, settings=settings, title=title)
    return folder


def write_run(result: Fit | Solution, folder: Path, *, settings: Mapping[str, Any]
              | None = None, title: str = "", document: dict[str, Any] | None = None) -> None:
    """Write the files of a run, also if the folder has files; `document` is what the report shows,
    if it is known.
    """
    asked = (dict(settings) if settings is not None else result.asked()
             if isinstance(result, Fit) else {})
    document = document or document_of(result, settings=asked, title=title)
    clear(folder)
    write_atomically(folder / "report.json", json.dumps(document, allow_nan=False).encode(),
                     shared=True)
    report.write(document, folder / "report.html")
    if not isinstance(result, Fit):
        write(folder, result, asked)
        return
    classes = () if result.recipe is None else result.recipe.classes
    coefficients, centres = result.coefficients, result.units.coefficients(result.centres)
    if result.average is not None and result.average.parts:
        write_atomically(folder / AVERAGE, pack(result.average.state()), shared=True)
    shown = Shown(coefficients.reshape(len(coefficients), -1), centres.reshape(len(centres), -1),
                  model_columns(result.units, classes), result.models, result.centres)
    write(folder, result.solution, asked, path=_path_columns(result),
          more={"headline": document["headline"], **_describe_fit(result)}, shown=shown,
          account=result.account)
    if result.account is not None and result.privacy is not None:
        write_released(result.solution.problem, folder)


def document_of(result: Fit | Solution, *, settings: Mapping[str, Any] | None = None,
                title: str = "") -> dict[str, Any]:
    """What the report of a result shows."""
    if not isinstance(result, Fit):
        return report.gather(result, title=title or None, settings=settings or None)
    recipe, table = result.recipe, result.table
    if not title and table is not None and table.data and not table.user:
        title = f"{Path(table.data).name}: {count_groups(result)}"
    name = "federate" if hasattr(result, "ledger") else "fit"
    return report.gather(
        result, title=title or None, classes=(recipe.classes or None) if recipe else None,
        command=None if table is None or not table.data else command_of(
            result.settings, table, name, getattr(result, "privacy", None)),
        settings=result.asked() if settings is None else settings,
        notes=recipe.notes if recipe else ())


def save_report(fit: Fit, path: str | PathLike[str], *, title: str = "") -> Path:
    """Write the report of a fit to a file."""
    return report.write(document_of(fit, title=title), path)


def command_of(settings: Settings, table: TableSource, command: str = "fit",
               privacy: Any = None) -> str:
    """The command for the same run; the task is always given, since it may have been inferred from
    this table.
    """
    usual = {**asdict(Settings()), "task": None, "n_classes": settings.n_classes,
             "standardize": settings.standardize,
             **asdict(TableSource(data=table.data, fingerprint=table.fingerprint))}
    names = {"holdout": "held-out"} if command == "federate" else {}
    promise = [] if privacy is None else ["--epsilon", f"{privacy.epsilon:g}", "--delta",
                                          f"{privacy.delta:g}", "--clip", privacy.clip_text,
                                          "--unit", privacy.unit]
    words = [word for name, value in {**asdict(table), **asdict(settings)}.items()
             if value != usual[name]
             for word in (f"--{names.get(name, name.replace('_', '-'))}", str(value))]
    scaled = [] if settings.standardize else ["--no-standardize"]
    return shlex.join(["coterie", command, table.data, *words, *promise, *scaled])


def count_groups(result: Fit) -> str:
    """For example "2 groups among 30 users", or what users have instead of groups."""
    k, n, noun = result.n_clusters, len(result.names), noun_of(result)
    if result.kind == "personal":
        return f"personal models around one centre for {many(n, noun)}"
    if n == 1:
        return f"one {noun}"
    if k == 1:
        what = "one group of" if result.settings.task == "clustering" else "one model for"
        return f"{what} {many(n, noun)}"
    groups = "no groups" if k == n else f"{k} groups"
    personal = ", with personal models" * (k < n and result.kind == "personal in groups")
    return f"{groups} among {many(n, noun)}{personal}"


def _describe_fit(fit: Fit) -> dict[str, Any]:
    """What run.json says of a fit in addition to its solution."""
    recipe, table = fit.recipe, fit.table
    facts = {"seed": fit.settings.seed, "fingerprint": table.fingerprint if table else "",
             "task": fit.settings.task, "kind": fit.kind, "why": fit.why, "compared": fit.compared,
             "compared_errors": fit.compared_errors, "scores": _summarise_scores(fit.scores),
             "warnings": list(fit.warnings)}
    if fit.stability is not None:
        facts["stability"] = json_ready({name: getattr(fit.stability, name)
                                         for name in ("index", "searched", "stays")})
    if fit.average is not None and fit.average.parts:
        average = fit.average
        facts["average"] = {
            "weights": average.weights, "gain": json_ready(average.gain),
            "gain_error": json_ready(average.error),
            "relative_gradients": {part.name: part.gradient for part in average.parts}}
    if fit.account is not None and fit.privacy is not None:
        facts["privacy"] = {**fit.statement._asdict(), "sentence": str(fit.statement)}
    if recipe is not None:
        facts |= {"notes": list(recipe.notes), "recipe": recipe.to_json()}
    if fit.seconds:
        facts |= {"solve_seconds": round(fit.solution.seconds, 3), "seconds": round(fit.seconds, 3)}
    return {**facts, "units": json_ready(fit.units.state()), "pooled": fit.together.tolist(),
            "libraries": _list_libraries()}


def _summarise_scores(scores: Scores | None) -> dict[str, Any] | None:
    return None if scores is None else {
        "metric": scores.metric, "rows": scores.n_rows, "fit": _mean(scores.fitted),
        "own": _mean(scores.alone), "pooled": _mean(scores.together),
        "gain": json_ready(scores.gain[0]), "gain_error": json_ready(scores.gain[1]),
        "worse": int(scores.worse.sum()), "sentence": str(scores)}


def _path_columns(fit: Fit) -> dict[str, list[Any]]:
    """The columns of path.csv."""
    points, scores = fit.path.solutions, fit.scores
    columns: dict[str, list[Any]] = {
        "lam": [s.lam for s in points], "n_clusters": [s.n_clusters for s in points],
        "objective": [s.objective for s in points],
        "bound": json_ready([s.certificate.bound for s in points]),
        "gap": json_ready([s.gap for s in points]), "status": [s.status.name for s in points]}
    if scores is not None and len(scores.points) == len(points):
        columns[f"held out {scores.metric}"] = [_mean(row) for row in scores.points]
    return columns


def _mean(values: Array) -> float | None:
    """Over users with held-out rows; None where it is not finite."""
    mean: float | None = json_ready(float(np.nanmean(values)))
    return mean


def _list_libraries() -> dict[str, str]:
    """The versions of the libraries that the numbers depend on."""
    versions = {}
    for name in ("numpy", "scipy", "numba", "scikit-learn", "polars"):
        with contextlib.suppress(PackageNotFoundError):  # polars is an extra
            versions[name] = version(name)
    return versions


# ---- the files

class Shown(NamedTuple):
    """The models that predict."""

    models: Array  # (n_users, columns) in the units given
    centres: Array  # (n_groups, columns) of the groups
    columns: list[str]
    # (n_users, dim) the models in the solver's units; None: those of the solution.
    solver: Array | None = None
    solver_centres: Array | None = None  # (n_groups, dim) the centres in the solver's units


def _loss_parts(problem: Problem) -> dict[str, Any]:
    """What the loss of a problem has over that of a user: the rows that count as one user; of
    personal models their covariance around centres, the scale of each user's price (None: one over
    its rows), and the median over users of the variance of their noise (None: 1 for all).
    """
    parts: dict[str, Any] = dict.fromkeys(("unit", "covariance", "scale", "noise"))
    loss, parts["unit"] = problem.loss.stated, problem.loss.rows_per_user
    if loss.covariance is not None:
        parts["covariance"] = np.asarray(loss.covariance)
    if loss.scales is not None:
        sizes, scale = problem.users.sizes, loss.scales
        # What every row counts is in the scale.
        noises = scale * sizes if parts["unit"] is None else scale * np.asarray(parts["unit"])
        parts |= {"scale": scale, "noise": float(np.median(noises))}
    return parts


def write(folder: str | os.PathLike[str], solution: Solution, settings: Mapping[str, Any], *,
          shown: Shown | None = None, path: Mapping[str, list[Any]] | None = None,
          more: Mapping[str, Any] | None = None, account: Account | None = None) -> Path:
    """Write a solution as a run folder without a report; `coterie.save_run` writes the report too.

    Parameters
    ----------
    folder : created if needed.
    solution : with its problem.
    settings : what the user asked for.
    shown : the models that predict, in the units given; if omitted, those of the solution as they
        are.
    path : columns of path.csv.
    more : further entries of run.json.
    account : of a federation; if omitted, that of the solution, if it has one.

    Returns
    -------
    The folder.
    """
    # 1. Tables of users, of groups, and of the path.
    folder, account = Path(folder), account or solution.account
    problem, labels = solution.problem, solution.labels
    first = np.unique(labels, return_index=True)[1]
    if shown is None:
        shown = Shown(solution.models, solution.models[first], problem.coefficient_names)
    columns = distinct(shown.columns, RESERVED)
    users = {"user": list(problem.users.names), "cluster": labels.tolist(),
             **{name: shown.models[:, k].tolist() for k, name in enumerate(columns)}}
    clusters = {"cluster": labels[first].tolist(), "users": np.bincount(labels).tolist(),
                **{name: shown.centres[:, k].tolist() for k, name in enumerate(columns)}}
    tables = {"models": users, "clusters": clusters} | (
        {} if path is None else {"path": dict(path)})
    for name, rows in tables.items():
        write_atomically(folder / f"{name}.csv",
                         table(list(rows), zip(*rows.values(), strict=True)), shared=True)
    with contextlib.suppress(MissingExtra):
        for name in tables.keys() - {"clusters"}:
            write_parquet(tables[name], folder / f"{name}.parquet")
    # 2. The messages of a federation.
    if account is not None:
        header = ["round", "kind", "direction", "field", "messages", "numbers", "bytes"]
        write_atomically(folder / "ledger.csv", table(header, account.ledger.entries), shared=True)
    # 3. What `load_run` needs.
    names = [name if isinstance(name, (str, int, float)) else str(name)
             for name in problem.users.names]
    write_atomically(folder / "solution.coterie", pack(
        {"models": solution.models, "duals": solution.duals, "names": names,
         "lam": solution.lam, "weights": problem.graph.weights, "pairs": problem.graph.pairs,
         "features": list(problem.users.feature_names), "own": shown.solver,
         "centres": shown.solver_centres, **_loss_parts(problem)}), shared=True)
    # 4. run.json last: a folder that has it is complete.
    info = {**_describe_solution(solution), **_describe_federation(account),
            "settings": dict(settings), **(more or {})}
    write_atomically(folder / "run.json", json.dumps(info, indent=1, ensure_ascii=False,
                                                     default=str).encode(), shared=True)
    return folder


def _describe_solution(solution: Solution) -> dict[str, Any]:
    """What run.json says of a solution."""
    from coterie import __version__

    problem, certificate = solution.problem, solution.certificate
    numbers = {"gap": solution.gap, "objective": certificate.objective, "bound": certificate.bound}
    return {"coterie": __version__, "numpy": np.__version__, "python": platform.python_version(),
            "settings": {}, "status": solution.status.name, "sentence": solution.status.value,
            "lam": solution.lam, "n_users": problem.n_users, "dim": problem.dim,
            "n_clusters": solution.n_clusters, **json_ready(numbers), "solver": solution.solver,
            "seconds": round(solution.seconds, 3)}


def _describe_federation(account: Account | None) -> dict[str, Any]:
    """What run.json says of a federation: rounds, bytes in all and by kind of question, and how
    many took part.
    """
    if account is None:
        return {}
    ledger = account.ledger
    counts = ("bytes", "bytes_up", "bytes_down", "numbers_up", "numbers_down")
    return {"n_rounds": account.n_rounds, **{name: getattr(ledger, name) for name in counts},
            "bytes_by_kind": ledger.by_kind(), "participants": ledger.participants(),
            "aside": {str(name): reason for name, reason in account.aside.items()},
            "refusals": [[turn, str(name), reason] for turn, name, reason in account.refusals]}


def check_free(folder: str | os.PathLike[str], *, overwrite: bool = False,
               resume: bool = False) -> Path:
    """Refuse a folder that is not free for a new run.

    Parameters
    ----------
    folder : it may exist or not; nothing is created or removed.
    overwrite : whether a finished run may be replaced.
    resume : whether an interrupted run in the folder is continued.

    Raises
    ------
    InvalidInput : the folder is a file, holds files that belong to no run, or holds a finished run.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise InvalidInput(f"{folder} is a file", remedy="Name a folder with --out")
    parts = list((folder / "progress").iterdir()) if (folder / "progress").is_dir() else None
    foreign = parts is not None and not all(".coterie" in file.suffixes for file in parts)
    finished = _is_run(folder / "run.json")
    if folder.is_dir() and parts is None and not finished:
        foreign = not {file.name for file in folder.iterdir()} <= {*UNFINISHED, LOCK}
    if foreign:
        raise InvalidInput(f"{folder} holds other files",
                           remedy="Name an empty or a new folder with --out")
    if finished and not overwrite and not (resume and parts):
        raise InvalidInput(f"{folder} holds a finished run",
                           remedy="Name another folder with --out, or replace the run: --overwrite "
                                  "in the command, overwrite=True in Python")
    return folder


def clear(folder: Path) -> None:
    """Remove the files of an earlier run, run.json first, so that no folder ever mixes two runs.

    A folder whose run.json belongs to something else is left as it is.
    """
    if (folder / "run.json").exists() and not _is_run(folder / "run.json"):
        return
    for name in ("run.json", *_OPTIONAL):
        (folder / name).unlink(missing_ok=True)


def _is_run(file: Path) -> bool:
    try:
        return "coterie" in json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def model_columns(units: Units, classes: Sequence[str]) -> list[str]:
    """The names of the coefficients in models.csv, for models in the units given."""
    return distinct(units.columns(classes), RESERVED)


def table(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> bytes:
    """Rows as CSV; names that a spreadsheet would take for formulas are made safe (see
    `storage.safe_cell`).
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    quoted = csv.writer(stream, lineterminator="\n", quoting=csv.QUOTE_ALL)
    for row in chain([header], rows):
        # \r ends a line for readers, and the writer does not quote it.
        cells = [safe_cell(cell) for cell in row]
        (quoted if any(isinstance(cell, str) and "\r" in cell for cell in cells)
         else writer).writerow(cells)
    return stream.getvalue().encode()


def write_released(problem: Problem, folder: Path) -> None:
    """Write the released statistics of a solved problem."""
    users, loss = problem.users.data, problem.loss.own_loss
    assert isinstance(users, Condensed)
    write_atomically(folder / RELEASED,
                     pack({"features": users.features, "targets": users.targets,
                           "offsets": users.offsets, "sizes": users.sizes, "ridge": loss.ridge}),
                     shared=True)
