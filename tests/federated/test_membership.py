"""Joining and leaving a finished run: nobody else is asked."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import coterie as ct
from coterie.base.errors import Incompatible
from coterie.federated.membership import join_run, leave_run
from coterie.federated.node import load_models
from coterie.federated.runtimes.in_process import LocalNodes
from coterie.federated.sources import Table
from coterie.output.runs.save import write_run


def rows(users: list[int], n: int = 30, seed: int = 4, spread: float = 0.0) -> pl.DataFrame:
    """Users of two groups, with personal deviations if wanted."""
    rng = np.random.default_rng(seed)
    own = {user: spread * rng.normal() for user in users}
    who, x = np.repeat(users, n), rng.normal(size=n * len(users))
    slope = np.where(who % 2, 2.0, -2.0) * (spread == 0) + np.array([own[user] for user in who])
    return pl.DataFrame({"who": [f"u{i:02d}" for i in who], "x": x, "ward": rng.choice(["east", "west"], len(x)),
                         "y": slope * x + 0.3 * rng.normal(size=len(x))})


def federate(frame: pl.DataFrame, out: Path) -> ct.Run:
    frame.write_csv(out.with_suffix(".csv"))
    done = command("federate", f"{out}.csv", "--user", "who", "--target", "y", "--out", str(out))
    assert done.returncode == 0, done.stderr
    return ct.load_run(out)


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "coterie", *words], capture_output=True, text=True, timeout=200)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> ct.Run:
    return federate(rows(list(range(10))), tmp_path_factory.mktemp("run") / "run")


def nodes_of(frame: pl.DataFrame) -> LocalNodes:
    table = Table(frame=frame, user="who", target="y")
    return LocalNodes([table.take(table.names[k::2]) for k in range(min(2, len(table.names)))])


def test_newcomers_join_the_group_that_fits(run):
    frame = pl.concat([rows(list(range(10))), rows([20, 21, 22], n=8, seed=9)])
    newcomers = join_run(nodes_of(frame), run, wait=0.0)
    assert newcomers.names == ("u20", "u21", "u22")  # those of the run are not asked
    assert newcomers.groups.tolist() == [run.labels[0], run.labels[1], run.labels[0]]
    for name, group in zip(newcomers.names, newcomers.groups, strict=True):
        np.testing.assert_array_equal(newcomers.models[name], run.centres[group])
    assert newcomers.ledger.by_kind().keys() == {"join"}
    assert newcomers.ledger.total(direction="down", field="models") < 1000
    with pytest.raises(Incompatible, match="All users that are here are in"):
        join_run(nodes_of(rows(list(range(10)))), run, wait=0.0)
    with pytest.raises(ct.InvalidInput, match="no groups that a newcomer could join"):
        join_run(nodes_of(frame), replace(run, centres=None), wait=0.0)


def test_it_is_what_personalize_finds(run):
    fitted = ct.fit_table(rows(list(range(10))), user="who", target="y")
    frame = rows([20, 21], n=20, seed=9)
    joined = fitted.personalize(fitted.recipe.encode(frame))
    newcomers = join_run(nodes_of(frame), run, wait=0.0)
    assert (joined.clusters >= 0).all()
    np.testing.assert_array_equal(newcomers.groups, joined.clusters)
    np.testing.assert_allclose([newcomers.models[name] for name in newcomers.names], joined.models, atol=1e-8)


def test_personal_models_of_newcomers(tmp_path):
    fitted = ct.fit_table(rows(list(range(24)), n=12, spread=0.6), user="who", target="y", folder=tmp_path / "run")
    assert fitted.kind == "personal"
    saved = ct.load_run(tmp_path / "run")  # a run of coterie fit can be joined as well
    newcomers = join_run(nodes_of(rows([30, 31], n=12, seed=3, spread=0.6)), saved, wait=0.0)
    assert newcomers.groups.tolist() == [0, 0]
    models = np.stack([newcomers.models[name] for name in newcomers.names])
    assert np.abs(models[0] - models[1]).max() > 0.01
    assert np.abs(models - saved.centres[0]).max() < 3 * np.abs(saved.models - saved.centres[0]).max()


def test_where_everyone_is_alone_newcomers_are_too(run):
    alone = replace(run, info={**run.info, "kind": "alone"})
    newcomers = join_run(nodes_of(rows([20], n=20, seed=9)), alone, wait=0.0)
    assert newcomers.groups.tolist() == [-1]
    assert np.abs(newcomers.models["u20"] - run.centres).max(axis=1).min() > 1e-3


def test_the_command_joins(run, tmp_path):
    rows([20, 21], n=20, seed=9).write_csv(tmp_path / "new.csv")
    before = (run.folder / "run.json").read_bytes()
    done = command("federate", "join", str(run.folder), str(tmp_path / "new.csv"), "--models-dir",
                   str(tmp_path / "models"), "--out", str(tmp_path / "joined.csv"))
    assert done.returncode == 0, done.stderr
    assert "2 newcomers in" in done.stdout
    joined = pl.read_csv(tmp_path / "joined.csv")
    assert joined["user"].to_list() == ["u20", "u21"]
    assert joined["x"][1] == pytest.approx(2.0, abs=0.1)
    assert (run.folder / "run.json").read_bytes() == before
    kept = load_models(tmp_path / "models")
    done = command("predict", str(tmp_path / "models"), str(tmp_path / "new.csv"), "--out", str(tmp_path / "p.csv"))
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(pl.read_csv(tmp_path / "p.csv")["prediction"],
                               kept.predict(tmp_path / "new.csv")["prediction"])


def test_those_who_leave_are_gone(run, tmp_path):
    out = tmp_path / "rest"
    fitted = leave_run(run, ["u03", "u04"], out)
    write_run(fitted, out)
    rest = ct.load_run(out)
    frame = rows(list(range(10))).filter(~pl.col("who").is_in(["u03", "u04"]))
    again = federate(frame, tmp_path / "again")
    assert rest.names == again.names
    np.testing.assert_array_equal(rest.labels, again.labels)
    np.testing.assert_allclose(rest.coefficients, again.coefficients, atol=1e-6)
    assert rest.gap <= 1e-6
    assert rest.certify(frame).holds
    for file in (file for file in out.rglob("*") if file.is_file()):
        assert b"u03" not in file.read_bytes(), file
    third = leave_run(rest, ["u05"], out)  # and once more, in place
    assert "u05" not in third.names
    assert len(third.names) == 7


@pytest.mark.slow
def test_moments_of_those_who_stay_give_no_average(tmp_path):
    frame = rows(list(range(12)), n=16, spread=1.0).with_columns(y=pl.col("y") + 3 * (2 * pl.col("x")).cos())
    run = federate(frame, tmp_path / "run")
    assert run.average is not None  # with the rows there is one
    rest = leave_run(run, ["u03"], tmp_path / "rest")
    assert rest.average is None
    others = frame.filter(pl.col("who") != "u03")
    alike = ct.fit_table(others, user="who", target="y", settings=replace(run.settings, average="off"))
    np.testing.assert_allclose(rest.coefficients, alike.coefficients, atol=1e-6)


def test_who_cannot_leave(run, tmp_path):
    with pytest.raises(ct.InvalidInput, match="'nobody' is not in"):
        leave_run(run, ["nobody"], tmp_path / "out")
    with pytest.raises(ct.InvalidInput, match="nobody would be left"):
        leave_run(run, [str(name) for name in run.names], tmp_path / "out")
    fitted = ct.fit_table(rows([0, 1, 2]), user="who", target="y", folder=tmp_path / "fit")
    with pytest.raises(ct.InvalidInput, match="no second moments of its users"):
        leave_run(ct.load_run(tmp_path / "fit"), [str(fitted.names[0])], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_leaves(run, tmp_path):
    done = command("federate", "leave", str(run.folder), "u01", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "from the moments of the others" in done.stdout
    assert "u01" not in ct.load_run(tmp_path / "out").names
    assert "u01" in ct.load_run(run.folder).names
