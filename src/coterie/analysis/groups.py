"""The groups among the users, how many there are included: nothing to tune, nothing to be told.

    found = find_groups(users)       # found.labels, found.n_clusters, found.models

1. Every user fits its own model, with a ridge on all coordinates, so that users with few samples or one class have it.
2. The path over lam on the graph of each user's nearest by Wald distance proposes partitions: its clusters, the cuts of
   its merge tree, and everyone together. Where it has too many clusters, the largest are kept and the a users of all
   others given to the likeliest of them: among many users of few samples, whole groups appear on the path only so.
3. Each is improved by merging clusters and moving users while this criterion falls, and the smallest wins:

       - sum_i L_i + K d/2 log(n_eff) + sum_k n_k log(N / n_k) + moves log(N max(K - 1, 1))

   for N users, K clusters of n_k users, and models of d coordinates. L_i = -m_i f_i(model of i's cluster) / s, without
   ridge, is the log-likelihood of user i with m_i samples. The prices are those of a description: of the models (the
   Bayesian information criterion), of the labels, and of every user moved from where the path has it. That one out
   of the N choose a sets of users was given away costs the logarithm of their number.

n_eff is the number of samples; for two classes sum_j 4 p_j (1 - p_j) under one model for all, since few samples tell of
a rare class. s is 1 but for losses of real numbers (squared, Huber, distances of points): there it is the variance
around the users' own models, from users with more numbers than coordinates, and 1 where there are none (points with one
sample each: scale them so that the spread within a group is 1). The squared hinge is taken for a log-likelihood.

A user shows its own model, that model's Hessian, its moments, and its losses with two derivatives under models it is
sent: a federation can do the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import lgamma

import numpy as np

from coterie._typing import Array, Indices, Ints
from coterie.analysis.path import Path, check_labels, solve_path
from coterie.data.scaling import Standardizer
from coterie.data.users import Participants, Users
from coterie.errors import InvalidInput, interruptible
from coterie.graph import Graph
from coterie.graph.weights import LocalModels, adaptive_graph
from coterie.losses import AffineLoss, Evaluation, Loss, Samples
from coterie.losses.grouped import Grouped
from coterie.losses.linear import Huber, Logistic, Squared, SquaredHinge
from coterie.losses.newton import minimise
from coterie.losses.points import HuberDistance, SquaredDistance
from coterie.problem import Problem
from coterie.solution import Solution

_LIGHTEST = 1e-3  # no edge weighs less, or one far group would stretch the path over hundreds of decades
_ROUNDS = 20
_STEP = 1.5  # from one lam of the search to the next
_PLATEAU = 4  # lams with the same clusters that end the search


@dataclass(frozen=True, kw_only=True, eq=False)
class Groups:
    """The groups that were found, and what else was looked at."""

    labels: Ints  # (n_users,) from 0, in order of first appearance
    models: Array = field(repr=False)  # (n_users, dim) the best model of each group for the loss and features given
    criterion: float  # of `labels`; the smallest of `candidates`
    candidates: tuple[tuple[int, float], ...] = field(repr=False)  # (number of clusters, criterion) of all examined
    lam: float | None  # of the path's point the labels were made from; None for a cut of the tree and for everyone
    graph: Graph = field(repr=False)
    path: Path = field(repr=False)  # of the search: standardised features, stronger ridge

    @property
    def n_clusters(self) -> int:
        return int(self.labels.max()) + 1

    def __str__(self) -> str:
        if self.n_clusters == 1:
            return f"All {len(self.labels)} user(s) are one group: none of {len(self.candidates)} partitions is better."
        sizes = ", ".join(map(str, np.bincount(self.labels)))
        together = min(value for count, value in self.candidates if count == 1)
        return f"{self.n_clusters} groups of {sizes} users: criterion {self.criterion:.6g}, one group {together:.6g}."


@interruptible()
def find_groups(users: Users, loss: Loss | None = None, *, most: int = 8, n_lams: int = 60, k: int = 5,
                weight_ridge: float = 0.1, progress: Callable[[Solution, int], None] | None = None) -> Groups:
    """Find the groups among the users, and one model for each; see the module's text for how.

    Nothing is random. For losses with <w, a> + b the search is on features standardised by the users' pooled moments
    (only scaled where there is no intercept), so their units do not matter; the models returned are for the features as
    given: the minimum of the sum of the members' losses, as `select.refit` has it.

    Parameters
    ----------
    users : whose data.
    loss : None means logistic for targets -1 and +1, squared for other targets, squared distance for none.
    most : the most groups considered.
    n_lams : how many points the path has at most.
    k : how many nearest users each one is compared with.
    weight_ridge : of the models that the graph and the path are made from; on all coordinates.
    progress : called after each lam of the search with its solution and how many there are at most.
    """
    if not isinstance(users, Users):
        raise InvalidInput(f"expected Users, got {type(users).__name__}",
                           remedy="Build them with Users.from_arrays(X, y, user)")
    for name, number, least in (("most", most, 1), ("n_lams", n_lams, 2), ("k", k, 1)):
        if isinstance(number, bool) or not isinstance(number, (int, np.integer)) or number < least:
            raise InvalidInput(f"{name} must be a whole number >= {least}, got {number!r}", remedy="Leave it out")
    if not (isinstance(weight_ridge, (int, float)) and 0 < weight_ridge < np.inf):
        raise InvalidInput(f"weight_ridge must be a finite number > 0, got {weight_ridge!r}", remedy="Leave it out")
    if users.n_users == 0:
        raise InvalidInput("there are no users to group", remedy="Give at least one")
    if loss is None:
        y = users.targets
        loss = SquaredDistance() if y is None else Logistic() if (np.abs(y) == 1.0).all() else Squared()
    if not isinstance(loss, Loss):
        raise InvalidInput(f"expected a loss such as Logistic(), got {loss!r}", remedy="Create it by calling its class")
    given = loss.prepare(users)
    scaled = _scaled(users, loss)
    with np.errstate(over="ignore"):  # a distance far beyond the median, whose weight is 0
        local = LocalModels.of(scaled, loss, weight_ridge)
        graph = adaptive_graph(local, "wald", min(k, max(users.n_users - 1, 1)))
    graph = Graph.from_edges(users.n_users, graph.edges, np.maximum(graph.weights, _LIGHTEST))
    path = _climb(Problem(scaled, _Ridged(loss, weight_ridge), 0.0, graph), local, most, n_lams, progress)

    judge = _Judge(scaled, loss)
    candidates: list[tuple[int, float]] = []
    best: tuple[float, Ints, float | None] | None = None
    for labels, lam in _proposals(path, most):
        labels, toll = judge.absorb(labels, most)
        value, polished = judge.polish(labels)
        candidates += [(int(labels.max()) + 1, judge.criterion(labels) + toll), (int(polished.max()) + 1, value + toll)]
        if best is None or value + toll < best[0]:
            best = value + toll, polished, lam
    assert best is not None
    clusters = Grouped(loss=loss, samples=given, labels=best[1])
    models = clusters.local(clusters.prepare(clusters.groups)).points[best[1]]
    return Groups(labels=best[1], models=models, criterion=best[0], candidates=tuple(dict.fromkeys(candidates)),
                  lam=best[2], graph=graph, path=path)


def _scaled(users: Users, loss: Loss) -> Users:
    if not isinstance(loss, AffineLoss):
        return users
    scaler = Standardizer.from_moments(users.moments(), feature_names=users.feature_names)
    return (scaler if loss.intercept else replace(scaler, mean=np.zeros_like(scaler.mean))).transform(users)


def _climb(problem: Problem, local: LocalModels, most: int, n_lams: int,
           progress: Callable[[Solution, int], None] | None) -> Path:
    """The path upwards from where the first users meet, until few clusters stay as they are."""
    def settled(solutions: list[Solution]) -> bool:
        last = solutions[-_PLATEAU:]
        few = last[-1].n_clusters <= most and len(last) == _PLATEAU
        return last[-1].n_clusters == parts or (few and all(np.array_equal(s.labels, last[0].labels) for s in last))

    parts = int(problem.graph.components.max()) + 1
    lowest = first_meeting(local, problem.graph)
    lams = lowest * _STEP ** np.arange(n_lams) if lowest > 0 else [0.0]
    return solve_path(problem, lams, tol=1e-5, enough=settled, progress=progress)


def first_meeting(local: LocalModels, graph: Graph) -> float:
    """A lam at which hardly any users have met; 0 where none are apart.

    Two users with an edge, by themselves, meet at lam w_ij = ||(H_i^-1 + H_j^-1)^-1 (x_i - x_j)||.
    """
    edges = slice(None, None, max(1, graph.n_edges // 10_000))  # a sample of them will do
    i, j = graph.edges[edges].T
    inverse = np.linalg.inv(local.hessians)
    force = np.linalg.solve(inverse[i] + inverse[j], (local.models[i] - local.models[j])[..., None])
    meet = np.linalg.norm(force, axis=(1, 2)) / np.maximum(graph.weights[edges], 1e-300)
    meet = meet[np.isfinite(meet) & (meet > 0)]
    return 0.3 * float(np.quantile(meet, 0.05)) if meet.size else 0.0


def _proposals(path: Path, most: int) -> list[tuple[Ints, float | None]]:
    """Everyone together, the path's clusters, the cuts of its merge tree: each once."""
    from scipy.cluster.hierarchy import fcluster

    n = path.problem.n_users
    found: dict[bytes, tuple[Ints, float | None]] = {}

    def add(labels: Ints, lam: float | None) -> None:
        labels = check_labels(labels, n)
        found.setdefault(labels.tobytes(), (labels, lam))

    add(np.zeros(n, dtype=np.int64), None)
    for solution in path.solutions:
        add(solution.labels, solution.lam)
    for count in range(2, min(most, n) + 1):
        add(fcluster(path.linkage, count, "maxclust"), None)
    return list(found.values())


class _Judge:
    """The criterion, and what lowers it. A cluster's fit depends on its members alone and is computed once."""

    def __init__(self, users: Users, loss: Loss) -> None:
        self.loss, self.samples = loss, loss.prepare(users)
        self.bare = replace(loss, ridge=0.0) if isinstance(loss, AffineLoss) else loss
        self.counts = users.counts.astype(float)
        self.n, self.dim = users.n_users, self.samples.dim
        self.fits: dict[bytes, tuple[Array, Array]] = {}
        self.scale = self._scale()
        pooled = self.fit(np.arange(self.n))[0]
        informative = float(users.n_samples)
        if isinstance(loss, (Logistic, SquaredHinge)):
            t = loss.decision(users.features, np.broadcast_to(pooled, (users.n_samples, self.dim)))
            p = 0.5 + 0.5 * np.tanh(t / 2) if isinstance(loss, Logistic) else np.clip((1 + t) / 2, 0, 1)
            informative = float((4 * p * (1 - p)).sum())
        self.price = 0.5 * self.dim * float(np.log(max(informative, np.e)))

    def _scale(self) -> float:
        if not isinstance(self.loss, (Squared, Huber, SquaredDistance, HuberDistance)):
            return 1.0
        numbers = self.counts * (self.dim if isinstance(self.loss, (SquaredDistance, HuberDistance)) else 1)
        free = np.maximum(numbers - self.dim, 0.0)
        own = self.bare.values(self.samples, self.bare.prox(self.samples, None, 1e-6, None).points)
        zero = self.bare.values(self.samples, np.zeros((self.n, self.dim)))
        if not free.any() or not zero.any():
            return 1.0
        total = float((2 * self.counts * own)[free > 0].sum() / free.sum())
        return max(total, 1e-12 * float((2 * self.counts * zero).sum() / numbers.sum()))  # data without noise

    def fit(self, members: Ints) -> tuple[Array, Array]:
        """A cluster's best model by likelihood and ridge, all samples alike; every user's log-likelihood under it."""
        key, weights = members.tobytes(), self.counts[members] / self.scale

        def evaluate(_: Ints, x: Array, order: int) -> tuple[Array, Array, Array]:
            parts = self.loss.evaluate(self.samples, np.repeat(x, len(members), axis=0), order, members)
            f, g, h = (np.tensordot(weights, part, 1)[None] if r <= order else part for r, part in enumerate(parts))
            return f, g, h

        if key not in self.fits:
            with np.errstate(over="ignore", invalid="ignore"):  # a trial far out, or a model of very different users
                model = minimise(evaluate, np.zeros((1, self.dim))).points
                values = self.bare.values(self.samples, np.repeat(model, self.n, axis=0))
            self.fits[key] = model[0], -self.counts / self.scale * np.where(np.isnan(values), np.inf, values)
        return self.fits[key]

    def clusters(self, labels: Ints) -> list[Ints]:
        return [np.flatnonzero(labels == c) for c in range(int(labels.max()) + 1)]

    def toll(self, clusters: int) -> float:
        """The price of one user moved."""
        return float(np.log(self.n * max(clusters - 1, 1)))

    def part(self, members: Ints) -> float:
        """What one cluster adds to the criterion."""
        size = len(members)
        return float(size * np.log(self.n / size) - self.fit(members)[1][members].sum()) + self.price

    def criterion(self, labels: Ints, moves: int = 0) -> float:
        parts = self.clusters(labels)
        return sum(self.part(members) for members in parts) + moves * self.toll(len(parts))

    def absorb(self, labels: Ints, most: int) -> tuple[Ints, float]:
        """At most so many clusters: the largest, the users of others given to the likeliest; and the price of that."""
        sizes = np.bincount(labels)
        if len(sizes) <= most:
            return labels, 0.0
        kept = [c for c in np.argsort(-sizes, kind="stable")[:most] if sizes[c] > 1] or [0]
        likelihoods = np.stack([self.fit(np.flatnonzero(labels == c))[1] for c in kept], axis=1)
        for place, c in enumerate(kept):
            likelihoods[labels == c, place] = np.inf
        away = self.n - int(sizes[kept].sum())
        toll = lgamma(self.n + 1) - lgamma(away + 1) - lgamma(self.n - away + 1)
        return check_labels(likelihoods.argmax(axis=1), self.n), toll

    def polish(self, labels: Ints) -> tuple[float, Ints]:
        """Merge clusters and move users while the criterion falls."""
        moved: set[int] = set()
        for _ in range(_ROUNDS):
            before, labels = labels, self._merge(labels)
            parts = self.clusters(labels)
            likelihoods = np.stack([self.fit(members)[1] for members in parts], axis=1)
            gains = likelihoods.max(axis=1) - likelihoods[np.arange(self.n), labels]
            moving = np.flatnonzero(gains > self.toll(len(parts)))
            new = labels.copy()
            new[moving] = likelihoods[moving].argmax(axis=1)
            new = check_labels(new, self.n)
            if moving.size and self.criterion(new, moving.size) < self.criterion(labels):
                moved.update(moving.tolist())
                labels = new
            if np.array_equal(before, labels):
                break
        return self.criterion(labels, len(moved) if labels.any() else 0), labels

    def _merge(self, labels: Ints) -> Ints:
        """Merge two clusters at a time, the pair that lowers the criterion most."""
        while labels.any():
            parts = self.clusters(labels)
            cost = [self.part(members) for members in parts]
            change, a, b = min((self.part(np.union1d(parts[a], parts[b])) - cost[a] - cost[b], a, b)
                               for a, b in combinations(range(len(parts)), 2))
            if change >= 0:
                break
            labels = check_labels(np.where(labels == b, a, labels), self.n)
        return labels


@dataclass(frozen=True, eq=False)
class _Ridged(Loss):
    """A loss with ridge/2 ||x||^2 added on all coordinates, intercepts too."""

    loss: Loss
    ridge: float

    @property
    def quadratic(self) -> bool:  # type: ignore[override]
        return self.loss.quadratic

    def dim(self, users: Participants) -> int:
        return self.loss.dim(users)

    def prepare(self, users: Participants) -> Samples:
        return self.loss.prepare(users)

    def evaluate(self, samples: Samples, models: Array, order: int = 2, users: Indices | None = None) -> Evaluation:
        values, gradients, hessians = self.loss.evaluate(samples, models, order, users)
        return Evaluation(values + 0.5 * self.ridge * (models**2).sum(axis=1),
                          gradients + self.ridge * models if order > 0 else gradients,
                          hessians + self.ridge * np.eye(samples.dim) if order > 1 else hessians)

    def strong_convexity(self, samples: Samples) -> Array:
        return self.loss.strong_convexity(samples) + self.ridge
