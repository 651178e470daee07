"""Noise that differs between users: a variance for each user, shrunk to a common one.

    rows of user i ~ N(design_i model_i, s_i),     model_i ~ N(centre of its group, T_i),     s_i ~
                                                   scaled inverse chi2

with nu degrees of freedom and scale s_0. nu and s_0 maximise the likelihood of the residual
variances, which are s_0 F(rows - parameters in use, nu) if s_i is drawn like this; the variance of
a user is then the mean

    s_i = (nu s_0 + squares_i) / (nu + m_i),        squares_i: expected sum of squared residuals of
                                                    its m_i rows

Two assumptions on the models are compared by their evidence:

    T_i = T         models differ alike, whatever the noise; noisy users are shrunk more
    T_i = s_i T     models of noisy users differ more, as if users had units of their own; all are
                    shrunk alike

Only the first needs the variances to find the models of the users.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from coterie.base.types import Array, Ints
from coterie.data.users import Users
from coterie.groups.dispersion import without_ridge
from coterie.groups.hierarchy import ModelSums
from coterie.groups.spread import Expansions, sample_users
from coterie.losses import Loss

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
