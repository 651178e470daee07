"""What the owner of a node allows, and what a run makes of its refusals."""

from __future__ import annotations

import json
import stat
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from support.nosy import Nosy

import coterie as ct
from coterie.base.errors import InvalidInput
from coterie.data.encoding import Recipe
from coterie.datasets import clustered, ellipses
from coterie.federated.agreement import Agreement
from coterie.federated.algorithms.base import Federation
from coterie.federated.client import Data
from coterie.federated.contract import Contract
from coterie.federated.guard import default_folder, row_digests
from coterie.federated.node import Node
from coterie.federated.private.ledger import NodeLedger
from coterie.federated.protocol.messages import Query, decode, triangle
from coterie.federated.run import run_federation
from coterie.federated.runtimes.in_process import LocalRuntime
from coterie.federated.settings import FederationSettings
from coterie.federated.sources import Table

USERS = ellipses(users_per_cluster=2, samples=30, seed=0).users
FEW = clustered("logistic", n_users=3, samples=8, n_features=9, seed=0).users  # 8 rows, 10 coordinates
MODEL = np.array([0.1, -0.2, 0.3])


def about(kind, centres):
    """A question of a fit about all rows, at k centres; a summary is taken around the first."""
    k, dim = centres.shape
    if kind == "summary":
        return {"centre": centres[0], "covariance": triangle(np.eye(dim)[None]), "step": 1.0, "rank": 1}
    question = {"centre": centres[None], "covariance": triangle(np.eye(dim)[None].repeat(k, axis=0))[None]}
    return question if kind == "around" else {**question, "step": np.ones(1), "rank": 0}


# -- consent


def test_few_rows_send_a_bound_instead_of_a_hessian(tmp_path):
    model = np.linspace(-0.5, 0.5, 10)
    reply = Nosy(FEW, tmp_path / "a.npz", {}).ask("expand", model=model, rank=0)
    assert set(reply) == {"value", "gradient", "diagonal"}
    loss = ct.Logistic()
    exact = loss.evaluate(loss.prepare(FEW.take([0])), model[None], 2)
    assert np.array_equal(reply["gradient"], exact.gradients[0])
    largest = np.linalg.eigvalsh(exact.hessians[0])[-1]
    assert largest <= reply["diagonal"][0] <= 1.5 * largest
    for own in ({"consent": "hessians"}, None):
        assert "diagonal" not in Nosy(FEW, tmp_path / "a.npz", own).ask("expand", model=model, rank=0)


def test_only_those_with_few_rows_do(tmp_path):
    rows = np.concatenate([np.arange(5), np.arange(30, 60)])  # user 0 has 5 rows, user 1 has 30
    users = ct.Users.from_arrays(np.tile(USERS.features[rows], (1, 4)), USERS.targets[rows], USERS.owner[rows])
    nosy = Nosy(users, tmp_path / "a.npz", {})
    answers = nosy.send(dict.fromkeys((0, 1), Query("expand", 0, {"model": np.zeros(9), "rank": np.array(0)})))
    replies = [decode(answers.replies[key]).arrays for key in ("0", "1")]
    assert [set(reply) - {"value", "gradient"} for reply in replies] == [{"diagonal"}, {"hessian"}]


HESSIANS = {
    "local": {"ridge": 0.1}, "moments": {},
    "summary": {"centre": np.zeros(10), "covariance": triangle(np.eye(10)[None]), "step": 1.0, "rank": 1}}


@pytest.mark.parametrize("kind", HESSIANS)
def test_few_rows_need_consent(tmp_path, kind):
    arrays = HESSIANS[kind]
    with pytest.raises(PermissionError, match=r"no more rows than coordinates.*consent = .*private release"):
        Nosy(FEW, tmp_path / "a.npz", {}).ask(kind, **arrays)
    for own in ({"consent": "hessians"}, None):
        assert Nosy(FEW, tmp_path / "a.npz", own).ask(kind, **arrays)
    many = clustered("logistic", n_users=3, samples=60, n_features=9, seed=0).users
    assert Nosy(many, tmp_path / "b.npz", {"ledger-dir": str(tmp_path / "b")}).ask(kind, **arrays)
    if kind == "summary":  # without Hessians they are among the many questions of a fit
        for other in ("evidence", "around"):
            with pytest.raises(PermissionError, match="fewer than 30 rows"):
                Nosy(FEW, tmp_path / "a.npz", {}).ask(other, **about(other, np.zeros((1, 10))))


@pytest.mark.parametrize("kind", ["summary", "evidence", "around"])
def test_a_fit_asks_nothing_of_a_few_more_rows_than_coordinates(tmp_path, kind):
    """Measured: its gradients give rows of such users away."""
    some = clustered("logistic", n_users=3, samples=25, n_features=2, seed=0).users  # 3 coordinates
    enough = clustered("logistic", n_users=3, samples=30, n_features=2, seed=0).users
    question = about(kind, np.zeros((1, 3)))
    with pytest.raises(PermissionError, match=r"fewer than 30 rows.*consent = .*private release"):
        Nosy(some, tmp_path / "a.npz", {}).ask(kind, **question)
    assert Nosy(some, tmp_path / "a.npz", {"consent": "hessians"}).ask(kind, **question)
    assert Nosy(enough, tmp_path / "b.npz", {"ledger-dir": str(tmp_path / "b")}).ask(kind, **question)


@pytest.mark.parametrize("kind", ["describe", "facts"])
def test_means_of_one_or_two_rows_stay(tmp_path, kind):
    for rows in (1, 2, 3):
        users = ct.Users.from_arrays(USERS.features[:rows], USERS.targets[:rows], np.zeros(rows, dtype=int))
        nosy = Nosy(users, tmp_path / f"{rows}.npz", {"ledger-dir": str(tmp_path / str(rows))})
        if rows < 3:
            with pytest.raises(PermissionError, match="fewer than 3 rows"):
                nosy.ask(kind)
        else:
            assert nosy.ask(kind)["count"].sum() == 3


def test_moments_of_few_held_out_rows_stay(tmp_path):
    """Second moments of two rows are the rows, also as the difference of two others."""
    users = clustered("squared", n_users=3, samples=12, n_features=3, seed=0).users
    attack = Nosy(users, tmp_path / "a.npz", None, task="regression").ask("moments", {"held_out": 0.17})
    assert attack["count"].tolist() == [10, 2]
    scatter = np.zeros((4, 4))
    scatter[np.triu_indices(4)] = attack["scatter"][1]
    half = np.sqrt(np.diag(scatter) / 2) * np.sign(scatter[0] + 1e-300)
    rows = np.column_stack([users.features[:12], users.targets[:12]])
    pair = attack["means"][1] + np.array([[1.0], [-1.0]]) * half
    assert all(np.abs(rows - row).max(axis=1).min() < 1e-9 for row in pair)  # the attack
    careful = Nosy(users, tmp_path / "a.npz", {"holdout": 0.17}, task="regression").ask("moments", {"held_out": 0.17})
    assert careful["count"].tolist() == [12, 0]
    agreeing = {"consent": "hessians", "holdout": 0.17, "ledger-dir": str(tmp_path / "b")}
    consent = Nosy(users, tmp_path / "a.npz", agreeing, task="regression").ask("moments", {"held_out": 0.17})
    assert consent["count"].tolist() == [10, 2]


def test_newton_converges_without_hessians():
    users = clustered("logistic", n_users=9, samples=8, n_features=9, seed=1).users
    data = Data.of(users, ct.Logistic(ridge=0.05))
    problem = ct.Problem(users, data.loss, lam=0.02)
    shy = LocalRuntime(replace(data, withheld=np.ones(9, dtype=bool)))
    settings, federation = FederationSettings(lam=0.02, tol=1e-9), Federation.of(problem)
    run, exact = (run_federation(federation, settings, runtime, problem=problem)
                  for runtime in (shy, LocalRuntime(data)))
    assert run.status == exact.status == ct.Status.CONVERGED
    assert run.models == pytest.approx(exact.models, abs=1e-4)
    assert run.ledger.total(field="hessian") == run.ledger.total(field="factor") == 0
    assert exact.ledger.total(field="hessian") > 0
    assert run.n_rounds > exact.n_rounds


# -- limits


def test_questions_are_counted_once_and_refused_beyond_the_limit(tmp_path):
    nosy = Nosy(USERS, tmp_path / "a.npz", {"max-questions": 3})
    first = nosy.ask("gradient", model=MODEL)
    nosy.ask("gradient", model=2 * MODEL)
    nosy.ask("gradient", model=3 * MODEL)
    for turn in range(5):  # the same question is free
        assert np.array_equal(nosy.ask("gradient", turn=turn, model=MODEL)["gradient"], first["gradient"])
    with pytest.raises(PermissionError, match=r"answered 3 questions about its rows.*allows 3 \(max-questions\)"):
        nosy.ask("gradient", model=4 * MODEL)
    agreed = Nosy(USERS, tmp_path / "a.npz", {"max-questions": 3}, loss_options='{"ridge": 1.0}')
    with pytest.raises(PermissionError):  # the same point of another loss is another question
        agreed.ask("gradient", model=MODEL)
    with pytest.raises(PermissionError):
        nosy.ask("around", **about("around", np.eye(3)))
    assert nosy.send({1: Query("gradient", 0, {"model": MODEL})}).replies  # of another user
    more = ct.Users.from_arrays(USERS.features + 1e-9, USERS.targets, USERS.owner)
    assert Nosy(more, tmp_path / "a.npz", {"max-questions": 3}).ask("gradient", model=4 * MODEL)  # other rows


def test_a_question_counts_once_for_every_model_that_its_answer_holds(tmp_path):
    nosy = Nosy(USERS, tmp_path / "a.npz", {"max-questions": 10, "max-hessians": 1})
    with pytest.raises(PermissionError, match="max-questions"):
        nosy.ask("around", **about("around", np.ones((11, 3))))
    with pytest.raises(PermissionError, match="max-questions"):
        nosy.ask("evidence", **about("evidence", np.ones((40, 3))))
    with pytest.raises(PermissionError, match="max-questions"):
        nosy.ask("evidence", **{**about("evidence", np.ones((9, 3))), "rank": 9})
    assert nosy.ask("around", **about("around", np.ones((2, 3))))
    assert nosy.ask("summary", **about("summary", np.ones((1, 3))))
    with pytest.raises(PermissionError, match="max-hessians"):
        nosy.ask("summary", **about("summary", np.zeros((1, 3))))


def test_limits_follow_from_the_rows(tmp_path):
    """A loss with kinks gives a row for every few gradients on a line."""
    for loss, rows, most in (("squared_hinge", 30, 100), ("squared_hinge", 150, 150), ("logistic", 30, 1000)):
        users = clustered("logistic", n_users=3, samples=rows, n_features=2, seed=0).users
        nosy = Nosy(users, tmp_path / f"{most}.npz", {"ledger-dir": str(tmp_path / str(most))}, loss=loss)
        with pytest.raises(PermissionError, match=f"allows {most} "):
            nosy.ask("evidence", **about("evidence", np.ones((3 * most + 6, 3))))
        assert nosy.ask("evidence", **about("evidence", np.ones((3 * most + 3, 3))))


def test_edges_at_the_users_are_not_for_nodes(tmp_path):
    nosy = Nosy(USERS, tmp_path / "a.npz", {})
    query = {"step": np.array(1), "settings": np.ones(6), "models": np.zeros((0, 3)), "who": np.zeros(0, np.int32)}
    with pytest.raises(PermissionError, match="nodes store nothing"):
        nosy.ask("pdmm", **query, point=np.zeros((1, 3)), tails=np.zeros(1))


def test_kinds_that_are_not_allowed(tmp_path):
    nosy = Nosy(USERS, tmp_path / "a.npz", {"allow": "gradient, certify"})
    assert nosy.ask("gradient", model=MODEL)
    with pytest.raises(PermissionError, match="does not allow questions of the kind 'expand'"):
        nosy.ask("expand", model=MODEL, rank=0)


@pytest.mark.parametrize(("own", "complaint"), [
    ({"allow": "gossip"}, "no kind of question"), ({"consent": "everything"}, "consent can be given to hessians"),
    ({"max-questions": -1}, "must not be negative"), ({"max-hessians": "many"}, "Give an integer"),
    ({"budget-epsilon": "4"}, "Give a number"), ({"split-key": 7}, "Give a text")])
def test_owners_settings_that_cannot_be_used(own, complaint):
    with pytest.raises(InvalidInput, match=complaint):
        Contract.of(own)
    assert Contract.of({"allow": "release, expand", "consent": "hessians"}).allowed_kinds == ("release", "expand")


# -- the ledger of a node


def test_the_log_has_every_answer_and_refusal(tmp_path):
    nosy = Nosy(USERS, tmp_path / "a.npz", {"max-questions": 1})
    nosy.ask("gradient", model=MODEL)
    for change in ({"model": 2 * MODEL}, {"model": np.full(3, 1e13)}):
        with pytest.raises(PermissionError):
            nosy.ask("gradient", turn=1, **change)
    with NodeLedger(tmp_path / "ledger") as ledger:
        lines = ledger.answers()
    assert [(line.run, line.round, line.user, line.kind) for line in lines] == [
        ("r", 0, 0, "gradient"), ("r", 1, 0, "gradient"), ("r", 1, 0, "gradient")]
    assert lines[0].numbers == 6
    assert lines[0].bytes > 48
    assert not lines[0].reason
    assert [bool(line.reason) and line.numbers == 0 for line in lines] == [False, True, True]


def test_ledgers_are_where_the_owner_says_or_by_the_data(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    nosy = Nosy(USERS, tmp_path / "a.npz", {"ledger-dir": ""})
    nosy.ask("gradient", model=MODEL)
    folder = default_folder(Contract.of(nosy.own))
    assert folder.parent == tmp_path / "state" / "coterie"
    assert (folder / "ledger.db").exists()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert default_folder(Contract.of({**nosy.own, "features": "x"})) == folder  # the rows are the same
    assert default_folder(Contract.of({**nosy.own, "path": "b.npz"})) != folder
    one, other = (Contract.of({"data": "my:load", "args.folder": name}) for name in "ab")
    assert default_folder(one) != default_folder(other)
    before = sorted(tmp_path.rglob("*"))
    Nosy(USERS, tmp_path / "a.npz", None).ask("gradient", model=MODEL)  # the server's data have no ledger
    assert sorted(tmp_path.rglob("*")) == before


def test_rows_are_known_by_their_values():
    frame = pl.DataFrame({"who": ["a", "b", "a"], "x": [1.0, 2.0, 3.0], "y": ["u", "v", "w"]})
    table = Table(frame=frame, user="who")
    digests = row_digests(table)
    assert set(digests) == {"a", "b"}
    assert row_digests(replace(table, frame=frame[[2, 1, 0]])) == digests
    assert row_digests(replace(table, features=("x",), task="regression")) == digests
    changed = row_digests(replace(table, frame=frame.with_columns(x=pl.Series([1.0, 2.0, 4.0]))))
    assert changed["b"] == digests["b"]
    assert changed["a"] != digests["a"]
    assert len(set(row_digests(USERS).values())) == USERS.n_users


def test_why_data_cannot_be_read_stays_at_the_node(tmp_path, caplog):
    file = tmp_path / "t.csv"
    file.write_text("who,x,y\na,1,2\na,secret,3\na,2,2.5\n")
    nosy = Nosy(USERS, tmp_path / "a.npz", {})
    nosy.own |= {"data": "csv", "path": str(file), "user": "who", "target": "y"}
    with pytest.raises(PermissionError, match="the node's own log says why"):
        nosy.ask("gradient", model=MODEL)
    assert "cannot answer" in caplog.text
    assert "agreed on prepared numbers" in caplog.text


def test_a_summary_of_two_rows_stays(tmp_path):
    file = tmp_path / "t.csv"
    own = {"data": "csv", "path": str(file), "user": "who", "target": "y", "ledger-dir": str(tmp_path / "ledger")}
    file.write_text("who,x,y\na,1.5,2.5\nb,2.5,3.5\n")
    assert "fewer than 3 rows" in Node({}, own).introduce()["error"]
    assert "summary" in Node({}, {**own, "consent": "hessians"}).introduce()["introduction"]
    file.write_text("who,x,y\na,1.5,2.5\nb,2.5,3.5\nb,3.5,4.5\n")
    said = Node({"run": "r"}, own).introduce()["introduction"]
    with NodeLedger(tmp_path / "ledger") as ledger:
        line = ledger.answers()[-1]
    assert (line.kind, line.run, line.bytes, line.user) == ("introduction", "r", len(said), None)


def test_columns_asked_a_few_at_a_time_count_all(tmp_path):
    """A table of nine columns and eight rows: an agreement on two of them does not make Hessians harmless."""
    rng, file = np.random.default_rng(0), tmp_path / "t.csv"
    names = [f"x{k}" for k in range(9)]
    frame = pl.DataFrame({"who": ["a"] * 8, **{name: rng.normal(size=8) for name in names},
                          "y": rng.normal(size=8)})
    frame.write_csv(file)
    few = Recipe.learn(frame.select("who", "x0", "x1", "y"), user="who", target="y")
    nosy = Nosy(USERS, tmp_path / "a.npz", {}, recipe=few, loss="", units=None)
    nosy.agreed |= {"names": ("a",), "features": few.feature_names, "task": "regression"}
    nosy.users = few.encode(frame)
    own = {"data": "csv", "path": str(file), "user": "who", "target": "y"}
    nosy.own |= own
    with pytest.raises(PermissionError, match="no more rows than coordinates"):
        nosy.ask("moments")
    nosy.own |= {"features": "x0, x1"}  # the owner's own choice
    assert nosy.ask("moments")["count"].tolist() == [8]


def test_agreement_names_do_not_make_a_question_new():
    one = Agreement(names=(1, 2), features=("x",), run="a", loss="logistic")
    assert one.digest == replace(one, run="b", names=(1,)).digest != replace(one, loss="squared").digest
    assert json.loads(one.to_json())["run"] == "a"
