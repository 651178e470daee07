"""What nodes say of themselves, and which can learn together: those whose data are of one kind.

Where nodes are apart, each of its own owner, one that does not fit most others is set aside by
name, with the reason, and the others go on. If it cannot be said which of them does not fit, or all
data are here and can be corrected, the run ends with an error that names both.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from coterie.base.errors import Incompatible, InvalidInput, require
from coterie.data.encoding import Recipe
from coterie.data.merging import MOST_COLUMNS, check_summary, is_count, is_name, is_text, merge
from coterie.data.summary import TableSummary
from coterie.data.users import Users
from coterie.federated.sources import Table

log = logging.getLogger("coterie.federated")
_LONGEST = 1 << 25  # characters of an introduction
_MOST_USERS = 1_000_000  # of one node
_TARGETS = ("none", "signs", "numbers", "table")
_FEW_TABLES = 100  # among which the one that does not fit is looked for


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
    user, target : columns of a private table, which a summary says otherwise.
    """

    names: tuple[Any, ...]
    features: tuple[str, ...] = ()
    n_classes: int = 0
    targets: str = "none"
    summary: TableSummary | None = None
    user: str = ""
    target: str = ""

    @classmethod
    def of(cls, source: Users | Table, *, private: bool = False) -> Introduction:
        """That of a node with these data; of a private one nothing that depends on values, but what
        columns hold.
        """
        if isinstance(source, Table):
            return (cls(names=source.names, features=source.number_columns(), targets="table",
                        user=source.user, target=source.target or "")
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
        require(all(isinstance(name, (str, int, float)) for name in self.names),
                "user names must be texts or integers", "Write dates as texts")
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
            columns = str(said.get("user", "")), str(said.get("target", ""))
            if not all(map(is_text, filter(None, columns))):
                raise _no_introduction("its columns have no names")
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
        return cls(tuple(names), tuple(features), n_classes, targets, summary, *columns)


def _no_introduction(why: str) -> InvalidInput:
    return InvalidInput(f"this is no introduction of a node: {why}",
                        remedy="Install the same version of coterie on the server and at the nodes")


def columns_of(node: Introduction) -> tuple[str, ...] | None:
    """The columns of prepared numbers, which must be the same everywhere; None for a table."""
    return None if node.summary is not None or node.targets == "table" else node.features


def of_one_kind(nodes: Sequence[tuple[str, Introduction]],
                apart: bool = True) -> tuple[list[tuple[str, Introduction]], dict[Any, str]]:
    """The nodes whose data can be used together, and for the users of the others the reason.

    Parameters
    ----------
    nodes : with the name of each.
    apart : whether one that does not fit is set aside.

    Raises
    ------
    Incompatible : there are several kinds, and none has most of the nodes.
    """
    kinds = Counter(columns_of(node) for _, node in nodes)
    (usual, many), *_ = kinds.most_common(1)
    kept = [(label, node) for label, node in nodes if columns_of(node) == usual]
    others = [(label, node) for label, node in nodes if columns_of(node) != usual]
    if not others:
        return list(nodes), {}
    (first, one), (label, other) = kept[0], others[0]
    if None in (usual, columns_of(other)):
        table, numbers = (first, label) if usual is None else (label, first)
        why = f"{table} has a table, and {numbers} prepared numbers"
        remedy = "Give all nodes the same kind of data."
    else:
        why = (f"The nodes have different columns: {', '.join(one.features)} ({first}) and "
               f"{', '.join(other.features)} ({label})")
        remedy = "Give all of them the same features in the same order."
    if not apart or 2 * many <= len(nodes):
        raise Incompatible(f"{why}. {remedy}")
    log.warning("%d node(s) are set aside, which do not fit the others: %s", len(others), why)
    return kept, {name: "its node has other data than most nodes: " + why for _, node in others
                  for name in node.names}


def recipe_of(nodes: Sequence[tuple[str, Introduction]],
              apart: bool = True) -> tuple[Recipe, list[tuple[str, Introduction]], dict[Any, str]]:
    """The recipe of all tables, of which nodes it is, and for users of others the reason.

    A table that does not fit is left out if it is the only one, and there are two others.

    Parameters
    ----------
    nodes : with the name of each.
    apart : whether one that does not fit is set aside.

    Raises
    ------
    InvalidInput : tables that do not fit together.
    """
    tables = [(label, node.summary) for label, node in nodes if node.summary is not None]

    def together(without: int | None = None) -> Recipe:
        chosen = [table for k, table in enumerate(tables) if k != without]
        return Recipe.from_summary(merge([summary for _, summary in chosen],
                                         tables=[label for label, _ in chosen]))

    try:
        return together(), list(nodes), {}
    except InvalidInput as error:
        fits = dict[int, Recipe]()
        for k in range(len(tables) if apart and 3 <= len(tables) <= _FEW_TABLES else 0):
            with contextlib.suppress(InvalidInput):
                fits[k] = together(k)
        if len(fits) != 1:
            raise
        ((odd, recipe),) = fits.items()
        kept = [one for k, one in enumerate(nodes) if k != odd]
        held = {name for _, node in kept for name in node.names}
        reason = f"{tables[odd][0]} has a table that does not fit the others: {error}"
        return recipe, kept, {name: reason for name in nodes[odd][1].names if name not in held}
