"""Which models users get: each kind is chosen where it is right, by rows that do not judge it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression

import coterie as ct
from coterie.datasets import clustered
from coterie.fitting import Settings, fit, judge, kinds
from coterie.fitting.inference import draw_groups, summarise_draws
from coterie.fitting.kinds import KINDS, Sharing, choose, group_centres, handed_out, kind_of, sharing_of
from coterie.fitting.sources import own_models
from coterie.fitting.units import Units
from coterie.groups.partitions import Partition
from coterie.groups.random_effects import learn_spread
from coterie.groups.summaries import Hypotheses, RowsSource, Summaries, ask_evidence, evidence_of, summarise

QUICK = Settings(task="regression", n_lams=3, average="off")


def panel(spread: list[float], *, n_users: int = 24, rows: int = 12, noise: float = 0.5, seed: int = 0,
          groups: int = 1) -> ct.Users:
    """Users with models N(centre of its group, diag(spread^2)) of two features and an intercept."""
    rng = np.random.default_rng(seed)
    centres = 3.0 * rng.normal(size=(groups, 3))
    models = centres[np.arange(n_users) % groups] + rng.normal(size=(n_users, 3)) * spread
    owner = np.repeat(np.arange(n_users), rows)
    X = rng.normal(size=(len(owner), 2))
    y = (np.column_stack([X, np.ones(len(X))]) * models[owner]).sum(axis=1) + noise * rng.normal(size=len(X))
    return ct.Users.from_arrays(X, y, owner)


@pytest.mark.parametrize(("spread", "groups", "kind"), [
    ([0.0, 0.0, 0.0], 1, "one model"), ([0.0, 0.0, 0.0], 2, "groups"), ([1.0, 1.0, 1.0], 1, "personal"),
    ([0.0, 0.0, 2.0], 1, "personal")])
@pytest.mark.parametrize("seed", range(3))
def test_the_right_kind_is_chosen(spread, groups, kind, seed):
    result = fit(panel(spread, groups=groups, seed=seed), QUICK)
    assert result.kind == kind
    assert result.n_clusters == (groups if kind == "groups" else 1)
    assert result.why.startswith({"one model": "All users", "groups": "Users of a group"}.get(kind, "Every user"))
    assert result.compared[kind] <= min(result.compared.values()) + 0.2 * abs(result.compared["one model"])
    assert result.solution.status is ct.Status.CONVERGED
    assert (result.stability is not None) == (kind == "groups")


def test_users_without_noise_are_alone():
    """Rows that determine each user's model exactly, and nothing in common."""
    result = fit(panel([5.0, 5.0, 5.0], noise=1e-9, rows=30), QUICK)
    assert result.kind in ("personal", "alone")
    assert result.scores.fitted.mean() <= 1.01 * result.scores.alone.mean()


def test_personal_models_are_those_of_the_mixed_model():
    """The modes of a random-effects model with this covariance, computed row by row."""
    users = panel([1.0, 0.5, 2.0], seed=3)
    units = Units.learn(users, "regression", loss="auto", ridge=1e-6, n_classes=0, standardize=True)
    inner = units.inner(users)
    sharing = sharing_of("personal", Summaries.exact(inner, units.loss), np.zeros(24, dtype=int), "rows")
    models = sharing.models(inner, units.loss)
    precision = np.linalg.inv(sharing.covariance)
    A = np.column_stack([inner.features, np.ones(inner.n_samples)])
    left, right = np.zeros((3, 3)), np.zeros(3)
    for i in range(24):
        a, y = A[inner.owner == i], inner.targets[inner.owner == i]
        outside = np.linalg.inv(np.eye(len(a)) + a @ sharing.covariance @ a.T)  # covariance of the rows, over the noise
        left, right = left + a.T @ outside @ a, right + a.T @ outside @ y
    centre = np.linalg.solve(left, right)
    for i in range(24):
        a, y = A[inner.owner == i], inner.targets[inner.owner == i]
        expected = np.linalg.solve(a.T @ a + precision, a.T @ y + precision @ centre)
        np.testing.assert_allclose(models[i], expected, atol=1e-4)


def test_the_spread_is_learned():
    users = panel([1.0, 0.0, 2.0], n_users=300, rows=10, noise=0.7, seed=1)
    spread = learn_spread(users, ct.Squared(ridge=1e-3), np.zeros(300, dtype=int))
    assert np.diag(spread.covariance) == pytest.approx([1.0, 0.0, 4.0], rel=0.25, abs=0.01)
    assert spread.noise == pytest.approx(0.49, rel=0.1)
    assert spread.shape in ("diagonal", "full")
    level = panel([0.0, 0.0, 2.0], n_users=60, rows=10, seed=2)
    assert learn_spread(level, ct.Squared(ridge=1e-3), np.zeros(60, dtype=int)).shape == "intercept"
    equal = panel([0.0, 0.0, 0.0], n_users=60, rows=10, seed=2)
    assert learn_spread(equal, ct.Squared(ridge=1e-3), np.zeros(60, dtype=int)) is None


def test_a_spread_of_classifiers_is_learned():
    rng = np.random.default_rng(0)
    models = np.array([1.0, -1.0, 0.0]) + rng.normal(size=(150, 3)) * [0.0, 0.0, 1.5]
    owner = np.repeat(np.arange(150), 30)
    X = rng.normal(size=(len(owner), 2))
    t = (np.column_stack([X, np.ones(len(X))]) * models[owner]).sum(axis=1)
    users = ct.Users.from_arrays(X, np.where(t + rng.logistic(size=len(t)) > 0, 1.0, -1.0), owner)
    covariance = learned(users, ct.Logistic(ridge=1e-3)).covariance
    assert covariance[2, 2] == pytest.approx(2.25, rel=0.35)
    assert np.abs(np.diag(covariance)[:2]).max() < 0.25


def learned(users: ct.Users, loss: ct.Loss):
    """The one centre with spread that these users' summaries show."""
    source = RowsSource(loss, [users])
    return ask_evidence(source, summarise(source), [[]])[0][0].one


def labelled(spread: float, *, n_users: int, rows: int, dim: int = 8, seed: int = 0) -> ct.Users:
    """Classes with few positive rows; models differ along one direction of all coordinates."""
    rng = np.random.default_rng(seed)
    direction = np.ones(dim) / np.sqrt(dim)
    models = rng.normal(size=dim) * 0.5 + spread * rng.normal(size=(n_users, 1)) * direction
    owner = np.repeat(np.arange(n_users), rows)
    X = rng.normal(size=(len(owner), dim))
    t = (X * models[owner]).sum(axis=1) - 2.0
    return ct.Users.from_arrays(X, np.where(t + rng.logistic(size=len(t)) > 0, 1.0, -1.0), owner)


@pytest.mark.parametrize("seed", range(3))
def test_evidence_of_classes_is_that_of_probabilities(seed):
    """Few rows, one class for many users: the expansions are extreme, and the evidence still a log-probability."""
    users, loss = labelled(0.0, n_users=20, rows=12, seed=seed), ct.Logistic(ridge=1e-3)
    plain, labels = ct.Logistic(ridge=0.0), np.zeros(20, dtype=int)
    pooled = np.repeat(group_centres(loss, loss.prepare(users), labels, "rows"), 20, axis=0)
    likelihood = -12 * plain.values(plain.prepare(users), pooled).sum()
    dim = loss.dim(users)
    shapes = [1e-12 * np.eye(dim), 0.01 * np.eye(dim), np.diag(np.linspace(1e-9, 0.3, dim))]
    asked = Hypotheses(np.stack([pooled] * 3, axis=1), np.stack(shapes), 1.0)
    evidence = evidence_of(loss, users, asked).evidence.sum(axis=0)
    assert evidence[0] == pytest.approx(likelihood, rel=1e-6)
    assert (evidence > likelihood - 15).all()
    assert (evidence < min(0.0, likelihood + 10)).all()


def test_the_direction_in_which_classifiers_differ_is_learned():
    users, loss = labelled(2.0, n_users=30, rows=60), ct.Logistic(ridge=1e-3)
    one = learned(users, loss)
    assert one.gain > 3.0
    values, vectors = np.linalg.eigh(one.covariance)
    assert values[-1] > 4 * values[-2]
    assert abs(vectors[:8, -1].sum()) / np.sqrt(8) > 0.9
    assert learned(labelled(0.0, n_users=30, rows=60), loss).gain < 1.0  # equal users do not differ


def test_evidence_decides_where_rows_left_out_cannot():
    """The simpler of two equally good kinds is taken, unless the evidence speaks against it or it is worse."""
    losses = np.stack([np.ones(20), 0.99 + 0.2 * (-1.0) ** np.arange(20)])  # a small gain, far from certain
    simpler_first, richer_first = np.array([False, False]), np.array([True, False])
    assert kinds._simplest(losses, simpler_first) == 0
    assert kinds._simplest(losses, richer_first) == 1
    assert kinds._simplest(losses[::-1], richer_first) == 0  # the doubtful one is the best
    labels = np.zeros(4, dtype=int)
    clear = Sharing("personal", labels, np.eye(2), gain=10.0)
    options = [Sharing("one model", labels), clear]
    assert kinds._doubtful(options).tolist() == [True, False]
    assert kinds._doubtful([options[0], replace(clear, gain=1.0)]).tolist() == [False, False]
    assert kinds._doubtful([options[0], Sharing("groups", np.array([0, 0, 1, 1]))]).tolist() == [True, False]


def test_rows_or_users_count_alike():
    rng = np.random.default_rng(0)
    owner = np.repeat([0, 1], [100, 4])
    X = rng.normal(size=(104, 1))
    y = X[:, 0] * np.where(owner == 0, 1.0, 3.0)
    users, loss = ct.Users.from_arrays(X, y, owner), ct.Squared(ridge=0.0)
    samples, together = loss.prepare(users), np.zeros(2, dtype=int)
    by_rows = group_centres(loss, samples, together, "rows")[0]
    np.testing.assert_allclose(by_rows[0], LinearRegression().fit(X, y).coef_[0], rtol=1e-8)
    np.testing.assert_allclose(group_centres(loss, samples, together, "users")[0],
                               ct.refit(ct.Problem(users, loss, lam=1.0), together)[0], rtol=1e-8)
    assert abs(by_rows[0] - group_centres(loss, samples, together, "users")[0, 0]) > 0.1
    with pytest.raises(ct.InvalidInput, match="count must be"):
        replace(QUICK, count="columns")


def test_kinds_are_named_by_their_groups():
    loss = ct.Squared()
    assert kind_of(loss, np.array([0, 0])) == "one model"
    assert kind_of(loss, np.array([0, 1])) == "alone"
    assert kind_of(loss, np.array([0, 1, 1])) == "groups"
    assert kind_of(ct.Personal(loss, 1.0), np.array([0, 0])) == "personal"
    assert kind_of(ct.Personal(loss, 1.0), np.array([0, 1])) == "personal in groups"
    assert [kind for kind in KINDS if "personal" in kind] == ["personal", "personal in groups"]


def test_a_solution_is_fitted_again():
    users = clustered("squared", seed=0).users
    solution = ct.solve(ct.Problem(users, ct.Squared(ridge=1e-3), lam=0.05))
    np.testing.assert_allclose(solution.refit(), ct.refit(solution.problem, solution.labels), rtol=1e-8, atol=1e-10)
    loss = ct.Personal(ct.Squared(ridge=1e-3), 0.5)
    solution = ct.solve(ct.Problem(users, loss, lam=0.05))
    centres = ct.refit(solution.problem, solution.labels)
    np.testing.assert_allclose(solution.refit(), loss.personal_models(users, centres), rtol=1e-7, atol=1e-9)
    assert np.abs(solution.refit() - centres).max() > 1e-3


def test_one_row_each_keeps_the_groups_that_were_found():
    users = ct.Users.from_arrays(np.arange(6.0)[:, None], np.arange(6.0), np.arange(6))
    units = Units.learn(users, "regression", loss="auto", ridge=1e-3, n_classes=0, standardize=True)
    known = Summaries.exact(units.inner(users), units.loss)
    compared = choose(known, np.array([0, 0, 0, 1, 1, 1]), QUICK)
    assert compared.sharing.kind == "groups"
    assert compared.means == {}


def test_groups_drawn_by_dice_are_unstable():
    """Forty users of one kind in four groups, and the same users in groups that are real."""
    for groups, stable in ((1, False), (4, True)):
        users = panel([0.0, 0.0, 0.0], n_users=40, groups=groups, seed=5)
        labels = np.arange(40) % 4
        sharing = Sharing("groups", labels)
        known = Summaries.exact(users, ct.Squared(ridge=1e-3))
        stability = summarise_draws(draw_groups(known, sharing, QUICK), sharing)
        assert stability.stable is stable
        assert ("unstable" in str(stability)) is not stable
        assert stability.stays.shape == (40,)
        assert (stability.index > 0.95) is stable


def test_models_handed_out_are_not_shrunk():
    users = clustered("squared", seed=1).users
    result = fit(users, QUICK)
    assert result.kind == "groups"
    loss, inner = result.units.loss, result.units.inner(users)
    np.testing.assert_array_equal(result.models, result.solution.models)
    np.testing.assert_allclose(result.models, handed_out(loss, loss.prepare(inner), result.labels, "rows"), rtol=1e-7)
    np.testing.assert_array_equal(result.models, result.centres[result.labels])
    pairs = np.column_stack(np.triu_indices(30, 1))
    pull = np.where(np.diff(result.labels[pairs], axis=1)[:, 0] == 0, 10.0, 0.1)
    graph = ct.Graph.from_edges(30, pairs, pull)  # the twin: groups pulled to each other
    shrunk = ct.solve(ct.Problem(inner, loss, lam=0.01, graph=graph))
    np.testing.assert_array_equal(shrunk.labels, result.labels)
    assert np.abs(result.models - shrunk.models).max() > 1e-3


@pytest.mark.parametrize("count", ["rows", "users"])
def test_newcomers_get_personal_models(count):
    users = panel([1.0, 1.0, 1.0], n_users=30, rows=15, seed=4)
    result = fit(users.take(range(25)), replace(QUICK, count=count))
    assert result.kind == "personal"
    new = users.take(range(25, 30)).split(test=0.5, seed=0)
    joined = result.personalize(new.train)
    inner = result.units.inner(new.train)
    loss = ct.Personal(result.units.loss, covariance=result.solution.problem.loss.covariance, scale="rows")
    centres = np.tile(result.centres[0], (5, 1))
    np.testing.assert_allclose(joined.models, loss.personal_models(inner, centres), rtol=1e-8, atol=1e-10)
    ours = result.units.scores(joined.models, new.test).mean()
    assert ours < 0.8 * result.units.scores(np.tile(result.together, (5, 1)), new.test).mean()


@pytest.mark.parametrize("count", ["rows", "users"])
def test_newcomers_have_the_noise_of_a_typical_user(count):
    """Users whose noise differs have a price each; newcomers that of the middle one."""
    users, rng = panel([1.0, 1.0, 1.0], n_users=40, rows=20, seed=4), np.random.default_rng(1)
    deviations = np.exp(rng.normal(size=40))
    users = replace(users, targets=users.targets + deviations[users.owner] * rng.normal(size=users.n_samples))
    known, new = users.take(range(35)), users.take(range(35, 40)).split(test=0.5, seed=0).train
    result = fit(known, replace(QUICK, count=count))
    assert result.kind == "personal"
    inner, labels = result.units.inner(known), np.zeros(35, dtype=int)
    sharing = sharing_of("personal", Summaries.exact(inner, result.units.loss), labels, count)
    assert sharing.noise is not None
    loss = ct.Personal(result.units.loss, covariance=sharing.covariance,
                       scale=np.median(sharing.noise) / new.sizes)
    centres = np.tile(result.centres[0], (5, 1))
    expected = loss.personal_models(result.units.inner(new), centres)
    np.testing.assert_allclose(result.personalize(new).models, expected, rtol=1e-8, atol=1e-10)


def test_each_part_of_the_rows_is_judged_on_its_own(monkeypatch):
    """Groups that are found without the held-out rows only are judged by these; all rows have the kind that is best."""
    users = panel([1.0, 1.0, 1.0], n_users=20, rows=10, seed=6)
    real, plain = judge.search, fit(users, QUICK)

    def search(known, options):
        found = real(known, options)
        if known.sizes.sum() == users.n_samples:
            return found
        halves = Partition(np.arange(20) % 2, found.best.length - 1.0)
        return found._replace(examined=[*found.examined, halves])

    monkeypatch.setattr(judge, "search", search)
    monkeypatch.setattr(kinds, "_doubtful", lambda options, _=0.0: np.array([o.kind != "groups" for o in options]))
    monkeypatch.setattr(kinds, "_MOST", np.inf)
    monkeypatch.setattr(kinds, "_LITTLE", np.inf)
    stored: dict = {}
    result = fit(users, QUICK, store=stored)
    assert stored["choice 1"]["kind"] == "groups"
    assert stored["choice 0"]["kind"] == result.kind == plain.kind == "personal"
    assert (result.scores.n_clusters, plain.scores.n_clusters) == (2, 1)
    assert result.scores.fitted.mean() > 1.1 * plain.scores.fitted.mean()  # they are judged as they were found
    assert result.models.tobytes() == plain.models.tobytes()
    assert result.compared["personal"] < result.compared["one model"]
    assert result.why.startswith("Every user gets a model of its own")


def test_no_user_with_large_numbers_decides_alone():
    """Nine users gain, and one in ten times larger units loses a little of its own: logarithms show it."""
    losses = np.stack([np.r_[400.0, np.full(9, 4.0)], np.r_[460.0, np.full(9, 1.0)]])
    everything = np.zeros(2, dtype=bool)
    assert kinds._simplest(losses, everything) == 0
    assert kinds._simplest(kinds._compared(losses, relative=True), everything, 1.0) == 1


def test_users_with_small_units_are_not_hurt():
    """Targets of some users are a thousand times as large as those of others: groups would serve only these."""
    rng = np.random.default_rng(1)
    owner, scale = np.repeat(np.arange(24), 20), np.geomspace(0.1, 100.0, 24)
    x = rng.normal(size=(owner.size, 2))
    level = 4 + 0.5 * rng.normal(size=24)
    y = scale[owner] * (x @ [1.0, -2.0] + level[owner] + 0.5 * rng.normal(size=owner.size))
    result = fit(ct.Users.from_arrays(x, y, owner), Settings(n_lams=4))
    assert result.kind in ("alone", "personal")
    assert np.median(result.scores.fitted / result.scores.alone) < 1.1
    assert (result.scores.fitted / result.scores.alone).max() < 3
    assert result.compared[result.kind] == min(result.compared.values())


def test_within_an_error_is_not_enough_where_most_is_missed():
    noisy = np.stack([np.full(10, 4.0), np.r_[20.0, np.full(9, 2.0)], np.ones(10)])
    assert kinds._simplest(noisy, np.array([True, False, False])) == 2
    noisy[1, 0] = 2.0
    assert kinds._simplest(noisy, np.array([True, False, False])) == 2
    noisy[1] = 1.0 + np.r_[0.3, np.zeros(9)]
    assert kinds._simplest(noisy, np.array([True, False, False])) == 1


def test_groups_drawn_to_fit_few_rows_are_not_better_than_they_are():
    """Groups that rows themselves decide: their estimated loss is that of new rows, not that of these rows."""
    rng = np.random.default_rng(3)
    owner = np.repeat(np.arange(200), 4)
    X = rng.normal(size=(len(owner), 1))
    t = X[:, 0] + 1.2 * rng.normal(size=200)[owner]
    draw = lambda: np.where(t + rng.logistic(size=len(t)) > 0, 1.0, -1.0)  # noqa: E731
    users, new = (ct.Users.from_arrays(X, draw(), owner) for _ in range(2))
    labels = (np.bincount(owner, users.targets) > 0).astype(np.int64)  # by the classes themselves
    labels = np.unique(labels, return_inverse=True)[1]
    loss, source = ct.Logistic(ridge=1e-3), RowsSource(ct.Logistic(ridge=1e-3), [users])
    known = ask_evidence(source, summarise(source), [[(labels, None)]])[0][0]
    sharing = Sharing("groups", labels)
    estimated = kinds.new_row_losses(sharing, known).mean()
    models, plain = sharing.models(users, loss), ct.Logistic(ridge=0.0)
    ours = plain.values(plain.prepare(users), models).mean()
    true = plain.values(plain.prepare(new), models).mean()
    assert true > ours + 0.1  # these rows flatter the groups
    assert estimated > ours + 0.5 * (true - ours)


@pytest.mark.parametrize("kind", ["one model", "personal"])
def test_estimated_losses_are_those_of_new_rows(kind):
    """On average over draws: what is added to the loss of the rows is what they are too low by."""
    rng, gaps, added = np.random.default_rng(5), [], []
    owner = np.repeat(np.arange(60), 12)
    for _ in range(4):
        X = rng.normal(size=(len(owner), 2))
        t = (np.column_stack([X, np.ones(len(X))]) * (np.array([1.0, -1.0, 0.3]) + 0.7 * rng.normal(size=(60, 3)))[
            owner]).sum(axis=1)
        users, new = (ct.Users.from_arrays(X, np.where(t + rng.logistic(size=len(t)) > 0, 1.0, -1.0), owner)
                      for _ in range(2))
        source, plain = RowsSource(ct.Logistic(ridge=1e-3), [users]), ct.Logistic(ridge=0.0)
        known = ask_evidence(source, summarise(source), [[]])[0][0]
        sharing = sharing_of(kind, known, np.zeros(60, dtype=np.int64), "rows")
        models = sharing.models(users, ct.Logistic(ridge=1e-3))
        ours, true = (plain.values(plain.prepare(part), models).mean() for part in (users, new))
        gaps.append(true - ours)
        added.append(kinds.new_row_losses(sharing, known).mean() - ours)
    assert np.mean(added) == pytest.approx(np.mean(gaps), abs=0.03)
    assert (np.mean(gaps) > 0.05) == (kind == "personal")


@pytest.mark.parametrize("ridge", [1e-9, 0.3])
def test_own_models_are_those_of_a_ridge_regression(ridge):
    users = panel([1.0, 1.0, 1.0], n_users=5, rows=6)
    ours = own_models(ct.Squared(ridge=ridge, penalize_intercept=True), users)
    for i in range(5):
        X, y = np.column_stack([users.features[users.owner == i], np.ones(6)]), users.targets[users.owner == i]
        np.testing.assert_allclose(ours[i], np.linalg.solve(X.T @ X + 6 * ridge * np.eye(3), X.T @ y), rtol=1e-5)


@pytest.mark.parametrize(("labels", "times"), [(np.zeros(24, dtype=np.int64), 1), (np.arange(24) % 2, 2)])
def test_a_spread_is_learned_once_for_each_kind(monkeypatch, labels, times):
    learned = []
    monkeypatch.setattr(kinds, "learn_spread", lambda *given: learned.append(given) or learn_spread(*given))
    kinds.candidates(Summaries.exact(panel([1.0, 1.0, 1.0]), ct.Squared(ridge=1e-3)), labels, "rows")
    assert len(learned) == times
