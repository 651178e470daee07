"""What a loss is, and everything that follows from its value, slope and curvature.

A linear loss is made of one convex function of the margin and the target,

    f_i(x) = ridge/2 ||w||^2 + mean_j phi(t_ij, y_ij),    t_ij = <w, a_ij> + intercept_sign * b,    x = [w, b]

and a class states phi by its value, slope and curvature; everything else (gradients and Hessians of all users at once,
conjugates, proximal steps) follows. The intercept b is the last coordinate and is not under the ridge, unless
`penalize_intercept` says so; then the ridge is ridge/2 ||x||^2.

The losses themselves are in the modules beside this one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from coterie._typing import Array, Flags, Indices
from coterie.data.users import Block, Users
from coterie.errors import Incompatible, InvalidInput
from coterie.losses.newton import Minimum, minimise


class Evaluation(NamedTuple):
    """Values (n,), gradients (n, dim) and Hessians (n, dim, dim); what was not asked for is empty."""

    values: Array
    gradients: Array
    hessians: Array


@dataclass(frozen=True, eq=False)
class Samples:
    """Users' data in the form a loss computes on: padded blocks of the loss's own design matrix."""

    users: Users
    blocks: tuple[Block, ...]
    dim: int

    @property
    def n_users(self) -> int:
        return self.users.n_users


class Loss(ABC):
    """A convex, differentiable loss of every user; all methods work on all users at once.

    A class must say `dim` and `_evaluate`, and `check_targets` where not every target will do; `decision` and `conic`
    are asked for where needed.
    """

    quadratic: ClassVar[bool] = False  # whether every f_i is quadratic, so that one Hessian serves everywhere

    def design(self, features: Array, real: Flags) -> Array:
        """The rows the loss computes on; `real` marks rows that are samples, not padding."""
        return features

    @abstractmethod
    def dim(self, users: Users) -> int:
        """Length of one user's model."""

    def check_targets(self, users: Users) -> None:  # noqa: B027  (a loss may take any targets, or none)
        """Raise InvalidInput where a target is outside the loss's domain."""

    def concerns(self, users: Users) -> list[str]:
        """What works but its owner should know, one sentence each."""
        return []

    @abstractmethod
    def _evaluate(self, samples: Samples, block: Block, models: Array, order: int) -> Evaluation:
        """One block of users with equally many rows; derivatives above `order` may be left empty."""

    def prepare(self, users: Users) -> Samples:
        """Check the users' targets against the loss and lay out their data."""
        users.require_samples()
        self.check_targets(users)
        blocks = tuple(b._replace(features=self.design(b.features, b.weights > 0)) for b in users.blocks())
        return Samples(users, blocks, self.dim(users))

    def evaluate(self, samples: Samples, models: Array, order: int = 2, users: Indices | None = None) -> Evaluation:
        """Values, gradients (order >= 1) and Hessians (order >= 2) at the users' own models; of all users, or some."""
        return self._on(samples, np.arange(samples.n_users) if users is None else users, models, order)

    def _on(self, samples: Samples, users: Indices, models: Array, order: int) -> Evaluation:
        n, d = models.shape
        if len(samples.blocks) == 1 and n == samples.n_users:  # all users, all of one length: nothing to gather
            return self._evaluate(samples, samples.blocks[0], models, order)
        out = Evaluation(np.empty(n), np.empty((n if order > 0 else 0, d)), np.empty((n if order > 1 else 0, d, d)))
        whole = n == samples.n_users
        place = np.full(samples.n_users, -1, dtype=np.intp)
        place[users] = np.arange(n)
        for block in samples.blocks:
            rows = place[block.index]
            if not whole:
                chosen = rows >= 0
                if not chosen.any():
                    continue
                block = Block(block.index[chosen], block.features[chosen], block.targets[chosen], block.weights[chosen])
                rows = rows[chosen]
            part = self._evaluate(samples, block, models[rows], order)
            for full, piece in zip(out[: order + 1], part[: order + 1], strict=True):
                full[rows] = piece
        return out

    def values(self, samples: Samples, models: Array) -> Array:
        return self.evaluate(samples, models, 0).values

    def gradients(self, samples: Samples, models: Array) -> Array:
        return self.evaluate(samples, models, 1).gradients

    def hessians(self, samples: Samples, models: Array) -> Array:
        return self.evaluate(samples, models, 2).hessians

    def lipschitz(self, samples: Samples) -> Array:
        """For each user an upper bound on the Hessian's largest eigenvalue, anywhere; inf where there is none."""
        return np.full(samples.n_users, np.inf)

    def strong_convexity(self, samples: Samples) -> Array:
        """For each user a lower bound on the Hessian's smallest eigenvalue, anywhere; 0 where there is none."""
        return np.zeros(samples.n_users)

    def local(self, samples: Samples, slopes: Array | None = None, start: Array | None = None,
              users: Indices | None = None) -> Minimum:
        """Each user's minimise_x f_i(x) - <slopes_i, x>; without slopes, their own best models."""
        return self.prox(samples, None if slopes is None else -slopes, 0.0, None, start, users)

    def prox(self, samples: Samples, linear: Array | None, t: Array | float, centres: Array | None,
             start: Array | None = None, users: Indices | None = None) -> Minimum:
        """Each user's minimise_x f_i(x) + <linear_i, x> + (t_i / 2) ||x - centres_i||^2; of all users, or some."""
        who = np.arange(samples.n_users) if users is None else users
        shape = (len(who), samples.dim)
        p = np.zeros(shape) if linear is None else linear
        v = np.zeros(shape) if centres is None else centres
        t = np.broadcast_to(np.asarray(t, dtype=float), shape[:1])
        eye, pulled = np.eye(samples.dim), bool(t.any())

        def evaluate(rows: Indices, x: Array, order: int) -> tuple[Array, Array, Array]:
            slopes = p[rows]
            with np.errstate(over="ignore", invalid="ignore"):  # a trial point far out is refused, not reported
                f, g, h = self._on(samples, who[rows], x, order)
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
        """f_i*(slopes_i) = max_x <slopes_i, x> - f_i(x), from above; +inf where it is, or no maximum was found.

        From the point x where the local solve ends, with residual r = slopes - grad f(x),
            f*(slopes) <= <slopes, x> - f(x) + ||r||^2 / (2 mu)       (f mu-strongly convex)
        Without strong convexity the squared Newton decrement r' H^-1 r, driven to rounding, stands for the last term;
        it is twice what f, were it quadratic from x on, could still give. A solve that runs off to infinity, as it
        does outside the conjugate's domain, gives +inf.
        """
        found = self.local(samples, slopes, start, users)
        residual = slopes - self.evaluate(samples, found.points, 1, users).gradients
        mu = self.strong_convexity(samples) if users is None else self.strong_convexity(samples)[users]
        squares = np.einsum("nd,nd->n", residual, residual)
        rigorous = np.divide(squares, 2 * mu, out=np.full(mu.shape, np.inf), where=mu > 0)
        excess = np.minimum(rigorous, np.where(found.converged, found.excess, np.inf))
        return -found.values + excess

    def decision(self, features: Array, models: Array) -> Array:
        """What a model says of a sample, row by row: a margin, a mean, or one number a class."""
        raise Incompatible(f"{type(self).__name__} models make no predictions from features.")

    def predict(self, features: Array, models: Array) -> Array:
        """The predicted target of each row of `features` under the model in the same row of `models`."""
        return self.decision(features, models)

    def conic(self, cp: ModuleType, samples: Samples, x: Any) -> Any:
        """The sum of all f_i as a CVXPY expression of x, the models one after the other in one vector."""
        raise Incompatible(f"{type(self).__name__} has no conic form, which the reference solver needs. "
                           "Give it a `conic` method, or use another solver.")


def margins_matrix(samples: Samples, loss: Loss, stride: int = 1, output: int = 0) -> Any:
    """The sparse matrix that takes all models in one vector to all rows' margins (of one output of several)."""
    from scipy import sparse

    users = samples.users
    rows = loss.design(users.features, np.ones(users.n_samples, dtype=bool))
    columns = users.owner[:, None] * samples.dim + np.arange(rows.shape[1]) * stride + output
    return sparse.csr_array((rows.ravel(), (np.repeat(np.arange(users.n_samples), rows.shape[1]), columns.ravel())),
                            shape=(users.n_samples, users.n_users * samples.dim))


def ridge_form(cp: ModuleType, ridge: float, shrunk: Array, x: Any) -> Any:
    """ridge/2 ||w||^2 of every user; `shrunk` marks the coordinates of one model that are w."""
    n_users = x.size // shrunk.size
    return ridge / 2 * cp.sum_squares(x[np.flatnonzero(np.tile(shrunk > 0, n_users))]) if ridge > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class AffineLoss(Loss):
    """Models that act on a sample through <w, a> + intercept_sign * b.

    Parameters
    ----------
    ridge : weight of ridge/2 ||w||^2.
    intercept : whether a model ends in an intercept b.
    penalize_intercept : whether the ridge is on the intercept too, ridge/2 (||w||^2 + b^2). Then every user has exactly
        one best model, also one with samples of a single class, and f_i is strongly convex with constant `ridge`.
    """

    ridge: float = 1e-3
    intercept: bool = True
    penalize_intercept: bool = False
    intercept_sign: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        if not (np.isfinite(self.ridge) and self.ridge >= 0):
            raise InvalidInput(f"ridge must be a finite number >= 0, got {self.ridge!r}", remedy="Use for example 1e-3")

    def design(self, features: Array, real: Flags) -> Array:
        if not self.intercept:
            return features
        # Padding rows are zero throughout, so their margin is 0 under any model.
        return np.concatenate([features, self.intercept_sign * real[..., None]], axis=-1)

    def shrunk(self, dim: int, outputs: int = 1) -> Array:
        """1 for the coordinates under the ridge, 0 for intercepts that are not (one for each output)."""
        mask = np.ones(dim)
        if self._free_intercept:
            mask[dim - outputs:] = 0.0
        return mask

    @property
    def _free_intercept(self) -> bool:
        """Whether there is an intercept that the ridge does not cover."""
        return self.intercept and not self.penalize_intercept

    def strong_convexity(self, samples: Samples) -> Array:
        return np.full(samples.n_users, 0.0 if self._free_intercept else self.ridge)

    def rows(self, features: Array, models: Array) -> tuple[Array, int]:
        """The design of new rows and how many outputs their models have; refuses what does not fit."""
        rows = self.design(features, np.ones(len(features), dtype=bool))
        outputs, left = divmod(models.shape[1], rows.shape[1])
        if left or not outputs:
            raise InvalidInput(f"models of {models.shape[1]} coordinates do not fit rows of {rows.shape[1]}",
                               remedy="Give the columns the models were fitted on")
        return rows, outputs


@dataclass(frozen=True, kw_only=True)
class LinearLoss(AffineLoss):
    """One convex function phi of a margin and a target; see the module's formula."""

    max_curvature: ClassVar[float] = np.inf

    # phi and its first two derivatives in t; all elementwise.
    @abstractmethod
    def value(self, t: Array, y: Array) -> Array: ...

    @abstractmethod
    def slope(self, t: Array, y: Array) -> Array: ...

    @abstractmethod
    def curvature(self, t: Array, y: Array) -> Array: ...

    def conic_terms(self, cp: ModuleType, t: Any, y: Array) -> Any:
        """phi of every row as a CVXPY expression."""
        raise Incompatible(f"{type(self).__name__} has no conic form: give it a `conic_terms` method.")

    def dim(self, users: Users) -> int:
        return users.n_features + self.intercept

    def _evaluate(self, samples: Samples, block: Block, models: Array, order: int) -> Evaluation:
        a, y, weights = block.features, block.targets, block.weights
        shrunk = self.ridge * self.shrunk(samples.dim)
        t = (a @ models[:, :, None])[..., 0]
        values = (weights * self.value(t, y)).sum(axis=1) + 0.5 * (shrunk * models**2).sum(axis=1)
        gradients, hessians = np.empty(0), np.empty(0)
        if order > 0:  # grad = A' (weights * phi') + ridge w
            gradients = ((weights * self.slope(t, y))[:, None, :] @ a)[:, 0] + shrunk * models
        if order > 1:  # H = A' diag(weights * phi'') A + ridge
            root = np.sqrt(weights * self.curvature(t, y))[..., None] * a
            hessians = root.swapaxes(1, 2) @ root + np.diag(shrunk)
        return Evaluation(values, gradients, hessians)

    def _gram_ends(self, samples: Samples) -> tuple[Array, Array]:
        """Smallest and largest eigenvalue of mean_j a_ij a_ij' + (ridge / max_curvature), for each user."""
        low, high = np.empty(samples.n_users), np.empty(samples.n_users)
        for block in samples.blocks:
            root = np.sqrt(block.weights)[..., None] * block.features
            gram = self.max_curvature * (root.swapaxes(1, 2) @ root) + np.diag(self.ridge * self.shrunk(samples.dim))
            ends = np.linalg.eigvalsh(gram)
            low[block.index], high[block.index] = ends[:, 0], ends[:, -1]
        return low, high

    def lipschitz(self, samples: Samples) -> Array:
        if not np.isfinite(self.max_curvature):
            return super().lipschitz(samples)
        return self._gram_ends(samples)[1] * (1 + 1e-12)

    def decision(self, features: Array, models: Array) -> Array:
        return np.einsum("nd,nd->n", self.rows(features, models)[0], models)

    def conic(self, cp: ModuleType, samples: Samples, x: Any) -> Any:
        users = samples.users
        assert users.targets is not None
        phi = self.conic_terms(cp, margins_matrix(samples, self) @ x, users.targets)
        return (1.0 / users.counts[users.owner]) @ phi + ridge_form(cp, self.ridge, self.shrunk(samples.dim), x)


def need_targets(loss: Loss, users: Users) -> Array:
    if users.targets is None:
        raise InvalidInput(f"{type(loss).__name__} needs targets, and these users have none",
                           remedy="Give y, or name the target column; to cluster rows use SquaredDistance()")
    return users.targets


def refuse_targets(users: Users, bad: Flags, expected: str, remedy: str) -> None:
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        user = int(users.owner[row])
        assert users.targets is not None
        raise InvalidInput(f"expected {expected}, got {users.targets[row]:g}",
                           where=f"user {users.names[user]!r}, its sample {row - int(users.offsets[user])}; "
                                 f"{int(bad.sum())} such targets in all",
                           remedy=remedy)


def require_positive(name: str, number: float) -> None:
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
    return [f"{alone.size} of {users.n_users} users have samples of one class only ({names}): alone they cannot tell "
            "the classes apart; with lam > 0 their models lean on the others."]
