"""A loss is one class and one name: fits, federations, estimators, run folders and reports then have it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import polars as pl
import pytest
from scipy.special import log_ndtr, ndtr, ndtri

import coterie as ct
from coterie.datasets import clustered
from coterie.fitting import Settings
from coterie.fitting.units import make_loss
from coterie.losses import LOSSES, losses_for, name_of
from coterie.losses.base import need_targets


@dataclass(frozen=True, kw_only=True)
class Probit(ct.LinearLoss):
    """phi(t, y) = -log Phi(y t), with Phi the normal distribution: classes -1 and +1."""

    task: ClassVar[str] = "classification"
    signs: ClassVar[bool] = True
    least: ClassVar[float] = 0.0
    max_curvature: ClassVar[float] = 1.0

    def check_targets(self, users):
        need_targets(self, users)

    def value(self, t, y):
        return -log_ndtr(y * t)

    def _ratio(self, z):
        """The density over the distribution."""
        return np.exp(-0.5 * z**2 - 0.5 * np.log(2.0 * np.pi) - log_ndtr(z))

    def slope(self, t, y):
        return -y * self._ratio(y * t)

    def curvature(self, t, y):
        ratio = self._ratio(y * t)
        return np.maximum(ratio * (ratio + y * t), 0.0)

    def shares(self, t):
        return ndtr(t)

    def margin_of(self, mean):
        return float(ndtri(np.clip(0.5 + 0.5 * mean, 1e-6, 1 - 1e-6)))

    def predict(self, features, models):
        return np.where(self.decision(features, models) >= 0, 1.0, -1.0)


@pytest.fixture
def entered(monkeypatch):
    """The loss by its name, for one test."""
    monkeypatch.setitem(LOSSES, "probit", Probit)


@pytest.fixture(scope="module")
def drawn():
    """Twelve users in three groups, with classes -1 and +1."""
    return clustered("logistic", n_users=12, n_features=2, samples=60, separation=6.0, seed=2)


def table(drawn):
    users = drawn.users
    return pl.DataFrame({"who": [f"u{k:02d}" for k in users.owner], "a": users.features[:, 0],
                         "b": users.features[:, 1], "y": np.where(users.targets > 0, "yes", "no")})


def same_groups(one, other):
    pairs = set(zip(one.tolist(), other.tolist(), strict=True))
    return len(pairs) == len(set(one.tolist())) == len(set(other.tolist()))


def test_its_name_and_task(entered):
    assert name_of(Probit()) == "probit"
    assert losses_for("classification") == ("logistic", "squared_hinge", "multinomial", "probit")


def test_without_a_name_it_is_none_of_the_losses(drawn):
    assert name_of(Probit()) == ""
    assert "probit" not in losses_for("classification")
    with pytest.raises(ct.InvalidInput, match="'probit' does not fit classification"):
        make_loss("classification", "probit", 0.1, 2)
    with pytest.raises(ct.InvalidInput, match="'probit' does not fit classification"):
        ct.fit_table(table(drawn), user="who", target="y", settings=Settings(loss="probit"))


def test_a_problem_a_path_and_groups(entered, drawn):
    ct.check_loss(Probit(), drawn.users)
    problem = ct.Problem(drawn.users, Probit(ridge=1e-2), lam=0.03)
    assert ct.solve(problem).status is ct.Status.CONVERGED
    assert all(s.gap < 1e-6 for s in ct.solve_path(problem, n_lams=4).solutions)
    assert same_groups(ct.find_groups(drawn.users, Probit(ridge=1e-2)).labels, drawn.clusters)


def test_a_fit_its_folder_and_its_report(entered, drawn, tmp_path):
    fit = ct.fit_table(table(drawn), user="who", target="y", settings=Settings(loss="probit"))
    assert isinstance(fit.units.loss, Probit)
    assert fit.gap < 1e-6
    assert same_groups(fit.labels, drawn.clusters)
    fit.save(tmp_path / "run")
    again = ct.load_run(tmp_path / "run")
    assert again.predict_table(table(drawn)).columns == fit.predict_table(table(drawn)).columns
    page = tmp_path / "report.html"
    fit.report(page)
    assert "classification with the loss probit" in page.read_text("utf-8").lower()


def test_a_federation(entered, drawn):
    loss = Probit(ridge=1e-2)
    here = ct.solve(ct.Problem(drawn.users, loss, lam=0.03))
    there = ct.federate(drawn.users, loss, 0.03, tol=1e-7)
    np.testing.assert_allclose(there.models, here.models, atol=1e-4)
    fitted = ct.federate(drawn.users, loss="probit", seed=1)
    assert isinstance(fitted.units.loss, Probit)
    assert same_groups(fitted.labels, drawn.clusters)


def test_an_estimator(entered, drawn):
    users = drawn.users
    model = ct.PersonalizedClassifier(loss="probit", random_state=0).fit(users.features, users.targets,
                                                                         users=users.owner)
    assert model.score(users.features, users.targets, users=users.owner) > 0.8
    assert not hasattr(model, "predict_proba")
    assert not model.__sklearn_tags__().classifier_tags.multi_class
    with pytest.raises(ct.InvalidInput, match="binary classification is supported by the probit"):
        model.fit(users.features, np.arange(len(users.targets)) % 3, users=users.owner)
    with pytest.raises(ct.InvalidInput, match="the probit is for two classes, got 3"):
        make_loss("classification", "probit", 0.1, 3)
