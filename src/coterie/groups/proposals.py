"""Proposals of groups: the path over lam on a graph of nearest users, with quadratic losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from coterie.base.labels import check_labels
from coterie.base.types import Array, Indices, Ints
from coterie.convex.path import Path, solve_path
from coterie.data.users import Participants
from coterie.losses import Evaluation, Loss, Samples
from coterie.losses.newton import whiten
from coterie.problem.graph import Graph
from coterie.problem.problem import Problem
from coterie.problem.solution import Solution
from coterie.problem.weights import LocalModels, adaptive_graph

# Weight; with smaller ones, a distant group would extend the path over hundreds of decades.
_SMALLEST = 1e-3
_STEP = 1.5  # ratio of two neighbouring lams of the search
_PLATEAU = 4  # the search ends after this number of lams with the same groups


def nearest_users(users: Participants, loss: Loss, sizes: Array | Ints, k: int,
                  ridge: float) -> tuple[
    LocalModels, Graph]:
    """The local models with a quadratic loss, and the graph of the nearest users with its weights.
    """
    samples = loss.prepare(users)
    with np.errstate(over="ignore"):  # a distance much larger than the median has weight 0
        models = loss.prox(samples, None, ridge, None).points
        hessians = loss.hessians(samples, models) + ridge * np.eye(samples.dim)
        local = LocalModels(models, hessians, sizes)
        graph = adaptive_graph(local, "wald", min(k, max(users.n_users - 1, 1)))
    return local, Graph.from_edges(users.n_users, graph.edges, np.maximum(graph.weights, _SMALLEST))


def search_path(problem: Problem, local: LocalModels, max_groups: int, n_lams: int, tol: float,
                progress: Callable[[Solution, int], None] | None) -> Path:
    """The path for increasing lam, from the first merges until a small number of groups does not
    change.
    """
    def settled(solutions: list[Solution]) -> bool:
        last = solutions[-_PLATEAU:]
        few = last[-1].n_clusters <= max_groups and len(last) == _PLATEAU
        return last[-1].n_clusters == parts or (few and all(np.array_equal(s.labels, last[0].labels)
                                                            for s in last))

    parts = int(problem.graph.components.max()) + 1
    lowest = first_merges(local, problem.graph)
    lams = lowest * _STEP ** np.arange(n_lams) if lowest > 0 else [0.0]
    return solve_path(problem, lams, tol=tol, enough=settled, progress=progress)


def first_merges(local: LocalModels, graph: Graph) -> float:
    """A lam at which very few users have merged; 0 if all local models are equal.

    Two users with an edge and no other users merge at lam w_ij = ||(H_i^-1 + H_j^-1)^-1 (x_i -
    x_j)||.
    """
    edges = slice(None, None, max(1, graph.n_edges // 1000))  # a sample of the edges is enough
    i, j = graph.edges[edges].T
    inverses = local.inverses
    roots = whiten(inverses[i] + inverses[j], np.eye(inverses.shape[1]))
    with np.errstate(over="ignore"):  # forces that overflow are left out
        force = roots.swapaxes(1, 2) @ (roots @ (local.models[i] - local.models[j])[..., None])
        merge = np.linalg.norm(force, axis=(1, 2)) / np.maximum(graph.weights[edges], 1e-300)
    merge = merge[np.isfinite(merge) & (merge > 0)]
    return 0.3 * float(np.quantile(merge, 0.05)) if merge.size else 0.0


def proposals_of(path: Path, max_groups: int) -> list[tuple[Ints, float | None]]:
    """The groups of the path, and the cuts of its merge tree, without duplicates."""
    from scipy.cluster.hierarchy import fcluster

    n = path.problem.n_users
    proposals: dict[bytes, tuple[Ints, float | None]] = {}

    def add(labels: Ints, lam: float | None) -> None:
        labels = check_labels(labels, n)
        proposals.setdefault(labels.tobytes(), (labels, lam))

    for solution in path.solutions:
        add(solution.labels, solution.lam)
    for count in range(2, min(max_groups, n) + 1):
        add(fcluster(path.linkage, count, "maxclust"), None)
    return list(proposals.values())


@dataclass(frozen=True, eq=False)
class WithRidge(Loss):
    """A loss plus ridge/2 ||x||^2, intercept included."""

    loss: Loss
    ridge: float

    @property
    def quadratic(self) -> bool:  # type: ignore[override]
        return self.loss.quadratic

    def dim(self, users: Participants) -> int:
        return self.loss.dim(users)

    def prepare(self, users: Participants) -> Samples:
        return self.loss.prepare(users)

    def evaluate(self, samples: Samples, models: Array, order: int = 2,
                 users: Indices | None = None) -> Evaluation:
        values, gradients, hessians = self.loss.evaluate(samples, models, order, users)
        return Evaluation(values + 0.5 * self.ridge * (models**2).sum(axis=1),
                          gradients + self.ridge * models if order > 0 else gradients,
                          hessians + self.ridge * np.eye(samples.dim) if order > 1 else hessians)

    def strong_convexity(self, samples: Samples) -> Array:
        return self.loss.strong_convexity(samples) + self.ridge
