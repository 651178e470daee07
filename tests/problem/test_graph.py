"""Graphs: B and its transpose, components, flows, kNN, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.problems import graph_for

import coterie as ct

KINDS = ["complete", "weighted", "knn", "disconnected", "empty"]


def dense_b(graph: ct.Graph) -> np.ndarray:
    b = np.zeros((graph.n_edges, graph.n_users))
    b[np.arange(graph.n_edges), graph.edges[:, 0]] = 1
    b[np.arange(graph.n_edges), graph.edges[:, 1]] = -1
    return b


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(n_users=st.integers(4, 12), dim=st.integers(1, 4), seed=st.integers(0, 99))
def test_differences_divergence_penalty_against_the_dense_operator(kind, n_users, dim, seed):
    graph, rng = graph_for(kind, n_users, seed), np.random.default_rng(seed)
    models, duals = rng.standard_normal((n_users, dim)), rng.standard_normal((graph.n_edges, dim))
    b = dense_b(graph)
    np.testing.assert_allclose(graph.differences(models), b @ models, atol=1e-14)
    np.testing.assert_allclose(graph.divergence(duals), b.T @ duals, atol=1e-13)
    assert graph.penalty(models) == pytest.approx(float(graph.weights @ np.linalg.norm(b @ models, axis=1)), abs=1e-12)


def test_a_complete_graph_keeps_no_list_of_pairs():
    graph = ct.Graph.complete(100_000)
    assert graph.n_edges == 100_000 * 99_999 // 2
    assert graph.weights.strides == (0,)
    assert "edges" not in vars(graph)
    assert (graph.components == 0).all()
    np.testing.assert_array_equal(ct.Graph.complete(4).edges, [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]])


@pytest.mark.parametrize("kind", KINDS)
def test_components_are_the_null_space_of_the_laplacian(kind):
    graph = graph_for(kind, 11)
    b = dense_b(graph)
    laplacian = b.T @ (graph.weights[:, None] * b)
    n_components = int(graph.components.max()) + 1
    assert n_components == (np.linalg.eigvalsh(laplacian) < 1e-9).sum()
    indicator = np.eye(n_components)[graph.components]
    np.testing.assert_allclose(laplacian @ indicator, 0, atol=1e-12)


def test_edges_of_weight_zero_do_not_connect():
    graph = ct.Graph.from_edges(3, [[0, 1], [1, 2]], [1.0, 0.0])
    assert graph.components.tolist() == [0, 0, 1]
    assert (ct.Graph.complete(3, weight=0.0).components == [0, 1, 2]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_electrical_flow_carries_the_forces_at_least_energy(kind):
    graph, rng = graph_for(kind, 10), np.random.default_rng(1)
    forces = rng.standard_normal((10, 3))
    for part in np.unique(graph.components):
        forces[graph.components == part] -= forces[graph.components == part].mean(axis=0)
    flow = graph.flow(forces)
    np.testing.assert_allclose(graph.divergence(flow), forces, atol=1e-10)
    if graph.n_edges:  # least energy: orthogonal, weighed by 1/w, to every circulation
        circulation = rng.standard_normal(flow.shape)
        circulation -= graph.flow(graph.divergence(circulation))
        assert np.abs(np.einsum("ed,ed->", flow / graph.weights[:, None], circulation)) < 1e-9


def test_what_cannot_flow_is_left_out():
    graph = ct.Graph.from_edges(3, [[0, 1]])
    flow = graph.flow(np.array([[2.0], [0.0], [5.0]]))
    np.testing.assert_allclose(graph.divergence(flow), [[1.0], [-1.0], [0.0]])


def test_knn_against_brute_force():
    rng = np.random.default_rng(0)
    points, k = rng.standard_normal((40, 3)), 4
    distances = np.linalg.norm(points[:, None] - points, axis=2)
    np.fill_diagonal(distances, np.inf)
    near = np.argsort(distances, axis=1)[:, :k]
    expected = {tuple(sorted((i, int(j)))) for i in range(40) for j in near[i]}
    graph = ct.Graph.knn(points, k=k, decay=0.5)
    assert {tuple(edge) for edge in graph.edges.tolist()} == expected
    i, j = graph.edges.T
    np.testing.assert_allclose(graph.weights, np.exp(-0.5 * distances[i, j] ** 2))


def test_knn_of_coinciding_points_has_no_loops():
    points = np.repeat(np.arange(3.0), 6)[:, None]
    graph = ct.Graph.knn(points, k=2)
    assert (graph.edges[:, 0] < graph.edges[:, 1]).all()
    assert np.unique(graph.edges).size == 18
    assert ct.Graph.knn([[1.0]], k=1).n_edges == 0


@pytest.mark.parametrize(("edges", "weights", "complaint"), [
    ([[0, 1], [1, 0]], None, r"edge 1.*Remove the duplicate"),
    ([[0, 0]], None, "two different users"),
    ([[0, 3]], None, r"user numbers from 0 to 2, got \(0, 3\)"),
    ([[-1, 1]], None, "user numbers"),
    ([[0, 1]], [-1.0], r"weights must be finite numbers >= 0, got -1 \(edge 0, users \(0, 1\)\)"),
    ([[0, 1]], [np.nan], "finite"),
    ([[0, 1]], [1.0, 2.0], "one weight for each of 1 edges"),
    ([[0, 1, 2]], None, r"\(n_edges, 2\)"),
    ([[0.5, 1.0]], None, "whole user numbers"),
])
def test_bad_edges_are_refused_by_name(edges, weights, complaint):
    with pytest.raises(ct.InvalidInput, match=complaint):
        ct.Graph.from_edges(3, edges, weights)


def test_bad_knn_and_sizes_are_refused():
    for k in (0, 5):
        with pytest.raises(ct.InvalidInput, match="k must be"):
            ct.Graph.knn(np.eye(5), k=k)
    with pytest.raises(ct.InvalidInput, match="finite points"):
        ct.Graph.knn([[np.nan], [1.0]], k=1)
    with pytest.raises(ct.InvalidInput, match="decay"):
        ct.Graph.knn(np.eye(3), k=1, decay=-1)
    for n_users in (0, 2.5, True):
        with pytest.raises(ct.InvalidInput, match="n_users"):
            ct.Graph.complete(n_users)
    with pytest.raises(ct.InvalidInput, match="weights"):
        ct.Graph.complete(3, weight=-1.0)


def test_the_caller_cannot_change_a_graph_afterwards():
    edges, weights = np.array([[1, 0]]), np.array([2.0])
    graph = ct.Graph.from_edges(2, edges, weights)
    edges[0], weights[0] = [0, 0], 9.0
    assert graph.edges.tolist() == [[0, 1]]
    assert graph.weights.tolist() == [2.0]
    with pytest.raises(ValueError):
        graph.weights[0] = 1.0


def test_flows_by_conjugate_gradients_are_those_of_a_factorisation(monkeypatch):
    rng = np.random.default_rng(0)
    graph = ct.Graph.knn(rng.normal(size=(200, 6)), k=5, decay=0.1)
    forces = rng.normal(size=(200, 3))
    exact = graph.flow_solver()(forces)
    monkeypatch.setattr("coterie.problem.graph._MANY", 10)
    np.testing.assert_allclose(graph.flow_solver()(forces), exact, rtol=1e-8, atol=1e-9)
    monkeypatch.setattr("coterie.problem.graph._STEPS", 1)  # not enough: then the factorisation is used
    np.testing.assert_array_equal(graph.flow_solver()(forces), exact)
