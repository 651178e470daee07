"""How certain the groups and their centres are.

Of the centres: coefficients with errors, variances of the personal part, noise. Each group is one
linear mixed model with its own centre, as lme4 and statsmodels fit it: random intercepts, and
random slopes of the columns that vary inside users, where models are personal. The variances
maximise the restricted likelihood without any prior, and errors are those of the centre for these
variances. Classes and counts are working least-squares problems (penalised quasi-likelihood), so
that their errors are approximate. Everything is given the kind of models and the groups: that these
were chosen by the same rows is not in the errors.

Of the groups: how stable they are when other rows are drawn. Other rows of the same users would
have other slopes: those of a user's log-likelihood vary around what they are by a normal
distribution whose covariance is its curvature (Bartlett's identity), which is also how much they
vary between random halves of the rows. Such slopes are drawn several times. Each time, starting
from the groups, centres are fitted and every user moves to the centre that fits best, until nothing
moves.

Two numbers say how far that leads: the adjusted Rand index of the groups before and after (1 for
the same groups, about 0 for random groups), and for each user how often it stays.

The number of groups is given. How far a new search agrees, which may find another number, is seen
from the groups that were found without the held-out rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from coterie.base.errors import InvalidInput
from coterie.base.types import Array, Ints
from coterie.convex.choice import adjusted_rand
from coterie.data.users import Users
from coterie.fitting.candidates import Working
from coterie.fitting.kinds import Sharing
from coterie.fitting.settings import Settings
from coterie.fitting.units import INTERCEPT, Units
from coterie.groups.hierarchy import Estimate, Form, ModelSums, learn
from coterie.groups.spread import Expansions
from coterie.groups.summaries import Summaries
from coterie.losses import Loss, losses_for, name_of

_NORMAL = 1.959964  # quantile of the standard normal distribution at 0.975
_ROUNDS, _SETTLED, _STEPS = 3000, 1e-10, 60
_VARIES = 1e-6  # variance inside users over the whole, from which a column varies there
_WIDEST = 60  # features up to which there is a summary
_COMBINED = 1e-7  # of a column, relative to it, that is left of a combination of others
# Draws, users drawn in all of them at most, and draws at least.
_DRAWS, _DRAWN, _FEWEST = 10, 20_000, 3
_MOVES = 3  # how often users may change their group
STABLE = 0.75  # adjusted Rand index below which groups are called unstable


class Coefficient(NamedTuple):
    """One coefficient of a centre, in the units given.

    Parameters
    ----------
    group : whose centre it is of.
    name : of the feature, or the intercept.
    value, error : the estimate and its standard error.
    low, high : the interval that has the coefficient with probability 0.95.
    """

    group: int
    name: str
    value: float
    error: float
    low: float
    high: float


class GroupPart(NamedTuple):
    """What a group has besides its centre.

    Parameters
    ----------
    group : its number.
    users, rows : how many.
    names : of the coefficients that are personal.
    covariance : of these between users, in the units given.
    noise : variance of the noise; for classes 1, and for counts the overdispersion.
    """

    group: int
    users: int
    rows: int
    names: tuple[str, ...]
    covariance: Array
    noise: float


@dataclass(frozen=True, eq=False)
class CentreSummary:
    """Coefficients of the centres with their errors; prints as a table.

    Parameters
    ----------
    kind : of models.
    coefficients : of all groups.
    groups : what each group has besides.
    exact : whether targets are numbers, so that errors are those of a linear mixed model.
    average : whether an average predicts, of which these models are one part at most.
    """

    kind: str
    coefficients: tuple[Coefficient, ...]
    groups: tuple[GroupPart, ...]
    exact: bool
    average: bool

    def __str__(self) -> str:
        wide = max(12, *(len(one.name) for one in self.coefficients))
        lines = []
        for part in self.groups:
            lines += [f"Group {part.group}: {part.users:,} users, {part.rows:,} rows, "
                      f"{self.kind}", f"{'':{wide}} {'coefficient':>12} {'std. error':>12} "
                      f"{'z':>8} {'2.5 %':>12} {'97.5 %':>12}"]
            lines += [f"{one.name:{wide}} {one.value:12.5g} {one.error:12.5g} "
                      f"{one.value / max(one.error, 1e-300):8.2f} {one.low:12.5g} {one.high:12.5g}"
                      if np.isfinite(one.error) else
                      f"{one.name:{wide}} not determined: these rows give it by other columns"
                      for one in self.coefficients if one.group == part.group]
            if part.names:
                lines.append("Standard deviations between users:")
                lines += [f"{name:{wide}} {np.sqrt(variance):12.5g}" for name, variance in
                          zip(part.names, np.diag(part.covariance), strict=True)]
            lines.append(f"{'noise (std. deviation)' if self.exact else 'dispersion'}: "
                         f"{np.sqrt(part.noise) if self.exact else part.noise:.5g}")
        lines.append("Errors and intervals are given the kind of models and the groups: that these "
                     "were chosen by the same rows is not in them.")
        if not self.exact:
            lines.append("For classes and counts they are approximate (penalised "
                         "quasi-likelihood).")
        if self.average:
            lines.append("Predictions are an average of several kinds of models; these are the "
                         "coefficients of the one kind that was chosen.")
        return "\n".join(lines)


def summarise_centres(units: Units, users: Users, labels: Ints, kind: str, *,
                      average: bool) -> CentreSummary:
    """The coefficients of centres with their errors.

    Parameters
    ----------
    units : of the data.
    users : their rows, as the solver sees them.
    labels : (n_users,) the groups.
    kind : of models.
    average : whether an average predicts.

    Raises
    ------
    InvalidInput : models that have no such coefficients.
    """
    usual = name_of(units.loss) == losses_for(units.task)[0]
    if units.task == "clustering" or not usual or units.n_classes > 2:
        raise InvalidInput("coefficients have errors for numbers, two classes and counts with the "
                           "default loss", remedy="Read the models in to_frame()")
    if kind == "alone" or users.n_features > _WIDEST:
        raise InvalidInput("these models share no centre" if kind == "alone" else
                           f"there are {users.n_features} features, and errors are computed for "
                           f"at most {_WIDEST}", remedy="Read the models in to_frame()")
    coefficients, groups = list[Coefficient](), list[GroupPart]()
    for c in range(int(labels.max()) + 1):
        some = users.take(np.flatnonzero(labels == c))
        estimate = _estimate(units, some, personal=kind.startswith("personal"))
        turn, shift = _to_given(units)
        told = turn[:, estimate.form.columns]
        values, C = told @ estimate.mean + shift, told @ estimate.error @ told.T
        errors = np.full(len(values), np.inf)
        errors[estimate.form.columns] = np.sqrt(np.diag(C))[estimate.form.columns]
        names = [INTERCEPT, *units.feature_names]
        for name, value, error in zip(names, values, errors, strict=True):
            reach = _NORMAL * float(error)
            coefficients.append(Coefficient(c, name, float(value), float(error),
                                            float(value) - reach, float(value) + reach))
        p = estimate.form.columns[estimate.form.personal]
        own = turn[np.ix_(p, p)]
        groups.append(GroupPart(c, some.n_users, some.n_samples, tuple(names[j] for j in p),
                                own @ estimate.variances.covariance @ own.T,
                                estimate.variances.noise * units.spread**2))
    return CentreSummary(kind, tuple(coefficients), tuple(groups), units.task == "regression",
                         average)


def _estimate(units: Units, users: Users, *, personal: bool) -> Estimate:
    """The mixed model of a group, in the solver's units."""
    assert users.targets is not None
    columns = np.concatenate([np.ones((users.n_samples, 1)), users.features], axis=1)
    known = _determined(columns)
    inside = users.moments().m2.sum(axis=0) / max(users.n_samples, 1)
    spread = users.features.var(axis=0)
    varies = np.flatnonzero(inside > _VARIES * np.where(spread > 0, spread, 1.0))
    own = np.concatenate([[0], 1 + varies]) if personal and users.n_users > 1 else np.zeros(0)
    own = np.flatnonzero(np.isin(known, own))
    form = Form(known, np.zeros(len(known), dtype=np.int64), own,
                np.zeros(len(own), dtype=np.int64))
    if units.task == "regression":
        sums = ModelSums.of(columns, users.targets, users.offsets)
        return learn(sums, form, rounds=_ROUNDS, settled=_SETTLED, priors=0.0)
    y = users.targets if units.task == "counts" else 0.5 * (users.targets + 1.0)
    mean = float(np.clip(y.mean(), 1e-3, None if units.task == "counts" else 1.0 - 1e-3))
    centre = float(np.log(mean) if units.task == "counts" else np.log(mean / (1.0 - mean)))
    work = Working(units.task, columns, y, users.offsets, centre,
                   float(np.log(2.0 * max(float(y.max()), 1.0))))
    estimate, _ = work.solve(form, None, np.full(len(y), centre), steps=_STEPS, rounds=4)
    # The centre is a part of the intercept.
    mean_part = estimate.mean.copy()
    mean_part[0] += centre
    return Estimate(form, estimate.variances, mean_part, estimate.error, estimate.personal,
                    estimate.spread, estimate.follows, estimate.evidence)


def _determined(columns: Array) -> Ints:
    """Positions of columns that are no combination of columns before them."""
    sizes = np.linalg.norm(columns, axis=0)
    left = columns / np.where(sizes > 0, sizes, 1.0)
    kept = []
    for j in range(columns.shape[1]):
        rest = float(np.linalg.norm(left[:, j]))
        if rest > _COMBINED:
            kept.append(j)
            axis = left[:, j] / rest
            left[:, j + 1:] -= np.outer(axis, axis @ left[:, j + 1:])
    return np.array(kept, dtype=np.int64)


def _to_given(units: Units) -> tuple[Array, Array]:
    """The linear map from the solver's coefficients, intercept first, to those in the units given.
    """
    d = len(units.mean)
    turn = np.zeros((d + 1, d + 1))
    turn[0, 0] = units.spread
    turn[0, 1:] = -units.mean / units.scale * units.spread
    turn[np.arange(1, d + 1), np.arange(1, d + 1)] = units.spread / units.scale
    shift = np.zeros(d + 1)
    shift[0] = units.centre
    return turn, shift


@dataclass(frozen=True, eq=False)
class Stability:
    """How stable the groups of a fit are.

    Parameters
    ----------
    index : mean adjusted Rand index of the groups and those with other rows.
    stays : (n_users,) the share of draws in which each user stays in its group.
    searched : adjusted Rand index of the groups and those that a search without the held-out rows
        found; nan where there was none.
    """

    index: float
    stays: Array = field(repr=False)
    searched: float = np.nan

    @property
    def stable(self) -> bool:
        """Whether the groups are about the same with other rows."""
        return min(self.index, self.searched if np.isfinite(self.searched) else 1.0) >= STABLE

    def __str__(self) -> str:
        again = f", {self.searched:.2f} for a search without the held-out rows" \
            if np.isfinite(self.searched) else ""
        return (f"The groups are {'stable' if self.stable else 'unstable'}: with other rows "
                f"{self.stays.mean():.0%} of the users stay in theirs (adjusted Rand index "
                f"{self.index:.2f}{again}).")


def draw_groups(known: Summaries, sharing: Sharing, settings: Settings) -> Ints:
    """(n_users, draws) the group of every user with other slopes.

    Parameters
    ----------
    known : what users say of their losses.
    sharing : the groups.
    settings : of the fit.
    """
    share = known.noise if sharing.noise is None else known.noise / sharing.noise[:, None]
    shared = known.expansions
    expansions = Expansions(shared.constants, share * shared.slopes,
                            np.reshape(share, (-1, 1, 1)) * shared.curvatures)
    if sharing.covariance is not None:
        expansions = expansions.marginal(sharing.covariance)[0]
    n, dim = expansions.slopes.shape
    scales, axes = np.linalg.eigh(expansions.curvatures)
    roots = axes * np.sqrt(known.noise * np.maximum(scales, 0.0))[:, None, :]
    rng = np.random.default_rng(settings.seed)
    drawn = np.empty((n, _draws(n)), dtype=np.int64)
    for k in range(_draws(n)):
        slopes = (roots @ rng.standard_normal((n, dim, 1)))[..., 0]
        drawn[:, k] = _moved(replace(expansions, slopes=expansions.slopes + slopes), sharing.labels)
    return drawn


def draw_wide_groups(loss: Loss, users: Users, centres: Array, settings: Settings) -> Ints:
    """(n_users, draws) the same for wide models, whose centres stay: only the values of users at
    these are drawn, with the covariance centres' A_i centres.
    """
    samples, n = loss.prepare(users), users.n_users
    rows, tiled = users.sizes.astype(float), [np.tile(c, (n, 1)) for c in centres]
    values = -rows[:, None] * np.stack([loss.values(samples, c) for c in tiled], axis=1)
    curvature = loss.expand(samples, np.tile(centres.mean(axis=0), (n, 1)))[2]
    bent = np.stack([curvature.times(c) for c in tiled], axis=1)  # (n, k, dim)
    scales, axes = np.linalg.eigh(rows[:, None, None] * np.einsum("nkd,ld->nkl", bent, centres))
    roots = axes * np.sqrt(np.maximum(scales, 0.0))[:, None, :]
    rng = np.random.default_rng(settings.seed)
    drawn = [(values + (roots @ rng.standard_normal((n, len(centres), 1)))[..., 0]).argmax(axis=1)
             for _ in range(_draws(n))]
    return np.stack(drawn, axis=1)


def _draws(n_users: int) -> int:
    """How often rows are drawn: many users say as much in fewer draws."""
    return int(np.clip(_DRAWN // n_users, _FEWEST, _DRAWS))


def summarise_draws(drawn: Ints, sharing: Sharing, judged: Ints | None = None) -> Stability:
    """From (n_users, draws) the groups of every draw, and those of the fit without the held-out
    rows.
    """
    index = float(np.mean([adjusted_rand(sharing.labels, labels) for labels in drawn.T]))
    stays = (drawn == sharing.labels[:, None]).mean(axis=1)
    searched = np.nan if judged is None else adjusted_rand(sharing.labels, judged)
    return Stability(index, stays, float(searched))


def _moved(expansions: Expansions, labels: Ints) -> Ints:
    """(n_users,) the number of the group whose centre fits each user best, from these groups on."""
    for _ in range(_MOVES):
        present = np.unique(labels, return_inverse=True)
        before, labels = labels, \
            present[0][expansions.values(expansions.centres(present[1])).argmax(axis=1)]
        if np.array_equal(before, labels):
            break
    return labels
