"""The noise around the models of the users: its size, whether it has heavy tails, and where it
differs between users.

A loss is used as the log-likelihood l_i = -m_i f_i / s of the m_i rows of a user. The dispersion s
is

    squared loss    the variance around the local models; also for distances of points, per
                    coordinate
    Poisson         sum_j phi'_j^2 c_j / sum_j phi''_j c_j,       c_j = a_j' (sum_l phi''_l a_l
                    a_l')^-1 a_j
    other losses    1

The ratio for Poisson compares the variance of the scores with the curvature (the sandwich
estimator, Huber 1967); it is multiplied by rows / (rows - parameters in use), and is at least 1. It
is larger than 1 for overdispersed counts. If there are too few rows for local models, s of the
squared loss is estimated together with the spread of the models.

Squares are not used for targets with outliers. For Huber's loss, and for the squared loss if the
noise has heavy tails, the groups are searched with the squared loss on pseudo-targets (Huber 1981,
chapter 7)

    y*_j = t_j + psi(y_j - t_j) / mean(psi'),       psi(r) = min(max(r, -delta), delta)

where t_j is the prediction of the user's local model, fitted with Huber's loss. Least squares on y*
has the same minimum as that fit, and the variance around it is the variance of that fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np

from coterie.base.types import Array, Ints
from coterie.data.moments import Condensed
from coterie.data.users import Users
from coterie.groups.hierarchy import ModelSums
from coterie.groups.spread import Expansions, estimate_covariance, find_modes, sample_users
from coterie.losses import (
    Huber,
    LinearLoss,
    Loss,
    Samples,
    Squared,
)
from coterie.losses.derived import Grouped

# Tails are heavy if the variance is this many times that of a normal distribution with equal
# quartiles.
_HEAVY = 1.6
_TUNING = 1.345  # delta in standard deviations; 95 % efficient for normal noise
_OUTLIER = 3.0  # delta in standard deviations while the tails are examined
_NORMAL = 1.4826  # standard deviation / median absolute deviation of a normal distribution
_MOST_USED = 0.9  # largest share of the rows that parameters are taken to use up


def without_ridge(loss: Loss) -> Loss:
    """The same loss with ridge 0."""
    return loss.with_ridge(0.0) if loss.affine else loss


def without_outliers(users: Users, loss: Loss) -> tuple[Users, Loss]:
    """Pseudo-targets and the squared loss if the noise has heavy tails or the loss is Huber's; else
    as given.

    Second moments do not show tails: users of whom only these are known are taken as they are.
    """
    y = users.targets
    if not loss.least_squares or y is None or isinstance(users, Condensed):
        return users, loss
    common = {f.name: getattr(loss, f.name) for f in fields(Squared)}
    squared, huber = Squared(**common), Huber(**common)
    # With few rows, an outlier looks like a different model: pull these models more to the pooled
    # one.
    pull = max(1e-3, 0.5 * (loss.dim(users) * users.n_users / users.n_samples) ** 2)
    delta = loss.delta
    if delta == np.inf:
        deviation, heavy = _tails(huber, users.take(sample_users(users.n_users)), pull)
        if not heavy:
            return users, loss
        delta = _TUNING * deviation
    residuals = _residuals(replace(huber, delta=delta), users, pull)
    inside = max(float((np.abs(residuals) <= delta).mean()), 0.1)
    return replace(users, targets=y - residuals + np.clip(residuals, -delta, delta) / inside), \
        squared


def has_outliers(users: Users, loss: Loss, noises: Array) -> bool:
    """Whether targets have heavy tails inside users whose noise variances have these ratios."""
    if isinstance(users, Condensed):
        return False
    few = sample_users(users.n_users)
    some = users.take(few)
    huber = Huber(**{f.name: getattr(loss, f.name) for f in fields(Squared)},
                  delta=_OUTLIER * float(np.sqrt(dispersion(loss, some, loss.prepare(some)))))
    scaled = _residuals(huber, some, 1e-3) / np.sqrt(noises[few])[some.owner]
    deviation = _NORMAL * float(np.median(np.abs(scaled)))
    return float((scaled**2).mean()) > _HEAVY * deviation**2


def _tails(huber: Huber, users: Users, pull: float) -> tuple[float, bool]:
    """The standard deviation of a normal distribution with the quartiles of the noise; whether the
    tails are heavy.
    """
    y, n, dim = users.targets, users.n_samples, huber.dim(users)
    assert y is not None
    deviation = _NORMAL * float(np.median(np.abs(y - np.median(y))))
    for _ in range(6):
        if not deviation > 1e-9 * float(np.abs(y).max()):
            return deviation, False  # no noise
        residuals = _residuals(replace(huber, delta=_OUTLIER * deviation), users, pull)
        before, deviation = deviation, _NORMAL * float(np.median(np.abs(residuals)))
        if abs(deviation - before) <= 0.05 * deviation:
            break
    heavy = float((residuals**2).mean()) > _HEAVY * deviation**2
    squared = Squared(ridge=0.0, intercept=huber.intercept)
    hessians = squared.hessians(squared.prepare(users), np.zeros((users.n_users, dim)))
    used = np.trace(np.linalg.solve(hessians + pull * np.eye(dim), hessians), axis1=1,
                    axis2=2).sum()
    # Residuals are smaller than the noise.
    return deviation / float(np.sqrt(1 - min(used / n, _MOST_USED))), heavy


def _residuals(loss: Huber, users: Users, pull: float) -> Array:
    """Targets minus predictions of local models that are pulled to the pooled model."""
    samples = loss.prepare(users)
    pooled = Grouped(loss=loss, samples=samples, labels=np.zeros(users.n_users, dtype=np.int64))
    centre = pooled.local(pooled.prepare(pooled.groups)).points
    models = loss.prox(samples, None, pull, np.repeat(centre, users.n_users, axis=0)).points
    assert users.targets is not None
    return users.targets - loss.decision(users.features, models[users.owner])


def dispersion(loss: Loss, users: Users, samples: Samples) -> float:
    """The dispersion s of the module's formulas."""
    if loss.gaussian or loss.task == "clustering":
        return _variance(without_ridge(loss), users, samples)
    if loss.task == "counts" and isinstance(loss, LinearLoss):
        return _score_ratio(loss.with_ridge(0.0), users, samples)
    return 1.0


def _variance(loss: Loss, users: Users, samples: Samples) -> float:
    points = not loss.gaussian
    counts, dim = users.sizes.astype(float), samples.dim
    numbers = counts * (dim if points else 1)
    freedom = np.maximum(numbers - dim, 0.0)
    zero = np.zeros((len(counts), dim))
    around_zero = 2 * float((counts * loss.values(samples, zero)).sum() / numbers.sum())
    if around_zero == 0 or (points and not freedom.any()):
        return 1.0
    smallest = 1e-12 * around_zero  # positive without noise
    if points or 2 * freedom.sum() >= numbers.sum():
        own = loss.values(samples, loss.prox(samples, None, 1e-6, None).points)
        return max(float((2 * counts * own)[freedom > 0].sum() / freedom.sum()), smallest)
    # EM for s and T together: s = (sum of squares + sum_i tr(curvature_i V_i)) / rows.
    unscaled, together = Expansions.at(loss, samples, counts, zero), \
        np.zeros(len(counts), dtype=np.int64)
    s, covariance = 0.5 * around_zero, 0.1 * np.eye(dim)
    for _ in range(12):
        expansions = unscaled.scaled(1 / s)
        covariance = estimate_covariance(expansions, together, 0, covariance)
        marginal, posterior = expansions.marginal(covariance)
        models = expansions.modes(marginal.centres(together)[together], posterior)
        squares = 2 * float((counts * loss.values(samples, models)).sum())
        before, s = s, max((squares + float((unscaled.curvatures * posterior).sum()))
                           / numbers.sum(), smallest)
        if abs(s - before) <= 0.01 * s:
            break
    return s


def _score_ratio(loss: LinearLoss, users: Users, samples: Samples) -> float:
    assert users.targets is not None
    n, together = users.n_samples, np.zeros(users.n_users, dtype=np.int64)
    counts, rows = users.counts.astype(float), loss.design(users.features, np.ones(n, dtype=bool))
    models = loss.prox(samples, None, 0.1, None).points
    s, covariance = 1.0, 0.1 * np.eye(samples.dim)
    for _ in range(3):
        expansions = Expansions.at(loss, samples, counts / s, models)
        covariance = estimate_covariance(expansions, together, 0, covariance)
        marginal, posterior = expansions.marginal(covariance)
        centres = marginal.centres(together)[together]
        models = find_modes(loss, samples, counts / s, centres, covariance, models)
        margins = loss.decision(users.features, models[users.owner])
        slopes, curvatures = loss.slope(margins, users.targets), \
            loss.curvature(margins, users.targets)
        c = (rows @ np.linalg.pinv((curvatures[:, None] * rows).T @ rows) * rows).sum(axis=1)
        used = float((expansions.curvatures * posterior).sum())  # effective number of parameters
        ratio = float(slopes**2 @ c) / max(float(curvatures @ c), 1e-300)
        s = max(ratio / (1 - min(used / n, _MOST_USED)), 1.0)
    return s


# Noise that differs between users: a variance for each user, shrunk to a common one.
#
#     rows of user i ~ N(design_i model_i, s_i),     model_i ~ N(centre of its group, T_i),
#     s_i ~ scaled inverse chi2
#
# with nu degrees of freedom and scale s_0. nu and s_0 maximise the likelihood of the residual
# variances, which are s_0 F(rows - parameters in use, nu) if s_i is drawn like this; the variance
# of a user is then the mean
#
#     s_i = (nu s_0 + squares_i) / (nu + m_i),
#
# squares_i the expected sum of squared residuals of its m_i rows. Two assumptions on the models are
# compared by their evidence:
#
#     T_i = T         models differ alike, whatever the noise; noisy users are shrunk more
#     T_i = s_i T     models of noisy users differ more, as if users had units of their own; all are
#                     shrunk alike
#
# Only the first needs the variances to find the models of the users.

_DEGREES = (2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0)  # values of nu that are compared
_ROUNDS = 15  # of EM
_FEWEST = 0.5  # rows less parameters in use from which a residual variance says something
_SMALLEST = 1e-6  # s_i, over s_0
_ROUNDING = 1e-13  # residuals, over the squares of targets, below which rounding decides


class _Step(NamedTuple):
    """The E step for given variances."""

    evidence: float
    used: Array  # (n_users,) parameters in use
    residual: Array  # (n_users,) sum of squared residuals
    expected: Array  # (n_users,) its expectation over the model given the rows
    moment: Array  # (dim, dim) the mean of (model - centre) (model - centre)' / scale


def sums_of(users: Users, loss: Loss) -> ModelSums:
    """What squared loss needs of the rows of each user."""
    plain = without_ridge(loss)
    samples, counts = plain.prepare(users), users.sizes.astype(float)
    f, g, h = plain.evaluate(samples, np.zeros((users.n_users, samples.dim)), 2)
    return ModelSums(counts[:, None, None] * h, -counts[:, None] * g, 2 * counts * f, counts)


def noise_of_users(users: Users, loss: Loss, labels: Ints, covariance: Array, noise: float,
                   form: Callable[[Array], Array]) -> tuple[Array, Array] | None:
    """T, and (n_users,) the noise variance of each user over the common one; None if equal noise
    should be assumed.

    Parameters
    ----------
    users : their data.
    loss : the squared loss; for others the noise has no variance of its own.
    labels : (n_users,) the groups, from 0.
    covariance, noise : T and s for equal noise, where EM starts.
    form : the projection of a covariance on the shape of T.
    """
    if not loss.gaussian or users.n_users < 3:
        return None
    rows, some = sums_of(users, loss), sample_users(users.n_users)
    few = ModelSums(*(part[some] for part in rows))
    few_labels = np.unique(labels[some], return_inverse=True)[1]
    fits = [_fit(few, few_labels, covariance, noise, form, follows) for follows in (False, True)]
    if fits[0] is None or fits[1] is None or fits[1][0] > fits[0][0]:
        return None
    _, spread, degrees, scale = fits[0]
    variances = np.full(users.n_users, scale)
    for _ in range(3):
        step = _expect(rows, labels, variances, spread, np.ones(users.n_users))
        variances = _variances(step, rows.rows, degrees, scale)
    return spread, variances / noise


def _fit(rows: ModelSums, labels: Ints, covariance: Array, noise: float,
         form: Callable[[Array], Array],
         follows: bool) -> tuple[float, Array, float, float] | None:
    """Evidence, T, nu and s_0 by EM; T_i = s_i T if `follows`. None if the noise of all users may
    be equal.
    """
    n = len(rows.rows)
    variances, spread = np.full(n, noise), covariance / noise if follows else covariance
    for _ in range(_ROUNDS):
        step = _expect(rows, labels, variances, spread, variances if follows else np.ones(n))
        degrees, scale, gain = _prior(step.residual, rows.rows - step.used)
        if gain < 0.5 * np.log(n):
            return None
        variances = _variances(step, rows.rows, degrees, scale)
        spread = form(step.moment)
    step = _expect(rows, labels, variances, spread, variances if follows else np.ones(n))
    return (step.evidence, spread, degrees, scale) if np.isfinite(step.evidence) else None


def _variances(step: _Step, counts: Array, degrees: float, scale: float) -> Array:
    return np.maximum((degrees * scale + step.expected) / (degrees + counts), _SMALLEST * scale)


def _expect(rows: ModelSums, labels: Ints, variances: Array, covariance: Array,
            scales: Array) -> _Step:
    """The E step of EM for T_i = scales_i * covariance.

    Models with covariance f T and curvature A are, in units of sqrt(f), models with covariance T
    and curvature f A.
    """
    v, f = variances[:, None], scales[:, None]
    constants = -0.5 * (rows.square / variances + rows.rows * np.log(2 * np.pi * variances))
    own = Expansions(constants, rows.moment / v, rows.gram / v[..., None])
    scaled = Expansions(constants, np.sqrt(f) * own.slopes, f[..., None] * own.curvatures)
    inner, posterior = scaled.marginal(covariance)
    marginal = Expansions(inner.constants, inner.slopes / np.sqrt(f),
                          inner.curvatures / f[..., None])
    posterior = f[..., None] * posterior
    centres = marginal.centres(labels)[labels]
    models = own.modes(centres, posterior)
    residual = rows.square \
        + (models * (np.einsum("nde,ne->nd", rows.gram, models) - 2 * rows.moment)).sum(axis=1)
    unsure = _ROUNDING * rows.square + 1e-300  # what differences of sums cannot tell from zero
    deviations = models - centres
    moment = (deviations / f).T @ deviations + (posterior / f[..., None]).sum(axis=0)
    return _Step(float(marginal.at_own(centres).sum()), np.einsum("nde,ned->n", own.curvatures,
        posterior),
                 np.maximum(residual, unsure),
                 np.maximum(residual, unsure) + np.einsum("nde,ned->n", rows.gram, posterior),
                 moment / len(scales))


def _prior(residual: Array, freedom: Array) -> tuple[float, float, float]:
    """nu and s_0 with the largest likelihood of residual / freedom ~ s_0 F(freedom, nu); the gain
    over equal noise.
    """
    from scipy.optimize import minimize_scalar

    known = freedom > _FEWEST
    if not known.any():
        return np.inf, 1.0, -np.inf
    ratio, k = residual[known] / freedom[known], freedom[known]
    middle = float(np.log(np.median(ratio)))

    def best(density: Callable[[Array], Array]) -> tuple[float, float]:
        found = minimize_scalar(lambda log: float(len(k) * log
                                                  - density(ratio / np.exp(log)).sum()),
                                bounds=(middle - 3, middle + 3), method="bounded")
        return float(-found.fun), float(np.exp(found.x))

    def ratios(degrees: float) -> tuple[float, float, float]:
        return *best(lambda x: _log_ratio_density(x, k, degrees)), degrees

    equal, _ = best(lambda x: _log_mean_square_density(x, k))
    likelihood, scale, degrees = max(map(ratios, _DEGREES))
    return degrees, scale, likelihood - equal


def _log_ratio_density(x: Array, k: Array, degrees: float) -> Array:
    """The logarithm of the density of Fisher's F(k, degrees) at x."""
    from scipy.special import betaln, xlogy

    a, b = 0.5 * k, 0.5 * degrees
    return np.asarray(xlogy(a, k) + xlogy(b, degrees) + xlogy(a - 1, x) - betaln(a, b)
                      - (a + b) * np.log(degrees + k * x))


def _log_mean_square_density(x: Array, k: Array) -> Array:
    """The logarithm of the density, at x, of the mean of k squares of standard normal numbers."""
    from scipy.special import gammaln, xlogy

    a = 0.5 * k
    return np.asarray(xlogy(a - 1, x * k) - a * x - gammaln(a) - a * np.log(2) + np.log(k))
