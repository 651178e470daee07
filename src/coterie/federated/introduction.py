"""What a node says of itself before the first round: the names of its users and, of a table, a
summary.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np

from coterie.base.errors import InvalidInput
from coterie.data.merging import MOST_COLUMNS, check_summary, is_count, is_name, is_text
from coterie.data.summary import TableSummary
from coterie.data.users import Users
from coterie.federated.sources import Table

_LONGEST = 1 << 25  # characters
_MOST_USERS = 1_000_000  # of one node
_TARGETS = ("none", "signs", "numbers", "table")


class Introduction(NamedTuple):
    """What a node says of itself.

    Parameters
    ----------
    names : of its users.
    features : of prepared numbers; empty for a table.
    n_classes : of prepared numbers: one more than the largest target.
    targets : of prepared numbers: "none", "signs" (all are -1 or 1), or "numbers"; of a table in a
        private federation "table": then `features` are its columns of numbers.
    summary : of a table; a private federation has none.
    """

    names: tuple[Any, ...]
    features: tuple[str, ...] = ()
    n_classes: int = 0
    targets: str = "none"
    summary: TableSummary | None = None

    @classmethod
    def of(cls, source: Users | Table, *, private: bool = False) -> Introduction:
        """That of a node with these data; of a private one nothing that depends on values, but what
        columns hold.
        """
        if isinstance(source, Table):
            return (cls(names=source.names, features=source.number_columns(), targets="table")
                    if private else cls(names=source.names, summary=source.summary()))
        y = source.targets
        if y is None or not len(y):
            return cls(names=source.names, features=source.feature_names)
        largest = float(y.max())
        return cls(names=source.names, features=source.feature_names,
                   n_classes=int(largest) + 1 if 0 <= largest < 1e6 and not private else 0,
                   targets="signs" if bool((np.abs(y) == 1.0).all()) else "numbers")

    def to_json(self) -> str:
        """As text, for the wire."""
        if not all(isinstance(name, (str, int, float)) for name in self.names):
            raise InvalidInput("user names must be texts or integers",
                               remedy="Write dates as texts")
        return json.dumps({**self._asdict(),
                           "summary": None if self.summary is None else self.summary.to_json()})

    @classmethod
    def from_json(cls, text: str) -> Introduction:
        """From what `to_json` gives; what it declares is bounded before memory or work is taken.

        Raises
        ------
        InvalidInput : a text that is none, or facts that no data have.
        """
        if not isinstance(text, str) or len(text) > _LONGEST:
            raise _no_introduction(f"it is no text of at most {_LONGEST:,} characters")
        try:
            said = json.loads(text)
            names, features, n_classes, targets = (said[key] for key in cls._fields[:4])
            if not (isinstance(names, list) and len(names) <= _MOST_USERS
                    and all(map(is_name, names)) and len(set(names)) == len(names)):
                raise _no_introduction("its users have no names, or the same")
            if not (isinstance(features, list) and len(features) <= MOST_COLUMNS
                    and all(map(is_text, features)) and len(set(features)) == len(features)):
                raise _no_introduction("its columns have no names, or the same")
            if not is_count(n_classes) or targets not in _TARGETS:
                raise _no_introduction("its targets do not exist")
            summary = None if said["summary"] is None else TableSummary.from_json(said["summary"])
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise _no_introduction(str(error)[:200]) from error
        if summary is not None:
            check_summary(summary)
        # a private table may have texts only.
        elif not features and names and targets not in ("none", "table"):
            raise _no_introduction("it has targets, and no columns")
        return cls(tuple(names), tuple(features), n_classes, targets, summary)


def _no_introduction(why: str) -> InvalidInput:
    return InvalidInput(f"this is no introduction of a node: {why}",
                        remedy="Install the same version of coterie on the server and at the nodes")
