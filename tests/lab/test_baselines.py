"""Comparators: each against a case whose answer is known, and what all of them must satisfy."""

from __future__ import annotations

import dataclasses
import inspect

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score
from support.problems import loss_for, users_for

import coterie as ct
from coterie.datasets import Dataset, clustered
from coterie.lab.baselines import (
    BASELINES,
    BUDGET,
    CFL,
    IFCA,
    ODCL,
    Comet,
    Ditto,
    FedAvgBaseline,
    FineTuning,
    Global,
    HypCluster,
    KMeans,
    Local,
    Mocha,
    ODCLKMeans,
    Oracle,
    PerFedAvg,
    SquaredPenaltyBaseline,
    tune,
)

LOSSES = ("squared_hinge", "logistic", "squared", "multinomial", "poisson")
QUICK = {"fedavg": {"rounds": 20}, "fine_tuning": {"common": FedAvgBaseline(rounds=20)}, "per_fedavg": {"rounds": 10},
         "mocha": {"rounds": 20}, "ifca": {"restarts": 2}, "hypcluster": {"restarts": 2}, "comet": {"rounds": 5}}
METHODS = sorted(BASELINES)


def quick(name):
    return BASELINES[name](**QUICK.get(name, {}))


@pytest.fixture(scope="module")
def planted():
    """Three groups that look 120 degrees apart, users of differing size; and fresh samples of the same."""
    rng, clusters = np.random.default_rng(1), np.arange(18) // 6
    angles = 2 * np.pi * clusters / 3
    true = 3.0 * np.stack([np.cos(angles), np.sin(angles)], axis=1)

    def draw(owner):
        features = rng.standard_normal((owner.size, 2))
        margins = np.einsum("nd,nd->n", features, true[owner])
        chance = 1 / (1 + np.exp(-margins))
        return ct.Users.from_arrays(features, np.where(rng.random(owner.size) < chance, 1.0, -1.0), owner)

    return Dataset(draw(np.repeat(np.arange(18), 40 + 5 * np.arange(18))), clusters, draw(np.repeat(np.arange(18), 99)))


@pytest.fixture(scope="module")
def quadratic():
    """Least squares without intercept, users with models and curvatures of their own."""
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(6), 15)
    features = rng.standard_normal((90, 2)) * (1.0 + owner[:, None] / 4)
    targets = np.einsum("nd,nd->n", features, rng.standard_normal((6, 2))[owner]) + 0.1 * rng.standard_normal(90)
    users, loss = ct.Users.from_arrays(features, targets, owner), ct.Squared(ridge=0.0, intercept=False)
    return users, loss, loss.prepare(users)


# What holds of all of them.

@pytest.mark.parametrize("loss_name", LOSSES)
@pytest.mark.parametrize("name", METHODS)
def test_any_method_with_any_loss(name, loss_name):
    """Ragged users: finite models, the same for the same seed and in whatever order the users come."""
    users, loss, method = users_for(loss_name, samples=12), loss_for(loss_name), quick(name)
    if loss_name == "multinomial":
        loss = ct.Multinomial(n_classes=3)
    truth = np.arange(9) // 3
    fitted = method.fit(users, loss, seed=3, clusters=truth)
    assert fitted.models.shape == (9, loss.dim(users))
    assert np.isfinite(fitted.models).all()
    assert fitted.name == name
    assert fitted.settings == method
    assert fitted.n_clusters == len(np.unique(fitted.labels)) == fitted.labels.max() + 1
    assert min(fitted.rounds, fitted.floats_up, fitted.floats_down) >= 0

    shuffled = np.random.default_rng(0).permutation(9)
    again = method.fit(users.take(shuffled), loss, seed=3, clusters=truth[shuffled])
    np.testing.assert_array_equal(again.models, fitted.models[shuffled])
    assert adjusted_rand_score(again.labels, fitted.labels[shuffled]) == 1.0
    assert (again.rounds, again.floats_up, again.floats_down) == (fitted.rounds, fitted.floats_up, fitted.floats_down)

    if len(fitted.shared) > 1:  # one shared model a cluster, in the order of the labels
        assert len(fitted.shared) == fitted.n_clusters
        if name != "comet":
            np.testing.assert_array_equal(fitted.shared[fitted.labels], fitted.models)


def test_the_table():
    assert len(BASELINES) == 16
    users, loss = users_for("logistic"), ct.Logistic()
    for name, method in BASELINES.items():
        grid = method.grid(users, loss)
        assert method.name == name
        assert 1 <= len(grid) <= BUDGET
        assert len(set(grid)) == len(grid)
        assert dataclasses.is_dataclass(method)
        with pytest.raises(dataclasses.FrozenInstanceError):
            method().name = "other"


@pytest.mark.parametrize("name", METHODS)
def test_tuning_takes_the_least_held_out_loss(name, monkeypatch):
    """And what settings have in common is computed once without changing any of them."""
    parts = clustered("logistic", n_users=6, samples=30, ragged=True, seed=2).users.split(validation=0.3, test=0.2)
    loss, truth, method = ct.Logistic(ridge=1e-2), np.arange(6) // 2, BASELINES[name]
    grid = method.grid(parts.train, loss)
    if "rounds" in {f.name for f in dataclasses.fields(method)}:
        grid = tuple(dataclasses.replace(settings, rounds=10) for settings in grid[-4:])
    monkeypatch.setattr(method, "grid", classmethod(lambda cls, users, loss: grid))
    fitted, chosen = tune(method, parts.train, parts.validation, loss, 5, clusters=truth)
    bare = ct.Logistic(ridge=0.0)
    held = bare.prepare(parts.validation)
    alone = [settings.fit(parts.train, loss, seed=5, clusters=truth) for settings in grid]
    scores = [bare.values(held, each.models).mean() for each in alone]
    best = int(np.argmin(scores))
    assert chosen == grid[best]
    np.testing.assert_array_equal(fitted.models, alone[best].models)
    for count in ("rounds", "floats_up", "floats_down"):
        assert getattr(fitted, count) == getattr(alone[best], count)


def test_tuning_sees_no_test_samples():
    assert list(inspect.signature(tune).parameters) == ["method", "train", "validation", "loss", "seed", "clusters"]
    parts = users_for("squared", samples=20).split(validation=0.3, test=0.2)
    with pytest.raises(ct.InvalidInput, match="other users"):
        tune(Local, parts.train, parts.validation.take([0, 1]), ct.Squared())
    nobody = users_for("squared", samples=20).split(validation=0.0, test=0.2)
    with pytest.raises(ct.InvalidInput, match="no validation samples"):
        tune(Local, nobody.train, nobody.validation, ct.Squared())


@pytest.mark.parametrize(("act", "complaint"), [
    (lambda u: Oracle().fit(u, ct.Logistic()), "true clusters"),
    (lambda u: IFCA(n_clusters=50).fit(u, ct.Logistic()), "Lower n_clusters"),
    (lambda u: KMeans(n_clusters=50).fit(u, ct.Logistic()), "Lower n_clusters"),
    (lambda u: SquaredPenaltyBaseline(strength=-1.0), "strength must be"),
    (lambda u: FedAvgBaseline(rate=3.0), "from 0 to 2"),
    (lambda u: PerFedAvg(variant="third"), "unknown variant"),
    (lambda u: CFL(rule="other"), "unknown rule"),
    (lambda u: Local(ridge=0.1).fit(u, ct.SquaredDistance()), "has no ridge"),
    (lambda u: Comet().fit(u, ct.SquaredDistance()), "do not predict targets"),
])
def test_what_cannot_work_is_refused(act, complaint):
    with pytest.raises(ct.CoterieError, match=complaint):
        act(users_for("logistic"))


def test_validation_rows_without_a_class_are_refused():
    users = users_for("multinomial", samples=12)
    kept = users.targets < 2
    fewer = ct.Users.from_arrays(users.features[kept], users.targets[kept], users.owner[kept])
    with pytest.raises(ct.InvalidInput, match="n_classes"):
        tune(Global, users, fewer, ct.Multinomial())


# Each by itself.

@pytest.mark.parametrize("loss_name", LOSSES)
def test_global_local_oracle_are_stationary(loss_name):
    users, loss, truth = users_for(loss_name, samples=40), loss_for(loss_name), np.arange(9) // 3
    samples = loss.prepare(users)
    together = Global().fit(users, loss)
    assert together.n_clusters == 1
    assert np.abs(loss.gradients(samples, together.models).sum(axis=0)).max() < 1e-7
    assert np.abs(loss.gradients(samples, Local().fit(users, loss).models)).max() < 1e-7
    informed = Oracle().fit(users, loss, clusters=truth)
    np.testing.assert_array_equal(informed.labels, truth)
    gradients = loss.gradients(samples, informed.models)
    for k in range(3):
        assert np.abs(gradients[truth == k].sum(axis=0)).max() < 1e-7


def test_a_user_of_one_class_has_a_finite_local_model():
    users = ct.Users.from_arrays(np.arange(12.0)[:, None] / 6 - 1, np.r_[-1.0, 1.0, -1.0, 1.0, -1, 1, np.ones(6)],
                                 np.repeat([0, 1], 6))
    models = Local().fit(users, ct.Logistic()).models
    assert np.abs(models).max() < 30
    assert ct.Logistic().values(ct.Logistic().prepare(users), models)[1] < 1e-6


def test_ridge_leaves_the_intercept_alone():
    users, loss = users_for("squared", samples=30), ct.Squared(ridge=0.0)
    shrunk = Local(ridge=1e6).fit(users, loss).models
    means = np.array([users.targets[users.owner == i].mean() for i in range(9)])
    np.testing.assert_allclose(shrunk, np.c_[np.zeros((9, 2)), means], atol=1e-5)


@pytest.mark.parametrize("loss_name", LOSSES)
@pytest.mark.parametrize("strength", [1e-3, 0.3, 1e4])
def test_squared_penalty_is_stationary(loss_name, strength):
    users, loss = users_for(loss_name, samples=30), loss_for(loss_name)
    fitted = SquaredPenaltyBaseline(strength=strength).fit(users, loss)
    pull = strength * (fitted.models - fitted.models.mean(axis=0))
    residual = loss.gradients(loss.prepare(users), fitted.models) + pull
    assert np.abs(residual).max() < 1e-7 * (1 + strength)
    np.testing.assert_allclose(fitted.shared[0], fitted.models.mean(axis=0), atol=1e-6)


def test_squared_penalty_has_its_limits(planted):
    loss = ct.Logistic(ridge=1e-2)
    local, together = (m.fit(planted.users, loss).models for m in (Local(), Global()))
    fitted = {strength: SquaredPenaltyBaseline(strength=strength).fit(planted.users, loss)
              for strength in (0.0, 1e-9, 1e3, 1e7)}
    np.testing.assert_array_equal(fitted[0.0].models, local)
    np.testing.assert_allclose(fitted[1e-9].models, local, atol=1e-5)
    np.testing.assert_allclose(fitted[1e7].models, together, atol=1e-5)
    assert fitted[1e3].n_clusters == 18  # near, never equal


def test_fedavg_with_one_step_is_gradient_descent(planted):
    loss = ct.Logistic(ridge=1e-2)
    samples = loss.prepare(planted.users)
    model, length = np.zeros(3), 0.7 / loss.lipschitz(samples).max()
    for _ in range(4):
        model = model - length * loss.gradients(samples, np.tile(model, (18, 1))).mean(axis=0)
    fitted = FedAvgBaseline(steps=1, rate=0.7, rounds=4).fit(planted.users, loss)
    np.testing.assert_allclose(fitted.models[0], model, atol=1e-13)
    assert (fitted.rounds, fitted.floats_up, fitted.floats_down) == (4, 4 * 18 * 3, 4 * 18 * 3)
    arrived = FedAvgBaseline(steps=1, rate=1.9, rounds=3000).fit(planted.users, loss)
    assert arrived.rounds < 3000
    np.testing.assert_allclose(arrived.models, Global().fit(planted.users, loss).models, atol=1e-7)


def test_fedavg_with_many_steps_averages_local_models(quadratic):
    """So many steps that every user reaches its own optimum: one round gives the mean of those."""
    users, loss, _ = quadratic
    fitted = FedAvgBaseline(steps=3000, rounds=1).fit(users, loss)
    np.testing.assert_allclose(fitted.models[0], Local().fit(users, loss).models.mean(axis=0), atol=1e-8)
    assert np.abs(fitted.models - Global().fit(users, loss).models).max() > 1e-2


def test_fine_tuning_goes_from_fedavg_to_local(quadratic):
    users, loss, _ = quadratic
    common = FedAvgBaseline(rounds=30)
    none = FineTuning(steps=0, common=common).fit(users, loss)
    np.testing.assert_array_equal(none.models, common.fit(users, loss).models)
    many = FineTuning(steps=3000, common=common).fit(users, loss)
    np.testing.assert_allclose(many.models, Local().fit(users, loss).models, atol=1e-8)
    assert many.floats_up == none.floats_up


def test_per_fedavg_finds_the_meta_optimum(quadratic):
    """f_i = 1/2 (x - c_i)' H_i (x - c_i): the optimum solves sum_i A_i (w - c_i) = 0, A_i = (I - a H) H (I - a H)."""
    users, loss, samples = quadratic
    method = PerFedAvg(adapt=0.8, steps=1, rounds=5000)
    hessians, best = loss.hessians(samples, np.zeros((6, 2))), Local().fit(users, loss).models
    alpha = 0.8 / loss.lipschitz(samples).max()
    damp = np.eye(2) - alpha * hessians
    weights = damp @ hessians @ damp
    meta = np.linalg.solve(weights.sum(axis=0), np.einsum("nde,ne->d", weights, best))
    fitted = method.fit(users, loss)
    np.testing.assert_allclose(fitted.shared[0], meta, atol=1e-7)
    adapted = meta - alpha * np.einsum("nde,ne->nd", hessians, meta - best)
    np.testing.assert_allclose(fitted.models, adapted, atol=1e-7)
    # First order: the factor in front of the gradient is left out, and the fixed point is another.
    weights = hessians @ damp
    other = np.linalg.solve(weights.sum(axis=0), np.einsum("nde,ne->d", weights, best))
    first = dataclasses.replace(method, variant="first_order").fit(users, loss).shared[0]
    np.testing.assert_allclose(first, other, atol=1e-7)
    assert np.abs(first - meta).max() > 1e-3


def test_ditto_goes_from_local_to_global(planted):
    loss = ct.Logistic(ridge=1e-2)
    samples, together = loss.prepare(planted.users), Global().fit(planted.users, loss).models
    alone = Local().fit(planted.users, loss).models
    np.testing.assert_allclose(Ditto(strength=0.0).fit(planted.users, loss).models, alone, atol=1e-8)
    np.testing.assert_allclose(Ditto(strength=1e8).fit(planted.users, loss).models, together, atol=1e-6)
    between = Ditto(strength=0.3).fit(planted.users, loss).models
    assert np.abs(loss.gradients(samples, between) + 0.3 * (between - together)).max() < 1e-8


def test_mocha_of_equal_tasks_is_one_ridge_problem():
    """W = c 1' has squared nuclear norm n ||c||^2: everyone solves f(x) + strength/2 ||x||^2."""
    one = users_for("logistic", n_users=3, samples=60, ragged=False).take([0])
    users = ct.Users.from_arrays(np.tile(one.features, (5, 1)), np.tile(one.targets, 5), np.repeat(np.arange(5), 60))
    loss = ct.Logistic(ridge=1e-2)
    fitted = Mocha(strength=0.2).fit(users, loss)
    expected = loss.prox(loss.prepare(one), None, 0.2, None).points
    np.testing.assert_allclose(fitted.models, np.tile(expected, (5, 1)), atol=1e-6)


def test_mocha_is_stationary(quadratic):
    """For W of full rank the penalty's gradient is strength ||W||_* (W W')^(-1/2) W, which the losses' balances."""
    users, loss, samples = quadratic
    fitted = Mocha(strength=1e-3).fit(users, loss)
    u, s, v = np.linalg.svd(fitted.models, full_matrices=False)
    assert s[-1] > 1e-2
    balance = loss.gradients(samples, fitted.models) + 1e-3 * s.sum() * (u @ v)
    assert np.abs(balance).max() < 1e-5
    assert np.abs(loss.gradients(samples, fitted.models)).max() > 1e-4
    np.testing.assert_array_equal(Mocha(strength=0.0).fit(users, loss).models, Local().fit(users, loss).models)
    strong = Mocha(strength=10.0).fit(users, loss)
    assert np.linalg.matrix_rank(strong.models) == 1  # the weaker direction is given up


@pytest.mark.parametrize("method", [IFCA, HypCluster, KMeans, pytest.param(Comet, marks=pytest.mark.slow)])
def test_planted_clusters_are_found_with_the_right_number_only(planted, method):
    loss = ct.Logistic(ridge=1e-2)
    right = method(n_clusters=3).fit(planted.users, loss)
    assert adjusted_rand_score(planted.clusters, right.labels) == 1.0
    wrong = method(n_clusters=2).fit(planted.users, loss)
    assert wrong.n_clusters == 2
    assert adjusted_rand_score(planted.clusters, wrong.labels) < 0.9
    if method is not Comet:
        oracle = Oracle().fit(planted.users, loss, clusters=planted.clusters)
        np.testing.assert_allclose(right.models, oracle.models, atol=1e-7)


def test_no_user_prefers_another_cluster_of_hypcluster(planted):
    loss = ct.Logistic(ridge=1e-2)
    fitted = HypCluster(n_clusters=2).fit(planted.users, loss)
    samples = loss.prepare(planted.users)
    under = np.stack([loss.values(samples, np.tile(m, (18, 1))) for m in fitted.shared], axis=1)
    np.testing.assert_allclose(loss.values(samples, fitted.models), under.min(axis=1))


def test_k_means_counts_one_round_and_one_fit(planted):
    fitted = KMeans(n_clusters=3).fit(planted.users, ct.Logistic(ridge=1e-2))
    oracle = Oracle().fit(planted.users, ct.Logistic(ridge=1e-2), clusters=planted.clusters)
    assert fitted.rounds == oracle.rounds + 1
    assert fitted.floats_up == oracle.floats_up + 18 * 3
    assert fitted.floats_down == oracle.floats_down


@pytest.mark.parametrize("method", [ODCL(share=0.92), ODCLKMeans(n_clusters=3)], ids=lambda method: method.name)
def test_odcl_averages_the_local_models_of_planted_clusters(planted, method):
    """One message up, one down; without structure between the clusters' models there is nothing to find."""
    loss = ct.Logistic(ridge=1e-2)
    fitted = method.fit(planted.users, loss)
    assert adjusted_rand_score(fitted.labels, planted.clusters) == 1.0
    own = loss.prox(loss.prepare(planted.users), None, method.ridge, None).points
    for k in range(3):
        np.testing.assert_allclose(fitted.shared[k], own[fitted.labels == k].mean(axis=0), rtol=1e-10)
    dim = fitted.models.shape[1]
    assert (fitted.rounds, fitted.floats_up, fitted.floats_down) == (1, 18 * dim, 18 * dim)


def test_odcl_goes_from_separate_models_to_one(planted):
    loss = ct.Logistic(ridge=1e-2)
    counts = [ODCL(share=share).fit(planted.users, loss).n_clusters for share in (0.01, 0.6, 1.0)]
    assert counts[0] == 18 > counts[1] > counts[2] == 1


def test_odcl_has_the_same_clusters_with_more_coordinates_than_users():
    data = clustered("squared", n_users=8, n_clusters=2, n_features=11, samples=30, seed=3)
    fitted, loss = ODCL(share=0.8).fit(data.users, ct.Squared()), ct.Squared()
    own = loss.prox(loss.prepare(data.users), None, 0.1, None).points
    problem = ct.Problem(ct.Users.from_arrays(own), ct.SquaredDistance(), 0.0)
    direct = ct.solve(problem.with_lam(0.8 * ct.lam_max(problem).upper))
    assert 1 < direct.n_clusters < 8
    np.testing.assert_array_equal(fitted.labels, direct.labels)


@pytest.mark.parametrize("rule", ["code", "paper"])
def test_cfl_splits_opposite_groups_and_nobody_else(rule):
    rng = np.random.default_rng(0)
    owner, features = np.repeat(np.arange(10), 40), rng.standard_normal((400, 12))
    margins = features @ rng.standard_normal(12)
    noise = rng.standard_normal(400)
    opposite = ct.Users.from_arrays(features, np.where(owner < 4, margins, -margins) + 0.3 * noise, owner)
    alike = ct.Users.from_arrays(features, margins + 0.3 * noise, owner)
    loss = ct.Squared(ridge=1e-3)
    split = CFL(rule=rule).fit(opposite, loss)
    np.testing.assert_array_equal(split.labels, owner[::40] >= 4)
    np.testing.assert_allclose(split.models, Oracle().fit(opposite, loss, clusters=split.labels).models, atol=1e-8)
    unsplit = CFL(rule=rule).fit(alike, loss)
    assert unsplit.n_clusters == 1
    np.testing.assert_allclose(unsplit.models, Global().fit(alike, loss).models, atol=1e-10)
    # The threshold is in units of noise: in other units of the targets the same split is made.
    scaled = ct.Users.from_arrays(features, 1e3 * opposite.targets, owner)
    np.testing.assert_array_equal(CFL(rule=rule).fit(scaled, loss).labels, split.labels)
    assert CFL(rule=rule, eps2=1e3).fit(opposite, loss).n_clusters == 1


def test_comet_goes_from_local_to_one_prediction_a_cluster(planted):
    loss = ct.Logistic(ridge=1e-2)
    local = Local().fit(planted.users, loss).models
    alone = Comet(weight=0.0, n_clusters=3).fit(planted.users, loss)
    np.testing.assert_array_equal(alone.models, local)
    near = Comet(weight=1e4, n_clusters=3).fit(planted.users, loss)
    for k in range(3):
        inside = near.models[planted.clusters == k]
        assert np.abs(inside - inside.mean(axis=0)).max() < 1e-2
        assert np.abs(local[planted.clusters == k] - local[planted.clusters == k].mean(axis=0)).max() > 0.1


@pytest.mark.slow
def test_comet_balances_loss_and_distillation():
    """At rest: grad f_i(x_i) + weight G_i (x_i - mean of the cluster) = 0, also for several outputs."""
    users, loss = users_for("multinomial", samples=40), ct.Multinomial(n_classes=3)
    fitted = Comet(weight=0.5, n_clusters=2, n_probes=20, rounds=500).fit(users, loss)
    gradients = loss.gradients(loss.prepare(users), fitted.models)
    for i in range(9):
        rows = np.c_[users.features[users.owner == i], np.ones((users.owner == i).sum())]
        away = fitted.models[i] - fitted.models[fitted.labels == fitted.labels[i]].mean(axis=0)
        pull = 0.5 * rows.T @ (rows @ away.reshape(3, 2)) / len(rows)
        np.testing.assert_allclose(gradients[i] + pull.ravel(), 0.0, atol=1e-6)
