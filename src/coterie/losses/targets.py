"""Checks of targets, and of numbers that losses are given."""

from __future__ import annotations

import numpy as np

from coterie.base.errors import InvalidInput
from coterie.base.types import Flags
from coterie.data.users import Users


def refuse_targets(users: Users, bad: Flags, expected: str, remedy: str) -> None:
    """Raise InvalidInput where a row is marked as bad, naming the first such target, its user and
    its sample.
    """
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        user = int(users.owner[row])
        assert users.targets is not None
        raise InvalidInput(f"expected {expected}, got {users.targets[row]:g}",
                           where=f"user {users.names[user]!r}, its sample "
                                 f"{row - int(users.offsets[user])}; "
                                 f"{int(bad.sum())} such targets in all",
                           remedy=remedy)


def require_positive(name: str, number: float) -> None:
    """Raise InvalidInput unless the setting `name` is a finite number > 0."""
    if not (np.isfinite(number) and number > 0):
        raise InvalidInput(f"{name} must be a finite number > 0, got {number!r}",
                           remedy="Use for example 1.0")


def one_class_concern(users: Users) -> list[str]:
    """A sentence naming the users all of whose samples are of one class."""
    assert users.targets is not None
    y = users.targets
    starts = users.offsets[:-1]
    alone = np.flatnonzero(np.minimum.reduceat(y, starts) == np.maximum.reduceat(y, starts))
    if not alone.size:
        return []
    names = ", ".join(repr(users.names[i]) for i in alone[:3]) + (", ..." if alone.size > 3 else "")
    return [f"{alone.size} of {users.n_users} users have samples of one class only ({names}), "
            "which do not "
            "determine a classifier; with lam > 0 their models depend on other users, too."]
