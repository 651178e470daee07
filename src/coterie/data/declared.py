"""Whether a summary that somebody else made of a table can be one: types, sizes, and counts that
add up.
"""

from __future__ import annotations

import math
from typing import Any

from coterie.base.errors import InvalidInput
from coterie.data.columns import HOLDS, LARGEST
from coterie.data.summary import (
    MOST_TEXTS,
    MOST_VALUES,
    TASKS,
    ColumnSummary,
    Levels,
    Numbers,
    TableSummary,
)

MOST_ROWS = 2**31 - 1
MOST_COLUMNS = 10_000
LONGEST = 1_000  # characters of a name or a level
_MOST_LEVELS = max(MOST_TEXTS, MOST_VALUES)


def check_summary(summary: TableSummary) -> None:
    """Refuse a summary that no table has.

    Raises
    ------
    InvalidInput : what is wrong with it.
    """
    _need(summary.task in (*TASKS, "auto") and isinstance(summary.named, bool),
          "its task does not exist")
    for name in (summary.user, summary.target):
        _need(name is None or is_text(name), "the name of a column is no text")
    _need(is_count(summary.rows) and is_count(summary.users) and summary.users <= summary.rows,
          "it has fewer rows than users, or no number of them")
    _need(is_count(summary.unnamed), "it has no number of rows without a user")
    _need(len(summary.columns) <= MOST_COLUMNS, f"it has more than {MOST_COLUMNS:,} columns")
    names = [column.name for column in summary.columns]
    _need(all(map(is_text, names)) and len(set(names)) == len(names),
          "a column has no name, or that of another one")
    for column in (*summary.columns, *([] if summary.answers is None else [summary.answers])):
        _check_column(column, summary.rows)


def _check_column(column: ColumnSummary, rows: int) -> None:
    where = f"column {str(column.name)[:40]!r}"
    _need(is_text(column.name) and column.kind in HOLDS and isinstance(column.written, bool)
          and isinstance(column.integer, bool), f"{where}: its kind does not exist")
    _need(is_count(column.rows) and is_count(column.missing)
          and column.missing <= column.rows <= rows, f"{where}: its rows do not add up")
    _check_levels(column.levels, column.present, where)
    if column.numbers is not None:
        _check_numbers(column.numbers, column.present, where)
    order = column.order
    _need(isinstance(order.differ, bool) and isinstance(order.numbered, bool),
          f"{where}: its order is none")
    _need(order.rising is None or (len(order.rising) == 3 and all(map(_is_integer, order.rising))
                                   and 0 <= order.rising[0] <= order.rising[1] <= MOST_ROWS
                                   and order.rising[2] >= 0), f"{where}: its order is none")


def _check_levels(levels: Levels, present: int, where: str) -> None:
    counts = levels.counts
    _need(isinstance(counts, dict) and len(counts) <= _MOST_LEVELS,
          f"{where}: it has more than {_MOST_LEVELS} levels")
    _need(all(is_text(text, empty=True) and is_count(n) and n >= 1 for text, n in counts.items()),
          f"{where}: a level is no text, or has no rows")
    rare = (levels.rare_rows, levels.rare_levels, levels.rare_local)
    _need(all(map(is_count, rare)) and levels.rare_local <= levels.rare_levels
          and sum(counts.values()) + levels.rare_rows <= present, f"{where}: its levels have more "
              "rows than the table")


def _check_numbers(numbers: Numbers, present: int, where: str) -> None:
    values = (numbers.low, numbers.high, numbers.mean, numbers.median)
    _need(is_count(numbers.rows) and 1 <= numbers.rows <= present
          and isinstance(numbers.integers, bool),
          f"{where}: its numbers have more rows than the table")
    _need(all(isinstance(v, (int, float)) and not isinstance(v, bool) and abs(v) <= LARGEST
              for v in values) and numbers.low <= numbers.high, f"{where}: its numbers are none")


def is_text(value: Any, empty: bool = False) -> bool:
    """Whether this is a text that is not too long."""
    return isinstance(value, str) and (empty or value != "") and len(value) <= LONGEST


def is_count(value: Any) -> bool:
    """Whether this is a number of rows."""
    return _is_integer(value) and 0 <= value <= MOST_ROWS


def is_name(value: Any) -> bool:
    """Whether this can name a user: a text or a number."""
    return is_text(value, empty=True) or (_is_integer(value) and abs(value) < 2**63) or (
        isinstance(value, float) and math.isfinite(value))


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _need(good: Any, complaint: str) -> None:
    if not good:
        raise InvalidInput(f"no table has this summary: {complaint}", remedy="Install the same "
            "version of coterie on "
                           "the server and at the nodes")
