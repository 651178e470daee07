"""The files of a run folder.

    run.json         settings, versions, status, gap, number of groups, and of a federated run
                     rounds and bytes
    models.csv       one line per user: its group and the model that predicts for it
    clusters.csv     one line per group: number of users, and their model or the centre of their
                     models
    path.csv         one line per lam of the path: groups, objective, bound, gap, score on held-out
                     rows
    ledger.csv       the messages of a federated run: by round, kind, direction and field
    solution.coterie models, duals and graph
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
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coterie.base.errors import InvalidInput, MissingExtra
from coterie.base.storage import json_ready, pack, safe_cell, unpack, write_atomically
from coterie.base.types import Array
from coterie.data.frames import distinct, write_parquet
from coterie.fitting.units import Units
from coterie.losses import Loss, Personal
from coterie.problem.account import Account
from coterie.problem.problem import Problem
from coterie.problem.solution import Solution

# Columns of models.csv and clusters.csv that are no coefficients.
RESERVED = ("user", "cluster", "users")
#: What an unfinished federated run leaves in its folder.
UNFINISHED = {"checkpoint", "cluster", "state", "rounds.jsonl", "error.txt"}
_OPTIONAL = ("released.coterie", "ledger.csv", "path.csv", "path.parquet", "models.parquet",
             "report.json", "report.html")


class Shown(NamedTuple):
    """The models that predict."""

    models: Array  # (n_users, columns) in the units given
    centres: Array  # (n_groups, columns) of the groups
    columns: list[str]
    # (n_users, dim) the models in the solver's units; None: those of the solution.
    solver: Array | None = None
    solver_centres: Array | None = None  # (n_groups, dim) the centres in the solver's units


def _covariance(loss: Loss) -> Array | None:
    """Of personal models around their centres; None where models are not personal."""
    return (np.asarray(loss.covariance)
            if isinstance(loss, Personal) and loss.covariance is not None else None)


def _scale(loss: Loss) -> Array | None:
    """Of the prices of personal models, one per user; None where it is one over the number of rows.
    """
    return loss.scale if isinstance(loss, Personal) and isinstance(loss.scale, np.ndarray) else None


def _noise(problem: Problem) -> float | None:
    """The median over users of the variance of their noise, of personal models; None where it is 1
    for all.
    """
    scale = _scale(problem.loss)
    return None if scale is None else float(np.median(scale * problem.users.data.sizes))


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
    tables = ({"models": users, "clusters": clusters}
              | ({} if path is None else {"path": dict(path)}))
    for name, rows in tables.items():
        write_atomically(folder / f"{name}.csv",
                         table(list(rows), zip(*rows.values(), strict=True)))
    with contextlib.suppress(MissingExtra):
        for name in tables.keys() - {"clusters"}:
            write_parquet(tables[name], folder / f"{name}.parquet")
    if account is not None:
        header = ["round", "kind", "direction", "field", "messages", "numbers", "bytes"]
        write_atomically(folder / "ledger.csv", table(header, account.ledger.entries))
    names = [name if isinstance(name, (str, int, float)) else str(name)
             for name in problem.users.names]
    write_atomically(folder / "solution.coterie", pack(
        {"models": solution.models, "duals": solution.duals, "names": names,
         "lam": solution.lam, "weights": problem.graph.weights, "pairs": problem.graph.pairs,
         "features": list(problem.users.feature_names), "own": shown.solver,
         "covariance": _covariance(problem.loss), "scale": _scale(problem.loss),
         "centres": shown.solver_centres, "noise": _noise(problem)}))
    info = {**_facts(solution), **_federated_facts(account), "settings": dict(settings),
            **(more or {})}
    write_atomically(folder / "run.json", json.dumps(info, indent=1, ensure_ascii=False,
                                                     default=str).encode())
    return folder


def _facts(solution: Solution) -> dict[str, Any]:
    """What run.json says of a solution."""
    from coterie import __version__

    problem, certificate = solution.problem, solution.certificate
    facts: dict[str, Any] = {"coterie": __version__, "numpy": np.__version__,
                             "python": platform.python_version(), "settings": {},
                             "status": solution.status.name, "sentence": solution.status.value,
                             "lam": solution.lam, "n_users": problem.n_users,
                             "dim": problem.dim, "n_clusters": solution.n_clusters,
                             **json_ready({"gap": solution.gap, "objective": certificate.objective,
                                           "bound": certificate.bound}), "solver": solution.solver,
                             "seconds": round(solution.seconds, 3)}
    return facts


def _federated_facts(account: Account | None) -> dict[str, Any]:
    """What run.json says of a federation: rounds, bytes in all and by kind of question, and how
    many took part.
    """
    if account is None:
        return {}
    ledger = account.ledger
    return {"n_rounds": account.n_rounds, "bytes": ledger.bytes, "bytes_up": ledger.bytes_up,
            "bytes_down": ledger.bytes_down, "numbers_up": ledger.numbers_up,
            "numbers_down": ledger.numbers_down, "bytes_by_kind": ledger.by_kind(),
            "participants": ledger.participants(),
            "aside": {str(name): reason for name, reason in account.aside.items()},
            "refusals": [[turn, str(name), reason] for turn, name, reason in account.refusals]}


def read(folder: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read run.json and the solution's arrays; `coterie.load_run` makes a `Run` of them.

    Raises
    ------
    InvalidInput : the folder is no run, or incomplete, or damaged.
    """
    folder = Path(folder)
    if not (folder / "run.json").exists():
        raise InvalidInput(f"{folder} is not a run folder: it has no run.json",
                           remedy="Give the folder that was named with --out")
    try:
        info = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidInput(f"{folder / 'run.json'} cannot be read: {error}",
                           remedy="Run it again") from error
    if not isinstance(info, dict):
        raise InvalidInput(f"{folder / 'run.json'} holds no run", remedy="Run it again")
    if not (folder / "solution.coterie").exists():
        raise InvalidInput(f"{folder} is incomplete: it has no solution.coterie",
                           remedy="Run it again")
    return info, unpack((folder / "solution.coterie").read_bytes(),
                        str(folder / "solution.coterie"))


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
        foreign = not {file.name for file in folder.iterdir()} <= UNFINISHED
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
