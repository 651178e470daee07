"""`save_run`: a result as a run folder."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from coterie.base.errors import InvalidInput
from coterie.base.storage import json_ready, write_atomically
from coterie.base.types import Array
from coterie.fitting.result import Fit, TableSource
from coterie.fitting.scores import Scores
from coterie.fitting.settings import Settings
from coterie.output import report
from coterie.output.runs.folder import Shown, check_free, clear, model_columns, write
from coterie.output.runs.released import write_released
from coterie.problem.solution import Solution


def save_run(result: Fit | Solution, folder: str | PathLike[str], *,
             settings: Mapping[str, Any] | None = None,
             title: str = "", overwrite: bool = False) -> Path:
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
    write_atomically(folder / "report.json", json.dumps(document, allow_nan=False).encode())
    report.write(document, folder / "report.html")
    if not isinstance(result, Fit):
        write(folder, result, asked)
        return
    classes = () if result.recipe is None else result.recipe.classes
    coefficients, centres = result.coefficients, result.units.coefficients(result.centres)
    shown = Shown(coefficients.reshape(len(coefficients), -1), centres.reshape(len(centres), -1),
                  model_columns(result.units, classes), result.models, result.centres)
    facts = _facts(result)
    if result.seconds:
        facts |= {"solve_seconds": round(result.solution.seconds, 3),
                  "seconds": round(result.seconds, 3)}
    write(folder, result.solution, asked, path=_path_columns(result), more=facts, shown=shown,
          account=result.account)
    if result.account is not None and result.privacy is not None:
        write_released(result.solution.problem, folder)


def document_of(result: Fit | Solution, *, settings: Mapping[str, Any] | None = None,
                title: str = "") -> dict[str, Any]:
    """What the report of a result shows."""
    if not isinstance(result, Fit):
        return report.gather(result, title=title or None, settings=settings or None)
    recipe, table = result.recipe, result.table
    if not title and table is not None and table.data:
        title = f"{Path(table.data).name}: {count_groups(result)}"
    return report.gather(
        result, title=title or None, classes=(recipe.classes or None) if recipe else None,
        command=None if table is None or not table.data
        else command_of(result.settings, table, "federate" if hasattr(result, "ledger") else "fit",
                        getattr(result, "privacy", None)), settings=settings if settings is not None
        else result.asked(), notes=recipe.notes if recipe else ())


def save_report(fit: Fit, path: str | PathLike[str], *, title: str = "") -> Path:
    """Write the report of a fit to a file."""
    return report.write(document_of(fit, title=title), path)


def command_of(settings: Settings, table: TableSource, command: str = "fit",
               privacy: Any = None) -> str:
    """The command for the same run; the task is always given, since it may have been inferred from
    this table.
    """
    usual = {**asdict(Settings()),
             "task": None, "n_classes": settings.n_classes, "standardize": settings.standardize,
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
    k, n = result.n_clusters, len(result.names)
    users = f"{n:,} {result.noun}{'s' * (n != 1)}"
    if result.kind == "personal":
        return f"personal models around one centre for {users}"
    if n == 1:
        return f"one {result.noun}"
    if k == n:
        return f"no groups among {users}"
    if k == 1:
        return (f"one model for {users}" if result.settings.task != "clustering"
                else f"one group of {users}")
    return (f"{k} groups among "
            f"{users}{', with personal models' * (result.kind == 'personal in groups')}")


def _facts(fit: Fit) -> dict[str, Any]:
    """What run.json says of a fit in addition to its solution."""
    recipe, table = fit.recipe, fit.table
    facts = {"seed": fit.settings.seed, "fingerprint": table.fingerprint if table else "",
             "task": fit.settings.task, "kind": fit.kind, "why": fit.why, "compared": fit.compared,
             "compared_errors": fit.compared_errors, "scores": _summary(fit.scores),
             "warnings": list(fit.warnings)}
    if fit.stability is not None:
        facts["stability"] = json_ready({"index": fit.stability.index,
                                         "searched": fit.stability.searched,
                                         "stays": fit.stability.stays})
    if fit.account is not None and fit.privacy is not None:
        facts["privacy"] = {**fit.statement._asdict(), "sentence": str(fit.statement)}
    if recipe is not None:
        facts |= {"notes": list(recipe.notes), "recipe": recipe.to_json()}
    return {**facts, "units": json_ready(fit.units.state()), "together": fit.together.tolist(),
            "libraries": _libraries()}


def _summary(scores: Scores | None) -> dict[str, Any] | None:
    return None if scores is None else {
        "metric": scores.metric, "rows": scores.n_rows, "here": _mean(scores.fitted),
        "alone": _mean(scores.alone), "together": _mean(scores.together),
        "gain": json_ready(scores.gain[0]), "gain_error": json_ready(scores.gain[1]),
        "worse": int(scores.worse.sum()), "sentence": str(scores)}


def _path_columns(fit: Fit) -> dict[str, list[Any]]:
    """The columns of path.csv."""
    points, scores = fit.path.solutions, fit.scores
    columns: dict[str, list[Any]] = {
        "lam": [s.lam for s in points],
        "n_clusters": [s.n_clusters for s in points], "objective": [s.objective for s in points],
        "bound": json_ready([s.certificate.bound for s in points]),
        "gap": json_ready([s.gap for s in points]), "status": [s.status.name for s in points]}
    if scores is not None and len(scores.points) == len(points):
        columns[f"held out {scores.metric}"] = [_mean(row) for row in scores.points]
    return columns


def _mean(values: Array) -> float | None:
    """Over users with held-out rows; None where it is not finite."""
    mean: float | None = json_ready(float(np.nanmean(values)))
    return mean


def _libraries() -> dict[str, str]:
    """The versions of the libraries that the numbers depend on."""
    versions = {}
    for name in ("numpy", "scipy", "numba", "scikit-learn", "polars"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:  # polars is an extra
            continue
    return versions
