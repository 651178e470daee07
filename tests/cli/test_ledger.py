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
