"""The run folder of a fit in a federation: that of `coterie fit` on the same table, written without the table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import coterie as ct
from coterie.federated import entry
from coterie.federated.runtimes.in_process import LocalNodes
from coterie.federated.session import Round
from coterie.federated.settings import Deployment
from coterie.federated.sources import Table


@pytest.fixture(scope="module")
def frame() -> pl.DataFrame:
    """Twelve users of two groups, with a category and missing cells."""
    rng = np.random.default_rng(4)
    n = 12 * 25
    who, x, ward = np.arange(n) // 25, rng.normal(size=n), rng.choice(["east", "west"], n)
    y = np.where(who % 2, 2.0, -2.0) * x + (ward == "east") + 0.3 * rng.normal(size=n)
    return pl.DataFrame({"who": [f"u{i:02d}" for i in who], "x": x, "ward": ward, "y": y,
                         "dose": [None if k % 9 == 4 else float(k % 5) for k in range(n)]})


def parts_of(frame: pl.DataFrame, parts: int = 3) -> list[Table]:
    complete = Table(frame=frame, user="who", target="y")
    return [complete.take(complete.names[k::parts]) for k in range(parts)]


def serve(frame: pl.DataFrame, out: Path, **changes: object) -> ct.Fit:
    config = {"user": "who", "target": "y", "out": str(out), **changes}
    settings = Deployment.of(config)
    lines: list[Round] = []
    nodes = LocalNodes(parts_of(frame), settings.holdout, settings.settings.seed)
    served = entry.serve(nodes, settings, lines.append)
    assert list(served.history) == lines
    entry.write(served, out, config)
    assert entry.describe(served).startswith(served.why)
    assert f"{served.n_rounds} rounds, " in entry.describe(served)
    return served


@pytest.fixture(scope="module")
def both(frame, tmp_path_factory) -> tuple[Path, Path]:
    """The folder of the table in one place, and that of three nodes."""
    folder = tmp_path_factory.mktemp("both")
    ct.fit_table(frame, user="who", target="y", folder=folder / "one")
    serve(frame, folder / "three")
    return folder / "one", folder / "three"


def test_the_folder_is_that_of_coterie_fit(both, frame):
    one, three = map(ct.load_run, both)
    assert {file.name for file in three.folder.iterdir()} - {"checkpoint", "ledger.csv"} == {
        file.name for file in one.folder.iterdir()}
    assert set(one.info) <= set(three.info)
    assert three.info["average"]["weights"] == pytest.approx(one.info["average"]["weights"], rel=1e-6)
    for name in ("kind", "task", "n_users", "n_clusters", "recipe", "notes"):
        assert one.info[name] == three.info[name], name
    assert one.n_clusters == 2
    np.testing.assert_array_equal(one.labels, three.labels)
    np.testing.assert_allclose(three.coefficients, one.coefficients, atol=1e-6)
    assert len(one.path) == len(three.path)
    np.testing.assert_allclose(three.predict(frame)["prediction"], one.predict(frame)["prediction"], atol=1e-6)
    assert three.scores["sentence"] == one.scores["sentence"]


def test_it_certifies_where_the_table_is(both, frame):
    run = ct.load_run(both[1])
    assert run.certify(frame).holds
    assert not run.certify(frame.with_columns(y=-pl.col("y"))).holds  # the twin
    with pytest.raises(ct.InvalidInput, match="The rows of this federation stayed with its users"):
        run.certify()


def test_it_says_what_was_sent(both):
    info = ct.load_run(both[1]).info
    assert info["n_rounds"] == 6  # the average is not clearly better, so that it is not made again to be scored
    assert info["participants"] == 12
    assert list(info["bytes_by_kind"]) == ["moments", "average", "certify"]
    for way in ("up", "down"):
        assert sum(sizes[way] for sizes in info["bytes_by_kind"].values()) == info[f"bytes_{way}"] > 0
    federated = json.loads((both[1] / "report.json").read_text())["federated"]
    assert [line["stage"] for line in federated["rounds"]] == ["moments", *["average"] * 4, "certify"]
    assert [line["answered"] for line in federated["rounds"]] == [12] * 6
    assert federated["kinds"] == info["bytes_by_kind"]
    assert len(federated["users"]) == 12
    assert sum(up for up, _ in federated["users"]) == info["bytes_up"]
    assert federated["sentence"].startswith("12 users took part in 6 rounds: ")
    assert "12 users took part" in (both[1] / "report.html").read_text()
    assert json.loads((both[0] / "report.json").read_text())["federated"] is None  # the twin
    assert "n_rounds" not in ct.load_run(both[0]).info


def test_a_second_start_asks_nothing_again(both, frame, monkeypatch):
    before = {name: (both[1] / name).read_bytes() for name in ("models.csv", "clusters.csv", "path.csv", "ledger.csv")}
    monkeypatch.setattr(LocalNodes, "exchange", lambda *_: pytest.fail("somebody was asked"))
    serve_again = Deployment.of({"user": "who", "target": "y", "out": str(both[1])})
    served = entry.serve(LocalNodes(parts_of(frame), 0.2), serve_again)
    entry.write(served, both[1], {"user": "who", "target": "y"})
    assert {name: (both[1] / name).read_bytes() for name in before} == before


def test_a_round_as_a_sentence():
    line = Round(0, np.nan, np.nan, 0, 0.1, "moments", 12, 11, np.nan, 2000, 30)
    assert str(line) == "round 0 (moments): 11 of 12 answered, 2,000 bytes up and 30 down"
    assert str(line._replace(stage="main", n_clusters=3, estimate=1e-3)) == (
        "round 0 (main): 11 of 12 answered, 3 groups, gap about 1e-03")
    assert str(line._replace(n_clusters=3, gap=None, estimate=None)).endswith("gap about nan")  # as JSON has it


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_a_server_that_stops_anywhere_ends_in_the_same_bits(frame, tmp_path, monkeypatch, task):
    if task == "classification":
        frame = frame.with_columns(y=pl.col("y") > 0)
    straight = serve(frame, tmp_path / "straight").n_rounds
    asked, exchange = [0], LocalNodes.exchange
    for stop in range(1, straight, max(straight // 3, 1)):
        def until(self, queries, stop=stop):
            asked[0] += 1
            if asked[0] > stop:
                raise KeyboardInterrupt
            return exchange(self, queries)

        asked[0] = 0
        monkeypatch.setattr(LocalNodes, "exchange", until)
        with pytest.raises(ct.Interrupted):
            serve(frame, tmp_path / str(stop))
        assert not (tmp_path / str(stop) / "run.json").exists()
        monkeypatch.setattr(LocalNodes, "exchange", exchange)
        config = {"user": "who", "target": "y", "out": str(tmp_path / str(stop))}
        again = entry.serve(LocalNodes(parts_of(frame), 0.2), Deployment.of(config))
        entry.write(again, tmp_path / str(stop), config)
        for name in ("models.csv", "path.csv", "ledger.csv", "solution.coterie"):
            assert (tmp_path / str(stop) / name).read_bytes() == (tmp_path / "straight" / name).read_bytes(), name
