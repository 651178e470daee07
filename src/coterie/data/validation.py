"""Checks of what a caller passes in: numbers, names, columns that exist.

Messages about arrays and frames count rows from 0, as Python does. Those about a file say the line
of the file, or the row of a file without lines (`coterie.data.files.row_place`), both from 1.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from decimal import Decimal
from numbers import Real
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from coterie.base.errors import ROW, InvalidInput
from coterie.base.types import Array, Ints

FILL = "Fill in or drop missing and infinite values first"
ENCODE = ("Encode it as numbers (coterie.fitting.prepare makes one-hot columns of a table's texts) "
          "or drop it")
ENCODE_TARGET = ("Encode classes as numbers: coterie.fitting.prepare does so and infers the task; "
                 "by hand, number them -1 and +1 for Logistic(), or 0, 1, ... for Multinomial()")


#: In place of a path: standard input.
STANDARD_INPUT = "-"


def is_input(path: str | PathLike[str]) -> bool:
    """Whether this stands for standard input."""
    return str(path) == STANDARD_INPUT


class Rows(NamedTuple):
    """Which user owns each row of the input, so that messages can say whose it is."""

    names: tuple[Any, ...]
    codes: Ints

    def where(self, row: int, column: Any = None) -> str:
        """The user, the row and the column of a cell, in words, with `ROW` for the row."""
        cell = f"user {show(self.names[self.codes[row]])}, {ROW}"
        return cell if column is None else f"{cell}, column {column!r}"


def group(user: Any) -> Rows:
    """Distinct names in order, and the position of each row's name among them."""
    values = user.to_numpy() if hasattr(user, "to_numpy") else user
    if isinstance(values, np.ndarray):
        if values.ndim != 1:
            raise InvalidInput(f"user must have one dimension, got shape {values.shape}",
                               remedy="Make one name of several columns: list(map(tuple, user))")
        # As nanoseconds, dates would turn into plain integers.
        values = (values.astype(f"{values.dtype.kind}8[us]") if values.dtype.kind in "mM"
                  else values).tolist()
    table: dict[Any, int] = {}
    codes: list[int] = []
    try:
        for value in values:
            codes.append(table.setdefault(value, len(table)))
    except TypeError as error:
        raise InvalidInput("A user name must be hashable, such as a string, a number or a tuple of "
                           "them", where=ROW, row=len(codes)) from error
    missing = next((code for name, code in table.items() if is_missing(name)), None)
    if missing is not None:
        raise InvalidInput("A user name is missing", where=ROW, remedy="Fill it in",
                           row=codes.index(missing))
    names = [plain(name) for name in table]
    try:
        order = sorted(range(len(names)), key=names.__getitem__)
    except TypeError:  # names of several kinds, which have no order
        order = list(range(len(names)))
    return Rows(tuple(names[i] for i in order), np.argsort(order)[codes])


def as_array(values: Any, what: str) -> npt.NDArray[Any]:
    """`values` as an array in which numbers stay numbers next to texts, and masked entries become
    None.
    """
    if hasattr(values, "tocsr"):
        raise InvalidInput(f"{what} must be dense, got {type(values).__name__}",
                           remedy=f"Pass {what}.toarray()")
    if np.ma.is_masked(values):
        values = np.where(np.ma.getmaskarray(values), None, values.data)
    values = values.to_numpy() if hasattr(values, "to_numpy") else values
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise InvalidInput(f"{what} has rows of different lengths",
                           remedy="Give all rows the same columns") from error
    return (array if isinstance(values, np.ndarray) or array.dtype.kind in "biuf"
            else np.asarray(values, dtype=object))


def as_numbers(values: Any, what: str, rows: Rows, column: Any, remedy: str) -> Array:
    """One column as finite float64; anything else is rejected with its user, row and column."""
    array, dtype = as_array(values, what), str(getattr(values, "dtype", "object"))
    bad: int | None = 0
    if (array.ndim == 1 and array.dtype.kind in "biufO"
        and not dtype.lower().startswith(("categor", "enum"))):
        every = array if array.dtype.kind == "O" else ()
        bad = next((i for i, v in enumerate(every) if not isinstance(v, (Real, Decimal, np.bool_))),
                   None)
    if bad is not None and is_missing(array[bad]):
        raise InvalidInput(f"{what} has a missing value", where=rows.where(bad, column),
                           remedy=FILL, row=bad)
    if bad is not None:
        raise InvalidInput(f"{what} must hold numbers, got {show(array[bad])} of dtype {dtype}",
                           where=rows.where(bad, column), remedy=remedy, row=bad)
    try:
        numbers = array.astype(np.float64)
    except OverflowError as error:
        raise InvalidInput(f"{what} has an integer beyond float64", where=f"column {column!r}",
                           remedy=FILL) from error
    check_finite(numbers, what, rows, [column])
    return numbers


def check_finite(values: Array, what: str, rows: Rows, columns: Sequence[Any] = (None,)) -> None:
    """Raise InvalidInput at the first number that is missing or infinite."""
    finite = np.isfinite(values)
    if not finite.all():
        row, column = divmod(int(np.argmin(finite)), len(columns))
        kind = ("a missing value (NaN)" if np.isnan(values.flat[row * len(columns) + column])
                else "an infinite value")
        raise InvalidInput(f"{what} has {kind}", where=rows.where(row, columns[column]),
                           remedy=FILL, row=row)


def check_unique(values: Collection[Any], what: str) -> None:
    """Raise InvalidInput if a value comes twice."""
    if len(set(values)) < len(values):
        raise InvalidInput(f"{what} must be unique, {show(Counter(values).most_common(1)[0][0])} "
                           "comes again")


def is_missing(value: Any) -> bool:
    """Whether a value is None, NaN, NaT or NA, or a tuple with one of them."""
    if isinstance(value, tuple):
        return any(map(is_missing, value))
    # NaN and NaT differ from themselves; pandas' NA refuses to say.
    return (value is None or type(value).__name__ == "NAType"
            or (isinstance(value, Hashable) and bool(value != value)))


def plain(name: Any) -> Any:
    """NumPy scalars and subclasses of str as the Python scalars they equal."""
    return (name.item() if isinstance(name, np.generic)
            else str.__str__(name) if isinstance(name, str) else name)


def show(*values: Any) -> str:
    """Values as messages show them: at most eight, and 60 characters each."""
    texts = [repr(plain(value)) for value in values[:8]] + ["..."] * (len(values) > 8)
    return ", ".join(text if len(text) <= 60 else text[:57] + "..." for text in texts)


def split_names(text: str) -> tuple[str, ...]:
    """Names separated by commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def suggest(name: Any, known: Collection[Any]) -> str:
    """The closest known name (3 for "3", too) and a few others."""
    texts = {str(value): value for value in known}
    folded = {text.casefold(): text for text in list(texts)[:2000]}
    close = [str(name)] if str(name) in texts else [
        folded[text] for text in difflib.get_close_matches(str(name).casefold(), list(folded), n=1)]
    return ((f"Did you mean {show(texts[close[0]])}? " if close else "")
            + f"There are: {show(*known)}")


def texts_of(parts: Any) -> tuple[str, ...]:
    """A list of texts as a tuple."""
    must(isinstance(parts, (list, tuple)) and all(isinstance(part, str) for part in parts),
          "a list of texts was expected")
    return tuple(parts)


def must(good: bool, complaint: str) -> None:
    """Raise TypeError with the complaint unless it is good."""
    if not good:
        raise TypeError(complaint)
