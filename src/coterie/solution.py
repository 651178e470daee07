"""What every solver returns: models, clusters, and the certificate that judges them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from html import escape
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from coterie._typing import Array, Ints
from coterie.data.users import Users
from coterie.errors import Incompatible, InvalidInput
from coterie.newcomers import Joined, join
from coterie.problem import Problem


class Status(Enum):
    """How a solve ended; the value is the sentence to read."""

    CONVERGED = "Solved: the certified relative gap is within the tolerance."
    INACCURATE = ("Not solved to the tolerance: the certified gap is what you have. "
                  "Raise tol, or give the solver more iterations.")
    NO_BOUND = ("No finite bound was found, so nothing is certified: some user's conjugate is infinite at these duals. "
                "A ridge > 0 and users with several classes make it finite; the residuals still tell how near it is.")
    UNANSWERED = ("Not certified: some users did not answer the questions a certificate needs. Let the run go on when "
                  "they are back, or set silent users aside with `patience`.")
    INTERRUPTED = "Interrupted: this is the best certified point so far. Solve again from it to go on."


class Record(NamedTuple):
    """One line of a solver's history."""

    iteration: int
    objective: float
    gap: float
    n_clusters: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """How far `models` can be from optimal, from the models and duals alone.

    For duals y with ||y_e|| <= lam w_e, every optimum lies between bound and objective (weak duality):
        bound = -sum_i f_i*( -(B'y)_i )  <=  min F  <=  objective
    Where no finite bound exists, convexity still gives, for every other choice z of models,
        F(models) - F(z)  <=  stationarity * ||models - z|| + complementarity
    """

    objective: float
    bound: float  # -inf where some conjugate is not finite
    stationarity: float  # ||grad f + B'y||, over all users together
    complementarity: float  # sum_e lam w_e ||(B models)_e|| - <y_e, (B models)_e>
    worst_user: int  # the user furthest from balance of its gradient and its edges
    infinite_users: tuple[int, ...] = ()  # users whose conjugate is infinite at these duals
    rounding: float = 0.0  # what floating point may have done to objective - bound; counted as part of the gap
    floor: float = 0.0  # the least size of objective a relative gap is measured against
    duals: Array | None = field(default=None, repr=False, compare=False)

    @property
    def gap(self) -> float:
        """objective - bound, and what rounding may have hidden of it; inf where there is no bound.

        A bound above the objective by more than rounding explains is none.
        """
        gap = self.objective - self.bound
        return max(gap, 0.0) + self.rounding if gap >= -self.rounding else np.inf

    @property
    def relative_gap(self) -> float:
        """gap / max(|objective|, |bound|, floor); inf where there is no bound."""
        if not (np.isfinite(self.bound) and np.isfinite(self.gap)):
            return np.inf
        return self.gap / max(abs(self.objective), abs(self.bound), self.floor, 1e-300)

    def with_duals(self, duals: Array) -> Certificate:
        """The same certificate with the duals it speaks of."""
        return replace(self, duals=duals)

    def __str__(self) -> str:
        if np.isfinite(self.bound) and not np.isfinite(self.gap):
            return (f"objective {self.objective:.10g}; the lower bound {self.bound:.10g} is above it, so rounding has "
                    "destroyed one of the two and nothing is certified")
        if np.isfinite(self.bound):
            return (f"objective {self.objective:.10g}, lower bound {self.bound:.10g}: "
                    f"within {self.relative_gap:.1e} (relative) of the optimum")
        users = ", ".join(map(str, self.infinite_users[:3])) + (", ..." if len(self.infinite_users) > 3 else "")
        return (f"objective {self.objective:.10g}; no finite lower bound: the conjugate is infinite for user(s) "
                f"number {users}. By convexity no models at distance r are better by more than "
                f"{self.stationarity:.1e} * r + {self.complementarity:.1e}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Solution:
    """Models, one row a user, with the clusters they form and the proof of how good they are."""

    problem: Problem = field(repr=False)
    models: Array = field(repr=False)  # (n_users, dim); users of one cluster have bitwise equal rows
    duals: Array | None = field(repr=False)  # (n_edges, dim), ||duals_e|| <= lam w_e
    certificate: Certificate
    status: Status
    solver: str
    seconds: float
    history: tuple[Any, ...] = field(default=(), repr=False)  # of Records, or of a federation's Rounds
    sigma: float | None = field(default=None, repr=False)  # where the solver's step ended; a warm start takes it up
    labels: Ints = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", labels_of(self.models))

    @property
    def lam(self) -> float:
        return self.problem.lam

    @property
    def n_clusters(self) -> int:
        return int(self.labels.max()) + 1

    @property
    def objective(self) -> float:
        return self.certificate.objective

    @property
    def gap(self) -> float:
        """The certified relative gap; inf where no finite bound was found."""
        return self.certificate.relative_gap

    def predict(self, X: npt.ArrayLike, users: npt.ArrayLike) -> Array:
        """The prediction for each row of X under the model of its user; `users` names the owner of each row."""
        rows = Users.from_arrays(X, None, users)
        # `rows` is sorted by user; `back` takes it to the order that was given.
        back = np.argsort(np.argsort(rows_owner(users, rows.names), kind="stable"), kind="stable")
        known = np.array([self.problem.users.index(name) for name in rows.names], dtype=np.int64)
        return self.problem.loss.predict(rows.features, self.models[known[rows.owner]])[back]

    def personalize(self, new_users: Users, *, weight: float | None = None) -> Joined:
        """Models for users who join later, everybody else's staying as they are; and which cluster each one joins."""
        return join(self.problem, self.models, self.labels, new_users, weight)

    def explain(self, first: int, second: int) -> Explanation:
        """Why two users (by number) are together or apart: the force between them against the most it may be."""
        return explain(self, first, second)

    def __str__(self) -> str:
        return (f"{self.n_clusters} cluster(s) of {self.problem.n_users} user(s) at lam = {self.lam:g}: "
                f"{self.certificate}. {self.status.value}")

    def _repr_html_(self) -> str:
        names, sizes = self.problem.users.names, np.bincount(self.labels)
        order, most, few = np.argsort(-sizes, kind="stable"), 12, 5
        rows = []
        for k in order[:most].tolist():
            members = ", ".join(f"{names[i]!s:.40}" for i in np.flatnonzero(self.labels == k)[:few])
            rows.append((k, int(sizes[k]), members + ", ..." * bool(sizes[k] > few)))
        if len(sizes) > most:
            rows.append(("...", int(sizes[order[most:]].sum()), f"in {len(sizes) - most:,} more clusters"))
        gap = f"relative gap {self.gap:.1e}" if np.isfinite(self.gap) else "no finite bound"
        return html_table(f"{self.n_clusters} cluster(s) of {self.problem.n_users} user(s) at lam = {self.lam:g}: "
                          f"objective {self.objective:.6g}, {gap}. {self.status.value}",
                          ("cluster", "users", "among them"), rows)


def html_table(caption: str, header: Sequence[str], rows: Iterable[Sequence[object]], above: str = "") -> str:
    """A table for notebooks, `above` (markup) over it; all texts are escaped."""
    def line(tag: str, cells: Sequence[object]) -> str:
        return "<tr>" + "".join(f'<{tag} style="text-align: left">{escape(str(c))}</{tag}>' for c in cells) + "</tr>"

    return (f"<div><p>{escape(caption)}</p>{above}<table><thead>{line('th', header)}</thead>"
            f"<tbody>{''.join(line('td', row) for row in rows)}</tbody></table></div>")


def labels_of(models: Array) -> Ints:
    """Cluster numbers from 0, in order of first appearance; users are together when their models are equal."""
    # Equal rows have equal bytes, once -0.0 is made 0.0; sorting bytes is much faster than sorting rows.
    rows = np.ascontiguousarray(models + 0.0)
    keys = rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).ravel()
    return first_labels(np.unique(keys, return_inverse=True)[1].ravel())


def first_labels(groups: Ints) -> Ints:
    """Group numbers 0 .. k-1 renumbered by first appearance."""
    _, first = np.unique(groups, return_index=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[groups]


def rows_owner(users: npt.ArrayLike, names: tuple[object, ...]) -> Ints:
    """(n_rows,) the place of each row's user among `names`."""
    place = {name: k for k, name in enumerate(names)}
    given = users.tolist() if hasattr(users, "tolist") else users.to_list() if hasattr(users, "to_list") else users
    return np.array([place[name] for name in given], dtype=np.int64)  # type: ignore[union-attr]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Two users, and what holds them together or keeps them apart."""

    users: tuple[object, object]
    together: bool
    distance: float  # between their models
    force: float  # ||y_ij||, what the pair carries
    limit: float  # lam w_ij, the most it may carry; 0 without an edge
    shared_with: int  # how many users have the first one's model

    @property
    def slack(self) -> float:
        """How much of its limit the pair has left: positive between users held together, 0 at full pull."""
        return self.limit - self.force

    def __str__(self) -> str:
        first, second = map(repr, self.users)
        if self.together and self.limit > 0:
            return (f"{first} and {second} are together, among {self.shared_with} users: keeping them so takes a force "
                    f"of {self.force:.3g} between them, and it may be up to {self.limit:.3g}.")
        if self.together:
            return (f"{first} and {second} are together through others, among {self.shared_with} users; no edge joins "
                    "the two of them.")
        if self.limit > 0:
            return (f"{first} and {second} are apart, by {self.distance:.3g}: they pull on each other with all that is "
                    f"allowed, {self.limit:.3g}, and their own data pull harder.")
        return f"{first} and {second} are apart, by {self.distance:.3g}; no edge joins the two of them."


def explain(solution: Solution, first: int, second: int) -> Explanation:
    n, graph = solution.problem.n_users, solution.problem.graph
    for user in (first, second):
        if not 0 <= user < n:
            raise InvalidInput(f"expected user numbers from 0 to {n - 1}, got {user}",
                               remedy="users.index(name) gives a user's number")
    if first == second:
        raise InvalidInput("expected two different users", remedy="Every user is together with itself")
    if solution.duals is None:
        raise Incompatible("This solution keeps no duals, and they are what explains it. "
                           "Solve at this lam again with ct.solve(problem).")
    i, j = sorted((first, second))
    if graph.is_complete:
        edge: int | None = i * n - i * (i + 1) // 2 + j - i - 1
    else:
        found = np.flatnonzero((graph.edges[:, 0] == i) & (graph.edges[:, 1] == j))
        edge = int(found[0]) if found.size else None
    names = solution.problem.users.names
    return Explanation(
        users=(names[first], names[second]),
        together=bool(solution.labels[first] == solution.labels[second]),
        distance=float(np.linalg.norm(solution.models[first] - solution.models[second])),
        force=0.0 if edge is None else float(np.linalg.norm(solution.duals[edge])),
        limit=0.0 if edge is None else float(solution.problem.lam * graph.weights[edge]),
        shared_with=int((solution.labels == solution.labels[first]).sum()),
    )
