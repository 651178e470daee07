"""The search for personal models around centres: where they may lie, at which price, and the
objective there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coterie.base.types import Array, Indices
from coterie.losses.base import Loss, Samples
from coterie.losses.frame import Frame
from coterie.losses.metric import Metric


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
            self.span = np.ascontiguousarray((np.eye(d) if metric.axes is None else metric.axes)[
                ..., kept])
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
        return g if self.span is None else (self._span(rows).swapaxes(-1, -2) @ g[..., None])[...,
            0]

    def hessians(self, h: Array, rows: Indices) -> Array:
        return h if self.span is None else self._span(rows).swapaxes(-1, -2) @ h @ self._span(rows)

    def along(self, c: Array) -> Array:
        """(n, dim) steps along the axes of the metric."""
        if self.turns is not None:
            return (self.turns.swapaxes(1, 2) @ c[..., None])[..., 0]
        steps = np.zeros((len(c), len(self.kept)))
        steps[:, self.kept] = c
        return steps


@dataclass(frozen=True, eq=False)
class Objective:
    """f(origin + span c) + <linear, span c> + 1/2 c' price c + lift of some users, for `minimise`.
    """

    loss: Loss
    samples: Samples
    who: Indices
    space: Space
    origin: Array
    linear: Array | None
    lift: Array  # (n,) added to values

    def __call__(self, rows: Indices, c: Array, order: int) -> tuple[Array, Array, Array]:
        step = self.space.local(c, rows)
        # a trial point far out is rejected, not reported.
        with np.errstate(over="ignore", invalid="ignore"):
            f, g, h = self.loss.evaluate_local(self.samples, self.origin[rows] + step, order,
                                               self.who[rows])
            price = self.space.price[rows]
            force = (price @ c[..., None])[..., 0]
            f = f + 0.5 * np.einsum("nd,nd->n", force, c) + self.lift[rows]
            if self.linear is not None:
                f = f + np.einsum("nd,nd->n", self.linear[rows], step)
                g = g + self.linear[rows] if order > 0 else g
            g = self.space.gradients(g, rows) + force if order > 0 else g
            h = self.space.hessians(h, rows) + price if order > 1 else h
        return f, g, h


def lower(objective: Objective, first: Array, second: Array) -> Array:
    """For each user the one of two points with the lower objective."""
    rows = np.arange(len(first))
    better = objective(rows, second, 0)[0] < np.nan_to_num(objective(rows, first, 0)[0], nan=np.inf,
                                                           posinf=np.inf)
    return np.where(better[:, None], second, first)
