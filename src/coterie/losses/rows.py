"""Wide models in the space of their rows: local solves and dual bounds without a matrix of dim x
dim.

A model is wide where it has many coordinates and its user few rows; see `coterie.losses.curvature`.

With weights w_j of rows, slopes u = (u_w, u_b) and a ridge on w alone, weak duality gives for any
alpha with sum_j sign alpha_j = u_b

    f*(u) <= ||u_w - A_w' alpha||^2 / (2 ridge) + sum_j w_j phi*(alpha_j / w_j)

which needs no solve to be right, only to be tight: alpha = w phi'(t) at the local optimum, moved to
the sum.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from coterie.base.types import Array, Indices
from coterie.data.users import Block
from coterie.losses.base import SUMS, DualBounds, Loss, Samples
from coterie.losses.blocks import BlockLoss, BlockSamples, Terms, in_blocks, take_users
from coterie.losses.curvature import Curvature, RowCurvature, RowTerms, WideEvaluation
from coterie.losses.newton import Minimum, Search, Step

_LEAST_DIM = 150  # coordinates from which models can be wide
# Numbers in all Hessians below which these are quick enough, and bear worse conditions.
_LEAST_NUMBERS = 1e6
_FEWER = 2.0  # times fewer numbers in systems of rows than in Hessians, from which models are wide
_NEWTON, _TRIALS = 40, 40  # most Newton steps of a bound, and halvings of one
_TIGHT = 1e-12  # times a conjugate: no more than this is left to be gained
# Times 1 + ||x||: how far away an intercept may be that a slope of rounding size moves.
_REACH = 10.0


def is_wide(loss: BlockLoss, samples: Samples) -> bool:
    """Whether systems of rows are smaller than Hessians, by the shape of the data; not for odd
    units (`Frame`).
    """
    if samples.dim < _LEAST_DIM or not loss.ridge > 0 or not isinstance(samples, BlockSamples) \
        or samples.frame:
        return False
    if samples.n_users * samples.dim**2 < _LEAST_NUMBERS:
        return False
    outputs = samples.dim // (samples.users.n_features + loss.intercept)
    classes = 1 if outputs == 1 else outputs + 1
    numbers = sum(len(block.index) * block.features.shape[1] ** 2 for block in samples.blocks)
    return _FEWER * classes * numbers <= samples.n_users * samples.dim**2


class _RowBlock(NamedTuple):
    """Users who have equally many rows: their positions among those concerned, their rows and A A'
    of features.
    """

    users: Indices
    block: Block
    gram: Array
    copies: dict[str, Array] | None
    name: str

    def terms(self, mass: Array) -> RowTerms:
        return RowTerms(self.users, self.block.features, self.gram, mass, self.block.weights,
                        self.copies, self.name)


def _parts(loss: BlockLoss, samples: Samples, users: Indices | None) -> list[_RowBlock]:
    """Blocks of the users concerned."""
    samples = in_blocks(loss, samples)
    out = []
    numbers = None if users is None else samples.positions[0][users]
    for k, block in enumerate(samples.blocks):
        if f"gram {k}" not in samples.known:
            columns = block.features[..., :-1] if loss.intercept else block.features
            samples.known[f"gram {k}"] = columns @ columns.swapaxes(1, 2)
        gram, rows, name = samples.known[f"gram {k}"], block.index, f"single {k}"
        if users is not None:
            rows = np.flatnonzero(numbers == k)
            if not rows.size:
                continue
            members = samples.positions[1][users[rows]]
            if len(members) < len(block.index) or (members != np.arange(len(members))).any():
                block, gram, name = take_users(block, members), gram[members], ""
        out.append(_RowBlock(rows, block, gram, samples.known if name else None, name))
    return out


def expand(loss: BlockLoss, samples: Samples, models: Array,
           users: Indices | None = None) -> WideEvaluation:
    """Values, gradients and curvature of these users' losses at their models."""
    n, dim = models.shape
    p = samples.users.n_features + loss.intercept
    k = dim // p
    ridges = loss.ridge * loss.shrunk(p)
    values, gradients = np.empty(n), np.empty((n, p, k))
    x, terms = models.reshape(n, p, k), list[RowTerms]()
    for part in _parts(loss, samples, users):
        rows, design = part.users, part.block.features
        here = loss.row_terms(part.block, design @ x[rows])
        values[rows] = here.values.sum(axis=1)
        gradients[rows] = design.swapaxes(1, 2) @ here.slopes
        terms.append(part.terms(here.mass))
    values += 0.5 * np.einsum("npk,p,npk->n", x, ridges, x, optimize=False)
    gradients += ridges[:, None] * x
    return values, gradients.reshape(n, dim), RowCurvature(terms, ridges, loss.output_basis(k),
                                                           bool(loss.intercept))


def row_bounds(loss: BlockLoss, samples: Samples, slopes: Array, start: Array, about: Array,
               who: Indices) -> DualBounds:
    """Upper bounds on f_i*(slopes_i) - <slopes_i, about_i>; see the module.

    Newton steps towards max_x <slopes_i, x> - f_i(x) make them tight: every point on the way gives
    a lower bound on the conjugate, too, and the steps end where the two are equal but for rounding.
    """
    best = DualBounds(*(np.full(len(who), number) for number in (np.inf, 0.0, np.inf)))
    x, lower = start.copy(), np.full(len(who), -np.inf)
    rows, everyone = np.arange(len(who)), np.arange(len(who))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for turn in range(_NEWTON):
            full = len(rows) == len(who)
            u = slopes if full else slopes[rows]
            point = _Point(loss, samples, x if full else x[rows],
                           None if len(rows) == samples.n_users else who[rows])
            bound = point.bound(u)
            better = np.flatnonzero(bound.values + bound.rounding
                                    < (best.values + best.rounding)[rows])
            for whole, part in zip(best, bound, strict=True):
                whole[rows[better]] = part[better]
            lower[rows] = np.maximum(lower[rows], np.einsum("nd,nd->n", u, point.x) - point.values)
            size = np.abs(best.values) + np.abs(lower)
            open_ = best.values - lower > _TIGHT * size + best.rounding
            going = np.flatnonzero(open_[rows] & np.isfinite(point.values))
            if not going.size or turn == _NEWTON - 1:
                break
            moved = point.step(u)
            x[rows] = moved
            rows = rows[going] if going.size < 0.5 * rows.size else rows
        shift = slopes * about
        values = best.values - shift.sum(axis=1)
        rounding = best.rounding + SUMS * np.abs(shift).sum(axis=1)
    finite = np.isfinite(values) & np.isfinite(rounding)
    slack = np.where(finite, np.maximum(best.values - lower, 0.0), np.inf)
    return DualBounds(np.where(finite, values, np.inf), np.where(finite, rounding, 0.0),
                      slack[everyone])


class _Point:
    """Losses of some users at a point, with the outputs of their rows.

    Attributes
    ----------
    loss, parts : the loss, and the blocks of the users' rows.
    x : (n, dim) the point.
    outputs, terms : for each block t (n, m, k), and the losses there.
    values : (n,)
    """

    def __init__(self, loss: BlockLoss, samples: Samples, x: Array, users: Indices | None) -> None:
        self.loss, self.x = loss, x
        self.p = samples.users.n_features + loss.intercept
        self.ridges = loss.ridge * loss.shrunk(self.p)
        self.parts = _parts(loss, samples, users)
        cube = self._cube(x)
        self.outputs = [part.block.features @ _some(cube, part.users) for part in self.parts]
        self.terms = [loss.row_terms(part.block, t)
                      for part, t in zip(self.parts, self.outputs, strict=True)]
        self.values = self._values(self.terms, x)

    def _cube(self, vectors: Array) -> Array:
        return vectors.reshape(len(vectors), self.p, -1)

    def _values(self, terms: list[Terms], x: Array) -> Array:
        values = 0.5 * np.einsum("npk,p,npk->n", self._cube(x), self.ridges, self._cube(x))
        for part, here in zip(self.parts, terms, strict=True):
            values[part.users] += here.values.sum(axis=1)
        return values

    def bound(self, slopes: Array) -> DualBounds:
        """The bound of the module, from the slopes of the rows here."""
        n, held = len(self.x), self.ridges > 0
        u = self._cube(slopes)
        out = DualBounds(np.empty(n), np.empty(n), np.empty(n))
        for (rows, block, gram, *_), t in zip(self.parts, self.outputs, strict=True):
            ends = _some(u, rows)
            alpha, conjugates = self.loss.row_duals(block, t, ends[:, -1]
                                                    if self.loss.free_intercept else None)
            residual = ends - block.features.swapaxes(1, 2) @ alpha
            # Rounding of A' alpha, in norm; the columns of the intercept are numbers 1.
            lengths = np.sqrt(np.einsum("nmm->nm", gram) + (self.loss.intercept != 0))
            level = np.linalg.norm(ends, axis=(1, 2)) \
                + (lengths * np.linalg.norm(alpha, axis=2)).sum(axis=1)
            length = np.linalg.norm(residual[:, held], axis=(1, 2)) + SUMS * level
            cost = length**2 / (2.0 * self.loss.ridge)
            missed = np.linalg.norm(residual[:, ~held], axis=(1, 2)) + SUMS * level
            exact = missed <= 1e3 * SUMS * level
            reach = _REACH * (1.0 + np.linalg.norm(_some(self.x, rows), axis=1)) if not held.all() \
                else 0.0
            out.values[rows] = np.where(exact, conjugates.sum(axis=1) + cost, np.inf)
            out.rounding[rows] = SUMS * np.abs(conjugates).sum(axis=1) + missed * reach
            out.slack[rows] = cost
        return out

    def step(self, slopes: Array) -> Array:
        """(n, dim) the point after a damped Newton step towards the maximum of <slopes, x> - f(x).
        """
        x, g = self._cube(self.x), np.empty_like(self._cube(self.x))
        terms = list[RowTerms]()
        for part, here in zip(self.parts, self.terms, strict=True):
            g[part.users] = part.block.features.swapaxes(1, 2) @ here.slopes
            terms.append(part.terms(here.mass))
        g = (g + self.ridges[:, None] * x).reshape(self.x.shape) - slopes
        curvature = RowCurvature(terms, self.ridges, self.loss.output_basis(x.shape[2]),
                                 bool(self.loss.intercept))
        step = -curvature.inverse(np.zeros(len(x)))(g)
        gain = -np.einsum("nd,nd->n", g, step)
        value = self.values - np.einsum("nd,nd->n", slopes, self.x)
        moves = [part.block.features @ _some(self._cube(step), part.users) for part in self.parts]
        size = np.ones(len(x))
        for _ in range(_TRIALS):
            trial = [self.loss.row_terms(part.block, t + size[part.users, None, None] * move)
                     for part, t, move in zip(self.parts, self.outputs, moves, strict=True)]
            point = self.x + size[:, None] * step
            new = self._values(trial, point) - np.einsum("nd,nd->n", slopes, point)
            worse = ~(new <= value - 1e-4 * size * gain + 1e-14
                      * (np.abs(self.values) + np.abs(value)))
            if not worse.any():
                return point
            size = np.where(worse, 0.5 * size, size)
        return np.where(worse[:, None], self.x, point)


def _some(array: Array, rows: Indices) -> Array:
    """These rows; the array itself where they are all."""
    return array if len(rows) == len(array) else array[rows]


def value_rounding(loss: BlockLoss, samples: Samples, models: Array,
                   users: Indices | None) -> Array:
    """(n,) what rounding may have done to values; outputs are bounded by the norms of rows and
    models.
    """
    out, most = np.empty(len(models)), loss.max_curvature
    cube = models.reshape(len(models), samples.users.n_features + loss.intercept, -1)
    for rows, block, gram, *_ in _parts(loss, samples, users):
        t = block.features @ _some(cube, rows)
        part = loss.row_terms(block, t)
        lengths = np.sqrt(np.einsum("nmm->nm", gram) + (loss.intercept != 0))
        terms = lengths * np.linalg.norm(_some(models, rows), axis=1)[:, None] \
            + np.linalg.norm(t, axis=2)
        curved = most if np.isfinite(most) else part.mass.max(axis=2) / np.maximum(block.weights,
            1e-300)
        out[rows] = (np.abs(part.values) + terms * np.linalg.norm(part.slopes, axis=2)
                     + 16 * SUMS * block.weights * curved * terms**2).sum(axis=1)
    return SUMS * (out + loss.ridge * (models**2).sum(axis=1))


_HESSIANS = 2**22  # numbers in the Hessians of all users that can be kept


def too_wide(loss: Loss, samples: Samples) -> bool:
    """Whether models are wide, and Hessians of all users too large to learn from them how models
    differ.

    Those of squared losses are exact: fewer of them say which coordinates differ, such as the
    intercept.
    """
    few = loss.quadratic and samples.n_users * samples.dim**2 <= _HESSIANS
    return loss.wide(samples) and not few


def minimise_wide(loss: Loss, samples: Samples, linear: Array | None, t: Array | float,
                  centres: Array | None, start: Array | None, users: Indices | None) -> Minimum:
    """`Loss.prox` of a loss with wide models."""
    who = np.arange(samples.n_users) if users is None else users
    zero = np.zeros((len(who), samples.dim))
    centres = zero if centres is None else centres
    search = _WideSearch(loss, samples, zero if linear is None else linear,
                         np.broadcast_to(np.asarray(t, dtype=float), len(who)), centres, who)
    search.begin(centres if start is None else start)
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
        self.loss, self.samples, self.who = loss, samples, who
        self.linear, self.pulls, self.centres = linear, t, centres

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

    def direction(self, norms: Array) -> Step:
        x, gradient = self.x, self.gradient
        size = self.curvature.trace() / self.curvature.shape[1] + self.pull
        damping = self.damping * norms * size
        step = -self.curvature.inverse(self.pull + damping)(gradient)
        decrement = np.einsum("nd,nd->n", -gradient, step)
        scale = np.abs(self.value) + np.abs(np.einsum("nd,nd->n", gradient, x)) \
            + 1e-9 * size * (x**2).sum(axis=1)
        lengths = np.linalg.norm(step, axis=1)
        cut = np.divide(self.reach, lengths, out=np.ones_like(lengths), where=lengths > self.reach)
        return cut[:, None] * step, cut, np.maximum(decrement, 0.0), scale + 1e-300, damping == 0.0
