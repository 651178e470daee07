"""Local problems of wide models: Newton's method with Hessians that are operators."""

from __future__ import annotations

import numpy as np

from coterie.base.types import Array, Indices
from coterie.losses.base import Loss, Samples
from coterie.losses.curvature import Curvature
from coterie.losses.newton import Minimum, Search, SearchStep

_HESSIANS = 2**22  # numbers in the Hessians of all users that can be kept


def too_wide(loss: Loss, samples: Samples) -> bool:
    """Whether models are wide, and Hessians of all users too large to learn from them how models
    differ.

    Those of squared losses are exact: fewer of them say which coordinates differ, such as the
    intercept.
    """
    few = loss.quadratic and samples.n_users * samples.dim**2 <= _HESSIANS
    return loss.wide(samples) and not few


def minimise_wide(loss: Loss, samples: Samples, linear: Array, t: Array, centres: Array,
                  start: Array,
                  who: Indices) -> Minimum:
    """Each user's minimise_x f_i(x) + <linear_i, x> + (t_i / 2) ||x - centres_i||^2.

    Parameters
    ----------
    loss, samples : a loss with wide models, and what it prepared.
    linear, centres : (n, dim).
    t : (n,).
    start : (n, dim) where to begin.
    who : (n,) positions of the users concerned.

    Returns
    -------
    Minimum
    """
    search = _WideSearch(loss, samples, linear, t, centres, who)
    search.begin(start)
    for _ in range(200):
        if not search.advance():
            break
    return search.ended()


class _WideSearch(Search):
    """The search of `coterie.losses.newton` with steps from operators.

    Attributes
    ----------
    loss, samples, linear, pulls, centres, who : the arguments of `minimise_wide`.
    curvature, pull : the Hessians at the current points, and the t of each user still searching.
    """

    curvature: Curvature
    pull: Array

    def __init__(self, loss: Loss, samples: Samples, linear: Array, t: Array, centres: Array,
                 who: Indices) -> None:
        self.loss, self.samples, self.linear, self.centres, self.who = loss, samples, linear, \
            centres, who
        self.pulls = t

    def begin(self, start: Array) -> None:
        super().__init__(self._evaluate, start)

    def _evaluate(self, rows: Indices, x: Array, order: int) -> tuple[Array, Array, Array]:
        everyone = len(rows) == self.samples.n_users \
            and (self.who == np.arange(len(self.who))).all()
        users = None if everyone else self.who[rows]
        # a trial point far out is rejected, not reported.
        with np.errstate(over="ignore", invalid="ignore"):
            if order > 1:
                f, g, self.curvature = self.loss.expand(self.samples, x, users)
                self.pull = self.pulls[rows]
            else:
                f, g, _ = self.loss.evaluate(self.samples, x, order, users)
            f = f + np.einsum("nd,nd->n", self.linear[rows], x)
            g = g + self.linear[rows] if order > 0 else g
            if self.pulls.any():
                step = x - self.centres[rows]
                f = f + 0.5 * self.pulls[rows] * np.einsum("nd,nd->n", step, step)
                g = g + self.pulls[rows, None] * step if order > 0 else g
        return f, g, np.empty(0)

    def direction(self, norms: Array) -> SearchStep:
        x, gradient = self.x, self.gradient
        size = self.curvature.trace() / self.curvature.shape[1] + self.pull
        damping = self.damping * norms * size
        step = -self.curvature.inverse(self.pull + damping)(gradient)
        decrement = np.einsum("nd,nd->n", -gradient, step)
        scale = np.abs(self.value) + np.abs(np.einsum("nd,nd->n", gradient, x)) + 1e-9 * size \
            * (x**2).sum(axis=1)
        lengths = np.linalg.norm(step, axis=1)
        cut = np.divide(self.reach, lengths, out=np.ones_like(lengths), where=lengths > self.reach)
        return SearchStep(cut[:, None] * step, cut, np.maximum(decrement, 0.0), scale + 1e-300,
                          damping == 0.0)
