"""Summaries of several tables as one: from the summary that each node makes of its table, the
summary of all rows.

Merging is exact with three exceptions. Where values are pooled or too many to be counted, the
number of levels is the largest that one node knows of, and the median is the mean of the nodes'
medians. And whether a column numbers the rows depends on their order, which is each node's own: it
does if it does at every node, or if all its parts rise and together are 0, 1, 2, ... or 1, 2, 3,
...

Kinds are reconciled: nothing with anything; truth values with numbers are numbers; integers, truth
values and texts that say numbers are levels where another node has texts, if they are 20 different
ones at most. All else is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from coterie.base.errors import InvalidInput
from coterie.data.columns import DAY, HOLDS, LARGEST, text_key
from coterie.data.summary import (
    MOST_TEXTS,
    MOST_VALUES,
    TASKS,
    ColumnSummary,
    Levels,
    Numbers,
    RowOrder,
    TableSummary,
)
from coterie.data.validation import show

MOST_ROWS = 2**31 - 1
MOST_COLUMNS = 10_000
LONGEST = 1_000  # characters of a name or a level
_MOST_LEVELS = max(MOST_TEXTS, MOST_VALUES)


def merge(summaries: Sequence[TableSummary], min_count: int = 1,
          tables: Sequence[str] = ()) -> TableSummary:
    """The summary of all rows together, as far as it follows from those of the parts; see the
    module.

    Parameters
    ----------
    summaries : one or more, made with the same user, target, features and task.
    min_count : levels with fewer rows in all parts together are pooled. `summarise` pools what
        leaves a node.
    tables : what messages call each part; "table 0", "table 1", ... unless given.

    Returns
    -------
    TableSummary

    Raises
    ------
    InvalidInput : the parts were asked different things, or a column is not the same kind of thing
        everywhere.
    """
    if not summaries:
        raise InvalidInput("At least one summary is needed, got none",
                           remedy="Wait until a node has answered")
    # 1. The same questions, the same columns.
    first, tables = summaries[0], tables or [f"table {k}" for k in range(len(summaries))]
    for key in ("user", "target", "task", "named"):
        others = {getattr(summary, key) for summary in summaries}
        if len(others) > 1:
            raise InvalidInput(f"Tables were summarised with different settings: {key} is "
                               f"{show(*sorted(map(str, others)))}",
                               remedy=f"Summarise all tables with the same {key}")
    names = [[column.name for column in summary.columns] for summary in summaries]
    for node, theirs in enumerate(names):
        odd = [name for name in dict.fromkeys((*names[0], *theirs)) if (name in names[0])
               != (name in theirs)]
        if odd:
            without = node if odd[0] in names[0] else 0
            raise InvalidInput(f"Column {show(odd[0])} is missing in {tables[without]} and there "
                               f"in {tables[0 if without else node]}", where=f"column {odd[0]!r}",
                               remedy=f"Add it, or remove it from all tables: --drop {odd[0]!r}")
    # 2. Facts about target and columns, column by column.
    by_name = [{column.name: column for column in summary.columns} for summary in summaries]
    given = [summary.answers for summary in summaries if summary.answers is not None]
    answers = None if first.answers is None else _merge_column(given, tables)
    # The order of rows counts without targets, too: all rows of the tables, not only those that the
    # facts are about.
    ordered = [columns for columns, summary in zip(by_name, summaries,
                                                   strict=True) if summary.rows] or by_name[:1]
    columns = tuple(replace(_merge_column([columns[name] for columns in by_name], tables),
                            order=_merge_orders([columns[name].order for columns in ordered]))
                    for name in names[0])
    merged = replace(first, rows=sum(s.rows for s in summaries),
                     users=sum(s.users for s in summaries),
                     answers=answers, columns=columns, unnamed=sum(s.unnamed for s in summaries))
    return merged if min_count <= 1 else _pool_rare(merged, min_count)


def _pool_rare(summary: TableSummary, min_count: int) -> TableSummary:
    def pooled(column: ColumnSummary) -> ColumnSummary:
        return replace(column, levels=column.levels.pooled(len(column.levels.counts), min_count))

    return replace(summary, columns=tuple(map(pooled, summary.columns)),
                   answers=None if summary.answers is None else pooled(summary.answers))


def _merge_column(parts: Sequence[ColumnSummary], tables: Sequence[str]) -> ColumnSummary:
    """One column's facts at all nodes as one."""
    kind = _merge_kinds(parts, tables)
    given = [part for part in parts if part.kind != "empty"] or list(parts[:1])
    levels = _merge_levels(given)
    numbers = None if kind in ("text", "empty") else _merge_numbers(
        kind, [part.numbers for part in given if part.numbers is not None], levels)
    return ColumnSummary(name=parts[0].name, kind=kind, written=all(p.written for p in given),
                         integer=all(p.integer for p in given), rows=sum(p.rows for p in parts),
                         missing=sum(p.missing for p in parts), levels=levels, numbers=numbers,
                         order=parts[0].order)


def _merge_kinds(parts: Sequence[ColumnSummary], tables: Sequence[str]) -> str:
    """What the column is in all tables together; what cannot be one thing is refused."""
    kinds = {part.kind: node for node, part in reversed(list(enumerate(parts)))
             if part.kind != "empty"}
    if len(kinds) <= 1:
        return next(iter(kinds), "empty")
    if set(kinds) == {"number", "flag"}:
        return "number"
    stubborn = [node for node, part in enumerate(parts)
                if part.kind in ("number", "flag", "date", "duration") and not part.levels.counts
                   and part.present]
    if "text" in kinds and not stubborn:
        return "text"
    one = stubborn[0] if stubborn else next(iter(kinds.values()))
    other = (kinds["text"] if "text" in kinds
             else next(n for kind, n in kinds.items() if kind != parts[one].kind))
    (one, other), name = sorted((one, other)), parts[0].name
    raise InvalidInput(f"The column holds {HOLDS[parts[one].kind]} in {tables[one]} and "
                       f"{HOLDS[parts[other].kind]} in {tables[other]}", where=f"column {name!r}",
                       remedy="Make it the same everywhere, or remove it from all tables: --drop "
                              f"{name!r}")


def _merge_levels(parts: Sequence[ColumnSummary]) -> Levels:
    """Rows of each level in all parts; a number that is no text is the text that says it, where
    there is one.
    """
    counts: dict[str, int] = {}
    for part in sorted(parts, key=lambda part: not part.written):
        keys = {} if part.written else {text_key(text): text for text in reversed(counts)}
        for text, n in part.levels.counts.items():
            same = text if text in counts else keys.get(text_key(text), text)
            counts[same] = counts.get(same, 0) + n
    return Levels(counts=dict(sorted(counts.items())),
                  rare_rows=sum(part.levels.rare_rows for part in parts),
                  rare_levels=max(part.levels.rare_levels for part in parts),
                  rare_local=max(part.levels.rare_local for part in parts))


def _merge_numbers(kind: str, parts: Sequence[Numbers], levels: Levels) -> Numbers | None:
    if not parts:
        return None
    n, low, high = sum(p.rows for p in parts), min(p.low for p in parts), max(p.high for p in parts)
    integers = all(p.integers for p in parts)
    if len(parts) == 1:
        return parts[0]
    if kind == "number" and not levels.rare_levels and sum(levels.counts.values()) == n:
        # All values are known: mean and median are those of the rows together.
        values = sorted((float({"true": "1", "false": "0"}.get(text.lower(), text)), count)
                        for text, count in levels.counts.items())
        ends = np.cumsum([count for _, count in values])
        middle = [values[int(np.searchsorted(ends, rank, side="right"))][0]
                  for rank in ((n - 1) // 2, n // 2)]
        return Numbers(rows=n, low=low, high=high, mean=sum(v * count for v, count in values) / n,
                       median=sum(middle) / 2, integers=integers)
    # Of dates each mean counts from the node's own earliest date.
    shift = [float(p.low - low) / DAY if kind == "date" else 0.0 for p in parts]
    mean, median = (sum(p.rows * (getattr(p, key) + s) for p, s in zip(parts, shift, strict=True))
                    / n for key in ("mean", "median"))
    return Numbers(rows=n, low=low, high=high, mean=mean, median=median, integers=integers)


def _merge_orders(parts: Sequence[RowOrder]) -> RowOrder:
    rising = None
    if all(part.rising is not None for part in parts):
        lows, highs, sums = zip(*(part.rising for part in parts if part.rising is not None),
                                strict=True)
        rising = (min(lows), max(highs), sum(sums))
    return RowOrder(differ=all(part.differ for part in parts),
                    numbered=all(part.numbered for part in parts), rising=rising)


# ---- whether a summary that somebody else made can be that of a table

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
          and sum(counts.values()) + levels.rare_rows <= present,
          f"{where}: its levels have more rows than the table")


def _check_numbers(numbers: Numbers, present: int, where: str) -> None:
    values = (numbers.low, numbers.high, numbers.mean, numbers.median)
    _need(is_count(numbers.rows) and 1 <= numbers.rows <= present
          and isinstance(numbers.integers, bool),
          f"{where}: its numbers have more rows than the table")
    _need(all(isinstance(v, (int, float)) and not isinstance(v, bool) and abs(v) <= LARGEST
              for v in values) and numbers.low <= numbers.high, f"{where}: its numbers are none")


def is_text(value: Any, empty: bool = False) -> bool:
    """Whether this is a text that is not too long, and can be written."""
    return (isinstance(value, str) and (empty or value != "") and len(value) <= LONGEST
            and not any("\ud800" <= letter <= "\udfff" for letter in value))


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
        raise InvalidInput(f"no table has this summary: {complaint}",
                           remedy="Install the same version of coterie on the server and at the "
                                  "nodes")
