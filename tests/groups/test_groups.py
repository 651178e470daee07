"""Groups found without being told anything: how many, who is in them, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

import coterie as ct
from coterie import datasets
from coterie.base.labels import check_labels
from coterie.convex.choice import refit
from coterie.groups.find import Groups, _scaler, describe_better, describe_sizes, find_groups
from coterie.groups.noise import dispersion
from coterie.groups.partitions import Judge, ModelTree
from coterie.groups.proposals import sample_of
from coterie.groups.spread import description_length, fit_spread
from coterie.groups.summaries import Summaries
from coterie.losses.derived import Grouped

FAMILIES = ("squared_hinge", "logistic", "squared", "huber", "multinomial")


def planted(family="logistic", n_clusters=3, seed=0, n_users=24, samples=100, spacing=4.0, n_features=3):
    """Users with many samples, whose clusters' models are `spacing` along different axes: not to be mistaken."""
    rng = np.random.default_rng(seed)
    clusters = np.arange(n_users) % n_clusters
    owner = np.repeat(np.arange(n_users), samples)
    x = rng.standard_normal((owner.size, n_features))
    margin = spacing * x[np.arange(owner.size), clusters[owner]]
    if family in ("squared_hinge", "logistic"):
        y = np.where(rng.random(owner.size) < 1 / (1 + np.exp(-margin)), 1.0, -1.0)
    elif family == "multinomial":
        y = np.digitize(margin + rng.logistic(size=owner.size), [-1.0, 1.0]).astype(float)
    else:
        y = margin + rng.standard_normal(owner.size)
    return ct.Users.from_arrays(x, y, owner), clusters


@pytest.mark.parametrize("family", FAMILIES)
def test_separated_clusters_are_found(family):
    users, truth = planted(family)
    found = find_groups(users, ct.LOSSES[family]())
    assert found.n_clusters == 3
    assert adjusted_rand_score(truth, found.labels) == 1.0
    assert found.labels[0] == 0
    assert found.labels.max() == 2
    assert "3 groups of 8, 8, 8 users" in str(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_cluster_is_left_whole(family):
    found = find_groups(planted(family, n_clusters=1, seed=1)[0], ct.LOSSES[family]())
    assert found.n_clusters == 1
    assert "All 24 users are one group" in str(found)


def test_the_loss_follows_the_targets():
    users, truth = planted("squared")
    assert adjusted_rand_score(truth, find_groups(users).labels) == 1.0
    assert isinstance(find_groups(users).path.problem.loss.loss, ct.Squared)
    points = datasets.gaussian_mixture(45, separation=20.0)
    found = find_groups(points.users)
    assert adjusted_rand_score(points.clusters, found.labels) == 1.0
    assert find_groups(datasets.gaussian_mixture(45, n_clusters=1).users).n_clusters == 1


def test_models_are_the_refit_on_the_features_as_given():
    users, truth = planted()
    units = ct.Users.from_arrays(users.features * [1e-2, 1.0, 1e3] + [5.0, 0.0, -1e3], users.targets, users.owner)
    loss = ct.Logistic(ridge=1e-6)
    found = find_groups(units, loss)
    assert adjusted_rand_score(truth, found.labels) == 1.0
    expected = refit(ct.Problem(units, loss, lam=0.0), found.labels)
    np.testing.assert_allclose(found.models, expected, rtol=1e-9, atol=1e-12)
    assert len(np.unique(found.models, axis=0)) == 3


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_units_of_real_targets_do_not_matter(factor):
    users, truth = planted("squared")
    scaled = replace(users, targets=users.targets * factor)
    assert adjusted_rand_score(truth, find_groups(scaled, ct.Squared(ridge=1e-9)).labels) == 1.0


@pytest.mark.parametrize("loss", [ct.Logistic(), ct.Logistic(intercept=False)])
def test_no_intercept(loss):
    users, truth = planted()
    assert adjusted_rand_score(truth, find_groups(users, loss).labels) == 1.0


def test_identical_users_are_one_group():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((20, 2)), rng.choice([-1.0, 1.0], 20)
    users = ct.Users.from_arrays(np.tile(x, (12, 1)), np.tile(y, 12), np.repeat(np.arange(12), 20))
    found = find_groups(users)
    assert found.n_clusters == 1
    assert (found.models == found.models[0]).all()


def test_two_kinds_of_identical_users():
    """Most distances are 0 here, and the others infinitely many times the median."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 2))
    targets = np.concatenate([np.tile(np.sign(x[:, 0]), 8), np.tile(-np.sign(x[:, 0]), 8)])
    users = ct.Users.from_arrays(np.tile(x, (16, 1)), targets, np.repeat(np.arange(16), 60))
    np.testing.assert_array_equal(find_groups(users).labels, np.repeat([0, 1], 8))


@pytest.mark.parametrize("n_users", [1, 2, 3])
def test_few_users(n_users):
    users = planted(n_clusters=1, n_users=n_users)[0]
    found = find_groups(users)
    np.testing.assert_array_equal(found.labels, np.zeros(n_users))
    assert found.models.shape == (n_users, 4)


def test_users_of_one_class_and_of_one_sample():
    users, truth = planted(samples=60)
    x, y, owner = users.features, users.targets, users.owner
    keep = ((owner != 5) | (y > 0)) & ((owner != 7) | (np.arange(len(y)) == users.offsets[7]))
    found = find_groups(ct.Users.from_arrays(x[keep], y[keep], owner[keep]))
    clear = np.setdiff1d(np.arange(24), [5, 7])
    assert found.n_clusters == 3
    assert adjusted_rand_score(truth[clear], found.labels[clear]) == 1.0
    assert np.isfinite(found.models).all()


def test_only_one_class():
    rng = np.random.default_rng(0)
    users = ct.Users.from_arrays(rng.standard_normal((40, 2)), np.ones(40), np.repeat(np.arange(8), 5))
    found = find_groups(users, n_lams=8)
    assert found.n_clusters == 1
    assert np.isfinite(found.models).all()


def test_one_sample_each():
    rng = np.random.default_rng(0)
    users = ct.Users.from_arrays(rng.standard_normal((30, 2)), rng.choice([-1.0, 1.0], 30), np.arange(30))
    assert find_groups(users, n_lams=8).n_clusters == 1


def test_same_answer_twice_and_for_users_in_another_order():
    users, _ = planted(n_users=21)
    first, second = find_groups(users), find_groups(users)
    np.testing.assert_array_equal(first.labels, second.labels)
    np.testing.assert_array_equal(first.models, second.models)
    assert first.criterion == second.criterion
    assert first.candidates == second.candidates
    order = np.random.default_rng(5).permutation(21)
    shuffled = find_groups(users.take(order))
    assert adjusted_rand_score(first.labels[order], shuffled.labels) == 1.0
    np.testing.assert_allclose(shuffled.criterion, first.criterion, rtol=1e-9)
    np.testing.assert_allclose(shuffled.models, first.models[order], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.slow
def test_nothing_examined_is_better(seed):
    """Clusters that overlap, so that there is much to examine."""
    data = datasets.clustered("logistic", samples=25, separation=2.0, ragged=True, seed=seed)
    users, loss, n = _scaler(data.users, ct.Logistic()).transform(data.users), ct.Logistic(), 30
    found, samples = find_groups(data.users), loss.prepare(users)
    pooled = Grouped(loss=loss, samples=samples, labels=np.zeros(n, dtype=np.int64), weights=users.counts / 25)
    centre = pooled.local(pooled.prepare(pooled.groups)).points
    t = loss.decision(users.features, centre.repeat(users.n_samples, axis=0))
    n_eff = float((1 - np.tanh(t / 2) ** 2).sum())  # 4 p (1 - p)

    def length(labels):
        """The formula, with models that are minimised to the end."""
        grouped = Grouped(loss=loss, samples=samples, labels=labels, weights=users.counts / 25)
        models = grouped.local(grouped.prepare(grouped.groups)).points[labels]
        values, sizes = ct.Logistic(ridge=0.0).values(samples, models), np.bincount(labels)
        return users.counts @ values + len(sizes) * samples.dim / 2 * np.log(n_eff) + sizes @ np.log(n / sizes)

    together = min(value for count, value in found.candidates if count == 1 and value > found.criterion - 1e-9)
    assert found.criterion <= together
    one = length(np.zeros(n, dtype=np.int64))
    assert any(abs(value - one) < 1.0 for count, value in found.candidates if count == 1)
    assert found.criterion == min(value for _, value in found.candidates)
    for solution in found.path.solutions:
        if solution.n_clusters <= 8:
            assert found.criterion <= length(solution.labels) + 1.0
    assert found.criterion >= length(found.labels) - 1.0  # and moves have their price


@pytest.mark.parametrize(("nats", "much"), [(1.0, "slightly"), (4.0, "clearly"), (53.54, "much")])
def test_the_evidence_for_groups_is_said_in_words(nats, much):
    assert describe_better(nats).startswith(f"describe the data {much} better than one group: by {nats:.3g} nats")


def test_the_sentence_about_groups_has_the_difference_of_lengths():
    found = ct.find_groups(datasets.clustered("squared", n_users=12, n_clusters=3).users)
    one = min(value for count, value in found.candidates if count == 1)
    assert str(found).startswith(f"3 groups of 4, 4, 4 users {describe_better(one - found.criterion)}.")
    assert describe_sizes(np.arange(22) // 2) == "2"
    assert describe_sizes(np.repeat(np.arange(11), [5000, *[1] * 10])) == "1 to 5,000"
    assert describe_sizes(np.arange(20) // 2) == ", ".join(["2"] * 10)


def test_criterion_is_the_formula():
    users, truth = planted("squared", n_users=6, n_clusters=2, samples=40)
    loss = ct.Squared(ridge=0.0)
    judge = Judge.of(Summaries.exact(users, loss))
    total = residual = 0.0
    for c in (0, 1):
        rows = truth[users.owner] == c
        a, y = np.c_[users.features[rows], np.ones(rows.sum())], users.targets[rows]
        total += np.linalg.lstsq(a, y)[1].item()
    for i in range(6):
        rows = users.owner == i
        residual += np.linalg.lstsq(np.c_[users.features[rows], np.ones(40)], users.targets[rows])[1].item()
    variance = residual / (6 * (40 - 4))
    expected = 0.5 * total / variance + 2 * 4 / 2 * np.log(240) + 6 * np.log(2) + 3 * np.log(6)
    np.testing.assert_allclose(judge.criterion(truth, 3), expected, rtol=1e-6)


def test_many_users_of_few_samples():
    users, truth = planted(n_users=200, samples=20, spacing=2.0, n_features=10)  # measured: 0.94
    found = find_groups(users, n_lams=15)
    assert found.n_clusters == 3
    assert adjusted_rand_score(truth, found.labels) > 0.7


def test_giving_users_away():
    users, truth = planted("squared")
    judge = Judge.of(Summaries.exact(users, ct.Squared()))
    many = np.where(np.arange(24) < 18, truth, np.arange(24) - 15)  # the last six alone
    labels, toll = judge.absorb(many, 3)
    np.testing.assert_array_equal(labels, truth)
    np.testing.assert_allclose(toll, np.log(134596.0))  # 24 choose 6
    same, free = judge.absorb(many, 9)
    assert free == 0.0
    np.testing.assert_array_equal(same, many)
    alone, _ = judge.absorb(np.arange(24), 3)
    assert not alone.any()


def test_max_groups_is_respected():
    assert find_groups(planted()[0], max_groups=2).n_clusters <= 2
    assert find_groups(planted()[0], max_groups=1).n_clusters == 1


# Users who differ without groups


def drawn(family, n_groups=0, seed=0, n_users=40, samples=50, dim=4, size=0.7, noise="normal"):
    """Users whose models are normal around one centre, or equal (size=0), or those of groups with such models."""
    rng = np.random.default_rng(seed)
    clusters = np.arange(n_users) % n_groups if n_groups else np.arange(n_users)
    models = 0.3 + size * rng.standard_normal((clusters.max() + 1, dim))
    owner = np.repeat(np.arange(n_users), samples)
    x = rng.standard_normal((owner.size, dim - 1))
    margin = (np.c_[x, np.ones(owner.size)] * models[clusters[owner]]).sum(axis=1)
    if family == "logistic":
        y = np.where(rng.random(owner.size) < 1 / (1 + np.exp(-margin)), 1.0, -1.0)
    elif family == "poisson":
        factor = rng.gamma(1.0, 1.0, owner.size) if noise == "overdispersed" else 1.0
        y = rng.poisson(factor * np.exp(np.minimum(margin, 4.0))).astype(float)
    else:
        y = margin + (rng.standard_t(1.5, owner.size) if noise == "heavy tails" else rng.standard_normal(owner.size))
    return ct.Users.from_arrays(x, y, owner), ct.LOSSES[family](), clusters


@pytest.mark.parametrize(("family", "size"), [("squared", 0.7), ("logistic", 0.7), ("poisson", 0.3)])
def test_continuous_differences_are_no_groups(family, size):
    users, loss, _ = drawn(family, size=size)
    found = find_groups(users, loss)
    assert found.kind == "one centre with spread"
    assert found.n_clusters == 1
    assert "Users differ, but continuously: no groups stand out" in str(found)
    assert 0.5 < np.trace(found.spread) / (4 * size**2) < 2.0
    assert found.criterion < found.candidates[0][1] - 10  # one model for all is much worse


@pytest.mark.parametrize(("family", "size"), [("squared", 0.7), ("logistic", 1.2), ("poisson", 0.5)])
def test_the_same_differences_with_groups_are_groups(family, size):
    users, loss, truth = drawn(family, n_groups=4, size=size, samples=100, seed=2)
    found = find_groups(users, loss)
    assert found.kind == "groups"
    assert adjusted_rand_score(truth, found.labels) == 1.0


def test_groups_whose_models_also_vary():
    rng = np.random.default_rng(0)
    truth, owner = np.arange(40) % 2, np.repeat(np.arange(40), 60)
    models = np.array([[3.0, 0.0], [-3.0, 0.0]])[truth] + 0.3 * rng.standard_normal((40, 2))
    x = rng.standard_normal((owner.size, 2))
    users = ct.Users.from_arrays(x, (x * models[owner]).sum(axis=1) + rng.standard_normal(owner.size), owner)
    found = find_groups(users)
    assert adjusted_rand_score(truth, found.labels) == 1.0
    assert found.spread.any()
    assert "Models also vary within groups." in str(found)


@pytest.mark.parametrize(("family", "noise", "size"), [
    ("squared", "heavy tails", 1.5), ("poisson", "overdispersed", 0.7)])
def test_noise_is_not_taken_for_groups(family, noise, size):
    users, loss, _ = drawn(family, size=0.0, noise=noise)
    assert find_groups(users, loss).kind == "one model"
    users, loss, truth = drawn(family, n_groups=3, size=size, noise=noise, samples=100)
    assert adjusted_rand_score(truth, find_groups(users, loss).labels) > 0.9


def test_dispersion():
    for noise, low, high in (("normal", 1.0, 1.1), ("overdispersed", 1.5, 3.5)):  # gamma: 1 + mean
        users, loss, _ = drawn("poisson", size=0.0, noise=noise)
        assert low <= dispersion(loss, users, loss.prepare(users)) <= high
    users, loss, _ = drawn("squared", samples=6)
    doubled = replace(users, targets=2 * users.targets)
    assert dispersion(loss, users, loss.prepare(users)) == pytest.approx(1.0, abs=0.3)
    assert dispersion(loss, doubled, loss.prepare(doubled)) == pytest.approx(4.0, abs=1.2)


@pytest.mark.parametrize(("n_groups", "n_users"), [(12, 48), (10, 20)])
def test_many_groups_and_small_groups(n_groups, n_users):
    users, loss, truth = drawn("squared", n_groups=n_groups, n_users=n_users, size=1.5)
    found = find_groups(users, loss)
    assert found.n_clusters == n_groups
    assert adjusted_rand_score(truth, found.labels) == 1.0
    few = find_groups(users, loss, max_groups=3)  # a limit does not turn groups into a continuous spread
    assert few.kind == "groups"
    assert few.n_clusters <= 3


def test_two_users_per_group_of_two_classes():
    users, loss, truth = drawn("logistic", n_groups=10, n_users=20, samples=100, dim=5, size=1.8)
    assert adjusted_rand_score(truth, find_groups(users, loss).labels) > 0.9


def test_evidence_is_the_density_of_the_targets():
    """For squared loss with variance s, targets of a unit are normal: design @ centre, design T design' + s I."""
    from scipy.stats import multivariate_normal

    users, _, truth = drawn("squared", n_groups=6, n_users=24, samples=12)
    judge = Judge.of(Summaries.exact(users, ct.Squared(ridge=0.0)))
    design, together = np.c_[users.features, np.ones(users.n_samples)], np.zeros(24, dtype=np.int64)
    scale = users.sizes[0] / judge.weights[0]
    alone = judge.with_spread(together, 0, np.eye(4)).spread
    shared = fit_spread(judge.expansions.sums(truth), together[:6], 0, np.eye(4))
    for spread, unit in ((alone, np.arange(24)), (shared, truth)):
        total = 0.5 * users.n_samples * np.log(2 * np.pi * scale)  # the likelihoods leave this constant out
        for k in range(unit.max() + 1):
            rows = unit[users.owner] == k
            covariance = design[rows] @ spread.covariance @ design[rows].T + scale * np.eye(rows.sum())
            total += multivariate_normal.logpdf(users.targets[rows], design[rows] @ spread.centres[0], covariance)
        assert spread.evidence == pytest.approx(total, rel=1e-6)
    assert shared.evidence > alone.evidence + 10  # these users do share models


def test_length_of_a_covariance():
    noise, n = np.eye(3), 50
    per_number = 0.5 * np.log(n)
    assert description_length(2.0 * np.eye(3), 0, noise, n) == pytest.approx(per_number)
    alike = np.diag([1.0, 1.0, 1.5])  # directions that are hardly known cost no more than other numbers
    assert description_length(alike, 1, noise, n) == pytest.approx(4 * per_number)
    narrow = np.diag([0.0, 0.0, 99.0])  # variances 1, 1 and 100: two angles
    expected = 3 * per_number + np.log(99.0**2 / 100.0)
    assert description_length(narrow, 1, noise, n, flat=True) == pytest.approx(expected)


def test_lengths_of_the_tree_are_those_of_its_cuts():
    users = drawn("squared", n_groups=3, n_users=12)[0]
    judge = Judge.of(Summaries.exact(users, ct.Squared(ridge=0.0)))
    centre = judge.one_centre()
    tree = ModelTree(judge, centre.spread)
    expected = [judge.criterion(tree.cut(count)) for count in range(1, 13)]
    np.testing.assert_allclose(tree.lengths(), expected, rtol=1e-6)
    assert np.argmin(tree.lengths()) == np.argmin(tree.lengths(with_prior=True)) == 2
    assert tree.lengths(with_prior=True)[-1] > centre.length  # as many groups as users: the labels cost extra


@pytest.mark.slow
@pytest.mark.parametrize(("family", "size", "noise"), [
    ("squared", 0.0, "normal"), ("squared", 0.5, "normal"), ("logistic", 0.6, "normal"), ("poisson", 0.3, "normal"),
    ("squared", 0.0, "heavy tails"), ("squared", 0.5, "heavy tails"), ("poisson", 0.0, "overdispersed"),
    ("poisson", 0.3, "overdispersed")])
def test_one_group_in_95_percent_of_draws(family, size, noise):
    counts = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        n_users, samples, dim = (int(rng.choice(choice)) for choice in ((15, 30, 60), (15, 40), (2, 4, 7)))
        users, loss, _ = drawn(family, seed=seed, n_users=n_users, samples=samples, dim=dim, size=size, noise=noise)
        counts.append(find_groups(users, loss).n_clusters)
    assert np.mean(np.array(counts) == 1) >= 0.95


def test_fields():
    found = find_groups(planted(n_users=12)[0])
    assert isinstance(found, Groups)
    assert found.models.shape == (12, 4)
    assert found.graph.n_users == found.path.problem.n_users == 12
    assert found.lam is None or found.lam in found.path.lams


@pytest.mark.parametrize(("arguments", "message"), [
    ({"max_groups": 0}, "max_groups must be a whole number >= 1"),
    ({"max_groups": 2.5}, "max_groups must be a whole number"),
    ({"n_lams": 1}, "n_lams must be"),
    ({"k": 0}, "k must be"),
    ({"k": True}, "k must be"),
    ({"weight_ridge": 0.0}, "weight_ridge must be"),
    ({"weight_ridge": np.nan}, "weight_ridge must be"),
    ({"loss": ct.Logistic}, "expected a loss such as"),
    ({"loss": ct.Poisson()}, "user"),
])
def test_bad_arguments_are_refused(arguments, message):
    users = planted(n_users=3)[0]
    with pytest.raises(ct.InvalidInput, match=message):
        find_groups(users, **arguments)


def test_bad_users_are_refused():
    with pytest.raises(ct.InvalidInput, match="expected Users"):
        find_groups(np.ones((3, 2)))
    users = planted(n_users=3)[0]
    with pytest.raises(ct.InvalidInput, match="no users"):
        find_groups(users.take(np.empty(0, dtype=int)))
    empty = ct.Users(users.features, users.targets, np.append(users.offsets, users.n_samples), (0, 1, 2, 3),
                     users.feature_names)
    with pytest.raises(ct.InvalidInput):
        find_groups(empty)


# Many users


def test_a_sample_has_different_users_and_is_the_same_every_time():
    assert sample_of(300) is None
    for n in (301, 900, 12345):
        some = sample_of(n)
        assert len(np.unique(some)) == len(some) == 300
        assert some.min() >= 0
        assert some.max() < n
        np.testing.assert_array_equal(some, sample_of(n))
    assert len(np.unique(sample_of(900) % 3)) == 3  # equal distances would take every third user


def test_a_rare_group_that_a_sample_misses():
    rng = np.random.default_rng(3)
    truth = np.zeros(1500, dtype=np.int64)
    outside = np.setdiff1d(np.arange(1500), sample_of(1500))
    truth[::2], truth[rng.choice(outside, 6, replace=False)] = 1, 2
    models, owner = rng.normal(size=(3, 4)) * 2, np.repeat(np.arange(1500), 15)
    x = rng.normal(size=(len(owner), 3))
    y = (x * models[truth[owner], :3]).sum(axis=1) + models[truth[owner], 3] + rng.normal(size=len(owner))
    found = find_groups(ct.Users.from_arrays(x, y, owner))
    assert found.n_clusters == 3
    assert adjusted_rand_score(truth, found.labels) > 0.99
    rare = found.labels[truth == 2]
    assert (rare == rare[0]).all()
    assert (found.labels == rare[0]).sum() == 6
    assert found.path.problem.n_users == 300


@pytest.mark.parametrize("family", ["squared", "logistic"])
def test_proposals_of_another_search(family):
    users, truth = planted(family, samples=80)
    first = find_groups(users.hold_out(0.25, seed=1).train)
    again = find_groups(users, proposals=first.proposals)
    assert len(again.path) == 0
    assert again.lam is None
    np.testing.assert_array_equal(again.labels, truth)
    assert again.criterion <= find_groups(users).criterion + 5.0  # one move
    assert find_groups(users, proposals=first.proposals, max_groups=2).n_clusters <= 2
    with pytest.raises(ct.InvalidInput, match="one label for each"):
        find_groups(users, proposals=[(truth[:-1], 0.0)])


def test_merges_by_sums_are_those_by_users():
    users, truth = planted("squared")
    judge, halves = Judge.of(Summaries.exact(users, ct.Squared())), check_labels(2 * truth + np.arange(24) // 4 % 2, 24)
    assert halves.max() == 5
    length, labels = judge.polish(halves)
    np.testing.assert_array_equal(labels, truth)
    assert length == pytest.approx(Judge.of(Summaries.exact(users, ct.Squared())).criterion(truth))
    parts = judge.fitted(truth).parts
    for k in range(3):
        some = np.flatnonzero(truth == k)
        model = judge.expansions.take(some).centres(np.zeros(8, dtype=np.int64))
        value = judge.expansions.take(some).values(model).sum()
        value += 0.5 * judge.weights[some].sum() * (judge.ridge @ model[0] ** 2)
        assert parts[k] == pytest.approx(8 * np.log(3) - value + judge.model_cost)
