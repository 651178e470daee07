"""`coterie reproduce`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from coterie.cli import base as options
from coterie.cli.base import console
from coterie.lab.experiments import paper_figures
from coterie.lab.experiments.paper import ReproductionSettings
from coterie.lab.experiments.paper import reproduce as run
from coterie.lab.experiments.paper_claims import Claim, Verdict, claims
from coterie.lab.experiments.paper_figures import write

app = typer.Typer(add_completion=False)
COLOURS = {Verdict.YES: "green", Verdict.PARTLY: "yellow", Verdict.NO: "red"}


@app.command()
def reproduce(
    out: Annotated[Path, typer.Option(help="Folder for figures, tables and claims; created if "
                                           "needed.")] = Path(
        "reproduction"),
    quick: Annotated[bool,
                     typer.Option(
                         help="Fewer seeds, lambdas and rounds: within two minutes.")] = False,
    seeds: Annotated[int, typer.Option(help="Seeds to average over; 0 takes 10, or 3 with --quick.",
                                       min=0)] = 0,
    threads: options.Threads = None, quiet: options.Quiet = False,
) -> None:
    """Reproduce every figure and claim of the paper and compare them with it.

    Example: coterie reproduce --quick --out reproduction
    """
    paper_figures.check()
    began = time.monotonic()
    settings = ReproductionSettings.quick(seeds or 3) if quick else ReproductionSettings(seeds=seeds
        or 10)
    out.mkdir(parents=True, exist_ok=True)
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(),
                  console=console,
                  transient=True) as bar:
        task = bar.add_task("Starting", total=None)

        def tell(text: str, done: int, total: int) -> None:
            bar.update(task, description=text, completed=done, total=total)

        results = run(settings, tell)
        checked = claims(results)
        bar.update(task, description="Drawing")
        files = write(out, results, checked)
    console.print(table(checked))
    counts = [sum(claim.verdict is verdict for claim in checked) for verdict in Verdict]
    console.print(f"{counts[0]} of {len(checked)} claims are reproduced, {counts[1]} partly, "
                  f"{counts[2]} not. "
                  f"Seed 0 decides; averages are over {settings.seeds} "
                  f"seed{'s' * (settings.seeds > 1)}.",
                  soft_wrap=True)
    console.print(f"{len(files)} files in {out}, in {time.monotonic() - began:.0f} s.",
                  soft_wrap=True)


def table(checked: Sequence[Claim]) -> Table:
    shown = Table(title="The paper and its reproduction", show_lines=True)
    for heading in ("", "exp.", "claim", "paper", "here, seed 0", "over seeds", "verdict"):
        shown.add_column(heading)
    for claim in checked:
        shown.add_row(str(claim.number), claim.experiment, claim.text, claim.paper, claim.ours,
                      claim.seeds,
                      f"[{COLOURS[claim.verdict]}]{claim.verdict.value}[/]")
    return shown
