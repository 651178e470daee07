"""What the owner of a node allows: kinds of questions, how many, whose Hessians, and which rows are
held out.

All of it is in the node's configuration (`coterie.federated.contract`), and nothing of it can come
from a server. In a simulation the server owns the data, and everything but the size of a message is
allowed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from coterie.base.errors import Refused
from coterie.base.types import Flags
from coterie.data.frames import row_names
from coterie.data.users import Users
from coterie.federated.bounds import too_much
from coterie.federated.client import Data
from coterie.federated.contract import LEAST_ROWS, PUBLIC, Contract
from coterie.federated.private.ledger import LoggedAnswer, NodeLedger, Question
from coterie.federated.private.release import PRIVATE
from coterie.federated.protocol.messages import Message
from coterie.federated.sources import SOURCES, Encoded, Table
from coterie.fitting.candidates import N_FOLDS
from coterie.fitting.columns import SumsQuestion, question_of
from coterie.losses import Huber, HuberDistance, SquaredHinge

# a fit of classes needs about 200.
_QUESTIONS, _KINKED_QUESTIONS, _LEAST_QUESTIONS = 1_000, 300, 100
_KINKED = (SquaredHinge, Huber, HuberDistance)  # three gradients on a line single out a row
_HESSIANS, _LEAST_HESSIANS = 100, 40  # one for every four rows, within these
_SCALARS = 3  # beside a gradient: value, curvature, and a bound on it
# Rows, and rows per coordinate, below which a fit's gradients give rows away.
_FIT_ROWS, _FIT_ROWS_EACH = 30, 3
_OF_A_FIT = ("summary", "evidence", "around")
_WITH_HESSIANS = ("local", "summary", "moments")
_HESSIAN_FIELDS = ("hessian", "scatter", "factor", "core", "basis")
_PARTS = ("factor", "core", "basis")  # of one Hessian, however many numbers they are
_FREE_FIELDS = ("difference", "sign")  # the server can compute them from what it knows


class Guard:
    """Decides for the owner of a node what leaves it, and enters everything that does.

    Parameters
    ----------
    contract : what the owner has set.
    source : the data of the node.
    ledger : of its answers; the owner's unless given.

    Raises
    ------
    InvalidInput : a ledger that cannot be used.

    Example
    -------
    >>> from coterie.datasets import ellipses
    >>> guard = Guard(Contract.of({"simulation": True}), ellipses(seed=0).users)
    >>> guard.owned, guard.holdout(0.2, 7)
    (False, (0.2, 7, 0))
    """

    def __init__(self, contract: Contract, source: Users | Table | Encoded,
                 ledger: NodeLedger | None = None) -> None:
        self.owned, self.source, self.settings = contract.owned, source, contract
        self.consent = not self.owned or contract.consent == "hessians"
        self.columns = source.n_features if isinstance(source, Users) else source.n_columns
        self.ledger = ledger or NodeLedger.of_owner(
            contract.ledger_dir or default_folder(contract), contract.budget_epsilon,
            contract.budget_delta) if self.owned else NodeLedger(None)

    @cached_property
    def rows(self) -> dict[Any, str]:
        """A digest of every user's rows."""
        if isinstance(self.source, Encoded):
            return self.source.digests
        return row_digests(self.source) if self.owned else {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *what: object) -> None:
        self.ledger.close()

    # -- splits

    def holdout(self, share: float, seed: int, task: str = "",
                n_columns: int = 0) -> tuple[float, int, int]:
        """Which rows are held out; of the owner's data by its own secret, and always the share
        that the owner has set, whoever asks first.

        Parameters
        ----------
        share, seed : what the server asks for.
        task : of a fit. A regression sends second moments of both parts.
        n_columns : of the rows.

        Returns
        -------
        The share, the seed, and how many rows a user holds out at least; with fewer it holds none.

        Raises
        ------
        Refused : another share is asked for, which would be another split of the same rows.
        """
        if not self.owned:
            return share, seed, 0
        least = (0 if self.consent else max(n_columns + 1, LEAST_ROWS) if task == "regression"
                 else LEAST_ROWS)
        if self.settings.split_key == PUBLIC:
            return share, seed, least
        own = self.settings.holdout
        if share not in (0, own):
            raise Refused(f"the owner of the node lets the share {own:g} of the rows be held out, "
                          f"and {share:g} is asked for", remedy=f"Use holdout = {own:g}")
        return share, self.secret, least

    @property
    def secret(self) -> int:
        """The seed of the node's own splits."""
        key = self.settings.split_key or self.ledger.pinned("split-key",
                                                            lambda: os.urandom(32).hex())
        return int.from_bytes(hashlib.sha256(f"splits {key}".encode()).digest()[:7])

    # -- what is asked

    def withheld(self, data: Data) -> Flags:
        """(n_users,) who sends a bound instead of a Hessian: those with no more rows than
        coordinates.

        Columns that an agreement leaves out count, too: otherwise a server would ask for a few
        columns at a time.
        """
        if self.consent:
            return np.zeros(data.n_users, dtype=bool)
        return np.asarray(self._rows(data) <= max(data.samples.dim, self.columns))

    @staticmethod
    def _rows(data: Data) -> Any:
        """(n_users,) rows of the smallest part that is asked about."""
        return data.samples.users.data.counts if data.train is None else data.train.counts

    def objection(self, data: Data, user: int, query: Message) -> str:
        """Why the owner does not allow this question, or an empty text."""
        kind, kinds = query.kind, self.settings.allowed_kinds
        if (kinds and kind not in kinds) or (self.settings.private and kind not in PRIVATE):
            return f"the owner of the node does not allow questions of the kind {kind!r}"
        if self.consent or kind in PRIVATE:
            return ""
        rows, columns = int(self._rows(data)[user]), max(data.samples.users.n_features,
                                                         self.columns) + 1
        hessians = kind in _WITH_HESSIANS
        wide = max(data.samples.dim, self.columns)
        if hessians and rows <= (columns if kind == "moments" else wide):
            return ("it has no more rows than coordinates, and its owner has not consented to send "
                    "Hessians (consent = "
                    '"hessians" in the node configuration, or a private release with an epsilon)')
        least = max(_FIT_ROWS, _FIT_ROWS_EACH * wide)
        if kind in _OF_A_FIT and rows < least:
            return (f"it has fewer than {least} rows, which the many questions of a fit would give "
                    "away, and its owner "
                    'has not consented (consent = "hessians" in the node configuration, or a '
                    'private release with an '
                    "epsilon)")
        if kind == "average" and rows < max(least, N_FOLDS * (1 + _summed(data, query))):
            return (f"it has fewer than {least} rows, or a fifth of them are no more than the "
                    "columns of an average, whose sums would give them away, and its owner has not "
                    'consented (consent = "hessians" in the node configuration)')
        if kind in ("describe", "facts") and rows < LEAST_ROWS:
            return f"it has fewer than {LEAST_ROWS} rows, whose means would be the rows"
        return ""

    def unaffordable(self, data: Data, user: int, query: Message, digest: str) -> str:
        """Why the answer would be one too many, or more work than allowed, before it is computed;
        or an empty text.
        """
        dim = data.samples.dim
        reason = too_much(query, int(data.samples.users.data.counts[user]), dim)
        if reason or not self.owned or query.kind not in ("evidence", "around"):
            return reason
        parts, k = query.arrays["centre"].shape[:2]
        plain = parts * (k * (1 + 2 * dim) if query.kind == "around"
                         else k + int(query.arrays["rank"]) * dim)
        logged = LoggedAnswer("", query.round, data.samples.users.names[user], query.kind, 0, 0,
                              digest)
        return self.ledger.over(self._question(data, user, logged,
                                               max(1, (plain - _SCALARS) // dim), 0))

    def _question(self, data: Data, user: int, logged: LoggedAnswer, units: int,
                  hessians: int) -> Question:
        """An answer with what it counts for, and what its user's owner allows."""
        rows = int(self._rows(data)[user])
        return Question(
            logged, "" if self.settings.private else self.rows[data.samples.users.names[user]],
            units, hessians, self.settings.max_questions or _most(data, rows),
            self.settings.max_hessians or min(max(rows // 4, _LEAST_HESSIANS), _HESSIANS))

    # -- what leaves

    def introduce(self, run: str, text: str, *, summary: bool) -> None:
        """Enter what the node says of itself; `summary` is whether a summary of its table is in it.

        Raises
        ------
        Refused : a summary of so few rows would show them.
        """
        if (summary and isinstance(self.source, Table) and not self.consent
            and len(self.source.frame) < LEAST_ROWS):
            raise Refused(f"this node has fewer than {LEAST_ROWS} rows, which a summary of its "
                          "table would show",
                          remedy="Set consent = 'hessians' in the node configuration")
        if self.owned:
            digest = hashlib.sha256(text.encode()).hexdigest()[:32]
            kind = "names" if self.settings.private else "introduction"
            self.ledger.log([LoggedAnswer(run, 0, None, kind, 0, len(text), digest)])

    def account(self, run: str, replies: Mapping[int, Message], data: Data,
                questions: Mapping[int, str], sizes: Mapping[int, int]) -> dict[int, str]:
        """Enter replies in the ledger; of those that are too many, the reason by user.

        Parameters
        ----------
        run : its name.
        replies : by the number of their user.
        data : of all users of the node.
        questions : digests of what was asked.
        sizes : of the replies in bytes.
        """
        if not self.owned:
            return {}
        entries, names = {}, data.samples.users.names
        for user, reply in replies.items():
            # What noisy releases cost is counted in their budget.
            units, hessians = (0, 0) if reply.kind in PRIVATE else cost(reply, data.samples.dim)
            entries[user] = self._question(data, user, LoggedAnswer(
                run, reply.round, names[user], reply.kind, reply.numbers, sizes[user],
                questions[user]), units, hessians)
        reasons = self.ledger.account(entries.values())
        return {user: reason for user, reason in zip(entries, reasons, strict=True) if reason}

    def refuse(self, run: str, refused: Mapping[Any, tuple[str, int, str]]) -> None:
        """Enter refusals: by user the kind of question, its round and the reason."""
        if self.owned and refused:
            self.ledger.log(LoggedAnswer(run, turn, user, kind, 0, 0, "", reason)
                            for user, (kind, turn, reason) in refused.items())


def _summed(data: Data, query: Message) -> int:
    """The columns of which an average asks the sums of each fold."""
    if "settings" not in query.arrays:
        return 0
    question = question_of(int(query.arrays["stage"]), query.arrays["settings"],
                           data.samples.users.n_features)
    return max(scale.basis.width for scale in question.frame.scales) \
        if isinstance(question, SumsQuestion) else 0


def _most(data: Data, rows: int) -> int:
    """How many questions about a user's rows are answered by default."""
    if not isinstance(data.loss, _KINKED):
        return _QUESTIONS
    return _KINKED_QUESTIONS if data.fits else min(max(rows, _LEAST_QUESTIONS), _KINKED_QUESTIONS)


def cost(reply: Message, dim: int) -> tuple[int, int]:
    """What a reply counts for: questions, one for every `dim` numbers beyond a value and two
    others, and Hessians.
    """
    plain = sum(array.size for name, array in reply.arrays.items() if name not in (*_HESSIAN_FIELDS,
        *_FREE_FIELDS))
    triangle, hessians = dim * (dim + 1) // 2, 0
    for name in _HESSIAN_FIELDS:
        size = reply.arrays[name].size if name in reply.arrays else 0
        hessians += 0 if name in _PARTS else -(-size // triangle)
    hessians += any(name in reply.arrays and reply.arrays[name].size > 0 for name in _PARTS)
    return max(1, (plain - _SCALARS) // dim), hessians


def row_digests(source: Users | Table) -> dict[Any, str]:
    """A digest of every user's rows as they are given, whatever a server makes of them."""
    if isinstance(source, Users):
        ends = source.offsets
        parts = {name: [source.features[ends[k]:ends[k + 1]]] + ([] if source.targets is None else
                 [source.targets[ends[k]:ends[k + 1]]]) for k, name in enumerate(source.names)}
    else:
        hashes, owners = source.frame.hash_rows(seed=0).to_numpy(), \
            row_names(source.frame[source.user])
        rows: dict[Any, list[int]] = {}
        for owner, number in zip(owners, hashes.tolist(), strict=True):
            if owner is not None:
                rows.setdefault(owner, []).append(number)
        parts = {name: [np.sort(np.array(own, dtype=np.uint64))] for name, own in rows.items()}
    return {name: hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes()
                                          for array in arrays)).hexdigest()[:32]
            for name, arrays in parts.items()}


def default_folder(contract: Contract) -> Path:
    """The ledger's folder where the owner names none: one for each file, or for each function and
    its settings.
    """
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    path = str(Path(contract.path).resolve()) if contract.path else ""
    other = {} if contract.data in SOURCES else dict(sorted(contract.args.items()))
    spec = json.dumps([contract.data, path, contract.dataset,
                       contract.given.get("partition-id", ""), other], default=str)
    return Path(state) / "coterie" / hashlib.sha256(spec.encode()).hexdigest()[:32]
