"""The in-process runtime: all users reply in one vectorised batch, with faults if wanted.
Nodes in this process agree on a recipe as on Flower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.base.errors import Incompatible, InvalidInput
from coterie.data.users import Users
from coterie.federated.admission import Introduction
from coterie.federated.agreement import Agreement
from coterie.federated.algorithms.base import Replies
from coterie.federated.algorithms.edges import answer_edges
from coterie.federated.client import Data, answer_all, join
from coterie.federated.private.ledger import NodeLedger
from coterie.federated.protocol.messages import Batch, Message, Ragged, decode, digest
from coterie.federated.sources import Table


@dataclass(frozen=True, kw_only=True, eq=False)
class Faults:
    """What goes wrong, at random but the same for the same seed.

    Parameters
    ----------
    drop : the share of queries that get no reply; half of them never arrive, of the others the
        reply is lost.
    late : the share of replies that arrive after their round, up to `delay` rounds later.
    delay : the largest delay in rounds.
    twice : the share of replies that arrive a second time, a round later.
    away : (n_rounds, n_users) who is away in which round and receives nothing; repeated from its
        start.
    seed : of what goes wrong.

    Raises
    ------
    InvalidInput : a share or an array that cannot be used.

    Example
    -------
    >>> Faults(drop=0.1, late=0.2, delay=2).delay
    2
    """

    drop: float = 0.0
    late: float = 0.0
    delay: int = 3
    twice: float = 0.0
    away: npt.ArrayLike | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("drop", "late", "twice"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidInput(f"{name} must be a share in [0, 1], got {getattr(self, name)!r}",
                                   remedy="Use 0.1")
        if self.delay < 1:
            raise InvalidInput(f"delay must be at least 1 round, got {self.delay!r}",
                               remedy="Use for example 3")
        if self.away is not None and (np.ndim(self.away) != 2 or not np.size(self.away)):
            raise InvalidInput("away has one row per round and one column per user, got shape "
                               f"{np.shape(self.away)}", remedy="Give an array of True and False")


class LocalRuntime:
    """Users in this process."""

    def __init__(self, data: Data, faults: Faults | None = None) -> None:
        self.data, self.faults = data, faults or Faults()
        if self.faults.away is not None and np.shape(self.faults.away)[1] != data.n_users:
            raise InvalidInput(f"away is for {np.shape(self.faults.away)[1]} users, the federation "
                               f"has {data.n_users}", remedy="Give one column per user")
        self.late: list[tuple[int, int, Message]] = []  # due in round, user, reply
        self.edges: dict[str, Ragged] = {}  # what users store with PDMM(edge_state="users")

    def begin(self, run: str) -> None:
        self.late, self.edges = [], {}

    def identity(self) -> dict[str, str]:
        users = self.data.samples.users.data
        names = np.frombuffer(repr(users.names).encode(), np.uint8)
        return {"data": digest(users.features, users.targets, users.offsets, names)}

    def exchange(self, queries: Batch) -> Replies:
        faults, turn = self.faults, queries.round
        n = self.data.n_users
        luck = np.random.default_rng([faults.seed, turn, 1]).random((4, n))[:, queries.users]
        away = np.zeros(len(queries), dtype=bool)
        if faults.away is not None:
            trace = np.asarray(faults.away, dtype=bool)
            away = trace[turn % len(trace)][queries.users]
        reached = np.flatnonzero(~away & (luck[0] >= 0.5 * faults.drop))
        answers = self._answered(queries.take(reached))
        luck = luck[:, reached]
        back = luck[0] >= faults.drop
        late = back & (luck[1] < faults.late)
        due = [(user, message) for when, user, message in self.late if when <= turn]
        self.late = [entry for entry in self.late if entry[0] > turn]
        for k in np.flatnonzero(late):
            when = turn + 1 + int(luck[2, k] * faults.delay)
            self.late.append((when, int(answers.users[k]), answers[int(answers.users[k])]))
        for k in np.flatnonzero(back & ~late & (luck[3] < faults.twice)):
            self.late.append((turn + 1, int(answers.users[k]), answers[int(answers.users[k])]))
        waiting = tuple(user for _, user, message in self.late if message.round <= turn)
        return Replies(batches=(answers.take(np.flatnonzero(back & ~late)),), singles=tuple(due),
                       waiting=waiting)

    def _answered(self, queries: Batch) -> Batch:
        """The replies of all users whom the queries reach."""
        if queries.kind != "pdmm":
            return answer_all(self.data, queries)
        replies, self.edges = answer_edges(self.data.loss, self.data.samples, queries, self.edges)
        return replies

    def snapshot(self) -> dict[str, Any]:
        saved: dict[str, Any] = {"late": [[when, user, message.encode().hex()]
                                          for when, user, message in self.late]}
        return saved | {"edges": {name: [part.values, part.offsets]
                                  for name, part in self.edges.items()}}

    def restore(self, saved: dict[str, Any]) -> None:
        self.late = [(when, user, decode(bytes.fromhex(text)))
                     for when, user, text in saved["late"]]
        self.edges = {name: Ragged(*part) for name, part in saved["edges"].items()}




class LocalNodes(LocalRuntime):
    """A runtime that finds its users in the sources given.

    Parameters
    ----------
    sources : the data of every node.
    holdout : the share of its rows that every user holds out.
    seed : of these rows.
    faults : what goes wrong on the way; nothing unless given.
    experiment : a seed of the noise of private releases; None for the operating system.

    Example
    -------
    >>> import coterie as ct
    >>> from coterie.datasets import clustered
    >>> users = clustered("squared", n_users=4, samples=10, seed=0).users
    >>> nodes = LocalNodes([users.take([0, 1]), users.take([2, 3])])
    >>> [len(introduction.names) for _, introduction in nodes.gather(n_users=4, wait=0.0)]
    [2, 2]
    """

    def __init__(self, sources: Sequence[Users | Table], holdout: float = 0.0, seed: int = 0,
                 faults: Faults | None = None, experiment: int | None = None) -> None:
        self.sources, self.holdout, self.seed = list(sources), holdout, seed
        self.keeper, self.experiment, self.private = NodeLedger(None), experiment, False
        self.faults, self.late, self.refused = faults or Faults(), [], dict[Any, str]()
        self.edges = {}
        self.data: Data

    def gather(self, n_users: int, wait: float) -> list[tuple[str, Introduction]]:
        said = [(f"node {k}", Introduction.of(source, private=self.private))
                for k, source in enumerate(self.sources)]
        count = sum(len(introduction.names) for _, introduction in said)
        if count < max(n_users, 1):
            raise Incompatible(f"{count} of {max(n_users, 1)} users are here. Give more nodes, or "
                               "lower `n-users`.")
        return said

    def use(self, agreement: Agreement) -> None:
        if not agreement.names:  # not known yet
            return
        for source in self.sources:
            if self.private and isinstance(source, Table) and agreement.recipe is not None:
                agreement.recipe.check_levels(source.frame)  # before anything is spent
        together = join([agreement.given(source) for source in self.sources])
        order = np.array([together.index(name) for name in agreement.names])
        data = agreement.data_of(together.take(order), 0.0 if self.private else self.holdout,
                                 self.seed)
        self.data = replace(data, keeper=self.keeper, experiment=self.experiment)
