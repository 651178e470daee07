"""Tables as they are: a target that cannot be right, columns with gaps, more features than a user has rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

import coterie as ct
from coterie.convex.choice import adjusted_rand
from coterie.fitting import Settings, fit
from coterie.fitting.prepare import without_far_targets
from coterie.groups.spread import Expansions

QUICK = Settings(task="regression", n_lams=3)


def three_groups(seed: int = 0, n_users: int = 15, rows: int = 20) -> ct.Users:
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(n_users), rows)
    X, models = rng.normal(size=(len(owner), 3)), 2.0 * rng.normal(size=(3, 4))
    y = (np.column_stack([X, np.ones(len(X))]) * models[owner % 3]).sum(axis=1) + 0.7 * rng.normal(size=len(X))
    return ct.Users.from_arrays(X, y, [f"u{i:02}" for i in owner])


def with_target(users: ct.Users, row: int, value: float) -> ct.Users:
    y = users.targets.copy()
    y[row] = value
    return replace(users, targets=y)


# ---- a target that cannot be right

def test_one_target_does_not_decide_the_groups(tmp_path):
    users = three_groups()
    wrong = with_target(users, 137, 1e12)
    with pytest.warns(ct.CoterieWarning, match=r"1 target .* left out: 1e\+12 \(user 'u06', row 18 .*--loss squared"):
        fitted = fit(wrong, QUICK)
    np.testing.assert_array_equal(fitted.labels, np.arange(15) % 3)
    without = fit(replace(users, features=np.delete(users.features, 137, 0), targets=np.delete(users.targets, 137),
                          offsets=users.offsets - (users.offsets > 137)), QUICK)
    np.testing.assert_array_equal(fitted.models, without.models)
    assert fitted.scores.fitted.mean() < 1.0
    assert fitted.why.startswith("1 target is more than 1000 times")
    run = ct.load_run(fitted.save(tmp_path / "run"))
    assert run.certify(wrong).holds
    assert run.certify(wrong).same_models


def test_a_named_loss_uses_all_targets():
    """The twin: with the target, the groups are lost and the errors are absurd."""
    with pytest.warns(ct.CoterieWarning, match=r"One target has 100% of the variance of all: 1e\+12 \(user 'u06'"):
        fitted = fit(with_target(three_groups(), 137, 1e12), replace(QUICK, loss="squared"))
    assert adjusted_rand(fitted.labels, np.arange(15) % 3) < 0.9
    assert fitted.scores.fitted.mean() > 1e6


@pytest.mark.parametrize(("value", "says"), [
    (1e12, "left out"), (-1e5, "left out"), (500.0, "of the variance"), (30.0, None), (0.0, None)])
def test_which_targets_are_far(value, says):
    users = three_groups()
    kept, concerns = without_far_targets(with_target(users, 137, value), QUICK)
    assert len(concerns) == (says is not None)
    assert all(says in concern and "user 'u06', row 18" in concern for concern in concerns)
    assert users.n_samples - kept.n_samples == (says == "left out")


def test_heavy_tails_and_rare_targets_are_kept():
    rng, users = np.random.default_rng(0), three_groups(n_users=50, rows=100)
    for y in (np.exp(2.0 * rng.normal(size=5000)), rng.standard_t(1.5, 5000), np.where(rng.random(5000) < 0.005, 9, 0),
              np.where(rng.random(5000) < 0.02, np.exp(rng.normal(size=5000)), 0), np.full(5000, 3.0)):
        assert without_far_targets(replace(users, targets=y), QUICK)[0].n_samples == 5000
    alone = ct.Users.from_arrays(users.features[:300], with_target(users, 137, 1e12).targets[:300])
    assert without_far_targets(alone, QUICK)[0].n_users == 300  # its only row is kept


# ---- columns with gaps

@pytest.mark.parametrize(("groups", "gaps"), [
    (1, "one user"), (1, "some users"), (1, "some rows"), (1, "half of the rows of some users"),
    pytest.param(2, "one user", marks=pytest.mark.slow), (2, "some users"), (2, "some rows"),
    (2, "half of the rows of some users")])
def test_columns_with_gaps_do_not_split_groups(groups, gaps):
    """Neither the indicator of missing values nor the mean in their cells makes groups."""
    rng = np.random.default_rng(1)
    owner = np.repeat(np.arange(16), 25)
    X = rng.normal(size=(400, 3))
    y = np.where(owner % 2 < groups - 1, -1.0, 1.0) * (X @ [2.0, -1.0, 0.5]) + 0.7 * rng.normal(size=400)
    missing = {"one user": owner == 3, "some users": owner % 5 == 3, "some rows": rng.random(400) < 0.2,
               "half of the rows of some users": (owner % 4 == 0) & (rng.random(400) < 0.5)}[gaps]
    frame = pl.DataFrame({"who": owner, "a": X[:, 0], "b": X[:, 1], "y": y,
                          "c": [None if gap else float(x) for gap, x in zip(missing, X[:, 2], strict=True)]})
    fitted = ct.fit_table(frame, user="who", target="y", settings=replace(QUICK, holdout=0.0))
    assert "c missing" in fitted.recipe.feature_names
    assert (fitted.kind, fitted.n_clusters) == (("one model", 1) if groups == 1 else ("groups", 2))
    if groups == 2:
        assert adjusted_rand(fitted.labels, np.arange(16) % 2) == 1.0


# ---- more features than a user has rows

def wide(n_users: int, rows: int, n_features: int) -> ct.Users:
    """The same few slopes for all users, and a level of each."""
    rng = np.random.default_rng(2)
    owner = np.repeat(np.arange(n_users), rows)
    X = rng.normal(size=(len(owner), n_features))
    y = X[:, :4] @ [2.0, -1.5, 1.0, 1.0] + 2.0 * rng.normal(size=n_users)[owner] + rng.normal(size=len(owner))
    return ct.Users.from_arrays(X, y, owner)


def test_more_features_than_rows_of_a_user():
    fitted = fit(wide(16, 10, 40), QUICK)
    assert fitted.kind == "personal"
    assert fitted.scores.fitted.mean() < 0.75 * min(fitted.scores.alone.mean(), fitted.scores.together.mean())


@pytest.mark.slow
def test_two_hundred_features():
    """30 users with 20 rows each; about a minute."""
    fitted = fit(wide(30, 20, 200), QUICK)
    assert fitted.solution.status is ct.Status.CONVERGED
    assert fitted.scores.fitted.mean() < 0.75 * min(fitted.scores.alone.mean(), fitted.scores.together.mean())


@pytest.mark.parametrize("floor", [0.0, 0.3, "different"])
@pytest.mark.parametrize("scales", [[1.0] * 60, [0.0] * 60, [0.0] * 59 + [2.0], list(np.geomspace(1e-8, 3.0, 60))])
def test_curvatures_of_low_rank_give_the_same_evidence(floor, scales):
    rng = np.random.default_rng(3)
    rows, T = rng.normal(size=(5, 8, 60)), np.diag(scales)
    floors = rng.random(5) if floor == "different" else np.full(5, floor)
    quick = Expansions(rng.normal(size=5), rng.normal(size=(5, 60)),
                       np.swapaxes(rows, 1, 2) @ rows + floors[:, None, None] * np.eye(60))
    slow = Expansions(quick.constants, quick.slopes, quick.curvatures)
    vars(slow)["factors"] = None
    assert quick.factors[1].shape == (5, 60, 8)
    for one, other in ((quick, slow), (quick.scaled(0.5).take(np.array([1, 3])), slow.scaled(0.5).take([1, 3]))):
        (marginal, posterior), (expected, exact) = one.marginal(T), other.marginal(T)
        for name in ("constants", "slopes", "curvatures"):
            np.testing.assert_allclose(getattr(marginal, name), getattr(expected, name), atol=1e-9)
        np.testing.assert_allclose(posterior, exact, atol=1e-9)
    assert Expansions(quick.constants, quick.slopes, quick.curvatures + np.diag(rng.random(60))).factors is None
