"""The price of leaving a centre: a quadratic form P_i for each user, by its eigenvalues and axes.

An eigenvalue is a number in [0, inf]. Along an axis of price inf a model cannot leave its centre
(the direction is entirely shared), along one of price 0 it leaves for free (the direction is
entirely personal). The covariance C_i = P_i^-1 has the inverse eigenvalues, so either matrix can
say both.

`Space` and `objective_of` are the search for personal models around centres: where they may lie, at
which price, and the objective there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.base.errors import InvalidInput
from coterie.base.types import Array, Flags, Indices
from coterie.data.users import Participants
from coterie.losses.base import Loss, Samples
from coterie.losses.frame import Frame
from coterie.losses.newton import Evaluate

#: A number, a diagonal (dim,), a matrix (dim, dim), or one per user: (n_users, 1, dim) and
#: (n_users, dim, dim).
Form = npt.ArrayLike
#: A number for all users, one number per user, numbers by the users' names, or "rows".
Scale = float | npt.ArrayLike | Mapping[Any, float] | str | None

_SHAPES = "a number, (dim,), (dim, dim), (n_users, 1, dim) or (n_users, dim, dim)"


@dataclass(frozen=True, eq=False)
class Metric:
    """P_i = axes_i diag(prices_i) axes_i' of every user; which prices are 0 or inf is the same for
    all users.
    """

    prices: Array  # (n_users, dim), in [0, inf]
    # (dim, dim) or (n_users, dim, dim), orthonormal columns; None: the coordinates themselves.
    axes: Array | None

    @classmethod
    def of(cls, form: Form, scale: Scale, users: Participants, dim: int, *,
           inverse: bool = False) -> Metric:
        """The metric scale_i * form of these users.

        Parameters
        ----------
        form : see `Form`.
        scale : see `Scale`.
        users : whose metric.
        dim : length of a model.
        inverse : whether `form` is the covariance, the inverse of the metric.

        Raises
        ------
        InvalidInput : where a shape does not fit, a matrix is not positive semidefinite, or a scale
            is not positive.
        """
        name = "covariance" if inverse else "metric"
        values, axes = _decomposed(np.asarray(form, dtype=float), name, users.n_users, dim)
        if inverse:
            with np.errstate(divide="ignore"):
                values = 1.0 / values
        with np.errstate(over="ignore"):
            prices = np.array(np.broadcast_to(values * _scales(scale, users)[:, None],
                                              (users.n_users, dim)))
        kinds = np.where(np.isinf(prices), 1, np.where(prices == 0, -1, 0))
        if len(kinds) and (kinds != kinds[0]).any():
            user, axis = (int(k) for k in np.argwhere(kinds != kinds[0])[0])
            raise InvalidInput("which directions are entirely shared or entirely personal must be "
                               "the same for all "
                               f"users: coordinate {axis} differs from that of the first user",
                               where=f"user {users.names[user]!r}", remedy="Use a large or a small "
                                   "number instead")
        return cls(prices, axes)

    @property
    def finite(self) -> Flags:
        """(dim,) the axes along which a model can leave its centre."""
        return np.asarray(np.isfinite(self.prices).all(axis=0))

    @property
    def free(self) -> Flags:
        """(dim,) the axes along which it does so for free."""
        return np.asarray((self.prices == 0).all(axis=0))

    def take(self, users: Indices | None) -> Metric:
        """The metric of some users; all by default."""
        if users is None:
            return self
        return Metric(self.prices[users], self.axes if self.axes is None or self.axes.ndim == 2
                      else self.axes[users])

    def along(self, vectors: Array) -> Array:
        """(n, dim) vectors in the coordinates of the axes."""
        return vectors if self.axes is None else (self.axes.swapaxes(-1, -2)
                                                  @ vectors[..., None])[..., 0]

    def back(self, vectors: Array) -> Array:
        """(n, dim) vectors in the coordinates of the axes, in those of models."""
        return vectors if self.axes is None else (self.axes @ vectors[..., None])[..., 0]

    def covariances(self, vectors: Array) -> Array:
        """(n,) u' C u of vectors u that have no part along free axes."""
        paid = ~self.free
        return (self.along(vectors)[:, paid] ** 2 / self.prices[:, paid]).sum(axis=1)

    def bounded(self, vectors: Array) -> Array:
        """(n, dim) vectors without their part along free axes."""
        if not self.free.any():
            return vectors
        return self.back(np.where(self.free, 0.0, self.along(vectors)))

    def envelopes(self, hessians: Array) -> Array:
        """(n, dim, dim) the envelopes' Hessians H - H (H + P)^-1 H, from those of the losses.

        In units in which prices are 1, and with V the step that a model makes when its centre makes
        a step,

            min_V (1 + V)' H (1 + V) + V' V,      V = -(H + 1)^-1 H

        is a sum of positive semidefinite terms, and an error of V changes it only by the square of
        the error.
        """
        finite, free = self.finite, self.free
        units = np.where(finite & ~free, 1.0 / np.sqrt(np.where(finite & ~free, self.prices, 1.0)),
                         1.0)
        h = hessians if self.axes is None else self.axes.swapaxes(-1, -2) @ hessians @ self.axes
        h = units[:, :, None] * h * units[:, None, :]
        d, moving = h.shape[1], finite.astype(float)
        paid = np.eye(d) * (finite & ~free)
        system = moving[:, None] * h * moving + paid + np.eye(d) * ~finite
        diagonal = np.einsum("nii->ni", system)
        scale = np.sqrt(np.maximum(diagonal, 1e-20
                                   * diagonal.max(axis=1, initial=0.0, keepdims=True) + 1e-300))
        scaled = system / (scale[:, :, None] * scale[:, None, :]) + 1e-13 * np.eye(d)
        v = -np.linalg.solve(scaled, (moving[:, None] * h) / scale[:, :, None]) / scale[:, :, None]
        w = np.eye(d) + v
        out = w.swapaxes(1, 2) @ h @ w + v.swapaxes(1, 2) @ paid @ v
        out = np.where(free[:, None] | free, 0.0, out) / (units[:, :, None] * units[:, None, :])
        out = out if self.axes is None else self.axes @ out @ self.axes.swapaxes(-1, -2)
        return np.asarray(0.5 * (out + out.swapaxes(1, 2)))


def _decomposed(form: Array, name: str, n_users: int, dim: int) -> tuple[Array, Array | None]:
    """Eigenvalues, (dim,) or (n_users, dim), and axes."""
    shapes = {(): "round", (dim,): "diagonal", (dim, dim): "full", (n_users, 1, dim): "diagonal",
              (n_users, dim, dim): "full"}
    if form.shape not in shapes:
        raise InvalidInput(f"expected a {name} of shape {_SHAPES} with n_users = {n_users} and dim "
                           f"= {dim}, got "
                           f"shape {form.shape}", remedy="For one number per user use scale")
    full = shapes[form.shape] == "full" and dim > 1
    if np.isnan(form).any() or (np.isinf(form).any() and full):
        raise InvalidInput(
            f"expected a {name} of {'finite numbers' if full else 'numbers in [0, inf]'}",
            remedy="A diagonal may have the entry inf" if full else "Remove missing values")
    if not full:
        values = form.reshape(1 if form.ndim < 3 else n_users, -1)
        if (values < 0).any():
            raise InvalidInput(f"expected a {name} >= 0, got {values.min():g}",
                               remedy="Use numbers in [0, inf]")
        return np.broadcast_to(values, (len(values), dim)), None
    size = np.abs(form).max(axis=(-1, -2), keepdims=True)
    if (np.abs(form - form.swapaxes(-1, -2)) > 1e-8 * size).any():
        raise InvalidInput(f"expected a symmetric {name}", remedy="A diagonal is given as a vector")
    values, axes = np.linalg.eigh(0.5 * (form + form.swapaxes(-1, -2)))
    if (values[..., 0] < -1e-8 * size[..., 0, 0]).any():
        raise InvalidInput(f"expected a positive semidefinite {name}, got the eigenvalue "
                           f"{values.min():g}", remedy="Add a multiple of the identity")
    if (form == form * np.eye(dim)).all():  # the coordinates themselves, exactly
        return np.diagonal(form, axis1=-2, axis2=-1).reshape(-1, dim), None
    level = dim * np.finfo(float).eps * values[..., -1:]
    values = np.where(values <= level, 0.0, values)
    if form.ndim == 3 and (values == 0).any():
        raise InvalidInput(f"expected a positive definite {name} for each user",
                           remedy="Give one semidefinite matrix for all users and a scale, or "
                                  "diagonals")
    return values.reshape(-1, dim), axes


def _scales(scale: Scale, users: Participants) -> Array:
    """(n_users,) the factor of each user."""
    if scale is None:
        return np.ones(users.n_users)
    if isinstance(scale, str):
        if scale != "rows":
            raise InvalidInput(f"unknown scale {scale!r}",
                               remedy='Give numbers, or "rows" for 1 / number of rows')
        return 1.0 / np.maximum(users.data.sizes, 1)
    if isinstance(scale, Mapping):
        missing = [name for name in users.names if name not in scale]
        if missing:
            raise InvalidInput("the scale has no number for a user", where=f"user {missing[0]!r}",
                               remedy="Give a number for each user")
        factors = np.array([float(scale[name]) for name in users.names])
    else:
        factors = np.asarray(scale, dtype=float)
    if factors.shape not in ((), (users.n_users,)):
        raise InvalidInput(f"expected one scale per user, {users.n_users} in all, got shape "
                           f"{factors.shape}",
                           remedy='For other users too, give a number, "rows", or a dict by name')
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise InvalidInput("expected finite scales > 0",
                           remedy="Remove the users without information")
    return np.array(np.broadcast_to(factors, users.n_users))


class Space:
    """Where personal models may lie: local points origin + span c, at the price 1/2 c' price c.

    Attributes
    ----------
    kept : (dim,) the axes along which they may leave the centre; c has one coordinate for each.
    span : (dim, r) or (n, dim, r) their directions in local coordinates; None: c are the local
        coordinates.
    turns : (n, dim, dim) row k is coordinate k of c along the axes of the metric; None: c lie along
        the axes.
    price : (n, r, r)
    """

    def __init__(self, metric: Metric, frame: Frame | None, who: Indices) -> None:
        kept, d = metric.finite, metric.prices.shape[1]
        self.kept, self.span, self.turns = kept, None, None
        if frame is not None and kept.all():
            # Local coordinates, in which the loss is well scaled.
            unit = np.broadcast_to(np.eye(d), (len(who), d, d)).reshape(-1, d)
            steps = frame.leave(unit, np.repeat(who, d), steps=True).reshape(len(who), d, d)
            self.turns = np.array(steps if metric.axes is None else steps @ metric.axes)
            self.price = (self.turns * metric.prices[:, None, :]) @ self.turns.swapaxes(1, 2)
            return
        if metric.axes is not None or not kept.all() or frame is not None:
            self.span = np.ascontiguousarray((np.eye(d) if metric.axes is None
                                              else metric.axes)[..., kept])
            if frame is not None:
                self.span = frame.basis(self.span, who)
        self.price = metric.prices[:, kept, None] * np.eye(int(kept.sum()))

    def _span(self, rows: Indices | None) -> Array:
        assert self.span is not None
        return self.span if self.span.ndim == 2 or rows is None else self.span[rows]

    def local(self, c: Array, rows: Indices | None = None) -> Array:
        """Steps in local coordinates."""
        return c if self.span is None else (self._span(rows) @ c[..., None])[..., 0]

    def gradients(self, g: Array, rows: Indices) -> Array:
        return g if self.span is None else (self._span(rows).swapaxes(-1, -2)
                                            @ g[..., None])[..., 0]

    def hessians(self, h: Array, rows: Indices) -> Array:
        return h if self.span is None else self._span(rows).swapaxes(-1, -2) @ h @ self._span(rows)

    def along(self, c: Array) -> Array:
        """(n, dim) steps along the axes of the metric."""
        if self.turns is not None:
            return (self.turns.swapaxes(1, 2) @ c[..., None])[..., 0]
        steps = np.zeros((len(c), len(self.kept)))
        steps[:, self.kept] = c
        return steps


def objective_of(loss: Loss, samples: Samples, who: Indices, space: Space, origin: Array,
                 linear: Array | None, lift: Array) -> Evaluate:
    """f(origin + span c) + <linear, span c> + 1/2 c' price c + lift of some users, for `minimise`.
    """

    def objective(rows: Indices, c: Array, order: int) -> tuple[Array, Array, Array]:
        step = space.local(c, rows)
        # a trial point far out is rejected, not reported.
        with np.errstate(over="ignore", invalid="ignore"):
            f, g, h = loss.evaluate_local(samples, origin[rows] + step, order, who[rows])
            price = space.price[rows]
            force = (price @ c[..., None])[..., 0]
            f = f + 0.5 * np.einsum("nd,nd->n", force, c) + lift[rows]
            if linear is not None:
                f = f + np.einsum("nd,nd->n", linear[rows], step)
                g = g + linear[rows] if order > 0 else g
            g = space.gradients(g, rows) + force if order > 0 else g
            h = space.hessians(h, rows) + price if order > 1 else h
        return f, g, h

    return objective


def lower(objective: Evaluate, first: Array, second: Array) -> Array:
    """For each user the one of two points with the lower objective."""
    rows = np.arange(len(first))
    better = objective(rows, second, 0)[0] < np.nan_to_num(objective(rows, first, 0)[0], nan=np.inf,
                                                           posinf=np.inf)
    return np.where(better[:, None], second, first)
