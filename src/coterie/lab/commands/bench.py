"""`coterie bench`: methods compared on the same data."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from coterie.base.errors import Interrupted, InvalidInput
from coterie.cli.base import Quiet, Threads, console, split_names
from coterie.lab.experiments import federations as lab
from coterie.lab.experiments.federations_data import BUNDLED, FILES, Benchmark, federations

app = typer.Typer(no_args_is_help=True, add_completion=False, name="bench",
                  help="Compare methods on the same data.")


@app.callback()
def bench() -> None:
    """Compare methods on the same data."""


@app.command()
def data(
    data: Annotated[Path | None,
                    typer.Option(help="Folder with the files of the published sets.")] = None,
    sets: Annotated[str, typer.Option(help="Data sets, separated by commas: "
                                           f"{', '.join((*FILES, *BUNDLED))}. "
                                           "Default: all that are available.")] = "",
    methods: Annotated[str, typer.Option(help="Only these methods, by their names in the table, "
                                              "separated by "
                                              "commas.")] = "",
    splits: Annotated[int, typer.Option(help="Number of random splits.", min=1)] = 5,
    first: Annotated[int, typer.Option(help="Seed of the first split; for published splits, the "
                                            "number of the first.",
                                       min=0)] = 200,
    quick: Annotated[bool, typer.Option(help="One split of a few small sets.")] = False,
    out: Annotated[Path,
                   typer.Option(help="Folder for tables and figures; created if needed.")] = Path(
                       "federations"),
    threads: Threads = None, quiet: Quiet = False,
) -> None:
    """Run all methods on real federations: same splits, same budget, scored per user on unseen
    rows.

    Example: coterie bench data --data files --sets landmine,school --splits 3 --out results
    """
    if data is not None and not data.is_dir():
        raise InvalidInput(f"{str(data)!r} is not a folder",
                           remedy="Give the folder with landmine.npz and the others")
    todo = federations(data, split_names(sets), quick)
    only = split_names(methods)
    known = dict.fromkeys(method.name for federation in todo for method in lab.methods(federation))
    skipped = {name: text for federation in todo for name, text in lab.left_out(federation).items()}
    for name in only:
        if name not in known and name not in skipped:
            raise InvalidInput(f"unknown method {name!r}",
                               remedy=f"Choose from: {', '.join((*known, *skipped))}")
    for name, text in skipped.items():
        if not only or name in only:
            console.print(f"Left out: {text}", soft_wrap=True, markup=False)
    seeds = range(first, first + (1 if quick else splits))
    note = lab.origin(seeds, "coterie " + shlex.join(sys.argv[1:]))
    results: list[lab.Result] = []
    interrupted = False
    for federation in todo:
        finished, splits_of = len(results), seeds
        if federation.masks is not None:  # as many as were published, each once
            splits_of = seeds[:len(federation.masks)]
        interrupted = _run(federation, splits_of, only, results)
        if len(results) > finished:
            rows = lab.write(results, out, note)
            console.print(_table([row for row in rows if row.federation == federation.name]))
            for concern in dict.fromkeys(f"{r.method}: {r.concern}" for r in results[finished:]
                                         if r.concern):
                console.print(concern, soft_wrap=True, markup=False)
        if interrupted:
            break
    if results:
        console.print(f"Tables and figures in {out}: table.csv, table.md, runs.csv, users.csv",
                      soft_wrap=True)
    if interrupted:
        console.print("Interrupted: finished splits are kept.")
        raise typer.Exit(130)


def _run(federation: Benchmark, seeds: range, only: tuple[str, ...],
         results: list[lab.Result]) -> bool:
    """Add the results of one federation; whether it was interrupted."""
    with console.status(f"{federation.name} ...") as status:
        try:
            results += lab.run(federation, seeds, only=only, progress=lambda name, seed,
                               method: status.update(
                f"{name}, split {seed - seeds.start + 1} of {len(seeds)}: {method}"))
        except Interrupted as stop:
            results += stop.best
            return True
    return False


def _table(rows: list[lab.Row]) -> Table:
    """The columns that fit a terminal; table.md and table.csv have all."""
    table = Table(title=f"{rows[0].federation}: {rows[0].metric} per user, best mean first")
    shown = ("method", "mean", "better than alone", "worse than alone", "against coterie",
             "p (Holm)", "models")
    columns = [lab.HEADINGS.index(heading) for heading in shown]
    for heading in shown:
        table.add_column(heading, justify="left" if heading in ("method", "against coterie")
                         else "right",
                         no_wrap=heading in ("method", "mean"))
    for row in rows:
        texts = lab.cells(row)
        table.add_row(*(texts[k] for k in columns), style="bold" if row.method == "coterie" else "")
    return table
