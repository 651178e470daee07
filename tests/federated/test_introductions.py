"""Nodes that lie about themselves are refused with a reason, and the run goes on with the others."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

import coterie as ct
from coterie.base.errors import Incompatible, InvalidInput
from coterie.data.merging import LONGEST, MOST_COLUMNS
from coterie.federated.admission import of_one_kind, recipe_of
from coterie.federated.agreement import Introduction, agree
from coterie.federated.algorithms.base import Replies
from coterie.federated.protocol.messages import Reply
from coterie.federated.runtimes.in_process import LocalNodes
from coterie.federated.settings import Deployment
from coterie.federated.sources import Table

USERS = ct.Users.from_arrays(np.random.default_rng(0).standard_normal((24, 2)), np.arange(24) % 3, np.arange(24) // 3)


def table():
    polars = pytest.importorskip("polars")
    rng = np.random.default_rng(0)
    return Table(frame=polars.DataFrame({
        "who": [f"u{k // 6}" for k in range(24)], "age": rng.normal(50, 9, 24), "since": ["2024-01-03"] * 24,
        "colour": [["red", "blue"][k % 2] for k in range(24)], "answer": [["yes", "no"][k % 2] for k in range(24)]}),
        user="who", target="answer")


PREPARED, SUMMARY = json.loads(Introduction.of(USERS).to_json()), json.loads(Introduction.of(table()).to_json())


def changed(said, *path_and_value):
    *path, last, value = path_and_value
    said = copy.deepcopy(said)
    inner = said
    for key in path:
        inner = inner[key]
    inner[last] = value
    return json.dumps(said)


NONSENSE = [
    "", "null", "7", "[]", "{}", "{", "[" * 200_000, '{"names": 1e999}', json.dumps({**PREPARED, "names": [["a"]]}),
    *(changed(PREPARED, "names", value) for value in (None, 7, "abc", {"a": 1}, [None], [{}], [True], [[1]], ["a", "a"],
                                                     [float("nan")], ["x" * (LONGEST + 1)], list(range(1_000_001)))),
    *(changed(PREPARED, "features", value) for value in (None, 7, [1], ["a", "a"], ["x" * 1_000_000], [""],
                                                        [f"c{k}" for k in range(MOST_COLUMNS + 1)])),
    *(changed(PREPARED, "n_classes", value) for value in (-1, 2**31, 1.5, None, "3", True)),
    changed(PREPARED, "targets", "others"), changed(PREPARED, "summary", 7), changed(PREPARED, "summary", {}),
    *(changed(SUMMARY, "summary", key, value) for key, value in (
        ("rows", -1), ("rows", 2**31), ("rows", "7"), ("users", 10**9), ("task", "anything"), ("user", 7),
        ("columns", 7), ("columns", [7]), ("columns", {}), ("answers", 7), ("named", 1))),
    *(changed(SUMMARY, "summary", "columns", 0, key, value) for key, value in (
        ("name", 7), ("name", "x" * 2000), ("kind", "magic"), ("rows", -5), ("rows", 10**6), ("missing", 99),
        ("missing", -1), ("levels", []), ("levels", {"counts": []}), ("order", None), ("numbers", {"low": 1}),
        ("written", "no"))),
    *(changed(SUMMARY, "summary", "columns", 0, "numbers", key, value) for key, value in (
        ("low", 1e300), ("high", "a"), ("mean", None), ("rows", 0), ("rows", 10**9), ("low", 1e9))),
    *(changed(SUMMARY, "summary", "answers", "levels", key, value) for key, value in (
        ("counts", {"yes": -1}), ("counts", {"yes": 10**9}), ("counts", {f"l{k}": 1 for k in range(1001)}),
        ("counts", {"x" * 2000: 1}), ("rare_rows", 10**9), ("rare_levels", -1))),
    changed(SUMMARY, "summary", "columns", 0, "order", "rising", [1, 2]),
]


@pytest.mark.parametrize("text", NONSENSE, ids=range(len(NONSENSE)))
def test_introductions_that_cannot_be_true_are_refused(text):
    with pytest.raises(ct.InvalidInput):
        Introduction.from_json(text)


def test_introductions_that_are_true_come_back():
    for source in (USERS, table()):
        one = Introduction.of(source)
        assert Introduction.from_json(one.to_json()) == one
    assert Introduction.from_json(changed(PREPARED, "names", ["a", 1, 2.5, ""])).names == ("a", 1, 2.5, "")


class Nodes(LocalNodes):
    """Nodes of which the first may say something else; `lie` changes the description of its first user."""

    def __init__(self, sources, lie=None, **said):
        super().__init__(sources)
        self.lie, self.said = lie, said

    def gather(self, n_users, wait):
        (label, first), *others = super().gather(n_users, wait)
        return [(label, first._replace(**self.said)), *others]

    def exchange(self, queries):
        pairs = [pair for batch in super().exchange(queries).batches for pair in batch.items()]
        names = self.data.samples.users.names
        return Replies(singles=tuple((user, self.lie(reply) if self.lie and names[user] == USERS.names[0] else reply)
                                     for user, reply in pairs))


SPREAD = [USERS.take([0, 1]), USERS.take([2, 3, 4]), USERS.take([5, 6, 7])]


def test_a_node_with_a_million_classes_is_refused_and_the_others_agree():
    agreement = agree(Nodes(SPREAD, n_classes=999_999), Deployment(loss="multinomial"))
    assert agreement.make_loss().n_classes == 3
    assert agreement.names == (2, 3, 4, 5, 6, 7)
    assert set(agreement.refused) == {0, 1}
    assert "999,999 classes" in agreement.refused[0]
    honest = agree(Nodes(SPREAD), Deployment(loss="multinomial"))
    assert honest.refused == {}
    assert len(honest.names) == 8


def test_if_all_declare_so_many_it_is_said():
    users = replace(USERS, targets=USERS.targets + 5000)
    with pytest.raises(ct.InvalidInput, match="5,003 classes"):
        agree(LocalNodes([users]), Deployment(loss="multinomial"))


def edited(**changes):
    def lie(reply):
        if reply.kind != "describe":
            return reply
        return Reply(reply.kind, reply.round, {name: np.asarray(changes[name](array)) if name in changes else array
                                               for name, array in reply.arrays.items()})
    return lie


@pytest.mark.parametrize(("lie", "reason"), [
    (edited(count=lambda c: c * 0 - 5), "no number of rows"), (edited(count=lambda c: c * 0 + 2.0**31), "no number of"),
    (edited(m2=lambda v: v * 0 + 1e300), "beyond"), (edited(m2=lambda v: -v), "negative"),
    (edited(means=lambda v: v + 1e12), "out of all proportion"), (edited(count=lambda c: c * 0 + 1e9), "proportion"),
    (edited(means=lambda v: v[:1]), "does not describe the columns"),
    (edited(means=lambda v: v * np.nan), "does not describe the columns"),
])
def test_users_who_lie_about_their_rows_do_not_move_the_scaling(lie, reason, caplog):
    data = Deployment(loss="squared", standardize="true")
    agreement = agree(Nodes(SPREAD, lie), data)
    assert reason in agreement.refused[0]
    assert reason in caplog.text
    honest = agree(LocalNodes([USERS.take(np.arange(1, 8))]), data)
    assert agreement.names == honest.names
    assert (agreement.mean, agreement.scale) == (honest.mean, honest.scale)
    assert agree(Nodes(SPREAD), data).refused == {}


def test_who_was_refused_is_shown_by_the_run(tmp_path):
    from coterie.federated import entry
    from coterie.federated.settings import Deployment

    config = Deployment.of({"out": str(tmp_path), "loss": "squared", "lam": 0.1, "standardize": "true"})
    served = entry.serve(Nodes(SPREAD, edited(m2=lambda v: -v)), config)
    assert "negative" in served.aside[0]
    assert served.models.shape[0] == 7
    again = entry.serve(Nodes(SPREAD), config)  # continued from the checkpoint
    assert again.aside == served.aside


# -- on a grid of Flower, without a network


@pytest.mark.flower
@pytest.mark.parametrize("text", ["{", "[" * 200_000, changed(PREPARED, "names", [["a"], {"b": 1}]),
                                  changed(PREPARED, "n_classes", -1), changed(SUMMARY, "summary", "rows", 2**40)])
def test_the_server_goes_on_without_a_node_that_lies(tmp_path, monkeypatch, text, caplog):
    pytest.importorskip("flwr", reason="the extra flower is not installed")
    from flwr.app import ConfigRecord, RecordDict
    from flwr.app import Message as Envelope
    from flwr.supercore.task_identity import TaskIdentity
    from support.grid import Nodes as Grid

    from coterie.federated import entry
    from coterie.federated.flower import FlowerRuntime
    from coterie.federated.protocol.messages import VERSION
    from coterie.federated.settings import Deployment, complete, for_nodes

    for name in ("_run_id", "_node_id", "_task_id"):  # nobody writes a message outside a task
        monkeypatch.setattr(TaskIdentity, name, 1)
    configs = []
    for k, users in enumerate(SPREAD):
        np.savez(tmp_path / f"{k}.npz", X=users.features, y=users.targets, user=np.array(users.names)[users.owner])
        configs.append({"data": "npz", "path": str(tmp_path / f"{k}.npz"), "split-key": "public"})
    grid = Grid(configs)

    def spoil(node, message, answer):
        if node != 100 or "queries" in message.content:
            return answer()
        said = ConfigRecord({"introduction": text, "version": VERSION})
        return Envelope(RecordDict({"users": said}), reply_to=message)

    grid.spoil = spoil
    config = complete({"out": str(tmp_path / "out"), "loss": "squared", "lam": 0.1, "wait": 0.1, "n-users": 8})
    served = entry.serve(FlowerRuntime(grid, for_nodes(config), deadline=5.0, poll=0.001), Deployment.of(config))
    assert list(served.aside) == ["node 100"]
    assert "node 100 cannot take part" in caplog.text
    assert served.models.shape[0] == 6
    assert served.status is ct.Status.CONVERGED


# -- nodes that do not fit


def introduced(*names, **more):
    return Introduction(names=names, features=("x0", "x1"), **more)


def test_a_node_with_other_columns_is_set_aside_by_name():
    nodes = [("one", introduced("a")), ("two", introduced("b")), ("three", introduced("c")._replace(features=("z",)))]
    kept, reasons = of_one_kind(nodes)
    assert [label for label, _ in kept] == ["one", "two"]
    assert list(reasons) == ["c"]
    assert "x0, x1 (one) and z (three)" in reasons["c"]
    assert of_one_kind(kept) == (kept, {})
    with pytest.raises(Incompatible, match="different columns"):  # nobody knows which of two is wrong
        of_one_kind(nodes[1:])


def test_a_node_with_another_kind_of_data_is_set_aside(tmp_path):
    frames = [pl.DataFrame({"who": [name] * 6, "x": x, "y": [1.5, 2, 3, 4, 5, 7]}) for name, x in (
        ("a", [1.5, 2, 3, 5, 8, 9]), ("b", [2.5, 2, 3, 4, 5, 6]), ("c", ["p", "q"] * 3))]
    tables = [(f"node {k}", Introduction.of(Table(frame=frame, user="who", target="y")))
              for k, frame in enumerate(frames)]
    recipe, kept, reasons = recipe_of(tables)
    assert recipe.feature_names == ("x",)
    assert [label for label, _ in kept] == ["node 0", "node 1"]
    assert list(reasons) == ["c"]
    assert "node 2 has a table that does not fit the others" in reasons["c"]
    with pytest.raises(InvalidInput):  # the twin: two nodes
        recipe_of(tables[1:])
    numbers = ("npz", Introduction(names=("d",), features=("x",)))
    kept, reasons = of_one_kind([*tables[:2], numbers])
    assert [label for label, _ in kept] == ["node 0", "node 1"]
    assert "prepared numbers" in reasons["d"]
