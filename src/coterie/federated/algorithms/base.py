"""The base of federated algorithms: pure functions on a state of arrays.

    ask(state) -> {user: Query}        which users get which query in this round
    answer(data, query) -> Reply       all of a user's work (`client`)
    tell(state, replies) -> state      the server's update; users who did not reply are absent

A `Method` is an algorithm that runs on a federation. This module contains what does not depend on
the algorithm: which users take part, and whose replies are outstanding. Replies that reach `tell`
were screened (`coterie.federated.screen`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from coterie.base.errors import InvalidInput, require
from coterie.base.labels import labels_of
from coterie.base.types import Array, Flags, Ints
from coterie.data.users import Participants
from coterie.federated.protocol.messages import Batch, Message, flags, gather, put
from coterie.losses import Loss
from coterie.losses.derived import Remote
from coterie.problem.graph import Graph
from coterie.problem.problem import Problem, check_lam


@dataclass(frozen=True, kw_only=True, eq=False)
class Participation:
    """A random set of the available users in every round.

    Parameters
    ----------
    fraction : the share of all users asked per round (at least one user), if no `count` is given.
    count : the number of users asked per round.
    order : "random" draws independently in every round, as in the paper; "sweeps" goes through all
        users in a random order, then in another one, so that no user waits long.
    trace : (n_rounds, n_users) whether a user is available in a round, repeated after its end;
        None: always.

    Raises
    ------
    InvalidInput : a setting that cannot be used.

    Example
    -------
    >>> Participation(count=2).choose(0, np.ones(5, dtype=bool), seed=0).tolist()
    [2, 4]
    """

    fraction: float = 1.0
    count: int | None = None
    order: str = "random"
    trace: npt.ArrayLike | None = None

    def __post_init__(self) -> None:
        require(0 < self.fraction <= 1,
                f"fraction must be in (0, 1], got {self.fraction!r}", "Use for example 0.4")
        if self.count is not None and (isinstance(self.count, bool) or int(self.count) != self.count
                                       or self.count < 1):
            raise InvalidInput(f"count must be an integer >= 1, got {self.count!r}",
                               remedy="Use for example 10")
        require(self.order in ("random", "sweeps"),
                f"order must be 'random' or 'sweeps', got {self.order!r}", "Use 'random'")
        if self.trace is not None:
            trace = np.asarray(self.trace, dtype=bool)
            require(trace.ndim == 2 and len(trace), "a trace has one row per round and one "
                    f"column per user, got shape {trace.shape}", "Give an array of True and False")
            object.__setattr__(self, "trace", trace)

    def share(self, n_users: int) -> float:
        """The approximate share of the users asked per round."""
        return self.fraction if self.count is None else min(1.0, self.count / max(n_users, 1))

    @classmethod
    def of(cls, given: Any) -> Participation:
        """From a share (0.4), a number of users (12), a trace, or a `Participation`."""
        if isinstance(given, Participation):
            return given
        if isinstance(given, (int, np.integer)) and not isinstance(given, bool):
            return cls(count=int(given))
        if isinstance(given, (float, np.floating)):
            return cls(fraction=float(given))
        return cls(trace=given)

    def available(self, turn: int, n_users: int) -> Flags:
        """The users that are available in a round."""
        if self.trace is None:
            return np.ones(n_users, dtype=bool)
        trace: Flags = self.trace  # type: ignore[assignment]  # an array since __post_init__
        if trace.shape[1] != n_users:
            raise InvalidInput(f"the trace is for {trace.shape[1]} users, "
                               f"the federation has {n_users}", remedy="Give one column per user")
        return trace[turn % len(trace)]

    def choose(self, turn: int, eligible: Flags, seed: int, need: Array | None = None) -> Ints:
        """The users asked in a round, ascending: at random, or by decreasing `need`; the same for
        the same seed.
        """
        n_users = len(eligible)
        wanted = max(1, round(self.fraction * n_users)) if self.count is None else self.count
        possible = np.flatnonzero(eligible & self.available(turn, n_users))
        if wanted >= len(possible):
            return possible
        # A random order of all users, of which those possible are taken: who else is eligible
        # changes no one's luck.
        order = np.random.default_rng([seed, turn]).permutation(n_users)
        # The next `wanted` in an endless row of random orders of all users.
        if self.order == "sweeps":
            first, last = turn * wanted, (turn + 1) * wanted
            row = np.concatenate([np.random.default_rng([seed, sweep, 5]).permutation(n_users)
                                  for sweep in range(first // n_users, (last - 1) // n_users + 1)])
            row = row[first % n_users:][:wanted]
            order = np.concatenate([row, order])
            order = order[np.sort(np.unique(order, return_index=True)[1])]
        if need is not None:
            order = order[np.argsort(-need[order], kind="stable")]
        return np.sort(order[flags(n_users, possible)[order]][:wanted])


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
    patience : number of unanswered queries in a row after which a user is set aside; None for 100,
        and for no limit where half of all users or more are silent.

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
                   graph=problem.graph, features=problem.users.feature_names, **more)

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
    aside: Flags  # (n_users,) who is excluded: not asked any more, and not part of the problem


class Replies(NamedTuple):
    """The replies that a runtime collected in a round."""

    batches: tuple[Batch, ...] = ()  # well-formed replies of many users
    # Single replies: received as bytes, or out of order.
    singles: tuple[tuple[int, Message], ...] = ()
    waiting: tuple[int, ...] = ()  # users whose reply may still arrive
    refused: tuple[tuple[int, str], ...] = ()  # users who sent an invalid message, with the reason


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


class Method(ABC):
    """An algorithm that runs on a federation: its queries, and its update from the replies."""

    kind: str  # of the queries
    max_rounds: int = 1000
    # Rounds between certificates where a single user keeps the others from an end.
    review: ClassVar[int] = 50
    # Whether what is known of the others must be forgotten when a liar is excluded.
    restarts: ClassVar[bool] = False

    def __init__(self, federation: Federation) -> None:
        self.federation = federation

    # -- what an algorithm defines

    @abstractmethod
    def begin(self, models: Array) -> Any:
        """The first state, from these models."""

    @abstractmethod
    def _ask(self, state: Any, users: Ints) -> Batch:
        """The queries to these users."""

    @abstractmethod
    def _tell(self, state: Any, replies: Batch) -> Any:
        """The state after these replies."""

    def warm(self, state: Any) -> Any:
        """A first state from the last one of the same method on a similar federation, such as
        another lam.
        """
        return replace(self.begin(state.now), aside=state.aside)

    def point(self, state: Any) -> tuple[Array, Array | None]:
        """Models and duals to certify, of the users that are not excluded; None: duals have to be
        built.
        """
        return state.now[~state.aside], None

    def estimate(self, state: Any) -> float:
        """An estimate of the relative gap; inf if there is none yet."""
        return np.inf

    def shares(self, state: Any) -> Array:
        """(n,) each user's part of the estimate, up to a factor that all of them share."""
        return np.ones(1)

    def finished(self, state: Any) -> bool:
        """Whether there are no more queries."""
        return False

    def unusable(self, state: Any, replies: Batch) -> list[tuple[int, str]]:
        """Users whose replies have the right fields, and do not fit what they were asked."""
        return []

    def rounds_within(self, share: float) -> int:
        """The limit of rounds if this share of the users is asked in each."""
        return int(np.ceil(self.max_rounds / share))

    def _alone(self, state: Any) -> Any:
        """The update of the server in a round without replies."""
        return state

    def _asked(self, state: Any, users: Ints) -> Any:
        """The state after these users have been asked, with what is needed to use their replies."""
        return state

    def _forget(self, state: Any, users: Ints) -> Any:
        """The state without the contributions of users who are excluded."""
        return state

    def _need(self, state: Any) -> Array | None:
        """(n_users,) the benefit of asking each user; None if it is not known."""
        return None

    # -- what is the same for all

    @property
    def fresh(self) -> dict[str, Any]:
        """The common part of a first state."""
        n = self.federation.n_users
        return {"round": 0, "asked": np.full(n, -1), "missed": np.zeros(n, dtype=np.int64),
                "aside": np.zeros(n, dtype=bool)}

    def carry(self, old: State, new: Any) -> Any:
        """A state of this method after one of another: with its round, and who was excluded."""
        users = np.flatnonzero(old.aside & ~new.aside)
        new = replace(new, round=old.round, aside=old.aside, missed=old.missed)
        return self._forget(new, users) if users.size else new

    def labels(self, state: Any) -> int:
        """The current number of groups."""
        active = state.now[~state.aside]
        return int(labels_of(active).max()) + 1 if len(active) else 0

    def chosen(self, state: Any) -> Ints:
        """The users who are asked in this round."""
        federation, eligible = self.federation, ~state.aside & (state.asked < 0)
        return federation.participation.choose(state.round, eligible, federation.seed,
                                               self._need(state))

    def ask(self, state: Any) -> Batch:
        """The queries of this round, as a mapping from user numbers to queries."""
        return self._ask(state, self.chosen(state))

    def asked(self, state: Any) -> Any:
        """The state after the queries of this round were sent."""
        users = self.chosen(state)
        return self._asked(replace(state, asked=put(state.asked, users, state.round)), users)

    def update(self, state: Any, replies: Batch | None, waiting: tuple[int, ...] = ()) -> Any:
        """The state after a round: of what `asked` gives and the replies, which are screened.

        Parameters
        ----------
        state : after the queries were sent.
        replies : to open queries; None if there are none.
        waiting : users whose reply may still arrive.
        """
        n = self.federation.n_users
        replied = flags(n, [] if replies is None else replies.users)
        open_ = flags(n, [user for user in waiting if 0 <= user < n])
        state = self._alone(state) if replies is None or not len(replies) \
            else self._tell(state, replies)
        unanswered = (state.asked >= 0) & ~replied
        return replace(state, round=state.round + 1,
                       missed=np.where(replied, 0, state.missed + (unanswered & ~open_)),
                       asked=np.where(unanswered & open_, state.asked, -1))

    def tell(self, state: Any, replies: Mapping[int, Message]) -> Any:
        """The state after a round with these replies, of which none is late or invalid."""
        batch = replies if isinstance(replies, Batch) else gather(list(replies.items())) \
            if replies else None
        return self.update(self.asked(state), batch)

    def exclude(self, state: Any, users: Ints) -> Any:
        """The state without these users."""
        aside = put(state.aside, users, True)
        new = np.flatnonzero(aside & ~state.aside)
        return self._forget(replace(state, aside=aside), new) if new.size else state


class Algorithm(ABC):
    """Settings of a federated algorithm, a frozen keyword-only dataclass."""

    @abstractmethod
    def on(self, federation: Federation, tol: float = 1e-6) -> Method:
        """The method of this algorithm on a federation."""

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def in_process(self) -> bool:
        """Whether it needs users who remember something between rounds: those in one process."""
        return False

    def replace(self, **changes: Any) -> Self:
        return replace(self, **changes)  # type: ignore[type-var]
