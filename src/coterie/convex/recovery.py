"""The range of lam in which groups are provably recovered: the paper's Theorems 1 to 4 as numbers.

In the convention of (C). For a partition C_1..C_K with n_k = |C_k|, W_kl the sum of w_ij over i in
C_k, j in C_l, and w* the solution of (C) with one model per group (the clustered problem, the
paper's Eq. (5)):

    Theorem 1   lam >= lower  =>  the users of each group share w*_k
    Theorem 2   lam <  upper  =>  the w*_k are pairwise distinct
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from coterie.base.errors import InvalidInput, NotConverged, interruptible
from coterie.base.labels import check_labels, group_means
from coterie.base.types import Array, Ints
from coterie.losses.derived import Grouped
from coterie.problem.graph import Graph
from coterie.problem.problem import Problem
from coterie.solvers import solve_quietly

KINDS = ("solution", "stringent", "uniform")
_SOLVED = 1e-8  # relative gap of the clustered problem up to which its gradients are trusted


@dataclass(frozen=True, kw_only=True)
class RecoveryBounds:
    """The range of lam, from `lower` to `upper`, in which the paper's theorems prove given groups.

    Attributes
    ----------
    kind
        "solution", "stringent" or "uniform"; see `recovery_bounds`.
    lam
        The lam of the problem.
    lower
        The lower bound (Theorem 1); inf if there is no finite bound.
    upper
        The upper bound (Theorem 2); 0 if there is no positive bound.
    lower_users
        The two users of one group that determine the lower bound.
    upper_clusters
        The two groups that determine the upper bound.
    exact
        Whether maximum and minimum were computed; otherwise they were estimated on the safe side.
    note
        A remark on the bounds.
    models
        (n_clusters, dim) w*, for kind "solution".
    within, across
        Theorem 4, for kind "uniform": local optima of one group are at most max_k eps_k / mu apart,
        those of two groups at least min_kl delta_kl / L.

    Example
    -------
    >>> import coterie as ct
    >>> users = ct.Users.from_arrays([[0.0], [1.0], [9.0], [10.0]])
    >>> bounds = ct.recovery_bounds(ct.Problem(users, ct.SquaredDistance(), lam=1.0), [0, 0, 1, 1])
    >>> bounds.lower, bounds.upper, bounds.holds
    (0.5, 2.25, True)
    """

    kind: str
    lam: float
    lower: float
    upper: float
    lower_users: tuple[int, int] | None
    upper_clusters: tuple[int, int] | None
    exact: bool
    note: str = ""
    models: Array | None = field(default=None, repr=False, compare=False)
    within: float = np.inf
    across: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether lam is between the bounds, so that the groups are recovered with distinct models.
        """
        return self.lower <= self.lam < self.upper

    @property
    def sentence(self) -> str:
        """The result as a sentence."""
        window = f"[{self.lower:.4g}, {self.upper:.4g})"
        if self.holds:
            text = (f"lam = {self.lam:.4g} is in {window}: these groups are provably recovered, "
                    "with different models.")
        elif self.lower > self.upper:
            text = (f"The range {window} is empty, so the bounds prove nothing about these groups; "
                    "they can still be right.")
        else:
            side = "below" if self.lam < self.lower else "above"
            text = f"lam = {self.lam:.4g} is {side} {window}, so the bounds prove nothing."
        return f"{text} {self.note}".strip()


@interruptible()
def recovery_bounds(problem: Problem, labels: npt.ArrayLike,
                    kind: str = "solution") -> RecoveryBounds:
    """Compute the range of lam in which `labels` are provably the groups of the solution.

    Parameters
    ----------
    problem
        The problem.
    labels
        (n_users,) the groups.
    kind
        "solution": Theorems 1 and 2 at the clustered solution for the lam of the problem; on a
        graph that is not complete, the closed-form flow of Theorem 1 is replaced by the electrical
        flow inside the groups. "stringent": the same for all lams at once, over the set W of the
        paper's Appendix A, which is enclosed by balls (strong convexity) and Lipschitz constants.
        "uniform": Theorem 3, over all models, if the loss allows it.

    Returns
    -------
    RecoveryBounds
        The bounds, and the users and groups that determine them.

    Raises
    ------
    InvalidInput
        If the kind is unknown, the labels do not fit the users, or the graph does not fit the kind.

    Example
    -------
    >>> import coterie as ct
    >>> users = ct.Users.from_arrays([[0.0], [1.0], [9.0], [10.0]])
    >>> print(ct.recovery_bounds(ct.Problem(users, ct.SquaredDistance(), lam=1.0),
    ...                          [0, 0, 1, 1]).sentence)
    lam = 1 is in [0.5, 2.25): these groups are provably recovered, with different models.
    """
    if kind not in KINDS:
        raise InvalidInput(f"unknown kind {kind!r}", remedy=f"Choose one of: {', '.join(KINDS)}")
    clusters = check_labels(labels, problem.n_users)
    if kind == "solution":
        return _at_solution(problem, clusters)
    if not problem.graph.is_complete:
        raise InvalidInput("the bounds for all lams need all pairs with one weight",
                           remedy="Use kind='solution'")
    return _stringent(problem, clusters) if kind == "stringent" else _uniform(problem, clusters)


def solve_clustered(problem: Problem, labels: Ints) -> Array:
    """(n_clusters, dim) the solution of (C) with one model per group.

    Raises
    ------
    NotConverged : where it is not certified within 1e-8.
    """
    k = int(labels.max()) + 1
    loss = Grouped(loss=problem.loss, samples=problem.samples, labels=labels)
    first, second, weights = _pairs_between(problem.graph, labels)
    pairs = np.stack([first, second], axis=1)
    graph = Graph.from_edges(k, pairs, weights) if k > 1 else Graph.complete(1)
    solution = solve_quietly(Problem(loss.groups, loss, lam=problem.lam, graph=graph), tol=1e-12)
    if not solution.gap <= _SOLVED:
        raise NotConverged("The problem with one model per group was solved within "
                           f"{solution.gap:.1e} only, and nothing can be concluded from that. "
                           "Scale the features, or add a ridge.")
    return solution.models


def _pairs_between(graph: Graph, labels: Ints) -> tuple[Ints, Ints, Array]:
    """The pairs of groups with an edge between them, and W_kl."""
    k = int(labels.max()) + 1
    if graph.is_complete:
        first, second = np.triu_indices(k, 1)
        counts, weight = np.bincount(labels).astype(float), graph.weights[:1].sum()
        return first, second, counts[first] * counts[second] * weight
    ends = np.sort(labels[graph.edges], axis=1)
    across = ends[:, 0] < ends[:, 1]
    keys, index = np.unique(ends[across, 0] * k + ends[across, 1], return_inverse=True)
    return keys // k, keys % k, np.bincount(index, graph.weights[across]).astype(float, copy=False)


def _denominator(graph: Graph, labels: Ints) -> float:
    """2 max_k sum_{l != k} W_kl / n_k, which is 2 max_k sum_{l != k} n_l on the complete graph with
    weight 1.
    """
    first, second, weights = _pairs_between(graph, labels)
    counts = np.bincount(labels)
    pulls = np.bincount(first, weights=weights, minlength=counts.size)
    pulls += np.bincount(second, weights=weights, minlength=counts.size)
    return 2.0 * float((pulls / counts).max())


def _means(problem: Problem, labels: Ints, at: Array) -> Array:
    """(n_clusters, dim) grad g_k at the k-th row of `at`, with g_k the mean of the losses of group
    k.
    """
    return group_means(problem.gradients(at[labels]), labels)


def _farthest(gradients: Array, labels: Ints, extra: Array) -> tuple[float, tuple[int, int] | None]:
    """max_k max_{i,j in C_k} (||gradients_i - gradients_j|| + max(extra_i, extra_j)) / n_k, and the
    pair.
    """
    most, pair = 0.0, None
    for k in range(int(labels.max()) + 1):
        members = np.flatnonzero(labels == k)
        for start in range(0, members.size, 512):  # in chunks, to limit the memory
            rows = members[start:start + 512]
            gaps = np.linalg.norm(gradients[rows, None] - gradients[members], axis=2)
            gaps = gaps + np.maximum(extra[rows, None], extra[members]) * (rows[:, None] != members)
            i, j = np.unravel_index(gaps.argmax(), gaps.shape)
            if gaps[i, j] / members.size > most:
                most, pair = float(gaps[i, j]) / members.size, (int(rows[i]), int(members[j]))
    return most, pair


def _closest(problem: Problem, labels: Ints, at: Array,
             slack: Array) -> tuple[float, tuple[int, int] | None]:
    """min_{k != l} max(0, ||grad g_k(at_k) - grad g_l(at_k)|| - slack_k), and the pair of groups.
    """
    least, pair = np.inf, None
    for a in range(len(at) if len(at) > 1 else 0):
        means = _means(problem, labels, np.broadcast_to(at[a], at.shape))
        gaps = np.linalg.norm(means - means[a], axis=1) - slack[a]
        gaps[a] = np.inf
        b = int(gaps.argmin())
        if gaps[b] < least:
            least, pair = max(float(gaps[b]), 0.0), (a, b)
    return least, pair


def _unproved(problem: Problem, kind: str, reason: object) -> RecoveryBounds:
    """Bounds that prove nothing."""
    return RecoveryBounds(kind=kind, lam=problem.lam, lower=np.inf, upper=0.0, lower_users=None,
                          upper_clusters=None, exact=False, note=f"Not available: {reason}")


def _per_weight(graph: Graph, lower: float, zero: float = np.inf) -> float:
    """A bound on forces as one on lam, for all pairs with one weight; `zero` where that is 0."""
    weight = float(graph.weights[0]) if graph.n_edges else 1.0
    return lower / weight if weight > 0 else zero


def _per_pull(graph: Graph, labels: Ints, upper: float) -> float:
    """A bound on differences of gradients as one on lam."""
    size = _denominator(graph, labels)
    return upper / size if size > 0 else np.inf


def _at_solution(problem: Problem, labels: Ints) -> RecoveryBounds:
    try:
        w = solve_clustered(problem, labels)
    except NotConverged as reason:
        return _unproved(problem, "solution", reason)
    gradients, graph = problem.gradients(w[labels]), problem.graph
    note = ""
    if graph.is_complete:
        lower, pair = _farthest(gradients, labels, np.zeros(problem.n_users))
        lower = _per_weight(graph, lower, zero=np.inf if lower > 0 else 0.0)
    else:
        lower, pair = _electrical(problem, labels, w, gradients)
        note = "The lower bound is that of the electrical flow inside the groups."
    upper, clusters = _closest(problem, labels, w, np.zeros(len(w)))
    return RecoveryBounds(kind="solution", lam=problem.lam,
                          lower=lower, upper=_per_pull(graph, labels, upper), lower_users=pair,
                          upper_clusters=clusters, exact=True, note=note, models=w)


def remaining_forces(problem: Problem, labels: Ints, models: Array,
                     gradients: Array) -> tuple[Graph, Array]:
    """The edges inside the groups, and the forces that their flows must balance: the gradients plus
    the pull of the other groups.
    """
    graph = problem.graph
    together = labels[graph.edges[:, 0]] == labels[graph.edges[:, 1]]
    differences = graph.differences(models)
    lengths = np.linalg.norm(differences, axis=1, keepdims=True)
    units = np.divide(differences, lengths, out=np.zeros_like(differences), where=lengths > 0)
    return (graph.subgraph(together & (graph.weights > 0)),
            -gradients - graph.divergence(problem.radii[:, None] * units))


def _electrical(problem: Problem, labels: Ints, w: Array,
                gradients: Array) -> tuple[float, tuple[int, int] | None]:
    """The largest ||y_e|| / w_e of the electrical flow inside the groups."""
    inside, forces = remaining_forces(problem, labels, w[labels], gradients)
    # a group that its edges do not connect cannot be held together.
    if len(np.unique(inside.components)) > len(w):
        return np.inf, None
    flow = np.linalg.norm(inside.flow(forces), axis=1) / inside.weights
    if not flow.size:
        return 0.0, None
    first, second = inside.edges[flow.argmax()].tolist()
    return float(flow.max()), (first, second)


def _stringent(problem: Problem, labels: Ints) -> RecoveryBounds:
    """Theorems 1 and 2 over W = {w : sum_k n_k g_k(w_k) <= F*}, with F* the pooled optimum.

    With m_k = min n_k g_k attained at v_k, and n_k g_k mu_k-strongly convex,
    n_k g_k(w_k) <= F* - sum_{l != k} m_l gives ||w_k - v_k||^2 <= 2 (F* - sum m) / mu_k.
    """
    # 1. The best models of all groups and of all users together.
    loss = Grouped(loss=problem.loss, samples=problem.samples, labels=labels)
    samples = loss.prepare(loss.groups)
    own = loss.local(samples)
    one = Grouped(loss=problem.loss, samples=problem.samples,
                  labels=np.zeros(problem.n_users, dtype=np.int64))
    pooled = one.local(one.prepare(one.groups))
    # 2. Balls around them that hold W.
    strong = loss.strong_convexity(samples)
    room = 2.0 * max(float(pooled.values[0] - own.values.sum()), 0.0)
    radius = np.sqrt(np.divide(room, strong, out=np.full(strong.size, np.inf), where=strong > 0))
    steep = _steepness(problem)
    if not (np.isfinite(radius).all() and own.converged.all() and np.isfinite(steep).all()):
        return _unproved(problem, "stringent", "it needs strongly convex losses with Lipschitz "
                         "gradients (a ridge, and no unpenalised intercept).")
    # 3. The largest difference of gradients inside a group, the smallest distance between groups.
    lower, pair = _farthest(problem.gradients(own.points[labels]), labels, steep * radius[labels])
    by_cluster = np.zeros(len(radius))
    np.maximum.at(by_cluster, labels, steep)
    upper, clusters = _closest(problem, labels, own.points, radius * by_cluster.max())
    return RecoveryBounds(
        kind="stringent", lam=problem.lam, lower=_per_weight(problem.graph, lower),
        upper=_per_pull(problem.graph, labels, upper), lower_users=pair, upper_clusters=clusters,
        exact=False, note="For all lams at once; estimated with enclosing balls.")


def _steepness(problem: Problem) -> Array:
    """(n_users,) numbers s_i such that max(s_i, s_j) bounds the norm of the difference of two
    Hessians, at any models.

    The difference of two matrices between 0 and L_i, and 0 and L_j, has norm at most max(L_i, L_j);
    for quadratic losses the difference is known.
    """
    if not problem.loss.quadratic:
        return problem.loss.lipschitz(problem.samples)
    hessians = problem.hessians(np.zeros((problem.n_users, problem.dim)))
    return 2.0 * np.linalg.norm(hessians - hessians.mean(axis=0), 2, axis=(1, 2))


def _uniform(problem: Problem, labels: Ints) -> RecoveryBounds:
    """Theorem 3: lam in [max_k eps_k / n_k, min (delta_kl - eps_k - eps_l) / (2 max_k sum_{l != k}
    n_l)).

    eps_k = sup_x ||grad f_i - grad f_j|| inside a group, delta_kl = inf_x ... between two groups.
    For quadratic losses with one common Hessian the difference of two gradients is a constant, so
    both are its norm. For other losses eps is infinite (quadratics with different Hessians, squared
    hinge, Poisson) or delta is zero (bounded gradients), and the theorem gives no bound.
    """
    hessians = problem.hessians(np.zeros((problem.n_users, problem.dim)))
    common = np.abs(hessians - hessians[0]).max() <= 1e-12 * np.abs(hessians).max()
    if not (problem.loss.quadratic and common):
        return _unproved(problem, "uniform", "it needs quadratic losses with one common Hessian, "
                         "such as SquaredDistance.")
    gradients = problem.gradients(np.zeros((problem.n_users, problem.dim)))
    lower, pair = _farthest(gradients, labels, np.zeros(problem.n_users))
    spread, delta = spreads(gradients, labels)
    several = len(spread) > 1
    least, most = np.linalg.eigvalsh(hessians[0])[[0, -1]]  # mu and L
    margins = delta - spread[:, None] - spread
    np.fill_diagonal(margins, np.inf)
    a, b = np.unravel_index(margins.argmin(), margins.shape)
    return RecoveryBounds(kind="uniform", lam=problem.lam, lower=_per_weight(problem.graph, lower),
                          upper=_per_pull(problem.graph, labels, max(float(margins[a, b]), 0.0)),
                          lower_users=pair, upper_clusters=(int(a), int(b)) if several else None,
                          exact=True, note="For all lams and all models.",
                          within=float(spread.max() / max(least, 1e-300)),
                          across=float(delta.min() / most) if several else 0.0)


def spreads(gradients: Array, labels: Ints) -> tuple[Array, Array]:
    """eps_k = max ||g_i - g_j|| inside each group, and delta_kl = min ||g_i - g_j|| between two
    groups.
    """
    k = int(labels.max()) + 1
    eps, delta = np.zeros(k), np.full((k, k), np.inf)
    for a in range(k):
        mine = gradients[labels == a]
        for b in range(a, k):
            other = gradients[labels == b]
            for start in range(0, len(mine), 512):
                gaps = np.linalg.norm(mine[start:start + 512, None] - other, axis=2)
                if a == b:
                    eps[a] = max(eps[a], float(gaps.max()))
                else:
                    delta[a, b] = delta[b, a] = min(delta[a, b], float(gaps.min()))
    return eps, delta
