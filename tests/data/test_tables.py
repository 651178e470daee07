"""Tables: whatever wrote the file, the numbers are those a slow reading gives, or the refusal says what to do."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
import warnings
from datetime import date, datetime, time, timedelta
from decimal import Decimal

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coterie.base.errors import CoterieWarning, InvalidInput, MissingExtra
from coterie.data.encoding import Column, Recipe, fingerprint, read_table

few = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
many = settings(few, max_examples=500)


def raises(*parts):
    """InvalidInput whose message holds all parts, in this order, and ends with a remedy."""
    return pytest.raises(InvalidInput, match="(?s)" + ".*".join(re.escape(part) for part in parts))


def written(tmp_path, content, name="data.csv"):
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def learned(tmp_path, content, **call):
    frame = read_table(written(tmp_path, content))
    recipe = Recipe.learn(frame, **call)
    return recipe, recipe.encode(frame)


# ---- files of other programs: all are this table

ROWS = [("bob", 31, 1.5, "red", True), ("ann", 25, -2.25, "blue", False), ("bob", 47, 0.125, "red", False),
        ("ann", 38, 10.0, "blue", True), ("zoë", 52, 3.75, "red", True), ("zoë", 19, 0.0, "blue", False)]
NAMES = ("subject", "age", "size", "colour", "y")


def text_of(separator=",", end="\n", comma=False, **options):
    out = io.StringIO(newline="")
    writer = csv.writer(out, delimiter=separator, lineterminator=end, **options)
    writer.writerow(NAMES)
    writer.writerows([[str(v).replace(".", ",") if comma and isinstance(v, float) else v for v in row] for row in ROWS])
    return out.getvalue()


def quoted_by_r():
    lines = [",".join(f'"{name}"' for name in ("", *NAMES))]
    lines += [f'"{i}","{u}",{a},{s:g},"{c}",{str(y).upper()}' for i, (u, a, s, c, y) in enumerate(ROWS, 1)]
    return "\n".join(lines) + "\n"


FRAME = pd.DataFrame(ROWS, columns=NAMES)
FILES = {
    "pandas.csv": FRAME.to_csv(index=False).encode(),
    "pandas_index.csv": FRAME.to_csv().encode(),
    "polars.csv": pl.DataFrame(ROWS, schema=NAMES, orient="row").write_csv().encode(),
    "excel.csv": text_of(end="\r\n").encode("utf-8-sig"),
    "excel_sep.csv": ("sep=;\r\n" + text_of(";", "\r\n")).encode(),
    "excel_unicode.txt": text_of("\t", "\r\n").encode("utf-16"),
    "big_endian.txt": b"\xfe\xff" + text_of("\t").encode("utf-16-be"),
    "no_bom.txt": text_of("\t").encode("utf-16-le"),
    "european.csv": text_of(";", "\r\n", comma=True).encode(),
    "european.tsv": text_of("\t", comma=True).encode(),
    "all_quoted.csv": text_of(quoting=csv.QUOTE_ALL).encode(),
    "pipes.txt": text_of("|").encode(),
    "old_mac.csv": text_of(end="\r").encode(),
    "r.csv": quoted_by_r().encode(),
    "no_last_newline.csv": text_of().rstrip("\n").encode(),
    "blank_lines.csv": ("\n" + text_of(end="\n\n") + "\n\n").encode(),
    "spaces.csv": text_of().replace(",", " ,  ").encode(),
    "packed.csv.gz": gzip.compress(text_of().encode(), mtime=0),
    "packed.csv.zst": pa.Codec("zstd").compress(text_of().encode(), asbytes=True),
    "trailing_separator.csv": text_of().replace("\n", ",\n").encode(),
}


def check(path):
    before = path.read_bytes()
    frame = read_table(path)
    recipe = Recipe.learn(frame, user="subject", target="y")
    users = recipe.encode(frame)
    assert path.read_bytes() == before
    assert users.names == ("ann", "bob", "zoë")
    assert users.feature_names == recipe.feature_names == ("age", "size", "colour=red")
    assert users.features.tolist() == [[25, -2.25, 0], [38, 10, 0], [31, 1.5, 1], [47, 0.125, 1], [52, 3.75, 1],
                                       [19, 0, 0]]
    assert users.targets.tolist() == [0, 1, 1, 0, 1, 0]
    assert (recipe.task, recipe.class_kind, recipe.class_values) == ("classification", "bool", (False, True))


@pytest.mark.parametrize("name", FILES)
def test_files_of_other_programs(tmp_path, name):
    check(written(tmp_path, FILES[name], name))


def test_check_can_fail(tmp_path):
    with pytest.raises(AssertionError):
        check(written(tmp_path, text_of().replace("10.0", "10.5")))


def test_windows_1252_is_read_and_said(tmp_path):
    with pytest.warns(CoterieWarning, match="Windows-1252"):
        check(written(tmp_path, text_of().encode("cp1252")))


@pytest.mark.parametrize("write", [
    lambda path: FRAME.to_parquet(path), lambda path: FRAME.set_index("subject").to_parquet(path),
    lambda path: FRAME.astype({"colour": "category", "subject": "string", "age": "Int64"}).to_parquet(path),
    lambda path: pl.DataFrame(ROWS, schema=NAMES, orient="row").cast({"age": pl.Decimal(9, 2)}).write_parquet(path),
])
@pytest.mark.parametrize("name", ["t.parquet", "t.dat"])
def test_parquet(tmp_path, write, name):
    write(tmp_path / name)
    check(tmp_path / name)


def test_a_lazy_frame_is_computed_and_others_are_refused():
    lazy = pl.LazyFrame({"x": [1.0, 2.0, 4.0]})
    assert Recipe.learn(lazy).encode(lazy).features[:, 0].tolist() == [1, 2, 4]
    with raises("must be a polars frame", "DataFrame", "read_table"):
        Recipe.learn(pd.DataFrame({"x": [1.0, 2.0]}))


def test_a_given_separator_is_used(tmp_path):
    path = written(tmp_path, "a:b\n1:2\n3:5\n")
    assert read_table(path).columns == ["a:b"]
    assert read_table(path, ":").to_dict(as_series=False) == {"a": [1, 3], "b": [2, 5]}
    for wrong in ("", ";;", '"', "\n", "é"):
        with raises("must be one character"):
            read_table(path, wrong)


def test_fingerprint(tmp_path):
    assert fingerprint(written(tmp_path, b"abc")) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    for path in (tmp_path, tmp_path / "none"):
        with raises("no file to read", str(path)):
            fingerprint(path)


@pytest.mark.usefixtures("without_polars")
def test_without_polars_the_message_names_the_extra(tmp_path):
    for name in ("t.csv", "t.parquet"):
        with pytest.raises(MissingExtra, match=re.escape("coterie[tables]")):
            read_table(written(tmp_path, "a,b\n1,2\n", name))


# ---- files that are refused

@pytest.mark.parametrize(("content", "parts"), [
    (b"", ["empty", "data.csv", "written completely"]),
    (b" \n\n", ["empty"]),
    (b"\xef\xbb\xbf", ["empty"]),
    (b"a,b\n", ["a header and no rows"]),
    (b"a,b", ["a header and no rows"]),
    (b"a,b\n1,2\n3\n", ["header has 2 fields and this record 1", "','", "line 3", "Correct the line"]),
    (b"a,b\n\n1,2\n\n\n3,4,5\n6,7\n", ["2 fields and this record 3", "line 6"]),
    (b"sep=;\na;b\n1;2\n3\n", ["this record 1", "line 4"]),
    (b'a,b\n"x\ny",2\n3\n', ["this record 1", "line 4"]),
    (b"a,b\n1,2,3\n1,2,3\n", ["this record 3", "line 2"]),
    (b"a\n1,5\n2,5\n", ["header has 1 fields and this record 2", "line 2"]),
    (b"a,b,a\n1,2,3\n", ["must be unique", "'a'"]),
    (b"a, a\n1,2\n", ["must be unique", "'a'"]),
    (b"a,\n1,2\n", []),
    (b"column 2,\n1,2\n", ["must be unique", "'column 2'"]),
    (b"a,b\n1,\x002\n", ["NUL byte", "line 2", "Parquet"]),
    (b"a,b\n1,2\n\x01,2\n", ["control character", "line 3"]),
    (bytes(range(256)) * 9, ["no text"]),
    (b"a,b\n1,\x81\xff\n", ["neither UTF-8, UTF-16 nor Windows-1252"]),
    (b"\xff\xfea\0,\0b", ["starts as utf-16 text but continues as something else"]),
    (b"\xef\xbb\xbfa,b\n1,\xe9\n", ["starts as utf-8 text"]),
    (b"PK\x03\x04" + bytes(99), ["workbook or a ZIP archive", "Save it as CSV"]),
    (gzip.compress(b"a,b\n1,2\n" * 99, mtime=0)[:30], ["damaged or cut short"]),
    (b"\x1f\x8bnonsense", ["damaged or cut short"]),
    (pa.Codec("zstd").compress(b"a,b\n1,2\n" * 99, asbytes=True)[:20], ["cannot be read", "data.csv"]),
    (b'a,b\n1,6" pipe\n', ["A quote must open", "line 2", '"6"" pipe"']),
    (b'a,b\n1,"6" pipe\n', ["A quote must open", "line 2"]),
    (b'a,b\n1,"x\n3,4\n', ["A quote must open", "line 2"]),
    (b'"a,b\n1,2\n', ["quote opens in the first line and never closes"]),
    (b"a,b;c,d\n1,2;3,4\n", ["',' (3 columns) or ';' (2 columns)", "--separator ','"]),
    (b"1.5,2\n3,4\n", ["first line must name the columns", "'1.5', '2'", "Add a first line"]),
    (b"a;b\n1,5;1.5\n2,5;2.5\n", ["'b' has decimal points", "'a' decimal commas", "same decimal mark"]),
])
def test_files_that_are_refused(tmp_path, content, parts):
    path = written(tmp_path, content)
    if not parts:
        assert read_table(path).columns == ["a", "column 2"]
        return
    with raises(*parts) as caught:
        read_table(path)
    assert caught.value.remedy or "unique" in str(caught.value)
    assert path.read_bytes() == content


def test_paths_that_are_refused(tmp_path):
    for name in ("none.csv", "none.parquet", "nul\0.csv"):
        with raises("no file", "Check the path"):
            read_table(tmp_path / name)
    with raises("a directory"):
        read_table(tmp_path)
    for content in (b"", b"a,b\n1,2\n", b"PAR1" + bytes(40), b"PAR1" + bytes(40) + b"PAR1"):
        with raises("cannot be read", "t.parquet"):
            read_table(written(tmp_path, content, "t.parquet"))


# ---- cells

@pytest.mark.parametrize(("texts", "expected"), [
    (["1", "2", "-3"], [1, 2, -3]), (["1.5", "2", "1e3"], [1.5, 2.0, 1000.0]), ([" 1", "2 ", "\t3"], [1, 2, 3]),
    (["1.5", "NaN", "nan"], [1.5, None, None]),
    (["1", "NA", "3"], [1, None, 3]), (["1.5", "n/a", "?"], [1.5, None, None]), (["-", "NULL", "-1"], [None, None, -1]),
    (["007", "1", "12"], ["007", "1", "12"]), (["+1", "-1", "+1"], ["+1", "-1", "+1"]),
    (["9007199254740993.0", "1", "2"], ["9007199254740993.0", "1", "2"]),
    (["9223372036854775807", "1", "2"], [2**63 - 1, 1, 2]),
    (["9223372036854775808", "1", "2"], ["9223372036854775808", "1", "2"]),
    (["True", "FALSE", "NaN"], [True, False, None]), (["yes", "no", "yes"], ["yes", "no", "yes"]),
    (["1_0", "2", "3"], ["1_0", "2", "3"]), (["-nan", "2", "3"], ["-nan", "2", "3"]), (["0x1", "2", "3"], None),
    (["1", "x", ""], ["1", "x", None]), (["1.234,5", "2", "3,25"], "texts"), (["1,234", "5", "6"], "texts"),
    (["", "", ""], [None, None, None]), (["2020-01-31", "2020-02-01", ""], ["2020-01-31", "2020-02-01", None]),
])
def test_what_cells_of_a_csv_file_are(tmp_path, texts, expected):
    rows = "".join(f'{i},"{text}"\n' for i, text in enumerate(texts))
    read = read_table(written(tmp_path, "i,x\n" + rows))["x"].to_list()
    expected = texts if expected in (None, "texts") else expected
    assert read == expected
    assert [type(v) for v in read] == [type(v) for v in expected]


@pytest.mark.parametrize(("separator", "texts", "expected"), [
    (";", ["1,5", "2", ",25"], [1.5, 2, 0.25]), (";", ["1.234,5", "-1.234.567", "2,5e3"], [1234.5, -1234567, 2500]),
    (";", ["1,234", "2,000", "3"], [1.234, 2, 3]), ("\t", ["1,5", "2,25", "3"], [1.5, 2.25, 3]),
    ("\t", ["1,234", "2,000", "3"], None), ("|", ["1,234", "0,500", "3"], [1.234, 0.5, 3]),
    (";", ["1,2,3", "2", "3"], None), (";", ["12.5", "2,5", "3"], None), (";", ["12.34,5", "2", "3"], None),
])
def test_decimal_commas(tmp_path, separator, texts, expected):
    rows = "".join(f"{i}{separator}{text}\n" for i, text in enumerate(texts))
    assert read_table(written(tmp_path, f"i{separator}x\n{rows}"))["x"].to_list() == (expected or texts)


def test_the_kind_of_a_column_is_read_from_all_rows(tmp_path):
    rows = "".join(f"{i % 7},{i % 3}\n" for i in range(5000))
    assert read_table(written(tmp_path, "u,x\n" + rows + "1,0.5\n"))["x"].dtype == pl.Float64
    assert read_table(written(tmp_path, "u,x\n" + rows + "1,z\n"))["x"].dtype == pl.String


# ---- columns

def one_column(values, **call):
    frame = pl.DataFrame({"x": values, "keep": np.sqrt(np.arange(len(values)) + 0.5)}, strict=False)
    recipe = Recipe.learn(frame, **call)
    encoded = recipe.encode(frame)
    columns = zip(encoded.feature_names, encoded.features.T, strict=True)
    return recipe, {name: column.tolist() for name, column in columns if name != "keep"}


@pytest.mark.parametrize(("values", "expected"), [
    ([1, 5, 3], {"x": [1, 5, 3]}), ([1.5, None, 2.5], {"x": [1.5, 2, 2.5], "x missing": [0, 1, 0]}),
    ([1.5, math.nan, 2.5], {"x": [1.5, 2, 2.5], "x missing": [0, 1, 0]}),
    ([True, False, True], {"x": [1, 0, 1]}), ([True, None, False], {"x": [1, 0.5, 0], "x missing": [0, 1, 0]}),
    ([Decimal("1.5"), Decimal(2), Decimal(3)], {"x": [1.5, 2, 3]}), ([" 1", "2.5 ", "1e2"], {"x": [1, 2.5, 100]}),
    (["007", "+5", "NA"], {"x": [7, 5, 6], "x missing": [0, 0, 1]}), (["TRUE", "false", "true"], {"x": [1, 0, 1]}),
    (["a", "b ", " a", "b"], {"x=b": [0, 1, 0, 1]}),
    (["a", None, "b", "b", "b"], {"x=b": [0, 0.75, 1, 1, 1], "x missing": [0, 1, 0, 0, 0]}),
    (["a", "c", "b", "a", "c", "c"], {"x=a": [1, 0, 0, 1, 0, 0], "x=b": [0, 0, 1, 0, 0, 0],
                                      "x=c": [0, 1, 0, 0, 1, 1]}),
    (["a", None, "b", "c", "a", "b", "c"], {"x=a": [1, 0, 0, 0, 1, 0, 0], "x=b": [0, 0, 1, 0, 0, 1, 0],
                                            "x=c": [0, 0, 0, 1, 0, 0, 1], "x missing": [0, 1, 0, 0, 0, 0, 0]}),
    ([date(2020, 3, 1), date(2020, 2, 28), date(2021, 2, 28)], {"x (days)": [2, 0, 366]}),
    ([datetime(2020, 1, 1, 12), datetime(2020, 1, 1), None], {"x (days)": [0.5, 0, 0.25], "x missing": [0, 0, 1]}),
    (["2020-01-02", "2020-01-01T06:00", "2020-01-01 12:00:00.5"], {"x (days)": [0.75, 0, 0.25 + 0.5 / 86400]}),
    (["2020-01-02T00:00:00Z", "2020-01-02T02:00:00+02:00", "2020-01-02 12:00+00:00"], {"x (days)": [0, 0, 0.5]}),
    ([timedelta(days=1), timedelta(hours=-6), timedelta(0)], {"x (days)": [1, -0.25, 0]}),
    ([time(12), time(0), time(18)], {"x (days)": [0.5, 0, 0.75]}),
    (pl.Series(["u", "v", "u", "v"], dtype=pl.Categorical), {"x=v": [0, 1, 0, 1]}),
    ([None, None, None], {}), ([4, 4, 4], {}), (["k", "k", None], {}), ([math.nan] * 3, {}),
    ([-1e150, 0.0, 1e150], {"x": [-1e150, 0, 1e150]}),
])
def test_columns(values, expected):
    recipe, encoded = one_column(values)
    assert encoded == {name: pytest.approx(column, rel=1e-14, abs=1e-14) for name, column in expected.items()}
    assert bool(recipe.notes) == (list(expected) != ["x"])


def test_an_indicator_is_made_above_one_percent():
    values = [None, *range(1, 200), 7]
    assert list(one_column(values[:100])[1]) == ["x"]
    recipe, encoded = one_column([None, *values[:100]])
    assert list(encoded) == ["x", "x missing"]
    assert recipe.notes == ("Column 'x' is missing in some rows and filled with the mean there; one more column "
                            "marks them.",)


def test_many_levels_are_pooled_or_refused():
    common = [f"c{i:02}" for i in range(20)]
    recipe, encoded = one_column(common * 11 + [f"rare{i}" for i in range(2)])
    assert list(encoded) == [f"x={level}" for level in common] + ["x=(other)"]
    assert encoded["x=(other)"] == [0] * 220 + [1, 1]
    assert "the others pooled" in recipe.notes[0]
    new = pl.DataFrame({"x": ["new", "c03"], "keep": [0.0, 1.0]})
    assert recipe.matrix(new)[0][:, 20].tolist() == [1, 0]
    with raises("22 different texts in 62 rows", "names or free text", "column 'x'", "--drop 'x'", "--features"):
        one_column(common * 3 + ["p", "q"])
    with raises("100 different texts in 1000 rows"):  # the 20 most frequent cover a fifth
        one_column([f"c{i % 100}" for i in range(1000)])


@pytest.mark.parametrize(("values", "parts"), [
    ([f"note {i}" for i in range(30)], ["30 different texts in 30 rows", "column 'x'", "--drop 'x'"]),
    (["a", "b", "c", "d"], ["4 different texts in 4 rows"]),
    (["$1,200", "$3,400.50"], ["must be plain", "'$1,200'", "column 'x'"]), (["5 %", "7 %"] * 2, ["be plain"]),
    (["31.12.2020", "01.01.2021"] * 3, ["dates ISO", "'01.01.2021'"]), (["1/2/2020", "1/3/2020"] * 2, ["dates ISO"]),
    ([str(i) for i in range(40)] + ["unknown"],
     ["holds numbers, but also texts ('unknown' in row 40)", "Correct or empty"]),
    ([1.0, math.inf, 2.0], ["finite and at most 1e+150, got inf", "column 'x', row 1"]),
    ([1.0, 0.0, -1e151], ["got -1e+151", "column 'x', row 2"]), (["1", "1e400", "2"], ["got inf", "row 1"]),
    ([[1, 2], [3]], ["List(Int64) cannot be used", "column 'x'", "--drop 'x'"]),
    ([{"a": 1}, {"a": 2}], ["Struct", "column 'x'"]), ([b"1", b"2"], ["Binary", "column 'x'"]),
])
def test_columns_that_are_refused(values, parts):
    with raises(*parts):
        one_column(values)
    frame = pl.DataFrame({"x": values, "keep": np.sqrt(np.arange(len(values)) + 0.5)}, strict=False)
    assert Recipe.learn(frame, drop=["x"]).feature_names == ("keep",)
    assert Recipe.learn(frame, features="keep").feature_names == ("keep",)


@pytest.mark.parametrize(("header", "values", "dropped"), [
    ("", [0, 1, 2, 3], True), ("", [1, 2, 3, 4], True), ("", [17, 3, 44, 5], True), ("", ["p", "q", "r", "s"], True),
    ("", [2, 2, 3, 4], False), ("", [0.5, 1, 2, 3], False), ("Unnamed: 0", [0, 1, 2, 3], True),
    ("id", [17, 3, 44, 5], True), ("id", [17, 3, 17, 5], False), ("Index", [1, 2, 3, 4], True),
    ("step", [0, 1, 2, 3], False), ("step", range(12), True), ("step", range(1, 13), True),
    ("step", range(12, 0, -1), False), ("step", range(5, 17), False),
])
def test_columns_that_count_rows(tmp_path, header, values, dropped):
    rows = "".join(f"{value},{i * i % 5}.5\n" for i, value in enumerate(values))
    path = written(tmp_path, f"{header},x\n{rows}")
    recipe = Recipe.learn(read_table(path))
    assert (recipe.feature_names == ("x",)) == dropped
    assert any("only numbers or names the rows" in note for note in recipe.notes) == dropped
    name = read_table(path).columns[0]
    if values[0] != "p":
        assert Recipe.learn(read_table(path), features=[name]).feature_names == (name,)


def test_names_of_encoded_columns_must_differ():
    frame = pl.DataFrame({"x": [1.0, None, 3.0], "x missing": [1.0, 2.0, 4.0]})
    with raises("Names of encoded columns must be unique", "'x missing'"):
        Recipe.learn(frame)


# ---- users

@pytest.mark.parametrize(("values", "names"), [
    (["b", " a", "b"], (" a", "b")), ([3, 1, 3], (1, 3)), ([2.0, 1.0, 2.0], (1.0, 2.0)),
    ([True, False, True], (False, True)),
    ([date(2020, 1, 2), date(2020, 1, 1), date(2020, 1, 2)], (date(2020, 1, 1), date(2020, 1, 2))),
    (pl.Series(["v", "u", "v"], dtype=pl.Categorical), ("u", "v")),
    (["🦊", "שלום", "🦊"], ("שלום", "🦊")), (["é", "e\u0301", "é"], ("e\u0301", "é")),
    (["<script>", "' OR 1=1 --", "<script>"], ("' OR 1=1 --", "<script>")),
    ([2**63 - 1, 2**63 - 2, 2**63 - 1], (2**63 - 2, 2**63 - 1)),
])
def test_user_names_stay_as_they_are(values, names):
    frame = pl.DataFrame({"u": values, "x": [1.0, 2.0, 4.0]})
    users = Recipe.learn(frame, user="u").encode(frame)
    assert users.names == names
    assert users.features[:, 0].tolist() == [2, 1, 4]


def test_codes_of_users_keep_their_zeros(tmp_path):
    _, users = learned(tmp_path, "u,x\n007,1\n07,2\n7,5\n007,3\n", user="u")
    assert users.names == ("007", "07", "7")
    _, users = learned(tmp_path, "u,x\n12345678901234567890,1\n12345678901234567891,2\n", user="u")
    assert users.n_users == 2


@pytest.mark.parametrize(("values", "parts"), [
    ([None, "a", ""], ["user is missing in 2 of 3 rows", "column 'u'", "Fill it in"]),
    ([1.0, math.nan, math.nan], ["missing in 2 of 3 rows"]), ([None] * 3, ["missing in 3 of 3 rows"]),
    ([1.0, 1.1, 2.0], ["texts, integers or dates, got 1.1", "row 1, column 'u'"]), ([1e300, 1.0, 2.0], ["got 1e+300"]),
    ([[1], [2], [3]], ["texts, integers or dates, got List"]), ([timedelta(1)] * 3, ["got Duration"]),
    ([math.inf, 1.0, 2.0], ["got inf"]),
])
def test_user_names_that_are_refused(values, parts):
    with raises(*parts):
        Recipe.learn(pl.DataFrame({"u": values, "x": [1.0, 2.0, 4.0]}), user="u")


@pytest.mark.parametrize("values", [["b", None, "a", "b"], ["b", "", "a", "b"], [2.0, math.nan, 1.0, 2.0],
                                    [2, None, 1, 2]])
def test_rows_without_user_are_left_out_with_a_note(values):
    frame = pl.DataFrame({"u": values, "x": [1.0, 50.0, 4.0, 2.0], "y": ["no", "new", "yes", "yes"]})
    recipe = Recipe.learn(frame, user="u", target="y")
    assert recipe.notes[0] == "1 of 4 rows have no user ('u') and are ignored."
    assert recipe.classes == ("no", "yes")
    users = recipe.encode(frame)
    assert users.features[:, 0].tolist() == [4, 1, 2]
    assert users.targets.tolist() == [1, 0, 1]
    assert len(users.names) == 2
    assert recipe.matrix(frame)[1][1] is None
    everyone = frame.with_columns(u=pl.Series(values[:1] * 4), y=pl.Series(["no", "yes"] * 2))
    assert not any("no user" in note for note in Recipe.learn(everyone, user="u", target="y").notes)
    with raises("user is missing in all rows", "column 'u'"):
        recipe.encode(frame[1:2])


def test_without_user_rows_are_users_with_their_numbers():
    frame = pl.DataFrame({"x": [5.0, 6.0, 8.0], "y": ["a", None, "b"]})
    recipe = Recipe.learn(frame, target="y")
    assert recipe.encode(frame).names == (0, 2)
    assert recipe.matrix(frame)[1] == [0, 1, 2]
    assert "1 of 3 rows have no target" in recipe.notes[0]
    assert any("Every row is a user" in note for note in recipe.notes)
    one_each = Recipe.learn(pl.DataFrame({"u": ["p", "q", "r"], "x": [5.0, 6.0, 8.0]}), user="u")
    assert "Every user ('u') has one row only" in one_each.notes[0]
    assert one_each.task == "clustering"


# ---- targets

def with_target(values, **call):
    n = len(values)
    frame = pl.DataFrame({"u": [i % 2 for i in range(n)], "x": np.sqrt(np.arange(n) + 0.5), "y": values}, strict=False)
    return frame, Recipe.learn(frame, user="u", target="y", **call)


@pytest.mark.parametrize(("values", "task", "classes", "kind"), [
    ([True, False, True], "classification", ("False", "True"), "bool"),
    (["no", "yes", "no", "yes"], "classification", ("no", "yes"), "str"),
    (["10", "9", "10", "9"], "classification", ("10", "9"), "str"),
    ([10, 9, 10, 9], "classification", ("9", "10"), "int"),
    ([-1.0, 1.0, 1.0], "classification", ("-1.0", "1.0"), "float"),
    ([0.5, 2.5, 0.5], "classification", ("0.5", "2.5"), "float"),
    ([0, 1, 2] * 2, "classification", ("0", "1", "2"), "int"),
    ([3, 1, 2] * 2, "classification", ("1", "2", "3"), "int"),
    ([0, 1, 2], "counts", (), "str"), ([0, 1, 3] * 2, "counts", (), "str"), ([0, 0, 7, 1, 2, 30], "counts", (), "str"),
    ([*range(11)] * 3, "counts", (), "str"), ([0, 9, 9, 10, 8, 9], "regression", (), "str"),
    ([1, 2, 4] * 2, "regression", (), "str"), ([2, 3, 4] * 2, "regression", (), "str"),
    ([-1, 0, 1] * 2, "regression", (), "str"), ([0.0, 1.5, 2.0], "regression", (), "str"),
    ([f"{i / 4}" for i in range(30)], "regression", (), "str"),
    (["a", "b", None] * 2, "classification", ("a", "b"), "str"),
])
def test_the_task_is_found_and_said(values, task, classes, kind):
    frame, recipe = with_target(values)
    assert (recipe.task, recipe.classes, recipe.class_kind) == (task, classes, kind)
    note = next(note for note in recipe.notes if "is inferred as" in note)
    assert task in note
    assert "--task" in note
    users = recipe.encode(frame)
    flat = [v for parity in (0, 1) for i, v in enumerate(values) if i % 2 == parity and v is not None]
    assert users.targets.tolist() == [recipe.class_values.index(v) if classes else float(v) for v in flat]
    assert recipe.encode(frame, targets=False).targets is None
    assert recipe.encode(frame, targets=False).n_samples == len(values)


@pytest.mark.parametrize(("values", "task", "classes"), [
    ([0, 1, 2] * 2, "regression", ()), ([0, 1, 2] * 2, "counts", ()),
    ([1, 2, 4] * 2, "classification", ("1", "2", "4")),
    ([True, False, True], "regression", ()), (["1", "2", "1"], "regression", ()),
])
def test_the_task_can_be_given(values, task, classes):
    frame, recipe = with_target(values, task=task)
    assert (recipe.task, recipe.classes) == (task, classes)
    assert not any("is inferred as" in note for note in recipe.notes)
    assert len(recipe.encode(frame).targets) == len(values)


@pytest.mark.parametrize(("values", "call", "parts"), [
    (["a"] * 4, {}, ["one value only, 'a'", "column 'y'", "--target"]), ([2, 2, None, 2], {}, ["one value only"]),
    ([2.0] * 3, {"task": "regression"}, ["one value only"]),
    ([None, None, None, 1, 2], {}, ["missing in 3 of 5 rows", "column 'y'", "Fill it in"]),
    ([None] * 3, {}, ["missing in 3 of 3 rows"]),
    ([f"t{i}" for i in range(9)], {}, ["9 different values in 9 rows", "too many for classes", "column 'y'"]),
    ([*map(str, range(9)), "x"], {}, ["target holds numbers, but also texts ('x' in row 9)", "column 'y'"]),
    ([*map(str, range(9)), "inf"], {}, ["got inf", "column 'y', row 9"]),
    ([f"t{i % 60}" for i in range(600)], {}, ["60 different values", "50"]),
    ([i % 60 for i in range(600)], {"task": "classification"}, ["60 different values", "--task regression"]),
    (["a", "b", "a"], {"task": "regression"}, ["must hold numbers", "texts ('a' in row 0)", "column 'y'"]),
    ([1.0, -2.0, 3.0], {"task": "counts"}, ["integers from 0, got -2", "row 1", "--task regression"]),
    ([1.0, 2.5, 3.0], {"task": "counts"}, ["integers from 0, got 2.5", "row 1"]),
    ([date(2020, 1, 1 + i) for i in range(3)], {}, ["must hold numbers", "dates", "column 'y'"]),
    ([[1], [2], [3]], {}, ["no numbers", "column 'y'"]), ([1.0, math.inf, 2.0], {}, ["got inf", "column 'y', row 1"]),
    ([1, 2, 3], {"task": "clustering"}, ["Clustering has no target", "'y'", "--drop 'y'"]),
    ([1, 2, 3], {"task": "count"}, ["no task 'count'", "Did you mean 'counts'"]),
    ([2**60, 2**60 + 1, 2**60], {"task": "classification"}, ["y"]),
])
def test_targets_that_are_refused(values, call, parts):
    with raises(*parts):
        with_target(values, **call)


@pytest.mark.parametrize(("call", "parts"), [
    ({"user": "who"}, ["no column 'who'", "There are: 'u'"]),
    ({"target": "yy"}, ["no column 'yy'", "Did you mean 'y'"]),
    ({"features": ["x", "ex"]}, ["no column 'ex'"]), ({"drop": ["z"]}, ["no column 'z'"]),
    ({"user": "u", "target": "u"}, ["must be unique", "'u'"]), ({"user": "u", "features": ["u"]}, ["must be unique"]),
    ({"target": "y", "features": ["y"]}, ["must be unique", "'y'"]),
    ({"features": ["x", "x"]}, ["must be unique", "'x'"]),
    ({"user": "u", "drop": ["u"]}, ["both used and dropped"]), ({"features": []}, ["At least one feature"]),
    ({"drop": ["u", "x", "y"]}, ["At least one feature"]), ({"task": "regression"}, ["needs a target", "--target"]),
    ({"features": ["c"]}, ["No column is left", "one value", "--features"]),
])
def test_columns_are_named_right(call, parts):
    frame = pl.DataFrame({"u": [1, 2, 2], "x": [1.5, 2.0, 4.0], "y": [0, 1, 1], "c": [3, 3, 3]})
    with raises(*parts):
        Recipe.learn(frame if call.get("drop") != ["u", "x", "y"] else frame.drop("c"), **call)


def test_one_row_is_too_few():
    with raises("At least two rows are needed, got 1"):
        Recipe.learn(pl.DataFrame({"x": [1.0]}))


# ---- other tables

def test_a_recipe_works_on_other_tables(tmp_path):
    recipe, _ = learned(tmp_path, text_of(), user="subject", target="y")
    new = "y,colour,extra,size,age,subject\nFalse,red,9,?,30,eve\nTrue, blue,8,2.5,,bob\n"
    frame = read_table(written(tmp_path, new))
    X, users = recipe.matrix(frame)
    assert users == ["eve", "bob"]
    assert X.tolist() == [[30, pytest.approx(np.mean([row[2] for row in ROWS])), 1],
                          [pytest.approx(np.mean([row[1] for row in ROWS])), 2.5, 0]]
    assert recipe.encode(frame).targets.tolist() == [1, 0]  # bob, eve
    assert recipe.matrix(frame.drop("y"))[0].tolist() == X.tolist()
    with pytest.warns(CoterieWarning, match="'colour' has levels .* 'green'"):
        X, _ = recipe.matrix(frame.with_columns(colour=pl.Series(["green", "red"])))
    assert X[:, 2:].tolist() == [[0.5], [1]]  # half of the rows that the recipe was learned from are red
    assert recipe.matrix(frame.with_columns(colour=pl.lit(None)))[0][:, 2:].tolist() == [[0.5], [0.5]]


@pytest.mark.parametrize(("change", "parts"), [
    ({"age": ["1", "old"]},
     ["must hold numbers", "texts ('old' in row 1)", "column 'age'", "fit again with this table"]),
    ({"flag": [1, 5]}, ["must hold truth values", "numbers", "column 'flag'"]),
    ({"age": [date(2020, 1, 1)] * 2}, ["must hold numbers", "dates", "column 'age'"]),
    ({"age": [1.0, math.inf]}, ["got inf", "column 'age', row 1"]), ({"when": [1, 2]}, ["must hold dates", "numbers"]),
    ({"colour": [date(2020, 1, 1)] * 2}, ["must hold texts", "dates", "column 'colour'"]),
    ({"y": ["no", "maybe"]}, ["class 'maybe'", "column 'y', row 1", "There are: 'no', 'yes'"]),
    ({"y": [0, 1]}, ["class '0.0'"]), ({"y": [None, None]}, ["target is missing in all rows"]),
    ({"u": [None, None]}, ["user is missing in all rows", "column 'u'"]),
])
def test_other_tables_that_are_refused(change, parts):
    frame = pl.DataFrame({"u": ["a", "b"] * 2, "age": [1, 5, 2, 3], "colour": ["r", "b"] * 2, "y": ["no", "yes"] * 2,
                          "when": [date(2020, 1, 1 + i) for i in range(4)], "flag": [True, False] * 2})
    recipe = Recipe.learn(frame, user="u", target="y")
    new = frame.head(2)
    assert recipe.encode(new).n_samples == 2
    assert recipe.encode(new.with_columns(pl.col("flag").cast(pl.Int8))).features[:, -1].tolist() == [1, 0]
    with raises(*parts):
        recipe.encode(new.with_columns(**{name: pl.Series(values) for name, values in change.items()}))
    for name in frame.columns:
        with raises(f"There is no column '{name}'"):
            recipe.encode(new.drop(name))
    with raises("no rows"):
        recipe.matrix(new.head(0))


def test_levels_and_classes_that_are_numbers_elsewhere(tmp_path):
    recipe, _ = learned(tmp_path, "c,x,y\n1,1,01\n2,2,2\n3+,3,01\n1,4,2\n2,5,2\n3+,7,01\n", target="y")
    assert recipe.feature_names == ("c=1", "c=2", "c=3+", "x")
    assert recipe.class_values == ("01", "2")
    new = read_table(written(tmp_path, "c,x,y\n2,1,2\n1,2,2\n"))
    assert new["c"].dtype == new["y"].dtype == pl.Int64
    assert recipe.encode(new).features[:, :3].tolist() == [[0, 1, 0], [1, 0, 0]]
    assert recipe.encode(new).targets.tolist() == [1, 1]


def test_json_round_trip(tmp_path):
    frame = pl.DataFrame({"u": ["a", "b", "a", "b"], "x": [0.1, 0.2, None, 1 / 3], "c": ["é", "f"] * 2,
                          "y": [1, 2, 2, 1],
                          "when": ["2020-01-01T00:00:00.000001", "2021-01-01", "2020-06-01", "2022-01-01"]})
    recipe = Recipe.learn(frame, user="u", target="y")
    back = Recipe.from_json(json.loads(json.dumps(recipe.to_json())))
    assert back == recipe
    assert isinstance(back.columns[0], Column)
    assert back.encode(frame).features.tobytes() == recipe.encode(frame).features.tobytes()
    assert Recipe.from_json({**recipe.to_json(), "notes": ["other"]}) != recipe
    for wrong in ({}, {**recipe.to_json(), "more": 1}, {**recipe.to_json(), "columns": [{"name": "x"}]}):
        with raises("no recipe", "to_json"):
            Recipe.from_json(wrong)


# ---- any bytes: the numbers of a slow reading, or a refusal

MARKS = {"", "na", "n/a", "nan", "null", "?", "-", "#n/a", "<na>"}
NUMBER = re.compile(r"[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|inf|infinity)", re.IGNORECASE)
COMMA = re.compile(r"[+-]?([0-9]+|[0-9]*,[0-9]+|[0-9]{1,3}(\.[0-9]{3})+(,[0-9]+)?)([eE][+-]?[0-9]+)?")


def slow_text(raw):
    """The text of a file, or None."""
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return raw.decode("utf-16", "replace")
    if b"\0" in raw:
        return raw.decode("utf-16-le" if raw[1::2].count(0) > raw[::2].count(0) else "utf-16-be", "replace")
    for encoding in ("utf-8", "cp1252"):
        try:
            return raw.decode(encoding)
        except UnicodeError:
            continue
    return None


def slow_table(raw):
    """Header, columns of texts and None, and the separator, read with the csv module line by line."""
    text = slow_text(raw).lstrip("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    separators = ",;\t|"
    if re.match(r"(?i)sep=.\n", text):
        separators, text = text[4], text[6:]
    options = []
    for separator in separators:
        rows = [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=separator) if row]
        if len({len(row) for row in rows}) == 1:
            options.append((len(rows[0]), separator, rows))
    options = [option for option in options if option[0] > 1] or options[:1]
    (_, separator, rows), = options
    header = [name.strip(" \t\n") or f"column {j}" for j, name in enumerate(rows[0], 1)]
    cells = [[cell.strip(" \t") for cell in column] for column in zip(*rows[1:], strict=True)]
    return header, [[None if c.lower() in MARKS else c for c in column] for column in cells], separator


def slow_numbers(cells, separator):
    """Numbers and None, or None if the cells are no numbers."""
    given = [c for c in cells if c is not None]
    if all(NUMBER.fullmatch(c) for c in given):
        return [None if c is None else float(c) for c in cells]
    if separator != "," and all(COMMA.fullmatch(c) for c in given):
        return [None if c is None else float(c.replace(".", "").replace(",", ".")) for c in cells]
    return None


def slow_columns(name, cells, separator):
    """The encoded columns by name."""
    given, numbers = {c for c in cells if c is not None}, slow_numbers(cells, separator)
    if numbers is None and {c.lower() for c in given} <= {"true", "false"}:
        numbers = [None if c is None else float(c.lower() == "true") for c in cells]
    gone = [c is None for c in cells]
    extra = {f"{name} missing": gone} if sum(gone) > len(gone) / 100 else {}
    if numbers is not None:
        known = [v for v in numbers if v is not None]
        mean = math.fsum(known) / len(known) if known else 0.0
        return {name: [mean if v is None else v for v in numbers], **extra} if len(set(known)) > 1 else {}
    if all(re.match(r"\d{4}-\d\d-\d\d", c) for c in given):
        times = [None if c is None else datetime.fromisoformat(c).replace(tzinfo=None) for c in cells]
        known = [t for t in times if t is not None]
        days = [None if t is None else (t - min(known)) / timedelta(days=1) for t in times]
        mean = math.fsum(d for d in days if d is not None) / len(known)
        return {f"{name} (days)": [mean if d is None else d for d in days], **extra} if len(set(known)) > 1 else {}
    if len(given) == 1:
        return {}
    if len(given) == 2:
        one = [None if c is None else c == max(given) for c in cells]
        mean = sum(c is True for c in one) / (len(one) - sum(gone))
        return {f"{name}={max(given)}": [mean if c is None else c for c in one], **extra}
    return {**{f"{name}={level}": [c == level for c in cells] for level in sorted(given)}, **extra}


def read_both_ways(path, raw, must_work=False):
    """True if the table is read, with the numbers of the slow reading; False if it is refused."""
    path.write_bytes(raw)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CoterieWarning)
        try:
            frame = read_table(path)
            user, target = frame.columns[0], frame.columns[-1]
            recipe = Recipe.learn(frame, user=user, target=target if target != user else None)
            users, (X, names) = recipe.encode(frame), recipe.matrix(frame)
        except InvalidInput as error:
            if must_work:
                raise AssertionError("a good table is refused") from error
            users = None
    assert path.read_bytes() == raw
    if users is None:
        return False
    assert np.isfinite(users.features).all()
    assert np.isfinite(users.targets).all()
    header, columns, separator = slow_table(raw)
    assert frame.columns == header
    kinds = {str: str, int: int, bool: lambda c: c.lower() == "true",
             float: lambda c: slow_numbers([c], separator)[0]}
    assert names == [kinds[type(names[0])](c) for c in columns[0]]
    counting = " ".join(note for note in recipe.notes if "names the rows" in note)
    expected = {}
    kept = [c is not None for c in columns[-1]]
    for name, cells in list(zip(header, columns, strict=True))[1:-1]:
        if repr(name) in counting:
            assert len({*slow_numbers(cells, separator)}) == len(cells)
            continue
        used = [c for c, keep in zip(cells, kept, strict=True) if keep]
        expected.update(slow_columns(name, used, separator))
    assert list(recipe.feature_names) == list(expected)
    for j, values in enumerate(expected.values()):
        np.testing.assert_allclose(X[kept, j], np.array(values, dtype=float), rtol=1e-12, atol=1e-300)
    targets = slow_numbers(columns[-1], separator)
    y = [None if c is None else (recipe.classes.index(next(k for k in recipe.classes if k.lower() == c.lower()
                                                          or (targets and NUMBER.fullmatch(k) and float(k) == v)))
                                 if recipe.classes else v)
         for c, v in zip(columns[-1], targets or columns[-1], strict=True)]
    order = sorted(users.names) if len({type(n) for n in names}) == 1 else users.names
    assert list(users.names) == list(order)
    rows = [i for name in users.names for i in range(len(y)) if names[i] == name and kept[i]]
    assert users.targets.tolist() == [y[i] for i in rows]
    return True


numbers = st.one_of(st.integers(-10**6, 10**6), st.floats(-1e9, 1e9, allow_subnormal=False), st.floats(0, 1))
words = st.sampled_from(["red", "blue", "a b", 'say "hi"', "x,y", "p;q", "t|u", "two\nlines", "🦊", "שלום", "e\u0301",
                         "<script>", "'", "#1", "O'Neil"])


@st.composite
def tables(draw):
    """Rows of a table with a user, numbers, flags, levels and a target, some cells missing."""
    n = draw(st.integers(4, 12))
    kinds = draw(st.lists(st.sampled_from(["number", "flag", "level", "constant", "empty", "date"]), max_size=3))
    level = draw(st.lists(words, min_size=2, max_size=3 if n > 6 else 2, unique=True))
    makers = {"number": numbers, "flag": st.booleans(), "level": st.sampled_from(level), "constant": st.just("k"),
              "empty": st.just(""), "date": st.dates(date(1900, 1, 1), date(2100, 1, 1)).map(str)}
    columns = [draw(st.lists(st.sampled_from(["u1", *level, "007"]), min_size=n, max_size=n)),
               [0.25, 0.5, *draw(st.lists(numbers, min_size=n - 2, max_size=n - 2))]]
    for kind in kinds:
        cells = draw(st.lists(makers[kind], min_size=n, max_size=n))
        gap = draw(st.integers(0, 2 * n))
        columns.append([draw(st.sampled_from(["", "NA", "?"])) if i == gap else c for i, c in enumerate(cells)])
    columns.append(["no", "yes", *draw(st.lists(st.sampled_from(["no", "yes"]), min_size=n - 2, max_size=n - 2))])
    names = ["who", "first", *(f"c{j} {kind}" for j, kind in enumerate(kinds)), "y"]
    return [names, *map(list, zip(*columns, strict=True))]


@st.composite
def files(draw):
    """A table as bytes, in one of the ways programs write them."""
    out = io.StringIO(newline="")
    csv.writer(out, delimiter=draw(st.sampled_from(",;\t|")),
               lineterminator=draw(st.sampled_from(["\n", "\r\n", "\n\n"])),
               quoting=draw(st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC]))
               ).writerows(draw(tables()))
    return out.getvalue().encode(draw(st.sampled_from(["utf-8", "utf-8", "utf-8-sig", "utf-16"])))


def damage(random, raw):
    """A few bytes replaced, put in, taken out or repeated."""
    data = bytearray(raw)
    numbers = [b"1", b"0", b"-", b".", b"5", b" ", b"e1", b"E2", b"+", b",", b"9" * 9]
    pieces = [b",", b";", b"\t", b"|", b'"', b"\n", b"\r", b"\0", b"NA", b"\xff", b"\xe9", b"inf", b"nan", b"9" * 25,
              b"1e308", b"true", b"2020-01-01", b"\xef\xbb\xbf", b"sep=;\n", b"_", data[:random.randint(0, 30)]]
    for _ in range(random.randint(1, 3)):
        digits = [at for at, byte in enumerate(data) if 48 <= byte < 58]
        if random.random() < 0.2 or not digits:
            at = random.randint(0, len(data))
            data[at:at + random.choice([0, 0, 1, 5])] = random.choice(pieces)
        else:
            at = random.choice(digits)
            data[at:at + random.choice([0, 1])] = random.choice(numbers)
    return bytes(data)


@few
@given(files())
def test_any_table_is_read_right(tmp_path, raw):
    read_both_ways(tmp_path / "f.csv", raw, must_work=True)


@few
@given(files(), st.randoms(use_true_random=False))
def test_damaged_files_are_read_right_or_refused(tmp_path, raw, random):
    read_both_ways(tmp_path / "f.csv", damage(random, raw))


@few
@given(st.one_of(st.binary(max_size=60), st.text(max_size=40).map(str.encode),
                 st.text('a1,;\t|"\n\r -.e', max_size=40).map(str.encode)))
def test_any_bytes_are_read_right_or_refused(tmp_path, raw):
    read_both_ways(tmp_path / "f.csv", raw)
    if not raw.startswith(b"PAR1"):
        with raises("cannot be read"):
            read_table(written(tmp_path, raw, "f.parquet"))


@pytest.mark.slow
@many
@given(files(), st.randoms(use_true_random=False), st.sampled_from([True, True, False]))
def test_many_files_are_read_right_or_refused(tmp_path, raw, random, damaged):
    read_both_ways(tmp_path / "f.csv", damage(random, raw) if damaged else raw)
