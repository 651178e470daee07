"""Groups of users with wide models: more coordinates than a user has rows.

A price of log(n) / 2 for every coordinate of a model would forbid groups that rows show clearly,
because rows determine only a few of these coordinates. So the models are random, and the evidence
integrates over them:

    model of user i ~ N(model of its group, within I),  model of a group ~ N(centre, between I),
    centre ~ N(0, prior I)

A loss is replaced by a quadratic at the pooled model, and the curvature of a row of softmax by its
mean over outputs: then the k outputs are separate, and have the same curvature in the p columns.
With the slopes b (p x k) and the curvature B of a log-likelihood, models of variance t around x
leave, as a function of x, a quadratic with

    curvature  B (I + t B)^-1        slope  (I + t B)^-1 b
    constant   t tr b' (I + t B)^-1 b / 2 - k log det(I + t B) / 2

which is applied to users, to groups and to the centre. Users have B = Q diag(d) Q' of low rank, Q
(p x rows). A description costs what the evidence lacks, and the labels:

    - evidence + sum_i log(n_users / size of the group of i) + log(n_users) / 2 for each variance
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from coterie.base.labels import check_labels, group_sums, one_group
from coterie.base.machine import require_memory
from coterie.base.types import Array, Ints
from coterie.data.users import Users
from coterie.groups.partitions import Partition
from coterie.losses import Loss, Samples
from coterie.losses.curvature import RowCurvature

_MOST_GROUPS = 32  # groups at most
# a tried variance within groups, over that of all users, where this is not almost zero.
_WITHIN, _NONE = 0.3, 1e-6
_BETWEEN = (1e-4, 1e-3, 1e-2, 1e-1)  # tried variances of models of groups
_ROUNDS = 8  # how often users may change their group
_PATIENCE = 2  # the search ends after this many numbers of groups without a shorter description
_EXPANDED = 3  # how often quadratics are computed, each time at a better pooled model
_PRIORS = tuple(np.geomspace(1e-7, 10.0, 41).tolist())  # tried variances of coefficients
_VARIANCES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)  # of users' models, the first ones tried
_LEAST = 1e-8  # variance
# Of L-BFGS: most steps, the gradient at the end over that at zero, and steps that are remembered.
_STEPS, _ACCURATE, _MEMORY = 600, 1e-5, 12
# Tried variances of targets that have variance 1.
_NOISES = tuple(np.geomspace(0.01, 1.0, 16).tolist())


class CentreQuadratic(NamedTuple):
    """<slope, x> - tr x' curvature x / 2 for x (p, k), plus a constant."""

    slope: Array  # (p, k)
    curvature: Array  # (p, p)
    constant: float

    def around(self, variance: float) -> CentreQuadratic:
        """The log of the mean of its exponential over models of this variance, as a function of
        their centre.
        """
        if variance == 0:
            return self
        eye = np.eye(len(self.curvature))
        root = np.linalg.cholesky(eye + variance * self.curvature)
        inverse = np.linalg.inv(root)
        inverse = inverse.T @ inverse
        slope = inverse @ self.slope
        constant = 0.5 * variance * float((self.slope * slope).sum()) - _log_det(root, self.slope)
        curvature = inverse @ self.curvature  # symmetric, because the factors commute
        return CentreQuadratic(slope, 0.5 * (curvature + curvature.T), self.constant + constant)


def _log_det(root: Any, slope: Array) -> float:
    """k log det(root root') / 2."""
    return slope.shape[1] * float(np.log(np.diag(root)).sum())


@dataclass(frozen=True, eq=False)
class UserQuadratics:
    """The log-likelihoods of users as quadratics about one point, for models of a variance around
    what is asked for.

    Parameters
    ----------
    slopes : (n_users, p, k).
    factors : for each user d (rows,) and Q' (rows, p) of the curvature Q diag(d) Q' that its rows
        have.
    constants : (n_users,)
    variance : of users' models around their centre.
    """

    slopes: Array
    factors: list[tuple[Array, Array]]
    constants: Array
    variance: float = 0.0

    def around(self, variance: float, noise: float = 1.0) -> UserQuadratics:
        """For models of this variance; the log-likelihoods are divided by the noise."""
        slopes, constants = self.slopes / noise, self.constants / noise
        factors = [(d / noise, Q) for d, Q in self.factors]
        k = slopes.shape[2]
        for i, (d, Q) in enumerate(factors):
            held = variance * d / (1.0 + variance * d)
            inside = Q @ slopes[i]
            constants[i] += 0.5 * variance * float((slopes[i] ** 2).sum()
                                                   - (held[:, None] * inside**2).sum()) \
                - 0.5 * k * float(np.log1p(variance * d).sum())
            slopes[i] -= Q.T @ (held[:, None] * inside)
            factors[i] = (d / (1.0 + variance * d), Q)
        return UserQuadratics(slopes, factors, constants, variance)

    @cached_property
    def total(self) -> CentreQuadratic:
        """The sum over all users."""
        return self.sum(np.arange(len(self.slopes)))

    def sum(self, members: Ints) -> CentreQuadratic:
        """The sum over some users."""
        rows = np.concatenate([np.sqrt(self.factors[i][0])[:, None] * self.factors[i][1]
                               for i in members])
        return CentreQuadratic(self.slopes[members].sum(axis=0), rows.T @ rows,
                               float(self.constants[members].sum()))

    def values(self, points: Array) -> Array:
        """(n_users, n_points) the values of all users at points (n_points, p, k)."""
        values = self.constants[:, None] + np.tensordot(self.slopes, points, ((1, 2), (1, 2)))
        side = points.transpose(1, 0, 2).reshape(points.shape[1], -1)
        for i, (d, Q) in enumerate(self.factors):
            values[i] -= 0.5 * (d @ (Q @ side) ** 2).reshape(len(points), -1).sum(axis=1)
        return np.asarray(values)

    def models(self, centres: Array) -> Array:
        """(n_users, p, k) the most likely models of users around their centres (n_users, p, k)."""
        pulls = self.slopes - np.stack([Q.T @ (d[:, None] * (Q @ c))
                                        for (d, Q), c in zip(self.factors, centres, strict=True)])
        return np.asarray(centres + self.variance * pulls)


@dataclass(frozen=True, eq=False)
class WideSearch:
    """What a search among users with wide models found.

    Parameters
    ----------
    examined : the descriptions compared; the first is one model, the second one centre with spread.
    models : (n_users, dim) the models of users around one centre, shrunk as the evidence says.
    variance : of users' models around one centre.
    noise : the dispersion.
    """

    examined: list[Partition]
    models: Array
    variance: float
    noise: float

    @property
    def best(self) -> Partition:
        """The shortest description."""
        return min(self.examined, key=lambda description: description.length)

    @property
    def sentence(self) -> str:
        """What the shortest description says."""
        best, examined = self.best, f"none of {len(self.examined)} descriptions"
        if best is self.examined[1]:
            return (f"Users differ, but continuously: no groups stand out ({examined} is better "
                    "than one centre with " "a spread of models).")
        if not best.labels.any():
            return one_group(len(best.labels), len(self.examined))
        sizes, within = ", ".join(map(str, np.bincount(best.labels))), \
            " Models also vary within groups."
        return (f"{best.n_groups} groups of {sizes} users describe the data better than one group: "
                "description " f"length {best.length:.6g} instead of "
                f"{min(d.length for d in self.examined[:2]):.6g}."
                f"{within if best.within else ''}")


@dataclass(frozen=True, eq=False)
class _Evidence:
    """The evidence of partitions.

    Parameters
    ----------
    users : their quadratics about a point.
    point : (p, k).
    prior : the variance of centres around zero.
    """

    users: UserQuadratics
    point: Array
    prior: float

    def centre(self, sums: CentreQuadratic) -> tuple[float, Array]:
        """The evidence, and the centre less the point, from the sum of quadratics of the centre."""
        b = sums.slope - self.point / self.prior
        root = np.linalg.cholesky(np.eye(len(b)) + self.prior * sums.curvature)
        half = np.linalg.solve(root, b)
        value = 0.5 * self.prior * float((half**2).sum()) - _log_det(root, b)
        value += sums.constant - 0.5 * float((self.point**2).sum()) / self.prior
        return value, self.prior * np.linalg.solve(root.T, half)

    def groups(self, around: list[CentreQuadratic], between: float) -> tuple[float, Array, Array]:
        """The evidence of groups, by quadratics of the centre; the models of groups and the centre,
        less the point.
        """
        value, centre = self.centre(CentreQuadratic(
            np.sum([g.slope for g in around], axis=0), np.sum([g.curvature for g in around],
                axis=0),
            sum(g.constant for g in around)))
        return value, \
            np.stack([centre + between * (g.slope - g.curvature @ centre) for g in around]), \
            centre

    def length(self, evidence: float, labels: Ints, numbers: int) -> float:
        """The description length, for so many variances."""
        sizes, n = np.bincount(labels), len(labels)
        return float(sizes @ np.log(n / sizes)) - evidence + 0.5 * numbers * float(np.log(n))


def search_wide(users: Users, loss: Loss, max_groups: int | None = None,
                progress: Callable[[int], None] | None = None) -> WideSearch:
    """Search for groups among users with wide models.

    Parameters
    ----------
    users : their data, with features, and targets that are numbers, of about unit size.
    loss : of their models; `loss.wide` holds for them.
    max_groups : largest number of groups; None for no limit.
    progress : called with the number of groups of every partition examined.

    Returns
    -------
    WideSearch

    Raises
    ------
    InvalidInput : where there is not enough memory.
    """
    samples, n = loss.prepare(users), users.n_users
    p = samples.users.n_features + 1
    require_memory(8.0 * p * (p * (4 * _MOST_GROUPS + 8) + 3 * users.n_samples),
                   f"groups of users with {p} columns",
                   "Use fewer columns, for example their principal components, or fewer users at a "
                   "time")
    bare, point, prior, noise = _expand(users, loss, samples)
    variance, noise = _spread(bare, point, prior, noise,
                              users if loss.gaussian else None)
    alone = bare.around(0.0, noise)
    evidence, everyone = _Evidence(alone, point, prior), np.zeros(n, dtype=np.int64)
    examined = [Partition(everyone, evidence.length(evidence.centre(alone.total)[0], everyone,
                                                          0))]
    spread = bare.around(variance, noise)
    value, centre = evidence.centre(spread.total)
    examined.append(Partition(everyone, evidence.length(value, everyone, 1), within=variance))
    # Users who have few rows in many columns show no variance of their own, but groups of them may.
    shown = bare.around(max(variance, 1.0 / np.mean([d.mean() for d, _ in alone.factors])), noise)
    models = (point + shown.models(np.broadcast_to(centre, alone.slopes.shape))).reshape(n, -1)
    limit = min(n - 1, max_groups or n, _MOST_GROUPS)
    if n > 2:
        for within in (0.0, *([_WITHIN * variance] if variance > _NONE else [])):
            examined += _partitions(evidence, models, within, limit, progress)
    return WideSearch(examined, models, variance, noise)


def _quadratics(loss: Loss, samples: Samples, rows: Array, point: Array) -> UserQuadratics:
    """The log-likelihoods of users about a point, without ridge and for noise 1."""
    n = samples.n_users
    values, gradients, curvature = loss.expand(samples, np.tile(point.ravel(), (n, 1)))
    assert isinstance(curvature, RowCurvature)
    ridge = loss.ridge * loss.shrunk(samples.dim, curvature.outputs)
    factors: list[tuple[Array, Array]] = [(np.empty(0), np.empty((0, 0)))] * n
    for part in curvature.terms:
        masses = curvature.mean_mass(part)
        for i, user in enumerate(part.users):
            real = part.weights[i] > 0
            root = np.sqrt(rows[user] * masses[i, real])[:, None] * part.design[i, real]
            d, U = np.linalg.eigh(root @ root.T)
            kept = d > 1e-10 * max(float(d[-1]), 1e-300)
            factors[user] = (d[kept], (U[:, kept] / np.sqrt(d[kept])).T @ root)
    slopes = -rows[:, None] * (gradients - ridge * point.ravel())
    return UserQuadratics(slopes.reshape(n, *point.shape), factors,
                          -rows * (values - 0.5 * float(ridge @ point.ravel() ** 2)))


def _expand(users: Users, loss: Loss, samples: Samples) -> tuple[UserQuadratics, Array, float,
        float]:
    """Quadratics about a pooled model with as much ridge as the evidence wants; this model, the
    prior, the noise.
    """
    everyone, rows = np.zeros(users.n_users, dtype=np.int64), users.sizes.astype(float)
    p = users.n_features + 1
    point, noises = np.zeros((p, samples.dim // p)), \
        _NOISES if loss.gaussian else (1.0,)
    for turn in range(_EXPANDED):
        quadratics = _quadratics(loss, samples, rows, point)
        if turn == _EXPANDED - 1:
            break
        slope, curvature, constant = quadratics.total
        scales, axes = np.linalg.eigh(curvature)
        scales, k = np.maximum(scales, 0.0), slope.shape[1]
        # In coordinates from zero.
        along = ((axes.T @ (slope + curvature @ point)) ** 2).sum(axis=1)
        constant -= float((point * (slope + 0.5 * curvature @ point)).sum())
        best = -np.inf
        for s in noises:
            for t in _PRIORS:
                value = 0.5 * t / s**2 * float((along / (1.0 + t * scales / s)).sum(
                    )) + constant / s \
                    - 0.5 * k * float(np.log1p(t * scales / s).sum())
                value -= 0.5 * float(rows.sum()) * np.log(s)
                if value > best:
                    best, prior, noise = value, t, s
        ridged = replace(loss, ridge=noise / (prior * rows.sum()))  # type: ignore[type-var]
        point = fit_models(ridged, ridged.prepare(users), everyone, rows / rows.sum(), None,
                           point.reshape(1, -1),
                           1e-4).centres.reshape(point.shape)
    return quadratics, point, prior, noise


def _spread(bare: UserQuadratics, point: Array, prior: float, noise: float,
            users: Users | None) -> tuple[float, float]:
    """The variance of users' models around one centre that has the largest evidence, and the noise.

    The noise is estimated for users with the squared loss; else they are None.
    """
    from scipy import optimize

    def missing(numbers: Array) -> float:
        variance = max(float(np.exp(numbers[0])), _LEAST)
        s = noise * float(np.exp(numbers[1])) if len(numbers) > 1 else noise
        around = bare.around(variance, s)
        rows = 0.0 if users is None else 0.5 * users.n_samples * float(np.log(s))
        return rows - _Evidence(around, point, prior).centre(around.total)[0]

    first = [min(np.log(_VARIANCES), key=lambda v: missing(np.array([v]))),
             *([] if users is None else [-0.3])]
    simplex = np.array([first, *(np.array(first) + 0.7 * unit for unit in np.eye(len(first)))])
    found = optimize.minimize(missing, first, method="Nelder-Mead", options={
        "initial_simplex": simplex, "xatol": 0.15, "fatol": 0.5, "maxfev": 20 * len(first)}).x
    return max(float(np.exp(found[0])), _LEAST), \
        noise * float(np.exp(found[1])) if users is not None else noise


def _partitions(evidence: _Evidence, models: Array, within: float, limit: int,
                progress: Callable[[int], None] | None) -> list[Partition]:
    """Partitions into 2, 3, ... groups: those of users' models in their largest principal
    components, and improved.

    Numbers of groups are tried until the description is no shorter several times.
    """
    from scipy.cluster.hierarchy import fcluster, linkage

    n, users = len(models), evidence.users.around(within)
    values, axes = np.linalg.eigh((models - models.mean(axis=0)) @ (models - models.mean(axis=0)).T)
    scores = axes[:, ::-1] * np.sqrt(np.maximum(values[::-1], 0.0))
    found: list[Partition] = []
    between, waited = _BETWEEN[len(_BETWEEN) // 2], 0
    for count in range(2, limit + 1):
        labels = check_labels(fcluster(linkage(scores[:, :max(count - 1, 1)], "ward"), count,
                                       "maxclust"), n)
        best: Partition | None = None
        for _ in range(_ROUNDS):
            groups = _Groups(evidence, users, labels, between if best else None)
            length = evidence.length(groups.evidence, labels, 1 + (within > 0)) + float(np.log(n))
            if best is not None and not length < best.length:
                break
            best, between = Partition(labels, length, within=within), groups.between
            labels = check_labels(groups.likeliest(), n)
            if np.array_equal(labels, best.labels) or not labels.any():
                break
        assert best is not None
        if progress is not None:
            progress(best.n_groups)
        shorter = not found or best.length < min(description.length for description in found)
        waited = 0 if shorter else waited + 1
        found.append(best)
        if waited == _PATIENCE:
            break
    return found


class _Groups:
    """The models of groups, with the variance between groups that has the largest evidence, or the
    one given.
    """

    def __init__(self, evidence: _Evidence, users: UserQuadratics, labels: Ints,
                 between: float | None) -> None:
        self.users, self.labels = users, labels
        self.sums = [users.sum(np.flatnonzero(labels == c)) for c in range(int(labels.max()) + 1)]
        trials = _BETWEEN if between is None else (between,)
        judged = [evidence.groups([part.around(t) for part in self.sums], t) for t in trials]
        best = int(np.argmax([value for value, *_ in judged]))
        self.between, (self.evidence, self.centres, self.centre) = trials[best], judged[best]

    def likeliest(self) -> Ints:
        """(n_users,) the group whose model, fitted without the user, fits it best.

        With V the covariance of the model of its group and the user's curvature Q diag(d) Q', the
        model without it is

            centre + W (slope of the others),      W = V + V Q (diag(1/d) - Q' V Q)^-1 Q' V
        """
        users, values = self.users, \
            self.users.values(self.centres) + np.log(np.bincount(self.labels))
        for c, part in enumerate(self.sums):
            V = np.linalg.inv(part.curvature + np.eye(len(part.curvature)) / self.between)
            pull = part.slope - part.curvature @ self.centre
            for i in np.flatnonzero(self.labels == c).tolist():
                d, Q = users.factors[i]
                QV = Q @ V
                others = pull - users.slopes[i] + Q.T @ (d[:, None] * (Q @ self.centre))
                small = np.diag(1.0 / d) - QV @ Q.T
                model = self.centre + V @ others + QV.T @ np.linalg.solve(small, QV @ others)
                members = int((self.labels == c).sum())
                values[i, c] = _at(users, i, model) + np.log(max(members - 1, 0.1))
        return np.asarray(values.argmax(axis=1))


def _at(users: UserQuadratics, user: int, model: Array) -> float:
    """The value of one user at a model (p, k)."""
    d, Q = users.factors[user]
    return float(users.constants[user] + (users.slopes[user] * model).sum() - 0.5
                 * (d @ (Q @ model) ** 2).sum())


# Wide models of users and of groups by L-BFGS: quick, and exact to a few digits, for what no
# certificate judges.


class CentredModels(NamedTuple):
    """Centres of groups, and the models of users around them."""

    centres: Array  # (n_groups, dim)
    models: Array  # (n_users, dim)


def fit_models(loss: Loss, samples: Samples, labels: Ints, weights: Array,
               prices: Array | None = None,
               start: Array | None = None, accurate: float = _ACCURATE) -> CentredModels:
    """Models and centres.

        minimise over models x and centres z   sum_i weights_i (f_i(x_i) + prices_i / 2 ||x_i -
                                               z_i||^2)

    Without prices, all users of a group have the model of the group.

    Parameters
    ----------
    loss, samples : the loss, and what it prepared.
    labels : (n_users,) the groups.
    weights : (n_users,)
    prices : (n_users,) of leaving the centre; None where nobody does.
    start : (n_groups, dim) or (n_users, dim) where to begin.
    accurate : the gradient at which the search ends, over that at zero.

    Returns
    -------
    CentredModels

    Raises
    ------
    InvalidInput : where there is not enough memory.
    """
    from scipy import optimize

    n_groups, dim = int(labels.max()) + 1, samples.dim
    shape = (n_groups if prices is None else len(labels), dim)
    require_memory(8.0 * shape[0] * dim * (2 * _MEMORY + 12), f"{shape[0]} models with {dim} "
        "coordinates",
                   "Use fewer columns, for example their principal components, or fewer users at a "
                   "time")
    sums = np.ones(n_groups) if prices is None else group_sums(weights * prices, labels, n_groups)

    def centres_of(x: Array) -> Array:
        assert prices is not None
        return group_sums((weights * prices)[:, None] * x, labels, n_groups) / sums[:, None]

    def evaluate(vector: Array) -> tuple[float, Array]:
        x = vector.reshape(shape)
        with np.errstate(over="ignore", invalid="ignore"):
            f, g, _ = loss.evaluate(samples, x[labels] if prices is None else x, 1)
            if prices is None:
                return float(weights @ f), group_sums(weights[:, None] * g, labels,
                                                      n_groups).ravel()
            away = x - centres_of(x)[labels]
            value = weights @ (f + 0.5 * prices * np.einsum("nd,nd->n", away, away))
            return float(value), (weights[:, None] * (g + prices[:, None] * away)).ravel()

    begin = np.zeros(shape) if start is None else start if len(start) == shape[0] else start[labels]
    level = float(np.abs(evaluate(np.zeros(shape).ravel())[1]).max())
    found = optimize.minimize(evaluate, begin.ravel(), jac=True, method="L-BFGS-B", options={
        "maxiter": _STEPS, "maxfun": 2 * _STEPS, "maxcor": _MEMORY, "gtol": accurate * level,
            "ftol": 1e-13})
    x = found.x.reshape(shape)
    return CentredModels(x, x[labels]) if prices is None else CentredModels(centres_of(x), x)
