"""A federation fits classes and counts as a table is fitted: the same groups, kind, models and scores."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import coterie as ct
from coterie.data.moments import SecondMoments
from coterie.datasets import clustered
from coterie.federated.fit import fit_federation
from coterie.federated.runtimes.in_process import LocalNodes
from coterie.federated.settings import Deployment
from coterie.fitting import Settings, fit
from coterie.lab.attacks.simulation import Recorder, evidence_of


def drawn(task: str, n_users: int = 10, rows: int = 60, seed: int = 0) -> ct.Users:
    """Two groups of users with other signs; targets as a table has them."""
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(n_users), rows)
    x = rng.standard_normal((owner.size, 2))
    margin = np.where(owner % 2 == 0, 1.0, -1.0) * (1.5 * x[:, 0] - x[:, 1]) + 0.3
    if task == "counts":
        y = rng.poisson(np.exp(0.5 * margin)).astype(float)
    elif task == "classes":
        y = np.digitize(margin + rng.logistic(size=owner.size), [-1.0, 1.0]).astype(float)
    elif task == "classification":
        y = (margin + rng.logistic(size=owner.size) > 0).astype(float)
    else:
        y = margin + rng.standard_normal(owner.size)
    return ct.Users.from_arrays(x, y, owner)


def table_fit(users: ct.Users, task: str) -> ct.Fit:
    return fit(users, Settings(task="classification" if task == "classes" else task))


LOSSES = {"classification": "logistic", "classes": "logistic", "counts": "poisson", "regression": None}


@pytest.mark.parametrize("task", ["classification", "regression", pytest.param("counts", marks=pytest.mark.slow),
                                  pytest.param("classes", marks=pytest.mark.slow)])
def test_a_federation_fits_as_a_table_is_fitted(task):
    users = drawn(task)
    here, there = table_fit(users, task), ct.federate(users, LOSSES[task])
    assert there.kind == here.kind
    np.testing.assert_array_equal(there.labels, here.labels)
    if task != "regression":  # the same code on the same summaries
        assert there.models.tobytes() == here.models.tobytes()
        assert there.centres.tobytes() == here.centres.tobytes()
        assert there.together.tobytes() == here.together.tobytes()
        assert there.lam == here.lam
        assert len(there.history) <= 10
    scale = np.abs(here.models).max()
    np.testing.assert_allclose(there.models, here.models, atol=1e-6 * scale)
    np.testing.assert_allclose(there.centres, here.centres, atol=1e-6 * scale)
    np.testing.assert_allclose(there.together, here.together, atol=1e-6 * scale)
    assert there.gap <= 1e-6
    assert there.solution.status is ct.Status.CONVERGED
    for name in ("fitted", "alone", "together"):
        np.testing.assert_allclose(getattr(there.scores, name), getattr(here.scores, name), atol=1e-6)
    assert there.scores.n_rows == here.scores.n_rows
    np.testing.assert_array_equal(there.scores.worse, here.scores.worse)
    assert there.compared == pytest.approx(here.compared)
    assert there.stability.index == pytest.approx(here.stability.index, abs=0.1)
    other = fit(drawn(task, seed=1), Settings(task="classification" if task == "classes" else task))
    assert np.abs(there.models - other.models).max() > 1e-3 * scale  # other rows give other models


def test_hessians_are_asked_for_at_few_points():
    """Two Hessians of few rows give the rows away, and more of them those of many rows: only summaries have them."""
    recorder = Recorder(LocalNodes([drawn("classification")], 0.2))
    fitted = fit_federation(recorder, Deployment(loss="logistic", standardize="True", holdout=0.2),
                            Settings(task="classification", loss="logistic"))
    evidence, kept = (evidence_of(recorder.exchanges, fitted.units.loss, np.full(10, 60), part) for part in (0, 1))
    assert {len(one.hessians) for one in evidence} == {1}
    assert {len(one.hessians) for one in kept} == {2}
    assert min(len(one.gradients) for one in evidence) > 3
    kinds = [queries.kind for queries, replies in recorder.exchanges
             if "hessian" in replies.arrays and replies.arrays["hessian"].size]
    assert kinds == ["summary", "summary"]


@pytest.mark.parametrize("task", ["regression", pytest.param("classification", marks=pytest.mark.slow)])
def test_the_result_does_not_depend_on_who_answers_when(task):
    users = drawn(task, n_users=8, rows=40)
    plain = ct.federate(users, LOSSES[task])
    patchy = ct.federate(users, LOSSES[task], participation=0.4, faults=ct.Faults(drop=0.1, late=0.1, twice=0.1))
    assert patchy.models.tobytes() == plain.models.tobytes()
    assert patchy.solution.models.tobytes() == plain.solution.models.tobytes()
    assert patchy.n_rounds > 2 * plain.n_rounds


@pytest.mark.parametrize(("task", "rounds"), [("regression", (0, 1)), pytest.param(
    "classification", (0, 3, 7), marks=pytest.mark.slow)])
def test_an_interrupted_fit_ends_in_the_same_bits(tmp_path, task, rounds):
    users = drawn(task, n_users=8, rows=40)
    plain = ct.federate(users, LOSSES[task])
    for turn in rounds:
        def stop(line, turn=turn):
            if line.iteration == turn:
                raise KeyboardInterrupt

        folder = tmp_path / str(turn)
        with pytest.raises(ct.Interrupted):
            ct.federate(users, LOSSES[task], checkpoint=folder, progress=stop)
        again = ct.federate(users, LOSSES[task], checkpoint=folder)
        assert again.models.tobytes() == plain.models.tobytes()
        assert again.n_rounds == plain.n_rounds
    with pytest.raises(ct.InvalidInput, match="another run"):
        ct.federate(users, LOSSES[task], checkpoint=folder, settings=Settings(max_groups=1))


def test_signs_are_classes():
    users = clustered("logistic", n_users=6, samples=40, seed=1).users
    zero_one = replace(users, targets=0.5 * (users.targets + 1.0))
    by_signs, by_name = ct.federate(users), ct.federate(zero_one, ct.Logistic())
    np.testing.assert_array_equal(by_signs.models, by_name.models)
    assert by_signs.units.n_classes == 2
    assert set(by_signs.predict(users)["prediction"].to_list()) <= {0, 1}


def test_squared_losses_need_two_rounds_and_less_than_three_hessians():
    users = drawn("regression", n_users=12)
    found = ct.federate(users, settings=Settings(average="off"))
    assert [line.stage for line in found.history] == ["moments", "certify"]
    dim = found.models.shape[1]
    up = found.ledger.total("numbers", direction="up") / users.n_users
    assert up < 3 * dim * (dim + 1) / 2 + 4 * dim + 10


def test_condensed_rows_have_the_same_losses():
    users = drawn("regression", n_users=5, rows=11)
    split = users.hold_out(0.3)
    moments = SecondMoments.of(split.train).add(SecondMoments.of(split.test))
    few = moments.users(users.names, users.feature_names)
    np.testing.assert_array_equal(few.sizes, users.sizes)
    assert few.counts.max() < users.counts.min()
    loss, models = ct.Squared(), np.random.default_rng(0).standard_normal((5, 3))
    np.testing.assert_allclose(loss.values(loss.prepare(few), models), loss.values(loss.prepare(users), models),
                               rtol=1e-12)
    np.testing.assert_allclose(few.moments().m2, users.moments().m2, rtol=1e-12)
    assert np.abs(ct.Huber().values(ct.Huber().prepare(few), models)
                  - ct.Huber().values(ct.Huber().prepare(users), models)).max() > 1e-3  # only squared losses are


@pytest.mark.parametrize(("options", "complaint"), [
    ({"lam": "best"}, "lam must be a number"), ({"algorithm": ct.Newton()}, "algorithm is for a given lam"),
    ({"patience": 3}, "patience is for a given lam"), ({"held_out": "some"}, "share of each user's rows"),
    ({"loss": ct.Squared(intercept=False)}, "makes its own loss"), ({"loss": "huber"}, "cannot be fitted like this"),
    ({"settings": Settings(standardize=False), "loss": "poisson"}, "cannot be fitted like this"),
])
def test_what_cannot_be_fitted_is_refused(options, complaint):
    with pytest.raises(ct.InvalidInput, match=complaint):
        ct.federate(drawn("counts", n_users=3, rows=5), **options)


def test_users_who_never_answer_are_named():
    users = drawn("regression", n_users=4, rows=6)
    away = np.zeros((1, 4), dtype=bool)
    away[0, 2:] = True
    with pytest.raises(ct.Incompatible, match="2 of 4 users do not answer"):
        ct.federate(users, faults=ct.Faults(away=away))
    away[0, 2] = False  # one of few keeps nobody from learning
    fit = ct.federate(users, faults=ct.Faults(away=away))
    assert list(fit.aside) == [users.names[3]]
    alone = ct.federate(users.take([0, 1, 2]))
    assert np.array_equal(fit.models, alone.models)
