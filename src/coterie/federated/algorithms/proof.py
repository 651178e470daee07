"""The certificate over the federation: one round of a few numbers from every user.

For models x and feasible duals y, user i gets x_i, slopes_i = -(B'y)_i and a reference point, and
returns the numbers of `certificates.Answers`. Their sums bound the distance to the optimum, for
every algorithm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from coterie.base.types import Array, Flags, Ints
from coterie.federated import plausible
from coterie.federated.algorithms.base import Federation, Method, State, hessians_of
from coterie.federated.judging import Judgement, judged
from coterie.federated.protocol.messages import Batch, square
from coterie.losses.derived import Quadratic
from coterie.problem.certificates import Answers, build_duals, project, reference, supplied
from coterie.problem.graph import Graph
from coterie.problem.problem import Problem
from coterie.problem.solution import Certificate
from coterie.problem.weights import LocalModels

_REPAIRS = 5  # largest number of attempts at duals for which all conjugates are finite
# a user is blamed for a part of the gap that is so many times the tolerance and the gap of all
# others.
_ALONE = 10.0
_SLACK = 1e-6  # of the ridge that a local Hessian contains
_FAILED = 100.0  # times the tolerance: a gap that somebody is blamed for
# Certificates in a row, and sweeps, that one user alone may spoil before it is excluded.
_BLAMED, _PATIENCE = 3, 100


@dataclass(frozen=True, kw_only=True, eq=False)
class ProofState(State):
    duals: Array  # (n_edges, dim) of the users that are not excluded
    slopes: Array  # (n_users, dim)
    answered: Flags  # (n_users,) whether the user has replied
    answers: Array  # (n_users, 5) value, conjugate, residual, size, rounding
    lack: Array  # (n_users, dim)
    repairs: int
    # (4,) before repairs: the user with the largest part of the gap, `own`, `share` and
    # `without_worst`.
    suspect: Array


class Proof(Method):
    """Asks every user once, and again if there was no reply.

    Parameters
    ----------
    federation : what is certified.
    tol : the relative gap at which the run ends.
    """

    kind = "certify"

    def __init__(self, federation: Federation, tol: float = 1e-6) -> None:
        super().__init__(federation)
        self.tol = tol

    def start(self, state: State, models: Array, duals: Array) -> ProofState:
        """The first state, for models and duals of the users that are not excluded in another
        method's state.
        """
        n, d = self.federation.n_users, self.federation.dim
        active = ~state.aside
        now = np.zeros((n, d))
        now[active] = models
        blank = ProofState(**self.carried(state), now=now, duals=duals, slopes=np.zeros((n, d)),
                           answered=np.zeros(n, dtype=bool), answers=np.zeros((n, 5)),
                           lack=np.zeros((n, d)), repairs=0,
                           suspect=np.full(4, np.nan))
        return self._put(blank, duals)

    def begin(self, models: Array) -> ProofState:
        problem = self.federation.problem(np.ones(self.federation.n_users, dtype=bool))
        duals = np.zeros((problem.graph.n_edges, self.federation.dim))
        return self.start(State(**self.fresh, now=models), models, duals)

    def _put(self, state: ProofState, duals: Array) -> ProofState:
        problem = self.problem(state)
        duals = project(duals, problem.radii)
        slopes = np.zeros_like(state.slopes)
        slopes[~state.aside] = -problem.graph.divergence(duals)
        return replace(state, duals=duals, slopes=slopes, answered=np.zeros_like(state.answered))

    def problem(self, state: ProofState) -> Problem:
        return self.federation.problem(~state.aside)

    def chosen(self, state: ProofState) -> Ints:
        available = self.federation.participation.available(state.round, self.federation.n_users)
        return np.flatnonzero(~state.aside & ~state.answered & (state.asked < 0) & available)

    def finished(self, state: ProofState) -> bool:
        return bool((state.answered | state.aside).all())

    def _ask(self, state: ProofState, users: Ints) -> Batch:
        return Batch(self.kind, state.round, users,
                     {"model": state.now[users], "slope": state.slopes[users],
                                                     "anchor": self._about(state)[users]})

    def _about(self, state: ProofState) -> Array:
        """(n_users, dim) the reference point of the conjugates; see `certificates.reference`."""
        about, active = np.zeros_like(state.now), ~state.aside
        about[active] = reference(self.problem(state).graph, state.now[active])
        return about

    def _forget(self, state: ProofState, users: Ints) -> ProofState:
        # The problem has changed: keep the duals of the remaining edges.
        before = np.zeros(self.federation.n_users, dtype=bool)
        before[users] = True
        were = ~(state.aside & ~before)
        kept = self.federation.graph.inside(~state.aside)[self.federation.graph.inside(were)]
        return self._put(replace(state, repairs=0, suspect=np.full(4, np.nan)), state.duals[kept])

    def _contradictions(self, state: ProofState, replies: Batch) -> list[tuple[int, str]]:
        """Users whose value or conjugate is none of a loss that they described before."""
        users, least = replies.users, self.federation.loss.least
        values, conjugates, rounding = (replies.arrays[name] for name in ("value", "conjugate",
            "rounding"))
        old, about = plausible.Statements.unpack(state.said[users]), self._about(state)[users]
        points = np.full_like(about, np.nan), np.full(len(users), np.nan)
        wrong = plausible.contradict(old, plausible.Statements(state.now[users], values, *points))
        for at, value in ((state.now[users], values), (old.points, old.values)):
            products = np.einsum("nd,nd->n", state.slopes[users], at - about)
            wrong |= plausible.beyond_conjugate(value, conjugates, products, rounding)
        low = values < least - 1e-9 * abs(least)
        return [(int(user), "its loss and its conjugate contradict each other or its earlier "
                            "replies")
                for user in users[wrong | low]]

    def _tell(self, state: ProofState, replies: Batch) -> ProofState:
        answered, answers, lack = state.answered.copy(), state.answers.copy(), state.lack.copy()
        answered[replies.users] = True
        parts = [replies.arrays[name] for name in ("value", "conjugate", "residual", "size",
                                                   "rounding")]
        answers[replies.users] = np.stack(parts, axis=1)
        lack[replies.users] = 0.0
        missing = replies.ragged.get("lack")
        if missing is not None:
            lack[replies.users[missing.owner]] = missing.values
        state = replace(state, answered=answered, answers=answers, lack=lack)
        active = ~state.aside
        outside = ~np.isfinite(answers[active, 1])
        if self.finished(state) and outside.any() and state.repairs < _REPAIRS \
            and self.federation.lam > 0:
            problem = self.problem(state)
            if problem.graph.n_edges and lack[active][outside].any():
                if not state.repairs:  # which cost the others something, too
                    state = replace(state, suspect=self._suspect(state))
                duals = supplied(problem.graph, problem.radii, state.duals, lack[active], outside)
                return replace(self._put(state, duals), repairs=state.repairs + 1)
        return self._blame(state) if self.finished(state) else state

    def _suspect(self, state: ProofState) -> Array:
        judgement = self.judgement(state)
        user = np.flatnonzero(~state.aside)[judgement.worst]
        return np.array([user, judgement.own[judgement.worst], judgement.share,
                         judgement.without_worst])

    def _blame(self, state: ProofState) -> ProofState:
        """Exclude the user because of whom alone one certificate after the other fails, by as much
        as before.
        """
        failed = self.judgement(state).certificate.relative_gap > _FAILED * self.tol
        worst = state.suspect if state.repairs else self._suspect(state)
        user, (own, share, without), blamed = int(worst[0]), worst[1:], np.zeros_like(state.blamed)
        if failed and _ALONE * max(without, self.tol) < share and without <= _ALONE * self.tol:
            count, before, since = state.blamed[user]
            again = count > 0 and own >= 0.5 * before
            blamed[user] = (count + 1, min(own, before), since) if again else (1, own, state.round)
        state = replace(state, blamed=blamed)
        waited = (state.round - blamed[user, 2]) \
            * self.federation.participation.share(self.federation.n_users)
        if blamed[user, 0] < _BLAMED or waited < _PATIENCE:
            return state
        reason = (f"{int(blamed[user, 0])} certificates in a row failed because of its replies "
                  "alone: its part of the "
                  f"gap stays at {own:.1e}, and without it the relative gap is {without:.1e}")
        return self._without(replace(state, blamed=np.zeros_like(blamed)), [(user, reason)])

    def certificate(self, state: ProofState) -> Certificate:
        """The certificate from the replies; it has no bound while some are missing."""
        return self.judgement(state).certificate.with_duals(state.duals)

    def judgement(self, state: ProofState) -> Judgement:
        """The certificate, and what each user has to do with its gap."""
        active = ~state.aside
        problem = self.problem(state)
        answers = Answers(*state.answers[active].T)
        if not self.finished(state):
            heard = state.answered[active]
            answers = answers._replace(values=np.where(heard, answers.values, np.inf),
                                       conjugates=np.where(heard, answers.conjugates, np.inf))
        about = self._about(state)[active]
        return judged(problem, state.now[active], state.slopes[active], about, answers)


def duals_for(federation: Federation, active: Flags, models: Array, gradients: Array) -> Array:
    """Build duals for models without duals, from the users' gradients at them."""
    n, d = models.shape
    loss = Quadratic(point=models, value=np.zeros(n), gradient=gradients,
                     hessian=np.broadcast_to(np.eye(d), (n, d, d)))
    return build_duals(federation.problem(active, loss), models)


@dataclass(frozen=True, kw_only=True, eq=False)
class AskedState(State):
    """The replies of users who are all asked the same once."""

    answered: Flags  # (n_users,)
    collected: Array  # (n_users, dim) the main part of the replies
    hessians: Array  # (n_users, dim, dim)
    counts: Array  # (n_users,)


class _AskAll(Method):
    """Asks every user once, and again if there was no reply."""

    def begin(self, models: Array) -> AskedState:
        n, d = self.federation.n_users, self.federation.dim
        return AskedState(**self.fresh, now=models, answered=np.zeros(n, dtype=bool),
                          collected=np.zeros((n, d)),
                          hessians=np.zeros((n, d, d) if self.kind == "local" else (0, d, d)),
                          counts=np.zeros(n))

    def chosen(self, state: AskedState) -> Ints:
        available = self.federation.participation.available(state.round, self.federation.n_users)
        return np.flatnonzero(~state.aside & ~state.answered & (state.asked < 0) & available)

    def finished(self, state: AskedState) -> bool:
        return bool((state.answered | state.aside).all())

    def _with_replies(self, state: AskedState, replies: Batch, rows: Array) -> AskedState:
        answered, collected = state.answered.copy(), state.collected.copy()
        answered[replies.users], collected[replies.users] = True, rows
        return replace(state, answered=answered, collected=collected)


class GradientRound(_AskAll):
    """The gradient of every user at its model, for methods without duals."""

    kind = "gradient"

    def _statements(self, state: AskedState, replies: Batch) -> plausible.Statements:
        return plausible.Statements(state.now[replies.users], replies.arrays["value"],
                                    replies.arrays["gradient"],
                                    np.maximum(replies.arrays["curvature"],
                                               replies.arrays["stiffness"]))

    def start(self, state: State, models: Array) -> AskedState:
        now = np.zeros((self.federation.n_users, self.federation.dim))
        now[~state.aside] = models
        return replace(self.begin(now), **self.carried(state))

    def _ask(self, state: AskedState, users: Ints) -> Batch:
        return Batch(self.kind, state.round, users, {"model": state.now[users]})

    def _tell(self, state: AskedState, replies: Batch) -> AskedState:
        return self._with_replies(state, replies, replies.arrays["gradient"])


class ScoreRound(_AskAll):
    """The score of every user's model on its held-out rows: three numbers per user."""

    kind = "score"

    def start(self, state: State, models: Array) -> AskedState:
        now = np.zeros((self.federation.n_users, self.federation.dim))
        now[~state.aside] = models
        blank = replace(self.begin(now), collected=np.zeros((self.federation.n_users, 3)))
        return replace(blank, **self.carried(state))

    def _ask(self, state: AskedState, users: Ints) -> Batch:
        return Batch(self.kind, state.round, users, {"model": state.now[users]})

    def _tell(self, state: AskedState, replies: Batch) -> AskedState:
        rows = np.stack([replies.arrays[name] for name in ("score", "hit", "count")], axis=1)
        return self._with_replies(state, replies, rows)


class LocalOptimaRound(_AskAll):
    """The local model of every user, the Hessian at it and the number of samples, from which
    weights are built.
    """

    kind = "local"
    ridge = 1e-3

    def _objections(self, state: AskedState, replies: Batch) -> list[tuple[int, str]]:
        ends = np.linalg.eigvalsh(square(replies.arrays["hessian"], self.federation.dim))
        low = ends[:, 0] < (1.0 - _SLACK) * self.ridge - 1e-8 * np.maximum(ends[:, -1], 0.0)
        flat = (replies.arrays["count"] >= 1) & low
        return [(int(user), "it has no rows")
                for user in replies.users[replies.arrays["count"] < 1]] + [
            (int(user), "its Hessian is not positive semidefinite, or below the ridge of "
                        f"{self.ridge:g}")
            for user in replies.users[flat]]

    def _ask(self, state: AskedState, users: Ints) -> Batch:
        return Batch(self.kind, state.round, users, shared={"ridge": np.array(self.ridge)})

    def _tell(self, state: AskedState, replies: Batch) -> AskedState:
        hessians, counts = state.hessians.copy(), state.counts.copy()
        hessians[replies.users] = hessians_of(replies, self.federation.dim)
        counts[replies.users] = replies.arrays["count"]
        return replace(self._with_replies(state, replies, replies.arrays["model"]),
                       hessians=hessians, counts=counts)

    def graph(self, state: AskedState, make: Callable[[LocalModels], Graph]) -> Graph:
        """The graph over all users from the local models of those that are not excluded."""
        active = ~state.aside
        counts = state.counts[active].astype(np.int64)
        built = make(LocalModels(state.collected[active], state.hessians[active], counts))
        return Graph.from_edges(self.federation.n_users, np.flatnonzero(active)[built.edges],
                                built.weights)
