"""Why a cluster stays together: the cheapest flow on its own edges that proves it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coterie.base.labels import check_labels, labels_of
from coterie.base.types import Array, Ints
from coterie.convex.recovery import clustered, unbalanced
from coterie.problem.certificates import feasible_flow
from coterie.problem.problem import Problem
from coterie.solvers.polish import polish


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
    models = clustered(problem, given)[given]
    clusters = labels_of(models)  # groups with the same model are one group
    # To rounding accuracy, so that the forces sum to zero.
    models = polish(problem, clusters, models)
    clusters = labels_of(models)
    proofs = _proofs(problem, clusters, models)
    first = np.unique(given, return_index=True)[1]
    return tuple(Fusion(cluster=k, rung=proofs[clusters[user]][0], needed=proofs[clusters[user]][1],
                        lam=problem.lam)
                 for k, user in enumerate(first))


def _proofs(problem: Problem, clusters: Ints, models: Array) -> list[tuple[str, float]]:
    """The rung of each group, and the lam that it needs."""
    inside, forces = unbalanced(problem, clusters, models, problem.gradients(models))
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
