"""What messages give away: rows rebuilt from them; whether a row was among a user's rows
(membership); and what the part of it was that is not known (attribute).

# Rows rebuilt

With a linear loss of one margin, t = <a, x>, a user's gradient and Hessian at x are, without the
ridge,

    g(x) = 1/m sum_j phi'(t_j, y_j) a_j        H(x) = 1/m sum_j phi''(t_j, y_j) a_j a_j'

where the last coordinate of every a_j is known (the intercept's). So

- one row is the direction of any gradient, its length given by the intercept;
- two Hessians of m <= d rows have one common basis in which both are diagonal: it is the rows
  (Jennrich's method);
- where phi'' is constant but for jumps (squared hinge, Huber), the difference of two Hessians is
  the sum of +- a_j a_j' over the rows that changed sides: one or two such rows follow from it, the
  intercept fixing lengths and the rotation;
- otherwise rows that explain all messages are searched for from several starts (Levenberg and
  Marquardt);
- of one or two rows, mean and scatter say everything.

# Membership and attributes

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
from functools import partial
from itertools import combinations

import numpy as np

from coterie.base.types import Array, Flags
from coterie.convex.choice import roc_auc
from coterie.lab.attacks.simulation import Evidence, LabelledRows
from coterie.losses.affine import LinearLoss

_RANK = 1e-7  # eigenvalues below this share of the largest are rounding
# Of the search for rows that explain the messages, for few unknown numbers; fewer for more.
_STARTS, _STEPS = 12, 300
_FEW, _UNKNOWNS = 40, 240  # numbers that are searched for: few, and the most
_WATCHED = 40  # steps after which a search that does not get on ends
_ENOUGH = 24  # most gradients that are used in the search
_EXPLAINED = 1e-7  # relative error of messages below which rows are taken to explain them
_H = 1e-5  # step of differences that stand for the third derivative of a loss
_OUTSIDE = 1e-9  # share of the mean eigenvalue that is added to G
# Share of the largest eigenvalue of the covariance of v below which a direction is ignored.
_KEPT = 1e-9
_PUBLIC = 800  # public rows that tracing uses
_CURVED, _POINTS = 3, 6  # Hessians and gradients that tracing uses
_GRID = 41  # values of an attribute that are compared


# Rows rebuilt


def rebuild_rows(evidence: Evidence, loss: LinearLoss, seed: int = 0) -> Array:
    """(at most count, n_features) the rows that the messages give away, in the units of the models.

    Parameters
    ----------
    evidence : on one user.
    loss : public, with its ridge.
    seed : of the starts of the search.
    """
    sign = loss.intercept_sign if loss.intercept else 0.0
    if not evidence.points and not evidence.hessians:
        return np.empty((0, 0))
    dim = len((evidence.points or evidence.curved)[0])
    candidates, jumps = np.empty((0, dim)), _jumps(loss)
    if not sign:  # lengths and signs of rows remain unknown
        return candidates
    if evidence.count == 1:
        return _without_intercept(_one_row(evidence), sign)
    if len(evidence.hessians) > 1 and jumps:
        candidates = _changed(evidence, loss, sign)
    elif len(evidence.hessians) > 1 and evidence.count <= dim:
        candidates = _in_common(evidence)
    if not len(candidates) and not jumps:
        candidates = _explaining(evidence, loss, sign, np.random.default_rng(seed))
    return _without_intercept(candidates[:evidence.count], sign)


def rows_from_sums(evidence: Evidence) -> Array:
    """(k, q) rows that follow from sums over one or two rows, in the units of the table."""
    rows = list[Array]()
    for sums in evidence.sums:
        if sums.count == 1:
            rows.append(sums.mean)
        elif sums.count == 2 and sums.scatter is not None:  # mean +- half the difference
            values, vectors = np.linalg.eigh(sums.scatter)
            half = np.sqrt(max(values[-1], 0.0) / 2) * vectors[:, -1]
            rows += [sums.mean + half, sums.mean - half]
    return np.stack(rows) if rows else np.empty((0, 0))


def match_rows(rebuilt: Array, rows: Array, within: float = 0.01) -> Flags:
    """(n_rows,) whether each row was recovered, up to this share of its length."""
    if not len(rebuilt) or not len(rows):
        return np.zeros(len(rows), dtype=bool)
    distances = np.linalg.norm(rows[:, None] - rebuilt[None], axis=2).min(axis=1)
    return np.asarray(distances <= within * np.maximum(np.linalg.norm(rows, axis=1), 1e-300))


def _without_intercept(rows: Array, sign: float) -> Array:
    """Rows without the intercept's coordinate, which fixes their length and sign."""
    last = rows[:, -1]
    good = np.abs(last) > 1e-12 * np.maximum(np.abs(rows).max(axis=1, initial=0.0), 1e-300)
    return np.asarray(rows[good, :-1] * (sign / last[good])[:, None])


def _one_row(evidence: Evidence) -> Array:
    longest = max(evidence.gradients, key=lambda g: float(np.abs(g).max()), default=None)
    if longest is not None and np.abs(longest).max() > 0:
        return longest[None]
    return np.stack([hessian[-1] for hessian in evidence.hessians][:1])


def _jumps(loss: LinearLoss) -> bool:
    """Whether the second derivative of the loss is constant but for jumps."""
    t, y = np.linspace(-3.0, 3.0, 25), np.ones(25)
    return bool(len(np.unique(loss.curvature(t, y))) <= 2 and not loss.quadratic)


def _in_common(evidence: Evidence) -> Array:
    """Rows of at most as many as coordinates: in the basis that is common to the Hessians.

    Of the two Hessians that differ most, H_1 = A' D_1 A and H_2 = A' D_2 A; in the range of H_1 +
    H_2 the vectors of H_1 V = (H_1 + H_2) V diag(share) are the rows of A^-1.
    """
    hessians = np.stack(evidence.hessians)
    traces = np.trace(hessians, axis1=1, axis2=2)
    flat = (hessians / traces[:, None, None]).reshape(len(hessians), -1)
    distances = ((flat[:, None] - flat[None]) ** 2).sum(axis=2)
    first, second = np.unravel_index(int(distances.argmax()), distances.shape)
    a, b = hessians[first], hessians[second]
    values, vectors = np.linalg.eigh(a + b)
    kept = values > _RANK * values[-1]
    whiten = vectors[:, kept] / np.sqrt(values[kept])
    shares, turn = np.linalg.eigh(whiten.T @ (a - b) @ whiten)
    if len(shares) != evidence.count or (np.diff(shares) < 1e-9).any():
        return np.empty((0, a.shape[0]))
    return (vectors[:, kept] * np.sqrt(values[kept]) @ turn).T


def _changed(evidence: Evidence, loss: LinearLoss, sign: float) -> Array:
    """Rows that changed sides between two points: differences of Hessians of rank one or two."""
    weight = loss.max_curvature / evidence.count
    zero, unique = np.zeros_like(evidence.hessians[0]), list[Array]()
    for a, b in combinations([*evidence.hessians, zero], 2):
        values, vectors = np.linalg.eigh(a - b)
        large = np.abs(values) > _RANK * max(float(np.abs(a).max()), float(np.abs(b).max()), 1e-300)
        if large.sum() not in (1, 2):
            continue
        columns = vectors[:, large] * np.sqrt(np.abs(values[large]))
        if large.sum() == 2:
            columns = _pair(columns, values[large].prod() > 0, weight)
        for row in columns.T:
            scaled = row * (sign / row[-1]) if abs(row[-1]) > 1e-9 else None
            if scaled is not None and not any(np.allclose(scaled, old, rtol=1e-6, atol=1e-6)
                                              for old in unique):
                unique.append(scaled)
    return np.stack(unique) if unique else np.empty((0, len(zero)))


def _pair(columns: Array, alike: bool, weight: float) -> Array:
    """(d, 2) two rows, times the root of their weight, from other columns with the same sum or
    difference of squares.

    Such columns differ by a rotation, or by a hyperbolic one. The last coordinates of the rows are
    equal up to their sign, which says by which.
    """
    last = columns[-1]
    if alike:  # onto the diagonal
        angle = np.arctan2(last[1], last[0]) - np.pi / 4
        return columns @ np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    columns = columns * np.where(last < 0, -1.0, 1.0)
    length = float(np.abs(last).mean())
    if not length > 0 or abs(abs(last[0]) - abs(last[1])) > 1e-5 * length:
        return np.empty((len(columns), 0))
    ratio = np.sqrt(weight) / length  # (1, 1) is stretched by cosh + sinh
    cosh, sinh = 0.5 * (ratio + 1 / ratio), 0.5 * (ratio - 1 / ratio)
    return columns @ np.array([[cosh, sinh], [sinh, cosh]])


#: From (n, m, p) rows, (n, r) relative errors of the messages and (n, r, m p) their derivatives.
_Residuals = Callable[[Array], tuple[Array, Array]]


def _explaining(evidence: Evidence, loss: LinearLoss, sign: float,
                rng: np.random.Generator) -> Array:
    """Rows that explain all messages, by least squares from several starts; none if no start gets
    there.
    """
    m, dim = evidence.count, len((evidence.points or evidence.curved)[0])
    p, upper = dim - 1, np.triu_indices(dim)
    equations = len(evidence.hessians) * len(upper[0]) + max(len(evidence.gradients) - 1, 0) * dim
    if m * p > min(_UNKNOWNS, equations):
        return np.empty((0, dim))
    used = np.unique(np.geomspace(1, max(len(evidence.points), 1), _ENOUGH).astype(int)) - 1
    hessians = np.array([h[upper] for h in evidence.hessians]).reshape(-1, len(upper[0]))
    gradients = np.array(evidence.gradients).reshape(-1, dim)[used]
    rises = gradients[1:] - gradients[:1]
    scale = float(max(np.abs(hessians).max(initial=0.0), np.abs(rises).max(initial=0.0)))
    if scale <= 0:
        return np.empty((0, dim))
    residuals = partial(_residuals, loss=loss, sign=sign, hessians=hessians, gradients=rises,
                        curved=np.array(evidence.curved).reshape(-1, dim), scale=scale,
                        points=np.array(evidence.points).reshape(-1, dim)[used])
    effort = min(1.0, (_FEW / (m * p)) ** 0.5)
    starts = rng.standard_normal((max(int(effort * _STARTS), 2), m, p))
    rows, errors = _least_squares(starts, residuals, int(effort * _STEPS))
    best = int(errors.argmin())
    if not errors[best] <= _EXPLAINED:
        return np.empty((0, dim))
    return np.concatenate([rows[best], np.full((m, 1), sign)], axis=1)


def _least_squares(rows: Array, residuals: _Residuals, steps: int) -> tuple[Array, Array]:
    """Levenberg-Marquardt from all starts at the same time; the rows, and the largest relative
    error of each.
    """
    n, m, p = rows.shape
    damping = np.full(n, 1e-2)
    residual, jacobian = residuals(rows)
    cost = (residual**2).sum(axis=1)
    reached = np.inf
    for step in range(steps):
        if step % _WATCHED == _WATCHED - 1:  # no start gets on
            if cost.min() > 0.9 * reached:
                break
            reached = float(cost.min())
        # Orthogonal factors instead of normal equations: differences of Hessians are small, and
        # squares lose them.
        size = np.sqrt(damping)[:, None] * np.maximum(np.linalg.norm(jacobian, axis=1), 1e-6)
        q, r = np.linalg.qr(np.concatenate([jacobian, size[:, None, :] * np.eye(m * p)], axis=1))
        slope = q[:, :residual.shape[1]].swapaxes(1, 2) @ residual[..., None]
        trial = rows - np.linalg.solve(r, slope)[..., 0].reshape(n, m, p)
        new, derivative = residuals(trial)
        lower = (new**2).sum(axis=1)
        better = lower < cost
        rows = np.where(better[:, None, None], trial, rows)
        residual = np.where(better[:, None], new, residual)
        jacobian = np.where(better[:, None, None], derivative, jacobian)
        cost = np.where(better, lower, cost)
        damping = np.clip(np.where(better, 0.2 * damping, 5.0 * damping), 1e-15, 1e8)
        if (cost <= 1e-26).any():
            break
    return rows, np.abs(residual).max(axis=1)


def _residuals(rows: Array, *, loss: LinearLoss, sign: float, curved: Array, hessians: Array,
               points: Array, gradients: Array, scale: float) -> tuple[Array, Array]:
    """How far rows are from explaining (k, d (d + 1) / 2) Hessians at (k, d) points `curved`, and
    (g - 1, d) differences of the gradients at (g, d) points from the first one.
    """
    n, m, p = rows.shape
    upper = np.triu_indices(p + 1)
    a = np.concatenate([rows, np.full((n, m, 1), sign)], axis=2)
    errors, slopes = list[Array](), list[Array]()
    if len(curved):
        t = np.einsum("nmd,kd->nkm", a, curved)
        weight, third = _with_derivative(loss.curvature, t)
        model = np.einsum("nkm,nmd,nme->nkde", weight, a, a)[..., upper[0], upper[1]] / m
        errors.append((model - hessians).reshape(n, -1))
        # d/da_jq of phi''(t_j) a_j a_j': phi''' x_q a a' + phi'' (e_q a' + a e_q')
        d = np.einsum("nkm,kq,nmd,nme->nkdemq", third, curved[:, :p], a, a)
        half = np.einsum("nkm,qd,nme->nkdemq", weight, np.eye(p + 1)[:p], a)
        d = (d + half + half.swapaxes(2, 3))[:, :, upper[0], upper[1]] / m
        slopes.append(d.reshape(n, -1, m * p))
    if len(gradients):
        t = np.einsum("nmd,kd->nkm", a, points)
        first, second = _with_derivative(loss.slope, t)
        rise = first[:, 1:] - first[:, :1]
        errors.append((np.einsum("nkm,nmd->nkd", rise, a) / m - gradients).reshape(n, -1))
        x = points[:, :p]
        bend = second[:, 1:, :, None] * x[1:, None] - second[:, :1, :, None] * x[None, :1, None]
        d = np.einsum("nkmq,nmd->nkdmq", bend, a)
        d = d + np.einsum("nkm,qd->nkdmq", rise, np.eye(p + 1)[:p])
        slopes.append((d / m).reshape(n, -1, m * p))
    return np.concatenate(errors, axis=1) / scale, np.concatenate(slopes, axis=1) / scale


def _with_derivative(function: Callable[[Array, Array], Array], t: Array) -> tuple[Array, Array]:
    """A function of the margin, which does not depend on the label up to a constant, and its
    derivative.
    """
    y = np.ones_like(t)
    return function(t, y), (function(t + _H, y) - function(t - _H, y)) / (2 * _H)


# Membership and attributes


Score = Callable[[LabelledRows], Array]
Scores = dict[str, Score]
#: From public rows to the score of a released sum.
Tracing = Callable[[LabelledRows], Score]


def tracing(of: Callable[[LabelledRows], Array], total: Array, count: float,
            noise: float = 0.0) -> Tracing:
    """The likelihood ratio of a released sum T = sum_j v(row_j) + N(0, noise^2 I) with a row inside
    and outside, in the normal approximation.

        T ~ N(v + (m - 1) mu, S)  against  N(m mu, S),    S = m C + noise^2 I

    `of` is v, from rows to (n, q), `total` (q,) is T, and `count` the number of rows in the sum, as
    far as the server knows it.
    """

    def score_by(public: LabelledRows) -> Score:
        step = max(len(public.targets) // _PUBLIC, 1)
        values = of(public.take(np.arange(len(public.targets))[::step]))
        mean, n = values.mean(axis=0), len(values)
        _, sizes, vectors = np.linalg.svd((values - mean) / np.sqrt(max(n - 1, 1)),
                                          full_matrices=False)
        kept = (sizes**2 > _KEPT * sizes[0] ** 2) & (np.arange(len(sizes)) < max(n // 4, 1))
        axes, variance = vectors[kept].T, count * sizes[kept] ** 2 + noise**2
        pull = axes.T @ (total - count * mean) / variance

        def score(rows: LabelledRows) -> Array:
            moved = (of(rows) - mean) @ axes
            return np.asarray(moved @ pull - 0.5 * (moved**2 / variance).sum(axis=1))

        return score

    return score_by


def trace_messages(evidence: Evidence, loss: LinearLoss) -> Tracing | None:
    """`tracing` by gradients and Hessians at some of the points as a sum over rows; None where
    there are none.
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

    return tracing(of, evidence.count * total, evidence.count)


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
        return {"tracing": evidence.released(public)}

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
    by_messages = trace_messages(evidence, loss)
    if by_messages is not None and evidence.count > 1:
        scores["tracing"] = by_messages(public)
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
