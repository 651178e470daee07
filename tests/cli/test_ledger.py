"""`coterie federate log`."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.nosy import Nosy
from typer.testing import CliRunner

from coterie.cli import app
from coterie.cli.base import console
from coterie.datasets import ellipses
from coterie.federated.private.ledger import NodeLedger
from coterie.federated.private.policy import mu_of


@pytest.fixture
def folder(tmp_path):
    nosy = Nosy(ellipses(users_per_cluster=1, samples=30, seed=0).users, tmp_path / "a.npz", {"max-questions": 2})
    for k in range(4):
        try:
            nosy.ask("gradient", turn=k, model=np.full(3, float(k)))
        except PermissionError:
            assert k > 1
    with NodeLedger(tmp_path / "ledger", budget=10.0) as ledger:
        ledger.release(0, "summary", mu_of(2.0, 1e-5), lambda: b"x")
    return tmp_path / "ledger"


def test_the_log_as_tables(folder, monkeypatch):
    monkeypatch.setattr(console, "_width", 200)
    result = CliRunner().invoke(app, ["federate", "log", str(folder)])
    assert result.exit_code == 0, result.output
    assert "2 answers with 12 numbers left, 2 were refused." in result.output
    assert result.output.count("gradient") == 4
    assert "its owner allows 2 (max-questions)" in " ".join(result.output.split())
    assert "Spent at delta = 1e-05" in " ".join(result.output.split())


def test_the_log_as_json(folder):
    result = CliRunner().invoke(app, ["federate", "log", str(folder), "--json", "--refused", "--last", "1"])
    lines = json.loads(result.output)
    assert [line["round"] for line in lines["answers"]] == [3]
    assert lines["epsilon"] == [[0, pytest.approx(2.0)]]


def test_a_folder_without_a_ledger_is_refused(tmp_path):
    result = CliRunner().invoke(app, ["federate", "log", str(tmp_path)])
    assert result.exit_code != 0
    assert list(tmp_path.iterdir()) == []


def test_the_log_says_that_no_epsilon_holds_where_exact_answers_left(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(console, "_width", 200)
    said = " ".join(CliRunner().invoke(app, ["federate", "log", str(folder)]).output.split())
    assert "none holds" in said
    assert "No epsilon holds for users of whom exact answers left this node, and 2 exact answers did." in said
    as_json = CliRunner().invoke(app, ["federate", "log", str(folder), "--json"]).output
    assert json.loads(as_json)["holds"] == [[0, False]]
    with NodeLedger(tmp_path / "other", budget=10.0) as ledger:  # the twin
        ledger.release(0, "summary", mu_of(2.0, 1e-5), lambda: b"x")
    assert "holds" not in CliRunner().invoke(app, ["federate", "log", str(tmp_path / "other")]).output


# -- a dry run


@pytest.fixture
def table(tmp_path):
    rows = [f"u{k % 3},{k}.5,{'ab'[k % 2]},s{k},{k * 7 % 11}.25" for k in range(90)]
    (tmp_path / "t.csv").write_text("who,x,kind,secret,y\n" + "\n".join(rows) + "\n")
    return f'data="csv" path="{tmp_path / "t.csv"}" user="who" target="y" drop="secret"'


def test_a_dry_run_says_what_would_leave(table, tmp_path, monkeypatch):
    monkeypatch.setattr(console, "_width", 200)
    result = CliRunner().invoke(app, ["federate", "check", table])
    said = " ".join(result.output.split())
    assert result.exit_code == 0, result.output
    for words in ("90 rows of 3 users", "columns 'x', 'kind'", "left out 'secret'", "kind (a, b)", "fewer than 3 rows",
                  "none: exact answers leave", "│ moments │ 3 │", "│ release │ 0 │ there is no budget"):
        assert words in said
    assert [file.name for file in tmp_path.iterdir()] == ["t.csv"]  # nothing is written


def test_a_dry_run_knows_the_budget(table, tmp_path, monkeypatch):
    monkeypatch.setattr(console, "_width", 200)
    budget = f' budget-epsilon=4 budget-delta=1e-5 ledger-dir="{tmp_path / "l"}"'
    said = " ".join(CliRunner().invoke(app, ["federate", "check", table + budget]).output.split())
    assert "epsilon = 4 at delta = 1e-05 for a row; nothing is spent" in said
    assert "│ moments │ 0 │ the owner of the node does not allow" in said
    assert "│ release │ 3 │" in said
    with NodeLedger(tmp_path / "l", budget=10.0) as ledger:
        ledger.release("u1", "summary", mu_of(2.0, 1e-5), lambda: b"x")
    said = " ".join(CliRunner().invoke(app, ["federate", "check", table + budget]).output.split())
    assert "the user who has spent most has spent 2" in said


@pytest.mark.parametrize(("config", "complaint"), [
    (["budget-epsilom=4"], "Did you mean 'budget-epsilon'?"), (["no-such-file.toml"], "cannot be read"),
    (["user"], "cannot be read"), (['user="who"'], "has set no data"),
    (['data="csv" path="/no/such.csv" user="who"'], "no file at this path")])
def test_a_dry_run_of_a_configuration_that_cannot_be_used(config, complaint):
    result = CliRunner().invoke(app, ["federate", "check", *config])
    assert result.exit_code != 0
    assert complaint in str(result.exception)


def test_a_configuration_as_a_file(table, tmp_path):
    file = tmp_path / "node.toml"
    file.write_text(f'data = "csv"\npath = "{tmp_path / "t.csv"}"\nuser = "who"\ntarget = "y"\ndrop = "secret"\n'
                    '[args]\nfolder = "/srv"\n')
    result = CliRunner().invoke(app, ["federate", "check", str(file)])
    assert result.exit_code == 0, result.output
    assert "90 rows of 3 users" in result.output
