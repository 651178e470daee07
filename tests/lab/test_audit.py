"""Attacks succeed where messages give rows away, and fail where they do not; a broken release is caught."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import coterie as ct
from coterie.cli import app
from coterie.datasets import clustered
from coterie.federated.client import Data, answer_all
from coterie.federated.private.policy import Privacy, mu_of
from coterie.federated.private.release import ReleaseQuestion
from coterie.federated.protocol.messages import Batch
from coterie.lab.attacks import audit
from coterie.lab.attacks.inference import (
    leverage,
    match_rows,
    membership_auc,
    rebuild_rows,
    rows_from_sums,
    tracing,
)
from coterie.lab.attacks.releases import epsilon_lower_bound, release_bound
from coterie.lab.attacks.simulation import Evidence, LabelledRows, Plan, Sums, draw_rows, evidence_of


def users(family: str = "logistic", rows: int = 30, n_users: int = 6, n_features: int = 4, seed: int = 0) -> ct.Users:
    return clustered(family, n_users=n_users, n_clusters=min(n_users, 3), samples=rows, n_features=n_features,
                     seed=seed).users


def evidence_at(data: ct.Users, loss: ct.LinearLoss, points: list[np.ndarray]) -> list[Evidence]:
    """What users answer to Newton's question at these points, the same for all of them."""
    exchanges, private = [], Data.of(data, loss)
    for k, point in enumerate(points):
        queries = Batch("expand", k, np.arange(data.n_users), {"model": np.tile(point, (data.n_users, 1))}, {},
                        {"rank": np.array(0)})
        exchanges.append((queries, answer_all(private, queries)))
    return evidence_of(exchanges, loss, data.counts)


def points(dim: int, count: int, seed: int = 0) -> list[np.ndarray]:
    return [np.zeros(dim), *(0.5 * np.random.default_rng(seed).standard_normal((count - 1, dim)))]


def test_two_hessians_give_all_rows_of_a_user_with_few():
    data, loss = users(rows=5), ct.Logistic()
    two, one = (evidence_at(data, loss, points(5, count)) for count in (2, 1))
    for user in range(data.n_users):
        rows = data.take([user]).features
        assert match_rows(rebuild_rows(two[user], loss), rows).all()
        assert not match_rows(rebuild_rows(one[user], loss), rows).any()  # one Hessian is the same for rotated rows


def test_more_rows_than_coordinates_are_searched_for():
    data, loss = users(rows=8, n_features=3, n_users=2), ct.Logistic()
    many = evidence_at(data, loss, points(4, 8))
    share = np.mean([match_rows(rebuild_rows(many[user], loss, user), data.take([user]).features).mean()
                     for user in range(2)])
    assert share > 0.4
    wide = users(rows=50, n_features=3, n_users=1)
    assert not len(rebuild_rows(evidence_at(wide, loss, points(4, 4))[0], loss))  # fewer equations than unknown numbers


@pytest.mark.parametrize("loss", [ct.SquaredHinge(), ct.Huber()])
def test_rows_that_change_sides_are_differences_of_hessians(loss):
    """From a point where all rows count, in steps so small that one or two rows leave at a time."""
    family = "squared_hinge" if isinstance(loss, ct.SquaredHinge) else "huber"
    data = users(family, rows=20, n_users=3)
    direction = np.random.default_rng(1).standard_normal(5)
    steps = [step * direction for step in np.linspace(0.0, 3.0, 12)]
    for user, evidence in enumerate(evidence_at(data, loss, steps)):
        rows = data.take([user]).features
        assert match_rows(rebuild_rows(evidence, loss), rows).sum() >= 2
        still = evidence_at(data, loss, [steps[0], 1e-9 * direction])[user]  # nobody changes sides
        assert not match_rows(rebuild_rows(still, loss), rows).any()


def test_one_row_is_the_direction_of_any_gradient():
    data, loss = users(rows=1), ct.Logistic()
    private, n = Data.of(data, loss), data.n_users
    queries = Batch("prox", 0, np.arange(n), {"centre": np.zeros((n, 5)), "t": np.ones(n)})
    evidence = evidence_of([(queries, answer_all(private, queries))], loss, data.counts)
    assert all(match_rows(rebuild_rows(evidence[k], loss), data.take([k]).features).all() for k in range(n))
    assert not len(rebuild_rows(evidence[0], replace(loss, intercept=False)))  # without intercept its length is unknown


def test_moments_of_one_or_two_rows_are_the_rows():
    rows = np.random.default_rng(0).standard_normal((3, 4))

    def sums(count: int) -> Evidence:
        some = rows[:count]
        return Evidence(count, sums=[Sums(count, some.mean(axis=0), np.cov(some.T, ddof=0) * count)])

    assert match_rows(rows_from_sums(sums(1)), rows[:1]).all()
    assert match_rows(rows_from_sums(sums(2)), rows[:2]).all()
    assert not len(rows_from_sums(sums(3)))


def test_the_audit_of_newton_and_splitting():
    found = {}
    for name, rows in (("newton", (4, 30)), ("splitting", (30,))):
        findings = audit(users(rows=60, n_users=8, n_features=3), algorithms=[name], rows=rows).findings
        found |= {(one.algorithm, one.rows): one for one in findings}
    assert found["newton", 4].exact_users == found["newton", 4].exact_rows == 1.0
    assert found["newton", 30].exact_users == found["splitting", 30].exact_users == 0.0
    assert found["newton", 4].membership > 0.99
    assert found["newton", 4].attribute > 0.95
    assert 0.45 < found["splitting", 30].membership < 0.9  # more than guessing, far from certain
    assert found["newton", 30].hessians > 1
    assert found["splitting", 30].hessians == 0


def test_held_out_rows_of_a_squared_fit_are_given_away_where_they_are_two():
    result = audit(users("squared", rows=30), algorithms=["fit"], rows=[10, 20])
    assert [one.exact_users for one in result.findings] == [1.0, 0.0]
    assert result.findings[0].exact_rows == pytest.approx(0.2)


def test_other_rows_are_not_taken_for_members():
    """A score of rows that have nothing to do with the messages is a guess, also with the best attack."""
    rng = np.random.default_rng(0)
    rows = LabelledRows(rng.standard_normal((400, 5)), np.zeros(400))
    gram = rng.standard_normal((30, 5))
    score = leverage(gram.T @ gram, lambda some: some.features)
    assert abs(membership_auc(score, rows.take(np.arange(200)), rows.take(np.arange(200, 400))) - 0.5) < 0.06
    inside = LabelledRows(gram[:4], np.zeros(4))
    small = leverage(inside.features.T @ inside.features, lambda some: some.features)
    assert membership_auc(small, inside, rows) == 1.0


@pytest.mark.parametrize(("noise", "low", "high"), [(0.0, 0.75, 1.0), (300.0, 0.4, 0.6)])
def test_tracing_needs_a_sum_without_much_noise(noise, low, high):
    rng = np.random.default_rng(0)
    rows, public = (LabelledRows(rng.standard_normal((n, 20)), np.zeros(n)) for n in (300, 2000))
    inside, outside = rows.take(np.arange(10)), rows.take(np.arange(10, 300))
    total = inside.features.sum(axis=0) + noise * rng.standard_normal(20)
    score = tracing(lambda some: some.features, total, 10, noise)(public)
    assert low <= membership_auc(score, inside, outside) <= high


@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_a_lower_bound_on_epsilon_stays_below_the_claim_and_catches_half_the_noise(epsilon):
    delta, rows = 1e-5, np.random.default_rng(0).standard_normal((20, 10))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    noise = 1.0 / mu_of(epsilon, delta)

    def bound(factor: float, seed: int) -> float:
        def release(data, rng):
            return data.sum(axis=0) + factor * noise * rng.standard_normal(10)

        return epsilon_lower_bound(release, rows, rows[1:], delta=delta, direction=rows[0], draws=2000,
                                   seed=seed).epsilon

    sound = [bound(1.0, seed) for seed in range(4)]
    assert max(sound) <= epsilon
    assert max(sound) > 0.3 * epsilon  # and not far below
    assert min(bound(0.5, seed) for seed in range(2)) > epsilon
    with pytest.raises(ct.InvalidInput, match="draws"):
        epsilon_lower_bound(lambda data, rng: data, rows, rows, delta=delta, draws=3)


def test_a_private_release_gives_no_rows_away():
    privacy = Privacy(epsilon=1.0, clip=6.0)
    result = audit(users(rows=44, n_users=12, n_features=3), algorithms=[], rows=[2, 20], privacy=privacy)
    found = {(one.algorithm, one.rows): one for one in result.findings}
    assert found["release, no noise", 2].exact_users > 0.5
    assert found["release, no noise", 2].membership > 0.9
    assert found["release, no noise", 20].membership > 0.65
    for rows in (2, 20):
        private = found["release", rows]
        assert private.exact_users == 0.0
        assert private.membership < result.allowed + 2 * private.membership_error
    assert 0.2 < result.bound.epsilon <= 1.0
    assert result.holds
    assert not replace(result, claimed=0.9 * result.bound.epsilon).holds


@pytest.mark.parametrize("unit", ["row", "user"])
def test_a_release_with_too_little_noise_is_caught(monkeypatch, unit):
    data, plan = draw_rows(users(rows=20), 10, 0), Plan(loss=ct.Logistic(), privacy=Privacy(epsilon=4.0, unit=unit))
    assert release_bound(data, plan, draws=1500).epsilon <= 4.0
    noisy = ReleaseQuestion.noisy
    half = lambda self, exact, rng: exact + 0.5 * (noisy(self, exact, rng) - exact)  # noqa: E731
    monkeypatch.setattr(ReleaseQuestion, "noisy", half)
    assert release_bound(data, plan, draws=1500).epsilon > 4.0


def test_what_cannot_be_audited_is_refused():
    data = users(rows=8)
    for options, complaint in (({"algorithms": ["newtown"]}, "newtown"), ({"rows": [0]}, "at least 1"),
                               ({"rows": [50]}, "at least 52 rows"), ({"algorithms": ["release"]}, "a budget"),
                               ({"loss": "multinomial"}, "one margin")):
        with pytest.raises(ct.InvalidInput, match=complaint):
            audit(data, **options)


@pytest.fixture
def table(tmp_path):
    data = users(rows=12, n_users=4, n_features=2)
    file = tmp_path / "table.csv"
    lines = [f"{data.names[owner]},{a},{b},{'yes' if y > 0 else 'no'}"
             for owner, (a, b), y in zip(data.owner, data.features.round(4), data.targets, strict=True)]
    file.write_text("\n".join(["who,a,b,y", *lines]) + "\n")
    return file


COLUMNS = ("--user", "who", "--target", "y")


@pytest.fixture
def said(capsys):
    def run(*words: str) -> str:
        app([str(word) for word in words], standalone_mode=False)
        return capsys.readouterr().out

    return run


def test_the_command_audits_a_table(table, tmp_path, said):
    shown = said("audit", table, *COLUMNS, "--algorithm", "newton", "--rows", "3", "--out", tmp_path / "audit.json")
    assert "newton" in shown
    assert "100%" in shown
    saved = json.loads((tmp_path / "audit.json").read_text())
    assert saved == json.loads(said("audit", table, *COLUMNS, "--algorithm", "newton", "--rows", "3", "--json"))
    assert saved["findings"][0]["exact_users"] == 1.0
    with pytest.raises(ct.InvalidInput, match="--user COLUMN"):
        said("audit", table)


@pytest.mark.slow
def test_the_command_audits_a_run(table, tmp_path, said):
    said("federate", table, *COLUMNS, "--lam", "0.05", "--out", tmp_path / "run")
    assert "Hessians (expand)" in said("audit", tmp_path / "run")
    again = json.loads(said("audit", tmp_path / "run", "--data", table, "--rows", "3", "--json"))
    assert [one["algorithm"] for one in again["findings"]] == ["newton"]
    budget = ("--epsilon", "2", "--clip", "a=-4:4,b=-4:4,y=no|yes")
    said("federate", table, *COLUMNS, *budget, "--out", tmp_path / "private")
    assert "noisy releases: epsilon = 2" in said("audit", tmp_path / "private")
    private = json.loads(said("audit", tmp_path / "private", "--data", table, "--rows", "3", "--json"))
    assert [one["algorithm"] for one in private["findings"]] == ["release", "release, no noise"]
    assert private["bound"]["epsilon"] <= private["claimed"] == 2.0
    said("fit", table, *COLUMNS, "--out", tmp_path / "fit")
    with pytest.raises(ct.InvalidInput, match="nothing crossed"):
        said("audit", tmp_path / "fit")


@pytest.mark.slow
def test_the_audit_says_how_far_a_liar_moves_the_others():
    users = clustered("logistic", n_users=6, samples=30, n_features=2, seed=3).users
    moved = [audit(users, algorithms=["splitting"], rows=[20], lam=lam).moved for lam in (0.0, 0.05)]
    assert moved[0] < 1e-4  # nobody pulls, and runs end within their tolerance
    assert 1e-3 < moved[1] < 10.0
