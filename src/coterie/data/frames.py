"""Everything that is done with polars: files become frames, and columns of frames become NumPy
arrays.

polars is the extra `tables`; it is imported when it is needed, and no other module imports it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coterie.base.errors import ROW, InvalidInput, MissingExtra, require_extra
from coterie.base.storage import write_atomically
from coterie.base.types import Array, Flags, Ints
from coterie.data.validation import check_unique, is_input, show


def read_parquet(path: str | PathLike[str], raw: bytes | None = None,
                 by_cell: bool = False) -> Any:
    """One Parquet file, or its bytes, as a polars frame; a column of lists of d numbers becomes d
    columns, but not where these would depend on all cells.
    """
    if raw is None:
        check_readable(path)
    frame = _read(path, lambda pl: pl.read_parquet(path, glob=False) if raw is None else
                  pl.read_parquet(io.BytesIO(raw)))
    return frame if by_cell else _unfold(frame)


def read_excel(path: str, raw: bytes, header: bool = True) -> Any:
    """The first sheet of an Excel file as a polars frame, with its blank rows; without a header,
    all rows from 1.
    """
    engines = {"fastexcel": "calamine", "openpyxl": "openpyxl"}
    engine = next((engine for library, engine in engines.items() if find_spec(library) is not None),
                  None)
    if engine is None:
        raise MissingExtra("fastexcel", "excel", "Reading Excel files")

    def read(pl: Any) -> Any:
        try:
            return pl.read_excel(io.BytesIO(raw), engine=engine, infer_schema_length=None,
                                 drop_empty_rows=False,
                                 # Without `skip_rows`, calamine skips blank rows at the top.
                                 has_header=header,
                                 read_options={"skip_rows": 0}
                                 if engine == "calamine" and not header else None)
        except Exception as error:  # each engine has its own
            raise ValueError(str(error) or type(error).__name__) from error

    return _read(path, read)


def find_filled_rows(frame: Any) -> list[int]:
    """The rows in which some cell has a value."""
    import polars as pl

    return list(frame.select(pl.any_horizontal(pl.all().is_not_null()).arg_true()).to_series(
        ).to_list())


def sheet_rows(path: str, raw: bytes) -> list[int]:
    """The rows of the sheet, from 1, in which the rows of an Excel table are: of those with some
    value.
    """
    table = read_excel(path, raw)
    # Blank rows and the header are above it.
    first = len(read_excel(path, raw, header=False)) - len(table) + 1
    return [first + row for row in find_filled_rows(table)]


def read_json_lines(path: str, content: Callable[[], list[tuple[int, bytes]]]) -> Any:
    """JSON objects as a polars frame: from the lines of a file that are not blank, with their
    numbers.
    """
    def read(pl: Any) -> Any:
        lines = content()
        if not lines:
            raise InvalidInput("The file is empty", where=path,
                               remedy="Check that it was written completely")
        _check_depth(path, lines)
        try:
            frame = pl.read_ndjson(b"\n".join(line for _, line in lines), infer_schema_length=None)
        except pl.exceptions.PolarsError:
            _check_objects(path, lines)
            raise
        if len(frame) != len(lines):
            _check_objects(path, lines)
            raise InvalidInput(f"{len(lines)} lines are read as {len(frame)} rows", where=path,
                               remedy="Save the table as Parquet")
        return frame

    return _unfold(_read(path, read))


def _check_depth(path: str, lines: Iterable[tuple[int, bytes]]) -> None:
    """Refuse a line that is nested deeper than any table, which parsers may not survive."""
    for number, line in lines:
        if line.count(b"[") + line.count(b"{") <= _DEEPEST:
            continue
        letters = np.frombuffer(line, np.uint8)
        steps = np.isin(letters, (91, 123)).astype(int) - np.isin(letters, (93, 125))
        if int(np.cumsum(steps).max()) > _DEEPEST:
            raise InvalidInput(f"JSON is nested more than {_DEEPEST} deep",
                               where=f"line {number} of {path}",
                               remedy="Write one plain object per line")


def _check_objects(path: str, lines: Iterable[tuple[int, bytes]]) -> None:
    """Refuse the first line that is no JSON object."""
    for number, line in lines:
        try:
            if not isinstance(json.loads(line), dict):
                raise ValueError("it is something else")
        except (ValueError, RecursionError) as error:
            raise InvalidInput(
                f"Every line must be a JSON object: {error}", where=f"line {number} of {path}",
                remedy='Write one object per line, such as {"shop": "A", "price": 1.5}') from error


def _unfold(frame: Any) -> Any:
    """Columns of lists of numbers, all of one length, as columns name[0], name[1], ...; other lists
    as they are.
    """
    import polars as pl

    columns: list[Any] = []
    for column in frame:
        if uneven_list(column) is not None:
            columns.append(column)
            continue
        numbers = column.explode(empty_as_null=True).to_numpy().reshape(len(column), -1)
        columns += [pl.Series(f"{column.name}[{j}]", values) for j, values in enumerate(numbers.T)]
    check_unique([column.name for column in columns], "Column names")
    return pl.DataFrame(columns)


def uneven_list(column: Any) -> int | None:
    """The first row without a list of as many numbers as in the first row; 0 for columns of
    something else.
    """
    import polars as pl

    inner = getattr(column.dtype, "inner", None)
    if inner is None or not inner.is_numeric():
        return 0
    lengths = column.cast(pl.List(inner)).list.len()
    wrong = ~lengths.eq_missing(lengths[0])
    return int(wrong.arg_max()) if wrong.any() else None if lengths[0] else 0


def check_lists(column: Any) -> None:
    """Raise InvalidInput unless the column holds lists of numbers, all of one length."""
    row = uneven_list(column)
    if row is not None:
        first, other = (show(column[k].to_list() if hasattr(column[k], "to_list") else column[k])
                        for k in (0, row))
        raise InvalidInput("Embeddings must be lists of numbers, all of one length, got "
                           f"{column.dtype}: "
                           f"{first} in the first row" + (f" and {other}" if row else ""),
                           where=f"{ROW}, column {column.name!r}", row=row,
                           remedy="Correct or remove the row, or give the numbers one column each")


def check_readable(path: str | PathLike[str]) -> None:
    """Raise MissingExtra without polars, and InvalidInput for a path at which there is no file."""
    _polars()
    if not is_input(path) and not Path(path).is_file():
        raise InvalidInput(f"There is {'a directory, not a' if Path(path).is_dir() else 'no'} file "
                           "at this path", where=str(path), remedy="Check the path")


def _polars() -> Any:
    with require_extra("polars", "tables", "Reading tables from files"):
        import polars
    return polars


def _read(path: str | PathLike[str], reader: Callable[[Any], Any]) -> Any:
    polars = _polars()
    try:
        frame = reader(polars)
    except InvalidInput:
        raise
    except (polars.exceptions.PolarsError, polars.exceptions.PanicException, OSError,
            ValueError) as error:
        raise InvalidInput(f"The file cannot be read as a table: {str(error).splitlines()[0]}",
                           where=str(path),
                           remedy="Check its format, its separator and that it is UTF-8") from error
    if not len(frame):
        raise InvalidInput("The file has no rows", where=str(path),
                           remedy="Check that it was written completely")
    return frame


def to_frame(columns: dict[str, list[Any]]) -> Any:
    """Columns as a frame of polars, or of pandas where polars is not installed.

    Values of several types in one column, and tuples, become texts.
    """
    plain = {name: _unify_types(values) for name, values in columns.items()}
    try:
        import polars
    except ImportError as error:
        try:
            import pandas
        except ImportError:
            raise MissingExtra("polars", "tables", "Making a table") from error
        return pandas.DataFrame(plain)
    return polars.DataFrame(plain)


def _unify_types(values: list[Any]) -> list[Any]:
    kinds = {type(value) for value in values} - {type(None)}
    return values if len(kinds) <= 1 and tuple not in kinds else list(map(str, values))


def users_frame(names: Sequence[Any], labels: Ints, numbers: Array, columns: Iterable[str]) -> Any:
    """A frame with a row for each user: `user`, `group`, and (n_users, n_columns) numbers."""
    numbers = np.asarray(numbers, dtype=float).reshape(len(names), -1)
    return to_frame({"user": list(names), "group": labels.tolist(),
                     **dict(zip(distinct(columns, ("user", "group")), numbers.T.tolist(),
                                strict=True))})


def distinct(names: Iterable[str], taken: Iterable[str] = ()) -> list[str]:
    """The names, with underscores appended to those that are taken or come again."""
    unique, seen = list[str](), set(taken)
    for name in names:
        while name in seen:
            name += "_"
        unique.append(name)
        seen.add(name)
    return unique


def beside(frame: Any, columns: dict[str, list[Any]]) -> Any:
    """The frame with more columns."""
    return frame.hstack(to_frame(columns).get_columns())


def write_parquet(columns: Any, path: str | PathLike[str]) -> None:
    """Columns, or a frame, as a Parquet file, written atomically."""
    with require_extra("polars", "tables", "Writing Parquet files"):
        import polars
    if isinstance(columns, dict):
        columns = polars.DataFrame({name: _unify_types(values) for name, values in columns.items()})
    stream = io.BytesIO()
    columns.write_parquet(stream)
    write_atomically(path, stream.getvalue(), shared=True)


# ---- columns of a polars frame, of any type

_DEEPEST = 100  # objects and lists in each other, in a line of JSON
#: Cells without a value, in capitals or not.
MISSING = ("", "na", "n/a", "nan", "null", "?", "-", "#n/a", "<na>")
# Numbers whose decimal mark is the comma: 1,5 and 1.234,5 and 1,5e-3. The others may be thousands:
# 1,234.
DECIMAL_COMMA = r"^[+-]?(\d+|\d*,\d+|\d{1,3}(\.\d{3})+(,\d+)?)([eE][+-]?\d+)?$"
THOUSANDS = r"^[+-]?(\d{1,3}|[1-9]\d{0,2},\d{3})$"
ISO_TIME = r"^\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d{1,6})?)?(Z|[+-]\d\d:?\d\d)?)?$"
FORMATS = ("%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S%.f", "%Y-%m-%dT%H:%M%#z",
           "%Y-%m-%dT%H:%M:%S%.f%#z")


class Cells(NamedTuple):
    """A column as numbers: `values` are 0 where `missing`."""

    kind: str       # number, flag, text, date, duration, empty or other
    # Numbers; 0 and 1; positions in levels; microseconds since 1970; microseconds.
    values: Array | Ints
    missing: Flags
    levels: tuple[str, ...] = ()  # of texts: the distinct ones, sorted
    dtype: str = ""

    @property
    def written(self) -> bool:
        """Whether the cells are texts, also texts that are numbers."""
        return self.dtype.startswith(("String", "Categorical", "Enum"))


def read_texts(path: str | PathLike[str],
               content: Callable[[], tuple[bytes, list[str], str, int]],
               by_cell: bool = False) -> Any:
    """The records of a text as a polars frame: from their bytes, the columns' names, the separator
    and their number.

    Columns whose texts are all numbers or all truth values hold these, but not by cell.
    """
    def read(pl: Any) -> Any:
        body, names, separator, n = content()
        texts = pl.read_csv(body, has_header=False, separator=separator,
                            schema=dict.fromkeys(names, pl.String),
                            quote_char='"' if b'"' in body else None)
        if texts.shape != (n, len(names)):
            raise InvalidInput(f"{n} rows and {len(names)} columns are read as {texts.shape}",
                               where=str(path), remedy="Save the table as Parquet")
        if by_cell:
            return texts
        read = [_infer_type(pl, column, separator) for column in texts]
        commas = [column.name for column, comma in read if comma]
        points = [column.name for column, comma in read
                  if commas and not comma and column.dtype == pl.Float64
                     and texts[column.name].str.contains(".", literal=True).any()]
        if points:
            raise InvalidInput(f"Column {show(points[0])} has decimal points, column "
                               f"{show(commas[0])} decimal commas", where=str(path),
                               remedy="Write all numbers with the same decimal mark")
        return pl.DataFrame([column for column, _ in read])

    return _read(path, read)


def infer_names(frame: Any, name: str) -> Any:
    """The frame with the names of users, which are public, in the type that all of them have."""
    import polars as pl

    texts = frame[name]
    return frame if texts.dtype != pl.String else frame.with_columns(
        _infer_type(pl, texts, ",")[0])


def read_numbers(frame: Any, names: Iterable[str]) -> Any:
    """The frame with those of the named columns that hold numbers as texts (+1, 007) as numbers."""
    import polars as pl

    parsed = {name: _parse_numbers(pl, frame[name]) for name in names
              if frame[name].dtype == pl.String}
    return frame.with_columns(**{name: numbers for name, numbers in parsed.items()
                                 if numbers is not None})


def _clean(column: Any) -> Any:
    """Texts without spaces around them, null where they mark a missing value."""
    column = column.str.strip_chars(" \t")
    return column.set(column.str.to_lowercase().is_in(MISSING).fill_null(True), None)


def _parse_numbers(pl: Any, column: Any) -> Any:
    """Texts as float64, or None if some text is no number."""
    numbers = column.cast(pl.Float64, strict=False).fill_nan(None)
    return numbers if numbers.null_count() == column.null_count() else None


def _infer_type(pl: Any, column: Any, separator: str) -> tuple[Any, bool]:
    """A column of texts as integers, numbers or truth values where all are, and whether commas are
    decimal marks.

    Integers not written plainly (007, +1, beyond 2^53) stay texts: they may be names or codes.
    """
    numbers = _parse_numbers(pl, column)
    if numbers is None:
        column = _clean(column)
        numbers = _parse_numbers(pl, column)
    if column.null_count() == len(column):
        return column, False
    comma = (numbers is None and separator in ";\t|"
             and bool(column.str.contains(DECIMAL_COMMA).all())
             and (separator == ";" or not column.str.contains(THOUSANDS).all()))
    if comma:
        numbers = _parse_numbers(
            pl, column.str.replace_all(".", "", literal=True).str.replace(",", ".", literal=True))
    if numbers is not None:
        start = column.head(1000)
        if not comma and start.cast(pl.Int64, strict=False).null_count() == start.null_count():
            integers = column.cast(pl.Int64, strict=False)
            if integers.null_count() == column.null_count():
                return integers if (integers.cast(pl.String) == column).all() else column, False
        return (numbers, comma) if comma or (numbers.abs() < 2**53).all() else (column, False)
    truth = column.str.to_lowercase()
    return (truth == "true" if truth.is_in(["true", "false"]).all() else column).alias(
        column.name), False


def read_cells(column: Any, *, parse: bool = True) -> Cells:
    """What a column of a polars frame holds; texts that are all numbers, truth values or ISO times
    are read as such.
    """
    import polars as pl

    dtype = column.dtype
    # 1. What it is: by its type, and texts by what they say.
    if dtype == pl.String or isinstance(dtype, (pl.Categorical, pl.Enum)):
        column, kind = _parse_texts(pl, _clean(column.cast(pl.String)), parse)
    elif dtype == pl.Boolean:
        kind = "flag"
    elif dtype.is_numeric():
        column, kind = column.cast(pl.Float64).fill_nan(None), "number"
    elif dtype == pl.Date or isinstance(dtype, pl.Datetime):
        column, kind = column.cast(pl.Datetime("us")).cast(pl.Int64), "date"
    elif isinstance(dtype, pl.Duration):
        column, kind = column.cast(pl.Duration("us")).cast(pl.Int64), "duration"
    elif dtype == pl.Time:
        column, kind = column.cast(pl.Int64) // 1000, "duration"
    else:
        kind = "empty" if dtype == pl.Null else "other"
    if kind != "other" and column.null_count() == len(column):
        kind = "empty"
    # 2. Texts as positions among the different ones.
    missing, levels = column.is_null().to_numpy(), ()
    if kind == "text":
        levels = tuple(column.drop_nulls().unique().sort().to_list())
        column = column.cast(pl.Enum(levels)).to_physical()
    # 3. All as numbers, 0 where they are missing.
    values: Any = np.zeros(len(column))
    if kind not in ("empty", "other"):
        values = column.fill_null(False if column.dtype == pl.Boolean else 0).to_numpy()
        values = values.astype(np.int64 if kind in ("text", "date", "duration") else np.float64)
    return Cells(kind, values, missing, levels,
                 "int" if dtype.is_integer() else "bool" if dtype == pl.Boolean else str(dtype))


def _parse_texts(pl: Any, column: Any, parse: bool) -> tuple[Any, str]:
    """Texts as numbers, truth values or dates where all of them are, and what they are."""
    numbers = _parse_numbers(pl, column) if parse else None
    if not parse or column.null_count() == len(column):
        return column, "text"
    if numbers is not None:
        return numbers, "number"
    truth = column.str.to_lowercase()
    if truth.is_in(["true", "false"]).all():
        return truth == "true", "flag"
    if not column.str.contains(ISO_TIME).all():
        return column, "text"
    times = column.str.replace(" ", "T", literal=True)
    parts = [times.str.to_datetime(f, strict=False, time_unit="us").cast(pl.Int64) for f in FORMATS]
    dates = pl.select(pl.coalesce(*parts)).to_series()
    return (dates, "date") if dates.null_count() == column.null_count() else (column, "text")


def as_frame(frame: Any) -> Any:
    """A polars frame, computed where it is lazy."""
    frame = frame.collect() if hasattr(frame, "collect") else frame
    if type(frame).__module__.partition(".")[0] != "polars" or not hasattr(frame, "columns"):
        raise InvalidInput(f"A table must be a polars frame, got {type(frame).__name__}",
                           remedy="Read it with read_table, or use polars.from_pandas")
    return frame


def row_names(column: Any) -> list[Any]:
    """The names in a user column: texts, integers, truth values, dates; None where there is none.

    Fractions are refused: they lose their last digits and zeros.
    """
    import polars as pl

    dtype, where = column.dtype, f"column {column.name!r}"
    if isinstance(dtype, (pl.Categorical, pl.Enum)):
        column = column.cast(pl.String)
    elif dtype.is_float():
        column = column.fill_nan(None)
    elif not (dtype.is_integer()
              or dtype in (pl.String, pl.Boolean, pl.Date, pl.Datetime, pl.Null)):
        raise InvalidInput(f"User names must be texts, integers or dates, got {dtype}", where=where,
                           remedy="Name another column as the user")
    if column.dtype == pl.String:
        column = column.set(column == "", None)
    wrong = (column != column.floor()) | (column.abs() >= 2**53) if dtype.is_float() else None
    if wrong is not None and wrong.any():
        raise InvalidInput("User names must be texts, integers or dates, got "
                           f"{column[wrong.arg_max()]!r}", where=f"{ROW}, {where}",
                           remedy="Write the names as texts, such as s1.10",
                           row=int(wrong.arg_max()))
    return list(column.to_list())
