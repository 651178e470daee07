"""Questions to all users, one after the other: each is repeated until everybody has answered.

So what the server computes from the answers does not depend on who was there in which round, or
what was lost on the way. Every complete answer is kept in the checkpoint; started again, the server
asks only what it does not know yet, and ends in the same numbers.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coterie.base.errors import Incompatible, InvalidInput
from coterie.base.storage import pack, unpack, write_atomically
from coterie.base.types import Array, Flags
from coterie.data.validation import show
from coterie.federated import plausible
from coterie.federated.algorithms.base import Replies, merge
from coterie.federated.algorithms.participation import Participation
from coterie.federated.driver import Round, uninterrupted
from coterie.federated.protocol.ledger import Entry, Ledger
from coterie.federated.protocol.messages import (
    REFUSES,
    Batch,
    Fields,
    Message,
    Ragged,
    Reply,
    gather,
    misfit,
)
from coterie.federated.runtimes.in_process import Runtime

_SILENT = 40  # rounds in a row in which none of the users asked answers
_SHAPES = "its fields have other shapes than those of the others"
_ODD = 6  # digits beyond the median of the others: whose numbers an error is blamed on
_DAMAGED = 3  # replies of a user that cannot be read before it is set aside


class SetAside(Incompatible):
    """Users whose nodes refuse, or whose answers cannot be true, with the reason; the others
    continue without them.
    """

    def __init__(self, reasons: Mapping[Any, str]) -> None:
        self.reasons = dict(reasons)
        super().__init__(f"User(s) {show(*reasons)} take no part: {next(iter(reasons.values()))}. "
                         "Ask the owners of "
                         "their nodes, or leave the users out.")


class Asker:
    """Asks all users over a runtime.

    Parameters
    ----------
    runtime : carries queries and replies.
    names : of the users.
    participation, seed : who is asked in a round.
    fingerprint : what must agree for a run in the checkpoint to be continued.
    checkpoint : the folder in which answers are kept; None to keep none.
    progress : called after every round.
    ridge : L2 strength that all Hessians contain.
    """

    def __init__(self, runtime: Runtime, names: tuple[Any, ...], *,
                 participation: Participation | None = None,
                 seed: int = 0, fingerprint: Mapping[str, Any] | None = None,
                 checkpoint: str | os.PathLike[str] | None = None,
                 progress: Callable[[Round], None] | None = None, ridge: float = 0.0) -> None:
        self.runtime, self.names, self.seed, self.progress = runtime, names, seed, progress
        self.participation = participation or Participation()
        self.folder = None if checkpoint is None else Path(checkpoint) / "answers"
        self.ledger, self.history = Ledger(len(names)), list[Round]()
        self.refusals: list[tuple[int, Any, str]] = []
        self.ridge, self.answers = ridge, list[Batch]()  # of all users who still take part
        self.turn, self.number, self.began = 0, 0, time.perf_counter()
        self._check(dict(fingerprint or {}))

    def ask(self, kind: str, dim: int, *, arrays: Fields | None = None,
            shared: Fields | None = None,
            ragged: Mapping[str, Ragged] | None = None) -> Batch:
        """The replies of all users to one question, in their order.

        Parameters
        ----------
        kind : of the query.
        dim : the length of a model.
        arrays : fields with one row per user.
        shared : fields that are the same for all users.
        ragged : fields that some users have.

        Raises
        ------
        Incompatible : users who do not answer, or not as agreed.
        SetAside : users whose nodes refuse; continue without them, after `leave_out`.
        """
        known = self._known()
        if known is not None:
            return known
        n, first = len(self.names), self.turn
        parts: list[Batch] = []
        answered, silent, entries = np.zeros(n, dtype=bool), 0, len(self.ledger.entries)
        began = len(self.history)
        while not answered.all():
            users = self.participation.choose(self.turn, ~answered, self.seed)
            query = Batch(kind, self.turn, users,
                          {name: rows[users] for name, rows in (arrays or {}).items()},
                          {name: part.take(users) for name, part in (ragged or {}).items()},
                          dict(shared or {}))
            replies = self.runtime.exchange(query)
            try:
                good = self._good(replies, kind, dim, first, answered)
            except SetAside:
                self._enter(query, replies)
                raise
            answered[[user for part in good for user in part.users.tolist()]] = True
            parts += good
            self._enter(query, replies)
            silent = 0 if good or not len(users) else silent + 1
            if silent > _SILENT:
                raise self._missing(answered)
        if len(parts) > 1:
            odd = plausible.other_shapes({user: reply for part in parts for user,
                                          reply in part.items()})
            self._set_aside(dict.fromkeys(odd, _SHAPES))
        complete = merge(parts) if len(parts) > 1 else parts[0]
        assert complete is not None
        self._set_aside(dict(plausible.fit_objections(complete, dim,
                                                      {**(arrays or {}), **(shared or {})},
                                                      self.ridge)))
        self.answers.append(complete)
        with uninterrupted():
            self._keep(complete, self.ledger.entries[entries:], self.history[began:])
        return complete

    def _good(self, replies: Replies, kind: str, dim: int, first: int, answered: Flags) -> list[
        Batch]:
        """The replies that can be used, of users who have not answered yet; others are noted."""
        refused = list(replies.refused)
        singles: dict[int, Message] = {}
        for user, message in replies.singles:
            if not 0 <= user < len(self.names) or answered[user] or message.round < first \
                or message.kind != kind:
                continue  # to an earlier question, or a second time
            reason = misfit(message, kind, dim)
            if reason is None:
                singles.setdefault(int(user), message)
            else:
                refused.append((int(user), reason))
        for user in plausible.other_shapes(singles):
            refused.append((user, _SHAPES))
            del singles[user]
        parts = [batch.take(np.flatnonzero(~answered[batch.users])) for batch in replies.batches
                 if len(batch)]
        if singles:
            parts.append(gather(list(singles.items())))
        refusing = {self.names[user]: reason for user,
                    reason in refused if reason.startswith(REFUSES)}
        if refusing:
            self.refusals += [(self.turn, name, reason) for name, reason in refusing.items()]
            raise SetAside(refusing)
        for user, reason in refused:
            name = self.names[user]
            self.refusals.append((self.turn, name, reason))
            if sum(other == name for _, other, _ in self.refusals) >= _DAMAGED:
                raise SetAside({name: reason})
        return [part for part in parts if len(part)]

    def refuse(self, *complaints: Sequence[str] | Flags) -> None:
        """Set users aside whose answers cannot be true.

        Parameters
        ----------
        complaints : for every user a reason, "" for none; or whether its numbers are out of all
            proportion.

        Raises
        ------
        SetAside : if there are any; continue without them, after `leave_out`.
        """
        reasons: dict[int, str] = {}
        for one in complaints:
            for user, reason in enumerate(one):
                if reason:
                    reasons.setdefault(user, reason if isinstance(reason, str) else
                                       "its numbers contradict each other, or are out of all "
                                       "proportion to the others'")
        self._set_aside(reasons)

    def suspect(self, error: Exception) -> SetAside | None:
        """Who is to blame for an error, if one user's numbers are beyond all proportion to the
        others'.
        """
        if len(self.names) < 3 or not self.answers:
            return None
        user, digits = plausible.oddest(self.answers)
        if digits < _ODD:
            return None
        reason = (f"its numbers are {digits:.0f} digits off the others', and cannot be computed "
                  f"with ({error})")
        self.refusals.append((self.turn, self.names[user], reason))
        return SetAside({self.names[user]: reason})

    def _set_aside(self, reasons: Mapping[int, str]) -> None:
        if reasons:
            named = {self.names[user]: reason for user, reason in reasons.items()}
            self.refusals += [(self.turn, name, reason) for name, reason in named.items()]
            raise SetAside(named)

    def leave_out(self, names: Collection[Any], fingerprint: Mapping[str, Any]) -> None:
        """Ask the others anew, from the first question; rounds and what was sent so far still
        count.

        Parameters
        ----------
        names : of the users who are left out.
        fingerprint : what must agree for the run of the others to be continued.
        """
        stay = [k for k, name in enumerate(self.names) if name not in names]
        self.names = tuple(self.names[k] for k in stay)
        self.ledger.n_users, self.number, self.answers = len(stay), 0, []
        self.ledger.per_user = {key: account[stay] for key, account in self.ledger.per_user.items()}
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._check(dict(fingerprint))

    def _missing(self, answered: Flags) -> Incompatible:
        silent = [self.names[user] for user in np.flatnonzero(~answered)[:3]]
        return Incompatible(f"{int((~answered).sum())} of {len(answered)} users do not answer "
                            f"({show(*silent)}). Start "
                            "their nodes and run the same again, or leave them out.")

    def _enter(self, queries: Batch, replies: Replies) -> None:
        """Enter a round into the ledger and the history."""
        _, up, down = self.ledger.record_round(queries, replies.batches, replies.singles)
        line = Round(self.turn, np.nan, np.nan, 0, time.perf_counter() - self.began, queries.kind,
                     len(queries),
                     sum(map(len, replies.batches)) + len(replies.singles), np.nan, up, down)
        self.history.append(line)
        self.turn += 1
        if self.progress is not None:
            self.progress(line)

    # -- on disk

    def _check(self, fingerprint: dict[str, Any]) -> None:
        """Refuse answers of another run."""
        if self.folder is None:
            return
        file = self.folder / "run.coterie"
        if not file.exists():
            write_atomically(file, pack(fingerprint), durable=True)
            return
        saved = unpack(file.read_bytes(), str(file))
        for key, value in fingerprint.items():
            if saved.get(key) != value:
                raise InvalidInput(f"the checkpoint in {self.folder.parent} is of another run: its "
                                   f"{key} is "
                                   f"{saved.get(key)!r}, this run's is {value!r}",
                                   remedy="Give another folder, or the same settings")

    def _file(self) -> Path | None:
        return None if self.folder is None else self.folder / f"{self.number:04d}.coterie"

    def _keep(self, batch: Batch, entries: list[Entry], lines: list[Round]) -> None:
        file = self._file()
        self.number += 1
        if file is None:
            return
        users = {"/".join(key): account for key, account in self.ledger.per_user.items()}
        write_atomically(file,
                         pack({"kind": batch.kind, "round": batch.round,
                               "arrays": dict(batch.arrays),
                                     "entries": [list(e) for e in entries],
                               "lines": [list(line) for line in lines],
                                     "accounts": users, "turn": self.turn}), durable=True)

    def _known(self) -> Batch | None:
        """The answer that an earlier start has kept."""
        file = self._file()
        if file is None or not file.exists():
            return None
        saved = unpack(file.read_bytes(), str(file))
        self.number += 1
        self.turn = int(saved["turn"])
        self.ledger.entries += [Entry(*entry) for entry in saved["entries"]]
        self.ledger.per_user = {(way, name): account for key, account in saved["accounts"].items()
                                for way, name in [key.split("/")]}
        self.history += [Round(*line) for line in saved["lines"]]
        arrays: dict[str, Array] = saved["arrays"]
        return Batch(saved["kind"], int(saved["round"]), np.arange(len(self.names)), arrays,
                     form=Reply)
