"""A server that attacks a node gets nothing; each attack succeeds where nothing guards the node."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest
from support.nosy import Nosy

import coterie as ct
from coterie.base.errors import InvalidInput
from coterie.datasets import ellipses
from coterie.federated import sources
from coterie.federated.client import answer_all
from coterie.federated.node import Node
from coterie.federated.private.ledger import NodeLedger
from coterie.federated.protocol.messages import Query, square

USERS = ellipses(users_per_cluster=2, samples=30, seed=0).users
MODEL = np.array([0.1, -0.2, 0.3])


# -- code


def test_a_server_cannot_run_a_command(tmp_path):
    file = tmp_path / "stolen"
    options = json.dumps({"args": ["touch", str(file)]})
    with pytest.raises(InvalidInput, match="is not a loss"):
        sources.make_loss("subprocess:check_call", options)  # the attack
    assert file.exists()
    file.unlink()
    for own in ({}, None):
        nosy = Nosy(USERS, tmp_path / "users.npz", own, loss="subprocess:check_call", loss_options=options)
        with pytest.raises(PermissionError, match=r"may name the losses squared_hinge.*not 'subprocess:check_call'"):
            nosy.ask("gradient", model=MODEL)
    node = Node({"data": "subprocess:check_call", "args": ["touch", str(file)]}, {"simulation": True})
    assert "may name the data csv, parquet" in node.introduce()["error"]
    nosy = Nosy(USERS, tmp_path / "users.npz")
    with pytest.raises(PermissionError, match="may name the data"):
        nosy.ask("gradient", {"data": "subprocess:check_call"}, model=MODEL)
    assert not file.exists()


def test_the_owner_can_name_a_loss_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "own_loss.py").write_text("import coterie as ct\ndef make(ridge=0.5):\n"
                                          "    return ct.Logistic(ridge=ridge)\n")
    monkeypatch.syspath_prepend(tmp_path)
    agreed = {"loss": "own_loss:make", "loss_options": '{"ridge": 0.25}'}
    reply = Nosy(USERS, tmp_path / "a.npz", {"loss": "own_loss:make"}, **agreed).ask("gradient", model=MODEL)
    known = ct.Logistic(ridge=0.25)
    assert reply["gradient"] == pytest.approx(known.gradients(known.prepare(USERS.take([0])), MODEL[None])[0])
    with pytest.raises(PermissionError, match="may name the losses"):
        Nosy(USERS, tmp_path / "a.npz", {}, **agreed).ask("gradient", model=MODEL)


@pytest.mark.parametrize(("changes", "complaint"), [
    ({"loss_options": '{"n_classes": 999999}', "loss": "multinomial"}, "1000 classes"),
    ({"loss_options": '{"ridge": [1.0]}'}, "is no number"),
    ({"loss_options": '{"rigde": 1.0}'}, "has no setting 'rigde'"),
    ({"loss_options": '{"ridge": 1e300}'}, "is no number"),
    ({"loss_options": "[]"}, "no mapping"),
    ({"loss_options": "{" * 100}, "cannot be used"),
    ({"n_classes": 999_999}, "1000 classes"),
    ({"task": "theft"}, "no task 'theft'"),
    ({"mean": (0.0, 0.0), "scale": (1.0, 0.0)}, "not positive"),
    ({"mean": (0.0, float("nan")), "scale": (1.0, 1.0)}, "not finite"),
    ({"mean": (0.0,), "scale": (1.0,)}, "not those of the columns"),
    ({"run": "r" * 10_000}, "no short text"),
    ({"features": (1, 2)}, "columns must be texts"),
    ({"names": ({"a": 1},)}, "names must be"),
])
def test_agreements_are_checked_before_use(tmp_path, changes, complaint):
    Nosy(USERS, tmp_path / "a.npz", {}).ask("gradient", model=MODEL)  # the twin
    with pytest.raises(PermissionError, match=complaint):
        Nosy(USERS, tmp_path / "a.npz", {}, **changes).ask("gradient", model=MODEL)


@pytest.mark.parametrize("text", ["", "{}", "[1]", "null", "{" * 100_000, '{"names": 3}'])
def test_texts_that_are_no_agreement(tmp_path, text):
    nosy = Nosy(USERS, tmp_path / "a.npz", {})
    with pytest.raises(PermissionError, match="agreement cannot be used"):
        nosy.ask("gradient", {"agreement": text}, model=MODEL)


@pytest.mark.parametrize("said", [{"held_out": 1.5}, {"held_out": "many"}, {"seed": -1}, {"seed": 1 << 70}])
def test_settings_of_a_split_are_checked(tmp_path, said):
    with pytest.raises(PermissionError, match="cannot be used"):
        Nosy(USERS, tmp_path / "a.npz", {}).ask("gradient", said, model=MODEL)


# -- folders


def test_a_server_cannot_name_a_folder(tmp_path):
    stolen = tmp_path / "stolen"
    nosy = Nosy(USERS, tmp_path / "a.npz", {})
    nosy.ask("gradient", {"state-dir": str(stolen), "ledger-dir": str(stolen), "models-dir": str(stolen)}, model=MODEL)
    assert not stolen.exists()


# -- memory and work

EYE = np.array([1.0, 0, 0, 1, 0, 1])  # the triangle of a matrix
SUMMARY = {"centre": MODEL, "covariance": EYE[None], "step": 1.0, "rank": 1}
AROUND = {"centre": MODEL[None, None], "covariance": EYE[None, None]}
EVIDENCE = {**AROUND, "step": np.ones(1), "rank": np.array(1)}
BIG = np.array(2**31 - 1)
ATTACKS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("train", {"model": MODEL, "steps": np.array(3), "rate": 0.1}, {"steps": BIG}, "2,147,483,647 steps, and 10,000"),
    ("train", {"model": MODEL, "steps": np.array(3), "rate": 0.1}, {"steps": np.array(-1)}, "steps"),
    ("gradient", {"model": MODEL}, {"model": np.array([1e300, 0, 0])}, r"beyond 1e\+12"),
    ("expand", {"model": MODEL, "rank": 0}, {"anchor": np.zeros((50_000, 3))}, "more than"),
    ("expand", {"model": MODEL, "rank": 0}, {"anchor": np.zeros((2, 3))}, "more than one row"),
    ("local", {"ridge": 0.1}, {"ridge": -1.0}, "is negative"),
    ("prox", {"centre": MODEL, "t": 1.0}, {"t": -1.0}, "is negative"),
    ("summary", SUMMARY, {"rank": BIG}, "number of parts is not allowed"),
    ("summary", SUMMARY, {"rank": 0}, "number of parts is not allowed"),
    ("summary", SUMMARY, {"step": 0.0}, "not positive"),
    ("summary", SUMMARY, {"covariance": EYE[None].repeat(2, axis=0)}, "its covariance"),
    ("summary", SUMMARY, {"covariance": np.ones((1, 7))}, "its covariance"),
    ("summary", SUMMARY, {"covariance": -EYE[None]}, "not positive"),
    ("summary", SUMMARY, {"covariance": np.array([[1.0, 2, 0, 1, 0, 1]])}, "not positive"),
    ("summary", SUMMARY, {"centre": np.array([1e300, 0, 0])}, r"beyond 1e\+12"),
    ("evidence", EVIDENCE, {"step": np.zeros(1)}, "not positive"),
    ("evidence", EVIDENCE, {"step": np.ones(2)}, "not allowed"),
    ("evidence", EVIDENCE, {"covariance": EYE[None, None].repeat(9, axis=1)}, "not allowed"),
    ("evidence", EVIDENCE, {"covariance": -EYE[None, None]}, "not positive"),
    ("evidence", EVIDENCE, {name: EVIDENCE[name].repeat(2, axis=0) for name in (*AROUND, "step")}, "not allowed"),
    ("evidence", EVIDENCE, {"rank": np.array(2)}, "not allowed"),
    ("evidence", EVIDENCE, {"rank": np.array(-1)}, "not allowed"),
    ("around", AROUND, {"centre": np.zeros((1, 1, 4))}, "not allowed"),
    ("around", AROUND, {"centre": np.zeros((1, 3))}, "not allowed"),
    ("around", AROUND, {"covariance": EYE}, "not allowed"),
    ("around", AROUND, {name: array.repeat(0, axis=1) for name, array in AROUND.items()}, "not allowed"),
    ("around", AROUND, {name: array.repeat(10_001, axis=1) for name, array in AROUND.items()},
     "more than|not allowed"),
    ("join", {"models": MODEL[None], "noise": 1.0}, {"covariance": np.zeros((3, 6))}, "more than one row"),
    ("home", {"centre": MODEL, "covariance": np.array([[1.0, 0, 0, 1, 0, 1]]), "noise": 1.0},
     {"covariance": np.zeros((1, 7))}, "not allowed"),
    ("certify", {"model": MODEL, "slope": MODEL, "anchor": MODEL}, {"noise": np.ones(5)}, "more than one row"),
]


@pytest.mark.parametrize(("kind", "honest", "changes", "complaint"), ATTACKS,
                         ids=[f"{kind} {' '.join(changes)}" for kind, _, changes, _ in ATTACKS])
@pytest.mark.parametrize("own", [{}, None], ids=["owner's", "server's"])
def test_what_a_message_declares_is_bounded(tmp_path, kind, honest, changes, complaint, own):
    nosy = Nosy(USERS, tmp_path / "a.npz", own)
    assert nosy.ask(kind, **honest) is not None
    with pytest.raises(PermissionError, match=complaint):
        nosy.ask(kind, **{**honest, **changes})


def test_users_of_a_node_are_asked_one_question_at_a_time(tmp_path):
    """Otherwise the question of one user would be answered, and that of another counted."""
    nosy = Nosy(USERS, tmp_path / "a.npz", {})
    first = Query("evidence", 0, EVIDENCE)
    for other in (Query("evidence", 0, {**EVIDENCE, "covariance": 2 * EYE[None, None]}),
                  Query("evidence", 1, EVIDENCE), Query("gradient", 0, {"model": MODEL}),
                  Query("evidence", 0, {**EVIDENCE, "step": np.full(1, 2.0)}),
                  Query("evidence", 0, {**EVIDENCE, "rank": np.array(0)}),
                  Query("evidence", 0, {**EVIDENCE, **{name: array.repeat(2, axis=1)
                                                       for name, array in AROUND.items()}})):
        answers = nosy.send({0: first, 1: other})
        assert set(answers.replies) == {"0"}
        assert "different questions at once" in answers.refusals["1"]
    own = Query("evidence", 0, {**EVIDENCE, "centre": np.ones((1, 1, 3))})  # centres may be those of each user
    assert set(nosy.send({0: first, 1: own}).replies) == {"0", "1"}


def test_garbage_is_refused_and_strangers_are_ignored(tmp_path):
    node = Nosy(USERS, tmp_path / "a.npz", {}).node()
    good = Query("gradient", 0, {"model": MODEL}).encode()
    answers = node.answer({"0": b"hello", "1": good[:-1], "7": good, "[]": good, "{": good, '"0"': good})
    assert answers.replies == {}
    assert set(answers.refusals) == {"0", "1"}
    assert set(node.answer({"2": good}).replies) == {"2"}


# -- rows by splits


def row_by_split(nosy: Nosy, seed: int, rows: int) -> np.ndarray | None:
    """The row that a split takes out of the others: the difference of two Hessians of the squared loss."""
    question = {"model": np.zeros(3), "rank": -1}
    share = 1.0 / rows
    whole = rows * (square(nosy.ask("expand", **question)["hessian"][0], 3) - 1e-3 * np.diag([1, 1, 0]))
    part = (rows - 1) * (square(nosy.ask("expand", {"held_out": share, "seed": seed}, **question)["hessian"][0], 3)
                         - 1e-3 * np.diag([1, 1, 0]))
    values, vectors = np.linalg.eigh(whole - part)
    return None if values[-1] < 1e-9 else vectors[:2, -1] / vectors[2, -1]


@pytest.mark.slow
def test_no_split_of_the_server_singles_out_a_row(tmp_path):
    def rows_found(own: dict[str, Any] | None, name: str) -> int:
        nosy = Nosy(USERS, tmp_path / f"{name}.npz", own, loss="squared")
        known, found = USERS.features[:30], set()
        for seed in range(40):
            try:
                row = row_by_split(nosy, seed, 30)
            except PermissionError:
                continue
            distance = np.inf if row is None else np.abs(known - row).max(axis=1)
            found |= set(np.flatnonzero(distance < 1e-6).tolist())
        return len(found)

    assert rows_found(None, "servers") >= 15  # the attack, where nothing guards the rows
    assert rows_found({"max-hessians": 1000, "consent": "hessians"}, "owners") <= 1  # one split, for ever
    assert rows_found({"max-hessians": 1000}, "careful") == 0


def test_splits_are_the_nodes_own(tmp_path):
    nosy = Nosy(USERS, tmp_path / "a.npz", {})
    reply = [nosy.ask("gradient", {"held_out": 0.2, "seed": seed}, model=MODEL)["gradient"] for seed in range(5)]
    assert all(np.array_equal(reply[0], other) for other in reply)
    assert not np.array_equal(reply[0], nosy.ask("gradient", model=MODEL)["gradient"])
    with pytest.raises(PermissionError, match=r"lets the share 0.2 of the rows be held out, and 0.3 is asked for"):
        nosy.ask("gradient", {"held_out": 0.3}, model=MODEL)
    fit = Nosy(USERS, tmp_path / "a.npz", {"max-hessians": 100}, task="classification")
    left = [fit.ask("facts", {"held_out": 0.2, "seed": seed})["means"] for seed in range(4)]
    assert left[0].shape == (2, 2)  # of all rows, and of those that are not held out
    assert not np.array_equal(*left[0])
    assert all(np.array_equal(left[0], other) for other in left)
    public = Nosy(USERS, tmp_path / "b.npz", {"split-key": "public"})
    free = [public.ask("gradient", {"held_out": 0.2, "seed": seed}, model=MODEL)["gradient"] for seed in range(2)]
    assert not np.array_equal(*free)
    expected = USERS.hold_out(0.2, seed=1).train.take([0])
    assert free[1] == pytest.approx(ct.Logistic().gradients(ct.Logistic().prepare(expected), MODEL[None])[0])
    one, other = (Nosy(USERS, tmp_path / f"{key}.npz", {"split-key": key, "ledger-dir": str(tmp_path / key)}).ask(
        "gradient", {"held_out": 0.2}, model=MODEL)["gradient"] for key in ("cat", "dog"))
    assert not np.array_equal(one, other)


# -- rows by chosen models


def rows_by_bisection(nosy: Nosy, n_rows: int, n_questions: int) -> tuple[int, int]:
    """Rows found, and questions answered: along a line the Hessian of the squared hinge changes row by row."""
    direction, asked, found = np.array([0.6, -0.7, 0.4]), dict[float, np.ndarray](), list[np.ndarray]()

    def hessian(at: float) -> np.ndarray:
        if at not in asked:
            if len(asked) >= n_questions:
                raise PermissionError
            asked[at] = square(nosy.ask("expand", model=at * direction, rank=-1)["hessian"][0], 3)
        return asked[at]

    intervals = [(-64.0, 64.0)]
    try:
        while intervals:
            low, high = intervals.pop()  # the deepest first, which gives the first rows soonest
            values, vectors = np.linalg.eigh(hessian(high) - hessian(low))
            sizes = np.abs(values)
            if sizes.max() < 1e-12 or high - low < 1e-9:
                continue
            if np.sort(sizes)[-2] < 1e-9 * sizes.max():  # one row
                vector = vectors[:, sizes.argmax()]
                found.append(vector[:2] / vector[2])
            else:
                intervals += [(low, 0.5 * (low + high)), (0.5 * (low + high), high)]
    except PermissionError:
        pass
    known = nosy.users.features[:n_rows]
    near = [row for row in found if min(np.abs(known - row).max(axis=1).min(), np.abs(known + row).max(axis=1).min())
            < 1e-6]
    return len({tuple(np.round(row, 6)) for row in near}), len(asked)


@pytest.mark.slow
def test_chosen_models_give_rows_until_the_node_stops(tmp_path):
    users = ellipses(users_per_cluster=1, samples=100, seed=0).users
    unguarded = Nosy(users, tmp_path / "a.npz", {"max-hessians": 10_000, "max-questions": 10_000}, loss="squared_hinge")
    rows, questions = rows_by_bisection(unguarded, 100, 10_000)
    assert rows >= 90
    assert questions <= 200
    guarded = Nosy(users, tmp_path / "b.npz", {"ledger-dir": str(tmp_path / "other")}, loss="squared_hinge")
    rows, questions = rows_by_bisection(guarded, 100, 10_000)
    assert questions == 40
    assert rows <= 30
    with NodeLedger(tmp_path / "other") as ledger:
        left = ledger.answers()
    assert [line.reason for line in left[:40]] == [""] * 40
    assert left[40].reason == "it has answered 40 questions with Hessians about its rows, and its owner allows 40 " \
                              "(max-hessians)"
    guarded.ask("expand", model=-64.0 * np.array([0.6, -0.7, 0.4]), rank=-1)  # what was asked before is free


# -- work before it is done


def hard(k, dim=3, slopes=0):
    """A question about k centres."""
    eye = np.eye(dim)[np.triu_indices(dim)]
    return {"covariance": np.tile(eye, (1, k, 1)), "centre": np.ones((1, k, dim)), "step": np.ones(1), "rank": slopes}


def test_questions_that_would_be_too_many_are_refused_before_the_work(tmp_path, monkeypatch):
    from coterie.federated import node

    worked = []
    monkeypatch.setattr(node, "answer_all", lambda data, batch: worked.append(batch.kind) or answer_all(data, batch))
    nosy = Nosy(USERS, tmp_path / "a.npz", {"max-questions": 10})
    with pytest.raises(PermissionError, match=r"its owner allows 10 \(max-questions\)"):
        nosy.ask("evidence", **hard(40))
    with pytest.raises(PermissionError, match="max-questions"):
        nosy.ask("around", **{name: part for name, part in hard(40).items() if name in ("covariance", "centre")})
    assert worked == []
    assert nosy.ask("evidence", **hard(20))
    assert worked == ["evidence"]


def test_work_of_a_question_is_bounded_by_the_rows(tmp_path):
    many = ct.Users.from_arrays(np.tile(USERS.features, (40, 1)), np.tile(USERS.targets, 40), np.zeros(7200, dtype=int))
    nosy = Nosy(many, tmp_path / "a.npz", {"max-questions": 10**6})
    with pytest.raises(PermissionError, match="600 points, which is more work for 7,200 rows than a question may ask"):
        nosy.ask("evidence", **hard(600))
    assert nosy.ask("evidence", **hard(200))
    few = Nosy(USERS, tmp_path / "b.npz", {"max-questions": 10**6, "ledger-dir": str(tmp_path / "b")})
    assert few.ask("evidence", **hard(600))
    home = {"centre": MODEL, "covariance": np.tile([1.0, 0, 0, 1, 0, 1], (17, 1)), "noise": 1.0}
    with pytest.raises(PermissionError, match="17 covariances, and 16 are allowed"):
        few.ask("home", **home)


def test_a_message_that_takes_too_long_is_given_up(tmp_path, monkeypatch):
    from coterie.federated import node

    def slow(data, batch):
        for _ in range(400):
            time.sleep(0.01)
        return answer_all(data, batch)

    monkeypatch.setattr(node, "answer_all", slow)
    nosy = Nosy(USERS, tmp_path / "a.npz", {"max-seconds": 0.2})
    began = time.monotonic()
    with pytest.raises(PermissionError, match=r"worked on it for 0.2 seconds, and its owner allows no more"):
        nosy.ask("gradient", model=MODEL)
    assert time.monotonic() - began < 3.0
    with NodeLedger(tmp_path / "ledger") as ledger:
        assert "max-seconds" in ledger.answers()[-1].reason
    monkeypatch.setattr(node, "answer_all", answer_all)
    assert nosy.ask("gradient", model=MODEL)
