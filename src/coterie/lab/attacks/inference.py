"""Was this row among a user's rows (membership), and what was the part of it that is not known
(attribute)?

Three scores, each from messages and public facts only, larger for members:

    leverage    -a' G^-1 a with G the sum of the user's Hessians, or of its second moments: rows
                that are inside G stick out of it less than others; with fewer rows than coordinates
                others lie outside of its range
    tracing     messages are sums T = sum_j v(a_j, y_j) of a known function of a row, plus normal
                noise where there is any: the likelihood ratio of T with the row inside and outside,
                with mean and covariance of v from public rows (Homer et al. 2008, Dwork et al.
                2015)
    nearest     minus the distance to the nearest row that was rebuilt
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from coterie.base.types import Array, Ints
from coterie.convex.choice import roc_auc
from coterie.lab.attacks.recording import Evidence
from coterie.losses.affine import LinearLoss

_OUTSIDE = 1e-9  # share of the mean eigenvalue that is added to G
# Share of the largest eigenvalue of the covariance of v below which a direction is ignored.
_KEPT = 1e-9
_PUBLIC = 800  # public rows that tracing uses
_CURVED, _POINTS = 3, 6  # Hessians and gradients that tracing uses
_GRID = 41  # values of an attribute that are compared


class LabelledRows(NamedTuple):
    """Rows with their targets, in the units of the models."""

    features: Array  # (n, p)
    targets: Array  # (n,)

    def take(self, index: Ints) -> LabelledRows:
        """Some of the rows."""
        return LabelledRows(self.features[index], self.targets[index])

    def joined(self) -> Array:
        """(n, p + 1) features and target."""
        return np.concatenate([self.features, self.targets[:, None]], axis=1)


Score = Callable[[LabelledRows], Array]
Scores = dict[str, Score]


@dataclass(frozen=True, eq=False)
class Statistic:
    """A released sum T = sum_j v(row_j) + N(0, noise^2 I).

    Parameters
    ----------
    of : v, from rows to (n, q).
    total : (q,) T.
    count : number of rows in the sum, as far as the server knows it.
    noise : standard deviation of the noise; 0 where there is none.
    """

    of: Callable[[LabelledRows], Array]
    total: Array
    count: float
    noise: float = 0.0

    def tracing(self, public: LabelledRows) -> Score:
        """The likelihood ratio of T with a row inside and outside, in the normal approximation.

            T ~ N(v + (m - 1) mu, S)  against  N(m mu, S),    S = m C + noise^2 I
        """
        step = max(len(public.targets) // _PUBLIC, 1)
        values = self.of(public.take(np.arange(len(public.targets))[::step]))
        mean, n = values.mean(axis=0), len(values)
        _, sizes, vectors = np.linalg.svd((values - mean) / np.sqrt(max(n - 1, 1)),
                                          full_matrices=False)
        kept = (sizes**2 > _KEPT * sizes[0] ** 2) & (np.arange(len(sizes)) < max(n // 4, 1))
        axes, variance = vectors[kept].T, self.count * sizes[kept] ** 2 + self.noise**2
        pull = axes.T @ (self.total - self.count * mean) / variance

        def score(rows: LabelledRows) -> Array:
            moved = (self.of(rows) - mean) @ axes
            return np.asarray(moved @ pull - 0.5 * (moved**2 / variance).sum(axis=1))

        return score


def statistic_of(evidence: Evidence, loss: LinearLoss) -> Statistic | None:
    """Gradients and Hessians at some of the points as a sum over rows; None where there are none.
    """
    curved, points = _spaced(evidence.curved, _CURVED), _spaced(evidence.points, _POINTS)
    if not curved and not points:
        return None
    dim = len((evidence.curved or evidence.points)[0])
    upper = np.triu_indices(dim)
    total = np.concatenate([*(evidence.gradients[k] for k in points),
                            *(evidence.hessians[k][upper] for k in curved)])

    def of(rows: LabelledRows) -> Array:
        a = design(rows.features, loss)
        parts = [loss.slope(a @ evidence.points[k], rows.targets)[:, None] * a for k in points]
        products = a[:, upper[0]] * a[:, upper[1]]
        parts += [loss.curvature(a @ evidence.curved[k], rows.targets)[:, None] * products
                  for k in curved]
        return np.concatenate(parts, axis=1)

    return Statistic(of, evidence.count * total, evidence.count)


def leverage(gram: Array, of: Callable[[LabelledRows], Array]) -> Score:
    """Minus the leverage of rows; `of` gives them in the coordinates of `gram`."""
    dim, mean = len(gram), max(float(np.trace(gram)), 1e-300) / len(gram)
    inverse = np.linalg.inv(gram / mean + _OUTSIDE * np.eye(dim))

    def score(rows: LabelledRows) -> Array:
        a = of(rows)
        return -np.asarray(np.einsum("nd,de,ne->n", a, inverse, a))

    return score


def nearest(rebuilt: Array) -> Score:
    """Minus the distance to the nearest row that was rebuilt."""
    def score(rows: LabelledRows) -> Array:
        a = rows.features if rebuilt.shape[1] == rows.features.shape[1] else rows.joined()
        return -np.linalg.norm(a[:, None] - rebuilt[None], axis=2).min(axis=1)

    return score


def scores_of(evidence: Evidence, loss: LinearLoss, rebuilt: Array, public: LabelledRows) -> Scores:
    """All scores that the evidence allows."""
    if evidence.released is not None:
        return {"tracing": evidence.released.tracing(public)}

    def of_loss(rows: LabelledRows) -> Array:
        return design(rows.features, loss)

    def of_sums(rows: LabelledRows) -> Array:
        return np.pad(rows.joined(), ((0, 0), (0, 1)), constant_values=1.0)

    scores = Scores()
    full = next((sums for sums in evidence.sums if sums.scatter is not None), None)
    if full is not None and full.scatter is not None:
        mean = np.append(full.mean, 1.0)
        gram = full.count * np.outer(mean, mean)
        gram[:-1, :-1] += full.scatter
        scores["leverage"] = leverage(gram, of_sums)
    elif evidence.hessians:
        scores["leverage"] = leverage(np.sum(evidence.hessians, axis=0), of_loss)
    elif evidence.gradients:
        gradients = np.stack(evidence.gradients)
        changes = np.concatenate([gradients[:1], np.diff(gradients, axis=0)])
        changes = changes / np.maximum(np.linalg.norm(changes, axis=1, keepdims=True), 1e-300)
        scores["leverage"] = leverage(changes.T @ changes, of_loss)
    statistic = statistic_of(evidence, loss)
    if statistic is not None and evidence.count > 1:
        scores["tracing"] = statistic.tracing(public)
    if len(rebuilt):
        scores["nearest"] = nearest(rebuilt)
    return scores


def design(features: Array, loss: LinearLoss) -> Array:
    """(n, d) rows as the loss sees them, with the intercept's coordinate."""
    return np.asarray(loss.design(features, np.ones(len(features), dtype=bool)))


def membership_auc(score: Score, members: LabelledRows, others: LabelledRows) -> float:
    """The probability that a member scores higher than another row of the same user."""
    inside, outside = score(members), score(others)
    return roc_auc(np.repeat([1.0, 0.0], [len(inside), len(outside)]),
                   np.concatenate([inside, outside]))


def guess_attribute(score: Score, rows: LabelledRows, column: int, public: LabelledRows, *,
                    likelihood: bool) -> tuple[Array, Array]:
    """An attribute of each row given the rest of the row: by public rows alone, and with a score.

    Parameters
    ----------
    score : of membership.
    rows : of one user; their column `column` is not looked at.
    column : of the features.
    public : rows of the same distribution, whose regression on the other columns and the target is
        the prior.
    likelihood : whether the score is a log-likelihood, so that the guess is the mean given prior
        and score; otherwise it is the value with the highest score.
    """
    def rest_of(some: LabelledRows) -> Array:
        return np.column_stack([np.delete(some.joined(), column, axis=1),
                                np.ones(len(some.targets))])

    truth, rest = public.features[:, column], rest_of(public)
    coefficients, *_ = np.linalg.lstsq(rest, truth, rcond=None)
    error = max(float(np.std(truth - rest @ coefficients)), 1e-12)
    prior = rest_of(rows) @ coefficients
    grid, values = np.linspace(-4.0, 4.0, _GRID)[:, None], np.empty((_GRID, len(prior)))
    for k in range(_GRID):
        trial = rows.features.copy()
        trial[:, column] = prior + grid[k] * error
        values[k] = score(LabelledRows(trial, rows.targets))
    if not likelihood:
        return prior, prior + error * grid[values.argmax(axis=0), 0]
    values -= 0.5 * grid**2
    weights = np.exp(values - values.max(axis=0))
    return prior, prior + error * (grid * weights).sum(axis=0) / weights.sum(axis=0)


def _spaced(items: list[Array], most: int) -> list[int]:
    """Positions of at most so many items, the first and the last among them."""
    if not items:
        return []
    return np.unique(np.geomspace(1, len(items), min(most, len(items))).astype(int) - 1).tolist()
