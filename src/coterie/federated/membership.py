"""Joining and leaving a finished run, without asking the other users again.

A newcomer gets a model in one question and answer (`coterie.federated.client`). A user that leaves
is taken out with what the server has in the checkpoint: with squared losses the second moments of
all others, which decide everything.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coterie.base.errors import Incompatible, InvalidInput
from coterie.base.labels import many
from coterie.base.storage import pack, unpack, write_atomically
from coterie.base.types import Array, Ints
from coterie.data.moments import SecondMoments
from coterie.data.users import Split
from coterie.data.validation import show
from coterie.federated.agreement import Agreement, Carrier, write_agreement
from coterie.federated.protocol.ledger import Ledger
from coterie.federated.protocol.messages import digest, square, triangle
from coterie.federated.session import Round, Session
from coterie.federated.sources import in_order
from coterie.fitting import Fit, fit
from coterie.fitting.predictions import name_text
from coterie.output.runs.load import Run
from coterie.output.runs.save import model_columns, table


class Newcomers(NamedTuple):
    """Who joined, and what the server learned of them.

    Parameters
    ----------
    names : of the newcomers.
    groups : (n,) the group of the run that fits each best; -1 where users of the run share nothing.
    models : by name, in the solver's units, of those whose owners return them.
    ledger : everything that was sent.
    """

    names: tuple[Any, ...]
    groups: Ints
    models: dict[Any, Array]
    ledger: Ledger


def sentences_of(groups: Iterable[int]) -> list[str]:
    """How many newcomers are in which group."""
    return [f"{many(size, 'newcomer')} "
            f"{f'in group {group + 1}' if group >= 0 else 'with a model from own rows'}."
            for group, size in sorted(Counter(groups).items())]


def join_run(runtime: Carrier, run: Run, *, wait: float = 120.0,
             progress: Callable[[Round], None] | None = None) -> Newcomers:
    """Ask newcomers which group of a finished run fits them best; they get their models with it.

    Parameters
    ----------
    runtime : finds the users and carries the question; users of the run are not asked.
    run : a finished fit.
    wait : seconds to wait for newcomers.
    progress : called after every round.

    Raises
    ------
    InvalidInput : the run is no fit.
    Incompatible : nobody new is there, or newcomers do not answer.
    """
    if run.units is None or run.settings is None or run.centres is None:
        raise InvalidInput(f"{run.folder} has no groups that a newcomer could join",
                           remedy="Give the folder of a run of `coterie fit`, or of `coterie "
                           "federate` without --lam")
    agreement = agreement_of(run)
    runtime.use(replace(agreement, names=()))  # newcomers need say no more than their names
    known, end, newcomers = {name_text(name) for name in run.names}, time.monotonic() + wait, \
        tuple[Any, ...]()
    while not newcomers:
        nodes = runtime.gather(1, max(end - time.monotonic(), 0.0))
        newcomers = in_order(name for _, node in nodes
                             for name in node.names if name_text(name) not in known)
        if not newcomers and time.monotonic() >= end:
            raise Incompatible(f"All users that are here are in {run.folder} already. Start the "
                               "nodes of newcomers.")
        time.sleep(0.0 if newcomers else 0.5)
    runtime.use(replace(agreement, names=newcomers))
    shared: dict[str, Array] = {"models": run.centres if run.kind != "alone" else run.centres[:0],
                                "noise": np.array(run.noise)}
    if run.covariance is not None:
        shared["covariance"] = triangle(run.covariance[None])
    session = Session(runtime, newcomers, progress=progress)
    replies = session.ask("join", run.models.shape[1], shared=shared)
    models = {newcomers[k]: reply.arrays["model"][0] for k, reply in replies.items()
              if "model" in reply.arrays}
    groups = np.asarray(replies.arrays["who"], dtype=np.int64)
    if not ((groups >= -1) & (groups < len(run.centres))).all():
        raise Incompatible("A newcomer answered with a group that does not exist. Install the same "
                           "version of coterie everywhere.")
    return Newcomers(newcomers, groups, models, session.ledger)


def agreement_of(run: Run) -> Agreement:
    """What a run's users agreed on, with its units; for a run of `coterie fit`, as if they had."""
    file = run.folder / "checkpoint" / "federation.json"
    if file.exists():
        return replace(Agreement.from_json(file.read_text(encoding="utf-8")), units=run.units)
    assert run.units is not None
    assert run.settings is not None
    return Agreement(names=run.names, features=run.units.feature_names, recipe=run.recipe,
                     units=run.units, run=digest(run.models), task=run.settings.task,
                     n_classes=run.settings.n_classes)


def write_newcomers(newcomers: Newcomers, run: Run, file: Path) -> None:
    """A CSV file: name and group of each newcomer and, of those who returned it, the model in the
    units given.
    """
    assert run.units is not None
    columns = (model_columns(run.units, run.recipe.classes if run.recipe else ())
               if newcomers.models else [])
    rows = []
    for name, group in zip(newcomers.names, newcomers.groups.tolist(), strict=True):
        model = newcomers.models.get(name)
        cells = ([""] * len(columns) if model is None
                 else run.units.coefficients(model[None]).ravel().tolist())
        rows.append([name, group, *cells])
    write_atomically(file, table(["user", "cluster", *columns], rows))


def leave_run(run: Run, names: Collection[str], out: Path) -> Fit:
    """Fit again without some users, from the second moments of the others; nobody is asked.

    The certificate is the server's own, from the moments. There is no average, which needs other
    sums. The numbers of those who left are in no file of `out`.

    Parameters
    ----------
    run : a finished fit of a federation with a squared loss, with its checkpoint.
    names : of those who leave.
    out : the folder of the new run, which may be that of the run.

    Returns
    -------
    The fit of the others.

    Raises
    ------
    InvalidInput : somebody is not in the run, nobody would be left, or the checkpoint has no second
        moments.
    """
    answers = run.folder / "checkpoint" / "answers" / "0000.coterie"
    saved: dict[str, Any] = (unpack(answers.read_bytes(), str(answers)) if answers.exists()
                             else {"kind": ""})
    if saved["kind"] != "moments" or run.settings is None:
        raise InvalidInput(f"the checkpoint in {run.folder} has no second moments of its "
                           "users, which only fits of a federation with a squared loss have",
                           remedy="Run the federation again without these users")
    known = {name_text(name): k for k, name in enumerate(run.names)}
    missing = [name for name in names if name not in known]
    if missing:
        raise InvalidInput(f"{show(missing[0])} is not in {run.folder}",
                           remedy="Give names as in models.csv")
    stay = np.setdiff1d(np.arange(len(run.names)), [known[name] for name in names])
    if not len(stay):
        raise InvalidInput("nobody would be left", remedy="Delete the folder of the run")
    before = agreement_of(run)
    agreement = replace(before, names=tuple(before.names[k] for k in stay), units=None)
    arrays = {name: rows[stay] for name, rows in saved["arrays"].items()}
    q = arrays["means"].shape[2]
    parts = [SecondMoments(arrays["count"][:, j].astype(np.int64), arrays["means"][:, j],
                           square(arrays["scatter"][:, j], q))
             for j in range(arrays["count"].shape[1])]
    everything = parts[0] if len(parts) == 1 else parts[0].add(parts[1])
    users = [part.users(agreement.names, agreement.features) for part in (everything, *parts)]
    split = None if len(parts) == 1 else Split(users[1], users[2].take([]), users[2])
    settings = replace(run.settings, average="off")  # moments have neither curves nor folds
    fitted = replace(fit(users[0], settings, split=split), recipe=run.recipe)
    _keep_checkpoint(out / "checkpoint", agreement, {**saved, "arrays": arrays, "accounts": {
        key: account[stay] for key, account in saved["accounts"].items()}})
    return fitted


def _keep_checkpoint(folder: Path, agreement: Agreement, moments: dict[str, Any]) -> None:
    """The agreement and the moments of those who stay; a later run with this folder asks them for
    the rest again.
    """
    shutil.rmtree(folder, ignore_errors=True)
    write_atomically(folder / "answers" / "0000.coterie", pack(moments), durable=True)
    write_agreement(folder, agreement)
