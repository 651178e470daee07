"""`coterie predict`, `coterie certify` and `coterie report`: what can be done with the folder of a run."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from scipy.spatial import cKDTree

from coterie import report, runs
from coterie.certificates import certify
from coterie.cli.base import app, console
from coterie.cli.fit import columns_of
from coterie.data.encoding import Recipe, fingerprint, read_table
from coterie.data.frames import write_parquet
from coterie.errors import InvalidInput
from coterie.fitting.units import Units
from coterie.graph import Graph
from coterie.problem import Problem
from coterie.solution import Certificate, first_labels, labels_of
from coterie.solvers import solve
from coterie.storage import json_ready, write_atomically

Run = Annotated[Path, typer.Argument(help="The folder of a run of `coterie fit`.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


@app.command()
def predict(
    run: Run,
    table: Annotated[Path, typer.Argument(help="A table with the columns that were learned from.")],
    out: Annotated[Path, typer.Option(help="File for the predictions, .csv or .parquet.")] = Path("predictions.csv"),
    separator: Annotated[str, typer.Option(help="Between the cells of a CSV file, where it cannot be told.")] = "",
    as_json: Json = False,
) -> None:
    """A prediction for every row of a table, by the model of the row's user.

    RUN is the folder of a run of `coterie fit`, TABLE a table with the columns that were learned from.
    Users who are not in the run get the model of everyone together, and a 0 in the column `known`. Where every row was
    a user of its own, rows of another table get the cluster that is nearest.

    Example: coterie predict run new.csv --out predictions.csv
    """
    told, saved, recipe, units = opened(run)
    if out.suffix not in ("", ".csv", ".txt", ".parquet", ".pq"):
        raise InvalidInput(f"predictions cannot be written as {out.suffix}", remedy="Name a .csv or .parquet file")
    if out.resolve() == table.resolve():
        raise InvalidInput(f"{out} is the table itself", remedy="Name another file with --out")
    X, names = recipe.matrix(read_table(table, separator or None))
    place = {_key(name): i for i, name in enumerate(saved["names"])}
    found = np.array([place.get(_key(name), -1) for name in names], dtype=np.int64)
    models = np.concatenate([saved["models"], np.array(told["together"])[None]])
    labels = np.concatenate([labels_of(saved["models"]), [-1]])
    clusters, known = labels[found], found >= 0
    if recipe.user is None and fingerprint(table) != told["fingerprint"]:  # a row's number says nothing here
        clusters, known = labels[cKDTree(saved["models"]).query(units.rows(X))[1]], np.zeros(len(X), dtype=bool)
    columns: dict[str, list[Any]] = {"user": [str(name) for name in names], "known": known.astype(int).tolist(),
                                     "cluster": [int(k) if k >= 0 else None for k in clusters]}
    if units.task != "clustering":
        with np.errstate(over="ignore"):
            predicted = units.predict(X, models[found])
        if recipe.classes:
            values = recipe.class_values
            columns["prediction"] = [values[int(c)] for c in predicted]
            if told["units"]["loss"] != "squared_hinge":
                shares = units.probabilities(X, models[found])
                columns |= {f"probability {name}": shares[:, c].tolist() for c, name in enumerate(recipe.classes)}
        else:
            columns["prediction"] = predicted.tolist()
    if out.suffix in (".parquet", ".pq"):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_parquet(columns, out)
    else:
        write_atomically(out, runs.table(list(columns), zip(*columns.values(), strict=True)))
    strangers = len({name for name, here in zip(names, known, strict=True) if not here})
    summary = {"rows": len(names), "users": len(set(names)), "unknown_users": strangers, "out": str(out)}
    if as_json:
        print(json.dumps(summary))
        return
    console.print(f"{len(names)} predictions for {summary['users']} users in {out}.", soft_wrap=True, markup=False)
    if strangers:
        given = "the cluster that is nearest" if recipe.user is None else "the model of everyone together"
        console.print(f"{strangers} of these users are not in the run: they get {given}.", soft_wrap=True)


@app.command("certify")
def run_certify(
    run: Run,
    data: Annotated[Path | None, typer.Argument(help="The table it was learned from; by default where it was.")] = None,
    as_json: Json = False,
) -> None:
    """Prove again how far the models can be from optimal, from the table and models.csv alone.

    RUN is the folder of a run of `coterie fit`, DATA the table it was learned from (by default where it was then).
    The problem is made anew from the table, the run's settings and its weights; a lower bound on its optimum is
    computed without what the run says about itself.

    Example: coterie certify run data.csv
    """
    told, saved, recipe, units = opened(run)
    asked = told["settings"]
    table = data or Path(asked["data"])
    given = recipe.encode(read_table(table, asked["separator"] or None))
    if list(map(str, given.names)) != list(map(str, saved["names"])):
        raise InvalidInput(f"{table} has other users than the run", remedy="Give the table the run was made from")
    units = Units.learn(given, units.task, loss=asked["loss"], ridge=asked["ridge"], n_classes=asked["n_classes"],
                        standardize=asked["standardize"])
    users = units.inner(given)
    pairs, weights = saved["pairs"], np.asarray(saved["weights"])
    graph = Graph.complete(users.n_users) if pairs is None else Graph.from_edges(users.n_users, pairs, weights)
    problem = Problem(users, units.loss, float(told["lam"]), graph)
    models, sorted_out = _models(run, units, columns_of(units, recipe.classes), [str(name) for name in users.names])
    certificate = prove(problem, models, float(asked["tol"]))
    n_clusters = int(labels_of(models).max()) + 1
    same = fingerprint(table) == told["fingerprint"]
    agrees = sorted_out and told["n_clusters"] == n_clusters and told["lam"] == saved["lam"]
    proven = certificate.relative_gap <= float(asked["tol"])
    if as_json:
        print(json.dumps({"certified": proven, "gap": json_ready(certificate.relative_gap), "n_clusters": n_clusters,
                          "objective": certificate.objective, "bound": json_ready(certificate.bound),
                          "same_data": same, "same_claims": agrees, "claimed_gap": told["gap"]}))
    else:
        if not same:
            console.print("This is not the file the run was made from, byte for byte.", style="yellow", soft_wrap=True)
        if not agrees:
            console.print(f"run.json claims {told['n_clusters']} cluster(s) at lam = {told['lam']:g}, and models.csv "
                          "says who is in which; the models say something else.", style="yellow", soft_wrap=True)
        console.print(f"{n_clusters} cluster(s) among {users.n_users} users at lam = {told['lam']:g}: {certificate}.",
                      soft_wrap=True, highlight=False)
        console.print("Certified: no other models are better by more than the tolerance." if proven else
                      "Not certified to the tolerance of the run.", soft_wrap=True)
    if not (proven and agrees):
        raise typer.Exit(1)


def prove(problem: Problem, models: Any, tol: float) -> Certificate:
    """With duals built from the models; where they are not good enough, with those of a solution found anew."""
    certificate = certify(problem, models)
    if certificate.relative_gap > tol:
        better = certify(problem, models, solve(problem, tol=tol / 10).duals)
        certificate = min(certificate, better, key=lambda c: c.relative_gap)
    return certificate


@app.command("report")
def run_report(
    run: Run,
    out: Annotated[Path | None, typer.Option(help="The page; by default report.html in the run's folder.")] = None,
    title: Annotated[str, typer.Option(help="Another title.")] = "",
) -> None:
    """Make the page of a run again, under another title or in another place.

    RUN is the folder of a run.

    Example: coterie report run --title "Twelve hospitals" --out hospitals.html
    """
    if not (run / "report.json").exists():
        raise InvalidInput(f"{run} holds no report.json", remedy="Give the folder of a run of `coterie fit`")
    try:
        document = json.loads((run / "report.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidInput(f"{run / 'report.json'} cannot be read: {error}", remedy="Run it again") from error
    page = out or run / "report.html"
    try:
        report.write({**document, "title": title or document["title"]}, page)
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(f"{run / 'report.json'} holds no report: {error}", remedy="Run it again") from error
    console.print(f"{page}: open it in a browser; it needs no network.", soft_wrap=True, markup=False)


def opened(run: Path) -> tuple[dict[str, Any], dict[str, Any], Recipe, Units]:
    """A run of `coterie fit`: run.json, the solution's arrays, and how a table becomes numbers."""
    told, saved = runs.read(run)
    if "recipe" not in told:
        raise InvalidInput(f"{run} is not a run of `coterie fit`", remedy="Give the folder that it was told with --out")
    try:
        recipe, units = Recipe.from_json(told["recipe"]), Units.from_state(told["units"])
        shapes = {np.array(told["together"], dtype=float).shape, saved["models"].shape[1:]}
        sizes = {len(units.mean), len(units.scale), len(recipe.feature_names)}
        numbers = [float(told["lam"]), float(told["settings"]["tol"])]
        texts = [told["settings"][name] for name in ("data", "separator", "loss")] + [told["fingerprint"]]
        rest = [told[name] for name in ("n_clusters", "gap")] + [told["settings"][name] for name in (
            "ridge", "n_classes", "standardize")]
        whole = len(shapes) == len(sizes) == 1 and np.isfinite(numbers).all() and all(isinstance(t, str) for t in texts)
        if not whole or any(isinstance(value, (str, list, dict)) for value in rest):
            raise ValueError("its parts do not fit each other")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidInput(f"{run / 'run.json'} was changed: {error}", remedy="Run it again") from error
    return told, saved, recipe, units


def _key(name: Any) -> str:
    """A user's name as text: a column of numbers is a column of texts as soon as one cell is no number."""
    return str(int(name)) if isinstance(name, float) and name.is_integer() else str(name)


def _models(run: Path, units: Units, columns: list[str], names: list[str]) -> tuple[Any, bool]:
    """models.csv in the solver's units, in the order of the table's users; and whether its clusters are the models'."""
    try:
        with (run / "models.csv").open(newline="", encoding="utf-8") as file:
            header, *rows = csv.reader(file)
        numbers = np.array([[float(cell) for cell in row[2:]] for row in rows])
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{run / 'models.csv'} cannot be read: {error}", remedy="Run it again") from error
    if header[2:] != columns:
        wrong = next((name for name, known in zip(header[2:], columns, strict=False) if name != known), "")
        raise InvalidInput(f"{run / 'models.csv'} has other columns than the run", where=f"column {wrong!r}",
                           remedy="Run it again")
    place = {row[0]: k for k, row in enumerate(rows)}
    if len(place) != len(rows) or sorted(place) != sorted(names):
        raise InvalidInput(f"{run / 'models.csv'} is not about the users of this table, each once",
                           remedy="Run it again")
    order = [place[name] for name in names]
    models = units.restored(numbers[order].reshape(len(names), len(units.coefficient_names), -1))
    clusters = first_labels(np.unique([rows[k][1] for k in order], return_inverse=True)[1])
    return models, bool(np.array_equal(clusters, labels_of(models)))