"""Douglas-Rachford splitting: proximal steps of the losses at the users, of the penalty at the
server.

    x   = argmin  t/2 sum_i ||x_i - s_i||^2 + lam sum w_ij ||x_i - x_j||      at the server: exact
        groups every round
    w_i = argmin  f_i(w) + t/2 ||w - (2 x_i - s_i)||^2       at the users that are asked
    s_i = s_i + relax (w_i - x_i)                             for those that replied

The step of the server is a convex-clustering problem, solved by the fast solver, whose duals prove
the result. If only some s_i are updated, this is a random block update of an averaged operator,
which converges as well (Combettes and Pesquet, 2015). The step t is the mean curvature of the
users, of which each reply contains one number; it changes a finite number of times, and s <- x + (t
/ t_new) (s - x) keeps models and duals. For models too long for Hessians.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from coterie.base.errors import InvalidInput, require
from coterie.base.types import Array, Flags, Ints
from coterie.federated.algorithms.base import Algorithm, Federation, Method, State
from coterie.federated.algorithms.proof import still_inside
from coterie.federated.plausible import capped, typical
from coterie.federated.protocol.messages import Batch, put
from coterie.losses.derived import Quadratic
from coterie.problem.problem import Problem
from coterie.problem.solution import Solution
from coterie.solvers import solve_quietly
from coterie.solvers.base import Point

_CHANGES = 20  # largest number of changes of the step
_OFF = 1.3  # smallest factor of a change
_LONG = 150  # coordinates from which models can be too long for matrices of their length


@dataclass(frozen=True, kw_only=True)
class Splitting(Algorithm):
    """Proximal steps at the users and at the server; only models are sent, up and down.

    Parameters
    ----------
    t : the step; None: the mean curvature of the users, as it becomes known.
    relax : relaxation factor, in (0, 2).

    Raises
    ------
    InvalidInput : a setting that cannot be used.

    Example
    -------
    >>> Splitting(relax=1.0).relax
    1.0
    """

    t: float | None = None
    relax: float = 1.6

    def __post_init__(self) -> None:
        if self.t is not None and not (np.isfinite(self.t) and self.t > 0):
            raise InvalidInput(f"t must be a finite number > 0, got {self.t!r}", remedy="Use None")
        require(0 < self.relax < 2, f"relax must be in (0, 2), got {self.relax!r}", "Use 1.6")

    def on(self, federation: Federation, tol: float = 1e-6) -> SplittingMethod:
        return SplittingMethod(federation, self, tol)


@dataclass(frozen=True, kw_only=True, eq=False)
class SplittingState(State):
    s: Array  # (n_users, dim)
    asked_x: Array  # (n_users, dim) x and t when the user was last asked
    asked_t: Array  # (n_users,)
    w: Array  # (n_users, dim) the users' last proximal points
    values: Array  # (n_users,) f_i at w
    curvature: Array  # (n_users,) the mean curvature at w; nan before the first reply
    duals: Array  # (n_edges, dim) of the users that are not excluded
    t: float
    sigma: float
    changes: int
    next_review: float  # number of sweeps after which the step is checked again
    error: float


class Sides(NamedTuple):
    """Coordinates in which the step of the server is solved: those of models, or if these are
    longer than there are users the directions between their points. Nothing pulls a solution out of
    the plane through the points.
    """

    centre: Array  # (dim,)
    axes: Array | None  # (d, dim) orthonormal rows; None: all of them

    @classmethod
    def of(cls, points: Array) -> Sides:
        n, dim = points.shape
        if dim <= max(n, _LONG):
            return cls(np.zeros(dim), None)
        centre = points.mean(axis=0)
        return cls(centre, np.linalg.qr((points - centre).T)[0].T)

    def enter(self, points: Array) -> Array:
        return points if self.axes is None else (points - self.centre) @ self.axes.T

    def leave(self, points: Array) -> Array:
        return points if self.axes is None else self.centre + points @ self.axes

    def along(self, vectors: Array) -> Array:
        """Vectors, not points, in these coordinates."""
        return vectors if self.axes is None else vectors @ self.axes.T

    def turn(self, vectors: Array) -> Array:
        """Vectors in these coordinates in those of models."""
        return vectors if self.axes is None else vectors @ self.axes


class SplittingMethod(Method):
    kind = "prox"
    max_rounds = 20_000
    restarts = True

    def __init__(self, federation: Federation, settings: Splitting, tol: float) -> None:
        super().__init__(federation)
        self.settings, self.tol = settings, tol

    def begin(self, models: Array) -> SplittingState:
        n, d = self.federation.n_users, self.federation.dim
        return SplittingState(**self.fresh, now=models, s=models, asked_x=models, w=models,
                              asked_t=np.ones(n), values=np.zeros(n), curvature=np.full(n, np.nan),
                              duals=np.zeros((self.federation.graph.n_edges, d)),
                              t=self.settings.t or 1.0, sigma=0.0, changes=0, next_review=0.0,
                              error=np.inf)

    def warm(self, state: SplittingState) -> SplittingState:
        return replace(state, **self.fresh | {"aside": state.aside}, next_review=0.0, changes=0)

    def point(self, state: SplittingState) -> tuple[Array, Array | None]:
        return state.now[~state.aside], state.duals

    def estimate(self, state: SplittingState) -> float:
        return state.error

    def _ask(self, state: SplittingState, users: Ints) -> Batch:
        return Batch(self.kind, state.round, users, {
            "centre": 2 * state.now[users] - state.s[users], "t": np.full(len(users), state.t)})

    def _asked(self, state: SplittingState, users: Ints) -> SplittingState:
        return replace(state, asked_x=put(state.asked_x, users, state.now[users]),
                       asked_t=put(state.asked_t, users, state.t))

    def _forget(self, state: SplittingState, users: Ints) -> SplittingState:
        kept = still_inside(self.federation.graph, state.aside, users)
        return self._solved(replace(state, duals=state.duals[kept]))

    def _tell(self, state: SplittingState, replies: Batch) -> SplittingState:
        users, told = replies.users, replies.arrays
        # s - x scales with 1/t, so the contribution of a late reply to s is rescaled to the current
        # step.
        scale = (state.asked_t[users] / state.t)[:, None]
        moved = self.settings.relax * scale * (told["point"] - state.asked_x[users])
        return self._solved(self._step(replace(
            state, s=put(state.s, users, state.s[users] + moved),
            w=put(state.w, users, told["point"]), values=put(state.values, users, told["value"]),
            curvature=put(state.curvature, users, told["curvature"]))))

    def _step(self, state: SplittingState) -> SplittingState:
        """Set the step from the users' curvature: after the first replies, and then at growing
        intervals.
        """
        sweeps = (state.round + 1) * self.federation.participation.share(self.federation.n_users)
        if self.settings.t is not None or state.changes >= _CHANGES or sweeps < state.next_review:
            return state
        known = np.isfinite(state.curvature) & (state.curvature > 0) & ~state.aside
        if not known.any():
            return state
        t = typical(state.curvature[known])
        state = replace(state, next_review=max(1.0, 1.5 * sweeps))
        if max(t / state.t, state.t / t) < _OFF:
            return state
        return replace(state, s=state.now + (state.t / t) * (state.s - state.now), t=t,
                       changes=state.changes + 1)

    def _server_step(self, state: SplittingState, active: Flags) -> tuple[Problem, Sides, Solution]:
        """The problem of the server, the coordinates it is solved in, and the solution."""
        s = state.s[active]
        sides = Sides.of(s)
        points = sides.enter(s)
        n, d = points.shape
        loss = Quadratic(point=points, value=np.zeros(n), gradient=np.zeros_like(points),
                         hessian=np.broadcast_to(state.t * np.eye(d), (n, d, d)))
        problem = replace(self.federation, dim=d).problem(active, loss)
        warm = Point(sides.enter(state.now[active]), sides.along(state.duals), state.sigma) \
            if state.sigma else None
        # The optimum of the server's problem can be much smaller than that of the federation: use a
        # small tolerance.
        return problem, sides, solve_quietly(problem, tol=1e-9, start=warm)

    def _solved(self, state: SplittingState) -> SplittingState:
        active = ~state.aside
        if not active.any():
            return state
        problem, sides, solution = self._server_step(state, active)
        now = state.now.copy()
        models = sides.leave(solution.models)
        now[active] = models
        duals = np.zeros_like(state.duals) if solution.duals is None else sides.turn(solution.duals)
        state = replace(state, now=now, duals=duals, sigma=solution.sigma or 0.0, error=np.inf)
        if not np.isfinite(state.curvature[active]).all():
            return state
        total = capped(state.values[active]).sum() + problem.lam * problem.graph.penalty(models)
        error = float(self.shares(state).sum() / max(abs(total), 1e-300))
        return replace(state, error=error)

    def shares(self, state: SplittingState) -> Array:
        # The error of the bound is about r^2 / 2h, with r = grad f(x) - slope = (t + h) (x - w).
        active = ~state.aside
        h = np.maximum(state.curvature[active], 1e-12 * state.t)
        steps = np.linalg.norm(state.now[active] - state.w[active], axis=1)
        return np.asarray(((state.t + h) * steps) ** 2 / (2 * h))
