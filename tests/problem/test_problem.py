"""The problem at the door, and what it computes."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from support.problems import graph_for, problem_for, users_for

import coterie as ct
from coterie.data.users import Participants
from coterie.losses.derived import Quadratic, Remote


def test_objective_is_losses_plus_penalty():
    problem = problem_for("logistic", lam=0.3, graph=graph_for("weighted", 9))
    models = np.random.default_rng(0).standard_normal((9, 3))
    penalty = sum(w * np.linalg.norm(models[i] - models[j])
                  for (i, j), w in zip(problem.graph.edges, problem.graph.weights, strict=True))
    assert problem.objective(models) == pytest.approx(problem.values(models).sum() + 0.3 * penalty, rel=1e-13)


def test_with_lam_shares_everything_else():
    problem = problem_for("squared")
    other = problem.with_lam(7)
    assert (other.lam, problem.lam) == (7.0, 0.05)
    assert other.samples is problem.samples
    assert other.graph is problem.graph


@pytest.mark.parametrize("lam", [-1e-9, np.nan, np.inf, "much", None])
def test_bad_lam_is_refused(lam):
    with pytest.raises(ct.InvalidInput, match="lam must be a finite number >= 0"):
        ct.Problem(users_for("squared"), ct.Squared(), lam=lam)
    with pytest.raises(ct.InvalidInput, match="lam must be"):
        problem_for("squared").with_lam(lam)


def test_parts_that_do_not_fit_are_refused():
    users = users_for("squared")
    with pytest.raises(ct.InvalidInput, match="graph is over 5 users, the data over 9"):
        ct.Problem(users, ct.Squared(), lam=0.1, graph=ct.Graph.complete(5))
    with pytest.raises(ct.InvalidInput, match="expected Users"):
        ct.Problem(np.ones((3, 2)), ct.Squared(), lam=0.1)
    with pytest.raises(ct.InvalidInput, match="calling its class"):
        ct.Problem(users, ct.Squared, lam=0.1)


def test_a_user_without_samples_is_refused_by_name():
    train, _, test = ct.Users.from_arrays(np.ones((5, 1)), np.ones(5), ["a", "a", "a", "b", "b"]).split(test=2)
    assert test.counts.tolist() == [2, 1]
    ct.Problem(train, ct.Squared(), lam=0.1)
    _, _, none = ct.Users.from_arrays(np.ones((3, 1)), np.ones(3), ["a", "a", "b"]).split(test=1)
    with pytest.raises(ct.InvalidInput, match="'b'"):
        ct.Problem(none, ct.Squared(), lam=0.1)


def test_a_problem_may_be_stated_where_the_data_are_not():
    rng = np.random.default_rng(0)
    points, names = rng.standard_normal((4, 2)), ["ann", "bob", "eve", "dan"]
    server = ct.Problem(Participants(names, ["x", "y"]),
                        Quadratic(point=points, value=np.zeros(4), gradient=np.zeros((4, 2)),
                                  hessian=np.broadcast_to(np.eye(2), (4, 2, 2))), lam=0.1)
    own = ct.Problem(ct.Users.from_arrays(points), ct.SquaredDistance(), lam=0.1)
    assert (server.n_users, server.dim, server.users.names) == (4, 2, tuple(names))
    np.testing.assert_allclose(ct.solve(server).models, ct.solve(own).models, atol=1e-6)
    remote = ct.Problem(server.users, Remote(loss=ct.Squared(), length=3), lam=0.1)
    np.testing.assert_allclose(remote.loss.predict(points, np.ones((4, 3))), points.sum(axis=1) + 1)
    with pytest.raises(ct.Incompatible, match="with their users"):
        remote.objective(np.zeros((4, 3)))


@pytest.mark.parametrize("name", sorted(ct.LOSSES))
def test_a_loss_on_data_is_refused_where_there_are_none(name):
    users = users_for(name)
    settings = {"n_classes": 3} if name == "multinomial" else {}
    away = Participants(users.names, users.feature_names)
    with pytest.raises(ct.Incompatible, match="samples of these users are elsewhere"):
        ct.Problem(away, ct.LOSSES[name](**settings), lam=0.1)
    assert ct.LOSSES[name](**settings).dim(away) == problem_for(name).dim  # the length of a model needs no data
    with pytest.raises(ct.Incompatible, match="elsewhere"):
        ct.Multinomial().dim(away)  # but the classes must be known


def test_one_user_only_has_nothing_to_fuse():
    problem = ct.Problem(ct.Users.from_arrays([[1.0], [2.0], [4.0]], [1, 2, 3], ["only"] * 3), ct.Squared(), lam=5.0)
    solution = ct.solve(problem)
    assert solution.n_clusters == 1
    assert solution.gap <= 1e-8
    np.testing.assert_allclose(solution.models, problem.loss.local(problem.samples).points, atol=1e-6)


def test_users_of_one_class_are_named_in_a_warning():
    users = ct.Users.from_arrays(np.arange(6.0)[:, None], [1, 1, -1, 1, -1, -1], ["x", "x", "y", "y", "z", "z"])
    with pytest.warns(ct.CoterieWarning, match=r"2 of 3 users .*'x', 'z'"):
        problem = ct.Problem(users, ct.Logistic(), lam=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        problem.with_lam(0.2)  # said once


def test_status_is_a_sentence_with_a_next_step():
    for status in ct.Status:
        assert status.value.endswith(".")
        assert len(status.value) > 40
    solution = ct.solve(problem_for("squared"))
    assert str(solution.n_clusters) in str(solution)
    assert ct.Status.CONVERGED.value in str(solution)
