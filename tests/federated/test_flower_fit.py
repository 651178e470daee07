"""A fit on Flower: six hospitals with tables of their own end where one table of all of them ends."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from support.grid import Nodes, someone  # noqa: F401  # a fixture of all tests
from support.nosy import write

import coterie as ct
from coterie.datasets import clustered
from coterie.federated import entry
from coterie.federated.membership import join_run, leave_run, write_newcomers
from coterie.federated.node import load_models
from coterie.federated.settings import Deployment, complete, for_nodes
from coterie.fitting.settings import Settings
from coterie.output.runs.save import write_run

flower = pytest.importorskip("coterie.federated.runtimes.cluster", reason="the extra flower is not installed",
                             exc_type=ImportError)
Cluster = flower.Cluster
pytestmark = pytest.mark.flower
EXAMPLE = Path(__file__).parents[2] / "examples" / "six_hospitals"
STORY = runpy.run_path(str(EXAMPLE / "make_tables.py"))
TABLE = {"user": "ward", "target": "days"}
RUN = {**TABLE, "average": "off"}  # two rounds


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory) -> list[Path]:
    return STORY["write_tables"](tmp_path_factory.mktemp("tables"))


@pytest.fixture(scope="module")
def together(hospitals) -> pl.DataFrame:
    """The table that nobody has."""
    return pl.concat([pl.read_csv(file) for file in hospitals])


@pytest.fixture(scope="module")
def one(together) -> ct.Fit:
    return ct.fit_table(together, user="ward", target="days")


def configs(hospitals: list[Path], folder: Path) -> list[dict[str, Any]]:
    """What the owner of each node says: wards send second moments of their eight held-out rows, too."""
    return [{"data": "csv", "path": str(file), "models-dir": str(folder / "models" / file.stem),
             "ledger-dir": str(folder / "ledgers" / file.stem), "consent": "hessians", "split-key": "public", **TABLE}
            for file in hospitals]


def serve(nodes: Nodes, out: Path, **changes: Any) -> ct.Fit:
    from coterie.federated.flower import FlowerRuntime

    config = complete({**RUN, "out": str(out), "wait": 2.0, **changes})
    runtime = FlowerRuntime(nodes, for_nodes(config), deadline=5.0, poll=0.001)
    served = entry.serve(runtime, Deployment.of(config))
    entry.write(served, out, config)
    return served


def check(out: Path, one: ct.Fit) -> ct.Run:
    """The folder has the groups and models of the fit of one table."""
    run = ct.load_run(out)
    assert run.names == one.names
    np.testing.assert_array_equal(run.labels, one.labels)
    np.testing.assert_allclose(run.coefficients, one.coefficients, atol=1e-6)
    assert run.kind == one.kind
    assert run.gap <= 1e-6
    assert run.info["n_rounds"] == 2
    assert run.info["participants"] == 30
    assert "30 users took part in 2 rounds" in (out / "report.html").read_text()
    return run


def test_six_tables_are_one_table(hospitals, one, together, tmp_path):
    serve(Nodes(configs(hospitals, tmp_path)), tmp_path / "out")
    run = check(tmp_path / "out", one)
    assert run.n_clusters == 2
    kinds = [STORY["kind_of"](STORY["HOSPITALS"].index(hospital), int(ward) - 1)
             for hospital, ward in (name.split() for name in run.names)]
    assert len(set(zip(run.labels.tolist(), kinds, strict=True))) == 2
    assert {"insurance=foreign", "insurance=student"} <= set(run.recipe.feature_names)
    assert run.certify(together).holds
    assert run.info["settings"]["data"] == ""
    with pytest.raises(ct.InvalidInput, match="stayed with its users"):
        run.certify()


def test_a_node_predicts_without_the_server(hospitals, tmp_path, one):
    nodes = configs(hospitals, tmp_path)
    del nodes[5]["models-dir"]
    grid = Nodes(nodes)
    serve(grid, tmp_path / "out")
    assert {folder.name for folder in (tmp_path / "models").iterdir()} == {file.stem for file in hospitals[:5]}
    kept = load_models(tmp_path / "models" / "altona")
    assert sorted(kept.names) == [f"altona {ward}" for ward in range(1, 6)]
    rows = pl.read_csv(hospitals[0])
    np.testing.assert_allclose(kept.predict(rows)["prediction"], one.predict(rows)["prediction"], atol=1e-6)
    with pytest.raises(ct.InvalidInput, match=r"no model for an unknown user.*barmbek 1"):
        kept.predict(hospitals[1])
    with pytest.raises(ct.InvalidInput, match="holds no models that a node keeps"):
        load_models(tmp_path)
    for file in (tmp_path / "models" / "altona").iterdir():
        file.write_text(file.read_text()[:-5])
    with pytest.raises(ct.InvalidInput, match="is damaged"):
        load_models(tmp_path / "models" / "altona")


def test_the_server_cannot_name_the_folder(hospitals, tmp_path):
    from coterie.federated.flower import FlowerRuntime

    config = complete({**RUN, "out": str(tmp_path / "out"), "wait": 2.0})
    said = {**for_nodes(config), "models-dir": str(tmp_path / "stolen")}
    nodes = [{key: value for key, value in node.items() if key != "models-dir"}
             for node in configs(hospitals, tmp_path)]
    entry.serve(FlowerRuntime(Nodes(nodes), said, deadline=5.0, poll=0.001), Deployment.of(config))
    assert not (tmp_path / "stolen").exists()


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_server_that_is_killed_ends_in_the_same_bits(hospitals, tmp_path, after):
    """The server dies while it writes the answers of a round, or later; nodes get new numbers meanwhile."""
    serve(Nodes(configs(hospitals, tmp_path)), tmp_path / "straight")
    grid = Nodes(configs(hospitals, tmp_path))
    replies = [0]

    def die(node: int, message: Any, answer: Any) -> Any:
        replies[0] += message.metadata.message_type == "train.answer"
        if replies[0] > 6 * after:
            raise KeyboardInterrupt
        return answer()

    grid.spoil = die
    if after < 2:
        with pytest.raises((KeyboardInterrupt, ct.Interrupted)):
            serve(grid, tmp_path / "out")
        assert not (tmp_path / "out" / "run.json").exists()
    again = Nodes(configs(hospitals, tmp_path))
    for node in list(again.contexts):
        again.rename(node, node + 1000)
    serve(again, tmp_path / "out")
    asked = {message.metadata.group_id for message in again.sent if message.metadata.message_type == "train.answer"}
    assert len(asked) == 2 - (after if after < 2 else 0)
    for name in ("models.csv", "clusters.csv", "path.csv", "ledger.csv", "solution.coterie"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes(), name


def test_nodes_that_fail_or_come_back_change_nothing(hospitals, tmp_path):
    """Two nodes lose their first answer to every question, and then are started again under new numbers."""
    serve(Nodes(configs(hospitals, tmp_path)), tmp_path / "straight")
    grid = Nodes(configs(hospitals, tmp_path))
    failed: set[tuple[str, str]] = set()

    def spoil(node: int, message: Any, answer: Any) -> Any:
        config = grid.contexts[node].node_config
        question = str(config["path"]), next(iter(message.content["queries"].values()))[:4].hex() \
            if "queries" in message.content else ""
        if question[1] and config["path"] in map(str, hospitals[:2]) and question not in failed:
            failed.add(question)
            grid.rename(node, node + 1000)
            raise ValueError("the power went off")
        return answer()

    grid.spoil = spoil
    fitted = serve(grid, tmp_path / "out")
    assert len(failed) == 4
    assert fitted.n_rounds > 2
    assert sum(line.asked - line.answered for line in fitted.history) == 20  # five wards, two nodes, two questions
    for name in ("models.csv", "clusters.csv", "path.csv"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes(), name


def test_classes_in_six_tables(hospitals, tmp_path):
    """Another loss, for which the server asks more."""
    tables = [pl.read_csv(file).with_columns(
        long=pl.when(pl.col("days") > 9).then(pl.lit("yes")).otherwise(pl.lit("no"))).drop("days")
        for file in hospitals]
    nodes = configs([tmp_path / file.name for file in hospitals], tmp_path)
    for table, node in zip(tables, nodes, strict=True):
        table.write_csv(node["path"])
        node["target"] = "long"
    serve(Nodes(nodes), tmp_path / "out", target="long")
    run, one = ct.load_run(tmp_path / "out"), ct.fit_table(pl.concat(tables), user="ward", target="long")
    np.testing.assert_array_equal(run.labels, one.labels)
    np.testing.assert_allclose(run.coefficients, one.coefficients, atol=1e-6)
    assert run.kind == one.kind
    kept = load_models(tmp_path / "models" / "altona")
    assert kept.predict(tables[0])["prediction"].to_list() == run.predict(tables[0])["prediction"].to_list()
    with pytest.raises(ct.InvalidInput, match="no second moments of its users"):
        leave_run(run, ["altona 1"], tmp_path / "rest")


def test_whom_a_node_refuses_is_set_aside_and_the_run_says_so(hospitals, together, tmp_path):
    """Owners who allow no second moments: the fit is that of the other hospitals, and the run says why."""
    nodes, out = configs(hospitals, tmp_path), tmp_path / "out"
    nodes[0]["allow"] = "certify"
    nodes[3] |= {"consent": "", "path": str(tmp_path / "few.csv")}
    few = pl.read_csv(hospitals[3]).group_by("ward", maintain_order=True).head(6)
    few.write_csv(tmp_path / "few.csv")
    fitted = serve(Nodes(nodes), out)
    assert {name.split()[0] for name in fitted.aside} == {"altona", "duvenstedt"}
    assert len(fitted.aside) == len(fitted.refusals) == 10
    assert "does not allow questions of the kind 'moments'" in fitted.aside["altona 1"]
    assert "no more rows than coordinates" in fitted.aside["duvenstedt 2"]
    others = together.filter(~pl.col("ward").str.contains("altona|duvenstedt"))
    alone = ct.fit_table(others, user="ward", target="days")
    run = ct.load_run(out)
    assert run.names == alone.names
    np.testing.assert_array_equal(run.labels, alone.labels)
    assert run.gap <= 1e-6
    assert run.info["aside"]["altona 3"] == fitted.aside["altona 3"]
    assert "10 users set aside (altona 1: its node refuses" in (out / "report.html").read_text()
    assert [line.stage for line in fitted.history] == ["moments", "moments", "certify"]
    again = serve(Nodes(nodes), out)  # continued from the checkpoint, with the same users
    assert again.aside == fitted.aside
    np.testing.assert_array_equal(again.models, fitted.models)


def test_a_fit_of_classes_goes_on_without_whom_a_node_stops(tmp_path):
    users = clustered("logistic", n_users=9, n_clusters=3, samples=60, seed=1).users
    nodes = []
    for k in range(3):
        file = write(users.take(np.arange(k, 9, 3)), tmp_path / f"{k}.npz")
        nodes.append({"data": "npz", "path": file, "split-key": "public"})
    nodes[1]["max-hessians"] = 2
    fitted = serve(Nodes(nodes), tmp_path / "out", user="", target="", loss="logistic")
    assert set(fitted.aside) == {1, 4, 7}
    assert all("allows 2 (max-hessians)" in reason for reason in fitted.aside.values())
    alone = ct.federate(users.take(np.array([0, 2, 3, 5, 6, 8])))
    np.testing.assert_allclose(fitted.models, alone.models, atol=1e-6)


def test_prepared_numbers(tmp_path):
    """Users without a table: the fit is that of one process, and nodes keep models for Users."""
    users = clustered("squared", n_users=9, n_clusters=3, samples=20, seed=0).users
    nodes = []
    for k in range(3):
        file = write(users.take(np.arange(k, 9, 3)), tmp_path / f"{k}.npz")
        nodes.append({"data": "npz", "path": file, "models-dir": str(tmp_path / f"models-{k}"),
                      "split-key": "public"})
    fitted = serve(Nodes(nodes), tmp_path / "out", user="", target="")
    local = ct.federate(users)
    np.testing.assert_array_equal(fitted.models, local.models)
    run = ct.load_run(tmp_path / "out")
    assert run.recipe is None
    np.testing.assert_array_equal(run.predict(users)["prediction"], local.predict(users)["prediction"])
    part = users.take([1, 4, 7])
    np.testing.assert_allclose(load_models(tmp_path / "models-1").predict(part)["prediction"],
                               local.predict(part)["prediction"])


def joined(nodes: Nodes, run: Path, out: Path) -> pl.DataFrame:
    from coterie.federated.flower import FlowerRuntime

    config = complete({**RUN, "out": str(out), "wait": 2.0, "join": str(run)})
    runtime = FlowerRuntime(nodes, for_nodes(config), deadline=5.0, poll=0.001)
    finished = ct.load_run(run)
    write_newcomers(join_run(runtime, finished, wait=Deployment.of(config).wait), finished, out / "joined.csv")
    return pl.read_csv(out / "joined.csv")


def test_a_seventh_hospital_joins(hospitals, one, tmp_path):
    """Its wards are asked one question; their models stay with them unless their owner says otherwise."""
    serve(Nodes(configs(hospitals, tmp_path)), tmp_path / "out")
    run = ct.load_run(tmp_path / "out")
    new = STORY["write_tables"](tmp_path / "more", patients=12, seed=5)[0]
    new.write_text(new.read_text().replace("altona", "gross borstel"))
    node = {"data": "csv", "path": str(new), "models-dir": str(tmp_path / "models" / "new"), **TABLE}
    grid, said = Nodes([*configs(hospitals, tmp_path), node]), list[str]()

    def listen(number: int, message: Any, answer: Any) -> Any:
        reply = answer()
        said.extend(str(dict(reply.content["users"])["introduction"]) for _ in range("users" in reply.content))
        return reply

    grid.spoil = listen
    frame = joined(grid, tmp_path / "out", tmp_path / "joined")
    assert frame["user"].to_list() == [f"gross borstel {ward}" for ward in range(1, 6)]
    alike = {name: int(label) for name, label in zip(run.names, run.labels, strict=True)}
    assert frame["cluster"].to_list() == [alike[f"altona {ward}"] for ward in range(1, 6)]
    assert frame.columns == ["user", "cluster"]  # no model left the hospital
    kept = load_models(tmp_path / "models" / "new")
    rows = pl.read_csv(new)
    same = rows.with_columns(pl.col("ward").str.replace("gross borstel", "altona"))
    np.testing.assert_allclose(kept.predict(rows)["prediction"], run.predict(same)["prediction"], atol=1e-8)
    asked = [message for message in grid.sent if message.metadata.message_type == "train.answer"]
    assert len(asked) == 1  # the six others were only asked who is there
    assert len(said) == 7
    assert all(json.loads(text)["summary"] is None for text in said)
    frame = joined(Nodes([{**node, "return-models": True}]), tmp_path / "out", tmp_path / "again")
    assert {"age", "intercept"} <= set(frame.columns)


def test_after_somebody_left_the_next_run_asks_for_the_certificate_only(hospitals, together, tmp_path):
    out = tmp_path / "out"
    serve(Nodes(configs(hospitals, tmp_path)), out)
    rest = leave_run(ct.load_run(out), ["altona 1"], out)
    write_run(rest, out)
    assert "altona 1" not in (out / "models.csv").read_text()
    again = serve(Nodes(configs(hospitals, tmp_path)), out)
    assert [line.stage for line in again.history] == ["moments", "certify"]
    assert [line.asked for line in again.history] == [30, 29]  # the first was asked before
    np.testing.assert_array_equal(again.models, rest.models)
    run = ct.load_run(out)
    assert run.info["participants"] == 29
    assert run.certify(together.filter(pl.col("ward") != "altona 1")).holds


# On the wire: in one process of the tests, one after the other


class Story:
    """The commands of the example, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, dict[str, subprocess.Popen[bytes]]()
        self.port = flower.free_port()
        text = (EXAMPLE / "sites.toml").read_text()
        (folder / "sites.toml").write_text(text.replace("port = 9092", f"port = {self.port}"))

    def run(self, *words: str, seconds: float = 400) -> str:
        done = subprocess.run([sys.executable, "-m", "coterie", *words], cwd=self.folder, capture_output=True,
                              text=True, timeout=seconds)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, name: str, *words: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.started[name] = subprocess.Popen(
                [sys.executable, "-m", "coterie", "federate", "start", f"kits/{name}", *words], cwd=self.folder,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def wait(self, name: str, words: str, seconds: float = 240.0, number: int = 1) -> None:
        log = self.folder / f"{name}.log"
        flower.wait(lambda: log.exists() and log.read_text().count(words) >= number, seconds, lambda: None)

    def sites(self) -> dict[str, str]:
        said = json.loads(self.run("federate", "status", "kits/server", "--json"))
        return {site["name"]: site["status"] for site in said["sites"]}

    def __enter__(self) -> Story:
        return self

    def __exit__(self, *what: object) -> None:
        flower.end(list(self.started.values()))


@pytest.mark.xdist_group("wire")
def test_the_commands_of_the_story(together, tmp_path):
    """From an empty folder to the page, by the commands of the example, with TLS and registered keys."""
    commands = re.findall(r"^coterie federate (.*?) *(?:#.*)?$", (EXAMPLE / "README.md").read_text(), re.MULTILINE)
    starts = [command.split()[1].removeprefix("kits/") for command in commands if command.startswith("start")]
    assert len(commands) + 2 <= 15  # with the tables and a prediction
    began, health = time.monotonic(), flower.free_port()
    with Story(tmp_path) as story:
        tables = STORY["write_tables"](tmp_path / "tables")
        story.run("federate", *commands[0].split())
        assert "200 rows of 5 users" in story.run("federate", *commands[1].split())
        story.start(starts[0], "--health", f"127.0.0.1:{health}", "--json-logs")
        for name in starts[1:]:
            story.start(name)
        story.wait("server", "The server is ready.")
        said = story.run("federate", *commands[2 + len(starts)].split(), "average=off")  # two rounds
        print(f"{time.monotonic() - began:.0f} s from an empty folder to the page")
        assert story.sites() == {table.stem: "online" for table in tables}
        with urllib.request.urlopen(f"http://127.0.0.1:{health}/metrics") as answer:
            page = answer.read().decode()
        assert 'coterie_sites{status="online"} 6' in page
        out = tmp_path / "kits" / "server" / "run"
        rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
        assert f"coterie_rounds_total {len(rounds)}\n" in page
        assert f"coterie_answers_total {30 * len(rounds)}\n" in page
        assert f'coterie_bytes_total{{direction="up"}} {sum(line["bytes_up"] for line in rounds)}\n' in page
        # A site that is not listed any more is forgotten while the server runs.
        text = (tmp_path / "sites.toml").read_text()
        (tmp_path / "sites.toml").write_text(re.sub(r"(?m)^farmsen.*\n", "", text))
        assert "farmsen: revoked" in story.run("federate", *commands[0].split())
        story.wait("server", "The former key of farmsen is not let in any more.", 60.0)
        assert "farmsen" not in story.sites()
    assert re.search(rf"round {len(rounds) - 1} \(\w+\): 30 of 30 answered", said)
    run = check(out, ct.fit_table(together, user="ward", target="days", settings=Settings(average="off")))
    assert run.certify(together).holds
    for table in tables:
        np.testing.assert_allclose(load_models(tmp_path / "kits" / table.stem / "models").predict(table)["prediction"],
                                   run.predict(table)["prediction"], atol=1e-8)


@pytest.mark.long
@pytest.mark.xdist_group("wire")
def test_a_killed_site_comes_back_and_a_copy_of_the_kits_goes_on(tmp_path):
    """A site that is started again within the minute waits; kits with state.db are restored from a copy."""
    with Story(tmp_path) as story:
        STORY["write_tables"](tmp_path / "tables")
        story.run("federate", "provision", "sites.toml")
        for name in ("server", "altona", "barmbek"):
            story.start(name)
        story.wait("altona", "altona takes part.")
        flower.end([story.started.pop("altona")], at_once=True)
        story.start("altona")
        story.wait("altona", "It tries again", number=1)
        story.wait("altona", "altona takes part.", number=2)
        story.wait("barmbek", "barmbek takes part.")
        numbers = (tmp_path / "kits" / "server" / "state" / "sites.json").read_bytes()
    shutil.copytree(tmp_path / "kits", tmp_path / "backup")
    shutil.rmtree(tmp_path / "kits")
    shutil.copytree(tmp_path / "backup", tmp_path / "kits")
    with Story(tmp_path) as story:
        text = (tmp_path / "kits" / "server" / "server.toml").read_text()
        story.port = int(re.findall(r"port = (\d+)", text)[0])
        for name in ("server", "altona", "barmbek"):
            story.start(name)
        assert "10 of 10 answered" in story.run("federate", "submit", "kits/server", "n-users=10")
        assert (tmp_path / "kits" / "server" / "state" / "sites.json").read_bytes() == numbers


@pytest.mark.long
@pytest.mark.xdist_group("wire")
def test_a_killed_superlink_ends_in_the_same_bits(hospitals, tmp_path):
    nodes, out = configs(hospitals, tmp_path), tmp_path / "out"
    serve(Nodes(nodes), tmp_path / "straight")
    config = complete({**RUN, "n-users": 30, "out": str(out), "wait": 240.0, "round-timeout": 90.0})
    with Cluster(tmp_path / "cluster", nodes) as cluster:
        cluster.submit(config)
        for _ in cluster.follow(out, 400.0):
            break  # after the first round
        cluster.kill_link()
        assert not (out / "run.json").exists()
        cluster.start_link()
        cluster.submit(config)
        lines = list(cluster.follow(out, 400.0))
    assert [line["stage"] for line in lines] == ["moments", "certify"]  # none of them twice
    for name in ("models.csv", "path.csv", "ledger.csv", "solution.coterie"):
        assert (out / name).read_bytes() == (tmp_path / "straight" / name).read_bytes(), name


@pytest.mark.xdist_group("wire")
def test_newcomers_join_over_the_wire(hospitals, one, tmp_path):
    one.save(tmp_path / "run")
    new = STORY["write_tables"](tmp_path / "more", patients=12, seed=5)[0]
    new.write_text(new.read_text().replace("altona", "gross borstel"))
    words = ["federate", "join", "run", str(new), "--runtime", "flower", "--local-cluster", "1", "--models-dir",
             "models"]
    done = subprocess.run([sys.executable, "-m", "coterie", *words], cwd=tmp_path, capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 newcomers in run/joined.csv" in done.stdout
    alike = {name: int(label) for name, label in zip(one.names, one.labels, strict=True)}
    frame = pl.read_csv(tmp_path / "run" / "joined.csv")
    assert frame["cluster"].to_list() == [alike[f"altona {ward}"] for ward in range(1, 6)]
    assert len(load_models(tmp_path / "models").names) == 5


def private_nodes(hospitals: list[Path], folder: Path) -> list[dict[str, Any]]:
    """Owners who set a budget and nothing else."""
    own = configs(hospitals, folder)
    for node in own:
        del node["consent"], node["split-key"]
    return [node | {"budget-epsilon": 20.0, "budget-delta": 1e-5} for node in own]


PRIVATE = {"epsilon": 20.0, "clip": "age=0:100, pressure=60:220, night=no|yes, days=0:60"}


def test_a_private_run_sends_releases_only(hospitals, tmp_path):
    grid = Nodes(private_nodes(hospitals, tmp_path))
    served = serve(grid, tmp_path / "out", **PRIVATE)
    run = ct.load_run(tmp_path / "out")
    assert run.info["privacy"]["epsilon"] == 20.0
    assert set(run.info["bytes_by_kind"]) == {"release", "home"}
    assert run.certify().holds
    assert len(served.names) == 30
    assert (tmp_path / "models" / hospitals[0].stem).exists()


@pytest.mark.long
def test_a_private_run_over_the_wire(hospitals, tmp_path):
    out, nodes = tmp_path / "out", private_nodes(hospitals[:2], tmp_path)
    config = complete({**RUN, **PRIVATE, "out": str(out), "n-users": 10, "wait": 120.0})
    with Cluster(tmp_path / "cluster", nodes) as cluster:
        cluster.submit(config)
        for _ in cluster.follow(out, 240.0):
            pass
    run = ct.load_run(out)
    assert run.status is ct.Status.RELEASED
    assert run.certify().holds
    assert load_models(tmp_path / "models" / hospitals[0].stem).names
