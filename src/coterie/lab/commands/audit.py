"""`coterie audit`: attacks on what crosses in a federation, and what they get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.table import Table

from coterie.base.errors import InvalidInput
from coterie.base.storage import write_atomically
from coterie.cli import base as options
from coterie.cli.base import console
from coterie.data.users import Users

app = typer.Typer(add_completion=False)
_Source = Annotated[Path, typer.Argument(help="A table with one row per sample, or the folder of a "
                                              "federated run.",
                                         metavar="RUN|DATA")]
_Data = Annotated[Path | None,
                  typer.Option(help="The table of a run, on which the run is repeated.")]
_User = Annotated[str, typer.Option(help="Column with the owner of each row.")]
_Algorithm = Annotated[str, typer.Option(
    help="What is attacked, separated by commas: algorithms of `coterie federate`, fit, weights, "
         "or active (a "
         "server that asks at points of its choice). By default newton, "
         "splitting, pdmm, fit and weights; of a run, its own.")]
_Rows = Annotated[str, typer.Option(help="Rows per user that take part, separated by commas.")]
_Lam = Annotated[float, typer.Option(help="Penalty strength of algorithms at a given one.")]
_Epsilon = Annotated[float | None, typer.Option(
    help="Budget of a private fit: its releases are attacked too, with their noise and without.")]
_Delta = Annotated[float, typer.Option(help="The delta of the budget.")]
_Clip = Annotated[str, typer.Option(help="Bounds of columns, as for `coterie federate`; by default "
                                         "those of the rows "
                                         "that take no part.")]
_MaxUsers = Annotated[int, typer.Option(help="Largest number of users that take part.", min=2)]
_Seed = Annotated[int, typer.Option(help="Seed of all random numbers.", min=0)]
_Out = Annotated[Path | None, typer.Option(help="File for the results as JSON.")]


@app.command("audit")
def run_audit(
    source: _Source, data: _Data = None, user: _User = "", target: options.Target = "",
              features: options.Features = "",
    drop: options.Drop = "", separator: options.Separator = "", loss: options.LossName = "auto",
    ridge: options.Ridge = 1e-3, algorithm: _Algorithm = "", rows: _Rows = "1,5,10,20,50",
              lam: _Lam = 0.02,
    epsilon: _Epsilon = None, delta: _Delta = 1e-5, clip: _Clip = "", max_users: _MaxUsers = 60,
              seed: _Seed = 0,
    out: _Out = None, threads: options.Threads = None, quiet: options.Quiet = False,
              as_json: options.Json = False,
) -> None:
    """Attack what a server sees of a federation: rebuild rows, test membership, guess an attribute.

    DATA is a table: the federation is simulated in this process, with some rows of every user; the
    others are compared with them. RUN is the folder of a federated run, which is repeated on --data
    with its algorithm, loss and lam; without --data, what could be recovered is said by the kinds
    of messages.

    Example: coterie audit table.csv --user who --target y --algorithm newton,splitting --rows 5,20
    """
    from coterie.federated.private.policy import Privacy, parse_clip
    from coterie.lab.attacks import auditing
    from coterie.lab.attacks.runs import RunFacts, structure
    from coterie.lab.attacks.simulation import loss_for

    facts = RunFacts.read(source) if source.is_dir() else None
    if facts is not None and data is None:
        _say(structure(facts), out, as_json)
        return
    if facts is not None:
        user, target, loss = facts.user or user, facts.target or target, facts.loss
        lam, algorithm, ridge = facts.lam, algorithm or facts.algorithm, facts.ridge
    privacy = facts.privacy if facts is not None else None
    if epsilon is not None:
        privacy = Privacy(epsilon=epsilon, delta=delta, clip=parse_clip(clip))
    users, task = _users(source if data is None else data, user, target, features, drop, separator)
    loss = "poisson" if loss == "auto" and task == "counts" else loss
    names = [name.strip() for name in algorithm.split(",") if name.strip()] \
        or list(auditing.ALGORITHMS)
    with console.status("Attacking ...") as status:
        result = auditing.audit(users, loss_for(users, loss, ridge), algorithms=names,
                                rows=_numbers(rows),
                                lam=lam, max_users=max_users, seed=seed, privacy=privacy,
                                progress=None if as_json
                                else lambda text: status.update(f"Attacking {text} ..."))
    if out is not None:
        write_atomically(out, json.dumps(result.to_json(), indent=1, allow_nan=False).encode())
    if as_json:
        print(json.dumps(result.to_json(), allow_nan=False))
    else:
        _show(result)
    if not result.holds:
        raise typer.Exit(1)


def _say(sentences: list[str], out: Path | None, as_json: bool) -> None:
    document = json.dumps({"structure": sentences}, indent=1)
    if out is not None:
        write_atomically(out, document.encode())
    if as_json:
        print(document)
        return
    for sentence in sentences:
        console.print(sentence, soft_wrap=True, highlight=False, markup=False)


def _users(file: Path, user: str, target: str, features: str, drop: str, separator: str) -> tuple[
    Users, str]:
    """The rows of a table as numbers, and the task; two classes become -1 and 1."""
    from dataclasses import replace

    from coterie.data.validation import split_names
    from coterie.fitting.prepare import prepare

    if not user or not target:
        raise InvalidInput("an audit needs the owner of each row and what is predicted",
                           remedy="Give --user COLUMN and --target COLUMN")
    prepared = prepare(file, user=user, target=target, features=split_names(features) or None,
                       drop=split_names(drop),
                       task="auto", separator=separator or None, loss="auto", ridge=1e-3,
                       standardize=True)
    users, recipe = prepared.given, prepared.recipe
    if recipe.task != "classification":
        return users, recipe.task
    if len(recipe.classes) != 2:
        raise InvalidInput(f"attacks are written for two classes, and {target!r} has "
                           f"{len(recipe.classes)}",
                           remedy="Name a target with two classes, or numbers")
    assert users.targets is not None
    return replace(users, targets=2.0 * users.targets - 1.0), recipe.task


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise InvalidInput(f"rows must be numbers separated by commas, got {text!r}",
                           remedy="Use 1,5,10") from None


def _show(result: object) -> None:
    from coterie.lab.attacks.auditing import Audit

    assert isinstance(result, Audit)
    table = Table(title=f"What a server gets: {result.loss} loss, {result.n_features} features")
    for name in ("algorithm", "rows", "users", "Hessians", "exact", "of rows", "member",
                 "attribute", "public"):
        table.add_column(name, justify="left" if name == "algorithm" else "right", no_wrap=True)
    for one in result.findings:
        if one.note:
            table.add_row(one.algorithm, str(one.rows))
            console.print(f"{one.algorithm}, {one.rows} rows: {one.note}", soft_wrap=True,
                          markup=False)
            continue
        areas = [f"{value:.2f}" if np.isfinite(value) else "" for value in (
            one.membership, one.attribute, one.attribute_public)]
        table.add_row(one.algorithm, str(one.rows), str(one.n_users), str(one.hessians),
                      f"{one.exact_users:.0%}",
                      f"{one.exact_rows:.0%}", *areas)
    console.print(table)
    console.print("exact: users with a row rebuilt within one percent; of rows: the share of all "
                  "rows. member: AUC of "
                  "telling a user's row from another of the same user. attribute: AUC of guessing "
                  "the first feature "
                  "from the rest of the row, public: without the messages. 0.5 is guessing, 1 "
                  "certainty. Other attacks "
                  "may get more.", soft_wrap=True, highlight=False)
    if np.isfinite(result.moved):
        console.print("One user that lies consistently moves the model of another by "
                      f"{result.moved:.2g} at most.",
                      soft_wrap=True, highlight=False)
    if result.bound is not None and result.claimed is not None:
        console.print(f"By telling releases apart, epsilon is at least {result.bound.epsilon:.2f} "
                      "(confidence "
                      f"{result.bound.confidence:.0%}); claimed: {result.claimed:g}, which allows "
                      "membership "
                      f"{result.allowed:.2f}." + ("" if result.holds else " The claim is refuted."),
                      soft_wrap=True,
                      highlight=False)
