"""What a loss is: one call, `evaluate`, and everything that follows from it.

A loss gives each user i a convex, differentiable function f_i of a model. A class says how long a
model is (`dim`) and what f_i, its gradient and its Hessian are (`evaluate`); minima, proximal steps
and conjugates of all users follow.

Losses that compute on users' samples derive from `coterie.losses.blocks.BlockLoss`; losses that
wrap another one, or that are known by formula, derive from `Loss` itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from coterie.base.errors import Incompatible, InvalidInput
from coterie.base.types import Array, Flags, Indices
from coterie.data.users import Participants, Users
from coterie.losses.curvature import WideEvaluation
from coterie.losses.frame import Frame
from coterie.losses.newton import Minimum, minimise, possible_gains, solve_scaled
from coterie.losses.traits import Traits

_EPSILON = float(np.finfo(float).eps)
# a residual this small beside the terms it is the difference of is zero but for rounding.
TINY = 1e3 * _EPSILON
SUMS = 8.0 * _EPSILON  # error of a computed sum beside the sum of its terms' absolute values
# Times its square: what is left of an offset that cancels, where nothing else is left.
NOISE = 1e-10
TIGHT = 1e-13  # times a bound: no more than this is left to be gained
REACH = 10.0  # times 1 + ||x||: how far away a model may be in directions that no curvature holds
# Newton steps that may follow a local solve until its residual is at rounding level.
_REFINEMENTS = 3


class Evaluation(NamedTuple):
    """Values (n,), gradients (n, dim) and Hessians (n, dim, dim); derivatives not asked for may be
    empty.
    """

    values: Array
    gradients: Array
    hessians: Array


@dataclass(frozen=True, eq=False)
class Samples:
    """The users a loss is evaluated for, and the length of a model; what `Loss.prepare` returns.

    Their data may be elsewhere, where the loss does not need them.
    """

    users: Participants
    dim: int
    # Local coordinates, where they differ from those given.
    frame: Frame | None = field(default=None, kw_only=True)
    # Of the users' data alone.
    known: dict[str, Array] = field(default_factory=dict, kw_only=True, repr=False)

    @property
    def n_users(self) -> int:
        return self.users.n_users


class Magnitudes(NamedTuple):
    """How large the terms are that values and gradients are summed of.

    Rounding changes a computed value by a small multiple of the unit roundoff times `values` +
    <`slopes`, |model|>, and a computed gradient by one times `gradients`.
    """

    values: Array  # (n,) sums of |terms| of values
    slopes: Array  # (n, dim) sums of |terms| of gradients
    gradients: Array  # (n, dim) the same, and what rounding inside the terms does to them


class DualBounds(NamedTuple):
    """Upper bounds on conjugates, and what rounding may have done to them; see `Loss.dual_bounds`.
    """

    values: Array  # (n,) +inf where there is no bound
    rounding: Array  # (n,)
    slack: Array  # (n,) the part of `values` that a better point could still take away


class Loss(Traits, ABC):
    """A convex, differentiable loss of every user; all methods work on all users at once.

    A class must say `dim` and `evaluate`; `decision` and `conic` are asked for where needed. A
    wrapper passes `evaluate` on to the loss inside and returns `loss.prepare(users)` from
    `prepare`.

    Example
    -------
    >>> import coterie as ct
    >>> users = ct.Users.from_arrays([[0.0], [1.0], [5.0]], user=["ann", "ann", "bob"])
    >>> loss = ct.SquaredDistance()
    >>> samples = loss.prepare(users)
    >>> loss.local(samples).points.tolist()
    [[0.5], [5.0]]
    """

    @abstractmethod
    def dim(self, users: Participants) -> int:
        """Length of one user's model."""

    @abstractmethod
    def evaluate(self, samples: Samples, models: Array, order: int = 2,
                 users: Indices | None = None) -> Evaluation:
        """Values, gradients and Hessians at the users' own models; of all users, or of some.

        Parameters
        ----------
        samples : what `prepare` returned.
        models : (n, dim) one row for each user evaluated.
        order : 0 for values only, 1 for gradients too, 2 for Hessians too; what is above may be
            left empty.
        users : (n,) positions of the users evaluated, in the order of the rows of `models`; all
            users by default.

        Returns
        -------
        Evaluation, with rows in the order of `models`.

        Raises
        ------
        Incompatible : where the loss cannot be evaluated on these samples.
        """

    def prepare(self, users: Participants) -> Samples:
        """Check that the loss can be evaluated for these users, and lay out what it needs of them.

        Raises
        ------
        InvalidInput : where a user has no samples, or a target is outside the loss's domain.
        Incompatible : where the loss needs the users' data, and these are elsewhere.
        """
        return Samples(users, self.dim(users))

    def concerns(self, users: Users) -> list[str]:
        """What works but its owner should know, one sentence each."""
        return []

    def values(self, samples: Samples, models: Array) -> Array:
        """(n_users,) f_i(models_i)."""
        return self.evaluate(samples, models, 0).values

    def gradients(self, samples: Samples, models: Array) -> Array:
        """(n_users, dim) grad f_i(models_i)."""
        return self.evaluate(samples, models, 1).gradients

    def hessians(self, samples: Samples, models: Array) -> Array:
        """(n_users, dim, dim) second derivatives of f_i at models_i."""
        return self.evaluate(samples, models, 2).hessians

    def lipschitz(self, samples: Samples) -> Array:
        """For each user an upper bound on the Hessian's largest eigenvalue, anywhere; inf where
        there is none.
        """
        return np.full(samples.n_users, np.inf)

    def steep(self, samples: Samples) -> bool:
        """Whether the loss may overflow at models far out, or be so steep that Newton's method is
        slow there.
        """
        if "steep" not in samples.known:
            samples.known["steep"] = np.isinf(self.lipschitz(samples))
        return bool(samples.known["steep"].any())

    def strong_convexity(self, samples: Samples) -> Array:
        """For each user a lower bound on the Hessian's smallest eigenvalue, anywhere; 0 where there
        is none.
        """
        return np.zeros(samples.n_users)

    def upper_hessians(self, samples: Samples) -> Array | None:
        """(n_users, dim, dim) matrices that no Hessian exceeds, in local coordinates; None where
        none are known.
        """
        return None

    def local(self, samples: Samples, slopes: Array | None = None, start: Array | None = None,
              users: Indices | None = None) -> Minimum:
        """Each user's minimise_x f_i(x) - <slopes_i, x>; without slopes, their own best models.

        Parameters
        ----------
        samples : what `prepare` returned.
        slopes : (n, dim), zero by default.
        start : (n, dim) where to begin, zero by default.
        users : (n,) positions of the users concerned; all by default.

        Returns
        -------
        Minimum, whose `converged` is False for users without a minimum.
        """
        return self.prox(samples, None if slopes is None else -slopes, 0.0, None, start, users)

    def prox(self, samples: Samples, linear: Array | None, t: Array | float, centres: Array | None,
             start: Array | None = None, users: Indices | None = None) -> Minimum:
        """Each user's minimise_x f_i(x) + <linear_i, x> + (t_i / 2) ||x - centres_i||^2; of all
        users, or of some.

        Parameters
        ----------
        samples : what `prepare` returned.
        linear, centres : (n, dim), zero by default.
        t : (n,), or one number for all.
        start : (n, dim) where to begin, `centres` by default.
        users : (n,) positions of the users concerned; all by default.

        Returns
        -------
        Minimum, with rows in the order of `users`.
        """
        who = np.arange(samples.n_users) if users is None else users
        shape = (len(who), samples.dim)
        v = np.zeros(shape) if centres is None else centres
        t = np.broadcast_to(np.asarray(t, dtype=float), shape[:1])
        p = np.zeros(shape) if linear is None else linear
        minimum = self._minimise(samples, p, t, v, v if start is None else start, who)
        frame = self.coordinates(samples)
        if frame is None:
            return minimum
        points = frame.leave(minimum.points, who)
        return minimum._replace(points=points, values=minimum.values + frame.constant(p, who))

    def _minimise(self, samples: Samples, linear: Array, t: Array, centres: Array, start: Array,
                  who: Indices) -> Minimum:
        """As `prox`; the points are in local coordinates, and the values lack the frame's constant.
        """
        frame, eye, pulled = self.coordinates(samples), np.eye(samples.dim), bool(t.any())
        p, v, pull = linear, centres, eye
        if frame is not None:  # ||x - centres||^2 = (z - v)' pull (z - v)
            p, v = frame.slopes(linear, who), frame.enter(centres, who)
            start = frame.enter(start, who)
            pull = frame.metric(who) if pulled else eye

        def evaluate(rows: Indices, z: Array, order: int) -> tuple[Array, Array, Array]:
            # a trial point far out is rejected, not reported.
            with np.errstate(over="ignore", invalid="ignore"):
                f, g, h = self.evaluate_local(samples, z, order, who[rows])
                f = f + np.einsum("nd,nd->n", p[rows], z)
                g = g + p[rows] if order > 0 else g
                if pulled:
                    metric = pull if frame is None else pull[rows]
                    shift = z - v[rows]
                    force = t[rows, None] * (shift if frame is None
                                             else np.einsum("nde,ne->nd", metric, shift))
                    f = f + 0.5 * np.einsum("nd,nd->n", force, shift)
                    g = g + force if order > 0 else g
                    h = h + t[rows, None, None] * metric if order > 1 else h
            return f, g, h

        return minimise(evaluate, start)

    def coordinates(self, samples: Samples) -> Frame | None:
        """The local coordinates of `evaluate_local`, `magnitudes` and `curvatures`; None for
        coordinates as given.

        A wrapper shares the samples of the loss inside but not its coordinates, in which it adds
        something else.
        """
        return None

    def evaluate_local(self, samples: Samples, models: Array, order: int = 2,
                       users: Indices | None = None) -> Evaluation:
        """As `evaluate`, with models and derivatives in the local `coordinates`."""
        return self.evaluate(samples, models, order, users)

    def magnitudes(self, samples: Samples, models: Array,
                   users: Indices | None = None) -> Magnitudes:
        """Sums of absolute values where `evaluate_local` sums terms; see `Magnitudes`.

        By default |f|, |grad f|, and |grad f| + |H| |model|, which is what rounding of the model
        itself does.
        """
        f, g, h = self.evaluate_local(samples, models, 2, users)
        return Magnitudes(np.abs(f), np.abs(g),
                          np.abs(g) + np.einsum("nde,ne->nd", np.abs(h), np.abs(models)))

    def value_rounding(self, samples: Samples, models: Array,
                       users: Indices | None = None) -> Array:
        """(n,) what rounding may have done to the values of `evaluate`."""
        who = np.arange(samples.n_users) if users is None else users
        frame = self.coordinates(samples)
        z = models if frame is None else frame.enter(models, who)
        terms = self.magnitudes(samples, z, users)
        return SUMS * (terms.values + (terms.slopes * np.abs(z)).sum(axis=1))

    def sizes(self, samples: Samples) -> Array:
        """(n_users,) a size of each loss that a value can be compared with; offsets of the data do
        not change it.

        By default the loss of the model zero. Losses with a free intercept, and of points, take a
        constant instead.
        """
        if "sizes" not in samples.known:
            samples.known["sizes"] = self._sizes(samples)
        return samples.known["sizes"]

    def _sizes(self, samples: Samples) -> Array:
        return np.abs(self.evaluate(samples, np.zeros((samples.n_users, samples.dim)), 0).values)

    def curvatures(self, samples: Samples) -> Array:
        """(n_users, dim) numbers c >= 0 such that f_i - 1/2 sum_k c_k z_k^2 is convex, in local
        coordinates.
        """
        return np.broadcast_to(self.strong_convexity(samples)[:, None],
                               (samples.n_users, samples.dim))

    def conjugates(self, samples: Samples, slopes: Array, start: Array | None = None,
                   users: Indices | None = None) -> Array:
        """f_i*(slopes_i) = max_x <slopes_i, x> - f_i(x), from above; +inf where it is, or no
        maximum was reached.

        Parameters
        ----------
        samples : what `prepare` returned.
        slopes : (n, dim).
        start : (n, dim) where to begin, zero by default.
        users : (n,) positions of the users concerned; all by default.

        Returns
        -------
        (n,) upper bounds, equal to the conjugates up to rounding.
        """
        bound = self.dual_bounds(samples, slopes, start, users)
        return bound.values + bound.rounding

    def dual_bounds(self, samples: Samples, slopes: Array, start: Array | None = None,
                    users: Indices | None = None, about: Array | None = None) -> DualBounds:
        """Upper bounds on f_i*(slopes_i) - <slopes_i, about_i> = max_x <slopes_i, x - about_i> -
        f_i(x).

        Where f(x) - 1/2 sum_k c_k x_k^2 is convex, every point x with residual r = slopes - grad
        f(x) gives

            f*(slopes) <= <slopes, x> - f(x) + sum_k r_k^2 / (2 c_k)

        which needs no solve to be right, only to be tight. Coordinates without curvature (c_k = 0:
        an intercept, no ridge) must have r_k = 0. In floating point that means a residual at
        rounding level, which counts by its effect |r_k| |x_k - about_k| and by what it can gain
        (`possible_gains`): second order where the Hessian has curvature beyond rounding, else r
        times `REACH`. Where this is not negligible, or rounding level is not reached, the bound is
        +inf. For losses that do not state `magnitudes` of their own, rounding level is estimated.

        Parameters
        ----------
        samples, slopes, start, users : as for `conjugates`.
        about : (n, dim) a point near the models, so that common offsets of all models cancel; zero
            by default.

        Returns
        -------
        DualBounds
        """
        who = np.arange(samples.n_users) if users is None else users
        zero = np.zeros((len(who), samples.dim))
        about = zero if about is None else about
        start = about if start is None else start
        frame, curved = self.coordinates(samples), self.curvatures(samples)[who]
        u, centre, z = slopes, about, start
        if frame is not None:
            u, centre = frame.slopes(slopes, who), frame.enter(about, who)
            z = frame.enter(start, who)
        settled = np.ones(len(who), dtype=bool)
        best = self._dual_bound(samples, z, u, centre, curved, who, settled)
        tight = np.isfinite(best.values) & (best.slack <= TIGHT * np.abs(best.values))
        rows = np.flatnonzero(~tight)  # who must look for a better point
        if rows.size:
            minimum = self._minimise(samples, -slopes[rows], np.zeros(rows.size), zero[rows],
                                     start[rows], who[rows])
            z, settled = minimum.points, minimum.converged
        for _ in range(1 + _REFINEMENTS if rows.size else 0):
            bound = self._dual_bound(samples, z, u[rows], centre[rows], curved[rows], who[rows],
                                     settled)
            better = np.flatnonzero(bound.values + bound.rounding
                                    < (best.values + best.rounding)[rows])
            for full, part in zip(best, bound, strict=True):
                full[rows[better]] = part[better]
            # Infinite only since a residual is not quite at rounding level: a Newton step more may
            # take it there.
            again = np.flatnonzero(~np.isfinite(best.values[rows]) & settled)
            if not again.size:
                break
            rows, settled = rows[again], settled[again]
            z = self._refined(samples, z[again], u[rows], who[rows])
        return best

    def ridge_bounds(self, bounds: DualBounds, samples: Samples, slopes: Array,
                     about: Array | None) -> DualBounds:
        """The dual bounds, and where they are infinite those of the ridge alone, if there is one.
        """
        return bounds

    def rough_bounds(self, samples: Samples, slopes: Array, start: Array, about: Array,
                     enough: float) -> DualBounds:
        """`dual_bounds` of all users that may be loose by `enough` times the sum of their losses,
        in all.

        A few Newton steps from `start` are taken together by all users, and no user is solved for
        exactly.
        """
        return self.dual_bounds(samples, slopes, start, None, about)

    def _dual_bound(self, samples: Samples, z: Array, u: Array, centre: Array, curved: Array,
                    who: Indices, settled: Flags) -> DualBounds:
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            f, g, h = self.evaluate_local(samples, z, 2 if (curved == 0).any() else 1, who)
            terms = self.magnitudes(samples, z, who)
            residual, away = np.abs(u - g), np.abs(z - centre)
            level = np.abs(u) + terms.gradients
            exact = settled[:, None] & (residual <= TINY * level)
            residual = residual + SUMS * level  # it is rounded itself
            cost = np.where(curved > 0, residual**2 / (2.0 * curved), np.inf)
            # Coordinates in which a residual at rounding level is let pass.
            flat = exact & (curved == 0)
            cost = np.where(flat, residual * away, cost).sum(axis=1)
            values = np.einsum("nd,nd->n", u, z - centre) - f + cost
            rounding = SUMS * (terms.values + (terms.slopes * np.abs(z)).sum(axis=1)
                               + (np.abs(u) * away).sum(axis=1))
            rows = np.flatnonzero(flat.any(axis=1))
            # What these residuals may still gain, where hardly anything holds the model.
            if rows.size:
                frame = self.coordinates(samples)
                unit = 1.0 if frame is None else np.maximum(frame.units(who[rows]).max(axis=1), 1.0)
                gain = possible_gains(h[rows], np.where(flat[rows], residual[rows], 0.0),
                                      SUMS * samples.dim,
                                      REACH * (unit + np.linalg.norm(z[rows], axis=1)))
                limit = 1e-7 * np.abs(values[rows]) + 1e-9 * self.sizes(samples)[who[rows]]
                rounding[rows] += np.where(gain <= limit, gain, np.inf)
        finite = np.isfinite(values) & np.isfinite(rounding)
        return DualBounds(*(np.where(finite, part, other)
                            for part, other in ((values, np.inf), (rounding, 0.0), (cost, np.inf))))

    def _refined(self, samples: Samples, z: Array, u: Array, who: Indices) -> Array:
        """One more Newton step towards grad f = u."""
        _, g, h = self.evaluate_local(samples, z, 2, who)
        units = np.sqrt(np.maximum(np.einsum("nii->ni", h), 1e-300))
        step = solve_scaled(h, units, np.full(len(z), 1e-15), u - g)
        with np.errstate(over="ignore"):  # of a step where the loss is flat
            # That is no refinement.
            far = np.linalg.norm(step, axis=1) > 1e-3 * (1.0 + np.linalg.norm(z, axis=1))
        return np.where(far[:, None], z, z + step)

    def wide(self, samples: Samples) -> bool:
        """Whether models have so many coordinates and users so few rows that Hessians are operators
        (`expand`).
        """
        return False

    def expand(self, samples: Samples, models: Array,
               users: Indices | None = None) -> WideEvaluation:
        """Values, gradients and Hessians as operators, where models are `wide`; of all users, or of
        some.

        Raises
        ------
        Incompatible : where they are not.
        """
        raise Incompatible(f"{type(self).__name__} has no Hessians as operators for these models: "
                           "use `evaluate`.")

    def own_models(self, samples: Samples, models: Array, users: Indices | None = None) -> Array:
        """The models that predict for these users, given those of a problem; a `Personal` loss has
        others.
        """
        return models

    @property
    def own_loss(self) -> Loss:
        """The loss of `own_models`, by which they are compared on other rows: without what wraps
        it.
        """
        return self

    @property
    def stated(self) -> Loss:
        """The loss as its users evaluate it, where only they can."""
        return self

    def decision(self, features: Array, models: Array) -> Array:
        """What a model says of a sample, row by row: a margin, a mean, or one number per class.

        Raises
        ------
        Incompatible : where models of this loss make no predictions.
        """
        raise Incompatible(f"{type(self).__name__} models make no predictions from features.")

    def predict(self, features: Array, models: Array) -> Array:
        """The predicted target of each row of `features` under the model in the same row of
        `models`.
        """
        return self.decision(features, models)

    def conic(self, cp: ModuleType, samples: Samples, x: Any) -> Any:
        """The sum of all f_i as a CVXPY expression of x, the models one after the other in one
        vector.

        Raises
        ------
        Incompatible : where the loss has no such form.
        """
        raise Incompatible(f"{type(self).__name__} has no conic form, which the reference solver "
                           "needs. Give it a `conic` method, or use another solver.")


def need_targets(loss: Loss, users: Users) -> Array:
    """The users' targets; raises InvalidInput where there are none."""
    if users.targets is None:
        raise InvalidInput(f"{type(loss).__name__} needs targets, and these users have none",
                           remedy="Give y, or name the target column; to cluster rows use "
                                  "SquaredDistance()")
    return users.targets


def refuse_targets(users: Users, bad: Flags, expected: str, remedy: str) -> None:
    """Raise InvalidInput where a row is marked as bad, naming the first such target, its user and
    its sample.
    """
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        user = int(users.owner[row])
        assert users.targets is not None
        raise InvalidInput(f"expected {expected}, got {users.targets[row]:g}",
                           where=f"user {users.names[user]!r}, its sample "
                                 f"{row - int(users.offsets[user])}; {int(bad.sum())} such targets "
                                 "in all", remedy=remedy)


def require_positive(name: str, number: float) -> None:
    """Raise InvalidInput unless the setting `name` is a finite number > 0."""
    if not (np.isfinite(number) and number > 0):
        raise InvalidInput(f"{name} must be a finite number > 0, got {number!r}",
                           remedy="Use for example 1.0")


def one_class_concern(users: Users) -> list[str]:
    """A sentence naming the users all of whose samples are of one class."""
    assert users.targets is not None
    y = users.targets
    starts = users.offsets[:-1]
    alone = np.flatnonzero(np.minimum.reduceat(y, starts) == np.maximum.reduceat(y, starts))
    if not alone.size:
        return []
    names = ", ".join(repr(users.names[i]) for i in alone[:3]) + (", ..." if alone.size > 3 else "")
    return [f"{alone.size} of {users.n_users} users have samples of one class only ({names}), "
            "which do not "
            "determine a classifier; with lam > 0 their models depend on other users, too."]
