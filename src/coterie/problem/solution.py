"""The result of every solver: models, their groups, and the certificate."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from html import escape
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from coterie.base.errors import Incompatible, InvalidInput
from coterie.base.labels import groups_of, labels_of, rows_owner
from coterie.base.types import Array, Ints
from coterie.data.frames import to_frame, users_frame
from coterie.data.users import Participants, Users
from coterie.losses import Loss
from coterie.losses.derived import Grouped
from coterie.problem.account import Account, Accounted, entry
from coterie.problem.newcomers import Joined, join
from coterie.problem.problem import Problem


class Status(Enum):
    """How a solve ended; the value is a sentence for the user.

    Example
    -------
    >>> Status.CONVERGED.value
    'Solved: the certified relative gap is within the tolerance.'
    """

    CONVERGED = "Solved: the certified relative gap is within the tolerance."
    RELEASED = ("Solved for the released statistics, which have noise: the certified relative gap "
                "is within the tolerance. How near they are to the rows is not certified.")
    INACCURATE = ("Not solved to the tolerance: the certified gap is larger. "
                  "Raise tol, or give the solver more iterations.")
    NO_BOUND = ("Not certified: there is no finite bound, because some user's conjugate is "
                "infinite at these duals. A ridge > 0 and users with several classes make it "
                "finite; the residuals show how close the models are.")
    UNANSWERED = ("Not certified: some users did not answer the queries of the certificate. "
                  "Continue the run when they "
                  "are available, or set silent users aside with `patience`.")
    INTERRUPTED = ("Interrupted: this is the best certified point so far. Solve again from it to "
                   "continue.")

    @classmethod
    def of(cls, certificate: Certificate, tol: float) -> Status:
        """The status of a solution with this certificate."""
        if certificate.relative_gap <= tol:
            return cls.CONVERGED
        return cls.INACCURATE if np.isfinite(certificate.bound) else cls.NO_BOUND


class Record(NamedTuple):
    """The progress of a solver at one point of time."""

    iteration: int
    objective: float
    gap: float  # certified, relative
    n_clusters: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """An upper bound on the distance of models from the optimum, computed from the models and duals
    only.

    For duals y with ||y_e|| <= lam w_e, the optimum is between bound and objective (weak duality):
        bound = -sum_i f_i*( -(B'y)_i )  <=  min F  <=  objective
    If there is no finite bound, convexity still gives, for all other models z,
        F(models) - F(z)  <=  stationarity * ||models - z|| + complementarity

    Attributes
    ----------
    objective
        F(models).
    bound
        The lower bound; -inf if some conjugate is not finite.
    stationarity
        ||grad f + B'y||, over all users together.
    complementarity
        sum_e lam w_e ||(B models)_e|| - <y_e, (B models)_e>.
    worst_user
        Position of the user with the largest residual.
    infinite_users
        Positions of the users whose conjugate is infinite at these duals.
    rounding
        The possible rounding error of objective - bound, counted as part of the gap.
    floor
        The smallest objective that a relative gap is measured against.
    others
        Of a federation: what the relative gap is at least, so that one user with a very large loss
        cannot hide the errors of the others; 0 where all data are known to be what they are.
    duals
        (n_edges, dim) the duals of the bound.

    Example
    -------
    >>> import coterie as ct
    >>> users = ct.Users.from_arrays([[0.0], [2.0]])
    >>> certificate = ct.solve(ct.Problem(users, ct.SquaredDistance(), lam=2.0)).certificate
    >>> round(certificate.objective, 6), certificate.relative_gap < 1e-8
    (1.0, True)
    """

    objective: float
    bound: float
    stationarity: float
    complementarity: float
    worst_user: int
    infinite_users: tuple[int, ...] = ()
    rounding: float = 0.0
    floor: float = 0.0
    others: float = 0.0
    duals: Array | None = field(default=None, repr=False, compare=False)

    @property
    def gap(self) -> float:
        """objective - bound plus the possible rounding error; inf if there is no bound.

        A bound that exceeds the objective by more than the rounding error is not used.
        """
        gap = self.objective - self.bound
        return max(gap, 0.0) + self.rounding if gap >= -self.rounding else np.inf

    @property
    def relative_gap(self) -> float:
        """gap / max(|objective|, |bound|, floor), at least `others`; inf if there is no bound."""
        if not (np.isfinite(self.bound) and np.isfinite(self.gap)):
            return np.inf
        return max(self.gap / max(abs(self.objective), abs(self.bound), self.floor, 1e-300),
                   self.others)

    def with_duals(self, duals: Array | None) -> Certificate:
        """The same certificate with its duals.

        Parameters
        ----------
        duals
            (n_edges, dim) the duals of the bound.

        Returns
        -------
        Certificate
            The certificate, with the same numbers.
        """
        return replace(self, duals=duals)

    def __str__(self) -> str:
        if np.isfinite(self.bound) and not np.isfinite(self.gap):
            return (f"objective {self.objective:.10g}; the lower bound {self.bound:.10g} is above "
                    "it, so rounding errors make one of the two invalid and nothing is certified")
        if np.isfinite(self.bound):
            return (f"objective {self.objective:.10g}, lower bound {self.bound:.10g}: "
                    f"within {self.relative_gap:.1e} (relative) of the optimum")
        users = ", ".join(map(str, self.infinite_users[:3])) + (", ..." if len(self.infinite_users)
            > 3 else "")
        return (f"objective {self.objective:.10g}; no finite lower bound: the conjugate is "
                "infinite for user(s) "
                f"number {users}. By convexity no models at distance r are better by more than "
                f"{self.stationarity:.1e} * r + {self.complementarity:.1e}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Solution(Accounted):
    """The models of all users, the groups they form, and a certificate.

    Attributes
    ----------
    problem
        The problem.
    models
        (n_users, dim) one model per user; users of one group have bitwise equal rows.
    duals
        (n_edges, dim) with ||duals_e|| <= lam w_e; None if the solver stores none.
    certificate
        The lower bound, the gap and the residuals.
    status
        How the solve ended.
    solver
        Name of the solver.
    seconds
        Time of the solve, without that of compiling functions on their first use.
    history
        The progress: `Record`s, or the rounds of a federation.
    sigma
        The last step size of the solver, used by a warm start.
    account
        What a federation took, and who took part; None where all data were in this process. Then
        the problem is that of the users who were not set aside.
    labels
        (n_users,) the group of each user, from 0 in order of first appearance.

    Example
    -------
    >>> import coterie as ct
    >>> users = ct.Users.from_arrays([[0.0], [1.0], [9.0]])
    >>> solution = ct.solve(ct.Problem(users, ct.SquaredDistance(), lam=1.0))
    >>> solution.n_clusters, solution.labels.tolist(), solution.models.round(6).tolist()
    (2, [0, 0, 1], [[1.5], [1.5], [7.0]])
    """

    problem: Problem = field(repr=False)
    models: Array = field(repr=False)
    duals: Array | None = field(repr=False)
    certificate: Certificate
    status: Status
    solver: str
    seconds: float
    history: tuple[Any, ...] = field(default=(), repr=False)
    sigma: float | None = field(default=None, repr=False)
    account: Account | None = field(default=None, repr=False)
    labels: Ints = field(init=False, repr=False)

    scores = entry("scores", "Of a federation: held-out loss, correct predictions, rows by user.")
    state = entry("state", "Of a federation: that of the algorithm; another run can start from it.")
    federation = entry("federation", "Of a federation: what the server knew.")

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", labels_of(self.models))

    def without_duals(self) -> Solution:
        """The same solution without duals, which need more memory than everything else.

        Returns
        -------
        Solution
        """
        other = copy.copy(self)
        self.problem.judged.clear()
        object.__setattr__(other, "duals", None)
        object.__setattr__(other, "certificate", replace(self.certificate, duals=None))
        return other

    @property
    def lam(self) -> float:
        """The penalty strength."""
        return self.problem.lam

    @property
    def n_clusters(self) -> int:
        """The number of groups."""
        return int(self.labels.max()) + 1

    @property
    def objective(self) -> float:
        """The value of (C) at the models."""
        return self.certificate.objective

    @property
    def gap(self) -> float:
        """The certified relative gap; inf if there is no finite bound."""
        return self.certificate.relative_gap

    def predict(self, X: npt.ArrayLike, users: npt.ArrayLike) -> Array:
        """Predict each row of X with the model of its user.

        Parameters
        ----------
        X
            (n_rows, n_features)
        users
            The owner of each row, by name or position (`Users.positions` has the rule).

        Returns
        -------
        Array
            One prediction per row.

        Raises
        ------
        InvalidInput
            If a user is not in the problem.

        Example
        -------
        >>> import coterie as ct
        >>> users = ct.Users.from_arrays([[0.0], [1.0], [2.0]] * 2, [0.0, 1.0, 2.0] * 2,
        ...                              ["ann"] * 3 + ["bob"] * 3)
        >>> solution = ct.solve(ct.Problem(users, ct.Squared(), lam=0.1))
        >>> solution.predict([[5.0], [0.0]], ["bob", "ann"]).round(1).tolist()
        [5.0, 0.0]
        >>> solution.predict(users.features, users.owner).shape
        (6,)
        """
        models = self.problem.loss.own_models(self.problem.samples, self.models)
        return predict_rows(self.problem.loss, self.problem.users, models, X, users)

    def refit(self) -> Array:
        """The models to use: each group fitted again without the penalty, which removes its
        shrinkage.

        Returns
        -------
        Array
            (n_users, dim) one model per user. With a `Personal` loss, each user's own model around
            the centre of its group; otherwise users of one group have equal models.

        Example
        -------
        >>> import coterie as ct
        >>> users = ct.Users.from_arrays([[0.0], [2.0], [9.0]])
        >>> solution = ct.solve(ct.Problem(users, ct.SquaredDistance(), lam=2.0))
        >>> solution.models.round(6).tolist(), solution.refit().tolist()
        ([[3.0], [3.0], [5.0]], [[1.0], [1.0], [9.0]])
        """
        loss, samples = self.problem.loss, self.problem.samples
        grouped = Grouped(loss=loss, samples=samples, labels=self.labels)
        return loss.own_models(samples,
                               grouped.local(grouped.prepare(grouped.groups)).points[self.labels])

    def personalize(self, new_users: Users, *, weight: float | None = None) -> Joined:
        """Give new users a model and a group, without changing the models of other users.

        Parameters
        ----------
        new_users
            Users with the same features.
        weight
            Weight of the pair of a new user and each other user; the default is their mean total
            weight.

        Returns
        -------
        Joined
            Models and groups of the new users.

        Raises
        ------
        InvalidInput
            If the features or targets do not fit the models, or the weight is not valid.

        Example
        -------
        >>> import coterie as ct
        >>> users = ct.Users.from_arrays([[0.0], [1.0], [9.0]])
        >>> solution = ct.solve(ct.Problem(users, ct.SquaredDistance(), lam=1.0))
        >>> solution.personalize(ct.Users.from_arrays([[0.8]], user=["new"])).clusters.tolist()
        [0]
        """
        return join(self.problem, self.models, self.labels, new_users, weight)

    def explain(self, first: Any, second: Any) -> Explanation:
        """Explain why two users share a model or not: the force between them, and its limit.

        Parameters
        ----------
        first, second
            The users, by name or position, as for `Users.positions`.

        Returns
        -------
        Explanation
            The distance, the force and its limit.

        Raises
        ------
        InvalidInput
            If they are not two different users.
        Incompatible
            If the solution has no duals.

        Example
        -------
        >>> import coterie as ct
        >>> users = ct.Users.from_arrays([[0.0], [1.0], [9.0]], user=["ann", "bob", "eve"])
        >>> print(ct.solve(ct.Problem(users, ct.SquaredDistance(), lam=1.0)).explain("ann", "eve"))
        'ann' and 'eve' are in different groups, at distance 5.5: the force between them has its \
largest value, 1, but their own data pull harder.
        """
        return explain(self.problem, self.models, self.labels, self.duals, (first, second))

    def to_frame(self) -> Any:
        """The groups and models as a table.

        Returns
        -------
        A frame of polars, or of pandas where polars is not installed, with a row for each user:
        `user`, `group`, and the coordinates of its model by feature.

        Raises
        ------
        MissingExtra
            If neither is installed.

        Example
        -------
        >>> import coterie as ct
        >>> users = ct.Users.from_arrays([[0.0], [1.0], [9.0]], user=["ann", "bob", "eve"],
        ...                              feature_names=["dose"])
        >>> solution = ct.solve(ct.Problem(users, ct.SquaredDistance(), lam=1.0))
        >>> solution.to_frame()["group"].to_list(), list(solution.to_frame().columns)
        ([0, 0, 1], ['user', 'group', 'dose'])
        """
        return users_frame(self.problem.users.names, self.labels, self.models,
                           self.problem.coefficient_names)

    def __repr__(self) -> str:
        found = outline(self.n_clusters, self.problem.n_users, self.lam, self.gap)
        if self.account is None:
            return f"Solution({found})"
        return f"Federated({found}, {self.n_rounds} rounds, {self.ledger.bytes:,} bytes)"

    def __str__(self) -> str:
        found = groups_of(self.n_clusters, self.problem.n_users)
        text = f"{found[0].upper()}{found[1:]} at lam = {self.lam:g}: {self.certificate}. "
        return f"{text}{self.status.value}{'' if self.account is None else f' {self.account}'}"

    def _repr_html_(self) -> str:
        names, sizes = self.problem.users.names, np.bincount(self.labels)
        order, most, few = np.argsort(-sizes, kind="stable"), 12, 5
        rows = []
        for k in order[:most].tolist():
            members = ", ".join(f"{names[i]!s:.40}" for i in np.flatnonzero(self.labels == k)[:few])
            rows.append((k, int(sizes[k]), members + ", ..." * bool(sizes[k] > few)))
        if len(sizes) > most:
            rows.append(("...", int(sizes[order[most:]].sum()),
                         f"in {len(sizes) - most:,} more groups"))
        gap = f"relative gap {self.gap:.1e}" if np.isfinite(self.gap) else "no finite bound"
        found = groups_of(self.n_clusters, self.problem.n_users)
        return html_table(f"{found[0].upper()}{found[1:]} at lam = {self.lam:g}: objective "
                          f"{self.objective:.6g}, "
                          f"{gap}. {self.status.value}", ("group", "users", "first users"), rows)


def outline(n_clusters: int, n_users: int, lam: float, gap: float) -> str:
    """Groups, users, lam and the certified gap in a few words, for the short form of results."""
    proof = f"certified to {gap:.1e}" if np.isfinite(gap) else "not certified"
    return f"{groups_of(n_clusters, n_users)}, lam {lam:.4g}, {proof}"


def points_frame(solutions: Sequence[Solution]) -> Any:
    """A frame with a row for each solution along lam."""
    return to_frame({"lam": [s.lam for s in solutions],
                     "n_clusters": [s.n_clusters for s in solutions],
                     "objective": [float(s.objective) for s in solutions],
                     "gap": [float(s.gap) for s in solutions],
                     "status": [s.status.name for s in solutions],
                     "seconds": [float(s.seconds) for s in solutions]})


def html_table(caption: str, header: Sequence[str], rows: Iterable[Sequence[object]],
               above: str = "") -> str:
    """A table for notebooks, with the markup `above` over it; all texts are escaped."""
    def line(tag: str, cells: Sequence[object]) -> str:
        return "<tr>" + "".join(f'<{tag} style="text-align: left">{escape(str(c))}</{tag}>'
                                for c in cells) + "</tr>"

    return (f"<div><p>{escape(caption)}</p>{above}<table><thead>{line('th', header)}</thead>"
            f"<tbody>{''.join(line('td', row) for row in rows)}</tbody></table></div>")


def predict_rows(loss: Loss, users: Participants, models: Array, X: npt.ArrayLike,
                 owners: npt.ArrayLike) -> Array:
    """The prediction for each row of X by the model of its user, in the order of the rows.

    Parameters
    ----------
    loss : that predicts.
    users : those who have models.
    models : (n_users, dim), in the order of `users.names`.
    X : (n_rows, n_features).
    owners : the user of each row, by name or position (`Users.positions` has the rule).

    Raises
    ------
    InvalidInput : where a row is of a user without a model.
    """
    rows = Users.from_arrays(X, None, owners)
    # `rows` is sorted by user; `back` restores the given order.
    back = np.argsort(np.argsort(rows_owner(owners, rows.names), kind="stable"), kind="stable")
    known = users.positions(rows.names)
    return loss.predict(rows.features, models[known[rows.owner]])[back]


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
                    f"between them is {self.force:.3g}, of at most {self.limit:.3g}.")
        if self.together:
            return (f"{first} and {second} are in one group of {self.shared_with} users, connected "
                    "by other users; there is no edge between the two.")
        if self.limit > 0:
            return (f"{first} and {second} are in different groups, at distance "
                    f"{self.distance:.3g}: the force between " "them has its largest value, "
                    f"{self.limit:.3g}, but their own data pull harder.")
        return (f"{first} and {second} are in different groups, at distance {self.distance:.3g}; "
                "there is no edge between the two.")


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
