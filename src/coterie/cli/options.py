"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.base.errors import InvalidInput
from coterie.cli.base import be_quiet, limit_threads
from coterie.data.encoding import TASKS
from coterie.data.validation import split_names as split_names
from coterie.fitting.units import FITTING
from coterie.problem.weights import KINDS

_LOSSES = ", ".join(dict.fromkeys(name for names in FITTING.values() for name in names))
Table = Annotated[Path, typer.Argument(help="A file with one row per sample (CSV, Parquet, Excel "
                                            "or JSON lines, also "
                                            "compressed); - is standard input.")]
Separator = Annotated[str, typer.Option(help="Separator of a CSV file; detected if omitted.")]
User = Annotated[str, typer.Option(help="Column with the owner of each row; if omitted, every row "
                                   "is a separate user.")]
Target = Annotated[str, typer.Option(help="Column to predict; if omitted, users are clustered.")]
Features = Annotated[str, typer.Option(help="Columns used as features, separated by commas; "
                                       "default: all others.")]
Drop = Annotated[str, typer.Option(help="Columns to ignore, separated by commas.")]
TaskName = Annotated[str, typer.Option(help=f"auto, or one of: {', '.join(TASKS)}.")]
LossName = Annotated[str, typer.Option(help=f"auto, or one that fits the task: {_LOSSES}.")]
Lam = Annotated[str, typer.Option(help="auto: the groups found; score: the least loss on held-out "
                                  "rows; or a number.")]
Weights = Annotated[str, typer.Option(help=f"One of: {', '.join(KINDS)}. unit is the paper's case: "
                                           "all pairs have "
                                           "weight 1.")]
Count = Annotated[str,
                  typer.Option(help="What counts alike in the model of a group: rows, or users.")]
Ridge = Annotated[float, typer.Option(help="L2 strength, intercept included.")]
Lams = Annotated[int, typer.Option(help="Number of points of the path.", min=2)]
MaxGroups = Annotated[int, typer.Option(help="Largest number of groups; 0: no limit.", min=0)]
Tol = Annotated[float, typer.Option(help="Certified relative gap to reach.")]
Holdout = Annotated[
    float, typer.Option(help="Share of every user's rows held out for validation; 0: none.")]
Standardize = Annotated[bool, typer.Option(help="Whether features are standardised.")]
Seed = Annotated[int, typer.Option(help="Seed of the held-out rows.", min=0)]
Out = Annotated[Path, typer.Option(help="Folder for the results; created if needed.")]
Resume = Annotated[bool,
                   typer.Option("--resume", help="Continue an interrupted run in the folder.")]
Overwrite = Annotated[bool,
                      typer.Option("--overwrite", help="Replace a finished run in the folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON only.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print warnings and errors only.",
                                     callback=be_quiet)]
Threads = Annotated[int | None, typer.Option(help="Largest number of threads; default: one per "
                                                  "core.", min=1,
                                             callback=limit_threads)]
RunFolder = Annotated[Path, typer.Argument(help="The folder of a run of `coterie fit`.")]


def parse_lam(text: str) -> Any:
    """A number, "auto" or "score"."""
    if text in ("auto", "score"):
        return text
    try:
        return float(text)
    except ValueError:
        raise InvalidInput(f"lam must be a number, auto or score, got {text!r}",
                           remedy="Use --lam auto") from None
