"""Models that vary continuously around the centre of a group: random effects with one covariance T
for all groups.

    model of user i ~ N(centre of its group, T),        log-likelihood of its rows  l_i(x) = -m_i
                                                        f_i(x) / s

for m_i rows and dispersion s. With the second-order expansion of l_i at a point,

    l_i(x) = constant_i + <slope_i, x> - x' curvature_i x / 2

the evidence log E exp(l_i(model of user i)) is a quadratic function of the centre, too. With A =
curvature_i and V = (A + T^-1)^-1, the covariance of the model of user i given its rows, it has

    curvature  A - A V A,      slope  (I - A V) slope_i,      constant  constant_i + slope_i' V
                               slope_i / 2
                                                                        - log det(I + A T) / 2

This is Laplace's approximation if the expansion is at the mode of l_i(x) - (x - centre)' T^-1 (x -
centre) / 2, and exact for squared loss. T is a multiple of the identity (or zero) plus a number of
free directions, its `rank`. It maximises the evidence by EM (Dempster, Laird and Rubin 1977); the
projection of an EM step on this form of T is that of probabilistic principal components (Tipping
and Bishop 1999).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from coterie.base.labels import group_sums
from coterie.base.machine import in_parts
from coterie.base.types import Array, Flags, Indices, Ints
from coterie.losses import Loss, Samples
from coterie.losses.newton import minimise

_ROUNDS = 30  # largest number of EM rounds
_SETTLED = 0.1  # EM ends after a round that increases the evidence by less
_SAMPLE = 150  # largest number of users that T is estimated from
_LONGEST = 16.0  # largest factor of an extrapolated EM step
_SMALLEST = 1e-10  # smallest eigenvalue of T, relative to the largest
# Curvatures of rank dim / _LOW at most are used as factors, in this dimension and above.
_LOW, _WIDE = 3, 30
_BLOCK = 100  # users whose matrices are computed at the same time
_FLAT = 1e-9  # relative curvature added, so that directions without curvature do not matter


#: Floors (n,) and factors (n, dim, rank) with curvature_i = floor_i I + factor_i factor_i', for
#: users with fewer rows than coordinates.
Factors = tuple[Array, Array]
#: Scales (n, dim) and axes (n, dim, dim), one in each row, with curvature_i = sum_r scale_ir
#: axis_ir axis_ir'.
Spectra = tuple[Array, Array]


@dataclass(frozen=True, eq=False)
class Expansions:
    """One quadratic log-likelihood per user, as in the module's formula.

    Parameters
    ----------
    constants : (n,).
    slopes : (n, dim).
    curvatures : (n, dim, dim).
    """

    constants: Array
    slopes: Array
    curvatures: Array

    @classmethod
    def at(cls, loss: Loss, samples: Samples, weights: Array, points: Array) -> Expansions:
        """The expansions of -weights_i f_i at points_i."""
        values, gradients, hessians = loss.evaluate(samples, points, 2)
        curvatures = weights[:, None, None] * hessians
        products = _times(curvatures, points)
        slopes = products - weights[:, None] * gradients
        return cls(-weights * values + (points * (0.5 * products - slopes)).sum(axis=1), slopes,
                   curvatures)

    def take(self, users: Indices | Ints) -> Expansions:
        """The expansions of some users."""
        return Expansions(self.constants[users], self.slopes[users],
                          self.curvatures[users])._knowing(
            self, lambda floors, factors: (floors[users], factors[users]),
            lambda scales, axes: (scales[users], axes[users]))

    def scaled(self, factor: float) -> Expansions:
        """All log-likelihoods times a factor."""
        return Expansions(factor * self.constants, factor * self.slopes,
                          factor * self.curvatures)._knowing(
            self, lambda floors, factors: (factor * floors, factor**0.5 * factors),
            lambda scales, axes: (factor * scales, axes))

    def weighted(self, weights: Array) -> Expansions:
        """The log-likelihood of every user times its weight."""
        return Expansions(weights * self.constants, weights[:, None] * self.slopes,
                          weights[:, None, None] * self.curvatures)

    def _knowing(self, other: Expansions, factors: Callable[[Array, Array], Factors],
                 spectra: Callable[[Array, Array], Spectra]) -> Expansions:
        """The same, with factors and spectra that come from those of others."""
        vars(self)["factors"] = None if other.factors is None else factors(*other.factors)
        if "spectra" in vars(other):
            vars(self)["spectra"] = spectra(*other.spectra)
        return self

    @cached_property
    def spectra(self) -> Spectra:
        """The eigenvalues and eigenvectors of the curvatures."""
        scales, axes = np.linalg.eigh(self.curvatures)
        return np.maximum(scales, 0.0), np.ascontiguousarray(np.swapaxes(axes, 1, 2))

    def values(self, centres: Array) -> Array:
        """(n, n_centres) the value of every user at every centre."""
        outer = (centres[:, :, None] * centres[:, None, :]).reshape(len(centres), -1)
        squares = self.curvatures.reshape(len(self.slopes), -1) @ outer.T
        return np.asarray(self.constants[:, None] + self.slopes @ centres.T - 0.5 * squares)

    def at_own(self, models: Array) -> Array:
        """(n,) the value of every user at its own model."""
        return np.asarray(self.constants
                          + (models * (self.slopes - 0.5 * _times(self.curvatures, models))).sum(
                              axis=1))

    def sums(self, labels: Ints) -> Expansions:
        """The sum over the users of each group."""
        return Expansions(*(group_sums(part, labels) for part in (self.constants, self.slopes,
            self.curvatures)))

    def centres(self, labels: Ints) -> Array:
        """(n_groups, dim) where the sum of the values of each group is largest."""
        sums = self.sums(labels)
        return solve_damped(sums.curvatures, sums.slopes)

    @cached_property
    def factors(self) -> Factors | None:
        """The curvatures as factors of low rank; None if the rank is not low."""
        dim = self.slopes.shape[1]
        if dim < _WIDE:
            return None
        scales, axes = np.linalg.eigh(self.curvatures)
        floors = scales[:, 0].clip(min=0.0)
        above = scales - floors[:, None]
        rank = max(int((above > 1e-12 * scales[:, -1:]).sum(axis=1).max()), 1)
        if _LOW * rank > dim:
            return None
        return floors, axes[:, :, -rank:] * np.sqrt(above[:, None, -rank:].clip(min=0.0))

    def marginal(self, covariance: Array) -> tuple[Expansions, Array]:
        """The evidence as a function of the centre, for models with this covariance, and V, (n,
        dim, dim).
        """
        scales, axes = np.linalg.eigh(covariance)
        if self.factors is not None:
            return self._marginal_of_factors(self.factors, np.maximum(scales, 0.0), axes)
        root = axes * np.sqrt(np.maximum(scales, 0.0))  # covariance = root root'
        out = [np.empty_like(part) for part in (self.constants, self.slopes, self.curvatures,
                                                self.curvatures)]

        def compute(some: slice) -> None:
            for full, part in zip(out, self._block(some, root), strict=True):
                full[some] = part

        in_parts(compute, len(self.constants), _BLOCK)
        return Expansions(*out[:3]), out[3]

    def _block(self, users: slice, root: Array) -> tuple[Array, Array, Array, Array]:
        """`marginal` of some users, as arrays; `root` is that of T."""
        from coterie.base.matrices import invert

        curvatures, slopes = self.curvatures[users], self.slopes[users]
        n, dim = slopes.shape
        # One product for the matrices of all users is much faster than one for each.
        half = np.swapaxes((curvatures.reshape(-1, dim) @ root).reshape(n, dim, dim), 1, 2)
        inner = (np.ascontiguousarray(half).reshape(-1, dim) @ root).reshape(n, dim, dim) \
            + np.eye(dim)
        inverses, logs = invert(inner)
        if not np.isfinite(logs).all():  # rounding made a matrix indefinite
            inverses, logs = np.linalg.inv(inner), np.linalg.slogdet(inner)[1]
        posterior = root @ (inverses.reshape(-1, dim) @ root.T).reshape(n, dim, dim)
        own = _times(posterior, slopes)
        constants = self.constants[users] + 0.5 * (slopes * own).sum(axis=1) - 0.5 * logs
        return constants, slopes - _times(curvatures, own), \
            curvatures - curvatures @ posterior @ curvatures, posterior

    def _marginal_of_factors(self, low: Factors, scales: Array, axes: Array) -> tuple[Expansions,
            Array]:
        """The same by the formulas for a matrix of low rank, for T = axes diag(scales) axes'.

        With c = floor, F = factor, S = (T^-1 + c I)^-1, W = S F and M = I + F' S F:

            V = S - W M^-1 W',      A V = c V + F M^-1 W',      A V A = c A V + (F (I - M^-1) + c W
                                    M^-1) F'
            log det(I + A T) = log det(I + c T) + log det M
        """
        floors, F = low
        if (floors == floors[0]).all():  # then S is the same for all
            floors = floors[:1]
        c, turned = floors[:, None, None], 1.0 + floors[:, None] * scales
        S = (axes * (scales / turned)[:, None, :]) @ axes.T
        W = S @ F
        M = np.eye(F.shape[2]) + np.swapaxes(F, 1, 2) @ W
        inverse = np.linalg.inv(M)
        right = inverse @ np.swapaxes(W, 1, 2)  # M^-1 W'
        posterior = S - W @ right
        own = _times(posterior, self.slopes)
        constants = self.constants + 0.5 * (self.slopes * own).sum(axis=1) \
            - 0.5 * (np.log(turned).sum(axis=1) + np.linalg.slogdet(M)[1])
        slopes = self.slopes - c[:, 0] * own - _times(F, _times(right, self.slopes))
        left = F - F @ inverse + c * np.swapaxes(right, 1, 2)
        curvatures = self.curvatures - left @ np.swapaxes(F, 1, 2)
        if c.any():
            curvatures -= c * (c * posterior + F @ right)
        return Expansions(constants, slopes, curvatures), posterior

    def modes(self, centres: Array, posterior: Array) -> Array:
        """(n, dim) the most likely model of every user, given its centre: centre + V (slope -
        curvature centre).
        """
        return centres + _times(posterior, self.slopes - _times(self.curvatures, centres))

    def second_moment(self, centres: Array, posterior: Array) -> Array:
        """(dim, dim) the mean of (model - centre) (model - centre)' given the rows: an EM step for
        T.
        """
        deviations = self.modes(centres, posterior) - centres
        return np.asarray((deviations.T @ deviations + posterior.sum(axis=0)) / len(deviations))


@dataclass(frozen=True, eq=False)
class Spread:
    """A covariance of models around the centres of groups, and how well it fits.

    Parameters
    ----------
    covariance : (dim, dim) T.
    rank : number of free directions of T.
    cost : the length of a description of T.
    centres : (n_groups, dim).
    models : (n_users, dim) the most likely model of each user.
    evidence : the sum of the evidence of all users.
    """

    covariance: Array
    rank: int
    cost: float
    centres: Array
    models: Array
    evidence: float


def _times(matrices: Array, vectors: Array) -> Array:
    return np.asarray((matrices @ vectors[..., None])[..., 0])


def solve_damped(curvatures: Array, slopes: Array) -> Array:
    """(n, dim) curvatures_i^-1 slopes_i; 0 in directions without curvature."""
    dim = slopes.shape[1]
    shift = _FLAT * np.trace(curvatures, axis1=1, axis2=2) / dim + 1e-300
    return np.asarray(np.linalg.solve(curvatures + shift[:, None, None] * np.eye(dim),
                                      slopes[..., None])[..., 0])


def sample_users(n_users: int) -> Indices:
    """Positions of enough users to estimate T: all users, or some of them at equal distances."""
    return np.unique(np.linspace(0, n_users - 1, min(n_users, _SAMPLE)).astype(np.intp))


class RoundSpread:
    """Models that vary alike in all directions, T = t I, in groups that may change.

    In the coordinates of user i's axes E with scales a, and with u = 1 / (1 + t a) and z = E
    slope_i:

        curvature  E' diag(a u) E,      slope  E' (u z),      constant  constant_i + sum (t u z^2 +
                                        log u) / 2
        V = E' diag(t u) E,             expected model - centre  E' (t u (z - a E centre))

    Parameters
    ----------
    expansions : of the users.
    """

    def __init__(self, expansions: Expansions) -> None:
        self.constants, (self.scales, self.axes) = expansions.constants, expansions.spectra
        self.turned = _times(self.axes, expansions.slopes)  # z

    def fit(self, t: float, labels: Ints) -> tuple[Array, Array]:
        """The centres of the groups, and (n, n_groups) the evidence of every user for each."""
        n, dim = self.scales.shape
        u, order = 1.0 / (1.0 + t * self.scales), np.argsort(labels, kind="stable")
        ends = np.cumsum(np.bincount(labels))
        axes = self.axes[order].reshape(-1, dim)
        curved, pulled = (part[order].reshape(-1, 1) * axes for part in (self.scales * u,
            u * self.turned))
        slices = [slice(dim * start, dim * end) for start, end in zip([0, *ends[:-1].tolist()],
            ends.tolist(),
                                                                       strict=True)]
        curvatures = np.stack([curved[each].T @ axes[each] for each in slices])
        centres = solve_damped(curvatures, np.stack([pulled[each].sum(axis=0) for each in slices]))
        at = (self.axes.reshape(-1, dim) @ centres.T).reshape(n, dim, -1)  # E centre
        constants = self.constants + 0.5 * (t * u * self.turned**2 + np.log(u)).sum(axis=1)
        pull, bend = (u * self.turned)[:, None, :] @ at, (self.scales * u)[:, None, :] @ at**2
        return centres, constants[:, None] + (pull - 0.5 * bend)[:, 0]

    def next(self, t: float, centres: Array) -> float:
        """An EM step for t, with (n, dim) the centre of every user."""
        u = 1.0 / (1.0 + t * self.scales)
        deviations = t * u * (self.turned - self.scales * _times(self.axes, centres))
        return float((deviations**2).sum() + t * u.sum()) / u.size


def intercept_spread(expansions: Expansions, labels: Ints, start: Array, free: Flags,
                     cost: float) -> Spread:
    """The spread of intercepts alone, `free`, around the centres of groups, by EM."""
    T = start
    for _ in range(_ROUNDS):
        marginal, posterior = expansions.marginal(T)
        centres = marginal.centres(labels)
        before, moment = T, expansions.second_moment(centres[labels], posterior)
        T = np.diag(np.where(free, np.diag(moment), 0.0))
        if np.abs(T - before).max() <= 0.02 * np.abs(T).max():
            break
    models = expansions.modes(centres[labels], posterior)
    return Spread(T, 0, cost, centres, models, float(marginal.at_own(centres[labels]).sum()))


def estimate_covariance(expansions: Expansions, labels: Ints, rank: int, start: Array) -> Array:
    """The T with the largest evidence for these groups, each with its best centre."""
    some = sample_users(len(labels))
    if len(some) < len(labels):
        expansions, labels = expansions.take(some), np.unique(labels[some], return_inverse=True)[1]
    alike = RoundSpread(expansions) if rank == 0 and expansions.factors is None else None
    trial = plain = best = project(start, rank)
    largest, stretch = -np.inf, 1.0
    for _ in range(_ROUNDS):
        if alike is not None:
            centres, values = alike.fit(float(trial[0, 0]), labels)
            evidence = float(values[np.arange(len(labels)), labels].sum())
        else:
            marginal, posterior = expansions.marginal(trial)
            centres = marginal.centres(labels)
            evidence = total(marginal, labels, centres)
        # The extrapolated step was too long; a plain one is safe.
        if evidence < largest and stretch > 1.0:
            trial, stretch = plain, 1.0
            continue
        gain, best, largest = evidence - largest, trial, max(evidence, largest)
        if gain < _SETTLED:
            break
        if alike is not None:
            plain = alike.next(float(trial[0, 0]), centres[labels]) * np.eye(len(trial))
        else:
            plain = project(expansions.second_moment(centres[labels], posterior), rank)
        # Plain EM is slow if T is small: extrapolate the logarithms of the eigenvalues.
        stretch = min(2.0 * stretch, _LONGEST)
        trial = extrapolate(best, plain, stretch)
    return best


def project(covariance: Array, rank: int, *, flat: bool = False) -> Array:
    """Keep the largest `rank` eigenvalues and replace the others by their mean, or by almost zero
    if `flat`.
    """
    scales, axes = np.linalg.eigh(0.5 * (covariance + covariance.T))
    smallest = _SMALLEST * max(float(scales[-1]), 1e-20)
    scales = np.maximum(scales, smallest)
    if rank == 0 and not flat:
        return float(scales.mean()) * np.eye(len(scales))
    if rank < len(scales):
        others = slice(0, len(scales) - rank)
        scales[others] = smallest if flat else scales[others].mean()
    return np.asarray((axes * scales) @ axes.T)


def description_length(covariance: Array, rank: int, noise: Array, n_users: int, *,
                       flat: bool = False) -> float:
    """The length of a description of T from n users whose models are known up to the covariance
    `noise`.

    Every number costs log(N) / 2: one scale of the directions that are not free, and `dim` for each
    free direction. An angle between directions i and j of T + noise is known better if their
    variances differ (Minka 2001): it costs log(N (v_i - v_j)^2 / (v_i v_j)) / 2 if this is more.
    """
    scales, axes = np.linalg.eigh(covariance)
    variances = np.maximum(scales + (axes * (noise @ axes)).sum(axis=0), 1e-300)[::-1]
    length = 0.5 * np.log(max(n_users, np.e)) * (rank * len(variances) + (0 if flat else 1))
    for i in range(rank):
        rest = variances[i + 1:]
        length += 0.5 \
            * float(np.log(np.maximum((variances[i] - rest) ** 2 / (variances[i] * rest),
                                      1.0)).sum())
    return float(length)


def extrapolate(old: Array, new: Array, stretch: float) -> Array:
    """The covariance `new` with eigenvalues new * (new / old)^(stretch - 1)."""
    before = np.linalg.eigvalsh(old)
    scales, axes = np.linalg.eigh(new)  # of a multiple of the identity, exactly the coordinates
    scales = scales * np.clip((scales / before) ** (stretch - 1.0), 0.01, 10.0)
    return np.asarray((axes * np.maximum(scales, _SMALLEST * scales.max())) @ axes.T)


def total(marginal: Expansions, labels: Ints, centres: Array) -> float:
    """The sum of the values of all users, each at the centre of its group."""
    return float(marginal.at_own(centres[labels]).sum())


def find_modes(loss: Loss, samples: Samples, weights: Array, centres: Array, covariance: Array,
               start: Array) -> Array:
    """minimise_x weights_i f_i(x) + (x - centres_i)' T^-1 (x - centres_i) / 2 for each user, to a
    few digits.
    """
    precision = np.linalg.inv(covariance)

    def evaluate(rows: Indices, x: Array, order: int) -> tuple[Array, Array, Array]:
        with np.errstate(over="ignore", invalid="ignore"):  # trial points
            f, g, h = loss.evaluate(samples, x, order, rows)
            f = weights[rows] * f
            g = weights[rows][:, None] * g if order > 0 else g
            h = weights[rows][:, None, None] * h if order > 1 else h
            shift = x - centres[rows]
            pull = shift @ precision
            return (f + 0.5 * (shift * pull).sum(axis=1), g + pull if order > 0 else g,
                    h + precision if order > 1 else h)

    return minimise(evaluate, start, max_iter=4).points


def fit_spread(expansions: Expansions, labels: Ints, rank: int, covariance: Array) -> Spread:
    """T, the centres and the models of the users for a partition.

    Parameters
    ----------
    expansions : of the log-likelihoods of the users.
    labels : (n_users,) the groups, from 0.
    rank : number of free directions of T.
    covariance : (dim, dim) where EM starts.
    """
    dim = expansions.slopes.shape[1]
    covariance = estimate_covariance(expansions, labels, rank, covariance)
    marginal, posterior = expansions.marginal(covariance)
    centres = marginal.centres(labels)
    noise = np.linalg.inv(expansions.curvatures.mean(axis=0) + _FLAT * np.eye(dim))
    cost = description_length(covariance, rank, noise, len(labels))
    spread = Spread(covariance, rank, cost, centres, expansions.modes(centres[labels], posterior),
                    total(marginal, labels, centres))
    if rank > 0:  # possibly the free directions are enough
        flat = project(covariance, rank, flat=True)
        marginal, posterior = expansions.marginal(flat)
        evidence = total(marginal, labels, centres)
        cost = description_length(flat, rank, noise, len(labels), flat=True)
        if evidence - cost > spread.evidence - spread.cost:
            spread = Spread(flat, rank, cost, centres, expansions.modes(centres[labels], posterior),
                            evidence)
    return spread
