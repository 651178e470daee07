"""`coterie federate` in this process: its folder is a run folder, and a finished run in it is kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import coterie as ct


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Six users of two groups."""
    rng = np.random.default_rng(0)
    who, x = np.arange(60) // 10, rng.normal(size=60)
    y = np.where(who % 2, 1.0, -1.0) * 2 * x + 0.1 * rng.normal(size=60)
    monkeypatch.chdir(tmp_path)
    pl.DataFrame({"who": [f"u{i}" for i in who], "x": x, "y": y}).write_csv("data.csv")
    return "data.csv"


def federate(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "coterie", "federate", *words], capture_output=True, text=True,
                          timeout=120)


def test_the_folder_is_a_run_that_predicts(table):
    done = federate(table, "--user", "who", "--target", "y", "--lam", "0.05", "--out", "run")
    assert done.returncode == 0, done.stderr
    run = ct.load_run("run")
    frame = pl.read_csv(table)
    predictions = run.predict(table)
    assert predictions["known"].to_list() == [1] * 60
    assert np.corrcoef(predictions["prediction"], frame["y"])[0, 1] > 0.9
    with pytest.raises(ct.InvalidInput, match="no model for an unknown user"):
        run.predict(frame.with_columns(who=pl.lit("nobody")))
    assert "A federation of 6 users" in run.report("page.html").read_text()


@pytest.mark.slow
def test_a_finished_run_is_replaced_only_when_asked(table):
    words = [table, "--user", "who", "--target", "y", "--out", "run", "--lam"]
    assert federate(*words, "0.05").returncode == 0
    before = Path("run/run.json").read_bytes()
    for lam in ("0.05", "0.1"):
        done = federate(*words, lam)
        assert done.returncode == 2
        assert "run holds a finished run" in done.stderr
        assert "--overwrite" in done.stderr
        assert Path("run/run.json").read_bytes() == before
    done = federate(*words, "0.1", "--overwrite")
    assert done.returncode == 0, done.stderr
    assert ct.load_run("run").lam == 0.1


@pytest.mark.slow
def test_folders_of_others_are_left_alone(table):
    Path("run").mkdir()
    for name in ("run.json", "notes.txt"):
        Path("run", name).write_text("{}")
        done = federate(table, "--user", "who", "--target", "y", "--out", "run", "--overwrite")
        assert done.returncode == 2
        assert "holds other files" in done.stderr
    assert {file.name for file in Path("run").iterdir()} == {"run.json", "notes.txt"}


def test_without_lam_it_writes_what_fit_writes(table):
    done = federate(table, "--user", "who", "--target", "y")
    assert done.returncode == 0, done.stderr
    run, one = ct.load_run("run"), ct.fit_table(table, user="who", target="y")
    np.testing.assert_array_equal(run.labels, one.labels)
    np.testing.assert_allclose(run.coefficients, one.coefficients, atol=1e-6)
    assert run.kind == one.kind
    assert run.certify().holds  # from the file of the run
    assert run.info["settings"]["data"].endswith(table)
    for sentence in (run.info["headline"]["found"], run.info["headline"]["better"]):
        assert sentence in done.stdout
    page = run.report("page.html").read_text()
    assert f"6 users took part in {run.info['n_rounds']} rounds" in page
    assert "coterie federate" in page
    refused = federate(table, "--user", "who", "--target", "y", "--out", "other", "--algorithm", "newton")
    assert refused.returncode == 2
    assert "algorithm is for a given lam, and lam is auto" in refused.stderr
    assert not Path("other").exists()
