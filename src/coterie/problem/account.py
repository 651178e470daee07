"""What a federation adds to a result: the account of what it took, and of who took part."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from coterie.base.labels import many
from coterie.base.types import Array


@dataclass(frozen=True, kw_only=True, eq=False)
class Account:
    """What a federation took, and who took part.

    Parameters
    ----------
    ledger : everything that was sent.
    history : one line for every round, certificates included.
    refusals : round, user and reason of every reply that was rejected.
    aside : the users who were set aside, or whose nodes refused to take part, with the reason; the
        result is that of the others.
    scores : (n_users, 3) held-out loss, correct predictions and rows of every user, of a run at a
        given lam; None where no rows were held out.
    state, federation : of such a run: the state of the algorithm, from which another run can start,
        and what the server knew, with the graph over all users.
    path : all runs of a path from which this one was chosen.
    agreement : of a deployment, what its nodes agreed on.
    privacy : what was promised to users; None without noise.
    at_home : (n_users, dim) of a private fit, the models that users have finished at home, in the
        solver's units; None unless users are in this process, because they never leave home. They
        are outside of the promise.
    """

    ledger: Any
    history: tuple[Any, ...] = ()
    refusals: tuple[tuple[int, Any, str], ...] = ()
    aside: dict[Any, str] = field(default_factory=dict)
    scores: Array | None = None
    state: Any = None
    federation: Any = None
    path: Any = None
    agreement: Any = None
    privacy: Any = None
    at_home: Array | None = None

    @property
    def n_rounds(self) -> int:
        """The number of rounds, certificates included, without the introduction of the nodes."""
        return len(self.history)

    def __str__(self) -> str:
        left = f" {many(len(self.aside), 'user')} set aside." if self.aside else ""
        return f"{self.n_rounds} rounds, {self.ledger}.{left}"


def entry(name: str, doc: str) -> Any:
    """A property of a result that its account has; results without an account do not have it."""

    def read(result: Any) -> Any:
        if result.account is None:
            raise AttributeError(f"this result has no {name}: it was not found by a federation")
        return getattr(result.account, name)

    return property(read, doc=doc)


class Accounted:
    """A result with an `account` if a federation found it, whose entries are its own, too."""

    ledger = entry("ledger", "Of a federation: everything that was sent.")
    refusals = entry("refusals", "Of a federation: round, user and reason of rejected replies.")
    aside = entry("aside", "Of a federation: the users who were set aside, and why.")
    n_rounds = entry("n_rounds", "Of a federation: the number of rounds.")
