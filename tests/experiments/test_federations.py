"""Real federations: same splits for all, settings chosen without test rows, tables that say where they are from."""

from __future__ import annotations

import csv
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

import coterie as ct
from coterie import cli
from coterie.baselines import BASELINES, BUDGET
from coterie.baselines.run import BaselineRun
from coterie.experiments import federations as lab
from coterie.experiments import federations_data as sets
from coterie.experiments.federations_ours import OURS, Coterie, CoterieGroups, CoteriePath, CoterieShrunk, counted

FEW = ("coterie", "coterie shrunk", "local", "global", "k_means")


@pytest.fixture(scope="module")
def tiny():
    """Twelve users in two groups that need opposite models."""
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(12), 24)
    features = rng.standard_normal((len(owner), 2))
    slopes = np.where(owner % 2 == 0, 1.0, -1.0)[:, None] * np.array([3.0, 1.0])
    targets = (features * slopes).sum(axis=1) + 0.3 * rng.standard_normal(len(owner)) + 5
    return sets.Benchmark(name="tiny", users=ct.Users.from_arrays(features, targets, owner), metric="RMSE",
                           loss=ct.Squared(ridge=1e-3), features=sets.both_standardised, rule="75 to 25 %",
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
    assert len(before) == len(after) == len(OURS) + len(BASELINES) + 4
    for a, b in zip(before, after, strict=True):
        assert (a.method, a.settings, a.rounds, a.floats) == (b.method, b.settings, b.rounds, b.floats)
        np.testing.assert_array_equal(a.models, b.models)
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


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.name)
def test_ours_has_no_larger_budget(kind, tiny):
    grid = kind.grid(tiny.users, tiny.loss)
    assert 1 < len(grid) <= BUDGET
    assert len(set(grid)) == len(grid)


def test_shrinkage_learns_how_much_users_differ():
    """Users who differ in one coordinate only: it is left to them, the other is pooled."""
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(60), 8)
    own = np.stack([4 * rng.standard_normal(60), np.ones(60)], axis=1)
    features = rng.standard_normal((len(owner), 2))
    targets = (features * own[owner]).sum(axis=1) + rng.standard_normal(len(owner))
    users, loss = ct.Users.from_arrays(features, targets, owner), ct.Squared(ridge=1e-6)
    alone = BASELINES["local"]().fit(users, loss).models
    shrunk = CoterieShrunk().fit(users, loss).models
    assert shrunk[:, 0].std() > 3
    assert shrunk[:, 1].std() < 0.3 * alone[:, 1].std()
    assert ((shrunk[:, :2] - own) ** 2).sum() < 0.7 * ((alone[:, :2] - own) ** 2).sum()


def test_a_weaker_pull_leaves_users_more_to_themselves(tiny):
    users = sets.both_standardised(tiny.users).transform(tiny.users)
    alone = BASELINES["local"]().fit(users, tiny.loss).models
    away = [np.abs(CoterieShrunk(shape="isotropic", factor=factor).fit(users, tiny.loss).models - alone).max()
            for factor in (1.0, 0.1, 0.01)]
    assert away[0] > 5 * away[1] > 25 * away[2] > 0
    assert any(isinstance(settings.method, CoterieShrunk) and settings.method.factor == 0.01
               for settings in Coterie.grid(users, tiny.loss))


def test_one_pull_for_all_directions_is_round(tiny):
    for shape in ("full", "diagonal", "isotropic"):
        covariance = CoterieShrunk(shape=shape)._shaped(np.array([[4.0, 1.0], [1.0, 2.0]]))
        assert (covariance[0, 1] != 0) == (shape == "full")
        assert (covariance[0, 0] == covariance[1, 1]) == (shape == "isotropic")


def test_the_groups_and_the_path_are_the_librarys(tiny):
    users = sets.standardised(tiny.users).transform(tiny.users)
    fitted = CoterieGroups().fit(users, tiny.loss)
    groups = ct.find_groups(users, tiny.loss)
    np.testing.assert_array_equal(fitted.labels, groups.labels)
    np.testing.assert_allclose(fitted.models, groups.models, atol=1e-6)
    assert CoteriePath(point=9).fit(users, tiny.loss).n_clusters == 1
    assert CoteriePath(point=0).fit(users, tiny.loss).n_clusters == 12
    assert Coterie(method=CoterieGroups()).fit(users, tiny.loss).rounds == fitted.rounds > 0


def test_evaluations_are_counted_as_rounds(tiny):
    run = BaselineRun(tiny.loss, tiny.loss.prepare(tiny.users), np.random.default_rng(0), None)
    loss, models = counted(run), np.zeros((12, 3))
    loss.gradients(run.samples, models)
    assert (run.rounds, run.floats_down, run.floats_up) == (1, 12 * 3, 12 * 4)
    loss.local(run.samples)
    assert (run.rounds, run.floats_down, run.floats_up) == (2, 24 * 3, 24 * 4)
    np.testing.assert_array_equal(loss.hessians(run.samples, models), tiny.loss.hessians(run.samples, models))


def test_holm_against_the_textbook():
    np.testing.assert_allclose(lab.holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    assert lab.holm([]).size == 0
    assert lab.signed_rank(np.zeros(5)) == 1.0
    assert lab.signed_rank(np.arange(1.0, 21.0)) < 1e-4


def test_metrics_by_hand():
    users = ct.Users.from_arrays([[1.0], [2.0], [-1.0], [1.0]], [1.0, -1.0, -1.0, -1.0], [0, 0, 0, 1])
    base = sets.Benchmark(name="x", users=users, metric="AUC", loss=ct.Logistic(), features=sets.standardised, rule="")
    models = np.array([[1.0, 0.0], [1.0, 0.0]])
    np.testing.assert_array_equal(lab.score(base, models, users), [0.5, np.nan])
    np.testing.assert_allclose(lab.score(replace(base, metric="accuracy"), models, users), [2 / 3, 0.0])
    squared = replace(base, metric="RMSE", loss=ct.Squared())
    np.testing.assert_allclose(lab.score(squared, models, users, 2.0), [2 * np.sqrt(3), 4.0])


def test_discriminant_directions_tell_classes_apart():
    rng = np.random.default_rng(0)
    owner, classes = np.repeat(np.arange(5), 40), np.tile([0.0, 1.0], 100)
    features = rng.standard_normal((200, 6)) * np.array([1, 1, 9, 9, 1, 1])
    features[:, 4] += 4 * classes
    users = ct.Users.from_arrays(features, classes, owner)
    made = sets.discriminant(users, 1).transform(users)
    assert made.n_features == 1
    assert made.features.std() == pytest.approx(1.0)
    assert abs(np.corrcoef(made.features[:, 0], features[:, 4])[0, 1]) > 0.95
    assert sets.principal(users, 2).transform(users).n_features == 2


def test_bundled_sets_are_as_documented():
    digits, diabetes = sets.federations(None)
    assert digits.users.n_users == 30
    assert list(np.bincount(digits.clusters)) == [10, 10, 10]
    assert (digits.split(0).everything.counts == 12).all()
    assert diabetes.users.n_users == 17
    assert (diabetes.users.counts == 26).all()
    assert (np.diff(np.maximum.reduceat(diabetes.users.features[:, 0], diabetes.users.offsets[:-1])) >= 0).all()


def test_a_missing_set_says_what_is_here(tmp_path):
    with pytest.raises(ct.InvalidInput, match=r"landmine.npz is not in .*digits, diabetes"):
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
    assert sets.available(tmp_path) == ("school", "digits", "diabetes")
@pytest.mark.slow
def test_the_command_writes_tables_and_pictures(tmp_path, monkeypatch):
    monkeypatch.setattr(lab, "OURS", (Coterie,))
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
    monkeypatch.setattr(lab, "OURS", (Coterie,))
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
