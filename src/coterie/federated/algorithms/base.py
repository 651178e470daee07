"""The base of federated algorithms: three pure functions on a state of arrays.

    ask(state) -> {user: Query}        which users get which query in this round
    answer(data, query) -> Reply       all of a user's work (`client`)
    tell(state, replies) -> state      the server's update; users who did not reply are absent

A `Method` is an algorithm that runs on a federation. This module contains everything that does not
depend on the algorithm: which users take part, which replies are outstanding, and the check of
replies.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from coterie.base.errors import CoterieError, InvalidInput
from coterie.base.types import Array, Flags, Ints
from coterie.data.users import Participants
from coterie.federated import plausible
from coterie.federated.algorithms.participation import Participation
from coterie.federated.plausible import Statements
from coterie.federated.protocol.messages import (
    MAY_BE_INFINITE,
    Batch,
    Message,
    gather,
    misfit,
    square,
)
from coterie.losses import Loss
from coterie.losses.derived import Remote
from coterie.problem.graph import Graph
from coterie.problem.problem import Problem, check_lam

log = logging.getLogger("coterie.federated")


@dataclass(frozen=True, kw_only=True, eq=False)
class Federation:
    """What the server knows before the first round: users, loss, graph and lam, but no data.

    Parameters
    ----------
    names : names of the users.
    dim : the length of a model.
    loss, lam, graph : the problem, as for `Problem`.
    participation : which users are asked in a round.
    seed : seed of all random choices.
    features : names of the users' columns.
    patience : number of unanswered queries in a row after which a user is excluded; None for no
        limit.

    Raises
    ------
    InvalidInput : a number that cannot be used.

    Example
    -------
    >>> from coterie.losses import Logistic
    >>> federation = Federation(names=("ann", "bob"), dim=3, loss=Logistic(), lam=0.1,
    ...                         graph=Graph.complete(2))
    >>> federation.n_users
    2
    """

    names: tuple[Any, ...]
    dim: int
    loss: Loss
    lam: float
    graph: Graph
    participation: Participation = field(default_factory=Participation)
    seed: int = 0
    features: tuple[str, ...] = ("x0",)
    patience: int | None = None

    def __post_init__(self) -> None:
        check_lam(self.lam)
        check_seed_and_patience(self.seed, self.patience)

    @classmethod
    def of(cls, problem: Problem, **more: Any) -> Self:
        """The federation that solves this problem; `more` are its other fields."""
        return cls(names=problem.users.names, dim=problem.dim, loss=problem.loss, lam=problem.lam,
                   graph=problem.graph,
                   features=problem.users.feature_names, **more)

    @property
    def n_users(self) -> int:
        """The number of users."""
        return len(self.names)

    def problem(self, active: Flags, loss: Loss | None = None) -> Problem:
        """The problem of the active users at the server, which has neither their data nor their
        losses.
        """
        return Problem(Participants(self.names, self.features).take(active),
                       Remote(loss=self.loss, length=self.dim) if loss is None else loss, self.lam,
                       self.graph if active.all() else self.graph.take(active))


def check_seed_and_patience(seed: int, patience: int | None) -> None:
    if patience is not None and patience < 1:
        raise InvalidInput(f"patience must be at least 1, got {patience!r}",
                           remedy="Use None for no limit")
    if isinstance(seed, bool) or int(seed) != seed or seed < 0:
        raise InvalidInput(f"seed must be an integer >= 0, got {seed!r}", remedy="Use 0")


@dataclass(frozen=True, kw_only=True, eq=False)
class State:
    """Arrays and scalars only: it can be saved, sent, resumed and compared."""

    round: int
    now: Array  # (n_users, dim) the current models
    asked: Ints  # (n_users,) the round of the open query of a user, -1 if there is none
    missed: Ints  # (n_users,) number of unanswered queries in a row
    # (n_users,) whether the user is excluded: not asked any more, and not part of the problem.
    aside: Flags
    refusals: tuple[tuple[int, int, str], ...] = ()  # round, user, reason
    # (n_users, 2 dim + 2) the last statement of each user about its loss; see
    # `plausible.Statements`.
    said: Array
    rest: float = np.inf  # an estimate of the relative gap in which no single user counts for much
    # (n_users, 3) certificates in a row that failed because of the user alone, its part of the gap,
    # and.
    blamed: Array
    # the round of the first of them


class Replies(NamedTuple):
    """The replies that a runtime collected in a round."""

    batches: tuple[Batch, ...] = ()  # well-formed replies of many users
    # Single replies: received as bytes, or out of order.
    singles: tuple[tuple[int, Message], ...] = ()
    waiting: tuple[int, ...] = ()  # users whose reply may still arrive
    refused: tuple[tuple[int, str], ...] = ()  # users who sent an invalid message, with the reason


class Method(ABC):
    """An algorithm that runs on a federation. Subclasses define the queries and the update from the
    replies.
    """

    kind: ClassVar[str]  # of the queries
    max_rounds: int = 1000
    # Rounds between certificates where a single user keeps the others from an end.
    review: ClassVar[int] = 50
    # Whether a liar that is excluded leaves traces in what is known of the others.
    restarts: ClassVar[bool] = False

    def __init__(self, federation: Federation) -> None:
        self.federation = federation

    @abstractmethod
    def begin(self, models: Array) -> State: ...

    def warm(self, state: Any) -> Any:
        """A first state from the last state of the same method on a similar federation, such as
        another lam.
        """
        return replace(self.begin(state.now), aside=state.aside, refusals=state.refusals,
                       said=state.said)

    @abstractmethod
    def _ask(self, state: Any, users: Ints) -> Batch: ...

    @abstractmethod
    def _tell(self, state: Any, replies: Batch) -> Any: ...

    def _alone(self, state: Any) -> Any:
        """The update of the server in a round without replies."""
        return state

    def _asked(self, state: Any, users: Ints) -> Any:
        """The state after these users have been asked, with what is needed to use their replies."""
        return state

    def _forget(self, state: Any, users: Ints) -> Any:
        """The state without the contributions of users who are excluded."""
        return state

    def point(self, state: Any) -> tuple[Array, Array | None]:
        """Models and duals to certify, of the users that are not excluded; None: duals have to be
        built.
        """
        return state.now[~state.aside], None

    def estimate(self, state: Any) -> float:
        """An estimate of the relative gap; inf if there is none yet."""
        return np.inf

    def rounds_within(self, share: float) -> int:
        """The limit of rounds if this share of the users is asked in each."""
        return int(np.ceil(self.max_rounds / share))

    def finished(self, state: Any) -> bool:
        """Whether there are no more queries."""
        return False

    def labels(self, state: Any) -> int:
        """The current number of groups."""
        from coterie.base.labels import labels_of

        active = state.now[~state.aside]
        return int(labels_of(active).max()) + 1 if len(active) else 0

    def chosen(self, state: Any) -> Ints:
        """The users who are asked in this round."""
        eligible = ~state.aside & (state.asked < 0)
        return self.federation.participation.choose(state.round, eligible, self.federation.seed,
                                                    self._need(state))

    def _need(self, state: Any) -> Array | None:
        """(n_users,) the benefit of asking each user; None if it is not known."""
        return None

    def ask(self, state: Any) -> Batch:
        """The queries of this round, as a mapping from user numbers to queries."""
        return self._ask(state, self.chosen(state))

    def tell(self, state: Any, replies: Mapping[int, Message] | Replies) -> Any:
        """The state after a round. Invalid replies are rejected, and their senders are excluded."""
        if not isinstance(replies, Replies):
            replies = Replies(singles=tuple(replies.items()))
        users = self.chosen(state)
        asked = state.asked.copy()
        asked[users] = state.round
        state = self._asked(replace(state, asked=asked), users)
        good, refused = self._screened(state, replies)
        state, good, broken = self._take(state, good)
        refused += broken
        if refused:
            state = self._without(state, refused)
        replied = np.zeros(self.federation.n_users, dtype=bool)
        replied[[] if good is None else good.users] = True
        waiting = np.zeros(self.federation.n_users, dtype=bool)
        waiting[[user for user in replies.waiting if 0 <= user < self.federation.n_users]] = True
        unanswered = (state.asked >= 0) & ~replied
        missed = np.where(replied, 0, state.missed + (unanswered & ~waiting))
        asked = np.where(unanswered & waiting, state.asked, -1)
        state = replace(state, round=state.round + 1, missed=missed, asked=asked)
        if self.federation.patience is not None:
            gone = np.flatnonzero((missed >= self.federation.patience) & ~state.aside)
            reason = f"it left {self.federation.patience} queries in a row unanswered"
            state = self._without(state, [(int(user), reason) for user in gone]) if gone.size \
                else state
        return state

    def _take(self, state: Any, good: Batch | None) -> tuple[Any, Batch | None,
            list[tuple[int, str]]]:
        """The state after the update. If replies break it, the largest one among them is refused,
        and it is repeated.

        Raises
        ------
        CoterieError, ArithmeticError, LinAlgError : what breaks the update also without that reply.
        """
        if good is None or not len(good):
            return self._alone(state), good, []
        statements, failure = self._statements(state, good), None
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                after = self._tell(state, good)
            if (np.abs(after.now) <= plausible.FARTHEST).all():
                if statements is not None:
                    said, some = after.said.copy(), np.isfinite(statements.values)
                    said[good.users[some]] = statements.pack()[some]
                    after = replace(after, said=said)
                return after, good, []
        except (CoterieError, ArithmeticError, np.linalg.LinAlgError) as error:
            failure = error
        if len(good) < 2:
            raise failure or InvalidInput("the replies lead to models that are not finite",
                                          remedy="Check the data")
        k = plausible.largest(good)
        user, others = int(good.users[k]), good.take(np.delete(np.arange(len(good)), k))
        after, kept, more = self._take(state, others)
        return after, kept, [(user, "its numbers are too large to compute with"), *more]

    def _statements(self, state: Any, replies: Batch) -> Statements | None:
        """What replies say of the users' losses; None if they say nothing of it."""
        return None

    def _without(self, state: Any, refused: list[tuple[int, str]]) -> Any:
        aside = state.aside.copy()
        for user, reason in refused:
            known = 0 <= user < self.federation.n_users
            name = repr(self.federation.names[user]) if known else f"number {user}"
            log.warning("round %d: %s user %s: %s", state.round,
                        "excluded" if known else "ignored a reply of", name,
                        reason)
            if known:
                aside[user] = True
        users = np.flatnonzero(aside & ~state.aside)
        notes = tuple((state.round, int(user), reason) for user, reason in refused)
        state = replace(state, aside=aside, refusals=state.refusals + notes)
        return self._forget(state, users) if users.size else state

    def _screened(self, state: Any, replies: Replies) -> tuple[Batch | None, list[tuple[int, str]]]:
        """All replies to open queries as one batch, and the senders of invalid replies with the
        reason.
        """
        refused = [(user, reason) for user, reason in replies.refused if not state.aside[user]]
        singles: dict[int, Message] = {}
        for user, message in replies.singles:
            if not (isinstance(user, (int, np.integer)) and 0 <= user < self.federation.n_users):
                refused.append((int(user) if isinstance(user, (int, np.integer)) else -1,
                                "a reply came from a user who is not part of the federation"))
            elif state.aside[user] or state.asked[user] < 0 or state.asked[user] != message.round \
                or user in singles:
                log.info("round %d: ignored an unexpected reply of user %r to round %d",
                         state.round,
                         self.federation.names[user], message.round)
            else:
                reason = misfit(message, self.kind, self.federation.dim)
                if reason is None:
                    singles[int(user)] = message
                else:
                    refused.append((int(user), reason))
        parts = [gather(list(singles.items()))] if singles else []
        for batch in filter(len, replies.batches):
            wanted = ~state.aside[batch.users] & (state.asked[batch.users] == batch.round) \
                & (batch.round >= 0)
            wanted &= ~np.isin(batch.users, list(singles))
            finite = np.ones(len(batch), dtype=bool)
            for name, array in batch.arrays.items():
                rows = array.reshape(len(batch), -1)
                allowed = rows == np.inf if (batch.kind, name) in MAY_BE_INFINITE else False
                finite &= (np.isfinite(rows) | allowed).all(axis=1)
            for part in batch.ragged.values():
                rows = part.values.reshape(len(part.values), int(np.prod(part.values.shape[1:])))
                finite[part.owner[~np.isfinite(rows).all(axis=1)]] = False
            refused += [(int(user), "it holds numbers that are not finite")
                        for user in batch.users[wanted & ~finite]]
            parts.append(batch.take(np.flatnonzero(wanted & finite)))
        good = merge([part for part in parts if len(part)])
        for object_to in (self._implausible, self._objections, self._contradictions):
            reasons = object_to(state, good) if good is not None and len(good) else []
            refused += reasons
            bad = [user for user, _ in reasons]
            good = good.take(np.flatnonzero(~np.isin(good.users, bad))) if good is not None \
                and bad else good
        return good, refused

    def _implausible(self, state: Any, replies: Batch) -> list[tuple[int, str]]:
        """Replies that cannot be true, whatever the data."""
        return plausible.objections(replies)

    def _contradictions(self, state: Any, replies: Batch) -> list[tuple[int, str]]:
        """Users who contradict what they said before, or the least value of the loss."""
        new = self._statements(state, replies)
        if new is None:
            return []
        least = self.federation.loss.least
        low = new.values < least - 1e-9 * abs(least)
        wrong = plausible.contradict(Statements.unpack(state.said[replies.users]), new)
        return [(int(user), f"its loss is below {least:g}, which no data give")
                for user in replies.users[low]] + [
            (int(user), "it contradicts its earlier replies: no convex loss has both")
            for user in replies.users[wrong & ~low]]

    def _objections(self, state: Any, replies: Batch) -> list[tuple[int, str]]:
        """Errors in replies that have the right form."""
        if self.kind != "expand":
            return []
        # One Hessian, in one of two forms, and a sign for every row of a factor.
        counts = {name: replies.ragged[name].counts if name in replies.ragged
                  else np.zeros(len(replies), dtype=int)
                  for name in ("hessian", "diagonal", "factor", "sign", "share")}
        bad = (counts["hessian"] + counts["diagonal"] != 1) | (counts["factor"] != counts["sign"])
        bad |= (counts["share"] > 1) | ((counts["hessian"] > 0) & (counts["factor"] > 0))
        reasons = [(int(user), "it has more or fewer rows than requested")
                   for user in replies.users[bad]]
        share = replies.ragged.get("share")
        if share is not None:
            wrong = np.setdiff1d(share.owner[~((share.values > 0) & (share.values <= 1))],
                                 np.flatnonzero(bad))
            reasons += [(int(user), "its step share is not in (0, 1]")
                        for user in replies.users[wrong]]
            bad[wrong] = True
        good = replies.take(np.flatnonzero(~bad))
        if len(good):
            ends = np.linalg.eigvalsh(hessians_of(good, self.federation.dim))
            indefinite = ends[:, 0] < -1e-8 * np.maximum(ends[:, -1], 0.0) - 1e-12 \
                * self.federation.dim
            reasons += [(int(user), "its Hessian is not positive semidefinite")
                        for user in good.users[indefinite]]
        return reasons

    @cached_property
    def fresh(self) -> dict[str, Any]:
        """The common part of a first state."""
        n = self.federation.n_users
        return {"round": 0, "asked": np.full(n, -1, dtype=np.int64),
                "missed": np.zeros(n, dtype=np.int64),
                "aside": np.zeros(n, dtype=bool), "said": np.full((n, 2 * self.federation.dim + 2),
                    np.nan),
                "blamed": np.zeros((n, 3))}

    def carried(self, state: State) -> dict[str, Any]:
        """The common part of a state that follows that of another method."""
        nobody = np.full(self.federation.n_users, -1, dtype=np.int64)
        return {"round": state.round, "asked": nobody, "missed": state.missed, "aside": state.aside,
                "refusals": state.refusals, "said": state.said, "blamed": state.blamed}


class Algorithm(ABC):
    """Settings of a federated algorithm, a frozen keyword-only dataclass."""

    @abstractmethod
    def on(self, federation: Federation, tol: float = 1e-6) -> Method:
        """The method of this algorithm on a federation."""

    @property
    def name(self) -> str:
        return type(self).__name__

    def replace(self, **changes: Any) -> Self:
        return replace(self, **changes)  # type: ignore[type-var]


def merge(parts: list[Batch]) -> Batch | None:
    """Merge batches of one kind, in ascending order of users; the first reply of a user counts."""
    if len(parts) <= 1:
        return parts[0] if parts else None
    pairs: dict[int, Message] = {}
    for part in parts:
        for user, message in part.items():
            pairs.setdefault(user, message)
    return gather(list(pairs.items()))


def traces_of(replies: Batch, dim: int) -> Array:
    """(n,) the traces of the Hessians of replies, in any of their forms."""
    out, diagonal = np.zeros(len(replies)), np.concatenate([[0], np.cumsum(np.arange(dim, 1, -1))])
    full, low = replies.ragged.get("hessian"), replies.ragged.get("factor")
    level = replies.ragged.get("diagonal")
    if full is not None:
        out[full.owner] = full.values[:, diagonal].sum(axis=1)
    if level is not None:
        out[level.owner] = dim * level.values
    if low is not None:
        np.add.at(out, low.owner, replies.ragged["sign"].values * (low.values**2).sum(axis=1))
    return out


def hessians_of(replies: Batch, dim: int) -> Array:
    """(n, dim, dim) the Hessians of replies, in any of their forms."""
    if "hessian" in replies.arrays:
        return square(replies.arrays["hessian"], dim)
    out = np.zeros((len(replies), dim, dim))
    full, low = replies.ragged.get("hessian"), replies.ragged.get("factor")
    level = replies.ragged.get("diagonal")
    if full is not None:
        out[full.owner] = square(full.values, dim)
    if level is not None:
        out[level.owner] = level.values[:, None, None] * np.eye(dim)
    if low is not None:
        for k in np.flatnonzero(low.counts):
            rows = low.rows(int(k))
            out[k] += (rows * replies.ragged["sign"].rows(int(k))[:, None]).T @ rows
    return out
