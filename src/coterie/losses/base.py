"""What a loss is: one call, `evaluate`, and everything that follows from it.

A loss gives each user i a convex, differentiable function f_i of a model. A class says how long a model is (`dim`) and
what f_i, its gradient and its Hessian are (`evaluate`); minima, proximal steps and conjugates of all users follow.

Losses that compute on users' samples derive from `coterie.losses.blocks.BlockLoss`; losses that wrap another one, or
that are known by formula, derive from `Loss` itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from coterie._typing import Array, Flags, Indices
from coterie.data.users import Participants, Users
from coterie.errors import Incompatible, InvalidInput
from coterie.losses.newton import Minimum, minimise


class Evaluation(NamedTuple):
    """Values (n,), gradients (n, dim) and Hessians (n, dim, dim); derivatives not asked for may be empty."""

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

    @property
    def n_users(self) -> int:
        return self.users.n_users


class Loss(ABC):
    """A convex, differentiable loss of every user; all methods work on all users at once.

    A class must say `dim` and `evaluate`; `decision` and `conic` are asked for where needed. A wrapper passes
    `evaluate` on to the loss inside and returns `loss.prepare(users)` from `prepare`.

    Example
    -------
    >>> import coterie as ct
    >>> users = ct.Users.from_arrays([[0.0], [1.0], [5.0]], user=["ann", "ann", "bob"])
    >>> loss = ct.SquaredDistance()
    >>> samples = loss.prepare(users)
    >>> loss.local(samples).points.tolist()
    [[0.5], [5.0]]
    """

    quadratic: ClassVar[bool] = False  # whether every f_i is quadratic, so that one Hessian serves everywhere

    @abstractmethod
    def dim(self, users: Participants) -> int:
        """Length of one user's model."""

    @abstractmethod
    def evaluate(self, samples: Samples, models: Array, order: int = 2, users: Indices | None = None) -> Evaluation:
        """Values, gradients and Hessians at the users' own models; of all users, or of some.

        Parameters
        ----------
        samples : what `prepare` returned.
        models : (n, dim) one row for each user evaluated.
        order : 0 for values only, 1 for gradients too, 2 for Hessians too; what is above may be left empty.
        users : (n,) positions of the users evaluated, in the order of the rows of `models`; all users by default.

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
        """For each user an upper bound on the Hessian's largest eigenvalue, anywhere; inf where there is none."""
        return np.full(samples.n_users, np.inf)

    def strong_convexity(self, samples: Samples) -> Array:
        """For each user a lower bound on the Hessian's smallest eigenvalue, anywhere; 0 where there is none."""
        return np.zeros(samples.n_users)

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
        """Each user's minimise_x f_i(x) + <linear_i, x> + (t_i / 2) ||x - centres_i||^2; of all users, or of some.

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
        p = np.zeros(shape) if linear is None else linear
        v = np.zeros(shape) if centres is None else centres
        t = np.broadcast_to(np.asarray(t, dtype=float), shape[:1])
        eye, pulled = np.eye(samples.dim), bool(t.any())

        def evaluate(rows: Indices, x: Array, order: int) -> tuple[Array, Array, Array]:
            slopes = p[rows]
            with np.errstate(over="ignore", invalid="ignore"):  # a trial point far out is rejected, not reported
                f, g, h = self.evaluate(samples, x, order, who[rows])
                f = f + np.einsum("nd,nd->n", slopes, x)
                g = g + slopes if order > 0 else g
                if pulled:
                    shift, pull = x - v[rows], t[rows]
                    f = f + 0.5 * pull * np.einsum("nd,nd->n", shift, shift)
                    g = g + pull[:, None] * shift if order > 0 else g
                    h = h + pull[:, None, None] * eye if order > 1 else h
            return f, g, h

        return minimise(evaluate, v if start is None else start)

    def conjugates(self, samples: Samples, slopes: Array, start: Array | None = None,
                   users: Indices | None = None) -> Array:
        """f_i*(slopes_i) = max_x <slopes_i, x> - f_i(x), from above; +inf where it is, or no maximum was reached.

        From the point x where the local solve ends, with residual r = slopes - grad f(x),
            f*(slopes) <= <slopes, x> - f(x) + ||r||^2 / (2 mu)       (f mu-strongly convex)
        Without strong convexity the squared Newton decrement r' H^-1 r, driven to rounding, stands for the last term;
        it is twice what f, were it quadratic from x on, could still give. A solve that runs off to infinity, as it
        does outside the conjugate's domain, gives +inf.

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
        minimum = self.local(samples, slopes, start, users)
        residual = slopes - self.evaluate(samples, minimum.points, 1, users).gradients
        mu = self.strong_convexity(samples) if users is None else self.strong_convexity(samples)[users]
        squares = np.einsum("nd,nd->n", residual, residual)
        rigorous = np.divide(squares, 2 * mu, out=np.full(mu.shape, np.inf), where=mu > 0)
        excess = np.minimum(rigorous, np.where(minimum.converged, minimum.excess, np.inf))
        return -minimum.values + excess

    def decision(self, features: Array, models: Array) -> Array:
        """What a model says of a sample, row by row: a margin, a mean, or one number per class.

        Raises
        ------
        Incompatible : where models of this loss make no predictions.
        """
        raise Incompatible(f"{type(self).__name__} models make no predictions from features.")

    def predict(self, features: Array, models: Array) -> Array:
        """The predicted target of each row of `features` under the model in the same row of `models`."""
        return self.decision(features, models)

    def conic(self, cp: ModuleType, samples: Samples, x: Any) -> Any:
        """The sum of all f_i as a CVXPY expression of x, the models one after the other in one vector.

        Raises
        ------
        Incompatible : where the loss has no such form.
        """
        raise Incompatible(f"{type(self).__name__} has no conic form, which the reference solver needs. "
                           "Give it a `conic` method, or use another solver.")


def need_targets(loss: Loss, users: Users) -> Array:
    """The users' targets; raises InvalidInput where there are none."""
    if users.targets is None:
        raise InvalidInput(f"{type(loss).__name__} needs targets, and these users have none",
                           remedy="Give y, or name the target column; to cluster rows use SquaredDistance()")
    return users.targets


def refuse_targets(users: Users, bad: Flags, expected: str, remedy: str) -> None:
    """Raise InvalidInput where a row is marked as bad, naming the first such target, its user and its sample."""
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        user = int(users.owner[row])
        assert users.targets is not None
        raise InvalidInput(f"expected {expected}, got {users.targets[row]:g}",
                           where=f"user {users.names[user]!r}, its sample {row - int(users.offsets[user])}; "
                                 f"{int(bad.sum())} such targets in all",
                           remedy=remedy)


def require_positive(name: str, number: float) -> None:
    """Raise InvalidInput unless the setting `name` is a finite number > 0."""
    if not (np.isfinite(number) and number > 0):
        raise InvalidInput(f"{name} must be a finite number > 0, got {number!r}", remedy="Use for example 1.0")


def one_class_concern(users: Users) -> list[str]:
    """A sentence naming the users all of whose samples are of one class."""
    assert users.targets is not None
    y = users.targets
    starts = users.offsets[:-1]
    alone = np.flatnonzero(np.minimum.reduceat(y, starts) == np.maximum.reduceat(y, starts))
    if not alone.size:
        return []
    names = ", ".join(repr(users.names[i]) for i in alone[:3]) + (", ..." if alone.size > 3 else "")
    return [f"{alone.size} of {users.n_users} users have samples of one class only ({names}), which do not "
            "determine a classifier; with lam > 0 their models are determined by other users."]
