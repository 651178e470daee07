"""The in-process runtime: all users reply in one vectorised batch, with faults if wanted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from coterie.base.errors import InvalidInput
from coterie.federated.algorithms.base import Replies
from coterie.federated.algorithms.edges import answer_edges
from coterie.federated.client import Data, answer_all
from coterie.federated.protocol.messages import Batch, Message, Ragged, decode, digest


class Runtime(Protocol):
    """Carries queries to users and their replies back. All runtimes carry the same queries and
    replies.
    """

    def begin(self, run: str) -> None:
        """A run of this name begins: replies still on their way belong to another one."""

    def identity(self) -> dict[str, str]:
        """What must agree for a saved run to be continued on this runtime."""

    def exchange(self, queries: Batch) -> Replies:
        """Ask, and wait as long as a round lasts."""

    def snapshot(self) -> dict[str, Any]:
        """What must be saved for the run to be continued: arrays and bytes by name."""

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue from what `snapshot` gave."""


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
