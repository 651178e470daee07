"""Datasets: the ellipses are where they are said to be, clusters are real, and files are read."""

from __future__ import annotations

import csv

import numpy as np
import pytest
from support.problems import loss_for

import coterie as ct
from coterie.datasets import FAMILIES, Ellipses, clustered, ellipses, gaussian_mixture, load, two_moons


@pytest.mark.parametrize(("settings", "held"), [({}, 10), ({"users_per_cluster": 10, "samples": 0.85}, 170)])
def test_ellipses_are_the_papers_two_settings(settings, held):
    data = ellipses(**settings, seed=1)
    per_cluster = settings.get("users_per_cluster", 20)
    assert data.users.n_users == 3 * per_cluster
    assert (data.users.counts == held).all()
    assert np.bincount(data.clusters).tolist() == [per_cluster] * 3
    for k in range(3):  # a cluster's users draw, without replacement, from one pool of 200 points
        owners = np.flatnonzero(data.clusters == k)
        rows = np.isin(data.users.owner, owners)
        pool = np.unique(data.users.features[rows], axis=0)
        assert len(pool) <= 200
        for user in owners[:3]:
            assert len(np.unique(data.users.features[data.users.owner == user], axis=0)) == held
    assert data.test.names == data.users.names
    assert np.bincount((data.test.targets > 0)[data.test.owner == 0]).tolist() == [500, 500]
    assert not np.isin(data.test.features, data.users.features).any()


def test_points_fill_their_ellipse_uniformly():
    shape = Ellipses(along=2.0, across=1.0, offset=3.0, centre=0.5)
    points, labels = shape.draw(1, 20_000, np.random.default_rng(0))
    angle = 2 * np.pi / 3
    ahead, aside = points @ [np.cos(angle), np.sin(angle)], points @ [-np.sin(angle), np.cos(angle)]
    u, v = (ahead - 0.5 - labels * 1.5) / 2.0, aside / 1.0
    radius = np.hypot(u, v)
    assert radius.max() <= 1 + 1e-12
    assert np.mean(radius < 0.5) == pytest.approx(0.25, abs=0.01)  # area grows with the square
    assert np.mean(u > 0) == pytest.approx(0.5, abs=0.01)


def test_the_default_ellipses_show_three_exact_clusters():
    data = ellipses(seed=0)
    problem = ct.Problem(data.users, ct.SquaredHinge(ridge=1e-3), lam=0.09)
    solution = ct.solve(problem)
    assert solution.status is ct.Status.CONVERGED
    assert solution.n_clusters == 3
    assert (solution.labels == data.clusters).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_follows_its_true_models(family):
    """With many samples, each user's own best model is nearer to its cluster's truth than to another's."""
    data = clustered(family, n_users=6, samples=400, separation=2.0, seed=3)
    loss = loss_for(family)
    own = loss.local(loss.prepare(data.users)).points
    distances = np.linalg.norm(own[:, None] - data.true_models, axis=2)
    if family == "squared_hinge":  # margins are not log-odds: compare directions
        unit = own / np.linalg.norm(own, axis=1, keepdims=True)
        distances = -unit @ data.true_models.T
    assert (distances.argmin(axis=1) == data.clusters).all()
    assert data.test.names == data.users.names


def test_one_seed_gives_one_result():
    for make in (ellipses, clustered, gaussian_mixture, two_moons):
        first, again, other = (make(seed=s).users.features for s in (5, 5, 6))
        np.testing.assert_array_equal(first, again)
        assert not np.array_equal(first, other)


def test_ragged_users_differ_in_size():
    counts = clustered("squared", samples=20, ragged=True).users.counts
    assert counts.min() >= 10
    assert counts.max() <= 40
    assert len(np.unique(counts)) > 5


def test_two_moons_are_standardised_and_interleaved():
    data = two_moons(2000)
    np.testing.assert_allclose(data.users.features.mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(data.users.features.std(0), 1, atol=1e-12)
    centres = [data.users.features[data.clusters == k].mean(0) for k in (0, 1)]
    assert np.linalg.norm(centres[0] - centres[1]) < 2.0


@pytest.mark.parametrize("call", [
    lambda: ellipses(samples=0), lambda: ellipses(samples=201), lambda: ellipses(samples=1.5),
    lambda: ellipses(points_per_cluster=7), lambda: clustered("gamma"), lambda: clustered(n_users=2, n_clusters=3),
])
def test_impossible_datasets_are_refused(call):
    with pytest.raises(ct.InvalidInput):
        call()


def write(path, header, rows):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def test_npz_csv_and_parquet_give_the_same_federation(tmp_path):
    import pandas

    rng = np.random.default_rng(0)
    features, user = rng.standard_normal((12, 2)), np.array(list("bbaaccbbaacc"))
    target, kind = rng.standard_normal(12), {"a": 0, "b": 1, "c": 0}
    np.savez(tmp_path / "f.npz", X=features, y=target, user=user, cluster=[0, 1, 0])
    rows = [[*map(repr, map(float, x)), float(y), u, kind[u]] for x, y, u in zip(features, target, user, strict=True)]
    write(tmp_path / "f.csv", ["p", "q", "y", "user", "cluster"], rows)
    pandas.read_csv(tmp_path / "f.csv").to_parquet(tmp_path / "f.parquet")
    stored = [load(tmp_path / name) for name in ("f.npz", "f.csv", "f.parquet")]
    for data in stored:
        assert data.users.names == ("a", "b", "c")
        assert data.clusters.tolist() == [0, 1, 0]
        np.testing.assert_allclose(data.users.features, stored[0].users.features, rtol=1e-15)
        np.testing.assert_allclose(data.users.targets, stored[0].users.targets, rtol=1e-15)
    assert stored[1].users.feature_names == ("p", "q")


def test_files_that_cannot_be_used_are_refused_by_name(tmp_path):
    np.savez(tmp_path / "lacking.npz", X=np.ones((3, 1)))
    np.savez(tmp_path / "clusters.npz", X=np.ones((3, 1)), user=[0, 0, 1], cluster=[0, 1, 2])
    (tmp_path / "broken.npz").write_bytes(b"PK not really")
    (tmp_path / "table.xls").write_text("")
    write(tmp_path / "mixed.csv", ["a", "user", "cluster"], [[1, "u", 0], [2, "u", 1]])
    for name, complaint in (("lacking.npz", "missing \\['user'\\]"), ("clusters.npz", "each of 2 users"),
                            ("broken.npz", "cannot read"), ("missing.npz", "cannot read"), ("table.xls", "table.xls"),
                            ("mixed.csv", "user 'u'"), ("missing.csv", "missing.csv")):
        with pytest.raises(ct.InvalidInput, match=complaint):
            load(tmp_path / name)
