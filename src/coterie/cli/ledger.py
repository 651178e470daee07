"""`coterie federate log`: what left a node, and what it refused."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from coterie.base.errors import InvalidInput
from coterie.cli.base import console
from coterie.cli.federate import command
from coterie.federated.private.ledger import FILE, LoggedAnswer, NodeLedger

_Folder = Annotated[Path, typer.Argument(help="The ledger-dir of a node.", metavar="LEDGER_DIR")]
_Delta = Annotated[float, typer.Option(help="Of the epsilon that is shown as spent.")]


@command.command("log")
def show_log(
    folder: _Folder,
    refused: Annotated[bool, typer.Option("--refused", help="Only what was refused.")] = False,
    last: Annotated[int, typer.Option(help="Only so many lines, the last ones; 0: all.",
                                      min=0)] = 0,
    delta: _Delta = 1e-5,
    as_json: Annotated[bool,
                       typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Every answer that left a node and every question that it refused, and what its users have
    spent.

    Example: coterie federate log ~/.local/state/coterie/1f0c... --refused
    """
    if not (folder / FILE).is_file():
        raise InvalidInput(f"{folder} holds no ledger of a node",
                           remedy="Give the folder that is `ledger-dir` in the node configuration")
    with NodeLedger(folder) as ledger:
        lines, spent = ledger.answers(), ledger.spending(delta)
    chosen = [line for line in lines if line.reason or not refused][-last:]
    if as_json:
        typer.echo(json.dumps({"answers": [line._asdict() for line in chosen], "delta": delta,
                               "epsilon": [[name, epsilon] for name, epsilon in spent.items()]}))
        return
    console.print(_lines(chosen))
    left = [line for line in lines if not line.reason]
    console.print(f"{len(left):,} answers with {sum(line.numbers for line in left):,} numbers "
                  f"left, {len(lines) - len(left):,} were refused.", soft_wrap=True)
    if spent:
        table = Table(title=f"Spent at delta = {delta:g}")
        table.add_column("user")
        table.add_column("epsilon", justify="right")
        for name, epsilon in spent.items():
            table.add_row(str(name), f"{epsilon:.4g}")
        console.print(table)


def _lines(lines: list[LoggedAnswer]) -> Table:
    """The log as a table."""
    table = Table(title="Answers")
    for name, side in (("time", "left"), ("run", "left"), ("round", "right"), ("user", "left"),
                       ("kind", "left"), ("numbers", "right"), ("bytes", "right"),
                       ("question", "left"), ("refused because", "left")):
        table.add_column(name, justify="right" if side == "right" else "left", overflow="fold",
                         no_wrap=name in ("run", "round", "kind", "numbers", "bytes"))
    for line in lines:
        when = datetime.fromtimestamp(line.time).astimezone().isoformat(" ", "seconds")
        table.add_row(when, line.run[:8], str(line.round), str(line.user), line.kind,
                      f"{line.numbers:,}", f"{line.bytes:,}", line.question[:8], line.reason)
    return table
