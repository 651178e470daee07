"""Why two users share a model or not: the force between them, and its limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.base.errors import Incompatible, InvalidInput
from coterie.base.types import Array, Ints
from coterie.problem.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why two users share a model or not.

    Attributes
    ----------
    users
        The names of the two users.
    together
        Whether they share a model.
    distance
        The distance of their models.
    force
        ||y_ij||, the norm of the dual of the pair.
    limit
        lam w_ij, the largest possible force; 0 without an edge.
    shared_with
        Number of users with the model of the first user.

    Example
    -------
    >>> import coterie as ct
    >>> users = ct.Users.from_arrays([[0.0], [1.0], [9.0]], user=["ann", "bob", "eve"])
    >>> held = ct.solve(ct.Problem(users, ct.SquaredDistance(), lam=1.0)).explain("ann", "bob")
    >>> held.together, held.limit, held.slack > 0
    (True, 1.0, True)
    """

    users: tuple[object, object]
    together: bool
    distance: float
    force: float
    limit: float
    shared_with: int

    @property
    def slack(self) -> float:
        """limit - force: positive between users who share a model, 0 at the largest possible force.
        """
        return self.limit - self.force

    def __str__(self) -> str:
        first, second = map(repr, self.users)
        if self.together and self.limit > 0:
            return (f"{first} and {second} are in one group of {self.shared_with} users: the force "
                    "between them is "
                    f"{self.force:.3g}, of at most {self.limit:.3g}.")
        if self.together:
            return (f"{first} and {second} are in one group of {self.shared_with} users, connected "
                    "by other users; "
                    "there is no edge between the two.")
        if self.limit > 0:
            return (f"{first} and {second} are in different groups, at distance "
                    f"{self.distance:.3g}: the force between " "them has its largest value, "
                    f"{self.limit:.3g}, but their own data pull harder.")
        return (f"{first} and {second} are in different groups, at distance {self.distance:.3g}; "
                "there is no edge "
                "between the two.")


def explain(problem: Problem, models: Array, labels: Ints, duals: Array | None,
            pair: tuple[Any, Any]) -> Explanation:
    """See `Solution.explain`."""
    n, graph = problem.n_users, problem.graph
    first, second = problem.users.positions(pair).tolist()
    if first == second:
        raise InvalidInput("expected two different users", remedy="Give two names")
    if duals is None:
        raise Incompatible("This solution has no duals, which are needed for the explanation. "
                           "Solve again at this lam with ct.solve(problem).")
    i, j = sorted((first, second))
    if graph.is_complete:
        edge: int | None = i * n - i * (i + 1) // 2 + j - i - 1
    else:
        matches = np.flatnonzero((graph.edges[:, 0] == i) & (graph.edges[:, 1] == j))
        edge = int(matches[0]) if matches.size else None
    names = problem.users.names
    return Explanation(
        users=(names[first], names[second]),
        together=bool(labels[first] == labels[second]),
        distance=float(np.linalg.norm(models[first] - models[second])),
        force=0.0 if edge is None else float(np.linalg.norm(duals[edge])),
        limit=0.0 if edge is None else float(problem.lam * graph.weights[edge]),
        shared_with=int((labels == labels[first]).sum()),
    )
