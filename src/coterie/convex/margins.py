"""How surely the groups of a solution are those of the optimum.

A solution within a gap of the optimum has bitwise equal models inside its groups, but another
solution within the same gap may have other groups, where users are just about to meet or to part.
What the certificate decides follows from weak duality. For every optimum x* and the duals y of the
certificate,

    sum_e (radii_e - ||y_e||) ||(B x*)_e||  <=  gap,        mu/2 ||x - x*||^2  <=  gap    (losses
                                                            mu-strongly convex)

So members of a group that edges with slack radii_e - ||y_e|| >= s connect are within gap / s of
each other in every optimum, and models of different groups further apart than 2 sqrt(gap / mu) are
different in every optimum.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from coterie.base.labels import check_labels, labels_of, many
from coterie.base.types import Array, Flags, Ints
from coterie.convex.recovery import remaining_forces, solve_clustered
from coterie.problem.certificates import certify, feasible_flow
from coterie.problem.problem import Problem
from coterie.problem.solution import Solution
from coterie.solvers.polish import polish

# Slack, relative to the radius, below which a dual counts as on the boundary of its ball.
_STRICT = 1e-7


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupMargins:
    """For each group of a solution, what the certificate decides about it.

    Attributes
    ----------
    slack : (n_groups,) share of their radii that the edges holding a group together have left: the
        largest s such that edges with at least that share connect all members. 1 for a single user,
        0 where a group is about to part.
    spread : (n_groups,) no two members are further apart in any optimum; inf without slack.
    distance : (n_groups,) from the group's model to the nearest of another group; inf where there
        is one group.
    reach : how far the models of two groups, together, can be from their optimum.
    estimated : whether `reach` rests on the least curvature at the solution, as no bound on it is
        known everywhere.
    decided : (n_groups,) whether every optimum has this group: its members nearer to each other
        than to all others.

    Example
    -------
    >>> import coterie as ct
    >>> problem = ct.Problem(ct.Users.from_arrays([[0.0], [1.0], [9.0]]), ct.SquaredDistance(),
    ...                      lam=1.0)
    >>> ct.group_margins(ct.solve(problem)).decided.tolist()
    [True, True]
    """

    labels: Ints = field(repr=False)
    slack: Array
    spread: Array
    distance: Array
    reach: float
    estimated: bool

    @property
    def decided(self) -> Flags:
        """(n_groups,) whether every optimum has this group."""
        held = (self.slack > _STRICT) & np.isfinite(self.spread)
        return held & (self.spread + self.reach < self.distance)

    def __str__(self) -> str:
        unclear = np.flatnonzero(~self.decided)
        if not unclear.size:
            all_of = f"All {len(self.slack):,} groups are" if len(self.slack) > 1 \
                else "The one group is"
            return f"{all_of} decided by the certificate."
        users = int(np.isin(self.labels, unclear).sum())
        return (f"{unclear.size} of {many(len(self.slack), 'group')}, with {many(users, 'user')}, "
                "are not decided by the certificate: other groups are as good within the gap. "
                "Solve with a smaller tol, or at another lam.")


def group_margins(solution: Solution) -> GroupMargins:
    """What the certificate of a solution decides about its groups.

    Parameters
    ----------
    solution : from `solve`; where it keeps no duals (a point of a path), they are built again.

    Returns
    -------
    GroupMargins

    Example
    -------
    >>> import coterie as ct
    >>> users = ct.Users.from_arrays([[0.0], [0.1], [5.0]])
    >>> solution = ct.solve(ct.Problem(users, ct.SquaredDistance(), lam=0.2))
    >>> ct.group_margins(solution).decided.tolist()
    [True, True]
    """
    problem, certificate = solution.problem, solution.certificate
    duals = certificate.duals if certificate.duals is not None else solution.duals
    if duals is None:
        certificate = certify(problem, solution.models)
        duals = certificate.duals
        assert duals is not None
    slacks = problem.radii - np.linalg.norm(duals, axis=1)
    relative, absolute = _holding(solution, slacks)
    gap = certificate.gap
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = np.where(absolute > 0, gap / absolute, np.inf)
    sizes = np.bincount(solution.labels)
    mu = float(problem.loss.strong_convexity(problem.samples).min())
    estimated = not mu > 0
    if estimated:
        mu = 0.5 * max(float(np.linalg.eigvalsh(problem.hessians(solution.models))[:, 0].min()),
                       0.0)
    return GroupMargins(labels=solution.labels, slack=np.where(sizes > 1, relative, 1.0),
                        spread=np.where(sizes > 1, spread, 0.0), distance=_distances(solution),
                        reach=2.0 * float(np.sqrt(gap / mu)) if mu > 0 else np.inf,
                        estimated=estimated)


def _holding(solution: Solution, slacks: Array) -> tuple[Array, Array]:
    """(n_groups,) the least slack, relative and absolute, on the tree of edges that holds each
    group together best.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import minimum_spanning_tree

    problem, labels = solution.problem, solution.labels
    edges, radii = problem.graph.edges, problem.radii
    inside = (labels[edges[:, 0]] == labels[edges[:, 1]]) & (radii > 0)
    first, second = edges[inside].T
    share = np.clip(slacks[inside] / radii[inside], 0.0, 1.0)
    # The tree of least 2 - share has on every path the largest possible least share.
    weights = csr_array((2.0 - share, (first, second)), shape=(problem.n_users, problem.n_users))
    tree = minimum_spanning_tree(weights).tocoo()
    chosen = csr_array((np.arange(1, len(first) + 1), (first, second)), shape=weights.shape)
    at = np.empty(0, dtype=np.int64)
    if tree.nnz:
        at = np.asarray(chosen[tree.row, tree.col]).ravel().astype(np.int64) - 1
    group = labels[first[at]]
    n_groups, sizes = solution.n_clusters, np.bincount(labels)
    relative, absolute = np.full(n_groups, np.inf), np.full(n_groups, np.inf)
    np.minimum.at(relative, group, share[at])
    np.minimum.at(absolute, group, slacks[inside][at])
    # Else members are equal, but no edges join them.
    connected = np.bincount(group, minlength=n_groups) == sizes - 1
    return np.where(connected, relative, 0.0), np.where(connected, absolute, 0.0)


def _distances(solution: Solution) -> Array:
    """(n_groups,) from each group's model to the nearest other one."""
    from scipy.spatial import cKDTree

    centres = solution.models[np.unique(solution.labels, return_index=True)[1]]
    if len(centres) == 1:
        return np.array([np.inf])
    return np.asarray(cKDTree(centres).query(centres, k=2)[0][:, 1])


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """The proof that the users of a group share one model: the cheapest flow that suffices.

    Attributes
    ----------
    cluster
        The number of the group.
    rung
        "alone" (one user), "closed form", "electrical flow", "feasible flow" or "none".
    needed
        The smallest lam for which this flow is feasible; inf for "none".
    lam
        The lam of the problem.

    Example
    -------
    >>> import coterie as ct
    >>> users = ct.Users.from_arrays([[0.0], [1.0], [9.0]])
    >>> print(ct.fusion_ladder(ct.Problem(users, ct.SquaredDistance(), lam=1.0), [0, 0, 1])[0])
    group 0: one model is proved by its closed form, which needs lam >= 0.5
    """

    cluster: int
    rung: str
    needed: float
    lam: float

    def __str__(self) -> str:
        if self.rung == "none":
            return (f"group {self.cluster}: no feasible flow was found at lam = {self.lam:.4g}, so "
                    "it may split")
        return (f"group {self.cluster}: one model is proved by its {self.rung}, which needs lam >= "
                f"{self.needed:.4g}")


def fusion_ladder(problem: Problem, labels: npt.ArrayLike) -> tuple[Fusion, ...]:
    """Prove that the users of each group share one model at the clustered solution, by the cheapest
    flow that suffices.

    The users of a group share one model exactly if some flow y on its edges balances the forces
    b_i, the sum of the user's gradient and the pull of the other groups, B'y = b, with ||y_e|| <=
    lam w_e. Tried in this order:
        closed form      y_ij = (b_i - b_j) / n_k, that of Theorem 1 (complete graph with one
                         weight)
        electrical flow  y = W B L^+ b
        feasible flow    accelerated projections onto the balls, starting from the electrical flow

    Parameters
    ----------
    problem
        The problem.
    labels
        (n_users,) the groups.

    Returns
    -------
    tuple[Fusion, ...]
        One proof per group.

    Raises
    ------
    InvalidInput
        If the labels do not fit the users.

    Example
    -------
    >>> import coterie as ct
    >>> users = ct.Users.from_arrays([[0.0], [1.0], [9.0]])
    >>> [step.rung for step in ct.fusion_ladder(ct.Problem(users, ct.SquaredDistance(), lam=1.0),
    ...                                         [0, 0, 1])]
    ['closed form', 'alone']
    """
    given = check_labels(labels, problem.n_users)
    models = solve_clustered(problem, given)[given]
    clusters = labels_of(models)  # groups with the same model are one group
    # To rounding accuracy, so that the forces sum to zero.
    models = polish(problem, clusters, models)
    clusters = labels_of(models)
    proofs = _proofs(problem, clusters, models)
    first = np.unique(given, return_index=True)[1]
    return tuple(Fusion(cluster=k, rung=proofs[clusters[user]][0], needed=proofs[clusters[user]][1],
                        lam=problem.lam) for k, user in enumerate(first))


def _proofs(problem: Problem, clusters: Ints, models: Array) -> list[tuple[str, float]]:
    """The rung of each group, and the lam that it needs."""
    inside, forces = remaining_forces(problem, clusters, models, problem.gradients(models))
    ratios = np.linalg.norm(inside.flow(forces), axis=1) / inside.weights
    owner = clusters[inside.edges[:, 0]]
    parts = np.unique(np.stack([clusters, inside.components], axis=1), axis=0)[:, 0]
    closed = "closed form" if problem.graph.is_complete else "electrical flow"
    residuals: Array | None = None
    proofs: list[tuple[str, float]] = []
    for k in range(int(clusters.max()) + 1):
        members = clusters == k
        if members.sum() == 1:
            proofs.append(("alone", 0.0))
        elif (parts == k).sum() > 1:  # its edges do not connect it
            proofs.append(("none", np.inf))
        elif (needed := float(ratios[owner == k].max())) <= problem.lam:
            proofs.append((closed, needed))
        else:
            if residuals is None:
                flow = feasible_flow(inside, forces, problem.lam * inside.weights, max_iter=5000)
                residuals = np.abs(forces - inside.divergence(flow))
            held = float(residuals[members].max()) <= 1e-7 * float(np.abs(forces).max())
            proofs.append(("feasible flow", problem.lam) if held else ("none", np.inf))
    return proofs
