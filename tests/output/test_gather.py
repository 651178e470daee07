"""The document of a result: complete, plain, right, and of a size a page can bear."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from scipy.cluster.hierarchy import cophenet, is_valid_linkage
from scipy.spatial.distance import squareform
from support.paths import halving, made_path

import coterie as ct
from coterie import plots
from coterie.base.storage import json_ready
from coterie.data.users import Participants
from coterie.datasets import clustered, ellipses, gaussian_mixture
from coterie.fitting import Scores, Settings, fit
from coterie.fitting.scores import covered_by, reliability_of
from coterie.output.report import render
from coterie.output.report.gather import aligned, gather, sample
from coterie.output.runs.save import count_groups

KEYS = {"title", "subtitle", "version", "command", "task", "users", "counts", "lams", "chosen", "points", "labels",
        "tree", "map", "coefficients", "scores", "bounds", "groups", "federated", "privacy", "settings", "notes",
        "reduced", "headline", "noun", "nouns", "loss", "warnings", "shares", "settings_sentence", "curves",
        "checks"}


def of_classes(users: ct.Users) -> ct.Users:
    return replace(users, targets=(users.targets + 1) / 2)


def fitted(family: str, task: str, **settings: object):
    data = clustered(family, n_users=9, n_clusters=2, samples=80, n_features=4, separation=3.0, seed=0)
    users = of_classes(data.users) if family == "logistic" else data.users
    return fit(users, Settings(task=task, n_lams=8, **settings))


@pytest.fixture(scope="module")
def lines():
    """Two features, two classes, far from the origin and on different scales."""
    users = of_classes(ellipses(users_per_cluster=4, samples=20, seed=0).users)
    return fit(replace(users, features=users.features * [1.0, 50.0] + [100.0, -7.0]),
               Settings(task="classification", n_lams=8))


@pytest.fixture(scope="module")
def several():
    return fitted("multinomial", "classification")


@pytest.fixture(scope="module")
def run():
    data = ellipses(users_per_cluster=4, seed=0)
    return ct.federate(data.users, ct.SquaredHinge(ridge=1e-3), 0.4, participation=0.5, held_out=data.test, seed=0)


def check(document: dict) -> None:
    """Shapes agree, JSON can say all of it, and a page can be made of it."""
    assert set(document) == KEYS
    json.dumps(document, allow_nan=False)
    n, n_lams = len(document["users"]), len(document["lams"])
    assert np.shape(document["labels"]) == (n_lams, n)
    if n > 1:
        assert np.shape(document["map"]["points"]) == (n_lams, n, 3 if document["map"]["kind"] == "separators" else 2)
    assert len(document["points"]) == len(document["coefficients"]["which"]) == n_lams
    assert len(document["tree"]) == n - 1
    assert n == 1 or is_valid_linkage(np.array(document["tree"], dtype=float))
    assert len(document["counts"]) == n
    width = len(document["coefficients"]["names"]) * len(document["coefficients"]["outputs"] or [1])
    scaled = document["coefficients"]["standardized"] or document["coefficients"]["clusters"]
    for k, (which, rows, same, labels) in enumerate(zip(
            document["coefficients"]["which"], document["coefficients"]["clusters"], scaled, document["labels"],
            strict=True)):
        assert np.shape(rows) == np.shape(same) == (len(which), width)
        assert len(which) == min(200 if k == document["chosen"] else 24, len(set(labels)))
        sizes = np.bincount(labels)[which]
        assert which == sorted(which) if len(which) <= 24 else (np.diff(sizes) <= 0).all()
        assert sizes.min() >= max(np.delete(np.bincount(labels), which), default=0)  # the largest are shown
    if document["scores"]:
        assert np.shape(document["scores"]["points"]) == (n_lams, n)
    assert "<html" in render(document)


# What it is made from


@pytest.mark.parametrize(("family", "task"), [("logistic", "classification"), ("squared", "regression"),
                                              ("poisson", "counts")])
def test_a_fit_of_each_task(family, task):
    fit_of_kind = fitted(family, task)
    document = gather(fit_of_kind, title="T", command="coterie fit", notes=["one"])
    check(document)
    assert (document["title"], document["task"], document["notes"]) == ("T", task, ["one"])
    assert document["chosen"] == fit_of_kind.chosen
    assert document["labels"][fit_of_kind.chosen] == fit_of_kind.labels.tolist()
    assert (document["groups"]["sentence"], document["groups"]["kind"]) == (fit_of_kind.why, fit_of_kind.kind)
    assert document["groups"]["compared"] == fit_of_kind.compared
    assert document["groups"]["errors"] == fit_of_kind.compared_errors
    assert document["groups"]["errors"][fit_of_kind.kind] == 0.0
    assert set(document["groups"]["errors"]) == set(fit_of_kind.compared)
    assert document["groups"]["stays"] == fit_of_kind.stability.stays.tolist()
    stability, held_out = document["groups"]["stability"], document["groups"]["held_out"]
    assert (stability["index"], stability["stable"]) == (fit_of_kind.stability.index, fit_of_kind.stability.stable)
    assert stability["groups"] == [fit_of_kind.stability.stays[fit_of_kind.labels == k].mean() for k in range(2)]
    gains = (fit_of_kind.scores.fitted - fit_of_kind.scores.alone) * (1 if fit_of_kind.scores.larger else -1)
    assert (held_out["gain"], held_out["error"]) == pytest.approx((gains.mean(), gains.std(ddof=1) / 3))
    assert (held_out["worse"], held_out["users"]) == (fit_of_kind.scores.worse.sum(), 9)
    assert f"standard error {held_out['error']:.2g}" in str(fit_of_kind.scores) or task == "classification"
    assert document["lams"] == fit_of_kind.path.lams.tolist()
    assert document["settings"]["n_lams"] == 8
    assert document["scores"]["points"][fit_of_kind.chosen] == pytest.approx(fit_of_kind.scores.fitted.tolist())
    first = np.unique(fit_of_kind.labels, return_index=True)[1]
    for k, row in zip(document["coefficients"]["which"][fit_of_kind.chosen],
                      document["coefficients"]["clusters"][fit_of_kind.chosen], strict=True):
        assert row == pytest.approx(fit_of_kind.coefficients[first[k]].ravel().tolist())
    assert document["bounds"] is None  # weights that were made from groups prove nothing about these groups


def test_the_headline_says_what_was_found_how_much_better_it_is_and_how_sure_that_is():
    found = fitted("squared", "regression")
    said, scores = gather(found)["headline"], found.scores
    assert said["found"] == "2 groups among 9 users (5 and 4 users). The users of a group share one model."
    assert [(each["number"], each["users"]) for each in said["groups"]] == [(1, 5), (2, 4)]
    clear = gather(replace(found, scores=replace(scores, alone=scores.fitted + 3 * np.arange(9))))["headline"]
    share = 1 - scores.fitted.mean() / (scores.fitted.mean() + 12)
    assert clear["better"].startswith(f"{100 * share:.0f} % less error than each user's own model: better for 8 of 9 "
                                      "users, none worse beyond chance; ")
    assert clear["better"].endswith(f"(on {scores.n_rows} rows held out from the fit).")
    assert said["sure"].startswith("The groups are stable: with other rows of the same users, 100 % of them stay")
    other = replace(scores, fitted=scores.fitted + 3 * np.arange(9), alone=scores.fitted, worse=np.arange(9) > 6)
    worse = gather(replace(found, scores=other))["headline"]["better"]
    assert "times the error than each user's own model: better for 0 of 9 users, 2 worse beyond chance" in worse
    even = replace(scores, alone=scores.fitted * np.array([1.1, 0.9, 1.1, 0.9, 1.1, 0.9, 1.1, 0.9, 1.05]))
    assert "which can be chance, than each user's own model: better for 5 of 9" in gather(
        replace(found, scores=even))["headline"]["better"]
    same = gather(replace(found, scores=replace(scores, alone=scores.fitted)))["headline"]
    assert same["better"].startswith("No more or less error than each user's own model: better for 0 of 9 users")
    assert gather(replace(found, scores=None))["headline"]["better"] == "Not known: no rows were held out."
    unstable = replace(found.stability, index=0.4, searched=0.2, stays=np.full(9, 0.5))
    assert gather(replace(found, stability=unstable))["headline"]["sure"] == (
        "The groups are unstable: with other rows of the same users, 50 % of them stay in their group, and a search "
        "without the held-out rows finds other groups.")


def shops(effects: np.ndarray, rows: int = 40, noise: float = 0.5, **columns: str):
    """A table of shops with these effects of price and sun, and levels; every other shop is of the second kind."""
    rng = np.random.default_rng(0)
    shop = np.repeat(np.arange(12), rows)
    price, sun = rng.uniform(100, 500, len(shop)), rng.random(len(shop)) < 0.5
    w = effects[shop % len(effects)]
    sold = w[:, 0] * price + w[:, 1] * sun + w[:, 2] + rng.normal(0, noise, len(shop))
    names = {"shop_id": "shop_id", **columns}
    return pl.DataFrame({names["shop_id"]: [f"s{k}" for k in shop], "price": price, "sun": sun, "sold": sold})


def test_groups_are_told_in_the_words_and_units_of_the_table():
    found = ct.fit_table(shops(np.array([[-0.02, 5.0, 30.0], [-0.02, 1.0, 30.0]])), user="shop_id", target="sold",
                         settings=Settings(n_lams=6))
    document = gather(found)
    said = document["headline"]
    assert (document["title"], document["noun"], document["nouns"]) == ("sold, by shop_id", "shop", "shops")
    assert said["found"] == "2 groups among 12 shops (6 and 6 shops). The shops of a group share one model."
    first, second = said["groups"]
    assert first["names"] == "s0, s10, s2, s4, ..."
    # What does not differ, the price, is not told; the column of 0 and 1 is not told by unit.
    for each, own, others in ((first, 5, 1), (second, 1, 5)):
        told = re.search(r"(\S+) with sun \(others (\S+)\)", each["differs"])
        assert [float(value) for value in told.groups()] == pytest.approx([own, others], abs=0.2)
    assert "price" not in first["differs"] + second["differs"]
    assert first["sentence"] == f"Group 1, 6 shops (s0, s10, s2, s4, ...): {first['differs']}."
    # The order of the groups is that of the labels, which begin at 0.
    assert [found.labels[found.names.index(each["names"].split(",")[0])] for each in said["groups"]] == [0, 1]


def test_large_columns_are_told_by_many_units_and_one_model_by_its_effects():
    found = ct.fit_table(shops(np.array([[-0.02, 5.0, 30.0]])), user="shop_id", target="sold",
                         settings=Settings(n_lams=6))
    said = gather(found)["headline"]
    assert found.kind == "one model"
    assert said["groups"] == []
    assert "per 100 of price" in said["shared"]
    slope = float(re.search(r"(\S+) per 100 of price", said["shared"])[1])
    assert slope == pytest.approx(-2.0, abs=0.05)
    assert "sold is typically 26" in said["shared"]


@pytest.mark.parametrize(("column", "noun", "nouns"), [
    ("shop_id", "shop", "shops"), ("Subject", "subject", "subjects"), ("country", "country", "countries"),
    ("who", "user", "users"), ("ID", "user", "users"), ("classes", "classe", "classes"), ("x1", "user", "users")])
def test_users_are_called_by_the_word_of_their_column(column, noun, nouns):
    frame = shops(np.array([[-0.02, 5.0, 30.0]]), rows=4, shop_id=column)
    document = gather(ct.fit_table(frame, user=column, target="sold", settings=Settings(n_lams=3, holdout=0.0)))
    assert (document["noun"], document["nouns"]) == (noun, nouns)


def test_nothing_shared_is_said_once_and_nowhere_else_contradicted():
    rng = np.random.default_rng(0)
    effects = np.column_stack([rng.normal(0, 0.1, 12), rng.normal(0, 30, 12), rng.normal(0, 30, 12)])
    found = ct.fit_table(shops(effects, rows=80), user="shop_id", target="sold", settings=Settings(n_lams=6))
    document = gather(found)
    said = document["headline"]
    assert found.kind == "alone"
    assert said["found"] == "No groups among 12 shops: each has a model of its own, and nothing is shared."
    assert (said["groups"], found.stability) == ([], None)
    texts = " ".join([found.why, *(text for text in said.values() if isinstance(text, str))])
    assert "stable" not in texts
    assert "groups of 1" not in texts


def test_curves_bend_where_effects_do():
    rng = np.random.default_rng(0)
    who = np.repeat(np.arange(16), 30)
    x, z = rng.uniform(0, 4, len(who)), rng.uniform(0, 4, len(who))
    y = 3 * np.sin(1.5 * x) + z + rng.normal(0, 1, 16)[who] + rng.normal(0, 0.2, len(who))
    frame = pl.DataFrame({"plant": who.astype(str), "x": x, "z": z, "y": y})
    found = ct.fit_table(frame, user="plant", target="y", settings=Settings(n_lams=4))
    document = gather(found)
    bent, straight = document["curves"]["columns"]
    assert (bent["name"], bent["bends"], bent["differs"]) == ("x", True, False)
    assert (straight["name"], straight["bends"]) == ("z", False)
    line = np.array(bent["x"])
    truth = 3 * np.sin(1.5 * line)
    assert np.std(np.array(bent["everyone"]) - truth) < 0.3
    assert np.polyfit(straight["x"], straight["everyone"], 1)[0] == pytest.approx(1.0, abs=0.1)
    assert document["headline"]["curves"].startswith("x bends, alike for all plants: highest near 1.")
    assert document["headline"]["curves"].endswith("Straight: z.")
    assert "An average of several models" in document["headline"]["average"]
    assert document["checks"]["mean"] == pytest.approx(np.nanmean(found.scores.covered))
    assert 0.75 < document["checks"]["mean"] <= 1.0
    off = ct.fit_table(frame, user="plant", target="y", settings=Settings(n_lams=4, average="off"))
    assert gather(off)["curves"] is None


def test_reliability_is_on_the_diagonal_for_probabilities_that_are_right():
    rng = np.random.default_rng(0)
    shares = rng.random(4000)
    right = reliability_of(shares, rng.random(4000) < shares)
    assert right[:, 2].sum() == 4000
    assert np.abs(right[:, 0] - right[:, 1]).max() < 0.06
    sure = reliability_of(np.clip(3 * shares - 1, 0, 1), rng.random(4000) < shares)  # too sure of itself
    assert np.abs(sure[:, 0] - sure[:, 1]).max() > 0.1
    assert len(reliability_of(shares[:10], shares[:10] > 0.5)) == 1


def test_coverage_is_counted_by_user():
    users = ct.Users.from_arrays(np.zeros((4, 1)), [0.0, 1.0, 2.0, 3.0], ["a", "a", "b", "b"])
    told, reach = np.array([0.5, 0.0, 2.0, 3.5]), np.array([1.0, 0.5, 0.1, 0.4])
    assert covered_by(users.targets, told, reach, users).tolist() == [0.5, 0.5]
    assert covered_by(users.targets, told, reach + 1, users).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("lam", "kind", "title", "text"), [
    (0.0, "alone", "No groups among 9 users", "No groups among 9 users: each has a model of its own, and "
     "nothing is shared."),
    (1e4, "one model", "One model for 9 users", "One group: all 9 users share one model.")])
def test_no_groups_and_one_group_are_called_so(lam, kind, title, text):
    result = fitted("squared", "regression", lam=lam)
    document = gather(result)
    assert result.kind == kind
    assert (document["title"], document["headline"]["found"]) == (title, text)
    assert document["headline"]["sure"] == "The penalty strength was given, not chosen by the data."
    assert "penalty strength" in document["settings_sentence"]
    assert " as given; 20% of the rows held out; tolerance 1e-06; seed 0." in document["settings_sentence"]


def test_one_user_is_compared_with_nobody():
    users = clustered("squared", n_users=1, n_clusters=1, samples=40, seed=0).users
    result = fit(users, Settings(n_lams=5))
    document = gather(result)
    score = f"{result.scores.fitted[0]:.3g}"
    assert document["title"] == "One user"
    said = {name: text for name, text in document["headline"].items() if text}
    assert said == {"found": "There is one user, so there is nothing to share.",
                    "shared": said["shared"], "better": f"On 8 held-out rows, the RMSE is {score}."}
    assert [document[name] for name in ("map", "scores", "shares")] == [None] * 3
    assert "held_out" not in document["groups"]
    assert str(result.scores) == f"RMSE on 8 held-out rows: {result.scores.fitted[0]:.4g}."
    assert count_groups(result) == "one user"


def test_models_that_do_better_are_a_warning():
    result = fitted("squared", "regression", lam=1e4)  # one model, where users differ
    [warning] = gather(result)["warnings"]
    assert warning.startswith("On held-out rows, models from each user's own rows only would predict better: RMSE ")
    assert warning in result._repr_html_().replace("&#x27;", "'")
    together = replace(result.scores, fitted=result.scores.together + np.linspace(0.4, 0.6, 9),
                       alone=np.full(9, 1e3))
    [warning] = gather(replace(result, scores=together))["warnings"]
    assert warning.startswith("On held-out rows, one model for all users would predict better")
    chance = replace(together, fitted=together.together + [3.0, -2.0, 1.0, -1.0, 2.0, -3.0, 1.0, 0.0, 0.0])
    assert gather(replace(result, scores=chance))["warnings"] == []  # 0.1, with a standard error of 0.6
    found = fitted("squared", "regression")
    assert gather(found)["warnings"] == []
    assert "Warning" not in found._repr_html_()


@pytest.mark.parametrize("family", ["squared", "logistic", "multinomial"])
def test_standardised_coefficients_are_of_standardised_features(family):
    found = fitted(family, "regression" if family == "squared" else "classification")
    document, units = gather(found), found.units
    shape = (-1, len(document["coefficients"]["names"]), len(document["coefficients"]["outputs"] or [1]))
    raw, scaled = (np.reshape(document["coefficients"][name][found.chosen], shape)
                   for name in ("clusters", "standardized"))
    X = np.random.default_rng(0).standard_normal((5, 4)) * units.scale + units.mean
    expected = (np.einsum("np,gpk->gnk", X, raw[:, :-1]) + raw[:, -1:] - units.centre) / units.spread
    margins = np.einsum("np,gpk->gnk", (X - units.mean) / units.scale, scaled[:, :-1]) + scaled[:, -1:]
    np.testing.assert_allclose(margins, expected, atol=1e-9)
    unscaled = fitted(family, found.settings.task, standardize=False)
    assert gather(unscaled)["coefficients"]["standardized"] is None


def test_shares_of_coefficients_add_up_to_their_mean_squares():
    rng = np.random.default_rng(3)
    owner, effects = np.repeat(np.arange(30), 30), rng.normal([1.0, -1.0, 0.5], [0.7, 0.0, 0.0], size=(30, 3))
    X = rng.standard_normal((900, 3))
    y = (X * effects[owner]).sum(axis=1) + rng.standard_normal(900)
    personal = fit(ct.Users.from_arrays(X, y, owner), Settings(n_lams=4))
    grouped, several = fitted("squared", "regression"), fitted("multinomial", "classification")
    assert (personal.kind, grouped.kind, several.kind) == ("personal", "groups", "groups")
    for result in (personal, grouped, several):
        shares = gather(result)["shares"]
        total = np.sum([shares[name] for name in ("shared", "groups", "personal")], axis=0)
        squares = (result.units.standardized(result.models) ** 2).mean(axis=0).sum(axis=1)
        np.testing.assert_allclose(total, squares, rtol=1e-9)
        assert len(shares["names"]) == len(total)
    assert max(gather(grouped)["shares"]["personal"]) < 1e-20  # all differences are between groups
    shares = gather(personal)["shares"]
    assert max(shares["groups"]) < 1e-20
    assert shares["personal"][0] > 20 * max(shares["personal"][1:3])  # users differ in the first effect only
    assert gather(fitted("squared", "regression", lam=1e4))["shares"] is None


def test_recovery_bounds_for_weights_that_do_not_come_from_groups():
    settings = Settings(task="regression", weights="unit", lam=0.05, n_lams=4, holdout=0.0)
    result = fit(clustered("squared").users, settings)
    bounds = ct.recovery_bounds(result.solution.problem, result.labels)
    document = gather(result)
    assert document["bounds"]["lower"] == pytest.approx(bounds.lower)
    assert document["bounds"]["sentence"] == bounds.sentence


def test_classes_name_the_outputs(several):
    document = gather(several, classes=["a", "b", "c"])
    check(document)
    assert document["coefficients"]["outputs"] == ["a", "b", "c"]
    assert document["coefficients"]["names"][-1] == "intercept"
    assert document["map"]["kind"] == "projection"
    sums = np.reshape(document["coefficients"]["clusters"][several.chosen], (-1, 5, 3)).sum(axis=2)
    np.testing.assert_allclose(sums, 0.0, atol=1e-9)
    assert gather(several)["coefficients"]["outputs"] == ["class 0", "class 1", "class 2"]
    with pytest.raises(ct.InvalidInput, match="3 classes, got 2"):
        gather(several, classes=["a", "b"])


def test_points_without_targets():
    fit_of_kind = fit(gaussian_mixture(20, n_features=2, seed=0).users, Settings(task="clustering", n_lams=8))
    document = gather(fit_of_kind)
    check(document)
    assert document["scores"] is None
    assert (document["noun"], document["subtitle"].split(",")[0]) == ("point", "20 points")
    assert "20 points" in document["headline"]["found"]
    assert document["map"]["kind"] == "projection"
    assert (document["map"]["xlabel"], document["map"]["ylabel"]) == ("x0", "x1")
    shown = fit_of_kind.units.coefficients(fit_of_kind.models)
    np.testing.assert_allclose(document["map"]["points"][fit_of_kind.chosen], shown[:, :, 0])
    np.testing.assert_allclose(np.array(document["coefficients"]["clusters"][fit_of_kind.chosen]).ravel(),
                               fit_of_kind.units.coefficients(fit_of_kind.centres).ravel())


def test_a_path_and_a_solution():
    path = made_path(halving(9, 4), [0.0, 0.1, 0.2, 0.3], dim=1)
    document = gather(path, chosen=1)
    check(document)
    assert document["map"]["kind"] == "line"
    assert document["chosen"] == 1
    assert gather(path)["chosen"] == plots.longest(path)
    single = gather(path[2])
    check(single)
    assert single["lams"] == [0.2]
    within = gather(path[2], path=path)
    assert (within["lams"], within["chosen"]) == (document["lams"], 2)
    check(gather(made_path([[0]], [0.0])))


def test_a_federation_and_its_rounds(run):
    document = gather(run)
    check(document)
    rounds = document["federated"]["rounds"]
    assert sum(r["bytes_up"] for r in rounds) == run.ledger.bytes_up
    assert sum(r["bytes_down"] for r in rounds) == run.ledger.bytes_down
    assert next(r["gap"] for r in rounds[::-1] if r["gap"] is not None) == pytest.approx(run.gap)
    assert str(run.ledger) in document["federated"]["sentence"]
    assert document["map"]["kind"] == "separators"
    np.testing.assert_allclose(document["scores"]["points"][0], run.scores[:, 1] / run.scores[:, 2])
    assert document["scores"]["alone"] is None
    without = gather(replace(run, account=replace(run.account, scores=None),
                             certificate=replace(run.certificate, bound=-np.inf)))
    assert without["scores"] is None
    assert without["points"][0]["bound"] is None
    assert without["points"][0]["gap"] is None


def test_data_that_are_with_their_users(run):
    problem = ct.Problem(run.problem.users, run.problem.loss, 0.4)
    away = ct.losses.derived.Remote(loss=problem.loss, length=3)
    remote = replace(run, problem=ct.Problem(replace(problem.users, targets=None), away, 0.4))
    document = gather(remote, most_users=5)
    check(document)
    assert document["bounds"] is None
    assert (document["map"]["kind"], document["task"]) == ("projection", "classification")
    assert document["counts"] == problem.users.take(np.arange(5)).counts.tolist()


def test_a_server_does_not_count_rows_it_has_not_seen(run):
    current = gather(run)
    assert "2 columns (x0, x1)" in current["subtitle"]
    assert " rows, " in current["subtitle"]
    away = ct.losses.derived.Remote(loss=run.problem.loss, length=3)
    names = Participants(run.problem.users.names, run.problem.users.feature_names)
    document = gather(replace(run, problem=ct.Problem(names, away, 0.4)))
    assert document["counts"] is None
    check(document | {"counts": [1] * run.problem.n_users})
    assert document["subtitle"] == f"{run.problem.n_users} users, 2 columns (" + ", ".join(
        run.problem.users.feature_names) + ")"
    assert document["map"]["kind"] == "projection"


# What it says


def test_lines_part_the_classes_as_the_models_do(lines):
    document = gather(lines)
    check(document)
    assert document["map"]["kind"] == "separators"
    samples, models = np.array(document["map"]["samples"]), np.array(document["map"]["points"])[lines.chosen]
    w = models[samples[:, 3].astype(int)]
    side = (samples[:, :2] * w[:, :2]).sum(axis=1) + w[:, 2] > 0
    predictions = lines.units.predict(samples[:, :2], lines.solution.models[samples[:, 3].astype(int)])
    np.testing.assert_array_equal(side, predictions == 1)
    assert (side == samples[:, 2]).mean() > 0.8
    assert samples[:, 0].mean() == pytest.approx(100, abs=2)


def test_samples_are_at_most_three_thousand():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((8000, 2))
    users = ct.Users.from_arrays(X, np.sign(X[:, 0]), np.arange(8000) % 4)
    document = gather(ct.solve(ct.Problem(users, ct.Logistic(ridge=0.1), 1.0)))
    samples = np.array(document["map"]["samples"])
    assert len(samples) == 3000
    assert set(samples[:, 3]) == {0, 1, 2, 3}


def test_scores_are_placed_by_the_chosen_points():
    def scores(n_rows: int, current: int) -> Scores:
        points = np.arange(n_rows)[:, None] * np.ones(3)
        return Scores(metric="RMSE", larger=False, fitted=points[current], alone=points[0], together=points[0],
                      points=points, losses=points[:, 0], chosen=current, n_clusters=2, n_rows=9)

    assert aligned(scores(5, 2), 5, 2).tolist() == [0, 1, 2, 3, 4]
    assert aligned(scores(5, 3), 5, 2).tolist() == [0, 2, 3, 4, 4]
    assert aligned(scores(9, 4), 5, 2).tolist() == [0, 2, 4, 6, 8]
    assert aligned(scores(3, 2), 4, 0).tolist() == [2, 2, 2, 2]
    assert aligned(scores(1, 0), 4, 1).tolist() == [-1, 0, -1, -1]


def test_unknown_scores_are_none(lines):
    scores = lines.scores
    current = np.where(np.arange(len(scores.fitted)) == 1, np.nan, scores.fitted)
    few = replace(scores, fitted=current, points=current[None], alone=current)
    document = gather(replace(lines, scores=few))
    json.dumps(document, allow_nan=False)
    assert document["scores"]["alone"][1] is None
    assert document["scores"]["points"][lines.chosen][1] is None
    assert set(document["scores"]["points"][0]) == {None}
    assert "chosen lam only" in document["scores"]["note"]


def test_settings_are_plain(several):
    settings = {"path": object, "n": np.int64(3), "x": np.nan, "list": (1, np.float64(0.5), {"a": np.inf}), "ok": True}
    stored = gather(several, settings=settings)["settings"]
    assert stored == {"path": "<class 'object'>", "n": 3, "x": None, "list": [1, 0.5, {"a": None}], "ok": True}
    assert json_ready(np.array([1.0, np.nan])) == [1.0, None]


# Many users


def test_a_sample_has_every_cluster_in_proportion():
    labels = np.random.default_rng(0).permutation(np.repeat([0, 1, 2, 3], [6000, 3000, 999, 1]))
    keep = sample(labels, 500)
    assert len(keep) == len(set(keep)) == 500
    assert (np.diff(keep) > 0).all()
    np.testing.assert_allclose(np.bincount(labels[keep])[:3], [300, 150, 50], atol=1)
    assert (labels[keep] == 3).sum() == 1
    np.testing.assert_array_equal(sample(np.arange(10), 4), [0, 1, 2, 3])
    np.testing.assert_array_equal(sample(np.array([0, 1, 1, 2, 2]), 2), [1, 3])  # more clusters than that: the largest


def test_the_tree_of_a_sample_joins_users_where_they_join():
    path = made_path(halving(200, 6), np.geomspace(0.1, 1.0, 6))
    document = gather(path, chosen=3, most_users=60)
    check(document)
    keep = [int(name) for name in document["users"]]
    labels = np.stack([s.labels for s in path.solutions])[:, keep]
    first = path.lams[(labels[:, :, None] == labels[:, None]).argmax(axis=0)]
    np.testing.assert_allclose(squareform(cophenet(np.array(document["tree"], dtype=float))),
                               np.where(np.eye(60), 0.0, first))
    assert document["labels"][3] == path[3].labels[keep].tolist()  # every cluster is there, by its own number


def test_twenty_thousand_users_are_reduced():
    labels = np.stack([np.arange(20_000), np.arange(20_000) // 400, np.zeros(20_000, dtype=int)])
    path = made_path(labels, [0.1, 0.2, 0.3], dim=4)
    began = time.perf_counter()
    document = gather(path, chosen=1)
    assert time.perf_counter() - began < 5
    check(document)
    assert document["reduced"] == {"users": 20_000, "shown": 2000}
    assert [p["n_clusters"] for p in document["points"]] == [20_000, 50, 1]
    assert set(document["labels"][1]) == set(range(50))
    assert document["bounds"] is None
    assert "20,000 users" in document["title"]
    assert gather(made_path(halving(30, 3), [0.1, 0.2, 0.3]))["reduced"] is None
    with pytest.raises(ct.InvalidInput, match="most_users"):
        gather(path, most_users=0)


def test_a_thousand_users_are_quick():
    path = made_path(halving(1000, 24), np.geomspace(1e-3, 1.0, 24), dim=21)
    began = time.perf_counter()
    document = gather(path)
    assert time.perf_counter() - began < 3
    check(document)
