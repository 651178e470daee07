"""From any table to numbers: a recipe is learned from a table and turns it, and other tables, into
Users.

**Files.** CSV (any of , ; tab | between cells; UTF-8, UTF-16 or Windows-1252), Parquet, JSON lines
or Excel, also with gzip, bzip2, xz or zstd; known by their content. Cells "", NA, N/A, NaN, null,
?, -, #N/A and <NA> are missing. The file is only ever read.

**Columns.** What a column becomes is decided by its values, in this order:

- all missing, or one value wherever it is given: dropped, with a note;
- numbers (also as texts) and truth values (true, false): as they are. A missing one becomes the
  column's mean;
- dates and times (also as ISO texts): days since the earliest one; durations and times of day:
  days;
- texts: a column of 0 and 1 for each level, if there are at most 20 levels and twice as many rows
  as levels; of two levels one column, for the second in alphabetical order. Of more than 20 levels
  the 20 most frequent ones are kept and the others pooled as "(other)", if the 20 cover half of the
  rows and there are 10 rows a level. Other texts are names or free text and are refused. A missing
  text is 0 in all columns, and the column's mean where there are two levels;
- lists, structs and bytes are refused, as are infinite numbers and numbers beyond 1e150.

Where more than 1 % of a column is missing, one more column marks the rows. Dropped with a note,
unless named as features: a column that counts at least 10 rows (from 0 or 1, top to bottom), one
called id, index or row whose integers all differ, and one without a name (such as pandas and R
write first) whose integers or texts all differ.

**User and target.** Rows without user or without target are left out, with a note; the table is
refused if they are more than half. Unless the task is given: texts and truth values are classes; so
are two different numbers, and integers 0..K-1 or 1..K with K <= 10 and at least 2 K rows; other
integers from 0 whose mean is at least their median are counts; other numbers are a regression.
There are at most 50 classes, and texts have at least twice as many rows as classes. Without target
users are clustered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np

from coterie.base.errors import ROW, InvalidInput
from coterie.base.types import Array, Flags
from coterie.data.columns import Column as Column
from coterie.data.columns import (
    as_texts,
    check_size,
    first_text,
    level_of,
    numbers_of,
    positions,
    text_key,
)
from coterie.data.files import fingerprint as fingerprint
from coterie.data.files import read_table as read_table
from coterie.data.frames import as_frame, read_cells, row_names
from coterie.data.summary import (
    MOST_CLASSES,
    MOST_LEVELS,
    ColumnSummary,
    Levels,
    TableSummary,
    leave_out,
    summarise,
    target_cells,
)
from coterie.data.summary import TASKS as TASKS
from coterie.data.summary import Task as Task
from coterie.data.users import Users
from coterie.data.validation import check_unique, must, show, suggest, texts_of

ClassKind = Literal["str", "int", "float", "bool"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a table becomes numbers: learned from one table or several, applied to these and others.

    Columns are matched by name. What each kind of column becomes is explained in the module.

    Parameters
    ----------
    user : the column that names the owner of a row; None: every row is a separate user, named by
        its number.
    target : the column to predict, or None.
    task : what the target is.
    classes : of a classification, in order: class k has the target k.
    class_kind : the type that classes have in the table.
    columns : the columns learned from, and what becomes of them.
    notes : what was inferred, filled in and left out, one sentence each.

    Example
    -------
    >>> import polars
    >>> frame = polars.DataFrame({"who": ["a", "b"] * 3, "kind": ["red", "blue", "red"] * 2,
    ...                           "y": [0.5, 1.5, 3.0] * 2})
    >>> recipe = Recipe.learn(frame, user="who", target="y")
    >>> recipe.task, recipe.feature_names
    ('regression', ('kind=red',))
    >>> recipe.encode(frame)
    Users(2 users, 6 samples, 1 features, targets)
    """

    user: str | None
    target: str | None
    task: Task
    classes: tuple[str, ...]
    class_kind: ClassKind
    columns: tuple[Column, ...]
    notes: tuple[str, ...]

    @classmethod
    def learn(cls, frame: Any, *, user: str | None = None, target: str | None = None,
              features: Iterable[str] | str | None = None, drop: Iterable[str] | str = (),
              task: str = "auto") -> Recipe:
        """The recipe for one table.

        Parameters
        ----------
        frame : a polars frame, one row per sample; `read_table` makes one of a file.
        user : the column that names the owner of each row; None makes every row a separate user.
        target : the column to predict; None clusters users.
        features : the columns to learn from; all others unless named.
        drop : columns to leave out.
        task : "auto", which infers it from the target, or one of TASKS.

        Returns
        -------
        Recipe, whose `notes` say what was inferred and left out.

        Raises
        ------
        InvalidInput : a column that is not there, or one that cannot become numbers.

        Example
        -------
        >>> import polars
        >>> frame = polars.DataFrame({"who": ["a", "b"] * 3, "x": range(6),
        ...                           "y": ["no", "yes", "no"] * 2})
        >>> Recipe.learn(frame, user="who", target="y").class_values
        ('no', 'yes')
        """
        summary = summarise(frame, user=user, target=target, features=features, drop=drop,
                            task=task)
        try:
            return cls.from_summary(summary)
        except MixedCells as problem:
            cells = read_cells(as_frame(frame)[problem.column])
            if cells.kind == "number":
                # Inf is written as a text.
                check_size(cells.values.astype(np.float64), problem.column)
            example, row = first_text(cells)
            raise InvalidInput(f"{problem.problem.partition(' (')[0]}{example}",
                               where=problem.where, remedy=problem.remedy, row=row) from None

    @classmethod
    def from_summary(cls, summary: TableSummary) -> Recipe:
        """The recipe for the table, or the tables, that a summary is of.

        Parameters
        ----------
        summary : of one table (`coterie.data.summary.summarise`) or of several
            (`coterie.data.merging.merge`).

        Raises
        ------
        InvalidInput : too few rows, a target or a column that cannot become numbers, or no column
            left.

        Example
        -------
        >>> import polars
        >>> from coterie.data.merging import merge
        >>> frames = [polars.DataFrame({"who": [name] * 3, "x": [1.0, 2.5, 4.0], "y": [1, 0, 1]})
        ...           for name in "ab"]
        >>> Recipe.from_summary(merge([summarise(frame, user="who", target="y")
        ...                            for frame in frames])).task
        'classification'
        """
        user, notes, everything = summary.user, list[str](), summary.rows + summary.unnamed
        if summary.unnamed > everything / 2:
            raise InvalidInput(f"The user is missing in {summary.unnamed} of {everything} rows",
                               where=f"column {user!r}",
                               remedy="Fill it in, or name another column: --user")
        if summary.unnamed:
            notes.append(f"{summary.unnamed} of {everything} rows have no user ({user!r}) and are "
                         "ignored.")
        if summary.rows < 2:
            raise InvalidInput(f"At least two rows are needed, got {summary.rows}",
                               remedy="Give a table with more rows")
        task, classes, class_kind = learn_target(summary, notes)
        if user is None and summary.target is not None:
            notes.append("Every row is a user; if several rows belong to one user, name the "
                         "column: --user COLUMN.")
        elif user is not None and summary.users == summary.rows:
            notes.append(f"Every user ({user!r}) has one row only, so user and row effects are "
                         "indistinguishable.")
        columns = tuple(learn_columns(summary, notes))
        if not columns:
            raise InvalidInput(
                "No column is left to learn from" + (f" ({' '.join(notes)})" if notes else ""),
                remedy="Give the table a column that varies, or name it: --features COLUMN")
        recipe = cls(user=user, target=summary.target, task=task, classes=classes,
                     class_kind=class_kind, columns=columns, notes=tuple(notes))
        check_unique(recipe.feature_names, "Names of encoded columns")
        return recipe

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the encoded columns, such as "age", "colour=red", "age missing", "when (days)".
        """
        return tuple(label for column in self.columns for label in column.labels)

    @property
    def class_values(self) -> tuple[Any, ...]:
        """The classes in the type they have in the table."""
        kinds: dict[str, Any] = {"str": str, "int": int, "float": float,
                                 "bool": lambda text: text == "True"}
        return tuple(map(kinds[self.class_kind], self.classes))

    def matrix(self, frame: Any, *, lenient: bool = False,
               known: Mapping[str, Collection[str]] | None = None) -> tuple[Array, list[Any]]:
        """The encoded columns of every row in the table's order, and the user of each row.

        Parameters
        ----------
        frame : a polars frame with the user column and the columns learned from.
        lenient, known : see `encode`.

        Returns
        -------
        (n_rows, n_encoded) numbers, and a list of n_rows names; None for rows without a user.

        Raises
        ------
        InvalidInput : a column that is missing, or that does not hold what was learned.
        """
        frame = as_frame(frame)
        for name in (*([] if self.user is None else [self.user]),
                     *(column.name for column in self.columns)):
            if name not in frame.columns:
                raise InvalidInput(f"There is no column {show(name)}",
                                   remedy=suggest(name, frame.columns))
        if not len(frame):
            raise InvalidInput("The table has no rows", remedy="Give a table with at least one row")
        X, start = np.empty((len(frame), len(self.feature_names))), 0
        for column in self.columns:
            # Levels are compared as texts: "01" is not "1".
            cells = read_cells(frame[column.name],
                               parse=column.kind != "category" and not lenient)
            X[:, start:start + len(column.labels)] = (
                column.encode_any(cells) if lenient
                else column.encode(cells, None if known is None else known.get(column.name, ())))
            start += len(column.labels)
        return X, list(range(len(frame))) if self.user is None else row_names(frame[self.user])

    def encode(self, frame: Any, *, targets: bool = True, lenient: bool = False,
               known: Mapping[str, Collection[str]] | None = None) -> Users:
        """The table's users, not standardised.

        Parameters
        ----------
        frame : a polars frame with the columns learned from.
        targets : whether targets are encoded as well, as class numbers or numbers; rows without one
            are left out, as are rows without a user.
        lenient : whether every value is encoded, one row independently of the others: what is no
            number is filled in, unknown levels are "other", rows of an unknown class are left out,
            and a user stays even without rows.
        known : of columns of texts, the levels that are told apart here; the others are unknown,
            whether there are such rows or not. All of them if None.

        Raises
        ------
        InvalidInput : a column that is missing, or that does not hold what was learned; a class
            that is new.
        """
        frame = as_frame(frame)
        X, names = self.matrix(frame, lenient=lenient, known=known)
        kept, y = np.array([name is not None for name in names], dtype=bool), None
        if not kept.any():
            raise InvalidInput("The user is missing in all rows", where=f"column {self.user!r}",
                               remedy="Name the owner of each row")
        if targets and self.target is not None:
            y, answered = self._answers(frame, kept, lenient)
            if lenient:
                return _with_all_users(X, y, names, kept & answered, self.feature_names)
            if not (kept & answered).any():
                raise InvalidInput("The target is missing in all rows",
                                   where=f"column {self.target!r}",
                                   remedy="Give targets, or encode without them")
            kept &= answered
        if not kept.all():
            rows = np.flatnonzero(kept)
            X, y, names = X[rows], None if y is None else y[rows], [names[row] for row in rows]
        return Users.from_arrays(X, y, names, feature_names=self.feature_names)

    def check_levels(self, frame: Any) -> None:
        """Refuse a table that has none of the levels of a column: they mean something else there.

        Raises
        ------
        InvalidInput : with the column, its levels, and what the table has instead.
        """
        for column in self.columns:
            if column.kind != "category":
                continue
            cells = read_cells(frame[column.name], parse=False)
            texts, codes = as_texts(cells)
            levels = (*([] if column.reference is None else [column.reference]), *column.levels)
            known = positions(levels, cells)
            seen = [texts[code] for code in np.unique(codes[~cells.missing])]
            if seen and not any(text in known for text in seen):
                raise InvalidInput(f"None of the levels {show(*levels)} is in the table, which has "
                                   f"{show(*seen[:3])}", where=f"column {column.name!r}",
                                   remedy="Name the levels as they are written there")

    def _answers(self, frame: Any, owned: Flags, lenient: bool) -> tuple[Array, Flags]:
        """Targets as numbers, and which rows have one; new classes are refused in rows that have a
        user.
        """
        if self.target not in frame.columns:
            raise InvalidInput(f"There is no column {show(self.target)}",
                               remedy=suggest(self.target, frame.columns))
        series, target = frame[self.target], str(self.target)
        if self.task != "classification" and lenient:
            values, missing = numbers_of(read_cells(series, parse=False))
            return np.where(missing, 0.0, values), ~missing
        if self.task != "classification":
            cells = target_cells(series, target, self.task)
            return cells.values.astype(np.float64), ~cells.missing
        if lenient:
            numbers = level_of(read_cells(series, parse=False), self.classes, -1)
            return np.maximum(numbers, 0).astype(np.float64), numbers >= 0
        cells = read_cells(series, parse=self.class_kind != "str")
        if cells.kind == "flag" and self.class_kind in ("int", "float"):
            cells = cells._replace(kind="number")
        texts, codes = as_texts(cells)
        known = positions(self.classes, cells)
        numbers = np.array([known.get(text, -1) for text in texts])[codes]
        new = np.flatnonzero((numbers < 0) & ~cells.missing & owned)
        if new.size:
            raise InvalidInput(f"The class {show(texts[codes[new[0]]])} is not among those learned",
                               where=f"column {target!r}, {ROW}",
                               remedy=f"There are: {show(*self.classes)}", row=int(new[0]))
        return np.where(cells.missing, 0, numbers).astype(np.float64), ~cells.missing

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; `from_json` gives an equal recipe."""
        def lists(value: Any) -> Any:
            return [lists(v) for v in value] if isinstance(value, (tuple, list)) else \
                {k: lists(v) for k, v in value.items()} if isinstance(value, dict) else value

        return {key: lists(value) for key, value in asdict(self).items()}

    @classmethod
    def from_json(cls, d: dict[str, Any]) -> Recipe:
        """The recipe that `to_json` gives."""
        try:
            columns = tuple(Column(**{**c, "levels": texts_of(c["levels"])}) for c in d["columns"])
            made = cls(**{**d, "columns": columns, "classes": texts_of(d["classes"]),
                          "notes": texts_of(d["notes"])})
            made._check_types()
            return made
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidInput(f"This is no recipe: {str(error)[:200]}",
                               remedy="Pass what Recipe.to_json gives") from error

    def _check_types(self) -> None:
        """Refuse what no recipe that is learned has, with a TypeError."""
        for name in (self.user, self.target):
            must(name is None or isinstance(name, str), "names of columns are texts")
        must(self.task in TASKS and self.class_kind in get_args(ClassKind), "there is no such task")
        must(len(set(self.classes)) == len(self.classes), "a class comes twice")
        must(all(column.is_one for column in self.columns), "a column is none")


def _with_all_users(X: Array, y: Array, names: list[Any], kept: Flags,
                    columns: tuple[str, ...]) -> Users:
    """The rows that are kept, of all users that are named, some of whom may have none."""
    named = np.flatnonzero([name is not None for name in names])
    users = Users.from_arrays(X[named], np.arange(len(named), dtype=float),
                              [names[row] for row in named], feature_names=columns)
    assert users.targets is not None
    order = named[users.targets.astype(np.int64)]  # rows of the table, by user
    counts = np.bincount(users.owner[kept[order]], minlength=users.n_users)
    order = order[kept[order]]
    return Users(X[order], y[order], np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
                 users.names, columns)


# ---- the rules: from facts about a table to its recipe

class MixedCells(InvalidInput):
    """Texts in a column of numbers. Whoever has the table can say where they are."""

    def __init__(self, problem: str, column: str, remedy: str) -> None:
        super().__init__(problem, where=f"column {column!r}", remedy=remedy)
        self.column = column


def learn_target(summary: TableSummary,
                 notes: list[str]) -> tuple[Task, tuple[str, ...], ClassKind]:
    """The task, and its classes in order with their type; notes say what was left out and what was
    inferred.
    """
    answers, n = summary.answers, summary.rows
    if answers is None:
        return "clustering", (), "str"
    name, where = answers.name, f"column {answers.name!r}"
    if answers.present < n / 2:
        raise InvalidInput(f"The target is missing in {answers.missing} of {n} rows", where=where,
                           remedy="Fill it in, or delete these rows")
    if answers.missing:
        notes.append(f"{answers.missing} of {n} rows have no target ({name!r}) and are ignored.")
    as_text = _is_text(answers, summary.task)
    numbers, levels = answers.numbers, answers.levels
    if levels.distinct == 1 if as_text or numbers is None else numbers.low == numbers.high:
        only = next(iter(levels.counts), "")
        raise InvalidInput("The target has one value only, "
                           f"{show(only if as_text else text_key(only))}", where=where,
                           remedy="Name another column: --target")
    task = _infer_task(answers, as_text) if summary.task == "auto" else summary.task
    classes, kind = _infer_classes(answers, as_text) if task == "classification" else ((), "str")
    if summary.task == "auto":
        others = " or ".join(other for other in TASKS[:3] if other != task)
        notes.append(f"The target {name!r} is inferred as {task}"
                     f"{f' with {len(classes)} classes ({show(*classes)})' if classes else ''}; if "
                     "it is not, "
                     f"use --task {others}.")
    return task, classes, kind  # type: ignore[return-value]


def _is_text(answers: ColumnSummary, task: str) -> bool:
    """Whether the target's texts are classes, though they may say numbers: not if there are too
    many of them.
    """
    if answers.kind != "number" or not answers.written or task != "auto":
        return answers.kind == "text"
    k = answers.levels.distinct
    return k <= MOST_CLASSES and k <= max(2, answers.present / 2)


def _values(answers: ColumnSummary) -> list[float]:
    """The different numbers of the target that are known: all of them unless some are pooled."""
    assert answers.numbers is not None
    known = {float({"true": "1", "false": "0"}.get(text.lower(), text))
             for text in answers.levels.counts}
    return sorted(known | ({answers.numbers.low, answers.numbers.high} if answers.levels.rare_levels
                           else set()))


def _infer_task(answers: ColumnSummary, as_text: bool) -> Task:
    numbers = answers.numbers
    if as_text or answers.kind == "flag" or numbers is None:
        return "classification"
    k = max(len(_values(answers)), answers.levels.rare_levels)
    codes = (numbers.integers and numbers.low in (0, 1) and numbers.high - numbers.low == k - 1
             and k <= 10 and numbers.rows >= 2 * k)
    if k == 2 or codes:
        return "classification"
    return ("counts" if numbers.integers and numbers.low == 0 and numbers.mean >= numbers.median
            else "regression")


def _infer_classes(answers: ColumnSummary, as_text: bool) -> tuple[tuple[str, ...], ClassKind]:
    """The classes of a target in order, and their type."""
    kind: ClassKind = ("str" if as_text else "bool" if answers.kind == "flag"
                       else "int" if answers.integer else "float")
    values = [] if as_text else _values(answers)
    k, n = max(len(values),
               answers.levels.distinct if as_text else answers.levels.rare_levels), answers.present
    if k > MOST_CLASSES or (kind == "str" and k > max(2, n / 2)):
        strange, n_strange = answers.levels.find_texts() if as_text else ([], 0)
        if 0 < n_strange < k / 2:
            raise MixedCells(f"The target holds numbers, but also texts{_in_brackets(strange)}",
                             answers.name, remedy="Correct or empty these cells, or name another "
                             "column: --target")
        raise InvalidInput(f"The target has {k} different values in {n} rows, too many for classes",
                           where=f"column {answers.name!r}",
                           remedy=f"Name another column, or make {MOST_CLASSES} at most"
                           + ("" if kind == "str" else ", or use --task regression"))
    if as_text:
        return tuple(sorted(answers.levels.counts)), kind
    if max(map(abs, values)) >= 2**53:
        raise InvalidInput("Classes must be integers below 2^53 or texts",
                           where=f"column {answers.name!r}", remedy="Write the classes as texts")
    types = {"bool": bool, "int": int, "float": float}
    return tuple(str(types[kind](value)) for value in values), kind


def learn_columns(summary: TableSummary, notes: list[str]) -> Iterator[Column]:
    """What becomes of each column; notes say what is not obvious."""
    said: dict[str, list[str]] = {}
    for facts in summary.columns:
        column = _learn_column(facts, summary, said)
        if column is not None:
            yield column
    notes += [f"Column {show(*names)} is {what}." if len(names) == 1 else
              f"Columns {show(*names)} are "
              f"{what.replace('it has', 'each has').replace('it is', 'each is')}."
              for what, names in said.items()]


def _learn_column(facts: ColumnSummary, summary: TableSummary,
                  said: dict[str, list[str]]) -> Column | None:
    """What becomes of a column, None if it is dropped; what is to be said of it is added to `said`.
    """
    name, numbers, levels = facts.name, facts.numbers, facts.levels

    def note(text: str) -> None:
        said.setdefault(text, []).append(name)

    if facts.kind == "empty" or not facts.present:
        note("dropped: it is empty")
        return None
    if levels.distinct == 1 if numbers is None else numbers.low == numbers.high:
        note("dropped: it has one value wherever it has any")
        return None
    if not summary.named and facts.numbers_rows(summary.rows):
        note("dropped: it only numbers or names the rows")
        return None
    indicator = 100 * facts.missing > facts.rows
    if facts.missing:
        several = numbers is None and levels.distinct > 2
        note("missing in some rows and "
             f"{'0 in all its columns' if several else 'filled with the mean'} there"
             + "; one more column marks them" * indicator)
    if numbers is None:
        kept, pooled = _choose_levels(name, levels, facts.present)
        if len(kept) == 2 and not pooled:  # the second column would be 1 minus the first
            note(f"text and became one column, 0 for {kept[0]!r} and 1 for {kept[1]!r}")
            return Column(name=name, kind="category", levels=kept[1:], reference=kept[0],
                          missing=indicator, fill=levels.counts[kept[1]] / facts.present)
        note("text and became a column of 0 and 1 for each level"
             + f" of the {len(kept)} most frequent, the others pooled" * pooled)
        return Column(name=name, kind="category", levels=kept, pooled=pooled, missing=indicator)
    if facts.kind in ("date", "duration"):
        note("given in days" + " since the earliest" * (facts.kind == "date"))
    kind: Any = facts.kind
    return Column(name=name, kind=kind, fill=numbers.mean, missing=indicator,
                  origin=int(numbers.low) if facts.kind == "date" else 0)


def _choose_levels(name: str, levels: Levels, n: int) -> tuple[tuple[str, ...], bool]:
    """The levels of a text column, and whether others are pooled; names and free text are refused.
    """
    texts, k = sorted(levels.counts), levels.distinct
    strange, n_strange = levels.find_texts()
    if not n_strange:
        raise InvalidInput("Numbers must be plain (1234.5) and dates ISO (2020-12-31), got "
                           f"{show(*texts[:1]) or 'others'}", where=f"column {name!r}",
                           remedy=f"Rewrite it, or ignore it: --drop {name!r}")
    most = sorted(sorted(texts, key=lambda text: (-levels.counts[text], text))[:MOST_LEVELS])
    covered = sum(levels.counts[text] for text in most)
    if (not most
            or not (k <= max(2, n / 2) if k <= MOST_LEVELS else k <= n / 10 and covered >= n / 2)):
        if n_strange < k / 2:
            raise MixedCells(
                f"The column holds numbers, but also texts{_in_brackets(strange)}", name,
                remedy=f"Correct or empty these cells, or leave the column out: --drop {name!r}")
        examples = f" ({show(*texts[:3])}, ...)" if texts else ""
        raise InvalidInput(f"The column has {k} different texts in {n} rows{examples}: it looks "
                           "like names or free "
                           "text", where=f"column {name!r}", remedy=leave_out(name))
    return tuple(most), k > len(most)


def _in_brackets(texts: list[str]) -> str:
    return f" ({show(*texts)})" if texts else ""
