"""A run as a folder: what was asked, what came out, in files other programs read.

    run.json         settings, versions, status, gap, number of clusters, and of a federated run rounds and bytes
    models.csv       a line for every user: its cluster and its model
    clusters.csv     a line for every cluster: how many users, and their model
    path.csv         a line for every lam of the path: clusters, objective, bound, gap, score on rows held out
    ledger.csv       what crossed, of a federated run: by round, kind, direction and field
    solution.coterie models, duals and graph, for `read`

Models and the path are written as Parquet too where polars is installed. Every file is written beside the old one and
put in its place in one step: an interrupted write leaves no half file.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from coterie._typing import Array
from coterie.data.frames import write_parquet
from coterie.errors import InvalidInput, MissingExtra
from coterie.losses import AffineLoss, Multinomial
from coterie.losses.remote import Remote
from coterie.problem import Problem
from coterie.solution import Solution
from coterie.storage import json_ready, pack, unpack, write_atomically

TAKEN = ("user", "cluster", "users")  # columns of models.csv and clusters.csv that are no coefficients


def write(folder: str | os.PathLike[str], solution: Solution, settings: Mapping[str, Any], *,
          shown: tuple[Array, list[str]] | None = None, path: Mapping[str, list[Any]] | None = None,
          more: Mapping[str, Any] | None = None) -> Path:
    """Write a solution as a run folder.

    Parameters
    ----------
    folder : made if needed.
    solution : with its problem.
    settings : what the user asked for.
    shown : models in units of the user's own, (n_users, columns), and the columns' names; else as they are.
    path : columns of path.csv.
    more : goes into run.json as well.
    """
    from coterie import __version__

    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    certificate, problem = solution.certificate, solution.problem
    told: dict[str, Any] = {
        "coterie": __version__, "numpy": np.__version__, "python": platform.python_version(),
        "settings": dict(settings), "status": solution.status.name, "sentence": solution.status.value,
        "lam": solution.lam,
        "n_users": problem.n_users, "dim": problem.dim, "n_clusters": solution.n_clusters,
        "gap": json_ready(solution.gap), "objective": json_ready(certificate.objective),
        "bound": json_ready(certificate.bound),
        "solver": solution.solver, "seconds": round(solution.seconds, 3)}
    run: Any = solution
    if hasattr(run, "ledger"):  # of a federation
        ledger = run.ledger
        told |= {"n_rounds": run.n_rounds, "bytes": ledger.bytes, "bytes_up": ledger.bytes_up,
                 "bytes_down": ledger.bytes_down, "numbers_up": ledger.numbers_up, "numbers_down": ledger.numbers_down,
                 "aside": {str(name): reason for name, reason in run.aside.items()},
                 "refusals": [[turn, str(name), reason] for turn, name, reason in run.refusals]}
        header = ["round", "kind", "direction", "field", "messages", "numbers", "bytes"]
        write_atomically(place / "ledger.csv", table(header, ledger.entries))
    models, columns = (solution.models, coefficient_names(problem)) if shown is None else shown
    labels = solution.labels
    users: dict[str, list[Any]] = {"user": list(problem.users.names), "cluster": labels.tolist()}
    columns = distinct(columns, TAKEN)
    users |= {name: models[:, k].tolist() for k, name in enumerate(columns)}
    first = np.unique(labels, return_index=True)[1]
    clusters: dict[str, list[Any]] = {"cluster": labels[first].tolist(), "users": np.bincount(labels).tolist()}
    clusters |= {name: models[first, k].tolist() for k, name in enumerate(columns)}
    for name, rows in (("models", users), ("clusters", clusters)):
        write_atomically(place / f"{name}.csv", table(list(rows), zip(*rows.values(), strict=True)))
    if path is not None:
        write_atomically(place / "path.csv", table(list(path), zip(*path.values(), strict=True)))
    with contextlib.suppress(MissingExtra):
        write_parquet(users, place / "models.parquet")
        if path is not None:
            write_parquet(dict(path), place / "path.parquet")
    write_atomically(place / "solution.coterie", pack({
        "models": solution.models, "duals": solution.duals, "names": [_plain(name) for name in problem.users.names],
        "lam": solution.lam, "weights": problem.graph.weights, "pairs": problem.graph.pairs,
        "features": list(problem.users.feature_names)}))
    told |= dict(more or {})
    write_atomically(place / "run.json", json.dumps(told, indent=1, ensure_ascii=False, default=str).encode())
    return place


def read(folder: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `write` wrote: run.json, and the solution's arrays."""
    place = Path(folder)
    if not (place / "run.json").exists():
        raise InvalidInput(f"{place} is not a run folder: it holds no run.json",
                           remedy="Give the folder that was named with --out")
    try:
        told = json.loads((place / "run.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidInput(f"{place / 'run.json'} cannot be read: {error}", remedy="Run it again") from error
    if not isinstance(told, dict):
        raise InvalidInput(f"{place / 'run.json'} holds no run", remedy="Run it again")
    if not (place / "solution.coterie").exists():
        raise InvalidInput(f"{place} is not whole: it holds no solution.coterie", remedy="Run it again")
    return told, unpack((place / "solution.coterie").read_bytes(), str(place / "solution.coterie"))


def coefficient_names(problem: Problem) -> list[str]:
    """What each coordinate of a model is."""
    loss = problem.loss.loss if isinstance(problem.loss, Remote) else problem.loss
    names = list(problem.users.feature_names)
    if isinstance(loss, AffineLoss) and loss.intercept:
        names.append("intercept")
    if isinstance(loss, Multinomial):
        outputs = problem.dim // max(len(names), 1)
        names = [f"{name}.{k}" for name in names for k in range(outputs)]
    return names if len(names) == problem.dim else [f"m{k}" for k in range(problem.dim)]


def distinct(names: Iterable[str], taken: Iterable[str] = ()) -> list[str]:
    """Names of columns none of which is taken or comes again; those that would get an underscore."""
    found, seen = list[str](), set(taken)
    for name in names:
        while name in seen:
            name += "_"
        found.append(name)
        seen.add(name)
    return found


def table(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> bytes:
    """CSV."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return stream.getvalue().encode()


def _plain(name: Any) -> Any:
    """A user's name as JSON has it: dates are texts."""
    return name if isinstance(name, (str, int, float)) else str(name)
