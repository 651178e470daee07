"""Private fits: groups and models from noisy releases, finished at home, and nothing else that leaves."""

from __future__ import annotations

import json

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

import coterie as ct
from coterie.base.errors import InvalidInput
from coterie.data.users import Users
from coterie.datasets import clustered
from coterie.federated.private.effective import NoisySums, effective
from coterie.federated.private.policy import parse_clip
from coterie.federated.private.release import SUMMARY, ReleaseQuestion, finish, normal

PRIVACY = ct.Privacy(epsilon=8.0, delta=1e-5, clip=6.0, experiment=0)


@pytest.fixture(scope="module")
def shops():
    return clustered("squared", n_users=24, n_clusters=3, samples=150, seed=0)


@pytest.fixture(scope="module")
def fit(shops):
    return ct.federate(shops.users, privacy=PRIVACY)


def test_groups_are_found_and_the_certificate_says_what_it_is_about(shops, fit):
    assert isinstance(fit, ct.Fit)
    assert fit.privacy is PRIVACY
    assert adjusted_rand_score(fit.labels, shops.clusters) == 1.0
    assert fit.solution.status is ct.Status.RELEASED
    assert fit.gap <= 1e-6
    assert fit.certify().certified
    assert "released statistics" in fit.statement.proves


def test_only_releases_leave_and_rounds_are_few(fit):
    assert [line.stage for line in fit.history] == ["release", "release", "home"]
    up = {entry.field for entry in fit.ledger.entries if entry.direction == "up"}
    assert up == {"released", "who", "frame"}


def test_models_are_near_those_without_noise(shops, fit):
    exact = ct.federate(shops.users)
    error = np.abs(fit.coefficients - exact.coefficients).max()
    assert error < 0.5 * np.abs(exact.coefficients).max()
    home = fit.units.coefficients(fit.at_home)
    assert np.abs(home - exact.coefficients).mean() < np.abs(fit.coefficients - exact.coefficients).mean()


def test_one_experiment_gives_one_result_and_real_noise_another(shops, fit):
    again = ct.federate(shops.users, privacy=PRIVACY, participation=0.3, faults=ct.Faults(drop=0.2, seed=3))
    assert np.array_equal(again.models, fit.models)
    assert np.array_equal(again.at_home, fit.at_home)
    real = ct.Privacy(epsilon=8.0, delta=1e-5, clip=6.0)
    fresh = ct.federate(shops.users.take(range(8)), privacy=real)
    other = ct.federate(shops.users.take(range(8)), privacy=real)
    assert not np.array_equal(fresh.models, other.models)


def test_two_classes():
    data = clustered("logistic", n_users=20, n_clusters=2, samples=300, separation=4.0, seed=1)
    fit = ct.federate(data.users, privacy=ct.Privacy(epsilon=8.0, clip=6.0, experiment=1))
    assert fit.settings.task == "classification"
    assert adjusted_rand_score(fit.labels, data.clusters) == 1.0
    test = clustered("logistic", n_users=20, n_clusters=2, samples=300, separation=4.0, seed=1).users
    right = np.sign(fit.units.margins(test.features, fit.models[test.owner])) == test.targets
    exact = ct.federate(data.users)
    best = np.sign(exact.units.margins(test.features, exact.models[test.owner])) == test.targets
    assert right.mean() > best.mean() - 0.03


def test_counts():
    rng = np.random.default_rng(2)
    owner, models = np.repeat(np.arange(16), 200), 0.5 * rng.normal(size=(2, 3))
    X = rng.normal(size=(len(owner), 3))
    mean = np.exp((X * models[owner % 2]).sum(axis=1) + 1.0)
    users = ct.Users.from_arrays(X, rng.poisson(mean).astype(float), owner)
    clip = {**dict.fromkeys(users.feature_names, (-3, 3)), "target": (0, 30)}
    fit = ct.federate(users, "poisson", privacy=ct.Privacy(epsilon=6.0, clip=clip, experiment=1))
    assert fit.settings.task == "counts"
    assert adjusted_rand_score(fit.labels, np.arange(16) % 2) == 1.0

    def excess(models: np.ndarray) -> float:  # of the deviance above that of the true means
        told = fit.units.predict(X, models)
        return float(np.mean(told - mean - mean * np.log(told / mean)))

    assert excess(fit.at_home[owner]) < 0.02
    assert excess(fit.models[owner]) < 0.3 * excess(np.tile(fit.together, (len(owner), 1)))
    with pytest.raises(InvalidInput, match="not negative"):
        ct.federate(users, "poisson", privacy=ct.Privacy(epsilon=6.0, clip={**clip, "target": (-9, -1)}))


def test_bounds_can_be_found_with_a_part_of_the_budget(shops):
    fit = ct.federate(shops.users, privacy=ct.Privacy(epsilon=8.0, experiment=2))
    assert [line.stage for line in fit.history] == ["release", "release", "release", "home"]
    assert adjusted_rand_score(fit.labels, shops.clusters) == 1.0


def test_whole_users_can_be_protected():
    users = clustered("squared", n_users=150, n_clusters=1, samples=5, seed=4).users
    clip = {**dict.fromkeys(users.feature_names, (-3, 3)), "target": (-1, 4)}
    privacy = ct.Privacy(epsilon=60.0, clip=clip, unit="user", experiment=1)
    fit = ct.federate(users, privacy=privacy, settings=ct.fitting.Settings(n_lams=2))
    assert "all rows of one user are replaced" in str(fit.statement)
    error = np.mean((fit.units.predict(users.features, fit.models[users.owner]) - users.targets) ** 2)
    assert error < 0.4 * users.targets.var()


def test_stages_use_the_budget_and_no_more():
    for clip in (None, 3.0):
        privacy = ct.Privacy(epsilon=2.0, delta=1e-6, clip=clip)
        total = np.sqrt(np.sum(np.square(privacy.stages)))
        assert 0.999 * privacy.mu < total <= privacy.mu


def test_without_noise_the_effective_problems_are_the_users_own():
    """Least squares of every user from exact sums are those of the rows."""
    data = clustered("squared", n_users=6, n_clusters=2, samples=40, seed=0)
    q = data.users.n_features + 1
    asked = ReleaseQuestion(stage=SUMMARY, mu=1e9, centre=np.zeros(q), scale=np.full(q, 20.0), n_features=q - 1)
    known = effective(NoisySums.of(asked.exact(data.users), asked), data.users.names, data.users.feature_names)
    loss = ct.Squared(penalize_intercept=False)
    models = loss.local(loss.prepare(known.users)).points
    stretch = np.sqrt(q - 1) / 0.8 * 20.0
    slopes = models[:, :-1] / (known.scale * stretch) * 20.0
    exact = loss.local(loss.prepare(data.users)).points[:, :-1]
    assert np.allclose(slopes, exact, rtol=1e-3, atol=1e-3)


def test_finishing_at_home_trusts_rows_as_far_as_they_go():
    rng = np.random.default_rng(0)
    X, truth = rng.normal(size=(4000, 2)), np.array([1.0, -1.0, 0.3])
    y = X @ truth[:2] + truth[2] + 0.5 * rng.normal(size=4000)
    few, many = Users.from_arrays(X[:4], y[:4], [0] * 4), Users.from_arrays(X, y, [0] * 4000)
    far, near = np.array([[3.0, 3.0, 3.0]]), truth[None] + 0.05
    shapes = np.eye(3)[None]
    loss = ct.Squared(ridge=1.0)
    assert np.allclose(finish(loss, many, far, shapes, 0.25), truth, atol=0.05)
    alone = ct.Squared().local(ct.Squared().prepare(few)).points
    assert np.linalg.norm(finish(loss, few, near, shapes, 0.25) - truth) < 0.7 * np.linalg.norm(alone - truth)


def test_finishing_at_home_finds_how_noisy_its_own_targets_are(monkeypatch):
    rng = np.random.default_rng(1)
    X, truth = rng.normal(size=(100, 2)), np.array([1.0, -1.0, 0.3])
    users = Users.from_arrays(X, X @ truth[:2] + truth[2] + 0.1 * rng.normal(size=100), [0] * 100)
    far, shapes = truth[None] + 0.2, 0.1 * np.eye(3)[None]
    assert np.allclose(finish(ct.Squared(), users, far, shapes, 1.0), truth, atol=0.05)  # 100 times too large
    monkeypatch.setattr("coterie.federated.private.release._NOISES", (1.0,))
    assert not np.allclose(finish(ct.Squared(), users, far, shapes, 1.0), truth, atol=0.05)


def test_a_private_run_is_saved_certified_and_shown(fit, tmp_path):
    fit.save(tmp_path / "run")
    run = ct.load_run(tmp_path / "run")
    assert run.info["privacy"]["epsilon"] == 8.0
    assert run.status is ct.Status.RELEASED
    assert run.certify().holds
    document = json.loads((tmp_path / "run" / "report.json").read_text())
    assert document["counts"] is None
    assert "epsilon = 8" in document["privacy"]["sentence"]
    assert np.allclose(run.models, fit.models)
    released = (tmp_path / "run" / "released.coterie").read_bytes()
    (tmp_path / "run" / "released.coterie").write_bytes(released[:-40])
    with pytest.raises(InvalidInput, match=r"released\.coterie"):
        run.certify()


@pytest.mark.parametrize(("more", "match"), [
    ({"lam": 0.1, "loss": ct.Squared()}, "chooses its lam"), ({"held_out": 0.2}, "held out"),
    ({"loss": "huber"}, "two classes"), ({"loss": "squared_hinge"}, "two classes"),
])
def test_what_cannot_be_private_is_refused(shops, more, match):
    with pytest.raises(InvalidInput, match=match):
        ct.federate(shops.users, privacy=PRIVACY, **more)


def test_bounds_never_come_from_the_data_unnoticed(shops):
    names = shops.users.feature_names
    with pytest.raises(InvalidInput, match=names[1]):
        ct.federate(shops.users, privacy=ct.Privacy(epsilon=4.0, clip={names[0]: (-5, 5), "target": (-9, 9)}))


def test_a_budget_that_does_not_suffice_for_bounds_is_said(shops):
    with pytest.raises(InvalidInput, match="does not suffice"):
        ct.federate(shops.users.take([0, 1]), privacy=ct.Privacy(epsilon=0.01, experiment=0))


@pytest.mark.parametrize("wrong", [
    {"epsilon": 0.0}, {"epsilon": 1.0, "delta": 2.0}, {"epsilon": 1.0, "unit": "table"}, {"epsilon": 1.0, "clip": -1.0},
    {"epsilon": 1.0, "clip": {"age": (3, 1)}}, {"epsilon": 1.0, "clip": {"age": 5}},
    {"epsilon": 1.0, "clip": {"sex": ["f", "f"]}}, {"epsilon": 1.0, "clip": {"age": (0, np.inf)}}])
def test_a_promise_that_cannot_be_made_is_refused(wrong):
    with pytest.raises(InvalidInput):
        ct.Privacy(**wrong)


def test_clip_as_text():
    assert parse_clip("") is None
    assert parse_clip("3.5") == 3.5
    assert parse_clip("age=0:100, sex=f|m,y=-1:1") == {"age": (0.0, 100.0), "sex": ("f", "m"), "y": (-1.0, 1.0)}
    for wrong in ("age", "age=0", "age=1:0", "age=a:b", "sex=f|f"):
        with pytest.raises(InvalidInput):
            parse_clip(wrong)


def test_the_draw_of_a_seed_is_repeated():
    assert np.array_equal(normal(5, [1, 2]), normal(5, [1, 2]))
