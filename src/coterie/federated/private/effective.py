"""What noisy summaries say, as fewer rows without noise would say it, and the fit of users who are
known by them only.

User i with rows a_j and targets y_j has released, with noise tau,

    S_i ~ sum a a',     b_i ~ sum y a     (noise tau / kappa),     c_i ~ sum y^2

(`coterie.federated.private.release`). Models are least squares, b_i = S_i x_i + error, and

    b_i - G_i x  has mean 0 at the user's model and covariance
    V_i = s^2 G_i + tau^2 / kappa^2 I + w_i tau^2 / 2 (|x|^2 I + x x')

G_i is the estimate of sum a a': the noisy matrix shrunk by w_i, as far as the noise dictates,
towards that of all users (empirical Bayes), with no eigenvalue below zero. So the user's knowledge
of its model is the quadratic

    1/2 (x - x_i)' (G_i V_i^-1 G_i) (x - x_i),        G_i V_i^-1 G_i x_i = G_i V_i^-1 b_i

which is that of a least-squares problem with noise s^2 and the matrix s^2 G_i V_i^-1 G_i instead of
sum a a': what noise took away is as if there were fewer rows. These problems, as second moments, go
through the fit of any table.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from coterie.base.errors import CoterieWarning
from coterie.base.types import Array, Ints
from coterie.data.moments import Condensed, SecondMoments, Standardizer
from coterie.federated.private.release import KAPPA, RHO, SUMMARY, W0, ReleaseQuestion
from coterie.fitting.fit import fit, fit_source
from coterie.fitting.judge import Chosen
from coterie.fitting.kinds import Comparison, choose
from coterie.fitting.result import Fit
from coterie.fitting.settings import Settings, Work
from coterie.fitting.sources import FitSource, RowsFitSource
from coterie.fitting.units import learn_units
from coterie.groups.partitions import Judge
from coterie.groups.search import SearchOptions, search, shortest
from coterie.groups.summaries import Summaries
from coterie.losses import Loss

_FEWEST = 30  # rows that the user with the least knowledge stands for
_LEAST = 1e-3  # smallest eigenvalue of a matrix of rows over the mean one
_PARTS = 8  # of mean features that the search for groups sees
_RIDGES = np.geomspace(1e-6, 1e2, 81)


class NoisySums(NamedTuple):
    """The released sums; see the module.

    Parameters
    ----------
    gram : (n, d, d).
    cross : (n, d).
    square : (n,).
    tau : the noise of `gram`.
    """

    gram: Array
    cross: Array
    square: Array
    tau: float

    @classmethod
    def of(cls, released: Array, question: ReleaseQuestion) -> NoisySums:
        """From what users released."""
        assert question.stage == SUMMARY
        d, n = question.n_features + 1, len(released)
        i, j = np.triu_indices(d)
        k, gram = len(i), np.empty((n, d, d))
        gram[:, i, j] = released[:, :k] / np.where(i == j, 1.0, np.sqrt(2.0))
        gram[:, j, i] = gram[:, i, j]
        return cls(gram, released[:, k:k + d] / KAPPA, released[:, -1] / RHO, question.tau)


class Effective(NamedTuple):
    """Least-squares problems that say what the summaries say, for rows (1, z).

    Parameters
    ----------
    users : with their second moments.
    mean, scale : (p,) of the features of the summaries, which became z.
    ridge : for a model of all users, by evidence.
    sizes : (n,) the estimated numbers of rows.
    means, means_noise : (n, p) the users' mean features, and the variance of each.
    noise, plain_noise : s^2, in the rows of `users`, and in those of the summaries.
    tau : the noise of the summaries.
    """

    users: Condensed
    mean: Array
    scale: Array
    ridge: float
    sizes: Array
    means: Array
    means_noise: Array
    noise: float
    plain_noise: float
    tau: float


def effective(summaries: NoisySums, names: tuple[Any, ...], features: tuple[str, ...],
              per_user: bool = False) -> Effective:
    """The problems that summaries stand for.

    Parameters
    ----------
    summaries : of all users.
    names, features : of the users and of the features.
    per_user : whether users released means instead of sums.
    """
    gram, cross, square, tau = summaries
    n, d = cross.shape
    sizes = _sizes(gram, tau, per_user)
    total, rows = gram.sum(axis=0), float(sizes.sum())
    level = tau * np.sqrt(n * d)  # the largest eigenvalue of a sum of n matrices of noise, nearly
    pooled = _raised(total[None], np.full(1, max(level, 1e-9 * rows)))[0]
    common = pooled / rows
    grams, kept = _shrunk(gram, sizes, total / rows, common, tau)
    shift = level if tau > 0 else 1e-9 * rows
    model = np.linalg.solve(pooled + shift * np.eye(d), cross.sum(axis=0))
    # The square of the targets is needed for the noise alone, and is known for all users together
    # only.
    noise = (square.sum() - 2 * model @ cross.sum(axis=0) + model @ pooled @ model) / rows
    noise = float(np.clip(noise, 1e-3, 1.0))
    errors = (tau / KAPPA) ** 2 + 0.5 * kept * tau**2 * (model @ model)
    covariance = (noise * grams + errors[:, None, None] * np.eye(d)
                  + (0.5 * kept * tau**2)[:, None, None] * np.outer(model, model))
    ratio = np.linalg.solve(covariance, grams)
    curvature = noise * np.einsum("nij,njk->nik", grams, ratio)
    slope = noise * np.einsum("nji,nj->ni", ratio, cross - grams @ model)
    mean, scale, to_rows = _standardised(common)
    curvature = np.einsum("ij,njk,lk->nil", to_rows,
                          0.5 * (curvature + np.swapaxes(curvature, 1, 2)), to_rows)
    rhs = curvature @ np.linalg.solve(to_rows.T, model) + slope @ to_rows.T
    counts = np.maximum(curvature[:, 0, 0], 1e-12)
    # More rows with more noise say the same.
    factor = max(1.0, max(d + 2, _FEWEST) / float(counts.min()))
    moments = _moments(curvature, rhs, factor, noise)
    means = gram[:, 0] / W0 / sizes[:, None] @ to_rows.T
    spread = (1.0 / sizes[:, None] + (0.5 * (tau / W0 / sizes) ** 2)[:, None]
              * (to_rows[1:] ** 2).sum(axis=1))
    return Effective(users=moments.users(names, features), mean=mean, scale=scale,
                     ridge=_ridge(curvature.sum(axis=0), rhs.sum(axis=0), noise), sizes=sizes,
                     means=means[:, 1:],
                     means_noise=spread, noise=noise * factor, plain_noise=noise, tau=tau)


def _sizes(gram: Array, tau: float, per_user: bool) -> Array:
    """(n,) the number of rows of each user: the noisy one, shrunk towards the mean."""
    if per_user:
        return np.ones(len(gram))
    sizes, error = gram[:, 0, 0] / W0**2, (tau / W0**2) ** 2
    between = max(float(sizes.var()) - error, 0.0)
    kept = between / (between + error) if between + error > 0 else 1.0
    return np.asarray(np.maximum(sizes.mean() + kept * (sizes - sizes.mean()), 1.0))


def _raised(matrices: Array, least: Array) -> Array:
    """Matrices with eigenvalues of at least `least`."""
    scales, axes = np.linalg.eigh(matrices)
    return np.asarray((axes * np.maximum(scales, least[:, None])[:, None, :]) @ np.swapaxes(axes, 1,
        2))


def _shrunk(gram: Array, sizes: Array, mean: Array, common: Array, tau: float) -> tuple[Array,
        Array]:
    """The users' matrices, shrunk towards the common one; and what is kept of each user's own
    deviation.
    """
    n, d = gram.shape[:2]
    own, kept = gram - sizes[:, None, None] * mean, np.ones(n)
    if tau > 0:
        noise = n * tau**2 * (d + 0.5 * d * (d - 1))  # of all entries of all matrices
        between = max(float((own**2).sum()) - noise, 0.0) / float((sizes**2).sum()) / d**2
        kept = sizes**2 * between / (sizes**2 * between + 0.5 * tau**2)
    shrunk = sizes[:, None, None] * common + kept[:, None, None] * own
    return _raised(shrunk, _LEAST * sizes * np.trace(common) / d), kept


def _standardised(common: Array) -> tuple[Array, Array, Array]:
    """Mean and scale of the features of a, and the matrix that makes (1, z) of a."""
    d = len(common)
    mean = common[0, 1:] / common[0, 0] * W0
    scale = np.sqrt(np.maximum(np.diag(common)[1:] / common[0, 0] * W0**2 - mean**2, 1e-9))
    to_rows = np.zeros((d, d))
    to_rows[0, 0] = 1.0 / W0
    to_rows[1:, 0] = -mean / scale / W0
    to_rows[np.arange(1, d), np.arange(1, d)] = 1.0 / scale
    return mean, scale, to_rows


def _moments(curvature: Array, rhs: Array, factor: float, noise: float) -> SecondMoments:
    """Second moments of rows (z, y) with these normal equations, and `noise` in y, times a factor.
    """
    d = curvature.shape[1]
    counts = np.maximum(np.round(factor * curvature[:, 0, 0]), 1.0)
    more = counts / curvature[:, 0, 0]
    curvature, rhs = curvature * more[:, None, None], rhs * more[:, None]
    first, level = curvature[:, 0, 1:], rhs[:, 0] / counts
    scatters = np.zeros((len(counts), d, d))
    scatters[:, :-1, :-1] = (curvature[:, 1:, 1:] - first[:, :, None] * first[:, None, :]
                             / counts[:, None, None])
    cross = rhs[:, 1:] - first * level[:, None]
    scatters[:, :-1, -1], scatters[:, -1, :-1] = cross, cross
    explained = np.einsum("ni,ni->n", cross, (np.linalg.pinv(
        scatters[:, :-1, :-1], rcond=1e-10, hermitian=True) @ cross[:, :, None])[:, :, 0])
    scatters[:, -1, -1] = explained + noise * more * np.maximum(counts - d, 1.0)
    return SecondMoments(counts.astype(np.int64), np.column_stack([first / counts[:, None], level]),
                         scatters)


def _ridge(curvature: Array, rhs: Array, noise: float) -> float:
    """The ridge, over the rows, at which the slopes of one model for all are most likely: x ~ N(0,
    noise / ridge I).
    """
    first = curvature[0, 1:]
    inner = curvature[1:, 1:] - np.outer(first, first) / curvature[0, 0]
    scales, axes = np.linalg.eigh(inner)
    scales, parts = np.maximum(scales, 1e-12 * max(float(scales[-1]), 1e-300)), axes.T @ (
        rhs[1:] - first * rhs[0] / curvature[0, 0])
    variances = noise * scales + scales**2 * _RIDGES[:, None]
    best = _RIDGES[np.argmax(-0.5 * (np.log(variances) + parts**2 / variances).sum(axis=1))]
    return float(np.clip(noise / (best * curvature[0, 0]), 1e-6, 10.0))


def with_means(known: Effective) -> Condensed | None:
    """The users with the main parts of their mean features as further coordinates of their models.

    They are for the search of groups: users of a group agree in what they release of their
    features, too. The main parts are principal components, in units of the noise, that vary more
    than noise does (Marchenko and Pastur 1967). A further coordinate is such a part: rows in which
    only it counts, as many as its precision says.

    Returns
    -------
    The users; None if mean features vary no more than noise does.
    """
    users, (n, p) = known.users, known.means.shape
    typical = known.means_noise.mean(axis=0)
    shifted = (known.means - known.means.mean(axis=0)) / np.sqrt(typical)
    _, values, axes = np.linalg.svd(shifted, full_matrices=False)
    k = min(int((values**2 / n > (1.0 + np.sqrt(p / n)) ** 2).sum()), _PARTS)
    if not k:
        return None
    parts = shifted @ axes[:k].T
    precision = np.repeat(known.noise / (known.means_noise / typical).mean(axis=1)[:, None], k,
                          axis=1)
    means, given = _of(users)
    scatters, extra = np.zeros((n, p + k + 1, p + k + 1)), np.arange(p, p + k)
    scatters[:, :p, :p] = given[:, :p, :p]
    scatters[:, :p, -1] = scatters[:, -1, :p] = given[:, :p, -1]
    scatters[:, extra, extra] = precision
    scatters[:, extra, -1] = scatters[:, -1, extra] = precision * parts
    scatters[:, -1, -1] = given[:, -1, -1] + (precision * parts**2).sum(axis=1)
    means = np.concatenate([means[:, :p], np.zeros((n, k)), means[:, p:]], axis=1)
    names = (*users.feature_names, *(f"part {j} of mean features" for j in range(k)))
    return SecondMoments(users.sizes, means, scatters).users(users.names, names)


def _of(users: Condensed) -> tuple[Array, Array]:
    """Means and scatters of condensed users."""
    few = SecondMoments.of(users)
    return few.means, few.scatters * (users.sizes / np.maximum(users.counts, 1))[:, None, None]


# The fit of users who are known by noisy summaries only.
#
# The summaries become least-squares problems, which go through the fit of a table. Two things
# differ. Groups are also searched among models and mean features together, because users of a group
# often agree in both, and noise leaves little of a model. And groups are kept where a personal
# model for each user is not clearly better: noise averages out in groups.

# Share of what a continuous spread of models and mean features explains that groups must explain.
_NEARLY = 0.85
_CLEARLY = 2.0  # standard errors by which other kinds must be better than groups


def fit_summaries(known: Effective, settings: Settings) -> Fit:
    """Groups and models, in the units of `known.users`.

    Parameters
    ----------
    known : what the summaries say.
    settings : of the fit; its task, ridge and scaling are those of `known`.
    """
    settings = replace(settings, task="regression", loss="squared", holdout=0.0, standardize=False,
                       ridge=known.ridge, n_classes=0, average="off")
    units = learn_units(known.users, settings)  # an average would cost budget of its own
    if known.users.n_users < 2:
        return fit(known.users, settings)

    def judge(source: FitSource, settings: Settings, work: Work) -> list[Chosen]:
        inner = source.parts[0]
        labels, sentence = search_groups(known, inner, source.loss, settings)
        summaries = Summaries.exact(inner, source.loss)
        compared = choose(summaries, labels, settings)
        compared = replace(compared, chosen=_prefer_groups(compared))
        return [Chosen(labels, sentence, compared.sharing, compared.means, compared.errors,
                       summaries)]

    with warnings.catch_warnings(action="ignore", category=CoterieWarning):
        return fit_source(RowsFitSource(units, known.users), settings,
                          Work(), judge)


def search_groups(known: Effective, inner: Any, loss: Loss, settings: Settings) -> tuple[Ints, str]:
    """The groups, and a sentence about them.

    Candidates are the best groups by models, and by models and mean features together; the latter
    if users hardly vary within them. The one that describes the models shorter is taken.
    """
    options = SearchOptions(max_groups=settings.max_groups, k=settings.k)
    everyone, by_models = np.zeros(inner.n_users, dtype=np.int64), _with_unit_columns(inner)
    candidates = [search(Summaries.exact(by_models, loss), options).best.labels]
    wide = with_means(known)
    if wide is not None:
        units = learn_units(wide, settings)
        examined = search(Summaries.exact(_with_unit_columns(units.inner(wide)), units.loss),
                          options).examined
        grouped = [partition for partition in examined if partition.labels.any()]
        ungrouped = [partition for partition in examined if not partition.labels.any()]
        together = max(partition.length for partition in ungrouped)
        gain = together - shortest(ungrouped).length  # by one centre with spread
        if grouped and together - shortest(grouped).length > _NEARLY * gain:
            candidates.append(shortest(grouped).labels)
    judge = Judge.of(Summaries.exact(by_models, loss))
    labels = min((labels for labels in candidates if labels.any()), key=judge.criterion,
                 default=everyone)
    if not labels.any():
        return labels, "No groups stand out from the noise."
    sizes = ", ".join(map(str, np.bincount(labels)))
    return labels, (f"{int(labels.max()) + 1} groups of {sizes} users describe the released "
                    "statistics better than one "
                    "group.")


def _with_unit_columns(users: Any) -> Any:
    """Features and targets with mean 0 and variance 1, as the search wants them."""
    scaled = Standardizer.from_moments(users.moments(),
                                       feature_names=users.feature_names).transform(users)
    column = replace(users, features=users.targets[:, None], targets=None,
                     feature_names=("target",))
    scaler = Standardizer.from_moments(column.moments(), feature_names=("target",))
    return replace(scaled, targets=(users.targets - scaler.mean.item()) / scaler.scale.item())


def _prefer_groups(compared: Comparison) -> int:
    """The kind taken: groups, unless another one is clearly better."""
    kinds = [option.kind for option in compared.options]
    if "groups" not in kinds or kinds[compared.chosen] in ("groups", "one model",
                                                           "personal in groups"):
        return compared.chosen
    groups = kinds.index("groups")
    judged = np.log(np.maximum(compared.losses, 1e-300))
    difference: Array = judged[groups] - judged[compared.chosen]
    error = float(difference.std(ddof=1) / np.sqrt(len(difference)))
    return groups if float(difference.mean()) <= _CLEARLY * error else compared.chosen
