"""`coterie report`: the report of a run written again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.base import app, console
from coterie.output import runs


@app.command("report")
def run_report(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    out: Annotated[Path | None, typer.Option(help="The file; by default report.html in the run "
                                                  "folder.")] = None,
    title: Annotated[str, typer.Option(help="Another title.")] = "",
) -> None:
    """Write the report of a run again, with another title or to another file.

    RUN is the folder of a run.

    Example: coterie report run --title "Twelve hospitals" --out hospitals.html
    """
    page = runs.load_run(run).report(out, title=title)
    console.print(f"{page}: open it in a browser; it needs no network.", soft_wrap=True,
                  markup=False)
