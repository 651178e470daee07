"""What a node's users have spent of their privacy budgets, and every answer that left: one file
that survives kills.

The file is an SQLite database in a folder of the node's owner. A release is entered together with
its bytes before they leave, in one transaction that is on the disk when it ends: whoever dies in
between has either spent nothing, or repeats the same bytes for nothing. The budget is a mu of
Gaussian differential privacy (see `coterie.federated.private.policy`), and releases of one user
compose to

    mu = sqrt(sum of mu_k^2)   <=   budget

A row belongs to one user by one column of users, and to another user by another column. Its owner's
budget is one: where releases were made of users by several columns, the sum is over the user's own
releases, and over those of whoever spent most by each other column. Names that a copy of the file
in another format may write differently (1, 1.0, "1" and "01") have one budget.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import time
import unicodedata
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, Self

from coterie.base.errors import InvalidInput, Refused, require
from coterie.base.storage import private_folder
from coterie.federated.private.policy import composed, epsilon_of, mu_of

FILE = "ledger.db"
_MOST_RELEASES = 100  # of one user; a run needs three, and each is kept for ever
_DELTA = 1e-5  # of the words, where the owner has named none
_ROUNDING = 1 + 1e-12  # relative: two releases of budget / sqrt(2) are within the budget
_SCHEMA = """
CREATE TABLE IF NOT EXISTS releases (user TEXT, key TEXT, mu REAL NOT NULL, data BLOB NOT NULL,
                                     time REAL NOT NULL, PRIMARY KEY (user, key));
CREATE TABLE IF NOT EXISTS groupings (user TEXT, key TEXT, grouping TEXT NOT NULL,
                                      PRIMARY KEY (user, key));
CREATE TABLE IF NOT EXISTS spending (grouping TEXT, person TEXT, square REAL NOT NULL,
                                     PRIMARY KEY (grouping, person));
CREATE TABLE IF NOT EXISTS most (grouping TEXT PRIMARY KEY, square REAL NOT NULL);
CREATE TABLE IF NOT EXISTS answers (id INTEGER PRIMARY KEY, time REAL, run TEXT, round INTEGER,
                                    user TEXT, kind TEXT, numbers INTEGER, bytes INTEGER,
                                    question TEXT, reason TEXT);
CREATE TABLE IF NOT EXISTS questions (user TEXT, rows TEXT, question TEXT, units INTEGER NOT NULL,
                                     hessians INTEGER NOT NULL, PRIMARY KEY (user, rows, question));
CREATE TABLE IF NOT EXISTS pins (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


class LoggedAnswer(NamedTuple):
    """One line of the audit log: an answer that left, or with a reason one that was refused.

    Parameters
    ----------
    run, round, user, kind : of the question.
    numbers, bytes : of the answer; 0 where it was refused.
    question : a digest of the question, without its round.
    reason : why it was refused; empty where the answer left.
    time : seconds since 1970.
    """

    run: str
    round: int
    user: Any
    kind: str
    numbers: int
    bytes: int
    question: str
    reason: str = ""
    time: float = 0.0


class Question(NamedTuple):
    """A question with the answer that is ready to leave.

    Parameters
    ----------
    answer : as it will be logged.
    rows : a digest of the user's rows; other rows are asked anew.
    units, hessians : what it counts for, unless the same question was answered before.
    max_units, max_hessians : the most that may be answered about these rows.
    """

    answer: LoggedAnswer
    rows: str
    units: int
    hessians: int
    max_units: int
    max_hessians: int


def _close(base: sqlite3.Connection) -> None:
    with suppress(sqlite3.Error):  # a connection can be closed by its own thread only
        base.close()


class NodeLedger:
    """The account of a node.

    Parameters
    ----------
    folder : of the owner, created if needed and readable by nobody else; None to remember nothing
        beyond this object.
    budget : the largest mu that all releases of one user may have together. Other processes may use
        the same folder at the same time.

    Raises
    ------
    InvalidInput : a folder that cannot be used, or that holds something else.

    Example
    -------
    >>> with NodeLedger(None, budget=mu_of(4.0, 1e-5)) as ledger:
    ...     first = ledger.release("ann", "summary", 0.9, lambda: b"noisy numbers")
    ...     again = ledger.release("ann", "summary", 0.9, lambda: b"other numbers")
    >>> first == again
    True
    """

    def __init__(self, folder: str | PathLike[str] | None, budget: float = math.inf) -> None:
        require(budget >= 0,
                f"a budget must be at least 0, got {budget!r}", "Use mu_of(epsilon, delta)")
        self.folder, self.budget = None if folder is None else Path(folder), float(budget)
        self.promise: tuple[float, float] | None = None
        try:
            self._base = sqlite3.connect(self._file(), timeout=60.0, isolation_level=None)
            # Also where nobody calls `close`: Python 3.13 warns then.
            weakref.finalize(self, _close, self._base)
            # What is entered survives a power failure.
            self._base.execute("PRAGMA synchronous = EXTRA")
            self._base.executescript(_SCHEMA)
            self._sum_releases()
        except (OSError, sqlite3.Error) as error:
            raise InvalidInput(f"the ledger in {folder} cannot be used: {error}", remedy="Name a "
                               "folder of your own as ledger-dir, or restore the ledger") from error

    @classmethod
    def of_owner(cls, folder: str | PathLike[str] | None, epsilon: float | None,
                 delta: float | None) -> Self:
        """With the budget that the owner of a node set: none, unless both are given."""
        require((epsilon is None) == (delta is None),
                "a budget has both an epsilon and a delta", "Set budget-epsilon and budget-delta")
        if epsilon is None or delta is None:
            return cls(folder, 0.0)
        ledger = cls(folder, mu_of(epsilon, delta))
        ledger.promise = epsilon, delta
        return ledger

    def _file(self) -> str:
        if self.folder is None:
            return ":memory:"
        file = private_folder(self.folder) / FILE
        # SQLite gives its journal the same mode.
        os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
        return str(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *what: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._base.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All of it or nothing; others wait."""
        self._base.execute("BEGIN IMMEDIATE")
        try:
            yield self._base
        except BaseException:
            self._base.execute("ROLLBACK")
            raise
        self._base.execute("COMMIT")

    # -- budgets

    def release(self, user: Any, key: str, mu: float, make: Callable[[], bytes], *,
                grouping: str = "") -> bytes:
        """What a user releases, the same bytes each time.

        Parameters
        ----------
        user : its name.
        key : of the release: the question, without the rows. A key that is known costs nothing.
        mu : what the release costs: sensitivity over noise.
        make : computes the bytes; called only if they are new and within the budget.
        grouping : what tells users apart: the name of the column.

        Returns
        -------
        The bytes, entered in the ledger.

        Raises
        ------
        Refused : the budget of the user does not allow it; nothing is spent.
        InvalidInput : a mu that is no number.
        """
        require(mu >= 0,
                f"mu must be a number of at least 0, got {mu!r}", "Use mu_of(epsilon, delta)")
        with self._transaction() as base:
            key = json.dumps([grouping, key]) if grouping else key  # two columns, one name
            row = base.execute("SELECT data FROM releases WHERE user = ? AND key = ?",
                               (_text(user), key)).fetchone()
            if row is not None:
                return bytes(row[0])
            total = composed([self.spent(user, grouping), mu])
            if total > self.budget * _ROUNDING:
                raise Refused(self._refusal(total), remedy="Ask for less, or ask the owner of the "
                              "node to raise budget-epsilon")
            if self._count(user) >= _MOST_RELEASES:
                raise Refused(f"the user has made {_MOST_RELEASES} releases, and no more are made")
            data = make()
            base.execute("INSERT INTO releases VALUES (?, ?, ?, ?, ?)",
                         (_text(user), key, mu, data, time.time()))
            base.execute("INSERT INTO groupings VALUES (?, ?, ?)", (_text(user), key, grouping))
            self._add(user, grouping, mu)
        return data

    def _refusal(self, total: float) -> str:
        """In the words of the owner's promise."""
        if not self.budget:
            return ("the owner of the node has set no privacy budget (budget-epsilon and "
                    "budget-delta)")
        delta = _DELTA if self.promise is None else self.promise[1]
        epsilon = epsilon_of(self.budget, delta) if self.promise is None else self.promise[0]
        return (f"the privacy budget of the user is spent: with this release epsilon would be "
                f"{epsilon_of(total, delta):.3g}, and its owner allows {epsilon:.6g} at delta = "
                f"{delta:g}")

    def _count(self, user: Any) -> int:
        return int(self._base.execute("SELECT COUNT(*) FROM releases WHERE user = ?",
                                      (_text(user),)).fetchone()[0])

    def _add(self, user: Any, grouping: str, mu: float) -> None:
        """Add to the sum of mu^2 of a user, and to the largest one by this column of users."""
        place = grouping, _one_form(user)
        self._base.execute("INSERT INTO spending VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET "
                           "square = square + excluded.square", (*place, mu * mu))
        self._base.execute("INSERT INTO most SELECT grouping, square FROM spending WHERE "
                           "grouping = ? AND person = ? ON CONFLICT DO UPDATE SET "
                           "square = MAX(square, excluded.square)", place)

    def _sum_releases(self) -> None:
        """The sums of a ledger that has none yet."""
        with self._transaction() as base:
            if base.execute("SELECT 1 FROM most").fetchone() is None:
                for user, grouping, mu in base.execute(
                        "SELECT releases.user, COALESCE(grouping, ''), mu FROM releases "
                        "LEFT JOIN groupings ON releases.user = groupings.user AND "
                        "releases.key = groupings.key").fetchall():
                    self._add(json.loads(user), grouping, mu)

    def spent(self, user: Any, grouping: str | None = None) -> float:
        """The mu of all releases that a row of a user may be in.

        Parameters
        ----------
        user : its name.
        grouping : the column that tells users apart; the one by which the user has spent most if
            None.
        """
        most = dict(self._base.execute("SELECT grouping, square FROM most"))
        own: dict[str, float] = {}
        for by in most:
            row = self._base.execute("SELECT square FROM spending WHERE grouping = ? AND person = "
                                     "?", (by, _one_form(user))).fetchone()
            own |= {} if row is None else {by: row[0]}
        columns = list(own) or [""]
        return max(math.sqrt(own.get(by, 0.0)
                             + sum(square for other, square in most.items() if other != by))
                   for by in (columns if grouping is None else [grouping]))

    def spending(self, delta: float) -> dict[Any, float]:
        """The epsilon that every user has spent by noisy releases, at this delta."""
        names = [json.loads(name) for name, in self._base.execute(
            "SELECT DISTINCT user FROM releases ORDER BY user")]
        return {name: epsilon_of(self.spent(name), delta) for name in names}

    def exact_answers(self) -> dict[Any, int]:
        """How many answers without noise left each user; None stands for summaries of all rows.

        No epsilon holds for such rows, whatever noisy releases have spent.
        """
        rows = self._base.execute(
            "SELECT user, COUNT(*) FROM answers WHERE reason = '' AND kind NOT IN "
            "('release', 'home', 'names') GROUP BY user ORDER BY user")
        return {json.loads(user): int(many) for user, many in rows}

    # -- what is fixed at first use

    def pinned(self, name: str, make: Callable[[], str]) -> str:
        """The value of this name; that of the first call for ever."""
        with self._transaction() as base:
            row = base.execute("SELECT value FROM pins WHERE name = ?", (name,)).fetchone()
            if row is not None:
                return str(row[0])
            value = make()
            base.execute("INSERT INTO pins VALUES (?, ?)", (name, value))
        return value

    # -- questions

    def account(self, questions: Iterable[Question]) -> list[str]:
        """Enter answers before they leave, as far as the limits allow it; a question that is
        repeated is free.

        Parameters
        ----------
        questions : in the order in which they count.

        Returns
        -------
        Of every question why its answer must not leave, or an empty text.
        """
        reasons = []
        with self._transaction() as base:
            for question in questions:
                answer, user = question.answer, _text(question.answer.user)
                reason = self._over(question, user)
                reasons.append(reason)
                self._enter(answer._replace(numbers=0, bytes=0, reason=reason) if reason
                            else answer)
                if not reason:
                    base.execute("INSERT OR IGNORE INTO questions VALUES (?, ?, ?, ?, ?)", (
                        user, question.rows, answer.question, question.units, question.hessians))
        return reasons

    def over(self, question: Question) -> str:
        """Why this question is one too many, or an empty text; nothing is entered."""
        return self._over(question, _text(question.answer.user))

    def _over(self, question: Question, user: str) -> str:
        """Why this question is one too many, or an empty text."""
        about = (user, question.rows)
        if self._base.execute("SELECT 1 FROM questions WHERE user = ? AND rows = ? AND question = "
                              "?", (*about, question.answer.question)).fetchone() is not None:
            return ""
        units, hessians = self._base.execute("SELECT COALESCE(SUM(units), 0), "
                                             "COALESCE(SUM(hessians), 0) FROM questions WHERE user "
                                             "= ? AND rows = ?", about).fetchone()
        for many, more, most, what, key in (
                (units, question.units, question.max_units, "questions", "max-questions"),
                (hessians, question.hessians, question.max_hessians, "questions with Hessians",
                 "max-hessians")):
            if more and many + more > most:
                return (f"it has answered {many} {what} about its rows, and its owner allows "
                        f"{most} ({key})")
        return ""

    # -- the audit log

    def log(self, answers: Iterable[LoggedAnswer]) -> None:
        """Enter answers before they leave, or refusals."""
        with self._transaction():
            for answer in answers:
                self._enter(answer)

    def _enter(self, answer: LoggedAnswer) -> None:
        self._base.execute("INSERT INTO answers (time, run, round, user, kind, "
                           "numbers, bytes, question, reason) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                           (answer.time or time.time(), answer.run, answer.round,
                            _text(answer.user), answer.kind, answer.numbers, answer.bytes,
                            answer.question, answer.reason))

    def answers(self) -> list[LoggedAnswer]:
        """Every answer that left or was refused, in order."""
        rows = self._base.execute("SELECT run, round, user, kind, numbers, bytes, question, "
                                  "reason, time FROM answers ORDER BY id").fetchall()
        return [LoggedAnswer(*row)._replace(user=json.loads(row[2])) for row in rows]

    def totals(self) -> tuple[int, int, int]:
        """How many answers left, with how many bytes, and how many questions were refused."""
        row = self._base.execute("SELECT COALESCE(SUM(reason = ''), 0), COALESCE(SUM(bytes), 0), "
                                 "COALESCE(SUM(reason != ''), 0) FROM answers").fetchone()
        return int(row[0]), int(row[1]), int(row[2])


def _text(user: Any) -> str:
    """A user's name as text; 1 and "1" are two users."""
    return json.dumps(user)


def _one_form(user: Any) -> str:
    """One text for all ways to write a name."""
    text = unicodedata.normalize("NFKC", str(user)).strip().casefold()
    try:
        number = float(text)
        return str(int(text) if text.lstrip("+-").isdecimal() else int(number)
                   if number.is_integer() else number)
    except (ValueError, OverflowError):
        return text
