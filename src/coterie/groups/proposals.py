"""Proposals of groups: the path over lam on a graph of nearest users, with quadratic losses, of a
sample where users are many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from coterie.base.labels import check_labels
from coterie.base.types import Array, Indices, Ints
from coterie.convex.path import Path, solve_path
from coterie.data.users import Participants
from coterie.groups.partitions import Judge, sums_of_nodes
from coterie.groups.spread import solve_damped
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


# Many users: proposals come from a sample of them, and groups that a sample misses from the users
# it explains least.
#
# The path and the tree need much more time for many users, and a sample of a few hundred shows all
# groups but rare ones. All users are then assigned to the most likely group. A rare group is found
# among the users whose rows ask most for models of their own. With evidence for models that vary as
# T around the model of the group, user i asks for
#
#     log E exp(l_i(model of i)) - l_i(model of i's group)
#
# nats. Ward's tree (1963) of the users who ask most has a gain for each node, if its users become a
# group of their own; the nodes with the largest sum of gains, of which none is inside another, are
# split off.

_MOST = 300  # users of a sample
_ASKING = 200  # users who ask for models of their own, at most


def sample_of(n_users: int) -> Ints | None:
    """Positions of the users of a sample, one of every stretch of users; None if all users are few
    enough.
    """
    if n_users <= _MOST:
        return None
    # Equal distances could be those of a pattern in the users.
    within = np.random.default_rng(n_users).random(_MOST)
    starts = np.arange(_MOST + 1) * n_users // _MOST
    return starts[:-1] + (within * np.diff(starts)).astype(np.int64)


def split_off(judge: Judge, labels: Ints, covariance: Array) -> Ints:
    """The partition with new groups of users whom it explains badly.

    Parameters
    ----------
    judge : of the users.
    labels : (n_users,) the partition.
    covariance : (dim, dim) T, how much models of users differ.
    """
    from scipy.cluster.hierarchy import linkage

    models = judge.fitted(labels).models[labels]
    marginal, posterior = judge.expansions.marginal(covariance)
    now = judge.expansions.at_own(models)
    gains = marginal.at_own(models) - now
    asking = np.sort(np.argsort(-gains, kind="stable")[:min(_ASKING, judge.n)])
    asking = asking[gains[asking] > np.log(judge.n)]
    if len(asking) < 2:
        return labels
    own, n = judge.expansions.take(asking), len(asking)
    scales, axes = np.linalg.eigh(posterior[asking].mean(axis=0))
    points = own.modes(models[asking], posterior[asking]) \
        @ (axes / np.sqrt(np.maximum(scales, 1e-12 * scales[-1])))
    links = linkage(points, "ward")
    sums, sizes = sums_of_nodes(own, links), np.append(np.ones(n), links[:, 3])
    likelihoods = sums.constants + 0.5 \
        * (sums.slopes * solve_damped(sums.curvatures, sums.slopes)).sum(axis=1)
    before = now[asking] - np.log(judge.n / np.bincount(labels)[labels[asking]])
    gain = likelihoods - sizes * np.log(judge.n / sizes) - judge.model_cost
    for first, second in links[:, :2].astype(int).tolist():
        before = np.append(before, before[first] + before[second])
    return _with_nodes(labels, asking, links, gain - before)


def _with_nodes(labels: Ints, asking: Ints, links: Array, gain: Array) -> Ints:
    """The labels with the nodes split off whose gains have the largest sum."""
    n, pairs = len(asking), links[:, :2].astype(int).tolist()
    best = np.maximum(gain, 0.0)
    for node, (first, second) in enumerate(pairs, start=n):
        best[node] = max(best[node], best[first] + best[second])
    new, number, nodes = labels.copy(), int(labels.max()), [len(gain) - 1]
    members: dict[int, list[int]] = {leaf: [leaf] for leaf in range(n)}
    for node, (first, second) in enumerate(pairs, start=n):
        members[node] = members[first] + members[second]
    while nodes:
        node = nodes.pop()
        if best[node] <= 0:
            continue
        if gain[node] >= best[node]:
            number += 1
            new[asking[members[node]]] = number
        else:
            nodes += pairs[node - n]
    return check_labels(new, len(labels))
