"""What a recipe is learned from: facts about each column of a table, small enough to be sent, and
mergeable.

    nodes  = [summarise(frame, user="who", target="y") for frame in frames]  # each for itself
    recipe = Recipe.from_summary(merge(nodes))         # as if from one table

A summary holds, for each column, what its cells are, how many are missing, mean, smallest and
largest number, and the levels of texts with their numbers of rows: never a row. Levels with fewer
than `min_count` rows, and those after the 100 most frequent, are pooled before they leave the node.
Of targets, integers are counted value by value (1000 values at most), so that classes and counts
can be recognised; other numbers only where they have two different values. How summaries become one
is `coterie.data.merging`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np

from coterie.base.errors import ROW, InvalidInput
from coterie.base.types import Flags
from coterie.data.columns import (
    HOLDS,
    LARGEST,
    LOCAL,
    check_size,
    first_text,
    in_days,
)
from coterie.data.frames import Cells, as_frame, read_cells, row_names
from coterie.data.validation import check_unique, show, suggest

Task = Literal["classification", "regression", "counts", "clustering"]
TASKS: tuple[Task, ...] = get_args(Task)
MOST_LEVELS, MOST_CLASSES = 20, 50
# That leave a node: levels of a text column, values of an integer target.
MOST_TEXTS, MOST_VALUES = 100, 1000
COUNTER = re.compile(r"(row[ _.]?)?(id|index)|row([ _.]?(names?|number|nr|no))?|_id", re.IGNORECASE)
UNNAMED = ("column 1", "Unnamed: 0", "__index_level_0__")


@dataclass(frozen=True, kw_only=True)
class Levels:
    """The different values of a column as texts, each with its number of rows, and those that are
    pooled.

    Parameters
    ----------
    counts : rows of each level.
    rare_rows, rare_levels : rows and number of the levels that are pooled.
    rare_local : how many of the pooled levels look like numbers or dates.
    """

    counts: dict[str, int]
    rare_rows: int = 0
    rare_levels: int = 0
    rare_local: int = 0

    @property
    def distinct(self) -> int:
        """The number of levels."""
        return len(self.counts) + self.rare_levels

    def pooled(self, most: int, min_count: int) -> Levels:
        """Only the `most` frequent levels, and of these only those with `min_count` rows."""
        frequent = sorted(self.counts, key=lambda text: (-self.counts[text], text))[:most]
        kept = {text for text in frequent if self.counts[text] >= min_count}
        rare = [text for text in self.counts if text not in kept]
        return Levels(counts={text: self.counts[text] for text in sorted(kept)},
                      rare_rows=self.rare_rows + sum(self.counts[text] for text in rare),
                      rare_levels=self.rare_levels + len(rare),
                      rare_local=self.rare_local + sum(bool(LOCAL.fullmatch(text))
                                                       for text in rare))

    def find_texts(self) -> tuple[list[str], int]:
        """Texts that do not look like numbers or dates, as far as they are known, and how many
        there are.
        """
        strange = [text for text in sorted(self.counts) if not LOCAL.fullmatch(text)]
        return strange, len(strange) + self.rare_levels - self.rare_local


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Facts about numbers, truth values (0 and 1), dates and durations.

    Parameters
    ----------
    rows : how many there are.
    low, high : the smallest and the largest; of dates and durations in microseconds.
    mean : of dates in days since the earliest, of durations in days.
    median : in the same units as the mean.
    integers : whether all are.
    """

    rows: int
    low: float
    high: float
    mean: float
    median: float
    integers: bool


@dataclass(frozen=True, kw_only=True)
class RowOrder:
    """Whether a column only numbers or names the rows of its table, missing targets or not.

    Parameters
    ----------
    differ : whether no value is missing or repeated; checked only if the column's name suggests a
        number of the row.
    numbered : whether it counts the rows, at least 10, from 0 or 1 upwards.
    rising : the smallest, the largest and the sum of integers that rise from row to row; None if
        they do not.
    """

    differ: bool = False
    numbered: bool = False
    rising: tuple[int, int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class ColumnSummary:
    """Facts about a column, from the rows that have a user and a target.

    Parameters
    ----------
    name : its name.
    kind : number, flag, text, date, duration, or empty.
    written : whether its cells are texts, also texts that are numbers.
    integer : whether its type is one of integers.
    rows, missing : rows, and how many have no value.
    levels : the different values.
    numbers : facts about numbers; None for texts.
    order : whether it numbers the rows.
    """

    name: str
    kind: str
    written: bool
    integer: bool
    rows: int
    missing: int
    levels: Levels
    numbers: Numbers | None
    order: RowOrder

    @property
    def present(self) -> int:
        """Rows with a value."""
        return self.rows - self.missing

    def numbers_rows(self, rows: int) -> bool:
        """Whether the column only numbers or names the rows, of which there are so many."""
        order, numbers = self.order, self.numbers
        if numbers is None:
            return order.differ and all(count == 1 for count in self.levels.counts.values())
        if order.numbered:
            return True
        if self.name in UNNAMED or COUNTER.fullmatch(self.name):
            return order.differ and numbers.high - numbers.low + 1 >= numbers.rows
        if order.rising is None or rows < 10:
            return False
        low, high, total = order.rising
        return low in (0, 1) and high - low == rows - 1 and 2 * total == rows * (low + high)


@dataclass(frozen=True, kw_only=True)
class TableSummary:
    """Facts about a table, or about several that were merged, from which `Recipe.from_summary`
    learns.

    Parameters
    ----------
    user, target, task : as asked; task may be "auto".
    named : whether the features were named.
    rows, users : how many; rows without a user do not count.
    answers : facts about the target; None without one.
    columns : facts about the features.
    unnamed : rows without a user.
    """

    user: str | None
    target: str | None
    task: str
    named: bool
    rows: int
    users: int
    answers: ColumnSummary | None
    columns: tuple[ColumnSummary, ...]
    unnamed: int = 0

    @property
    def kept(self) -> int:
        """Rows that have a target, or all where there is none."""
        return self.rows if self.answers is None else self.answers.present

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; `from_json` gives an equal summary."""
        return {**asdict(self), "columns": [asdict(column) for column in self.columns]}

    @classmethod
    def from_json(cls, d: dict[str, Any]) -> TableSummary:
        """The summary that `to_json` gives."""
        def column(c: dict[str, Any]) -> ColumnSummary:
            rising = c["order"]["rising"]
            return ColumnSummary(**{
                **c, "levels": Levels(**c["levels"]),
                "numbers": None if c["numbers"] is None else Numbers(**c["numbers"]),
                "order": RowOrder(**{**c["order"],
                                     "rising": None if rising is None else tuple(rising)})})

        try:
            if not isinstance(d["columns"], list):
                raise TypeError("its columns are no list")
            return cls(**{**d, "answers": None if d["answers"] is None else column(d["answers"]),
                          "columns": tuple(map(column, d["columns"]))})
        except (KeyError, TypeError) as error:
            raise InvalidInput(f"This is no summary of a table: {error}",
                               remedy="Pass what TableSummary.to_json gives") from error


def summarise(frame: Any, *, user: str | None = None, target: str | None = None,
              features: Iterable[str] | str | None = None, drop: Iterable[str] | str = (),
              task: str = "auto", min_count: int = 1) -> TableSummary:
    """Facts about a table from which a recipe can be learned.

    Parameters
    ----------
    frame : a polars frame, one row per sample.
    user, target : the columns that name the owner of a row and what is to be predicted.
    features : the columns to learn from; all others unless named.
    drop : columns to leave out.
    task : "auto", or one of TASKS.
    min_count : levels and target values with fewer rows are pooled.

    Returns
    -------
    TableSummary, without a row of the table.

    Raises
    ------
    InvalidInput : a column that is not there, or one that cannot be used in any table.
    """
    frame = as_frame(frame)
    chosen = _choose_columns(list(frame.columns), user, target, features, drop)
    _check_task(task, target)
    names: list[Any] = list(range(len(frame))) if user is None else row_names(frame[user])
    owned, answers = np.array([name is not None for name in names], dtype=bool), None
    kept, rows = owned, int(owned.sum())
    if target is not None:
        cells = target_cells(frame[target], target, task)
        kept = owned & ~cells.missing
        answers = _summarise_target(frame[target], cells, owned, task, min_count)
    return TableSummary(user=user, target=target, task=task, named=features is not None, rows=rows,
                        users=len(set(names) - {None}), answers=answers, unnamed=len(frame) - rows,
                        columns=tuple(_summarise_column(frame[name], name, kept, min_count)
                                      for name in chosen))


def _choose_columns(columns: list[str], user: str | None, target: str | None,
                    features: Iterable[str] | str | None, drop: Iterable[str] | str) -> list[str]:
    """The columns to use as features."""
    used = [name for name in (user, target) if name is not None]
    given = (None if features is None else [features] if isinstance(features, str)
             else list(features))
    dropped = [drop] if isinstance(drop, str) else list(drop)
    for name in (*used, *(given or ()), *dropped):
        if name not in columns:
            raise InvalidInput(f"There is no column {show(name)}", remedy=suggest(name, columns))
    check_unique([*used, *(given or ())], "Columns used as user, target and features")
    both = [name for name in dropped if name in (*used, *(given or ()))]
    if both:
        raise InvalidInput(f"Column {show(both[0])} is both used and dropped",
                           remedy="Leave out one of the two")
    chosen = [c for c in columns if c not in (*used, *dropped)] if given is None else given
    if not chosen:
        raise InvalidInput("At least one feature column is needed, got none",
                           remedy="Name some: --features COLUMN")
    return chosen


def _check_task(task: str, target: str | None) -> None:
    if task not in ("auto", *TASKS):
        raise InvalidInput(f"There is no task {show(task)}", remedy=suggest(task, ("auto", *TASKS)))
    if task == "clustering" and target is not None:
        raise InvalidInput(f"Clustering has no target, got column {show(target)}",
                           remedy=f"Leave --target out, and the column with --drop {target!r}")
    if target is None and task not in ("auto", "clustering"):
        raise InvalidInput(f"The task {task} needs a target",
                           remedy="Name its column: --target COLUMN")


def _summarise_column(series: Any, name: str, kept: Flags, min_count: int) -> ColumnSummary:
    """Facts about a feature; numbers beyond all bounds and columns of lists and the like are
    refused.
    """
    cells = read_cells(series)
    if cells.kind == "other":
        raise InvalidInput(f"A column of {series.dtype} cannot be used", where=f"column {name!r}",
                           remedy=leave_out(name))
    if cells.kind == "number":
        check_size(np.where(cells.missing, 0.0, cells.values), name)
    present = kept & ~cells.missing
    levels = (count_levels(cells, present).pooled(MOST_TEXTS, min_count) if cells.kind == "text"
              else _count_few(_read_levels(series, cells), present, MOST_LEVELS, min_count))
    return ColumnSummary(
        name=name, kind=cells.kind, written=cells.written, integer=cells.dtype == "int",
        rows=int(kept.sum()), missing=int((kept & cells.missing).sum()), levels=levels,
        numbers=_summarise_numbers(cells, present), order=_summarise_order(name, cells))


def _read_levels(series: Any, cells: Cells) -> Cells | None:
    """The cells as texts where they can be levels: of texts, integers and truth values."""
    if cells.written:
        return read_cells(series, parse=False)
    start = cells.values[:1000]  # the first rows are quick to look at, and mostly enough
    return (cells if cells.dtype in ("int", "bool") and len(np.unique(start)) <= MOST_LEVELS + 1
            else None)


def _count_few(cells: Cells | None, present: Flags, most: int, min_count: int) -> Levels:
    """The levels if there are at most so many, else only their number; None are values that cannot
    be levels.
    """
    rows = int(present.sum())
    if cells is None:
        return Levels(counts={}, rare_rows=rows, rare_levels=most + 1 if rows else 0)
    levels = count_levels(cells, present)
    return (levels.pooled(most, min_count) if levels.distinct <= most
            else Levels(counts={}, rare_rows=rows, rare_levels=levels.distinct))


def count_levels(cells: Cells, present: Flags) -> Levels:
    """All different values in these rows as texts, with their numbers of rows."""
    if cells.kind == "empty" or not present.any():
        return Levels(counts={})
    if cells.kind == "text":
        counts = np.bincount(cells.values[present].astype(np.int64), minlength=len(cells.levels))
        return Levels(counts={text: int(n) for text, n in zip(cells.levels, counts, strict=True)
                              if n})
    values, counts = np.unique(cells.values[present], return_counts=True)
    text: Callable[[float], str] = {"int": lambda v: str(int(v)),
                                    "bool": lambda v: str(bool(v)).lower()}.get(
        cells.dtype, lambda v: repr(float(v) + 0.0))
    return Levels(counts={text(v): int(n) for v, n in zip(values, counts, strict=True)})


def _summarise_numbers(cells: Cells, present: Flags, median: bool = False) -> Numbers | None:
    if cells.kind in ("text", "empty", "other") or not present.any():
        return None
    values = cells.values[present]
    low, high = values.min().item(), values.max().item()
    shown = in_days(cells.kind, values, low if cells.kind == "date" else 0)
    return Numbers(rows=len(values), low=low, high=high, mean=float(shown.mean()),
                   median=float(np.median(shown)) if median else 0.0,
                   integers=bool((values == np.floor(values)).all()))


def _summarise_order(name: str, cells: Cells) -> RowOrder:
    n, values = len(cells.values), cells.values
    suggests = name in UNNAMED or COUNTER.fullmatch(name) is not None
    if cells.missing.any() or cells.kind not in ("text", "number") or not n:
        return RowOrder()
    if cells.kind == "text":
        return RowOrder(differ=name in UNNAMED and len(cells.levels) == n)
    if not (values == np.floor(values)).all():
        return RowOrder()
    steps = np.diff(values)
    rises = bool((steps > 0).all()) and values[0] >= 0 and values[-1] < 2**31
    return RowOrder(differ=suggests and len(np.unique(values)) == n,
                    numbered=n >= 10 and values[0] in (0, 1) and bool((steps == 1).all()),
                    rising=(int(values[0]), int(values[-1]), int(values.astype(np.int64).sum()))
                           if rises else None)


def target_cells(series: Any, name: str, task: str) -> Cells:
    """The target's cells: numbers where the task wants numbers, else as they are; what is neither
    is refused.
    """
    cells, where = read_cells(series, parse=task in ("regression", "counts")), f"column {name!r}"
    if (cells.kind in ("date", "duration", "other")
        or (cells.kind == "text" and task in ("regression", "counts"))):
        wanted = "numbers" if task == "regression" else "numbers or classes"
        example, row = first_text(cells)
        raise InvalidInput(f"The target must hold {wanted}, it holds {HOLDS[cells.kind]}{example}",
                           where=where, remedy="Name another column: --target", row=row)
    if cells.kind == "number":
        check_size(np.where(cells.missing, 0.0, cells.values), name)
    if task == "counts":
        bad = np.flatnonzero(~cells.missing
                             & ((cells.values < 0) | (cells.values != np.floor(cells.values))))
        if bad.size:
            raise InvalidInput(f"Counts are integers from 0, got {cells.values[bad[0]]:g}",
                               where=f"{where}, {ROW}", remedy="Use --task regression",
                               row=int(bad[0]))
    return cells


def _summarise_target(series: Any, cells: Cells, owned: Flags, task: str,
                      min_count: int) -> ColumnSummary:
    """Facts about the target; texts that are all numbers are both, until all nodes are known."""
    kind, present, numbers = cells.kind, owned & ~cells.missing, cells
    if cells.kind == "text" and task == "auto":
        parsed = read_cells(series)
        if parsed.kind == "number" and (np.abs(parsed.values) <= LARGEST).all():
            kind, numbers = "number", parsed
    if task in ("regression", "counts"):
        most = 1  # enough to see whether the target has one value only
    elif cells.kind == "number" and task == "auto":
        values = cells.values[present]
        most = MOST_VALUES if (values == np.floor(values)).all() else 2
    else:
        most = MOST_CLASSES
    return ColumnSummary(
        name=series.name, kind=kind, written=cells.written, integer=cells.dtype == "int",
        rows=int(owned.sum()), missing=int((owned & cells.missing).sum()),
        levels=_count_few(cells, present, most, min_count),
        numbers=_summarise_numbers(numbers, present, median=True), order=RowOrder())


def leave_out(name: str) -> str:
    """What to do about a column that cannot be used."""
    return f"Leave it out (--drop {name!r}) or name the features (--features)"
