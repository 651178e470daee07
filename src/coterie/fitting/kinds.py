"""Which models users get: one member of the family

    minimise  sum_i [ f_i(x_i) + 1/2 (x_i - z_i)' P_i (x_i - z_i) ] + lam sum_{i<j} w_ij ||z_i -
    z_j||

of personal models x_i around centres z_i. From simple to rich:

    one model           one centre, no personal part
    groups              a centre per group, no personal part
    personal            one centre, personal parts with a covariance that is learned from the users
    personal in groups  a centre per group, and personal parts
    alone               everyone's own model

Every kind is judged by its loss on rows that it was not fitted to. With the squared loss this is
estimated by generalised cross-validation (Craven and Wahba 1979) for each user,

    f_i(model of i) / (1 - df_i / m_i)^2,       df_i: how many of its m_i rows' targets the model
                                                follows

which needs no more than second moments. With other losses it is estimated from the users' summaries
(`new_row_losses`). The simplest kind is taken that is within one
standard error of the best one, or misses little of what the best one gains over one model for all;
the error is that of the mean over users of the difference. Where targets are numbers, the
logarithms of the losses are compared, so that no user with much noise or large units decides alone.
Two limits to simplicity: one model for all is not taken where the evidence of all rows speaks
against it, because groups were found or users differ clearly from each other (`ModelSpread.gain`),
unless it is the best; and other kinds are not taken if they miss most of the gain. None of these
rows is among those that judge the fit in the end (`coterie.fitting.scores`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from coterie.base.labels import group_sums
from coterie.base.types import Array, Flags, Ints
from coterie.data.users import Participants, Users
from coterie.fitting.settings import Settings
from coterie.groups.noise import without_ridge
from coterie.groups.random_effects import learn_spread
from coterie.groups.summaries import Summaries, spread_within
from coterie.groups.wide import CentredModels, fit_models
from coterie.losses import Loss, Personal, Samples
from coterie.losses.derived import Grouped, Weighted
from coterie.losses.personal import PersonalSamples
from coterie.losses.rows import too_wide

Count = Literal["rows", "users"]
Kind = Literal["one model", "groups", "personal", "personal in groups", "alone"]
KINDS: tuple[Kind, ...] = ("one model", "groups", "personal", "personal in groups", "alone")
_WIDE_SPLITS = 2  # the same for wide models
# Share of what the best kind gains over one model, and of its loss, that a simpler kind may miss.
_LITTLE = 0.05
_MOST = 0.5  # share of this gain that kinds other than one model may miss at most
# Gain in evidence, in nats, from which users differ clearly: a Bayes factor of 20 (Kass and Raftery
# 1995).
_CLEAR, _LIKELY = 3.0, 1.0
_MOST_USED = 0.95  # share of its rows' targets that a user's model follows at most
_NO_LOSS = 1e-12  # loss over the largest one below which differences do not count
# Rows per number that they determine, on average, from which users can be left alone.
_DETERMINED = 3
# Tried variances of wide personal models, in units of the noise.
_VARIANCES = (1e-3, 1e-2, 1e-1, 1.0)
_THIN, _THINNED = 0.25, 40  # c of thinned slopes, and how often they are drawn
_WIDE_SHARE = 0.25  # of each user's rows that are left out to choose between them
_ROUGH = 1e-3  # gradient, over that at zero, at which the fits for this choice end


@dataclass(frozen=True, eq=False)
class Sharing:
    """What users share.

    Parameters
    ----------
    kind : a name in KINDS.
    labels : (n_users,) the groups whose users share a centre.
    covariance : (dim, dim) of personal models around their centre, in units of the noise, or one
        number where models are wide; None without personal parts.
    count : what counts alike in the centre of a group.
    gain : what the evidence gains by the personal parts, in nats.
    noise : (n_users,) the noise of each user over the common one; None if it is equal for all.
    """

    kind: Kind
    labels: Ints
    covariance: Array | None = field(default=None, repr=False)
    count: Count = "rows"
    gain: float = 0.0
    noise: Array | None = field(default=None, repr=False)

    @property
    def n_groups(self) -> int:
        """The number of groups."""
        return int(self.labels.max()) + 1

    @property
    def differ(self) -> bool:
        """Whether no two users have equal models, and there is one group."""
        return self.kind == "personal" and self.n_groups == 1

    def loss(self, loss: Loss, users: Users) -> Loss:
        """The loss of the centres of these users."""
        if self.covariance is None:
            return loss
        scale = "rows" if self.noise is None else self.noise / np.maximum(users.sizes, 1)
        return Personal(loss, covariance=self.covariance, scale=scale)

    def models(self, users: Users, loss: Loss) -> Array:
        """(n_users, dim) the model of each user."""
        outer = self.loss(loss, users)
        return handed_out(outer, outer.prepare(users), self.labels, self.count)


def group_centres(loss: Loss, samples: Samples, labels: Ints, count: Count,
                  start: Array | None = None) -> Array:
    """(n_groups, dim) the centre of each group, fitted to the group's rows without the penalty.

    Where rows count alike, a user with few rows, or noisy ones, has little influence.
    """
    if too_wide(loss, samples):
        return wide_models(loss, samples, labels, count, start).centres
    rows: Array = samples.users.sizes.astype(float)
    count = "users" if loss.counts_rows else count
    if loss.scales is not None:  # noise / rows
        rows = 1.0 / loss.scales
    weights = rows / rows.mean() if count == "rows" else None
    grouped = Grouped(loss=loss, samples=samples, labels=labels, weights=weights)
    # With quadratic losses one step is enough from anywhere, and from zero its last digits are
    # always the same.
    return grouped.local(grouped.prepare(grouped.groups),
                         start=None if loss.quadratic else start).points


def handed_out(loss: Loss, samples: Samples, labels: Ints, count: Count) -> Array:
    """(n_users, dim) the model of each user: the centre of its group or, with a `Personal` loss,
    its own around it.
    """
    if too_wide(loss, samples):
        return wide_models(loss, samples, labels, count).models
    return loss.own_models(samples, group_centres(loss, samples, labels, count)[labels])


def wide_models(loss: Loss, samples: Samples, labels: Ints, count: Count,
                start: Array | None = None,
                accurate: float = 1e-7) -> CentredModels:
    """The centres of groups and the models around them, where these are wide; `group_centres`
    without Newton steps.
    """
    weights = samples.users.sizes / samples.users.sizes.mean() if count == "rows" \
        else np.ones(samples.n_users)
    if isinstance(loss, Personal):
        assert isinstance(samples, PersonalSamples)
        return fit_models(loss.loss, samples.inner, labels, weights,
                          samples.metric.prices[:, 0], start, accurate)
    return fit_models(loss, samples, labels, weights, None, start, accurate)


def stated_loss(loss: Loss, unit: float | Array | None, covariance: Array | None,
                scale: Array | None) -> Loss:
    """The loss of the problem that a fit solves: with `unit` every row counts alike, and with a
    covariance centres of personal models are fitted, by default at a price of one over the rows.
    """
    counted = loss if unit is None else Weighted(loss=loss, unit=unit)
    if covariance is None:
        return counted
    return Personal(counted, covariance=covariance, scale="rows" if scale is None else scale)


def loss_of_newcomers(loss: Loss, users: Participants, newcomers: Participants) -> Loss:
    """The loss of a problem for others than its users: where every user has a price of leaving its
    centre, they have that of a user with the noise of a typical one.
    """
    scales, unit = loss.scales, loss.rows_per_user
    if scales is None or not isinstance(loss, Personal):
        return loss
    if unit is not None:  # the price is that of one row
        counted = Weighted(loss=loss.own_loss, unit=float(np.median(unit)))
        return replace(loss, loss=counted, scale=float(np.median(scales)))
    noise = float(np.median(scales * users.sizes))
    return replace(loss, scale=noise / np.maximum(newcomers.sizes, 1))


def kind_of(loss: Loss, labels: Ints) -> Kind:
    """The kind of models that this loss and these groups give."""
    n_groups = int(labels.max()) + 1
    if loss.stated.personal:
        return "personal" if n_groups == 1 else "personal in groups"
    return "one model" if n_groups == 1 else "alone" if n_groups == len(labels) else "groups"


def sharing_of(kind: Kind, known: Summaries, labels: Ints, count: Count) -> Sharing:
    """A kind for these users, with the groups that were found.

    Where there is one group only the kind is the one without groups, and where users do not differ
    inside their groups the one without personal parts.
    """
    everyone = np.zeros(known.users.n_users, dtype=np.int64)
    groups = np.unique(labels, return_inverse=True)[1]
    if kind == "alone":
        return Sharing(kind, np.arange(len(labels)), None, count)
    groups = groups if kind in ("groups", "personal in groups") else everyone
    name: Kind = "personal in groups" if groups.any() else "personal"
    if kind.startswith("personal") and known.one is not None:
        spread = spread_within(known, groups) if groups.any() else known.one.covariance
        if groups.any() or known.one.gain > 0:
            return Sharing(name, groups, spread / known.noise, count, known.one.gain)
    elif kind.startswith("personal"):
        learned = learn_spread(known.users.data, known.loss, groups)
        if learned is not None:
            return Sharing(name, groups, learned.relative, count, learned.gain, learned.noises)
    return Sharing("groups" if groups.any() else "one model", groups, None, count)


def candidates(known: Summaries, labels: Ints, count: Count) -> list[Sharing]:
    """All kinds that differ for these users, with the groups that were found, from simple to rich.

    Nobody is left alone with too few rows to say how good such a model is.
    """
    kinds = [kind for kind in KINDS if labels.any() or "groups" not in kind]
    numbers = float(known.users.n_users * known.samples.dim)
    if known.one is not None or float(known.sizes.sum()) < _DETERMINED * numbers:
        kinds.remove("alone")
    options = {option.kind: option
               for option in (sharing_of(kind, known, labels, count) for kind in kinds)}
    return [options[kind] for kind in KINDS if kind in options]


@dataclass(frozen=True, eq=False)
class Comparison:
    """Kinds and their losses on rows that were left out.

    Parameters
    ----------
    options : the kinds.
    losses : (n_options, n_users) mean loss of each user's rows left out; nan for users without.
    chosen : the index of the kind taken.
    relative : whether logarithms of the losses were compared, because users differ in noise and
        units.
    """

    options: list[Sharing]
    losses: Array
    chosen: int
    relative: bool = False

    @property
    def sharing(self) -> Sharing:
        """The kind taken."""
        return self.options[self.chosen]

    @property
    def means(self) -> dict[str, float]:
        """The mean over users of the loss on rows left out, by kind; the geometric mean if they are
        `relative`.
        """
        judged = _compared(self.losses, self.relative)
        if not judged.size:
            return {}
        means = np.exp(judged.mean(axis=1)) if self.relative else judged.mean(axis=1)
        return {option.kind: float(mean) for option, mean in zip(self.options, means, strict=True)}

    @property
    def errors(self) -> dict[str, float]:
        """The standard error, over users, of the mean difference between the loss of each kind and
        the kind taken.
        """
        judged = _compared(self.losses, self.relative)
        if judged.shape[1] < 2:
            return {}
        errors = (judged - judged[self.chosen]).std(axis=1, ddof=1) / np.sqrt(judged.shape[1])
        errors *= np.exp(judged[self.chosen].mean()) if self.relative else 1.0
        return {option.kind: float(error) for option, error in zip(self.options, errors,
            strict=True)}


def choose(known: Summaries, labels: Ints, settings: Settings) -> Comparison:
    """Choose the kind of models by their estimated loss on new rows; without users to judge by, the
    groups that were found.

    Parameters
    ----------
    known : the users' summaries.
    labels : (n_users,) the groups that were found.
    settings : of the fit.

    Returns
    -------
    Comparison
    """
    options = candidates(known, labels, settings.count)
    losses = np.stack([new_row_losses(option, known) for option in options])
    return _compare(options, losses, labels, known.one is None)


def choose_wide(users: Users, loss: Loss, labels: Ints, settings: Settings) -> Comparison:
    """The same for wide models: every kind is fitted anew without some rows of all users, and
    judged on these rows.

    Personal models have a covariance that is a multiple of the identity; the multiple is chosen in
    the same way.
    """
    everyone = np.zeros(users.n_users, dtype=np.int64)
    partitions = [everyone, labels] if labels.any() else [everyone]
    names: tuple[tuple[Kind, Kind], ...] = (("one model", "personal"),
                                            ("groups", "personal in groups"))
    options = [Sharing(names[k][variance > 0], groups, np.array(variance) if variance else None,
                       settings.count)
               for k, groups in enumerate(partitions) for variance in (0.0, *_VARIANCES)]
    sums, counts = _wide_losses(options, users, loss, settings, settings.seed + 1)
    order = np.argsort(-sums.sum(axis=1), kind="stable")
    best = {options[j].kind: int(j) for j in order}  # the last, and so the best one of every kind
    chosen = [best[kind] for kind in KINDS if kind in best]
    options, sums = [options[j] for j in chosen], sums[chosen]
    for turn in range(1, _WIDE_SPLITS):
        more, others = _wide_losses(options, users, loss, settings, settings.seed + 1 + turn)
        sums, counts = sums + more, counts + others
    with np.errstate(invalid="ignore", divide="ignore"):
        return _compare(options, sums / counts, labels, loss.gaussian)


def _wide_losses(options: list[Sharing], users: Users, loss: Loss, settings: Settings,
                 seed: int) -> tuple[Array, Array]:
    """(n_options, n_users) sums of the losses of rows left out, by models without these rows; and
    (n_users,) rows.
    """
    plain, sums, counts = without_ridge(loss), np.zeros((len(options), users.n_users)), \
        np.zeros(users.n_users)
    kept, _, test = users.hold_out(_WIDE_SHARE, stratify=settings.task == "classification",
                                   seed=seed)
    present = np.flatnonzero(test.counts > 0)
    if not present.size:
        return sums, counts
    rows, start = test.take(present), None
    judged = plain.prepare(rows)
    counts[present] = rows.counts
    for j, option in enumerate(options):
        outer = option.loss(loss, kept)
        fitted = wide_models(outer, outer.prepare(kept), option.labels, settings.count,
                             None if option.covariance is None else start, _ROUGH)
        start = fitted.models
        with np.errstate(over="ignore"):
            sums[j, present] = rows.counts * plain.values(judged, fitted.models[present])
    return sums, counts


def _compare(options: list[Sharing], losses: Array, labels: Ints, relative: bool) -> Comparison:
    judged = _compared(losses, relative)
    chosen = [option.kind for option in options].index("groups" if labels.any() else "one model")
    if judged.shape[1] > 1:
        doubtful = _doubtful(options, _CLEAR if relative else _LIKELY)
        if not relative and doubtful.any() and len(options) > 1:  # the evidence of all rows decides
            return Comparison(options, losses, 1 + _simplest(judged[1:], doubtful[1:]), relative)
        chosen = _simplest(judged, doubtful, 1.0 if relative else None)
    return Comparison(options, losses, chosen, relative)


def new_row_losses(option: Sharing, known: Summaries) -> Array:
    """(n_users,) the loss of each user's model on new rows, estimated from its summary.

    It is nan for users with one row. With squared losses it is that of generalised
    cross-validation, with others what the loss of the user's rows is too low on average (Akaike):

        f_i / (1 - df_i / m_i)^2          f_i + s df_i / m_i

    df_i = tr(A_i M_i) with A_i the curvature of user i's rows, and M_i the derivative of its model
    by their slope:

        C / w_i                                  one model, groups or alone; C^-1 the sum over i's
                                                 group
        V_i + (I - V_i A_i) C (I - A_i V_i)      personal; V_i = (A_i + T^-1)^-1, C^-1 = sum of A_j
                                                 - A_j V_j A_j
    """
    n, dim = known.users.n_users, known.samples.dim
    zero, rows, eye = np.zeros((n, dim)), known.sizes.astype(float), np.eye(dim)
    at = known.loss.evaluate(known.samples, zero, 2)
    bare = at.hessians - np.diag(known.ridge)
    weights = rows if option.noise is None else rows / option.noise
    A, slopes = weights[:, None, None] * at.hessians, -weights[:, None] * at.gradients
    influence, B, follows, pull = np.zeros_like(A), A, eye, slopes
    if option.covariance is not None:
        V = option.covariance @ np.linalg.inv(eye + A @ option.covariance)
        influence, follows = V, eye - V @ A
        B, pull = A @ follows, slopes - _times(A @ V, slopes)
    share = np.ones(n) if option.count == "rows" else 1.0 / weights
    sums = group_sums(share[:, None, None] * B, option.labels, option.n_groups)
    sums += 1e-12 * np.trace(sums, axis1=1, axis2=2)[:, None, None] * eye
    sums += known.noise * known.precision(option.n_groups)
    inverse = np.asarray(np.linalg.inv(sums))
    centres = _times(inverse, group_sums(share[:, None] * pull, option.labels, option.n_groups))
    centres = centres[option.labels]
    models = centres + _times(influence, slopes - _times(A, centres))
    C = share[:, None, None] * inverse[option.labels]
    M = influence + follows @ C @ np.swapaxes(follows, -1, -2)
    used = np.einsum("nij,nji->n", weights[:, None, None] * bare, M)
    errors = known.loss.values(known.samples, models) - 0.5 * models**2 @ known.ridge
    told = known.told.get(option.labels.tobytes()) if option.covariance is None else None
    exact = errors if told is None else -known.noise * told / np.maximum(rows, 1.0)
    if known.one is None:
        estimated = errors / (1.0 - np.clip(used / rows, 0.0, _MOST_USED)) ** 2
    elif option.n_groups > 1:
        centre_only = np.einsum("nij,nji->n", A, follows @ C @ np.swapaxes(follows, -1, -2))
        fixed = _thinned_errors(known, option, _times(inverse, group_sums(
            share[:, None] * pull, option.labels, option.n_groups)), influence)
        estimated = exact - errors + fixed + known.noise * centre_only / rows
    else:
        estimated = exact + known.noise * used / rows
    return np.where(rows > 1, estimated, np.nan)


def _thinned_errors(known: Summaries, option: Sharing, centres: Array, influence: Array) -> Array:
    """(n_users,) the loss of new rows where rows also decide the group of their user.

    The slope b of a user is thinned (Oliveira, Lei and Tibshirani 2024): with e ~ N(0, s A),

        b + sqrt(c) e   decides the group and the model around its centre,
        b - e / sqrt(c) judges them; the two are independent
    """
    n, rows = len(option.labels), known.sizes.astype(float)
    zero = np.zeros_like(known.expansions.slopes)
    at = known.loss.evaluate(known.samples, zero, 2)
    A, b = rows[:, None, None] * at.hessians, -rows[:, None] * at.gradients
    scales, axes = np.linalg.eigh(A)
    roots = axes * np.sqrt(known.noise * np.maximum(scales, 0.0))[:, None, :]
    common = np.log(np.bincount(option.labels) / n) * known.noise
    fit = np.einsum("kd,nde,ke->nk", centres, A, centres)
    pulled = centres if option.covariance is None else None
    rng, total = np.random.default_rng(0), np.zeros(n)
    for _ in range(_THINNED):
        noise = _times(roots, rng.standard_normal(b.shape))
        kept, left = b + _THIN**0.5 * noise, b - noise / _THIN**0.5
        if pulled is None:  # the evidence of a group, by models around its centre
            rest = kept[:, None] - np.einsum("nde,ke->nkd", A, centres)
            gain = np.einsum("nkd,nde,nke->nk", rest, influence, rest)
            best = (kept @ centres.T - 0.5 * fit + 0.5 * gain + common).argmax(axis=1)
            models = centres[best] + _times(influence, rest[np.arange(n), best])
        else:
            models = centres[(kept @ centres.T - 0.5 * fit + common).argmax(axis=1)]
        total += 0.5 * (models * _times(A, models)).sum(axis=1) - (left * models).sum(axis=1)
    return np.asarray(at.values + total / _THINNED / rows)


def _times(matrices: Array, vectors: Array) -> Array:
    return np.asarray((matrices @ vectors[..., None])[..., 0])


def _compared(losses: Array, relative: bool) -> Array:
    """(n_options, n_judged) the losses of users who have some, or their logarithms."""
    judged = losses[:, np.isfinite(losses).all(axis=0)]
    return np.log(np.maximum(judged, _NO_LOSS * judged.max(initial=0.0) + 1e-300)) if relative \
        else judged


def _doubtful(options: list[Sharing], clear: float = _CLEAR) -> Flags:
    """(n_options,) True where the evidence of all rows speaks against an option: groups that were
    found against one centre, with or without spread, and spread against one model.
    """
    grouped = any(option.kind == "groups" for option in options)
    spread = any(option.kind == "personal" and option.gain > clear for option in options)
    return np.array([(grouped and option.kind in ("one model", "personal"))
                     or (spread and option.kind == "one model") for option in options])


def _simplest(judged: Array, doubtful: Flags, size: float | None = None) -> int:
    """The first option whose mean loss is within a standard error, and a little of the benefit, of
    the least.

    A doubtful option has to have the least. `size` is what a difference can be large against, the
    least by default.
    """
    best = int(judged.mean(axis=1).argmin())
    excess = judged - judged[best]
    errors = excess.std(axis=1, ddof=1) / np.sqrt(judged.shape[1])
    means = excess.mean(axis=1)  # the first one is what sharing less than everything gains
    size = float(judged[best].mean()) if size is None else size
    # Poisson losses can be negative.
    little = _LITTLE * (min(float(means[0]), size) if size > 0 else float(means[0]))
    near = (means <= errors + little) & ~doubtful
    near[1:] &= means[1:] <= _MOST * means[0]
    near[best] = True
    return int(np.flatnonzero(near)[0])


_SENTENCES: dict[Kind, str] = {
    "one model": "All users get the same model",
    "groups": "Users of a group get the same model",
    "personal": "Every user gets a model of its own, around a centre that all users share",
    "personal in groups": "Every user gets a model of its own, around the centre of its group",
    "alone": "Every user gets a model from its own rows only"}


def sentence_of(kind: Kind, means: dict[str, float]) -> str:
    """What users get, and the losses of the kinds on rows they were not fitted to."""
    others = ", ".join(f"{name} {mean:.3g}" for name, mean in means.items() if name != kind)
    if kind not in means or not others:
        return f"{_SENTENCES[kind]}."
    rest = "" if means[kind] <= min(means.values()) \
        else ", and no kind that is less simple is clearly better"
    return (f"{_SENTENCES[kind]}: the estimated loss on new rows is {means[kind]:.3g} "
            f"({others}){rest}.")
