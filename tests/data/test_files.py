"""Files of every kind that other programs write, packed or not, and the lines that errors name."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import sys

import openpyxl
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from coterie.base.errors import ROW, InvalidInput, MissingExtra, located
from coterie.data import files
from coterie.data.files import read_table, row_place
from coterie.data.users import Users
from coterie.fitting.prepare import prepare

NAMES = ("who", "x", "note")
ROWS = [("ann", 1.5, "a,b"), ("bob", -2.0, 'say "hi"'), ("zoë", 1e-3, "two\nlines"), ("bob", 7.25, "{}")]


def csv_bytes() -> bytes:
    return b'who,x,note\nann,1.5,"a,b"\nbob,-2.0,"say ""hi"""\nzo\xc3\xab,1e-3,"two\nlines"\nbob,7.25,{}\n'


def json_bytes() -> bytes:
    return "\n".join(json.dumps(dict(zip(NAMES, row, strict=True)), ensure_ascii=False) for row in ROWS).encode()


def parquet_bytes() -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.table({name: list(column) for name, column in zip(NAMES, zip(*ROWS, strict=True), strict=True)}),
                   stream)
    return stream.getvalue()


def excel_bytes() -> bytes:
    book, stream = openpyxl.Workbook(), io.BytesIO()
    for row in (NAMES, *ROWS):
        book.active.append(row)
    book.save(stream)
    return stream.getvalue()


KINDS = {".csv": csv_bytes, ".jsonl": json_bytes, ".ndjson": json_bytes, ".parquet": parquet_bytes,
         ".xlsx": excel_bytes}
PACKERS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress,
           ".zst": zstandard.ZstdCompressor().compress}


def check(frame: pl.DataFrame) -> None:
    assert frame.columns == list(NAMES)
    assert frame.rows() == ROWS


@pytest.fixture
def piped(monkeypatch):
    """Bytes on standard input."""
    def pipe(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    return pipe


@pytest.mark.parametrize("packed", PACKERS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_packed_or_not_by_name_by_content_and_from_standard_input(tmp_path, piped, kind, packed):
    content = PACKERS[packed](KINDS[kind]())
    for name in (f"table{kind}{packed}", f"TABLE{kind.upper()}{packed.upper()}", "table"):
        path = tmp_path / name
        path.write_bytes(content)
        check(read_table(path))
        assert path.read_bytes() == content
    piped(content)
    check(read_table("-"))
    check(read_table("-"))  # it is kept
    assert files.fingerprint("-") == files.fingerprint(path)


def test_check_can_fail():
    with pytest.raises(AssertionError):
        check(pl.DataFrame([*ROWS[:3], ("bob", 7.5, "{}")], schema=list(NAMES), orient="row"))


def test_another_standard_input_is_read_anew(piped):
    piped(b"a\n1\n2\n")
    assert read_table("-")["a"].to_list() == [1, 2]
    piped(b"a\n3\n")
    assert read_table("-")["a"].to_list() == [3]


@pytest.mark.parametrize("packed", [".gz", ".bz2", ".xz", ".zst"])
def test_packed_files_that_are_cut_short(tmp_path, packed):
    path = tmp_path / f"table.csv{packed}"
    path.write_bytes(PACKERS[packed](csv_bytes() * 50)[:-9])
    with pytest.raises(InvalidInput, match=r"damaged or cut short .*table\.csv.*Copy or download it again"):
        read_table(path)


def test_a_damaged_workbook_and_a_text_called_one(tmp_path):
    path = tmp_path / "table.xlsx"
    path.write_bytes(excel_bytes()[:-100])
    with pytest.raises(InvalidInput, match=r"cannot be read as a table.*table\.xlsx"):
        read_table(path)
    path.write_bytes(csv_bytes())
    check(read_table(path))


def test_excel_without_its_engine_names_the_install_command(tmp_path, monkeypatch):
    path = tmp_path / "table.xlsx"
    path.write_bytes(excel_bytes())
    monkeypatch.setitem(sys.modules, "fastexcel", None)
    check(read_table(path))  # openpyxl reads it
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(MissingExtra, match=re.escape("pip install 'coterie[excel]'")):
        read_table(path)


@pytest.mark.parametrize(("text", "complaint"), [
    ('{"a": 1}\n\n{"a": 2\n', r"must be a JSON object: .*line 3 of .*t\.jsonl.*one object per line"),
    ('{"a": 1}\n[1]\n', r"it is something else .*line 2 of "), ('{"a": 1}\n5\n', "line 2 of "),
    ('{"a": 1}{"a": 2}\n', "line 1 of "), ("", "The file is empty"), (" \n", "The file is empty"),
    ('{"a": true}\n{"a": 1}\n', "cannot be read as a table"), ('{"a": 1}\n{"a": \0}\n', "NUL byte.*line 2 of "),
])
def test_json_lines_that_are_refused(tmp_path, text, complaint):
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(InvalidInput, match=complaint):
        read_table(tmp_path / "t.jsonl")


@pytest.mark.parametrize(("name", "text"), [("t.json", '[{"a": 1}, {"a": 2}]'), ("t.json", '{"a":\n 1}'),
                                            ("t.csv", '[\n  {"a": 1}\n]\n')])
def test_json_that_is_not_one_object_per_line_is_refused(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidInput, match=r"one object per line.*jq -c"):
        read_table(tmp_path / name)
    (tmp_path / name).write_text('{"a": 1}\n{"a": 2}\n')
    assert read_table(tmp_path / name)["a"].to_list() == [1, 2]


def test_json_lines_with_gaps_and_lists(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes('{"who": "é", "e": [1, 2.5]}\r\n{"e": [3, 4], "more": 1}\r\n'.encode("utf-16"))
    assert read_table(path).to_dict(as_series=False) == {"who": ["é", None], "e[0]": [1.0, 3.0], "e[1]": [2.5, 4.0],
                                                         "more": [None, 1]}


# ---- lines

BAD = 3  # the row whose number is too large


def table_with_a_bad_row(kind: str) -> tuple[bytes, str]:
    """A file with one number that is refused, and where it is."""
    values = [1.0, 2.0, 3.0, 1e200, 4.0]
    if kind == "csv":
        text = "sep=,\nwho,x\n\na,1\n\"a\nb\",2\n\nb,3\nb,1e200\nb,4\n"
        assert text.splitlines()[8] == "b,1e200"
        return text.encode(), "line 9 of "
    if kind == "json":
        lines = [json.dumps({"who": "ab"[i % 2], "x": value}) for i, value in enumerate(values)]
        return "\n\n".join(lines).encode(), "line 7 of "
    frame = pl.DataFrame({"who": list("abbab"), "x": values})
    stream = io.BytesIO()
    if kind == "parquet":
        frame.write_parquet(stream)
        return stream.getvalue(), "row 4 of "
    book = openpyxl.Workbook()
    for row in ((), (), ("who", "x"), ("a", 1.5), (None, None), ("b", 2.0), ("b", 3.0), ("a", 1e200), ("b", 4.0)):
        book.active.append(row)
    book.save(stream)
    return stream.getvalue(), "row 8 of "


@pytest.mark.parametrize("kind", ["csv", "json", "parquet", "excel"])
@pytest.mark.parametrize("packed", ["", ".xz"])
def test_errors_name_the_line_of_the_file(tmp_path, piped, kind, packed):
    content, place = table_with_a_bad_row(kind)
    content = PACKERS[packed](content)
    path = tmp_path / "shops"
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match=r"got 1e\+200 \(column 'x', " + re.escape(f"{place}{path})")):
        prepare(path, user="who")
    piped(content)
    with pytest.raises(InvalidInput, match=re.escape(f"(column 'x', {place}standard input)")):
        prepare("-", user="who")
    with pytest.raises(InvalidInput, match=r"\(column 'x', row 3\)"):  # a frame has no file
        prepare(read_table(path), user="who")


@pytest.mark.parametrize("engine", ["fastexcel", "openpyxl"])
def test_rows_of_a_sheet_have_the_numbers_that_excel_shows(tmp_path, monkeypatch, engine):
    if engine == "openpyxl":
        monkeypatch.setitem(sys.modules, "fastexcel", None)
    path, book = tmp_path / "t.xlsx", openpyxl.Workbook()
    for cell, value in {"A3": "who", "B3": "x", "A4": "a", "B4": 0, "A6": "b", "B6": 1, "A9": "c"}.items():
        book.active[cell] = value
    book.save(path)
    place = row_place(path)
    assert [place(row) for row in range(3)] == [f"row {row} of {path}" for row in (4, 6, 9)]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "cp1252"])
def test_every_row_has_its_line(tmp_path, end, encoding):
    text = end.join(["who,x", "é,0", "", 'b,"1', '1"', "c,2", "", "", "d,3"])
    path = tmp_path / "t.csv"
    path.write_bytes(text.encode(encoding))
    place = row_place(path)
    assert [place(row) for row in range(4)] == [f"line {line} of {path}" for line in (2, 4, 6, 9)]


def test_users_of_a_file_and_messages_about_texts(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("who,x,y\na,1,0\n\nb,,1\n")
    with pytest.raises(InvalidInput, match=rf"user 'b', line 4 of {re.escape(str(path))}, column 'x'"):
        Users.from_csv(path, user="who", target="y")
    path.write_text("who,x,y\na,1,5\nb,2,much\na,3,7\nb,5,9\n")
    with pytest.raises(InvalidInput, match=rf"'much' in line 3 of {re.escape(str(path))}\)"):
        prepare(path, user="who", target="y", task="regression")


def test_a_row_is_located_once():
    with pytest.raises(InvalidInput, match=r"^Wrong \(line 5 of a\.csv\)\.$"), located(lambda row: f"row {row} of b"), \
            located(lambda row: f"line {row + 2} of a.csv"):
        raise InvalidInput("Wrong", where=ROW, row=3)
    with pytest.raises(InvalidInput, match=r"^Wrong \(row 3\)\.$"), located(None):
        raise InvalidInput("Wrong", where=ROW, row=3)


# ---- files that are traps


def bomb(kind, n):
    import bz2
    import gzip
    import lzma

    import zstandard

    text = b"who,x,y\n" + b"u1,1.5,2.0\n" * n
    return {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress,
            "zst": zstandard.ZstdCompressor().compress}[kind](text)


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz", "zst"])
def test_a_packed_file_that_unpacks_to_too_much_is_refused_on_the_way(tmp_path, monkeypatch, kind):
    from coterie.data import files

    file = tmp_path / f"t.csv.{kind}"
    file.write_bytes(bomb(kind, 200_000))
    assert len(read_table(file)) == 200_000
    monkeypatch.setattr(files, "_SMALL", 1000)
    monkeypatch.setattr(files, "_RATIO", 20)
    with pytest.raises(InvalidInput, match=r"packed bytes are more than .* MiB unpacked"):
        read_table(file)
    file.write_bytes(bomb(kind, 200_000)[:-30])
    monkeypatch.setattr(files, "_RATIO", 10**6)
    with pytest.raises(InvalidInput, match="damaged or cut short"):
        read_table(file)


def test_a_workbook_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    from coterie.data import files

    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    for row in (["who", "x"], *[["a", 1]] * 50):
        book.active.append(row)
    book.save(tmp_path / "t.xlsx")
    assert len(read_table(tmp_path / "t.xlsx"))
    monkeypatch.setattr(files, "_SMALL", 100)
    monkeypatch.setattr(files, "_RATIO", 1)
    with pytest.raises(InvalidInput, match="MiB unpacked"):
        read_table(tmp_path / "t.xlsx")


def test_too_many_columns_are_refused_before_they_are_read(tmp_path, monkeypatch):
    from coterie.data import files

    (tmp_path / "t.csv").write_text("who," + ",".join(f"c{k}" for k in range(50)) + "\n" + "a," * 50 + "1\n")
    assert read_table(tmp_path / "t.csv").shape == (1, 51)
    monkeypatch.setattr(files, "MOST_COLUMNS", 50)
    with pytest.raises(InvalidInput, match="has 51 columns, and there can be 50"):
        read_table(tmp_path / "t.csv")


@pytest.mark.parametrize("depth", [100_000, 101])
def test_json_nested_too_deep_is_refused(tmp_path, depth):
    deep = '{"who": "a", "x": ' + "[" * depth + "]" * depth + ', "y": 1}\n'
    (tmp_path / "t.jsonl").write_text('{"who": "b", "x": [], "y": 1}\n' + deep)
    with pytest.raises(InvalidInput, match=r"nested more than 100 deep .*line 2 of"):
        read_table(tmp_path / "t.jsonl")
    (tmp_path / "t.jsonl").write_text(deep * 2)  # as the first line, too
    with pytest.raises(InvalidInput, match=r"nested more than 100 deep .*line 1 of"):
        read_table(tmp_path / "t.jsonl")
