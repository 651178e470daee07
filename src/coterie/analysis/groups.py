"""Find the groups among the users and their number, without tuning.

    groups = find_groups(users)       # groups.labels, groups.n_clusters, groups.models

1. Every user fits a local model, with a ridge on all coordinates, so that it exists also for users with few samples or
   one class.
2. The path over lam on the graph of nearest users by Wald distance proposes partitions: its groups, the cuts of its
   merge tree, and one group for all. If a partition has too many groups, the largest are kept, and the a users of the
   others are assigned to the most likely of them: if many users have few samples, complete groups appear only this way.
3. Each partition is improved by merging groups and moving users while this criterion, a description length, decreases.
   The partition with the smallest value is the result.

       - sum_i L_i + K d/2 log(n_eff) + sum_k n_k log(N / n_k) + moves log(N max(K - 1, 1))

   for N users, K groups of n_k users, and models of d coordinates. L_i = -m_i f_i(model of i's group) / s, without
   ridge, is the log-likelihood of user i with m_i samples. The other terms are the lengths of a description of the
   models (the Bayesian information criterion), of the labels, and of every user moved from its group on the path.
   Assigning a users in step 2 adds log(N choose a).

n_eff is the number of samples; for two classes it is sum_j 4 p_j (1 - p_j) with one model for all, because samples
carry little information on a rare class. s is 1, except for losses of real numbers (squared, Huber, distances of
points): there it is the variance around the local models, from users with more numbers than coordinates, and 1 if there
are none (points with one sample each: scale them so that the spread within a group is 1). The squared hinge is used as
if it were a log-likelihood.

A user sends its local model, the Hessian at it, its moments, and the values and two derivatives of its loss at models
that it receives, so a federation can do the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import lgamma

import numpy as np

from coterie._typing import Array, Indices, Ints
from coterie.analysis.path import Path, solve_path
from coterie.data.scaling import Standardizer
from coterie.data.users import Participants, Users
from coterie.errors import InvalidInput, interruptible
from coterie.graph import Graph
from coterie.graph.weights import LocalModels, adaptive_graph
from coterie.labels import check_labels
from coterie.losses import AffineLoss, Evaluation, Loss, Samples
from coterie.losses.grouped import Grouped
from coterie.losses.linear import Huber, Logistic, Squared, SquaredHinge
from coterie.losses.newton import minimise
from coterie.losses.points import HuberDistance, SquaredDistance
from coterie.problem import Problem
from coterie.solution import Solution

_SMALLEST = 1e-3  # weight; with smaller ones, a distant group would extend the path over hundreds of decades
_ROUNDS = 20  # largest number of rounds of merging and moving
_STEP = 1.5  # ratio of two neighbouring lams of the search
_PLATEAU = 4  # the search ends after this number of lams with the same groups


@dataclass(frozen=True, kw_only=True, eq=False)
class Groups:
    """The groups of `find_groups`, and the search that found them.

    Attributes
    ----------
    labels
        (n_users,) the group of each user, from 0 in order of first appearance.
    models
        (n_users, dim) the best model of each user's group, for the given loss and features.
    criterion
        The description length of `labels`, the smallest of `candidates`.
    candidates
        (number of groups, criterion) of all partitions examined.
    lam
        The point of the path that the labels come from; None for a cut of the tree and for one group.
    graph
        The graph of the search.
    path
        The path of the search, with standardised features and a stronger ridge.

    Example
    -------
    >>> import coterie as ct
    >>> from coterie.datasets import clustered
    >>> groups = ct.find_groups(clustered("squared", n_users=12, n_clusters=3).users)
    >>> groups.n_clusters, groups.labels.tolist()
    (3, [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2])
    """

    labels: Ints
    models: Array = field(repr=False)
    criterion: float
    candidates: tuple[tuple[int, float], ...] = field(repr=False)
    lam: float | None
    graph: Graph = field(repr=False)
    path: Path = field(repr=False)

    @property
    def n_clusters(self) -> int:
        """The number of groups."""
        return int(self.labels.max()) + 1

    def __str__(self) -> str:
        if self.n_clusters == 1:
            return f"All {len(self.labels)} user(s) are one group: none of {len(self.candidates)} partitions is better."
        sizes = ", ".join(map(str, np.bincount(self.labels)))
        one = min(value for count, value in self.candidates if count == 1)
        return f"{self.n_clusters} groups of {sizes} users describe the data better than one group: description " \
               f"length {self.criterion:.6g} instead of {one:.6g}."


@interruptible()
def find_groups(users: Users, loss: Loss | None = None, *, max_groups: int = 8, n_lams: int = 60, k: int = 5,
                weight_ridge: float = 0.1, progress: Callable[[Solution, int], None] | None = None) -> Groups:
    """Find the groups among the users, and one model per group.

    The result is deterministic. For losses with <w, a> + b the search uses features standardised by the pooled moments
    of the users (only scaled if there is no intercept), so their units do not matter. The models are for the given
    features: they minimise the sum of the losses of a group's users, as in `refit`.

    Parameters
    ----------
    users
        The users.
    loss
        The loss; None: logistic for targets -1 and +1, squared for other targets, squared distance without targets.
    max_groups
        Largest number of groups to consider.
    n_lams
        Largest number of points of the path.
    k
        Number of nearest users that each user is compared with.
    weight_ridge
        L2 strength, intercept included, of the local models for the graph, and of the path.
    progress
        Called after each lam of the search with its solution and the largest number of lams.

    Returns
    -------
    Groups
        The groups and their models.

    Raises
    ------
    InvalidInput
        If there are no users, or an argument is not valid.

    Example
    -------
    >>> import coterie as ct
    >>> ct.find_groups(ct.Users.from_arrays([[0.0], [0.1], [9.0], [9.2]]), ct.SquaredDistance()).labels.tolist()
    [0, 0, 1, 1]
    """
    loss = _checked_loss(users, loss, max_groups=(max_groups, 1), n_lams=(n_lams, 2), k=(k, 1))
    if not (isinstance(weight_ridge, (int, float)) and 0 < weight_ridge < np.inf):
        raise InvalidInput(f"weight_ridge must be a finite number > 0, got {weight_ridge!r}",
                           remedy="Omit it to use the default")
    given = loss.prepare(users)
    scaled = _scaled(users, loss)
    with np.errstate(over="ignore"):  # a distance much larger than the median has weight 0
        local = LocalModels.of(scaled, loss, weight_ridge)
        graph = adaptive_graph(local, "wald", min(k, max(users.n_users - 1, 1)))
    graph = Graph.from_edges(users.n_users, graph.edges, np.maximum(graph.weights, _SMALLEST))
    path = _search_path(Problem(scaled, _Ridged(loss, weight_ridge), 0.0, graph), local, max_groups, n_lams, progress)
    criterion, labels, lam, candidates = _best_partition(path, _Judge(scaled, loss), max_groups)
    grouped = Grouped(loss=loss, samples=given, labels=labels)
    models = grouped.local(grouped.prepare(grouped.groups)).points[labels]
    return Groups(labels=labels, models=models, criterion=criterion, candidates=candidates, lam=lam, graph=graph,
                  path=path)


def _checked_loss(users: Users, loss: Loss | None, **numbers: tuple[int, int]) -> Loss:
    """Check the users and the numbers, each given with its minimum; returns the loss to use."""
    if not isinstance(users, Users):
        raise InvalidInput(f"expected Users, got {type(users).__name__}",
                           remedy="Build them with Users.from_arrays(X, y, user)")
    for name, (number, minimum) in numbers.items():
        if isinstance(number, bool) or not isinstance(number, (int, np.integer)) or number < minimum:
            raise InvalidInput(f"{name} must be a whole number >= {minimum}, got {number!r}",
                               remedy="Omit it to use the default")
    if users.n_users == 0:
        raise InvalidInput("there are no users to group", remedy="Give at least one")
    if loss is None:
        y = users.targets
        return SquaredDistance() if y is None else Logistic() if (np.abs(y) == 1.0).all() else Squared()
    if not isinstance(loss, Loss):
        raise InvalidInput(f"expected a loss such as Logistic(), got {loss!r}", remedy="Create it by calling its class")
    return loss


def _best_partition(path: Path, judge: _Judge, max_groups: int) -> tuple[
        float, Ints, float | None, tuple[tuple[int, float], ...]]:
    """The smallest criterion, its labels and lam, and all candidates."""
    candidates: list[tuple[int, float]] = []
    best: tuple[float, Ints, float | None] | None = None
    for labels, lam in _proposals(path, max_groups):
        labels, cost = judge.absorb(labels, max_groups)
        value, polished = judge.polish(labels)
        candidates += [(int(labels.max()) + 1, judge.criterion(labels) + cost), (int(polished.max()) + 1, value + cost)]
        if best is None or value + cost < best[0]:
            best = value + cost, polished, lam
    assert best is not None
    return *best, tuple(dict.fromkeys(candidates))


def _scaled(users: Users, loss: Loss) -> Users:
    if not isinstance(loss, AffineLoss):
        return users
    scaler = Standardizer.from_moments(users.moments(), feature_names=users.feature_names)
    return (scaler if loss.intercept else replace(scaler, mean=np.zeros_like(scaler.mean))).transform(users)


def _search_path(problem: Problem, local: LocalModels, max_groups: int, n_lams: int,
                 progress: Callable[[Solution, int], None] | None) -> Path:
    """The path for increasing lam, from the first merges until a small number of groups does not change."""
    def settled(solutions: list[Solution]) -> bool:
        last = solutions[-_PLATEAU:]
        few = last[-1].n_clusters <= max_groups and len(last) == _PLATEAU
        return last[-1].n_clusters == parts or (few and all(np.array_equal(s.labels, last[0].labels) for s in last))

    parts = int(problem.graph.components.max()) + 1
    lowest = first_merges(local, problem.graph)
    lams = lowest * _STEP ** np.arange(n_lams) if lowest > 0 else [0.0]
    return solve_path(problem, lams, tol=1e-5, enough=settled, progress=progress)


def first_merges(local: LocalModels, graph: Graph) -> float:
    """A lam at which very few users have merged; 0 if all local models are equal.

    Two users with an edge and no other users merge at lam w_ij = ||(H_i^-1 + H_j^-1)^-1 (x_i - x_j)||.
    """
    edges = slice(None, None, max(1, graph.n_edges // 10_000))  # a sample of the edges is enough
    i, j = graph.edges[edges].T
    inverse = np.linalg.inv(local.hessians)
    force = np.linalg.solve(inverse[i] + inverse[j], (local.models[i] - local.models[j])[..., None])
    merge = np.linalg.norm(force, axis=(1, 2)) / np.maximum(graph.weights[edges], 1e-300)
    merge = merge[np.isfinite(merge) & (merge > 0)]
    return 0.3 * float(np.quantile(merge, 0.05)) if merge.size else 0.0


def _proposals(path: Path, max_groups: int) -> list[tuple[Ints, float | None]]:
    """One group for all, the groups of the path, and the cuts of its merge tree, without duplicates."""
    from scipy.cluster.hierarchy import fcluster

    n = path.problem.n_users
    proposals: dict[bytes, tuple[Ints, float | None]] = {}

    def add(labels: Ints, lam: float | None) -> None:
        labels = check_labels(labels, n)
        proposals.setdefault(labels.tobytes(), (labels, lam))

    add(np.zeros(n, dtype=np.int64), None)
    for solution in path.solutions:
        add(solution.labels, solution.lam)
    for count in range(2, min(max_groups, n) + 1):
        add(fcluster(path.linkage, count, "maxclust"), None)
    return list(proposals.values())


class _Judge:
    """The criterion and its minimisation. The fit of a group depends on its users only and is computed once."""

    def __init__(self, users: Users, loss: Loss) -> None:
        self.loss, self.samples = loss, loss.prepare(users)
        self.bare = replace(loss, ridge=0.0) if isinstance(loss, AffineLoss) else loss
        self.counts = users.counts.astype(float)
        self.n, self.dim = users.n_users, self.samples.dim
        self.fits: dict[bytes, tuple[Array, Array]] = {}
        self.scale = self._scale()
        pooled = self.fit(np.arange(self.n))[0]
        n_eff = float(users.n_samples)
        if isinstance(loss, (Logistic, SquaredHinge)):
            t = loss.decision(users.features, np.broadcast_to(pooled, (users.n_samples, self.dim)))
            p = 0.5 + 0.5 * np.tanh(t / 2) if isinstance(loss, Logistic) else np.clip((1 + t) / 2, 0, 1)
            n_eff = float((4 * p * (1 - p)).sum())
        self.model_cost = 0.5 * self.dim * float(np.log(max(n_eff, np.e)))

    def _scale(self) -> float:
        if not isinstance(self.loss, (Squared, Huber, SquaredDistance, HuberDistance)):
            return 1.0
        numbers = self.counts * (self.dim if isinstance(self.loss, (SquaredDistance, HuberDistance)) else 1)
        freedom = np.maximum(numbers - self.dim, 0.0)
        own = self.bare.values(self.samples, self.bare.prox(self.samples, None, 1e-6, None).points)
        zero = self.bare.values(self.samples, np.zeros((self.n, self.dim)))
        if not freedom.any() or not zero.any():
            return 1.0
        variance = float((2 * self.counts * own)[freedom > 0].sum() / freedom.sum())
        return max(variance, 1e-12 * float((2 * self.counts * zero).sum() / numbers.sum()))  # positive without noise

    def fit(self, members: Ints) -> tuple[Array, Array]:
        """The best model of a group, with all samples weighted equally, and the log-likelihood of every user for it."""
        key, weights = members.tobytes(), self.counts[members] / self.scale

        def evaluate(_: Ints, x: Array, order: int) -> tuple[Array, Array, Array]:
            parts = self.loss.evaluate(self.samples, np.repeat(x, len(members), axis=0), order, members)
            f, g, h = (np.tensordot(weights, part, 1)[None] if r <= order else part for r, part in enumerate(parts))
            return f, g, h

        if key not in self.fits:
            with np.errstate(over="ignore", invalid="ignore"):  # trial points, and models of very different users
                model = minimise(evaluate, np.zeros((1, self.dim))).points
                values = self.bare.values(self.samples, np.repeat(model, self.n, axis=0))
            self.fits[key] = model[0], -self.counts / self.scale * np.where(np.isnan(values), np.inf, values)
        return self.fits[key]

    def groups(self, labels: Ints) -> list[Ints]:
        """The users of each group."""
        return [np.flatnonzero(labels == c) for c in range(int(labels.max()) + 1)]

    def move_cost(self, n_groups: int) -> float:
        """The cost of one moved user."""
        return float(np.log(self.n * max(n_groups - 1, 1)))

    def part(self, members: Ints) -> float:
        """The contribution of one group to the criterion."""
        size = len(members)
        return float(size * np.log(self.n / size) - self.fit(members)[1][members].sum()) + self.model_cost

    def criterion(self, labels: Ints, moves: int = 0) -> float:
        """The description length of a partition after this number of moves."""
        parts = self.groups(labels)
        return sum(self.part(members) for members in parts) + moves * self.move_cost(len(parts))

    def absorb(self, labels: Ints, max_groups: int) -> tuple[Ints, float]:
        """Keep the largest groups and assign all other users to the most likely of them; returns also the cost."""
        sizes = np.bincount(labels)
        if len(sizes) <= max_groups:
            return labels, 0.0
        kept = [c for c in np.argsort(-sizes, kind="stable")[:max_groups] if sizes[c] > 1] or [0]
        likelihoods = np.stack([self.fit(np.flatnonzero(labels == c))[1] for c in kept], axis=1)
        for column, c in enumerate(kept):
            likelihoods[labels == c, column] = np.inf
        assigned = self.n - int(sizes[kept].sum())
        cost = lgamma(self.n + 1) - lgamma(assigned + 1) - lgamma(self.n - assigned + 1)  # log(n choose assigned)
        return check_labels(likelihoods.argmax(axis=1), self.n), cost

    def polish(self, labels: Ints) -> tuple[float, Ints]:
        """Merge groups and move users while the criterion decreases."""
        moved: set[int] = set()
        for _ in range(_ROUNDS):
            before, labels = labels, self._merge(labels)
            parts = self.groups(labels)
            likelihoods = np.stack([self.fit(members)[1] for members in parts], axis=1)
            gains = likelihoods.max(axis=1) - likelihoods[np.arange(self.n), labels]
            moving = np.flatnonzero(gains > self.move_cost(len(parts)))
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
        """Merge two groups at a time, the pair that decreases the criterion most."""
        while labels.any():
            parts = self.groups(labels)
            cost = [self.part(members) for members in parts]
            change, a, b = min((self.part(np.union1d(parts[a], parts[b])) - cost[a] - cost[b], a, b)
                               for a, b in combinations(range(len(parts)), 2))
            if change >= 0:
                break
            labels = check_labels(np.where(labels == b, a, labels), self.n)
        return labels


@dataclass(frozen=True, eq=False)
class _Ridged(Loss):
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

    def evaluate(self, samples: Samples, models: Array, order: int = 2, users: Indices | None = None) -> Evaluation:
        values, gradients, hessians = self.loss.evaluate(samples, models, order, users)
        return Evaluation(values + 0.5 * self.ridge * (models**2).sum(axis=1),
                          gradients + self.ridge * models if order > 0 else gradients,
                          hessians + self.ridge * np.eye(samples.dim) if order > 1 else hessians)

    def strong_convexity(self, samples: Samples) -> Array:
        return self.loss.strong_convexity(samples) + self.ridge
