"""From any table to numbers: a file is read, a recipe is learned from it, and makes Users of this table and others.

**Files.** CSV (any of , ; tab | between cells; UTF-8, UTF-16 or Windows-1252; plain, gzip or zstd) or Parquet, known
by their content. Cells "", NA, N/A, NaN, null, ?, -, #N/A and <NA> are missing. The file is only ever read.

**Columns.** What a column becomes is decided by its values, in this order:

- all missing, or one value wherever it is given: dropped, with a note;
- numbers (also as texts) and truth values (true, false): as they are. A missing one becomes the column's mean;
- dates and times (also as ISO texts): days since the earliest one; durations and times of day: days;
- texts: a column of 0 and 1 for each level, if there are at most 20 levels and twice as many rows as levels. Of more
  levels the 20 most frequent ones are kept and the others pooled as "(other)", if the 20 cover half of the rows and
  there are 10 rows a level. Other texts are names or free text and are refused. A missing text is 0 in all columns;
- lists, structs and bytes are refused, as are infinite numbers and numbers beyond 1e150.

Where more than 1 % of a column is missing, one more column tells where. Dropped with a note, unless named as features:
a column that counts at least 10 rows (from 0 or 1, top to bottom), one called id, index or row whose integers all
differ, and one without a name (such as pandas and R write first) whose integers or texts all differ.

**Target.** Rows without target are left out, with a note, and refused if they are more than half. Unless the task is
given: texts and truth values are classes; so are two different numbers, and integers 0..K-1 or 1..K with K <= 10 and at
least 2 K rows; other integers from 0 whose mean is at least their median are counts; other numbers are a regression.
There are at most 50 classes, and texts have at least twice as many rows as classes. Without target users are clustered.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np

from coterie._typing import Array, Flags, Ints
from coterie.data.frames import Settled, as_frame, row_names, settle
from coterie.data.io import fingerprint as fingerprint
from coterie.data.io import read_table as read_table
from coterie.data.users import Users
from coterie.data.validation import check_unique, show, suggest
from coterie.errors import CoterieWarning, InvalidInput

Task = Literal["classification", "regression", "counts", "clustering"]
TASKS: tuple[Task, ...] = get_args(Task)
MOST_LEVELS, MOST_CLASSES, LARGEST, DAY = 20, 50, 1e150, 86_400_000_000
OTHER = "(other)"
COUNTER = re.compile(r"(row[ _.]?)?(id|index)|row([ _.]?(names?|number|nr|no))?|_id", re.IGNORECASE)
UNNAMED = ("column 1", "Unnamed: 0", "__index_level_0__")
# Numbers and dates as people write them, $1,234.50 and 12 % and 31.12.2020, which are no levels.
LOCAL = re.compile("[$€£]? ?[+-]?(\\d+|\\d{1,3}([,.' \u00a0\u202f]\\d{3})+)([.,]\\d+)? ?[%$€£]?"
                   "|\\d{4}[./-]\\d{1,2}[./-]\\d{1,2}( .*)?|\\d{1,2}[./-]\\d{1,2}[./-](\\d{4}|\\d\\d)( .*)?")
AS_LEARNED = "Correct it, or learn from this table"
SHOWN = {"number": "numbers", "flag": "truth values", "date": "dates", "duration": "durations", "text": "texts",
         "other": "values that are no numbers", "empty": "nothing"}


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of the table that is used, and what becomes of it."""

    name: str
    kind: Literal["number", "category", "flag", "date", "duration"]
    fill: float = 0.0             # in place of a missing value, in the units of the encoded column
    levels: tuple[str, ...] = ()  # of a category
    pooled: bool = False          # all other levels are one more column
    missing: bool = False         # one more column tells where values are missing
    origin: int = 0               # of dates: the earliest, in microseconds since 1970

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the encoded columns."""
        own = [f"{self.name}={level}" for level in (*self.levels, *([OTHER] * self.pooled))] \
            if self.kind == "category" else [f"{self.name} (days)" if self.kind in ("date", "duration") else self.name]
        return (*own, *([f"{self.name} missing"] * self.missing))

    def encode(self, found: Settled) -> Array:
        """The encoded columns, (n_rows, n_labels)."""
        encoded = np.zeros((len(found.missing), len(self.labels)))
        if self.missing:
            encoded[:, -1] = found.missing
        if self.kind == "category":
            place = self._places(found)
            seen = place >= 0
            encoded[np.flatnonzero(seen), place[seen]] = 1.0
            return encoded
        fits = found.kind in (self.kind, "empty") or (self.kind == "number" and found.kind == "flag") \
            or (self.kind == "flag" and found.kind == "number" and bool(np.isin(found.values, (0, 1)).all()))
        if not fits:
            raise InvalidInput(f"The column must hold {SHOWN[self.kind]}, as in the table learned from, it holds "
                               f"{SHOWN[found.kind]}{_example(found)}", where=f"column {self.name!r}",
                               remedy=AS_LEARNED)
        values = _units(self.kind, found.values, self.origin)
        _check_size(values, self.name)
        encoded[:, 0] = np.where(found.missing, self.fill, values)
        return encoded

    def _places(self, found: Settled) -> Ints:
        """The encoded column of each row's level, -1 for none."""
        if found.kind not in ("text", "number", "flag", "empty"):
            raise InvalidInput(f"The column must hold texts, as in the table learned from, it holds "
                               f"{SHOWN[found.kind]}", where=f"column {self.name!r}", remedy=AS_LEARNED)
        texts, codes = _texts(found)
        known = _lookup(self.levels, found)
        unknown = len(self.levels) if self.pooled else -1
        places = np.where(found.missing, -1, np.array([known.get(text, unknown) for text in texts])[codes])
        new = [texts[code] for code in np.unique(codes[(places < 0) & ~found.missing])]
        if new:
            warnings.warn(f"Column {self.name!r} has levels that the table learned from does not have, {show(*new)}: "
                          "all its columns are 0 there.", CoterieWarning, stacklevel=5)
        return places


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a table becomes numbers: learned from one table, applied to it and to others. Columns are found by name."""

    user: str | None                 # None: every row is a user of its own, named by its number
    target: str | None
    task: Task
    classes: tuple[str, ...]         # of classification, in order: class k has the target k
    class_kind: Literal["str", "int", "float", "bool"]
    columns: tuple[Column, ...]
    notes: tuple[str, ...]           # what is not obvious, a sentence each

    @classmethod
    def learn(cls, frame: Any, *, user: str | None = None, target: str | None = None,
              features: Iterable[str] | str | None = None, drop: Iterable[str] | str = (),
              task: str = "auto") -> Recipe:
        """The recipe for this table; `features` are all other columns unless named, less those in `drop`."""
        frame = as_frame(frame)
        chosen = _chosen(list(frame.columns), user, target, features, drop)
        n, notes = len(frame), list[str]()
        if task not in ("auto", *TASKS):
            raise InvalidInput(f"There is no task {show(task)}", remedy=suggest(task, ("auto", *TASKS)))
        if task == "clustering" and target is not None:
            raise InvalidInput(f"Clustering has no target, got column {show(target)}",
                               remedy=f"Leave --target out, and the column with --drop {target!r}")
        if target is None and task not in ("auto", "clustering"):
            raise InvalidInput(f"The task {task} needs a target", remedy="Name its column: --target COLUMN")
        if n < 2:
            raise InvalidInput(f"At least two rows are needed, got {n}", remedy="Give a table with more rows")
        names = range(n) if user is None else row_names(frame[user])
        kept, kind, class_kind = np.ones(n, dtype=bool), "clustering", "str"
        classes: tuple[str, ...] = ()
        if target is not None:
            found, kind = _target(frame[target], target, task)
            kept = ~found.missing
            if kept.sum() < n / 2:
                raise InvalidInput(f"The target is missing in {n - kept.sum()} of {n} rows", where=f"column {target!r}",
                                   remedy="Fill it in, or delete these rows")
            if not kept.all():
                notes.append(f"{n - kept.sum()} of {n} rows have no target ({target!r}) and are left out.")
            values = found.values[kept]
            if (values == values[0]).all():
                raise InvalidInput(f"The target has one value only, {show(_texts(found)[0][0])}",
                                   where=f"column {target!r}", remedy="Name another column: --target")
            if kind == "classification":
                classes, class_kind = _classes(found, target)
            if task == "auto":
                others = " or ".join(other for other in TASKS[:3] if other != kind)
                notes.append(f"The target {target!r} is taken for {kind}"
                             f"{f' with {len(classes)} classes ({show(*classes)})' if classes else ''}; if it is not, "
                             f"say --task {others}.")
        if user is None and target is not None:
            notes.append("Every row is a user of its own; if rows share users, name their column: --user COLUMN.")
        elif user is not None and len(set(names)) == n:
            notes.append(f"Every user ({user!r}) has one row only, so nothing tells a user from its row.")
        columns = tuple(_columns(frame, chosen, kept, named=features is not None, notes=notes))
        if not columns:
            raise InvalidInput("No column is left to learn from" + (f" ({' '.join(notes)})" if notes else ""),
                               remedy="Give the table a column that varies, or name it: --features COLUMN")
        recipe = cls(user=user, target=target, task=kind, classes=classes, class_kind=class_kind,  # type: ignore[arg-type]
                     columns=columns, notes=tuple(notes))
        check_unique(recipe.feature_names, "Names of encoded columns")
        return recipe

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Of the encoded columns: "age", "colour=red", "age missing", "when (days)"."""
        return tuple(label for column in self.columns for label in column.labels)

    @property
    def class_values(self) -> tuple[Any, ...]:
        """The classes in the type they have in the table."""
        kinds: dict[str, Any] = {"str": str, "int": int, "float": float, "bool": lambda text: text == "True"}
        return tuple(map(kinds[self.class_kind], self.classes))

    def matrix(self, frame: Any) -> tuple[Array, list[Any]]:
        """The encoded columns of every row in the table's order, and the user of each row."""
        frame = as_frame(frame)
        for name in (*([] if self.user is None else [self.user]), *(column.name for column in self.columns)):
            if name not in frame.columns:
                raise InvalidInput(f"There is no column {show(name)}", remedy=suggest(name, frame.columns))
        if not len(frame):
            raise InvalidInput("The table has no rows", remedy="Give a table with at least one row")
        X, start = np.empty((len(frame), len(self.feature_names))), 0
        for column in self.columns:
            # Levels are compared as texts: "01" is not "1".
            found = settle(frame[column.name], parse=column.kind != "category")
            X[:, start:start + len(column.labels)] = column.encode(found)
            start += len(column.labels)
        return X, list(range(len(frame))) if self.user is None else row_names(frame[self.user])

    def encode(self, frame: Any, *, targets: bool = True) -> Users:
        """The table's users, not standardised. Targets are class numbers or numbers; rows without one are left out."""
        frame = as_frame(frame)
        X, names = self.matrix(frame)
        if not targets or self.target is None:
            return Users.from_arrays(X, None, names, feature_names=self.feature_names)
        if self.target not in frame.columns:
            raise InvalidInput(f"There is no column {show(self.target)}", remedy=suggest(self.target, frame.columns))
        y, kept = self._targets(frame[self.target])
        if not kept.any():
            raise InvalidInput("The target is missing in all rows", where=f"column {self.target!r}",
                               remedy="Give targets, or encode without them")
        if not kept.all():
            rows = np.flatnonzero(kept)
            X, y, names = X[rows], y[rows], [names[row] for row in rows]
        return Users.from_arrays(X, y, names, feature_names=self.feature_names)

    def _targets(self, series: Any) -> tuple[Array, Flags]:
        """Targets as numbers, and which rows have one."""
        target = str(self.target)
        if self.task != "classification":
            found, _ = _target(series, target, self.task)
            return found.values.astype(np.float64), ~found.missing
        found = settle(series, parse=self.class_kind != "str")
        texts, codes = _texts(found)
        known = _lookup(self.classes, found)
        numbers = np.array([known.get(text, -1) for text in texts])[codes]
        new = np.flatnonzero((numbers < 0) & ~found.missing)
        if new.size:
            raise InvalidInput(f"The class {show(texts[codes[new[0]]])} is not among those learned",
                               where=f"column {target!r}, row {new[0]}", remedy=f"There are: {show(*self.classes)}")
        return np.where(found.missing, 0, numbers).astype(np.float64), ~found.missing

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
            columns = tuple(Column(**{**c, "levels": tuple(c["levels"])}) for c in d["columns"])
            return cls(**{**d, "columns": columns, "classes": tuple(d["classes"]), "notes": tuple(d["notes"])})
        except (KeyError, TypeError) as error:
            raise InvalidInput(f"This is no recipe: {error}", remedy="Pass what Recipe.to_json gives") from error


def _chosen(columns: list[str], user: str | None, target: str | None, features: Iterable[str] | str | None,
            drop: Iterable[str] | str) -> list[str]:
    """The columns to use as features."""
    used = [name for name in (user, target) if name is not None]
    given = None if features is None else [features] if isinstance(features, str) else list(features)
    dropped = [drop] if isinstance(drop, str) else list(drop)
    for name in (*used, *(given or ()), *dropped):
        if name not in columns:
            raise InvalidInput(f"There is no column {show(name)}", remedy=suggest(name, columns))
    check_unique([*used, *(given or ())], "Columns used as user, target and features")
    both = [name for name in dropped if name in (*used, *(given or ()))]
    if both:
        raise InvalidInput(f"Column {show(both[0])} is both used and dropped", remedy="Leave out one of the two")
    chosen = [c for c in columns if c not in (*used, *dropped)] if given is None else given
    if not chosen:
        raise InvalidInput("At least one feature column is needed, got none", remedy="Name some: --features COLUMN")
    return chosen


def _columns(frame: Any, chosen: Sequence[str], kept: Flags, *, named: bool,
             notes: list[str]) -> Iterable[Column]:
    """What becomes of each column, from the rows that are kept."""
    said: dict[str, list[str]] = {}
    for name in chosen:
        found = settle(frame[name])
        if found.kind == "other":
            raise InvalidInput(f"A column of {frame[name].dtype} cannot be used", where=f"column {name!r}",
                               remedy=_leave_out(name))
        here = kept & ~found.missing
        values = _units(found.kind, found.values, 0)[here]
        if not here.any() or found.kind == "empty":
            said.setdefault("dropped: it is empty", []).append(name)
            continue
        if found.kind == "number":
            _check_size(np.where(found.missing, 0.0, found.values), name)
        if (values == values[0]).all():
            said.setdefault("dropped: it has one value wherever it has any", []).append(name)
            continue
        if not named and _counts_rows(name, found):
            said.setdefault("dropped: it only numbers or names the rows", []).append(name)
            continue
        gone = int(kept.sum() - here.sum())
        indicator = 100 * gone > kept.sum()
        if gone:
            text = "0 in all its columns" if found.kind == "text" else "filled with the mean"
            told = "; one more column tells where" * bool(indicator)
            said.setdefault(f"missing in some rows and {text} there{told}", []).append(name)
        if found.kind == "text":
            levels, pooled = _levels(name, found, here)
            said.setdefault("text and became a column of 0 and 1 for each level"
                            + " of the 20 most frequent, the others pooled" * pooled, []).append(name)
            yield Column(name=name, kind="category", levels=levels, pooled=pooled, missing=bool(indicator))
            continue
        origin = int(found.values[here].min()) if found.kind == "date" else 0
        if found.kind in ("date", "duration"):
            said.setdefault("given in days" + " since the earliest" * (found.kind == "date"), []).append(name)
        fill = float(_units(found.kind, found.values, origin)[here].mean())
        yield Column(name=name, kind=found.kind, fill=fill, missing=bool(indicator), origin=origin)  # type: ignore[arg-type]
    notes += [f"Column {show(*names)} is {what}." if len(names) == 1 else
              f"Columns {show(*names)} are {what.replace('it has', 'each has').replace('it is', 'each is')}."
              for what, names in said.items()]


def _levels(name: str, found: Settled, here: Flags) -> tuple[tuple[str, ...], bool]:
    """The levels of a text column, and whether others are pooled; names and free text are refused."""
    counts = np.bincount(found.values[here].astype(np.int64), minlength=len(found.levels))
    n, k = int(counts.sum()), int((counts > 0).sum())
    if all(LOCAL.fullmatch(level) for level in found.levels):
        raise InvalidInput(f"Numbers must be plain (1234.5) and dates ISO (2020-12-31), got {show(found.levels[0])}",
                           where=f"column {name!r}", remedy=f"Rewrite it, or leave it out: --drop {name!r}")
    most = sorted(np.argsort(-counts, kind="stable")[:min(k, MOST_LEVELS)].tolist())
    if not (k <= max(2, n / 2) if k <= MOST_LEVELS else k <= n / 10 and counts[most].sum() >= n / 2):
        strange = [level for level in found.levels if not LOCAL.fullmatch(level)]
        if len(strange) < k / 2:
            raise InvalidInput(f"The column holds numbers, but also {show(*strange)}", where=f"column {name!r}",
                               remedy=f"Correct or empty these cells, or leave the column out: --drop {name!r}")
        raise InvalidInput(f"The column has {k} different texts in {n} rows ({show(*found.levels[:3])}, ...): it looks "
                           "like names or free text", where=f"column {name!r}", remedy=_leave_out(name))
    return tuple(found.levels[i] for i in most), k > MOST_LEVELS


def _counts_rows(name: str, found: Settled) -> bool:
    """Whether a column only numbers or names the rows."""
    n, values = len(found.values), found.values
    if found.missing.any() or found.kind not in ("text", "number"):
        return False
    if found.kind == "text":
        return name in UNNAMED and len(found.levels) == n
    if not (values == np.floor(values)).all():
        return False
    if name in UNNAMED or COUNTER.fullmatch(name):
        return len(np.unique(values)) == n
    return n >= 10 and values[0] in (0, 1) and bool((np.diff(values) == 1).all())


def _target(series: Any, name: str, task: str) -> tuple[Settled, str]:
    """A target column and its task; texts are numbers where the task wants numbers or there are too many of them."""
    found = settle(series, parse=task in ("regression", "counts"))
    n, k = int((~found.missing).sum()), len(found.levels)
    if found.kind == "text" and task == "auto" and (k > MOST_CLASSES or k > max(2, n / 2)):
        read = settle(series)
        found = read if read.kind == "number" else found
    where = f"column {name!r}"
    if found.kind in ("date", "duration", "other") or (found.kind == "text" and task in ("regression", "counts")):
        raise InvalidInput(f"The target must hold numbers{' or classes' if task != 'regression' else ''}, it holds "
                           f"{SHOWN[found.kind]}{_example(found)}", where=where, remedy="Name another column: --target")
    if found.kind == "number":
        _check_size(np.where(found.missing, 0.0, found.values), name)
    if task == "counts":
        bad = np.flatnonzero(~found.missing & ((found.values < 0) | (found.values != np.floor(found.values))))
        if bad.size:
            raise InvalidInput(f"Counts are integers from 0, got {found.values[bad[0]]:g}",
                               where=f"{where}, row {bad[0]}", remedy="Say --task regression")
    if task != "auto" or not n:
        return found, task
    if found.kind in ("text", "flag"):
        return found, "classification"
    values = found.values[~found.missing]
    distinct = np.unique(values)
    whole, k = bool((values == np.floor(values)).all()), len(distinct)
    codes = whole and distinct[0] in (0, 1) and distinct[-1] - distinct[0] == k - 1 and k <= 10 and n >= 2 * k
    if k == 2 or codes:
        return found, "classification"
    return found, "counts" if whole and distinct[0] == 0 and values.mean() >= np.median(values) else "regression"


def _classes(found: Settled, name: str) -> tuple[tuple[str, ...], str]:
    """The classes of a target in order, and their type."""
    values, counts = np.unique(found.values[~found.missing], return_counts=True)
    kind = {"text": "str", "flag": "bool"}.get(found.kind, "int" if found.dtype == "int" else "float")
    k, n = len(values), int(counts.sum())
    if k > MOST_CLASSES or (kind == "str" and k > max(2, n / 2)):
        raise InvalidInput(f"The target has {k} different values in {n} rows, too many for classes",
                           where=f"column {name!r}", remedy=f"Name another column, or make {MOST_CLASSES} at most"
                           + ("" if kind == "str" else ", or say --task regression"))
    if kind in ("int", "float") and np.abs(values).max() >= 2**53:
        raise InvalidInput("Classes must be integers below 2^53 or texts", where=f"column {name!r}",
                           remedy="Write the classes as texts")
    types: dict[str, Any] = {"str": lambda v: found.levels[int(v)], "bool": bool, "int": int, "float": float}
    return tuple(str(types[kind](value)) for value in values), kind


def _texts(found: Settled) -> tuple[list[str], Ints]:
    """The distinct values of a column as texts, and the position of each row's among them; 0 where it is missing."""
    if found.kind == "text":
        return list(found.levels), found.values.astype(np.int64)
    values, codes = np.unique(found.values[~found.missing], return_inverse=True)
    places = np.zeros(len(found.values), dtype=np.int64)
    places[~found.missing] = codes
    return [_key(str(bool(v)) if found.kind == "flag" else str(v)) for v in values.tolist()] or [""], places


def _lookup(texts: Sequence[str], found: Settled) -> dict[str, int]:
    """Positions of texts under the names that `_texts` gives them: as they are, or 1, 1.0 and 1e0 as one."""
    return {text if found.kind == "text" else _key(text): i for i, text in enumerate(texts)}


def _units(kind: str, values: Any, origin: int) -> Array:
    """Dates and durations in days."""
    return np.asarray((values - origin) / DAY if kind in ("date", "duration") else values, dtype=np.float64)


def _check_size(values: Array, name: str) -> None:
    large = np.flatnonzero(~(np.abs(values) <= LARGEST))
    if large.size:
        raise InvalidInput(f"A number must be finite and at most {LARGEST:g}, got {values[large[0]]:g}",
                           where=f"column {name!r}, row {large[0]}", remedy="Correct it, or leave the cell empty")


def _key(text: str) -> str:
    """One text for all ways to write a number or a truth value."""
    try:
        return repr(float(text) + 0.0)
    except ValueError:
        return text.lower() if text.lower() in ("true", "false") else text


def _example(found: Settled) -> str:
    """The first text that is no number, and its row."""
    if found.kind != "text":
        return ""
    code = next((i for i, level in enumerate(found.levels) if not LOCAL.fullmatch(level)), 0)
    return f" ({show(found.levels[code])} in row {np.argmax((found.values == code) & ~found.missing)})"


def _leave_out(name: str) -> str:
    return f"Leave it out (--drop {name!r}) or name the features (--features)"
