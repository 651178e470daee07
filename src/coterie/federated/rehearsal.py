"""What a node would do, before it is started: a dry run for its owner, who may see everything.

The configuration is parsed and the data are read as at the node; nothing is sent, and nothing is
written, not even a ledger.
"""

from __future__ import annotations

import shlex
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from coterie.base.errors import CoterieError, InvalidInput
from coterie.base.labels import many
from coterie.data.encoding import Recipe
from coterie.data.users import Users
from coterie.data.validation import show
from coterie.federated import sources
from coterie.federated.client import Data
from coterie.federated.contract import Contract
from coterie.federated.guard import Guard, default_folder
from coterie.federated.private.ledger import FILE, NodeLedger
from coterie.federated.protocol.messages import KINDS, Query
from coterie.losses import Samples, SquaredDistance

_SHOWN = 20  # columns


class Rehearsal(NamedTuple):
    """What a node would do.

    Parameters
    ----------
    facts : name and sentence of each thing that the owner may want to know.
    answered : for each kind of question how many users would answer, and why others would not.
    """

    facts: list[tuple[str, str]]
    answered: list[tuple[str, int, str]]


def read_config(words: list[str]) -> dict[str, Any]:
    """A node configuration: a TOML file, or KEY=VALUE as for `--node-config`.

    Raises
    ------
    InvalidInput : words that are neither.

    Example
    -------
    >>> read_config(['data="csv" user="ward" max-questions=3'])
    {'data': 'csv', 'user': 'ward', 'max-questions': 3}
    """
    if len(words) == 1 and "=" not in words[0]:
        file = Path(words[0])
        try:
            return flat(tomllib.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise InvalidInput(f"the node configuration cannot be read: {error}", where=str(file),
                               remedy='Give a TOML file, or for example \'data="csv" '
                               'path="/data/visits.csv" user="patient"\'') from error
    config: dict[str, Any] = {}
    for part in (part for word in words for part in shlex.split(word, posix=False)):
        key, sign, value = part.partition("=")
        try:
            config[key] = tomllib.loads(f"x = {value}")["x"]
        except ValueError:  # a text that the shell has taken the quotes of
            config[key] = value
        if not sign:
            raise InvalidInput(f"the node configuration cannot be read at {part!r}",
                               remedy="Write KEY=VALUE, texts in quotes")
    return config


def flat(given: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Keys of tables joined by points, as Flower joins them."""
    joined: dict[str, Any] = {}
    for key, value in given.items():
        joined |= flat(value, f"{before}{key}.") if isinstance(value, dict) else {
            f"{before}{key}": value}
    return joined


def rehearse(own: Mapping[str, Any]) -> Rehearsal:
    """What a node with this configuration would do.

    Parameters
    ----------
    own : the node configuration.

    Raises
    ------
    InvalidInput : a configuration, or data, that cannot be used; with all details.
    Refused : no data are named.
    """
    contract = Contract.of(own)
    contract.require_data(False)
    source = sources.load(contract.config)
    facts = [("data", _data(contract, source)), *_columns(contract, source),
             ("limits", _limits(contract)), ("budget", _budget(contract))]
    try:
        users = source if isinstance(source, Users) else Recipe.learn(
            source.frame, user=contract.user, target=contract.target or None,
            features=source.features, drop=source.drop, task=contract.task or "auto",
        ).encode(source.frame)
    except CoterieError as error:
        facts.append(("problem", str(error)))
        return Rehearsal(facts, [])
    return Rehearsal(facts, _answered(contract, source, users))


def _data(contract: Contract, source: Users | sources.Table) -> str:
    rows = source.n_samples if isinstance(source, Users) else len(source.frame)
    where = f" in {contract.path}" if contract.path else ""
    return (f"{many(rows, 'row')} of {many(len(source.names), 'user')}{where}: "
            f"{show(*source.names[:3])}{', ...' * (len(source.names) > 3)}")


def _columns(contract: Contract, source: Users | sources.Table) -> list[tuple[str, str]]:
    """What may be learned from, and what of it is said at the start."""
    if isinstance(source, Users):
        return [("columns", show(*source.feature_names[:_SHOWN]))]
    named = source.features or tuple(name for name in source.frame.columns if name not in (
        source.user, source.target, *source.drop))
    lines = [("columns", show(*named[:_SHOWN])),
             ("left out", show(*(name for name in source.frame.columns if name not in (
                 *named, source.user, source.target))) or "none")]
    if contract.private:
        return [*lines, ("said", "names of users, and of columns that `columns` declares; else "
                         "noisy releases only")]
    told = [f"{one.name} ({', '.join(list(one.levels.counts)[:5])})"
            for one in source.summary().columns if one.levels.counts]
    return [*lines, ("levels said", "; ".join(told[:_SHOWN]) or "none"),
            ("rare levels", f"those with fewer than {many(contract.least_rows, 'row')} are not "
                            "told apart (min-count)")]


def _limits(contract: Contract) -> str:
    return (f"{contract.max_questions or 'by the loss, at most 1,000'} questions and "
            f"{contract.max_hessians or 'one for four rows, 40 to 100,'} Hessians about the same "
            f"rows of a user; {contract.max_seconds:g} seconds for a message; the share "
            f"{contract.holdout:g} of the rows, if any, is held out")


def _budget(contract: Contract) -> str:
    """What is left of it, in the owner's words."""
    if contract.budget_epsilon is None or contract.budget_delta is None:
        return "none: exact answers leave, and noisy releases are refused"
    epsilon, delta = contract.budget_epsilon, contract.budget_delta
    said = f"epsilon = {epsilon:g} at delta = {delta:g} for a {contract.budget_unit}"
    folder = Path(contract.ledger_dir or default_folder(contract))
    if not (folder / FILE).is_file():
        return f"{said}; nothing is spent"
    with NodeLedger(folder) as ledger:
        spent, exact = ledger.spending(delta), ledger.exact_answers()
    most = max(spent.values(), default=0.0)
    said += f"; the user who has spent most has spent {most:.3g}" if spent else \
        "; nothing is spent"
    return said + ("; exact answers left earlier, so that no epsilon holds for these rows"
                   if exact else "")


def _answered(contract: Contract, source: Users | sources.Table,
              users: Users) -> list[tuple[str, int, str]]:
    """For each kind of question how many users would answer, and the reason of most others."""
    dim = users.n_features + 1
    data = Data(SquaredDistance(), Samples(users, dim))
    guard = Guard(contract, source, NodeLedger(None))
    lines = []
    for kind in KINDS:
        if kind in ("pdmm", "release") and not (kind == "release" and contract.private):
            lines.append((kind, 0, "there is no budget" if kind == "release" else
                          "nodes store nothing"))
            continue
        reasons = Counter(guard.objection(data, user, Query(kind, 0, {}))
                          for user in range(users.n_users))
        good = reasons.pop("", 0)
        lines.append((kind, good, reasons.most_common(1)[0][0] if reasons else ""))
    return lines
