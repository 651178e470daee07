"""Quadratics of wide models: curvature in the span of a few vectors, and one number outside of it.

A user with few rows bends its loss in the span of these rows only. With orthonormal rows Q (b x p)
that span it, the same for each of k outputs, and orthonormal rows V (q x b k) of directions within
the span, the Hessian is

    H = outer I + (Q x I_k)' (core - outer I) (Q x I_k),    core = inner I + V' diag(gains) V
    (H + shift)^-1 = I / s + (Q x I_k)' ((1/i - 1/s) I - V' diag(gains / (gains + i)) V / i) (Q x
    I_k)

with s = outer + shift and i = inner + shift, so no matrix is larger than the span. Rows that are
zero are padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np

from coterie.base.errors import Incompatible, InvalidInput
from coterie.base.types import Array, Indices
from coterie.data.users import Participants
from coterie.losses.base import SUMS, DualBounds, Evaluation, Loss, Samples
from coterie.losses.curvature import Inverse, RowCurvature, RowInverse, RowTerms, WideEvaluation
from coterie.losses.newton import Minimum


class Span(NamedTuple):
    """Hessians of n users as in the module."""

    basis: Array  # (n, b, p) Q
    axes: Array  # (n, q, b k) V
    gains: Array  # (n, q) >= 0
    inner: Array  # (n,) > 0
    outer: Array  # (n,) > 0

    @property
    def outputs(self) -> int:
        b = self.basis.shape[1]
        return self.axes.shape[2] // b if b else 1

    def take(self, users: Indices | slice) -> Span:
        """Those of some users."""
        return Span(*(part[users] for part in self))


class SpanCurvature(RowCurvature):
    """The Hessians of a `Span` as operators.

    Parameters
    ----------
    span : of the users.
    """

    def __init__(self, span: Span) -> None:
        n, _, p = span.basis.shape
        nothing = np.empty((n, 0, 1))
        self.span, self.outputs = span, span.outputs
        self.terms = (RowTerms(np.arange(n), span.basis, nothing, nothing, nothing[..., 0]),)
        # What preconditioners ask for: the curvature everywhere, and beside it that of each vector.
        self.ridges, self.basis, \
            self.intercept = np.full(p, float(span.outer.min(initial=np.inf))), None, False
        self.shape = n, p * self.outputs

    def times(self, vectors: Array) -> Array:
        span, n = self.span, len(vectors)
        t = (span.basis @ vectors.reshape(n, -1, self.outputs)).reshape(n, -1)
        along = span.gains * (span.axes @ t[..., None])[..., 0]
        change = (span.inner - span.outer)[:, None] * t + (along[:, None] @ span.axes)[:, 0]
        back = span.basis.swapaxes(1, 2) @ change.reshape(n, -1, self.outputs)
        return np.asarray(span.outer[:, None] * vectors + back.reshape(vectors.shape))

    def mean_mass(self, part: RowTerms) -> Array:
        span = self.span.take(part.users)
        along = np.einsum("nq,nqc,nqc->nc", span.gains, span.axes, span.axes, optimize=True)
        mean = along.reshape(len(along), -1, self.outputs).mean(axis=2)
        return np.asarray(np.maximum((span.inner - span.outer)[:, None] + mean, 0.0))

    def trace(self) -> Array:
        inside = self.outputs * (self.span.basis != 0).any(axis=2).sum(axis=1)
        return np.asarray(self.span.outer * (self.shape[1] - inside) + self.span.inner * inside
                          + self.span.gains.sum(axis=1))

    def level(self) -> float | None:
        outer = self.span.outer
        return float(outer[0]) if not self.span.basis.shape[1] and (outer == outer[0]).all() \
            else None

    def inverse(self, shift: Array, dtype: type = np.float64) -> Inverse:
        return SpanInverse(self, np.broadcast_to(shift, self.shape[:1]), dtype)


class SpanInverse(RowInverse):
    """(H_i + shift_i)^-1 as a map; see the module.

    Attributes
    ----------
    scales : (n_users, p) s, in every column.
    plain, along : (n_users, 1) 1/i - 1/s, and (n_users, q) gains / (gains + i) / i.
    """

    def __init__(self, curvature: SpanCurvature, shift: Array, dtype: type) -> None:
        span = curvature.span
        s, i = span.outer + shift, (span.inner + shift)[:, None]
        self.curvature, self.dtype, self.basis = curvature, dtype, None
        self.plain: Array = (1.0 / i - 1.0 / s[:, None]).astype(dtype)
        self.along: Array = (span.gains / (span.gains + i) / i).astype(dtype)
        self.scales = np.repeat(s[:, None], span.basis.shape[2], axis=1).astype(dtype)
        self.axes: Array = span.axes.astype(dtype, copy=False)
        self.designs = [span.basis.astype(dtype, copy=False)]

    def __call__(self, vectors: Array) -> Array:
        design, k, n = self.designs[0], self.curvature.outputs, len(vectors)
        v: Array = vectors.reshape(n, -1, k).astype(self.dtype, copy=False)
        t = (design @ v).reshape(n, -1)
        along = self.along * (self.axes @ t[..., None])[..., 0]
        inside = self.plain * t - (along[:, None] @ self.axes)[:, 0]
        return np.asarray(v / self.scales[:, :1, None] + design.swapaxes(1, 2)
                          @ inside.reshape(n, -1, k)).reshape(
            vectors.shape)

    def average(self, number: int) -> Array:
        """(n, b, b) s^2 times the mean over outputs of what `__call__` subtracts in the span, at
        least 0.
        """
        n, b, _ = self.designs[0].shape
        k, q = self.curvature.outputs, self.axes.shape[1]
        rows = (np.sqrt(self.along / k)[..., None] * self.axes).reshape(n, q, b, k).swapaxes(2,
            3).reshape(n, q * k, b)
        mean = rows.swapaxes(1, 2) @ rows - self.plain[..., None] * np.eye(b, dtype=self.dtype)
        if (self.plain > 0).any():  # where there is less curvature inside than outside
            values, vectors = np.linalg.eigh(mean)
            mean = (vectors * np.maximum(values, 0.0)[:, None, :]) @ vectors.swapaxes(1, 2)
        return np.asarray(self.scales[:, :1, None] ** 2 * mean)


@dataclass(frozen=True, kw_only=True, eq=False)
class SpanQuadratic(Loss):
    """A quadratic function for each user, with a Hessian as in the module; no data are needed.

    Parameters
    ----------
    point, value, gradient : as for `Quadratic`.
    span : the Hessians.

    Example
    -------
    >>> from coterie.data.users import Participants
    >>> loss = SpanQuadratic(point=np.zeros((1, 2)), value=np.ones(1), gradient=np.ones((1, 2)),
    ...                      span=Span(np.array([[[1.0, 0.0]]]), np.ones((1, 1, 1)),
    ...                                np.full((1, 1), 3.0), np.ones(1), np.ones(1)))
    >>> loss.local(loss.prepare(Participants(["ann"]))).points.tolist()
    [[-0.25, -1.0]]
    """

    quadratic: ClassVar[bool] = True
    point: Array
    value: Array
    gradient: Array
    span: Span

    @cached_property
    def hessian(self) -> SpanCurvature:
        """The Hessians as operators."""
        return SpanCurvature(self.span)

    def _hessians(self, users: Indices | None) -> SpanCurvature:
        everyone = users is None or np.array_equal(users, np.arange(len(self.point)))
        return self.hessian if users is None or everyone else SpanCurvature(self.span.take(users))

    def dim(self, users: Participants) -> int:
        return int(self.point.shape[1])

    def prepare(self, users: Participants) -> Samples:
        if users.n_users != len(self.point):
            raise InvalidInput(f"expected {len(self.point)} users, one for each function, got "
                               f"{users.n_users}",
                               remedy="Give the users these functions belong to")
        return super().prepare(users)

    def wide(self, samples: Samples) -> bool:
        return True

    def expand(self, samples: Samples, models: Array,
               users: Indices | None = None) -> WideEvaluation:
        """Values, gradients and Hessians as operators."""
        values, gradients, _ = self.evaluate(samples, models, 1, users)
        return WideEvaluation(values, gradients, self._hessians(users))

    def evaluate(self, samples: Samples, models: Array, order: int = 2,
                 users: Indices | None = None) -> Evaluation:
        if order > 1:
            raise Incompatible("Hessians of wide models are operators: use `expand`.")
        who = slice(None) if users is None else users
        steps = models - self.point[who]
        changes = self._hessians(users).times(steps)
        slopes = self.gradient[who]
        return Evaluation(self.value[who] + np.einsum("nd,nd->n", slopes + 0.5 * changes, steps),
                          slopes + changes,
                          np.empty(0))

    def local(self, samples: Samples, slopes: Array | None = None, start: Array | None = None,
              users: Indices | None = None) -> Minimum:
        who = np.arange(samples.n_users) if users is None else users
        u = np.zeros((len(who), samples.dim)) if slopes is None else slopes
        points, values = self._best(samples, u, who)
        return Minimum(points, values, np.zeros(len(who)), np.ones(len(who), dtype=bool))

    def _best(self, samples: Samples, slopes: Array, who: Indices) -> tuple[Array, Array]:
        """The minima of f - <slopes, x>, and the values there."""
        inverse = self._hessians(who).inverse(np.zeros(len(who)))
        points = self.point[who]
        for _ in range(2):  # the second step removes what rounding left of the first one
            points = points - inverse(self.evaluate(samples, points, 1, who).gradients - slopes)
        return points, self.evaluate(samples, points, 0, who).values - np.einsum("nd,nd->n", slopes,
            points)

    def dual_bounds(self, samples: Samples, slopes: Array, start: Array | None = None,
                    users: Indices | None = None,
                    about: Array | None = None) -> DualBounds:
        who = np.arange(samples.n_users) if users is None else users
        points, values = self._best(samples, slopes, who)
        shift = np.zeros(len(who)) if about is None else np.einsum("nd,nd->n", slopes, about)
        rounding = self.value_rounding(samples, points,
                                       who) + SUMS * (np.abs(slopes * points).sum(axis=1)
                                                                       + np.abs(shift))
        return DualBounds(-values - shift, rounding, np.zeros(len(who)))

    def value_rounding(self, samples: Samples, models: Array,
                       users: Indices | None = None) -> Array:
        who = slice(None) if users is None else users
        steps = models - self.point[who]
        changes = self._hessians(users).times(steps)
        return SUMS * (np.abs(self.value[who])
                       + (np.abs(steps) * (np.abs(self.gradient[who]) + np.abs(changes))).sum(
            axis=1))
