"""Wide models in the space of their rows: local solves and dual bounds without a matrix of dim x dim.

A model is wide where it has many coordinates and its user few rows; see `coterie.losses.curvature`.

With weights w_j of rows, slopes u = (u_w, u_b) and a ridge on w alone, weak duality gives for any alpha with
sum_j sign alpha_j = u_b

    f*(u) <= ||u_w - A_w' alpha||^2 / (2 ridge) + sum_j w_j phi*(alpha_j / w_j)

which needs no solve to be right, only to be tight: alpha = w phi'(t) at the local optimum, moved to the sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from coterie._typing import Array, Indices
from coterie.data.users import Block
from coterie.losses.base import SUMS, DualBounds, Samples
from coterie.losses.blocks import BlockSamples, in_blocks, take_users
from coterie.losses.curvature import RowCurvature, RowTerms
from coterie.losses.newton import Minimum, Search, SearchStep

if TYPE_CHECKING:
    from coterie.losses.affine import AffineLoss

_LEAST_DIM = 150  # coordinates from which models can be wide
_FEWER = 2.0  # times fewer numbers in systems of rows than in Hessians, from which models are wide
_REACH = 10.0  # times 1 + ||x||: how far away an intercept may be that a slope of rounding size moves


class Terms(NamedTuple):
    """The losses of the rows of users who have equally many."""

    values: Array  # (n, m) w phi(t)
    slopes: Array  # (n, m, k) w phi'(t)
    mass: Array  # (n, m, 1) w phi''(t), or for softmax (n, m, C) w times the probabilities


class WideEvaluation(NamedTuple):
    """Values (n,), gradients (n, dim) and the Hessians as operators."""

    values: Array
    gradients: Array
    curvature: RowCurvature


def is_wide(loss: AffineLoss, samples: Samples) -> bool:
    """Whether systems of rows are smaller than Hessians, by the shape of the data alone."""
    if samples.dim < _LEAST_DIM or not loss.ridge > 0 or not isinstance(samples, BlockSamples):
        return False
    outputs = samples.dim // (samples.users.n_features + loss.intercept)
    classes = 1 if outputs == 1 else outputs + 1
    numbers = sum(len(block.index) * block.features.shape[1] ** 2 for block in samples.blocks)
    return _FEWER * classes * numbers <= samples.n_users * samples.dim**2


def _parts(loss: AffineLoss, samples: Samples, users: Indices | None) -> list[tuple[Indices, Block, Array]]:
    """Blocks of the users concerned in the coordinates of models, with their positions and Gram matrices."""
    samples = in_blocks(loss, samples)
    out = []
    numbers = None if users is None else samples.positions[0][users]
    for k, block in enumerate(samples.blocks):
        if samples.frame is not None:
            plain = samples.users.blocks()[k]
            block = plain._replace(features=loss.design(plain.features, plain.weights > 0))
        if f"gram {k}" not in samples.known:
            columns = block.features[..., :-1] if loss.intercept else block.features
            samples.known[f"gram {k}"] = columns @ columns.swapaxes(1, 2)
        gram, rows = samples.known[f"gram {k}"], block.index
        if users is not None:
            rows = np.flatnonzero(numbers == k)
            if not rows.size:
                continue
            members = samples.positions[1][users[rows]]
            if len(members) < len(block.index) or (members != np.arange(len(members))).any():
                block, gram = take_users(block, members), gram[members]
        out.append((rows, block, gram))
    return out


def expand(loss: AffineLoss, samples: Samples, models: Array, users: Indices | None = None) -> WideEvaluation:
    """Values, gradients and curvature of these users' losses at their models."""
    n, dim = models.shape
    p = samples.users.n_features + loss.intercept
    k = dim // p
    ridges = loss.ridge * loss.shrunk(p)
    values, gradients = np.empty(n), np.empty((n, p, k))
    x, terms = models.reshape(n, p, k), list[RowTerms]()
    for rows, block, gram in _parts(loss, samples, users):
        part = loss.row_terms(block, block.features @ x[rows])
        values[rows] = part.values.sum(axis=1)
        gradients[rows] = block.features.swapaxes(1, 2) @ part.slopes
        terms.append(RowTerms(rows, block.features, gram, part.mass, block.weights))
    values += 0.5 * np.einsum("npk,p,npk->n", x, ridges, x, optimize=False)
    gradients += ridges[:, None] * x
    return WideEvaluation(values, gradients.reshape(n, dim),
                          RowCurvature(terms, ridges, loss.output_basis(k), bool(loss.intercept)))


def minimise_rows(loss: AffineLoss, samples: Samples, linear: Array, t: Array, centres: Array, start: Array,
                  who: Indices) -> Minimum:
    """Each user's minimise_x f_i(x) + <linear_i, x> + (t_i / 2) ||x - centres_i||^2."""
    pulled = bool(t.any())

    def evaluate(rows: Indices, x: Array, order: int) -> tuple[Array, Array, Array]:
        with np.errstate(over="ignore", invalid="ignore"):  # a trial point far out is rejected, not reported
            if order > 1:
                f, g, curvature = expand(loss, samples, x, who[rows])
                search.curvature, search.pull = curvature, t[rows]
            else:
                f, g, _ = loss.evaluate(samples, x, order, who[rows])
            f = f + np.einsum("nd,nd->n", linear[rows], x)
            g = g + linear[rows] if order > 0 else g
            if pulled:
                step = x - centres[rows]
                f = f + 0.5 * t[rows] * np.einsum("nd,nd->n", step, step)
                g = g + t[rows, None] * step if order > 0 else g
        return f, g, np.empty(0)

    search = _RowSearch()
    return search.run(evaluate, start)


class _RowSearch(Search):
    """Newton's method with steps from systems of rows; see `coterie.losses.newton`.

    Attributes
    ----------
    curvature, pull : the Hessians at the current points, and the t of each user.
    """

    curvature: RowCurvature
    pull: Array

    def __init__(self) -> None:
        pass

    def run(self, evaluate, start: Array, max_iter: int = 200) -> Minimum:  # type: ignore[no-untyped-def]
        super().__init__(evaluate, start)
        for _ in range(max_iter):
            if not self.advance():
                break
        return self.ended()

    def direction(self, norms: Array) -> SearchStep:
        x, gradient = self.x, self.gradient
        size = self.curvature.trace() / self.curvature.shape[1] + self.pull
        damping = self.damping * norms * size
        step = -self.curvature.inverse(self.pull + damping)(gradient)
        decrement = np.einsum("nd,nd->n", -gradient, step)
        scale = np.abs(self.value) + np.abs(np.einsum("nd,nd->n", gradient, x)) + 1e-9 * size * (x**2).sum(axis=1)
        lengths = np.linalg.norm(step, axis=1)
        cut = np.divide(self.reach, lengths, out=np.ones_like(lengths), where=lengths > self.reach)
        return SearchStep(cut[:, None] * step, cut, np.maximum(decrement, 0.0), scale + 1e-300, damping == 0.0)


def row_bounds(loss: AffineLoss, samples: Samples, points: Array, slopes: Array, about: Array,
               who: Indices) -> DualBounds:
    """Upper bounds on f_i*(slopes_i) - <slopes_i, about_i>, from the slopes of the rows at `points`; see the module."""
    n, dim = points.shape
    p = samples.users.n_features + loss.intercept
    k = dim // p
    ridges = loss.ridge * loss.shrunk(p)
    x, u = points.reshape(n, p, k), slopes.reshape(n, p, k)
    values, slack, rounding = np.empty(n), np.empty(n), np.empty(n)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for rows, block, _ in _parts(loss, samples, who):
            a = block.features
            t = a @ x[rows]
            alpha, conjugates = loss.row_duals(block, t, u[rows, -1] if loss.free_intercept else None)
            residual = np.abs(u[rows] - a.swapaxes(1, 2) @ alpha)
            level = np.abs(u[rows]) + np.abs(a).swapaxes(1, 2) @ np.abs(alpha)
            residual += SUMS * level  # it is rounded itself
            held = ridges > 0
            cost = (residual[:, held] ** 2 / (2.0 * ridges[held, None])).sum(axis=(1, 2))
            missed = residual[:, ~held].sum(axis=(1, 2))  # of the sums, at rounding level
            exact = (residual[:, ~held] <= 1e3 * SUMS * level[:, ~held]).all(axis=(1, 2))
            values[rows] = np.where(exact, conjugates.sum(axis=1) + cost, np.inf)
            slack[rows] = cost
            rounding[rows] = SUMS * np.abs(conjugates).sum(axis=1) + missed * _REACH * (
                1.0 + np.linalg.norm(points[rows] - about[rows], axis=1) + np.abs(x[rows, -1]).sum(axis=1))
        moved = slopes * about
        values -= moved.sum(axis=1)
        rounding += SUMS * np.abs(moved).sum(axis=1)
    finite = np.isfinite(values) & np.isfinite(rounding)
    return DualBounds(np.where(finite, values, np.inf), np.where(finite, rounding, 0.0),
                      np.where(finite, slack, np.inf))
