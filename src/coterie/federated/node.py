"""A node: it replies to a server for its users, whatever carries the messages.

The server's settings and queries are the server's word, and the node's configuration is that of its owner. Only what
`FROM_SERVER` lists is taken from the server, and nothing about data where the owner has named them.

What a user must remember between two queries is stored on the node's disk (`state-dir`, which only the owner can name)
or by the runtime, with its round and the state before it: a round whose reply the server never received is undone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, MutableMapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from coterie.data.participants import Participants
from coterie.errors import CoterieError, InvalidInput
from coterie.federated import sources
from coterie.federated.agreement import Agreement, Introduction
from coterie.federated.client import answer_all
from coterie.federated.config import FOR_NODES, DataSettings, key_of
from coterie.federated.keeping import keep_models
from coterie.federated.protocol.messages import VERSION, Batch, Message, Query, Ragged, decode, gather, misfit
from coterie.storage import pack, unpack, write_atomically

#: All that a node takes from a server.
FROM_SERVER = (*FOR_NODES, "agreement", "run", "bases")
#: What is said of data, which is the owner's word alone where the owner has named them.
_DATA = {key_of(f.name) for f in fields(DataSettings)} - {"held-out", "task"}


def settings(said: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """What a node goes by: the owner's word, and what a server may say besides.

    Parameters
    ----------
    said : what the server says of the run.
    own : the node's configuration.
    """
    kept = {key: value for key, value in said.items() if key in FROM_SERVER and not ("data" in own and key in _DATA)}
    return {**kept, **own}


class Node:
    """A node during one message.

    Parameters
    ----------
    said : what the server says of the run.
    own : the node's configuration.
    store : where the runtime keeps what users remember, as bytes by name; used where the owner names no `state-dir`.

    Example
    -------
    >>> node = Node({"dataset": "ellipses"}, {"data": "dataset"})
    >>> node.introduce()["version"]
    1
    """

    def __init__(self, said: Mapping[str, Any], own: Mapping[str, Any],
                 store: MutableMapping[str, Any] | None = None) -> None:
        self.own, self.config = dict(own), settings(said, own)
        self.store = {} if store is None else store

    def introduce(self) -> dict[str, Any]:
        """Who is at this node, and what it says of its data; or an "error", as text."""
        try:
            source = sources.load(self.config)
            agreed = "agreement" in self.config  # then names are enough
            introduction = Introduction(source.names) if agreed else Introduction.of(source)
            return {"introduction": introduction.to_json(), "version": VERSION}
        except (CoterieError, OSError, ValueError) as error:
            return {"error": str(error)}

    def answer(self, queries: Mapping[str, bytes]) -> dict[str, bytes]:
        """The replies of the users of this node.

        Parameters
        ----------
        queries : of each user who is asked, by its name as JSON.

        Returns
        -------
        Replies by the same names, of those who can answer.
        """
        agreement = Agreement.from_json(str(self.config["agreement"]))
        data = agreement.data(sources.load(self.config), float(self.config["held-out"]), int(self.config["seed"]))
        users, dim = data.samples.users, data.samples.dim
        bases = json.loads(str(self.config.get("bases", "{}")))
        memory = Memory(self.own.get("state-dir"), str(self.config.get("run", "")), self.store)
        asked: list[tuple[int, Message]] = []
        for key, content in queries.items():
            name, query = json.loads(key), decode(bytes(content), Query)
            if name in users.names and misfit(query, query.kind, dim, "query") is None:
                known = memory.recall(name, int(bases.get(json.dumps(name), -1)))
                if query.kind != "pdmm" or known or "point" in query.arrays:
                    asked.append((users.index(name), query))
        if not asked:
            return {}
        replies = answer_all(replace(data, memory=memory.stacked(users, dim)), gather(asked, "query"))
        self._keep_models(replies, dict(asked), agreement, users)
        if replies.kind == "join" and not self.own.get("return-models"):
            replies = replace(replies, ragged={})  # a newcomer's model stays with it
        encoded = {json.dumps(users.names[k]): reply.encode() for k, reply in replies.items()}
        if replies.memory:
            memory.keep(users, replies)
        return encoded

    def _keep_models(self, replies: Batch, asked: Mapping[int, Message], agreement: Agreement,
                     users: Participants) -> None:
        """Keep the users' models where the owner of the node wishes it; the server cannot name the folder."""
        folder, names = str(self.own.get("models-dir", "")), users.names
        if folder and replies.kind == "judge":  # with this question every user gets its model
            keep_models(folder, agreement, [(names[k], query.arrays["model"]) for k, query in asked.items()])
        elif folder and replies.kind == "join":
            keep_models(folder, agreement, [(names[k], reply.arrays["model"][0]) for k, reply in replies.items()])


class Memory:
    """What users of a node remember: after the last query, and before it.

    Parameters
    ----------
    folder : `state-dir` of the owner; empty or None for `store`.
    run : the name of the run.
    store : where the runtime keeps bytes by name.
    """

    def __init__(self, folder: Any, run: str, store: MutableMapping[str, Any]) -> None:
        self.folder = Path(str(folder)) if folder else None
        self.run, self.store = run, store
        self.recalled: dict[Any, dict[str, Any]] = {}

    def _file(self, name: Any) -> Path:
        assert self.folder is not None
        return self.folder / f"{hashlib.sha256(json.dumps(name).encode()).hexdigest()[:40]}.coterie"

    def recall(self, name: Any, base: int) -> bool:
        """Whether the user remembers the round of the last reply that the server received."""
        saved, key = None, json.dumps(name)
        if self.folder is not None:
            with contextlib.suppress(FileNotFoundError, InvalidInput):  # a file cut short is as good as none
                saved = unpack(self._file(name).read_bytes())
        elif key in self.store:
            saved = unpack(bytes(self.store[key]))
        if saved is None or saved["run"] != self.run:
            return False
        for part in ("now", "before"):
            if saved[part] is not None and saved[part]["round"] == base:
                self.recalled[name] = saved[part]
                return True
        return False

    def stacked(self, users: Participants, dim: int) -> dict[str, Ragged]:
        """The memory of all users of the node; those without one have an empty one."""
        if not self.recalled:
            return {}
        blank = {"point": np.zeros((1, dim)), "tails": np.zeros(1), "neighbours": np.zeros(0, dtype=np.int64),
                 "quiet": np.zeros(0, dtype=bool), "radii": np.zeros(0), "others": np.zeros((0, dim)),
                 "difference": np.zeros((0, dim)), "hat": np.zeros((0, dim))}
        rows = [self.recalled.get(name, {"memory": blank})["memory"] for name in users.names]
        counts = {field: np.array([len(row[field]) for row in rows]) for field in blank}
        return {field: Ragged.of(np.concatenate([row[field] for row in rows]), counts[field]) for field in blank}

    def keep(self, users: Participants, replies: Batch) -> None:
        """Keep what the replying users remember now, and what they remembered before."""
        for k in replies.users.tolist():
            name = users.names[k]
            now = {"round": replies.round, "memory": {field: part.rows(k) for field, part in replies.memory.items()}}
            data = pack({"run": self.run, "now": now, "before": self.recalled.get(name)})
            if self.folder is not None:
                write_atomically(self._file(name), data)
            else:
                self.store[json.dumps(name)] = data
