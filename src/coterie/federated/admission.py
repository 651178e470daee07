"""Which nodes can learn together: those whose data are of one kind.

Where nodes are apart, each of its own owner, one that does not fit most others is set aside by
name, with the reason, and the others go on. If it cannot be said which of them does not fit, or all
data are here and can be corrected, the run ends with an error that names both.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from coterie.base.errors import Incompatible, InvalidInput
from coterie.data.encoding import Recipe
from coterie.data.merging import merge
from coterie.data.summary import TableSummary

log = logging.getLogger("coterie.federated")
_FEW_TABLES = 100  # among which the one that does not fit is looked for


class Introduced(Protocol):
    """What a node says of itself; see `coterie.federated.agreement.Introduction`."""

    @property
    def names(self) -> tuple[Any, ...]:
        """Of its users."""

    @property
    def features(self) -> tuple[str, ...]:
        """Of prepared numbers."""

    @property
    def targets(self) -> str:
        """What they are."""

    @property
    def summary(self) -> TableSummary | None:
        """Of a table."""


_Node = TypeVar("_Node", bound=Introduced)


def columns_of(node: Introduced) -> tuple[str, ...] | None:
    """The columns of prepared numbers, which must be the same everywhere; None for a table."""
    return None if node.summary is not None or node.targets == "table" else node.features


def of_one_kind(nodes: Sequence[tuple[str, _Node]],
                apart: bool = True) -> tuple[list[tuple[str, _Node]], dict[Any, str]]:
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


def recipe_of(nodes: Sequence[tuple[str, _Node]],
              apart: bool = True) -> tuple[Recipe, list[tuple[str, _Node]], dict[Any, str]]:
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
