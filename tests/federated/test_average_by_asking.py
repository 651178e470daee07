"""A federation of numbers averages kinds of models as a table does, by sums of its users."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import coterie as ct
from coterie.base.errors import InvalidInput
from coterie.base.storage import packed, square, triangle, unpacked
from coterie.federated.bounds import objection
from coterie.federated.client import Data
from coterie.federated.contract import Contract
from coterie.federated.fit import fit_federation
from coterie.federated.guard import Guard
from coterie.federated.protocol.messages import REFUSES, Query
from coterie.federated.runtimes.in_process import LocalNodes
from coterie.federated.settings import Deployment
from coterie.fitting import Settings, fit
from coterie.fitting.basis import Basis, Grid
from coterie.fitting.candidates import Limits, Scale, forms_of, learn_numbers
from coterie.fitting.columns import (
    ColumnFrame,
    GridQuestion,
    LeftOutQuestion,
    Shared,
    SumsQuestion,
    question_of,
)
from coterie.fitting.sources import pooled_moments
from coterie.lab.attacks.simulation import Recorder


def bent(n_users: int = 12, rows: int = 40, *, seed: int = 0, positive: bool = False) -> ct.Users:
    """Users whose intercepts differ, and who share a curve of x0; x1 is straight."""
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(n_users), rows)
    X = rng.uniform(-2.0, 2.0, (len(owner), 2))
    y = (2.0 * np.cos(2.0 * X[:, 0]) + 0.5 * X[:, 1] + rng.normal(0, 1.0, n_users)[owner]
         + 0.3 * rng.normal(size=len(owner)))
    if positive:
        X[:, 1], y = np.exp(X[:, 1]), np.exp(y)
    return ct.Users.from_arrays(X, y, [f"u{i:02d}" for i in owner])


@pytest.fixture(scope="module")
def asked() -> tuple[ct.Fit, Recorder]:
    """The fit of a federation, and what was sent."""
    recorder = Recorder(LocalNodes([bent()], 0.2))
    deployment = Deployment(loss="squared", standardize="True", holdout=0.2)
    return fit_federation(recorder, deployment, Settings(task="regression", loss="squared")), recorder


def frame_of(users: ct.Users, width: int = 2) -> ColumnFrame:
    """A frame of straight columns and curves."""
    grid = Grid.of(*pooled_moments(users)[1:])
    question = GridQuestion(grid, pulls=False)
    sketch = question.pool([question.answer(users, {})])
    basis = Basis.learn(sketch, grid).with_curves(sketch, width)
    return ColumnFrame("regression", 0, (Scale(basis, False, 0.0, 1.0),), Limits(-9.0, 9.0))


@pytest.mark.parametrize("positive", [False, True])
def test_the_parts_of_an_average_by_asking_have_the_bits_of_a_table(positive):
    """Weights compare parts with the kind, which a federation chooses on rows with the same moments, to rounding."""
    users = bent(positive=positive)
    there, here = ct.federate(users), fit(users, Settings(task="regression"))
    assert there.average.used
    assert there.average.weights == pytest.approx(here.average.weights, rel=1e-9)
    np.testing.assert_allclose(there.average.quantiles, here.average.quantiles, rtol=1e-9)
    for mine, theirs in zip(there.average.parts, here.average.parts, strict=True):
        assert mine.estimate.mean.tobytes() == theirs.estimate.mean.tobytes()
        assert mine.estimate.personal.tobytes() == theirs.estimate.personal.tobytes()
        assert mine.gradient < 1e-8
    assert len(there.history) <= 10
    np.testing.assert_allclose(there.scores.fitted, here.scores.fitted, rtol=1e-9)
    other = fit(bent(seed=1, positive=positive), Settings(task="regression"))  # the twin
    assert other.average.weights != pytest.approx(here.average.weights, rel=1e-9)


def test_neither_nodes_nor_the_order_of_answers_matter():
    users = bent()
    plain = ct.federate(users)
    patchy = ct.federate(users, participation=0.4, faults=ct.Faults(drop=0.1, late=0.1))
    nodes = LocalNodes([users.take(np.arange(0, 12, 2)), users.take(np.arange(1, 12, 2))], 0.2)
    deployment = Deployment(loss="squared", standardize="True", holdout=0.2)
    spread = fit_federation(nodes, deployment, Settings(task="regression", loss="squared"))
    for other in (patchy, spread):
        assert other.average.weights == plain.average.weights
        assert other.predict(users)["prediction"].to_list() == plain.predict(users)["prediction"].to_list()


def test_sums_leave_users_and_no_rows(asked):
    fitted, recorder = asked
    kinds = [queries.kind for queries, _ in recorder.exchanges]
    assert kinds == ["moments", *["average"] * 8, "certify"]
    longest = 40  # rows of a user
    for queries, replies in recorder.exchanges:
        for name, array in replies.arrays.items():
            assert array.shape[1:] != (longest,), (queries.kind, name)
    assert fitted.average.used


def test_a_federation_without_an_average_has_two_rounds():
    plain = ct.federate(bent(), settings=Settings(average="off"))
    assert plain.average is None
    assert [line.stage for line in plain.history] == ["moments", "certify"]


def test_a_saved_federation_predicts_explains_and_certifies(tmp_path):
    users = bent()
    fitted = ct.federate(users)
    run = ct.load_run(fitted.save(tmp_path / "run"))
    mine, theirs = (one.predict(users, interval=0.9) for one in (fitted, run))
    for name in ("prediction", "low", "high"):
        assert mine[name].to_list() == theirs[name].to_list()
    assert run.info["average"]["weights"] == fitted.average.weights
    assert run.certify(users).relative_gap <= 1e-6
    new = bent(1, seed=5)
    joined = fitted.personalize(replace(new, names=("new",)))
    assert joined.models.shape == fitted.models[:1].shape


def test_without_consent_users_with_few_rows_give_no_sums():
    users = bent(4, 60)
    contract = Contract.of({"data": "npz", "path": "x.npz"})
    data = Data.of(users, ct.Squared())
    question = SumsQuestion(frame_of(users))
    query = Query("average", 0, {"stage": np.array(1), "rank": np.array(0), "who": np.array(0),
                                 "settings": packed(question.arrays())})
    with Guard(contract, users) as guard:
        assert 5 * (1 + question.frame.scales[0].basis.width) > 60
        assert "fifth" in guard.objection(data, 0, query)
    many = bent(4, 400)
    with Guard(contract, many) as guard:
        assert guard.objection(Data.of(many, ct.Squared()), 0, query) == ""
    with Guard(Contract.of({"data": "npz", "path": "x.npz", "consent": "hessians"}), users) as guard:
        assert guard.objection(data, 0, query) == ""


def test_who_declines_is_not_set_aside_and_there_is_no_average(monkeypatch):
    nodes = LocalNodes([bent()], 0.2)
    exchange = nodes.exchange

    def refusing(queries):
        replies = exchange(queries)
        if queries.kind != "average":
            return replies
        return replies._replace(batches=(replies.batches[0].take(np.arange(1, len(queries))),),
                                refused=((int(queries.users[0]), REFUSES + "its owner does not"),))

    monkeypatch.setattr(nodes, "exchange", refusing)
    deployment = Deployment(loss="squared", standardize="True", holdout=0.2)
    fitted = fit_federation(nodes, deployment, Settings(task="regression", loss="squared"))
    assert fitted.average is None
    assert "There is no average of kinds of models: 'u00' does not answer: its owner does not." in fitted.why
    assert not fitted.account.aside
    assert len(fitted.solution.models) == 12


@pytest.mark.parametrize(("field", "change"), [
    ("values", lambda x: -x), ("count", lambda x: x + 1), ("hessian", lambda x: -x),
    ("gradient", lambda x: 1e3 * x + 1e3)])
def test_who_lies_is_set_aside(monkeypatch, field, change):
    nodes = LocalNodes([bent()], 0.2)
    exchange = nodes.exchange

    def lying(queries):
        replies = exchange(queries)
        if queries.kind == "average" and field in replies.batches[0].arrays:
            batch = replies.batches[0]
            row = int(np.flatnonzero(batch.users == 3)[0]) if 3 in batch.users and len(queries) == 12 else -1
            if row >= 0:
                array = batch.arrays[field].copy()
                array[row] = change(array[row])
                batch.arrays[field] = array
        return replies

    monkeypatch.setattr(nodes, "exchange", lying)
    deployment = Deployment(loss="squared", standardize="True", holdout=0.2)
    fitted = fit_federation(nodes, deployment, Settings(task="regression", loss="squared"))
    assert set(fitted.account.aside) == {"u03"}
    assert fitted.average.used


def test_questions_survive_the_wire_and_others_are_refused():
    users = bent(3)
    frame = frame_of(users)
    numbers = packed(SumsQuestion(frame).arrays())
    again = question_of(1, numbers, 2)
    fields = {"who": np.zeros(3, dtype=np.int64)}
    for name, array in SumsQuestion(frame).answer(users, fields).items():
        np.testing.assert_array_equal(array, again.answer(users, fields)[name])
    assert objection(Query("average", 0, {"stage": np.array(1), "rank": np.array(0), "who": np.array(2),
                                          "settings": numbers}), 3) is None
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        broken = numbers.copy()
        broken[rng.integers(broken.size)] = rng.choice([-1.0, 1e9, 0.5, 3.0, 1e300])
        try:
            question_of(1, broken[:rng.integers(1, broken.size + 1)], 2)
        except InvalidInput:
            refused += 1
    assert refused > 200
    for stage, size, match in ((1, 3, "other columns"), (2, 2, "no question"), (7, 2, "no question")):
        with pytest.raises(InvalidInput, match=match):
            question_of(stage, numbers, size)


def test_packed_arrays_come_back():
    arrays = [np.zeros((0, 3)), np.arange(6.0).reshape(2, 3), np.array(4.0), np.ones((1, 2, 2))]
    for mine, theirs in zip(unpacked(packed(arrays)), arrays, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    with pytest.raises(InvalidInput, match="too early"):
        unpacked(packed(arrays)[:-1])


def test_sums_by_fold_are_those_of_the_rows_that_are_left_out():
    users = bent(2, 23)
    question = SumsQuestion(frame_of(users))
    sums, _ = question.read(question.answer(users, {"who": np.array([0, 3])}))
    columns, target, _ = question.frame.columns(users, 0)
    folds = question.frame.folds(users, np.array([0, 3]))
    for rows, part in zip(folds, sums[0], strict=True):
        for user in (0, 1):
            mine = rows[users.owner[rows] == user]
            np.testing.assert_allclose(part.gram[user], columns[mine].T @ columns[mine], atol=1e-9)
            np.testing.assert_allclose(part.moment[user], columns[mine].T @ target[mine], atol=1e-9)
            assert part.rows[user] == len(mine)
    whole = triangle(sum(part.gram for part in sums[0]))
    np.testing.assert_allclose(whole[0], triangle(columns[:23].T @ columns[:23]), atol=1e-9)


def test_products_of_errors_are_those_of_predictions_made_without_the_rows():
    users = bent(4, 30)
    frame, first = frame_of(users), np.zeros(4, dtype=np.int64)
    sums, _ = SumsQuestion(frame).read(SumsQuestion(frame).answer(users, {"who": first}))
    candidates = forms_of(frame.scales[0].basis, 0, straight=True)[:2]
    learned = [folds for _, folds in learn_numbers(candidates, sums)]
    shared = tuple(tuple(Shared.of(one) for one in folds) for folds in learned)
    question = LeftOutQuestion(frame, tuple(candidates), shared, np.zeros(0), np.zeros(0))
    told = question.answer(users, {"who": first, "models": np.zeros((4, 5 * 3))})
    products, rows = square(told["values"], 3), told["count"]
    columns = frame.columns(users, 0)[0]
    wrong = np.zeros((users.n_samples, 3))
    wrong[:, 0] = -users.targets  # the kind predicts zero
    for f, left in enumerate(frame.folds(users, first)[:-1]):
        for c, folds in enumerate(learned):
            mean, _ = folds[f].predict(columns[left], users.owner[left])
            wrong[left, 1 + c] = mean - users.targets[left]
    for user in range(4):
        mine = wrong[users.owner == user]
        np.testing.assert_allclose(products[user], mine.T @ mine, rtol=1e-9)
        assert rows[user] == 30
    seen = [whole for whole, _ in learn_numbers(candidates, sums)]  # the twin: with the rows
    inside = seen[1].predict(columns, users.owner)[0] - users.targets
    assert inside[users.owner == 0] @ inside[users.owner == 0] < products[0, 2, 2]
