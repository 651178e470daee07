"""Table files as they come: CSV of any encoding, separator and line end, Parquet, JSON lines or
Excel, packed or not.

The text of a CSV file is checked as bytes before a parser sees it: every record has as many fields
as the header and quotes enclose complete fields, so there is one way to read it. Blank lines are
skipped. Messages count the lines of the file from 1.
"""

from __future__ import annotations

import bz2
import contextlib
import csv
import gzip
import hashlib
import io
import json
import lzma
import sys
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from coterie.base.errors import CoterieWarning, InvalidInput, require_extra
from coterie.base.machine import free_memory
from coterie.base.types import Flags, Ints
from coterie.data.frames import (
    check_readable,
    find_filled_rows,
    read_excel,
    read_json_lines,
    read_parquet,
    read_texts,
    sheet_rows,
)
from coterie.data.validation import check_unique, show
from coterie.data.validation import is_input as is_input

SEPARATORS = ",;\t|"
EXCEL = (".xlsx", ".xlsm", ".xlsb", ".xls", ".ods")
JSON_LINES = (".jsonl", ".ndjson")
COMPLETE = "Check that it was written completely"
SAVE = "Save it as UTF-8 CSV or as Parquet"
#: How packed files start, and how their names end.
PACKED = {b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\xfd7zXZ\x00": ".xz", b"\x28\xb5\x2f\xfd": ".zst"}
# What a packed file may unpack to: so many bytes, or so many times its own size.
_SMALL, _RATIO = 1 << 28, 200
_CHUNK, _PART = 1 << 22, 1 << 12
# Bytes with question marks for those that no text holds.
_PRINTED = bytes(63 if byte < 32 and byte not in (9, 10, 13) else byte for byte in range(256))
MOST_COLUMNS = 100_000
# What was read from standard input: it can be read once only.
_input: tuple[Any, bytes] | None = None


def read_table(path: str | PathLike[str], separator: str | None = None, *,
               by_cell: bool = False) -> Any:
    """A file as a polars frame, one row per sample.

    It is CSV, Parquet, JSON lines (one object per line) or Excel (the first sheet), and may be
    packed with gzip, bzip2, xz or zstd. Which of them it is, is recognised by its content.

    Parameters
    ----------
    path : the file; "-" is standard input.
    separator : between the cells of a CSV file; detected if omitted.
    by_cell : whether what a cell becomes may depend on nothing but this cell and the header: then
        cells of a CSV file are texts, and other files than CSV and Parquet are refused.

    Raises
    ------
    InvalidInput : no file, no table, or one that can be read in more than one way; with the line.
    MissingExtra : polars is not installed, or what it needs for this kind of file.

    Example
    -------
    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "shops.csv")
    >>> _ = path.write_text("shop;price\\nA;1,5\\nB;2,25\\n")
    >>> read_table(path)["price"].to_list()
    [1.5, 2.25]
    """
    kind, raw = _open(path)
    if kind == "parquet":
        return read_parquet(path, raw, by_cell)
    name, content = shown(path), raw or b""
    if by_cell:
        if kind != "csv":
            raise InvalidInput("Cells of this file cannot be read one by one", where=name,
                               remedy="Save the table as CSV or Parquet")
        return read_texts(name, lambda: _read_records(name, content, separator, by_cell), by_cell)
    if kind == "excel":
        _check_workbook(name, content)
        frame = read_excel(name, content)
        return frame[find_filled_rows(frame)]
    if kind == "json":
        return read_json_lines(name, lambda: _number_lines(decode(name, content)))
    return read_texts(name, lambda: _read_records(name, content, separator))


def row_place(path: str | PathLike[str], separator: str | None = None) -> Callable[[int], str]:
    """Where a row of `read_table` is in its file, in words: "line 17 of shops.csv"; the file is
    read when asked.

    Files without lines have rows from 1; in Excel these are the rows of the sheet, the header among
    them.

    Parameters
    ----------
    path, separator : as for `read_table`.

    Returns
    -------
    A function of the number of a row, from 0, for `coterie.base.errors.located`.

    Example
    -------
    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "shops.csv")
    >>> _ = path.write_text("shop,price\\nA,1\\n\\nB,2\\n")
    >>> row_place(path)(1).split(" of ")[0]
    'line 4'
    """
    def place(row: int) -> str:
        kind, raw = _open(path)
        name, content = shown(path), raw or b""
        if kind == "parquet":
            return f"row {row + 1} of {name}"
        if kind == "excel":
            return f"row {sheet_rows(name, content)[row]} of {name}"
        with warnings.catch_warnings():  # they were shown when the file was read
            warnings.simplefilter("ignore", CoterieWarning)
            data = decode(name, content)
        if kind == "json":
            return f"line {_number_lines(data)[row][0]} of {name}"
        skipped = _read_separator_line(data)[1]
        starts = _find_records(data[skipped:] + b"\n")
        return f"line {_line_number(data, skipped + int(starts[row + 1]))} of {name}"

    return place


def shown(path: str | PathLike[str]) -> str:
    """The name of a file in messages."""
    return "standard input" if is_input(path) else str(path)


def _open(path: str | PathLike[str]) -> tuple[str, bytes | None]:
    """What kind of table a file is, and its bytes, unpacked; None where polars reads the file
    itself.
    """
    check_readable(path)
    start, name = read_start(path), suffix_of(path)
    if (not is_packed(start) and not is_input(path)
        and (start[:4] == b"PAR1" or name in (".parquet", ".pq"))):
        return "parquet", None
    raw = unpack(path, read_bytes(path))
    if raw[:4] == b"PAR1" or name in (".parquet", ".pq"):
        return "parquet", raw
    if (raw[:4] == b"\xd0\xcf\x11\xe0"
        or (raw[:4] == b"PK\x03\x04" and (name in EXCEL or b"xl/workbook" in raw))):
        return "excel", raw
    array = raw[:1 << 10].lstrip().startswith((b"[{", b"[\n", b"[\r\n"))
    if (name == ".json" or array) and not _is_object(raw):
        raise InvalidInput("JSON must have one object per line, with nothing around them",
                           where=shown(path),
                           remedy="Write it as JSON lines, for example with jq -c '.[]' table.json")
    return "json" if name in JSON_LINES or _is_object(raw) else "csv", raw


def _check_workbook(path: str, raw: bytes) -> None:
    """Refuse a workbook that unpacks to too much."""
    size = 0
    with (contextlib.suppress(zipfile.BadZipFile, ValueError, NotImplementedError),
          zipfile.ZipFile(io.BytesIO(raw)) as parts):  # one of before 2007, or the reader complains
        size = sum(part.file_size for part in parts.infolist())
    if size > most_unpacked(len(raw)):
        raise too_large(path, len(raw), most_unpacked(len(raw)))


def _is_object(raw: bytes) -> bool:
    """Whether the first line is a JSON object, which no header of a CSV file is."""
    first = raw[:1 << 20].lstrip().split(b"\n", 1)[0]
    try:
        return first.startswith(b"{") and isinstance(json.loads(first), dict)
    except RecursionError:  # nested deeper than any table
        return True
    except ValueError:
        return False


def _number_lines(data: bytes) -> list[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers from 1."""
    return [(number, line) for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]


def _read_records(path: str, raw: bytes, separator: str | None,
                  by_cell: bool = False) -> tuple[bytes, list[str], str, int]:
    """The records after the header without blank lines, the names of the columns, the separator,
    and their number.
    """
    data = decode(path, raw, by_cell)
    named, skipped = _read_separator_line(data)
    separator, data = named if separator is None else separator, data[skipped:]
    if not data or data.isspace():
        raise InvalidInput("The file is empty", where=path, remedy=COMPLETE)
    data += b"" if data.endswith(b"\n") else b"\n"
    if separator is None:
        separator = (max(SEPARATORS, key=data.partition(b"\n")[0].decode().count) if by_cell
                     else _sniff(path, data))
    if len(separator) != 1 or not separator.isascii() or separator in '"\r\n':
        raise InvalidInput(f"The separator must be one character, got {separator!r}",
                           remedy="For example ';'")
    width = data.count(separator.encode(), 0, data.index(b"\n")) + 1
    if width > MOST_COLUMNS:
        raise InvalidInput(f"The table has {width:,} columns, and there can be {MOST_COLUMNS:,}",
                           where=path, remedy="Leave columns out, or give it one row per value")
    n = _check_records(path, data, separator.encode(), bool(skipped))
    data = _drop_blank_lines(data)
    end = int(next(newlines for newlines in _find_marks(data, b"\n") if newlines.size)[0]) + 1
    try:
        header = next(csv.reader(io.StringIO(data[:end].decode(), newline=""), delimiter=separator))
    except csv.Error as error:
        raise InvalidInput(f"The header cannot be read: {error}", where=path,
                           remedy="Check the first line") from error
    names = [name.strip(" \t\n") or f"column {j}" for j, name in enumerate(header, 1)]
    check_unique(names, f"Column names of {path}")
    if n == 0:
        raise InvalidInput("The file has a header and no rows", where=path, remedy=COMPLETE)
    # pandas numbers columns without names; other numbers are a row of data.
    given = [name for name in header if name.strip()]
    if (all(map(_is_number, given))
        and [*map(float, given)] not in ([*range(len(given))], [*range(1, len(given) + 1)])):
        raise InvalidInput(f"The first line must name the columns, it holds {show(*header)}",
                           where=path, remedy="Add a first line with the names of the columns")
    return data[end:], names, separator, n


def _read_separator_line(data: bytes) -> tuple[str | None, int]:
    """The separator that Excel's own first line names, and the length of this line; None and 0
    without one.
    """
    return (chr(data[4]), 6) if data[:4].lower() == b"sep=" and data[5:6] == b"\n" else (None, 0)


def decode(path: str, raw: bytes, by_cell: bool = False) -> bytes:
    """A file's text in UTF-8 with newlines as line ends; control characters and files that are no
    text are refused. By cell, what is no UTF-8 stays so, and no other letter changes.
    """
    if raw.startswith(b"PK\x03\x04"):
        raise InvalidInput("The file is a workbook or a ZIP archive, not a table", where=path,
                           remedy="Save it as CSV or unpack it")
    # 1. The encoding: by its mark, by the zeros of UTF-16, or by trying.
    zero = np.frombuffer(raw[:4096].ljust(2, b"x"), np.uint8) == 0
    marked = ("utf-8" if raw[:3] == b"\xef\xbb\xbf"
              else "utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff")
              else "utf-16-le" if zero[1::2].mean() > 0.3 and not zero[::2].any()
              else "utf-16-be" if zero[::2].mean() > 0.3 and not zero[1::2].any() else "")
    if by_cell and not marked:
        raw, marked = raw.decode("utf-8", "replace").encode().translate(_PRINTED), "utf-8"
    for encoding in (marked,) if marked else ("utf-8", "cp1252"):
        try:
            raw = raw if encoding == "utf-8" and raw.isascii() else raw.decode(encoding).encode()
            break
        except UnicodeError:
            continue
    else:
        raise InvalidInput(f"The file starts as {marked} text but continues as something else"
                           if marked else
                           "The file is no text: neither UTF-8, UTF-16 nor Windows-1252",
                           where=path, remedy=SAVE)
    # 2. Without marks, with newlines as line ends.
    while raw.startswith(b"\xef\xbb\xbf"):  # byte order marks, two after joining files
        raw = raw[3:]
    if b"\r" in raw:
        raw = raw.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    # 3. Nothing that no text holds.
    strange = raw.translate(None, bytes({9, 10, *range(32, 256)}))
    if strange:
        what = "NUL byte" if strange[0] == 0 else f"control character {strange[:1]!r}"
        raise InvalidInput(f"The file has a {what}: it is possibly binary", remedy=SAVE,
                           where=f"line {_line_number(raw, raw.index(strange[:1]))} of {path}")
    if encoding == "cp1252":
        warnings.warn(f"{path} is not UTF-8 and is read as Windows-1252 (Latin-1); check its "
                      "accented letters.", CoterieWarning, stacklevel=2)
    return raw


def _line_number(data: bytes, position: int) -> int:
    return data.count(b"\n", 0, position) + 1


def _find_marks(data: bytes, symbols: bytes) -> Iterator[Ints]:
    """Positions of the symbols outside quotes, chunk by chunk.

    Quotes open and close in turn ("" inside quotes closes and opens again): outside, an even number
    stands before.
    """
    array, quoted, before, size = np.frombuffer(data, np.uint8), b'"' in data, 0, 1 << 22
    for start in range(0, len(array), size):
        part = array[start:start + size]
        marks = np.flatnonzero(np.logical_or.reduce([part == symbol for symbol in symbols]))
        if quoted:
            quotes = np.flatnonzero(part == 34)
            marks = marks[(before + np.searchsorted(quotes, marks)) % 2 == 0]
            before += len(quotes)
        yield marks + start


def _blank(data: bytes, marks: Ints) -> Flags:
    """Which of these positions outside quotes are newlines of blank lines: the byte before is a
    newline, too.
    """
    array = np.frombuffer(data, np.uint8)
    return np.asarray((array[marks] == 10) & ((marks == 0) | (array[marks - 1] == 10)))


def _drop_blank_lines(data: bytes) -> bytes:
    if not data.startswith(b"\n") and b"\n\n" not in data:
        return data
    blank = np.concatenate([newlines[_blank(data, newlines)]
                            for newlines in _find_marks(data, b"\n")])
    return np.delete(np.frombuffer(data, np.uint8), blank).tobytes()


def _count_fields(data: bytes, separator: bytes) -> Ints:
    """The number of fields of each record."""
    array = np.frombuffer(data, np.uint8)
    kinds = [array[marks[~_blank(data, marks)]] for marks in _find_marks(data, separator + b"\n")]
    return np.diff(np.flatnonzero(np.concatenate(kinds) == 10), prepend=-1)


def _find_records(data: bytes) -> Ints:
    """Where each record starts, the header first."""
    ends = np.concatenate([newlines[~_blank(data, newlines)]
                           for newlines in _find_marks(data, b"\n")])
    starts = np.concatenate([[0], ends[:-1] + 1])
    # Blank lines are before the record.
    filled = np.flatnonzero(np.frombuffer(data, np.uint8) != 10)
    return np.asarray(filled[np.searchsorted(filled, starts)])


def _sniff(path: str, data: bytes) -> str:
    """The one separator with which all of the first records have as many fields as the header, two
    at least.
    """
    head = data[:1 << 16] if len(_count_fields(data[:1 << 16], b",")) > 1 else data
    widths = {symbol: _count_fields(head, symbol.encode()) for symbol in SEPARATORS}
    if not widths[","].size:
        raise InvalidInput("A quote opens in the first line and never closes", where=path,
                           remedy="Close it")
    fits = [symbol for symbol, w in widths.items() if w[0] > 1 and (w == w[0]).all()]
    if len(fits) > 1:
        raise InvalidInput("The separator can be "
                           + " or ".join(f"{s!r} ({widths[s][0]} columns)" for s in fits),
                           where=path, remedy=f"Say which, for example --separator '{fits[0]}'")
    return fits[0] if fits else max(SEPARATORS, key=lambda symbol: int(widths[symbol][0]))


def _check_records(path: str, data: bytes, separator: bytes, skipped: int) -> int:
    """The number of records after the header; quotes in the middle of a field and ragged records
    are refused.
    """
    array, border = np.frombuffer(data, np.uint8), np.frombuffer(separator + b'\n"', np.uint8)
    quotes = np.flatnonzero(array == 34) if b'"' in data else np.zeros(0, np.int64)
    opens, closes = quotes[::2], quotes[1::2]
    wrong = [*opens[~np.isin(array[opens - 1], border) & (opens > 0)][:1],
             *closes[~np.isin(array[closes + 1], border)][:1], *opens[len(closes):]]
    if wrong:
        raise InvalidInput("A quote must open at the start of a field and close at its end",
                           where=f"line {_line_number(data, int(min(wrong))) + skipped} of {path}",
                           remedy='Quote the field and double the quotes in it: "6"" pipe"')
    widths = _count_fields(data, separator)
    ragged = np.flatnonzero(widths != widths[0])
    if ragged.size:
        start = int(_find_records(data)[ragged[0]])
        raise InvalidInput(f"The header has {widths[0]} fields and this record "
                           f"{widths[ragged[0]]}, with the separator {separator.decode()!r}",
                           where=f"line {_line_number(data, start) + skipped} of {path}",
                           remedy="Correct the line, quote texts that hold the separator, or name "
                                  "it (--separator)")
    return len(widths) - 1


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# ---- bytes

def read_bytes(path: str | PathLike[str]) -> bytes:
    """The bytes of a file, or of standard input, which are kept for the next call.

    Raises
    ------
    InvalidInput : there is no file, or it cannot be opened.
    """
    global _input
    if is_input(path):
        if _input is None or _input[0] is not sys.stdin:
            _input = (sys.stdin, sys.stdin.buffer.read())
        return _input[1]
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise InvalidInput("The file cannot be opened: "
                           f"{getattr(error, 'strerror', None) or error}", where=str(path),
                           remedy="Check the path and who may read it") from error


def read_start(path: str | PathLike[str]) -> bytes:
    """The first bytes of a file; none where there is no file."""
    if is_input(path):
        return read_bytes(path)[:8]
    try:
        with Path(path).open("rb") as file:
            return file.read(8)
    except PermissionError as error:
        raise InvalidInput(f"The file cannot be opened: {error.strerror}", where=str(path),
                           remedy="Check who may read it") from error
    except (OSError, ValueError):
        return b""


def fingerprint(path: str | PathLike[str]) -> str:
    """SHA-256 of the file's bytes."""
    if is_input(path):
        return hashlib.sha256(read_bytes(path)).hexdigest()
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError) as error:
        raise InvalidInput("There is no file to read at this path", where=str(path),
                           remedy="Check the path") from error


def suffix_of(path: str | PathLike[str]) -> str:
    """How the name ends, such as .csv, without the ending of a packed file."""
    name = Path(path)
    return (name.with_suffix("") if name.suffix.lower() in PACKED.values() else name).suffix.lower()


def is_packed(start: bytes) -> bool:
    """Whether a file that starts like this is packed."""
    return any(start.startswith(mark) for mark in PACKED)


def unpack(path: str | PathLike[str], raw: bytes) -> bytes:
    """The bytes of a file, unpacked where it is packed with gzip, bzip2, xz or zstd.

    Raises
    ------
    InvalidInput : the packed file is damaged.
    MissingExtra : zstandard, for files packed with zstd, is not installed.
    """
    ending = next((ending for mark, ending in PACKED.items() if raw.startswith(mark)), "")
    if not ending:
        return raw
    try:
        return _within(path, len(raw), _unpack_zstd(raw) if ending == ".zst"
                       else _read_all(_OPEN[ending](io.BytesIO(raw))))
    except InvalidInput:
        raise
    except (EOFError, OSError, ValueError, zlib.error, lzma.LZMAError) as error:
        raise InvalidInput("The compressed file cannot be read: it is damaged or cut short",
                           where=str(path), remedy="Copy or download it again") from error


def most_unpacked(packed: int) -> float:
    """Bytes that a packed file of this size may hold: more is no table, but a trap."""
    return min(max(_SMALL, _RATIO * packed), 0.4 * free_memory())


def _within(path: str | PathLike[str], packed: int, chunks: Iterable[bytes]) -> bytes:
    """The chunks together; refused as soon as they are too many."""
    parts, size, most = list[bytes](), 0, most_unpacked(packed)
    for chunk in chunks:
        parts.append(chunk)
        size += len(chunk)
        if size > most:
            raise too_large(path, packed, most)
    return b"".join(parts)


def too_large(path: str | PathLike[str], packed: int, most: float) -> InvalidInput:
    """The refusal of a packed file that unpacks to too much."""
    return InvalidInput(f"{packed:,} packed bytes are more than {most / 2**20:,.0f} MiB unpacked",
                        where=str(path), remedy="Unpack the file yourself if you trust it, and if "
                        "there is memory for the table")


#: How packed bytes are opened; zstd is a library of its own.
_OPEN: dict[str, Callable[[io.BytesIO], io.BufferedIOBase]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw), ".bz2": bz2.BZ2File, ".xz": lzma.LZMAFile}


def _read_all(file: io.BufferedIOBase) -> Iterator[bytes]:
    with file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _unpack_zstd(raw: bytes) -> Iterator[bytes]:
    with require_extra("zstandard", "tables", "Reading files packed with zstd"):
        import zstandard
    at = 0
    try:
        while at < len(raw):  # a file may be several frames, one after the other
            frame = zstandard.ZstdDecompressor().decompressobj()
            while not frame.eof and at < len(raw):  # little at a time, which may become much
                part = raw[at:at + _PART]
                yield frame.decompress(part)
                at += len(part) - len(frame.unused_data)
            if not frame.eof:
                raise EOFError
    except zstandard.ZstdError as error:
        raise EOFError from error
