"""On Flower: the same questions, answers and results as in process, with real SuperLinks and SuperNodes on loopback."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.grid import Nodes, someone  # noqa: F401  # a fixture of all tests

import coterie as ct
from coterie.base.errors import Incompatible, InvalidInput
from coterie.base.storage import locked
from coterie.data.encoding import Recipe
from coterie.datasets import clustered, ellipses
from coterie.federated import entry, sources
from coterie.federated.protocol.messages import decode
from coterie.federated.settings import CONFIG, RENAMED, Deployment, algorithm_of, complete, for_nodes
from coterie.fitting.prepare import prepare
from coterie.output import runs

flower = pytest.importorskip("coterie.federated.runtimes.cluster", reason="the extra flower is not installed",
                             exc_type=ImportError)
Cluster, alive, end, family = flower.Cluster, flower.alive, flower.end, flower.family
free_port, toml, wait, write_app = flower.free_port, flower.toml, flower.wait, flower.write_app

pytestmark = pytest.mark.flower

ROOT = Path(__file__).parents[2]
COTERIE = [sys.executable, "-m", "coterie"]
LOSS, LAM = ct.SquaredHinge(ridge=1e-3), 0.2
RUN = {"loss": "squared_hinge", "loss-options": '{"ridge": 0.001}', "lam": LAM}
DATA = ellipses(users_per_cluster=5, samples=30, seed=0).users  # 15 users, 3 clusters at this lam in 3 rounds


def save(users: ct.Users, path: Path) -> Path:
    """Users as a node's .npz file."""
    arrays = {} if users.targets is None else {"y": users.targets}
    np.savez(path, X=users.features, user=np.array(users.names)[users.owner],
             feature_names=np.array(users.feature_names), **arrays)
    return path


def dealt(users: ct.Users, folder: Path, places: list[Any], **more: Any) -> list[dict[str, Any]]:
    """Configurations of nodes that hold the users at these places; the run's seed decides which rows are held out."""
    folder.mkdir(parents=True, exist_ok=True)
    own = {"data": "npz", "split-key": "public"}
    return [{**own, "path": str(save(users.take(np.asarray(part)), folder / f"users-{k}.npz")), **more}
            for k, part in enumerate(places)]


def the_same(result: Any, local: ct.Solution) -> bool:
    """Bitwise the models and duals of a run in this process; `found` is a solution, or a run folder."""
    arrays = runs.read(result)[1] if isinstance(result, Path) else {"models": result.models, "duals": result.duals}
    return np.array_equal(arrays["models"], local.models) and np.array_equal(arrays["duals"], local.duals)


# Without a network: server and client app in one process, on a Grid that hands the messages over


def runtime_on(nodes: Nodes, config: dict[str, Any], deadline: float = 5.0) -> Any:
    from coterie.federated.flower import FlowerRuntime

    return FlowerRuntime(nodes, for_nodes(config), deadline=deadline, poll=0.001)


def service_of(nodes: Nodes, out: Path, deadline: float = 5.0, progress: Any = None, **settings: Any) -> Any:
    changes = {name.replace("_", "-"): value for name, value in settings.items()}
    config = complete({**RUN, "out": str(out), "wait": 2.0, **changes})
    return entry.serve(runtime_on(nodes, config, deadline), Deployment.of(config), progress)


def serve(*words: Any, **settings: Any) -> Any:
    return service_of(*words, **settings)


PLACES = [[0], [1, 4, 7, 10], [2, 3, 5, 6, 8, 9, 11, 12, 13, 14]]  # one user, and many


@pytest.fixture
def nodes(tmp_path) -> Nodes:
    return Nodes(dealt(DATA, tmp_path / "data", PLACES))


@pytest.mark.parametrize(("name", "options"), [
    ("newton", {}), ("newton", {"rank": 2}), ("splitting", {}), ("fedavg", {"rounds": 5}), ("squared_penalty", {}),
    ("pdmm", {"variant": "symmetric"}), ("pdmm", {"variant": "paper"}), ("pdmm", {"pairs": "unordered"}),
    ("pdmm", {"quiet": 2}), ("pdmm", {"bregman": "linear"}),
], ids=lambda value: value if isinstance(value, str) else " ".join(map(str, value.values())) or "default")
def test_every_algorithm_gives_what_it_gives_in_process(nodes, tmp_path, name, options):
    for share in (1.0, 0.4):
        local = ct.federate(DATA, LOSS, LAM, algorithm=ct.ALGORITHMS[name](**options), participation=share,
                           max_rounds=8, seed=3)
        result = serve(nodes, tmp_path / f"out-{share}", algorithm=name, max_rounds=8, participation=share, seed=3,
                      **{"algorithm-options": json.dumps(options)})
        assert the_same(result, local)
        assert result.status == local.status
        assert result.gap == local.gap
        for key in ("round", "kind", "field"):
            for what in ("bytes", "numbers"):
                assert result.ledger.by(key, what) == local.ledger.by(key, what)
        assert all(result.ledger.user(k) == local.ledger.user(k) for k in range(15))


def test_edges_at_the_users_are_for_one_process(nodes, tmp_path):
    with pytest.raises(InvalidInput, match=r'remember their edges.*Use edge_state="server"'):
        serve(nodes, tmp_path / "out", algorithm="pdmm", **{"algorithm-options": '{"edge_state": "users"}'})
    assert nodes.sent == []


def test_scaling_weights_and_scores_are_those_of_one_process(nodes, tmp_path):
    scaled = ct.Standardizer.from_moments(DATA.moments(), feature_names=DATA.feature_names).transform(DATA)
    local = ct.federate(scaled, LOSS, LAM, graph="wald")
    result = serve(nodes, tmp_path / "a", standardize=True, weights="wald")
    assert the_same(result, local)
    assert np.array_equal(result.problem.graph.weights, local.problem.graph.weights)

    parts = DATA.hold_out(0.3, seed=5)
    local = ct.federate(parts.train, LOSS, LAM, held_out=parts.test, seed=5)
    result = serve(nodes, tmp_path / "b", seed=5, **{"held-out": 0.3})
    assert the_same(result, local)
    assert np.array_equal(result.scores, local.scores)


def test_a_path_is_that_of_one_process(nodes, tmp_path):
    parts = DATA.hold_out(0.3, seed=0)
    for name, options in (("newton", {}), ("pdmm", {})):
        local = ct.federate_path(parts.train, LOSS, lams=[0.3, 0.2], held_out=parts.test, max_rounds=5,
                                algorithm=ct.ALGORITHMS[name](**options))
        result = serve(nodes, tmp_path / name, algorithm=name, lams="0.2 0.3", max_rounds=5,
                      **{"algorithm-options": json.dumps(options), "held-out": 0.3})
        best = local.best()
        assert result.lam == best.lam
        assert the_same(result, best)


def spread(tmp_path: Path, parts: int = 3) -> tuple[Path, list[dict[str, Any]]]:
    """A table with texts, numbers and classes as one file, and as those of several nodes."""
    rng, folder = np.random.default_rng(0), tmp_path / "tables"
    folder.mkdir()
    rows = [f"u{k % 7},{rng.normal(50, 9):.3f},{rng.choice(['red', 'blue'])},{'ill' if rng.random() < 0.5 else 'well'}"
            for k in range(210)]
    for part in range(-1, parts):
        own = [row for row in rows if part < 0 or int(row[1]) % parts == part]
        (folder / f"{part}.csv").write_text("\n".join(["who,age,colour,state", *own]))
    table = {"data": "csv", "user": "who", "target": "state"}
    return folder / "-1.csv", [{**table, "path": str(folder / f"{part}.csv")} for part in range(parts)]


def test_nodes_with_tables_agree_on_one_recipe(tmp_path):
    path, configs = spread(tmp_path)
    one = prepare(path, user="who", target="state")
    result = serve(Nodes(configs), tmp_path / "out", loss="auto", loss_options="", lam=0.03, weights="wald")
    assert isinstance(one.units.loss, ct.Logistic)
    assert the_same(result, ct.federate(one.users, one.units.loss, 0.03, weights="wald"))

    other = Path(configs[1]["path"])
    other.write_text(re.sub(r"(?m)^(u\d),[\d.]+", r"\1,old", other.read_text()))
    odd = serve(Nodes(configs), tmp_path / "conflict", loss="auto", loss_options="").aside
    assert set(odd) == {"u1", "u4"}
    assert "numbers in the node of user 'u0' and texts in the node of user 'u1'" in odd["u1"]


def test_the_number_of_classes_is_the_largest_that_any_node_knows(tmp_path):
    users = clustered("multinomial", n_users=6, samples=30, seed=0).users
    users = ct.Users.from_arrays(users.features, np.where(users.owner < 5, np.minimum(users.targets, 1), users.targets),
                                 users.owner)
    grid = Nodes(dealt(users, tmp_path / "data", [[0, 1, 2, 3, 4], [5]]))
    result = serve(grid, tmp_path / "out", loss="multinomial", lam=0.05)
    assert the_same(result, ct.federate(users, ct.Multinomial(ridge=1e-3, n_classes=3), 0.05))


def test_only_plain_bytes_and_settings_cross(nodes, tmp_path):
    answers = []

    def spoil(node, message, answer):
        answers.append(answer())
        return answers[-1]

    nodes.spoil = spoil
    serve(nodes, tmp_path / "out", algorithm="pdmm", max_rounds=3)
    questions = [message for message in nodes.sent if message.metadata.message_type == "train.answer"]
    assert len(questions) == 3 * 4  # three nodes, three rounds and the certificate
    assert {message.metadata.dst_node_id for message in questions} == {100, 101, 102}
    for message in questions:
        assert all(decode(data) for data in message.content["queries"].values())
        own = DATA.take(np.array(PLACES[message.metadata.dst_node_id - 100])).names
        assert {json.loads(name) for name in message.content["queries"]} == set(own)
        assert set(message.content.keys()) == {"config", "queries"}
        assert {type(value) for value in message.content["config"].values()} <= {str, int, float, bool}
    info = [reply.content["answers"] for reply in answers if "answers" in reply.content]
    assert all(type(data) is bytes and decode(data) for record in info for data in record.values())


def test_nothing_is_pickled():
    code = {path: path.read_text() for path in (ROOT / "src" / "coterie").rglob("*.py")}
    uses = [path.name for path, text in code.items()
            if re.search(r"import (c?pickle|dill|cloudpickle|joblib|shelve)|allow_pickle=True", text)]
    assert uses == []


def test_a_node_with_a_new_number_is_the_same_users(nodes, tmp_path):
    def restart(line):
        node = max(nodes.contexts)
        nodes.rename(node, node + 1)

    for options in ({}, {"variant": "paper"}):
        local = ct.federate(DATA, LOSS, LAM, algorithm=ct.PDMM(**options), max_rounds=6)
        result = serve(nodes, tmp_path / f"out{len(options)}", algorithm="pdmm", max_rounds=6, progress=restart,
                      **{"algorithm-options": json.dumps(options)})
        assert the_same(result, local)
        assert not result.aside


def test_of_a_round_whose_answer_was_lost_nothing_remains(nodes, tmp_path):
    away = np.zeros((100, 15), dtype=bool)
    away[[2, 3, 5]] = np.isin(np.arange(15), PLACES[1])
    turn = [0]

    def spoil(node, message, answer):
        reply = answer()
        return None if node == 101 and away[turn[0]].any() and "queries" in message.content else reply

    def count(line):
        turn[0] = line.iteration + 1

    class Lossy(Nodes):
        """Says of an answer that will not come that its node died, as Flower does."""

        def pull_messages(self, ids):
            from flwr.app import Error, Message

            known = super().pull_messages(ids)
            heard = {reply.metadata.reply_to_message_id for reply in known}
            lost = [self.sent[int(number[1:])] for number in ids if number not in heard]
            return known + [Message(Error(code=5, reason="gone"), reply_to=message) for message in lost]

    for options in ({}, {"variant": "paper"}):
        turn[0] = 0
        lossy = Lossy([context.node_config for context in nodes.contexts.values()])
        lossy.spoil = spoil
        local = ct.federate(DATA, LOSS, LAM, algorithm=ct.PDMM(**options), max_rounds=8, faults=ct.Faults(away=away))
        result = serve(lossy, tmp_path / f"out{len(options)}", algorithm="pdmm", max_rounds=8, progress=count,
                      **{"algorithm-options": json.dumps(options)})
        assert the_same(result, local)


@pytest.mark.parametrize("options", [{}, {"variant": "paper"}], ids=["symmetric", "paper"])
def test_a_server_that_was_killed_goes_on_from_its_checkpoint(nodes, tmp_path, options):
    def crash(line):
        if line.iteration in (1, 4):
            raise RuntimeError("the lights went out")

    settings = {"algorithm": "pdmm", "algorithm-options": json.dumps(options), "max-rounds": 6}
    for _ in range(2):
        with pytest.raises(RuntimeError, match="lights"):
            serve(nodes, tmp_path / "out", progress=crash, **settings)
        nodes.rename(101, 101)  # a new run: what Flower kept for the node is gone
    result = serve(nodes, tmp_path / "out", **settings)
    assert the_same(result, ct.federate(DATA, LOSS, LAM, algorithm=ct.PDMM(**options), max_rounds=6))
    with pytest.raises(InvalidInput, match="its lam is"):
        serve(nodes, tmp_path / "out", **{**settings, "lam": 0.3})


def test_a_user_at_two_nodes_is_at_the_first_and_moves_when_that_is_gone(tmp_path, caplog):
    grid = Nodes(dealt(DATA, tmp_path / "data", [*PLACES, PLACES[0] + PLACES[1]]))

    def leave(line):
        if line.iteration == 0:
            del grid.contexts[100]

    result = serve(grid, tmp_path / "out", progress=leave)
    assert result.status == ct.Status.CONVERGED
    assert the_same(result, ct.federate(DATA, LOSS, LAM))
    refused = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert [re.findall(r"user (\d+)", line)[0] for line in refused] == ["0", "1", "4", "7", "10"]
    asked = [(message.metadata.dst_node_id, set(map(json.loads, message.content["queries"])))
             for message in grid.sent if "queries" in message.content]
    assert (100, {0}) in asked
    assert (103, {0}) in asked  # its own copies of the others are never asked
    assert not any(node == 103 and users & {1, 4, 7, 10} for node, users in asked)


GARBAGE = {
    "damaged": (lambda data: data[:-3] + b"\0\0\0", "checksum"),
    "cut": (lambda data: data[:20], "checksum|shorter"),
    "no message": (lambda data: b"hello, world, hello", "not a coterie message"),
    "a text": (lambda data: "hello", "not bytes"),
    "too long": (lambda data: data + bytes(5000), "longer than the 4,000 allowed"),
    "not a number": (lambda data: changed(data, lambda array: np.full_like(array, np.nan)), "holds nan"),
    "another shape": (lambda data: changed(data, lambda array: np.zeros(7)), "has shape"),
    "another kind": (lambda data: replace(decode(data), kind="score", arrays={}).encode(), "of kind"),
}


def changed(data: bytes, change: Any) -> bytes:
    message = decode(data)
    return replace(message, arrays={name: change(array) for name, array in message.arrays.items()}).encode()


@pytest.mark.parametrize("what", GARBAGE)
def test_whoever_answers_garbage_is_set_aside_and_the_others_go_on(nodes, tmp_path, monkeypatch, what):
    change, complaint = GARBAGE[what]
    monkeypatch.setattr("coterie.federated.flower._MOST", 4000)

    def spoil(node, message, answer):
        reply = answer()
        if node == 101 and "answers" in reply.content and message.metadata.group_id == "1":
            for name, data in reply.content["answers"].items():
                reply.content["answers"][name] = change(data)
        return reply

    nodes.spoil = spoil
    result = serve(nodes, tmp_path / "out", tol=1e-11)
    assert set(result.aside) == {1, 4, 7, 10}
    assert all(re.search(complaint, reason) for reason in result.aside.values()), result.aside
    others = np.array(PLACES[0] + PLACES[2])
    alone = ct.federate(DATA.take(others), LOSS, LAM, tol=1e-11)
    assert result.status == alone.status == ct.Status.CONVERGED
    assert result.problem.users.names == alone.problem.users.names
    assert result.models == pytest.approx(alone.models, abs=1e-5)


def test_a_node_that_has_answered_enough_is_set_aside_and_the_run_says_so(nodes, tmp_path):
    nodes.contexts[101].node_config["max-hessians"] = 1
    served = service_of(nodes, tmp_path / "out")
    result = served
    assert set(result.aside) == {1, 4, 7, 10}
    assert set(result.aside.values()) == {"its node refuses: it has answered 1 questions with Hessians about its rows, "
                                          "and its owner allows 1 (max-hessians)"}
    alone = ct.federate(DATA.take(np.array(PLACES[0] + PLACES[2])), LOSS, LAM)
    assert result.status == ct.Status.CONVERGED
    assert result.models == pytest.approx(alone.models, abs=1e-3)
    entry.write(served, tmp_path / "out", {})
    assert "1 (max-hessians)" in json.loads((tmp_path / "out" / "run.json").read_text())["aside"]["1"]


def test_a_node_that_fails_is_set_aside_after_so_many_questions(nodes, tmp_path):
    def spoil(node, message, answer):
        if node == 100 and "queries" in message.content:
            raise RuntimeError("disk full")
        return answer()

    nodes.spoil = spoil
    result = serve(nodes, tmp_path / "out", patience=2)
    assert result.aside == {0: "it left 2 queries in a row unanswered"}
    assert result.status == ct.Status.CONVERGED


def test_a_slow_node_is_not_waited_for_longer_than_a_round(nodes, tmp_path):
    late: dict[str, tuple[float, Any]] = {}

    class Slow(Nodes):
        def pull_messages(self, ids):
            due = [number for number, (when, _) in late.items() if number in ids and when <= time.monotonic()]
            return super().pull_messages(ids) + [late.pop(number)[1] for number in due]

    def spoil(node, message, answer):
        reply = answer()
        if node == 101 and "queries" in message.content:
            late[message.metadata.message_id] = time.monotonic() + 0.25, reply
            return None
        return reply

    grid = Slow([context.node_config for context in nodes.contexts.values()])
    grid.spoil = spoil
    lines: list[Any] = []
    result = serve(grid, tmp_path / "out", deadline=0.1, progress=lines.append, tol=1e-11)
    assert result.status == ct.Status.CONVERGED
    assert not result.aside
    assert min(line.answered for line in lines) < 15
    assert result.models == pytest.approx(ct.federate(DATA, LOSS, LAM, tol=1e-11).models, abs=1e-5)
    assert sum(line.asked == 0 for line in lines) <= 9  # with nobody else to ask, it is waited for


def test_a_node_that_never_says_who_is_there_holds_nobody_up(nodes, tmp_path):
    nodes.spoil = lambda node, message, answer: None if node == 102 else answer()
    result = serve(nodes, tmp_path / "out", deadline=0.3, n_users=5)
    assert set(result.problem.users.names) == {0, 1, 4, 7, 10}
    assert result.status == ct.Status.CONVERGED


def claiming(grid: Nodes, node: int, names: list[Any]) -> Nodes:
    """The grid with a node that says it holds these users."""
    def spoil(asked, message, answer):
        reply = answer()
        if asked == node and "users" in reply.content:
            said = json.loads(reply.content["users"]["introduction"])
            reply.content["users"]["introduction"] = json.dumps({**said, "names": names})
        return reply

    grid.spoil = spoil
    return grid


@pytest.mark.parametrize("lam", [LAM, "auto"])
def test_a_node_that_claims_the_users_of_others_is_set_aside(tmp_path, lam):
    """The first to claim them holds them until it does not answer for them."""
    grid = claiming(Nodes(dealt(DATA, tmp_path / "data", PLACES)), 100, list(range(15)))
    settings = {"lam": lam} if lam != "auto" else {"lam": "auto", "loss": "squared", "loss-options": ""}
    result = serve(grid, tmp_path / "out", **settings)
    assert result.aside[0] == "its node refuses: its node says it holds user 1, and does not answer for it"
    names = result.names if lam == "auto" else [name for name in range(15) if name not in result.aside]
    assert set(names) == set(range(1, 15))
    assert (result.solution if lam == "auto" else result).status == ct.Status.CONVERGED
    honest = serve(Nodes(dealt(DATA, tmp_path / "more", PLACES[1:])), tmp_path / "honest", **settings)
    assert np.asarray(result.models)[-14:] == pytest.approx(np.asarray(honest.models), abs=1e-5)


def test_a_node_that_claims_them_later_takes_nothing(tmp_path):
    grid = claiming(Nodes(dealt(DATA, tmp_path / "data", PLACES)), 102, list(range(15)))
    result = serve(grid, tmp_path / "out")
    assert the_same(result, ct.federate(DATA, LOSS, LAM))


def test_a_node_holds_no_more_users_than_the_server_allows(tmp_path):
    grid = claiming(Nodes(dealt(DATA, tmp_path / "data", PLACES)), 100, list(range(200, 30_000)))
    result = serve(grid, tmp_path / "out")
    assert result.aside["node 100"] == \
        "it says it holds 29,800 users, and a node may hold 10,000 (max-users)"
    assert result.status == ct.Status.CONVERGED


def test_two_servers_do_not_write_into_one_folder(tmp_path):
    from coterie.federated.flower import _main

    with locked(tmp_path / "out"), pytest.raises(InvalidInput, match="another run writes into"):
        _main(Nodes([]), SimpleNamespace(run_config={"out": str(tmp_path / "out")}))


def test_columns_and_data_that_do_not_fit_are_said_at_once(tmp_path):
    one, two = dealt(DATA, tmp_path / "data", [[0, 1], [2, 3]])
    other = ct.Users.from_arrays(DATA.features, DATA.targets, DATA.owner, feature_names=["length", "width"])
    (two,) = dealt(other, tmp_path / "more", [[2, 3]])
    with pytest.raises(Incompatible, match="different columns"):
        serve(Nodes([one, two]), tmp_path / "a")
    with pytest.raises(Incompatible, match=r"2 of 3 users came within 0.2 s.*no-such-file"):
        serve(Nodes([one, {"data": "npz", "path": "no-such-file.npz"}]), tmp_path / "b", n_users=3, wait=0.2)
    with pytest.raises(Incompatible, match="0 of 1 users"):
        serve(Nodes([]), tmp_path / "c", wait=0.1)


def test_a_node_of_another_version_is_told_apart(nodes, tmp_path):
    def spoil(node, message, answer):
        reply = answer()
        if node == 100 and "users" in reply.content:
            reply.content["users"]["version"] = 99
        return reply

    nodes.spoil = spoil
    with pytest.raises(Incompatible, match="speaks version 99"):
        serve(nodes, tmp_path / "out", n_users=15, wait=0.1)


# Settings and sources


def test_settings_have_defaults_and_strangers_are_refused():
    assert complete({"lam": 0.3}) == {**CONFIG, "lam": 0.3}
    with pytest.raises(InvalidInput, match=r"unknown setting 'lamb'.*Settings are: .*lam"):
        complete({"lamb": 0.3})
    for old, new in RENAMED.items():
        with pytest.raises(InvalidInput, match=f"the setting '{old}' is called '{new}'"):
            complete({old: 3})
        assert new in CONFIG
    with pytest.raises(InvalidInput, match="unknown algorithm 'magic'"):
        algorithm_of("magic")
    with pytest.raises(InvalidInput, match=r"cannot be made with.*as JSON"):
        algorithm_of("", '{"rang": 1}')
    assert algorithm_of("pdmm", '{"rho": 2}') == ct.PDMM(rho=2)
    assert not {"out", "checkpoint", "lam"} & for_nodes(CONFIG).keys()


def test_ready_sources(tmp_path):
    few = DATA.take([0, 1, 2])
    npz = save(few, tmp_path / "part-2.npz")
    lines = ["who,x0,x1,label", *(f"{few.names[k]},{x[0]!r},{x[1]!r},{y}" for k, x, y in zip(
        few.owner, few.features.tolist(), few.targets.tolist(), strict=True))]
    (tmp_path / "d.csv").write_text("\n".join(lines))
    import polars

    polars.read_csv(tmp_path / "d.csv").write_parquet(tmp_path / "d.parquet")
    table = {"user": "who", "target": "label"}
    for config in ({"data": "npz", "path": str(npz)},
                   {"data": "npz", "path": str(tmp_path / "part-{partition}.npz"), "partition-id": 2},
                   {"data": "csv", "path": str(tmp_path / "d.csv"), **table},
                   {"data": "parquet", "path": str(tmp_path / "d.parquet"), **table}):
        loaded = sources.load(config)
        assert loaded.names == few.names
        if isinstance(loaded, sources.Table):  # numbers as they are, and classes
            recipe = Recipe.from_summary(loaded.summary())
            loaded = recipe.encode(loaded.frame)
            assert recipe.class_values == (-1.0, 1.0)
            loaded = replace(loaded, targets=np.array(recipe.class_values)[loaded.targets.astype(int)])
        assert np.array_equal(loaded.features, few.features), config
        assert np.array_equal(loaded.targets, few.targets)
    options = {"data": "dataset", "dataset": "ellipses", "dataset-options": '{"users_per_cluster": 5, "samples": 30}'}
    assert np.array_equal(sources.load(options).features, DATA.features)
    parts = [sources.load({**options, "split": True, "partition-id": k, "num-partitions": 4}) for k in range(4)]
    assert [part.names for part in parts] == [tuple(range(k, 15, 4)) for k in range(4)]
    tables = [sources.load({"data": "csv", "path": str(tmp_path / "d.csv"), **table, "split": True, "partition-id": k,
                            "num-partitions": 2}) for k in range(2)]
    assert [part.names for part in tables] == [(0, 2), (1,)]
    assert [len(part.frame) for part in tables] == [few.counts[[0, 2]].sum(), few.counts[1]]


def test_a_function_of_your_own(tmp_path, monkeypatch):
    (tmp_path / "own_data.py").write_text(
        "import coterie as ct\n"
        "def load(config):\n    return ct.Users.from_arrays([[1.0], [2.0]], [1.0, -1.0], [config['first'], 'b'])\n"
        "def wrong(config):\n    return [[1.0]]\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert sources.load({"data": "own_data:load", "first": "a"}).names == ("a", "b")
    for config, complaint in (
            ({}, r"no 'data'.*--node-config 'data="),
            ({"data": "npz"}, r"no 'path'.*--node-config"),
            ({"data": "csv", "path": "x.csv"}, "no 'user'"),
            ({"data": "own_data:wrong"}, r"gave a list, not Users.*Return Users"),
            ({"data": "own_data:missing"}, r"cannot be found.*Install the module where the node runs"),
            ({"data": "no_such_module:load"}, "cannot be found"),
            ({"data": "exel"}, r"neither a known name nor module:name.*csv"),
            ({"data": "dataset", "dataset": "moons"}, r"unknown data set.*ellipses"),
            ({"data": "own_data:load", "first": "a", "split": True}, "no 'partition-id'")):
        with pytest.raises(InvalidInput, match=complaint):
            sources.load(config)
    np.savez(tmp_path / "bare.npz", X=np.ones((2, 1)))
    with pytest.raises(InvalidInput, match="holds no array 'user'"):
        sources.load({"data": "npz", "path": str(tmp_path / "bare.npz")})
    with pytest.raises(InvalidInput, match="neither a known name"):
        sources.make_loss("magic")
    with pytest.raises(InvalidInput, match=r"cannot be made with.*as JSON"):
        sources.make_loss("squared_hinge", '{"rigde": 1}')


def test_rows_held_out_do_not_depend_on_who_shares_the_node():
    together = DATA.hold_out(0.25, seed=7)
    for part in PLACES:
        alone = DATA.take(np.array(part)).hold_out(0.25, seed=7)
        for mine, all_users in zip(alone, together, strict=True):
            same = all_users.take(np.array(part))
            assert np.array_equal(mine.features, same.features)
            assert np.array_equal(mine.targets, same.targets)
    assert (together.test.counts > 0).all()
    assert not np.array_equal(DATA.hold_out(0.25, seed=8).test.features, together.test.features)


# The example app


def test_the_example_app_is_the_written_one_with_comments(tmp_path):
    example = tomllib.loads((ROOT / "examples" / "flower_app" / "pyproject.toml").read_text())
    written = tomllib.loads((write_app(tmp_path, CONFIG) / "pyproject.toml").read_text())
    assert example["tool"]["flwr"]["app"]["components"] == written["tool"]["flwr"]["app"]["components"]
    settings = example["tool"]["flwr"]["app"]["config"]
    assert list(settings) == list(CONFIG)
    assert {name: type(value) for name, value in settings.items()} == {
        name: type(value) for name, value in CONFIG.items()}
    text = (ROOT / "examples" / "flower_app" / "pyproject.toml").read_text()
    for name in CONFIG:
        assert re.search(rf"^{name} = .*  # \w", text, re.M), f"{name} has no comment"


def test_the_docs_have_every_setting():
    page = (ROOT / "docs" / "flower.md").read_text()
    shown = dict(re.findall(r"^\| `([a-z-]+)` \| `([^`]*)` \|", page, re.M))
    assert shown == {name: toml(value) for name, value in CONFIG.items()}


def test_the_example_data_function(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples" / "flower_app")
    (tmp_path / "ward-a.csv").write_text("patient,age,pressure,ill\n7,50,120,yes\n7,60,150,no\n9,40,130,yes\n")
    users = sources.load({"data": "my_data:load", "folder": str(tmp_path)})
    assert users.names == ("ward-a/7", "ward-a/9")
    assert users.targets.tolist() == [1.0, -1.0, 1.0]
    assert users.feature_names == ("age", "pressure")


# On the wire


@pytest.fixture(scope="module")
def wire(tmp_path_factory) -> Iterator[Cluster]:
    """A SuperLink and four SuperNodes with three or four users each, with TLS and keys; all stopped afterwards.

    Every message to a node is answered in a new process, which is most of the time that the tests below take.
    """
    folder = tmp_path_factory.mktemp("wire")
    configs = dealt(DATA, folder, [np.arange(k, 15, 4) for k in range(4)], data="mischief:load")
    configs = [{**config, "args.switch": str(folder / f"switch-{k}")} for k, config in enumerate(configs)]
    cluster = Cluster(folder / "cluster", configs)
    cluster.env["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parents[1] / "support" / "flower_nodes"), *filter(None, [os.environ.get("PYTHONPATH")])])
    known: set[Any] = set()
    try:
        with cluster:
            yield cluster
            known = {process for process in family([os.getpid()]) if process.pid != os.getpid()}
    finally:
        cluster.stop()
    assert alive(known) == []


@pytest.fixture
def switch(wire) -> Iterator[Any]:
    """Tell a node how to behave; it forgets after the test."""
    files = [Path(config["args.switch"]) for config in wire.configs]
    yield lambda node, word: files[node].write_text(word)
    for file in files:
        file.unlink(missing_ok=True)


def deployed(cluster: Cluster, out: Path, timeout: float = 240.0, **settings: Any) -> list[dict[str, Any]]:
    """Submit a run and wait for it; its rounds."""
    cluster.submit(complete({**RUN, "n-users": 15, "out": str(out), **settings}))
    return list(cluster.follow(out, timeout))


@pytest.mark.long
@pytest.mark.xdist_group("wire")
def test_newton_over_tls_is_bitwise_the_run_in_process(wire, tmp_path):
    lines = deployed(wire, tmp_path / "out")
    local = ct.federate(DATA, LOSS, LAM)
    info, _ = runs.read(tmp_path / "out")
    assert the_same(tmp_path / "out", local)
    assert info["status"] == "CONVERGED"
    assert info["gap"] == local.gap <= 1e-6
    assert (info["n_rounds"], info["n_clusters"], info["bytes"]) == (local.n_rounds, 3, local.ledger.bytes)
    assert [(line["stage"], line["asked"], line["answered"]) for line in lines] == [
        ("main", 15, 15), ("main", 15, 15), ("proof", 15, 15)]
    assert lines[-1]["gap"] == local.gap
    assert wire.command("log", wire.run, "local", "--show").count("round ") >= 3  # what `flwr log` shows


@pytest.mark.xdist_group("wire")
def test_pdmm_over_tls_is_bitwise_the_run_in_process(wire, tmp_path):
    """By Flower's own command, on the example app."""
    settings = {"algorithm": "pdmm", "max-rounds": 2,
                "algorithm-options": json.dumps({"variant": "paper"})}
    out = tmp_path / "out"
    changes = {**RUN, **settings, "n-users": 15, "out": str(out)}
    (tmp_path / "changes.toml").write_text("".join(f"{key} = {toml(value)}\n" for key, value in changes.items()))
    info = wire.command("run", str(ROOT / "examples" / "flower_app"), "local", "--run-config",
                        str(tmp_path / "changes.toml"), "--format", "json")
    wire.run = str(json.loads(info[info.index("{"):])["run-id"])
    list(wire.follow(out, 240.0))
    assert [file for file in [wire.folder, *wire.folder.glob("*")] if file.stat().st_mode & 0o077] == []
    local = ct.federate(DATA, LOSS, LAM, algorithm=ct.PDMM(variant="paper"), max_rounds=2)
    assert the_same(out, local)
    assert runs.read(out)[0]["bytes"] == local.ledger.bytes



@pytest.mark.long
@pytest.mark.xdist_group("wire")
def test_a_rough_run_ends_where_the_others_alone_would(wire, tmp_path, switch):
    """One node sends damaged bytes, one numbers that are none, one is slow and claims the users of another."""
    switch(1, "damaged")
    switch(2, "nan")
    switch(3, f"twin {wire.configs[0]['path']}\nslow 30")
    lines = deployed(wire, tmp_path / "out", tol=1e-10, **{"round-timeout": 20.0})
    info, result = runs.read(tmp_path / "out")
    assert set(map(int, info["aside"])) == {k for k in range(15) if k % 4 in (1, 2)}
    assert all(re.search("checksum|holds nan", reason) for reason in info["aside"].values())
    assert info["status"] == "CONVERGED"
    assert info["gap"] <= 1e-6
    assert lines[0]["answered"] < lines[0]["asked"]  # the slow one is not waited for
    others = np.array([k for k in range(15) if k % 4 not in (1, 2)])
    alone = ct.federate(DATA.take(others), LOSS, LAM, tol=1e-10)
    assert result["models"] == pytest.approx(alone.models, abs=1e-5)
    assert "says it holds user 0" in wire.command("log", wire.run, "local", "--show")


@pytest.mark.xdist_group("wire")
def test_nodes_without_a_registered_key_are_refused(wire, tmp_path):
    """Without a key, with one nobody registered, with a certificate of another authority, without TLS."""
    from coterie.federated.runtimes.keys import make_certificates, make_node_keys

    make_certificates(tmp_path / "other")
    (stranger,) = make_node_keys(tmp_path, ["stranger"])
    own = wire.folder / "keys" / "ca.crt"
    ways = {
        "no key": ["--root-certificates", str(own)],
        "unregistered": ["--root-certificates", str(own), "--auth-supernode-private-key", str(stranger)],
        "wrong authority": ["--root-certificates", str(tmp_path / "other" / "ca.crt"),
                            "--auth-supernode-private-key", str(wire.keys[0])],
        "no TLS": ["--insecure"],
    }

    def online() -> int:
        nodes = json.loads(wire.command("supernode", "list", "local", "--format", "json"))["nodes"]
        return sum(node["status"] == "online" for node in nodes)

    wait(lambda: online() == len(wire.nodes), 60.0, lambda: None)
    before = online()
    started_here: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, options in ways.items():
            started_here[name] = wire._start(f"refused {name}", [
                "flower-supernode", "--superlink", f"127.0.0.1:{wire.port}", "--port", str(free_port()),
                "--node-config", 'data="npz"', "--max-retries", "1", *options])
        limit = time.monotonic() + 60
        while any(process.poll() is None for process in started_here.values()) and time.monotonic() < limit:
            time.sleep(0.2)
        codes = {name: process.poll() for name, process in started_here.items()}
    finally:
        end(list(started_here.values()), at_once=True)
    assert all(code not in (0, None) for code in codes.values()), codes
    assert online() == before


@pytest.mark.long
@pytest.mark.xdist_group("wire")
def test_after_a_node_and_the_server_are_killed_the_optimum_is_the_same(wire, tmp_path):
    out, settings = tmp_path / "out", {"lam": 0.05, "round-timeout": 20.0}
    local = ct.federate(DATA, LOSS, 0.05)
    assert local.n_rounds > 4
    wire.submit(complete({**RUN, "n-users": 15, "out": str(out), **settings}))
    for line in wire.follow(out, 120.0):
        if line["iteration"] == 1:
            break
    wire.kill_node(2)
    wire.kill_link()
    assert (out / "checkpoint" / "state.coterie").exists()
    assert not (out / "run.json").exists()
    wire.start_link()
    wire.submit(complete({**RUN, "n-users": 15, "out": str(out), **settings}))
    wire.restart_node(2)
    lines = list(wire.follow(out, 240.0))
    info, result = runs.read(out)
    assert [line["iteration"] for line in lines] == list(range(len(lines)))  # no round twice, none left out
    assert info["status"] == "CONVERGED"
    assert info["gap"] <= 1e-6
    assert not info["aside"]
    assert info["objective"] == pytest.approx(local.objective, rel=2e-6)
    assert result["models"] == pytest.approx(local.models, abs=1e-3)


# Simulated


@pytest.mark.long
@pytest.mark.xdist_group("wire")
def test_a_thousand_simulated_users(tmp_path):
    """Twenty virtual nodes with fifty users each: every message has the questions for all of them."""
    options = {"n_users": 1000, "n_clusters": 4, "samples": 80, "n_features": 4, "separation": 3.0, "seed": 0}
    config = complete({
        "data": "dataset", "dataset": "clustered", "dataset-options": json.dumps(options), "split": True, "lam": 1.0,
        "weights": "wald", "loss": "logistic", "loss-options": '{"ridge": 0.001}', "n-users": 1000,
        "out": str(tmp_path / "out"), "wait": 120.0})
    with Cluster(tmp_path / "cluster", virtual=20) as cluster:
        cluster.submit(config)
        lines = list(cluster.follow(tmp_path / "out", 300.0))
        known = family([cluster.link.pid])
    assert alive(known) == []
    info, _ = runs.read(tmp_path / "out")
    local = ct.federate(clustered("logistic", **options).users, ct.Logistic(ridge=1e-3), 1.0, graph="wald")
    assert info["gap"] <= 1e-6
    assert info["n_users"] == 1000
    assert all(line["asked"] == line["answered"] == 1000 for line in lines)
    assert the_same(tmp_path / "out", local)


# The command


def command(*words: str, cwd: Path, timeout: float = 180) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COTERIE, "federate", *words], cwd=cwd, capture_output=True, text=True, timeout=timeout)


@pytest.mark.xdist_group("wire")
def test_the_command_simulates_what_it_computes(tmp_path):
    words = [str(spread(tmp_path)[0]), "--user", "who", "--target", "state", "--lam", "0.03"]
    for runtime in ("local", "flower-sim"):
        done = command("--runtime", runtime, "--local-cluster", "3", *words, "--out", runtime, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "certified gap" in done.stdout
    one, two = (runs.read(tmp_path / runtime) for runtime in ("local", "flower-sim"))
    assert np.array_equal(one[1]["models"], two[1]["models"])
    assert [one[0][name] for name in ("gap", "n_clusters", "n_rounds", "bytes")] == [
        two[0][name] for name in ("gap", "n_clusters", "n_rounds", "bytes")]
    lines = (tmp_path / "flower-sim" / "rounds.jsonl").read_text().splitlines()
    assert len(lines) == two[0]["n_rounds"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
@pytest.mark.xdist_group("wire")
def test_nothing_is_left_of_a_broken_off_run(tmp_path, number, code):
    process = subprocess.Popen(
        [*COTERIE, "federate", "--runtime", "flower", "--local-cluster", "1", "--dataset", "ellipses", "--max-rounds",
         "50", "--algorithm", "pdmm", "--lam", "0.02", "--out", "out"], cwd=tmp_path,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True)
    known: set[Any] = set()
    try:
        limit = time.monotonic() + 120
        while not (tmp_path / "out" / "rounds.jsonl").exists() or not (
                tmp_path / "out" / "rounds.jsonl").read_text().strip():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < limit
            time.sleep(0.1)
        known = family([process.pid])
        assert len(known) >= 5  # the command, SuperLink, SuperNode and their helpers
        process.send_signal(number)
        assert process.wait(30) == code
        limit = time.monotonic() + (1 if number == signal.SIGINT else 15)  # when killed, the watch does it
        while alive(known) and time.monotonic() < limit:
            time.sleep(0.1)
        assert [process.cmdline()[:3] for process in alive(known)] == []
    finally:
        end([process], at_once=True)
        for other in alive(known):
            other.kill()
        if process.stdout is not None:
            process.stdout.close()
    assert not (tmp_path / "out" / "run.json").exists()
    assert (tmp_path / "out" / "checkpoint" / "state.coterie").exists()


def test_what_flower_prints_is_not_coloured(tmp_path, monkeypatch):
    """Notebooks set FORCE_COLOR, and what Flower's commands print is read as JSON."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "FORCE_COLOR" not in Cluster(tmp_path).env


def test_apps_are_written(tmp_path):
    done = command("write-app", "--out", "app", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    written = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
    assert written["tool"]["flwr"]["app"]["config"] == CONFIG
    assert command("--runtime", "magic", "--dataset", "ellipses", cwd=tmp_path).returncode == 2
