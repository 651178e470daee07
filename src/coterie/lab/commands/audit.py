"""`coterie audit`: attacks on what crosses in a federation, and what they get."""

from __future__ import annotations

import json
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from coterie.base.errors import InvalidInput
from coterie.base.storage import write_atomically
from coterie.cli import base as options
from coterie.cli.base import console
from coterie.data.users import Users
from coterie.data.validation import split_names
from coterie.federated.private.policy import Privacy, parse_clip
from coterie.fitting.prepare import prepare
from coterie.lab.attacks import auditing
from coterie.lab.attacks.simulation import loss_for
from coterie.output.runs.load import read

#: Questions whose answers hold Hessians, gradients, or sums over rows.
HESSIANS = ("expand", "local", "summary")
GRADIENTS = ("gradient", "prox", "train", "around", "pdmm")
SUMS = ("facts", "moments", "describe")

app = typer.Typer(add_completion=False)
_Source = Annotated[Path, typer.Argument(metavar="RUN|DATA",
    help="A table with one row per sample, or the folder of a federated run.")]
_Data = Annotated[Path | None, typer.Option(
    help="The table of a run, on which the run is repeated.")]
_User = Annotated[str, typer.Option(help="Column with the owner of each row.")]
_Algorithm = Annotated[str, typer.Option(
    help="What is attacked, separated by commas: algorithms of `coterie federate`, fit, weights, "
         "or active (a server that asks at points of its choice). By default newton, splitting, "
         "pdmm, fit and weights; of a run, its own.")]
_Rows = Annotated[str, typer.Option(help="Rows per user that take part, separated by commas.")]
_Lam = Annotated[float, typer.Option(help="Penalty strength of algorithms at a given one.")]
_Epsilon = Annotated[float | None, typer.Option(
    help="Budget of a private fit: its releases are attacked too, with their noise and without.")]
_Delta = Annotated[float, typer.Option(help="The delta of the budget.")]
_Clip = Annotated[str, typer.Option(
    help="Bounds of columns, as for `coterie federate`; by default those of the rows that take no "
         "part.")]
_MaxUsers = Annotated[int, typer.Option(help="Largest number of users that take part.", min=2)]
_Seed = Annotated[int, typer.Option(help="Seed of all random numbers.", min=0)]
_Out = Annotated[Path | None, typer.Option(help="File for the results as JSON.")]


@app.command("audit")
def run_audit(
    source: _Source, data: _Data = None, user: _User = "", target: options.Target = "",
    features: options.Features = "", drop: options.Drop = "", separator: options.Separator = "",
    loss: options.LossName = "auto", ridge: options.Ridge = 1e-3, algorithm: _Algorithm = "",
    rows: _Rows = "1,5,10,20,50", lam: _Lam = 0.02, epsilon: _Epsilon = None,
    delta: _Delta = 1e-5, clip: _Clip = "", max_users: _MaxUsers = 60, seed: _Seed = 0,
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
    privacy = None
    if source.is_dir():
        run = read_run(source)
        if data is None:
            _print_structure(describe_messages(run), out, as_json)
            return
        source, privacy = data, run["privacy"]
        user, target, algorithm = run["user"] or user, run["target"] or target, \
            algorithm or run["algorithm"]
        loss, lam, ridge = run["loss"], run["lam"], run["ridge"]
    if epsilon is not None:
        privacy = Privacy(epsilon=epsilon, delta=delta, clip=parse_clip(clip))
    users, task = _read_users(source if data is None else data, user, target, features, drop,
                              separator)
    loss = "poisson" if loss == "auto" and task == "counts" else loss
    names = [name.strip() for name in algorithm.split(",") if name.strip()] \
        or list(auditing.ALGORITHMS)
    with console.status("Attacking ...") as status:
        result = auditing.audit(
            users, loss_for(users, loss, ridge), algorithms=names, rows=_numbers(rows), lam=lam,
            max_users=max_users, seed=seed, privacy=privacy,
            progress=None if as_json else lambda text: status.update(f"Attacking {text} ..."))
    if out is not None:
        write_atomically(out, json.dumps(result.to_json(), indent=1, allow_nan=False).encode())
    if as_json:
        print(json.dumps(result.to_json(), allow_nan=False))
    else:
        _print_result(result)
    if not result.holds:
        raise typer.Exit(1)


def read_run(folder: str | PathLike[str]) -> dict[str, Any]:
    """What run.json says of a federated run: its settings, the columns of its table, the length of
    a model, the kinds of questions that were answered, and the budget where there was one. The
    algorithm is "fit" where everything was chosen, and "release" where this was done privately.

    Raises
    ------
    InvalidInput : the folder is no run, or not of a federation.
    """
    info, _ = read(folder)
    settings: dict[str, Any] = info["settings"]
    if "n_rounds" not in info:
        raise InvalidInput(f"{folder} is a run of a table: nothing crossed in it",
                           remedy="Give the folder of a run of `coterie federate`")
    run = {"lam": float(info["lam"]), "user": str(settings.get("user", "")),
           "target": str(settings.get("target", "")), "dim": int(info["dim"]),
           "kinds": tuple(info["bytes_by_kind"]), "n_rounds": int(info["n_rounds"])}
    budget = info.get("privacy")
    if budget is not None:  # its loss is that of the released statistics
        privacy = Privacy(**{name: budget[name] for name in ("epsilon", "delta", "unit")})
        return {**run, "algorithm": "release", "loss": "auto", "ridge": 1e-3, "privacy": privacy}
    algorithm = "fit" if "kind" in info else str(settings.get("algorithm") or "newton")
    return {**run, "algorithm": algorithm, "loss": str(settings.get("loss", "auto")),
            "ridge": float(settings.get("ridge", 1e-3)), "privacy": None}


def describe_messages(run: dict[str, Any]) -> list[str]:
    """What can be recovered by the kinds of messages alone, in sentences."""
    hessians, gradients, sums = (", ".join(kind for kind in run["kinds"] if kind in group)
                                 for group in (HESSIANS, GRADIENTS, SUMS))
    dim, privacy = run["dim"], run["privacy"]
    said = [f"{run['n_rounds']} rounds of {run['algorithm']}, models of {dim} coordinates."]
    if privacy is not None:
        said.append(f"Users sent noisy releases: epsilon = {privacy.epsilon:g}, delta = "
                    f"{privacy.delta:g}, unit {privacy.unit}.")
    if hessians:
        said.append(f"Users sent Hessians ({hessians}): if at two or more points, all rows of a "
                    f"user with at most {dim} rows can be rebuilt exactly unless its loss is "
                    "squared, and rows of users with some more rows often.")
    if gradients:
        said.append(f"Users sent gradients ({gradients}): the row of a user with one row can be "
                    f"rebuilt; with fewer than {dim} rows, a row is told from others by the span "
                    "of the gradients.")
    if sums:
        said.append(f"Users sent sums over their rows ({sums}): one row, or with products two "
                    "rows, can be rebuilt, also if they are the held-out ones.")
    return [*said, "Give --data TABLE to repeat the run and attack it."]


def _print_structure(sentences: list[str], out: Path | None, as_json: bool) -> None:
    document = json.dumps({"structure": sentences}, indent=1)
    if out is not None:
        write_atomically(out, document.encode())
    if as_json:
        print(document)
        return
    for sentence in sentences:
        console.print(sentence, soft_wrap=True, highlight=False, markup=False)


def _read_users(file: Path, user: str, target: str, features: str, drop: str,
                separator: str) -> tuple[Users, str]:
    """The rows of a table as numbers, and the task; two classes become -1 and 1."""
    if not user or not target:
        raise InvalidInput("an audit needs the owner of each row and what is predicted",
                           remedy="Give --user COLUMN and --target COLUMN")
    prepared = prepare(file, user=user, target=target, features=split_names(features) or None,
                       drop=split_names(drop), task="auto", separator=separator or None,
                       loss="auto", ridge=1e-3, standardize=True)
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


def _print_result(result: auditing.Audit) -> None:
    def say(text: str) -> None:
        console.print(text, soft_wrap=True, highlight=False)

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
        areas = (f"{area:.2f}" if np.isfinite(area) else ""
                 for area in (one.membership, one.attribute, one.attribute_public))
        table.add_row(one.algorithm, str(one.rows), str(one.n_users), str(one.hessians),
                      f"{one.exact_users:.0%}", f"{one.exact_rows:.0%}", *areas)
    console.print(table)
    say("exact: users with a row rebuilt within one percent; of rows: the share of all rows. "
        "member: AUC of telling a user's row from another of the same user. attribute: AUC of "
        "guessing the first feature from the rest of the row, public: without the messages. 0.5 is "
        "guessing, 1 certainty. Other attacks may get more.")
    if np.isfinite(result.moved):
        say("One user that lies consistently moves the model of another by "
            f"{result.moved:.2g} at most.")
    if result.bound is not None and result.claimed is not None:
        say(f"By telling releases apart, epsilon is at least {result.bound.epsilon:.2f} "
            f"(confidence {result.bound.confidence:.0%}); claimed: {result.claimed:g}, which "
            f"allows membership {result.allowed:.2f}."
            + ("" if result.holds else " The claim is refuted."))
