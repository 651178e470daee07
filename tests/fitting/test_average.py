"""Averages of kinds of models: where they are used, what they predict, and that groups stay groups."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

import coterie as ct
from coterie.base.errors import InvalidInput
from coterie.datasets import clustered
from coterie.estimators import PersonalizedClassifier, PersonalizedRegressor
from coterie.fitting import Settings, fit
from coterie.fitting.average import Average, ErrorProducts, StackedWeights, weights_of
from coterie.fitting.basis import _CENTRES, Basis, Grid, Sketch
from coterie.fitting.candidates import folds_of
from coterie.fitting.columns import GridQuestion
from coterie.fitting.sources import pooled_moments

QUICK = Settings(task="regression", n_lams=3, holdout=0.0)


def bent(n_users: int = 20, rows: int = 20, *, noise: float = 0.3, seed: int = 0, task: str = "regression") -> ct.Users:
    """Users whose intercepts differ, and who share a curve of x0; x1 is straight."""
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(n_users), rows)
    X = rng.uniform(-2.0, 2.0, (len(owner), 2))
    t = 2.0 * np.cos(2.0 * X[:, 0]) + 0.5 * X[:, 1] + rng.normal(0, 1.0, n_users)[owner]
    if task == "classification":
        y = (rng.random(len(t)) < 1.0 / (1.0 + np.exp(-2.0 * t))).astype(float)
    elif task == "counts":
        y = rng.poisson(np.exp(0.5 * t)).astype(float)
    else:
        y = t + noise * rng.normal(size=len(t))
    return ct.Users.from_arrays(X, y, [f"u{i:02d}" for i in owner])


def told(fitted: ct.Fit, users: ct.Users) -> np.ndarray:
    return np.array(fitted.predict(users)["prediction"])


def rmse(fitted: ct.Fit, users: ct.Users) -> float:
    return float(np.sqrt(np.mean((told(fitted, users) - users.targets) ** 2)))


def test_curves_are_found_where_columns_bend_and_only_there():
    users, new = bent(), bent(seed=1)
    new = replace(new, targets=new.targets)
    train, _, test = users.split(test=0.5)
    curved, straight = fit(train, QUICK), fit(train, replace(QUICK, curves="off"))
    assert curved.average.used
    assert any(name.startswith("curves") for name in curved.average.weights)
    assert "Predictions are an average of: curves" in curved.why
    assert rmse(curved, test) < 0.4  # the noise is 0.3
    assert rmse(straight, test) > 1.2
    assert not any(name.startswith("curves") for name in straight.average.weights)


@pytest.mark.parametrize("seed", range(3))
def test_true_groups_are_kept_to_the_last_bit(seed):
    users = clustered("squared", n_users=18, samples=30, seed=seed).users
    fitted, alone = fit(users, QUICK), fit(users, replace(QUICK, average="off"))
    assert not fitted.average.used
    assert alone.average is None
    assert "average" not in fitted.why
    np.testing.assert_array_equal(fitted.labels, alone.labels)
    np.testing.assert_array_equal(told(fitted, users), told(alone, users))
    assert len(np.unique(fitted.centres[fitted.labels], axis=0)) == fitted.n_clusters
    # The twin: an average predicts something else.
    assert not np.array_equal(told(fit(bent(), QUICK), bent()),
                              told(fit(bent(), replace(QUICK, average="off")), bent()))


def learned_basis(users: ct.Users) -> tuple[Basis, Sketch]:
    """The basis of these users, with curves, and what it was learned from."""
    grid = Grid.of(*pooled_moments(users)[1:])
    question = GridQuestion(grid, pulls=True)
    sketch = question.pool([question.answer(users, {})])
    return Basis.learn(sketch, grid).with_curves(sketch, 8), sketch


def test_curves_are_held_beyond_the_range():
    users = bent()
    basis, _ = learned_basis(users)
    top = basis.mean + basis.scale * basis.range[1]
    np.testing.assert_allclose(top, users.features.max(axis=0), atol=0.1)  # to a cell
    rows = basis.rows(np.stack([top, top + 1.0, top + 5.0, top - 0.5]), np.full(4, -1))
    part = np.concatenate(basis.part_of("curves"))
    np.testing.assert_allclose(rows[0, part], rows[1, part], rtol=1e-12)
    np.testing.assert_array_equal(rows[1, part], rows[2, part])
    assert not np.allclose(rows[0, part], rows[3, part])
    assert rows[2, 1] > rows[1, 1] > rows[0, 1]  # straight columns are not held


def test_the_curve_of_a_column_has_no_straight_part_and_mean_square_one():
    basis, sketch = learned_basis(bent())
    some = sketch.counts[0, 0, :-1] > 0
    z = _CENTRES[some]
    curve, share = basis.curves[0].of(z), sketch.counts[0, 0, :-1][some] / sketch.rows.sum()
    np.testing.assert_allclose(np.stack([np.ones(len(z)), z]) @ (share[:, None] * curve), 0.0, atol=1e-8)
    assert share @ (curve**2).sum(axis=1) == pytest.approx(1.0, rel=1e-3)


def test_a_grid_does_not_depend_on_the_last_digits_of_moments():
    rng = np.random.default_rng(0)
    mean, spread = rng.normal(size=50) * 10.0 ** rng.integers(-6, 6, 50), rng.random(50) + 0.1
    one, other = Grid.of(mean, spread), Grid.of(mean * (1 + 1e-15), spread * (1 - 1e-15))
    for mine, theirs in zip(one, other, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert not np.array_equal(one.scale, Grid.of(mean, spread * 1.01).scale)  # the twin
    np.testing.assert_allclose(one.scale[0], spread, rtol=1e-3)


def test_predictions_of_a_saved_run_are_the_same_bits(tmp_path):
    users = bent()
    fitted = fit(users, QUICK)
    run = ct.load_run(fitted.save(tmp_path / "run"))
    for name in ("prediction", "low", "high"):
        mine, theirs = fitted.predict(users, interval=0.8)[name], run.predict(users, interval=0.8)[name]
        assert mine.to_list() == theirs.to_list()
    assert run.info["average"]["weights"] == fitted.average.weights
    assert max(run.info["average"]["relative_gradients"].values()) < 1e-8
    (tmp_path / "run" / "average.coterie").unlink()
    with pytest.raises(InvalidInput, match="incomplete"):
        ct.load_run(tmp_path / "run")


def test_scores_are_those_of_the_models_that_predict_without_the_held_out_rows():
    users, settings = bent(noise=1.0), replace(QUICK, holdout=0.25)
    fitted = fit(users, settings)
    split = users.hold_out(0.25, seed=0)
    without = fit(split.train, QUICK)
    assert fitted.average.used
    assert without.average.used
    errors = (told(without, split.test) - split.test.targets) ** 2
    means = np.bincount(split.test.owner, errors) / split.test.counts
    np.testing.assert_allclose(fitted.scores.fitted, np.sqrt(means), rtol=1e-6)
    seen = (told(fitted, split.test) - split.test.targets) ** 2  # the twin: models that saw the rows
    assert not np.allclose(fitted.scores.fitted, np.sqrt(np.bincount(split.test.owner, seen) / split.test.counts))


def test_intervals_cover_what_they_say_and_no_more():
    users = bent(60, 30, noise=1.0)
    train, _, test = users.split(test=0.5)
    fitted = fit(train, QUICK)
    for level, least, most in ((0.9, 0.87, 0.93), (0.5, 0.44, 0.56)):
        found = fitted.predict(test, interval=level)
        low, high = np.array(found["low"]), np.array(found["high"])
        assert least < np.mean((low <= test.targets) & (test.targets <= high)) < most
    # Nearly as narrow as the noise allows: 2 x 1.645.
    assert np.mean(np.array(high - low)) < 2.0


def test_users_with_few_rows_have_wider_intervals():
    users = bent(30, 20)
    kept = np.flatnonzero((users.owner >= 5) | (np.arange(users.n_samples) % 20 < 2))
    few = replace(users, features=users.features[kept], targets=users.targets[kept],
                  offsets=np.searchsorted(users.owner[kept], np.arange(31)))
    found = fit(few, QUICK).predict(users, interval=0.9)
    wide = np.array(found["high"]) - np.array(found["low"])
    assert wide[users.owner < 5].mean() > 1.1 * wide[users.owner >= 5].mean()


@pytest.mark.parametrize("task", ["classification", "counts"])
def test_classes_and_counts_are_averaged_and_have_no_intervals(task, tmp_path):
    train, _, test = bent(30, 60, task=task).split(test=0.5)
    settings = replace(QUICK, task=task)
    fitted, off = fit(train, settings), fit(train, replace(settings, average="off"))
    assert any(name.startswith("curves") for name in fitted.average.weights)
    column = "probability 1" if task == "classification" else "prediction"
    mine, theirs = (np.array(one.predict(test)[column]) for one in (fitted, off))
    truth = test.targets
    assert np.mean((mine - truth) ** 2) < 0.85 * np.mean((theirs - truth) ** 2)
    if task == "classification":
        assert (np.array(fitted.predict(test)["prediction"]) == (mine > 0.5)).all()
    run = ct.load_run(fitted.save(tmp_path / "run"))
    assert run.predict(test)[column].to_list() == mine.tolist()
    with pytest.raises(InvalidInput, match="intervals are for numbers"):
        fitted.predict(test, interval=0.9)


def test_what_has_no_average_has_no_intervals():
    users = bent()
    for settings in (replace(QUICK, average="off"), replace(QUICK, lam=0.1, weights="unit"),
                     replace(QUICK, loss="huber"), replace(QUICK, count="users")):
        fitted = fit(users, settings)
        assert fitted.average is None
        with pytest.raises(InvalidInput, match="no intervals"):
            fitted.predict(users, interval=0.9)


def test_an_interval_is_a_share():
    with pytest.raises(InvalidInput, match="share between 0 and 1"):
        fit(bent(), QUICK).predict(bent(), interval=90)


@pytest.mark.parametrize("setting", [{"average": "maybe"}, {"curves": "on"}, {"scale": "sqrt"}])
def test_unknown_settings_are_refused(setting):
    with pytest.raises(InvalidInput, match="must be"):
        replace(QUICK, **setting)


def test_logarithms_are_used_where_targets_are_products_and_refused_where_there_are_none():
    users = bent(noise=0.3)
    product = replace(users, targets=np.exp(users.targets))
    train, _, test = product.split(test=0.5)
    both, level = fit(train, QUICK), fit(train, replace(QUICK, scale="level"))
    assert sum(weight for name, weight in both.average.weights.items() if "logarithms" in name) > 0.8
    assert not any("logarithms" in name for name in level.average.weights)
    assert rmse(both, test) < rmse(level, test)
    assert fit(train, replace(QUICK, scale="log")).average.scales[0].logarithm
    with pytest.raises(InvalidInput, match="not positive"):
        fit(users, replace(QUICK, scale="log"))


def test_estimators_predict_with_the_average():
    users = bent()
    owner = [users.names[i] for i in users.owner]
    model = PersonalizedRegressor(n_lams=3).fit(users.features, users.targets, users=owner)
    off = PersonalizedRegressor(n_lams=3, average="off").fit(users.features, users.targets, users=owner)
    mine = model.predict(users.features, users=owner)
    np.testing.assert_array_equal(mine, told(model.fit_, users))
    assert np.mean((mine - users.targets) ** 2) < 0.5 * np.mean(
        (off.predict(users.features, users=owner) - users.targets) ** 2)
    # Newcomers have models of the kind that was chosen.
    joined = model.personalize(users.features[:20], users.targets[:20], users=["new"] * 20)
    own = model.fit_.units.predict(users.features[:3], np.repeat(joined.models, 3, axis=0))
    np.testing.assert_array_equal(model.predict(users.features[:3], users=["new"] * 3), own)


def test_shares_of_classes_agree_with_decisions():
    users = bent(30, 40, task="classification")
    owner = [users.names[i] for i in users.owner]
    model = PersonalizedClassifier(n_lams=3).fit(users.features, users.targets, users=owner)
    assert model.fit_.average.used
    share = model.predict_proba(users.features, users=owner)[:, 1]
    t = model.decision_function(users.features, users=owner)
    np.testing.assert_allclose(1.0 / (1.0 + np.exp(-t)), share)
    assert (model.predict(users.features, users=owner) == (share > 0.5)).all()


def test_unknown_users_get_the_shared_part():
    users = bent()
    fitted = fit(users, QUICK)
    new = replace(users, names=tuple(f"new {name}" for name in users.names))
    known, strange = told(fitted, users), told(fitted, new)
    assert np.mean((known - users.targets) ** 2) < np.mean((strange - users.targets) ** 2)
    wide = fitted.predict(new, interval=0.9)
    covered = (np.array(wide["low"]) <= users.targets) & (users.targets <= np.array(wide["high"]))
    assert covered.mean() > 0.85


def test_weights_of_equally_good_independent_options_are_equal():
    rng = np.random.default_rng(0)
    errors = rng.normal(size=(4000, 2))
    errors = errors @ np.linalg.inv(np.linalg.cholesky(errors.T @ errors / 4000)).T  # orthonormal

    def weights(wrong: np.ndarray) -> np.ndarray:
        return weights_of(ErrorProducts.of((wrong.T @ wrong)[None], np.array([len(wrong)])))

    np.testing.assert_allclose(weights(errors), 0.5, atol=1e-3)
    np.testing.assert_allclose(weights(errors * [1.0, 2.0]), [0.8, 0.2], atol=1e-3)
    np.testing.assert_allclose(weights(np.stack([np.zeros(9), np.full(9, 5.0)], axis=1)), [1.0, 0.0])


@pytest.mark.parametrize(("own", "equal_kept", "personal_kept"), [(0.1, True, False), (1.0, False, False)])
def test_equal_models_are_kept_unless_an_average_is_clearly_better(own, equal_kept, personal_kept):
    # Errors with the variance 1 + own^2, and 1 + own^2 / 2 for the mean of both options: a gain in log RMSE of 0.0025
    # for own = 0.1, less than one percent; and of 0.14 for own = 1.
    rng = np.random.default_rng(0)
    errors = rng.normal(size=(100, 50, 1)) + own * rng.normal(size=(100, 50, 2))
    judged = ErrorProducts.of(np.swapaxes(errors, 1, 2) @ errors, np.full(100, 50))
    for differ, kept in ((False, equal_kept), (True, personal_kept)):
        weights = StackedWeights.of(judged, numbers=True, differ=differ).weights
        assert (weights[0] == 1.0) == kept
        assert kept or 0.0 < weights[0] < 1.0


def test_folds_have_as_many_rows_of_each_user_and_class():
    users = bent(6, 23, task="classification")
    folds = folds_of(users, "classification", np.arange(6) % 5, 0)
    counts = np.array([np.bincount(folds[users.owner == i], minlength=5) for i in range(6)])
    assert counts.max() - counts.min() == 1
    single = replace(users, features=users.features[:24], targets=users.targets[:24],
                     offsets=np.array([0, 23, 24, 24, 24, 24, 24]))
    assert folds_of(single, "classification", np.zeros(6, dtype=np.int64), 0)[23] == -1


def test_a_state_gives_the_average_back():
    users = bent()
    average = fit(users, QUICK).average
    again = Average.from_state(average.state())
    own = np.zeros(users.n_samples)
    for mine, theirs in zip(average.predict(users.features, users.owner, own),
                            again.predict(users.features, users.owner, own), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    changed = average.state()
    changed["own"] = 0.5
    assert not np.array_equal(Average.from_state(changed).predict(users.features, users.owner, own + 1.0)[0],
                              average.predict(users.features, users.owner, own + 1.0)[0])


def test_many_users_are_judged_by_some_of_them():
    users = bent(400, 6, noise=0.5)
    fitted = fit(users, QUICK)
    assert fitted.average.used
    assert all(len(part.estimate.personal) == 400 for part in fitted.average.parts)
    assert rmse(fitted, users) < 0.6


def test_users_with_one_row_only_are_not_averaged():
    users = bent(40, 1)
    assert fit(users, QUICK).average is None


def test_the_command_writes_intervals(tmp_path):
    from typer.testing import CliRunner

    from coterie.cli import app

    users = bent()
    pl.DataFrame({"who": [users.names[i] for i in users.owner], "x0": users.features[:, 0],
                  "x1": users.features[:, 1], "y": users.targets}).write_csv(tmp_path / "table.csv")
    run = CliRunner().invoke
    asked = ["fit", str(tmp_path / "table.csv"), "--user", "who", "--target", "y", "--out", str(tmp_path / "run")]
    done = run(app, asked)
    assert done.exit_code == 0
    assert "An average of several models" in " ".join(done.output.split())
    out = tmp_path / "predictions.csv"
    done = run(app, ["predict", str(tmp_path / "run"), str(tmp_path / "table.csv"), "--interval", "0.9",
                     "--out", str(out)])
    assert done.exit_code == 0
    frame = pl.read_csv(out)
    assert ((frame["low"] < frame["prediction"]) & (frame["prediction"] < frame["high"])).all()
    assert 0.85 < ((frame["low"] <= frame["y"]) & (frame["y"] <= frame["high"])).mean() < 0.98
    assert run(app, [*asked, "--overwrite", "--average", "off"]).exit_code == 0
    done = run(app, ["predict", str(tmp_path / "run"), str(tmp_path / "table.csv"), "--interval", "0.9"])
    assert isinstance(done.exception, InvalidInput)


def test_numbers_far_from_zero_have_a_basis():
    users = bent()
    far = replace(users, features=users.features + [1e9, 0.0])
    near, there = learned_basis(users)[0], learned_basis(far)[0]
    for logarithms in (False, True):
        grid = Grid.of(*pooled_moments(far)[1:])
        question = GridQuestion(grid, pulls=False)
        sketch = question.pool([question.answer(far, {})])
        assert np.isfinite(Basis.learn(sketch, grid, logarithms=logarithms).rows(far.features, far.owner)).all()
    assert len(there.curves) == len(near.curves)
    np.testing.assert_allclose(there.range, near.range, atol=0.1)
