"""`coterie predict`, `certify` and `report`: what is done with the folder of a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.base.errors import InvalidInput
from coterie.base.labels import groups_of, many
from coterie.base.storage import json_ready, write_atomically
from coterie.cli import base as options
from coterie.cli.base import Arg, Opt, app, console, error, say
from coterie.data.files import is_input
from coterie.data.frames import to_frame, write_parquet
from coterie.federated.node import holds_models, load_models
from coterie.fitting.predictions import PredictsRows, RowScores
from coterie.output import runs


@app.command("predict")
def run_predict(
    run: options.RunFolder,
    table: Annotated[Path, Arg(help="A table with the columns that were learned from; - reads "
                                    "standard input.")],
    out: Annotated[Path, Opt(help="File for the predictions, .csv or .parquet; - writes CSV to "
                                  "standard output.")] = Path("predictions.csv"),
    separator: options.Separator = "",
    only_predictions: Annotated[bool, Opt("--only-predictions",
                                          help="Leave out the columns of the table.")] = False,
    quiet: options.Quiet = False, as_json: options.Json = False,
) -> None:
    """Predict every row of a table by the model of the row's user.

    RUN is the folder of a run of `coterie fit` or `coterie federate`, TABLE a table with the
    columns that were learned from. At a node of a federation RUN may be the folder in which the
    node keeps its users' models. The output has the table's columns and the predictions. Where the
    table has the target, the predictions are scored. Unknown users get the pooled model, and a 0 in
    the column `known`. Where every row was a separate user, rows of another table get the nearest
    cluster.

    Example: coterie predict run new.csv --out predictions.csv
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
    predicted = fitted.predict_table(table, separator=separator)
    frame = to_frame(predicted.columns) if only_predictions else predicted.joined()
    printer = console
    if is_input(out):
        sys.stdout.write(runs.table(frame.columns, frame.iter_rows()).decode())
        printer = error
    elif out.suffix in (".parquet", ".pq"):
        write_parquet(frame, out)
    else:
        write_atomically(out, runs.table(frame.columns, frame.iter_rows()))
    # 3. What is said of them.
    names, scores = predicted.columns["user"], predicted.scores
    users = set(names) - {None}
    unknown = len(users & {name for name, known in zip(names, predicted.columns["known"],
                                                       strict=True) if not known})
    if as_json:
        print(json.dumps({"rows": len(names), "users": len(users), "unknown_users": unknown,
                          "out": str(out), **({} if scores is None else _score_info(scores))}))
        return
    if quiet:
        return
    where = "on standard output" if is_input(out) else f"in {out}"
    recipe = getattr(fitted, "recipe", None)
    counted = _describe_predictions(len(names), len(users), unknown, where,
                                    by_row=recipe is not None and recipe.user is None)
    say(counted, to=printer)
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


def _score_info(scores: RowScores) -> dict[str, Any]:
    return {"metric": scores.metric, "score": scores.mean, "scored_rows": scores.n_rows,
            "rows_of_the_fit": scores.seen,
            "score_of_users": {str(name): score for name, score in scores.users.items()}}


@app.command("certify")
def run_certify(
    run: options.RunFolder,
    data: Annotated[Path | None,
                    Arg(help="The table of the run; by default the file of the run.")] = None,
    threads: options.Threads = None, quiet: options.Quiet = False, as_json: options.Json = False,
) -> None:
    """Certify the models of a run again, from its table.

    RUN is the folder of a run of `coterie fit`, DATA its table (by default the file of the run).
    The problem is built again from the table, the run's settings and its weights; a lower bound on
    its optimum is computed independently of the values stored in the run.

    Example: coterie certify run data.csv
    """
    saved = runs.load_run(run)
    proof = saved.certify(data)
    claims = saved.info
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
def run_report(
    run: Annotated[Path, Arg(help="The folder of a run.")],
    out: Annotated[Path | None,
                   Opt(help="The file; by default report.html in the run folder.")] = None,
    title: Annotated[str, Opt(help="Another title.")] = "",
) -> None:
    """Write the report of a run again, with another title or to another file.

    RUN is the folder of a run.

    Example: coterie report run --title "Twelve hospitals" --out hospitals.html
    """
    page = runs.load_run(run).report(out, title=title)
    say(f"{page}: open it in a browser; it needs no network.")
