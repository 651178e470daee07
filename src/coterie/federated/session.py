"""Rounds with users elsewhere: questions, replies, ledger, history, checkpoint.

An algorithm asks some users in every round, and continues with whatever they replied (`step`). A
question is repeated until all users have answered (`ask`), so what the server computes from the
answers does not depend on who was there in which round, or what was lost on the way. Both are
saved: started again, a session asks only what it does not know yet, and ends in the same numbers.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coterie.base.errors import CoterieError, Incompatible, InvalidInput
from coterie.base.labels import many
from coterie.base.storage import open_private, pack, private_folder, unpack, write_atomically
from coterie.base.types import Array, Flags
from coterie.data.validation import show
from coterie.federated import plausible
from coterie.federated.algorithms.base import Method, Participation, Replies, Runtime
from coterie.federated.protocol.ledger import Entry, Ledger
from coterie.federated.protocol.messages import (
    REFUSES,
    Batch,
    Fields,
    Message,
    Ragged,
    gather,
    merge,
    misfit,
)
from coterie.federated.screen import Refusals, Screen

log = logging.getLogger("coterie.federated")

_SILENT = 40  # rounds in a row in which none of the users asked answers
_PATIENCE = 100  # queries in a row that a user of a few may leave unanswered, unless it is set
_SHAPES = "its fields have other shapes than those of the others"
_ODD = 6  # digits beyond the median of the others: whose numbers an error is blamed on
_DAMAGED = 3  # replies of a user that cannot be read before it is set aside


class Round(NamedTuple):
    """One line of a federated run's history; the first five fields are those of every solver's."""

    iteration: int  # the round
    objective: float  # nan until certified
    gap: float  # certified relative gap; nan until certified
    n_clusters: int
    seconds: float
    stage: str
    asked: int
    answered: int
    estimate: float  # what the algorithm believes its gap to be
    bytes_up: int
    bytes_down: int

    def __str__(self) -> str:
        start = f"round {self.iteration} ({self.stage}): {self.answered} of {self.asked} answered"
        if not self.n_clusters:  # a question of a fit, which finds groups when it has the answers
            return f"{start}, {self.bytes_up:,} bytes up and {self.bytes_down:,} down"
        near = f"certified gap {self.gap:.1e}" if self.gap is not None and np.isfinite(self.gap) \
            else f"gap about {self.estimate or np.nan:.0e}"
        return f"{start}, {many(self.n_clusters, 'group')}, {near}"


class SetAside(Incompatible):
    """Users whose nodes refuse, or whose answers cannot be true, with the reason; the others
    continue without them.
    """

    def __init__(self, reasons: Mapping[Any, str]) -> None:
        self.reasons = dict(reasons)
        super().__init__(f"User(s) {show(*reasons)} take no part: {next(iter(reasons.values()))}. "
                         "Ask the owners of their nodes, or leave the users out.")


class Session:
    """Asks users over a runtime, and keeps the account of it.

    Parameters
    ----------
    runtime : carries queries and replies.
    names : of the users.
    participation, seed : who is asked a question in a round.
    fingerprint : what must agree for a run in the checkpoint to be continued.
    checkpoint : the folder in which the run is kept; None to keep nothing.
    progress : called after every round.

    Attributes
    ----------
    ledger, history : what was sent, and one line for every round.
    refused : round, user and reason of every reply that was rejected; users by their position in
        `everyone`.
    everyone, stay : the users at the start, and the positions of those who still take part.
    answers : to the questions so far, of all users who still take part.
    turn, number : of the next round and the next question.
    folder, unsaved : where the run is kept, and rounds that are not there yet.
    began : when the session began, in seconds.
    """

    def __init__(self, runtime: Runtime, names: tuple[Any, ...], *,
                 participation: Participation | None = None, seed: int = 0,
                 fingerprint: Mapping[str, Any] | None = None,
                 checkpoint: str | os.PathLike[str] | None = None,
                 progress: Callable[[Round], None] | None = None) -> None:
        self.runtime, self.names, self.seed, self.progress = runtime, names, seed, progress
        self.participation = participation or Participation()
        self.fingerprint = dict(fingerprint or {})
        self.folder = None if checkpoint is None else Path(checkpoint)
        self.ledger, self.history = Ledger(len(names)), list[Round]()
        self.everyone, self.stay = names, np.arange(len(names))
        self.refused: list[tuple[int, int, str]] = []
        self.unsaved: list[tuple[Round, list[Entry]]] = []
        self.answers: list[Batch] = []  # to questions, of all users who still take part
        self.turn, self.number, self.began = 0, 0, time.perf_counter()

    @property
    def refusals(self) -> tuple[tuple[int, Any, str], ...]:
        """Round, user by name and reason of every reply that was rejected; who is not part of the
        federation by number.
        """
        return tuple((turn, self.everyone[user] if 0 <= user < len(self.everyone) else user,
                      reason) for turn, user, reason in self.refused)

    # -- a round

    def enter(self, queries: Batch, replies: Replies, stage: str, n_clusters: int = 0,
              objective: float = np.nan, gap: float = np.nan, estimate: float = np.nan) -> Round:
        """Enter a round into the ledger and the history."""
        entries, up, down = self.ledger.record_round(queries, replies.batches, replies.singles)
        answered = sum(map(len, replies.batches)) + len(replies.singles)
        line = Round(queries.round, objective, gap, n_clusters, time.perf_counter() - self.began,
                     stage, len(queries), answered, estimate, up, down)
        self.history.append(line)
        self.unsaved.append((line, entries))
        return line

    def step(self, method: Method, state: Any, screen: Screen) -> tuple[Any, Batch, Replies]:
        """A round of an algorithm: the state after it, and what was asked and answered.

        Raises
        ------
        Incompatible : all users are set aside.
        """
        turn, queries = state.round, method.ask(state)
        state, replies = method.asked(state), self.runtime.exchange(queries)
        good, refused = screen.check(method, state, queries, replies)
        state, broken = _updated(method, state, good, replies.waiting, screen)
        state = self.exclude(method, state, refused + broken, turn)
        patience = method.federation.patience
        gone = np.flatnonzero((state.missed >= (patience or _PATIENCE)) & ~state.aside)
        # Where most are silent, the network is.
        if patience is not None or _few(len(gone), int((~state.aside).sum())):
            reason = f"it left {patience or _PATIENCE} queries in a row unanswered"
            state = self.exclude(method, state, [(int(user), reason) for user in gone], state.round)
        return state, queries, replies

    def exclude(self, method: Method, state: Any, refused: Refusals, turn: int) -> Any:
        """The state without these users, with a word in the log about each."""
        known = [user for user, _ in refused if 0 <= user < len(self.names)]
        for user, reason in refused:
            said = f"set aside user {self.names[user]!r}" if user in known else \
                f"ignored a reply of user number {user}"
            log.warning("round %d: %s: %s", turn, said, reason)
            self.refused.append((turn, user, reason))
        state = method.exclude(state, np.array(known, dtype=np.int64)) if known else state
        if state.aside.all() and self.refused:
            turn, name, reason = self.refusals[-1]
            raise Incompatible("All users were set aside, so nothing is left to solve; the last, "
                               f"{name!r} in round {turn}: {reason}.")
        return state

    # -- a question to all

    def ask(self, kind: str, dim: int, *, arrays: Fields | None = None,
            shared: Fields | None = None, ragged: Mapping[str, Ragged] | None = None) -> Batch:
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
        n, first, silent = len(self.names), self.turn, 0
        parts: list[Batch] = []
        answered = np.zeros(n, dtype=bool)
        while not answered.all():
            users = self.participation.choose(self.turn, ~answered, self.seed)
            query = Batch(kind, self.turn, users,
                          {name: rows[users] for name, rows in (arrays or {}).items()},
                          {name: part.take(users) for name, part in (ragged or {}).items()},
                          dict(shared or {}))
            replies = self.runtime.exchange(query)
            try:
                good = self._good(replies, kind, dim, first, answered)
            finally:
                line = self.enter(query, replies, kind)
                self.turn += 1
                if self.progress is not None:
                    self.progress(line)
            answered[[user for part in good for user in part.users.tolist()]] = True
            parts += good
            silent = 0 if good or not len(users) else silent + 1
            if silent > _SILENT:
                quiet = np.flatnonzero(~answered)
                if _few(len(quiet), n):
                    self._set_aside(dict.fromkeys(
                        quiet.tolist(), f"it left {silent} queries in a row unanswered"))
                raise self._missing(answered)
        if len(parts) > 1:
            self._set_aside(dict.fromkeys(plausible.other_shapes(
                {user: reply for part in parts for user, reply in part.items()}), _SHAPES))
        complete = merge(parts)
        assert complete is not None
        self._set_aside(dict(plausible.fit_objections(complete, dim)))
        self.answers.append(complete)
        with uninterrupted():
            self._keep(complete)
        return complete

    def _good(self, replies: Replies, kind: str, dim: int, first: int,
              answered: Flags) -> list[Batch]:
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
        self._set_aside({user: reason for user, reason in refused if reason.startswith(REFUSES)})
        for user, reason in refused:
            self._note(user, reason)
            if [number for _, number, _ in self.refused].count(int(self.stay[user])) >= _DAMAGED:
                raise SetAside({self.names[user]: reason})
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
        self._note(user, reason)
        return SetAside({self.names[user]: reason})

    def _set_aside(self, reasons: Mapping[int, str]) -> None:
        for user, reason in reasons.items():
            self._note(user, reason)
        if reasons:
            raise SetAside({self.names[user]: reason for user, reason in reasons.items()})

    def _note(self, user: int, reason: str) -> None:
        self.refused.append((self.turn, int(self.stay[user]), reason))

    def leave_out(self, names: Collection[Any], fingerprint: Mapping[str, Any]) -> None:
        """Ask the others anew, from the first question; rounds and what was sent so far still
        count.

        Parameters
        ----------
        names : of the users who are left out.
        fingerprint : what must agree for the run of the others to be continued.
        """
        stay = [k for k, name in enumerate(self.names) if name not in names]
        self.names, self.stay = tuple(self.names[k] for k in stay), self.stay[stay]
        self.ledger.n_users, self.number, self.answers, self.unsaved = len(stay), 0, [], []
        self.ledger.per_user = {key: account[stay] for key, account in self.ledger.per_user.items()}
        self.fingerprint = dict(fingerprint)
        if self.folder is not None:
            shutil.rmtree(self.folder / "answers", ignore_errors=True)

    def _missing(self, answered: Flags) -> Incompatible:
        silent = [self.names[user] for user in np.flatnonzero(~answered)[:3]]
        return Incompatible(f"{int((~answered).sum())} of {len(answered)} users do not answer "
                            f"({show(*silent)}). Start their nodes and run the same again, or "
                            "leave them out.")

    # -- on disk: the state of an algorithm, replaced after every round, with a journal of the
    #    rounds so far; and one file for every answered question

    def save(self, state: Mapping[str, Any]) -> None:
        """Append what is new to the journal, then replace the state of the algorithm.

        The state says how long the journal is; lines beyond that, of a round that did not end, are
        cut off on loading.
        """
        if self.folder is None:
            return
        private_folder(self.folder)
        with open_private(self.folder / "rounds.jsonl", "ab") as file:
            for line, entries in self.unsaved:
                file.write(json.dumps({"round": line, "entries": entries}).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
            length = file.tell()
        saved = {**state, "fingerprint": self.fingerprint, "accounts": self._accounts(),
                 "refused": [list(refusal) for refusal in self.refused],
                 "runtime": self.runtime.snapshot(), "journal": length}
        write_atomically(self.folder / "state.coterie", pack(saved), durable=True)
        self.unsaved = []

    def load(self) -> dict[str, Any] | None:
        """The saved state of the algorithm, with the account restored; None where there is none."""
        file = None if self.folder is None else self.folder / "state.coterie"
        if file is None or not file.exists():
            return None
        saved = unpack(file.read_bytes(), str(file))
        journal, length = file.with_name("rounds.jsonl"), int(saved["journal"])
        text = journal.read_bytes() if journal.exists() else b""
        if len(text) < length:
            raise InvalidInput(f"{journal} is shorter than the state file next to it says",
                               remedy="Start the run again in another directory")
        if len(text) > length:
            with journal.open("r+b") as opened:
                opened.truncate(length)
        self._check(saved["fingerprint"])
        self.runtime.restore(saved["runtime"])
        lines = [json.loads(line) for line in text[:length].splitlines()]
        self._restore(saved["accounts"], [line["round"] for line in lines],
                      [entry for line in lines for entry in line["entries"]])
        self.refused = [(turn, user, reason) for turn, user, reason in saved["refused"]]
        return saved

    def _check(self, saved: Mapping[str, Any]) -> None:
        """Refuse what is of another run."""
        for key, value in self.fingerprint.items():
            if saved.get(key) != value:
                raise InvalidInput(f"the checkpoint in {self.folder} is of another run: its {key} "
                                   f"is {saved.get(key)!r}, this run's is {value!r}",
                                   remedy="Give another directory, or the same settings")

    def _accounts(self) -> dict[str, Any]:
        return {"/".join(key): account for key, account in self.ledger.per_user.items()}

    def _restore(self, accounts: Mapping[str, Any], lines: Sequence[Any],
                 entries: Sequence[Any]) -> None:
        self.history += [Round(*line) for line in lines]
        self.ledger.entries += [Entry(*entry) for entry in entries]
        self.ledger.per_user = {(way, name): account for key, account in accounts.items()
                                for way, name in [key.split("/")]}

    def _answer_file(self) -> Path | None:
        """Where the next answer is kept."""
        return None if self.folder is None else \
            self.folder / "answers" / f"{self.number:04d}.coterie"

    def _keep(self, answer: Batch) -> None:
        """Keep an answer, with the account of its rounds."""
        file = self._answer_file()
        self.number += 1
        if file is not None:
            saved = {"kind": answer.kind, "round": answer.round, "arrays": dict(answer.arrays),
                     "entries": [list(entry) for _, part in self.unsaved for entry in part],
                     "lines": [list(line) for line, _ in self.unsaved],
                     "accounts": self._accounts(), "turn": self.turn}
            write_atomically(file, pack(saved), durable=True)
        self.unsaved = []

    def _known(self) -> Batch | None:
        """The answer that an earlier start has kept."""
        file = self._answer_file()
        if file is None:
            return None
        if not self.number:  # whose answers are there?
            run = file.with_name("run.coterie")
            if run.exists():
                self._check(unpack(run.read_bytes(), str(run)))
            else:
                write_atomically(run, pack(self.fingerprint), durable=True)
        if not file.exists():
            return None
        saved = unpack(file.read_bytes(), str(file))
        self.number += 1
        self.turn = int(saved["turn"])
        self._restore(saved["accounts"], saved["lines"], saved["entries"])
        arrays: dict[str, Array] = saved["arrays"]
        return Batch(saved["kind"], int(saved["round"]), np.arange(len(self.names)), arrays)


def _few(silent: int, users: int) -> bool:
    """Whether the others can go on without the silent ones, whose absence is their own."""
    return 0 < 2 * silent < users


def _updated(method: Method, state: Any, good: Batch | None, waiting: tuple[int, ...],
             screen: Screen) -> tuple[Any, Refusals]:
    """The state after the update. If replies break it, the largest one among them is refused, and
    it is repeated.

    Raises
    ------
    CoterieError, ArithmeticError, LinAlgError : what breaks the update also without that reply.
    """
    refused: Refusals = []
    while True:
        failure: Exception | None = None
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                after = method.update(state, good, waiting)
            if good is None or not len(good) or (np.abs(after.now) <= plausible.FARTHEST).all():
                if good is not None and len(good):
                    screen.accept(good)
                return after, refused
        except (CoterieError, ArithmeticError, np.linalg.LinAlgError) as error:
            failure = error
        if good is None or len(good) < 2:
            raise failure or InvalidInput("the replies lead to models that are not finite",
                                          remedy="Check the data")
        k = plausible.largest(good)
        refused.append((int(good.users[k]), "its numbers are too large to compute with"))
        good = good.take(np.delete(np.arange(len(good)), k))


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the block is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals: list[Any] = []
    handler = signal.signal(signal.SIGINT, lambda *arguments: signals.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if signals and callable(handler):
        handler(*signals[0])
