"""A column of a table as columns of numbers: what a recipe says about it, and how it is applied to
a table.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from coterie.base.errors import ROW, CoterieWarning, InvalidInput
from coterie.base.types import Array, Flags, Ints
from coterie.data.frames import Cells
from coterie.data.validation import show

LARGEST, DAY = 1e150, 86_400_000_000
OTHER = "(other)"
# Numbers and dates as people write them, $1,234.50 and 12 % and 31.12.2020, which are no levels.
LOCAL = re.compile("[$€£]? ?[+-]?(\\d+|\\d{1,3}([,.' \u00a0\u202f]\\d{3})+)([.,]\\d+)? ?[%$€£]?"
                   "|\\d{4}[./-]\\d{1,2}[./-]\\d{1,2}( "
                   ".*)?|\\d{1,2}[./-]\\d{1,2}[./-](\\d{4}|\\d\\d)( .*)?")
_COMMA = re.compile("[+-]?\\d+,\\d+(e[+-]?\\d+)?")
#: Kinds of cells that can be levels or classes.
CLASSES_OF = ("text", "number", "flag", "empty")
AS_LEARNED = "Correct it, or fit again with this table"
#: What a column of each kind holds, in words.
HOLDS = {"number": "numbers", "flag": "truth values", "date": "dates", "duration": "durations",
         "text": "texts", "other": "values that are no numbers", "empty": "nothing"}


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of the table that is used, and what becomes of it.

    Parameters
    ----------
    name : its name in the table.
    kind : what it holds; texts are a category.
    fill : replaces a missing value, in the units of the encoded column.
    levels : the texts of a category that have a column of 0 and 1 each.
    reference : of a category with two texts, the one that is 0 in the column of the other.
    pooled : whether all other levels of a category are one more column.
    missing : whether one more column marks the rows without a value.
    origin : the earliest date, in microseconds since 1970.
    """

    name: str
    kind: Literal["number", "category", "flag", "date", "duration"]
    fill: float = 0.0
    levels: tuple[str, ...] = ()
    reference: str | None = None
    pooled: bool = False
    missing: bool = False
    origin: int = 0

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the encoded columns."""
        own = ([f"{self.name}={level}" for level in (*self.levels, *([OTHER] * self.pooled))]
               if self.kind == "category"
               else [f"{self.name} (days)" if self.kind in ("date", "duration") else self.name])
        return (*own, *([f"{self.name} missing"] * self.missing))

    def encode_any(self, cells: Cells) -> Array:
        """The encoded columns of any cells, each row independently of the others: unknown levels
        are as in `encode`, and what is no number or too large is filled in.
        """
        if self.kind == "category":
            index = level_of(cells, (*self.levels, *self._reference), len(self.levels)
                             if self.pooled else -1)
            return self._indicators(index, cells.missing)
        values, missing = numbers_of(cells, self.kind, self.origin)
        encoded = np.zeros((len(missing), len(self.labels)))
        if self.missing:
            encoded[:, -1] = missing
        encoded[:, 0] = np.where(missing, self.fill, values)
        return encoded

    @property
    def is_one(self) -> bool:
        """Whether all parts have their types, and numbers are of a usual size."""
        levels = (*self.levels, *self._reference)
        numbers = ((self.fill, LARGEST), (self.origin, 2**62))
        return (isinstance(self.name, str) and isinstance(self.origin, int)
                and self.kind in ("number", "category", "flag", "date", "duration")
                and isinstance(self.pooled, bool) and isinstance(self.missing, bool)
                and all(isinstance(level, str) for level in levels)
                and len(set(levels)) == len(levels)
                and (self.kind == "category" or not (levels or self.pooled))
                and all(isinstance(number, (int, float)) and not isinstance(number, bool)
                        and abs(number) <= most for number, most in numbers))

    @property
    def _reference(self) -> tuple[str, ...]:
        return () if self.reference is None else (self.reference,)

    def _indicators(self, index: Ints, missing: Flags) -> Array:
        """(n_rows, n_labels) of a category, by the encoded column of each row's level."""
        encoded = np.zeros((len(index), len(self.labels)))
        if self.missing:
            encoded[:, -1] = missing
        known = (index >= 0) & (index < len(self.labels) - self.missing)
        encoded[np.flatnonzero(known), index[known]] = 1.0
        encoded[index < 0, 0] = self.fill
        return encoded

    def encode(self, cells: Cells, known: Collection[str] | None = None) -> Array:
        """The encoded columns, (n_rows, n_labels); of a category, only known levels are told
        apart, all of them if None.
        """
        if self.kind == "category":
            return self._indicators(self._level_index(cells, known), cells.missing)
        encoded = np.zeros((len(cells.missing), len(self.labels)))
        if self.missing:
            encoded[:, -1] = cells.missing
        fits = (cells.kind in (self.kind, "empty")
                or (self.kind == "number" and cells.kind == "flag")
                or (self.kind == "flag" and cells.kind == "number"
                    and bool(np.isin(cells.values, (0, 1)).all())))
        if not fits:
            example, row = first_text(cells)
            raise InvalidInput(f"The column must hold {HOLDS[self.kind]}, it holds "
                               f"{HOLDS[cells.kind]}{example}", where=f"column {self.name!r}",
                               remedy=AS_LEARNED, row=row)
        values = in_days(self.kind, cells.values, self.origin)
        check_size(values, self.name)
        encoded[:, 0] = np.where(cells.missing, self.fill, values)
        return encoded

    def _level_index(self, cells: Cells, only: Collection[str] | None) -> Ints:
        """The encoded column of each row's level: -1 for none, after the last for the reference."""
        if cells.kind not in ("text", "number", "flag", "empty"):
            raise InvalidInput(f"The column must hold texts, it holds {HOLDS[cells.kind]}",
                               where=f"column {self.name!r}", remedy=AS_LEARNED)
        texts, codes = as_texts(cells)
        known = positions((*self.levels, *self._reference), cells)
        if only is not None:
            plain = {text if cells.kind == "text" else text_key(text) for text in only}
            known = {text: index for text, index in known.items() if text in plain}
        unknown = len(self.levels) if self.pooled else -1
        index = np.where(cells.missing, -1,
                         np.array([known.get(text, unknown) for text in texts])[codes])
        new = [texts[code] for code in np.unique(codes[(index < 0) & ~cells.missing])]
        if new and only is None:
            becomes = ("all its columns are 0" if self.reference is None
                       else "it is filled with its mean")
            warnings.warn(f"Column {self.name!r} has levels that are not known, {show(*new)}: "
                          f"{becomes} there.", CoterieWarning, stacklevel=5)
        return index


def level_of(cells: Cells, levels: Sequence[str], unknown: int) -> Ints:
    """(n_rows,) the position of each cell's level, whatever the other cells are: 1, 1.0 and 1e0 are
    one level. Unknown ones have the number given, missing cells and those that are no levels -1.
    """
    if cells.kind not in CLASSES_OF:
        return np.full(len(cells.missing), -1)
    texts, codes = as_texts(cells)
    known = {text_key(text): index for index, text in enumerate(levels)}
    index = np.array([known.get(text_key(text), unknown) for text in texts])[codes]
    return np.where(cells.missing, -1, index)


def numbers_of(cells: Cells, kind: str = "number", origin: float = 0.0) -> tuple[Array, Flags]:
    """The cells as numbers, each by itself, and which of them are none or too large."""
    values, missing = np.asarray(cells.values, dtype=np.float64), cells.missing
    if cells.kind == "text":
        parsed = np.array([_number_of(text) for text in cells.levels])
        values = parsed[cells.values] if kind in ("number", "flag") else values * np.nan
    elif kind in ("date", "duration") or cells.kind in ("date", "duration", "other"):
        values = in_days(kind, values, origin) if cells.kind == kind else values * np.nan
    with np.errstate(invalid="ignore"):
        wrong = missing | ~(np.abs(values) <= LARGEST)
    return np.where(wrong, 0.0, values), wrong


def _number_of(text: str) -> float:
    """The number or truth value that a text says; nan if none."""
    text = text.strip().lower()
    if _COMMA.fullmatch(text):
        text = text.replace(",", ".")
    try:
        return float({"true": "1", "false": "0"}.get(text, text))
    except ValueError:
        return float("nan")


def as_texts(cells: Cells) -> tuple[list[str], Ints]:
    """The distinct values of a column as texts, and the position of each row's among them; 0 where
    it is missing.
    """
    if cells.kind == "text":
        return list(cells.levels), cells.values.astype(np.int64)
    values, codes = np.unique(cells.values[~cells.missing], return_inverse=True)
    index = np.zeros(len(cells.values), dtype=np.int64)
    index[~cells.missing] = codes
    return [text_key(str(bool(v)) if cells.kind == "flag" else str(v)) for v in values.tolist()] \
        or [""], index


def positions(texts: Sequence[str], cells: Cells) -> dict[str, int]:
    """Positions of texts under the names that `as_texts` gives them: as they are, or 1, 1.0 and 1e0
    as one.
    """
    return {text if cells.kind == "text" else text_key(text): i for i, text in enumerate(texts)}


def text_key(text: str) -> str:
    """One text for all ways to write a number or a truth value."""
    try:
        return repr(float(text) + 0.0)
    except ValueError:
        return text.lower() if text.lower() in ("true", "false") else text


def number_key(text: str) -> tuple[float, str]:
    """What texts are sorted by as the numbers that they say; others come after these."""
    try:
        return float(text), ""
    except ValueError:
        return np.inf, text


def in_days(kind: str, values: Any, origin: float) -> Array:
    """Dates and durations in days since `origin`, other values as they are."""
    return np.asarray((values - origin) / DAY if kind in ("date", "duration") else values,
                      dtype=np.float64)


def check_size(values: Array, name: str) -> None:
    """Raise InvalidInput at the first number that is infinite or too large to be squared."""
    large = np.flatnonzero(~(np.abs(values) <= LARGEST))
    if large.size:
        raise InvalidInput(f"A number must be finite and at most {LARGEST:g}, got "
                           f"{values[large[0]]:g}", where=f"column {name!r}, {ROW}",
                           remedy="Correct it, or leave the cell empty", row=int(large[0]))


def first_text(cells: Cells) -> tuple[str, int | None]:
    """A text that is no number with `ROW` for its row, in brackets, and its first row."""
    if cells.kind != "text":
        return "", None
    k = next((k for k, level in enumerate(cells.levels) if not LOCAL.fullmatch(level)), 0)
    return (f" ({show(cells.levels[k])} in {ROW})",
            int(np.argmax((cells.values == k) & ~cells.missing)))
