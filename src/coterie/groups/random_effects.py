"""How personal users' models are: the covariance of models around the centres of their groups, and
the noise.

    model of user i ~ N(centre of its group, T),        log-likelihood of its rows  -m_i f_i / s

This is for the squared loss; `coterie.groups.summaries` has it for others. T and the noise variance
s maximise the evidence by EM (Dempster, Laird and Rubin 1977). A direction in which
users agree gets a small variance and is shared; one in which they differ a large one and is
personal. The shapes that T may have:

    round           a multiple of the identity
    intercept       a variance of the intercept; slopes are shared entirely
    diagonal        a variance of each coordinate
    one direction   a free variance in one direction, any, and a multiple of the identity in the
                    others; only where
                    there are fewer users than numbers of a full T
    full            any

T is used to predict, so its shape is chosen by the evidence less 1 for each free number of T
(Akaike 1973; Vaida and Blanchard 2005). Whether users differ at all is a question about them, not
about predictions: `ModelSpread.gain` answers it with log(n_users) / 2 for each number (Schwarz
1978). Where the noise differs between users, each has a variance of its own
(`coterie.groups.noise`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from coterie.base.types import Array, Flags, Ints
from coterie.data.users import Users
from coterie.groups.noise import (
    dispersion,
    has_outliers,
    noise_of_users,
    without_outliers,
    without_ridge,
)
from coterie.groups.spread import Expansions, project, total
from coterie.groups.summaries import Summaries, intercepts_of
from coterie.losses import Loss
from coterie.losses.derived import Grouped

SHAPES = ("round", "intercept", "diagonal", "one direction", "full")
_ROUNDS = 100  # largest number of EM rounds
_SETTLED = 0.02  # EM ends after two rounds that increase the evidence by less
_MEMORY = 3  # earlier steps that an accelerated EM step uses
_FARTHEST = 10.0  # factor by which such a step changes a variance, at most
_MOST = 200  # largest number of users that T is estimated from
# Variance of models over that of the noise beyond which rows determine models exactly.
_EXACT = 1e10
_SMALLEST = 1e-8  # smallest eigenvalue of T beside the largest
_START = 0.1  # ridge of the pooled model, and pull of the first models to it
_PROPORTION = 1e6  # of the noise of two users, at most
_SMALL, _WIDEST = 10, 60  # coordinates up to which a full T is always tried, and tried at all


_Estimate = tuple[Array, float]  # T and s


@dataclass(frozen=True, eq=False)
class ModelSpread:
    """The covariance of users' models around the centres of their groups.

    Parameters
    ----------
    shape : of the covariance.
    covariance : (dim, dim) T.
    noise : s.
    evidence : log-likelihood of all rows.
    n_numbers : free numbers of T.
    gain : what the evidence gains over models without a personal part, less log(n_users) / 2 for
        each number.
    noises : (n_users,) the noise variance of each user over s; None if it is equal for all.
    """

    shape: str
    covariance: Array
    noise: float
    evidence: float
    n_numbers: int
    gain: float = 0.0
    noises: Array | None = None

    @property
    def predictive(self) -> float:
        """The evidence less 1 for each free number of T."""
        return self.evidence - self.n_numbers

    @property
    def relative(self) -> Array:
        """T / s, the covariance for `Personal(loss, covariance=..., scale=noises / rows)`."""
        return self.covariance / self.noise


def learn_spread(users: Users, loss: Loss, labels: Ints) -> ModelSpread | None:
    """The covariance with the largest evidence; None where models without a personal part have
    more.

    Parameters
    ----------
    users : their data, with features of about unit size.
    loss : quadratic; its ridge is not used.
    labels : (n_users,) the groups, from 0.

    Returns
    -------
    The covariance, or None.
    """
    # An overflow has no evidence.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        try:
            return _best_spread(users, loss, labels)
        except np.linalg.LinAlgError:  # rows without noise determine models to all digits
            return None


def search_summaries(users: Users, loss: Loss) -> Summaries:
    """The summaries of squared losses that groups are searched on: with the noise of each user,
    where it differs; else without outliers.
    """
    known = Summaries.exact(users, loss) if loss.quadratic else None
    if known is not None and loss.gaussian:
        learned = learn_spread(users, loss, np.zeros(users.n_users, dtype=np.int64))
        noises = None if learned is None else learned.noises
        # Beyond this proportion, and where tails are heavy inside users, targets are outliers.
        if learned is not None and noises is not None \
                and noises.max() < _PROPORTION * noises.min() \
                and not has_outliers(users, loss, noises):
            return replace(known, noise=learned.noise, noises=noises)
    few, squared = without_outliers(users, loss)
    return known if known is not None and few is users else Summaries.exact(few, squared)


def _best_spread(users: Users, loss: Loss, labels: Ints) -> ModelSpread | None:
    everyone, groups = users, labels
    some = _some(users.n_users)
    users, labels = users.take(some), np.unique(labels[some], return_inverse=True)[1]
    plain = without_ridge(loss)
    samples, rows = plain.prepare(users), users.sizes.astype(float)
    models = _first_models(loss, users, labels)
    learn = _Learner(Expansions.at(plain, samples, rows, models), models, labels, rows,
                     dispersion(plain, users, samples), intercepts_of(loss, samples),
                     gaussian=loss.gaussian)
    without, best = learn("none"), None
    if np.isfinite(without.evidence):
        best = learn.best(without)
    if best is None or float(best.relative.max()) > _EXACT:
        return None
    differing = noise_of_users(everyone, loss, groups, best.covariance, best.noise,
                               learn.form(best.shape)[0])
    return best if differing is None else replace(best, covariance=differing[0],
                                                  noises=differing[1])


def _some(n_users: int) -> Ints:
    """Positions of the users that T is estimated from."""
    return np.unique(np.linspace(0, n_users - 1, min(n_users, _MOST)).astype(np.int64))


def _first_models(loss: Loss, users: Users, labels: Ints) -> Array:
    """Models between the pooled ones and the users' own, where the expansion is."""
    samples = loss.prepare(users)
    grouped = Grouped(loss=loss, samples=samples, labels=labels,
                      weights=users.sizes / users.sizes.mean())
    centres = grouped.prox(grouped.prepare(grouped.groups), None, _START, None).points
    return loss.prox(samples, None, _START, centres[labels]).points


class _Learner:
    """EM for one shape after the other, on the same users: first expansions, first models, groups,
    rows, noise.
    """

    def __init__(self, first: Expansions, models: Array, labels: Ints, rows: Array, noise: float,
                 intercepts: Flags, *,
                 gaussian: bool = False) -> None:
        self.first, self.models, self.labels, self.counts = first, models, labels, rows
        self.noise, self.intercepts, self.gaussian = noise, intercepts, gaussian

    def __call__(self, shape: str, *, prior: bool = False) -> ModelSpread:
        form, n_numbers = self.form(shape)
        n, dim = self.models.shape
        deviations = self.models - self.first_centres()
        scatter = deviations.T @ deviations / n
        covariance = form(scatter + 1e-3 * np.trace(scatter) / dim * np.eye(dim) + 1e-12
                          * np.eye(dim))
        covariance, noise, evidence = self._maximise(self.first, covariance, self.noise, form,
                                                     prior=prior)
        return ModelSpread(shape, covariance, noise, evidence, n_numbers)

    def best(self, without: ModelSpread) -> ModelSpread | None:
        """The shape with the largest evidence less 1 for each number; None where none is better
        than `without`.

        Shapes are compared by the most likely T of each, and the T of the best one is that with the
        prior.
        """
        n, dim = self.models.shape
        few, best = dim * (dim + 1) // 2 > n, None
        possible = {"intercept": self.intercepts.any() and dim > 1, "diagonal": dim > 1,
                    "one direction": few and dim <= _WIDEST, "full": 1 < dim <= _WIDEST}
        for shape in SHAPES:
            if not possible.get(shape, True) or (shape == "full" and best is None and dim > _SMALL):
                continue  # a spread that no simpler shape shows would have to be a narrow one
            spread = self(shape)
            if np.isfinite(spread.covariance).all() \
                and spread.predictive > (best or without).predictive:
                gain = spread.evidence - without.evidence - 0.5 * np.log(n) * spread.n_numbers
                best = replace(spread, gain=float(gain))
        if best is not None:
            weighed = self(best.shape, prior=True)
            if np.isfinite(weighed.covariance).all():
                best = replace(best, covariance=weighed.covariance, noise=weighed.noise)
        return best

    def first_centres(self) -> Array:
        """(n_users, dim) the centre of each user's group, as a mean of the first models."""
        sums = np.zeros((int(self.labels.max()) + 1, self.models.shape[1]))
        np.add.at(sums, self.labels, self.models)
        return (sums / np.bincount(self.labels)[:, None])[self.labels]

    def form(self, shape: str) -> tuple[Callable[[Array], Array], int]:
        """The projection of a covariance on a shape, and its number of free numbers."""
        dim = self.models.shape[1]
        if shape == "none":
            return np.zeros_like, 0
        if shape == "round":
            return lambda T: np.eye(dim) * np.trace(T) / dim, 1
        if shape == "diagonal":
            return lambda T: np.diag(np.diag(T)), dim
        if shape == "one direction":
            return lambda T: project(T, 1), dim + 1
        if shape == "full":
            return lambda T: 0.5 * (T + T.T), dim * (dim + 1) // 2
        free = self.intercepts
        return lambda T: np.diag(np.where(free, np.diag(T), 0.0)), int(free.sum())

    def _maximise(self, unscaled: Expansions, covariance: Array, noise: float,
                  form: Callable[[Array], Array], *,
                  prior: bool) -> tuple[Array, float, float]:
        """EM from a start, accelerated; the evidence, with the `_log_prior` where wanted, never
        falls.

        Returns T, s and the evidence without prior.
        """
        n, rows, largest, settled = len(self.labels), float(self.counts.sum()), -np.inf, 0
        trial, plain, best = (covariance, noise), (covariance, noise), (covariance, noise)
        known, found = list[tuple[_Estimate, _Estimate]](), -np.inf
        for _ in range(_ROUNDS):
            T, s = trial
            scaled = unscaled.scaled(1 / s)
            marginal, posterior = scaled.marginal(T)
            centres = marginal.centres(self.labels)
            evidence = total(marginal, self.labels, centres)
            if self.gaussian:
                evidence -= 0.5 * rows * np.log(2 * np.pi * s)
            posed = evidence + (_log_prior(T) if prior else 0.0)
            if not posed >= largest and trial is not plain:  # the accelerated step was too long
                trial, known = plain, known[-1:]
                continue
            if posed >= largest:
                best, found = trial, evidence
            gain, largest = posed - largest, max(posed, largest)
            settled = settled + 1 if gain < _SETTLED else 0
            if settled > 1:
                break
            if self.gaussian:
                models = scaled.modes(centres[self.labels], posterior)
                squares = -2.0 * float(unscaled.at_own(models).sum())
                used = float((unscaled.curvatures * posterior).sum())
                s = max((squares + used) / rows, 1e-4 * self.noise, 1e-300)
            moment = scaled.second_moment(centres[self.labels], posterior) \
                * (n / max(n - 1, 1) if prior else 1.0)
            plain = _definite(form(moment), form), s
            known = [*known, (trial, plain)][-_MEMORY - 1:]
            trial = _accelerated(known, form) if len(known) > 1 and T.any() else plain
        return *best, found


def _log_prior(covariance: Array) -> float:
    """log |T| / 2, in the directions that T has: the prior of Chung, Gelman, Rabe-Hesketh, Liu and
    Dorie (2015).

    The most likely T of few users has directions in which they do not differ at all, by chance.
    With this prior none of them vanishes, and an EM step for T is n / (n - 1) times as large.
    """
    if not covariance.any():
        return 0.0
    scales = np.linalg.eigvalsh(covariance)
    return 0.5 * float(np.log(scales[scales > 0.1 * _SMALLEST * scales[-1]]).sum())


def _accelerated(known: list[tuple[_Estimate, _Estimate]],
                 form: Callable[[Array], Array]) -> _Estimate:
    """Where EM leads to, from the last estimates and those that EM made of them (Anderson 1965).

    In the coordinates in which the last covariance is the identity; there no variance becomes more
    than `_FARTHEST` times as large or small.
    """
    T, s = known[-1][1]
    scales, axes = np.linalg.eigh(T)
    root = axes * np.sqrt(np.maximum(scales, 1e-12 * scales[-1]))
    turn = axes / np.sqrt(np.maximum(scales, 1e-12 * scales[-1]))
    images = np.stack([np.append(turn.T @ new[0] @ turn, np.log(new[1])) for _, new in known])
    steps = images - np.stack([np.append(turn.T @ old[0] @ turn, np.log(old[1])) for old,
                               _ in known])
    changes = np.diff(steps, axis=0)
    products = changes @ changes.T
    products += (1e-10 * np.trace(products) + 1e-300) * np.eye(len(products))
    end = images[-1] - np.linalg.solve(products, changes @ steps[-1]) @ np.diff(images, axis=0)
    inner = end[:-1].reshape(T.shape)
    values, vectors = np.linalg.eigh(0.5 * (inner + inner.T))
    inner = (vectors * np.clip(values, 1 / _FARTHEST, _FARTHEST)) @ vectors.T
    noise = s * float(np.exp(np.clip(end[-1] - np.log(s), -1.0, 1.0)))
    return _definite(form(root @ inner @ root.T), form), noise


def _definite(covariance: Array, form: Callable[[Array], Array]) -> Array:
    """With eigenvalues of at least `_SMALLEST` of the largest, in the same form."""
    scales, axes = np.linalg.eigh(covariance)
    return form((axes * np.maximum(scales, _SMALLEST * scales.max())) @ axes.T)
