"""Proximal Newton for a federation, the default algorithm.

In each round the users that are asked get their model x_i and return f_i, gradient and Hessian at
it. The server stores the last reply of every user and solves the problem with these quadratics
instead of the losses,

    minimise  sum_i [ f_i + <g_i, s_i> + 1/2 s_i' (H_i + shift_i I) s_i ]
              + lam sum w ||x_i - x_j||,                          s_i = x_i - p_i

to high accuracy, which gives the new models. Near the optimum the method converges quadratically.
Further away a quadratic may predict too large a decrease. The next reply shows it, because it
contains f_i at the new point. Such a reply is rejected, shift_i is increased, and the next query
contains the last accepted point p_i, so that the user itself steps back as far as needed, without
an extra round.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coterie.base.errors import InvalidInput, require
from coterie.base.types import Array, Flags, Ints
from coterie.federated.algorithms.base import Algorithm, Federation, Method, State
from coterie.federated.algorithms.forms import (
    Forms,
    between,
    comes_in_parts,
    hessians_of,
    row_length,
    spans_of,
    trusted,
    wrong_hessians,
)
from coterie.federated.plausible import capped
from coterie.federated.protocol.messages import Batch, Ragged, flags, put
from coterie.solvers import solve_quietly
from coterie.solvers.base import Point


@dataclass(frozen=True, kw_only=True)
class Newton(Algorithm):
    """Gradients and Hessians up, models down; converges in a few rounds.

    Parameters
    ----------
    select : "needed" asks those users first whose last replies are furthest from their current
        models; "random" asks uniformly at random. Both ask only as many users as participation
        allows.
    rank : 0 sends Hessians exactly, in the shorter of two forms (a low-rank form if a user has
        fewer samples than half the coordinates); a number r > 0 sends a multiple of the identity
        plus a matrix of rank r, which together are at least as large as the Hessian; -1 always
        sends the triangle.

    Raises
    ------
    InvalidInput : a setting that cannot be used.

    Example
    -------
    >>> import coterie as ct
    >>> users = ct.Users.from_arrays([[0.0], [1.0], [9.0]])
    >>> ct.federate(users, ct.SquaredDistance(), lam=1.0,
    ...             algorithm=ct.Newton(select="random")).labels.tolist()
    [0, 0, 1]
    """

    select: str = "needed"
    rank: int = 0

    def __post_init__(self) -> None:
        require(self.select in ("needed", "random"),
                f"select must be 'needed' or 'random', got {self.select!r}", "Use 'needed'")
        if isinstance(self.rank, bool) or int(self.rank) != self.rank or self.rank < -1:
            raise InvalidInput(f"rank must be -1, 0 or a positive number, got {self.rank!r}",
                               remedy="Use 0")

    def on(self, federation: Federation, tol: float = 1e-6) -> NewtonMethod:
        return NewtonMethod(federation, self, tol)


@dataclass(frozen=True, kw_only=True, eq=False)
class NewtonState(State):
    """What the server knows.

    Attributes
    ----------
    sent : (n_users, dim) the model of the last query.
    points, values, gradients, hessians : of the last accepted reply, and of wide models instead of
        Hessians:
    basis, axes, gains, inner, outer, sizes : see `Forms`.
    shift : (n_users,) a multiple of the identity that is added to the Hessian.
    known, doubted : (n_users,) whether there is a reply, and whether the last one was rejected.
    duals, sigma : of the last problem with quadratics.
    promised : (n_users,) 1/2 s'Hs for the step s from each user's point to its model.
    trust, error : the error of the quadratics in the last round, relative to that.
    """

    sent: Array  # (n_users, dim) the model of the last query
    # (n_users, dim) the point of the last accepted reply; value, gradient and Hessian at it:
    points: Array
    values: Array
    gradients: Array
    hessians: Array  # and for wide models what follows: see `Forms`
    basis: Array
    axes: Array
    gains: Array
    inner: Array
    outer: Array
    sizes: Ints
    shift: Array  # (n_users,) a multiple of the identity that is added to the Hessian
    known: Flags  # (n_users,) whether there is a reply
    doubted: Flags  # (n_users,) whether the last reply was rejected
    duals: Array  # (n_edges, dim)
    sigma: float
    promised: Array  # (n_users,) 1/2 s'Hs for the step s from each user's point to its model
    trust: float  # the error of the quadratics in the last round, relative to that
    error: float

    @property
    def forms(self) -> Forms:
        """The Hessians."""
        return Forms(*(getattr(self, name) for name in Forms._fields))


class NewtonMethod(Method):
    kind = "expand"
    max_rounds = 200
    review = 20

    def __init__(self, federation: Federation, settings: Newton, tol: float) -> None:
        super().__init__(federation)
        self.settings, self.tol = settings, tol

    def begin(self, models: Array) -> NewtonState:
        n, d = self.federation.n_users, self.federation.dim
        return NewtonState(**self.fresh, now=models, sent=models,
                           points=models, values=np.zeros(n), gradients=np.zeros((n, d)),
                           **Forms.blank(n, d)._asdict(), shift=np.zeros(n),
                           known=np.zeros(n, dtype=bool), doubted=np.zeros(n, dtype=bool),
                           duals=np.zeros((self.federation.graph.n_edges, d)),
                           sigma=0.0, promised=np.full(n, np.inf), trust=1.0, error=np.inf)

    def warm(self, state: NewtonState) -> NewtonState:
        """All replies are still valid: the problem is solved with them before users are asked
        again.
        """
        return self._solved(replace(state, **self.fresh | {"aside": state.aside}, trust=1.0))

    def point(self, state: NewtonState) -> tuple[Array, Array | None]:
        active = ~state.aside
        duals = state.duals if active.all() else state.duals[self.federation.graph.inside(active)]
        return state.now[active], duals

    def estimate(self, state: NewtonState) -> float:
        return state.error

    def shares(self, state: NewtonState) -> Array:
        return state.promised[state.known & ~state.aside]

    def _need(self, state: NewtonState) -> Array | None:
        return state.promised if self.settings.select == "needed" else None

    def _ask(self, state: NewtonState, users: Ints) -> Batch:
        doubted = state.doubted[users]
        ragged = {"anchor": Ragged.of(state.points[users[doubted]], doubted)} if doubted.any() \
            else {}
        count = {"count": state.sizes[users].astype(float)} if state.forms.in_spans else {}
        return Batch(self.kind, state.round, users, {"model": state.now[users], **count}, ragged,
                     {"rank": np.array(self.settings.rank, dtype=np.int64)})

    def _asked(self, state: NewtonState, users: Ints) -> NewtonState:
        return replace(state, sent=put(state.sent, users, state.now[users]))

    def _forget(self, state: NewtonState, users: Ints) -> NewtonState:
        return self._solved(replace(state, known=put(state.known, users, False)))

    def _tell(self, state: NewtonState, replies: Batch) -> NewtonState:
        stepped_back, share = np.zeros(len(replies), dtype=bool), replies.ragged.get("share")
        if share is not None:
            stepped_back[share.owner] = share.values < 1.0
        return self._taken(state, replies, self._at(state, replies), self._forms(state, replies),
                           stepped_back)

    def _forms(self, state: NewtonState, replies: Batch) -> Forms:
        """The Hessians of replies."""
        old, dim = state.forms.take(replies.users), self.federation.dim
        if old.in_spans or comes_in_parts(replies):
            new = spans_of(replies, old, dim, self._row_length)
            return new.completed() if old.complete else new
        return Forms.blank(len(replies), dim)._replace(hessians=hessians_of(replies, dim))

    @property
    def _row_length(self) -> int:
        return row_length(self.federation.loss, len(self.federation.features), self.federation.dim)

    def unusable(self, state: NewtonState, replies: Batch) -> list[tuple[int, str]]:
        reasons = wrong_hessians(replies, state.forms.take(replies.users), self.federation.dim,
                                 self._row_length)
        return [(int(replies.users[position]), reason) for position, reason in reasons.items()]

    def _at(self, state: NewtonState, replies: Batch) -> Array:
        """(n, dim) the points that replies are about: the models sent, or points on the way to
        them.
        """
        users, share = replies.users, replies.ragged.get("share")
        at = state.sent[users].copy()
        if share is not None:
            # From the last accepted point, or from zero if the query contained none.
            k = share.owner
            named = state.doubted[users[k]][:, None]
            at[k] = np.where(named, between(state.points[users[k]], at[k], share.values),
                             share.values[:, None] * at[k])
        return at

    @np.errstate(over="ignore", invalid="ignore")  # a finite reply can be too large to square
    def _taken(self, state: NewtonState, replies: Batch, at: Array, forms: Forms,
               stepped_back: Flags) -> NewtonState:
        """Accept the replies that agree with the quadratics."""
        # 1. What the quadratics predicted: good replies are those that agree with them, first ones,
        #    and those from the way to a point.
        users, share = replies.users, replies.ragged.get("share")
        step = at - state.points[users]
        slopes = np.einsum("nd,nd->n", state.gradients[users], step)
        second = 0.5 * state.forms.take(users).squares(step) + 0.5 * state.shift[users] \
            * (step**2).sum(axis=1)
        good = trusted(state.values[users], slopes, second, replies.arrays["value"]) \
            | ~state.known[users]
        if share is not None:
            good[share.owner] = True
        # 2. The relative error of the quadratics: the smaller it is, the earlier a certificate is
        #    worth a round.
        seen = state.known[users] & (second > 0)
        off = np.abs(replies.arrays["value"] - state.values[users] - slopes - second)[seen].sum()
        trust = float(np.clip(off / second[seen].sum(), 1e-4, 1.0)) if seen.any() else 1.0
        trust = 0.0 if self.federation.loss.quadratic else trust
        taken = users[good]
        known, known_forms = put(state.known, taken, True), state.forms.put(taken, forms.take(good))
        # 3. If a quadratic predicted too large a decrease, its shift is increased; if it was
        #    accurate, decreased.
        curvature = known_forms.traces() / self.federation.dim
        stiffer = np.maximum(100.0 * state.shift,
                             0.03 * np.maximum(curvature, capped(curvature[known]).mean()))
        poor = flags(self.federation.n_users, users[~good | stepped_back])
        shift = np.where(poor, stiffer, put(state.shift, taken, 0.1 * state.shift[taken]))
        # 4. The next models, from the quadratics of all users.
        return self._solved(replace(
            state, points=put(state.points, taken, at[good]), shift=shift, known=known, trust=trust,
            values=put(state.values, taken, replies.arrays["value"][good]),
            gradients=put(state.gradients, taken, replies.arrays["gradient"][good]),
            doubted=put(state.doubted, users, ~good), **known_forms._asdict()))

    def _accuracy(self, state: NewtonState) -> float:
        """The relative gap of the problem with quadratics; of wide models small beside the error of
        the quadratics.
        """
        least = max(0.01 * self.tol, 1e-13)
        return max(least, min(1e-5, 0.01 * state.error)) if state.forms.in_spans else least

    def _solved(self, state: NewtonState) -> NewtonState:
        """Compute the new models of all users that have replied."""
        known, federation = state.known & ~state.aside, self.federation
        if not known.any():
            return state
        # 1. The problem of the quadratics of all users known, shifted so that each has a minimum.
        forms = state.forms.take(known)
        curvature = forms.traces() / federation.dim
        shift = np.maximum(state.shift[known], 1e-9 * max(float(capped(curvature).mean()), 1e-300))
        points, values = state.points[known], capped(state.values[known])
        # What all models share costs no digits in the problem of their differences.
        middle = _middle(points)
        forms = forms.shifted(shift)
        problem = federation.problem(known, forms.quadratic(points - middle, values,
                                                            state.gradients[known]))
        # 2. Solve it, from the last models and duals.
        inside: Any = slice(None) if known.all() else federation.graph.inside(known)
        warm = Point(state.now[known] - middle, state.duals[inside], state.sigma or None) \
            if state.sigma else None
        solution = solve_quietly(problem, tol=self._accuracy(state), start=warm)
        now, duals, models = state.now.copy(), state.duals.copy(), solution.models + middle
        # 3. Other users keep the start: no user receives a model built from other users only.
        now[known] = models
        if solution.duals is not None:
            duals[inside] = solution.duals
        # 4. The decrease that the quadratics promise, and an estimate of the gap.
        step = models - points
        promised = np.full(federation.n_users, np.inf)
        promised[known] = 0.5 * forms.squares(step)
        complete = known.sum() == (~state.aside).sum() and not (state.doubted & known).any()
        size = max(abs(solution.objective), 1e-300)
        error = state.trust * float(promised[known].sum()) / size if complete else np.inf
        return replace(state, now=now, duals=duals, sigma=solution.sigma or 0.0, promised=promised,
                       error=error)


def _middle(points: Array) -> Array:
    """(dim,) the mean of the points if they are close together and far from zero, else zero."""
    middle = points.mean(axis=0)
    spread = np.abs(points - middle).max()
    return np.asarray(np.where(np.isfinite(middle) & (np.abs(middle) > 1e3 * spread), middle, 0.0))
