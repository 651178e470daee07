"""What every user is asked once: gradients, local models and scores, and the certificate.

For models x and feasible duals y, user i gets x_i, slopes_i = -(B'y)_i and a reference point, and
returns the numbers of `certificates.Answers`. Their sums bound the distance to the optimum, for
every algorithm. With objective = sum f_i(x_i) + penalty and bound = -sum f_i*(u_i), the gap is a
sum of parts that are never negative:

    own_i = f_i(x_i) + f_i*(u_i) - <u_i, x_i> >= 0   of every user,     penalty - <y, Bx> >= 0
                                                     known to the server

A relative gap divides their sum by the objective, which one user with a loss of 1e9 makes as large
as it likes. So the gap of all others is also measured against the objective of the others, and
counts unless it is ten times the tolerance at most.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from coterie.base.types import Array, Flags, Ints
from coterie.federated.algorithms.base import Federation, Method, State
from coterie.federated.protocol.messages import SCHEMAS, Batch, put, square
from coterie.losses.derived import Quadratic
from coterie.problem.certificates import (
    FLOOR,
    Answers,
    assemble,
    build_duals,
    project,
    reference,
    supply,
)
from coterie.problem.graph import Graph
from coterie.problem.problem import Problem
from coterie.problem.solution import Certificate

_REPAIRS = 5  # largest number of attempts at duals for which all conjugates are finite
_SLACK = 1e-6  # of the ridge that a local Hessian contains
_RIDGE = 1e-3  # of local models
_HIDDEN = 10.0  # the others' own relative gap may be so many times as large as that of all users
_EPSILON = 4 * float(np.finfo(float).eps)
#: The fields of replies that are collected, by the kind of the question.
_COLLECTED = {"local": ("model", "hessian", "count"), "gradient": ("gradient",),
              "score": ("score", "hit", "count"),
              "certify": ("value", "conjugate", "residual", "size", "rounding")}


@dataclass(frozen=True, kw_only=True, eq=False)
class AskedState(State):
    answered: Flags  # (n_users,) who has replied
    collected: Array  # (n_users, p) the numbers of their replies side by side


class Survey(Method):
    """Asks every user the same once, and again if there was no reply.

    Parameters
    ----------
    federation : whose users are asked.
    kind : "local" for their own models, from which weights are built; "gradient"; or "score".
    """

    def __init__(self, federation: Federation, kind: str) -> None:
        super().__init__(federation)
        self.kind = kind

    def begin(self, models: Array) -> AskedState:
        n, d = models.shape
        widths = {"1": 1, "d": d, "h": d * (d + 1) // 2}
        width = sum(widths[SCHEMAS[self.kind].reply[name]] for name in _COLLECTED[self.kind])
        return AskedState(**self.fresh, now=models, answered=np.zeros(n, dtype=bool),
                          collected=np.zeros((n, width)))

    def start(self, state: State, models: Array) -> AskedState:
        """The first state after one of another method, with models of those not excluded."""
        blank = np.zeros((self.federation.n_users, self.federation.dim))
        return replace(self.begin(put(blank, ~state.aside, models)), round=state.round,
                       missed=state.missed, aside=state.aside)

    def chosen(self, state: AskedState) -> Ints:
        available = self.federation.participation.available(state.round, self.federation.n_users)
        return np.flatnonzero(~state.aside & ~state.answered & (state.asked < 0) & available)

    def finished(self, state: AskedState) -> bool:
        return bool((state.answered | state.aside).all())

    def _ask(self, state: AskedState, users: Ints) -> Batch:
        if self.kind == "local":
            return Batch(self.kind, state.round, users, shared={"ridge": np.array(_RIDGE)})
        return Batch(self.kind, state.round, users, {"model": state.now[users]})

    def unusable(self, state: AskedState, replies: Batch) -> list[tuple[int, str]]:
        if self.kind != "local":
            return []
        ends = np.linalg.eigvalsh(square(replies.arrays["hessian"], self.federation.dim))
        low = ends[:, 0] < (1.0 - _SLACK) * _RIDGE - 1e-8 * np.maximum(ends[:, -1], 0.0)
        empty = replies.arrays["count"] < 1
        return [(int(user), "it has no rows") for user in replies.users[empty]] + [
            (int(user), f"its Hessian is not positive semidefinite, or below the ridge of "
                        f"{_RIDGE:g}") for user in replies.users[low & ~empty]]

    def _tell(self, state: AskedState, replies: Batch) -> AskedState:
        told = np.column_stack([replies.arrays[name] for name in _COLLECTED[self.kind]])
        return replace(state, answered=put(state.answered, replies.users, True),
                       collected=put(state.collected, replies.users, told))


def duals_for(federation: Federation, active: Flags, models: Array, gradients: Array) -> Array:
    """Build duals for models without duals, from the users' gradients at them."""
    n, d = models.shape
    loss = Quadratic(point=models, value=np.zeros(n), gradient=gradients,
                     hessian=np.broadcast_to(np.eye(d), (n, d, d)))
    return build_duals(federation.problem(active, loss), models)


@dataclass(frozen=True, kw_only=True, eq=False)
class ProofState(AskedState):
    duals: Array  # (n_edges, dim) of the users that are not excluded
    slopes: Array  # (n_users, dim)
    lack: Array  # (n_users, dim)
    repairs: int


class Proof(Survey):
    """The certificate: one round of a few numbers from every user.

    Parameters
    ----------
    federation : what is certified.
    """

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation, "certify")

    def begin(self, models: Array) -> ProofState:
        everyone = np.ones(len(models), dtype=bool)
        duals = np.zeros((self.federation.problem(everyone).graph.n_edges, models.shape[1]))
        return self.certifying(State(**self.fresh, now=models), models, duals)

    def certifying(self, state: State, models: Array, duals: Array) -> ProofState:
        """The first state, for models and duals of the users that are not excluded in another
        method's state.
        """
        asked = Survey.begin(self, np.zeros((self.federation.n_users, self.federation.dim)))
        asked.now[~state.aside] = models
        blank = ProofState(
            **vars(asked) | {"round": state.round, "missed": state.missed, "aside": state.aside},
            duals=duals, slopes=np.zeros_like(asked.now), lack=np.zeros_like(asked.now), repairs=0)
        return self._put(blank, duals)

    def _put(self, state: ProofState, duals: Array) -> ProofState:
        problem = self.problem(state)
        duals = project(duals, problem.radii)
        slopes = put(np.zeros_like(state.slopes), ~state.aside, -problem.graph.divergence(duals))
        return replace(state, duals=duals, slopes=slopes, answered=np.zeros_like(state.answered))

    def problem(self, state: ProofState) -> Problem:
        """The problem that is certified."""
        return self.federation.problem(~state.aside)

    def _ask(self, state: Any, users: Ints) -> Batch:
        return Batch(self.kind, state.round, users,
                     {"model": state.now[users], "slope": state.slopes[users],
                      "anchor": self._about(state)[users]})

    def _about(self, state: ProofState) -> Array:
        """(n_users, dim) the reference point of the conjugates; see `certificates.reference`."""
        active = ~state.aside
        about = reference(self.problem(state).graph, state.now[active])
        return put(np.zeros_like(state.now), active, about)

    def _forget(self, state: ProofState, users: Ints) -> ProofState:
        # The problem has changed: keep the duals of the remaining edges.
        duals = state.duals[still_inside(self.federation.graph, state.aside, users)]
        return self._put(replace(state, repairs=0), duals)

    def _tell(self, state: Any, replies: Batch) -> Any:
        lack, missing = put(state.lack, replies.users, 0.0), replies.ragged.get("lack")
        if missing is not None:
            lack[replies.users[missing.owner]] = missing.values
        return super()._tell(replace(state, lack=lack), replies)

    def repaired(self, state: ProofState) -> ProofState | None:
        """The next attempt where conjugates are infinite: duals nearer to the users' domains; None
        if nothing is to be mended.
        """
        active, problem = ~state.aside, self.problem(state)
        outside, lack = ~np.isfinite(state.collected[active, 1]), state.lack[active]
        if state.repairs >= _REPAIRS or problem.lam == 0 or not problem.graph.n_edges \
                or not lack[outside].any():
            return None
        duals = supply(problem.graph, problem.radii, state.duals, lack, outside)
        return replace(self._put(state, duals), repairs=state.repairs + 1)

    def certificate(self, state: ProofState) -> Certificate:
        """The certificate from the replies; it has no bound while some are missing."""
        return self.judgement(state).certificate.with_duals(state.duals)

    def judgement(self, state: ProofState) -> Judgement:
        """The certificate, and what each user has to do with its gap."""
        active = ~state.aside
        answers = Answers(*state.collected[active].T)
        if not self.finished(state):
            heard = state.answered[active]
            answers = answers._replace(values=np.where(heard, answers.values, np.inf),
                                       conjugates=np.where(heard, answers.conjugates, np.inf))
        return judged(self.problem(state), state.now[active], state.slopes[active],
                      self._about(state)[active], answers)


def still_inside(graph: Graph, aside: Flags, users: Ints) -> Flags:
    """Which of the edges that were left before these users were excluded are left now."""
    return graph.inside(~aside)[graph.inside(~put(aside, users, False))]


class Judgement(NamedTuple):
    """A certificate, and what each user has to do with its gap."""

    certificate: Certificate
    own: Array  # (n_users,) the user's part of the gap, possible rounding errors included
    worst: int  # the user with the largest part
    share: float  # its part, relative to the objective of the others
    without_worst: float  # the relative gap of the others


@np.errstate(over="ignore", invalid="ignore")
def judged(problem: Problem, models: Array, slopes: Array, about: Array,
           answers: Answers) -> Judgement:
    """The certificate from the users' answers, with what it would be without the largest of them.
    """
    certificate = assemble(problem, models, slopes, about, answers)
    products = np.einsum("nd,nd->n", slopes, models - about)
    carried = np.linalg.norm(slopes, axis=1) * np.linalg.norm(models - about, axis=1)
    rounding = answers.rounding + _EPSILON * (np.abs(answers.values) + np.abs(answers.conjugates)
                                              + carried)
    own = np.maximum(answers.values + answers.conjugates - products, 0.0) + rounding
    own = np.where(np.isnan(own), np.inf, own)
    worst, n = int(own.argmax()), problem.n_users
    if n < 3:
        return Judgement(certificate, own, worst, 0.0, np.inf)
    penalty = problem.lam * problem.graph.penalty(models)
    slack = max(penalty + float(products.sum()), 0.0) + _EPSILON * penalty

    def size(*left: int) -> float:
        """The objective of all users but one or two."""
        rest = ~np.isin(np.arange(n), left)
        total = abs(float(answers.values[rest].sum()) + problem.lam
                    * problem.graph.take(rest).penalty(models[rest]))
        return max(total, FLOOR * float(answers.sizes[rest].sum()), 1e-300)

    def relative(*left: int) -> float:
        """Their gap, relative to their objective."""
        return (float(own[~np.isin(np.arange(n), left)].sum()) + slack) / size(*left)

    sizes = np.nan_to_num(np.abs(answers.values) + np.abs(answers.conjugates),
                          posinf=np.finfo(float).max)
    far = np.linalg.norm(models - np.median(models, axis=0), axis=1)
    largest = {int(part.argmax()) for part in (sizes, answers.sizes, far)}
    others = max(relative(k) for k in largest) / _HIDDEN
    pairs = [relative(worst, k) / _HIDDEN for k in largest if k != worst and n > 3]
    return Judgement(replace(certificate, others=others if np.isfinite(others) else np.inf), own,
                     worst,
                     float(own[worst]) / size(worst, *largest), max([relative(worst), *pairs]))
