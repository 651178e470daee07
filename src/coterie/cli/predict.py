"""`coterie predict`: the rows of a table by the models of a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.base.errors import InvalidInput
from coterie.base.labels import many
from coterie.base.storage import write_atomically
from coterie.cli import options
from coterie.cli.base import app, console, error
from coterie.data.files import is_input
from coterie.data.frames import to_frame, write_parquet
from coterie.federated.keeping import holds_models, load_models
from coterie.fitting.predictions import PredictsRows, RowScores
from coterie.output import runs


@app.command("predict")
def run_predict(run: options.RunFolder, table: Annotated[Path, typer.Argument(help="A table with "
        "the columns that " "were learned from; " "- reads standard " "input.")],
                out: Annotated[Path, typer.Option(help="File for the predictions, .csv or "
                                                  ".parquet; - writes CSV to standard "
                                                  "output.")] = Path("predictions.csv"),
                separator: options.Separator = "", only_predictions: Annotated[bool,
        typer.Option("--only-predictions", help="Leave out the columns of the table.")] = False,
                quiet: options.Quiet = False, as_json: options.Json = False,) -> None:
    """Predict every row of a table by the model of the row's user.

    RUN is the folder of a run of `coterie fit` or `coterie federate`, TABLE a table with the
    columns that were learned from. At a node of a federation RUN may be the folder in which the
    node keeps its users' models. The output has the table's columns and the predictions. Where the
    table has the target, the predictions are scored. Unknown users get the pooled model, and a 0 in
    the column `known`. Where every row was a separate user, rows of another table get the nearest
    cluster.

    Example: coterie predict run new.csv --out predictions.csv
    """
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
    counted = _count(len(names), len(users), unknown, where,
                     by_row=recipe is not None and recipe.user is None)
    printer.print(counted, soft_wrap=True, markup=False)
    if scores is not None:
        printer.print(str(scores), soft_wrap=True, markup=False, highlight=False)


def _count(n_rows: int, n_users: int, unknown: int, where: str, by_row: bool) -> str:
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
