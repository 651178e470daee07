"""The users that are asked in a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.base.errors import InvalidInput
from coterie.base.types import Array, Flags, Ints


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
        if not 0 < self.fraction <= 1:
            raise InvalidInput(f"fraction must be in (0, 1], got {self.fraction!r}",
                               remedy="Use for example 0.4")
        if self.count is not None and (isinstance(self.count, bool) or int(self.count) != self.count
                                       or self.count < 1):
            raise InvalidInput(f"count must be an integer >= 1, got {self.count!r}",
                               remedy="Use for example 10")
        if self.order not in ("random", "sweeps"):
            raise InvalidInput(f"order must be 'random' or 'sweeps', got {self.order!r}",
                               remedy="Use 'random'")
        if self.trace is not None:
            trace = np.asarray(self.trace, dtype=bool)
            if trace.ndim != 2 or not len(trace):
                raise InvalidInput("a trace has one row per round and one column per user, got "
                                   f"shape {trace.shape}",
                                   remedy="Give an array of True and False")
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
            raise InvalidInput(f"the trace is for {trace.shape[1]} users, the federation has "
                               f"{n_users}",
                               remedy="Give one column per user")
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
        keep = np.zeros(n_users, dtype=bool)
        keep[possible] = True
        return np.sort(order[keep[order]][:wanted])
