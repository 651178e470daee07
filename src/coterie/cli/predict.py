"""`coterie predict`: the rows of a table by the models of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from coterie import runs
from coterie.cli import options
from coterie.cli.base import app, console
from coterie.data.frames import write_parquet
from coterie.errors import InvalidInput
from coterie.federated.keeping import holds_models, load_models
from coterie.fitting.predictions import PredictsRows
from coterie.storage import write_atomically


@app.command("predict")
def run_predict(
    run: options.RunFolder,
    table: Annotated[Path, typer.Argument(help="A table with the columns that were learned from.")],
    out: Annotated[Path, typer.Option(help="File for the predictions, .csv or .parquet.")] = Path("predictions.csv"),
    separator: options.Separator = "",
    as_json: options.Json = False,
) -> None:
    """Predict every row of a table by the model of the row's user.

    RUN is the folder of a run of `coterie fit` or `coterie federate`, TABLE a table with the columns that were learned
    from. At a node of a federation RUN may be the folder in which the node keeps its users' models.
    Unknown users get the pooled model, and a 0 in the column `known`. Where every row was a separate user, rows of
    another table get the nearest cluster.

    Example: coterie predict run new.csv --out predictions.csv
    """
    complete = (run / "run.json").exists() or not holds_models(run)
    fitted: PredictsRows = runs.load_run(run) if complete else load_models(run)
    if out.suffix not in ("", ".csv", ".txt", ".parquet", ".pq"):
        raise InvalidInput(f"predictions cannot be written as {out.suffix}", remedy="Name a .csv or .parquet file")
    if out.resolve() == table.resolve():
        raise InvalidInput(f"{out} is the table itself", remedy="Name another file with --out")
    columns = fitted.predict(table, separator=separator).to_dict(as_series=False)
    if out.suffix in (".parquet", ".pq"):
        write_parquet(columns, out)
    else:
        write_atomically(out, runs.table(list(columns), zip(*columns.values(), strict=True)))
    users = columns["user"]
    unknown = len({name for name, known in zip(users, columns["known"], strict=True) if not known})
    summary = {"rows": len(users), "users": len(set(users)), "unknown_users": unknown, "out": str(out)}
    if as_json:
        print(json.dumps(summary))
        return
    console.print(f"{len(users)} predictions for {summary['users']} users in {out}.", soft_wrap=True, markup=False)
    if unknown:
        recipe = getattr(fitted, "recipe", None)
        by_row = recipe is not None and recipe.user is None
        console.print(f"{unknown} of these users are not in the run: they get the "
                      f"{'model of the nearest group' if by_row else 'pooled model'}.", soft_wrap=True)
