"""Weights from local models: distances as stated, the nearest as neighbours, graphs connected on request."""

from __future__ import annotations

import numpy as np
import pytest
from support.problems import users_for

import coterie as ct
from coterie.datasets import clustered
from coterie.groups.proposals import first_merges
from coterie.problem.weights import KINDS


@pytest.fixture(scope="module")
def local():
    return ct.LocalModels.of(clustered("logistic", n_users=40, samples=30, seed=1).users, ct.Logistic(), ridge=0.03)


def wald(local, i, j):
    gap = local.models[i] - local.models[j]
    spread = np.linalg.inv(local.hessians[i]) / local.counts[i] + np.linalg.inv(local.hessians[j]) / local.counts[j]
    return gap @ np.linalg.solve(spread, gap) / gap.size


def test_local_models_are_optimal_with_the_ridge(local):
    users = clustered("logistic", n_users=40, samples=30, seed=1).users
    loss = ct.Logistic()
    gradients = loss.gradients(loss.prepare(users), local.models) + 0.03 * local.models
    assert np.abs(gradients).max() < 1e-9
    assert np.linalg.eigvalsh(local.hessians).min() >= 0.03


def test_weights_are_their_formulas(local):
    i, j = np.triu_indices(40, 1)
    euclid = ((local.models[i] - local.models[j]) ** 2).sum(axis=1)
    walds = np.array([wald(local, a, b) for a, b in zip(i, j, strict=True)])
    middle = np.median(np.sqrt(euclid))
    for kind, expected in (("gaussian", np.exp(-euclid / np.median(euclid))),
                           ("wald", np.exp(-walds / np.median(walds))),
                           ("inverse", middle / (middle + np.sqrt(euclid)))):
        graph = ct.adaptive_graph(local, kind, k=None, connected=False)
        np.testing.assert_allclose(graph.weights, expected, rtol=1e-9)
        joined = ct.adaptive_graph(local, kind, k=None)
        np.testing.assert_allclose(joined.weights, np.maximum(expected, 1e-3), rtol=1e-9)
    assert ct.adaptive_graph(local, "unit", k=None).is_complete
    other = ct.adaptive_graph(local, "gaussian", k=None, scale=2.0, connected=False)
    np.testing.assert_allclose(other.weights, np.exp(-euclid / 2.0))


@pytest.mark.parametrize("kind", KINDS)
def test_every_user_keeps_its_nearest(local, kind):
    graph = ct.adaptive_graph(local, kind, k=4, connected=False)
    edges = {tuple(edge) for edge in graph.edges.tolist()}
    n = len(local.models)
    for i in range(n):
        others = [j for j in range(n) if j != i]
        if kind in ("auto", "wald"):
            distances = [wald(local, i, j) for j in others]
        else:
            distances = [np.linalg.norm(local.models[i] - local.models[j]) for j in others]
        near = {others[p] for p in np.argsort(distances)[:4]}
        kept = {a + b - i for a, b in edges if i in (a, b)}
        assert near <= kept or kind in ("auto", "wald")  # Wald neighbours are sought among many, not among all
        assert len(near & kept) >= 3


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_joined_on_request(kind):
    far = np.concatenate([np.random.default_rng(0).standard_normal((6, 2)) + 100 * k for k in range(4)])
    local = ct.LocalModels(far, np.tile(np.eye(2), (24, 1, 1)), np.full(24, 10))
    assert ct.adaptive_graph(local, kind, k=2, connected=False).components.max() >= 3
    assert ct.adaptive_graph(local, kind, k=2, connected=True).components.max() == 0


def test_users_who_know_little_count_as_near():
    """The same two models are nearer, in the Wald distance, when their owners hold fewer samples."""
    models = np.array([[0.0, 0.0], [1.0, 0.0], [5.0, 5.0]])
    few, many = (ct.LocalModels(models, np.tile(np.eye(2), (3, 1, 1)), np.full(3, m)) for m in (2, 200))
    weights = [ct.adaptive_graph(local, "wald", k=None, scale=100.0).weights for local in (few, many)]
    assert (weights[0] > weights[1]).all()


@pytest.mark.parametrize("k", [None, 4])
def test_wald_weights_do_not_depend_on_the_units_of_the_features(local, k):
    units = np.array([1e-70, 1.0, 1e70])
    scaled = ct.LocalModels(local.models / units, local.hessians * units * units[:, None], local.counts)
    graph, same = (ct.adaptive_graph(one, "wald", k=k) for one in (local, scaled))
    assert np.array_equal(graph.edges, same.edges)
    np.testing.assert_allclose(same.weights, graph.weights, rtol=1e-9)


def test_hessians_that_rounding_made_indefinite_give_no_negative_distance():
    """Such a distance was once below 0, the scale with it, and the weight infinite."""
    almost = 1.0 + 2.0**-52
    local = ct.LocalModels(np.array([[1.0, -1.0], [0.0, 0.0]]), np.array([[[1.0, almost], [almost, 1.0]], np.eye(2)]),
                           np.ones(2))
    assert wald(local, 0, 1) < 0
    assert np.linalg.eigvalsh(local.covariances).min() >= 0
    for kind in KINDS:
        weights = ct.adaptive_graph(local, kind, k=None).weights
        assert (weights >= 1e-3).all()
        assert (weights <= 1.0).all()
    assert 0 < first_merges(local, ct.Graph.complete(2)) < np.inf


def test_distances_that_overflow_have_the_smallest_weight():
    models = np.array([[0.0], [1.0], [1e200], [-1e200]])
    local = ct.LocalModels(models, np.ones((4, 1, 1)), np.full(4, 10))
    for kind in ("gaussian", "wald", "inverse"):
        for scale in (None, 1.0):
            weights = ct.adaptive_graph(local, kind, k=None, scale=scale).weights
            assert weights[0] == weights.max()
            assert ((weights >= 1e-3) & (weights <= 1.0)).all()
    assert 0 < first_merges(local, ct.Graph.complete(4)) < np.inf


def test_bad_requests_and_small_federations(local):
    with pytest.raises(ct.InvalidInput, match="unknown weights"):
        ct.adaptive_graph(local, "cosine")
    with pytest.raises(ct.InvalidInput, match="k must be"):
        ct.adaptive_graph(local, "wald", k=0)
    users = users_for("squared")
    two, one = (ct.LocalModels.of(users.take(np.arange(n)), ct.Squared()) for n in (2, 1))
    assert ct.adaptive_graph(two, "wald", k=5).n_edges == 1
    assert ct.adaptive_graph(one, "wald").n_edges == 0


def test_duplicates_have_full_weight_and_no_loops():
    models = np.repeat(np.arange(4.0), 5)[:, None]
    local = ct.LocalModels(models, np.ones((20, 1, 1)), np.full(20, 10))
    graph = ct.adaptive_graph(local, "gaussian", k=3)
    assert np.isfinite(graph.weights).all()
    assert (graph.edges[:, 0] < graph.edges[:, 1]).all()
