"""The scikit-learn estimators: its own checks, known answers, users of all kinds, newcomers and routing."""

from __future__ import annotations

import pickle
import warnings

import joblib
import numpy as np
import pandas as pd
import polars as pl
import pytest
import sklearn
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import make_column_transformer
from sklearn.datasets import make_blobs
from sklearn.ensemble import BaggingClassifier
from sklearn.exceptions import ConvergenceWarning, NotFittedError, SkipTestWarning
from sklearn.linear_model import LogisticRegression, PoissonRegressor, Ridge
from sklearn.metrics import adjusted_rand_score
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_val_predict, cross_val_score, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_dict_unchanged, check_estimator, parametrize_with_checks

import coterie as ct
from coterie.datasets import clustered
from coterie.estimators import EVERYONE, ConvexClustering, PersonalizedClassifier, PersonalizedRegressor

#: Checks of scikit-learn that are known to fail, with the reason: none.
EXPECTED: dict[str, str] = {}
FAMILIES = {"logistic": PersonalizedClassifier, "multinomial": PersonalizedClassifier, "squared": PersonalizedRegressor,
            "poisson": PersonalizedRegressor}


#: The checks give no users, and the estimators say so.
pytestmark = pytest.mark.filterwarnings("ignore:no users are given, so all rows")


@parametrize_with_checks([PersonalizedRegressor()], expected_failed_checks=lambda estimator: EXPECTED)
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks(
    [PersonalizedClassifier(), ConvexClustering(n_lams=8), PersonalizedClassifier(loss="squared_hinge"),
     PersonalizedClassifier(loss="multinomial", weights="unit"),
     PersonalizedRegressor(loss="huber", lam=0.1), PersonalizedRegressor(loss="poisson")],
    expected_failed_checks=lambda estimator: EXPECTED)
def test_scikit_learns_own_checks_of_the_others(estimator, check):
    check(estimator)


def test_where_users_are_required_the_checks_are_skipped_openly():
    with pytest.warns(SkipTestWarning, match="Explicit SKIP"):
        check_estimator(PersonalizedRegressor(no_users="error"))


class Remembers(PersonalizedRegressor):
    def predict(self, X, users=None):
        self.last = X
        return super().predict(X, users)


def test_an_estimator_that_remembers_what_it_predicts_is_found():
    check_dict_unchanged("Regressor", PersonalizedRegressor())
    with pytest.raises(AssertionError, match="changes __dict__"):
        check_dict_unchanged("Remembers", Remembers())


class Data:
    """Rows of planted groups, shuffled, half of each user's for training; users 100, 101, ..."""

    def __init__(self, family: str, n_users: int = 12, samples: int = 80, separation: float = 4.0, seed: int = 0):
        made = clustered(family, n_users=n_users, n_clusters=3, samples=samples, n_features=2, separation=separation,
                         seed=seed)
        order = np.random.default_rng(seed).permutation(made.users.n_samples)
        self.X, self.y, self.users = made.users.features[order], made.users.targets[order], made.users.owner[order]
        self.users = self.users + 100
        self.clusters, self.family = made.clusters, family

    def model(self, **settings):
        return FAMILIES[self.family](**{"loss": self.family, **settings})

    def fitted(self, **settings):
        return self.model(**settings).fit(self.X, self.y, users=self.users)


@pytest.fixture(scope="module")
def logistic():
    return Data("logistic", samples=50)


@pytest.fixture(scope="module")
def squared():
    return Data("squared", samples=40)


@pytest.fixture(scope="module")
def model(logistic):
    """Never changed by a test."""
    return logistic.fitted()


# ---- known answers

def pooled(family: str, X, y, n_rows: int, ridge: float, share: float = 1.0):
    """scikit-learn's coefficients, the intercept last, of users with `n_rows` in all.

    Real targets are given centred. A group minimises sum_i (mean loss of user i + ridge/2 ||w||^2); times the rows of
    one user, that is the sum over rows and n_rows * ridge / 2 ||w||^2. The intercept is under a share of the ridge: the
    coefficient of a column of 1 / sqrt(share), divided by sqrt(share).
    """
    A = np.column_stack([X, np.full(len(X), share**-0.5)])
    units = np.array([1.0, 1.0, share**-0.5])
    return solved(family, A, y, n_rows, ridge) * units


def solved(family: str, A, y, n_rows: int, ridge: float):
    if family == "squared":
        return Ridge(alpha=n_rows * ridge, fit_intercept=False, solver="cholesky").fit(A, y).coef_
    if family == "poisson":
        return PoissonRegressor(alpha=ridge, fit_intercept=False, tol=1e-10, max_iter=10_000).fit(A, y).coef_
    C = 1 / (n_rows * ridge)
    return LogisticRegression(C=C, fit_intercept=False, tol=1e-10, max_iter=10_000).fit(A, y).coef_.squeeze()


@pytest.mark.parametrize("family", FAMILIES)
def test_one_user_is_an_ordinary_linear_model(family):
    data = Data(family, n_users=3)
    y = data.y - data.y.mean() if family == "squared" else data.y
    ours = data.model(standardize=False, tol=1e-12, no_users="together").fit(data.X, y)
    theirs = pooled(family, data.X, y, len(y), 1e-3)
    stacked = np.concatenate([ours.coef_[0], ours.intercept_[0][..., None]], axis=-1)
    assert stacked == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert stacked != pytest.approx(pooled(family, data.X, y, len(y), 1e-1), rel=1e-4, abs=1e-5)
    assert list(ours.users_) == [EVERYONE]
    assert (ours.n_clusters_, ours.lam_, list(ours.labels_)) == (1, 0.0, [0])
    assert ours.gap_ < 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_planted_groups_are_recovered_with_their_pooled_models(family):
    data = Data(family, separation=1.0 if family == "poisson" else 4.0)
    y = data.y - data.y.mean() if family == "squared" else data.y
    ours = data.model(standardize=False).fit(data.X, y, users=data.users)
    assert np.array_equal(ours.labels_, data.clusters)
    assert ours.n_clusters_ == 3
    assert ours.gap_ < 1e-6
    assert ours.coef_.shape == ((12, 3, 2) if family == "multinomial" else (12, 2))
    refitted = ours.fit_.units.coefficients(ct.refit(ours.solution_.problem, ours.labels_))
    loss = ours.fit_.units.loss  # the ridge is learned where rows are few
    assert loss.ridge >= 1e-3
    for group in range(3):
        rows = data.clusters[data.users - 100] == group
        theirs = pooled(family, data.X[rows], y[rows], rows.sum(), loss.ridge, float(loss.penalize_intercept))
        users = np.flatnonzero(data.clusters == group)
        assert refitted[users[0]].squeeze() == pytest.approx(theirs.T, rel=1e-4, abs=1e-5)
        for user in users:
            stacked = np.concatenate([ours.coef_[user], ours.intercept_[user][..., None]], axis=-1)
            # The groups pull on each other with a hundredth of what would bring them together.
            assert 0 < np.abs(stacked - theirs).max() < 0.1 * np.abs(ours.coef_).max()
            other = data.clusters != group
            assert np.abs(ours.coef_[user] - ours.coef_[other]).max() > 0.1 * np.abs(ours.coef_).max()


def test_rows_given_to_the_wrong_users_have_no_groups(logistic):
    owners = np.random.default_rng(1).permutation(logistic.users)
    assert logistic.model().fit(logistic.X, logistic.y, users=owners).n_clusters_ == 1


def test_coefficients_tell_what_predict_tells(model, logistic, squared):
    at = np.searchsorted(model.users_.astype(int), logistic.users)
    t = (model.coef_[at] * logistic.X).sum(axis=1) + model.intercept_[at]
    assert t == pytest.approx(model.decision_function(logistic.X, users=logistic.users), abs=1e-9)
    assert np.array_equal(model.predict(logistic.X, users=logistic.users), model.classes_[(t > 0).astype(int)])
    p = model.predict_proba(logistic.X, users=logistic.users)
    assert p[:, 1] == pytest.approx(1 / (1 + np.exp(-t)), abs=1e-12)
    assert p.sum(axis=1) == pytest.approx(1.0)
    line = squared.fitted()
    at = squared.users - 100
    t = (line.coef_[at] * squared.X).sum(axis=1) + line.intercept_[at]
    assert t == pytest.approx(line.predict(squared.X, users=squared.users), abs=1e-9)
    assert line.score(squared.X, squared.y, users=squared.users) > 0.95


@pytest.mark.parametrize("loss", ["logistic", "multinomial"])
def test_several_classes_and_two_in_the_symmetric_form(loss, logistic):
    data = Data("multinomial", n_users=6) if loss == "logistic" else logistic
    learner = PersonalizedClassifier(loss=loss).fit(data.X, data.y, users=data.users)
    t = learner.decision_function(data.X, users=data.users)
    at = np.searchsorted(learner.users_.astype(int), data.users)
    by_hand = np.einsum("n...p,np->n...", learner.coef_[at], data.X) + learner.intercept_[at]
    assert t == pytest.approx(by_hand, abs=1e-9)
    assert t.ndim == (2 if loss == "logistic" else 1)
    p = learner.predict_proba(data.X, users=data.users)
    assert np.array_equal(learner.classes_[p.argmax(axis=1)], learner.predict(data.X, users=data.users))


def test_counts_are_predicted_as_means():
    data = Data("poisson", n_users=6, separation=1.0)
    learner = data.fitted(average="off")
    mean = np.exp((learner.coef_[data.users - 100] * data.X).sum(axis=1) + learner.intercept_[data.users - 100])
    assert learner.predict(data.X, users=data.users) == pytest.approx(mean)
    assert 0 < learner.score(data.X, data.y, users=data.users) <= 1
    with pytest.raises(ValueError, match="count"):
        data.model().fit(data.X, data.y - 5, users=data.users)


# ---- invariances

def test_the_order_of_rows_does_not_matter(model, logistic):
    order = np.random.default_rng(3).permutation(len(logistic.y))
    other = logistic.model().fit(logistic.X[order], logistic.y[order], users=logistic.users[order])
    assert np.array_equal(other.labels_, model.labels_)
    assert other.coef_ == pytest.approx(model.coef_, rel=1e-5, abs=1e-6)
    learner = model.decision_function(logistic.X, users=logistic.users)
    assert np.array_equal(learner[order], model.decision_function(logistic.X[order], users=logistic.users[order]))
    assert not np.array_equal(learner, model.decision_function(logistic.X, users=logistic.users[order]))


def test_units_do_not_matter_unless_they_are_kept(model, logistic):
    X = logistic.X * [1000.0, 0.01] + [5.0, -3.0]
    learner = model.decision_function(logistic.X, users=logistic.users)
    scaled = logistic.model().fit(X, logistic.y, users=logistic.users)
    assert scaled.decision_function(X, users=logistic.users) == pytest.approx(learner, rel=1e-5, abs=1e-6)
    kept = logistic.model(standardize=False, lam=0.0).fit(X, logistic.y, users=logistic.users)
    assert kept.decision_function(X, users=logistic.users) != pytest.approx(learner, rel=1e-2, abs=1e-2)


def test_the_unit_of_a_target_does_not_matter(squared):
    learner = squared.fitted().predict(squared.X, users=squared.users)
    other = squared.model().fit(squared.X, 1e6 * squared.y - 7, users=squared.users)
    assert other.predict(squared.X, users=squared.users) == pytest.approx(1e6 * learner - 7, rel=1e-6)


def test_the_same_again_bit_for_bit(model, logistic, tmp_path):
    learner = model.decision_function(logistic.X, users=logistic.users)
    again = logistic.fitted()
    assert np.array_equal(again.decision_function(logistic.X, users=logistic.users), learner)
    joblib.dump(model, tmp_path / "model")
    for copy in (pickle.loads(pickle.dumps(model)), joblib.load(tmp_path / "model")):
        assert np.array_equal(copy.decision_function(logistic.X, users=logistic.users), learner)
        assert np.array_equal(copy.labels_, model.labels_)
        assert copy.path_.lams == pytest.approx(model.path_.lams)
    fresh = clone(model)
    assert fresh.get_params() == model.get_params()
    with pytest.raises(NotFittedError):
        fresh.predict(logistic.X)


def test_random_state_is_of_the_rows_held_out():
    data = Data("squared", n_users=3, samples=20)

    def held_out(random_state):
        return data.fitted(holdout=0.2, random_state=random_state, n_lams=4).scores_.fitted

    assert np.array_equal(held_out(1), held_out(1))
    assert not np.array_equal(held_out(1), held_out(2))
    assert np.array_equal(held_out(np.random.RandomState(1)), held_out(np.random.RandomState(1)))


# ---- users

def test_users_without_a_model_get_the_one_for_everyone(model, logistic):
    learner = model.decision_function(logistic.X, users=["new"] * len(logistic.y))
    units = model.fit_.units
    Z = (logistic.X - units.mean) / units.scale
    theirs = pooled("logistic", Z, logistic.y, len(Z), units.loss.ridge, float(units.loss.penalize_intercept))
    assert learner == pytest.approx(Z @ theirs[:-1] + theirs[-1], abs=1e-2 * np.abs(learner).max())
    assert learner != pytest.approx(model.decision_function(logistic.X, users=logistic.users), abs=1e-2)
    strict = logistic.fitted(unknown="error")
    strict.predict(logistic.X, users=logistic.users)
    with pytest.raises(ct.InvalidInput, match=r"no model for 2 user.*'newer', 'new'.*personalize"):
        strict.predict(logistic.X[:3], users=[100, "newer", "new"])
    with pytest.raises(ct.InvalidInput, match="Give users"):
        strict.predict(logistic.X)
    with pytest.raises(ct.InvalidInput, match="'together' or 'error', got 'ask'"):
        logistic.fitted(unknown="ask")


def test_users_left_out_or_of_another_type_are_noticed(model, logistic):
    strict = logistic.model(no_users="error")
    for method in (model.predict, model.predict_proba, model.decision_function, strict.fit, model.score):
        rows = (logistic.X, logistic.y) if method.__name__ in ("fit", "score") else (logistic.X,)
        with pytest.raises(ct.InvalidInput, match=r"no users are given.*metadata_routing.*user_column.*no_users="):
            method(*rows)
    pooled_on_purpose = logistic.fitted(no_users="together").predict(logistic.X)
    assert np.array_equal(pooled_on_purpose, model.predict(logistic.X, users=["new"] * len(logistic.y)))
    with pytest.raises(ct.InvalidInput, match="no_users must be 'auto' or 'error' or 'together', got 'one'"):
        logistic.fitted(no_users="one")
    with pytest.raises(ct.InvalidInput, match=r"no user '100', but there is 100.*type"):
        model.predict(logistic.X, users=logistic.users.astype(str))
    with pytest.raises(ct.InvalidInput, match="600 rows and users has 2 values"):
        model.predict(logistic.X, users=[100, 101])
    with pytest.raises(ct.InvalidInput, match="600 rows and users has 2 values"):
        logistic.model().fit(logistic.X, logistic.y, users=[100, 101])
    with pytest.raises(ct.InvalidInput, match=r"name is missing.*row 1"):
        model.predict(logistic.X[:2], users=[100, None])


@pytest.mark.parametrize("kind", [
    "text", "list", "tuple", "mixed", "pandas", "categorical", "pandas categorical", "polars", "polars categorical",
    "date"])
def test_names_of_all_kinds_give_the_same_groups(kind, model, logistic):
    users = {
        "text": lambda u: np.char.add("u", u.astype(str)),
        "list": lambda u: u.tolist(),
        "tuple": lambda u: [("site", int(i)) for i in u],
        "mixed": lambda u: [int(i) if i % 2 else f"u{i}" for i in u],
        "pandas": lambda u: pd.Series(u, index=u[::-1]),
        "categorical": lambda u: pd.Categorical(u.astype(str), categories=[*map(str, range(90, 120))]),
        "pandas categorical": lambda u: pd.Series(u.astype(str), dtype="category"),
        "polars": lambda u: pl.Series(u),
        "polars categorical": lambda u: pl.Series(u.astype(str), dtype=pl.Categorical),
        "date": lambda u: np.datetime64("2024-01-01") + u.astype("m8[D]"),
    }[kind](logistic.users)
    other = logistic.model(n_lams=4).fit(logistic.X, logistic.y, users=users)
    assert other.users_.shape == (12,)
    assert sorted(np.bincount(other.labels_)) == sorted(np.bincount(model.labels_))
    learner = other.decision_function(logistic.X, users=users)
    assert learner == pytest.approx(model.decision_function(logistic.X, users=logistic.users), rel=1e-5, abs=1e-6)


def test_a_user_with_some_classes_only_leans_on_its_group(logistic):
    kept = (logistic.users != 100) | (logistic.y == logistic.y.max())
    learner = logistic.model().fit(logistic.X[kept], logistic.y[kept], users=logistic.users[kept])
    assert np.isfinite(learner.coef_).all()
    rows = logistic.users == 100
    right = (learner.predict(logistic.X[rows], users=logistic.users[rows]) == logistic.y[rows]).mean()
    assert right > 0.5


@pytest.mark.parametrize("n_users", [1, 2, 3])
@pytest.mark.parametrize("settings", [{}, {"lam": 0.1}, {"lam": "score"}, {"weights": "wald"}, {"weights": "unit"}],
                         ids=str)
def test_few_users(n_users, settings, squared):
    few = squared.users < 100 + n_users
    learner = PersonalizedRegressor(n_lams=4, **settings).fit(squared.X[few], squared.y[few], users=squared.users[few])
    assert learner.coef_.shape == (n_users, 2)
    assert learner.gap_ < 1e-6
    assert learner.score(squared.X[few], squared.y[few], users=squared.users[few]) > 0.3
    assert (learner.scores_ is None) == (settings in ({}, {"lam": 0.1}))


def test_rows_or_users_count_alike():
    """Users of one group with 30 and 3 rows: the model is that of all rows, or of all users."""
    rng = np.random.default_rng(0)
    users = np.repeat(np.arange(8), [30, 3] * 4)
    X, few = rng.normal(size=(len(users), 1)), users % 2 == 1
    y = X[:, 0] + 0.3 * few + 0.5 * rng.normal(size=len(users))
    A, slopes = np.column_stack([X, np.ones(len(X))]), {}
    for count, weights in (("rows", np.ones(len(X))), ("users", np.where(few, 1 / 3, 1 / 30))):
        learner = PersonalizedRegressor(count=count, ridge=1e-9, n_lams=4, most=1, lam=10.0).fit(X, y, users=users)
        expected = np.linalg.solve(A.T @ (weights[:, None] * A), A.T @ (weights * y))
        assert learner.n_clusters_ == 1
        np.testing.assert_allclose([learner.coef_[0, 0], learner.intercept_[0]], expected, atol=1e-6)
        slopes[count] = learner.coef_[0, 0]
    assert abs(slopes["rows"] - slopes["users"]) > 1e-3
    assert PersonalizedRegressor().count == "rows"


# ---- newcomers

@pytest.mark.parametrize("family", ["logistic", "squared"])
def test_newcomers_join_their_own_kind(family):
    data = Data(family, n_users=24)
    old = data.users % 2 == 0
    learner = data.model().fit(data.X[old], data.y[old], users=data.users[old])
    few = ~old & (np.arange(len(old)) % 4 == 0)
    rest = ~old & ~few
    X, y, users = data.X[rest], data.y[rest], data.users[rest]
    before = learner.score(X, y, users=users)
    coef, theirs = learner.coef_.copy(), learner.predict(data.X[old], users=data.users[old])
    joined = learner.personalize(data.X[few], data.y[few], users=data.users[few])
    truth = data.clusters[np.array(joined.users.names) - 100]
    group_of = {data.clusters[user - 100]: label for user, label in zip(learner.users_, learner.labels_, strict=True)}
    assert all(label in (-1, group_of[kind]) for kind, label in zip(truth, joined.clusters, strict=True))
    assert (joined.clusters >= 0).mean() >= 0.5
    assert learner.score(X, y, users=users) > before + 0.1
    assert learner.score(X, y, users=users) > data.model(lam=0.0).fit(
        data.X[few], data.y[few], users=data.users[few]).score(X, y, users=users) - 0.01
    assert np.array_equal(learner.coef_, coef)
    assert np.array_equal(learner.predict(data.X[old], users=data.users[old]), theirs)
    copy = pickle.loads(pickle.dumps(learner))
    assert np.array_equal(copy.predict(X, users=users), learner.predict(X, users=users))
    again = learner.predict(X, users=users)
    learner.personalize(data.X[few], data.y[few], users=data.users[few])  # the same rows, the same models
    assert np.array_equal(learner.predict(X, users=users), again)
    learner.fit(data.X[old], data.y[old], users=data.users[old])
    assert learner.newcomers_ == {}


def test_newcomers_are_checked(logistic):
    learner = logistic.fitted(n_lams=4)
    X, y = logistic.X[:4], logistic.y[:4]
    with pytest.raises(ct.InvalidInput, match=r"newcomers must not be among.*user 100"):
        learner.personalize(X, y, users=[100, 100, "a", "a"])
    with pytest.raises(ct.InvalidInput, match=r"class 7.0, which fit has not seen \(row 2\)"):
        learner.personalize(X, [1.0, -1.0, 7.0, 1.0], users=list("aabb"))
    with pytest.raises(ct.InvalidInput, match="newcomers need names"):
        learner.personalize(X, y, None)
    with pytest.raises(ValueError, match="expecting 2 features"):
        learner.personalize(X[:, :1], y, users=list("aabb"))
    with pytest.raises(NotFittedError):
        logistic.model().personalize(X, y, users=list("aabb"))
    learner.personalize(X[:1], y[:1], users=["a"])  # one row, one class
    assert set(learner.newcomers_) == {"a"}
    unit = logistic.fitted(weights="unit", lam=0.01, n_lams=4)
    assert unit.personalize(X, y, users=list("abab")).models.shape == (2, 3)


# ---- scikit-learn's ways

def test_frames_name_their_columns(logistic):
    frame = pd.DataFrame(logistic.X, columns=["age", "dose"])
    learner = logistic.model(n_lams=4).fit(frame, pd.Series(logistic.y), users=pd.Series(logistic.users))
    assert list(learner.feature_names_in_) == ["age", "dose"]
    assert learner.fit_.units.feature_names == ("age", "dose")
    assert learner.n_features_in_ == 2
    expected = learner.predict(frame, users=logistic.users)
    assert isinstance(expected, np.ndarray)
    assert np.array_equal(learner.predict(pl.from_pandas(frame), users=pl.Series(logistic.users)), expected)
    with pytest.raises(ValueError, match="same order"):
        learner.predict(frame[["dose", "age"]], users=logistic.users)
    with pytest.raises(ValueError, match="weight"):
        learner.predict(frame.rename(columns={"age": "weight"}), users=logistic.users)
    lazy = logistic.model(n_lams=4).fit(pl.from_pandas(frame), pl.Series(logistic.y), users=pl.Series(logistic.users))
    assert np.array_equal(lazy.predict(frame, users=logistic.users), expected)


def test_classes_of_text(logistic):
    names = np.where(logistic.y > 0, "yes", "no")
    learner = logistic.model(n_lams=4).fit(logistic.X, names, users=logistic.users)
    assert list(learner.classes_) == ["no", "yes"]
    assert set(learner.predict(logistic.X, users=logistic.users)) == {"no", "yes"}
    assert learner.score(logistic.X, names, users=logistic.users) > 0.8
    right = learner.predict(logistic.X, users=logistic.users) == names
    assert learner.score(logistic.X, names, users=logistic.users, sample_weight=right) == 1.0


def test_users_are_routed(logistic):
    X, y, users = logistic.X, logistic.y, logistic.users
    with sklearn.config_context(enable_metadata_routing=True):
        scores = cross_val_score(logistic.model(n_lams=4), X, y, cv=2, params={"users": pd.Series(users)})
        assert scores.min() > 0.8
        pipe = make_pipeline(StandardScaler(), logistic.model(n_lams=4)).fit(X, y, users=users)
        assert pipe[-1].n_clusters_ == 3
        assert pipe.score(X, y, users=users) > 0.8
        assert np.array_equal(pipe.predict(X, users=users), pipe[-1].predict(pipe[:-1].transform(X), users=users))
        assert pipe.predict_proba(X, users=users).shape == (len(y), 2)
        assert pipe.decision_function(X, users=users).shape == (len(y),)
        asked = logistic.model().set_fit_request(users=True).set_predict_request(users=False).set_score_request(
            users=True)
        assert asked.get_metadata_routing().predict.requests["users"] is False
        assert asked.get_metadata_routing().fit.requests["users"] is True


@pytest.mark.skipif(sklearn.__version__ < "1.8", reason="scikit-learn routes nothing to the score of a pipeline")
@pytest.mark.slow
def test_users_are_routed_through_searches_over_pipelines(logistic):
    X, y, users = logistic.X, logistic.y, logistic.users
    pipe = make_pipeline(StandardScaler(), logistic.model(n_lams=4))
    with sklearn.config_context(enable_metadata_routing=True):
        search = GridSearchCV(pipe, {"personalizedclassifier__lam": ["auto", 1e6]}, cv=2).fit(X, y, users=users)
    assert search.best_params_ == {"personalizedclassifier__lam": "auto"}
    assert search.best_estimator_[-1].n_clusters_ == 3


def test_without_routing_what_drops_users_raises(logistic):
    """Searches that lose `users` between fit and score raise; with no_users="error", all that never had them do."""
    X, y, users, missing = logistic.X, logistic.y, logistic.users, "no users are given"
    learner, usual = logistic.model(n_lams=4, no_users="error"), logistic.model(n_lams=4)
    pipe = make_pipeline(StandardScaler(), learner)
    with pytest.raises(ValueError, match="users"):
        pipe.fit(X, y, users=users)  # by scikit-learn
    for whole in (pipe, BaggingClassifier(learner, n_estimators=2), CalibratedClassifierCV(learner, cv=2)):
        with pytest.raises(ct.InvalidInput, match=missing):
            whole.fit(X, y)
    for given in ({"cv": 2}, {"cv": GroupKFold(2), "groups": users}):  # groups split the rows, and nothing else
        with pytest.raises(ct.InvalidInput, match=missing):
            cross_val_score(learner, X, y, error_score="raise", **given)
        with pytest.raises(ValueError, match=missing), warnings.catch_warnings(action="ignore"):
            cross_val_score(learner, X, y, **given)  # all fits failed
    search = GridSearchCV(learner, {"lam": ["auto"]}, cv=2, error_score="raise")
    with pytest.raises(ct.InvalidInput, match=missing):
        search.fit(X, y)
    with pytest.raises(ct.InvalidInput, match=missing):
        search.set_params(estimator=usual).fit(X, y, users=users)  # fit gets them, score does not
    with pytest.raises(ct.InvalidInput, match=missing):
        cross_val_predict(usual, X, y, cv=2, params={"users": users})  # fit gets them, predict does not


def test_a_search_that_would_score_without_users_raises(logistic):
    """Also with scikit-learn's default, which replaces an error of a score by nan and goes on."""
    X, y, users = logistic.X, logistic.y, logistic.users
    usual, remedy = logistic.model(n_lams=4), r"no users are given to score(.|\n)*enable_metadata_routing=True"
    pipe, grid = make_pipeline(StandardScaler(), usual), {"lam": ["auto", 1e6]}
    with pytest.raises(ValueError, match=remedy):
        GridSearchCV(usual, grid, cv=2).fit(X, y, users=users)
    with pytest.raises(ValueError, match=remedy):
        GridSearchCV(pipe, {"personalizedclassifier__ridge": [1e-3]}, cv=2).fit(
            X, y, personalizedclassifier__users=users)
    with pytest.raises(ValueError, match=remedy):
        cross_val_score(usual, X, y, cv=2, params={"users": users})
    with pytest.raises(ValueError, match=remedy):
        cross_validate(usual, X, y, cv=2, params={"users": users}, scoring=["accuracy", "roc_auc"])
    with sklearn.config_context(enable_metadata_routing=True), pytest.raises(ValueError, match=remedy):
        GridSearchCV(usual, grid, cv=2, scoring="accuracy").fit(X, y, users=users)  # asks predict without users


def test_a_search_whose_scorer_knows_the_users_is_trusted(logistic):
    X = np.column_stack([logistic.X, logistic.users])

    def right(learner, X, y):
        return learner.score(X, y, users=X[:, 2].astype(int))

    scores = cross_val_score(logistic.model(n_lams=4), X, logistic.y, cv=2, params={"users": logistic.users},
                             scoring=right)
    assert scores.min() > 0.8
    together = logistic.model(n_lams=4, no_users="together")  # the pooled model is scored, as asked for
    assert cross_val_score(together, X, logistic.y, cv=2, params={"users": logistic.users}).max() < scores.min()


@pytest.mark.parametrize("estimator", [PersonalizedClassifier(n_lams=4), PersonalizedRegressor(n_lams=4)])
def test_a_fit_without_users_says_so(estimator, logistic):
    with pytest.warns(ct.CoterieWarning, match=r"no users are given.*user_column.*no_users='together'") as caught:
        estimator.fit(logistic.X, logistic.y)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings(action="error"):
        clone(estimator).set_params(no_users="together").fit(logistic.X, logistic.y)
        clone(estimator).fit(logistic.X, logistic.y, users=logistic.users)


def test_with_routing_what_drops_users_raises(logistic):
    X, y, users, missing = logistic.X, logistic.y, logistic.users, "no users are given"
    with sklearn.config_context(enable_metadata_routing=True):
        with pytest.raises(ct.InvalidInput, match=missing):
            make_pipeline(StandardScaler(), logistic.model(no_users="error")).fit(X, y)
        with pytest.raises(ct.InvalidInput, match=missing):  # a scorer by name asks predict without users
            cross_val_score(logistic.model(n_lams=4), X, y, cv=2, params={"users": users}, scoring="accuracy",
                            error_score="raise")
        off = clone(logistic.model(no_users="error").set_fit_request(users=False))
        assert off.get_metadata_routing().fit.requests["users"] is False
        with pytest.raises((ct.InvalidInput, TypeError), match=r"users"):
            make_pipeline(StandardScaler(), off).fit(X, y, users=users)


@pytest.mark.parametrize("library", [pd, pl])
def test_a_column_of_the_frame_names_the_users(library, model, logistic):
    """Everything works without routing: scorers by name, cross_val_predict, pipelines that keep frames."""
    X, y, users = logistic.X, logistic.y, logistic.users
    frame = library.DataFrame({"age": X[:, 0], "clinic": users, "dose": X[:, 1]})
    learner = logistic.model(user_column="clinic").fit(frame, y)
    assert np.array_equal(learner.coef_, model.coef_)
    assert list(learner.feature_names_in_) == ["age", "dose"]
    assert learner.predict_proba(frame) == pytest.approx(model.predict_proba(X, users=users), rel=1e-12)
    assert learner.score(frame, y) == model.score(X, y, users=users)
    new = library.DataFrame({"age": X[:4, 0], "clinic": list("aabb"), "dose": X[:4, 1]})
    assert learner.personalize(new, y[:4]).users.names == ("a", "b")
    with pytest.raises(ct.InvalidInput, match=r"There is no column 'clinics'.*'clinic'"):
        logistic.model(user_column="clinics").fit(frame, y)
    with pytest.raises(ct.InvalidInput, match=r"needs a frame with this column, got ndarray.*set_output"):
        learner.predict(X)
    with pytest.raises(ct.InvalidInput, match="Leave out one of the two"):
        learner.predict(frame, users=users)
    with pytest.raises(ct.InvalidInput, match="Leave out one of the two"):
        logistic.model(user_column="clinic").fit(frame, y, users=users)


def test_a_user_column_passes_through_what_cannot_route(logistic):
    frame = pd.DataFrame(logistic.X, columns=["age", "dose"]).assign(clinic=logistic.users)
    scaled = make_column_transformer((StandardScaler(), ["age", "dose"]), remainder="passthrough",
                                     verbose_feature_names_out=False).set_output(transform="pandas")
    learner = logistic.model(user_column="clinic", n_lams=4)
    assert cross_val_score(make_pipeline(scaled, learner), frame, logistic.y, cv=2, scoring="roc_auc").min() > 0.9
    predictions = cross_val_predict(learner, frame, logistic.y, cv=2)
    assert (predictions == logistic.y).mean() > 0.8
    search = GridSearchCV(learner, {"lam": ["auto", 1e6]}, cv=2).fit(frame, logistic.y)
    assert search.best_params_ == {"lam": "auto"}


def test_it_is_shown_in_notebooks_and_takes_parameters(model):
    assert "PersonalizedClassifier" in model._repr_html_()
    assert repr(PersonalizedClassifier(lam=0.5)) == "PersonalizedClassifier(lam=0.5)"
    assert PersonalizedRegressor().set_params(loss="huber").loss == "huber"
    assert not hasattr(PersonalizedClassifier(loss="squared_hinge"), "predict_proba")
    assert hasattr(PersonalizedClassifier(), "predict_proba")


@pytest.mark.parametrize(("settings", "complaint"), [
    ({"lam": "best"}, "lam must be a number"), ({"lam": -1.0}, "lam must be a finite number"),
    ({"weights": "heavy"}, "unknown weights 'heavy'"), ({"loss": "poisson"}, "'poisson' does not fit classification"),
    ({"ridge": -1.0}, "ridge must be"), ({"n_lams": 1}, "n_lams must be"), ({"k": 0}, "k must be"),
    ({"tol": 0.0}, "tol must be"), ({"holdout": 1.5}, "holdout must be"), ({"count": "all"}, "count must be")])
def test_wrong_parameters_are_named(settings, complaint, logistic):
    PersonalizedClassifier(**settings)  # nothing is checked before fit
    with pytest.raises(ct.InvalidInput, match=complaint):
        PersonalizedClassifier(**settings).fit(logistic.X, logistic.y, users=logistic.users)


# ---- clusters of points

def test_points_of_clear_clusters():
    X, y = make_blobs(90, centers=3, cluster_std=0.25, random_state=2)
    for clusters in (ConvexClustering(), ConvexClustering(3), ConvexClustering(n_clusters=3, loss="huber_distance")):
        labels = clusters.fit_predict(X)
        assert adjusted_rand_score(labels, y) == 1.0
        assert np.array_equal(labels, clusters.labels_)
        assert (clusters.n_clusters_, clusters.cluster_centers_.shape) == (3, (3, 2))
        assert clusters.gap_ < 1e-6
        assert clusters.lam_ in clusters.path_.lams
        assert clusters.fit_.path[clusters.fit_.chosen] is clusters.solution_ or clusters.n_clusters is None
    means = np.stack([X[labels == k].mean(axis=0) for k in range(3)])
    assert ConvexClustering(3).fit(X).cluster_centers_ == pytest.approx(means)
    assert adjusted_rand_score(ConvexClustering(2).fit_predict(X), y) < 1.0


def test_points_by_a_lam_with_a_known_answer():
    """Two points a and b with unit weight meet at lam = ||a - b|| / 2."""
    X = np.array([[0.0, 0.0], [3.0, 4.0]])
    for lam, expected in ((2.49, 2), (2.51, 1)):
        learner = ConvexClustering(lam=lam).fit(X)
        assert learner.n_clusters_ == expected
        assert learner.lam_ == lam
    assert learner.cluster_centers_ == pytest.approx(np.array([[1.5, 2.0]]))
    again = ConvexClustering(lam=2.51, standardize=True).fit(X)
    assert again.cluster_centers_ == pytest.approx(learner.cluster_centers_)
    assert ConvexClustering().fit(X).n_clusters_ == 1  # two points alone are no clear clusters
    assert ConvexClustering(2).fit(X).n_clusters_ == 2


def test_a_number_that_the_path_steps_over_is_found_between():
    X = make_blobs(60, centers=5, cluster_std=0.5, random_state=3)[0]
    for number in (2, 4, 9, 60, 100):
        learner = ConvexClustering(number, n_lams=3).fit(X)
        assert learner.n_clusters_ <= number
        assert learner.n_clusters_ == min(number, 60)
        assert learner.solution_ is learner.path_[learner.fit_.chosen]
        assert (np.diff(learner.path_.lams) > 0).all()


def test_clustering_is_asked_for_one_way():
    X = make_blobs(20, random_state=0)[0]
    with pytest.raises(ct.InvalidInput, match="both n_clusters and lam"):
        ConvexClustering(3, lam=0.1).fit(X)
    for wrong in (0, 2.5, True, "3"):
        with pytest.raises(ct.InvalidInput, match="n_clusters must be a whole number"):
            ConvexClustering(wrong).fit(X)
    frame = pd.DataFrame(X, columns=["a", "b"])
    assert list(ConvexClustering().fit(frame).feature_names_in_) == ["a", "b"]


@pytest.mark.parametrize("tol", [1e-6, 1e-16])
@pytest.mark.parametrize("estimator", [PersonalizedRegressor, ConvexClustering])
def test_an_estimator_that_did_not_converge_warns_once(estimator, tol):
    """With a warning that is coterie's and scikit-learn's, so that filters for either apply."""
    X = make_blobs(12, random_state=0)[0]
    given = (X,) if estimator is ConvexClustering else (X, X.sum(axis=1), np.repeat([0, 1, 2], 4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted = estimator(lam=0.01, weights="unit", n_lams=3, tol=tol).fit(*given)
    assert (fitted.solution_.status is ct.Status.CONVERGED) == (tol == 1e-6)
    assert len(caught) == (tol == 1e-16)
    for warning in caught:
        assert issubclass(warning.category, ct.ConvergenceWarning)
        assert issubclass(warning.category, ConvergenceWarning)
        assert warning.filename == __file__
