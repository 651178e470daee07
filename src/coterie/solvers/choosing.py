"""The choice of the engine of the fast solver, by the graph and the loss."""

from __future__ import annotations

import numpy as np

from coterie.base.memory import require_memory
from coterie.base.types import Array
from coterie.problem.graph import Graph
from coterie.solvers.direct import Direct
from coterie.solvers.engines import (
    Complete,
    Dense,
    Engine,
    Iterative,
    multiples_of_identity,
    narrow_order,
    near_order,
)

_DENSE = 300  # largest number of unknowns for which the complete system is inverted


def choose(graph: Graph, hessians: Array, quadratic: bool, lam: float) -> Engine:
    """Choose the engine for a graph and a loss with these Hessians."""
    n, dim = hessians.shape[:2]
    # The state of every edge, its dual, and two copies.
    needed = 8.0 * graph.n_edges * (4 * dim + 1)
    require_memory(needed, f"{graph.n_edges:,} edges", "Use a graph of nearest neighbours, "
                                                       "Graph.knn or "
                   "adaptive_graph, or for all pairs with one weight solver='lean', which stores "
                   "no value per pair")
    if graph.n_edges == n * (n - 1) // 2:
        ordered = graph.is_complete \
            or bool((np.diff(graph.edges[:, 0] * n + graph.edges[:, 1]) > 0).all())
        if ordered:
            return Complete(graph, dim, lam)
    if n * dim > _DENSE and quadratic and multiples_of_identity(hessians):
        order = narrow_order(graph)
        if order is not None:
            return Direct(graph, dim, lam, order)
    return (Dense if n * dim <= _DENSE else Iterative)(graph, dim, lam, near_order(graph))
