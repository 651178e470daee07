"""A node: it replies to a server for its users, whatever carries the messages.

The server's settings and queries are the server's word, and the node's configuration is that of its
owner. Only what `FROM_SERVER` lists is taken from the server, and nothing about data where the
owner has named them.

Users remember nothing between two queries: a query holds all that its reply needs.

The owner of a node may name a folder (`models-dir`; the server cannot) in which the node keeps the
models of its users, so that it predicts without the server. Each user has one file in it, written
when the user gets its model at the end of a fit, and replaced by the next fit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from coterie.base.errors import CoterieError, Incompatible, InvalidInput, Refused, require
from coterie.base.machine import OutOfTime, time_limit
from coterie.base.storage import json_ready, write_atomically
from coterie.base.types import Array
from coterie.data.encoding import Recipe
from coterie.federated import sources
from coterie.federated.agreement import Agreement
from coterie.federated.bounds import MOST_BYTES, alike, check_agreement, check_data, objection
from coterie.federated.client import Data, answer_all
from coterie.federated.contract import Contract
from coterie.federated.guard import Guard, default_folder
from coterie.federated.private.release import finished_at_home, objection_to
from coterie.federated.protocol.messages import (
    VERSION,
    BadMessage,
    Batch,
    Message,
    decode,
    gather,
)
from coterie.federated.settings import DATA, FOR_NODES, by_present_names
from coterie.fitting.predictions import Predictor, PredictsRows
from coterie.fitting.units import Units
from coterie.losses import Samples, SquaredDistance

log = logging.getLogger("coterie.federated")
_T = TypeVar("_T")
_FILES = "user-*.json"  # in which models are kept
_LONGEST = 500  # characters of a reason
_STEP = 0.1  # seconds, of which the time of answers with a budget is a multiple
#: All that a node takes from a server.
FROM_SERVER = (*FOR_NODES, "agreement", "run")
#: What is said of data, which is the owner's word alone where the owner has named them.
_OWNERS = set(DATA) - {"holdout", "task"}


def settings(said: Mapping[str, Any], contract: Contract) -> dict[str, Any]:
    """What a node goes by: the owner's word, and what a server may say besides.

    Parameters
    ----------
    said : what the server says of the run.
    contract : what the owner has set.
    """
    kept = {key: value for key, value in by_present_names(said).items()
            if key in FROM_SERVER and not (contract.owned and key in _OWNERS)}
    return {**kept, **contract.config}


class NodeReplies(NamedTuple):
    """What leaves a node: replies as bytes, and reasons of refusals, both by the user's name as
    JSON.
    """

    replies: dict[str, bytes]
    refusals: dict[str, str]


class Node:
    """A node during one message.

    Parameters
    ----------
    said : what the server says of the run.
    own : the node's configuration.
    read : reads tables; one that is shared by nodes remembers the last.
    simulated : whether this is a node of a simulation, where a server may name its own data.

    Example
    -------
    >>> node = Node({}, {"data": "dataset", "dataset": "ellipses"})
    >>> node.introduce()["version"]
    2
    """

    def __init__(self, said: Mapping[str, Any], own: Mapping[str, Any],
                 read: sources.TableReader | None = None, *, simulated: bool = False) -> None:
        self.read, self.simulated = read or sources.TableReader(), simulated
        self.said, self.own = dict(said), dict(own)
        self.run = str(self.said.get("run", ""))[:200]

    def _begin(self) -> Contract:
        """The contract, after all that can be refused without data."""
        contract = Contract.of(self.own)
        contract.require_data(self.simulated)
        check_data(self.said, contract.config)
        self.config = settings(self.said, contract)
        return contract

    def introduce(self) -> dict[str, Any]:
        """Who is at this node, and what it says of its data; or an "error", as text."""
        try:
            contract = self._begin()
            agreed = "agreement" in self.config  # then names are enough
            private = contract.private or _number(self.config.get("epsilon", 0)) > 0
        except (CoterieError, ValueError) as error:
            return {"error": str(error)}

        def describe() -> str:
            source = sources.load(self.config, self.read)
            text = contract.introduction(source, agreed, private).to_json()
            with Guard(contract, source) as guard:
                guard.introduce(self.run, text, summary=not agreed and not private)
            return text

        try:
            with _paced(contract):
                return {"introduction": _own_business(describe, contract), "version": VERSION}
        except CoterieError as error:
            return {"error": str(error)}

    def answer(self, queries: Mapping[str, bytes]) -> NodeReplies:
        """The replies of the users of this node, as far as its owner allows them.

        Parameters
        ----------
        queries : of each user who is asked, by its name as JSON.

        Returns
        -------
        NodeReplies, of those who can answer or may not. Why data cannot be used is in the node's
        own log.
        """
        try:
            contract = self._begin()
            agreement = check_agreement(str(self.config.get("agreement", "")), self.own)
            contract.permit(agreement)
            share, seed = self._split_asked()
            with _paced(contract):
                return _own_business(lambda: self._answer(contract, agreement, share, seed,
                                                          queries), contract)
        except CoterieError as error:
            return NodeReplies({}, dict.fromkeys(queries, _reason(error)))

    def _answer(self, contract: Contract, agreement: Agreement, share: float, seed: int,
                queries: Mapping[str, bytes]) -> NodeReplies:
        """The same, after all that can be refused without data."""
        kept = self._kept_rows(contract, agreement)
        source = (None if kept is None else sources.Encoded.read(kept)) \
            or sources.load(self.config, self.read)
        with Guard(contract, source) as guard:
            try:
                split = guard.holdout(share, seed, agreement.task, len(agreement.features))
                users = contract.users(agreement, source)
            except Refused as error:
                known = {_name(key) for key in queries} & {*source.names}
                guard.refuse(self.run, {name: ("", 0, error.reason) for name in known})
                return NodeReplies({}, dict.fromkeys(queries, error.reason))
            if kept is not None and isinstance(source, sources.Table):
                sources.Encoded(users=users, n_columns=source.n_columns,
                                digests=guard.rows).write(kept)
            if contract.private:  # a loss may refuse values: models are finished apart
                data = Data(SquaredDistance(), Samples(users, users.n_features))
            else:
                data = agreement.data_of(users, *split, own=contract.splits)
                data = replace(data, withheld=guard.withheld(data))
            return self._answers(guard, agreement, replace(
                data, keeper=guard.ledger, about=_encoding(agreement),
                grouping=contract.user), queries)

    def _kept_rows(self, contract: Contract, agreement: Agreement) -> Path | None:
        """The file in which the rows are kept as numbers by this recipe, if they can be kept."""
        state = sources.state_of(self.config) if contract.owned else ""
        if not state:
            return None
        spec = json.dumps([state, sorted(contract.config.items()), _encoding(agreement)],
                          default=str)
        name = hashlib.sha256(spec.encode()).hexdigest()[:32]
        return Path(contract.ledger_dir or default_folder(contract)) / "rows" / f"{name}.coterie"

    def _split_asked(self) -> tuple[float, int]:
        """The share of rows to hold out, and its seed."""
        try:
            share, seed = float(self.config["holdout"]), int(self.config["seed"])
            if 0 <= share < 1 and 0 <= seed < 1 << 63:
                return share, seed
        except (KeyError, TypeError, ValueError, OverflowError):
            pass
        raise Refused("held-out or seed cannot be used")

    def _digest(self, query: Message, agreement: Agreement) -> str:
        return _digest(query, self._split_asked()[0], agreement)

    def _answers(self, guard: Guard, agreement: Agreement, data: Data,
                 queries: Mapping[str, bytes]) -> NodeReplies:
        """Replies and refusals."""
        users = data.samples.users
        asked: dict[int, Message] = {}
        refused: dict[Any, tuple[str, int, str]] = {}  # kind, round and reason
        for key, content in queries.items():
            name = _name(key)
            if name not in users.names:
                continue
            try:
                query = decode(bytes(content), MOST_BYTES)
            except (BadMessage, TypeError) as error:
                refused[name] = "", 0, str(error)
                continue
            first = next(iter(asked.values()), query)
            user = users.index(name)
            reason = _objection(guard, agreement, data, user, query, first) or guard.unaffordable(
                data, user, query, self._digest(query, agreement))
            if reason:
                refused[name] = query.kind, query.round, reason
            else:
                asked[user] = query
        guard.refuse(self.run, refused)
        replies, over = dict[str, bytes](), dict[str, str]()
        try:
            with time_limit(guard.settings.max_seconds):
                replies, over = self._replies(guard, agreement, data, asked) if asked else ({}, {})
        except OutOfTime:
            late = (f"its node has worked on it for {guard.settings.max_seconds:g} seconds, and "
                    "its owner allows no more (max-seconds)")
            over = {json.dumps(users.names[k]): late for k in asked}
            guard.refuse(self.run, {users.names[k]: (query.kind, query.round, late)
                                    for k, query in asked.items()})
        return NodeReplies(replies, {json.dumps(name): reason
                                     for name, (_, _, reason) in refused.items()} | over)

    def _replies(self, guard: Guard, agreement: Agreement, data: Data,
                 asked: Mapping[int, Message]) -> tuple[dict[str, bytes], dict[str, str]]:
        """The replies that may leave, and of those that are too many the reasons."""
        users, batch = data.samples.users, gather(list(asked.items()), "query")
        replies = answer_all(data, batch)
        leaving = replies if replies.kind != "join" or self.own.get("return-models") else \
            replace(replies, ragged={})  # a newcomer's model stays with it
        messages = dict(leaving.items())
        encoded = {k: reply.encode() for k, reply in messages.items()}
        digests = {k: self._digest(asked[k], agreement) for k in messages}
        sizes = {k: len(content) for k, content in encoded.items()}
        over = guard.account(self.run, messages, data, digests, sizes)
        left = {k: query for k, query in asked.items() if k not in over}
        folder = str(self.own.get("models-dir", ""))
        models = self._kept(guard, agreement, data, batch, replies) if folder else {}
        if models:
            keep_models(folder, agreement, [(users.names[k], models[k]) for k in left])
        keys = {k: json.dumps(users.names[k]) for k in asked}
        return {keys[k]: encoded[k] for k in left}, {keys[k]: reason for k, reason in over.items()}


    def _kept(self, guard: Guard, agreement: Agreement, data: Data, batch: Batch,
              replies: Batch) -> dict[int, Array]:
        """The models that users keep; with a budget, nobody learns whether there are any."""
        try:
            whole = data if batch.kind != "home" else agreement.data_of(data.samples.users.data,
                                                                        0.0, 0)
            return _models(whole, batch, replies)
        except (Exception, OutOfTime):
            if not guard.settings.private:
                raise
            log.exception("the models of this node's users cannot be finished")
            return {}


def _reason(error: CoterieError) -> str:
    return (error.reason if isinstance(error, Refused) else str(error))[:_LONGEST]


@contextlib.contextmanager
def _paced(contract: Contract) -> Iterator[None]:
    """With a budget, the block takes a multiple of a step: how long the work takes is a fact of the
    rows.
    """
    began = time.monotonic()
    try:
        yield
    finally:
        if contract.private:
            time.sleep(-(time.monotonic() - began) % _STEP)


def _own_business(work: Callable[[], _T], contract: Contract) -> _T:
    """What the work gives; why it fails is for the owner alone, since the reason may name cells.

    What the contract refuses says nothing of rows, and in a simulation the rows are the server's.
    """
    try:
        return work()
    except Refused:
        raise
    except Exception as error:
        if not contract.owned and isinstance(error, CoterieError):
            raise
        log.error("a node cannot answer from its data: %s", error,
                  exc_info=not isinstance(error, (CoterieError, OSError)))
        if isinstance(error, FileNotFoundError) and not contract.private:
            raise Incompatible(f"The file {Path(str(error.filename)).name} of this node is not "
                               "there.") from None
        raise Incompatible("The data of this node cannot be used as asked; the node's own log says "
                           "why, and so does `coterie federate check` there.") from None


def _objection(guard: Guard, agreement: Agreement, data: Data, user: int, query: Message,
               first: Message) -> str:
    """Why this question is not answered, or an empty text."""
    home = query.kind == "home" and agreement.units is not None
    dim = agreement.make_loss().dim(data.samples.users) if home else data.samples.dim
    first_of_all = guard.objection(data, user, query) if guard.settings.private else ""
    reason = first_of_all or objection(query, dim, 1 if data.train is None else 2)
    if reason is None and not alike(query, first):
        reason = "the users of a node are asked different questions at once"
    reason = reason or guard.objection(data, user, query)
    if reason or query.kind != "release":
        return reason
    if guard.settings.private and query.arrays["settings"][:1].tolist() != [
            int(guard.settings.budget_unit == "user")]:
        return (f"the budget of the owner of the node protects a {guard.settings.budget_unit} "
                "(budget-unit), and the release would protect something else")
    return objection_to(data.release, user, query, data.samples.users.n_features)


def _models(data: Data, queries: Batch, replies: Batch) -> dict[int, Array]:
    """The users' models, where the question lets them have one; nobody else sees these."""
    if queries.kind == "certify" and "point" in queries.arrays:  # the models that users get
        return dict(zip(queries.users.tolist(), queries.arrays["point"], strict=True))
    if queries.kind == "join":
        return {k: reply.arrays["model"][0] for k, reply in replies.items()}
    if queries.kind == "home":  # finished from exact rows
        models = finished_at_home(data.loss, data.samples, queries)
        return dict(zip(queries.users.tolist(), models, strict=True))
    return {}


def _digest(query: Message, share: float, agreement: Agreement) -> str:
    """A name for the question: the same only if the answer is the same."""
    sums = hashlib.sha256(f"{query.kind} {share!r} {agreement.digest}".encode())
    for name, array in sorted(query.arrays.items()):
        sums.update(f"{name} {array.dtype} {array.shape}".encode())
        sums.update(np.ascontiguousarray(array).tobytes())
    return sums.hexdigest()[:32]


def _encoding(agreement: Agreement) -> str:
    """A name for how rows become numbers."""
    recipe = None if agreement.recipe is None else replace(agreement.recipe, notes=()).to_json()
    return hashlib.sha256(json.dumps([recipe, agreement.features, agreement.signs]).encode()
                          ).hexdigest()[:32]


def _name(key: str) -> Any:
    """A user's name from JSON; None if it is none."""
    with contextlib.suppress(ValueError, RecursionError):
        name = json.loads(key)
        return name if isinstance(name, (str, int, float)) else None
    return None


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


# -- models that a node keeps


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptModels(PredictsRows):
    """The models of a node's users: `predict` works as that of a run, for these users only.

    Parameters
    ----------
    names : of the users.
    models : (n_users, dim) their models, in the solver's units.
    units, recipe : how rows become what the solver sees.
    """

    names: tuple[Any, ...]
    models: Array = field(repr=False)
    units: Units = field(repr=False)
    recipe: Recipe | None = field(repr=False, default=None)

    def _predictor(self) -> Predictor:
        return Predictor(units=self.units, recipe=self.recipe, names=self.names, models=self.models,
                         labels=np.full(len(self.names), -1), together=None)


def keep_models(folder: str | PathLike[str], agreement: Agreement,
                models: Iterable[tuple[Any, Array]]) -> None:
    """Write one file for each user.

    Parameters
    ----------
    folder : created if needed.
    agreement : with the units of the models.
    models : names of users, and their models in the solver's units.
    """
    assert agreement.units is not None
    shared = {"run": agreement.run, "recipe": None if agreement.recipe is None
              else agreement.recipe.to_json(), "units": json_ready(agreement.units.state())}
    for name, model in models:
        text = json.dumps({"user": name, "model": np.asarray(model).tolist(), **shared},
                          ensure_ascii=False)
        number = hashlib.sha256(json.dumps(name).encode()).hexdigest()[:40]
        write_atomically(Path(folder) / f"user-{number}.json", text.encode())


def load_models(folder: str | PathLike[str]) -> KeptModels:
    """Read the models that a node keeps; of several fits, those of the last one.

    Parameters
    ----------
    folder : the `models-dir` of the node.

    Raises
    ------
    InvalidInput : there are none, or a file is damaged.
    """
    files = sorted(Path(folder).glob(_FILES), key=lambda file: (file.stat().st_mtime_ns, file.name))
    require(files, f"{folder} holds no models that a node keeps",
            "Give the folder that is `models-dir` in the node configuration")
    try:
        parts = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        last = parts[-1]
        users = {part["user"]: part["model"] for part in parts if part["run"] == last["run"]}
        units = Units.from_state(last["units"])
        recipe = None if last["recipe"] is None else Recipe.from_json(last["recipe"])
        models = np.array(list(users.values()), dtype=float)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInput(f"a file in {folder} is damaged: {error}",
                           remedy="Run the federation again") from error
    return KeptModels(names=tuple(users), models=models, units=units, recipe=recipe)


def holds_models(folder: str | PathLike[str]) -> bool:
    """Whether a folder is one in which a node keeps models."""
    return any(Path(folder).glob(_FILES))
