"""`coterie fit` and what goes on from its folder, as a user runs them: from any table to numbers that can be redone."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, event, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from support.browser import NASTY, Tab

import coterie
from coterie.base.storage import plain_cell, unpack
from coterie.cli import main
from coterie.output import runs

SMALL = ("--n-lams", "4")
NAMES = [NASTY, "a,b", 'say "hi"', "two\nlines", "😀", "=1+1", "O'Brien", "Zoë"]
KINDS = ("binary", "classes", "regression", "counts", "points", "rows")
FILES = {"run.json", "models.csv", "models.parquet", "clusters.csv", "path.csv", "path.parquet", "report.html",
         "report.json", "solution.coterie"}


class Done(NamedTuple):
    code: int
    out: str
    err: str


def run(*arguments: object) -> Done:
    """The command in this process; anything but an exit is an error of the test."""
    out, err, before, code = io.StringIO(), io.StringIO(), signal.getsignal(signal.SIGINT), -1
    argv, sys.argv = sys.argv, ["coterie", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            try:
                main()
            except SystemExit as end:
                code = int(end.code or 0)
    finally:
        sys.argv = argv
        signal.signal(signal.SIGINT, before)
    return Done(code, out.getvalue(), err.getvalue())


def good(*arguments: object) -> str:
    done = run(*arguments)
    assert done.code == 0, done
    return done.out


def bad(*arguments: object, code: int = 2) -> str:
    done = run(*arguments)
    assert done.code == code, done
    assert "Traceback" not in done.err
    return done.err


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# ---- tables


def rows_of(kind: str, seed: int = 0) -> list[dict[str, Any]]:
    """Eight users of two groups, ten rows each; a text column and gaps for regression."""
    rng = np.random.default_rng(seed + (kind == "binary"))  # ten rows of yes and no do not always show the groups
    rows = []
    for i, name in enumerate(NAMES):
        sign = 1.0 if i % 2 else -1.0
        for j in range(1 if kind == "rows" else 10):
            a, b = rng.standard_normal(2).round(4)
            gap = kind == "regression" and j == 3
            t = sign * (2 * a - b * (not gap))
            row: dict[str, Any] = {"subject": name, "a": 100 + 5 * a, "b": b, "y": round(t + 0.1 * rng.normal(), 4)}
            if kind == "binary":
                row["y"] = "yes" if t + 0.4 * rng.logistic() > 0 else "no"
            elif kind == "classes":
                row["y"] = "high" if t > 1 else "low" if t < -1 else "mid"
            elif kind == "counts":
                row["y"] = int(rng.poisson(np.exp(0.7 * t)))
            elif kind == "regression":
                row |= {"subject": 10 + i, "b": "" if gap else b, "colour": ["red", "blue"][(i // 2 + j) % 2]}
            else:
                row = {"subject": name, "a": 100 + 5 * (a / 4 + sign), "b": b / 4 - sign}
            rows.append(row)
    return rows


def text_of(rows: list[dict[str, Any]]) -> bytes:
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue().encode()


def asked(kind: str) -> list[str]:
    return [*(["--drop", "subject"] if kind == "rows" else ["--user", "subject"]),
            *(["--target", "y"] if kind not in ("points", "rows") else []), *SMALL]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A run of every kind, made once: data.csv and run/ in a folder of its own."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            base = tmp_path_factory.mktemp(kind)
            (base / "data.csv").write_bytes(text_of(rows_of(kind)))
            done = run("fit", base / "data.csv", *asked(kind), "--out", base / "run")
            assert done.code == 0, done
            assert done.err == ""
            assert (base / "data.csv").read_bytes() == text_of(rows_of(kind))
            made[kind] = base
        return made[kind]

    return folder


@pytest.fixture
def copied(folders, tmp_path):
    """A run to do anything with: `data.csv` and `run` in the working folder."""
    def copy(kind: str) -> Path:
        shutil.copytree(folders(kind) / "run", tmp_path / "run")
        shutil.copy(folders(kind) / "data.csv", tmp_path)
        return tmp_path / "run"

    return copy


def lines(path: Path) -> list[dict[str, str]]:
    """The cells of a file, names that look like formulas without the apostrophe before them."""
    with path.open(newline="", encoding="utf-8") as file:
        return [{plain_cell(name): plain_cell(cell) for name, cell in row.items()} for row in csv.DictReader(file)]


def run_info(path: Path) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads((path / "run.json").read_text(encoding="utf-8"), parse_constant=refuse)


def comparable(folder: Path) -> dict[str, bytes]:
    """The files of a run as bytes, without the time it took."""
    plain = {**run_info(folder), "seconds": 0, "solve_seconds": 0}
    return {"run.json": json.dumps(plain).encode()} | {
        name: (folder / name).read_bytes() for name in sorted(FILES - {"run.json"})}


# ---- what a run is


def command(*arguments: object, code: str = "") -> subprocess.CompletedProcess[str]:
    """The command as a process of its own, after some Python code."""
    script = f"import os, signal, sys\n{code}\nimport coterie.cli\ncoterie.cli.main()"
    return subprocess.run([sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True,
                          timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_from_a_table_to_a_proof(folders, tmp_path):
    """Three commands of a shell, and the same bits as in any other process."""
    (tmp_path / "data.csv").write_bytes(text_of(rows_of("regression")))
    done = command("fit", "data.csv", "--user", "subject", "--target", "y", *SMALL)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for words in ("2 groups among 8 subjects", "Group 1, 4 subjects", "inferred as regression", "% less error",
                  "certified gap", "report.html"):
        assert words in done.stdout
    said = run_info(tmp_path / "run")["headline"]  # what is printed, and what the page shows, is in run.json
    for sentence in (said["found"], said["better"], said["sure"], *(each["sentence"] for each in said["groups"])):
        assert sentence in done.stdout
    assert {file.name for file in (tmp_path / "run").iterdir()} == FILES | {"average.coterie"}  # intervals of numbers
    for name in ("models.csv", "path.csv", "clusters.csv", "solution.coterie"):
        assert (tmp_path / "run" / name).read_bytes() == (folders("regression") / "run" / name).read_bytes()
    done = command("certify", "run")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Certified: no other models are better" in done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_run_json(folders, kind):
    base = folders(kind)
    info = run_info(base / "run")
    settings = info["settings"]
    assert (settings["n_lams"], settings["tol"], settings["weights"], settings["lam"]) == (4, 1e-6, "auto", "auto")
    assert settings["data"] == str(base / "data.csv")
    assert info["coterie"] == coterie.__version__
    assert info["libraries"]["numpy"] == info["numpy"] == np.__version__
    assert info["seed"] == settings["seed"] == 0
    assert info["fingerprint"] == coterie.data.files.fingerprint(base / "data.csv")
    assert (info["status"], info["n_users"], info["n_clusters"]) == ("CONVERGED", 8, 2)
    assert 0 <= info["gap"] <= 1e-6
    assert info["seconds"] > info["solve_seconds"] >= 0  # the whole run, and the chosen point of the path
    assert info["bound"] <= info["objective"] + 1e-12 * abs(info["objective"])
    assert info["task"] == settings["task"] == {"binary": "classification", "classes": "classification", "points":
                                                 "clustering", "rows": "clustering"}.get(kind, kind)
    assert (info["scores"] is None) == (kind in ("points", "rows"))
    if info["scores"]:
        better = info["scores"]["fit"] < info["scores"]["pooled"]
        assert better == (info["scores"]["metric"] != "accuracy")
        assert info["scores"]["rows"] == 16


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_agree(folders, kind):
    base = folders(kind) / "run"
    info, models, clusters, path = run_info(base), *(lines(base / f"{name}.csv") for name in (
        "models", "clusters", "path"))
    names = sorted(NAMES) if kind not in ("rows", "regression") else list(map(str, range(8))) if kind == "rows" else \
        [str(10 + i) for i in range(8)]
    assert [row["user"] for row in models] == names
    assert len(clusters) == info["n_clusters"]
    for cluster in clusters:
        members = [row for row in models if row["cluster"] == cluster["cluster"]]
        assert int(cluster["users"]) == len(members) == 4
        for row in members:
            assert {**row, "user": ""} == {"user": "", **{k: v for k, v in cluster.items() if k != "users"}}
    saved = unpack((base / "solution.coterie").read_bytes())
    assert [str(name) for name in saved["names"]] == names
    assert saved["lam"] == info["lam"]
    chosen = [row for row in path if float(row["lam"]) == info["lam"]]
    # Where groups were proposed and improved, the path may have no point with exactly these.
    assert len(chosen) == 1
    assert int(chosen[0]["n_clusters"]) in ((2,) if kind in ("points", "rows", "regression") else (2, 3))
    assert all(float(row["gap"]) <= 1e-6 and row["status"] == "CONVERGED" for row in path)
    assert int(path[-1]["n_clusters"]) == 1
    for name in ("models", "path"):
        with_types = pl.read_parquet(base / f"{name}.parquet")
        rows = lines(base / f"{name}.csv")
        assert with_types.columns == list(rows[0])
        for column in with_types:
            texts = [row[column.name] for row in rows]
            assert (column.to_list() == list(map(float, texts)) if column.dtype.is_float() else
                    list(map(str, column.to_list())) == texts)


def margins(kind: str, base: Path, rows: list[dict[str, Any]]) -> np.ndarray:
    """(n_rows, outputs) by hand: the columns of models.csv times those of the table, in its own units."""
    models = {row["user"]: row for row in lines(base / "models.csv")}
    gaps = [float(row["b"]) for row in rows if row["b"] != ""]
    predicted = []
    for row in rows:
        model = models[str(row["subject"])]
        x = {"a": float(row["a"]), "b": float(row["b"]) if row["b"] != "" else float(np.mean(gaps)), "intercept": 1.0}
        if kind == "regression":
            x |= {"b missing": float(row["b"] == ""), "colour=red": float(row["colour"] == "red")}
        suffixes = [""] if kind != "classes" else [f" [{c}]" for c in ("high", "low", "mid")]
        assert {f"{name}{end}" for name in x for end in suffixes} == set(model) - {"user", "cluster"}
        predicted.append([sum(value * float(model[name + end]) for name, value in x.items()) for end in suffixes])
    return np.array(predicted)


@pytest.mark.parametrize("kind", ["binary", "classes", "regression", "counts"])
def test_predictions_by_hand(folders, kind):
    base, rows = folders(kind), rows_of(kind)
    assert f"{len(rows)} predictions for 8 users" in good("predict", base / "run", base / "data.csv")
    info, t = lines(Path("predictions.csv")), margins(kind, base / "run", rows)
    assert [row["user"] for row in info] == [str(row["subject"]) for row in rows]
    assert {row["known"] for row in info} == {"1"}
    clusters = {row["user"]: row["cluster"] for row in lines(base / "run" / "models.csv")}
    assert [row["cluster"] for row in info] == [clusters[row["user"]] for row in info]
    if kind in ("regression", "counts"):
        mine = t[:, 0] if kind == "regression" else np.exp(t[:, 0])
        np.testing.assert_allclose([float(row["prediction"]) for row in info], mine, rtol=1e-7, atol=1e-9)
        errors = np.abs(mine - [row["y"] for row in rows])
        assert errors.mean() < (0.4 if kind == "regression" else 1.5)
        return
    classes = ["no", "yes"] if kind == "binary" else ["high", "low", "mid"]
    t = np.column_stack([np.zeros(len(t)), t]) if kind == "binary" else t
    assert [row["prediction"] for row in info] == [classes[k] for k in t.argmax(axis=1)]
    shares = np.exp(t) / np.exp(t).sum(axis=1, keepdims=True)
    for k, name in enumerate(classes):
        np.testing.assert_allclose([float(row[f"probability {name}"]) for row in info], shares[:, k], rtol=1e-6)
    assert np.mean([a["prediction"] == b["y"] for a, b in zip(info, rows, strict=True)]) > 0.8


def test_predictions_on_standard_output(folders):
    base = folders("regression")
    told = good("predict", base / "run", base / "data.csv")
    done = run("predict", base / "run", base / "data.csv", "--out", "-")
    assert done.code == 0
    assert done.out == Path("predictions.csv").read_text(encoding="utf-8")
    assert done.err == told.replace("in predictions.csv", "on standard output")
    assert run("predict", base / "run", base / "data.csv", "--out", "-", "--quiet") == (0, done.out, "")
    assert "both go to standard output" in bad("predict", base / "run", base / "data.csv", "--out", "-", "--json")


def test_predictions_can_be_wrong(folders):
    """The twin: other models give other numbers."""
    base, rows = folders("regression"), rows_of("regression")
    good("predict", base / "run", base / "data.csv")
    t = margins("regression", base / "run", [{**row, "subject": 10 + (row["subject"] - 9) % 8} for row in rows])
    assert np.abs(t[:, 0] - [float(row["prediction"]) for row in lines(Path("predictions.csv"))]).max() > 1


# ---- other tables


def test_other_tables_are_predicted(folders):
    base, rows = folders("regression"), rows_of("regression")[:6]
    good("predict", base / "run", base / "data.csv")
    expected = [row["prediction"] for row in lines(Path("predictions.csv"))[:6]]
    turned = [{"more": "x", **dict(reversed(row.items()))} for row in rows]
    Path("turned.csv").write_bytes(text_of(turned))
    good("predict", base / "run", "turned.csv", "--out", "turned_out.csv")
    assert [row["prediction"] for row in lines(Path("turned_out.csv"))] == expected
    strange = [{**rows[0], "subject": "new"}, {**rows[1], "colour": "green"}, {**rows[2], "a": ""}, *rows[3:]]
    Path("strange.csv").write_bytes(text_of(strange))
    done = run("predict", base / "run", "strange.csv", "--out", "strange.parquet")
    assert done.code == 0
    assert "'green'" in done.err
    assert "1 of these users is not in the run: it gets the pooled model." in done.out
    info = pl.read_parquet("strange.parquet")
    # With a text among them all names are texts; 10 is still user 10.
    assert info["user"].to_list() == ["new", "10", "10", "10", "10", "10"]
    assert info["known"].to_list() == [0, 1, 1, 1, 1, 1]
    assert info["cluster"].to_list() == [None, 0, 0, 0, 0, 0]
    assert info["prediction"].to_list()[3:] == [float(text) for text in expected[3:]]
    # A stranger has the model of everyone, an unseen level and a gap the mean of the table learned from.
    model = next(row for row in lines(base / "run" / "models.csv") if row["user"] == "10")
    red = np.mean([row["colour"] == "red" for row in rows_of("regression")]) - (rows[1]["colour"] == "red")
    assert info["prediction"][1] == pytest.approx(float(expected[1]) + red * float(model["colour=red"]))
    mean = np.mean([row["a"] for row in rows_of("regression")])
    assert info["prediction"][2] == pytest.approx(float(expected[2]) + (mean - rows[2]["a"]) * float(model["a"]))
    assert np.isfinite(info["prediction"].to_numpy()).all()


def test_predictions_stand_beside_the_table_and_are_scored(folders):
    base, rows = folders("regression"), rows_of("regression")
    said = good("predict", base / "run", base / "data.csv")
    info = lines(Path("predictions.csv"))
    assert list(info[0]) == [*rows[0], "user", "known", "cluster", "prediction"]
    assert [float(row["y"]) for row in info] == [row["y"] for row in rows]
    assert [row["colour"] for row in info] == [row["colour"] for row in rows]
    errors: dict[str, list[float]] = {}
    for row in info:
        errors.setdefault(row["user"], []).append((float(row["y"]) - float(row["prediction"])) ** 2)
    means = {name: float(np.sqrt(np.mean(values))) for name, values in errors.items()}
    worst = max(means, key=lambda name: means[name])
    assert f"RMSE on 80 rows with a target: {np.mean(list(means.values())):.4g}, mean over 8 users; worst " \
        f"{means[worst]:.4g} (user {worst}). These are the rows of the fit" in said
    good("predict", base / "run", base / "data.csv", "--only-predictions", "--out", "bare.csv")
    assert list(lines(Path("bare.csv"))[0]) == ["user", "known", "cluster", "prediction"]
    # Rows without user get the pooled model; without target there is no score; names that are taken are kept.
    other = [{**row, "subject": "" if i == 3 else row["subject"], "prediction": i, "user": "x"}
             for i, row in enumerate(rows[:6])]
    Path("other.csv").write_bytes(text_of([{k: v for k, v in row.items() if k != "y"} for row in other]))
    done = run("predict", base / "run", "other.csv", "--out", "other.parquet")
    assert done.code == 0
    assert "1 of 6 rows have no user" in done.err
    assert "RMSE" not in done.out
    frame = pl.read_parquet("other.parquet")
    assert frame["prediction"].to_list() == list(range(6))
    assert frame["coterie prediction"][:3].to_list() == [float(row["prediction"]) for row in info[:3]]
    assert frame["coterie user"].to_list() == ["10", "10", "10", None, "10", "10"]
    assert frame["known"].to_list() == [1, 1, 1, 0, 1, 1]


def test_new_classes_are_predicted_and_not_scored(folders):
    base, rows = folders("binary"), rows_of("binary")[:4]
    Path("new.csv").write_bytes(text_of([*rows[:3], {**rows[3], "y": "maybe"}]))
    done = run("predict", base / "run", "new.csv")
    assert done.code == 0
    line = text_of(rows[:3]).count(b"\n") + 1  # a name may have several lines
    assert f"not scored: The class 'maybe' is not among those learned (column 'y', line {line} of new.csv)" in done.err
    Path("new.csv").write_bytes(text_of(rows))
    said = good("predict", base / "run", "new.csv")
    assert re.search(r"accuracy on 4 rows with a target: \d+\.\d%\.\n", said)


@pytest.mark.parametrize(("change", "parts"), [
    (lambda rows: [{k: v for k, v in row.items() if k != "a"} for row in rows], ["no column 'a'", "There are"]),
    (lambda rows: [{k: v for k, v in row.items() if k != "subject"} for row in rows], ["no column 'subject'"]),
    (lambda rows: [{**row, "a": "tall"} for row in rows], ["must hold numbers", "'tall'", "column 'a'"]),
    (lambda rows: [{**row, "a": "inf"} if i == 2 else row for i, row in enumerate(rows)],
     ["got inf", "column 'a', line 4 of other.csv"]),
])
def test_other_tables_that_are_refused(folders, change, parts):
    base = folders("regression")
    Path("other.csv").write_bytes(text_of(change(rows_of("regression"))))
    assert re.search("(?s)" + ".*".join(map(re.escape, parts)), bad("predict", base / "run", "other.csv"))
    assert not Path("predictions.csv").exists()


def test_a_table_is_never_written_over(copied):
    copied("regression")
    before = Path("data.csv").read_bytes()
    assert "is the table itself" in bad("predict", "run", "data.csv", "--out", "../" + Path.cwd().name + "/data.csv")
    assert "in the folder for the results" in bad("fit", "run/models.csv", "--user", "user", "--out", "run")
    assert Path("data.csv").read_bytes() == before
    good("predict", "run", "data.csv", "--out", "new/folder/p.csv")
    assert "cannot be written as .xlsx" in bad("predict", "run", "data.csv", "--out", "p.xlsx")


def test_points_of_another_table_go_to_the_nearest_cluster(folders):
    base, rows = folders("rows"), rows_of("rows")
    good("predict", base / "run", base / "data.csv")
    first = lines(Path("predictions.csv"))
    assert [row["cluster"] for row in first] == ["0", "1"] * 4
    assert {row["known"] for row in first} == {"1"}
    Path("more.csv").write_bytes(text_of(rows[1:4]))
    assert "the model of the nearest group" in good("predict", base / "run", "more.csv")
    assert [(row["cluster"], row["known"]) for row in lines(Path("predictions.csv"))] == [("1", "0"), ("0", "0"),
                                                                                         ("1", "0")]


# ---- names


def fitted_frame(frame: pl.DataFrame, *more: str) -> list[dict[str, str]]:
    """A run of a frame through Parquet; certified; and its models."""
    frame.write_parquet("data.parquet")
    good("fit", "data.parquet", "--user", "u", "--target", "y", "--holdout", "0", "--n-lams", "2", *more)
    assert json.loads(good("certify", "run", "--json"))["certified"]
    good("predict", "run", "data.parquet")
    assert {row["coterie known" if "known" in frame.columns else "known"]
            for row in lines(Path("predictions.csv"))} == {"1"}
    return lines(Path("run/models.csv"))


@pytest.mark.parametrize(("names", "texts"), [
    ([date(2020, 5, 17), date(2021, 1, 2)], ["2020-05-17", "2021-01-02"]), ([True, False], ["False", "True"]),
    ([2.0, 10.0], ["2.0", "10.0"]), ([-5, 2**53 - 1], ["-5", str(2**53 - 1)]), (["1", "01"], ["01", "1"]),
    (["a\r\nb", "a\nb"], ["a\nb", "a\r\nb"]), ([" a", "a"], [" a", "a"]), (["é", "e\u0301"], ["e\u0301", "é"]),
])
def test_any_names_of_users(names, texts):
    frame = pl.DataFrame({"u": names * 6, "x": np.arange(12.0) % 5, "y": np.arange(12.0) * np.tile([1.5, -1.5], 6)})
    assert [row["user"] for row in fitted_frame(frame)] == texts


def test_names_of_another_type_are_the_same_users(folders):
    base, rows = folders("regression"), rows_of("regression")
    good("predict", base / "run", base / "data.csv")
    expected = [float(row["prediction"]) for row in lines(Path("predictions.csv"))]
    frame = pl.read_csv(base / "data.csv")
    for kind in (pl.String, pl.Float64, pl.Int16):
        frame.with_columns(pl.col("subject").cast(pl.Int64).cast(kind)).write_parquet("other.parquet")
        good("predict", base / "run", "other.parquet", "--out", "out.parquet")
        assert pl.read_parquet("out.parquet")["prediction"].to_list() == expected
    assert len(rows) == len(expected)


def test_columns_may_be_called_anything():
    """Even as the columns that the results have of their own."""
    rng = np.random.default_rng(0)
    named = ["user", "cluster", "users", "intercept", "intercept_", "a,b", "known", '"', "lam"]
    frame = pl.DataFrame({"u": ["p", "q", "r"] * 10, **{name: rng.standard_normal(30) for name in named}})
    frame = frame.with_columns(y=sum(k * frame[name] for k, name in enumerate(named)))
    models = fitted_frame(frame, "--lam", "1000", "--weights", "unit", "--ridge", "1e-9")
    assert list(models[0]) == ["user", "cluster", "user_", "cluster_", "users_", "intercept", "intercept_", "a,b",
                               "known", '"', "lam", "intercept__"]
    np.testing.assert_allclose([float(text) for text in list(models[0].values())[2:]], [*range(9), 0], atol=1e-5)
    assert list(lines(Path("run/clusters.csv"))[0]) == ["cluster", "users", *list(models[0])[2:]]


def test_numbers_far_from_zero_are_proven():
    rng = np.random.default_rng(0)
    x = rng.standard_normal(40)
    frame = pl.DataFrame({"u": ["p", "q"] * 20, "x": 1e8 + x, "y": 1e9 + 3 * x + 0.1 * rng.standard_normal(40)})
    models = fitted_frame(frame)
    assert float(models[0]["x"]) == pytest.approx(3, abs=0.1)


# ---- proofs


def change(path: Path, line: int, column: int, to: Any) -> None:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    rows[line][column] = str(to(rows[line][column]))
    path.write_bytes(runs.table(rows[0], rows[1:]))


@pytest.mark.parametrize("kind", KINDS)
def test_every_run_is_proven_again(folders, kind):
    base = folders(kind)
    assert "Certified: no other models are better" in good("certify", base / "run")
    info = json.loads(good("certify", base / "run", base / "data.csv", "--json"))
    assert info["certified"]
    assert info["same_data"]
    assert info["same_claims"]
    assert info["n_clusters"] == 2
    assert info["objective"] == pytest.approx(run_info(base / "run")["objective"], rel=1e-9)


def test_changed_models_are_not_proven(copied):
    base = copied("regression")
    change(base / "models.csv", 1, 2, lambda text: text)  # nothing, to begin with
    good("certify", "run", "data.csv")
    change(base / "models.csv", 1, 2, lambda text: float(text) * 1.01)
    done = run("certify", "run", "data.csv")
    assert done.code == 1
    assert "Not certified" in done.out
    info = run("certify", "run", "data.csv", "--json")
    assert not json.loads(info.out)["certified"]
    for to in ("x", "nan", ""):
        change(base / "models.csv", 1, 2, lambda _, to=to: to)
        assert "models" in bad("certify", "run", "data.csv")
    (base / "models.csv").unlink()
    assert "models.csv" in bad("certify", "run", "data.csv")


def test_models_under_other_names_are_not_proven(copied):
    base = copied("regression")
    rows_of_file = (base / "models.csv").read_text().splitlines()
    first, *rest = rows_of_file
    (base / "models.csv").write_text("\n".join([first, *rest[::-1]]) + "\n")  # the order of lines says nothing
    good("certify", "run", "data.csv")
    (base / "models.csv").write_text("\n".join([*rows_of_file, rows_of_file[-1]]) + "\n")
    assert "each once" in bad("certify", "run", "data.csv")
    names = first.split(",")
    (base / "models.csv").write_text("\n".join([",".join([*names[:2], names[3], names[2], *names[4:]]), *rest]) + "\n")
    assert f"column '{names[3]}'" in bad("certify", "run", "data.csv")
    (base / "models.csv").write_text("\n".join(rows_of_file) + "\n")
    change(base / "models.csv", 1, 1, lambda text: 1 - int(text))  # a user in the other cluster, by its label only
    done = run("certify", "run", "data.csv")
    assert done.code == 1
    assert "groups differ from those in run.json" in done.out


def test_another_table_is_not_proven(copied):
    copied("regression")
    rows = rows_of("regression")
    Path("data.csv").write_bytes(text_of([{**row, "y": row["y"] + (i == 3)} for i, row in enumerate(rows)]))
    done = run("certify", "run", "data.csv")
    assert done.code == 1
    assert "differs from the file of the run" in done.out
    Path("data.csv").write_bytes(text_of(rows[10:]))
    assert "other users than the run" in bad("certify", "run", "data.csv")
    Path("data.csv").unlink()
    assert "data.csv" in bad("certify", "run", "data.csv")
    # The same rows, written otherwise: proven, and said.
    Path("data.csv").write_bytes(text_of(rows).replace(b"\n", b"\r\n"))
    done = run("certify", "run", "data.csv", "--json")
    assert (done.code, json.loads(done.out)["same_data"]) == (0, False)


@pytest.mark.parametrize(("keys", "value", "code"), [
    (["lam"], 10.0, 1), (["n_clusters"], 3, 1), (["settings", "ridge"], 0.1, 1),
    (["settings", "standardize"], False, 1), (["settings", "loss"], "poisson", 2),
    (["lam"], "x", 2), (["lam"], None, 2), (["settings"], None, 2),
    (["settings", "tol"], "small", 2), (["recipe", "columns"], [], 2), (["recipe", "user"], 3, 2), (["recipe"], 7, 2),
    (["units", "mean"], [0.0], 2), (["units", "task"], "magic", 2), (["units"], {}, 2), (["fingerprint"], None, 2),
    (["pooled"], [1.0], 2), (["settings", "data"], 4, 2), (["recipe", "task"], "counts", 2),
])
def test_a_changed_run_json_is_found(copied, keys, value, code):
    base = copied("regression")
    info = run_info(base)
    inside = info
    for key in keys[:-1]:
        inside = inside[key]
    inside[keys[-1]] = value
    (base / "run.json").write_text(json.dumps(info))
    done = run("certify", "run", "data.csv")
    assert done.code == code, done
    assert "Traceback" not in done.err


@pytest.mark.parametrize("name", ["run.json", "solution.coterie", "report.json"])
@pytest.mark.parametrize("content", [b"", b"[1]", b"{}", b"\xff\xfe", None])
def test_a_damaged_folder_ends_in_a_sentence(copied, name, content):
    base = copied("regression")
    (base / name).write_bytes(content) if content is not None else (base / name).unlink()
    for arguments in (("report", "run"),) if name == "report.json" else (("certify", "run", "data.csv"),
                                                                         ("predict", "run", "data.csv")):
        assert "coterie:" in bad(*arguments)


# ---- the other commands


def test_json_is_all_that_is_printed(copied):
    base = copied("regression")
    done = run("fit", "data.csv", *asked("regression"), "--json", "--overwrite")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out) == run_info(base)
    info = json.loads(good("predict", "run", "data.csv", "--json"))
    scores = info.pop("score_of_users")
    assert info.pop("score") == pytest.approx(np.mean(list(scores.values())))
    assert info == {"rows": 80, "users": 8, "unknown_users": 0, "out": "predictions.csv", "metric": "RMSE",
                    "scored_rows": 80, "rows_of_the_fit": True}
    rows = json.loads(good("path", "run", "--json"))
    assert [[str(cell) for cell in row.values()] for row in rows] == [
        list(row.values()) for row in lines(base / "path.csv")]
    assert all(isinstance(row["lam"], float) and isinstance(row["n_clusters"], int) for row in rows)
    done = run("path", "data.csv", *asked("regression"), "--out", "other", "--json")
    assert {"lam", "n_clusters", "gap"} <= set(json.loads(done.out)[0])


def test_quiet_commands_print_nothing(copied):
    base = copied("regression")
    before = lines(base / "models.csv")
    (base / "models.csv").unlink()
    assert run("fit", "data.csv", *asked("regression"), "--overwrite", "--quiet") == (0, "", "")
    assert lines(base / "models.csv") == before
    for arguments in (("certify", "run"), ("predict", "run", "data.csv"), ("path", "run")):
        assert run(*arguments, "--quiet") == (0, "", "")
        assert run(*arguments).out
    assert "no column 'z'" in bad("fit", "data.csv", *asked("regression"), "--features", "z", "--out", "o", "--quiet")
    assert json.loads(good("certify", "run", "--quiet", "--json"))["certified"]


def test_a_table_from_standard_input(copied):
    base = copied("regression")
    raw, coterie = Path("data.csv").read_bytes(), [sys.executable, "-m", "coterie"]
    packed = gzip.compress(raw)

    def piped(*arguments: str, content: bytes = raw) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([*coterie, *arguments], input=content, capture_output=True, timeout=120)

    done = piped("fit", "-", *asked("regression"), "--out", "other", content=packed)
    assert done.returncode == 0, done.stderr
    assert lines(Path("other/models.csv")) == lines(base / "models.csv")
    assert run_info(Path("other"))["settings"]["data"] == "-"
    assert "was not made from a file" in bad("certify", "other")
    proof = json.loads(piped("certify", "other", "-", "--json", content=packed).stdout)
    assert (proof["certified"], proof["same_data"]) == (True, True)
    assert piped("predict", "other", "-").returncode == 0
    assert len(lines(Path("predictions.csv"))) == 80
    said = piped("fit", "-", "--user", "u", "--target", "y", "--out", "bad", content=b"u,x,y\na,1,2\nb,inf,3\n").stderr
    assert b"column 'x', line 3 of standard input" in said
    flower = ("federate", "-", "--user", "u", "--target", "y", "--runtime", "flower-sim", "--out", "o")
    assert b"cannot read standard input" in piped(*flower, content=b"u,x,y\n").stderr


def test_rows_without_user_are_left_out_of_a_fit(folders):
    rows = rows_of("regression")
    Path("gaps.csv").write_bytes(text_of([{**rows[0], "subject": "", "a": 0.0}, *rows]))
    assert "1 of 81 rows have no user ('subject') and are ignored." in good("fit", "gaps.csv", *asked("regression"))
    models, expected = lines(Path("run/models.csv")), lines(folders("regression") / "run" / "models.csv")
    assert models == expected
    good("certify", "run")


def test_path_and_report(copied):
    base = copied("regression")
    shown = good("path", "run")
    assert "8 users along lam" in shown
    assert len(re.findall("CONVERGED", shown)) == 4
    done = good("path", "data.csv", "--user", "subject", "--target", "y", "--weights", "unit", "--n-lams", "3", "--out",
                "whole")
    assert "8 users along lam" in done
    path = lines(Path("whole/path.csv"))
    assert [float(path[0]["lam"]), int(path[0]["n_clusters"]), int(path[-1]["n_clusters"])] == [0.0, 8, 1]
    page = (base / "report.html").read_bytes()
    good("report", "run")
    assert (base / "report.html").read_bytes() == page
    good("report", "run", "--title", "Eight & more", "--out", "page.html")
    assert "Eight &amp; more" in Path("page.html").read_text()
    assert (base / "report.html").read_bytes() == page


def test_a_finished_run_is_replaced_only_when_asked(copied):
    base = copied("regression")
    before = comparable(base)
    for arguments in (["fit", "data.csv"], ["path", "data.csv"], ["fit", "data.csv", "--resume"]):
        said = bad(*arguments, *asked("regression"))
        assert "run holds a finished run" in said
        assert "--overwrite" in said
        assert comparable(base) == before
    good("path", "data.csv", *asked("regression"), "--overwrite")
    assert run_info(base)["settings"]["holdout"] == 0
    assert comparable(base) != before
    good("fit", "data.csv", *asked("regression"), "--overwrite")
    assert run_info(base)["settings"]["data"] == "data.csv"


def test_settings_reach_the_fit(copied):
    copied("regression")
    info = json.loads(good("fit", "data.csv", *asked("regression"), "--lam", "0.5", "--weights", "wald", "--loss",
                            "huber", "--ridge", "0.01", "--holdout", "0", "--no-standardize", "--tol", "1e-4", "--seed",
                            "7", "--features", "a, b", "--out", "other", "--json"))
    assert (info["lam"], info["seed"], info["scores"], info["units"]["loss"]) == (0.5, 7, None, "huber")
    assert (info["units"]["mean"], info["units"]["ridge"]) == ([0, 0, 0], 0.01)
    assert [column["name"] for column in info["recipe"]["columns"]] == ["a", "b"]
    assert list(lines(Path("other/models.csv"))[0]) == ["user", "cluster", "a", "b", "b missing", "intercept"]
    good("certify", "other")


# ---- refusals


PLAIN = "u,x,y\n" + "".join(f"{u},{x},{x * (1 if u == 'a' else -1) + 0.5}\n" for u in "ab" for x in range(6))


@pytest.mark.parametrize(("text", "arguments", "parts"), [
    (PLAIN, ["--target", "y"], ["--user COLUMN"]),
    (PLAIN, ["--user", "who", "--target", "y"], ["no column 'who'", "There are"]),
    (PLAIN, ["--user", "u", "--target", "Y"], ["no column 'Y'", "There are: 'u', 'x', 'y'"]),
    (PLAIN, ["--user", "u", "--target", "u"], ["'u' comes again"]),
    (PLAIN, ["--user", "u", "--target", "y", "--drop", "x"], ["At least one feature", "--features"]),
    (PLAIN, ["--user", "u", "--target", "y", "--features", "z"], ["no column 'z'"]),
    (PLAIN, ["--user", "u", "--target", "y", "--task", "magic"], ["no task 'magic'", "counts"]),
    (PLAIN, ["--user", "u", "--target", "y", "--task", "counts"], ["column 'y'"]),
    (PLAIN, ["--user", "u", "--target", "y", "--task", "clustering"], ["no target", "--drop 'y'"]),
    (PLAIN, ["--user", "u", "--task", "regression"], ["needs a target", "--target COLUMN"]),
    (PLAIN, ["--user", "u", "--target", "y", "--loss", "poisson"], ["does not fit regression", "huber"]),
    (PLAIN, ["--user", "u", "--target", "y", "--lam", "much"], ["lam must be a number", "--lam auto"]),
    (PLAIN, ["--user", "u", "--target", "y", "--lam", "-1"], ["lam must be"]),
    (PLAIN, ["--user", "u", "--target", "y", "--lam", "nan"], ["lam must be"]),
    (PLAIN, ["--user", "u", "--target", "y", "--weights", "heavy"], ["unknown weights 'heavy'", "wald"]),
    (PLAIN, ["--user", "u", "--target", "y", "--holdout", "1"], ["holdout", "0.2"]),
    (PLAIN, ["--user", "u", "--target", "y", "--tol", "0"], ["tol must be"]),
    (PLAIN, ["--user", "u", "--target", "y", "--ridge", "-1"], ["ridge must be"]),
    (PLAIN, ["--user", "u", "--target", "y", "--n-lams", "1"], ["--n-lams"]),
    (PLAIN, ["--user", "u", "--target", "y", "--seed", "-1"], ["--seed"]),
    (PLAIN, ["--user", "u", "--target", "y", "--separator", "ab"], ["must be one character"]),
    (PLAIN, ["--user", "u", "--target", "y", "--lam", "score", "--holdout", "0"], ["no rows are held out"]),
    (PLAIN, ["--user", "u", "--target", "y", "--resume"], ["no interrupted run to continue", "--resume"]),
    (PLAIN, ["--user", "u", "--target", "y", "--out", "data.csv"], ["data.csv is a file", "--out"]),
    ("", ["--user", "u"], ["The file is empty"]), ("u,x\n", ["--user", "u"], ["no rows"]),
    ("u,x,y\na,1,2\nb,2\n", ["--user", "u", "--target", "y"], ["3 fields and this record 2", "line 3"]),
    ("u,x,x\na,1,2\nb,2,3\n", ["--user", "u"], ["must be unique", "'x'"]),
    ("u,x,y\na,1,2\n", ["--user", "u", "--target", "y"], ["At least two rows"]),
    ("u,x,y\na,1,\nb,2,\nb,3,1\n", ["--user", "u", "--target", "y"], ["missing in 2 of 3 rows", "column 'y'"]),
    ("u,x,y\na,1,5\nb,2,5\n", ["--user", "u", "--target", "y"], ["one value only, '5", "column 'y'"]),
    ("u,x,y\na,1,2\n,2,3\n,4,1\n", ["--user", "u", "--target", "y"], ["user is missing in 2 of 3 rows", "'u'"]),
    ("u,x,y\na,1,2\nb,inf,3\n", ["--user", "u", "--target", "y"], ["column 'x', line 3 of data.csv"]),
    ("u,x,y\na,1,2\nb,1e200,3\n", ["--user", "u", "--target", "y"], ["column 'x'"]),
    ("u,t,y\n" + "".join(f"a,word{i},{i * i}\n" for i in range(30)), ["--user", "u", "--target", "y"],
     ["30 different texts", "column 't'", "--drop"]),
    (b"\x00\x01\x02\xff", ["--user", "u"], ["possibly binary"]),
])
def test_refusals_say_where_and_what_to_do(text, arguments, parts):
    Path("data.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    before = Path("data.csv").read_bytes()
    said = bad("fit", "data.csv", *arguments)
    assert re.search("(?s)" + ".*".join(map(re.escape, parts)), said), said
    assert Path("data.csv").read_bytes() == before
    assert {path.name for path in Path().iterdir()} <= {"data.csv"}


def test_a_file_that_is_not_there():
    for arguments in (["fit", "nothing.csv"], ["predict", "nothing", "nothing.csv"], ["certify", "nothing"],
                      ["path", "nothing"], ["report", "nothing"]):
        assert "nothing" in bad(*arguments)
    Path("empty").mkdir()
    assert "empty" in bad("fit", "empty")
    for arguments in (["path", "empty"], ["certify", "empty"], ["report", "empty"]):
        assert "empty" in bad(*arguments)


@pytest.mark.parametrize("others", [["notes.txt"], ["progress/thesis.doc"], ["run.json"], ["run.json", "progress/x"]])
def test_folders_of_others_are_left_alone(others):
    Path("data.csv").write_text(PLAIN)
    for name in others:
        Path("out", name).parent.mkdir(parents=True, exist_ok=True)
        Path("out", name).write_text("{}")
    assert "holds other files" in bad("fit", "data.csv", "--user", "u", "--target", "y", "--out", "out")
    assert {str(path.relative_to("out")) for path in Path("out").rglob("*") if path.is_file()} == set(others)


# ---- broken off


class PowerCut(BaseException):
    """Nothing gets to run after it, as after SIGKILL."""


def cut(at: int, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> bool:
    """Whether the command was cut off inside its write number `at`, half of a file written beside its place."""
    left, real = [at], Path.write_bytes

    def write(self: Path, data: bytes) -> int:
        left[0] -= 1
        if left[0] == 0:
            real(self, data[:len(data) // 2])
            raise PowerCut
        return real(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", write)
        try:
            assert run(*arguments).code == 0
        except PowerCut:
            return True
    return False


def check_complete(folder: Path) -> None:
    """Every file that is in its place is complete."""
    for file in (file for file in folder.rglob("*") if file.is_file()
                 and file.suffix != ".new" and file.name != ".lock"):
        if file.suffix == ".coterie":
            unpack(file.read_bytes())
        elif file.suffix == ".json":
            json.loads(file.read_text())
        elif file.suffix == ".parquet":
            assert len(pl.read_parquet(file)) > 0
        elif file.suffix == ".csv":
            rows = list(csv.reader(io.StringIO(file.read_text(), newline="")))
            assert {len(row) for row in rows} == {len(rows[0])}
            assert file.read_bytes().endswith(b"\n")
        else:
            assert file.read_text().rstrip().endswith("</html>")
    if (folder / "run.json").exists():
        assert FILES.issubset(file.name for file in folder.iterdir())


def test_whole_can_fail(copied):
    base = copied("regression")
    check_complete(base)
    for name in ("solution.coterie", "models.csv", "report.html"):
        content = (base / name).read_bytes()
        (base / name).write_bytes(content[:len(content) // 2])
        with pytest.raises(Exception):  # noqa: B017
            check_complete(base)
        (base / name).write_bytes(content)


FEW = ["fit", "data.csv", "--user", "subject", "--target", "y", "--n-lams", "2"]


def few() -> None:
    """A table that is solved quickly, and its run."""
    Path("data.csv").write_bytes(text_of(rows_of("regression")[:40]))


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_a_power_cut_at_any_write_loses_nothing(monkeypatch, every):
    few()
    good(*FEW, "--out", "whole")
    expected = comparable(Path("whole"))
    k, done = 1, False
    while not done:
        done = not cut(k, monkeypatch, *FEW, "--out", "cut")
        check_complete(Path("cut"))
        if not done and (Path("cut/progress/asked.coterie")).exists():
            good(*FEW, "--out", "cut", "--resume")
        elif not done:
            assert "no interrupted run to continue" in bad(*FEW, "--out", "cut", "--resume")
        if Path("cut/run.json").exists():
            assert comparable(Path("cut")) == expected
            assert not Path("cut/progress").exists()
            shutil.rmtree("cut")
        k += every
    assert k > 12


def test_a_power_cut_while_an_old_run_is_replaced(monkeypatch):
    """The folder never mixes two runs: it is the old one, or no run until it is the new one."""
    few()
    good(*FEW, "--out", "cut")
    old = comparable(Path("cut"))
    other = [*FEW, "--ridge", "0.1", "--holdout", "0", "--out", "cut", "--overwrite"]
    seen, k = set(), 1
    while cut(k, monkeypatch, *other):
        check_complete(Path("cut"))
        if Path("cut/run.json").exists():
            assert comparable(Path("cut")) == old
        seen.add(Path("cut/run.json").exists())
        k += 2
    assert seen == {True, False}
    assert run_info(Path("cut"))["settings"]["ridge"] == 0.1
    assert "progress" not in {file.name for file in Path("cut").iterdir()}


@pytest.mark.parametrize("name", ["choice-0", "choice-1", "asked"])
def test_an_interrupt_while_parts_are_removed_leaves_no_run_to_continue(monkeypatch, name):
    """Files are removed in any order: here one, and then the interrupt comes."""
    few()

    def interrupted(folder, **_):
        for file in folder.glob(f"*{name}.coterie"):
            file.unlink()
        if folder.is_dir():  # not before the run
            raise KeyboardInterrupt

    good(*FEW, "--out", "whole")
    with monkeypatch.context() as patch:
        patch.setattr("coterie.output.runs.from_table.shutil.rmtree", interrupted)
        bad(*FEW, "--out", "cut", code=130)
    assert any(Path("cut/progress").iterdir())
    assert comparable(Path("cut")) == comparable(Path("whole"))
    assert "no interrupted run to continue" in bad(*FEW, "--out", "cut", "--resume")


@pytest.mark.slow
def test_an_interrupt_in_a_destructor_is_not_lost():
    """Python drops an exception in a destructor; the command sends the interrupt again."""
    few()
    code = """
import coterie.output.runs.from_table as parts
class Dying:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        [None for _ in range(100)]
real, count = parts.write_atomically, [0]
def put(path, data):
    real(path, data)
    count[0] += 1
    if count[0] == 3:
        Dying()
    if count[0] > 3:
        import time
        time.sleep(0.2)
parts.write_atomically = put
"""
    done = command(*FEW, "--out", "cut", code=code)
    assert done.returncode == 130, done
    assert done.stderr == "Interrupted: rerun with --resume to continue.\n"
    dropped = command(*FEW, "--out", "other", code=code + """
import coterie.cli.base as base
base._unraisable = lambda failure: None
""")
    assert dropped.returncode == 0, dropped  # without the command's hook, it is lost


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_done():
    few()
    good(*FEW, "--out", "whole")
    # The signal comes while the choice for all rows is kept, and again while that without the held-out rows is.
    code = """
import coterie.output.runs.from_table as parts
real, count = parts.write_atomically, [0]
def put(path, data):
    real(path, data)
    count[0] += 1
    if count[0] == 2:
        os.kill(os.getpid(), signal.SIGINT)
parts.write_atomically = put
"""
    for more in ([], ["--resume"]):
        done = command(*FEW, "--out", "cut", *more, code=code)
        assert done.returncode == 130, done
        assert "Traceback" not in done.stderr
        assert "--resume" in done.stderr
        assert not Path("cut/run.json").exists()
    assert "other data or settings" in bad(*FEW, "--out", "cut", "--resume", "--ridge", "0.5")
    good(*FEW, "--out", "cut", "--resume")
    assert comparable(Path("cut")) == comparable(Path("whole"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_signals_at_random_moments(number):
    few()
    arguments = [*FEW[:-1], "12", "--out"]
    start = time.monotonic()
    assert command(*arguments, "whole").returncode == 0
    took = time.monotonic() - start
    rng, stopped = np.random.default_rng(0), 0
    for turn in range(20):
        if turn >= 3 and stopped > 6:
            break
        shutil.rmtree("cut", ignore_errors=True)
        for last in (False, False, False, True):
            more = ["--resume"] if Path("cut/progress/asked.coterie").exists() else []
            process = subprocess.Popen([sys.executable, "-m", "coterie", *arguments, "cut", *more],
                                       stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            if not last:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(took * rng.uniform(0.4, 1.0))
                process.send_signal(number)
            said = process.communicate(timeout=60)[1]
            if Path("cut").exists():
                check_complete(Path("cut"))
            if process.returncode == 0:
                took *= 1.0 if last else 0.7  # it ended before its signal: the machine is less busy than at first
                break
            stopped += 1
            if number == signal.SIGINT and process.returncode != -signal.SIGINT:  # else Python was still starting
                assert process.returncode == 130, said
                # Python shows an interrupt inside a destructor and goes on; the command ends soon after.
                assert said.count("Traceback") == said.count("Exception ignored")
            if Path("cut/run.json").exists() and not Path("cut/progress/asked.coterie").exists():
                break  # the signal came when the run was complete
        assert comparable(Path("cut")) == comparable(Path("whole"))
    assert stopped > 6


# ---- any table at all


CELLS = st.one_of(
    st.integers(-3, 12).map(str), st.floats(allow_nan=False, allow_infinity=False).map(repr), st.text(max_size=4),
    st.sampled_from(["", "NA", "1e150", "-1e150", "1e-300", "1e308", "inf", "nan", "true", "False", "2020-01-31", "1,5",
                     "007", "=1", '"', "😀", "\u202e", "0", "-0.0", "a b", NASTY]))
NEAT = st.one_of(st.integers(0, 3).map(str), st.floats(-5, 5).map(lambda x: f"{x:.3f}"))


@st.composite
def tables(draw: st.DrawFn) -> bytes:
    """Mostly tables that can be worked with, and every way in which they may not be."""
    def rare() -> bool:
        return draw(st.integers(0, 9)) == 9

    n, p = draw(st.integers(1, 20)), draw(st.integers(1, 4))
    header = draw(st.lists(st.text(max_size=3), min_size=p, max_size=p)) if rare() else [f"x{j}" for j in range(p)]
    people = draw(st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=4)) if rare() else list("abc")
    columns = []
    for _ in range(p + 1):
        kind = draw(st.sampled_from(["neat"] * 16 + ["constant", "empty", "huge", "any"]))
        cells = {"neat": NEAT, "constant": st.just("1"), "empty": st.just(""), "any": CELLS,
                 "huge": st.floats(-1e149, 1e149).map(repr)}[kind]
        columns.append(draw(st.lists(cells, min_size=n, max_size=n)))
    owners = draw(st.lists(st.sampled_from(people), min_size=n, max_size=n))
    rows = [["u", *header, "y"], *([who, *cells] for who, *cells in zip(owners, *columns, strict=True))]
    if rare():
        rows[draw(st.integers(0, n))].append("more")
    stream = io.StringIO(newline="")
    csv.writer(stream, delimiter=draw(st.sampled_from(",,,;\t|")), lineterminator=draw(st.sampled_from(
        ["\n", "\r\n"]))).writerows(rows)
    encoding = draw(st.sampled_from(["utf-8", "utf-8", "utf-8-sig", "utf-16", "cp1252"]))
    raw = stream.getvalue().encode(encoding, "replace")
    return raw[:draw(st.integers(0, len(raw)))] if rare() else raw


def survives(raw: bytes, more: list[str], base: Path) -> None:
    """The command says no, or all it says is a number and proven."""
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir()
    (base / "data.csv").write_bytes(raw)
    done = run("fit", base / "data.csv", "--n-lams", "2", *more, "--out", base / "run")
    event(f"exit {done.code}")
    assert done.code in (0, 1, 2), done
    assert (base / "data.csv").read_bytes() == raw
    assert "Traceback" not in done.err
    if done.code == 2:
        assert "coterie:" in done.err or "Usage" in done.err
        return
    info = run_info(base / "run")
    assert (info["status"] == "CONVERGED") == (done.code == 0)
    check_complete(base / "run")
    assert run("predict", base / "run", base / "data.csv", "--out", base / "p.csv").code == 0
    for row in lines(base / "p.csv"):
        for name, value in row.items():
            if (name == "prediction" and info["task"] in ("regression", "counts")) or name.startswith("probability"):
                assert np.isfinite(float(value)), (row, info["task"])
    if done.code == 0:
        assert run("certify", base / "run").code == 0


ASKED = st.sampled_from([["--user", "u", "--target", "y"], ["--user", "u", "--target", "y"], ["--user", "u"], [],
                         ["--user", "u", "--target", "y", "--lam", "score"],
                         ["--user", "u", "--target", "y", "--weights", "unit", "--lam", "0.1"],
                         ["--user", "u", "--target", "y", "--holdout", "0"],
                         ["--user", "u", "--target", "y", "--task", "regression"],
                         ["--user", "u", "--target", "y", "--task", "classification"],
                         ["--user", "u", "--target", "y", "--task", "counts"],
                         ["--user", "u", "--target", "y", "--ridge", "0"],
                         ["--user", "u", "--target", "y", "--no-standardize"],
                         ["--user", "u", "--target", "y", "--tol", "1e-13", "--max-groups", "2"],
                         ["--user", "u", "--target", "y", "--task", "classification", "--loss", "squared_hinge"],
                         ["--user", "u", "--target", "y", "--task", "regression", "--loss", "huber"],
                         ["--user", "u", "--weights", "gaussian"], ["--user", "u", "--loss", "huber_distance"]])
some = hypothesis_settings(max_examples=15, suppress_health_check=list(HealthCheck))


#: Hessians with entries of 1 and 1e144: as rounded they are indefinite, and once gave negative squared distances.
STEEP = b"u,x0,x1,y\na,1,1846618061393769.0,0\nc,0,0.0,0\na,0,8.636168555094444e+71,0\nc,0,0.0,1.000\n"


@some
@given(tables(), ASKED)
@example(STEEP, ["--user", "u", "--target", "y", "--no-standardize"])
def test_any_table_ends_well(tmp_path, raw, more):
    survives(raw, more, tmp_path / "any")


@pytest.mark.slow
@hypothesis_settings(some, max_examples=100)
@given(tables(), ASKED)
def test_many_tables_end_well(tmp_path, raw, more):
    survives(raw, more, tmp_path / "any")


# ---- the page


@pytest.mark.browser
def test_the_page_of_a_run_in_a_browser(folders, browser):
    tab = Tab(browser, folders("binary") / "run" / "report.html")
    assert tab.text("h1") == "y, by subject"
    assert tab.text("#answer").startswith("2 groups among 8 subjects")
    assert sorted(tab.texts("#roster tbody th")) == sorted(NAMES)
    assert tab.value("document.querySelectorAll('script[src], img').length") == 0
    assert tab.problems() == []
    tab.close()
