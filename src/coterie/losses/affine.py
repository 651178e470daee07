"""Losses whose models act on a sample through a margin: a ridge, an intercept, and one convex
function.

A linear loss is made of one convex function of the margin and the target,

    f_i(x) = ridge/2 ||w||^2 + mean_j phi(t_ij, y_ij),    t_ij = <w, a_ij> + intercept_sign * b,
                                                          x = [w, b]

and a class states phi by its value, slope and curvature; everything else (gradients and Hessians of
all users at once, conjugates, proximal steps) follows. The intercept b is the last coordinate and
is not under the ridge, unless `penalize_intercept` says so; then the ridge is ridge/2 ||x||^2.

The losses themselves are in `coterie.losses.linear`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, ClassVar, Self

import numpy as np

from coterie.base.errors import Incompatible, InvalidInput
from coterie.base.types import Array, Flags, Indices
from coterie.data.users import Block, Participants, Users
from coterie.losses.base import (
    NOISE,
    SUMS,
    DualBounds,
    Evaluation,
    Magnitudes,
    Samples,
    need_targets,
)
from coterie.losses.blocks import BlockLoss, Terms, in_blocks
from coterie.losses.curvature import WideEvaluation
from coterie.losses.frame import Frame
from coterie.losses.newton import Minimum
from coterie.losses.rows import expand, is_wide, minimise_wide, row_bounds, value_rounding

# Times the terms of a gradient: how far beside a slope bounds are computed, if none is found at it.
_BESIDE = 1e-10


@dataclass(frozen=True, kw_only=True)
class AffineLoss(BlockLoss):
    """Models that act on a sample through <w, a> + intercept_sign * b.

    Parameters
    ----------
    ridge : weight of ridge/2 ||w||^2.
    intercept : whether a model ends in an intercept b.
    penalize_intercept : whether the ridge is on the intercept too, ridge/2 (||w||^2 + b^2). Then
        every user has exactly one best model, also one with samples of a single class, and f_i is
        strongly convex with constant `ridge`.

    Raises
    ------
    InvalidInput : where `ridge` is not a finite number >= 0.

    Example
    -------
    >>> import coterie as ct
    >>> users = ct.Users.from_arrays([[0.0], [1.0], [2.0]], [1, 1, 1], ["ann", "ann", "ann"])
    >>> for loss in (ct.Logistic(), ct.Logistic(penalize_intercept=True)):
    ...     print(loss.local(loss.prepare(users)).converged.tolist())
    [False]
    [True]
    """

    affine: ClassVar[bool] = True
    ridge: float = 1e-3
    intercept: bool = True
    penalize_intercept: bool | float = False

    def __post_init__(self) -> None:
        if not (np.isfinite(self.ridge) and self.ridge >= 0):
            raise InvalidInput(f"ridge must be a finite number >= 0, got {self.ridge!r}",
                               remedy="Use for example 1e-3")

    def design(self, features: Array, real: Flags, local: bool = False) -> Array:
        if not self.intercept:
            return features
        # Padding rows are zero throughout, so their margin is 0 under any model.
        return np.concatenate([features, (1.0 if local else self.intercept_sign) * real[..., None]],
                              axis=-1)

    def frame(self, users: Users) -> Frame | None:
        outputs = self.dim(users) // (users.n_features + self.intercept)
        return Frame.of(users, centred=self.free_intercept,
                        sign=self.intercept_sign * self.intercept, outputs=outputs,
                        level=self.neutral(users) if self.free_intercept else None)

    def with_ridge(self, ridge: float, penalize_intercept: float | None = None) -> Self:
        share = self.penalize_intercept if penalize_intercept is None else penalize_intercept
        return replace(self, ridge=ridge, penalize_intercept=share)

    def neutral(self, users: Users) -> Array:
        """(n_users,) the margin that knows a user's targets but no features; 0 for classes."""
        return np.zeros(users.n_users)

    def _sizes(self, samples: Samples) -> Array:
        z = np.zeros((samples.n_users, samples.dim))
        if self.free_intercept:
            outputs = samples.dim // (samples.users.n_features + 1)
            z[:, -outputs:] = self.neutral(samples.users.data)[:, None]
            z[:, -outputs:] *= self.intercept_sign
            if samples.frame is not None:  # in local coordinates the intercept has the sign +1
                z[:, -outputs:] = self.neutral(samples.users.data)[:, None] \
                    - samples.frame.level[:, None]
        offsets = NOISE * self.neutral(samples.users.data) ** 2
        return np.abs(self.evaluate_local(samples, z, 0).values) + offsets

    def ridges(self, block: Block, dim: int) -> Array:
        """(dim,) or (n, dim) the weight of each coordinate's square, twice over."""
        weights = self.ridge * self.shrunk(dim, dim // block.features.shape[2])
        return weights if block.units is None else weights / block.units**2

    def curvatures(self, samples: Samples) -> Array:
        every = self.ridge * self.shrunk(samples.dim,
                                         samples.dim // (samples.users.n_features + self.intercept))
        if samples.frame is None:
            return np.broadcast_to(every, (samples.n_users, samples.dim))
        return np.asarray(every / samples.frame.units(np.arange(samples.n_users)) ** 2)

    def ridge_bounds(self, bounds: DualBounds, samples: Samples, slopes: Array,
                     about: Array | None) -> DualBounds:
        """As for any loss. With phi >= 0, f(x) >= 1/2 sum_k c_k x_k^2 gives f*(u) <= sum_k u_k^2 /
        (2 c_k). It is the conjugate where phi vanishes in the limit only: samples of one class, and
        a slope 0 of the intercept.
        """
        rows = np.flatnonzero(np.isinf(bounds.values)) if self.least >= 0 \
            else np.empty(0, dtype=np.intp)
        c = self.ridge * self.shrunk(samples.dim,
                                     samples.dim // (samples.users.n_features + self.intercept))
        rows = rows[(slopes[rows][:, c == 0] == 0).all(axis=1)]
        u = slopes[rows]
        ridges = np.divide(u**2, 2.0 * c, out=np.zeros_like(u), where=c > 0).sum(axis=1)
        moved = np.zeros_like(u) if about is None else u * about[rows]
        out = DualBounds(*(part.copy() for part in bounds))
        out.values[rows] = ridges - moved.sum(axis=1)
        out.rounding[rows] = SUMS * (ridges + np.abs(moved).sum(axis=1))
        out.slack[rows] = ridges
        return out

    def shrunk(self, dim: int, outputs: int = 1) -> Array:
        share = np.ones(dim)
        if self.intercept:
            share[dim - outputs:] = float(self.penalize_intercept)
        return share

    @property
    def free_intercept(self) -> bool:
        return self.intercept and not self.penalize_intercept

    def strong_convexity(self, samples: Samples) -> Array:
        least = min(1.0, float(self.penalize_intercept)) if self.intercept else 1.0
        return np.full(samples.n_users, self.ridge * least)

    # ---- wide models: see `coterie.losses.rows`

    def wide(self, samples: Samples) -> bool:
        return is_wide(self, samples)

    def expand(self, samples: Samples, models: Array,
               users: Indices | None = None) -> WideEvaluation:
        return expand(self, samples, models, users)

    def prox(self, samples: Samples, linear: Array | None, t: Array | float, centres: Array | None,
             start: Array | None = None, users: Indices | None = None) -> Minimum:
        if not self.wide(samples):
            return super().prox(samples, linear, t, centres, start, users)
        return minimise_wide(self, samples, linear, t, centres, start, users)

    def dual_bounds(self, samples: Samples, slopes: Array, start: Array | None = None,
                    users: Indices | None = None, about: Array | None = None) -> DualBounds:
        if not self.wide(samples):
            return super().dual_bounds(samples, slopes, start, users, about)
        who = np.arange(samples.n_users) if users is None else users
        about = np.zeros_like(slopes) if about is None else about
        start = about if start is None else start
        return row_bounds(self, samples, slopes, start, about, who)

    def value_rounding(self, samples: Samples, models: Array,
                       users: Indices | None = None) -> Array:
        if not self.wide(samples):
            return super().value_rounding(samples, models, users)
        return value_rounding(self, samples, models, users)

    def rows(self, features: Array, models: Array) -> tuple[Array, int]:
        """The design of new rows and how many outputs their models have; refuses what does not fit.
        """
        rows = self.design(features, np.ones(len(features), dtype=bool))
        outputs, left = divmod(models.shape[1], rows.shape[1])
        if left or not outputs:
            raise InvalidInput(f"models of {models.shape[1]} coordinates do not fit rows of "
                               f"{rows.shape[1]}",
                               remedy="Give the columns the models were fitted on")
        return rows, outputs


@dataclass(frozen=True, kw_only=True)
class LinearLoss(AffineLoss):
    """One convex function phi of a margin and a target; see the module's formula.

    A class says `value`, `slope` and `curvature`, and where they exist `max_curvature`, the largest
    curvature anywhere, and `conic_terms`. The page "Adding a loss" in the docs shows a complete
    one.

    Example
    -------
    >>> import numpy as np
    >>> import coterie as ct
    >>> class Quartic(ct.LinearLoss):
    ...     def value(self, t, y):
    ...         return (t - y) ** 4
    ...     def slope(self, t, y):
    ...         return 4 * (t - y) ** 3
    ...     def curvature(self, t, y):
    ...         return 12 * (t - y) ** 2
    >>> users = ct.Users.from_arrays([[1.0], [2.0]], [1.0, 2.0], ["ann", "ann"])
    >>> loss = Quartic(ridge=0.0, intercept=False)
    >>> loss.values(loss.prepare(users), np.zeros((1, 1))).tolist()
    [8.5]
    """

    def dual_bounds(self, samples: Samples, slopes: Array, start: Array | None = None,
                    users: Indices | None = None, about: Array | None = None) -> DualBounds:
        best = super().dual_bounds(samples, slopes, start, users, about)
        rows = np.flatnonzero(~np.isfinite(best.values))
        if rows.size and self.intercept and not self.penalize_intercept and not self.wide(samples):
            who = rows if users is None else users[rows]
            about = np.zeros_like(slopes) if about is None else about
            start = about if start is None else start
            beside = self._bounds_beside(samples, slopes[rows], start[rows], who, about[rows])
            for full, part in zip(best, beside, strict=True):
                full[rows] = part
        return best

    def _bounds_beside(self, samples: Samples, slopes: Array, start: Array, who: Indices,
                       about: Array) -> DualBounds:
        """Bounds from slopes on both sides: a convex function is at most the larger of its values
        around a point.

        Where no row holds the intercept, computed gradients along it are 0 or multiples of the
        rounding of margins, and none of them need be near a slope that is itself a rounding error.
        Slopes a little beside are reached.
        """
        gap = np.abs(slopes - self.evaluate(samples, start, 1, who).gradients)[:, -1]
        step = _BESIDE * self.magnitudes(samples, np.zeros_like(slopes), who).gradients[:, -1]
        out = DualBounds(np.full(len(who), np.inf), np.zeros(len(who)), np.full(len(who), np.inf))
        near = np.flatnonzero(gap <= step)
        if near.size:
            last = np.arange(slopes.shape[1]) == slopes.shape[1] - 1
            one, other = (AffineLoss.dual_bounds(self, samples, slopes[near]
                                                 + side * step[near, None] * last, start[near],
                                                 who[near], about[near]) for side in (1, -1))
            for full, *sides in zip(out, one, other, strict=True):
                full[near] = np.maximum(*sides)
        return out

    @abstractmethod
    def value(self, t: Array, y: Array) -> Array:
        """phi(t, y), elementwise."""

    @abstractmethod
    def slope(self, t: Array, y: Array) -> Array:
        """The first derivative of phi in t, elementwise."""

    @abstractmethod
    def curvature(self, t: Array, y: Array) -> Array:
        """The second derivative of phi in t, elementwise."""

    def conic_terms(self, cp: ModuleType, t: Any, y: Array) -> Any:
        """phi of every row as a CVXPY expression.

        Raises
        ------
        Incompatible : where the loss has no such form.
        """
        raise Incompatible(f"{type(self).__name__} has no conic form: give it a `conic_terms` "
                           "method.")

    def conjugate(self, a: Array, y: Array) -> Array | None:
        """phi*(a, y) = max_t a t - phi(t, y), elementwise, inf outside its domain; None where it is
        not known.
        """
        return None

    def row_terms(self, block: Block, t: Array) -> Terms:
        y, weights = block.targets, block.weights
        t = t[..., 0]
        return Terms(weights * self.value(t, y), (weights * self.slope(t, y))[..., None],
                     (weights * self.curvature(t, y))[..., None])

    def row_duals(self, block: Block, t: Array, sums: Array | None) -> tuple[Array, Array]:
        y, weights, t = block.targets, block.weights, t[..., 0]
        slopes = self.slope(t, y)
        known = self.conjugate(slopes, y) is not None
        if sums is not None and known:  # moved along the curvature, so that the sums are right
            sign, curvature = block.features[..., -1], weights * self.curvature(t, y)
            total = (sign**2 * curvature).sum(axis=1)
            for _ in range(2):  # the second time removes what the first one's rounding left
                lack = sums[:, 0] - (sign * weights * slopes).sum(axis=1)
                share = np.divide(lack, total, out=np.zeros_like(lack), where=total > 0)
                slopes = slopes + sign * self.curvature(t, y) * share[:, None]
        conjugates = self.conjugate(slopes, y) if known else t * slopes - self.value(t, y)
        assert conjugates is not None
        return (weights * slopes)[..., None], np.where(weights > 0, weights * conjugates, 0.0)

    def dim(self, users: Participants) -> int:
        return users.n_features + self.intercept

    def evaluate_block(self, block: Block, models: Array, order: int) -> Evaluation:
        a, y, weights = block.features, block.targets, block.weights
        ridges = self.ridges(block, models.shape[1])
        t = (a @ models[:, :, None])[..., 0]
        values = (weights * self.value(t, y)).sum(axis=1) + 0.5 * (ridges * models**2).sum(axis=1)
        gradients, hessians = np.empty(0), np.empty(0)
        if order > 0:  # grad = A' (weights * phi') + ridge w
            gradients = ((weights * self.slope(t, y))[:, None, :] @ a)[:, 0] + ridges * models
        if order > 1:  # H = A' diag(weights * phi'') A + ridge
            hessians = ((weights * self.curvature(t, y))[..., None] * a).swapaxes(1, 2) @ a
            diagonal = np.arange(models.shape[1])
            hessians[:, diagonal, diagonal] += ridges
        return Evaluation(values, gradients, hessians)

    def magnitudes_block(self, block: Block, models: Array) -> Magnitudes:
        a, y, weights = block.features, block.targets, block.weights
        ridges = self.ridges(block, models.shape[1])
        t, terms = (a @ models[:, :, None])[..., 0], (np.abs(a)
                                                      @ np.abs(models)[:, :, None])[..., 0]
        values = (weights * np.abs(self.value(t, y))).sum(axis=1) \
            + 0.5 * (ridges * models**2).sum(axis=1)
        slopes = ((weights * np.abs(self.slope(t, y)))[:, None, :] @ np.abs(a))[:, 0] \
            + ridges * np.abs(models)
        terms = np.abs(t) + terms
        inside = self.curvature(t, y) * terms  # t itself is rounded
        most = self.max_curvature if np.isfinite(self.max_curvature) else self.curvature(t, y)
        # Which counts even where the loss is zero.
        values += 16 * SUMS * (weights * most * terms**2).sum(axis=1)
        return Magnitudes(values, slopes,
                          slopes + ((weights * inside)[:, None, :] @ np.abs(a))[:, 0])

    def upper_hessians(self, samples: Samples) -> Array | None:
        if not np.isfinite(self.max_curvature):
            return None
        out = np.empty((samples.n_users, samples.dim, samples.dim))
        for block in in_blocks(self, samples).blocks:  # max_curvature mean_j a_ij a_ij' + ridge
            root = np.sqrt(self.max_curvature * block.weights)[..., None] * block.features
            ridges = self.ridges(block, samples.dim)[..., None] * np.eye(samples.dim)
            out[block.index] = root.swapaxes(1, 2) @ root + ridges
        return out

    def _gram_ends(self, samples: Samples) -> tuple[Array, Array]:
        """Smallest and largest eigenvalue of `upper_hessians`, in the coordinates given."""
        upper = self.upper_hessians(samples)
        assert upper is not None
        if samples.frame is not None:
            upper = samples.frame.hessians(upper, np.arange(samples.n_users))
        ends = np.linalg.eigvalsh(upper)
        return np.asarray(ends[:, 0], dtype=float), np.asarray(ends[:, -1], dtype=float)

    def lipschitz(self, samples: Samples) -> Array:
        if not np.isfinite(self.max_curvature):
            return super().lipschitz(samples)
        return self._gram_ends(samples)[1] * (1 + 1e-12)

    def steep(self, samples: Samples) -> bool:
        return not np.isfinite(self.max_curvature)

    def decision(self, features: Array, models: Array) -> Array:
        return np.einsum("nd,nd->n", self.rows(features, models)[0], models)

    def conic(self, cp: ModuleType, samples: Samples, x: Any) -> Any:
        users = samples.users.data
        phi = self.conic_terms(cp, margins_matrix(samples, self) @ x, need_targets(self, users))
        return (1.0 / users.counts[users.owner]) @ phi + ridge_form(cp, self.ridge,
            self.shrunk(samples.dim), x)


def margins_matrix(samples: Samples, loss: AffineLoss, stride: int = 1, output: int = 0) -> Any:
    """The sparse matrix that takes all models in one vector to all rows' margins (of one output of
    several).
    """
    from scipy import sparse

    users = samples.users.data
    rows = loss.design(users.features, np.ones(users.n_samples, dtype=bool))
    columns = users.owner[:, None] * samples.dim + np.arange(rows.shape[1]) * stride + output
    return sparse.csr_array((rows.ravel(), (np.repeat(np.arange(users.n_samples), rows.shape[1]),
                                            columns.ravel())),
                            shape=(users.n_samples, users.n_users * samples.dim))


def ridge_form(cp: ModuleType, ridge: float, shrunk: Array, x: Any) -> Any:
    """ridge/2 ||w||^2 of every user; `shrunk` marks the coordinates of one model that are w."""
    n_users = x.size // shrunk.size
    roots = np.tile(np.sqrt(shrunk), n_users)
    held = np.flatnonzero(roots > 0)
    return ridge / 2 * cp.sum_squares(cp.multiply(roots[held], x[held])) if ridge > 0 else 0.0
