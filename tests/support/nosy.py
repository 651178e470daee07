"""A server that asks a node whatever it likes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

import coterie as ct
from coterie.federated.agreement import Agreement
from coterie.federated.node import Node, NodeReplies
from coterie.federated.protocol.messages import Query, decode
from coterie.federated.settings import for_nodes


def write(users: ct.Users, file: Path) -> str:
    """Users as a node's .npz file."""
    arrays = {} if users.targets is None else {"y": users.targets}
    np.savez(file, X=users.features, user=np.array(users.names)[users.owner],
             feature_names=np.array(users.feature_names), **arrays)
    return str(file)


class Nosy:
    """Asks the users of a node, which is a new object for every message.

    Parameters
    ----------
    users : of the node, in the file.
    file : their data.
    own : the node's configuration; None for a simulation, where the server names the data.
    """

    def __init__(self, users: ct.Users, file: Path, own: dict[str, Any] | None = None, **agreed: Any) -> None:
        self.users, path = users, write(users, file)
        ledger = str(file.parent / "ledger")
        self.own = {"simulation": True} if own is None else {"data": "npz", "path": path, "ledger-dir": ledger, **own}
        self.said = {**for_nodes({"lam": 0.1}), **({} if own is not None else {"data": "npz", "path": path})}
        self.agreed = {"names": users.names, "features": users.feature_names, "run": "r", "loss": "logistic", **agreed}

    def node(self, **said: Any) -> Node:
        """The node, which hears the server's settings."""
        agreement = Agreement(**self.agreed).to_json()
        said = {name.replace("_", "-"): value for name, value in said.items()}
        return Node({**self.said, "run": "r", "agreement": agreement, **said}, self.own)

    def send(self, queries: dict[Any, Query], **said: Any) -> NodeReplies:
        """What comes back, as bytes."""
        return self.node(**said).answer({json.dumps(name): query.encode() for name, query in queries.items()})

    def ask(self, kind: str, said: dict[str, Any] | None = None, /, *, turn: int = 0, **arrays: Any) -> dict[str, Any]:
        """The first user's reply; refused questions raise PermissionError."""
        name = self.users.names[0]
        query = Query(kind, turn, {field: np.asarray(value) for field, value in arrays.items()})
        answers = self.send({name: query}, **(said or {}))
        if answers.refusals:
            raise PermissionError(answers.refusals[json.dumps(name)])
        return dict(decode(answers.replies[json.dumps(name)]).arrays)
